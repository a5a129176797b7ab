// What norm_bwd_ring.cu has beside its formulas: lines of 16 bits at multiples of 16 bytes. A loader copies them into
// rings in shared memory, one for each member of a block, which is SPAN warpgroups that share a line.
#pragma once
#include "norm/norm_tile.h"

enum { MEMBERS = GROUPS / SPAN, COLUMNS = 1024 * J * SPAN, ALL = 7 };
typedef sl<elem, COLUMNS> shared_line;
typedef ring<STAGES> rings[MEMBERS];

TILE void rings_init(rings &inputs) {
  for (int i = 0; i < MEMBERS; i++) ring_init(inputs[i], arrivals(1, 0, 0), arrivals(0, 0, SPAN));
}
// A line of a stream
TILE void bring(shared_line &to, const norm_stream &g, const norm_problem &p, const place &at, sem &full) {
  bulk_load(to, (const elem *)g.data + offset_of(g, at), p.dim, full);
}
// Thread: all lines of a block, of `streams` streams. load(member, stage, at, full) brings a line of each.
// Rows are missing in a block's last tiles only, so that all members are in the same stage.
template<class F> TILE void load_lines(rings &inputs, const norm_problem &p, int tiles, int streams, F load) {
  uint32_t bytes = line_bytes<elem>(p.dim) * streams;
  ring_pos pos = {};
  for (int i = block_index(); i < tiles; i += block_count()) {
    for (int member = 0; member < MEMBERS; member++) {
      place at = place_of(p, i, member * SPAN);
      if (rows_left(p, at) <= 0) break;
      ring_acquire(inputs[member], pos);
      ring_expect(inputs[member], pos, bytes);
      load(member, pos.stage, at, inputs[member].full[pos.stage]);
    }
    ring_next(inputs[0], pos);
  }
}

template<int N> TILE void keep_line(const norm_stream &g, const lt<N> &t, const norm_problem &p, const place &at) {
  if (g.data) save<EIGHTS>((elem *)g.data + offset_of(g, at), 0, t, 1, 1, columns_left(p, at));
}
// Weight or bias. Zeros where there is none.
template<int N> TILE void load_line_vector(lt<N> &t, const void *v, int is_float, const norm_problem &p,
                                           const place &at) {
  int64_t first = (int64_t)at.group * p.dim + at.col;
  int n = v ? columns_left(p, at) : 0;
  if (is_float) {
    load_begin<EIGHTS>(t, (const float *)v + first, 0, 1, 1, n);
    load_end<float>(t);
  } else {
    load_begin<EIGHTS>(t, (const elem *)v + first, 0, 1, 1, n);
    load_end<elem>(t);
  }
}
// What lines are multiplied with
template<int N> TILE void load_line_weight(lt<N> &w, const norm_problem &p, const place &at) {
  const float offset = p.weight_offset;
  load_line_vector(w, p.weight, p.weight_is_float, p, at);
  each<EIGHTS>(w, 1, columns_left(p, at), [=](float &w) { w += offset; });
}
