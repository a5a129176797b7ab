// Chunks of heads, one after another, that the loader thread of a kernel of Kimi delta attention finds for all.
#pragma once
#include "delta/kda_gates.h"

enum { TASKS = 4 };                 // whose places are known at a time
// A chunk of a head: its steps, or more than a chunk has; none where its place is empty. mark: what else the kernel
// wants to know of it
struct task { int place, mark; head_steps at; };
struct words { int place, mark, batch, head, step, steps; };
struct task_list {
  words tasks[TASKS];
  sem given[TASKS];                 // that a place is free follows from the ring of k and q
};
TILE void init_tasks(task_list &s) {
  for (sem &given : s.given) sem_init(given, arrivals(1, 0, 0));
}
// The n-th (thread)
TILE void give_task(task_list &s, uint32_t n, const task &t) {
  words &w = s.tasks[n % TASKS];
  put(w.place, t.place);
  put(w.mark, t.mark);
  put(w.batch, t.at.batch);
  put(w.head, t.at.head);
  put(w.step, t.at.step);
  put(w.steps, t.at.steps);
  sem_arrive<THREAD>(s.given[n % TASKS]);
}
TILE void wait_for_task(task_list &s, uint32_t n) { sem_wait(s.given[n % TASKS], n / TASKS & 1); }
TILE task given_task(const task_list &s, uint32_t n) {
  const words &w = s.tasks[n % TASKS];
  return {get(w.place), get(w.mark), {get(w.batch), get(w.head), get(w.step), get(w.steps)}};
}
