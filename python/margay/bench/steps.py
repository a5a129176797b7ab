"""Steps of generation: Mamba-2, linear attention, delta rules, against mamba_ssm, FLA and PyTorch's operations (GPU).

One token. Bound by memory: the state is read and written. What stands beside is a copy of it. Small batches are bound
by the launch.
"""
import functools
import itertools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, peer, run_family
from margay.families import steps

P, N, D = 64, 128, 128               # Mamba-2: columns of a head, of its state; else: K = V
SSD = [(1, 32), (8, 64), (64, 64), (256, 64), (256, 128)]             # batch, heads
LINEAR = [(1, 32), (16, 32), (64, 32), (256, 32)]
DELTA = [(1, 32), (16, 32), (64, 32), (256, 32)]
STATES = (torch.float32, torch.bfloat16)
HIDE_CYCLES = 400_000


def by_mamba_ssm():
    theirs = peer("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    if theirs is None:
        return None

    def call(state, x, dt, a, b, c, d):
        (_, heads, dim), n = x.shape, b.shape[2]
        return theirs(state, x, dt[..., None].expand(x.shape), a[:, None, None].expand(heads, dim, n), b, c,
                      d[:, None].expand(heads, dim), dt_softplus=True)
    return call


def ssd(b, h, state, device, dtype):
    inputs = (torch.randn(b, h, P, dtype=dtype, device=device), torch.rand(b, h, device=device) - 4,
              -4 * torch.rand(h, device=device), torch.randn(b, 1, N, dtype=dtype, device=device),
              torch.randn(b, 1, N, dtype=dtype, device=device), torch.randn(h, device=device))
    calls = {"margay": lambda s, x, dt, a, b, c, d: margay.ssd_step(s, x, dt, a, b, c, D=d, dt_softplus=True),
             "torch": lambda s, x, dt, a, b, c, d: steps._ssd_by_torch(s, x, dt, a, b, c, d, None, None, None, True,
                                                                       0.0, float("inf"))}
    if device == "cuda" and (theirs := by_mamba_ssm()):
        calls["mamba_ssm"] = theirs
    return torch.randn(b, h, P, N, device=device).to(state), inputs, calls


def linear(b, h, state, device, dtype):
    inputs = (*(torch.randn(b, h, D, dtype=dtype, device=device) for _ in range(3)), -torch.rand(b, h, device=device))
    calls = {"margay": margay.linear_attention_step,
             "torch": lambda s, q, k, v, g: steps._linear_attention_by_torch(s, q, k, v, g, None, D ** -0.5)}
    return torch.randn(b, h, D, D, device=device).to(state), inputs, calls


def delta_by_torch(state, q, k, v, g, beta):
    wide, q, k, v = state.float(), q.float(), k.float(), v.float()
    wide = wide * (g.exp()[..., None] if g.ndim == 3 else g.exp()[..., None, None])
    error = v - (k[:, :, None] @ wide)[:, :, 0]
    wide = wide + k[..., None] * (beta[..., None] * error)[:, :, None]
    state.copy_(wide)
    return D ** -0.5 * (q[:, :, None] @ wide)[:, :, 0]


def by_fla(module, name):
    """Of its own new state, which it returns beside the result."""
    theirs = peer(module, name)
    if theirs is None:
        return None

    def call(state, *tensors):
        q, k, v, g, beta = (t[:, None] for t in tensors)
        return theirs(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)[0][:, 0]
    return call


def delta(name, b, h, state, device, dtype):
    randn = lambda *size: torch.randn(size, device=device)  # noqa: E731
    unit = lambda t: torch.nn.functional.normalize(t, dim=-1).to(dtype)  # noqa: E731
    inputs = (unit(randn(b, h, D)), unit(randn(b, h, D)), randn(b, h, D).to(dtype),
              -torch.rand(b, h, *(D,) * (name == "kda"), device=device), torch.rand(b, h, device=device))
    calls = {"margay": getattr(margay, f"{name}_step"), "torch": delta_by_torch}
    if device == "cuda" and (theirs := by_fla(f"fla.ops.{name}", f"fused_recurrent_{name}")):
        calls["fla"] = theirs
    return torch.randn(b, h, D, D, device=device).to(state), inputs, calls


def build(op, b, h, kind, device="cuda", dtype=torch.bfloat16):
    """Each has a state of its own, which goes on from call to call."""
    torch.manual_seed(0)
    state, inputs, calls = op(b, h, kind, device, dtype)
    runners = {name: functools.partial(call, state.clone(), *inputs) for name, call in calls.items()}
    to = torch.empty_like(state)
    return Problem(runners, 2e-2, 0, 2 * state.nbytes, beside={"copy": (lambda: to.copy_(state), 2 * state.nbytes)})


def cases(ssd_shapes=SSD, linear_shapes=LINEAR, delta_shapes=DELTA, device="cuda", dtype=torch.bfloat16):
    for name, op, shapes in (("ssd_step", ssd, ssd_shapes), ("linear_attention_step", linear, linear_shapes),
                             *((f"{rule}_step", functools.partial(delta, rule), delta_shapes)
                               for rule in ("gated_delta_rule", "kda"))):
        for state, (b, h) in itertools.product(STATES, shapes):
            kind = str(state).removeprefix("torch.")
            fields = {"group": f"{name}, {kind} state", "direction": "forward", "b": b, "t": 1, "h": h, "state": kind,
                      "dtype": str(dtype).removeprefix("torch.")}
            yield Case(f"{name} {kind} state B={b} H={h}", fields, functools.partial(build, op, b, h, state, device,
                                                                                     dtype))


def run(options, arguments):
    return run_family("steps", cases(), GpuTimer(HIDE_CYCLES), options)
