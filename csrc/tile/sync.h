// Synchronisation. Contracts; bodies in sm90/ and cpu/.
#pragma once

// Arrivals are counted in warps: a thread or a warp counts 1, a warpgroup 4. See arrivals().
TILE constexpr int arrivals(int threads, int warps, int warpgroups) { return threads + warps + 4 * warpgroups; }
TILE void sem_init(sem &s, int count);                  // thread, in the block's init function only
TILE void sem_wait(sem &s, uint32_t phase);             // any width: until the phase of this parity is complete
template<int W = WARPGROUP> TILE void sem_arrive(sem &s);   // all of the caller's earlier reads and writes are ordered
                                                            // before it
TILE void sem_expect(sem &s, uint32_t bytes);           // thread: arrive, and expect this many bytes of asynchronous
                                                        // copies
// The same semaphore in block `rank` of this cluster. It passes on nothing that the caller wrote: it says that products
// or copies which the caller has waited for are over. With ORDERED it is ordered like sem_arrive, at the price of a
// fence for the cluster.
enum remote { UNORDERED, ORDERED };
template<int W = WARPGROUP, int ORDER = UNORDERED> TILE void sem_arrive_at(sem &s, int rank);
TILE int cluster_rank();                                // rank of this block in its cluster

TILE void bar_sync(int id, int threads);                // warpgroup: named barrier; ids 1..7 belong to the kernel
TILE void bar_arrive(int id, int threads);              // warpgroup: arrive without waiting
TILE void wg_sync();                                    // warpgroup: its 128 threads
// Generic writes before it are seen by TMA and matrix instructions issued after the next sync or arrive; generic reads
// before it are done before such a copy overwrites what they read.
TILE void fence_async();

// A kernel whose block is DEPENDENT begins before the kernel in front of it in the stream is over: when the last block
// of that one ends or, where that one is FOLLOWED, when its last block has begun. grid_wait() waits until that kernel
// is over and its writes are seen. Any width. Every role of a dependent kernel calls it before it touches global
// memory.
TILE void grid_wait();

// Global counters that order blocks. order_wait: until *g >= value; all writes of those who passed or counted are seen.
template<int W = WARPGROUP> TILE void order_wait(const int *g, int value);   // warpgroup or thread
TILE void order_pass(int *g, int value);                // warpgroup: its global writes before it, then *g = value
template<int W> TILE void order_count(int *g);          // thread: its global writes before it, then 1 is added to *g
