// Synchronisation on sm_90a: mbarriers, named barriers, proxy fences.
#pragma once
enum traced { TRACE_WAIT = 1, TRACE_ARRIVE, TRACE_EXPECT, TRACE_BAR_SYNC, TRACE_BAR_ARRIVE, TRACE_WG_SYNC,
    TRACE_FENCE_ASYNC, TRACE_MMA_FENCE, TRACE_COMMIT,
              TRACE_MMA_WAIT, TRACE_STORE_WAIT, TRACE_ORDER_WAIT, TRACE_ORDER_PASS, TRACE_ORDER_COUNT };
TILE void hardware_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
TILE void group_barrier() { hardware_barrier(8 + (int)(threadIdx.x >> 7), 128); }
TILE void sem_init(sem &s, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&s)), "r"(count));
}
TILE void sem_wait(sem &s, uint32_t phase) {
  trace(TRACE_WAIT, &s, (int)phase);
  uint32_t done, a = shared_address(&s);
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done) : "r"(a), "r"(phase) : "memory");
  } while (!done);
}
// One arrival per warp, after all its lanes: it orders every lane's accesses.
template<int W> TILE void sem_arrive(sem &s) {
  if (W != THREAD) __syncwarp();
  if (W == THREAD || lane() == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&s)) : "memory");
  trace(TRACE_ARRIVE, &s, W == WARPGROUP ? 4 : 1);   // last: a delay in front of it would hide a read that it overtakes
}
template<int W, int ORDER> TILE void sem_arrive_at(sem &s, int rank) {
  if (W != THREAD) __syncwarp();
  if (W != THREAD && lane() != 0) ;
  else if (ORDER)
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\n"
                 "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a];\n}\n"
                 ::"r"(shared_address(&s)), "r"(rank) : "memory");
  else
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [a];\n}\n"
                 ::"r"(shared_address(&s)), "r"(rank) : "memory");
  trace(TRACE_ARRIVE, &s, W == WARPGROUP ? 4 : 1);
}
TILE void sem_expect(sem &s, uint32_t bytes) {
  trace(TRACE_EXPECT, &s, (int)bytes);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
      ::"r"(shared_address(&s)), "r"(bytes) : "memory");
}
TILE int cluster_rank() { uint32_t r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return (int)r; }
TILE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
TILE void bar_sync(int id, int threads) {
  trace(TRACE_BAR_SYNC, nullptr, id);
  hardware_barrier(id, threads);
}
TILE void bar_arrive(int id, int threads) {
  trace(TRACE_BAR_ARRIVE, nullptr, id);
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
TILE void wg_sync() {
  trace(TRACE_WG_SYNC, nullptr, 0);
  group_barrier();
}
TILE void fence_async() {
  trace(TRACE_FENCE_ASYNC, nullptr, 0);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

TILE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

template<int W> TILE void order_wait(const int *g, int value) {
  trace(TRACE_ORDER_WAIT, nullptr, value);
  if (W == THREAD || thread_in_group() == 0) {
    int seen;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(g) : "memory"); while (seen < value);
  }
  if (W == WARPGROUP) group_barrier();
}
TILE void order_pass(int *g, int value) {
  trace(TRACE_ORDER_PASS, nullptr, value);
  __threadfence();
  group_barrier();
  if (thread_in_group() == 0) asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(g), "r"(value) : "memory");
}
template<int W> TILE void order_count(int *g) {
  static_assert(W == THREAD, "a thread's");
  trace(TRACE_ORDER_COUNT, nullptr, 0);
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(g) : "memory");
}
