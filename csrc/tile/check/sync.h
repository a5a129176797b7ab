// Bodies of tile/sync.h, and of everything that waits.
#pragma once
template<class X> TILE X &at_rank(X &x, int rank) { return *(X *)ck_at_rank(&x, rank); }

TILE int block_index() { return ck_block_index(); }
TILE int block_count() { return ck_block_count(); }
TILE int atomic_next(int *counter) { return ck_atomic_next(HERE, counter); }
TILE int cluster_rank() { return ck_cluster_rank(); }

TILE void sem_init(sem &s, int count) { ck_sem_init(HERE, &s, count); }
TILE void sem_wait(sem &s, uint32_t phase) { ck_sem_wait(HERE, &s, phase); }
template<int W> TILE void sem_arrive(sem &s) { ck_sem_arrive(HERE, &s, W, CK_LOCAL); }
template<int W, int ORDER> TILE void sem_arrive_at(sem &s, int rank) {
  ck_sem_arrive(HERE, ck_at_rank(&s, rank), W, ORDER ? CK_ORDERED : CK_REMOTE);
}
TILE void sem_expect(sem &s, uint32_t bytes) { ck_sem_expect(HERE, &s, bytes); }
TILE void bar_sync(int id, int threads) { ck_bar(HERE, id, threads, true); }
TILE void bar_arrive(int id, int threads) { ck_bar(HERE, id, threads, false); }
TILE void wg_sync() { ck_wg_sync(HERE); }
TILE void fence_async() { ck_fence_async(HERE); }
TILE void grid_wait() { ck_grid_wait(HERE); }
template<int W> TILE void order_wait(const int *g, int value) { ck_order_wait(HERE, W, g, value); }
TILE void order_pass(int *g, int value) { ck_order_pass(HERE, g, value); }
template<int W> TILE void order_count(int *g) { ck_order_count(HERE, g); }

template<int G> TILE void tma_store_wait_read() { ck_store_wait(HERE, WARPGROUP, G, false); }
template<int G, int W> TILE void tma_store_wait() { ck_store_wait(HERE, W, G, true); }
TILE void tma_prefetch(const gmap &) { ck_called_by(HERE, THREAD); }
template<int C> TILE void tma_prefetch_rows(const gmap &, int, int, int, int) { ck_called_by(HERE, THREAD); }
TILE void tma_prefetch(const float *, int) { ck_called_by(HERE, THREAD); }
TILE void mma_fence() { ck_mma_fence(HERE); }
TILE void mma_commit() { ck_mma_commit(HERE); }
template<int G, class... Tile> TILE void mma_wait(Tile &...tiles) {
  ck_register *named[sizeof...(tiles) + 1] = {&tiles.state...};
  ck_mma_wait(HERE, G, named, (int)sizeof...(tiles));
}
