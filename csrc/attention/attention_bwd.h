// What the kernels of attention backward share: how they walk over keys and queries, and what they do with a tile.
// These are plain functions of tiles, tasks, steps and scalars. Shared memory, barriers, who owns what and the order of
// the products are each kernel's own and stand in its file.
//
// A task (key_task) is a block of BN keys of one key head. Its steps are the blocks of M query rows that see it, of all
// query heads that share the key head. Where such tasks would be too few, the query heads are dealt out to several
// tasks, the `parts`, whose dk and dv are added up. M and BN are the kernel's tile. D (columns of dq and dk),
// DETERMINISTIC and FEATURES come from the row.
//
// docs/02-tour.md follows a stage through attention_bwd.cu, and says what the kernels of pairs do otherwise.
#pragma once
#include "attention/attention_features.h"

// ---- the walk

enum { SLOTS = 8 };   // more than q's stages + 1: the info of a step may be read when its stage and the next step's
                      // have been released
// What the compute roles have to know of a step. They read it here instead of keeping it in registers.
struct step_info {
  int keys;        // keys from the block's first to the last there is
  int diagonal;    // query i of the step sees keys of the block up to i + diagonal
  int dq_block;    // index of the step's query block among all heads' blocks
  int position;    // where additions to dq_block keep an order: how many key blocks add before this one. -1 for
                   // padding, which not every key block visits
  int rows;        // PACKED: the step's query rows before those of another sequence
  int lower;       // WINDOWS: query i of the step sees keys of the block from i + lower on
  int distance, row, key, head;   // EVERYTHING: row - key of the step's first ones, counted from the sequence's ends;
                                  // these two; batch * q_heads + head
};

struct key_task {
  int batch, part, key0;
  int first, blocks, rotation, steps;   // query blocks first .. first + blocks - 1 of each head, of which block
                                        // first + rotation is the first
  int q_blocks;                         // query blocks of a head that have rows in them; the next one is padding
  int base;                             // the batch's or sequence's first query block in lse2, delta and dq_acc: of
                                        // head 0
  sequence seq;
};
TILE bool is_empty(const key_task &t) { return PACKED && t.key0 >= t.seq.keys; }
// batch of the maps
TILE int in_memory(const attention_bwd_params &p, const key_task &t) {
  return PACKED && p.features.q_start ? 0 : t.batch;
}

