// A thread that writes zeros into the accumulator of dq while the others compute: for all heads at once, before, it would be an eighth of the time of short
// sequences, and most of it would have to come back from memory. Included once `shared` and BLOCKS (of the cluster) are known; s.zeros is its.
#pragma once

// Heads (or parts of them) have numbers in the order of tasks. A task's thread sees to its share of the head p.lag after its own.
TILE void cleaner(const attention_bwd_params &p, shared &s, int) {
  int next, rank = BLOCKS == 1 ? 0 : cluster_rank();
  grid_wait();
  clear(s.zeros);
  fence_async();
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    int block, head = head_and_block(p, next, block) + p.lag;
    if (p.lag && head < p.batch * p.k_heads) {
      // Shares are counted in 16 stores and in 32 bits: a block may have 24 registers for this thread.
      uint32_t tiles = ((p.group - 1) * p.q_blocks + p.q_real) * (M * D / ZEROS / 16), shares = p.k_blocks * BLOCKS, share = block * BLOCKS + rank;
      float *to = p.dq_acc + (int64_t)head * p.group * p.q_blocks * (M * D);
      uint32_t i = (uint64_t)tiles * share / shares * 16, end = (uint64_t)tiles * (share + 1) / shares * 16;
      ROLLED for (; i < end; i++) tma_store(to + (int64_t)i * ZEROS, s.zeros);
      tma_store_wait<0, THREAD>();
      order_count<THREAD>(p.zeroed + head);
    }
    if (BLOCKS == 1) queue_release<THREAD>(s.queue, count);
    else cluster_queue_release<THREAD>(s.queue, count);
  }
}
// Thread (a loader), in front of a task's second step: nobody adds before that is loaded. Until its accumulator is there.
TILE void wait_for_zeros(const attention_bwd_params &p, const held &h) {
  int head = get(h.batch) * p.k_heads + get(h.part);
  if (p.lag && head >= p.lag) order_wait<THREAD>(p.zeroed + head, p.k_blocks * BLOCKS);
}
