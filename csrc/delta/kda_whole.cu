// Kimi delta attention (2025), forward, of heads that fill the device: one kernel that prepares a head's chunks one
// after the other and passes over them, so that nothing of what kda_prepare.cu makes goes through memory. The formulas
// are kda_prepare.cu's and delta_sweep.cu's, and so is the result, bit by bit where M and P are kept.
// Of packed rows the host does not know the lengths: here is seen whether they leave too many blocks without work, and
// then two kernels behind this one do all.
// EARLY: heads are few, and gates forget (delta.h). A block takes a range of the chunks of all heads, one head after
// another: where it begins within a head, it begins with 0 some chunks early, and the output of those is not written.
// What it begins its own chunks with is compared with the state that the range in front ends with, by the block that
// has that in registers. Later ranges come first: a block waits for one of a lower index. Rows are dense.
// Else a block takes heads. Two warpgroups, one for each panel of 64 channels, make a chunk's tiles, M and P; a third
// one has the state, both halves of v's columns in turn, and is a chunk behind. The last of the two sums the next
// chunk's gates while the first one inverts. Tiles stand where k and q came, and o leaves from where v did.
//
// Where M and P are not kept, M is inverted in halves (tile/triangle.h), and R found in two steps: a chunk's way from L
// to u is shorter so, though the state has more to do.
// What few chunks or calls want is in functions that are called (tile/cold.h): in between it cost a tenth of all time.
// There products are those of warps, as ptxas takes no others across a call.
//
// Registers of a thread. Chunks: as kda_prepare.cu. State: two halves of 64; of one, x and y 32 each, an operand 16,
// then u as two operands. The state's product is over before that of P is issued: both in flight would be too many.
#include "tile/numbers.h"
#include "tile/quarters.h"
#include "tile/order.h"
#include "tile/slices.h"
#include "delta/delta_alike.h"
#include "delta/delta_early.h"
#include "delta/kda_chunk.h"

// D: columns of q and k. EARLY, KEEPS, LOAD_REGS, COMPUTE_REGS, STATE_REGS
static_assert(D == 128, "two panels");
enum { AHEAD = 4 };             // what is made with the sums, while the state has the chunk before the last one
typedef st<elem, Q, D> wide;
typedef st<elem, 2 * Q, 64> both;
union sums {
  ct l;                             // to base 2
  given_gates given;
  kept products;                    // of a far chunk
};
struct keys { panel k, q; };         // behind each other, for products with both
struct shared {
  struct keys keys[2][PANELS];      // of chunks in turn; then k e^l, scale q e^l
  wide w[2];                        // k e^(l_e - l)
  area areas[PANELS];               // then what is handed over, then in the last one what the inverse works with
  union sums sums[PANELS];
  square m, p[2];
  panel v[2];                       // both halves of the columns; then o
  cg groups[PANELS];
  sv<Q> squares[2][PANELS];         // of k's rows and of q's
  sv<D> ends[AHEAD];                // e^(l_e)
  sv<Q> beta[AHEAD];
  sv<32> early;                     // chunks by which ranges begin early; -1: nothing is done
  task_list todo;
  ring<2, ASYNC_READS> inputs;      // k and q
  ring<1> gates;                    // in place of the sums
  ring<1> values;                   // v
  sem tiles[2], pairs[2];           // a chunk's are there: k, q, w, ends, beta; M and P
  sem inverted;                     // the state has read M
  sem done[2];                      // ... and all of a chunk
  sem chosen;                       // `early` is there
  sem summed, judged;               // EARLY: what is in alike_of()
};
typedef kda_whole_params params;
TILE handed &handed_by(shared &s, int h) { return in_place_of<handed>(s.areas[h]); }
// EARLY: the state that a range ends with and the one that it has to be, by halves of values, sums by those of keys.
// Nobody works in areas then.
TILE alike<2> &alike_of(shared &s) { return in_place_of<alike<2>>(s.areas[0]); }
TILE tri<inner> &scratch_of(shared &s) { return in_place_of<tri<inner>>(s.areas[PANELS - 1]); }

