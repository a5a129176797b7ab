// What feeds the compute warpgroups of attention_fwd.cu: a thread that draws tasks, and one each that loads queries, and keys and values; and what clears rows that no load should have brought.
// Included once `shared` is known.
#pragma once

template<int C> TILE void load(const gmap &m, st<elem, BN, C> (&tiles)[STAGES], kv_ring &r, ring_pos &at, int row, int head, int batch) {
  ring_acquire(r, at);
  ring_expect(r, at, tile_bytes(tiles[0]));
  tma_load(tiles[at.stage], m, r.full[at.stage], row, 0, head, batch);
  ring_next(r, at);
}
// Draws a task while the last two key blocks of the one before are loaded: early enough to hide the counter's latency, not so early that blocks
// which are done wait for tasks that others hold.
TILE void scheduler(const attention_fwd_params &p, shared &s, int) {
  task t;
  int next = next_task(p, 0, 0, t);
  for (uint32_t count = 0; hand_out(p, s.queue, s.task_of, count, next, t); count++) {
    sem_wait(s.draw, count & 1);
    next = next_task(p, count + 1, next, t);
  }
}
// A warpgroup frees its q only with its last scores, for which the next task's keys and values need not wait.
TILE void query_loader(const attention_fwd_params &p, shared &s, int) {
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    task t = get_held(s.task_of[count & 1], p);
    for (int w = 0; w < NC; w++) {
      sem_wait(s.q_free[w], ~count & 1);   // free at first, like a ring's stage
      sem_expect(s.q_full[w], tile_bytes(s.q[w]));
      tma_load(s.q[w], p.q, s.q_full[w], t.seq.q0 + t.row0 + w * 64, 0, t.head, in_memory(p, t));
    }
    queue_release<THREAD>(s.queue, count);
  }
}
TILE void loader(const attention_fwd_params &p, shared &s, int) {
  places at = {};
  for (uint32_t count = 0; queue_take(s.queue, count) < p.tasks; count++) {
    task t = get_held(s.task_of[count & 1], p);
    int j = t.first + t.steps - 1, k_head = t.head / p.group, batch = in_memory(p, t);
    load(p.k, s.k, s.k_ring, at.k, t.seq.k0 + j * BN, k_head, batch);
    if (t.steps == 1) sem_arrive<THREAD>(s.draw);
    for (; j > t.first; j--) {
      if (j == t.first + 1) sem_arrive<THREAD>(s.draw);
      load(p.k, s.k, s.k_ring, at.k, t.seq.k0 + (j - 1) * BN, k_head, batch);
      load(p.v, s.v, s.v_ring, at.v, t.seq.k0 + j * BN, k_head, batch);
    }
    load(p.v, s.v, s.v_ring, at.v, t.seq.k0 + j * BN, k_head, batch);
    queue_release<THREAD>(s.queue, count);
  }
}

// A task's first key block may have rows of the next sequence, or of none: 0 times what they hold may be NaN. The first warpgroup clears them in v, while
// no tile is in its registers; all wait for it before their first product with v.
TILE void clear_tail(const attention_fwd_params &p, shared &s, const places &at, const task &t, uint32_t count) {
  int keys = t.seq.keys - (t.first + t.steps - 1) * BN;
  if (p.features.q_start && keys < BN) {
    ring_wait(s.v_ring, at.v);
    clear_rows(s.v[at.v.stage], 0, keys);
    fence_async();
  }
  sem_arrive(s.v_clean[count & 1]);
}
