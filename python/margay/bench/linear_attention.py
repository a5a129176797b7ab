"""Causal linear attention, forward and a training step, against FLA and PyTorch's products in chunks (GPU).

bfloat16, K = V = D. `plain` has no decay, `head` one for each head, `step` one for each step of each head. A training
step is the forward and the backward: gradients of q, k, v and of the decays of steps. FLA is a peer where it can be
imported; its first call compiles and tunes, which is not timed. Its chunk_simple_gla refuses gradients of decays on
Hopper with some Triton releases, which get them wrong: of steps, its fused_chunk_simple_gla is the peer.

Bound by memory: q, k, v, g and out once forward; a training step reads these and dout again and writes the gradients.
`of copy` compares that rate with one of a copy of v, timed in turn with the others.
"""
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, peer, run_family, step
from margay.bench.ssd import HIDE_CYCLES, TORCH_UNITS, decays

CHUNK = 128
KINDS = ("plain", "head", "step")
SHAPES = [(8, 2048, 32, 64), (8, 2048, 32, 128), (8, 8192, 32, 128), (1, 131072, 1, 128), (1, 131072, 8, 128),
          (1, 131072, 32, 128)]                              # batch, steps, heads, D
FLA_DIM = 128                                                # FLA tunes for each, and for each number of heads


def by_chunks(q, k, v, g=None):
    """PyTorch's: all chunks at once. Their states are a prefix sum, or one product with the decays between them. T in
    whole chunks."""
    (b, t, h, d), dv = q.shape, v.shape[3]
    q, k, v = (x.view(b, t // CHUNK, CHUNK, h, -1).transpose(2, 3) for x in (q, k, v))
    if g is None:
        weights = (q @ k.mT).tril()
        states = (k.mT @ v).float().cumsum(1)
        q_across = q
    else:
        l = g.expand(b, t, h).view(b, t // CHUNK, CHUNK, h).transpose(2, 3).cumsum(-1)
        ends, half = l[..., -1], lambda x: torch.exp(x)[..., None].to(q.dtype)
        weights = q @ k.mT * decays(l).to(q.dtype)
        states = torch.einsum("bhij,bjhkv->bihkv", decays(ends.cumsum(1).mT),
                              ((k * half(ends[..., None] - l)).mT @ v).float())
        q_across = q * half(l)
    before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1).to(q.dtype)
    out = q_across @ before + weights @ v
    return (d ** -0.5 * out).transpose(2, 3).reshape(b, t, h, dv)


def by_fla(kind):
    if kind == "step":
        call = peer("fla.ops.simple_gla", "fused_chunk_simple_gla")
        return call and (lambda q, k, v, g: call(q, k, v, g=g)[0])
    call = peer("fla.ops.simple_gla", "chunk_simple_gla")
    return call and (lambda q, k, v, g=None: call(q, k, v, g_gamma=g)[0])


def build(kind, b, t, h, d, training, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(b, t, h, d, dtype=dtype, device=device) for _ in range(4))
    k = k / d ** 0.5
    g = {"plain": (), "head": (h,), "step": (b, t, h)}[kind]
    g = [-0.1 * torch.rand(g, device=device)] if g else []
    inputs, fixed = ([q, k, v, *g], []) if kind == "step" else ([q, k, v], g)
    calls = {"margay": margay.linear_attention}
    if device == "cuda" and d == FLA_DIM and (theirs := by_fla(kind)):
        calls["fla"] = theirs
    if len(calls) == 1 or b * t * h <= TORCH_UNITS:
        calls["torch"] = by_chunks
    runners = {name: (lambda *tensors, call=call: call(*tensors, *fixed)) for name, call in calls.items()}
    small, to = sum(tensor.nbytes for tensor in g), torch.empty_like(v)
    beside = {"copy": (lambda: to.copy_(v), 2 * v.nbytes)}
    if training:
        runners = {name: step(call, inputs, (dout,)) for name, call in runners.items()}
        return Problem(runners, 5e-2, 0, 11 * q.nbytes + 3 * small, beside=beside,
                       doubted=("fla",), memory=True)
    return Problem({name: functools.partial(call, *inputs) for name, call in runners.items()}, 2e-2, 0,
                   4 * q.nbytes + small, beside=beside, memory=True)


def cases(kinds=KINDS, shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for kind in kinds:
        for direction in ("forward", "training step"):
            for b, t, h, d in shapes:
                fields = {"group": f"{direction}, {kind}", "direction": direction, "kind": kind, "d": d, "b": b, "t": t,
                          "h": h, "dtype": str(dtype).removeprefix("torch.")}
                yield Case(f"{direction} {kind} D={d} B={b} T={t} H={h}", fields, functools.partial(
                    build, kind, b, t, h, d, direction != "forward", device, dtype))


def run(options, arguments):
    return run_family("linear_attention", cases(), GpuTimer(HIDE_CYCLES), options)
