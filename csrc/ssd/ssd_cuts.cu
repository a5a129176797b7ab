// States of SSD at the cuts of a sequence: what ssd_fwd.cu's S becomes from 0 over a segment of whole chunks,
//   S = e^(l_e) S + (x_j dt_j e^(l_e - l_j))^T b
// and the product of the e^(l_e), by which a state before the segment decays. BACKWARDS, of linear attention's
// gradients, it is what becomes of 0 behind a segment on the way to its first step, with e^L the product of the e^(l_e)
// in front,
//   S   = S + (x_j e^(L + l_j))^T b
// and the cuts are those of the last segment, the one before, and so on.
// A unit is 64 rows of a head's state. A block has SLOTS units of one group of heads, which share b; where the group
// has no more, its last units are computed for nothing. Roles: a loader thread; SCANS scan warps: dt -> each unit's
// weights; GROUPS state warpgroups.
#include "tile/tile.h"
#include "ssd/ssd_fwd.h"

// Q: steps of a chunk. N (state), HEADS (units of a warpgroup: 1 or 2), GROUPS, BACKWARDS, STAGES and *_REGS come from
// the row. A unit's state is TILES tiles of W columns.
enum { Q = 64, SLOTS = GROUPS * HEADS, W = N < 128 ? N : 128, TILES = N / W, SCANS = 2, MINE = SLOTS / SCANS };
static_assert(HEADS * TILES <= 2, "a warpgroup has two tiles of state");

struct vectors { sv<Q> decay, weight; };         // e^(l_i), dt_j e^(l_e - l_j)
struct shared {
  st<elem, Q, N> b[STAGES];
  st<elem, Q, 64> x[STAGES][SLOTS];
  vectors v[STAGES][SLOTS];
  ring<STAGES> inputs;                           // full: the bytes, and the scan warps' vectors
};
typedef ssd_cuts_params params;

TILE void init(shared &s) { ring_init(s.inputs, arrivals(1, SCANS, 0), arrivals(0, 0, GROUPS)); }

struct task { int row, cut, group, unit, first, end; };
TILE int parts(const params &p) { return (p.head_dim + 63) / 64; }
TILE task block_task(const params &p) {
  int units = p.group_heads * parts(p), blocks = (units + SLOTS - 1) / SLOTS, groups = p.heads / p.group_heads;
  int i = block_index(), cut = i % p.cut, block = i / p.cut, matrix = block / blocks;
  int segment = BACKWARDS ? p.cut - cut : cut, end = (segment + 1) * p.segment;
  if (BACKWARDS && end > p.steps) end = p.steps;
  return {matrix / groups, cut, matrix % groups, block % blocks * SLOTS, segment * p.segment, end};
}
// Of a unit behind the group's last, the last.
TILE int unit_of(const params &p, const task &t, int slot) {
  int last = p.group_heads * parts(p) - 1;
  return t.unit + slot < last ? t.unit + slot : last;
}
TILE int head_of(const params &p, const task &t, int slot) {
  return t.group * p.group_heads + unit_of(p, t, slot) / parts(p);
}
TILE int row_of(const params &p, const task &t, int slot) { return unit_of(p, t, slot) % parts(p) * 64; }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  for (int step = t.first; step < t.end; step += Q) {
    sem &full = s.inputs.full[at.stage];
    ring_acquire(s.inputs, at);
    ring_expect(s.inputs, at, tile_bytes(s.b[0]) + SLOTS * tile_bytes(s.x[0][0]));
    ROLLED for (int slot = 0; slot < SLOTS; slot++)
      tma_load(s.x[at.stage][slot], p.x, full, step, row_of(p, t, slot), head_of(p, t, slot), t.row);
    tma_load(s.b[at.stage], p.b, full, step, 0, t.group, t.row);
    ring_next(s.inputs, at);
  }
}

