"""Gated delta rule and Kimi delta attention: forward, backward, a training step, against FLA and cuDNN (GPU).

bfloat16, K = V = 128. `gdn`: a decay for each step of each value head; `kda steep`, `kda mild`: for each channel, of
-3.2 or -0.08 a step in the mean. Decays are given as logarithms in float32, and q and k have norm 1; `raw`: both are
made in the kernel, from what a layer projects, and so is beta. A training step is the forward and the backward.
`varlen`: packed sequences of these lengths.

FLA and cuDNN's frontend are peers where they can be imported; their first calls compile and tune, which is not timed,
but printed. FLA's chunk_gated_delta_rule refuses its backward on Hopper with some Triton releases, which get it wrong.
cuDNN takes Kimi delta attention alone, and of its backward no raw gates and as many key heads as value heads.

Bound by memory: q, k, v, g, beta and out once forward; the backward reads these and dout, and writes the gradients.
`of copy` compares that rate with one of a copy of v, timed in turn with the others.
"""

import functools

import torch
import torch.nn.functional as F

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, peer, run_family, step

D, CHUNK = 128, 64
# batch, steps, key heads, value heads; the last two have few heads and a long sequence
GDN = [(1, 8192, 16, 32), (2, 8192, 8, 16), (4, 4096, 16, 32), (1, 32768, 8, 16), (1, 32768, 16, 32), (8, 2048, 32, 64),
       (8, 8192, 16, 16), (1, 131072, 4, 4), (1, 131072, 8, 8)]
KDA = [(1, 8192, 32, 32), (2, 8192, 16, 16), (4, 4096, 32, 32), (1, 32768, 16, 16), (8, 2048, 64, 64),
       (1, 131072, 4, 4), (1, 131072, 8, 8)]
MIXES = {"8 x 4096": 8 * [4096], "1 x 24576 + 32 x 256": [24576, *32 * [256]], "256 x 128": 256 * [128],
         "uneven": [8192, 1, 4095, 63, 129, 6000, 64, 900, 13324]}      # 32768 steps each
KINDS = {"gdn": GDN, "kda steep": KDA, "kda mild": KDA, "gdn raw": GDN[:1], "kda steep raw": KDA[:1]}
TORCH_UNITS = 1 << 15                # steps of heads, above which PyTorch's form takes too long or too much memory
HIDE_CYCLES = 4_000_000              # a step of the peers takes their host milliseconds


