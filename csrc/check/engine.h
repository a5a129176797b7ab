// Inside of the checker's runtime: the run's state, its clocks, its reports.
#pragma once
#include "check/check.h"

enum { GROUP_WIDTH = 128, MAX_FIBERS = 64, MAX_SEMS = 2048, MAX_OPS = 4096, MAX_BARRIERS = 16, CLOSURE = 192,
    MAX_GROUPS = 1 << 14, MAX_FRAMES = 48 };

// Components of a clock. Every semaphore has the phases it has completed. Every fiber has
//   GENERIC      its own accesses, made by all of its threads
//   PRODUCTS_A   its product groups, for operands of which a warp's part of the product reads only the warp's rows: a
//   PRODUCTS     the same for operands that all warps' parts read: b
//   STORES       its store groups, when they have read shared memory
//   WRITTEN      the same, when they have written global memory
//   PROGRESS     what it has passed on, arrivals at other blocks included
enum { GENERIC, PRODUCTS_A, PRODUCTS, STORES, WRITTEN, PROGRESS, PER_FIBER };
typedef int32_t *clock;

// Who made a phase what it is.
enum { ARRIVALS = 12 };
typedef struct arrival { const void *pc; int fiber, warps; } arrival;

typedef struct semaphore {
  const char *at;
  int block, count, pending, bytes, completed;   // completed: phases
  int expected, issued;                          // bytes of this phase so far
  struct arrival arrival[2][ARRIVALS];                  // of the phase before and of this one, by the phase's lowest
                                                        // bit
  int arrivals[2];
  clock arrived, arrived_fenced, released, released_fenced;
} semaphore;

// What a fiber that waits on a semaphore has seen of it: phases, and its progress when it saw the last.
typedef struct watcher { int phases, when; bool waits; const void *pc; } watcher;

typedef struct named_barrier {
  int threads, wanted, generation;               // wanted: of the last who came
  uint64_t members;                              // fibers that have ever met here
  clock arrived, arrived_fenced, released, released_fenced;
} named_barrier;

enum wait_kind { WAIT_NOTHING, WAIT_SEM, WAIT_BARRIER, WAIT_PRODUCTS, WAIT_STORES, WAIT_ORDER };
typedef struct fiber {
  void *sp;
  char *stack;
  const ck_role *role;
  int block, rank;
  bool alive, group;                             // group: a warpgroup, whose elected thread is not all of it
  enum wait_kind wait;
  const void *on, *wait_pc;
  int64_t value;
  int phase;                                     // of the semaphore it waits for, or waited for last
  const semaphore *last_sem;
  clock seen, fenced;                            // of each thread about itself
  clock leader_seen, leader_fenced;              // of the elected thread, about the others too; the first two where
                                                 // !group
  int products_committed, stores_committed;
  int products_open;                             // issued since the last commit
  const void *product_pc, *store_pc;             // of the last
  int store_place;
  int fence;                                     // counts mma_fence; `work` what has happened since the last one
  bool fence_due;
  bool grid_waited, grid_over;                   // over: waited for all of the grid
  const void *late_fence;                        // a mutated fence that is still to be made
  int events;                                    // synchronising calls so far
  bool skip_next;
} fiber;

typedef struct operation {
  enum { EFFECT_LOAD, EFFECT_STORE, EFFECT_PRODUCT } kind;
  int fiber, ticket, sem, bytes;
  const void *pc;
  ck_effect run;
  _Alignas(16) char closure[CLOSURE];
} operation;

