// What feeds the two blocks of attention_bwd_wide.cu: loads, of which each block makes its half for both, and the exchange of ds.
#pragma once

TILE int other_rank() { return cluster_rank() ^ 1; }
TILE int first_key(const task &t) { return t.key0 + cluster_rank() * KEYS; }

TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0, col = cluster_rank() * HALF;
  grid_wait();
  for (uint32_t count = 0; (next = cluster_queue_draw<PAIR>(s.queue, count, next, p.counter)) < p.tasks; count++) {
    held &t = s.now;
    put_held(t, p, task_at(p, next));
    int steps = get(t.steps), key0 = get(t.key0), batch = get(t.batch), k_head = key_head(t, p);
    for (int step = 0; step < steps; step++, n++) {
      ring_pos at = ring_at<STAGES>(n);
      int head = head_of(t, p, step), block = block_of(t, step);
      int64_t stats = (int64_t)(get(t.base) + head * p.q_blocks + block) * M;
      ring_acquire(s.ring_q, at);
      if (step == 1) wait_for_zeros(p, t);
      put_place(s.at[n % SLOTS], p, t, head, block);
      ring_expect(s.ring_q, at, tile_bytes(s.q[0]) + M * 4);
      tma_load_cols_multicast<HALF>(s.q[at.stage], col, p.q, s.ring_q.full[at.stage], block * M, col, head, batch, 3);
      tma_load(s.lse2[at.stage], p.lse2 + stats, s.ring_q.full[at.stage]);
      if (step == 0) {
        sem_wait(s.k_free, ~count & 1);
        sem_expect(s.k_full, tile_bytes(s.k) + tile_bytes(s.k_other));
        tma_load(s.k, p.k, s.k_full, key0 + cluster_rank() * KEYS, 0, k_head, batch);
        tma_load(s.k_other, p.k, s.k_full, key0 + other_rank() * KEYS, col, k_head, batch);
        sem_wait(s.v_free, ~count & 1);
        sem_expect(s.v_full, tile_bytes(s.v));
        tma_load(s.v, p.v, s.v_full, key0 + cluster_rank() * KEYS, 0, k_head, batch);
      }
      ring_acquire(s.ring_dout, at);
      ring_expect(s.ring_dout, at, tile_bytes(s.dout[0]) + M * 4);
      tma_load_cols_multicast<HALF>(s.dout[at.stage], col, p.dout, s.ring_dout.full[at.stage], block * M, col, head, batch, 3);
      tma_load(s.delta[at.stage], p.delta + stats, s.ring_dout.full[at.stage]);
    }
  }
}

// Hands ds of every step to the other block.
TILE void sender(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    uint32_t end = n + task_at(p, next).steps;
    for (; n < end; n++) {
      sem_wait(s.ds_full, n & 1);
      sem_wait(s.other_free, ~n & 1);
      tma_send(s.ds_other, s.ds, s.other_full, other_rank());
      sem_wait(s.other_full, n & 1);
      sem_arrive_at<THREAD>(s.ds_free, other_rank());   // its copy is here
    }
    cluster_queue_release<THREAD>(s.queue, count);
  }
}
