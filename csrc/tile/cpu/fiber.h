// A cluster of blocks on one thread: every member of a role is a cooperative fiber. One machine per thread, shared by
// all kernels.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

enum { MAX_FIBERS = 64, MAX_CLUSTER = 16, BARRIERS = 16, STACK_BYTES = 1 << 20, GUARD_BYTES = 1 << 16, GRANULE = 1024,
    PACK_KINDS = 3, PACK_GROWTH = 4 };
enum wait_kind { WAIT_NONE, WAIT_SEM, WAIT_BARRIER, WAIT_ORDER };

struct barrier { uint32_t generation; int threads; };
struct fiber {
#if defined(__x86_64__)
  void *sp;
#else
  ucontext_t context;
#endif
  char *stack;
  void (*body)(const void *params, void *shared, int index);
  int role, index, width, rank;
  bool alive;
  enum wait_kind wait;
  const void *on;
  uint32_t value;             // phase, generation or counter value waited for
};
struct machine {
  fiber host, fibers[MAX_FIBERS];
  int count, live, current;
  int stacks;                 // fibers that have one
  const void *params;
  int first, blocks;          // of the grid: first block of the cluster, number of blocks
  char *shared;               // the blocks' shared structs, `stride` bytes apart
  size_t stride, capacity;
  barrier barriers[MAX_CLUSTER][BARRIERS];
  // Packed forms of shared tiles for the matrix products, see mma.h. Indexed by the granule a tile starts in.
  char *packed[PACK_KINDS];   // PACK_GROWTH * capacity bytes each: floats in place of bytes
  uint32_t *written;          // counts writes
  uint64_t *packed_tag[PACK_KINDS];
};
inline thread_local machine *mg_machine;
inline pthread_key_t mg_machine_key;
inline pthread_once_t mg_machine_once = PTHREAD_ONCE_INIT;
// Bytes that this thread asked for last and did not get; runtime/cpu.c reads and clears it.
inline thread_local size_t mg_machine_lacks;

TILE void *map_pages(size_t bytes) {
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p != MAP_FAILED) return p;
  mg_machine_lacks = bytes;
  return nullptr;
}
TILE size_t arena_bytes(size_t capacity) {
  return capacity * (1 + PACK_GROWTH * PACK_KINDS) +
         capacity / GRANULE * (sizeof(uint32_t) + PACK_KINDS * sizeof(uint64_t));
}
static void machine_free(void *p) {
  machine *m = (machine *)p;
  for (int i = 0; i < m->stacks; i++) munmap(m->fibers[i].stack, STACK_BYTES + GUARD_BYTES);
  if (m->shared) munmap(m->shared, arena_bytes(m->capacity));
  munmap(m, sizeof *m);
}
static void machine_key_create() { pthread_key_create(&mg_machine_key, machine_free); }
// Null where there is not memory enough.
static machine *machine_open(size_t stride, int cluster, int fibers) {
  machine *m = mg_machine;
  if (!m) {
    if (!(m = (machine *)map_pages(sizeof *m))) return nullptr;
    mg_machine = m;
    pthread_once(&mg_machine_once, machine_key_create);
    pthread_setspecific(mg_machine_key, m);
  }
  for (; m->stacks < fibers; m->stacks++) {
    char *stack = (char *)map_pages(STACK_BYTES + GUARD_BYTES);
    if (!stack) return nullptr;
    mprotect(stack, GUARD_BYTES, PROT_NONE);
    m->fibers[m->stacks].stack = stack;
  }
  if (m->capacity < stride * cluster) {
    if (m->shared) munmap(m->shared, arena_bytes(m->capacity));
    m->capacity = 0;
    m->shared = (char *)map_pages(arena_bytes(stride * cluster));
    if (!m->shared) return nullptr;
    m->capacity = stride * cluster;
    char *p = m->shared;
    p += m->capacity;
    for (int i = 0; i < PACK_KINDS; i++, p += PACK_GROWTH * m->capacity) m->packed[i] = p;
    for (int i = 0; i < PACK_KINDS; i++, p += m->capacity / GRANULE * sizeof(uint64_t))
      m->packed_tag[i] = (uint64_t *)p;
    m->written = (uint32_t *)p;
  }
  m->stride = stride;
  return m;
}
TILE fiber &self() { return mg_machine->fibers[mg_machine->current]; }

