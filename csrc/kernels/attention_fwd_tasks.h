// What attention forward works on: a task is a block of BM query rows of one (batch, head), its steps are the blocks of BN keys that these see.
// Included by the kernel once BM, BN and FEATURES are known.
#pragma once

struct task {
  int batch, head, row0;       // row0 and keys count in the sequence
  int first, steps;            // key blocks first .. first + steps - 1
  sequence seq;
};
TILE bool is_empty(const task &t) { return FEATURES && t.row0 >= t.seq.rows; }   // a packed sequence that is shorter than the longest

// Heads go in sections whose k and v fit the L2; the row blocks with most keys of a section first.
TILE task task_at(const attention_fwd_params &p, int i) {
  task t;
  int section = i / (p.l2_heads * p.q_blocks), r = i - section * p.l2_heads * p.q_blocks, left = p.batch * p.q_heads - section * p.l2_heads;
  int heads = left < p.l2_heads ? left : p.l2_heads, block = p.q_blocks - 1 - r / heads, bh = section * p.l2_heads + r % heads;
  t.batch = bh / p.q_heads;
  t.head = bh - t.batch * p.q_heads;
  t.row0 = block * BM;
  t.seq = {0, 0, p.q_rows, p.k_rows, p.diagonal, -UNMASKED};
  t.first = 0;
  if (FEATURES) {
    t.seq = sequence_of(p.features, t.batch, p.q_rows, p.k_rows, p.diagonal);
    t.first = t.row0 + t.seq.lower > 0 ? (t.row0 + t.seq.lower) / BN : 0;
  }
  int keys = t.row0 + BM + t.seq.diagonal < t.seq.keys ? t.row0 + BM + t.seq.diagonal : t.seq.keys, blocks = (keys + BN - 1) / BN - t.first;
  t.steps = keys > 0 && blocks > 1 ? blocks : 1;   // at least one block, all masked where a row block sees no key
  return t;
}
TILE int draw(const attention_fwd_params &p, task_queue &q, uint32_t count, int task) {
  return queue_draw(q, count, task, p.counter, [&](int i) { return FEATURES && i < p.tasks && is_empty(task_at(p, i)); });
}
TILE int in_memory(const attention_fwd_params &p, const task &t) { return FEATURES && p.features.q_start ? 0 : t.batch; }   // batch of the maps

TILE void mask(rt<float, BN> &x, const task &t, int row0, int col0) {
  int keys = t.seq.keys - col0, diagonal = row0 + t.seq.diagonal - col0, lower = FEATURES ? row0 + t.seq.lower - col0 : -UNMASKED;
  if (diagonal < BN - 1 || keys < BN || (FEATURES && lower > -64))
    map_rc(x, [=](float a, int row, int col) { return col < keys && col <= row + diagonal && (!FEATURES || col >= row + lower) ? a : -infinity(); });
}
