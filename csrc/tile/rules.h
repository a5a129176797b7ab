// What Hopper asks of a kernel's types and of its block. Every backend asserts it, so that the CPU build and the
// checker refuse what nvcc refuses.
#pragma once
enum { SM_REGISTERS = 65536, BLOCK_SHARED_BYTES = 227 * 1024 };
// Registers of a thread at launch, which setmaxnreg then moves between warpgroups.
constexpr int registers_at_launch(int threads, int blocks_per_sm) {
  return SM_REGISTERS / (threads * blocks_per_sm) / 8 * 8;
}

#define SHARED_TILE_RULES(R, C) \
  static_assert((C) % 64 == 0 && (R) % 8 == 0, "shared tile st<T, R, C>: C is a multiple of 64, R of 8")
#define REGISTER_TILE_RULES(T, N) \
  static_assert((N) > 0 && (N) % (sizeof(T) == 1 ? 32 : 16) == 0, \
                "register tile rt<T, N>: N is a multiple of 16, for e4m3 of 32")
#define GROUP_VECTOR_RULES(N) \
  static_assert((N) == 256 || (N) == 512, "vector of a warpgroup gv<N>: N is 256 or 512")
// The widths of tile/sm90/wgmma.h.
#define PRODUCT_RULES(N) \
  static_assert((N) == 16 || (N) == 32 || (N) == 64 || (N) == 80 || (N) == 96 || (N) == 128 || (N) == 160 || \
                (N) == 176 || (N) == 192 || (N) == 256, \
                "a product has 16, 32, 64, 80, 96, 128, 160, 176, 192 or 256 columns")
#define ROLE_RULES(REGISTERS) \
  static_assert((REGISTERS) == 0 || ((REGISTERS) % 8 == 0 && (REGISTERS) >= 24 && (REGISTERS) <= 240), \
                "registers of a role: 0, or a multiple of 8 from 24 to 240")
// ASKED: the registers that the roles ask for, a thread of each warpgroup. Rows of fp32 run on the CPU only, where
// shared memory is plain memory.
#define BLOCK_RULES(SHARED, ASKED, WARPGROUPS, OTHERS, BLOCKS_PER_SM) \
  static_assert((OTHERS) <= 4, "thread and warp roles share one warpgroup, one warp each"); \
  static_assert((ASKED) <= ((WARPGROUPS) + ((OTHERS) > 0)) * \
                registers_at_launch(128 * ((WARPGROUPS) + ((OTHERS) > 0)), BLOCKS_PER_SM), \
                "register pool: the roles ask for more registers than the block is launched with, " \
                "setmaxnreg would hang"); \
  static_assert(sizeof(elem) == 4 || sizeof(SHARED) <= BLOCK_SHARED_BYTES, \
                "shared memory: a block has 227 KB (232448 bytes), struct shared is larger")
