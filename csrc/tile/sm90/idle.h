// Bodies of tile/idle.h.
#pragma once
TILE void sem_wait_idle(sem &s, uint32_t phase) {
  trace(TRACE_WAIT, &s, (int)phase);
  uint32_t done, a = shared_address(&s);
  for (;;) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(a), "r"(phase) : "memory");
    if (done) return;
    __nanosleep(100);
  }
}
