// How the backward kernels walk: a task is a block of BN keys of one key head, its steps are the blocks of M query rows of the group's
// heads, or of a part of them, that see it. Included by the kernels once BN, M, DETERMINISTIC and FEATURES are known.
#pragma once

enum { WINDOWS = FEATURES > 0, PACKED = FEATURES > 1, EVERYTHING = FEATURES > 2 };
enum { SLOTS = 8 };   // a step's place is read up to two steps after its stage was released: more than STAGES + 2
// Where a step stands. The compute roles read it here instead of keeping it in registers.
struct place {
  int keys;        // keys from the block's first to the last there is
  int diagonal;    // query i of the step sees keys of the block up to i + diagonal
  int dq_block;    // index of the step's query block among all heads' blocks
  int turn;        // of this key block among those that add to dq_block; -1 for padding, which not every key block visits
  int rows;        // rows with FEATURES: the step's query rows before those of another sequence
  int lower, distance, row, key, head;   // rows with FEATURES: keys from i + lower on are seen; row - key of the first; these; batch * q_heads + head
};

struct task {
  int batch, k_head, key0, first, blocks, turn, steps;   // query blocks first .. first + blocks - 1 of each head of the group
  int real, base;                                        // query blocks of a head that have rows in them; first in lse2, delta, dq_acc of head 0
  sequence seq;
};
TILE bool is_empty(const task &t) { return PACKED && t.key0 >= t.seq.keys; }
TILE int in_memory(const attention_bwd_params &p, const task &t) { return PACKED && p.features.q_start ? 0 : t.batch; }

