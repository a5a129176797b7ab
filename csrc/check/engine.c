// Fibers, the scheduler, semaphores, asynchronous operations, mutations.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#include "check/engine.h"

enum { STACK_BYTES = 4 << 20, MAX_STEPS = 4000000, KERNEL_BARRIERS = 7 };
run ck;

// ---- memory of a run: clocks and the like, freed together
static char *pool;
static size_t pool_used, pool_size;

static void *pool_take(size_t bytes) {
  bytes = (bytes + 63) & ~(size_t)63;
  if (pool_used + bytes > pool_size) {
    fprintf(stderr, "margay.check: out of memory for clocks\n");
    abort();
  }
  void *p = pool + pool_used;
  pool_used += bytes;
  return memset(p, 0, bytes);
}
static void pool_reset(size_t bytes) {
  if (bytes > pool_size) {
    free(pool);
    pool = aligned_alloc(64, pool_size = (bytes + 63) & ~(size_t)63);
    if (!pool) pool_size = 0;
  }
  pool_used = 0;
}
clock clock_new(void) { return pool_take((size_t)ck.components * sizeof(int32_t)); }

// ---- fibers
#if defined(__x86_64__)
__attribute__((naked, noinline)) static void switch_stack(void **save, void *load) {
  (void)save, (void)load;
  __asm__("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
          "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
          "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tretq");
}
static void fiber_prepare(fiber *f, void (*entry)(void)) {
  void **sp = (void **)(f->stack + STACK_BYTES) - 1;   // as if entry had been called from an aligned stack
  *--sp = (void *)(uintptr_t)entry;
  f->sp = sp - 6;
}
#else
static void switch_stack(void **save, void *load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, load);
}
static void fiber_prepare(fiber *f, void (*entry)(void)) {
  ucontext_t *c = (ucontext_t *)f->stack;
  getcontext(c);
  c->uc_stack.ss_sp = f->stack + sizeof *c;
  c->uc_stack.ss_size = STACK_BYTES - sizeof *c;
  c->uc_link = NULL;
  makecontext(c, entry, 0);
  f->sp = c;
}
#endif

void fiber_yield(void) { switch_stack(&self()->sp, ck.host_sp); }

static uint32_t draw(void) {
  ck.random ^= ck.random << 13;
  ck.random ^= ck.random >> 7;
  ck.random ^= ck.random << 17;
  return (uint32_t)(ck.random >> 11);
}

// Something else may go on here.
static void point(void) {
  if (ck.current >= 0) fiber_yield();
}

