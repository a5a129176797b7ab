// What feeds the compute warpgroups of attention_fwd_fp8.cu: a thread that draws tasks and loads, and warps that turn v. Included once `shared` is known.
#pragma once

TILE void load_keys(const attention_fp8_params &p, shared &s, ring_pos &at, int row, int head, int batch) {
  ring_acquire(s.k_ring, at);
  ring_expect(s.k_ring, at, tile_bytes(s.k[0]));
  tma_load(s.k[at.stage], p.fwd.k, s.k_ring.full[at.stage], row, 0, head, batch);
  ring_next(s.k_ring, at);
}
TILE void load_values(const attention_fp8_params &p, shared &s, ring_pos &at, int row, int head, int batch) {
  for (int part = 0; part < BN; part += 64) {
    ring_acquire(s.v_ring, at);
    ring_expect(s.v_ring, at, tile_bytes(s.v[0]));
    tma_load(s.v[at.stage], p.fwd.v, s.v_ring.full[at.stage], row + part, 0, head, batch);
    ring_next(s.v_ring, at);
  }
}
TILE void loader(const attention_fp8_params &p, shared &s, int) {
  places at = {};
  task t, following;
  int next = next_task(p.fwd, 0, 0, t);
  for (uint32_t count = 0; hand_out(p.fwd, s.queue, s.task_of, count, next, t); count++) {
    int j = t.steps - 1, k_head = t.head / p.fwd.group;
    for (int w = 0; w < NC; w++) {
      sem_wait(s.q_free[w], ~count & 1);   // free at first, like a ring's stage
      sem_expect(s.q_full[w], tile_bytes(s.q[w]));
      tma_load(s.q[w], p.fwd.q, s.q_full[w], t.row0 + w * 64, 0, t.head, t.batch);
      if (w == 0) load_keys(p, s, at.k, j * BN, k_head, t.batch);   // right behind its q: the first warpgroup can begin
    }
    for (; j >= 0; j--) {   // v ahead of the next keys: it has further to go
      if (j == 0) next = next_task(p.fwd, count + 1, next, following);   // here, where stages are to be waited for
      load_values(p, s, at.v, j * BN, k_head, t.batch);
      if (j > 0) load_keys(p, s, at.k, (j - 1) * BN, k_head, t.batch);
    }
    t = following;
  }
}
TILE void turner(const attention_fp8_params &p, shared &s, int index) {
  uint32_t block = 0;   // of all tasks: what is kept instead of places, for want of registers
  for (uint32_t count = 0; queue_take(s.queue, count) < p.fwd.tasks; count++) {
    uint32_t end = block + (uint32_t)get(s.task_of[count & 1].steps);
    queue_release<WARP>(s.queue, count);
    for (; block < end; block++) {
      ring_pos to = ring_at<T_STAGES>(block);
      ring_acquire(s.t_ring, to);
      for (int part = 0; part < BN; part += 64) {
        ring_pos from = ring_at<V_STAGES>(block * (BN / 64) + part / 64);
        ring_wait(s.v_ring, from);
        transpose_part(s.turned[to.stage], part, s.v[from.stage], index, TURNERS);
        ring_release<WARP>(s.v_ring, from);
      }
      ring_fill<WARP>(s.t_ring, to);
    }
  }
}
