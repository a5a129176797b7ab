// Kimi delta attention (2025): what the steps of a chunk are to the state, for all chunks at once. With l_i the sum of
// the log decays up to step i of a chunk of 64 steps whose last is e, a vector of channels as k_i and q_i, and m a
// vector for each group of 16 steps, the mean of l at the two steps in its middle or, where decays allow it, for each
// two groups the sum between them:
//   L_ij = sum over channels of k_i e^(l_i - m) k_j e^(m - l_j) for j < i, m of i's group
//   P_ij = the same of scale q_i and k_j for j <= i;   M = (I + L diag(beta))^-1
// and tiles of k e^l, scale q e^l and k e^(l_e - l), and the vector e^(l_e). The state needs no more of q, k and the
// gates. k_j e^(m - l_j) is made with the m of j's own group. From there it goes from middle to middle, by a
// factor that all steps of a group share. That may be e^-168: then its square root is multiplied with twice. No
// exponent is above 79, and e^79 |k| fits into bf16. Where one would be, a log decay counts, in L and P, as -10.5 where
// it is less. It is wrong by e^-10.5 at most, less than what rounding to 16 bits leaves (float32, which the CPU has, is
// no more exact there), and the tiles have the true decays from another sum. Else the tiles are what the products have,
// times the e^ of what lies before and behind a group.
// Keys in fp16 have more bits than a factor in bf16, and where |k|^2 in L is over theirs, beta |k|^2 may be over 2:
// then a state that equal keys reflect grows from step to step. So such factors are two bf16, and three products are
// added.
// Teams take a task each: a loader thread, and a warpgroup for each panel of 64 channels, which has its panel's factors
// and tiles. Products over all channels are sums of both panels' ones, and half of them goes to the other warpgroup:
// the first makes L and M, the last P. Tiles leave while products are made, then the next task's k, q and gates come,
// and the last warpgroup sums these while the first one inverts. Without PAIRS, the tiles and the vector alone: what a
// caller lacks who has M and P.
//
// Registers of a thread. Gates: two columns of a group, 32. Pairs: what becomes the right operand 32, an operand 16,
// two groups' products 16 + 16, L or P 32. Inverse: two tiles of 32. Tiles: 32, three of 8.
#include "tile/order.h"
#include "delta/kda_chunk.h"

// D: columns of q and k. PAIRS, TEAMS, LOAD_REGS, COMPUTE_REGS
// LATER: of a task, each warpgroup's stores behind those of what is in place of the sums
enum { LATER = PAIRS && PANELS == 1 ? 3 : 1 };
template<typename T> struct parts_of { enum { COUNT = 1 }; };
template<> struct parts_of<fp16> { enum { COUNT = 2 }; };
// PARTS: of a factor, whose sum it is. EARLY: tiles are made beside the factors, unless gates are steep.
// LAST_SUMS: the last warpgroup sums all panels' gates, while the first one inverts. They come to where the sums go
enum { PARTS = parts_of<elem>::COUNT, EARLY = PAIRS && PARTS == 1, LAST_SUMS = EARLY && PANELS == 2 };
union sums {                        // the others when nobody reads the sums any more
  ct l;                             // to base 2
  panel tiles[2];
  struct { panel write; handed sums; } early;
  given_gates given;
};
struct chunk {
  panel k[PANELS], q[PANELS];
  area areas[2];
  union sums sums[PANELS];
  cg groups[PANELS];
  sv<Q> squares[2][PANELS];         // of k's rows and of q's
  sv<Q> beta[2];                    // of tasks in turn
  task_list todo;
  ring<1> inputs;
  sem gates;                        // they are in place of the sums, or, where not copied, there is room for sums
  sem added;                        // what was handed over has been read
  sem made;                         // P is there, and what else the last warpgroup stored is in memory
};
struct shared { chunk chunks[TEAMS]; };
// An area has, one after another: its panel's factors; what their products are, if they were called; of factors in two
// parts, the sums that the other warpgroup makes whole; then the reader's results. The last warpgroup's are P and a
// tile, the first one's what it inverts with, M and a tile.
TILE handed &handed_by(chunk &s, int h) {
  if (EARLY) return in_place_of<handed>(s.sums[h].early.sums);
  return in_place_of<handed>(s.areas[h]);
}
TILE kept &kept_by(chunk &s, int h) { return in_place_of<kept>(s.areas[h]); }
TILE square &reads_of(chunk &s) { return in_place_of<square>(s.areas[0]); }
TILE tri<inner> &scratch_of(chunk &s) { return in_place_of<tri<inner>>(s.areas[1]); }
TILE square &m_of(chunk &s) { return in_place_of<square>(s.areas[1]); }
// k e^l, scale q e^l, k e^(l_e - l) of a panel
TILE panel &tile_of(chunk &s, int h, int which) {
  if (which == 0) return in_place_of<panel>(s.areas[PANELS - 1 - h].left[2]);
  return in_place_of<panel>(s.sums[h].tiles[which - 1]);
}
typedef kda_prepare_params params;

