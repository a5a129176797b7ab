// The protocol checker's runtime. A kernel compiled with the backend tile/check calls it for everything that
// synchronises or touches memory.
//
// All blocks of a launch run on one thread, every member of a role as a fiber. A seeded scheduler picks what goes on: a
// fiber, or an asynchronous operation (copy, store, matrix product) that has been issued and now takes effect. Vector
// clocks decide what an access must be ordered after, not who was fast. engine.h has the components, shadow.c the
// rules, and docs/protocol.md explains both.
//
// `pc` is the address of the call in the kernel's code, inlined as it is. Its debug information gives the chain of
// source lines.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

// ---- what a kernel calls
// `bytes` in each of `rows` rows, `pitch` bytes apart
typedef struct ck_region { const void *p; int rows, pitch, bytes; } ck_region;
typedef void (*ck_effect)(void *closure);

// State of a register tile or vector: tickets of the product groups that still write or read it (0: none).
// product: the last that used it. touched: the mma_fence after which ordinary code used it last, counted from 1.
typedef struct ck_register { const void *product; int32_t writer, reader, touched; int16_t fiber; bool valid;
    } ck_register;

void ck_reads(const void *pc, int width, ck_register *r);     // width: of the role that calls, here and below
void ck_writes(const void *pc, int width, ck_register *r);
void ck_register_ends(ck_register *r);                        // its scope is left

void ck_reads_shared(const void *pc, const ck_region *r);
void ck_writes_shared(const void *pc, const ck_region *r);
void ck_parked(const void *pc, const ck_region *r, bool writes);   // each thread its own part: a parked
                                                                   // vector, or its columns of a row of a tile
enum ck_global { CK_GLOBAL_READ, CK_GLOBAL_WRITE, CK_GLOBAL_ADD };
void ck_global(const void *pc, const void *p, size_t bytes, enum ck_global kind);
void ck_bounds(const void *pc, bool inside, const char *what, const void *tile);
void ck_begins_at(const void *pc, int at, int unit, const void *tile);
void ck_called_by(const void *pc, int width);
// what the next copy or store touches in global memory
void ck_global_load(const void *pc, const void *p, size_t bytes, const void *sem);
void ck_global_store(const void *pc, const void *p, size_t bytes);

// `closure` is copied; the effect comes later.
void ck_load(const void *pc, const ck_region *to, const void *sem, int bytes, ck_effect run, const void *closure,
             size_t size);
void ck_send(const void *pc, const ck_region *from, const ck_region *to, const void *sem, int bytes, ck_effect run,
             const void *closure, size_t size);
void ck_store(const void *pc, const ck_region *from, ck_effect run, const void *closure, size_t size);
// d (+)= a b. Operand a is a register tile or a region, the other one NULL.
void ck_product(const void *pc, ck_register *d, bool accumulates, ck_register *a_register, const ck_region *a,
                const ck_region *b, ck_effect run, const void *closure, size_t size);

void ck_sem_init(const void *pc, const void *sem, int count);
void ck_sem_wait(const void *pc, const void *sem, uint32_t phase);
enum ck_where { CK_LOCAL, CK_REMOTE, CK_ORDERED };            // not local: a semaphore of any block of the cluster;
                                                              // ordered: like a local one
void ck_sem_arrive(const void *pc, const void *sem, int width, enum ck_where where);
void ck_sem_expect(const void *pc, const void *sem, uint32_t bytes);
void ck_bar(const void *pc, int id, int threads, bool waits);
void ck_wg_sync(const void *pc);
void ck_fence_async(const void *pc);
void ck_mma_fence(const void *pc);
void ck_mma_commit(const void *pc);
void ck_mma_wait(const void *pc, int groups, ck_register **named, int count);
void ck_store_wait(const void *pc, int width, int groups, bool written);
void ck_order_wait(const void *pc, int width, const int *g, int value);
void ck_order_pass(const void *pc, int *g, int value);
void ck_order_count(const void *pc, int *g);
void ck_order_tell(const void *pc, int *g);
void ck_grid_wait_part(const void *pc, int width, const int *g, int value);
int ck_atomic_next(const void *pc, int *counter);
void ck_grid_wait(const void *pc);
int ck_block_index(void);
int ck_block_count(void);
int ck_cluster_rank(void);
const void *ck_at_rank(const void *p, int rank);              // the same object in block `rank` of the cluster

