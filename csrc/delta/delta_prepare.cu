// What the pass over the sequence (delta_sweep.cu) needs of each chunk and head and what does not depend on the state:
// M^T and P^T of delta_prepare.h, for all chunks at once. Tasks are chunks and heads of v, those of one head of k side
// by side, since they read the same q and k. A block takes every n-th task.
// Roles: a loader thread; SCANS warps: gates -> vectors, they also clear the next packed row's steps; PREPS warpgroups;
// each of these every SCANS-th or PREPS-th task of the block.
//
// Registers of a thread of these: three tiles of 32, an operand of 12.
#include "delta/delta_prepare.h"
#include "tile/channels.h"

// D: columns of q and k. PREPS, SCANS, STAGES, *_REGS
static_assert(STAGES % SCANS == 0, "a stage has one scan warp");
typedef st<elem, Q, D> wide;
struct shared {
  wide k[STAGES], q[STAGES];
  square p[PREPS];
  tri<inner> scratch[PREPS];              // then m
  chunk_vectors vec[STAGES];
  ring<STAGES, ASYNC_READS> inputs;       // full: the bytes, and the scan warp
  sem loaded[STAGES];                     // the tiles are there, where they are to be cleared
};
TILE square &m_of(shared &s, int index) { return in_place_of<square>(s.scratch[index]); }
typedef delta_prepare_params params;

TILE bool is_done(const params &p) { return was_taken(p.taken); }
TILE void init(shared &s) {
  ring_init(s.inputs, arrivals(1, 1, 0), arrivals(0, 0, 1));
  for (int i = 0; i < STAGES; i++) sem_init(s.loaded[i], arrivals(1, 0, 0));
}

struct task { row_task t; int place; };
TILE int task_count(const params &p) { return p.batches * p.rows.places * p.rows.heads; }
TILE task task_at(const params &p, int i) {
  int heads = p.rows.heads, chunk = i / heads, head = i - chunk * heads, row = chunk / p.rows.places;
  int place = chunk - row * p.rows.places;
  chunk_steps c = steps_at(p.rows, place);
  return {{row, row, head, head / p.rows.group_heads, c.step, c.end, 0, 0}, place};
}

// The bytes of a chunk that runs over complete `loaded`, those of others `full`. The loader arrives at both.
TILE void loader(const params &p, shared &s, int) {
  grid_wait();
  ring_pos at = {};
  int tasks = task_count(p);
  for (int i = block_index(); i < tasks; i += block_count()) {
    task b = task_at(p, i);
    const row_task &t = b.t;
    bool over = runs_over(p.rows, t.first, t.end);
    sem &full = over ? s.loaded[at.stage] : s.inputs.full[at.stage];
    ring_acquire(s.inputs, at);
    sem_expect(full, 2 * tile_bytes(s.k[0]));
    tma_load(s.k[at.stage], p.k, full, t.first, 0, t.key_head, t.batch);
    tma_load(s.q[at.stage], p.q, full, t.first, 0, t.key_head, t.batch);
    sem_arrive<THREAD>(over ? s.inputs.full[at.stage] : s.loaded[at.stage]);
    ring_next(s.inputs, at);
  }
}

// The next task's gates are under way while this one's are worked on.
TILE void scan(const params &p, shared &s, int index) {
  grid_wait();
  int tasks = task_count(p), first = block_index() + index * block_count(), stride = SCANS * block_count();
  given_steps next;
  task b;
  if (first < tasks) {
    b = task_at(p, first);
    load_given(next, p.rows, p.gates, b.t, b.t.first);
  }
  for (int n = index, i = first; i < tasks; n += SCANS, i += stride) {
    row_task t = b.t;
    ring_pos at = ring_at<STAGES>(n);
    ring_acquire(s.inputs, at);
    put_vectors(s.vec[at.stage], next, p.gates, t.head, p.scale);
    if (i + stride < tasks) {
      b = task_at(p, i + stride);
      load_given(next, p.rows, p.gates, b.t, b.t.first);
    }
    sem_wait(s.loaded[at.stage], at.phase);
    if (runs_over(p.rows, t.first, t.end)) {
      clear_rows<WARP>(s.k[at.stage], 0, t.end - t.first);
      clear_rows<WARP>(s.q[at.stage], 0, t.end - t.first);
      fence_async();
    }
    sem_arrive<WARP>(s.inputs.full[at.stage]);
  }
}

TILE void prepare(const params &p, shared &s, int index) {
  grid_wait();
  int tasks = task_count(p);
  for (int n = index, i = block_index() + index * block_count(); i < tasks; n += PREPS, i += PREPS * block_count()) {
    task b = task_at(p, i);
    const row_task &t = b.t;
    ring_pos at = ring_at<STAGES>(n);
    chunk_vectors &v = s.vec[at.stage];
    rt<float, Q> reads, writes, inverse;
    ring_wait(s.inputs, at);
    begin_pairs(reads, writes, s.k[at.stage], s.q[at.stage]);
    tma_store_wait_read();
    wg_sync();                            // m and p of the task before have left
    mma_wait<0>(reads, writes);
    make_pairs(reads, writes, v, false);
    ring_release(s.inputs, at);
    store(s.p[index], reads);
    fence_async();
    invert(inverse, writes, s.scratch[index]);
    tma_store(p.p, s.p[index], b.place * Q, 0, t.head, t.row);
    wg_sync();                            // everybody has read the scratch
    store_carried(m_of(s, index), inverse);
    fence_async();
    wg_sync();
    tma_store(p.m, m_of(s, index), b.place * Q, 0, t.head, t.row);
  }
  tma_store_wait_read();
}

typedef block<params, shared, init, role<prepare, WARPGROUP, PREPS, PREP_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<scan, WARP, SCANS, LOAD_REGS>, DEPENDENT, FOLLOWED, UNLESS<is_done>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, Q, PREPS)
