"""Attention on the CPU, against PyTorch's SDPA: same dtype, same threads.

Two threads unless --threads says otherwise.
"""
import functools

import torch

from margay.bench.attention.attention import build
from margay.bench.harness import Case, CpuTimer, run_family

BATCH, HEADS, N = 1, 8, 2048


def cases():
    for direction in ("forward", "backward"):
        for dtype in ("bfloat16", "float32"):
            for d in (64, 128):
                for mask in ("full", "causal"):
                    fields = {"group": f"{direction} {dtype}", "direction": direction, "dtype": dtype, "d": d,
                              "mask": mask, "n": N}
                    yield Case(f"{direction} {dtype} D={d} {mask}", fields,
                               functools.partial(build, N, d, mask == "causal", getattr(torch, dtype),
                                                 direction == "backward", BATCH, HEADS, "cpu"))


def run(options, arguments):
    torch.set_num_threads(arguments.threads)
    return run_family("cpu", cases(), CpuTimer(), options)
