"""Attention forward and backward, against cuDNN's and the flash attention of PyTorch's SDPA (GPU).

batch * N = 16384, heads * D = 2048. FLOP: 4 B H N^2 D forward, half of it when causal; backward 2.5 times that.
PyTorch has no attention of float8_e4m3fn. There, only the forward is timed, against margay's and cuDNN's of the same
numbers in bfloat16.
"""
import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, run_family

TOKENS, WIDTH = 16384, 2048
FP8 = "float8_e4m3fn"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}


def sdpa(backend, q, k, v, *, causal):
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def sdpa_unguided(q, k, v, *, causal):
    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def functions(device):
    peers = {name: functools.partial(sdpa, backend) for name, backend in BACKENDS.items()}
    return {"margay": margay.attention} | (peers if device == "cuda" else {"torch": sdpa_unguided})


def build(n, d, causal, dtype, backward, batch, heads, device="cuda"):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(batch, heads, n, d, dtype=dtype, device=device) for _ in range(4))
    work, called = 4 * batch * heads * n * n * d * (0.5 if causal else 1), functions(device).items()
    tolerance, tensor_bytes = 1e-5 if dtype == torch.float32 else 1e-2, q.numel() * q.element_size()
    if not backward:
        calls = {name: functools.partial(f, q, k, v, causal=causal) for name, f in called}
        return Problem(calls, tolerance, work, 4 * tensor_bytes)
    return Problem({name: gradient(functools.partial(f, causal=causal), (q, k, v), dout) for name, f in called},
                   2 * tolerance, 2.5 * work, 8 * tensor_bytes)


def build_fp8(n, d, causal):
    torch.manual_seed(0)
    batch, heads = TOKENS // n, WIDTH // d
    q, k, v = (torch.randn(batch, heads, n, d, device="cuda").to(getattr(torch, FP8)) for _ in range(3))
    factors = {name: torch.ones(batch, heads, device="cuda") for name in ("q_descale", "k_descale", "v_descale")}
    wide = [t.to(torch.bfloat16) for t in (q, k, v)]
    runners = {"margay": functools.partial(margay.attention, q, k, v, causal=causal, **factors),
               "margay bfloat16": functools.partial(margay.attention, *wide, causal=causal),
               "cuDNN bfloat16": functools.partial(sdpa, BACKENDS["cuDNN"], *wide, causal=causal)}
    work = 4 * batch * heads * n * n * d * (0.5 if causal else 1)
    # probabilities have four significant bits: an error of some 3 %
    return Problem(runners, 6e-2, work, 5 * q.numel(), 2)


def cases(dims=(64, 128), dtype="bfloat16", lengths=LENGTHS, tokens=TOKENS, width=WIDTH, device="cuda"):
    """Of `tokens` tokens in sequences of each length, and of `width` columns in heads of each dim."""
    for backward in (False,) if dtype == FP8 else (False, True):
        for d in dims:
            for causal in (False, True):
                for n in lengths:
                    direction, mask = "backward" if backward else "forward", "causal" if causal else "full"
                    fields = {"group": f"{direction} D={d} {dtype}", "direction": direction, "dtype": dtype, "d": d,
                              "mask": mask, "n": n}
                    call = functools.partial(build_fp8, n, d, causal) if dtype == FP8 else functools.partial(
                        build, n, d, causal, getattr(torch, dtype), backward, tokens // n, width // d, device)
                    yield Case(f"{direction} {dtype} D={d} {mask} N={n}", fields, call)


def run(options, arguments):
    family = "attention" if arguments.dtype != FP8 else "attention-fp8"
    return run_family(family, cases(arguments.dims, arguments.dtype), GpuTimer(), options)