TILE void init(shared &s) {
  init_tasks(s.todo);
  ring_init(s.inputs, arrivals(1, 0, 0), arrivals(0, 0, 1));
  ring_init(s.gates, arrivals(1, 0, 0), arrivals(0, 0, PANELS));
  ring_init(s.values, arrivals(1, 0, 0), arrivals(0, 0, 1));
  for (int i = 0; i < 2; i++) {
    sem_init(s.tiles[i], arrivals(0, 0, PANELS));
    sem_init(s.pairs[i], arrivals(0, 0, PANELS));
    sem_init(s.done[i], arrivals(0, 0, 1));
  }
  sem_init(s.inverted, arrivals(0, 0, 1));
  sem_init(s.chosen, arrivals(0, 1, 0));
  if (!EARLY) return;
  sem_init(s.summed, arrivals(0, 0, 1));
  sem_init(s.judged, arrivals(0, 1, 0));
}

// ---- loaders

TILE void load_gates(const params &p, shared &s, const task &t, ring_pos at) {
  ring_acquire(s.gates, at);
  if (!p.copied) return sem_arrive<THREAD>(s.gates.full[0]);
  bool floats = are_floats(p.gates, p.copied);
  ring_expect(s.gates, at, PANELS * given_bytes(floats));
  ROLLED for (int h = 0; h < PANELS; h++)
    load_gates(s.sums[h].given, p.g, floats, s.gates.full[0], t, 64 * h, LEAVES);
}
// A block takes the units block_index(), + block_count(), ...: the heads of a row, one row after another; EARLY one of
// them, a range. An empty row has a chunk of no steps, which leaves the state as it is.
// A task's mark: 2 row, and ENDS in its last chunk. EARLY:
enum {
  NO_TASK = -1,                     // the place of the one behind the last
  ENDS = 1,                         // the last chunk of a head, of a range, or of those in front
  TELLS = 2,                        // a range's own first chunk, where it began early: behind it that is told
  IN_FRONT = 4,                     // its output is not written
};
TILE int unit_count(const params &p) { return EARLY ? p.cut.line.ranges.by : p.rows.rows * p.rows.heads; }
TILE int own_range(const params &p) { return p.cut.line.ranges.by - 1 - block_index(); }
// A range ends within a head: there is another state to be compared with.
TILE bool is_cut(const params &p, int range) {
  const delta_line &line = p.cut.line;
  int end = range_begin(range + 1, line);
  return end != quotient(end, line.places) * line.places.by;
}
// EARLY: half g of what range number `range` began its own chunks with; not the first
TILE float *begun_by(const params &p, int range, int g) {
  return p.cut.states + ((int64_t)2 * (range - 1) + g) * (64 * D);
}
TILE bool is_last(const task &t) { return t.mark & (EARLY ? ENDS | TELLS : ENDS); }
TILE bool is_in_front(const task &t) { return EARLY && t.mark & IN_FRONT; }
TILE int row_of(const task &t) { return EARLY ? t.at.batch : t.mark >> 1; }
// This kernel would be slower than two.
TILE bool leaves(const params &p) {
  float longest = 0.f, all = 0.f;
  ROLLED for (int first = 0; first < p.rows.rows; first += Q) {
    wv<Q> chunks;
    map_index(chunks, [=](int i) {
      return first + i < p.rows.rows ? (float)task_of(p.rows, first + i, 0).chunks : 0.f;
    });
    longest = fmaxf(longest, max_of(chunks));
    all += sum_of(chunks);
  }
  all *= (float)p.rows.heads;
  float turns = (float)((unit_count(p) + block_count() - 1) / block_count());
  float one = (float)KDA_ONE * fminf(turns * longest, all / (float)block_count() + longest);
  float two = (float)KDA_MADE * all + fmaxf((float)KDA_LONGEST * longest, (float)KDA_PASSED * all);
  return one > two;
}
// As zero_words(), by a warp: 0 is 0 as a float, too.
TILE void clear_marks(const params &p) {
  enum { AT_ONCE = 128 };
  wv<AT_ONCE> zero;
  fill(zero, 0.f);
  ROLLED for (int i = 0; i < p.mark_count; i += AT_ONCE) {
    int left = p.mark_count - i;
    store((float *)p.marks + i, 1, zero, left < AT_ONCE ? left : AT_ONCE);
  }
}
TILE void choose(const params &p, shared &s, int) {
  grid_wait();
  int early = EARLY ? most_early(p.cut.early, p.cut.earlies) : 0;
  bool leave = EARLY ? early == 0 : p.rows.starts && p.taken && leaves(p);
  wv<32> x;
  fill(x, leave ? -1.f : (float)early);
  store(s.early, x);
  sem_arrive<WARP>(s.chosen);
  if (p.taken && block_index() == 0) {
    fill(x, leave ? 0.f : 1.f);
    store((float *)p.taken, 1, x, 1);       // as tell_taken()
    if (EARLY) clear_marks(p);
  }
  if (leave || !EARLY || !is_cut(p, own_range(p))) return;
  sem_wait(s.summed, 0);
  judge_states(alike_of(s), D);
  sem_arrive<WARP>(s.judged);
}
TILE void load_chunk(const params &p, shared &s, uint32_t n, const row_task &r, int chunk, int mark) {
  int step = r.first + chunk * Q;
  task t = {r.place + chunk, mark, {r.batch, r.head, step, r.end - step}};
  ring_pos at = ring_at<2>(n);
  give_task(s.todo, n, t);
  load_gates(p, s, t, ring_at<1>(n));
  ring_acquire(s.inputs, at);
  ring_expect(s.inputs, at, 2 * PANELS * tile_bytes(s.keys[0][0].k));
  ROLLED for (int h = 0; h < PANELS; h++) {
    tma_load(s.keys[at.stage][h].k, p.k, s.inputs.full[at.stage], step, 64 * h, r.key_head, r.batch, LEAVES);
    tma_load(s.keys[at.stage][h].q, p.q, s.inputs.full[at.stage], step, 64 * h, r.key_head, r.batch, LEAVES);
  }
}
// What a range has of one head from place `from` of the line on, at most to its own end: chunks `own` to end - 1.
struct stretch { row_task r; int own, end; };
TILE stretch stretch_of(const params &p, int from, int range_end) {
  const delta_line &line = p.cut.line;
  int matrix = quotient(from, line.places), row = quotient(matrix, line.heads), first = matrix * line.places.by;
  int end = range_end - first;
  return {task_of(p.rows, row, matrix - row * line.heads.by), from - first,
          end < line.places.by ? end : line.places.by};
}
TILE int mark_in(const stretch &a, int begin, int chunk) {
  int mark = chunk < a.own ? IN_FRONT : 0;
  if (chunk + 1 == a.own || chunk + 1 == a.end) mark += ENDS;
  return chunk == a.own && begin < a.own ? mark + TELLS : mark;
}
// Where the range lies is found while others find how early it begins.
TILE void load_range(const params &p, shared &s, uint32_t &n) {
  int from = range_begin(own_range(p), p.cut.line), end = range_begin(own_range(p) + 1, p.cut.line);
  stretch a = stretch_of(p, from, end);
  grid_wait();
  sem_wait(s.chosen, 0);
  int early = (int)get(s.early, 0), begin = a.own > early ? a.own - early : 0;
  ROLLED while (early > 0 && from < end) {
    ROLLED for (int chunk = begin; chunk < a.end; chunk++, n++)
      load_chunk(p, s, n, a.r, chunk, mark_in(a, begin, chunk));
    from += a.end - a.own;
    a = stretch_of(p, from, end);
    begin = a.own;
  }
}
TILE void load_heads(const params &p, shared &s, uint32_t &n) {
  grid_wait();
  sem_wait(s.chosen, 0);
  int units = get(s.early, 0) < 0.f ? 0 : unit_count(p);
  ROLLED for (int i = block_index(); i < units; i += block_count()) {
    int row = i / p.rows.heads;
    row_task r = task_of(p.rows, row, i - row * p.rows.heads);
    int chunks = r.chunks > 0 ? r.chunks : 1;
    ROLLED for (int chunk = 0; chunk < chunks; chunk++, n++)
      load_chunk(p, s, n, r, chunk, 2 * row + (chunk + 1 == chunks));
  }
}
TILE void loader(const params &p, shared &s, int) {
  uint32_t n = 0;
  tma_prefetch(p.k);
  tma_prefetch(p.q);
  if (p.copied) tma_prefetch(p.g);
  if (EARLY) load_range(p, s, n);
  else load_heads(p, s, n);
  give_task(s.todo, n, {NO_TASK, 0, {0, 0, 0, 0}});
}
TILE void value_loader(const params &p, shared &s, int) {
  tma_prefetch(p.v);
  tma_prefetch(p.o);
  grid_wait();
  uint32_t n = 0;
  for (;; n++) {
    wait_for_task(s.todo, n);
    task t = given_task(s.todo, n);
    if (t.place == NO_TASK) break;
    ring_acquire(s.values, ring_at<1>(n));
    ring_expect(s.values, ring_at<1>(n), 2 * tile_bytes(s.v[0]));
    ROLLED for (int g = 0; g < 2; g++)
      tma_load(s.v[g], p.v, s.values.full[0], t.at.step, 64 * g, t.at.head, t.at.batch, LEAVES);
  }
  if (EARLY && n > 0 && is_cut(p, own_range(p))) tma_prefetch(begun_by(p, own_range(p) + 1, 0), 128 * D);
}