TILE bool is_done(const params &p) { return was_taken(p.taken); }
TILE void init(shared &s) {
  for (int i = 0; i < TEAMS; i++) {
    ring_init(s.chunks[i].inputs, arrivals(1, 0, 0), arrivals(0, 0, PANELS));
    if (LAST_SUMS) sem_init(s.chunks[i].added, arrivals(0, 0, PANELS));
    if (PAIRS && PANELS == 2) sem_init(s.chunks[i].made, arrivals(0, 0, 1));
    if (LAST_SUMS) sem_init(s.chunks[i].gates, arrivals(1, 0, 0));
    init_tasks(s.chunks[i].todo);
  }
}

// A wave of heads has its first chunks in front.
TILE int task_count(const params &p) { return p.rows.places * p.batches * p.rows.heads; }
TILE task task_at(const params &p, int index) {
  int places = p.rows.places, wave = index / (p.wave * places), first = wave * p.wave;
  int width = wave_width(p.wave, first, p.batches * p.rows.heads);
  index -= first * places;
  int place = index / width, unit = first + index - place * width, batch = unit / p.rows.heads;
  chunk_steps c = steps_at(p.rows, place);
  return {place, wave * places + place, {batch, unit - batch * p.rows.heads, c.step, c.end - c.step}};
}
// Where the pass is beside, what is made for it stays in the L2 until it has been read there, and what is read leaves.
TILE enum l2 once(const params &p) { return p.done ? LEAVES : USUAL; }
TILE enum l2 soon(const params &p) { return p.done ? STAYS : USUAL; }

TILE void load_gates(const params &p, chunk &s, const task &t) {
  if (!p.copied) return sem_arrive<THREAD>(s.gates);
  bool floats = p.gates.g.is_float;
  sem_expect(s.gates, PANELS * given_bytes(floats));
  ROLLED for (int h = 0; h < PANELS; h++) load_gates(s.sums[h].given, p.g, floats, s.gates, t, 64 * h, once(p));
}

// Where there are few tasks, blocks have one each. Blocks that have none leave their multiprocessors to the pass.
// Tasks are given one ahead of their copies: when k and q of the one before have been asked for, everybody has done
// with those of the task before that, and with all of the one before.
TILE void loader(const params &p, shared &all, int team) {
  chunk &s = all.chunks[team];
  uint32_t n = 0;
  grid_wait();
  int blocks = block_count() - p.ending, block = block_index() - p.ending, teams = TEAMS * blocks;
  int end = task_count(p), first = block < 0 ? end : block + team * blocks;
  ROLLED for (int i = first; i < end; i = p.next ? teams + atomic_next(p.next) : i + teams) {
    task t = task_at(p, i);
    if (t.at.steps <= 0) continue;
    int head = t.at.head / p.rows.group_heads;
    give_task(s.todo, n, t);
    ring_acquire(s.inputs, ring_at<1>(n));
    if (LAST_SUMS) load_gates(p, s, t);
    ring_expect(s.inputs, ring_at<1>(n), 2 * PANELS * tile_bytes(s.k[0]));
    ROLLED for (int h = 0; h < PANELS; h++) {
      tma_load(s.k[h], p.k, s.inputs.full[0], t.at.step, 64 * h, head, t.at.batch, once(p));
      tma_load(s.q[h], p.q, s.inputs.full[0], t.at.step, 64 * h, head, t.at.batch, once(p));
    }
    n++;
  }
  give_task(s.todo, n, {});
}

