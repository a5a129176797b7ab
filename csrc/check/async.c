// Register tiles, products, copies, stores; what kernels touch in shared and in global memory.
#include <stdlib.h>
#include <string.h>
#include "check/engine.h"

// ---- register tiles
static const char *register_in_flight(const ck_register *r, bool written) {
  const int done = r->fiber == ck.current ? self()->seen[component(ck.current, PRODUCTS)] : 0;
  if (r->writer)
    return r->writer > done ? "a product that has not been waited for still writes" :
                              "has to be named in the mma_wait that frees it:";
  if (written && r->reader)
    return r->reader > done ? "a product that has not been waited for still reads" :
                              "has to be named in the mma_wait that frees it:";
  return NULL;
}
static bool check_register(const void *pc, const ck_register *r, bool written) {
  if (ck.failed) return false;
  const char *why = register_in_flight(r, written);
  const bool waited = why && why[0] == 'h';
  if (!why || !rule_on(waited ? CK_UNNAMED : CK_IN_FLIGHT)) return true;
  report(waited ? CK_UNNAMED : CK_IN_FLIGHT, pc, r->product, ck.current,
         waited ? "touches a register tile that %s it was used by a product" : "touches a register tile that %s", why);
  return false;
}
void ck_reads(const void *pc, int width, ck_register *r) {
  if (!called_by(pc, width) || !check_register(pc, r, false)) return;
  r->touched = self()->fence + 1;
  if (r->valid || !rule_on(CK_UNINITIALISED)) return;
  report(CK_UNINITIALISED, pc, NULL, -1, "reads registers that nothing has written");
}
void ck_writes(const void *pc, int width, ck_register *r) {
  if (!called_by(pc, width) || !check_register(pc, r, true)) return;
  r->valid = true;
  r->touched = self()->fence + 1;
}
void ck_register_ends(ck_register *r) {
  if (ck.failed || ck.current < 0 || !register_in_flight(r, true)) return;
  const int done = self()->seen[component(ck.current, PRODUCTS)];
  if (r->writer > done || r->reader > done) {
    if (rule_on(CK_LIFETIME))
      report(CK_LIFETIME, self()->product_pc, NULL, -1,
             "leaves the scope of a register tile that a product still uses");
  } else if (rule_on(CK_UNNAMED)) {
    report(CK_UNNAMED, r->product, NULL, -1,
           "the scope of a register tile of this product ends, and no mma_wait has named the tile: "
           "the compiler may give its registers to something else before the wait");
  }
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

void ck_load(const void *pc, const ck_region *to, const void *at, int bytes, ck_effect run, const void *closure,
             size_t size) {
  if (!called_by(pc, 1)) return;
  event_add(pc, CK_OP_LOAD, at, bytes);
  const int sem = sem_of(pc, at);
  if (sem < 0) return;
  semaphore *s = &ck.sem[sem];
  s->issued += bytes;
  // in a cluster other blocks' copies may come before the expectation
  if (ck.kernel->cluster == 1 && s->issued > s->expected && rule_on(CK_BYTES)) {
    report_place(offset_in_block(at));
    report(CK_BYTES, pc, NULL, -1, "copies %d bytes in phase %d of {s:%d}: %d in all, and %d are expected", bytes,
           s->completed, offset_in_block(at), s->issued, s->expected);
    return;
  }
  if (!shadow_access(pc, to, ACCESS_WRITE | ACCESS_ASYNC, sem_component(sem), ck.sem[sem].completed + 1)) return;
  operation *o = issue(pc, EFFECT_LOAD, run, closure, size);
  if (!o) return;
  o->sem = sem;
  o->bytes = bytes;
  point();
}

// From this block to another of the cluster: a remote arrival, and a load whose source is shared memory, read until
// that phase is complete.
void ck_send(const void *pc, const ck_region *from, const ck_region *to, const void *at, int bytes, ck_effect run,
             const void *closure, size_t size) {
  const int sem = ck.failed ? -1 : sem_of(pc, at);
  if (sem < 0 || !shadow_access(pc, from, ACCESS_ASYNC, sem_component(sem), ck.sem[sem].completed + 1)) return;
  ck.sem[sem].bytes += bytes;
  ck.sem[sem].expected += bytes;
  arrive(pc, sem, 1, true);
  ck_load(pc, to, at, bytes, run, closure, size);
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

void ck_product(const void *pc, ck_register *d, bool accumulates, ck_register *a_register, const ck_region *a,
                const ck_region *b, ck_effect run, const void *closure, size_t size) {
  if (!called_by(pc, GROUP_WIDTH)) return;
  fiber *f = self();
  event_add(pc, CK_OP_PRODUCT, NULL, 0);
  const int ticket = f->products_committed + 1, who = component(ck.current, PRODUCTS);
  if (accumulates && !d->valid && rule_on(CK_UNINITIALISED)) {
    report(CK_UNINITIALISED, pc, NULL, -1, "accumulates into registers that nothing has written");
    return;
  }
  const bool unfenced = f->fence_due || d->touched > f->fence || (a_register && a_register->touched > f->fence);
  if (unfenced && rule_on(CK_MMA_FENCE)) {
    report(CK_MMA_FENCE, pc, NULL, -1,
           f->fence_due ? "multiplies without an mma_fence since the last barrier wait"
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
  if (!called_by(pc, GROUP_WIDTH) || !begin(pc, CK_OP_COMMIT, NULL, 0)) return;
  self()->products_committed++;
  self()->products_open = 0;
}

void ck_mma_wait(const void *pc, int groups, ck_register **named, int count) {
  if (!called_by(pc, GROUP_WIDTH) || !begin(pc, CK_OP_MMA_WAIT, NULL, groups)) return;
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

void ck_store_wait(const void *pc, int width, int groups, bool written) {
  if (!called_by(pc, width) || !begin(pc, CK_OP_STORE_WAIT, NULL, groups)) return;
  fiber *f = self();
  const int until = f->stores_committed - groups - mutated(pc, CK_GROUP_LESS);
  if (until <= 0) return;
  wait_for(pc, WAIT_STORES, NULL, until);
  learn_component(component(ck.current, STORES), until, f->group);
  if (written) learn_component(component(ck.current, WRITTEN), until, f->group);
}

// ---- global memory
static word words[MAX_WORDS];
static int word_count;
static word *word_at(const int *g) {
  int i = 0;
  while (i < word_count && words[i].at != g) i++;
  if (i == MAX_WORDS) return &words[0];
  if (i == word_count) words[word_count++] = (word){(int *)g, *g, clock_new(), clock_new()};
  return &words[i];
}
// ---- what a kernel tells the one behind it
enum { MAX_TOLD = 1 << 16 };
// mark NULL: not told yet. Who knows `who` up to `value` knows that it is written. What is more is not known
static struct { ck_told part; int who, value; } written[MAX_TOLD];
static int written_count;
static int passed[MAX_FIBERS][MAX_WORDS];        // what the fiber has seen of a counter
static void note_written(const void *p, size_t bytes, int who, int value) {
  const int last = written_count - 1;
  if (last >= 0 && !written[last].part.mark && written[last].who == who && written[last].value == value &&
      written[last].part.p + written[last].part.bytes == p)
    written[last].part.bytes += bytes;
  else if (written_count < MAX_TOLD) {
    written[written_count].who = who;
    written[written_count].value = value;
    written[written_count++].part = (ck_told){p, bytes, NULL};
  }
}
// All that the elected thread knows of, whoever wrote it.
static void tell_written(const int *mark) {
  for (int i = 0; i < written_count; i++)
    if (!written[i].part.mark && self()->leader_seen[written[i].who] >= written[i].value) written[i].part.mark = mark;
}
static int by_address(const void *a, const void *b) {
  const ck_told *x = a, *y = b;
  return (x->p > y->p) - (x->p < y->p);
}
int ck_told_of(ck_told *told, int most) {
  int n = 0;
  bool any = false;
  for (int i = 0; i < written_count; i++) any = any || written[i].part.mark;
  for (int i = 0; i < written_count && any; i++, n++)     // what nobody told of, too: only the kernel's end tells that
    if (n < most) told[n] = written[i].part;
  qsort(told, (size_t)(n < most ? n : most), sizeof *told, by_address);
  return n;
}
// Whether the fiber has not waited for what is told of some of these bytes, or nothing is.
static bool untold(const char *p, size_t bytes) {
  const ck_request *q = ck.request;
  int low = 0;
  for (int high = q->told_count; low < high;) {    // the first that ends behind p
    const int middle = (low + high) / 2;
    if (q->told[middle].p + q->told[middle].bytes <= p) low = middle + 1;
    else high = middle;
  }
  for (; low < q->told_count && q->told[low].p < p + bytes; low++) {
    const int *mark = q->told[low].mark;
    if (!mark || passed[ck.current][word_at(mark) - words] < *mark) return true;
  }
  return false;
}
static bool is_told(const void *pc, const void *p, size_t bytes) {
  if (ck.failed || self()->grid_over || !rule_on(CK_GLOBAL_RACE) || !untold(p, bytes)) return !ck.failed;
  report(CK_GLOBAL_RACE, pc, NULL, -1,
         "reads what the kernel in front of this one may still write: no grid_wait_part for all that it tells of it");
  return false;
}

void words_reset(void) {
  word_count = written_count = 0;
  memset(passed, 0, sizeof *passed * (size_t)ck.fibers);
}
void words_restore(void) {
  for (int i = 0; i < word_count; i++) *words[i].at = words[i].before;
}
void ck_order_wait(const void *pc, int width, const int *g, int value) {
  if (!called_by(pc, width) || !begin(pc, CK_OP_ORDER_WAIT, NULL, value)) return;
  const word *w = word_at(g);
  wait_for(pc, WAIT_ORDER, g, value);
  learn(w->seen, w->fenced);
}
void ck_order_pass(const void *pc, int *g, int value) {
  if (!called_by(pc, GROUP_WIDTH) || !begin(pc, CK_OP_ORDER_PASS, NULL, value)) return;
  word *w = word_at(g);
  publish(w->seen, w->fenced);
  *g = value;
  point();
}
void ck_order_count(const void *pc, int *g) {
  word *w = word_at(g);
  if (!called_by(pc, 1) || !begin(pc, CK_OP_ORDER_COUNT, NULL, 0)) return;
  publish(w->seen, w->fenced);
  ++*g;
  point();
}
// By the elected thread, which knows of the others' writes after a sync.
void ck_order_tell(const void *pc, int *g) {
  word *w = word_at(g);
  if (!called_by(pc, GROUP_WIDTH) || !begin(pc, CK_OP_ORDER_COUNT, NULL, 0)) return;
  const fiber *f = self();
  if (f->leader_seen[component(ck.current, WRITTEN)] < f->stores_committed && rule_on(CK_GLOBAL_RACE)) {
    report(CK_GLOBAL_RACE, pc, f->store_pc, ck.current,
           "tells what a store may still write: no tma_store_wait for it");
    return;
  }
  tell_written(g);
  publish_leader(w->seen, w->fenced);
  ++*g;
  point();
}
int ck_atomic_next(const void *pc, int *counter) {
  if (ck.failed) return 0;
  point();
  word_at(counter);
  event_add(pc, CK_OP_ATOMIC, NULL, *counter);
  return (*counter)++;
}
void ck_grid_wait(const void *pc) {
  if (begin(pc, CK_OP_GRID_WAIT, NULL, 0)) self()->grid_waited = self()->grid_over = true;
}
void ck_grid_wait_part(const void *pc, int width, const int *g, int value) {
  if (!called_by(pc, width) || !begin(pc, CK_OP_ORDER_WAIT, NULL, value)) return;
  const word *w = word_at(g);
  wait_for(pc, WAIT_ORDER, g, value);
  learn(w->seen, w->fenced);
  passed[ck.current][w - words] = value;
  self()->grid_waited = true;
}
static bool grid_over(const void *pc) {
  if (ck.failed) return false;
  if (!ck.kernel->dependent || self()->grid_waited || !rule_on(CK_GRID)) return true;
  report(CK_GRID, pc, NULL, -1,
         "touches global memory without a grid_wait, while the kernel in front of this one may still run");
  return false;
}
void ck_global(const void *pc, const void *p, size_t bytes, enum ck_global kind) {
  const int who = component(ck.current, GENERIC);
  if (!bytes || !grid_over(pc) || (kind == CK_GLOBAL_READ && !is_told(pc, p, bytes))) return;
  if (kind == CK_GLOBAL_WRITE) note_written(p, bytes, who, self()->seen[who]);
  shadow_global(pc, p, bytes, kind, who, self()->seen[who]);
}
void ck_global_load(const void *pc, const void *p, size_t bytes, const void *at) {
  const int sem = grid_over(pc) && is_told(pc, p, bytes) ? sem_of(pc, at) : -1;
  if (sem >= 0) shadow_global(pc, p, bytes, CK_GLOBAL_READ, sem_component(sem), ck.sem[sem].completed + 1);
}
void ck_global_store(const void *pc, const void *p, size_t bytes) {
  if (!grid_over(pc)) return;
  const int who = component(ck.current, WRITTEN), value = self()->stores_committed + 1;
  note_written(p, bytes, who, value);
  shadow_global(pc, p, bytes, CK_GLOBAL_WRITE, who, value);
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
void ck_parked(const void *pc, const ck_region *r, bool writes) {
  if (ck.failed) return;
  const int flags = ACCESS_OWN | (writes ? ACCESS_WRITE : 0);
  shadow_access(pc, r, flags, component(ck.current, GENERIC), self()->seen[component(ck.current, GENERIC)]);
}
void ck_bounds(const void *pc, bool inside, const char *what, const void *tile) {
  if (ck.failed || inside || !rule_on(CK_BOUNDS)) return;
  report_place(in_shared(tile) ? offset_in_block(tile) : -1);
  report(CK_BOUNDS, pc, NULL, -1, "%s", what);
}
void ck_begins_at(const void *pc, int at, int unit, const void *tile) {
  if (ck.failed || at % unit == 0 || !rule_on(CK_BOUNDS)) return;
  report_place(in_shared(tile) ? offset_in_block(tile) : -1);
  report(CK_BOUNDS, pc, NULL, -1, "a window begins at row or column %d of its tile, which is no multiple of %d", at,
         unit);
}
void ck_called_by(const void *pc, int width) { called_by(pc, width); }

int ck_block_index(void) { return self()->block; }
int ck_block_count(void) { return ck.blocks; }
int ck_cluster_rank(void) { return self()->rank; }
const void *ck_at_rank(const void *p, int rank) {
  return (const char *)p + (ptrdiff_t)(rank - self()->rank) * (ptrdiff_t)ck.kernel->stride;
}
