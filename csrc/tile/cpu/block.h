// From a kernel's roles to its mg_kernel_desc. See tile/tile.h for how a kernel file uses it.
// No member functions here: objects of one kernel for several instruction sets are linked together, and only static
// functions stay apart.
#pragma once
template<auto BODY, int WIDTH, int COUNT, int REGISTERS> struct role;
struct DEPENDENT;
struct FOLLOWED;
template<int N> struct OCCUPANCY;
template<int N> struct CLUSTER;
template<auto ASKED> struct UNLESS;

template<class Part> struct part_of;
template<auto BODY, int WIDTH, int COUNT, int REGISTERS> struct part_of<role<BODY, WIDTH, COUNT, REGISTERS>> {
  ROLE_RULES(REGISTERS);
  enum : int { MEMBERS = COUNT, WARPGROUPS = WIDTH == WARPGROUP ? COUNT : 0, OTHERS = COUNT - WARPGROUPS,
      BUDGET = REGISTERS, BLOCKS = 0, RANKS = 0, WAITS = 0, LETS = 0 };
};
template<int N> struct part_of<OCCUPANCY<N>> {
  enum : int { MEMBERS = 0, WARPGROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = N, RANKS = 0, WAITS = 0, LETS = 0 };
};
template<int N> struct part_of<CLUSTER<N>> {
  enum : int { MEMBERS = 0, WARPGROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = N, WAITS = 0, LETS = 0 };
};
template<> struct part_of<DEPENDENT> {
  enum : int { MEMBERS = 0, WARPGROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = 0, WAITS = 1, LETS = 0 };
};
template<> struct part_of<FOLLOWED> {
  enum : int { MEMBERS = 0, WARPGROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = 0, WAITS = 0, LETS = 1 };
};
template<auto ASKED> struct part_of<UNLESS<ASKED>> {
  enum : int { MEMBERS = 0, WARPGROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = 0, WAITS = 0, LETS = 0 };
};

// the first thread or warp role asks for its whole warpgroup
template<class... Parts> static constexpr int registers_asked() {
  int others = 0;
  ((others = others == 0 && (int)part_of<Parts>::OTHERS > 0 ? (int)part_of<Parts>::BUDGET : others), ...);
  return (others + ... + (part_of<Parts>::WARPGROUPS * (int)part_of<Parts>::BUDGET));
}
template<class Params, class Shared, auto INIT, class... Parts> struct block {
  enum : int {
    MEMBERS = (0 + ... + (int)part_of<Parts>::MEMBERS),
    WARPGROUPS = (0 + ... + (int)part_of<Parts>::WARPGROUPS),
    OTHERS = (0 + ... + (int)part_of<Parts>::OTHERS),
    BLOCKS = (0 + ... + (int)part_of<Parts>::BLOCKS),
    RANKS = (0 + ... + (int)part_of<Parts>::RANKS),
    WAITS = (0 + ... + (int)part_of<Parts>::WAITS),
    LETS = (0 + ... + (int)part_of<Parts>::LETS),
    PER_SM = BLOCKS ? BLOCKS : 1,
    SIZE = RANKS ? RANKS : 1,
    THREADS = 128 * (WARPGROUPS + (OTHERS > 0)),
    SHARED_BYTES = sizeof(Shared),
    PARAMS_BYTES = sizeof(Params),
  };
  BLOCK_RULES(Shared, registers_asked<Parts...>(), WARPGROUPS, OTHERS, PER_SM);
  static_assert(MEMBERS * SIZE <= (int)MAX_FIBERS && SIZE <= (int)MAX_CLUSTER, "too many fibers");
};

template<class Params, class Shared, auto BODY> static void role_body(const void *params, void *shared, int index) {
  BODY(*(const Params *)params, *(Shared *)shared, index);
}
template<class Params, class Shared, auto BODY, int WIDTH, int COUNT, int REGISTERS>
TILE void add_members(machine &m, role<BODY, WIDTH, COUNT, REGISTERS> *, int role_index, int rank) {
  for (int i = 0; i < COUNT; i++) fiber_add(m, role_body<Params, Shared, BODY>, role_index, i, WIDTH, rank);
}
template<class Params, class Shared, int N> TILE void add_members(machine &, OCCUPANCY<N> *, int, int) {}
template<class Params, class Shared, int N> TILE void add_members(machine &, CLUSTER<N> *, int, int) {}
template<class Params, class Shared> TILE void add_members(machine &, DEPENDENT *, int, int) {}
template<class Params, class Shared> TILE void add_members(machine &, FOLLOWED *, int, int) {}
template<class Params, class Shared, auto ASKED> TILE void add_members(machine &, UNLESS<ASKED> *, int, int) {}

template<class Params, class Part> TILE bool holds(Part *, const Params &) { return false; }
template<class Params, auto ASKED> TILE bool holds(UNLESS<ASKED> *, const Params &p) { return ASKED(p); }

// No blocks: only gets the thread the memory that a cluster needs. See mg_machine_lacks for what became of it.
template<class Params, class Shared, auto INIT, class... Parts>
TILE void run_cluster(block<Params, Shared, INIT, Parts...> *, const void *params, int first, int blocks) {
  typedef block<Params, Shared, INIT, Parts...> kernel;
  enum { SIZE = kernel::SIZE, MEMBERS = kernel::MEMBERS, STRIDE = (sizeof(Shared) + GRANULE - 1) / GRANULE * GRANULE };
  machine *opened = machine_open(STRIDE, SIZE, MEMBERS * SIZE);
  if (!opened || !blocks || (holds((Parts *)nullptr, *(const Params *)params) || ...)) return;
  machine &m = *opened;
  m.params = params;
  m.first = first;
  m.blocks = blocks;
  m.count = 0;
  memset(m.barriers, 0, sizeof m.barriers);
  for (int rank = 0; rank < SIZE; rank++) {
    int role_index = 0;
    INIT(*(Shared *)(m.shared + rank * m.stride));
    (add_members<Params, Shared>(m, (Parts *)nullptr, role_index++, rank), ...);
  }
  run_fibers(m);
}
template<class Kernel> static void run_kernel(const void *params, int first, int blocks) {
  run_cluster((Kernel *)nullptr, params, first, blocks);
}

#define MG_JOIN_(a, b) a##_##b
#define MG_JOIN(a, b) MG_JOIN_(a, b)
#define ENTRY(K, TILE_M, TILE_N) \
  extern "C" { \
  extern const mg_kernel_desc MG_JOIN(KERNEL, ISA); \
  const mg_kernel_desc MG_JOIN(KERNEL, ISA) = {K::SHARED_BYTES, K::THREADS, K::SIZE, K::PER_SM, K::PARAMS_BYTES, \
                                               K::WAITS, K::LETS, TILE_M, TILE_N, run_kernel<K>}; \
  }
#define EXAMPLE(...)   // a problem for the checker, see check/block.h