TILE void team_sync(int team) {
  if (PANELS == 1) wg_sync();
  else bar_sync(1 + team, 128 * PANELS);
}

TILE void take_factors(rv &k, rv &q, const params &p, const chunk &s) {
  take_factors(k, q, p.gates.norm, p.scale, s.squares);
}

// ---- factors in two parts: what is rounded, and what rounding has left, rounded too. Of a group, the left factors'
// rests take the place of what products have read: there is no other.
TILE void take_rest(rt<float, 16> &x) {
  rt<factor, 16> rounded;
  convert(rounded, x);
  each_part(0, [](int, int, float &x, float rounded) { x -= rounded; }, x, (const rt<factor, 16> &)rounded);
}
struct parts { rt<factor, 64> most, rest; };
TILE void split(parts &d, rt<float, 64> &x) {   // x is lost
  convert(d.most, x);
  UNROLLED for (int c = 0; c < 64; c += 16)
    each_part(c, [](int, int, float &x, float rounded) { x -= rounded; }, x, (const rt<factor, 64> &)d.most);
  convert(d.rest, x);
}
TILE void carry_to_group(parts &d, const sv<64> &f, int group) {
  rt<float, 64> x;
  fill(x, 0.f);
  UNROLLED for (int c = 0; c < 64; c += 16)
    each_part(c, [](int, int, float &x, float most, float rest) { x = most + rest; }, x,
              (const rt<factor, 64> &)d.most, (const rt<factor, 64> &)d.rest);
  carry(x, f, group);
  split(d, x);
}
// ptxas spills if both halves are made at once, or columns unrolled.
TILE void put_rests(chunk &s, const panel &given, const rv &norm, int h, int half, int group) {
  ROLLED for (int c = 0; c < 64; c += 16) {
    rt<float, 16> x;
    fill(x, 0.f);
    each_part(c, [](int, int, float &x, float l, float given, float norm) { x = given * norm * fast_exp2(l); }, x,
              s.sums[h].l, given, norm);
    take_rest(x);
    store_group(s.areas[h].left[group], half, x, c, group);
  }
}
TILE void put_rests(const params &p, chunk &s, int h, int group) {
  rv norm_k, norm_q;
  take_factors(norm_k, norm_q, p, s);
  put_rests(s, s.k[h], norm_k, h, h, group);
  take_factors(norm_k, norm_q, p, s);
  put_rests(s, s.q[h], norm_q, h, 1 - h, group);
}
// Of the four products that of both rests is left out.
template<int GROUP> TILE void make_group(rt<float, Q> &a, parts &right, const params &p, chunk &s, int h) {
  st<factor, 32, 64> &left = s.areas[h].left[GROUP];
  rt<float, 16> own, other;
  mma_fence();
  mma_ABt_halves<ZERO>(own, other, right.rest, left, 0);
  mma_ABt_halves<ACC>(own, other, right.most, left, 0);
  mma_commit();
  mma_wait<0>(own, other, right.rest, right.most);
  wg_sync();                                // everybody's products have read the left factors
  put_rests(p, s, h, GROUP);
  fence_async();
  wg_sync();
  mma_fence();
  mma_ABt_halves<ACC>(own, other, right.most, left, 0);
  mma_commit();
  mma_wait<0>(own, other, right.most);
  put_group(a, own, GROUP);
  wg_sync();                                // ... and their rests
  hand_over(handed_by(s, h), other, GROUP);
}
TILE void make_pairs_of_parts(rt<float, Q> &a, rt<float, 64> &right, const params &p, chunk &s, int h) {
  const sv<64> *between = s.groups[h].between;
  parts r;
  fill(a, 0.f);
  split(r, right);
  make_group<0>(a, r, p, s, h);
  carry_to_group(r, between[0], 1);
  make_group<1>(a, r, p, s, h);
  carry_to_group(r, between[1], 2);
  make_group<2>(a, r, p, s, h);
  carry_to_group(r, between[2], 3);
  make_group<3>(a, r, p, s, h);
}
// Counts the last of the team's first n tasks when it is in memory; nothing where nobody waits for that. By the first
// warpgroup, who has the time, and knows of the last one.
TILE void tell(const params &p, const chunk &s, uint32_t n) {
  if (!p.done || n == 0) return;
  tma_store_wait<0>();
  order_tell(p.done + get(s.todo.tasks[(n - 1) % TASKS].mark));
}
// This panel's factors, and, early, its tiles, which leave.
TILE void make_right(rt<float, 64> &right, const params &p, chunk &s, uint32_t n, int h, bool early) {
  {
    rv norm_k, norm_q;
    take_factors(norm_k, norm_q, p, s);
    make_factors<4>(right, s.areas[h], s.k[h], s.q[h], s.sums[h].l, s.groups[h], norm_k, norm_q, h, early, nullptr);
  }
  if (early) {
    wg_sync();                              // everybody has read the sums
    put_write(s.sums[h].early.write, 0, right, s.groups[h]);
  }
  fence_async();
  wg_sync();
  if (early) {
    task t = given_task(s.todo, n);
    tma_store(p.read_k, s.k[h], t.place * Q, 64 * h, t.at.head, t.at.batch, soon(p));
    tma_store(p.read_q, s.q[h], t.place * Q, 64 * h, t.at.head, t.at.batch, soon(p));
    tma_store(p.write_k, s.sums[h].early.write, t.place * Q, 64 * h, t.at.head, t.at.batch, soon(p));
  }
}
TILE void put_inverse(rt<float, Q> &a, chunk &s, const sv<Q> &factors) {
  rt<float, Q> inverse;
  make_inverse(inverse, a, factors, scratch_of(s));
  wg_sync();                                // everybody has read scratch
  store_carried(m_of(s), inverse);
}
TILE void put_reads(rt<float, Q> &a, chunk &s) {
  triu(a, 0, 0.f);
  store(reads_of(s), a);
}
template<bool STEEP> TILE void make_tiles(const params &p, chunk &s, int h) {
  panel &read_k = tile_of(s, h, 0), &read_q = tile_of(s, h, 1), &write_k = tile_of(s, h, 2);
  rt<float, 64> l;
  rv norm_k, norm_q;
  load(l, s.sums[h].l);
  take_factors(norm_k, norm_q, p.gates.norm > 0, p.scale, s.squares);   // another question than elsewhere: no answer is
                                                                        // kept
  wg_sync();                                // everybody has read the sums
  UNROLLED for (int c = 0; c < 64; c += 16) {
    rt<float, 16> part[3];
    make_tile_part<STEEP>(part, c, (const rt<float, 64> &)l, s.k[h], s.q[h], s.groups[h], norm_k, norm_q);
    store(read_k, part[0], c);
    store(read_q, part[1], c);
    store(write_k, part[2], c);
  }
}

