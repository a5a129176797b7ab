// Task queue of a persistent block; backend-independent. The loader draws task numbers, statically (block, block + blocks, ...) or from a
// counter in global memory that starts at 0, and hands each to the compute roles; a number >= tasks ends the role.
#pragma once
struct task_queue { int id[2]; sem full[2], empty[2]; };
struct task_pos { int task; uint32_t count; };          // this task, and how many the role has been given

TILE void queue_init(task_queue &q, int consumers) {    // arrivals()
  for (int i = 0; i < 2; i++) { sem_init(q.full[i], 1); sem_init(q.empty[i], consumers); }
}
TILE task_pos queue_begin() { task_pos p; p.task = 0; p.count = 0; return p; }
// Thread (the loader). Returns false when no task is left; then every consumer has been told.
TILE bool queue_draw(task_queue &q, task_pos &p, int *counter, int tasks) {
  if (p.count == 0) p.task = block_index();
  else if (counter) p.task = block_count() + atomic_next(counter);
  else p.task += block_count();
  if (counter) {
    ring_pos at = ring_at<2>(p.count);
    sem_wait(q.empty[at.stage], at.phase ^ 1);
    put(q.id[at.stage], p.task);
    sem_arrive<THREAD>(q.full[at.stage]);
  }
  p.count++;
  return p.task < tasks;
}
// Warpgroup (a compute role).
TILE bool queue_take(task_queue &q, task_pos &p, const int *counter, int tasks) {
  if (counter) {
    ring_pos at = ring_at<2>(p.count);
    sem_wait(q.full[at.stage], at.phase);
    p.task = get(q.id[at.stage]);
    sem_arrive(q.empty[at.stage]);
  } else
    p.task = p.count == 0 ? block_index() : p.task + block_count();
  p.count++;
  return p.task < tasks;
}