// ---- chunks

TILE void team_sync() { bar_sync(1, 128 * PANELS); }
TILE void take_factors(rv &k, rv &q, const params &p, const shared &s) {
  take_factors(k, q, p.gates.norm, p.scale, s.squares);
}
// A chunk's tiles are there, and there is room for the next gates.
TILE void tell_tiles(shared &s, int i) {
  sem_arrive<WARPGROUP>(s.tiles[i]);
  sem_arrive<WARPGROUP>(s.gates.empty[0]);
}
TILE void make_right(rt<float, 64> &right, const params &p, shared &s, int i, int h, bool early, bool tell) {
  {
    rv norm_k, norm_q;
    take_factors(norm_k, norm_q, p, s);
    make_factors<2>(right, s.areas[h], s.keys[i][h].k, s.keys[i][h].q, s.sums[h].l, s.groups[h], norm_k, norm_q, h,
                    early, &s.w[i]);
  }
  if (tell) fence_async();
  wg_sync();
  if (tell) tell_tiles(s, i);
}
// Sums of both panels; then M by the first warpgroup, P by the last.
TILE void put_pairs(rt<float, Q> &a, shared &s, uint32_t n, int h) {
  if (KEEPS) tma_store_wait_read();         // M and P have left
  team_sync();
  add(a, handed_by(s, 1 - h));
  wg_sync();                                // everybody has what was handed over: the inverse works there
  if (h == 0) {
    rt<float, Q> inverse;
    make_inverse<KEEPS ? IN_ONE : IN_HALVES>(inverse, a, s.beta[n % AHEAD], scratch_of(s));
    sem_wait(s.inverted, n & 1 ^ 1);
    store_carried<KEEPS ? IN_ONE : IN_HALVES>(s.m, inverse);
  } else {
    triu(a, 0, 0.f);
    store_own(s.p[n % 2], a, 0);
  }
}
COLD void clear_keys(shared &s, uint32_t n, int h) {
  int steps = given_task(s.todo, n).at.steps;
  clear_rows(s.keys[n % 2][h].k, 0, steps);
  clear_rows(s.keys[n % 2][h].q, 0, steps);
  wg_sync();
}
COLD void put_squares(shared &s, int i, int h) {
  put_squares(s.squares[0][h], s.keys[i][h].k);
  put_squares(s.squares[1][h], s.keys[i][h].q);
}
TILE enum reach put_sums(shared &s, const hm &g, uint32_t n, int h, bool steep) {
  hv end;
  enum reach reach = put_sums(s.sums[h].l, s.groups[h], end, g, steep, steep);
  if (reach == BEYOND && !steep) return reach;
  map(end, end, [](float x) { return fast_exp2(x); });
  store(s.ends[n % AHEAD], 64 * h, end);
  return reach;
}
COLD void put_gates(const params &p, shared &s, uint32_t n, int h) {
  put_panel(s.sums[h].given, p.gates, p.key_dim, given_task(s.todo, n), h);
}
COLD void sum_steep(const params &p, shared &s, uint32_t n, int h) {
  hm g;
  take_steep(g, s.sums[h].given, are_floats(p.gates, p.copied), given_task(s.todo, n));
  put_sums(s, g, n, h, true);
}
// Of any gates, with true sums: in L and P they were not, and these are made.
TILE void make_tiles(const params &p, shared &s, uint32_t n, int h) {
  const int i = n % 2;
  {
    hm g;
    take_panel(g, p.gates, p.key_dim, given_task(s.todo, n), h);
    at_least(g, LEAST);
    put_sums(s, g, n, h, true);
  }
  wg_sync();
  const own_rows<elem> k = own_rows_of(s.keys[i][h].k), q = own_rows_of(s.keys[i][h].q);
  rv norm_k, norm_q;
  take_factors(norm_k, norm_q, p.gates.norm > 0, p.scale, s.squares);   // another question than elsewhere: no answer is
                                                                        // kept
  ROLLED for (int c = 0; c < 64; c += 16) {
    rt<float, 16> part[3];
    make_tile_part<true>(part, c, s.sums[h].l, k, q, s.groups[h], norm_k, norm_q);
    store_own(s.keys[i][h].k, part[0], c);
    store_own(s.keys[i][h].q, part[1], c);
    store_own(s.w[i], part[2], 64 * h + c);
  }
}
// Where groups have a middle each, of one panel: then both warpgroups run this code.
COLD void make_far_products(const params &p, shared &s, uint32_t n, int h) {
  rt<float, Q> a;
  rt<float, 64> right;
  make_right(right, p, s, n % 2, h, reach_of(s.groups[h]) != BEYOND, false);
  make_products_by_warps(a, right, s.areas[h], s.groups[h], handed_by(s, h), true);
  put(s.sums[h].products, a);
}
COLD void put_steep_tiles(const params &p, shared &s, uint32_t n, int h) {
  make_tiles(p, s, n, h);
  fence_async();
  tell_tiles(s, n % 2);
}
COLD void keep_pairs(const params &p, shared &s, uint32_t n, int h) {
  wg_sync();
  task t = given_task(s.todo, n);
  tma_store(h ? p.p : p.m, h ? s.p[n % 2] : s.m, t.place * Q, 0, t.at.head, t.at.batch);
}
// By the last warpgroup, of both panels.
TILE void sum_gates(const params &p, shared &s, const task &t, uint32_t n) {
  ring_wait(s.gates, ring_at<1>(n));
  ROLLED for (int h = 0; h < PANELS; h++) {
    hm g;
    if (!p.copied) put_gates(p, s, n, h);
    take_copied(g, s.sums[h].given, are_floats(p.gates, p.copied), t);
    if (put_sums(s, g, n, h, false) == BEYOND) sum_steep(p, s, n, h);
  }
}

