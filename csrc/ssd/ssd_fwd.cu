// Mamba-2 SSD forward (Dao & Gu 2024, section 6), one pass over the sequence in chunks of 64 steps, the state in
// registers throughout. With l_i = sum of dt_k a for k <= i, inside a chunk whose last step is e, and S the state
// before it:
//   y^T = e^(l_i) S c^T + x^T P^T,   P_ij = (c_i . b_j) e^(l_i - l_j) dt_j for j <= i, plus d on the diagonal
//   S   = e^(l_e) S + (x_j dt_j e^(l_e - l_j))^T b
// Linear attention is the same of q = c, k = b and v = x, with weights 1 in place of dt, decays of its own in place of
// e^(dt a), and a factor of y (without d). Only the scan warp knows which of the two it is.
// BACKWARDS the pass goes from the last chunk to the first. S begins as the state's gradient behind the last step:
//   y^T = e^(l_e - l_i) S c^T + x^T P^T,   P_ij = (c_i . b_j) e^(l_j - l_i) dt_j for j >= i
//   S   = e^(l_e) S + (x_j dt_j e^(l_j))^T b
// which for b = q, c = k and x = the gradient of y is v's; the gradient of k is that of c = v, b = the gradient of y and
// x = q. The factor is kept out of S here too: what comes in is divided by it, what goes out is multiplied.
// Transposed, so that the state is the register operand of its own product and never goes through shared memory. Steps
// past the end have dt = 0: they add nothing and decay nothing. Where a chunk has several sequences (seq_idx), the sums
// l run on, since only their differences are used; what would go from one sequence to another becomes 0: e^(l_i) behind
// a first change, P_ij and e^(l_e - l_j) where a change lies between. Where the next packed row follows in memory
// (starts), the scan warp clears its steps in x and b before products read them, and y's last chunk is stored from
// registers. Roles: a loader thread; a scan warp: dt -> each head's vectors; a score warpgroup: each head's P; GROUPS
// state warpgroups with HEADS slots each: 64 rows of a head's state, of which a head has SPLIT, in as many warpgroups.
#include "tile/tile.h"
#include "ssd/ssd_fwd.h"

// Q: steps of a chunk. N (state), HEADS (1 or 2), GROUPS, SPLIT, PER_SM and *_REGS come from the row. Slot i: part i %
// SPLIT of head i / SPLIT, in warpgroup i % GROUPS: the first heads of all warpgroups come first, which is the order in
// which P is made. A slot's state is TILES tiles of W columns.
enum { Q = 64, SLOTS = GROUPS * HEADS, ALL = SLOTS / SPLIT, W = N < 128 ? N : 128, TILES = N / W };
static_assert(HEADS * TILES <= 2 && SPLIT <= GROUPS, "a warpgroup has two tiles of state");

// l_i + log scale and l_j - log dt_j in base 2; e^(l_i); scale e^(l_i); dt_j e^(l_e - l_j). BACKWARDS both l are
// negative, read and weight have each other's power.
struct vectors { sv<Q> l, m, decay, read, weight; };
struct shared {
  st<elem, Q, N> b[2], c[2];
  st<elem, Q, 64> x[2][SLOTS], p[2][ALL], y[GROUPS];
  vectors v[2][ALL];
  sv<Q> changes[2];              // of seq_idx, from the chunk's begin to each step
  ring<2, ASYNC_READS> x_ring[SLOTS];   // read into registers too, in front of advance()'s fence
  ring<2, ASYNC_READS> bc_ring;
  ring<2, ASYNC_READS> v_ring;   // refilled by plain stores only, which need no fence
  sem p_full[2][ALL];            // refilled behind v_ring, whose stage is filled when all readers of p have released it
  sem last;                      // the tiles of a last chunk that runs over are there, and to be cleared behind its end
};
typedef ssd_fwd_params params;

TILE void init(shared &s) {
  ring_init(s.bc_ring, arrivals(1, 0, 0), arrivals(0, 0, GROUPS + 1));
  ring_init(s.v_ring, arrivals(0, 1, 0), arrivals(0, 0, GROUPS + 1));
  for (int i = 0; i < SLOTS; i++) ring_init(s.x_ring[i], arrivals(1, 0, 0), arrivals(0, 0, 1));
  for (int i = 0; i < 2; i++)
    for (int h = 0; h < ALL; h++) sem_init(s.p_full[i][h], arrivals(0, 0, 1));
  sem_init(s.last, arrivals(SLOTS + 1, 0, 0));
}