// ---- switching
#if defined(__x86_64__)
// Callee-saved registers on the old stack; every vector register is the caller's in this ABI.
__attribute__((naked, noinline, unused)) static void switch_stack(void ** /*save*/, void * /*load*/) {
  __asm__("pushq %rbp\n\tpushq %rbx\n\tpushq %r12\n\tpushq %r13\n\tpushq %r14\n\tpushq %r15\n\t"
          "movq %rsp, (%rdi)\n\tmovq %rsi, %rsp\n\t"
          "popq %r15\n\tpopq %r14\n\tpopq %r13\n\tpopq %r12\n\tpopq %rbx\n\tpopq %rbp\n\tretq");
}
TILE void fiber_switch(fiber &from, fiber &to) { switch_stack(&from.sp, to.sp); }
TILE void fiber_prepare(fiber &f, void (*entry)()) {
  void **sp = (void **)(f.stack + STACK_BYTES + GUARD_BYTES) - 1;   // as if entry had been called from an aligned stack
  *--sp = (void *)entry;
  f.sp = sp - 6;
}
#else
TILE void fiber_switch(fiber &from, fiber &to) { swapcontext(&from.context, &to.context); }
TILE void fiber_prepare(fiber &f, void (*entry)()) {
  getcontext(&f.context);
  f.context.uc_stack.ss_sp = f.stack + GUARD_BYTES;
  f.context.uc_stack.ss_size = STACK_BYTES;
  f.context.uc_link = nullptr;
  makecontext(&f.context, entry, 0);
}
#endif

// ---- scheduling: round robin among the fibers that can run
TILE bool fiber_ready(const fiber &f) {
  switch (f.wait) {
  case WAIT_SEM: return ((const sem *)f.on)->phase != f.value;
  case WAIT_BARRIER: return ((const barrier *)f.on)->generation != f.value;
  case WAIT_ORDER: return __atomic_load_n((const int *)f.on, __ATOMIC_ACQUIRE) >= (int)f.value;
  case WAIT_NONE: break;
  }
  return true;
}
__attribute__((noreturn, unused)) static void report_deadlock(const machine &m) {
  fprintf(stderr, "margay: deadlock in block %d of %d\n", m.first, m.blocks);
  for (int i = 0; i < m.count; i++) {
    const fiber &f = m.fibers[i];
    fprintf(stderr, "  block rank %d role %d member %d: ", f.rank, f.role, f.index);
    if (!f.alive) fprintf(stderr, "has returned\n");
    else if (f.wait == WAIT_SEM) {
      const sem &s = *(const sem *)f.on;
      fprintf(stderr, "sem at shared + %zu, phase %u (now in phase %d: %d of %d arrivals and %d bytes missing)\n",
              (size_t)((const char *)&s - m.shared) % m.stride, f.value, s.phase, s.pending, s.count, s.bytes);
    } else {
      const barrier &b = *(const barrier *)f.on;
      fprintf(stderr, "named barrier %d (%d threads there)\n", (int)(&b - m.barriers[f.rank]), b.threads);
    }
  }
  abort();
}
// Run something else; returns when the calling fiber can go on. A counter in global memory is passed by another thread:
// poll it.
__attribute__((noinline, unused)) static void fiber_yield() {
  machine &m = *mg_machine;
  int me = m.current;
  fiber &from = m.fibers[me];
  if (!m.live) fiber_switch(from, m.host);
  for (;;) {
    bool order = false;
    for (int k = 1, i = me; k <= m.count; k++) {
      if (++i == m.count) i = 0;
      fiber &f = m.fibers[i];
      if (!f.alive) continue;
      if (fiber_ready(f)) {
        f.wait = WAIT_NONE;
        m.current = i;
        if (i != me) fiber_switch(from, f);
        return;
      }
      order |= f.wait == WAIT_ORDER;
    }
    if (!order) report_deadlock(m);
    sched_yield();
  }
}
TILE void fiber_wait(enum wait_kind kind, const void *on, uint32_t value) {
  fiber &f = self();
  f.wait = kind;
  f.on = on;
  f.value = value;
  if (fiber_ready(f)) f.wait = WAIT_NONE;
  else fiber_yield();
}
__attribute__((unused)) static void fiber_main() {
  machine &m = *mg_machine;
  fiber &f = self();
  f.body(m.params, m.shared + f.rank * m.stride, f.index);
  f.alive = false;
  m.live--;
  fiber_yield();
  __builtin_unreachable();
}
TILE void fiber_add(machine &m, void (*body)(const void *, void *, int), int role, int index, int width, int rank) {
  fiber &f = m.fibers[m.count++];
  f.body = body;
  f.role = role;
  f.index = index;
  f.width = width;
  f.rank = rank;
  f.alive = true;
  f.wait = WAIT_NONE;
  fiber_prepare(f, fiber_main);
}
TILE void run_fibers(machine &m) {
  m.live = m.count;
  m.current = 0;
  fiber_switch(m.host, m.fibers[0]);
}