// Of both panels' products M by the first warpgroup, P by the last. Early: k and q have left.
TILE void put_pairs(rt<float, Q> &a, chunk &s, uint32_t n, int h, int team, bool early) {
  if (PANELS == 2) {
    team_sync(team);
    add(a, handed_by(s, 1 - h));
    if (LAST_SUMS) sem_arrive<WARPGROUP>(s.added);
    else wg_sync();                           // everybody has what was handed over
  }
  if (early) {
    tma_store_wait_read();
    ring_release(s.inputs, ring_at<1>(n));
  }
  if (h == 0) put_inverse(a, s, s.beta[n % 2]);
  else put_reads(a, s);
  if (PANELS == 1) {
    fill(a, 0.f);
    add(a, handed_by(s, 0));
    if (!EARLY) wg_sync();                    // P goes where it lay
    put_reads(a, s);
  }
}

// Gates of a task come into the L2.
TILE void bring_gates(const params &p, const task &t) {
  if (t.at.steps <= 0) return;
  if (p.gates.g.is_float) prefetch(first_of<float>(p.gates.g, t.at), p.gates.g.step, t.at.steps, p.key_dim);
  else prefetch(first_of<elem>(p.gates.g, t.at), p.gates.g.step, t.at.steps, p.key_dim);
}
// Sums of panel h's gates, and what is left at the end, unless put_sums() says that they are BEYOND.
TILE enum reach put_sums(const params &p, chunk &s, const task &t, const hm &g, int h, bool steep) {
  hv end;
  enum reach reach = put_sums(s.sums[h].l, s.groups[h], end, g, steep, PARTS == 2 || steep);
  if (reach == BEYOND && !steep) return reach;
  int64_t place = (int64_t)(t.at.batch * p.rows.heads + t.at.head) * p.rows.places + t.place;
  map(end, end, [](float x) { return fast_exp2(x); });
  store(p.ends + place * D + 64 * h, end, 64);
  return reach;
}
// Of few tasks' own panels: without PAIRS they may be raw, as this is what the caller waits for least.
TILE void take_own(hm &g, const params &p, const task &t, int h) {
  if (PAIRS) take_panel(g, p.gates, p.key_dim, t, h);
  else take_gates_of<hv>(g, p.gates, t.at, p.key_dim, 64 * h, [](float x) { return x; });
}
// The panel's own gates, by its warpgroup.
TILE void sum_own_gates(const params &p, chunk &s, const task &t, int h) {
  bool steep = false, again = true;
  ROLLED while (again) {
    hm g;
    take_own(g, p, t, h);
    tma_store_wait_read<LATER>();             // before the sync in sum_down(): the sums' place is free
    if (steep) at_least(g, PAIRS ? STEEPEST : LEAST);
    again = put_sums(p, s, t, g, h, steep) == BEYOND && !steep;
    steep = again;
  }
}
COLD void put_gates(const params &p, chunk &s, uint32_t n, int h) {
  put_panel(s.sums[h].given, p.gates, p.key_dim, given_task(s.todo, n), h);
}
COLD void sum_steep(const params &p, chunk &s, uint32_t n, int h) {
  task t = given_task(s.todo, n);
  hm g;
  take_steep(g, s.sums[h].given, are_floats(p.gates, p.copied), t);
  put_sums(p, s, t, g, h, true);
}
// Of all panels, by the last warpgroup.
TILE void sum_gates(const params &p, chunk &s, const task &t, uint32_t n) {
  sem_wait(s.gates, n & 1);
  ROLLED for (int h = 0; h < PANELS; h++) {
    hm g;
    if (!p.copied) put_gates(p, s, n, h);
    take_copied(g, s.sums[h].given, are_floats(p.gates, p.copied), t);
    if (put_sums(p, s, t, g, h, false) == BEYOND) sum_steep(p, s, n, h);
  }
}
// Tiles that are not made with the factors, and leave.
TILE void put_tiles(const params &p, chunk &s, uint32_t n, int h, bool steep) {
  task t = given_task(s.todo, n);
  if (PAIRS && steep) {
    hm g;
    take_panel(g, p.gates, p.key_dim, t, h);
    at_least(g, LEAST);
    put_sums(p, s, t, g, h, true);
    wg_sync();
    t = given_task(s.todo, n);
  }
  if (PAIRS || PARTS == 2 || steep) make_tiles<true>(p, s, h);
  else make_tiles<false>(p, s, h);
  if (!LAST_SUMS) ring_release(s.inputs, ring_at<1>(n));  // its fence is that of the stores, too
  else fence_async();
  wg_sync();
  const int row = t.place * Q;
  tma_store(p.read_q, tile_of(s, h, 1), row, 64 * h, t.at.head, t.at.batch, soon(p));
  tma_store(p.write_k, tile_of(s, h, 2), row, 64 * h, t.at.head, t.at.batch, soon(p));
  tma_store(p.read_k, tile_of(s, h, 0), row, 64 * h, t.at.head, t.at.batch, soon(p));
  if (LAST_SUMS) {
    tma_store_wait_read<1>();                 // the last one lies in an area
    ring_release(s.inputs, ring_at<1>(n));
  }
}
// Where groups have a middle each, of one panel: then both warpgroups run this code.
COLD void make_far_products(const params &p, chunk &s, uint32_t n, int h) {
  rt<float, Q> a;
  rt<float, 64> right;
  make_right(right, p, s, n, h, reach_of(s.groups[h]) != BEYOND);
  make_products_by_warps(a, right, s.areas[h], s.groups[h], handed_by(s, h), false);
  wg_sync();                                  // everybody's products have read the left factors
  put(kept_by(s, h), a);
}
COLD void put_steep_tiles(const params &p, chunk &s, uint32_t n, int h) { put_tiles(p, s, n, h, true); }
COLD void clear_keys(chunk &s, uint32_t n, int h) {
  int steps = given_task(s.todo, n).at.steps;
  clear_rows(s.k[h], 0, steps);
  clear_rows(s.q[h], 0, steps);
  wg_sync();
}
COLD void put_squares(chunk &s, int h) {
  put_squares(s.squares[0][h], s.k[h]);
  put_squares(s.squares[1][h], s.q[h]);
}

