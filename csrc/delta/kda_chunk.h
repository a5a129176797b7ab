// What kda's kernels make of a chunk's panel of 64 channels (warpgroup): sums of its gates, factors of its steps, and
// both products of pairs. The formulas are kda_prepare.cu's.
#pragma once
#include "tile/cold.h"
#include "tile/l2.h"
#include "tile/slices.h"
#include "delta/kda_gates.h"
#include "delta/kda_tasks.h"

enum { PANELS = D / 64 };
// Gates are steep where a group's first or last sum is further than FAR from its middle, to base 2.
#define FAR 113.8f
// What a steep one counts as in L and P
#define STEEPEST -10.5f
typedef st<elem, Q, 64> panel;
// Of each group of 16 steps i: k e^(l - m) and scale q e^(l - m), in that order in the first panel's
struct area { st<factor, 32, 64> left[4]; };

// ---- gates and their sums

// A panel's gates as they were given
union given_gates { sm<64, 64> floats; panel shorts; };
TILE int given_bytes(bool floats) {
  return floats ? (int)sizeof(sm<64, 64>) : (int)sizeof(panel);
}
TILE void load_gates(given_gates &d, const gmap &g, bool floats, sem &full, const task &t, int col, enum l2 hint) {
  if (floats) tma_load(d.floats, g, full, t.at.step, col, t.at.head, t.at.batch, hint);
  else tma_load(d.shorts, g, full, t.at.step, col, t.at.head, t.at.batch, hint);
}
// What is behind a packed row's last step is another row's.
COLD void clear_given(given_gates &given, bool floats, int steps) {
  if (floats) clear_behind(given.floats, steps);
  else clear_rows(given.shorts, 0, steps);
  wg_sync();
}
TILE void take_copied(hm &g, given_gates &given, bool floats, const task &t) {
  if (t.at.steps < Q) clear_given(given, floats, t.at.steps);
  if (floats) load(g, given.floats);
  else load(g, given.shorts);
}
// What no copy brings lies there as floats.
TILE bool are_floats(const kda_gates &p, bool copied) { return !copied || p.g.is_float; }
TILE void take_panel(hm &g, const kda_gates &p, int key_dim, const task &t, int h) {
  take_given(g, p, t.at, key_dim, 64 * h);
}
TILE void put_panel(given_gates &d, const kda_gates &p, int key_dim, const task &t, int h) {
  hm g;
  take_panel(g, p, key_dim, t, h);
  store(d.floats, g);
  wg_sync();
}
TILE void take_steep(hm &g, given_gates &given, bool floats, const task &t) {
  take_copied(g, given, floats, t);
  at_least(g, STEEPEST);
}
// Sums of a panel's gates, to base 2, and of all; not if a sum is too far from its group's middle and gates do not
// count as steep. logs: of the groups' middles and ends the logarithms, not what they are to multiply with.
TILE enum reach put_sums(ct &l, cg &groups, hv &all, const hm &g, bool steep, bool logs) {
  return sum_down(
    l, groups, all, g, 1.4426950408889634f, FAR, steep, [](float x) { return fast_exp2(0.5f * x); },
    [=](float x) {
      float root = fast_exp2(0.5f * x);     // its square may be a subnormal number
      return logs ? x : root * root;
    });
}

// ---- factors