TILE void prepare(const params &p, shared &s, int h) {
  grid_wait();
  for (uint32_t n = 0;; n++) {
    wait_for_task(s.todo, n);
    task t = given_task(s.todo, n);
    if (t.place == NO_TASK) break;
    const int i = n % 2;
    if (h == 1) {
      rv beta;
      take_beta_as_given(beta, p.gates, t.at);              // it comes meanwhile
      sum_gates(p, s, t, n);
      store(s.beta[n % AHEAD], beta);
    }
    sem_wait(s.done[i], n / 2 & 1 ^ 1);     // with the chunk before the last one
    ring_wait(s.inputs, ring_at<2>(n));
    if (runs_over(p.rows, t.at.step, t.at.step + t.at.steps)) clear_keys(s, n, h);
    if (p.gates.norm) put_squares(s, i, h);
    team_sync();
    const enum reach reach = reach_of(s.groups[h]);
    {
      rt<float, Q> a;
      if (reach == NEAR && reach_of(s.groups[1 - h]) == NEAR) {
        rt<float, 64> right;
        make_right(right, p, s, i, h, true, true);
        make_products_of_halves(a, right, s.areas[h], s.groups[h], handed_by(s, h), true);
      } else {
        make_far_products(p, s, n, h);
        take(a, s.sums[h].products);
        if (reach != BEYOND) {
          fence_async();
          tell_tiles(s, i);                               // then the next gates take the place of these
        }
      }
      put_pairs(a, s, n, h);
    }
    if (reach == BEYOND) put_steep_tiles(p, s, n, h);
    fence_async();
    sem_arrive<WARPGROUP>(s.pairs[i]);
    if (KEEPS && !is_in_front(given_task(s.todo, n))) keep_pairs(p, s, n, h);
  }
  if (KEEPS) tma_store_wait_read();
}