def by_chunks(q, k, v, g, beta):
    """PyTorch's, in float32, of log decays: all chunks at once, and a loop over their states. T in whole chunks."""
    (b, t, h, d), dv, group = v.shape[:3] + q.shape[3:], v.shape[3], v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    q, k, v, g, beta = (x.float().view(b, t // CHUNK, CHUNK, h, -1).transpose(2, 3) for x in (q, k, v, g, beta))
    l = g.cumsum(3)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu(1)
    if l.shape[4] == 1:
        weights = (l - l.mT).masked_fill(later, -torch.inf).exp()
        scores, keys = q @ k.mT * weights, k @ k.mT * weights
    else:
        weights = (l[..., :, None, :] - l[..., None, :, :]).masked_fill(later[..., None], -torch.inf).exp()
        scores, keys = (torch.einsum("bnhik,bnhjk,bnhijk->bnhij", x, k, weights) for x in (q, k))
    identity = torch.eye(CHUNK, device=q.device).expand_as(keys)
    inverse = beta * torch.linalg.solve_triangular(identity + keys.tril(-1) * beta.mT, identity, upper=False,
                                                   unitriangular=True)
    ends = l[..., -1:, :]
    reads, writes, state, outs = k * l.exp(), k * (ends - l).exp(), q.new_zeros(b, h, d, dv), []
    for i in range(t // CHUNK):
        u = inverse[:, i] @ (v[:, i] - reads[:, i] @ state)
        outs.append((q[:, i] * l[:, i].exp()) @ state + scores[:, i] @ u)
        state = state * ends[:, i].exp().mT + writes[:, i].mT @ u
    return (d ** -0.5 * torch.stack(outs, 1)).transpose(2, 3).reshape(b, t, h, dv)


def ours(kind, starts):
    rule = margay.gated_delta_rule if kind.startswith("gdn") else margay.kda
    if not kind.endswith("raw"):
        return lambda q, k, v, g, beta: rule(q, k, v, g, beta, cu_seqlens=starts)
    options = dict(use_gate=True, use_qk_l2norm=True, use_beta_sigmoid=True, cu_seqlens=starts)
    return lambda q, k, v, g, beta, rates, biases: rule(q, k, v, g, beta, A_log=rates, dt_bias=biases, **options)


def by_fla(kind, starts):
    module, name = (("fla.ops.gated_delta_rule", "chunk_gated_delta_rule") if kind.startswith("gdn")
                    else ("fla.ops.kda", "chunk_kda"))
    call, starts = peer(module, name), None if starts is None else starts.long()
    if call is None or not kind.endswith("raw"):
        return call and (lambda q, k, v, g, beta: call(q, k, v, g=g, beta=beta, cu_seqlens=starts)[0])
    options = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                   cu_seqlens=starts)
    return lambda q, k, v, g, beta, rates, biases: call(q, k, v, g=g, beta=beta, A_log=rates, dt_bias=biases.flatten(),
                                                        **options)[0]


def by_cudnn(kind, shape, starts):
    """Packed: [steps, heads, D]."""
    if not kind.startswith("kda") or kind.endswith("raw"):
        return None
    call, (b, t, _, h) = peer("cudnn.linear_attention.ops", "kimi_delta_attention"), shape
    if call is None:
        return None
    starts = torch.arange(0, b * t + 1, t, dtype=torch.int32, device="cuda") if starts is None else starts

    def run(q, k, v, g, beta):
        result = call(*(x.flatten(0, 1) for x in (q, k, v, g, beta)), starts, scale=D ** -0.5)
        return (result[0] if isinstance(result, tuple) else result).view(b, t, h, D)
    return run


def inputs_of(kind, b, t, h, hv, device, dtype):
    torch.manual_seed(0)
    randn = lambda *size: torch.randn(size, dtype=dtype, device=device)  # noqa: E731
    q, k, v = randn(b, t, h, D), randn(b, t, h, D), randn(b, t, hv, D)
    size = (b, t, hv, D) if kind.startswith("kda") else (b, t, hv)
    if kind.endswith("raw"):
        biases = torch.rand(size[2:], device=device) * 4 - 5
        return q, k, v, randn(*size), randn(b, t, hv), torch.log(1 + 15 * torch.rand(hv, device=device)), biases
    mean = {"gdn": 0.1, "kda steep": 3.2, "kda mild": 0.08}[kind]
    return (*(F.normalize(x.float(), dim=-1).to(dtype) for x in (q, k)), v,
            -2 * mean * torch.rand(size, device=device), torch.rand(b, t, hv, device=device))


def build(kind, shape, direction, lengths=None, device="cuda", dtype=torch.bfloat16):
    b, t, h, hv = shape
    inputs = inputs_of(kind, *shape, device, dtype)
    starts = None
    if lengths:
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    calls = {"margay": ours(kind, starts)}
    if device == "cuda":
        for name, call in (("fla", by_fla(kind, starts)), ("cudnn", by_cudnn(kind, shape, starts))):
            if call:
                calls[name] = call
    if b * t * hv <= TORCH_UNITS and not lengths and not kind.endswith("raw"):
        calls["torch"] = by_chunks
    read, dout = sum(x.nbytes for x in inputs), torch.randn_like(inputs[2])
    to = torch.empty_like(inputs[2])
    more = dict(beside={"copy": (lambda: to.copy_(inputs[2]), 2 * inputs[2].nbytes)}, memory=True,
                doubted=("fla",) if direction != "forward" else ())
    if direction == "forward":
        runners = {name: functools.partial(call, *inputs) for name, call in calls.items()}
        return Problem(runners, 2e-2, 0, read + dout.nbytes, **more)
    if direction == "backward":
        runners = {name: gradient(call, inputs, dout) for name, call in calls.items()}
        return Problem(runners, 5e-2, 0, 2 * read + dout.nbytes, **more)
    runners = {name: step(call, inputs, (dout,)) for name, call in calls.items()}
    return Problem(runners, 5e-2, 0, 3 * read + 2 * dout.nbytes, **more)


def cases(kinds=KINDS, mixes=MIXES, device="cuda", dtype=torch.bfloat16):
    for kind, shapes in kinds.items():
        packed = [((1, sum(lengths), *shapes[0][2:]), lengths, name) for name, lengths in mixes.items()
                  if not kind.endswith("raw")]
        for direction in ("forward", "backward", "training step"):
            for shape, lengths, name in [*((shape, None, "") for shape in shapes), *packed]:
                b, t, h, hv = shape
                fields = {"group": f"{direction}, {kind}", "direction": direction, "kind": kind, "b": b, "t": t, "h": h,
                          "hv": hv, "d": D, "dtype": str(dtype).removeprefix("torch.")}
                fields |= {"lengths": name} if name else {}
                varlen = f" varlen {name}" if name else ""
                yield Case(f"{direction} {kind} B={b} T={t} H={h} HV={hv}{varlen}", fields,
                           functools.partial(build, kind, shape, direction, lengths, device, dtype))


def run(options, arguments):
    return run_family("delta", cases(), GpuTimer(HIDE_CYCLES), options)
