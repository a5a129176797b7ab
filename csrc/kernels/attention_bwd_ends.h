// The steps of attention_bwd.cu at a task's ends that a warpgroup sees only a part of. Included once `state`, softmax and the issues are known.
#pragma once

// A task's first step for the second warpgroup, whose keys its first 64 rows do not see, and its last for the first, likewise: from its products to dv and dk,
// without the rows that see nothing (of 64, that is all). No product is in flight.
template<int A> TILE void end_step(state &a, const attention_bwd_params &p, shared &s, uint32_t n, uint32_t count, int wg) {
  ring_pos at = ring_at<STAGES>(n), to = ring_at<DS_STAGES>(n);
  int first = A == ZERO ? M - 64 : 0;
  OVERLAY(float, 64, x, a.s);
  OVERLAY(float, 64, dp, a.dp);
  OVERLAY(elem, 64, prob, a.p);
  OVERLAY(elem, 64, ds, a.ds);
  if (TURNS) turn_wait<NC>(wg);
  ring_wait(s.ring_q, at);
  if constexpr (M == 64) {
    if (TURNS) turn_pass<NC>(wg);
    sem_wait(s.dout_full[at.stage], at.phase);
    if (A == ZERO) fill(a.dk, 0.f), fill(a.dv, 0.f);
    fill(x, 0.f);
    ring_acquire(s.ring_ds, to);
    store(s.ds[to.stage][wg], x);
    ring_fill(s.ring_ds, to);
  } else {
    mma_fence();
    mma_ABt_rows<ZERO>(x, s.k[count & 1][wg], s.q[at.stage], first);
    mma_commit();
    sem_wait(s.dout_full[at.stage], at.phase);
    mma_fence();
    mma_ABt_rows<ZERO>(dp, s.v[wg], s.dout[at.stage], first);
    mma_commit();
    if (TURNS) turn_pass<NC>(wg);
    softmax(x, dp, prob, ds, p, s, n, first, wg);
    mma_fence();
    mma_AB_rows<A>(a.dv, prob, s.dout[at.stage], first);
    mma_AB_rows<A>(a.dk, ds, s.q[at.stage], first);
    mma_commit();
    mma_wait<0>(a.dv, a.dk, prob, ds);
  }
  ring_release(s.ring_q, at);
}