// ---- the state

// Rows of v behind a packed row's end.
COLD void clear_values(shared &s, uint32_t n) {
  int steps = given_task(s.todo, n).at.steps;
  ring_wait(s.values, ring_at<1>(n));
  ROLLED for (int g = 0; g < 2; g++) clear_rows(s.v[g], 0, steps);
  wg_sync();
}
// o where a packed row ends. Everybody has stored it.
COLD void put_last_rows(const params &p, shared &s, uint32_t n) {
  task t = given_task(s.todo, n);
  int64_t ld = p.o_step;
  int steps = t.at.steps;
  ROLLED for (int g = 0; g < 2; g++) {
    elem *to = (elem *)p.o_data + t.at.step * p.o_step + t.at.head * p.o_head + 64 * g;
    rt<float, Q> o;
    load(o, s.v[g]);
    store_rows<elem>(o, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.value_dim - 64 * g);
  }
  fence_async();                            // then v comes there
}
// Steps behind the last packed row are in no sequence.
COLD void clear_rest(const params &p, const shared &s, uint32_t n) {
  task t = given_task(s.todo, n);
  int64_t ld = p.o_step;
  rt<float, 64> zero;
  fill(zero, 0.f);
  ROLLED for (int step = t.at.step + t.at.steps; step < p.rows.steps; step += Q)
    ROLLED for (int col = 0; col < p.value_dim; col += 64) {
      elem *to = (elem *)p.o_data + step * ld + t.at.head * p.o_head + col;
      int steps = p.rows.steps - step;
      store_rows<elem>(zero, [=](int i) { return i < steps ? to + i * ld : (elem *)nullptr; }, p.value_dim - col);
    }
}

