// Semaphores, named barriers, fences; what may be mutated about them.
#include <stdlib.h>
#include <string.h>
#include "check/engine.h"

enum { KERNEL_BARRIERS = 7 };
static void fence_async(void);

// ---- mutations
bool mutated(const void *pc, enum ck_mutation kind) {
  const ck_request *q = ck.request;
  if (q->mutation != (uint32_t)kind) return false;
  for (int low = 0, high = q->site_count; low < high;) {
    const int middle = (low + high) / 2;
    if (q->sites[middle] == pc) return true;
    if ((uintptr_t)q->sites[middle] < (uintptr_t)pc) low = middle + 1;
    else high = middle;
  }
  return false;
}

// Begins every synchronising call: notes it, and lets the next call's arrival go first where it is mutated to come
// early. False: leave it out.
bool begin(const void *pc, enum ck_op op, const void *at, int value) {
  if (ck.failed) return false;
  if (ck.current < 0) return true;
  fiber *f = self();
  // a fence in front of the arrival comes early with it
  if (ck.request->mutation == CK_EARLY && op != CK_OP_FENCE_ASYNC) {
    int ahead = 1;
    const ck_event *next = event_of(ck.current, f->events + ahead);
    while (next && next->op == CK_OP_FENCE_ASYNC) next = event_of(ck.current, f->events + ++ahead);
    if (next && (next->op == CK_OP_ARRIVE) && mutated(next->pc, CK_EARLY)) {
      if (ahead > 1) fence_async();
      const int sem = sem_of(next->pc, ck.shared + (size_t)next->block * ck.kernel->stride + next->offset);
      if (sem >= 0) arrive(next->pc, sem, abs(next->value), next->value < 0);
      f->events++;
      event_add(pc, op, at, value);
      f->skip_next = true;
      return !ck.failed;
    }
  }
  f->events++;
  event_add(pc, op, at, value);
  if (f->skip_next && op == CK_OP_ARRIVE) {
    f->skip_next = false;
    f->events--;
    return false;
  }
  return !mutated(pc, CK_DROP);
}

// ---- clocks of fibers
void tick(int fiber_number) {
  fiber *f = &ck.fiber[fiber_number];
  f->seen[component(fiber_number, GENERIC)]++;
  f->seen[component(fiber_number, PROGRESS)]++;
}
void publish(clock seen, clock fenced) {
  const fiber *f = self();
  clock_join(seen, f->seen);
  clock_join(fenced, f->fenced);
  if (f->group) {
    clock_join(seen, f->leader_seen);
    clock_join(fenced, f->leader_fenced);
  }
  tick(ck.current);
}
void publish_leader(clock seen, clock fenced) {
  clock_join(seen, self()->leader_seen);
  clock_join(fenced, self()->leader_fenced);
  tick(ck.current);
}
void learn(const int32_t *seen, const int32_t *fenced) {
  fiber *f = self();
  clock_join(f->seen, seen);
  clock_join(f->fenced, fenced);
  if (f->group) {
    clock_join(f->leader_seen, seen);
    clock_join(f->leader_fenced, fenced);
  }
  f->fence_due = true;
}
void learn_component(int c, int value, bool leader_only) {
  fiber *f = self();
  if (!leader_only && f->seen[c] < value) f->seen[c] = value;
  if (f->leader_seen[c] < value) f->leader_seen[c] = value;
}

// ---- semaphores
bool in_shared(const void *p) { return (size_t)((const char *)p - ck.shared) < ck.shared_bytes; }
int block_of(const void *p) { return (int)((size_t)((const char *)p - ck.shared) / ck.kernel->stride); }
int offset_in_block(const void *p) { return p ? (int)((size_t)((const char *)p - ck.shared) % ck.kernel->stride) : -1; }

