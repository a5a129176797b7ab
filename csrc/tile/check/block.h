// From a kernel's roles to a ck_kernel, and what the tool finds in the compiled file: mg_check_run, mg_check_fields,
// mg_check_desc.
#pragma once
template<auto BODY, int WIDTH, int COUNT, int REGISTERS> struct role {
  ROLE_RULES(REGISTERS);
  enum : int { MEMBERS = COUNT, GROUPS = WIDTH == WARPGROUP ? COUNT : 0, OTHERS = COUNT - GROUPS, BUDGET = REGISTERS,
      BLOCKS = 0, RANKS = 0, WAITS = 0, LETS = 0 };
};
template<int N> struct OCCUPANCY {
  enum : int { MEMBERS = 0, GROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = N, RANKS = 0, WAITS = 0, LETS = 0 };
};
template<int N> struct CLUSTER {
  enum : int { MEMBERS = 0, GROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = N, WAITS = 0, LETS = 0 };
};
struct DEPENDENT {
  enum : int { MEMBERS = 0, GROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = 0, WAITS = 1, LETS = 0 };
};
struct FOLLOWED {
  enum : int { MEMBERS = 0, GROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = 0, WAITS = 0, LETS = 1 };
};
template<auto ASKED> struct UNLESS {
  enum : int { MEMBERS = 0, GROUPS = 0, OTHERS = 0, BUDGET = 0, BLOCKS = 0, RANKS = 0, WAITS = 0, LETS = 0 };
};

template<class Params, class Shared, auto BODY> static void role_body(const void *params, void *shared, int index) {
  BODY(*(const Params *)params, *(Shared *)shared, index);
}
template<class Params, class Shared, auto BODY, int WIDTH, int COUNT, int REGISTERS>
static void add_role(ck_kernel &k, role<BODY, WIDTH, COUNT, REGISTERS> *, int index) {
  for (int i = 0; i < COUNT; i++) k.role[k.fibers++] = {role_body<Params, Shared, BODY>, index, i, WIDTH};
}
template<class Params, class Shared, int N> static void add_role(ck_kernel &, OCCUPANCY<N> *, int) {}
template<class Params, class Shared, int N> static void add_role(ck_kernel &, CLUSTER<N> *, int) {}
template<class Params, class Shared> static void add_role(ck_kernel &, DEPENDENT *, int) {}
template<class Params, class Shared> static void add_role(ck_kernel &, FOLLOWED *, int) {}
template<class Params, auto ASKED> static bool unless_body(const void *params) {
  return ASKED(*(const Params *)params);
}
template<class Params, class Shared, auto ASKED> static void add_role(ck_kernel &k, UNLESS<ASKED> *, int) {
  k.unless = unless_body<Params, ASKED>;
}