// The order of tasks. Key heads go in sections whose q, dout and dq fit the L2. In a section the blocks that most
// queries see come first; these are the first keys.
TILE int head_and_block(const attention_bwd_params &p, int i, int &block) {
  int section = i / (p.l2_heads * p.k_blocks), r = i - section * p.l2_heads * p.k_blocks,
      left = p.batch * p.k_heads - section * p.l2_heads;
  int heads = left < p.l2_heads ? left : p.l2_heads;
  block = r / heads;
  return section * p.l2_heads + r - block * heads;
}
template<int M, int BN> TILE key_task task_at(const attention_bwd_params &p, int i) {
  key_task t;
  int block, bh = head_and_block(p, i, block);
  t.batch = bh / p.k_heads;
  t.part = bh - t.batch * p.k_heads;
  t.key0 = block * BN;
  t.seq = {0, 0, p.q_rows, p.k_rows, p.diagonal, -UNMASKED};
  t.q_blocks = p.q_blocks;
  t.base = t.batch * p.q_heads * p.q_padded;
  if (WINDOWS) {
    t.seq = sequence_of(p.features, PACKED, t.batch, p.q_rows, p.k_rows, p.diagonal);
    if (PACKED) t.q_blocks = t.seq.rows > M ? (t.seq.rows + M - 1) / M : 1;
    if (PACKED && p.features.q_start) t.base = padded_block(p.features.q_start, t.batch, M);
  }
  int first_row = t.key0 - t.seq.diagonal;          // the first query row that sees the block's first key
  t.first = first_row > 0 ? first_row / M : 0;
  if (t.first > t.q_blocks - 1) t.first = t.q_blocks - 1;
  int end = t.q_blocks;
  if (WINDOWS) {
    int last_row = t.key0 + BN - 1 - t.seq.lower;   // the last one that sees a key of the block
    if (last_row < 0) end = 0;
    else if (last_row / M + 1 < end) end = last_row / M + 1;
  }
  t.blocks = end - t.first;
  int least = p.group == 1 ? 2 : 1;                 // the pipeline needs two steps; the added block is padding (lse2 =
                                                    // inf) or masked
  if (t.blocks < least) t.blocks = least;
  // Without a mask, key blocks of one head start at different query blocks, so that their additions to dq rarely meet.
  t.rotation = DETERMINISTIC || t.seq.diagonal < t.seq.keys || (WINDOWS && t.seq.lower > -UNMASKED) ?
      0 : t.key0 / M % t.blocks;
  t.steps = t.blocks * p.group;
  return t;
}
template<int M, int BN> TILE int draw(const attention_bwd_params &p, task_queue &q, uint32_t count, int task) {
  return queue_draw(q, count, task, p.counter,
                    [&](int i) { return PACKED && i < p.tasks && is_empty(task_at<M, BN>(p, i)); });
}
// The first key block that visits a query block: task_at's `end`, solved for the key block.
template<int M, int BN> TILE int first_visitor(const attention_bwd_params &p, int diagonal, int lower, int block) {
  int seen = block * M + lower - BN + 1, least = block - (p.group == 1 ? 1 : 0), added = least * M + diagonal;
  int a = seen > 0 ? (seen + BN - 1) / BN : 0, b = least > 0 && added > 0 ? (added + BN - 1) / BN : 0;
  return a < b ? a : b;
}
// Where a block of keys begins in the accumulators of dk and dv, in blocks of 64 keys.
TILE int acc_block(const attention_bwd_params &p, int batch, int part, int key0) {
  return (batch * p.k_heads + part) / p.parts * p.acc_blocks + key0 / 64;
}

// A task as the roles read it from shared memory, so that they neither work it out again nor keep it in registers. The
// loader fills it when it has drawn the task. own: keys of a packed sequence from the block's first on, 0 where the
// sequence has no rows; rows: query rows of the sequence. Both are UNMASKED where the call is dense.
struct key_task_smem {
  int own, rows, steps, keys, row, part, batch, first, blocks, rotation, q_blocks, base, q0, key0, diagonal, acc0,
      lower, distance, heads;
};
template<int BN> TILE void put_task(key_task_smem &h, const attention_bwd_params &p, const key_task &t) {
  put(h.steps, t.steps);
  put(h.keys, t.seq.keys - t.key0);          // from the block's first on
  put(h.row, t.seq.k0 + t.key0);             // the block in the maps: row, head, batch
  put(h.part, t.part);
  put(h.batch, in_memory(p, t));
  put(h.first, t.first);
  put(h.blocks, t.blocks);
  put(h.rotation, t.rotation);
  put(h.q_blocks, t.q_blocks);
  put(h.base, t.base);
  put(h.q0, t.seq.q0);
  put(h.key0, t.key0);
  put(h.diagonal, t.seq.diagonal);
  if (WINDOWS) put(h.lower, t.seq.lower);
  if (PACKED) {
    bool packed = p.features.q_start;
    put(h.acc0, packed ? padded_block(p.features.k_start, t.batch, BN) * (BN / 64) : 0);
    put(h.own, !packed ? UNMASKED : t.seq.rows > 0 ? t.seq.keys - t.key0 : 0);
    put(h.rows, packed ? t.seq.rows : UNMASKED);
  }
  if (EVERYTHING) {
    put(h.distance, t.seq.keys - t.seq.rows);
    put(h.heads, t.batch * p.q_heads);         // before this sequence's
  }
}
// The task's key head; query head and block of a step.
TILE int key_head(const key_task_smem &h, const attention_bwd_params &p) { return get(h.part) / p.parts; }
TILE int head_of(const key_task_smem &h, const attention_bwd_params &p, int step) {
  return get(h.part) * p.group + step / get(h.blocks);
}
TILE int block_of(const key_task_smem &h, int step) {
  int blocks = get(h.blocks), i = step % blocks + get(h.rotation);
  return get(h.first) + (i < blocks ? i : i - blocks);
}
// Thread (the loader), before it makes the step's stage full.
template<int M, int BN>
TILE void put_step(step_info &info, const attention_bwd_params &p, const key_task_smem &h, int head, int block) {
  int key0 = get(h.key0), diagonal = get(h.diagonal), lower = WINDOWS ? get(h.lower) : 0;
  put(info.keys, get(h.keys));
  put(info.diagonal, block * M + diagonal - key0);
  put(info.dq_block, get(h.base) + head * p.q_padded + block);
  put(info.position, block >= get(h.q_blocks) || (WINDOWS && !p.order) ?
      -1 : key0 / BN - (WINDOWS ? first_visitor<M, BN>(p, diagonal, lower, block) : 0));
  if (WINDOWS) put(info.lower, block * M + lower - key0);
  if (PACKED) put(info.rows, get(h.rows) - block * M);
  if (EVERYTHING) {
    put(info.distance, block * M + get(h.distance) - key0);
    put(info.row, block * M);
    put(info.key, key0);
    put(info.head, get(h.heads) + head);
  }
}