int sem_of(const void *pc, const void *at) {
  const size_t offset = (size_t)((const char *)at - ck.shared);
  const int sem = offset < ck.shared_bytes ? ck.sem_at[offset / 8] : -1;
  if (sem < 0 && !ck.failed && rule_on(CK_INIT)) {
    report_place(offset < ck.shared_bytes ? offset_in_block(at) : -1);
    report(CK_INIT, pc, NULL, -1, "uses a semaphore that the block's init has not initialised");
  }
  return sem;
}
static const void *staged(const void *pc, const void *at) { return mutated(pc, CK_STAGE) ? (const char *)at + 8 : at; }

void ck_sem_init(const void *pc, const void *at, int count) {
  if (ck.failed) return;
  const size_t offset = (size_t)((const char *)at - ck.shared);
  if (ck.current >= 0 || offset >= ck.shared_bytes || ck.sems == MAX_SEMS) {
    report(CK_INIT, pc, NULL, -1,
           ck.current >= 0 ? "initialises a semaphore outside of the block's init" :
                             "initialises what is no semaphore of this block");
    return;
  }
  event_add(pc, CK_OP_INIT, at, count);
  if (mutated(pc, CK_DROP)) return;
  count += mutated(pc, CK_COUNT_MORE) - mutated(pc, CK_COUNT_LESS);
  if (count < 1) count = 1;
  ck.sem_at[offset / 8] = (int16_t)ck.sems;
  ck.sem[ck.sems++] = (semaphore){.at = at, .block = block_of(at), .count = count, .pending = count};
}

// A wait names a phase's parity only. Whoever completes phase k has to know, through what arrived, that all who wait on
// the semaphore have seen phase k - 1. Else one of them may still look for it, and take k for k - 2.
static void check_watchers(const void *pc, const semaphore *s) {
  for (int i = 0; i < ck.fibers && rule_on(CK_PHASE_SEEN); i++) {
    const watcher *w = &ck.watcher[s - ck.sem][i];
    if (!w->waits || (w->phases >= s->completed && s->arrived[component(i, PROGRESS)] >= w->when)) continue;
    report_sem(s);
    report(CK_PHASE_SEEN, pc, w->pc, i,
           "completes phase %d of {s:%d} although {f:%d} is not known to have seen phase %d: the semaphore counts too "
           "few arrivals, somebody arrives once too often, or this role should have waited for that one",
           s->completed, offset_in_block(s->at), i, s->completed - 1);
    return;
  }
}
// Nobody who waits for the phase before, which is complete, but has not yet been let go on.
static void check_blocked(const void *pc, const semaphore *s) {
  for (int i = 0; i < ck.fibers && !ck.failed && rule_on(CK_PHASE_SEEN); i++) {
    const fiber *f = &ck.fiber[i];
    if (!f->alive || f->wait != WAIT_SEM || f->on != s || (uint32_t)(s->completed & 1) == (uint32_t)f->value) continue;
    report_sem(s);
    report(CK_PHASE_SEEN, pc, f->wait_pc, i,
           "completes phase %d of {s:%d} while {f:%d} still waits for phase %d, which so looks as if it had not been",
           s->completed, offset_in_block(s->at), i, s->completed - 1);
  }
}
void sem_step(const void *pc, semaphore *s) {
  if (s->pending || s->bytes) return;
  if (s->completed) check_watchers(pc, s);
  check_blocked(pc, s);
  s->expected = s->issued = 0;
  memcpy(s->released, s->arrived, (size_t)ck.components * sizeof(int32_t));
  memcpy(s->released_fenced, s->arrived_fenced, (size_t)ck.components * sizeof(int32_t));
  memset(s->arrived, 0, (size_t)ck.components * sizeof(int32_t));
  memset(s->arrived_fenced, 0, (size_t)ck.components * sizeof(int32_t));
  s->completed++;
  s->pending = s->count;
  s->arrivals[s->completed & 1] = 0;
}

