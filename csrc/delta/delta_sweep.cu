// Delta rules (gated: Yang, Kautz, Hatamizadeh 2024), forward, one pass over the sequence in chunks of 64 steps, the
// state in registers throughout. With l_i the sum of the log decays up to step i of a chunk whose last step is e, S the
// state before it, and M and P of delta_prepare.h:
//   R^T = (v^T - e^(l_i) S^T k^T) M^T,   u^T = beta_i R^T,   o^T = scale e^(l_i) S^T q^T + u^T P^T
//   S^T = e^(l_e) S^T + (u_i e^(l_e - l_i))^T k
// R_i is what the state before step i lacks of v_i. All products of the state have it, or what came out of one, as
// their register operand: nothing of them goes through shared memory. M^T and P^T do not depend on the state. PREPS
// warpgroups make those of later chunks meanwhile, and P^T with beta_j in row j, so that R stands where u would;
// without any, a kernel before this one has made them (delta_prepare.cu).
// CHANNELS, a decay for each channel: e^(l_i) k, scale e^(l_i) q, e^(l_e - l_i) k come as tiles, e^(l_e) as a vector.
// The kernel that makes them may run at the same time, on other multiprocessors: who reads of them waits for it then.
// CUT: only what segments of a row begin with is written (delta.h). A turn is what becomes of the unit matrix where v
// is 0: its columns stand where those of v would.
// EARLY: gates forget (delta.h). Segments begin with 0 some chunks early, whose output is not written.
// Steps past the end have g = beta = 0 and rows of zeros. Where the next packed row follows in memory, the scan warp
// clears its steps before products read them, and the last chunk's o is stored from registers.
// Where heads are few, two blocks share the work (PAIR): the first carries the state. The second makes o of what the
// first sends it of each chunk: the state's operands, and u as an operand.
// R and u are fp16 operands. A row of theirs, a column of v, is first multiplied with the reciprocal of its largest
// value; with PREPS only where fp16 would not hold it.
// Roles: a loader thread; SCANS warps: gates -> vectors; PREPS warpgroups, each every PREPS-th chunk; GROUPS warpgroups
// of 64 columns of v.
//
// Registers of a thread. State: S D / 2, x and y 32 each, two operands of 16, two rows' factors, with AHEAD two more
// operands of S. Prepare: two tiles of 32, and what invert() has beside them (delta_prepare.h).
#include "tile/l2.h"
#include "tile/order.h"
#include "tile/mail.h"
#include "tile/quarters.h"
#include "tile/numbers.h"
#include "delta/delta_early.h"

// D: columns of the state. GROUPS, PREPS, CHANNELS, CUT, EARLY, STAGES, READY, *_REGS
// WEIGHED: beta is in P, not in u. KEEPS: M and P go to memory too, as delta_prepare.cu makes them
// BOTH: k and q are in one tile, for products with both. Of 64 columns registers lack
// AHEAD: registers are there for the state in 16 bits
// HALVES: A is inverted in halves, and R found in two steps: whoever prepares chunks is waited for by all, and this is
// a third less of it
// LATE: and for what a chunk leaves to the next, whose first product it runs under
// PAIR: a cluster of two blocks. The second has q and P in the places of k and M. One ring has all that a block reads
// of a chunk
enum { PAIR = CLUSTER_SIZE == 2, ALL = !PAIR && !CUT };   // ALL: q and P are beside k and M
enum { KEEPS = EARLY == 2, WEIGHED = PREPS > 0 && !KEEPS, BOTH = GROUPS == 2 && PREPS == 1 && D == 128 };
enum { PANELS = D / 64, READERS = GROUPS + (PREPS > 0), AHEAD = (GROUPS == 1 || PREPS == 0) && !CUT };
// TOLD: chunks may be prepared meanwhile
enum { TOLD = CHANNELS && !CUT };
enum { LATE = PREPS == 0 && !CUT && !PAIR && (GROUPS == 1 || !CHANNELS) };
// SCANS: a pair takes less time for a chunk than a scan warp does. A stage has one of them: another might take a phase
// of its semaphore for the one after next
enum { SCANS = PAIR ? STAGES : 1 };
enum { HALVES = GROUPS == 2 && PREPS == 1 && !KEEPS };
static_assert(!PAIR || (GROUPS == 1 && PREPS == 0 && READY == STAGES && !CHANNELS && !CUT), "what a pair can do");
static_assert(!EARLY || (PREPS == 1 && !PAIR && !CHANNELS && !CUT), "what begins early");
static_assert(READY % (PREPS ? PREPS : 1) == 0, "a stage of `ready` has one producer");
typedef st<elem, Q, D> wide;
typedef st<elem, Q, 64> tile;
// What a pair's second block wants of a chunk: the state's halves, and u as an operand with the factors of its rows
struct letter { mail<elem, 64> low, high; mail<inner, Q> factor; mail_rows down; };
struct shared {
  st<elem, 2 * Q, D> keys[BOTH ? STAGES : 0];   // k, then q
  wide k[BOTH ? 0 : STAGES], q[ALL && !BOTH ? STAGES : 0], w[CHANNELS ? STAGES : 0];
  st<exact, Q, D> turns[CUT ? GROUPS : 0];
  tile v[PAIR ? STAGES : 2][GROUPS], o[CUT ? 0 : GROUPS];
  square m[READY], p[ALL ? READY : 0];
  tri<inner> scratch[PREPS];
  chunk_vectors vec[STAGES];              // CHANNELS: beta only
  sv<D> ends[CHANNELS ? STAGES : 0];
  ring<STAGES, ASYNC_READS> k_ring;       // k, q, w, ends. PAIR: all that a block reads of a chunk. v is read through
                                          // registers: who does that fences before the release
  ring<STAGES, ASYNC_READS> vec_ring;     // refilled by plain stores only, which need no fence
  ring<READY, ASYNC_READS> ready;         // m and p
  ring<2> v_ring;                         // this one and the two before it: not of a PAIR
  letter letters[PAIR ? READY : 0];
  ring<READY> mail_ring;                  // in step with k_ring
  sem last;                               // the tiles of a last chunk that runs over are there, and to be cleared
};
typedef delta_sweep_params params;