// ---- what the backend's block tells (block.h)
typedef struct ck_role { void (*body)(const void *params, void *shared, int index); int role, index, width; } ck_role;
typedef struct ck_kernel {
  size_t shared_bytes, stride;          // of one block; distance of two blocks' structs
  int cluster, fibers, dependent;
  ck_role role[64];                     // of one block
  void (*init)(void *shared);
  bool (*unless)(const void *params);   // every fiber asks; or NULL
  void (*arena)(char *shared, size_t bytes);   // where the blocks' shared structs lie, before anything runs
} ck_kernel;

// ---- what the tool calls
enum ck_mutation {
  CK_NONE, CK_DROP, CK_DOUBLE, CK_PHASE, CK_BYTES_MORE, CK_BYTES_LESS, CK_COUNT_MORE, CK_COUNT_LESS, CK_GROUP_LESS,
  CK_STAGE, CK_EARLY, CK_FENCE_LATE
};
enum ck_op {
  CK_OP_INIT, CK_OP_WAIT, CK_OP_ARRIVE, CK_OP_EXPECT, CK_OP_BAR_SYNC, CK_OP_BAR_ARRIVE, CK_OP_WG_SYNC,
  CK_OP_FENCE_ASYNC, CK_OP_MMA_FENCE, CK_OP_COMMIT,
  CK_OP_MMA_WAIT, CK_OP_STORE_WAIT, CK_OP_ORDER_WAIT, CK_OP_ORDER_PASS, CK_OP_ORDER_COUNT, CK_OP_LOAD, CK_OP_STORE,
  CK_OP_PRODUCT, CK_OP_ATOMIC, CK_OP_GRID_WAIT
};
enum ck_rule {
  CK_UNINITIALISED, CK_RACE, CK_OVERWRITE, CK_FENCE, CK_FENCE_READ, CK_IN_FLIGHT, CK_UNNAMED, CK_MMA_FENCE, CK_COUNT,
  CK_BYTES, CK_EXIT, CK_BARRIER,
  CK_DEADLOCK, CK_BOUNDS, CK_LIFETIME, CK_INIT, CK_GLOBAL_RACE, CK_CRASH, CK_ELECTED, CK_PHASE_SEEN, CK_GRID, CK_RULES
};
// Global memory that the kernel in front has written, and the counter that it told it by (order_tell).
typedef struct ck_told { const char *p; size_t bytes; const int *mark; } ck_told;
typedef struct ck_request {
  uint64_t seed;
  uint32_t rules_off;                   // bit per rule
  uint32_t mutation;                    // enum ck_mutation
  const void *const *sites;             // calls that are mutated, sorted by address
  int site_count;
  int32_t ordered;                      // additions to global memory must be ordered too (deterministic kernels)
  int32_t told_count;
  const ck_told *told;                  // in the order of addresses; who reads of it has waited for the counter
} ck_request;
// offset: of the semaphore in its block's struct, or -1; value: phase, bytes, arrivals (negative: at any block of the
// cluster), groups ...
typedef struct ck_event { const void *pc; int32_t op, fiber, block, offset, value; } ck_event;

// Run all blocks once. 0: no report. Else `text` holds the report as JSON (always terminated).
int ck_run(const ck_kernel *kernel, const ck_request *request, const void *params, int blocks, char *text, size_t size);
// What the last run told, as a request wants it; at most `most`. Returns how much there was.
int ck_told_of(ck_told *told, int most);
// Every synchronisation and asynchronous issue of the last run, in the order of execution; at most `most`. Returns how
// many there were.
int ck_events(ck_event *events, int most);
long ck_steps(void);                    // of the last run's scheduler
#ifdef __cplusplus
}
#endif
