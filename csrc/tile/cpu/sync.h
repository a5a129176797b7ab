// Bodies of tile/sync.h. Fibers of a cluster share one thread, so ordering costs nothing; only waiting is real.
#pragma once

TILE void sem_step(sem &s) {
  if (s.pending || s.bytes) return;
  s.phase ^= 1;
  s.pending = s.count;
}
TILE void sem_complete(sem &s, int bytes) {
  s.bytes -= bytes;
  sem_step(s);
}
// The object at this address in block `rank` of the cluster.
template<class X> TILE X &at_rank(X &x, int rank) {
  return *(X *)((char *)&x + (ptrdiff_t)(rank - self().rank) * (ptrdiff_t)mg_machine->stride);
}

TILE void sem_init(sem &s, int count) {
  s.bytes = 0;
  s.count = s.pending = (uint8_t)count;
  s.phase = 0;
}
TILE void sem_wait(sem &s, uint32_t phase) {
  if (s.phase == phase) fiber_wait(WAIT_SEM, &s, phase);
}
template<int W> TILE void sem_arrive(sem &s) {
  s.pending -= W == WARPGROUP ? 4 : 1;
  sem_step(s);
}
TILE void sem_expect(sem &s, uint32_t bytes) {
  s.bytes += (int32_t)bytes;
  s.pending--;
  sem_step(s);
}
template<int W, int ORDER> TILE void sem_arrive_at(sem &s, int rank) { sem_arrive<W>(at_rank(s, rank)); }
TILE int cluster_rank() { return self().rank; }

TILE barrier &barrier_add(int id, int threads) {
  fiber &f = self();
  barrier &b = mg_machine->barriers[f.rank][id];
  b.threads += f.width;
  if (b.threads >= threads) {
    b.threads = 0;
    b.generation++;
  }
  return b;
}
TILE void bar_arrive(int id, int threads) { barrier_add(id, threads); }
TILE void bar_sync(int id, int threads) {
  uint32_t generation = mg_machine->barriers[self().rank][id].generation;
  fiber_wait(WAIT_BARRIER, &barrier_add(id, threads), generation);
}
template<class Tile, class F> TILE void issue_load(Tile &t, const region &, sem &s, int bytes, F f) {
  tile_written(&t);
  f();
  sem_complete(s, bytes);
}
template<class Tile, class F> TILE void issue_send(const region &, Tile &t, const region &to, sem &s, int bytes, F f) {
  sem_expect(s, bytes);
  issue_load(t, to, s, bytes, f);
}
TILE void wg_sync() {}
TILE void fence_async() {}
template<int G> TILE void tma_store_wait_read() {}
template<int G, int W> TILE void tma_store_wait() {}
TILE void tma_prefetch(const gmap &) {}
template<int C> TILE void tma_prefetch_rows(const gmap &, int, int, int, int) {}
TILE void tma_prefetch(const float *, int) {}
TILE void mma_fence() {}
TILE void mma_commit() {}
template<int G, class... Tile> TILE void mma_wait(Tile &...) {}

TILE void grid_wait() {}
template<int W> TILE void order_wait(const int *g, int value) { fiber_wait(WAIT_ORDER, g, (uint32_t)value); }
TILE void order_pass(int *g, int value) { __atomic_store_n(g, value, __ATOMIC_RELEASE); }
template<int W> TILE void order_count(int *g) { __atomic_fetch_add(g, 1, __ATOMIC_RELEASE); }
