// A block on sm_90a: warpgroup roles first, then one warpgroup whose warps are the thread and warp roles.
#pragma once
template<auto Body, int Width, int Count, int Registers> struct role {
  ROLE_RULES(Registers);
  static constexpr int groups = Width == WARPGROUP ? Count : 0, warps = Width == WARPGROUP ? 0 : Count,
                       registers = Registers, occupancy = 0, cluster = 0, followed = 0;
  template<class P> static __device__ __forceinline__ bool holds(const P &) { return false; }
  template<class P, class S> static __device__ __forceinline__ void run(const P &p, S &s, int index) {
    if (Width == WARPGROUP || Width == WARP || lane() == 0) Body(p, s, index);
  }
};
struct DEPENDENT {
  static constexpr int groups = 0, warps = 0, registers = 0, occupancy = 0, cluster = 0, followed = 0;
  template<class P> static __device__ __forceinline__ bool holds(const P &) { return false; }
};
struct FOLLOWED {
  static constexpr int groups = 0, warps = 0, registers = 0, occupancy = 0, cluster = 0, followed = 1;
  template<class P> static __device__ __forceinline__ bool holds(const P &) { return false; }
};
template<int N> struct OCCUPANCY {
  static constexpr int groups = 0, warps = 0, registers = 0, occupancy = N, cluster = 0, followed = 0;
  template<class P> static __device__ __forceinline__ bool holds(const P &) { return false; }
};
template<int N> struct CLUSTER {
  static constexpr int groups = 0, warps = 0, registers = 0, occupancy = 0, cluster = N, followed = 0;
  template<class P> static __device__ __forceinline__ bool holds(const P &) { return false; }
};

template<auto Asked> struct UNLESS {
  static constexpr int groups = 0, warps = 0, registers = 0, occupancy = 0, cluster = 0, followed = 0;
  template<class P> static __device__ __forceinline__ bool holds(const P &p) { return Asked(p); }
};

// setmaxnreg towards `Want` from what every thread got at launch; 0 keeps that.
template<int Want, int Launched> TILE void set_registers() {
  if constexpr (Want > Launched) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Want));
  else if constexpr (Want != 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Want));
}

template<class Params, class Shared, void (*Init)(Shared &), class... Role> struct block {
  typedef Params params;
  static constexpr int groups = (Role::groups + ...), warps = (Role::warps + ...),
                       threads = 128 * (groups + (warps > 0));
  static constexpr int occupancy = (Role::occupancy + ...) ? (Role::occupancy + ...) : 1,
                       cluster = (Role::cluster + ...) ? (Role::cluster + ...) : 1;
  static constexpr int launched = registers_at_launch(threads, occupancy);
  static constexpr int first_registers() {
    int r = 0;
    ((r = r == 0 && Role::warps ? Role::registers : r), ...);
    return r;
  }
  static constexpr int warp_registers = first_registers();
  BLOCK_RULES(Shared, ((Role::groups * Role::registers) + ...) + (warps ? warp_registers : 0), groups, warps,
              occupancy);

  template<int Group, int Warp, class R, class... Rest>
  static __device__ __forceinline__ void dispatch(const Params &p, Shared &s, int group, int warp) {
    if constexpr (R::groups > 0) {
      if (group >= Group && group < Group + R::groups) {
        set_registers<R::registers, launched>();
        return R::run(p, s, group - Group);
      }
    } else if constexpr (R::warps > 0)
      if (group == groups && warp >= Warp && warp < Warp + R::warps) return R::run(p, s, warp - Warp);
    if constexpr (sizeof...(Rest) > 0) dispatch<Group + R::groups, Warp + R::warps, Rest...>(p, s, group, warp);
  }

  static __device__ __forceinline__ void run(const Params &p) {
    Shared &s = *(Shared *)block_memory;
    if ((Role::followed + ...)) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if ((Role::holds(p) || ...)) return;
    if (threadIdx.x == 0) {
      Init(s);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (cluster > 1) cluster_sync();   // no peer may arrive at or write into this block before
    __syncthreads();
    int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, (threadIdx.x & 127) >> 5, 0);
    if (warps > 0 && group == groups) set_registers<warp_registers, launched>();
    dispatch<0, 0, Role...>(p, s, group, warp);
    if (cluster > 1) cluster_sync();   // a peer may still arrive at or write into this block
  }
};
#define ENTRY(kernel, TILE_M, TILE_N) \
  extern "C" __global__ void __launch_bounds__(kernel::threads, kernel::occupancy) \
      KERNEL(const __grid_constant__ kernel::params p) { \
    kernel::run(p); \
  }
#define EXAMPLE(...)   // a problem for the checker, see check/block.h
