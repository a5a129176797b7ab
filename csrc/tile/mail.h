// Registers that a warpgroup sends to another one: each thread there gets what the thread of its number has here, and
// no tile is laid out in between. Contracts; bodies in sm90/ and cpu/. tile.h does not include this file: the kernels
// that want it do.
//
//   mail<T, N>   room in shared memory for an rt<T, N> of float or 16 bits, in an order of its own
//   mail_rows    for an rv
//
// All operations are a warpgroup's. The boxes of a ring lie with who takes from them, and so does `full`; `empty` lies
// with who sends.
#pragma once
#include "tile/tile.h"
template<typename T, int N> struct mail;
struct mail_rows;
// Of 16 bits: into the box of block `rank`, which counts a warpgroup's arrival and the bytes on its own `full`.
template<typename T, int N> TILE void mail_send(mail<T, N> &box, const rt<T, N> &t, sem &full, int rank);
TILE void mail_send(mail_rows &box, const rv &v, sem &full, int rank);
// Into a box of the caller's own block: there it is shared memory like any other.
template<typename T, int N> TILE void mail_put(mail<T, N> &box, const rt<T, N> &t);
// Of the caller's own block, after a wait for `full`.
template<typename T, int N> TILE void mail_take(rt<T, N> &t, const mail<T, N> &box);
TILE void mail_take(rv &v, const mail_rows &box);
// What was taken has been used, by arithmetic or by products that the caller has waited for: an arrival at the `empty`
// of block `rank`, which may send again.
TILE void mail_done(sem &empty, int rank);
#ifdef __CUDACC__
#include "tile/sm90/mail.h"
#else
#include "tile/cpu/mail.h"
#endif
