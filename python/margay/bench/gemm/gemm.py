"""Matrix products, against torch.mm, that is cuBLASLt (GPU).

FLOP: 2 M N K. Layouts: nn is a b; nt is a b^T with b stored [N, K], as nn.Linear has it.
"""
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, run_family

SHAPES = [(n, n, n) for n in (1024, 2048, 4096, 6144, 8192, 12288, 16384)] + [(4096, 14336, 4096), (8192, 28672, 8192)]


def matrix(rows, columns, dtype, layout, device):
    if layout == "t":
        return torch.randn(columns, rows, dtype=dtype, device=device).t()
    return torch.randn(rows, columns, dtype=dtype, device=device)


def build(m, n, k, dtype, layout, device="cuda"):
    torch.manual_seed(0)
    a = matrix(m, k, dtype, layout[0], device)
    b = matrix(k, n, dtype, layout[1], device)
    size = (m * k + k * n + m * n) * a.element_size()
    peer = "cuBLASLt" if device == "cuda" else "torch"
    return Problem({"margay": lambda: margay.matmul(a, b), peer: lambda: torch.mm(a, b)}, 1e-2, 2 * m * n * k, size)


def cases(dtypes=("bfloat16", "float16"), layouts=("nn",), shapes=SHAPES, device="cuda"):
    for dtype in dtypes:
        for layout in layouts:
            for m, n, k in shapes:
                fields = {"group": f"{dtype} {layout}", "dtype": dtype, "layout": layout, "m": m, "n": n, "k": k}
                call = functools.partial(build, m, n, k, getattr(torch, dtype), layout, device)
                yield Case(f"{dtype} {layout} {m}x{n}x{k}", fields, call)


def run(options, arguments):
    return run_family("gemm", cases(arguments.dtypes, arguments.layouts), GpuTimer(), options)
