// Synchronisation on sm_90a: mbarriers, named barriers, proxy fences.
#pragma once
TILE void sem_init(sem &s, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s)), "r"(count));
}
TILE void sem_wait(sem &s, uint32_t phase) {
  uint32_t done, a = shared_address(&s);
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(a), "r"(phase) : "memory");
  } while (!done);
}
// One arrival per warp, after all its lanes: it orders every lane's accesses.
template<int W> TILE void sem_arrive(sem &s) {
  if (W != THREAD) __syncwarp();
  if (W == THREAD || lane() == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&s)) : "memory");
}
template<int W> TILE void sem_arrive_at(sem &s, int rank) {
  if (W != THREAD) __syncwarp();
  if (W == THREAD || lane() == 0)
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [a];\n}\n"
                 ::"r"(shared_address(&s)), "r"(rank) : "memory");
}
TILE void sem_expect(sem &s, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&s)), "r"(bytes) : "memory");
}
TILE int cluster_rank() { uint32_t r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return (int)r; }
TILE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
TILE void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
TILE void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
TILE void wg_sync() { bar_sync(8 + (int)(threadIdx.x >> 7), 128); }
TILE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

TILE void order_wait(const int *g, int value) {
  if (thread_in_group() == 0) {
    int seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(g) : "memory"); while (seen < value);
  }
  wg_sync();
}
TILE void order_pass(int *g, int value) {
  __threadfence();
  wg_sync();
  if (thread_in_group() == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(g), "r"(value) : "memory");
}