// u^T, as operands of P and of the state, of x, which becomes R^T. The state decays meanwhile.
TILE void solve(rt<float, Q> &x, rt<float, D> &state, rt<inner, Q> &factor, rt<elem, Q> &u, const rv &down, shared &s,
                uint32_t n, int g) {
  convert(factor, x);
  if (g == 0) sem_wait(s.pairs[n % 2], n / 2 & 1);
  mma_fence();
  mma_AB<ZERO>(x, factor, s.m);
  mma_commit();
  map_col(state, s.ends[n % AHEAD], [](float f, float e) { return f * e; });
  mma_wait<0>(x, factor);
  if (g == 1) sem_arrive<WARPGROUP>(s.inverted);
  map_col(x, s.beta[n % AHEAD], [](float f, float b) { return f * b; });
  convert(factor, x);
  map_row(x, down, [](float f, float m) { return f * m; });
  convert(u, x);
}
// The same in halves: R of the first one, what is left of the last, R of that.
TILE void solve_in_halves(const rt<float, Q> &x, rt<float, D> &state, rt<inner, Q> &factor, rt<elem, Q> &u,
                          const rv &down, shared &s, uint32_t n, int g) {
  const sv<Q> &beta = s.beta[n % AHEAD];
  rt<float, Q / 2> first, last;
  rt<inner, Q / 2> a, b;
  rt<elem, Q / 2> c, d;
  split_halves(first, last, x);
  convert(a, first);
  if (g == 0) sem_wait(s.pairs[n % 2], n / 2 & 1);
  mma_fence();
  mma_AB_quarter<ZERO>(first, a, s.m, 0, 0);
  mma_commit();
  map_col(state, s.ends[n % AHEAD], [](float f, float e) { return f * e; });
  mma_wait<0>(first, a);
  convert(a, first);
  mma_fence();
  mma_AB_quarter<ACC>(last, a, s.m, 0, 32);
  mma_commit();
  map_col(first, slice<32>(beta, 0), [](float f, float b) { return f * b; });
  mma_wait<0>(last, a);
  convert(a, first);
  convert(b, last);
  mma_fence();
  mma_AB_quarter<ZERO>(last, b, s.m, 32, 32);
  mma_commit();
  map_row(first, down, [](float f, float m) { return f * m; });
  convert(c, first);
  mma_wait<0>(last, b);
  if (g == 1) sem_arrive<WARPGROUP>(s.inverted);
  map_col(last, slice<32>(beta, 32), [](float f, float b) { return f * b; });
  convert(b, last);
  map_row(last, down, [](float f, float m) { return f * m; });
  convert(d, last);
  join_halves(factor, a, b);
  join_halves(u, c, d);
}
// One chunk, of half g of v's columns. leaves: o is stored.
TILE void advance(rt<float, D> &state, const params &p, shared &s, const task &t, uint32_t n, int g, bool leaves) {
  const int i = n % 2;
  rt<float, Q> x, y;
  rt<inner, Q> factor;
  rt<elem, 64> part;
  rv up, down;
  convert_part(part, state, 0);
  mma_fence();
  mma_ABt_halves<ZERO>(x, y, part, in_place_of<both>(s.keys[i][0]), 0);
  mma_commit();
  mma_wait<0>(x, y, part);
  convert_part(part, state, 64);
  mma_fence();
  mma_ABt_halves<ACC>(x, y, part, in_place_of<both>(s.keys[i][1]), 0);
  mma_commit();
  if (g == 0) ring_wait(s.values, ring_at<1>(n));
  mma_wait<0>(x, y, part);
  if (g == 1) ring_release(s.inputs, ring_at<2>(n));
  load_t(part, s.v[g]);
  map_col(x, part, s.beta[n % AHEAD], [](float a, float b, float) { return b - a; });
  row_factors(up, down, x);
  map_row(x, up, [](float f, float m) { return f * m; });
  if (KEEPS) solve(x, state, factor, part, down, s, n, g);
  else solve_in_halves(x, state, factor, part, down, s, n, g);
  mma_fence();
  mma_AB<ACC>(state, part, s.w[i]);
  mma_commit();
  mma_wait<0>(state, part);
  mma_fence();                              // for ptxas, which else lacks registers; no tile was touched since the last
  mma_AB<ZERO>(x, factor, s.p[i]);          // u^T P^T
  mma_commit();
  mma_wait<0>(x, factor);
  each<Q>([](int, int, float &y, float x, float m) { y = fused(x, m, y); }, y, (const rt<float, Q> &)x, down);
  wg_sync();                                // everybody has v
  store_t(s.v[g], y);
  fence_async();
  wg_sync();
  if (EARLY) leaves = !is_in_front(given_task(s.todo, n));    // read again: kept, registers lack for it
  if (leaves) tma_store(p.o, s.v[g], t.at.step, 64 * g, t.at.head, t.at.batch, LEAVES);
}
TILE int64_t first_of(const params &p, const task &t, int g, ssd_order o) {
  return ((int64_t)row_of(t) * p.rows.heads + t.at.head) * o.matrix + 64 * g * o.row;
}
TILE void begin_state(rt<float, D> &state, const params &p, const task &t, int g) {
  ssd_order o = p.initial_order;
  fill(state, 0.f);
  if (EARLY && t.at.step > p.rows.from) return;
  if (p.initial) load(state, p.initial + first_of(p, t, g, o), o.row, o.col, p.value_dim - 64 * g, p.key_dim);
}
TILE void end_state(const rt<float, D> &state, const params &p, const task &t, int g) {
  ssd_order o = p.final_order;
  if (p.final) store(p.final + first_of(p, t, g, o), o.row, o.col, state, p.value_dim - 64 * g, p.key_dim);
}

