// Task queue of a persistent block; backend-independent. One thread (the loader, or a scheduler) draws task numbers,
// statically (block, block + blocks, ...) or from a counter in global memory that starts at 0, and hands each to the
// compute roles, which hold it until they release it; a number >= tasks ends a role. Positions count the tasks a role
// has been given.
#pragma once
struct task_queue { int id[2]; sem full[2], empty[2]; };

TILE void queue_init(task_queue &q, int consumers) {    // arrivals()
  for (int i = 0; i < 2; i++) { sem_init(q.full[i], 1); sem_init(q.empty[i], consumers); }
}
// Thread (the one that draws): the next task after `task` (any value at count 0) that is not to be skipped.
template<class F> TILE int next_task(uint32_t count, int task, int *counter, F skip) {
  bool first = count == 0;
  do {
    task = first ? block_index() : block_count() + (counter ? atomic_next(counter) : task);
    first = false;
  } while (skip(task));
  return task;
}
// Thread (the one that draws): waits until the task two before is released, and hands one out. What it writes in
// between about the task is known with it.
TILE void queue_acquire(task_queue &q, uint32_t count) {
  ring_pos at = ring_at<2>(count);
  sem_wait(q.empty[at.stage], at.phase ^ 1);
}
TILE void queue_give(task_queue &q, uint32_t count, int task) {
  put(q.id[count & 1], task);
  sem_arrive<THREAD>(q.full[count & 1]);
}
template<class F> TILE int queue_draw(task_queue &q, uint32_t count, int task, int *counter, F skip) {
  task = next_task(count, task, counter, skip);
  queue_acquire(q, count);
  queue_give(q, count, task);
  return task;
}
TILE int queue_draw(task_queue &q, uint32_t count, int task, int *counter) {
  return queue_draw(q, count, task, counter, [](int) { return false; });
}
// A role of any width that works on the tasks.
TILE int queue_take(task_queue &q, uint32_t count) {
  ring_pos at = ring_at<2>(count);
  sem_wait(q.full[at.stage], at.phase);
  return get(q.id[at.stage]);
}
TILE int queue_again(const task_queue &q, uint32_t count) { return get(q.id[count & 1]); }   // the task it holds
template<int W = WARPGROUP> TILE void queue_release(task_queue &q, uint32_t count) {
  sem_arrive<W>(q.empty[count & 1]);
}
// Static order over clusters of B blocks that work on a task together.
template<int B> TILE int cluster_index() { return block_index() / B; }
template<int B> TILE int cluster_count() { return block_count() / B; }

// The same for the blocks of a cluster, which work on a task together: block 0 draws. Its `empty` counts the compute
// roles of all blocks and the other blocks' loaders.
TILE void cluster_queue_init(task_queue &q, int blocks, int consumers) {
  queue_init(q, blocks * consumers + blocks - 1);
}
template<int W = WARPGROUP> TILE void cluster_queue_release(task_queue &q, uint32_t count) {
  sem_arrive_at<W, ORDERED>(q.empty[count & 1], 0);
}
template<int B> TILE int cluster_queue_draw(task_queue &q, uint32_t count, int task, int *counter) {
  ring_pos at = ring_at<2>(count);
  if (cluster_rank() == 0) {
    task = count == 0 ? cluster_index<B>() : cluster_count<B>() + (counter ? atomic_next(counter) : task);
    sem_wait(q.empty[at.stage], at.phase ^ 1);
    for (int rank = 0; rank < B; rank++) put_at(q.id[at.stage], task, q.full[at.stage], rank);
  } else {
    task = queue_take(q, count);
    cluster_queue_release<THREAD>(q, count);
  }
  return task;
}