// ---- loads: all by one thread, which has said how many bytes it expects

// A step's rows of q with lse2, or of dout with delta: `first` is the first of these numbers.
template<int M, int C>
TILE void load_step(st<elem, M, C> &tile, sv<M> &numbers, const gmap &map, sem &full, int row, int head, int batch,
                    const float *from, int64_t first) {
  tma_load(tile, map, full, row, 0, head, batch);
  tma_load(numbers, from + first, full);
}
// In a pair of blocks each loads half of a step's columns for both, and all of its numbers. Each also adds half of the
// columns of dq.
TILE int other_rank() { return cluster_rank() ^ 1; }
TILE int first_column() { return cluster_rank() * (D / 2); }   // of this block's half
template<int M, int C>
TILE void load_step_of_pair(st<elem, M, C> &tile, sv<M> &numbers, const gmap &map, sem &full, int row, int head,
                            int batch, const float *from, int64_t first) {
  static_assert(C == D, "the halves are those of dq");
  tma_load_cols_multicast<C / 2>(tile, first_column(), map, full, row, first_column(), head, batch, 3);   // 3: to both
  tma_load(numbers, from + first, full);
}

// ---- a step's arithmetic, keys by queries

// Scores to probabilities: 2^(c x - lse2), 0 where the query does not see the key. `keys`, `diagonal` and `lower` are
// those of step_info, counted from the tile's first key and query.
template<int N>
TILE void probabilities(rt<float, N> &x, const sv<N> &lse2, float c, int keys, int diagonal, int lower = -UNMASKED) {
  if (diagonal < 63) triu(x, -diagonal, -infinity());
  if (WINDOWS && lower > -N) tril(x, -lower, -infinity());
  if (keys < 64) map_rc(x, [=](float a, int key, int) { return key < keys ? a : -infinity(); });
  map_col(x, lse2, [=](float a, float l) { return fast_exp2(fused(a, c, -l)); });
}
// dp to ds: prob (f dp - delta); f: ds_scale, which delta has too.
template<int N, class Prob> TILE void score_gradient(rt<float, N> &dp, const Prob &prob, const sv<N> &delta, float f) {
  map_col(dp, prob, delta, [=](float a, float b, float d) { return b * fused(a, f, -d); });
}

// ---- dq, in global memory

