// The states behind segments of rows, each from the one before: cuts[i] += turns[i] cuts[i - 1]. Transposed, so that a
// state is the register operand: S^T <- S^T turn^T + what became of 0. State and turn have two parts each, of 8 bits
// and of the rest; the product of the rests is left out. A block has 64 columns of v for each of GROUPS warpgroups.
// Roles: a loader thread; GROUPS warpgroups.
//
// Registers of a thread: state and sum D / 2 each, two operands of D / 4.
#include "delta/delta_prepare.h"

// D: columns of the state. GROUPS, *_REGS
typedef st<exact, D, D> matrix;
struct shared {
  matrix most[STAGES], rest[STAGES];
  ring<STAGES, ASYNC_READS> turns;
};
typedef delta_join_params params;

TILE bool is_done(const params &p) { return is_taken(p.taken); }
TILE void init(shared &s) { ring_init(s.turns, arrivals(1, 0, 0), arrivals(0, 0, GROUPS)); }

struct task { int row, head, col; };
TILE task block_task(const params &p) {
  int parts = (p.value_dim + 64 * GROUPS - 1) / (64 * GROUPS), matrix = block_index() / parts, row = matrix / p.heads;
  return {row, matrix - row * p.heads, (block_index() - matrix * parts) * 64 * GROUPS};
}

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  for (int i = 1; i < p.cut; i++) {
    ring_acquire(s.turns, at);
    ring_expect(s.turns, at, 2 * tile_bytes(s.most[0]));
    tma_load(s.most[at.stage], p.turns, s.turns.full[at.stage], 0, 0, i, t.row * p.heads + t.head);
    tma_load(s.rest[at.stage], p.turns, s.turns.full[at.stage], D, 0, i, t.row * p.heads + t.head);
    ring_next(s.turns, at);
  }
}

// sum += S^T turn^T, of 64 rows of the turn
TILE void add_panel(rt<float, D> &sum, rt<float, D> &state, const matrix &most, const matrix &rest, int k0) {
  rt<float, D> leading;
  rt<exact, 64> high, low;
  fill(leading, 0.f);
  map(leading, state, [](float, float x) { return fused(x, 65536.f, x) - 65536.f * x; });
  convert_part(high, leading, k0);
  map(leading, state, [](float most, float x) { return x - most; });
  convert_part(low, leading, k0);
  mma_fence();
  mma_AB_rows<ACC>(sum, high, most, k0);
  mma_AB_rows<ACC>(sum, low, most, k0);
  mma_AB_rows<ACC>(sum, high, rest, k0);
  mma_commit();
  mma_wait<0>(sum, high, low);
}

TILE void join(const params &p, shared &s, int wg) {
  task t = block_task(p);
  ring_pos at = {};
  rt<float, D> state, sum;
  int col = t.col + 64 * wg, cols = p.value_dim - col;
  int64_t size = (int64_t)p.key_dim * p.value_dim, next = p.heads * size;
  float *cut = p.cuts + ((int64_t)t.row * p.cut_stride * p.heads + t.head) * size + (int64_t)col * p.key_dim;
  load(state, cut, p.key_dim, 1, cols, p.key_dim);
  for (int i = 1; i < p.cut; i++) {
    cut += next;
    load(sum, cut, p.key_dim, 1, cols, p.key_dim);
    ring_wait(s.turns, at);
    add_panel(sum, state, s.most[at.stage], s.rest[at.stage], 0);
    if (D > 64) add_panel(sum, state, s.most[at.stage], s.rest[at.stage], 64);
    ring_done(s.turns, at);
    store(cut, p.key_dim, 1, sum, cols, p.key_dim);
    map(state, sum, [](float, float x) { return x; });
  }
}

typedef block<params, shared, init, role<join, WARPGROUP, GROUPS, 0>, role<loader, THREAD, 1, 0>,
              UNLESS<is_done>> kernel;
ENTRY(kernel, 64, 64 * GROUPS)
