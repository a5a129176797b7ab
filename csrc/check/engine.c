// Fibers, the scheduler, and a run from its beginning to its end. What kernels call is in sync.c and async.c.
#define _GNU_SOURCE   // dladdr
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unwind.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#include "check/engine.h"

enum { STACK_BYTES = 4 << 20, GUARD_BYTES = 1 << 16, SIGNAL_STACK = 1 << 17, MAX_STEPS = 4000000 };
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
void point(void) {
  if (ck.current >= 0) fiber_yield();
}

// ---- waiting
bool ready(const fiber *f) {
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
void wait_for(const void *pc, enum wait_kind kind, const void *on, int64_t value) {
  fiber *f = self();
  f->wait = kind;
  f->on = on;
  f->wait_pc = pc;
  f->value = value;
  do fiber_yield();
  while (!ready(f));
  f->wait = WAIT_NOTHING;
}

// ---- the run
static void take_effect(int i) {
  operation o = ck.op[i];
  ck.op[i] = ck.op[--ck.ops];
  ck.effect = &o;
  o.run(o.closure);
  ck.effect = NULL;
  if (o.kind == EFFECT_LOAD) {
    semaphore *s = &ck.sem[o.sem];
    ck.current = o.fiber;   // in whose name a report would be
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
  if (!ck.kernel->unless || !ck.kernel->unless(ck.params))
    f->role->body(ck.params, ck.shared + (size_t)f->block * ck.kernel->stride, f->role->index);
  if (!ck.failed) check_exit(f);
  f->alive = false;
  ck.alive--;
  fiber_yield();
  __builtin_unreachable();
}

static int arrivals_of(const semaphore *s) { return s->count - s->pending; }

// Who mostly lacks what the mistake left out. First, who waits on a semaphore that some have arrived at. Next, who has
// all arrivals and lacks bytes. Then, who waits for the earliest phase. The others follow.
static const fiber *cause_of_deadlock(void) {
  const fiber *cause = NULL;
  int best = -1;
  for (int i = 0; i < ck.fibers; i++) {
    const fiber *f = &ck.fiber[i];
    if (!f->alive) continue;
    const semaphore *s = f->wait == WAIT_SEM ? f->on : NULL;
    const int weight = !s ? 0 : !s->pending ? 1 : arrivals_of(s) ? 2 : 0;
    if (weight < best || (weight == best && (!s || cause->wait != WAIT_SEM || f->phase >= cause->phase))) continue;
    best = weight;
    cause = f;
  }
  return cause;
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
      n += (size_t)snprintf(
          text + n, sizeof text - n,
          "for phase %d (parity %d) of {s:%d}; it is in phase %d and lacks %d of %d arrivals and %d bytes", f->phase,
          (int)f->value, offset_in_block(s->at), s->completed, s->pending, s->count, s->bytes);
      for (int a = 0; a < s->arrivals[s->completed & 1] && n < sizeof text - 100; a++)
        n += (size_t)snprintf(text + n, sizeof text - n, a ? ", {f:%d}" : "; arrived: {f:%d}",
                              s->arrival[s->completed & 1][a].fiber);
    } else if (f->wait == WAIT_BARRIER) {
      const named_barrier *b = f->on;
      n += (size_t)snprintf(text + n, sizeof text - n, "at named barrier %d, where %d of %d threads are",
                            (int)(b - ck.barrier[f->block]), b->threads, b->wanted);
    } else if (f->wait == WAIT_ORDER)
      n += (size_t)snprintf(text + n, sizeof text - n, "for a global counter to reach %d; it is %d", (int)f->value,
                            *(const int *)f->on);
    else n += (size_t)snprintf(text + n, sizeof text - n, "for asynchronous work");
  }
  const fiber *cause = cause_of_deadlock();
  ck.current = (int)(cause - ck.fiber);
  if (cause->wait == WAIT_SEM) report_sem(cause->on);
  report(CK_DEADLOCK, cause->wait_pc, NULL, -1, "deadlock: nobody can go on%s", text);
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
    report(CK_BARRIER, NULL, NULL, -1,
           "the kernel ends while %d of %d threads have arrived at named barrier %d of block %d", b->threads, b->wanted,
           i % MAX_BARRIERS, i / MAX_BARRIERS);
  }
  for (int i = 0; i < ck.sems && !ck.failed; i++) {
    const semaphore *s = &ck.sem[i];
    if (!s->bytes || !rule_on(CK_BYTES)) continue;
    ck.current = 0;
    report_sem(s);
    report(CK_BYTES, NULL, NULL, -1, "the kernel ends while {s:%d} of block %d %s %d bytes", offset_in_block(s->at),
           s->block, s->bytes > 0 ? "still expects" : "has got unexpected", s->bytes > 0 ? s->bytes : -s->bytes);
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

static char *new_stack(void) {   // what overflows it is a crash, not another fiber's stack
  char *p = mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "margay.check: out of memory for stacks\n");
    abort();
  }
  mprotect(p, GUARD_BYTES, PROT_NONE);
  return p + GUARD_BYTES;
}
static void open_fibers(void) {
  const int per_block = ck.kernel->fibers;
  for (int i = 0; i < ck.fibers; i++) {
    fiber *f = &ck.fiber[i];
    char *stack = f->stack ? f->stack : new_stack();
    const ck_role *role = &ck.kernel->role[i % per_block];
    *f = (fiber){.stack = stack, .role = role, .block = i / per_block, .rank = i / per_block % ck.kernel->cluster,
                 .alive = true,
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
  // Only what this run may use: all of it is megabytes
  memset(ck.barrier, 0, (size_t)ck.blocks * sizeof *ck.barrier);
  memset(ck.products_left, 0, (size_t)ck.fibers * sizeof *ck.products_left);
  memset(ck.stores_left, 0, (size_t)ck.fibers * sizeof *ck.stores_left);
  ck.ops = ck.sems = 0;
  words_reset();
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
  memset(ck.watcher, 0, (size_t)ck.sems * sizeof *ck.watcher);
  for (int i = 0; i < ck.sems; i++) {
    semaphore *s = &ck.sem[i];
    s->arrived = clock_new(), s->arrived_fenced = clock_new();
    s->released = clock_new(), s->released_fenced = clock_new();
  }
  open_fibers();
  ck.alive = ck.fibers;
  schedule();
  if (!ck.failed) check_end();
}

// ---- crashes of the kernel's code: the run ends with a report, the process lives
static const int crash_signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
enum { CRASH_SIGNALS = sizeof crash_signals / sizeof *crash_signals };
static sigjmp_buf crashed;
static volatile sig_atomic_t crash_signal;
static const void *crash_address;

static _Unwind_Reason_Code note_frame(struct _Unwind_Context *context, void *unused) {
  (void)unused;
  int before = 0;
  const uintptr_t ip = _Unwind_GetIPInfo(context, &before);
  if (before) ck.crash_frames = 0;       // this one was interrupted: the handler's own frames were in front of it
  if (ck.crash_frames == MAX_FRAMES) return _URC_END_OF_STACK;
  ck.crash_frame[ck.crash_frames++] = (const void *)(ip + (uintptr_t)before);   // like an address behind a call
  return _URC_NO_REASON;
}
static void on_crash(int signal, siginfo_t *info, void *context) {
  (void)context;
  if (!crash_signal) {   // else unwinding crashed: what it has found must do
    crash_signal = signal;
    crash_address = info->si_addr;
    _Unwind_Backtrace(note_frame, NULL);
  }
  siglongjmp(crashed, 1);
}
static void report_crash(void) {
  Dl_info mine, other;
  const operation *o = ck.effect;
  const int noted = ck.crash_frames;
  ck.crash_frames = 0;
  for (int i = 0; i < noted; i++)
    if (!o && dladdr(&ck, &mine) && dladdr(ck.crash_frame[i], &other) && mine.dli_fbase == other.dli_fbase)
      ck.crash_frame[ck.crash_frames++] = ck.crash_frame[i];
  ck.in_fiber = false;
  ck.effect = NULL;
  if (o) ck.current = o->fiber;
  if (!rule_on(CK_CRASH)) return;
  const char *when = o ? ", when what it has issued takes effect" : "";
  const char *what = crash_signal == SIGFPE ? "divides an integer by zero" :
                                              "executes an instruction that the machine does not have";
  if (crash_signal == SIGSEGV || crash_signal == SIGBUS)
    report(CK_CRASH, o ? o->pc : NULL, NULL, -1, "crashes: touches address %p, where no memory is%s",
           (void *)(uintptr_t)crash_address, when);
  else report(CK_CRASH, o ? o->pc : NULL, NULL, -1, "crashes: %s%s", what, when);
}
static void run_guarded(void) {
  static char stack[SIGNAL_STACK];
  struct sigaction action = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER},
      before[CRASH_SIGNALS];
  const stack_t own = {.ss_sp = stack, .ss_size = sizeof stack};
  stack_t stack_before;
  crash_signal = 0;
  ck.crash_frames = 0;
  ck.in_fiber = false;
  ck.effect = NULL;
  sigaltstack(&own, &stack_before);
  for (int i = 0; i < CRASH_SIGNALS; i++) sigaction(crash_signals[i], &action, &before[i]);
  if (sigsetjmp(crashed, 1)) report_crash();
  else run_once();
  for (int i = 0; i < CRASH_SIGNALS; i++) sigaction(crash_signals[i], &before[i], NULL);
  sigaltstack(&stack_before, NULL);
}

int ck_run(const ck_kernel *kernel, const ck_request *request, const void *params, int blocks, char *text,
           size_t size) {
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
    snprintf(text, size,
             "{\"rule\": \"limit\", \"text\": \"%d blocks of %d roles, the checker runs at most %d roles at once\"}",
             blocks, kernel->fibers, MAX_FIBERS);
    return 1;
  }
  if (request->mutation == CK_EARLY) {   // the order of calls, to know what comes next
    recorded.mutation = CK_NONE;
    ck.request = &recorded;
    run_guarded();
    events_keep();
    words_restore();
    if (ck.failed) return 1;
    ck.request = request;
  }
  run_guarded();
  return ck.failed;
}
long ck_steps(void) { return ck.steps; }