void arrive(const void *pc, int sem, int warps, bool remote) {
  semaphore *s = &ck.sem[sem];
  if (s->pending < warps) {
    if (!rule_on(CK_COUNT)) return;
    report_sem(s);
    report(CK_COUNT, pc, NULL, -1,
           "arrives %d times at {s:%d} in phase %d, which expects only %d more of its %d arrivals", warps,
           offset_in_block(s->at), s->completed, s->pending, s->count);
    return;
  }
  if (remote) {   // what the caller wrote itself is not passed on
    fiber *f = self();
    const int own = component(ck.current, GENERIC), had = s->arrived[own];
    clock_join(s->arrived, f->seen);
    clock_join(s->arrived, f->leader_seen);
    s->arrived[own] = had;
    tick(ck.current);
  } else publish(s->arrived, s->arrived_fenced);
  int *n = &s->arrivals[s->completed & 1];
  if (*n < ARRIVALS) s->arrival[s->completed & 1][(*n)++] = (arrival){pc, ck.current, warps};
  s->pending -= warps;
  sem_step(pc, s);
}

// Who calls. An operation for one thread would be made 128 times by a warpgroup. A warpgroup's operation hangs, or
// does a part, when a thread calls it.
static const char *width_name(int width) {
  return width == 1 ? "one thread" : width == GROUP_WIDTH ? "a warpgroup" : "a warp";
}
bool called_by(const void *pc, int width) {
  if (ck.failed || ck.current < 0 || self()->role->width == width || !rule_on(CK_ELECTED)) return !ck.failed;
  report(CK_ELECTED, pc, NULL, -1, "is an operation of %s, called by a role of %s", width_name(width),
         width_name(self()->role->width));
  return false;
}

void ck_sem_arrive(const void *pc, const void *at, int width, enum ck_where where) {
  const int warps = width == GROUP_WIDTH ? 4 : 1;
  if (!called_by(pc, width) || !begin(pc, CK_OP_ARRIVE, at, where ? -warps : warps)) return;
  for (int i = 0; i <= mutated(pc, CK_DOUBLE) && !ck.failed; i++) {
    const int sem = sem_of(pc, staged(pc, at));
    if (sem >= 0) arrive(pc, sem, warps, where == CK_REMOTE);
  }
  make_late_fence();
  point();
}

void ck_sem_expect(const void *pc, const void *at, uint32_t bytes) {
  if (!called_by(pc, 1) || !begin(pc, CK_OP_EXPECT, at, (int)bytes)) return;
  for (int i = 0; i <= mutated(pc, CK_DOUBLE) && !ck.failed; i++) {
    const int sem = sem_of(pc, staged(pc, at));
    if (sem < 0) return;
    const int counted = (int)bytes + 128 * (mutated(pc, CK_BYTES_MORE) - mutated(pc, CK_BYTES_LESS));
    ck.sem[sem].bytes += counted;
    ck.sem[sem].expected += counted;
    arrive(pc, sem, 1, false);
  }
  make_late_fence();
  point();
}

void ck_sem_wait(const void *pc, const void *at, uint32_t phase) {
  if (!begin(pc, CK_OP_WAIT, at, (int)phase)) return;
  const int sem = sem_of(pc, staged(pc, at));
  if (sem < 0) return;
  semaphore *s = &ck.sem[sem];
  const int parity = (int)(phase ^ mutated(pc, CK_PHASE)), next = ck.watcher[sem][ck.current].phases;
  // -1: the one before the first
  const int meant = !ck.watcher[sem][ck.current].waits ? -parity : (next & 1) == parity ? next : next - 1;
  if (s->completed > meant + 1 && rule_on(CK_PHASE_SEEN)) {
    report_sem(s);
    if (meant < 0)
      report(CK_PHASE_SEEN, pc, NULL, -1,
             "waits for parity 1 of {s:%d}, which is the phase before the first: such a wait passes at once, and %d "
             "phases are complete already. The first phase has parity 0",
             offset_in_block(s->at), s->completed);
    report(CK_PHASE_SEEN, pc, NULL, -1, "waits for phase %d of {s:%d}, which has completed %d phases: it was overtaken",
           meant, offset_in_block(s->at), s->completed);
    return;
  }
  self()->phase = meant;
  wait_for(pc, WAIT_SEM, s, parity);
  learn(s->released, s->released_fenced);
  learn_component(sem_component(sem), s->completed, false);
  self()->last_sem = s;
  ck.watcher[sem][ck.current] = (watcher){s->completed, self()->seen[component(ck.current, PROGRESS)], true, pc};
  make_late_fence();
}

