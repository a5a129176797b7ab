"""Attention on the CPU against PyTorch's scaled_dot_product_attention: same dtype, same threads.

Two threads unless --threads says otherwise.
"""
import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

import margay
from margay.bench.attention import gradient
from margay.bench.harness import Case, CpuTimer, Problem, run_family

BATCH, HEADS, N = 1, 8, 2048


def build(d, causal, dtype, backward):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(BATCH, HEADS, N, d).to(dtype) for _ in range(4))
    functions = {"margay": margay.attention, "torch": lambda q, k, v, *, causal: scaled_dot_product_attention(q, k, v, is_causal=causal)}
    work = 4 * BATCH * HEADS * N * N * d * (0.5 if causal else 1)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    if not backward:
        return Problem({name: functools.partial(f, q, k, v, causal=causal) for name, f in functions.items()}, tolerance, work)
    return Problem({name: gradient(f, q, k, v, dout, causal) for name, f in functions.items()}, 2 * tolerance, 2.5 * work)


def cases():
    for direction in ("forward", "backward"):
        for dtype in ("bfloat16", "float32"):
            for d in (64, 128):
                for mask in ("full", "causal"):
                    fields = {"group": f"{direction} {dtype}", "direction": direction, "dtype": dtype, "d": d, "mask": mask, "n": N}
                    yield Case(f"{direction} {dtype} D={d} {mask}", fields,
                               functools.partial(build, d, mask == "causal", getattr(torch, dtype), direction == "backward"))


def run(options, arguments):
    torch.set_num_threads(arguments.threads)
    return run_family("cpu", cases(), CpuTimer(), options)
