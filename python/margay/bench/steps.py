"""Steps of Mamba-2, linear attention and delta rules against mamba_ssm, FLA, FlashInfer and PyTorch's operations (GPU).

One token; of the delta rules also four, with the states behind them. Bound by memory: the state is read and written.
What stands beside is a copy of it. Small batches are bound by the launch.
"""
import functools
import itertools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, peer, run_family
from margay.families import steps

P, N, D = 64, 128, 128               # Mamba-2: columns of a head, of its state; linear attention: K = V
SSD = [(1, 32), (8, 64), (64, 64), (256, 64), (256, 128)]             # batch, heads
LINEAR = [(1, 32), (16, 32), (64, 32), (256, 32)]
# batch, value heads, tokens, order of the state. Gated delta rule: two value heads to a key head
DELTA = [(1, 32, 1, "VK"), (16, 32, 1, "VK"), (64, 32, 1, "VK"), (256, 32, 1, "VK"), (64, 32, 4, "VK"),
         (1, 32, 1, "KV"), (16, 32, 1, "KV"), (256, 32, 1, "KV")]
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


def by_fla(op, order):
    module, name = dict(gated_delta_rule=("gated_delta_rule", "fused_recurrent_gated_delta_rule"),
                        kda=("kda", "fused_recurrent_kda"))[op]
    theirs = peer(f"fla.ops.{module}", name)
    return theirs and (lambda s, q, k, v, g, beta, a_log, dt_bias: theirs(
        q, k, v, g=g, beta=beta, A_log=a_log, dt_bias=dt_bias, initial_state=s, output_final_state=True,
        use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
        state_v_first=order == "VK")[0])


def by_flashinfer():
    theirs = peer("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
    return theirs and (lambda s, q, k, v, g, beta, a_log, dt_bias: theirs(q, k, v, s, a_log, g, dt_bias, beta)[0])


def delta(op, b, h, t, order, state, device, dtype):
    """As models have it: norms, gate and sigmoid inside."""
    new = lambda *shape: torch.randn(*shape, dtype=dtype, device=device)  # noqa: E731
    heads_k, per_key = (h, (D,)) if op == "kda" else (max(1, h // 2), ())
    inputs = (new(b, t, heads_k, D), new(b, t, heads_k, D), new(b, t, h, D), new(b, t, h, *per_key), new(b, t, h),
              torch.rand(h, device=device), torch.randn(h, *per_key, device=device))
    ours = margay.kda_step if op == "kda" else margay.gated_delta_rule_step
    pool = torch.randn(b, h, D, D, device=device).to(state)
    kept = torch.zeros(b, t, *pool.shape[1:], dtype=state, device=device) if t > 1 else None
    turn = lambda s: s.mT if order == "VK" and s is not None else s  # noqa: E731
    calls = {"margay": lambda s, q, k, v, g, beta, a_log, dt_bias: ours(
                 s, q, k, v, g, beta, A_log=a_log, dt_bias=dt_bias, use_gate=True, use_qk_l2norm=True,
                 use_beta_sigmoid=True, state_v_first=order == "VK", intermediate_states=kept, update_state=t == 1),
             "torch": lambda s, q, k, v, g, beta, a_log, dt_bias: steps._delta_by_torch(
                 turn(s), q, k, v, g.float(), beta.float(), a_log, dt_bias, None, None, None, turn(kept), None,
                 D ** -0.5, 0.0, 1, True, t > 1)}
    if device == "cuda" and t == 1:
        if state == torch.float32 and (theirs := by_fla(op, order)):
            calls["fla"] = theirs
        if op != "kda" and order == "VK" and (theirs := by_flashinfer()):
            calls["flashinfer"] = theirs
    return pool, inputs, calls


def build_delta(op, b, h, t, order, kind, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    state, inputs, calls = delta(op, b, h, t, order, kind, device, dtype)
    runners = {name: functools.partial(call, state.clone(), *inputs) for name, call in calls.items()}
    to, moved = torch.empty_like(state), (1 + t) * state.nbytes
    return Problem(runners, 2e-2, 0, moved, beside={"copy": (lambda: to.copy_(state), 2 * state.nbytes)})


def build(op, b, h, kind, device="cuda", dtype=torch.bfloat16):
    """Each has a state of its own, which goes on from call to call."""
    torch.manual_seed(0)
    state, inputs, calls = op(b, h, kind, device, dtype)
    runners = {name: functools.partial(call, state.clone(), *inputs) for name, call in calls.items()}
    to = torch.empty_like(state)
    return Problem(runners, 2e-2, 0, 2 * state.nbytes, beside={"copy": (lambda: to.copy_(state), 2 * state.nbytes)})


def cases(ssd_shapes=SSD, linear_shapes=LINEAR, delta_shapes=DELTA, device="cuda", dtype=torch.bfloat16):
    for name, op, shapes in (("ssd_step", ssd, ssd_shapes), ("linear_attention_step", linear, linear_shapes)):
        for state, (b, h) in itertools.product(STATES, shapes):
            kind = str(state).removeprefix("torch.")
            fields = {"group": f"{name}, {kind} state", "direction": "forward", "b": b, "t": 1, "h": h, "state": kind,
                      "dtype": str(dtype).removeprefix("torch.")}
            yield Case(f"{name} {kind} state B={b} H={h}", fields, functools.partial(build, op, b, h, state, device,
                                                                                     dtype))
    for op, state, (b, h, t, order) in itertools.product(("gated_delta_rule", "kda"), STATES, delta_shapes):
        kind = str(state).removeprefix("torch.")
        fields = {"group": f"{op}_step, {kind} state [{', '.join(order)}]", "direction": "forward", "b": b, "t": t,
                  "h": h, "state": kind, "dtype": str(dtype).removeprefix("torch.")}
        yield Case(f"{op}_step {kind} state {order} B={b} T={t} H={h}", fields,
                   functools.partial(build_delta, op, b, h, t, order, state, device, dtype))


def run(options, arguments):
    return run_family("steps", cases(), GpuTimer(HIDE_CYCLES), options)
