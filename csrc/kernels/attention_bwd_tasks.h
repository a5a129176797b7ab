// How the backward kernels walk: a task is a block of BN keys of one key head, its steps are the blocks of M query rows of the group's
// heads that see it. Included by the kernels once BN, M and DETERMINISTIC are known.
#pragma once

enum { SLOTS = 8 };   // a step's place is read up to two steps after its stage was released: more than STAGES + 2
// Where a step stands. The compute roles read it here instead of keeping it in registers.
struct place {
  int keys;        // keys from the block's first to the last there is
  int diagonal;    // query i of the step sees keys of the block up to i + diagonal
  int dq_block;    // index of the step's query block among all heads' blocks
  int turn;        // of this key block among those that add to dq_block; -1 for padding, which not every key block visits
};

struct task { int batch, k_head, key0, first, blocks, turn, steps; };   // query blocks first .. first + blocks - 1 of each head of the group

// Key heads go in sections whose q, dout and dq fit the L2; the blocks seen by most queries, which are the first keys, first.
TILE task task_at(const attention_bwd_params &p, int i) {
  task t;
  int section = i / (p.l2_heads * p.k_blocks), r = i - section * p.l2_heads * p.k_blocks, left = p.batch * p.k_heads - section * p.l2_heads;
  int heads = left < p.l2_heads ? left : p.l2_heads, bh = section * p.l2_heads + r % heads;
  t.batch = bh / p.k_heads;
  t.k_head = bh - t.batch * p.k_heads;
  t.key0 = r / heads * BN;
  int first_row = t.key0 - p.diagonal;              // the first query row that sees the block's first key
  t.first = first_row > 0 ? first_row / M : 0;
  if (t.first > p.q_real - 1) t.first = p.q_real - 1;
  t.blocks = p.q_real - t.first;
  if (p.group == 1 && t.blocks < 2) t.blocks = 2;   // the pipeline needs two steps; the added block is padding (lse2 = inf)
  // Without a mask, key blocks of one head start at different query blocks, so that their additions to dq rarely meet.
  t.turn = DETERMINISTIC || p.diagonal < p.k_rows ? 0 : t.key0 / M % t.blocks;
  t.steps = t.blocks * p.group;
  return t;
}
TILE int head_of(const task &t, const attention_bwd_params &p, int step) { return t.k_head * p.group + step / t.blocks; }
TILE int block_of(const task &t, int step) {
  int i = step % t.blocks + t.turn;
  return t.first + (i < t.blocks ? i : i - t.blocks);
}
// Thread (the loader), before it makes the step's stage full.
TILE void put_place(place &at, const attention_bwd_params &p, const task &t, int block, int64_t dq_block) {
  put(at.keys, p.k_rows - t.key0);
  put(at.diagonal, block * M + p.diagonal - t.key0);
  put(at.dq_block, (int)dq_block);
  put(at.turn, block < p.q_real ? t.key0 / BN : -1);
}