// ---- mutations
static bool mutated(const void *pc, enum ck_mutation kind) {
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
static void arrive(const void *pc, int sem, int warps, bool remote);
static void fence_async(void);
static int sem_of(const void *pc, const void *at);

// Begins every synchronising call: notes it, and lets the next call's arrival go first where it is mutated to come early. False: leave it out.
static bool begin(const void *pc, enum ck_op op, const void *at, int value) {
  if (ck.failed) return false;
  if (ck.current < 0) return true;
  fiber *f = self();
  if (ck.request->mutation == CK_EARLY && op != CK_OP_FENCE_ASYNC) {   // a fence in front of the arrival comes early with it
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
static void make_late_fence(void);

// ---- clocks of fibers
static void tick(int fiber_number) {
  fiber *f = &ck.fiber[fiber_number];
  f->seen[component(fiber_number, GENERIC)]++;
  f->seen[component(fiber_number, PROGRESS)]++;
}
static void publish(clock seen, clock fenced) {
  const fiber *f = self();
  clock_join(seen, f->seen);
  clock_join(fenced, f->fenced);
  if (f->group) {
    clock_join(seen, f->leader_seen);
    clock_join(fenced, f->leader_fenced);
  }
  tick(ck.current);
}
static void learn(const int32_t *seen, const int32_t *fenced) {
  fiber *f = self();
  clock_join(f->seen, seen);
  clock_join(f->fenced, fenced);
  if (f->group) {
    clock_join(f->leader_seen, seen);
    clock_join(f->leader_fenced, fenced);
  }
  f->fence_due = true;
}
static void learn_component(int c, int value, bool leader_only) {
  fiber *f = self();
  if (!leader_only && f->seen[c] < value) f->seen[c] = value;
  if (f->leader_seen[c] < value) f->leader_seen[c] = value;
}

// ---- semaphores
int block_of(const void *p) { return (int)((size_t)((const char *)p - ck.shared) / ck.kernel->stride); }
int offset_in_block(const void *p) { return p ? (int)((size_t)((const char *)p - ck.shared) % ck.kernel->stride) : -1; }

static int sem_of(const void *pc, const void *at) {
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
    report(CK_INIT, pc, NULL, -1, ck.current >= 0 ? "initialises a semaphore outside of the block's init" : "initialises what is no semaphore of this block");
    return;
  }
  event_add(pc, CK_OP_INIT, at, count);
  if (mutated(pc, CK_DROP)) return;
  count += mutated(pc, CK_COUNT_MORE) - mutated(pc, CK_COUNT_LESS);
  if (count < 1) count = 1;
  ck.sem_at[offset / 8] = (int16_t)ck.sems;
  ck.sem[ck.sems++] = (semaphore){.at = at, .block = block_of(at), .count = count, .pending = count};
}

// A wait names a phase's parity only. Whoever completes phase k has to know, through what arrived, that all who wait on the semaphore have seen phase
// k - 1: else one of them may still look for it, and take k for k - 2.
static void check_watchers(const void *pc, const semaphore *s) {
  for (int i = 0; i < ck.fibers && rule_on(CK_PHASE_SEEN); i++) {
    const watcher *w = &ck.watcher[s - ck.sem][i];
    if (!w->waits || (w->phases >= s->completed && s->arrived[component(i, PROGRESS)] >= w->when)) continue;
    report_sem(s);
    report(CK_PHASE_SEEN, pc, w->pc, i, "completes phase %d of {s:%d} although {f:%d} is not known to have seen phase %d: the semaphore counts too few arrivals, "
           "somebody arrives once too often, or this role should have waited for that one", s->completed, offset_in_block(s->at), i, s->completed - 1);
    return;
  }
}
// Nobody who waits for the phase before, which is complete, but has not yet been let go on.
static void check_blocked(const void *pc, const semaphore *s) {
  for (int i = 0; i < ck.fibers && !ck.failed && rule_on(CK_PHASE_SEEN); i++) {
    const fiber *f = &ck.fiber[i];
    if (!f->alive || f->wait != WAIT_SEM || f->on != s || (uint32_t)(s->completed & 1) == (uint32_t)f->value) continue;
    report_sem(s);
    report(CK_PHASE_SEEN, pc, f->wait_pc, i, "completes phase %d of {s:%d} while {f:%d} still waits for phase %d, which so looks as if it had not been",
           s->completed, offset_in_block(s->at), i, s->completed - 1);
  }
}
static void sem_step(const void *pc, semaphore *s) {
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

static void arrive(const void *pc, int sem, int warps, bool remote) {
  semaphore *s = &ck.sem[sem];
  if (s->pending < warps) {
    if (!rule_on(CK_COUNT)) return;
    report_sem(s);
    report(CK_COUNT, pc, NULL, -1, "arrives %d times at {s:%d} in phase %d, which expects only %d more of its %d arrivals", warps, offset_in_block(s->at),
           s->completed, s->pending, s->count);
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

// Who calls: an operation for one thread called by a warpgroup would be made 128 times.
static bool called_by(const void *pc, int width) {
  if (ck.failed || ck.current < 0 || self()->role->width == width || !rule_on(CK_ELECTED)) return !ck.failed;
  report(CK_ELECTED, pc, NULL, -1, "is an operation of %s, called by a role of %d threads", width == 1 ? "one thread" : width == 32 ? "a warp" : "a warpgroup",
         self()->role->width);
  return false;
}

void ck_sem_arrive(const void *pc, const void *at, int width, bool remote) {
  const int warps = width == 128 ? 4 : 1;
  if (!called_by(pc, width) || !begin(pc, CK_OP_ARRIVE, at, remote ? -warps : warps)) return;
  for (int i = 0; i <= mutated(pc, CK_DOUBLE) && !ck.failed; i++) {
    const int sem = sem_of(pc, staged(pc, at));
    if (sem >= 0) arrive(pc, sem, warps, remote);
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

static bool ready(const fiber *f) {
  const int number = (int)(f - ck.fiber);
  switch (f->wait) {
  case WAIT_SEM: return (uint32_t)(((const semaphore *)f->on)->completed & 1) != (uint32_t)f->value;
  case WAIT_BARRIER: return ((const named_barrier *)f->on)->generation != (int)f->value;
  case WAIT_PRODUCTS:
    for (int t = f->seen[component(number, PRODUCTS)] + 1; t <= f->value; t++)
      if (ck.products_left[number][t % MAX_GROUPS]) return false;
    return true;
  case WAIT_STORES:
    for (int t = f->leader_seen[component(number, STORES)] + 1; t <= f->value; t++)
      if (ck.stores_left[number][t % MAX_GROUPS]) return false;
    return true;
  case WAIT_ORDER: return *(const int *)f->on >= (int)f->value;
  case WAIT_NOTHING: break;
  }
  return true;
}
static void wait_for(const void *pc, enum wait_kind kind, const void *on, int64_t value) {
  fiber *f = self();
  f->wait = kind;
  f->on = on;
  f->wait_pc = pc;
  f->value = value;
  do fiber_yield();
  while (!ready(f));
  f->wait = WAIT_NOTHING;
}

void ck_sem_wait(const void *pc, const void *at, uint32_t phase) {
  if (!begin(pc, CK_OP_WAIT, at, (int)phase)) return;
  const int sem = sem_of(pc, staged(pc, at));
  if (sem < 0) return;
  semaphore *s = &ck.sem[sem];
  const int parity = (int)(phase ^ mutated(pc, CK_PHASE)), next = ck.watcher[sem][ck.current].phases;
  const int meant = !ck.watcher[sem][ck.current].waits ? -parity : (next & 1) == parity ? next : next - 1;   // -1: the one before the first
  if (s->completed > meant + 1 && rule_on(CK_PHASE_SEEN)) {
    report_sem(s);
    report(CK_PHASE_SEEN, pc, NULL, -1, "waits for phase %d of {s:%d}, which has completed %d phases: it was overtaken", meant, offset_in_block(s->at), s->completed);
    return;
  }
  wait_for(pc, WAIT_SEM, s, parity);
  learn(s->released, s->released_fenced);
  learn_component(sem_component(sem), s->completed, false);
  ck.watcher[sem][ck.current] = (watcher){s->completed, self()->seen[component(ck.current, PROGRESS)], true, pc};
  make_late_fence();
}

// ---- named barriers
void ck_bar(const void *pc, int id, int threads, bool waits) {
  if (!begin(pc, waits ? CK_OP_BAR_SYNC : CK_OP_BAR_ARRIVE, NULL, id)) return;
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
      report(CK_BARRIER, pc, NULL, -1, "meets named barrier %d for %d threads; the last who came there expected %d", id, threads, b->wanted);
      return;
    }
    b->members |= (uint64_t)1 << ck.current;
    int members = 0;
    for (int m = 0; m < ck.fibers; m++) members += b->members >> m & 1 ? ck.fiber[m].role->width : 0;
    if (members > threads && rule_on(CK_BARRIER)) {
      report(CK_BARRIER, pc, NULL, -1, "is one too many at named barrier %d of %d threads: others meet there", id, threads);
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
  if (!begin(pc, CK_OP_WG_SYNC, NULL, 0)) return;
  fiber *f = self();
  if (!f->group) return;
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
static void make_late_fence(void) {
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
  if (!begin(pc, CK_OP_MMA_FENCE, NULL, 0)) return;
  self()->fence++;
  self()->fence_due = false;
}

// ---- register tiles
static const char *register_in_flight(const ck_register *r, bool written) {
  const int done = r->fiber == ck.current ? self()->seen[component(ck.current, PRODUCTS)] : 0;
  if (r->writer) return r->writer > done ? "a product that has not been waited for still writes" : "has to be named in the mma_wait that frees it:";
  if (written && r->reader) return r->reader > done ? "a product that has not been waited for still reads" : "has to be named in the mma_wait that frees it:";
  return NULL;
}
static bool check_register(const void *pc, const ck_register *r, bool written) {
  if (ck.failed) return false;
  const char *why = register_in_flight(r, written);
  const bool waited = why && why[0] == 'h';
  if (!why || !rule_on(waited ? CK_UNNAMED : CK_IN_FLIGHT)) return true;
  report(waited ? CK_UNNAMED : CK_IN_FLIGHT, pc, r->product, ck.current, waited ? "touches a register tile that %s it was used by a product" : "touches a register tile that %s", why);
  return false;
}
void ck_reads(const void *pc, ck_register *r) {
  if (!check_register(pc, r, false)) return;
  r->touched = self()->fence + 1;
  if (r->valid || !rule_on(CK_UNINITIALISED)) return;
  report(CK_UNINITIALISED, pc, NULL, -1, "reads registers that nothing has written");
}
void ck_writes(const void *pc, ck_register *r) {
  if (!check_register(pc, r, true)) return;
  r->valid = true;
  r->touched = self()->fence + 1;
}
void ck_register_ends(ck_register *r) {
  if (ck.failed || ck.current < 0 || !register_in_flight(r, true)) return;
  const int done = self()->seen[component(ck.current, PRODUCTS)];
  if ((r->writer <= done && r->reader <= done) || !rule_on(CK_LIFETIME)) return;
  report(CK_LIFETIME, self()->product_pc, NULL, -1, "leaves the scope of a register tile that a product still uses");
}

// ---- asynchronous operations
static operation *issue(const void *pc, int kind, ck_effect run, const void *closure, size_t size) {
  if (ck.ops == MAX_OPS || size > CLOSURE) {
    report(CK_EXIT, pc, NULL, -1, "issues more asynchronous operations than the checker keeps (%d)", MAX_OPS);
    return NULL;
  }
  operation *o = &ck.op[ck.ops++];
  *o = (operation){.kind = kind, .fiber = ck.current, .pc = pc, .run = run, .sem = -1};
  memcpy(o->closure, closure, size);
  return o;
}

void ck_load(const void *pc, const ck_region *to, const void *at, int bytes, ck_effect run, const void *closure, size_t size) {
  if (!called_by(pc, 1)) return;
  event_add(pc, CK_OP_LOAD, at, bytes);
  const int sem = sem_of(pc, at);
  if (sem < 0) return;
  semaphore *s = &ck.sem[sem];
  s->issued += bytes;
  if (ck.kernel->cluster == 1 && s->issued > s->expected && rule_on(CK_BYTES)) {   // in a cluster other blocks' copies may come before the expectation
    report_place(offset_in_block(at));
    report(CK_BYTES, pc, NULL, -1, "copies %d bytes in phase %d of {s:%d}: %d in all, and %d are expected", bytes, s->completed, offset_in_block(at), s->issued,
           s->expected);
    return;
  }
  if (!shadow_access(pc, to, ACCESS_WRITE | ACCESS_ASYNC, sem_component(sem), ck.sem[sem].completed + 1)) return;
  operation *o = issue(pc, EFFECT_LOAD, run, closure, size);
  if (!o) return;
  o->sem = sem;
  o->bytes = bytes;
  point();
}

void ck_store(const void *pc, const ck_region *from, ck_effect run, const void *closure, size_t size) {
  if (ck.failed) return;
  fiber *f = self();
  event_add(pc, CK_OP_STORE, NULL, 0);
  const int ticket = ++f->stores_committed;
  f->store_pc = pc;
  f->store_place = offset_in_block(from->p);
  if (!shadow_access(pc, from, ACCESS_ASYNC | ACCESS_LEADER, component(ck.current, STORES), ticket)) return;
  operation *o = issue(pc, EFFECT_STORE, run, closure, size);
  if (!o) return;
  o->ticket = ticket;
  ck.stores_left[ck.current][ticket % MAX_GROUPS]++;
  point();
}

void ck_product(const void *pc, ck_register *d, bool accumulates, ck_register *a_register, const ck_region *a, const ck_region *b, ck_effect run,
                const void *closure, size_t size) {
  if (ck.failed) return;
  fiber *f = self();
  event_add(pc, CK_OP_PRODUCT, NULL, 0);
  const int ticket = f->products_committed + 1, who = component(ck.current, PRODUCTS);
  if (accumulates && !d->valid && rule_on(CK_UNINITIALISED)) {
    report(CK_UNINITIALISED, pc, NULL, -1, "accumulates into registers that nothing has written");
    return;
  }
  const bool unfenced = f->fence_due || d->touched > f->fence || (a_register && a_register->touched > f->fence);
  if (unfenced && rule_on(CK_MMA_FENCE)) {
    report(CK_MMA_FENCE, pc, NULL, -1, f->fence_due ? "multiplies without an mma_fence since the last barrier wait"
                                                    : "multiplies with a register tile that was used after the last mma_fence");
    return;
  }
  if (d->reader > f->seen[who] && rule_on(CK_IN_FLIGHT)) {
    report(CK_IN_FLIGHT, pc, d->product, ck.current, "multiplies into a register tile that a product in flight reads");
    return;
  }
  if (a_register) {
    if (!check_register(pc, a_register, false)) return;
    if (!a_register->valid && rule_on(CK_UNINITIALISED)) {
      report(CK_UNINITIALISED, pc, NULL, -1, "multiplies registers that nothing has written");
      return;
    }
    a_register->reader = ticket;
    a_register->product = pc;
    a_register->fiber = (int16_t)ck.current;
  } else if (!shadow_access(pc, a, ACCESS_ASYNC, component(ck.current, PRODUCTS_A), ticket)) return;
  if (!shadow_access(pc, b, ACCESS_ASYNC, who, ticket)) return;
  f->product_pc = pc;
  d->writer = ticket;
  d->product = pc;
  d->fiber = (int16_t)ck.current;
  d->valid = true;
  operation *o = issue(pc, EFFECT_PRODUCT, run, closure, size);
  if (!o) return;
  o->ticket = ticket;
  ck.products_left[ck.current][ticket % MAX_GROUPS]++;
  f->products_open++;
  point();
}

void ck_mma_commit(const void *pc) {
  if (!begin(pc, CK_OP_COMMIT, NULL, 0)) return;
  self()->products_committed++;
  self()->products_open = 0;
}

void ck_mma_wait(const void *pc, int groups, ck_register **named, int count) {
  if (!begin(pc, CK_OP_MMA_WAIT, NULL, groups)) return;
  fiber *f = self();
  const int until = f->products_committed - groups - mutated(pc, CK_GROUP_LESS);
  if (until > 0) {
    wait_for(pc, WAIT_PRODUCTS, NULL, until);
    f->seen[component(ck.current, PRODUCTS)] = until;   // each warp about its part: of the others' a sync tells
    learn_component(component(ck.current, PRODUCTS_A), until, false);
  }
  for (int i = 0; i < count; i++) {
    if (named[i]->writer && named[i]->writer <= until) named[i]->writer = 0;
    if (named[i]->reader && named[i]->reader <= until) named[i]->reader = 0;
  }
}

void ck_store_wait(const void *pc, int groups, bool written) {
  if (!begin(pc, CK_OP_STORE_WAIT, NULL, groups)) return;
  fiber *f = self();
  const int until = f->stores_committed - groups - mutated(pc, CK_GROUP_LESS);
  if (until <= 0) return;
  wait_for(pc, WAIT_STORES, NULL, until);
  learn_component(component(ck.current, STORES), until, f->group);
  if (written) learn_component(component(ck.current, WRITTEN), until, f->group);
}

// ---- global memory
typedef struct word { int *at, before; clock seen, fenced; } word;   // a counter that blocks meet at; `before`: its value before the run
enum { MAX_WORDS = 1024 };
static word words[MAX_WORDS];
static int word_count;
static word *word_at(const int *g) {
  int i = 0;
  while (i < word_count && words[i].at != g) i++;
  if (i == MAX_WORDS) return &words[0];
  if (i == word_count) words[word_count++] = (word){(int *)g, *g, clock_new(), clock_new()};
  return &words[i];
}
static void restore_words(void) {
  for (int i = 0; i < word_count; i++) *words[i].at = words[i].before;
}
void ck_order_wait(const void *pc, const int *g, int value) {
  if (!begin(pc, CK_OP_ORDER_WAIT, NULL, value)) return;
  const word *w = word_at(g);
  wait_for(pc, WAIT_ORDER, g, value);
  learn(w->seen, w->fenced);
}
void ck_order_pass(const void *pc, int *g, int value) {
  if (!begin(pc, CK_OP_ORDER_PASS, NULL, value)) return;
  word *w = word_at(g);
  publish(w->seen, w->fenced);
  *g = value;
  point();
}
int ck_atomic_next(const void *pc, int *counter) {
  if (ck.failed) return 0;
  point();
  word_at(counter);
  event_add(pc, CK_OP_ATOMIC, NULL, *counter);
  return (*counter)++;
}
void ck_global(const void *pc, const void *p, size_t bytes, enum ck_global kind) {
  const int who = component(ck.current, GENERIC);
  if (!ck.failed && bytes) shadow_global(pc, p, bytes, kind, who, self()->seen[who]);
}
void ck_global_load(const void *pc, const void *p, size_t bytes, const void *at) {
  const int sem = ck.failed ? -1 : sem_of(pc, at);
  if (sem >= 0) shadow_global(pc, p, bytes, CK_GLOBAL_READ, sem_component(sem), ck.sem[sem].completed + 1);
}
void ck_global_store(const void *pc, const void *p, size_t bytes) {
  if (!ck.failed) shadow_global(pc, p, bytes, CK_GLOBAL_WRITE, component(ck.current, WRITTEN), self()->stores_committed + 1);
}

// ---- shared memory through registers
void ck_reads_shared(const void *pc, const ck_region *r) {
  if (ck.failed) return;
  shadow_access(pc, r, 0, component(ck.current, GENERIC), self()->seen[component(ck.current, GENERIC)]);
}
void ck_writes_shared(const void *pc, const ck_region *r) {
  if (ck.failed) return;
  shadow_access(pc, r, ACCESS_WRITE, component(ck.current, GENERIC), self()->seen[component(ck.current, GENERIC)]);
}
void ck_bounds(const void *pc, bool inside, const char *what, const void *tile) {
  if (ck.failed || inside || !rule_on(CK_BOUNDS)) return;
  report_place(offset_in_block(tile));
  report(CK_BOUNDS, pc, NULL, -1, "%s goes beyond its edge", what);
}

int ck_block_index(void) { return self()->block; }
int ck_block_count(void) { return ck.blocks; }
int ck_cluster_rank(void) { return self()->rank; }
const void *ck_at_rank(const void *p, int rank) { return (const char *)p + (ptrdiff_t)(rank - self()->rank) * (ptrdiff_t)ck.kernel->stride; }

// ---- the run
static void take_effect(int i) {
  operation o = ck.op[i];
  ck.op[i] = ck.op[--ck.ops];
  o.run(o.closure);
  if (o.kind == EFFECT_LOAD) {
    semaphore *s = &ck.sem[o.sem];
    s->bytes -= o.bytes;
    sem_step(o.pc, s);
  } else if (o.kind == EFFECT_STORE) ck.stores_left[o.fiber][o.ticket % MAX_GROUPS]--;
  else ck.products_left[o.fiber][o.ticket % MAX_GROUPS]--;
}

// One of the operations that may take effect: products of a fiber in their order, copies in any.
static int pick_operation(void) {
  int eligible[MAX_OPS], count = 0, oldest[MAX_FIBERS];
  for (int f = 0; f < ck.fibers; f++) oldest[f] = -1;
  for (int i = 0; i < ck.ops; i++) {
    const operation *o = &ck.op[i];
    if (o->kind != EFFECT_PRODUCT) eligible[count++] = i;
    else if (oldest[o->fiber] < 0 || ck.op[oldest[o->fiber]].ticket > o->ticket) oldest[o->fiber] = i;
  }
  for (int f = 0; f < ck.fibers; f++)
    if (oldest[f] >= 0) eligible[count++] = oldest[f];
  return count ? eligible[draw() % (uint32_t)count] : -1;
}

static void check_exit(fiber *f) {
  const int number = (int)(f - ck.fiber);
  if (!rule_on(CK_EXIT)) return;
  if (f->seen[component(number, PRODUCTS)] < f->products_committed + (f->products_open > 0))
    report(CK_EXIT, f->product_pc, NULL, -1, "returns while its matrix products are in flight: no mma_wait");
  else if (f->leader_seen[component(number, STORES)] < f->stores_committed) {
    report_place(f->store_place);
    report(CK_EXIT, f->store_pc, NULL, -1, "returns while its stores still read shared memory: no tma_store_wait_read");
  }
}

static void fiber_main(void) {
  fiber *f = self();
  f->role->body(ck.params, ck.shared + (size_t)f->block * ck.kernel->stride, f->role->index);
  if (!ck.failed) check_exit(f);
  f->alive = false;
  ck.alive--;
  fiber_yield();
  __builtin_unreachable();
}

static void report_deadlock(void) {
  if (!rule_on(CK_DEADLOCK)) {
    ck.alive = 0;
    return;
  }
  char text[2048];
  size_t n = 0;
  for (int i = 0; i < ck.fibers && n < sizeof text - 200; i++) {
    const fiber *f = &ck.fiber[i];
    if (!f->alive) continue;
    n += (size_t)snprintf(text + n, sizeof text - n, "\n{f:%d} waits ", i);
    if (f->wait == WAIT_SEM) {
      const semaphore *s = f->on;
      n += (size_t)snprintf(text + n, sizeof text - n, "for a phase of parity %d of {s:%d}, of which it has seen %d; it is in phase %d and lacks %d of %d arrivals"
                            " and %d bytes", (int)f->value, offset_in_block(s->at), ck.watcher[s - ck.sem][i].phases, s->completed, s->pending, s->count, s->bytes);
    } else if (f->wait == WAIT_BARRIER) {
      const named_barrier *b = f->on;
      n += (size_t)snprintf(text + n, sizeof text - n, "at named barrier %d, where %d of %d threads are", (int)(b - ck.barrier[f->block]), b->threads, b->wanted);
    } else if (f->wait == WAIT_ORDER) n += (size_t)snprintf(text + n, sizeof text - n, "for a global counter to reach %d; it is %d", (int)f->value, *(const int *)f->on);
    else n += (size_t)snprintf(text + n, sizeof text - n, "for asynchronous work");
  }
  const fiber *first = ck.fiber;
  while (!first->alive) first++;
  ck.current = (int)(first - ck.fiber);
  const fiber *cause = first;   // whose semaphore has all its arrivals and lacks bytes, if there is one: the others mostly follow
  for (int i = 0; i < ck.fibers; i++) {
    const fiber *f = &ck.fiber[i];
    if (f->alive && f->wait == WAIT_SEM && !((const semaphore *)f->on)->pending) cause = f;
  }
  first = cause;
  ck.current = (int)(first - ck.fiber);
  if (first->wait == WAIT_SEM) report_sem(first->on);
  report(CK_DEADLOCK, first->wait_pc, NULL, -1, "deadlock: nobody can go on%s", text);
}

static void schedule(void) {
  while (!ck.failed) {
    int able[MAX_FIBERS], count = 0;
    for (int i = 0; i < ck.fibers; i++)
      if (ck.fiber[i].alive && ready(&ck.fiber[i])) able[count++] = i;
    if (!ck.alive && !ck.ops) return;
    if (!count && !ck.ops) {
      report_deadlock();
      return;
    }
    if (++ck.steps > MAX_STEPS) {
      report(CK_DEADLOCK, NULL, NULL, -1, "no end after %d steps", MAX_STEPS);
      return;
    }
    if (ck.ops && (!count || (int)(draw() & 7) < ck.patience)) {
      take_effect(pick_operation());
      continue;
    }
    ck.current = able[draw() % (uint32_t)count];
    ck.in_fiber = true;
    switch_stack(&ck.host_sp, ck.fiber[ck.current].sp);
    ck.in_fiber = false;
  }
}

static void check_end(void) {
  for (int i = 0; i < ck.fibers; i++)
    if (ck.fiber[i].alive) return;   // a deadlock that is not to be reported
  for (int i = 0; i < ck.blocks * MAX_BARRIERS && !ck.failed; i++) {
    const named_barrier *b = &ck.barrier[i / MAX_BARRIERS][i % MAX_BARRIERS];
    if (!b->threads || !rule_on(CK_BARRIER)) continue;
    ck.current = 0;
    report(CK_BARRIER, NULL, NULL, -1, "the kernel ends while %d of %d threads have arrived at named barrier %d of block %d", b->threads, b->wanted,
           i % MAX_BARRIERS, i / MAX_BARRIERS);
  }
  for (int i = 0; i < ck.sems && !ck.failed; i++) {
    const semaphore *s = &ck.sem[i];
    if (!s->bytes || !rule_on(CK_BYTES)) continue;
    ck.current = 0;
    report_sem(s);
    report(CK_BYTES, NULL, NULL, -1, "the kernel ends while {s:%d} of block %d %s %d bytes", offset_in_block(s->at), s->block,
           s->bytes > 0 ? "still expects" : "has got unexpected", s->bytes > 0 ? s->bytes : -s->bytes);
  }
}

static bool open_memory(void) {
  const size_t bytes = ck.kernel->stride * (size_t)ck.blocks;
  if (ck.mapped < bytes) {
    if (ck.shared) munmap(ck.shared, ck.mapped);
    ck.shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    free(ck.sem_at);
    ck.sem_at = malloc(bytes / 8 * sizeof *ck.sem_at);
    if (ck.shared == MAP_FAILED || !ck.sem_at) return false;
    ck.mapped = bytes;
  }
  ck.shared_bytes = bytes;
  memset(ck.shared, 0xff, bytes);   // NaN
  memset(ck.sem_at, 0xff, bytes / 8 * sizeof *ck.sem_at);
  if (!shadow_open(bytes)) return false;
  shadow_reset();
  ck.kernel->arena(ck.shared, bytes);
  return true;
}

static void open_fibers(void) {
  const int per_block = ck.kernel->fibers;
  for (int i = 0; i < ck.fibers; i++) {
    fiber *f = &ck.fiber[i];
    char *stack = f->stack ? f->stack : mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const ck_role *role = &ck.kernel->role[i % per_block];
    *f = (fiber){.stack = stack, .role = role, .block = i / per_block, .rank = i / per_block % ck.kernel->cluster, .alive = true,
                 .group = role->width == 128, .fence_due = true};
    f->leader_seen = f->seen = clock_new();
    f->leader_fenced = f->fenced = clock_new();
    if (f->group) {
      f->leader_seen = clock_new();
      f->leader_fenced = clock_new();
    }
    f->seen[component(i, GENERIC)] = f->seen[component(i, PROGRESS)] = 1;
    fiber_prepare(f, fiber_main);
  }
}

static void run_once(void) {
  memset(ck.barrier, 0, sizeof ck.barrier);
  memset(ck.watcher, 0, sizeof ck.watcher);
  memset(ck.products_left, 0, sizeof ck.products_left);
  memset(ck.stores_left, 0, sizeof ck.stores_left);
  ck.ops = ck.sems = word_count = 0;
  ck.steps = 0;
  ck.failed = false;
  ck.current = -1;
  ck.random = ck.request->seed * 0x9e3779b97f4a7c15u + 12345;
  ck.patience = (int[]){3, 0, 7, 5}[ck.request->seed % 4];   // effects as late as can be, at once, and in between
  events_reset();
  if (!open_memory()) {
    report(CK_EXIT, NULL, NULL, -1, "out of memory");
    return;
  }
  for (int i = 0; i < 16; i++) draw();
  ck.components = 0;
  for (int b = 0; b < ck.blocks; b++) ck.kernel->init(ck.shared + (size_t)b * ck.kernel->stride);
  ck.components = PER_FIBER * ck.fibers + ck.sems;
  const size_t clock_bytes = ((size_t)ck.components * sizeof(int32_t) + 63) & ~(size_t)63;
  pool_reset(clock_bytes * (4 * (size_t)(ck.fibers + ck.sems) + 4 * 8 * (size_t)ck.blocks + 2 * MAX_WORDS));
  for (int i = 0; i < ck.sems; i++) {
    semaphore *s = &ck.sem[i];
    s->arrived = clock_new(), s->arrived_fenced = clock_new();
    s->released = clock_new(), s->released_fenced = clock_new();
  }
  open_fibers();
  ck.alive = ck.fibers;
  if (ck.kernel->registers > ck.kernel->register_limit && rule_on(CK_BUDGET)) {
    ck.current = 0;
    report(CK_BUDGET, NULL, NULL, -1, "the roles ask for %d registers a thread of one warpgroup each in all, the block is launched with %d: setmaxnreg would hang",
           ck.kernel->registers, ck.kernel->register_limit);
  }
  schedule();
  if (!ck.failed) check_end();
}

int ck_run(const ck_kernel *kernel, const ck_request *request, const void *params, int blocks, char *text, size_t size) {
  ck_request recorded = *request;
  ck.kernel = kernel;
  ck.request = request;
  ck.params = params;
  ck.blocks = blocks;
  ck.fibers = kernel->fibers * blocks;
  ck.text = text;
  ck.text_size = size;
  text[0] = 0;
  if (ck.fibers > MAX_FIBERS) {
    snprintf(text, size, "{\"rule\": \"limit\", \"text\": \"%d blocks of %d roles, the checker runs at most %d roles at once\"}", blocks, kernel->fibers, MAX_FIBERS);
    return 1;
  }
  if (request->mutation == CK_EARLY) {   // the order of calls, to know what comes next
    recorded.mutation = CK_NONE;
    ck.request = &recorded;
    run_once();
    events_keep();
    restore_words();
    if (ck.failed) return 1;
    ck.request = request;
  }
  run_once();
  return ck.failed;
}
long ck_steps(void) { return ck.steps; }