// Key heads go in sections whose q, dout and dq fit the L2; the blocks seen by most queries, which are the first keys, first.
TILE int head_and_block(const attention_bwd_params &p, int i, int &block) {
  int section = i / (p.l2_heads * p.k_blocks), r = i - section * p.l2_heads * p.k_blocks, left = p.batch * p.k_heads - section * p.l2_heads;
  int heads = left < p.l2_heads ? left : p.l2_heads;
  block = r / heads;
  return section * p.l2_heads + r - block * heads;
}
TILE task task_at(const attention_bwd_params &p, int i) {
  task t;
  int block, bh = head_and_block(p, i, block);
  t.batch = bh / p.k_heads;
  t.k_head = bh - t.batch * p.k_heads;
  t.key0 = block * BN;
  t.seq = {0, 0, p.q_rows, p.k_rows, p.diagonal, -UNMASKED};
  t.real = p.q_real;
  t.base = t.batch * p.q_heads * p.q_blocks;
  if (WINDOWS) {
    t.seq = sequence_of(p.features, PACKED, t.batch, p.q_rows, p.k_rows, p.diagonal);
    if (PACKED) t.real = t.seq.rows > M ? (t.seq.rows + M - 1) / M : 1;
    if (PACKED && p.features.q_start) t.base = padded_block(p.features.q_start, t.batch, M);
  }
  int first_row = t.key0 - t.seq.diagonal;          // the first query row that sees the block's first key
  t.first = first_row > 0 ? first_row / M : 0;
  if (t.first > t.real - 1) t.first = t.real - 1;
  int end = t.real;
  if (WINDOWS) {
    int last_row = t.key0 + BN - 1 - t.seq.lower;   // the last one that sees a key of the block
    if (last_row < 0) end = 0;
    else if (last_row / M + 1 < end) end = last_row / M + 1;
  }
  t.blocks = end - t.first;
  int least = p.group == 1 ? 2 : 1;                 // the pipeline needs two steps; the added block is padding (lse2 = inf) or masked
  if (t.blocks < least) t.blocks = least;
  // Without a mask, key blocks of one head start at different query blocks, so that their additions to dq rarely meet.
  t.turn = DETERMINISTIC || t.seq.diagonal < t.seq.keys || (WINDOWS && t.seq.lower > -UNMASKED) ? 0 : t.key0 / M % t.blocks;
  t.steps = t.blocks * p.group;
  return t;
}
TILE int draw(const attention_bwd_params &p, task_queue &q, uint32_t count, int task) {
  return queue_draw(q, count, task, p.counter, [&](int i) { return PACKED && i < p.tasks && is_empty(task_at(p, i)); });
}
// The first key block that visits a query block: task_at's `end`, solved for the key block.
TILE int first_visitor(const attention_bwd_params &p, int diagonal, int lower, int block) {
  int seen = block * M + lower - BN + 1, least = block - (p.group == 1 ? 1 : 0), added = least * M + diagonal;
  int a = seen > 0 ? (seen + BN - 1) / BN : 0, b = least > 0 && added > 0 ? (added + BN - 1) / BN : 0;
  return a < b ? a : b;
}
// A block of keys' place in the accumulators of dk and dv, in blocks of 64 keys.
TILE int acc_block(const attention_bwd_params &p, int batch, int part, int key0) {
  return (batch * p.k_heads + part) / p.parts * p.acc_blocks + key0 / 64;
}
// A task in shared memory: less for the roles to work out and to keep in registers. Two, as in the queue; the loader fills one once it was given
// the task, and makes it known with the task's k.
// own, rows: keys from the block's first, and query rows, to the end of a packed sequence; no end where dense, no keys where there are no rows.
struct held { int own, rows, steps, keys, row, part, batch, first, blocks, turn, real, base, q0, key0, diagonal, acc0, lower, distance, heads; };
TILE void put_held(held &h, const attention_bwd_params &p, const task &t) {
  put(h.steps, t.steps);
  put(h.keys, t.seq.keys - t.key0);          // from the block's first on
  put(h.row, t.seq.k0 + t.key0);             // the block in the maps: row, head, batch
  put(h.part, t.k_head);
  put(h.batch, in_memory(p, t));
  put(h.first, t.first);
  put(h.blocks, t.blocks);
  put(h.turn, t.turn);
  put(h.real, t.real);
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
// Warpgroup or warp. Rows from `rows` on of two tiles, which belong to other sequences or to none, become 0: 0 times what they hold may be NaN.
template<int W = WARPGROUP, int R> TILE void clear_rest(st<elem, R, D> &a, st<elem, R, D> &b, int rows) {
  if (rows >= R) return;
  clear_rows<W>(a, 0, rows);
  clear_rows<W>(b, 0, rows);
  fence_async();
}
// Warpgroup. A block of 64 keys of dk or dv, of which `keys` are the sequence's, leaves through a tile that nobody reads any more (whose store is left
// running), or is added to the other parts'.
template<int C> TILE void leave(const attention_grad &to, st<elem, 64, C> &tile, const rt<float, C> &x, int row, int head, int batch, int acc, int keys) {
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
// The task's key head; query head and block of a step.
TILE int key_head(const held &h, const attention_bwd_params &p) { return get(h.part) / p.parts; }
TILE int head_of(const held &h, const attention_bwd_params &p, int step) { return get(h.part) * p.group + step / get(h.blocks); }
TILE int block_of(const held &h, int step) {
  int blocks = get(h.blocks), i = step % blocks + get(h.turn);
  return get(h.first) + (i < blocks ? i : i - blocks);
}
// Whether none of the second warpgroup's 64 keys is seen by the first 64 rows of a task's first step, or of the first one's by the last 64 rows of its last.
// (Where the first warpgroup does not see the first rows, nobody does, and likewise for the second and the last.)
TILE bool begins_late(const held &h, int wg) { return BN == 128 && wg > 0 && get(h.first) * M + 63 + get(h.diagonal) - get(h.key0) < 64; }
TILE bool ends_early(const held &h, int wg) {
  return BN == 128 && WINDOWS && wg == 0 && get(h.steps) > 2 && (get(h.first) + get(h.blocks)) * M - 64 + get(h.lower) - get(h.key0) > 63;
}
// Thread (the loader), before it makes the step's stage full.
TILE void put_place(place &at, const attention_bwd_params &p, const held &h, int head, int block) {
  int key0 = get(h.key0), diagonal = get(h.diagonal), lower = WINDOWS ? get(h.lower) : 0;
  put(at.keys, get(h.keys));
  put(at.diagonal, block * M + diagonal - key0);
  put(at.dq_block, get(h.base) + head * p.q_blocks + block);
  put(at.turn, block >= get(h.real) || (WINDOWS && !p.order) ? -1 : key0 / BN - (WINDOWS ? first_visitor(p, diagonal, lower, block) : 0));
  if (WINDOWS) put(at.lower, block * M + lower - key0);
  if (PACKED) put(at.rows, get(h.rows) - block * M);
  if (EVERYTHING) {
    put(at.distance, block * M + get(h.distance) - key0);
    put(at.row, block * M);
    put(at.key, key0);
    put(at.head, get(h.heads) + head);
  }
}