typedef struct run {
  const ck_kernel *kernel;
  const ck_request *request;
  const void *params;
  int blocks, fibers, components, sems;
  char *shared;
  size_t shared_bytes, mapped;
  void *host_sp;
  int current, alive;                            // current -1: initialising
  bool in_fiber;                                 // not in the scheduler
  uint64_t random;
  int patience;                                  // how likely an asynchronous effect is taken before a fiber, of 8
  long steps;
  bool failed;
  fiber fiber[MAX_FIBERS];
  semaphore sem[MAX_SEMS];
  watcher watcher[MAX_SEMS][MAX_FIBERS];
  int16_t *sem_at;                               // by (address in shared) / 8, -1: none
  named_barrier barrier[MAX_FIBERS][MAX_BARRIERS];
  operation op[MAX_OPS];
  int ops;
  const operation *effect;                       // that is being made
  uint16_t products_left[MAX_FIBERS][MAX_GROUPS], stores_left[MAX_FIBERS][MAX_GROUPS];   // by ticket
  const void *crash_frame[MAX_FRAMES];           // of the kernel's code, the innermost first
  int crash_frames;
  char *text;
  size_t text_size;
} run;
extern run ck;

// ---- clocks
static inline void clock_join(clock a, const int32_t *b) {
  for (int i = 0; i < ck.components; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
}
static inline int component(int fiber, int part) { return PER_FIBER * fiber + part; }
static inline int sem_component(int sem) { return PER_FIBER * ck.fibers + sem; }
clock clock_new(void);                           // zeros, freed with the run
void fiber_yield(void);                          // to the scheduler
static inline fiber *self(void) { return &ck.fiber[ck.current]; }

// ---- engine.c
void point(void);                                // something else may go on here
bool ready(const fiber *f);                      // may the fiber go on?
void wait_for(const void *pc, enum wait_kind kind, const void *on, int64_t value);
// A counter in global memory that blocks meet at; `before`: its value before the run.
typedef struct word { int *at, before; clock seen, fenced; } word;
enum { MAX_WORDS = 8192 };

// ---- sync.c
bool mutated(const void *pc, enum ck_mutation kind);
// Begins every synchronising call: notes it. False: leave it out.
bool begin(const void *pc, enum ck_op op, const void *at, int value);
void make_late_fence(void);                      // at the end of a synchronising call, where a mutant has put a fence
                                                 // off
void publish(clock seen, clock fenced);          // what the current fiber knows, and a new step of its own
void publish_leader(clock seen, clock fenced);   // what its elected thread knows
void learn(const int32_t *seen, const int32_t *fenced);
void learn_component(int c, int value, bool leader_only);
bool called_by(const void *pc, int width);
int sem_of(const void *pc, const void *at);      // -1, with a report, where there is none
void arrive(const void *pc, int sem, int warps, bool remote);
void sem_step(const void *pc, semaphore *s);     // completes the phase if nothing is missing

// ---- async.c
void words_reset(void);
void words_restore(void);                        // as they were before the run

// ---- shadow.c
enum access_flags { ACCESS_WRITE = 1, ACCESS_ASYNC = 2, ACCESS_LEADER = 4, ACCESS_OWN = 8 };
bool shadow_open(size_t bytes);
void shadow_reset(void);
// An access by the current fiber that is over at `value` of component `who`. False, with a report, if it breaks a rule.
bool shadow_access(const void *pc, const ck_region *r, int flags, int who, int value);
bool shadow_global(const void *pc, const void *p, size_t bytes, enum ck_global kind, int who, int value);

// ---- report.c
bool rule_on(enum ck_rule rule);
// The first report ends the run. In `format`, {s:N} stands for the semaphore or the place at offset N of a block's
// struct, {f:N} for fiber N.
__attribute__((format(printf, 5, 6))) void report(enum ck_rule rule, const void *pc, const void *other_pc,
                                                  int other_fiber, const char *format, ...);
void report_sem(const semaphore *s);             // the same, and what its last phases are made of
void report_place(int offset);                   // what the accesses are about, by its offset in the block's struct;
                                                 // before report()
void report_last_wait(void);                      // and what the current fiber's last wait was for; after
                                                  // report_place()
bool in_shared(const void *p);
int offset_in_block(const void *p);
int block_of(const void *p);
void event_add(const void *pc, enum ck_op op, const void *at, int value);
void events_reset(void);
const ck_event *event_of(int fiber, int index);  // the fiber's index-th synchronising call in the recorded run, NULL
                                                 // past the end
void events_keep(void);                          // the last run's events become the recorded ones