// ---- named barriers
void ck_bar(const void *pc, int id, int threads, bool waits) {
  if (!called_by(pc, GROUP_WIDTH) || !begin(pc, waits ? CK_OP_BAR_SYNC : CK_OP_BAR_ARRIVE, NULL, id)) return;
  fiber *f = self();
  if (id < 1 || id > KERNEL_BARRIERS) {
    report(CK_BARRIER, pc, NULL, -1, "uses named barrier %d, a kernel has 1 to %d", id, KERNEL_BARRIERS);
    return;
  }
  named_barrier *b = &ck.barrier[f->block][id];
  if (!b->arrived) {
    b->arrived = clock_new(), b->arrived_fenced = clock_new();
    b->released = clock_new(), b->released_fenced = clock_new();
  }
  for (int i = 0; i <= mutated(pc, CK_DOUBLE) && !ck.failed; i++) {
    const int generation = b->generation;
    if (b->members && b->wanted != threads && rule_on(CK_BARRIER)) {
      report(CK_BARRIER, pc, NULL, -1, "meets named barrier %d for %d threads; the last who came there expected %d", id,
             threads, b->wanted);
      return;
    }
    b->members |= (uint64_t)1 << ck.current;
    int members = 0;
    for (int m = 0; m < ck.fibers; m++) members += b->members >> m & 1 ? ck.fiber[m].role->width : 0;
    if (members > threads && rule_on(CK_BARRIER)) {
      report(CK_BARRIER, pc, NULL, -1, "is one too many at named barrier %d of %d threads: others meet there", id,
             threads);
      return;
    }
    b->wanted = threads;
    b->threads += f->role->width;
    publish(b->arrived, b->arrived_fenced);
    if (b->threads > threads && rule_on(CK_BARRIER)) {
      report(CK_BARRIER, pc, NULL, -1, "is one more at named barrier %d than its %d threads", id, threads);
      return;
    }
    if (b->threads >= threads) {
      b->threads = 0;
      b->generation++;
      memcpy(b->released, b->arrived, (size_t)ck.components * sizeof(int32_t));
      memcpy(b->released_fenced, b->arrived_fenced, (size_t)ck.components * sizeof(int32_t));
      memset(b->arrived, 0, (size_t)ck.components * sizeof(int32_t));
      memset(b->arrived_fenced, 0, (size_t)ck.components * sizeof(int32_t));
    }
    if (!waits) continue;
    wait_for(pc, WAIT_BARRIER, b, generation);
    learn(b->released, b->released_fenced);
  }
  make_late_fence();
  point();
}

void ck_wg_sync(const void *pc) {
  if (!called_by(pc, GROUP_WIDTH) || !begin(pc, CK_OP_WG_SYNC, NULL, 0)) return;
  fiber *f = self();
  if (!f->group) return;   // the rule is off
  clock_join(f->seen, f->leader_seen);
  clock_join(f->leader_seen, f->seen);
  clock_join(f->fenced, f->leader_fenced);
  clock_join(f->leader_fenced, f->fenced);
  tick(ck.current);
  make_late_fence();
}

// ---- fences. Each thread fences its own accesses: what others did has to be fenced by them.
static void fence_async(void) {
  fiber *f = self();
  const int own = component(ck.current, GENERIC);
  f->fenced[own] = f->seen[own];
  tick(ck.current);
}
void make_late_fence(void) {
  if (ck.failed || ck.current < 0 || !self()->late_fence) return;
  self()->late_fence = NULL;
  fence_async();
}
void ck_fence_async(const void *pc) {
  if (!begin(pc, CK_OP_FENCE_ASYNC, NULL, 0)) return;
  if (mutated(pc, CK_FENCE_LATE)) self()->late_fence = pc;
  else fence_async();
}
void ck_mma_fence(const void *pc) {
  if (!called_by(pc, GROUP_WIDTH) || !begin(pc, CK_OP_MMA_FENCE, NULL, 0)) return;
  self()->fence++;
  self()->fence_due = false;
}
