// Rows whose columns are pairs, as rotations turn them (warpgroup): from global memory into registers and back, each
// number once. Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the kernels that want it do.
//
//   pt<T>    a row in each slot, 16 columns a thread. 16-bit numbers stay as they are: eight registers
//   pa       two floats for each pair, an angle's cosine and sine: 16 registers
//   pc       a float for each column, of all rows: 16 registers
//   pr<R>    a float for each of R rows of a slot, R registers
//   ps       room for all threads' pc, in shared memory: sums down the columns meet there
//   per_slot<X>   a value for each slot: a thread has its own slot's
//   paired   where the calling thread is in rows of a pairing: worked out once, not in every operation
//
// A warpgroup has slots_of() slots. f(slot) says where a slot's row is, if it exists. EIGHTS: eight columns are one
// access. Then rows begin at multiples of 16 bytes, `pairs` is a multiple of 8 and `width` of 16. SINGLES: rows may lie
// anywhere and have any width.
#pragma once
#include "tile/pairing.h"
#include "tile/tile.h"
enum pair_access { EIGHTS, SINGLES };
template<typename T> struct pt;
struct pa;
struct pc;
template<int R> struct pr;
struct ps;
template<typename X> struct per_slot;
struct paired;
template<typename T> struct row_of { T *begin; bool exists; };

TILE paired paired_of(const pairing &p);
TILE int slots_of(const pairing &p) { return WARPGROUP >> p.lanes_log2; }
template<typename X, class F> TILE void set(per_slot<X> &x, const paired &p, F f);       // f(slot)
template<typename X> TILE const X &of_slot(const per_slot<X> &x, int slot);               // in an f(slot) only
template<int A, typename T, class F> TILE void load(pt<T> &x, const paired &p, F f);   // no row: zeros
// Rows of `pairs` numbers, floats or 16 bits. EIGHTS: the rows lie as above.
template<int A, class F, class G> TILE void load(pa &a, const paired &p, F first, G second);
// f(x, y, a, b) of each pair x, y and its angle's two floats, in R rows of a slot that have the same angles; f may
// change x and y, which are then rounded to T. The other columns stay.
template<int A, int R, typename T, class F> TILE void each_pair(pt<T> (&x)[R], const pa &a, const paired &p, F f);
// The same with f(x, y, a, b, of x's column, of y's, of the row), and g(x, of its column, of the row) of the others.
template<int A, int R, typename T, class F, class G>
TILE void each_pair(pt<T> (&x)[R], const pa &a, const pc &columns, const pr<R> &rows, const paired &p, F f, G g);
template<int A, typename T, class F> TILE void save(F f, const pt<T> &x, const paired &p);   // no row: nothing

// A row of `width` numbers, floats or 16 bits.
template<int A, typename T> TILE void load(pc &x, const paired &p, row_of<T> row);
TILE void fill(pc &x, float y);
template<int R> TILE void fill(pr<R> &x, float y);
// x = f(sum of the squares of each row's columns), of rows in at most 32 threads: lanes_log2 <= 5.
template<int A, int R, typename T, class F> TILE void squares(pr<R> &x, const pt<T> (&rows)[R], const paired &p, F f);

// Of rows x and u of two tensors. d = h(sum of f(x, y, u, v, a, b, of x's column, of y's, of the row) over the pairs,
// and of g(x, u, of the column, of the row) over the other columns), of rows in at most 32 threads.
template<int A, int R, typename T, class F, class G, class H>
TILE void dots(pr<R> &d, const pt<T> (&x)[R], const pt<T> (&u)[R], const pa &a, const pc &columns, const pr<R> &rows,
               const paired &p, F f, G g, H h);
// f(x, y, u, v, a, b, of x's column, of y's, of the row, other of the row, sum of x's column, of y's) and g(x, u, of
// the column, of the row, other, sum) change x and y, as in each_pair, and sums, which are partial per thread.
template<int A, int R, typename T, class F, class G>
TILE void each_pair(pt<T> (&x)[R], const pt<T> (&u)[R], const pa &a, const pc &columns, const pr<R> &rows,
                    const pr<R> &others, pc &sums, const paired &p, F f, G g);
// Partial sums become a row of `width` floats, always in the same order. Between the two stands a sync.
TILE void put(ps &d, const pc &sums, const paired &p);
template<int A> TILE void save(float *g, const ps &s, const paired &p);
#ifdef __CUDACC__
#include "tile/sm90/pairs.h"
#else
#include "tile/cpu/pairs.h"
#endif