// The block's first head; steps first .. end - 1 of the batch.
struct task { int row, batch, head, segment, first, end; };
TILE task block_task(const params &p) {
  int blocks = p.heads / ALL, unit = block_index() / p.segments, segment = block_index() - unit * p.segments;
  int row = unit / blocks;
  task t = {row, row, (unit - row * blocks) * ALL, segment, segment * p.segment, (segment + 1) * p.segment};
  if (segment + 1 == p.segments) t.end = p.steps;
  if (p.starts) {
    int first = p.starts[row], end = p.starts[row + 1];
    t.batch = 0;
    t.first = first > 0 ? first : 0;
    t.end = end < p.steps ? end : p.steps;
  }
  return t;
}
// Chunks in their order, each by its first step.
enum { NEXT = BACKWARDS ? -Q : Q };
TILE int first_chunk(const task &t) { return BACKWARDS ? t.first + (t.end - t.first + Q - 1) / Q * Q - Q : t.first; }
TILE bool is_chunk(const task &t, int step) { return BACKWARDS ? step >= t.first : step < t.end; }
// Steps of the next packed row are in this chunk, the last of its row.
TILE bool runs_over(const params &p, const task &t, int step) { return p.starts && t.end - step < Q; }

TILE void loader(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  int group = t.head / p.group_heads;
  for (int step = first_chunk(t); is_chunk(t, step); step += NEXT) {
    int i = at.stage;
    bool over = runs_over(p, t, step);
    ROLLED for (int slot = 0; slot < SLOTS; slot++) {
      sem &full = over ? s.last : s.x_ring[slot].full[i];
      ring_acquire(s.x_ring[slot], at);
      sem_expect(full, tile_bytes(s.x[0][0]));
      tma_load(s.x[i][slot], p.x, full, step, slot % SPLIT * 64, t.head + slot / SPLIT, t.batch);
    }
    sem &full = over ? s.last : s.bc_ring.full[i];
    ring_acquire(s.bc_ring, at);
    sem_expect(full, 2 * tile_bytes(s.b[0]));
    tma_load(s.c[i], p.c, full, step, 0, group, t.batch);
    tma_load(s.b[i], p.b, full, step, 0, group, t.batch);
    ring_next(s.bc_ring, at);
  }
}

// Fills the stages of a chunk that runs over: no row of x and b is another sequence's then.
TILE void clear_behind(shared &s, ring_pos at, int steps) {
  sem_wait(s.last, 0);
  clear_rows<WARP>(s.b[at.stage], 0, steps);
  ROLLED for (int slot = 0; slot < SLOTS; slot++) clear_rows<WARP>(s.x[at.stage][slot], 0, steps);
  fence_async();
  sem_arrive<WARP>(s.bc_ring.full[at.stage]);
  ROLLED for (int slot = 0; slot < SLOTS; slot++) sem_arrive<WARP>(s.x_ring[slot].full[at.stage]);
}

TILE void scan(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  wv<Q> next, dt, l, out, changes;
  fill(changes, 0.f);
  // of `next`, which is under way while the one before is worked on
  int64_t given = ((int64_t)t.batch * p.steps + first_chunk(t)) * p.heads + t.head;
  load_given(next, p.dt, given, p.heads, is_chunk(t, first_chunk(t)) ? t.end - first_chunk(t) : 0);
  for (int step = first_chunk(t); is_chunk(t, step); step += NEXT) {
    ring_acquire(s.v_ring, at);
    if (p.seq_idx) {
      count_changes(changes, p.seq_idx + t.batch * p.seq_stride, step, t.end);
      store(s.changes[at.stage], changes);
    }
    float changed = last(changes);
    ROLLED for (int h = 0; h < ALL; h++) {
      vectors &v = s.v[at.stage][h];
      log_decays(dt, l, next, p.dt, t.head + h);
      bool same = h + 1 < ALL;
      given += same ? 1 : (int64_t)NEXT * p.heads - (ALL - 1);
      int then = same ? step : step + NEXT;
      load_given(next, p.dt, given, p.heads, is_chunk(t, then) ? t.end - then : 0);
      float end = last(l), scale = p.scale, log_scale = p.log_scale;
      map(out, l, l, [=](float x, float) { return (BACKWARDS ? -x : x) + log_scale; });
      store(v.l, out);
      map(out, l, dt, [](float x, float d) { return (BACKWARDS ? -x : x) - fast_log2(d); });
      store(v.m, out);
      map(out, l, changes, [](float x, float n) { return n > 0.f ? 0.f : fast_exp2(x); });
      store(v.decay, out);
      if (BACKWARDS) {
        map(dt, dt, out, [](float d, float e) { return d * e; });
        store(v.weight, dt);
        map(out, l, l, [=](float x, float) { return scale * fast_exp2(end - x); });
        store(v.read, out);
        continue;
      }
      map(out, out, out, [=](float x, float) { return x * scale; });
      store(v.read, out);
      map(dt, dt, changes, [=](float d, float n) { return n < changed ? 0.f : d; });
      map(out, l, dt, [=](float x, float d) { return d * fast_exp2(end - x); });
      store(v.weight, out);
    }
    sem_arrive<WARP>(s.v_ring.full[at.stage]);
    if (runs_over(p, t, step)) clear_behind(s, at, t.end - step);
    ring_next(s.v_ring, at);
  }
}