// The next chunk's dt is under way while this one's is worked on.
TILE void scan(const params &p, shared &s, int warp) {
  task t = block_task(p);
  ring_pos at = {};
  wv<Q> given[MINE], dt, l, out, changes;
  float before[MINE];          // the L of BACKWARDS
  fill(changes, 0.f);
  int64_t g = (int64_t)t.row * p.steps * p.heads;
  UNROLLED for (int i = 0; i < MINE; i++) {
    int head = head_of(p, t, i * SCANS + warp);
    load_given(given[i], p.dt, g + (int64_t)t.first * p.heads + head, p.heads, t.end - t.first);
    before[i] = 0.f;
  }
  for (int step = t.first; step < t.end; step += Q) {
    ring_acquire(s.inputs, at);
    if (p.seq_idx) count_changes(changes, p.seq_idx + t.row * p.seq_stride, step, t.end);
    float changed = last(changes);
    UNROLLED for (int i = 0; i < MINE; i++) {
      int slot = i * SCANS + warp, head = head_of(p, t, slot);
      vectors &v = s.v[at.stage][slot];
      log_decays(dt, l, given[i], p.dt, head);
      load_given(given[i], p.dt, g + (int64_t)(step + Q) * p.heads + head, p.heads, t.end - step - Q);
      float end = last(l);
      map(out, l, changes, [](float x, float n) { return n > 0.f ? 0.f : fast_exp2(x); });
      store(v.decay, out);
      if (BACKWARDS) {
        float all = before[i];
        map(out, l, l, [=](float x, float) { return fast_exp2(all + x); });
        store(v.weight, out);
        before[i] += end;
        continue;
      }
      map(dt, dt, changes, [=](float d, float n) { return n < changed ? 0.f : d; });
      map(out, l, dt, [=](float x, float d) { return d * fast_exp2(end - x); });
      store(v.weight, out);
    }
    sem_arrive<WARP>(s.inputs.full[at.stage]);
    ring_next(s.inputs, at);
  }
}

// Where the columns of a tile of the slot's state begin, in states of all heads the i-th.
TILE int64_t first_of(const params &p, const task &t, int64_t i, int slot, int col) {
  return ((i * p.heads + head_of(p, t, slot)) * p.head_dim + row_of(p, t, slot)) * p.state_dim + col;
}
TILE void keep_state(const params &p, const task &t, const rt<float, W> &s, float decay, int slot, int col) {
  if (unit_of(p, t, slot) != t.unit + slot) return;
  int64_t i = (int64_t)t.row * p.cut_stride + t.cut;
  rv one;
  fill(one, decay);
  store(p.cuts + first_of(p, t, i, slot, col), p.state_dim, s, p.head_dim - row_of(p, t, slot), p.state_dim - col);
  if (col == 0 && row_of(p, t, slot) == 0) store(p.decays + i * p.heads + head_of(p, t, slot), one, 1);
}

// One chunk of a slot, whose tiles are s0 and s1, or s0 alone. The state is scaled while no product is in flight.
TILE void advance(rt<float, W> &s0, rt<float, W> &s1, float &decay, shared &s, int stage, int slot) {
  rt<elem, Q> x;
  vectors &v = s.v[stage][slot];
  load_t(x, s.x[stage][slot]);
  map_col(x, v.weight, [](float f, float w) { return f * w; });
  float d = get(v.decay, Q - 1);
  decay *= d;
  if (!BACKWARDS) map(s0, [=](float f) { return f * d; });
  if (TILES == 2 && !BACKWARDS) map(s1, [=](float f) { return f * d; });
  mma_fence();
  mma_AB_cols<ACC>(s0, x, s.b[stage], 0);
  if (TILES == 2) mma_AB_cols<ACC>(s1, x, s.b[stage], W);
  mma_commit();
  if (TILES == 2) mma_wait<0>(s0, s1, x);
  else mma_wait<0>(s0, x);
}

TILE void run_state(const params &p, shared &s, int wg) {
  // s1: of another slot, or other columns
  enum { TWO = HEADS * TILES == 2, OTHER = HEADS == 2 ? GROUPS : 0, COL = TILES == 2 ? W : 0 };
  task t = block_task(p);
  ring_pos at = {};
  rt<float, W> s0, s1;        // by name, not an array: registers
  float decay0 = 1.f, decay1 = 1.f;
  fill(s0, 0.f);
  fill(s1, 0.f);
  for (int step = t.first; step < t.end; step += Q) {
    ring_wait(s.inputs, at);
    advance(s0, s1, decay0, s, at.stage, wg);
    if (HEADS == 2) advance(s1, s0, decay1, s, at.stage, wg + OTHER);
    ring_done(s.inputs, at);
  }
  keep_state(p, t, s0, decay0, wg, 0);
  if (TWO) keep_state(p, t, s1, decay1, wg + OTHER, COL);
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<scan, WARP, SCANS, LOAD_REGS>> kernel;
ENTRY(kernel, Q, SLOTS)
