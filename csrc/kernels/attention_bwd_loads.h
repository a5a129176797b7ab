// What feeds the compute warpgroups of attention_bwd.cu: draws tasks, says where each step stands, loads; and what clears rows that no load should have
// brought. Included once `shared` is known.
#pragma once

TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0;
  grid_wait();
  for (uint32_t count = 0; (next = draw(p, s.queue, count, next)) < p.tasks; count++) {
    held &t = s.task_of[count & 1];
    put_held(t, p, task_at(p, next));
    int steps = get(t.steps);
    for (int step = 0; step < steps; step++, n++) {
      ring_pos at = ring_at<STAGES>(n), k = ring_at<2>(count);
      int head = head_of(t, p, step), block = block_of(t, step), row = get(t.q0) + block * M, batch = get(t.batch);
      int64_t stats = (int64_t)(get(t.base) + head * p.q_blocks + block) * M;
      ring_acquire(s.ring_q, at);
      if (CLEANERS && step == 1) wait_for_zeros(p, t);
      put_place(s.at[n % SLOTS], p, t, head, block);
      ring_expect(s.ring_q, at, tile_bytes(s.q[0]) + M * 4);
      tma_load(s.q[at.stage], p.q, s.ring_q.full[at.stage], row, 0, head, batch);
      tma_load(s.lse2[at.stage], p.lse2 + stats, s.ring_q.full[at.stage]);
      if (step == 0) {
        sem_wait(s.k_free[k.stage], k.phase ^ 1);
        sem_expect(s.k_full[k.stage], NC * tile_bytes(s.v[0]));
        for (int w = 0; w < NC; w++) tma_load(s.k[k.stage][w], p.k, s.k_full[k.stage], get(t.row) + w * 64, 0, key_head(t, p), batch);
      }
      sem_expect(s.dout_full[at.stage], tile_bytes(s.dout[0]) + M * 4);
      tma_load(s.dout[at.stage], p.dout, s.dout_full[at.stage], row, 0, head, batch);
      tma_load(s.delta[at.stage], p.delta + stats, s.dout_full[at.stage]);
      if (step == 0) {
        sem_wait(s.v_free, ~count & 1);
        sem_expect(s.v_full, NC * tile_bytes(s.v[0]));
        for (int w = 0; w < NC; w++) tma_load(s.v[w], p.v, s.v_full, get(t.row) + w * 64, 0, key_head(t, p), batch);
      }
    }
  }
}

// The k of the task before, once its dk has left through it.
TILE void free_k(shared &s, uint32_t count) {
  tma_store_wait_read();
  if (count > 0) sem_arrive(s.k_free[~count & 1]);
}

// Rows of q and dout that are not this sequence's: the first warpgroup clears them, both wait.
TILE void clear_queries(shared &s, uint32_t n, int wg) {
  ring_pos at = ring_at<STAGES>(n);
  int rows = get(s.at[n % SLOTS].rows);
  if (rows >= M) return;
  if (wg == 0) {
    sem_wait(s.dout_full[at.stage], at.phase);
    clear_rest(s.q[at.stage], s.dout[at.stage], rows);
  }
  bar_sync(NC + 2, 128 * NC);
}
