// Rows whose columns are pairs, as rotations turn them (warpgroup): from global memory into registers and back, each
// number once. Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the kernels that want it do.
//
//   pt<T>    a row in each slot, 16 columns a thread. 16-bit numbers stay as they are: eight registers
//   pa       two floats for each pair, an angle's cosine and sine: 16 registers
//
// A warpgroup has slots_of() slots. f(slot) says where a slot's row begins, or NULL. EIGHTS: eight columns are one
// access. Then rows begin at multiples of 16 bytes, `pairs` is a multiple of 8 and `width` of 16. SINGLES: rows may lie
// anywhere and have any width.
#pragma once
#include "tile/pairing.h"
#include "tile/tile.h"
enum pair_access { EIGHTS, SINGLES };
template<typename T> struct pt;
struct pa;

TILE int slots_of(const pairing &p) { return WARPGROUP >> p.lanes_log2; }
template<int A, typename T, class F> TILE void load(pt<T> &x, const pairing &p, F f);   // NULL: zeros
// Rows of `pairs` numbers, floats or 16 bits. EIGHTS: the rows lie as above.
template<int A, class F, class G> TILE void load(pa &a, const pairing &p, F first, G second);
// f(x, y, a, b) of each pair x, y and its angle's two floats; f may change x and y, which are then rounded to T. The
// other columns stay.
template<int A, typename T, class F> TILE void each_pair(pt<T> &x, const pa &a, const pairing &p, F f);
template<int A, typename T, class F> TILE void save(F f, const pt<T> &x, const pairing &p);   // NULL: not written
#ifdef __CUDACC__
#include "tile/sm90/pairs.h"
#else
#include "tile/cpu/pairs.h"
#endif