TILE void compute(const params &p, shared &all, int wg) {
  const int team = wg / PANELS, h = wg % PANELS;
  chunk &s = all.chunks[team];
  uint32_t n = 0;
  grid_wait();
  for (;; n++) {
    wait_for_task(s.todo, n);
    task t = given_task(s.todo, n);
    if (t.at.steps <= 0) break;
    if (h == 0) tell(p, s, n);
    if (!LAST_SUMS) sum_own_gates(p, s, t, h);
    else if (h == PANELS - 1) sum_gates(p, s, t, n);
    if (h == (LAST_SUMS ? PANELS - 1 : 0)) {
      rv beta;
      take_beta_as_given(beta, p.gates, t.at);
      store(s.beta[n % 2], beta);
    }
    ring_wait(s.inputs, ring_at<1>(n));
    if (runs_over(p.rows, t.at.step, t.at.step + t.at.steps)) clear_keys(s, n, h);
    if (p.gates.norm) put_squares(s, h);
    tma_store_wait_read();
    if (h == 0) {                           // the other one is later here
      wait_for_task(s.todo, n + 1);
      bring_gates(p, given_task(s.todo, n + 1));
    }
    team_sync(team);                        // all has left, and all have written squares; l, too
    const enum reach reach = reach_of(s.groups[h]);
    const bool steep = reach == BEYOND, early = EARLY && !steep;
    if (PAIRS) {
      rt<float, Q> a;
      if (LAST_SUMS && (reach != NEAR || reach_of(s.groups[PANELS - 1 - h]) != NEAR)) {
        make_far_products(p, s, n, h);
        take(a, kept_by(s, h));
      } else {
        rt<float, 64> right;
        make_right(right, p, s, n, h, LAST_SUMS || early);
        if (PARTS == 2) make_pairs_of_parts(a, right, p, s, h);
        else make_products(a, right, s.areas[h], s.groups[h], handed_by(s, h), false, LAST_SUMS ? NEAR : reach);
      }
      put_pairs(a, s, n, h, team, early);
    }
    // Only sums of steep gates take the place of what was handed over; but who waits at all has to see every phase.
    if (LAST_SUMS) sem_wait(s.added, n & 1);
    if (early) {
      fence_async();
      wg_sync();
    } else if (LAST_SUMS) {
      put_steep_tiles(p, s, n, h);
    } else {
      put_tiles(p, s, n, h, steep);
    }
    if (PAIRS && PANELS == 2 && h == 1) {
      if (p.done) tma_store_wait<0>();        // they have been on their way for long
      sem_arrive<WARPGROUP>(s.made);
    }
    if (PAIRS && h == 0) {
      if (PANELS == 2) sem_wait(s.made, n & 1);
      t = given_task(s.todo, n);
      tma_store(p.p, reads_of(s), t.place * Q, 0, t.at.head, t.at.batch, soon(p));
      tma_store(p.m, m_of(s), t.place * Q, 0, t.at.head, t.at.batch, soon(p));
    }
  }
  if (h == 0) tell(p, s, n);
  tma_store_wait_read();
}

typedef block<params, shared, init, role<compute, WARPGROUP, TEAMS * PANELS, COMPUTE_REGS>,
              role<loader, THREAD, TEAMS, LOAD_REGS>, DEPENDENT, FOLLOWED, UNLESS<is_done>> kernel;
ENTRY(kernel, Q, TEAMS)
