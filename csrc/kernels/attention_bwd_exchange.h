// What feeds the two blocks of attention_bwd_cluster.cu: loads, of which each block makes its half of q and dout for both, and the exchange of ds.
#pragma once

TILE int other_rank() { return cluster_rank() ^ 1; }
TILE int first_column() { return cluster_rank() * HALF; }   // of this block's half

// Has few registers: what it knows of its task and step is in shared memory. It has acquired dout's stage of the step before, and with it all that
// step n writes before dout: all who read the step Q_STAGES before have released that.
TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0;
  for (uint32_t count = 0; (next = cluster_queue_draw<PAIR>(s.queue, count, next, p.counter)) < p.tasks; count++) {
    put_held(s.now, p, task_at(p, next));
    for (int step = 0; step < get(s.now.steps); step++, n++) {
      ring_pos at = ring_at<Q_STAGES>(n), to = ring_at<DOUT_STAGES>(n);
      int head = head_of(s.now, p, step), block = block_of(s.now, step);
      put_place(s.at[n % SLOTS], p, s.now, head, block);
      put(s.row, block * M);
      put(s.head, head);
      sem_expect(s.q_full[at.stage], tile_bytes(s.q[0]) + M * 4);
      tma_load_cols_multicast<HALF>(s.q[at.stage], first_column(), p.q, s.q_full[at.stage], get(s.row), first_column(), get(s.head), get(s.now.batch), 3);
      tma_load(s.lse2[at.stage], p.lse2 + (int64_t)get(s.at[n % SLOTS].dq_block) * M, s.q_full[at.stage]);
      ring_acquire(s.ring_dout, to);
      ring_expect(s.ring_dout, to, tile_bytes(s.dout[0]) + M * 4);
      tma_load_cols_multicast<HALF>(s.dout[to.stage], first_column(), p.dout, s.ring_dout.full[to.stage], get(s.row), first_column(), get(s.head), get(s.now.batch), 3);
      tma_load(s.delta[to.stage], p.delta + (int64_t)get(s.at[n % SLOTS].dq_block) * M, s.ring_dout.full[to.stage]);
    }
  }
}

// Loads a task's k and v, then hands ds of every step to the other block.
TILE void sender(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next;
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    task t = task_at(p, next);
    int head = t.k_head / p.parts;
    uint32_t end = n + t.steps;
    sem_wait(s.v_free, ~count & 1);
    sem_expect(s.v_full, NC * tile_bytes(s.v[0]));
    for (int w = 0; w < NC; w++) tma_load(s.v[w], p.v, s.v_full, t.key0 + cluster_rank() * KEYS + w * 64, 0, head, t.batch);
    sem_wait(s.k_free, ~count & 1);
    sem_expect(s.k_full, NC * (tile_bytes(s.k[0]) + tile_bytes(s.k_other[0])));
    for (int w = 0; w < NC; w++) {
      tma_load(s.k[w], p.k, s.k_full, t.key0 + cluster_rank() * KEYS + w * 64, 0, head, t.batch);
      tma_load(s.k_other[w], p.k, s.k_full, t.key0 + other_rank() * KEYS + w * 64, first_column(), head, t.batch);
    }
    for (; n < end; n++) {
      ring_pos at = ring_at<NC>(n);
      ring_wait(s.ring_ds, at);
      ring_acquire(s.ring_other, at);
      for (int w = 0; w < NC; w++) tma_send(s.ds_other[at.stage][w], s.ds[at.stage][w], s.ring_other.full[at.stage], other_rank());
    }
    cluster_queue_release<THREAD>(s.queue, count);
  }
}
