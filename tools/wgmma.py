"""Writes csrc/tile/sm90/wgmma.h: the operand lists of wgmma for every width N that the tile layer offers.

The preprocessor cannot count."""
import pathlib

WIDTHS = (16, 32, 64, 80, 96, 128, 160, 176, 192, 256)
HEAD = '''\
// wgmma.mma_async m64 nN k16 (16-bit operands) and k32 (e4m3), fp32 accumulator. tools/wgmma.py writes this
// file.
// a, b: low words of shared matrix descriptors (see desc() in mma.h); TA, TB: 1 if the operand is stored transposed
// (MN-major).
#pragma once
#define WGMMA_HIGH "0x40000040"   // of every descriptor: 128-byte swizzle, 8-row groups 1024 bytes apart
#define WGMMA_SS(TYPES, N, A, B, P, TA_, TB_) \\
  asm volatile("{\\n.reg .pred p;\\n.reg .b64 da, db;\\n" \\
    "mov.b64 da, {" A ", " WGMMA_HIGH "};\\nmov.b64 db, {" B ", " WGMMA_HIGH "};\\nsetp.ne.b32 p, " P ", 0;\\n" \\
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " " WGMMA_D ", da, db, p, 1, 1, " TA_ ", " TB_ ";\\n}\\n" \\
    : WGMMA_O : "r"(a), "r"(b), "r"(add), "n"(TA), "n"(TB))
#define WGMMA_RS(TYPES, N, A, B, P, TB_) \\
  asm volatile("{\\n.reg .pred p;\\n.reg .b64 db;\\nmov.b64 db, {" B ", " WGMMA_HIGH "};\\n" \\
    "setp.ne.b32 p, " P ", 0;\\n" \\
    "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " " WGMMA_D ", " A ", db, p, 1, 1, " TB_ ";\\n}\\n" \\
    : WGMMA_O : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(TB))
// 8-bit operands lie along the reduction; BYTES: rows of their panels, which have the 128-byte or the 64-byte swizzle.
#define WGMMA8_HIGH(BYTES) (BYTES == 128 ? 0x40000040u : 0x80000020u)
#define WGMMA8_SS(N, A, B, P, HIGH) \\
  asm volatile("{\\n.reg .pred p;\\n.reg .b64 da, db;\\n" \\
    "mov.b64 da, {" A ", " HIGH "};\\nmov.b64 db, {" B ", " HIGH "};\\nsetp.ne.b32 p, " P ", 0;\\n" \\
    "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 " WGMMA_D ", da, db, p, 1, 1;\\n}\\n" \\
    : WGMMA_O : "r"(a), "r"(b), "r"(add), "n"(WGMMA8_HIGH(BYTES)))
#define WGMMA8_RS(N, A, B, P, HIGH) \\
  asm volatile("{\\n.reg .pred p;\\n.reg .b64 db;\\nmov.b64 db, {" B ", " HIGH "};\\n" \\
    "setp.ne.b32 p, " P ", 0;\\n" \\
    "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 " WGMMA_D ", " A ", db, p, 1, 1;\\n}\\n" \\
    : WGMMA_O : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add), "n"(WGMMA8_HIGH(BYTES)))
#define WGMMA(N, I0, I1, I2, I3, I4, I5, I6) \\
  template<typename T, int TA, int TB> TILE void wgmma(float (&d)[N / 2], uint32_t a, uint32_t b, int add) { \\
    static_assert(sizeof(T) == 2, "16-bit operands"); \\
    if constexpr (is_bf16<T>) WGMMA_SS("bf16.bf16", N, I0, I1, I2, I3, I4); \\
    else WGMMA_SS("f16.f16", N, I0, I1, I2, I3, I4); \\
  } \\
  template<typename T, int TB> TILE void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) { \\
    static_assert(sizeof(T) == 2, "16-bit operands"); \\
    if constexpr (is_bf16<T>) WGMMA_RS("bf16.bf16", N, "{" I0 ", " I1 ", " I2 ", " I3 "}", I4, I5, I6); \\
    else WGMMA_RS("f16.f16", N, "{" I0 ", " I1 ", " I2 ", " I3 "}", I4, I5, I6); \\
  } \\
  template<int BYTES> TILE void wgmma_e4m3(float (&d)[N / 2], uint32_t a, uint32_t b, int add) { \\
    WGMMA8_SS(N, I0, I1, I2, I3); \\
  } \\
  template<int BYTES> TILE void wgmma_e4m3(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t b, int add) { \\
    WGMMA8_RS(N, "{" I0 ", " I1 ", " I2 ", " I3 "}", I4, I5, I6); \\
  }
'''


def rows(items, begin="", end=""):
    """The items, separated by commas, on lines of a macro; `begin` and `end` stand around each line."""
    each = 8 if len(items[0]) > 4 else 16
    lines = [", ".join(items[i:i + each]) for i in range(0, len(items), each)]
    comma = ", " if end else ","
    return "".join(f" \\\n  {begin}{line}{comma if line is not lines[-1] else ''}{end}" for line in lines)


def main():
    lines = [HEAD]
    for width in WIDTHS:
        n = width // 2
        lines.append('#define WGMMA_D "{"%s "}"\n' % rows([f'%{i}' for i in range(n)], '"', '"'))
        lines.append('#define WGMMA_O%s\n' % rows([f'"+f"(d[{i}])' for i in range(n)]))
        lines.append('WGMMA(%d, %s)\n' % (width, ', '.join(f'"%{n + i}"' for i in range(7))))
        lines.append('#undef WGMMA_D\n#undef WGMMA_O\n')
    pathlib.Path(__file__).parents[1].joinpath('csrc/tile/sm90/wgmma.h').write_text(''.join(lines))


if __name__ == '__main__':
    main()