TILE void score(const params &p, shared &s, int) {
  task t = block_task(p);
  ring_pos at = {};
  rt<float, Q> products;
  rv l;
  for (int step = first_chunk(t); is_chunk(t, step); step += NEXT) {
    ring_wait(s.bc_ring, at);
    mma_fence();
    mma_ABt<ZERO>(products, s.c[at.stage], s.b[at.stage]);
    mma_commit();
    ring_wait(s.v_ring, at);
    mma_wait<0>(products);
    ring_release(s.bc_ring, at);
    if (p.seq_idx) {
      load(l, s.changes[at.stage]);
      map_rc(products, l, s.changes[at.stage],
             [](float x, float ni, float nj, int, int) { return ni == nj ? x : 0.f; });
    }
    ROLLED for (int h = 0; h < ALL; h++) {
      vectors &v = s.v[at.stage][h];
      load(l, v.l);
      auto decayed = [](float x, float li, float mj) { return x * fast_exp2(li - mj); };
      float d = p.d ? p.d[t.head + h] : 0.f;
      if (BACKWARDS) store_triu(s.p[at.stage][h], products, l, v.m, d, decayed);
      else store_tril(s.p[at.stage][h], products, l, v.m, d, decayed);
      fence_async();
      sem_arrive(s.p_full[at.stage][h]);
    }
    ring_release(s.v_ring, at);
    ring_next(s.v_ring, at);
  }
}

// y = S c^T, 64 columns of the state at a time: so few registers hold its 16-bit copy. col: in its tile, k0: in c.
TILE void read_panel(rt<float, Q> &y, const rt<float, W> &state, int col, const st<elem, Q, N> &c, int k0) {
  rt<elem, 64> part;
  convert_part(part, state, col);
  mma_fence();
  if (k0 == 0) mma_ABt_part<ZERO>(y, part, c, k0);
  else mma_ABt_part<ACC>(y, part, c, k0);
  mma_commit();
  mma_wait<0>(y, part);
}

// One chunk of a slot. The state is scaled while no product is in flight.
// s0, s1: its tiles, or s0 alone.
TILE void advance(rt<float, W> &s0, rt<float, W> &s1, const params &p, shared &s, const task &t, ring_pos at, int step,
                  int slot, int wg) {
  rt<float, Q> y;
  rt<elem, Q> x;
  int head = slot / SPLIT, row0 = slot % SPLIT * 64;
  vectors &v = s.v[at.stage][head];
  read_panel(y, s0, 0, s.c[at.stage], 0);
  if (W > 64) read_panel(y, s0, 64, s.c[at.stage], 64);
  if (TILES == 2) read_panel(y, s1, 0, s.c[at.stage], W);
  if (TILES == 2) read_panel(y, s1, 64, s.c[at.stage], W + 64);
  float decay = get(v.decay, Q - 1);
  map(s0, [=](float f) { return f * decay; });
  if (TILES == 2) map(s1, [=](float f) { return f * decay; });
  map_col(y, v.read, [](float f, float e) { return f * e; });
  ring_wait(s.x_ring[slot], at);
  sem_wait(s.p_full[at.stage][head], at.phase);
  mma_fence();
  mma_AtBt<ACC>(y, s.x[at.stage][slot], s.p[at.stage][head]);
  mma_commit();
  tma_store_wait_read();
  wg_sync();
  mma_wait<0>(y);
  store_t(s.y[wg], y);
  load_t(x, s.x[at.stage][slot]);
  map_col(x, v.weight, [](float f, float w) { return f * w; });
  mma_fence();
  mma_AB_cols<ACC>(s0, x, s.b[at.stage], 0);
  if (TILES == 2) mma_AB_cols<ACC>(s1, x, s.b[at.stage], W);
  mma_commit();
  fence_async();                 // behind the reads of x and the writes of y
  ring_release(s.x_ring[slot], at);
  wg_sync();
  bool over = runs_over(p, t, step);
  if (!over) tma_store(p.y, s.y[wg], step, row0, t.head + head, t.batch);
  if (TILES == 2) mma_wait<0>(s0, s1, x);
  else mma_wait<0>(s0, x);
  if (over) {
    elem *to = (elem *)p.y_data + step * p.y_step + (t.head + head) * p.y_head + row0;
    int64_t ld = p.y_step;
    int steps = t.end - step;
    load(y, s.y[wg]);
    store_rows<elem>(y, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.head_dim - row0);
  }
}