// The kernel that prepares meanwhile began behind those in front of it.
TILE bool is_done(const params &p) { return TOLD && p.done ? is_taken(p.taken) : was_taken(p.taken); }
TILE void init(shared &s) {
  ring_init(s.k_ring, arrivals(1, PAIR, 0), arrivals(0, 0, READERS));
  if (!PAIR) {
    ring_init(s.vec_ring, arrivals(0, 1, 0), arrivals(0, 0, READERS));
    ring_init(s.ready, PREPS ? arrivals(0, 0, 1) : arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
    ring_init(s.v_ring, arrivals(1, 0, 0), arrivals(0, 0, GROUPS));
  }
  if (PAIR) ring_init(s.mail_ring, arrivals(0, 0, PANELS + 2), arrivals(0, 0, 1));
  sem_init(s.last, arrivals(1 + (!CHANNELS && !PAIR), 0, 0));
}

// col: the block's first column of v, or of a turn. early: chunks of r in front of the segment
struct task { row_task r; int segment, segments, col, early; bool turns; };
TILE task block_task(const params &p) {
  enum { WIDTH = 64 * GROUPS };
  int segments = p.cut.segments > 1 ? p.cut.segments : 1, parts = (p.value_dim + WIDTH - 1) / WIDTH;
  int i = block_index() / CLUSTER_SIZE;
  int cuts = CUT ? segments - 1 : segments, first = p.rows.rows * p.rows.heads * cuts * parts;
  bool turns = CUT && i >= first;
  if (turns) {                            // segment 0 has none
    i -= first;
    cuts--;
    parts = (D + WIDTH - 1) / WIDTH;
  }
  int unit = i / parts, matrices = p.rows.rows * p.rows.heads;
  int matrix = EARLY ? unit % matrices : unit / cuts, segment = EARLY ? unit / matrices : unit - matrix * cuts;
  int row = matrix / p.rows.heads;
  task b = {task_of(p.rows, row, matrix - row * p.rows.heads), segment + turns, segments,
            (i - unit * parts) * WIDTH, 0, turns};
  if (segments > 1) take_segment(b.r, b.segment, p.cut.segment);
  if (EARLY) b.early = begin_early(b.r, b.segment, few_early(p.cut.early, p.cut.earlies));
  return b;
}

TILE bool makes_o() { return PAIR && cluster_rank() == 1; }   // a pair's second block

// The chunks of the head's wave in this place are there.
template<int W> TILE void wait_for_place(const params &p, const row_task &t, int place) {
  int wave = (t.row * p.rows.heads + t.head) / p.wave;
  int heads = wave_width(p.wave, wave * p.wave, p.rows.rows * p.rows.heads);
  grid_wait_part<W>(p.done + wave * p.rows.places + place, heads);
}
// Nothing is read or written before.
template<int W> TILE void begin(const params &p) {
  if (TOLD && p.done) wait_for_place<W>(p, block_task(p).r, 0);
  else grid_wait();
}
// What is prepared meanwhile is in the L2 when it is read, if what nobody wants again leaves it.
template<class Tile>
TILE void read_once(Tile &x, const params &p, const gmap &m, sem &full, int row, int col, const row_task &t) {
  if (TOLD) tma_load(x, m, full, row, col, t.head, t.batch, p.done ? LEAVES : USUAL);
  else tma_load(x, m, full, row, col, t.head, t.batch);
}

TILE void loader(const params &p, shared &s, int) {
  begin<THREAD>(p);
  task b = block_task(p);
  const row_task &t = b.r;
  ring_pos at = {}, in = {}, to = {};
  for (int chunk = 0; chunk < t.chunks; chunk++) {
    int step = t.first + chunk * Q, place = t.place + chunk, i = at.stage;
    bool over = runs_over(p.rows, step, t.end);
    ring_acquire(s.k_ring, at);
    if (PAIR) {
      bool second = makes_o();
      sem &full = over ? s.last : s.k_ring.full[i];
      sem_expect(full, tile_bytes(s.k[0]) + tile_bytes(s.m[0]) + (second ? 0 : tile_bytes(s.v[0][0])));
      tma_load(s.k[i], second ? p.q : p.k, full, step, 0, t.key_head, t.batch);
      if (!second) tma_load(s.v[i][0], p.v, full, step, b.col, t.head, t.batch);
      tma_load(s.m[i], second ? p.p : p.m, full, place * Q, 0, t.head, t.batch);
      ring_next(s.k_ring, at);
      continue;
    }
    if (CHANNELS) {
      if (TOLD && p.done && chunk) wait_for_place<THREAD>(p, t, place);
      sem &full = s.k_ring.full[i];
      sem_expect(full, (3 - CUT) * tile_bytes(s.k[0]) + D * 4);
      read_once(s.k[i], p, p.k, full, place * Q, 0, t);
      if (!CUT) read_once(s.q[i], p, p.q, full, place * Q, 0, t);
      read_once(s.w[i], p, p.w, full, place * Q, 0, t);
      tma_load(s.ends[i], p.ends + (((int64_t)t.batch * p.rows.heads + t.head) * p.rows.places + place) * D, full);
    } else {
      sem &full = over ? s.last : s.k_ring.full[i];
      sem_expect(full, BOTH ? tile_bytes(s.keys[0]) : (1 + ALL) * tile_bytes(s.k[0]));
      if (BOTH) {
        tma_load_rows(s.keys[i], 0, Q, p.k, full, step, 0, t.key_head, t.batch);
        tma_load_rows(s.keys[i], Q, Q, p.q, full, step, 0, t.key_head, t.batch);
      } else {
        tma_load(s.k[i], p.k, full, step, 0, t.key_head, t.batch);
        if (ALL) tma_load(s.q[i], p.q, full, step, 0, t.key_head, t.batch);
      }
    }
    ring_next(s.k_ring, at);
    if (!b.turns) {
      sem &full = over ? s.last : s.v_ring.full[in.stage];
      ring_acquire(s.v_ring, in);
      sem_expect(full, GROUPS * tile_bytes(s.v[0][0]));
      ROLLED for (int g = 0; g < GROUPS; g++)
        read_once(s.v[in.stage][g], p, p.v, full, step, b.col + 64 * g, t);
      ring_next(s.v_ring, in);
    }
    if (PREPS) continue;
    ring_acquire(s.ready, to);
    ring_expect(s.ready, to, (1 + ALL) * tile_bytes(s.m[0]));
    sem &full = s.ready.full[to.stage];
    read_once(s.m[to.stage], p, p.m, full, place * Q, 0, t);
    if (ALL) read_once(s.p[to.stage], p, p.p, full, place * Q, 0, t);
    ring_next(s.ready, to);
  }
}

// Fills the stages of a chunk that runs over: no row of its tiles is another sequence's then.
TILE void clear_behind(shared &s, ring_pos at, ring_pos in, int steps) {
  sem_wait(s.last, 0);
  if (BOTH) clear_halves<WARP>(s.keys[at.stage], steps);
  if (!CHANNELS && !BOTH) clear_rows<WARP>(s.k[at.stage], 0, steps);
  if (!CHANNELS && ALL && !BOTH) clear_rows<WARP>(s.q[at.stage], 0, steps);
  ROLLED for (int g = 0; g < GROUPS && !makes_o(); g++)
    clear_rows<WARP>(s.v[PAIR ? at.stage : in.stage][g], 0, steps);
  if (!CHANNELS) fence_async();          // v is read into registers
  if (!CHANNELS) sem_arrive<WARP>(s.k_ring.full[at.stage]);
  if (!PAIR) sem_arrive<WARP>(s.v_ring.full[in.stage]);
}

// One of SCANS warps, each every SCANS-th chunk. Its next chunk's gates are under way while this one's are worked on.
TILE void scan(const params &p, shared &s, int index) {
  begin<WARP>(p);
  task b = block_task(p);
  const row_task &t = b.r;
  ring<STAGES, ASYNC_READS> &made = PAIR ? s.k_ring : s.vec_ring;
  given_steps next;
  int first = t.first + index * Q;
  if (CHANNELS) load_beta(next.beta, p.rows, p.gates, t, first);
  else load_given(next, p.rows, p.gates, t, first);
  for (int chunk = index; chunk < t.chunks; chunk += SCANS) {
    int step = t.first + chunk * Q, then = step + SCANS * Q;
    ring_pos at = ring_at<STAGES>(chunk);
    chunk_vectors &v = s.vec[at.stage];
    if (CHANNELS) {
      ring_acquire(made, at);
      put_beta(v.beta, next.beta, p.gates);
      int place = t.place + chunk + 1;
      if (TOLD && p.done && chunk + 1 < t.chunks) wait_for_place<WARP>(p, t, place);
      load_beta(next.beta, p.rows, p.gates, t, then);
    } else if (PREPS) {
      ring_acquire(made, at);
      put_vectors(v, next, p.gates, t.head, p.scale);
      load_given(next, p.rows, p.gates, t, then);
    } else {                              // the loads come first, and have until the next turn
      given_steps given = next;
      wv<Q> l;
      load_given(next, p.rows, p.gates, t, then);
      sum_decays(l, given, p.gates, t.head);
      ring_acquire(made, at);
      if (!makes_o()) put_state_vectors(v, given, l, p.gates);
      if (PAIR ? makes_o() : !CUT) put_read(v, given, l, p.scale);
    }
    if (PAIR && !makes_o()) ring_acquire(s.mail_ring, at);   // room for the letter: the state waits for one phase
    sem_arrive<WARP>(made.full[at.stage]);
    if (runs_over(p.rows, step, t.end)) clear_behind(s, at, ring_at<2>(chunk), t.end - step);
  }
}

TILE void prepare(const params &p, shared &s, int index) {
  grid_wait();
  task b = block_task(p);
  int chunks = b.r.chunks;
  for (int chunk = index; chunk < chunks; chunk += PREPS) {
    ring_pos at = ring_at<STAGES>(chunk), to = ring_at<READY>(chunk);
    chunk_vectors &v = s.vec[at.stage];
    rt<float, Q> reads, writes, inverse;
    ring_wait(s.k_ring, at);
    if (BOTH) begin_pairs(reads, writes, s.keys[at.stage]);
    else begin_pairs(reads, writes, s.k[at.stage], s.q[at.stage]);
    ring_wait(s.vec_ring, at);
    mma_wait<0>(reads, writes);
    ring_release(s.k_ring, at);
    make_pairs(reads, writes, v, WEIGHED);  // the state's warpgroups leave beta out then
    ring_release(s.vec_ring, at);
    ring_acquire(s.ready, to);
    store(s.p[to.stage], reads);
    if (HALVES) {
      invert_in_halves(inverse, writes, s.scratch[index]);
      store_carried<IN_HALVES>(s.m[to.stage], inverse);
    } else {
      invert(inverse, writes, s.scratch[index]);
      store_carried(s.m[to.stage], inverse);
    }
    ring_fill(s.ready, to);
    if (KEEPS) tma_store_wait_read<2>();  // the last chunk but one has left: its tiles are written next
    wg_sync();                            // everybody has read scratch
    if (KEEPS && chunk >= b.early) {
      tma_store(p.p, s.p[to.stage], (b.r.place + chunk) * Q, 0, b.r.head, b.r.batch);
      tma_store(p.m, s.m[to.stage], (b.r.place + chunk) * Q, 0, b.r.head, b.r.batch);
    }
  }
  if (KEEPS) tma_store_wait_read();
}

// x = S^T k^T and y = S^T q^T, 64 columns of the state at a time.
TILE void read_panel(rt<float, Q> &x, rt<float, Q> &y, const rt<elem, 64> &part, shared &s, int stage, int col) {
  mma_fence();
  if (BOTH) {
    if (col == 0) mma_ABt_halves<ZERO>(x, y, part, s.keys[stage], col);
    else mma_ABt_halves<ACC>(x, y, part, s.keys[stage], col);
    return mma_commit();
  }
  if (col == 0) mma_ABt_part<ZERO>(x, part, s.k[stage], col);
  else mma_ABt_part<ACC>(x, part, s.k[stage], col);
  if (CUT) return mma_commit();
  if (col == 0) mma_ABt_part<ZERO>(y, part, s.q[stage], col);
  else mma_ABt_part<ACC>(y, part, s.q[stage], col);
  mma_commit();
}

// o of a chunk, which the warpgroup has stored and fenced
TILE void send_o(const params &p, shared &s, const task &b, int chunk, int wg) {
  wg_sync();
  int row = b.r.first + chunk * Q, col = b.col + 64 * wg;
  if (TOLD) tma_store(p.o, s.o[wg], row, col, b.r.head, b.r.batch, p.done ? LEAVES : USUAL);
  else tma_store(p.o, s.o[wg], row, col, b.r.head, b.r.batch);
}
TILE void send_last_o(const params &p, shared &s, const task &b, int wg) {
  const row_task &t = b.r;
  int step = t.first + (t.chunks - 1) * Q, steps = t.end - step, col = b.col + 64 * wg;
  fence_async();
  if (!runs_over(p.rows, step, t.end)) return send_o(p, s, b, t.chunks - 1, wg);
  elem *to = (elem *)p.o_data + step * p.o_step + t.head * p.o_head + col;
  int64_t ld = p.o_step;
  rt<float, Q> y;
  wg_sync();
  load(y, s.o[wg]);
  store_rows<elem>(y, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.value_dim - col);
}

TILE void scale_state(rt<float, D> &state, const shared &s, const chunk_vectors &v, int stage) {
  if (CHANNELS) return map_col(state, s.ends[stage], [](float f, float e) { return f * e; });
  float decay = fast_exp2(get(v.l, Q - 1));
  map(state, [=](float f) { return f * decay; });
}

// R^T and u, as operands, of x in halves: R of the first one, what is left of the last, R of that. Whatever else there
// is to be done stands under these three products.
TILE void solve_in_halves(const rt<float, Q> &x, rt<float, Q> &y, rt<float, D> &state, rt<inner, Q> &error,
                          rt<elem, Q> &u, const rv &down, shared &s, int stage, ring_pos from) {
  const chunk_vectors &v = s.vec[stage];
  const square &m = s.m[from.stage];
  rt<float, Q / 2> first, last;
  rt<inner, Q / 2> a, b;
  rt<elem, Q / 2> c, d;
  split_halves(first, last, x);
  convert(a, first);
  ring_wait(s.ready, from);
  mma_fence();
  mma_AB_quarter<ZERO>(first, a, m, 0, 0);
  mma_commit();
  map_col(y, v.read, [](float f, float e) { return f * e; });
  tma_store_wait_read();
  wg_sync();                              // o's tile is free
  scale_state(state, s, v, stage);
  mma_wait<0>(first, a);
  convert(a, first);
  mma_fence();
  mma_AB_quarter<ACC>(last, a, m, 0, 32);
  mma_commit();
  map_row(first, down, [](float f, float m) { return f * m; });
  map_col(first, slice<32>(v.write, 0), [](float f, float w) { return f * w; });
  convert(c, first);
  mma_wait<0>(last, a);
  convert(b, last);
  mma_fence();
  mma_AB_quarter<ZERO>(last, b, m, 32, 32);
  mma_commit();
  mma_wait<0>(last, b);
  convert(b, last);
  map_row(last, down, [](float f, float m) { return f * m; });
  map_col(last, slice<32>(v.write, 32), [](float f, float w) { return f * w; });
  convert(d, last);
  join_halves(error, a, b);
  join_halves(u, c, d);
}

// One chunk. The state is scaled while no product of it is in flight. o leaves under the next chunk's first product.
TILE void advance(rt<float, D> &state, const params &p, shared &s, const task &b, ring_pos at, ring_pos in,
                  ring_pos from, int chunk, int wg) {
  chunk_vectors &v = s.vec[at.stage];
  rt<float, Q> x, y;
  rt<inner, Q> factor;
  rt<elem, 64> part, low, high;           // low, high: the state's halves
  rv up, down;
  int i = at.stage;
  ring_wait(s.k_ring, at);
  if (AHEAD) {                            // y's products run on while x is worked on
    convert_part(low, state, 0);
    if (PANELS == 2) convert_part(high, state, 64);
    mma_fence();
    mma_ABt_part<ZERO>(x, low, s.k[i], 0);
    if (PANELS == 2) mma_ABt_part<ACC>(x, high, s.k[i], 64);
    mma_commit();
    mma_ABt_part<ZERO>(y, low, s.q[i], 0);
    if (PANELS == 2) mma_ABt_part<ACC>(y, high, s.q[i], 64);
    mma_commit();
    ring_wait(s.vec_ring, at);
    ring_wait(s.v_ring, in);
    load_t(part, s.v[in.stage][wg]);
    ring_release(s.v_ring, in);
    if (chunk) send_o(p, s, b, chunk - 1, wg);
    mma_wait<1>(x);
  } else {                                // with fewer registers; another warpgroup has the tensor cores meanwhile
    convert_part(part, state, 0);
    read_panel(x, y, part, s, i, 0);
    if (!CUT && chunk) {
      fence_async();                      // o is written, v was read
      sem_arrive<WARPGROUP>(s.v_ring.empty[in.stage ^ 1]);
      if (!EARLY || chunk > b.early) send_o(p, s, b, chunk - 1, wg);
    }
    ring_wait(s.vec_ring, at);
    mma_wait<0>(x, y, part);
    if (PANELS == 2) {
      convert_part(part, state, 64);
      read_panel(x, y, part, s, i, 64);
    }
    if (!b.turns) ring_wait(s.v_ring, in);
    if (PANELS == 2) mma_wait<0>(x, y, part);
    if (!b.turns) {
      load_t(part, s.v[in.stage][wg]);
      if (CUT) ring_release(s.v_ring, in);
    }
  }
  if (b.turns && CHANNELS) map(x, [](float a) { return -a; });
  else if (b.turns) map_col(x, v.decay, [](float a, float e) { return -a * e; });
  else if (CHANNELS) map_col(x, part, v.beta, [](float a, float b, float) { return b - a; });
  else map_col(x, part, v.decay, [](float a, float b, float e) { return b - a * e; });
  if (PREPS) {
    few_factors(up, down, x);
    scale_rows(x, up);
  } else {
    row_factors(up, down, x);
    map_row(x, up, [](float f, float m) { return f * m; });
  }
  if (HALVES) solve_in_halves(x, y, state, factor, part, down, s, i, from);
  else {
    convert(factor, x);
    ring_wait(s.ready, from);
    mma_fence();
    mma_AB<ZERO>(x, factor, s.m[from.stage]);   // R^T
    mma_commit();
    if (AHEAD && PANELS == 2) mma_wait<1>(y, low, high);
    else if (AHEAD) mma_wait<1>(y, low);
    scale_state(state, s, v, i);
    if (!CUT) tma_store_wait_read();
    if (!CUT && !CHANNELS) map_col(y, v.read, [](float f, float e) { return f * e; });
    if (!CUT) wg_sync();                  // o's tile is free
    mma_wait<0>(x, factor);
    if (CUT) {
      map_row(x, down, [](float f, float m) { return f * m; });
      map_col(x, v.beta, [](float f, float b) { return f * b; });
      if (!CHANNELS) map_col(x, v.weight, [](float f, float w) { return f * w; });
      convert(part, x);
    } else {
      if (!WEIGHED) map_col(x, v.beta, [](float f, float b) { return f * b; });
      convert(factor, x);
      map_row(x, down, [](float f, float m) { return f * m; });
      if (!CHANNELS) map_col(x, WEIGHED ? v.write : v.weight, [](float f, float w) { return f * w; });
      convert(part, x);
      mma_fence();
      mma_AB<ZERO>(x, factor, s.p[from.stage]);   // u^T P^T
      mma_commit();
    }
  }
  ring_release(s.vec_ring, at);
  if (CUT || HALVES) mma_fence();           // else that of the product before
  if (BOTH) mma_AB_rows<ACC>(state, part, s.keys[i], 0);
  else mma_AB<ACC>(state, part, CHANNELS ? s.w[i] : s.k[i]);
  mma_commit();
  if (HALVES) {                             // registers lack for both products in flight
    mma_wait<0>(state, part);
    mma_fence();
    mma_AB<ZERO>(x, factor, s.p[from.stage]);
    mma_commit();
  }
  if (!CUT) {
    if (HALVES) mma_wait<0>(x, factor);
    else mma_wait<1>(x, factor);
    each<Q>([](int, int, float &y, float x, float m) { y = fused(x, m, y); }, y, (const rt<float, Q> &)x, down);
    store_t(s.o[wg], y);
  }
  if (CHANNELS) fence_async();            // the ends have been read
  if (!HALVES) mma_wait<0>(state, part);
  ring_release(s.ready, from);
  ring_release(s.k_ring, at);
}

// Where LATE. A chunk of which R^T is there; u^T P^T, the sums, whose product is in flight while the next chunk begins;
// and scale e^(l_i) S^T q^T. down: of rows of R and of the sums.
struct late { rt<float, Q> error, sums, reads; rt<inner, Q> factor; rv down; cv<Q> writes; };
TILE void put_o(late &c, shared &s, int wg) {
  each<Q>([](int, int, float &y, float x, float m) { y = fused(x, m, y); }, c.reads, (const rt<float, Q> &)c.sums,
          c.down);
  store_t(s.o[wg], c.reads);
}

// R of a chunk. The chunk before, where there is one, has its o made under the first product.
TILE void read_state(rt<float, D> &state, late &c, const params &p, shared &s, const task &b, ring_pos at, ring_pos in,
                     ring_pos from, ring_pos before, int chunk, bool begins, int wg) {
  chunk_vectors &v = s.vec[at.stage];
  rt<float, Q> &x = c.error, value;
  rt<elem, 64> part, low, high;           // low, high: the state's halves
  cv<Q> decays;
  rv up;
  int i = at.stage;
  convert_part(low, state, 0);
  if (PANELS == 2) convert_part(high, state, 64);
  ring_wait(s.k_ring, at);
  mma_fence();
  mma_ABt_part<ZERO>(x, low, s.k[i], 0);
  if (PANELS == 2) mma_ABt_part<ACC>(x, high, s.k[i], 64);
  mma_commit();
  if (!begins) {
    mma_wait<1>(c.sums, c.factor);
    ring_release(s.ready, before);
    put_o(c, s, wg);
    mma_fence();
  }
  mma_ABt_part<ZERO>(c.reads, low, s.q[i], 0);
  if (PANELS == 2) mma_ABt_part<ACC>(c.reads, high, s.q[i], 64);
  mma_commit();
  ring_wait(s.vec_ring, at);
  ring_wait(s.v_ring, in);
  load_t(part, s.v[in.stage][wg]);
  ring_release(s.v_ring, in);             // with a fence behind which o is written
  if (!begins) send_o(p, s, b, chunk - 1, wg);
  fill(value, 0.f);
  map_col(value, part, v.beta, [](float, float x, float) { return x; });
  if (!CHANNELS) load(decays, v.decay);
  mma_wait<1>(x);
  if (CHANNELS) map(x, value, [](float a, float b) { return b - a; });
  else map_col(x, value, decays, [](float a, float b, float e) { return b - a * e; });
  row_factors(up, c.down, x);
  map_row(x, up, [](float f, float m) { return f * m; });
  convert(c.factor, x);
  ring_wait(s.ready, from);
  mma_fence();
  mma_AB<ZERO>(x, c.factor, s.m[from.stage]);
  mma_commit();
  if (PANELS == 2) mma_wait<1>(c.reads, low, high);
  else mma_wait<1>(c.reads, low);
  scale_state(state, s, v, i);
  if (!CHANNELS) map_col(c.reads, v.read, [](float f, float e) { return f * e; });
  load(c.writes, CHANNELS ? v.beta : v.write);
  if (!begins) {
    tma_store_wait_read();
    wg_sync();                            // o's tile may be written again
  }
  mma_wait<0>(x, c.factor);
}

// The state behind the chunk. Its product comes first: the next chunk waits for it.
TILE void write_state(rt<float, D> &state, late &c, shared &s, ring_pos at, ring_pos from, bool ends) {
  chunk_vectors &v = s.vec[at.stage];
  rt<elem, 64> part;
  fill(c.sums, 0.f);
  map_col(c.sums, c.error, c.writes, [](float, float f, float w) { return f * w; });
  map_row(c.sums, c.down, [](float f, float m) { return f * m; });
  convert(part, c.sums);
  mma_fence();
  mma_AB<ACC>(state, part, CHANNELS ? s.w[at.stage] : s.k[at.stage]);
  mma_commit();
  map_col(c.error, v.beta, [](float f, float b) { return f * b; });
  convert(c.factor, c.error);
  mma_fence();
  mma_AB<ZERO>(c.sums, c.factor, s.p[from.stage]);
  mma_commit();
  if (!ends) ring_release(s.vec_ring, at);
  if (!ends && CHANNELS) fence_async();   // the ends have been read
  mma_wait<1>(state, part);
  if (!ends) ring_release(s.k_ring, at);
}

TILE void run_late(rt<float, D> &state, const params &p, shared &s, const task &b, int wg) {
  ring_pos at = {}, in = {}, from = {};
  late c;
  read_state(state, c, p, s, b, at, in, from, from, 0, true, wg);
  for (int chunk = 1; chunk < b.r.chunks; chunk++) {
    ring_pos before = from;
    write_state(state, c, s, at, from, false);
    ring_next(s.k_ring, at);
    ring_next(s.v_ring, in);
    ring_next(s.ready, from);
    read_state(state, c, p, s, b, at, in, from, before, chunk, false, wg);
  }
  write_state(state, c, s, at, from, true);
  mma_wait<0>(c.sums, c.factor);
  put_o(c, s, wg);
}

// Where PAIR, by the first block. Of a chunk its v, and the state in front of it as operands
struct chunk_ahead { rt<float, Q> value; rt<elem, 64> low, high; };
TILE void split_state(chunk_ahead &a, const rt<float, D> &state) {
  convert_part(a.low, state, 0);
  if (PANELS == 2) convert_part(a.high, state, 64);
}
// any: what map_col() wants. Nobody looks at it.
TILE void take_value(rt<float, Q> &value, const tile &v, const chunk_vectors &any) {
  rt<elem, 64> part;
  load_t(part, v);
  fill(value, 0.f);
  map_col(value, part, any.beta, [](float, float x, float) { return x; });
}

// One chunk, and what the next one has ahead. Every product is waited for before the next one is issued; all other work
// stands under one of the three. A part of the letter leaves under each: a warp that sends faster than others take
// waits for its registers.
TILE void send_chunk(rt<float, D> &state, chunk_ahead &a, shared &s, ring_pos at, bool more) {
  int i = at.stage;
  const chunk_vectors &v = s.vec[i];
  letter &to = s.letters[i];
  sem &full = s.mail_ring.full[i];
  ring_pos next = at;
  rt<float, Q> x, error;
  rt<elem, Q> u;
  rt<inner, Q> factor;
  cv<Q> decays, writes;
  rv up, down;
  ring_next(s.k_ring, next);
  mma_fence();
  mma_ABt_part<ZERO>(x, a.low, s.k[i], 0);
  if (PANELS == 2) mma_ABt_part<ACC>(x, a.high, s.k[i], 64);
  mma_commit();
  float decay = fast_exp2(get(v.l, Q - 1));
  load(decays, v.decay);
  load(writes, v.write);
  mail_send(to.low, a.low, full, 1);
  if (PANELS == 2) mma_wait<0>(x, a.low, a.high);
  else mma_wait<0>(x, a.low);
  map(state, [=](float f) { return f * decay; });   // under the shuffles below; above, ptxas would wait for x
  map_col(x, a.value, decays, [](float a, float b, float e) { return b - a * e; });
  row_factors(up, down, x);
  map_row(x, up, [](float f, float m) { return f * m; });
  convert(factor, x);
  mma_fence();
  mma_AB<ZERO>(error, factor, s.m[i]);    // R^T
  mma_commit();
  if (PANELS == 2) mail_send(to.high, a.high, full, 1);
  mma_wait<0>(error, factor);
  map_col(x, error, writes, [](float, float f, float w) { return f * w; });
  map_row(x, down, [](float f, float m) { return f * m; });
  convert(u, x);
  mma_fence();
  mma_AB<ACC>(state, u, s.k[i]);
  mma_commit();
  if (more) {
    ring_wait(s.k_ring, next);
    take_value(a.value, s.v[next.stage][0], s.vec[next.stage]);
    fence_async();                        // v has been read
  }
  map_col(error, v.beta, [](float f, float b) { return f * b; });
  convert(factor, error);
  mail_send(to.factor, factor, full, 1);
  mail_send(to.down, down, full, 1);
  mma_wait<0>(state, u);
  ring_release(s.k_ring, at);
  split_state(a, state);
}

TILE void run_first(rt<float, D> &state, shared &s, const task &b) {
  ring_pos at = {};
  chunk_ahead a;
  ring_wait(s.k_ring, at);
  take_value(a.value, s.v[0][0], s.vec[0]);
  split_state(a, state);
  for (int chunk = 0; chunk < b.r.chunks; chunk++) {
    send_chunk(state, a, s, at, chunk + 1 < b.r.chunks);
    ring_next(s.k_ring, at);
  }
}

// By the second: o.
TILE void run_second(const params &p, shared &s, const task &b, int wg) {
  ring_pos at = {};
  late c;
  rt<elem, 64> low, high;
  for (int chunk = 0; chunk < b.r.chunks; chunk++) {
    int i = at.stage;
    const letter &m = s.letters[i];
    ring_wait(s.k_ring, at);
    ring_wait(s.mail_ring, at);
    mail_take(low, m.low);
    if (PANELS == 2) mail_take(high, m.high);
    mail_take(c.factor, m.factor);
    mail_take(c.down, m.down);
    mma_fence();
    mma_ABt_part<ZERO>(c.reads, low, s.k[i], 0);
    if (PANELS == 2) mma_ABt_part<ACC>(c.reads, high, s.k[i], 64);
    mma_commit();
    mma_AB<ZERO>(c.sums, c.factor, s.m[i]);
    mma_commit();
    if (chunk) {
      tma_store_wait_read();
      wg_sync();                          // o's tile may be written again
    }
    if (PANELS == 2) mma_wait<1>(c.reads, low, high);
    else mma_wait<1>(c.reads, low);
    map_col(c.reads, s.vec[i].read, [](float f, float e) { return f * e; });
    mma_wait<0>(c.sums, c.factor);
    ring_release(s.k_ring, at);
    put_o(c, s, wg);
    mail_done(s.mail_ring.empty[i], 0);
    if (chunk + 1 < b.r.chunks) {
      fence_async();
      send_o(p, s, b, chunk, wg);
    }
    ring_next(s.k_ring, at);
  }
}

TILE int64_t first_of(const params &p, const task &b, int wg, int64_t i, ssd_order o) {
  return (i * p.rows.heads + b.r.head) * o.matrix + (b.col + 64 * wg) * o.row;
}
TILE float *cut_of(const params &p, const task &b, int wg, int cut) {   // behind segment `cut`
  ssd_order order = {p.key_dim, 1, p.key_dim * p.value_dim};
  return p.cut.states + first_of(p, b, wg, (int64_t)b.r.row * p.cut.stride + cut, order);
}
TILE void begin_state(rt<float, D> &state, const params &p, const task &b, int wg) {
  int cols = p.value_dim - b.col - 64 * wg, col = b.col + 64 * wg;
  fill(state, 0.f);
  if (b.turns) map_rc(state, [=](float, int row, int k) { return k == row + col ? 1.f : 0.f; });
  else if (b.segment == 0 && p.initial) {
    ssd_order o = p.initial_order;
    load(state, p.initial + first_of(p, b, wg, b.r.row, o), o.row, o.col, cols, p.key_dim);
  } else if (b.segment > 0 && !CUT && !EARLY)
    load(state, cut_of(p, b, wg, b.segment - 1), p.key_dim, 1, cols, p.key_dim);
}
// The leading bits are (1 + 2^16) S - 2^16 S, of which only the sum is rounded.
TILE void put_turn(const params &p, shared &s, const task &b, rt<float, D> &state, int wg) {
  rt<float, D> part;
  rt<exact, 64> panel;
  fill(part, 0.f);
  map(part, state, [](float, float x) { return fused(x, 65536.f, x) - 65536.f * x; });
  map(state, part, [](float x, float most) { return x - most; });
  ROLLED for (int rest = 0; rest < 2; rest++) {
    UNROLLED for (int c = 0; c < D; c += 64) {
      convert_part(panel, part, c);
      store(s.turns[wg], panel, c);
    }
    fence_async();
    wg_sync();
    tma_store(p.turns, s.turns[wg], rest * D + b.col + 64 * wg, 0, b.segment, b.r.row * p.rows.heads + b.r.head);
    tma_store_wait_read();
    wg_sync();
    map(part, state, [](float, float x) { return x; });
  }
}
TILE void put_between(const params &p, const task &b, const rt<float, D> &state, int cut, int wg) {
  store_acc(early_state(p.cut, p.rows, b.r, cut, b.col / 64 + wg, D), state);
}
TILE void end_state(const params &p, shared &s, const task &b, rt<float, D> &state, int wg) {
  int cols = p.value_dim - b.col - 64 * wg;
  if (b.turns) {
    if (b.col + 64 * wg < D) put_turn(p, s, b, state, wg);
    return;
  }
  if (CUT) return store(cut_of(p, b, wg, b.segment), p.key_dim, 1, state, cols, p.key_dim);
  if (EARLY && b.segment + 1 < b.segments) return put_between(p, b, state, b.segment, wg);
  if (!p.final || b.segment + 1 < b.segments) return;
  ssd_order o = p.final_order;
  store(p.final + first_of(p, b, wg, b.r.row, o), o.row, o.col, state, cols, p.key_dim);
}
// Steps behind the last packed row are in no sequence.
TILE void clear_rest(const params &p, const task &b, int wg) {
  const row_task &t = b.r;
  if (!p.rows.starts || t.row + 1 < p.rows.rows) return;
  int col = b.col + 64 * wg;
  int64_t ld = p.o_step;
  elem *o = (elem *)p.o_data + t.head * p.o_head + col;
  rt<float, 64> zero;
  fill(zero, 0.f);
  for (int step = t.end; step < p.rows.steps; step += Q) {
    elem *to = o + step * ld;
    int steps = p.rows.steps - step;
    store_rows<elem>(zero, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.value_dim - col);
  }
}

TILE void run_state(const params &p, shared &s, int wg) {
  begin<WARPGROUP>(p);
  task b = block_task(p);
  ring_pos at = {}, in = {}, from = {};
  if (makes_o()) {
    run_second(p, s, b, wg);
    if (b.r.chunks) send_last_o(p, s, b, wg);
    clear_rest(p, b, wg);
    return tma_store_wait_read();
  }
  rt<float, D> state;                     // S^T: 64 columns of v by K
  if (EARLY && block_index() == 0 && wg == 0) tell_taken(p.cut.takes, b.r.chunks > 0);
  if (EARLY && b.r.chunks == 0) return;
  begin_state(state, p, b, wg);
  if (LATE && b.r.chunks) run_late(state, p, s, b, wg);
  if (PAIR && b.r.chunks) run_first(state, s, b);
  for (int chunk = 0; chunk < b.r.chunks && !LATE && !PAIR; chunk++) {
    if (EARLY && b.early && chunk == b.early) put_between(p, b, state, b.segments - 2 + b.segment, wg);
    advance(state, p, s, b, at, in, READY == STAGES ? at : from, chunk, wg);
    ring_next(s.k_ring, at);
    ring_next(s.v_ring, in);
    ring_next(s.ready, from);
  }
  if (ALL && b.r.chunks) send_last_o(p, s, b, wg);
  end_state(p, s, b, state, wg);
  if (ALL) clear_rest(p, b, wg);
  if (ALL) tma_store_wait_read();
  // What is behind this kernel is behind the one beside which it runs. One block says so: others may begin before that.
  if (TOLD && p.done && block_index() + 1 == block_count()) grid_wait();
}

typedef block<params, shared, init, role<run_state, WARPGROUP, GROUPS, STATE_REGS>,
              role<prepare, WARPGROUP, PREPS, PREP_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<scan, WARP, SCANS, LOAD_REGS>, DEPENDENT, OCCUPANCY<PER_SM>, CLUSTER<CLUSTER_SIZE>,
              UNLESS<is_done>> kernel;
ENTRY(kernel, Q, 64 * GROUPS)