// Parts of 16 columns, as they are read
TILE void put_begun(float *to, const rt<float, D> &state) {
  CONSTANT_INDEX for (int c = 0; c < D; c += 16) {
    rt<float, 16> some;
    copy_part(some, state, c);
    store_acc(to + 64 * c, some);
  }
}
// The state at the end of this range with what the next one began its own chunks with; half of that is on its way.
TILE void compare_end(const rt<float, D> &first, const rt<float, D> &second, const params &p, shared &s) {
  enum { IN_FLIGHT = 4 };
  const int range = own_range(p) + 1;
  alike<2> &alike = alike_of(s);
  const float *begun[2] = {begun_by(p, range, 0), begun_by(p, range, 1)};
  rt<float, 16> other[IN_FLIGHT][2], own;
  rsum sizes[2], errors[2];
  order_wait(p.cut.told + range - 1, 1);
  CONSTANT_INDEX for (int i = 0; i < IN_FLIGHT; i++)
    CONSTANT_INDEX for (int g = 0; g < 2; g++) load_acc(other[i][g], begun[g] + 16 * i * 64);
  CONSTANT_INDEX for (int g = 0; g < 2; g++) {
    fill(sizes[g], 0.f);
    fill(errors[g], 0.f);
  }
  CONSTANT_INDEX for (int i = 0; i < D / 16; i++) {
    csum<16> key_sizes, key_errors;
    clear(key_sizes);
    clear(key_errors);
    CONSTANT_INDEX for (int g = 0; g < 2; g++) {
      copy_part(own, g ? second : first, 16 * i);
      add_sizes<16>(own, other[i % IN_FLIGHT][g], sizes[g], errors[g], key_sizes, key_errors);
      if (i + IN_FLIGHT < D / 16) load_acc(other[i % IN_FLIGHT][g], begun[g] + 16 * (i + IN_FLIGHT) * 64);
    }
    store(alike.sizes[i / 4], i % 4 * 16, key_sizes);
    store(alike.errors[i / 4], i % 4 * 16, key_errors);
  }
  CONSTANT_INDEX for (int g = 0; g < 2; g++) put_apart(alike.apart[g], sizes[g], errors[g]);
  sem_arrive<WARPGROUP>(s.summed);
  sem_wait(s.judged, 0);
  if (get(alike.verdict, 0) == 0.f) return;
  tma_store_wait();                         // to tell something is to tell all
  order_tell(p.taken + 1);
}
TILE void run_state(const params &p, shared &s, int) {
  rt<float, D> first, second;               // S^T: 64 columns of v each by K
  uint32_t n = 0;
  grid_wait();
  while (true) {
    wait_for_task(s.todo, n);
    task t = given_task(s.todo, n);
    if (t.place == NO_TASK) break;
    if (!EARLY || t.at.step == p.rows.from || is_in_front(t)) {     // else it goes on
      begin_state(first, p, t, 0);
      begin_state(second, p, t, 1);
    }
    for (bool last = false; !last; n++) {
      wait_for_task(s.todo, n);
      t = given_task(s.todo, n);
      sem_wait(s.tiles[n % 2], n / 2 & 1);
      const bool over = !EARLY && runs_over(p.rows, t.at.step, t.at.step + t.at.steps);
      if (over) clear_values(s, n);
      advance(first, p, s, t, n, 0, !over);
      advance(second, p, s, t, n, 1, !over);
      sem_arrive<WARPGROUP>(s.done[n % 2]);
      if (over) put_last_rows(p, s, n);
      tma_store_wait_read();                // o
      sem_arrive<WARPGROUP>(s.values.empty[0]);
      last = is_last(EARLY ? given_task(s.todo, n) : t);      // as there
    }
    if (EARLY) t = given_task(s.todo, n - 1);
    if (is_in_front(t)) {
      put_begun(begun_by(p, own_range(p), 0), first);
      put_begun(begun_by(p, own_range(p), 1), second);
      continue;
    }
    // A chunk later all that was stored is there, and nobody has waited.
    if (EARLY && t.mark & TELLS) order_pass(p.cut.told + own_range(p) - 1, 1);
    if (EARLY && t.place + 1 < p.rows.places) continue;
    end_state(first, p, t, 0);
    end_state(second, p, t, 1);
    if (!EARLY && p.rows.starts && row_of(t) + 1 == p.rows.rows) clear_rest(p, s, n - 1);
  }
  if (EARLY && n > 0 && is_cut(p, own_range(p))) compare_end(first, second, p, s);
}

typedef block<params, shared, init, role<prepare, WARPGROUP, PANELS, COMPUTE_REGS>,
              role<run_state, WARPGROUP, 1, STATE_REGS>, role<loader, THREAD, 1, LOAD_REGS>,
              role<value_loader, THREAD, 1, LOAD_REGS>, role<choose, WARP, 1, LOAD_REGS>, DEPENDENT> kernel;
ENTRY(kernel, Q, D)