// Where the columns of a tile of the slot's state begin, in states of all heads the i-th.
TILE int64_t first_of(const params &p, const task &t, int64_t i, int slot, int col, ssd_order o) {
  int64_t matrix = (int64_t)p.head_dim * p.state_dim;
  return (i * p.heads + t.head + slot / SPLIT) * matrix + slot % SPLIT * 64 * o.row + col * o.col;
}
TILE void begin_state(const params &p, const task &t, rt<float, W> &s, int slot, int col) {
  const float *from = t.segment ? p.cuts : p.initial;
  int64_t i = t.segment ? (int64_t)t.row * p.cut_stride + t.segment - 1 : t.row;
  ssd_order o = {t.segment ? p.state_dim : p.order.row, t.segment ? 1 : p.order.col};
  if (!from) return fill(s, 0.f);          // as a value: the first use is a conversion, not a product
  load(s, from + first_of(p, t, i, slot, col, o), o.row, o.col, p.head_dim - slot % SPLIT * 64, p.state_dim - col);
  float factor = 1.f / p.scale;
  if (BACKWARDS) map(s, [=](float x) { return x * factor; });
}
TILE void keep_state(const params &p, const task &t, rt<float, W> &s, int slot, int col) {
  if (!p.final || t.segment + 1 < p.segments) return;
  float scale = p.scale;
  if (BACKWARDS) map(s, [=](float x) { return x * scale; });
  float *to = p.final + first_of(p, t, t.row, slot, col, p.order);
  store(to, p.order.row, p.order.col, s, p.head_dim - slot % SPLIT * 64, p.state_dim - col);
}

// Steps behind the last packed row are in no sequence.
TILE void clear_rest(const params &p, const task &t, int slot) {
  if (!p.starts || t.row + 1 < p.rows) return;
  int row0 = slot % SPLIT * 64;
  int64_t ld = p.y_step;
  elem *y = (elem *)p.y_data + (t.head + slot / SPLIT) * p.y_head + row0;
  rt<float, 64> zero;
  fill(zero, 0.f);
  for (int step = t.end; step < p.steps; step += Q) {
    elem *to = y + step * ld;
    int steps = p.steps - step;
    store_rows<elem>(zero, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.head_dim - row0);
  }
}

TILE void run_state(const params &p, shared &s, int wg) {
  // s1: of another slot, or other columns
  enum { TWO = HEADS * TILES == 2, OTHER = HEADS == 2 ? GROUPS : 0, COL = TILES == 2 ? W : 0 };
  task t = block_task(p);
  ring_pos at = {};
  rt<float, W> s0, s1;        // by name, not an array: registers
  begin_state(p, t, s0, wg, 0);
  if (TWO) begin_state(p, t, s1, wg + OTHER, COL);
  for (int step = first_chunk(t); is_chunk(t, step); step += NEXT) {
    ring_wait(s.bc_ring, at);
    ring_wait(s.v_ring, at);
    advance(s0, s1, p, s, t, at, step, wg, wg);
    if (HEADS == 2) advance(s1, s0, p, s, t, at, step, wg + OTHER, wg);
    ring_release(s.bc_ring, at);
    ring_release(s.v_ring, at);
    ring_next(s.v_ring, at);
  }
  keep_state(p, t, s0, wg, 0);
  if (TWO) keep_state(p, t, s1, wg + OTHER, COL);
  clear_rest(p, t, wg);
  if (HEADS == 2) clear_rest(p, t, wg + OTHER);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<score, WARPGROUP, 1, SCORE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<scan, WARP, 1, LOAD_REGS>, OCCUPANCY<PER_SM>> kernel;
ENTRY(kernel, Q, ALL)
