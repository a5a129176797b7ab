// Rings of stages and turns; backend-independent.
#pragma once
// A ring of S stages. A producer acquires a stage, fills it and makes it full, by bytes or by arriving. A consumer
// waits for it, reads it and releases it. READS says how consumers read. GENERIC_READS: through registers; the release
// fences, so that the next asynchronous copy comes after these reads. ASYNC_READS: only by matrix instructions.
enum reads { GENERIC_READS, ASYNC_READS };
template<int S, int READS = GENERIC_READS> struct ring { sem full[S], empty[S]; };
struct ring_pos { int stage; uint32_t phase; };

template<int S, int R> TILE void ring_init(ring<S, R> &r, int producers, int consumers) {   // arrivals(), see sync.h
  for (int i = 0; i < S; i++) { sem_init(r.full[i], producers); sem_init(r.empty[i], consumers); }
}
template<int S> TILE ring_pos ring_at(uint32_t n) {     // position of the n-th use since the kernel began
  ring_pos p;
  p.stage = (int)(n % S);
  p.phase = (n / S) & 1;
  return p;
}
template<int S, int R> TILE void ring_next(const ring<S, R> &, ring_pos &p) {
  if (++p.stage == S) { p.stage = 0; p.phase ^= 1; }
}
// The phase before a fresh semaphore's first counts as complete: the first S acquires pass. So positions count from the
// kernel's begin, not from a task's.
template<int S, int R> TILE void ring_acquire(ring<S, R> &r, ring_pos p) { sem_wait(r.empty[p.stage], p.phase ^ 1); }
template<int S, int R> TILE void ring_expect(ring<S, R> &r, ring_pos p, uint32_t bytes) {
  sem_expect(r.full[p.stage], bytes);
}
// For a producer that wrote the stage with generic stores.
template<int W = WARPGROUP, int S, int R> TILE void ring_fill(ring<S, R> &r, ring_pos p) {
  fence_async();
  sem_arrive<W>(r.full[p.stage]);
}
template<int S, int R> TILE void ring_wait(ring<S, R> &r, ring_pos p) { sem_wait(r.full[p.stage], p.phase); }
template<int W = WARPGROUP, int S, int R> TILE void ring_release(ring<S, R> &r, ring_pos p) {
  if (R == GENERIC_READS) fence_async();
  sem_arrive<W>(r.empty[p.stage]);
}
// The consumer's usual end of a stage.
template<int S, int R> TILE void ring_done(ring<S, R> &r, ring_pos &p) { ring_release(r, p); ring_next(r, p); }

// A ring over the B blocks of a cluster whose producers copy into each other's stages (multicast). A stage is free when
// the consumers of every block have released it, and a producer that has acquired it may write it in all of them. Each
// block counts its own bytes.
template<int B, int S, int R> TILE void cluster_ring_init(ring<S, R> &r, int producers, int consumers) {
  ring_init(r, producers, B * consumers);
}
template<int B, int W = WARPGROUP, int S, int R> TILE void cluster_ring_release(ring<S, R> &r, ring_pos p) {
  if constexpr (B == 1) return ring_release<W>(r, p);
  static_assert(B == 1 || R == ASYNC_READS, "an arrival at another block does not order generic reads");
  // sem_arrive also orders what this block's loader copies there for itself
  for (int rank = 0; rank < B; rank++)
    if (rank == cluster_rank()) sem_arrive<W>(r.empty[p.stage]);
    else sem_arrive_at<W>(r.empty[p.stage], rank);
}

// Turns: the N warpgroups of a block issue matrix work one after the other, so that one's arithmetic runs under the
// others' products. They use named barriers 1 to N. A warpgroup calls turn_begin once before its first turn, and
// turn_end once after its last.
template<int N> TILE void turn_wait(int wg) { bar_sync(1 + wg, 256); }
template<int N> TILE void turn_pass(int wg) { bar_arrive(1 + (wg + 1 == N ? 0 : wg + 1), 256); }
template<int N> TILE void turn_begin(int wg) { if (wg == N - 1) turn_pass<N>(wg); }
template<int N> TILE void turn_end(int wg) { if (wg == 0) turn_wait<N>(wg); }
