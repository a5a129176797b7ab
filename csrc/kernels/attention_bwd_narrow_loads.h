// What feeds the compute warpgroups of attention_bwd_narrow.cu: a thread that draws tasks and loads queries' rows, and one that loads keys and values.
// Included once `shared` is known.
#pragma once

// Has few registers: where it stands is in shared memory. It has acquired dout's stage of the step before, and with it all that step n writes before dout:
// all who read the step Q_STAGES before have released that.
TILE void loader(const attention_bwd_params &p, shared &s, int) {
  uint32_t n = 0;
  int next = 0;
  grid_wait();
  for (uint32_t count = 0; (next = queue_draw(s.queue, count, next, p.counter)) < p.tasks; count++) {
    const held &t = s.now;
    put_held(s.now, p, task_at(p, next));
    for (int step = 0; step < get(t.steps); step++, n++) {
      ring_pos at = ring_at<Q_STAGES>(n), to = ring_at<DOUT_STAGES>(n);
      int head = head_of(t, p, step), block = block_of(t, step);
      if (step == 1) wait_for_zeros(p, t);
      put_place(s.at[n % SLOTS], p, t, head, block);
      put(s.task_of[n % SLOTS], count);
      put(s.row, block * M);
      put(s.head, head);
      sem_expect(s.q_full[at.stage], tile_bytes(s.q[0]) + M * 4);
      tma_load(s.q[at.stage], p.q, s.q_full[at.stage], get(s.row), 0, get(s.head), get(t.batch));
      tma_load(s.lse2[at.stage], p.lse2 + (int64_t)get(s.at[n % SLOTS].dq_block) * M, s.q_full[at.stage]);
      ring_acquire(s.ring_dout, to);
      ring_expect(s.ring_dout, to, tile_bytes(s.dout[0]) + M * 4);
      tma_load(s.dout[to.stage], p.dout, s.ring_dout.full[to.stage], get(s.row), 0, get(s.head), get(t.batch));
      tma_load(s.delta[to.stage], p.delta + (int64_t)get(s.at[n % SLOTS].dq_block) * M, s.ring_dout.full[to.stage]);
    }
  }
}
TILE void key_loader(const attention_bwd_params &p, shared &s, int) {
  int next;
  grid_wait();
  for (uint32_t count = 0; (next = queue_take(s.queue, count)) < p.tasks; count++) {
    task t = task_at(p, next);
    int head = t.k_head / p.parts;
    sem_wait(s.v_free, ~count & 1);
    sem_expect(s.v_full, NC * tile_bytes(s.v[0]));
    for (int w = 0; w < NC; w++) tma_load(s.v[w], p.v, s.v_full, t.key0 + w * 64, 0, head, t.batch);
    sem_wait(s.k_free, ~count & 1);
    sem_expect(s.k_full, NC * tile_bytes(s.k[0]));
    for (int w = 0; w < NC; w++) tma_load(s.k[w], p.k, s.k_full, t.key0 + w * 64, 0, head, t.batch);
    queue_release<THREAD>(s.queue, count);
  }
}
