"""Norms behind dropout and a residual, and gated ones, against PyTorch and torch.compile (GPU).

mamba_ssm's Triton kernels, Liger's and quack's norms, and FLA's gated one, are peers where they can be imported.

Bound by memory: x and residual read, out and their sum written forward; backward the sum and two gradients read, one
written, or two where dropout lies between them. Results in e4m3 are half as many bytes. `of copy` compares that rate
with one of a copy of as many bytes as x has, timed in turn with the others.
"""
import functools

import torch
import torch.nn.functional as F

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, peer, run_family, step

SHAPES = [(32768, 4096), (32768, 8192), (8192, 1024)]                   # rows, columns
GATED = [(262144, 128, 128), (32768, 4096, 512)]                        # rows, columns, columns of a group
KINDS = {"layer_norm": 0.1, "rms_norm": 0.0}                            # dropout_p
HIDE_CYCLES = 2_000_000


def by_torch(kind, p, x, residual, weight):
    u = F.dropout(x, p) + residual
    return (F.layer_norm(u, weight.shape, weight, weight, 1e-5) if kind == "layer_norm" else
            F.rms_norm(u, weight.shape, weight, 1e-5)), u


def by_package(call, kind, p, x, residual, weight):
    """mamba_ssm's and flash-attn's."""
    bias = weight if kind == "layer_norm" else None
    return call(x, weight, bias, residual=residual, dropout_p=p, eps=1e-5, prenorm=True, is_rms_norm=bias is None)


def by_liger(call, x, residual, weight):
    return call(x, residual, weight, 1e-5, in_place=False)


def by_quack(call, x, residual, weight):
    return call(x, weight, residual=residual, eps=1e-5, prenorm=True)


def by_margay(kind, p, x, residual, weight):
    bias = weight if kind == "layer_norm" else None
    return getattr(margay, kind)(x, weight, bias, residual=residual, dropout_p=p, eps=1e-5, prenorm=True)


def gated_by_torch(size, x, z, weight):
    n = F.rms_norm(x.unflatten(-1, (-1, size)), (size,), None, 1e-6).flatten(-2)
    return n * weight * F.silu(z)


def gated_by_fla(call, size, x, z, weight):
    return call(x, weight, None, z=z, eps=1e-6, group_size=size)


def gated_by_margay(size, x, z, weight):
    return margay.gated_rms_norm(x, z, weight, group_size=size)


def build(kind, rows, columns, size, direction, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, other, dout, du = (torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(4))
    weight = torch.rand(columns, device=device).to(dtype) + 0.5
    if size:
        calls = {"margay": functools.partial(gated_by_margay, size), "torch": functools.partial(gated_by_torch, size)}
        douts = dout
    else:
        p = KINDS[kind]
        calls = {"margay": functools.partial(by_margay, kind, p), "torch": functools.partial(by_torch, kind, p)}
        douts = dout, du
    if device == "cuda" and direction != "training step":
        torch.compiler.reset()
        calls["compiled"] = torch.compile(calls["torch"], dynamic=False)
    if not size and device == "cuda" and (call := peer("mamba_ssm.ops.triton.layer_norm", "layer_norm_fn")):
        calls["mamba_ssm"] = functools.partial(by_package, call, kind, KINDS[kind])
    if kind == "rms_norm" and device == "cuda":
        if call := peer("liger_kernel.transformers.functional", "liger_fused_add_rms_norm"):
            calls["liger"] = functools.partial(by_liger, call)
        if call := peer("quack.rmsnorm", "rmsnorm"):
            calls["quack"] = functools.partial(by_quack, call)
    if size and device == "cuda" and (call := peer("fla.modules.norm.layernorm_gated", "rmsnorm_fn")):
        calls["fla"] = functools.partial(gated_by_fla, call, size)
    douts_of_step = (douts,) if size else douts
    of_direction = {"forward": functools.partial, "backward": lambda call, *inputs: gradient(call, inputs, douts),
                    "training step": lambda call, *inputs: step(call, inputs, douts_of_step)}[direction]
    runners = {name: of_direction(call, x, other, weight) for name, call in calls.items()}
    drops = not size and KINDS[kind] > 0
    tensors = {"forward": 3 if size else 4, "backward": 5 if size or drops else 4}
    tensors["training step"] = sum(tensors.values())
    to = torch.empty_like(x)
    # what dropout drops differs from one to the other
    tolerance = float("inf") if drops else 3e-2
    return Problem(runners, tolerance, 0, tensors[direction] * x.nbytes,
                   beside={"copy": (lambda: to.copy_(x), 2 * x.nbytes)}, memory=direction != "backward")


def quantised_by_torch(scale, x, residual, weight):
    u = x + residual
    y = F.rms_norm(u, weight.shape, weight, 1e-5).float()
    descale = y.abs().amax(-1) / 448 if scale is None else scale
    out = (y / (descale[:, None] if scale is None else scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (out, descale, u) if scale is None else (out, u)


def quantised_by_margay(scale, x, residual, weight):
    return margay.rms_norm(x, weight, residual=residual, eps=1e-5, prenorm=True, out_dtype=torch.float8_e4m3fn,
                           out_scale=scale)


def build_quantised(given, rows, columns, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, residual = (torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(2))
    weight = torch.rand(columns, device=device).to(dtype) + 0.5
    scale = torch.tensor(0.01, device=device) if given else None
    calls = {"margay": functools.partial(quantised_by_margay, scale),
             "torch": functools.partial(quantised_by_torch, scale)}
    if device == "cuda":
        torch.compiler.reset()
        calls["compiled"] = torch.compile(calls["torch"], dynamic=False)
    to = torch.empty_like(x)
    # theirs is rounded twice, to the element type first: where that decides, by a step of e4m3
    return Problem({name: functools.partial(call, x, residual, weight) for name, call in calls.items()}, 5e-2, 0,
                   7 * x.nbytes // 2, beside={"copy": (lambda: to.copy_(x), 2 * x.nbytes)}, memory=True)


def cases(shapes=SHAPES, gated=GATED, device="cuda", dtype=torch.bfloat16):
    problems = [(kind, rows, columns, 0) for kind in KINDS for rows, columns in shapes]
    problems += [("gated_rms_norm", *shape) for shape in gated]
    for direction in ("forward", "backward", "training step"):
        for kind, rows, columns, size in problems:
            fields = {"group": f"{kind} {direction}", "direction": direction, "kind": kind, "rows": rows,
                      "columns": columns, "size": size, "dtype": str(dtype).removeprefix("torch.")}
            yield Case(f"{kind} {direction} {rows}x{columns}" + (f" groups of {size}" if size else ""), fields,
                       functools.partial(build, kind, rows, columns, size, direction, device, dtype))
    for kind in ("rms_norm e4m3", "rms_norm e4m3, scale given"):
        for rows, columns in shapes:
            fields = {"group": f"{kind} forward", "direction": "forward", "kind": kind, "rows": rows,
                      "columns": columns, "size": 0, "dtype": str(dtype).removeprefix("torch.")}
            yield Case(f"{kind} forward {rows}x{columns}", fields,
                       functools.partial(build_quantised, kind.endswith("given"), rows, columns, device, dtype))


def run(options, arguments):
    return run_family("norm", cases(), GpuTimer(HIDE_CYCLES), options)