// Warpgroup. Where tiles of dq are added in a fixed order: the step's position in that order, else -1.
TILE int position_of(const step_info &info) { return DETERMINISTIC ? get(info.position) : -1; }
// Warpgroup. Adds a tile of dq, the `tile`-th of all, when all before it in the order have added. These belong to tasks
// that were drawn before: the key blocks of a head are drawn in the order of their keys.
TILE void add_dq(const attention_bwd_params &p, int64_t tile, int position, const rt<float, 64> &dq) {
  if (position >= 0) order_wait(p.order + tile, position);
  add_acc(p.dq_acc + tile * 64 * 64, dq);
  if (position >= 0) order_pass(p.order + tile, position + 1);
}
// The body of a role of one thread, which writes zeros into the accumulator of dq while the others compute. Zeroing all
// heads before the kernel would cost an eighth of the time of short sequences, and most of the zeros would have to come
// back from memory. Heads (or parts of them) have numbers in the order of tasks. A task's thread writes its share of
// the zeros of the head p.lag after its own. B: blocks of the cluster. `zeros` is this role's own.
template<int M, int B, int N> TILE void write_zeros(const attention_bwd_params &p, sv<N> &zeros, task_queue &queue) {
  int next, rank = B == 1 ? 0 : cluster_rank();
  grid_wait();
  clear(zeros);
  fence_async();
  for (uint32_t count = 0; (next = queue_take(queue, count)) < p.tasks; count++) {
    int block, head = head_and_block(p, next, block) + p.lag;
    if (p.lag && head < p.batch * p.k_heads) {
      // Shares are counted in 16 stores and in 32 bits: a block may have 24 registers for this thread.
      uint32_t tiles = ((p.group - 1) * p.q_padded + p.q_blocks) * (M * D / N / 16), shares = p.k_blocks * B,
          share = block * B + rank;
      float *to = p.dq_acc + (int64_t)head * p.group * p.q_padded * (M * D);
      uint32_t i = (uint64_t)tiles * share / shares * 16, end = (uint64_t)tiles * (share + 1) / shares * 16;
      ROLLED for (; i < end; i++) tma_store(to + (int64_t)i * N, zeros);
      tma_store_wait<0, THREAD>();
      order_count<THREAD>(p.zeroed + head);
    }
    if (B == 1) queue_release<THREAD>(queue, count);
    else cluster_queue_release<THREAD>(queue, count);
  }
}
// Thread (a loader), before it loads a task's second step: nobody adds to dq before that is loaded. Waits until the
// zeros of the task's head are there.
template<int B> TILE void wait_for_zeros(const attention_bwd_params &p, const key_task_smem &h) {
  int head = get(h.batch) * p.k_heads + get(h.part);
  if (p.lag && head >= p.lag) order_wait<THREAD>(p.zeroed + head, p.k_blocks * B);
}

// ---- dk and dv

// Warpgroup. Stores a block of 64 keys of dk or dv, of which `keys` are the sequence's. It leaves through a tile that
// nobody reads any more, and the store is not waited for. With several parts it is added to the accumulator instead.
template<int C>
TILE void leave(const attention_grad &to, st<elem, 64, C> &tile, const rt<float, C> &x, int row, int head, int batch,
                int acc, int keys) {
  bool whole = !PACKED || keys >= 64;   // else the next sequence's keys follow
  if (to.acc) {
    add_acc(to.acc + (int64_t)acc * 64 * D, x);
    return;
  }
  if (!whole) store_first((elem *)to.data + row * to.row + head * to.head, to.row, x, keys, to.columns);
  store(tile, x);
  fence_async();
  wg_sync();
  if (whole) tma_store(to.map, tile, row, 0, head, batch);
}
// The same of a dense task: its block-th 64 keys.
template<int C>
TILE void leave(const attention_grad &to, st<elem, 64, C> &tile, const rt<float, C> &x, const attention_bwd_params &p,
                const key_task &t, int block) {
  leave(to, tile, x, t.key0 + block * 64, t.part / p.parts, t.batch, acc_block(p, t.batch, t.part, t.key0) + block, 64);
}