// Factors that make rows of length 1.
TILE void put_squares(sv<Q> &d, panel &y) {
  const own_rows<elem> x = own_rows_of(y);
  rsum sum;
  rv squares;
  fill(sum, 0.f);
  each<64>([](int, int, float y, float &z) { z = fused(y, y, z); }, x, sum);
  reduce(squares, sum);
  store(d, squares);
}
TILE void take_norm(rv &norm, const sv<Q> (&squares)[PANELS]) {
  load(norm, squares[0]);
  if (PANELS == 2) {
    rv more;
    load(more, squares[PANELS - 1]);
    map(norm, norm, more, [](float x, float y) { return x + y; });
  }
  map(norm, norm, [](float x) { return fast_rsqrt(x + 1e-6f); });
}
// Of k's rows and of q's, the scale in the latter, of their squares. They are made anew, not kept.
TILE void take_factors(rv &k, rv &q, bool norm, float scale, const sv<Q> (&squares)[2][PANELS]) {
  fill(k, 1.f);
  fill(q, scale);
  if (!norm) return;
  take_norm(k, squares[0]);
  take_norm(q, squares[1]);
  map(q, q, [=](float x) { return x * scale; });
}
struct factor_part {
  rt<float, 16> l;
  rt<elem, 16> k, q;
};
TILE void take_part(factor_part &d, panel &k, panel &q, const ct &l, int c) {
  load_part(d.k, own_rows_of(k), c);
  load_part(d.q, own_rows_of(q), c);
  load_part(d.l, l, c);
}
// The factors of columns i of L^T and P^T, and those of rows j, for their own groups, of panel h. Early: of the first
// ones also the tiles, in place of k and q. A block of these has been read before it is written, and by its warp alone,
// as has l; and the third one, k e^(l_e - l), to panel h of `write`. NULL: put_write() makes that. AT_ONCE: parts of 16
// columns whose code lies one behind the other. All four want fewer registers; two are half as much to fetch.
template<int AT_ONCE>
TILE void make_factors(rt<float, 64> &right, area &to, panel &k, panel &q, ct &l, const cg &groups, const rv &norm_k,
                       const rv &norm_q, int h, bool early, st<elem, Q, D> *write) {
  static_assert(AT_ONCE == 2 || AT_ONCE == 4, "a turn begins with the first of two parts");
  const by_group middle = {groups.middle}, end = {groups.end};
  factor_part parts[2];
  fill(right, 0.f);
  take_part(parts[0], k, q, l, 0);
  ROLLED for (uint32_t first = 0; first < 64; first += 16 * AT_ONCE) {
    UNROLLED for (int i = 0; i < AT_ONCE; i++) {
      const uint32_t c = first + 16 * i;
      const factor_part &now = parts[i % 2];
      rt<float, 16> x, y, z;
      // Loads wait for no store of the part before. Behind the last one there is nothing to load.
      if (AT_ONCE < 4 || i < 3) take_part(parts[1 - i % 2], k, q, l, (c + 16) % 64);
      fill(x, 0.f);
      fill(y, 0.f);
      fill(z, 0.f);
      each_part(c, [](int, int, float &x, float &y, float &z, float l, float k, float q, float norm_k, float norm_q) {
        float e = fast_exp2(l);
        k *= norm_k;
        z = k * fast_exp2(-l);
        x = k * e;
        y = q * norm_q * e;
      }, x, y, z, now.l, now.k, now.q, norm_k, norm_q);
      append_part(right, z);
      store_groups(to.left, h, x, c);
      store_groups(to.left, 1 - h, y, c);
      if (early) {
        each_part(c, [](int, int, float &x, float &y, float &z, float middle, float end) {
          x *= middle;
          y *= middle;
          z *= end;
        }, x, y, z, middle, end);
        store_own(k, x, c);
        store_own(q, y, c);
        if (write) store_own(*write, z, h, c);
      }
    }
  }
}
// k e^(l_e - l), columns of d from col on
template<int C> TILE void put_write(st<elem, Q, C> &d, int col, const rt<float, 64> &right, const cg &groups) {
  const by_group end = {groups.end};
  UNROLLED for (int c = 0; c < 64; c += 16) {
    rt<float, 16> x;
    fill(x, 0.f);
    each_part(c, [](int, int, float &x, float right, float end) { x = right * end; }, x, right, end);
    store_own(d, x, col + c);
  }
}

// 16 columns from c on of k e^l, scale q e^l and k e^(l_e - l). STEEP: the groups' middles and ends are logarithms, of
// any gates. Else they are, bit by bit, those that are made with the factors.
template<bool STEEP, class L, class X>
TILE void make_tile_part(rt<float, 16> (&d)[3], int c, L &l, X &k, X &q, const cg &groups, const rv &norm_k,
                         const rv &norm_q) {
  const by_group middle = {groups.middle}, end = {groups.end};
  CONSTANT_INDEX for (rt<float, 16> &x : d) fill(x, 0.f);
  each_part(c, [](int, int, float &x, float &y, float &z, float l, float k, float q, float middle, float end,
                  float norm_k, float norm_q) {
    float e = fast_exp2(STEEP ? middle + l : l);
    k *= norm_k;
    x = k * e;
    y = q * norm_q * e;
    z = k * fast_exp2(STEEP ? end - l : -l);
    if (!STEEP) {
      x *= middle;
      y *= middle;
      z *= end;
    }
  }, d[0], d[1], d[2], l, k, q, middle, end, norm_k, norm_q);
}

// ---- products

