// What the scan warp of the backward's two passes over the sequence makes of a chunk's gates: delta_keep.cu and
// delta_back.cu include it, whose rows say whether decays are of CHANNELS.
#pragma once
#include "delta/delta_prepare.h"

// What the caller gave of the chunk from `step` on.
TILE void load_gates(given_steps &x, const delta_rows &r, const delta_gates &p, const row_task &t, int step) {
  if (CHANNELS) load_beta(x.beta, r, p, t, step);
  else load_given(x, r, p, t, step);
}
// The vectors of the chunk that x is of, with CHANNELS beta only, and the gains: beta, and the weight. Meanwhile the
// gates of the chunk from `then` on, which x is of behind it, are under way.
TILE void scan_chunk(chunk_vectors &v, sv<Q> &gains, given_steps &x, const delta_rows &r, const delta_gates &p,
                     const row_task &t, float scale, int then) {
  wv<Q> gain;
  if (CHANNELS) {
    put_beta(v.beta, x.beta, p);
    load_gates(x, r, p, t, then);
    load(gain, v.beta);
  } else {
    wv<Q> l, weight;
    given_steps given = x;
    load_gates(x, r, p, t, then);
    sum_decays(l, given, p, t.head);
    put_state_vectors(v, given, l, p);
    put_read(v, given, l, scale);
    load(gain, v.beta);
    load(weight, v.weight);
    map(gain, gain, weight, [](float b, float w) { return b * w; });
  }
  store(gains, gain);
}
