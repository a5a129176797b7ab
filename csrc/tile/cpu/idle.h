// Bodies of tile/idle.h.
#pragma once
TILE void sem_wait_idle(sem &s, uint32_t phase) { sem_wait(s, phase); }