// the first thread or warp role asks for its whole warpgroup
template<class... Parts> static constexpr int registers_asked() {
  int others = 0;
  ((others = others == 0 && (int)Parts::OTHERS > 0 ? (int)Parts::BUDGET : others), ...);
  return (others + ... + (Parts::GROUPS * (int)Parts::BUDGET));
}
template<class Params, class Shared, auto INIT, class... Parts> struct block {
  typedef Params params;
  typedef Shared shared_type;
  enum : int {
    GROUPS = (0 + ... + (int)Parts::GROUPS),
    OTHERS = (0 + ... + (int)Parts::OTHERS),
    BLOCKS = (0 + ... + (int)Parts::BLOCKS),
    RANKS = (0 + ... + (int)Parts::RANKS),
    WAITS = (0 + ... + (int)Parts::WAITS),
    LETS = (0 + ... + (int)Parts::LETS),
    PER_SM = BLOCKS ? BLOCKS : 1,
    SIZE = RANKS ? RANKS : 1,
    THREADS = 128 * (GROUPS + (OTHERS > 0)),
  };
  BLOCK_RULES(Shared, registers_asked<Parts...>(), GROUPS, OTHERS, PER_SM);
  static void init(void *shared) { INIT(*(Shared *)shared); }
  static ck_kernel kernel() {
    ck_kernel k = {};
    int index = 0;
    k.shared_bytes = sizeof(Shared);
    k.stride = (sizeof(Shared) + GRANULE - 1) / GRANULE * GRANULE;
    k.cluster = SIZE;
    (add_role<Params, Shared>(k, (Parts *)nullptr, index++), ...);
    k.dependent = WAITS;
    k.init = init;
    k.arena = set_arena;
    return k;
  }
  // Room for packed operands: PACK_GROWTH times the shared memory for each kind.
  static void set_arena(char *shared, size_t bytes) {
    static machine m;
    static size_t capacity;
    if (capacity < bytes) {
      for (char *&p : m.packed) {
        if (capacity) munmap(p, PACK_GROWTH * capacity);
        p = (char *)mmap(nullptr, PACK_GROWTH * bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      }
      for (uint64_t *&p : m.packed_tag) p = (uint64_t *)realloc(p, bytes / GRANULE * sizeof *p);
      m.written = (uint32_t *)realloc(m.written, bytes / GRANULE * sizeof *m.written);
      capacity = bytes;
    }
    memset(m.written, 0, bytes / GRANULE * sizeof *m.written);
    m.shared = shared;
    mg_machine = &m;
  }
};

// ---- names of what lies in shared memory: the build lists the members of the struct as FIELD(name) ... in FIELDS
enum field_kind { FIELD_PLAIN, FIELD_RING, FIELD_QUEUE, FIELD_SEM };
struct check_field { const char *name; size_t offset, size, element; int kind, stages; };
template<class X> struct kind_of_field { enum { KIND = FIELD_PLAIN, STAGES = 1 }; };
template<int S, int R> struct kind_of_field<ring<S, R>> { enum { KIND = FIELD_RING, STAGES = S }; };
template<> struct kind_of_field<task_queue> { enum { KIND = FIELD_QUEUE, STAGES = 2 }; };
template<> struct kind_of_field<sem> { enum { KIND = FIELD_SEM, STAGES = 1 }; };
#ifndef FIELDS
#define FIELDS
#endif
#define FIELD(m) \
  {#m, offsetof(S, m), sizeof(S::m), sizeof(std::remove_all_extents_t<decltype(S::m)>), \
   kind_of_field<std::remove_all_extents_t<decltype(S::m)>>::KIND, \
   kind_of_field<std::remove_all_extents_t<decltype(S::m)>>::STAGES},
template<class S> static const check_field *fields_of() {
  static const check_field fields[] = {FIELDS{nullptr, 0, 0, 0, 0, 0}};
  return fields;
}

// ---- a problem of the file's own, for files that are no row of kernels.def. The statements fill the parameters `p`;
// memory is the run's. What is
// behind the end of a tensor or vector (to 16 bytes) is no memory: touching it is a crash.
static char *example_memory;
static size_t example_used;
enum : size_t { EXAMPLE_BYTES = 64 << 20, EXAMPLE_PAGE = 1 << 16 };
static void *example_take(size_t bytes) {
  if (!example_memory)
    example_memory = (char *)mmap(nullptr, EXAMPLE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                                  0);
  const size_t room = (bytes + EXAMPLE_PAGE - 1) / EXAMPLE_PAGE * EXAMPLE_PAGE;
  char *p = example_memory + example_used;
  example_used += room + EXAMPLE_PAGE;
  if (example_used > EXAMPLE_BYTES || mprotect(p, room, PROT_READ | PROT_WRITE)) {
    fprintf(stderr, "margay.check: tensors and vectors of an EXAMPLE have 64 MB in all\n");
    abort();
  }
  memset(p, 0, room);
  return p + room - ((bytes + 15) & ~(size_t)15);
}
// A tensor [batch, heads, rows, cols] of zeros, seen in tiles.
template<typename T> static gmap example_tensor(int batch, int heads, int rows, int cols) {
  T *d = (T *)example_take((size_t)batch * heads * rows * cols * sizeof(T));
  gmap m = {};
  gmap_cpu view = {(char *)d, {cols, rows, heads, batch}, {}};
  int64_t stride = sizeof(T);
  for (int i = 0; i < 4; i++) {
    view.stride[i] = stride;
    stride *= view.size[i];
  }
  memcpy(&m, &view, sizeof view);
  return m;
}
template<typename T> static T *example_words(int n) { return (T *)example_take((size_t)n * sizeof(T)); }   // zeros
#define EXAMPLE(K, BLOCKS, ...)                            \
  extern "C" const K::params *mg_check_example(int *blocks) { \
    alignas(64) static K::params p;                        \
    example_used = 0;                                      \
    p = {};                                                \
    __VA_ARGS__;                                           \
    *blocks = BLOCKS;                                      \
    return &p;                                             \
  }

#define ENTRY(K, TILE_M, TILE_N) \
  extern "C" { \
  extern const mg_kernel_desc mg_check_desc; \
  const mg_kernel_desc mg_check_desc = {sizeof(K::shared_type), K::THREADS, K::SIZE, K::PER_SM, sizeof(K::params), \
                                        K::WAITS, K::LETS, TILE_M, TILE_N, nullptr}; \
  const check_field *mg_check_fields(void) { return fields_of<K::shared_type>(); } \
  const ck_kernel *mg_check_kernel(void) { \
    static const ck_kernel k = K::kernel(); \
    return &k; \
  } \
  int mg_check_run(const ck_request *request, const void *params, int blocks, char *text, size_t size) { \
    return ck_run(mg_check_kernel(), request, params, blocks, text, size); \
  } \
  }