TILE void carry(rt<float, 64> &right, const sv<64> &between, int group) {
  carry_to_group(right, between, group);
  carry_to_group(right, between, group);
}
// `to` is in place of left factors, which everybody has to have read then: a group's factors are 4 KB, and of groups 0
// and 1 the first 3 KB are taken, of 2 and 3 the next 7.
TILE void hand_over_in_turn(handed &to, const rt<float, 16> &t, int group, bool in_place) {
  if (in_place && group % 2 == 0) wg_sync();
  hand_over(to, t, group);
}
// A half of the columns of both products, where its groups have one middle; meanwhile rows are carried to the next.
template<int HALF>
TILE void make_half(rt<float, Q> &a, rt<float, 64> &right, area &from, const cg &groups, handed &to, bool in_place) {
  rt<factor, 64> r;
  rt<float, 16> own, other, next, next_other;
  convert_group(r, right, 2 * HALF + 1);
  mma_fence();
  mma_ABt_halves<ZERO>(own, other, r, from.left[2 * HALF], 0);
  mma_ABt_halves<ZERO>(next, next_other, r, from.left[2 * HALF + 1], 0);
  mma_commit();
  if (HALF == 0) carry(right, groups.between[1], 2);
  mma_wait<0>(own, other, next, next_other, r);
  put_group(a, own, 2 * HALF);
  put_group(a, next, 2 * HALF + 1);
  hand_over_in_turn(to, other, 2 * HALF, in_place);
  hand_over_in_turn(to, next_other, 2 * HALF + 1, in_place);
}
// A group of columns; meanwhile rows are carried to the next group.
template<int GROUP>
TILE void make_group(rt<float, Q> &a, rt<float, 64> &right, area &from, const cg &groups, handed &to, bool in_place) {
  rt<factor, 64> r;
  rt<float, 16> own, other;
  convert_group(r, right, GROUP);
  mma_fence();
  mma_ABt_halves<ZERO>(own, other, r, from.left[GROUP], 0);
  mma_commit();
  if (GROUP < 3) carry(right, groups.between[GROUP < 3 ? GROUP : 0], GROUP + 1);
  mma_wait<0>(own, other, r);
  put_group(a, own, GROUP);
  hand_over_in_turn(to, other, GROUP, in_place);
}
// By warps; see mma_ABt_halves_by_warps().
template<int GROUP>
TILE void make_group_by_warps(rt<float, Q> &a, rt<float, 64> &right, area &from, const cg &groups, handed &to,
                              bool in_place) {
  rt<factor, 64> r;
  rt<float, 16> own, other;
  convert_group(r, right, GROUP);
  mma_ABt_halves_by_warps(own, other, r, from.left[GROUP]);
  if (GROUP < 3) carry(right, groups.between[GROUP < 3 ? GROUP : 0], GROUP + 1);
  put_group(a, own, GROUP);
  hand_over_in_turn(to, other, GROUP, in_place);
}
// This panel's part of L^T in the first warpgroup, of P^T in the last; and, handed over, of the other one. Where j is
// behind i the products are anything, also infinite.
TILE void make_products_of_halves(rt<float, Q> &a, rt<float, 64> &right, area &from, const cg &groups, handed &to,
                                  bool in_place) {
  fill(a, 0.f);
  make_half<0>(a, right, from, groups, to, in_place);
  make_half<1>(a, right, from, groups, to, in_place);
}
TILE void make_products(rt<float, Q> &a, rt<float, 64> &right, area &from, const cg &groups, handed &to, bool in_place,
                        enum reach reach) {
  if (reach == NEAR && PANELS == 2)         // ptxas lacks registers for halves where there are three teams
    return make_products_of_halves(a, right, from, groups, to, in_place);
  fill(a, 0.f);
  make_group<0>(a, right, from, groups, to, in_place);
  make_group<1>(a, right, from, groups, to, in_place);
  make_group<2>(a, right, from, groups, to, in_place);
  make_group<3>(a, right, from, groups, to, in_place);
}
TILE void make_products_by_warps(rt<float, Q> &a, rt<float, 64> &right, area &from, const cg &groups, handed &to,
                                 bool in_place) {
  fill(a, 0.f);
  make_group_by_warps<0>(a, right, from, groups, to, in_place);
  make_group_by_warps<1>(a, right, from, groups, to, in_place);
  make_group_by_warps<2>(a, right, from, groups, to, in_place);
  make_group_by_warps<3>(a, right, from, groups, to, in_place);
}
// What a function that is called has made of it, for the thread that called.
struct kept { pt parts[4]; };
TILE void put(kept &d, const rt<float, Q> &a) {
  UNROLLED for (int i = 0; i < 4; i++) {
    rt<float, 16> part;
    copy_part(part, a, 16 * i);
    store(d.parts[i], part);
  }
}
TILE void take(rt<float, Q> &a, const kept &s) {
  fill(a, 0.f);
  UNROLLED for (int i = 0; i < 4; i++) {
    rt<float, 16> part;
    load(part, s.parts[i]);
    put_group(a, part, i);
  }
}
// M^T of L^T, of which anything may stand where nothing should.
template<inverse I = IN_ONE>
TILE void make_inverse(rt<float, Q> &inverse, rt<float, Q> &a, const sv<Q> &factors, tri<inner> &scratch) {
  rv beta;
  load(beta, factors);
  map_row(a, beta, [](float x, float y) { return x * y; });
  if (I == IN_HALVES) invert_in_halves(inverse, a, scratch);
  else invert(inverse, a, scratch);
}
