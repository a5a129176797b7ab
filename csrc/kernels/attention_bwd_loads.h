// What feeds the compute warpgroups of attention_bwd.cu: draws tasks, says where each step stands, loads, and clears rows that no load should have brought.
// Included once `shared` is known.
#pragma once

// Thread (the loader), before it asks for a stage of whose rows only some are this sequence's: its loads are for the trimmer, who makes it full.
TILE void hand_to_trimmer(shared &s, uint32_t trims, int stage, int rows) {
  sem_wait(s.trim_free, ~trims & 1);
  put(s.trim_stage, stage);
  put(s.trim_rows, rows);
  sem_expect(s.trim_full, stage < 0 ? 0 : 2 * (tile_bytes(s.q[0]) + M * 4));
}
// Clears the other rows. A stage of -1 is the end.
TILE void trimmer(const attention_bwd_params &, shared &s, int) {
  for (uint32_t count = 0;; count++) {
    sem_wait(s.trim_full, count & 1);
    int stage = get(s.trim_stage);
    if (stage < 0) break;
    clear_rest<WARP>(s.q[stage], s.dout[stage], get(s.trim_rows));
    sem_arrive<WARP>(s.ring_q.full[stage]);
    sem_arrive<WARP>(s.dout_full[stage]);
    sem_arrive<WARP>(s.trim_free);
  }
}

TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0, trims = 0;
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
      bool trim = PACKED && get(s.at[n % SLOTS].rows) < M;
      sem &q_full = trim ? s.trim_full : s.ring_q.full[at.stage], &dout_full = trim ? s.trim_full : s.dout_full[at.stage];
      if (trim) hand_to_trimmer(s, trims++, at.stage, get(s.at[n % SLOTS].rows));
      else sem_expect(q_full, tile_bytes(s.q[0]) + M * 4);
      tma_load(s.q[at.stage], p.q, q_full, row, 0, head, batch);
      tma_load(s.lse2[at.stage], p.lse2 + stats, q_full);
      if (step == 0) {
        sem_wait(s.k_free[k.stage], k.phase ^ 1);
        sem_expect(s.k_full[k.stage], NC * tile_bytes(s.v[0]));
        for (int w = 0; w < NC; w++) tma_load(s.k[k.stage][w], p.k, s.k_full[k.stage], get(t.row) + w * 64, 0, key_head(t, p), batch);
      }
      if (!trim) sem_expect(dout_full, tile_bytes(s.dout[0]) + M * 4);
      tma_load(s.dout[at.stage], p.dout, dout_full, row, 0, head, batch);
      tma_load(s.delta[at.stage], p.delta + stats, dout_full);
      if (step == 0) {
        sem_wait(s.v_free, ~count & 1);
        sem_expect(s.v_full, NC * tile_bytes(s.v[0]));
        for (int w = 0; w < NC; w++) tma_load(s.v[w], p.v, s.v_full, get(t.row) + w * 64, 0, key_head(t, p), batch);
      }
    }
  }
  if (PACKED) hand_to_trimmer(s, trims, -1, 0);
}

// The k of the task before, once its dk has left through it.
TILE void free_k(shared &s, uint32_t count) {
  tma_store_wait_read();
  if (count > 0) sem_arrive(s.k_free[~count & 1]);
}
