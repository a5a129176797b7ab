"""Mamba-2's scan, forward and a training step, against mamba_ssm and PyTorch's products in chunks (GPU).

bfloat16 with dt, A, D and final states; P = 64 columns of a head, G = 1. A training step is the forward and the
backward with all gradients. mamba_ssm is a peer where it can be imported; its first call compiles and tunes, which is
not timed.

FLOP of a step of a head, in chunks of Q = 128: 4 P N + 2 P Q, and 2 Q N of B and C for all heads together; a training
step takes three times that. Bytes: every argument and result once.
"""
import functools
import itertools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, peer, run_family, step, timer_for

P, GROUPS = 64, 1
SHAPES = [(8, 2048, 64, 128), (8, 8192, 64, 128), (1, 8192, 128, 128), (1, 131072, 1, 128), (1, 131072, 8, 128),
          (1, 131072, 32, 128), (16, 4096, 16, 64)]          # batch, steps, heads, N columns of the state
TUNED_STATE = 128                    # mamba_ssm tunes for each N, most of it for the backward: that runs with this one
TORCH_UNITS = 1 << 20                # steps of heads, above which PyTorch runs only where there is no other peer
CHUNK, CHUNK_MAMBA = 128, 256
HIDE_CYCLES = 4_000_000              # a step of the peers takes their host milliseconds


def by_chunks(x, dt, a, b, c, d):
    """PyTorch's: all chunks at once, their states by one product with the decays between them. T in whole chunks."""
    (batch, steps, heads, _), n = x.shape, b.shape[3]
    chunks = steps // CHUNK
    xs = (x * dt[..., None]).to(x.dtype).view(batch, chunks, CHUNK, heads, -1).transpose(2, 3)
    bs, cs = (t.view(batch, chunks, CHUNK, n) for t in (b, c))
    l = (dt * a).view(batch, chunks, CHUNK, heads).transpose(2, 3).cumsum(-1)           # [batch, chunks, heads, CHUNK]
    weights = (cs @ bs.mT)[:, :, None] * decays(l).to(x.dtype)
    ends = l[..., -1]
    inputs = (xs * torch.exp(ends[..., None] - l)[..., None].to(x.dtype)).mT @ bs[:, :, None]
    between = decays(ends.cumsum(1).mT)                                                # [batch, heads, chunks, chunks]
    states = torch.einsum("bhij,bjhpn->bihpn", between, inputs.float())
    before = torch.cat((torch.zeros_like(states[:, :1]), states[:, :-1]), 1).to(x.dtype)
    across = torch.exp(l)[..., None].to(x.dtype) * (cs[:, :, None] @ before.mT)
    y = (weights @ xs + across).transpose(2, 3).reshape(x.shape)
    return y + (d[:, None] * x).to(x.dtype), states[:, -1]


def decays(l):
    """e^(l_i - l_j) where j <= i, else 0."""
    differences = l[..., :, None] - l[..., None, :]
    later = torch.ones(differences.shape[-2:], dtype=torch.bool, device=l.device).triu(1)
    return torch.exp(differences.masked_fill(later, -torch.inf))


def inputs_of(b, t, h, n, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(b, t, h, P, dtype=dtype, device=device)
    bs, cs = (torch.randn(b, t, GROUPS, n, dtype=dtype, device=device) for _ in range(2))
    dt = torch.rand(b, t, h, device=device) * 0.19 + 0.01
    return x, dt, -4 * torch.rand(h, device=device), bs, cs, torch.randn(h, device=device)


def ours(x, dt, a, b, c, d):
    return margay.ssd(x, dt, a, b, c, D=d, return_final_states=True)


def build(b, t, h, n, training, device="cuda", dtype=torch.bfloat16):
    inputs = inputs_of(b, t, h, n, device, dtype)
    calls, units = {"margay": ours}, b * t * h
    if device == "cuda" and (n == TUNED_STATE or not training) and (
            theirs := peer("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")):
        calls["mamba_ssm"] = lambda x, dt, a, b, c, d: theirs(x, dt, a, b, c, CHUNK_MAMBA, D=d,
                                                              return_final_states=True)
    if len(calls) == 1 or units <= TORCH_UNITS:
        calls["torch"] = by_chunks
    flops = units * (4 * P * n + 2 * P * CHUNK) + b * t * 2 * CHUNK * n
    read = inputs[0].nbytes + inputs[1].nbytes + inputs[3].nbytes + inputs[4].nbytes
    states = 4 * b * h * P * n
    if training:
        douts = torch.randn_like(inputs[0]), None
        runners = {name: step(call, inputs, douts) for name, call in calls.items()}
        # A's gradient is a number a head; one alone may be near 0
        return Problem(runners, 0.1 if h > 1 else 0.5, 3 * flops, 3 * read + 2 * inputs[0].nbytes + states,
                       memory=True)
    runners = {name: functools.partial(call, *inputs) for name, call in calls.items()}
    return Problem(runners, 2e-2, flops, read + inputs[0].nbytes + states, memory=True)


def cases(shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    directions = "forward", "training step"
    # what mamba_ssm has tuned first
    for direction, (b, t, h, n) in sorted(itertools.product(directions, shapes), key=lambda c: c[1][3] != TUNED_STATE):
        fields = {"group": direction, "direction": direction, "b": b, "t": t, "h": h, "p": P, "n_state": n,
                  "dtype": str(dtype).removeprefix("torch.")}
        yield Case(f"{direction} B={b} T={t} H={h} N={n}", fields,
                   functools.partial(build, b, t, h, n, direction != "forward", device, dtype))


def run(options, arguments):
    return run_family("ssd", cases(), GpuTimer(HIDE_CYCLES), options)
