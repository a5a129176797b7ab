"""Long rows of the delta rules: states carried from call to call, steps of generation against the sequence, rows of
100,000 steps."""

import pytest
import torch

import margay as mg
from cases import DEVICES
from delta_forms import hard

OPS = pytest.mark.parametrize("kda", (False, True), ids=("gdn", "kda"))
DEVICE = pytest.mark.parametrize("device", DEVICES)


def problem(kda, steps, h=1, hv=2, d=64, dv=48, *, b=1, device="cpu", dtype=torch.bfloat16, name="mild"):
    q, k, v, g, beta, state, _, _ = hard(name, 5, b, steps, h, hv, d, dv, channels=kda, dtype=dtype, device=device)
    return [q, k, v, g, beta], state


def rule(kda, inputs, state, **options):
    return (mg.kda if kda else mg.gated_delta_rule)(*inputs, initial_state=state, output_final_state=True, **options)


def close(found, expected, largest):
    """The relative error of the whole."""
    error = float((found.double() - expected.double()).norm()) / float(expected.double().norm())
    assert error <= largest, f"relative error {error:.3g}, allowed {largest:.3g}"


@OPS
@DEVICE
def test_states_are_carried(device, kda):
    """Calls that begin with the state behind the call before are one call: to the bit where they are cut between
    chunks, else to rounding."""
    inputs, state = problem(kda, 1000, device=device)
    for cuts, same in (((0, 64, 448, 960, 1000), True), ((0, 1, 100, 333, 999, 1000), False)):
        outs, now = [], state
        for first, end in zip(cuts, cuts[1:]):
            out, now = rule(kda, [t[:, first:end] for t in inputs], now)
            outs.append(out)
        out, last = rule(kda, inputs, state)
        if same and device == "cpu":
            assert torch.equal(torch.cat(outs, 1), out) and torch.equal(now, last)
        close(torch.cat(outs, 1), out, 2.0 ** -7)
        close(now, last, 2.0 ** -7)


@OPS
@DEVICE
def test_gradients_are_carried(device, kda):
    """Gradients of two calls, the second of which begins with the state of the first, are those of one call."""
    inputs, state = problem(kda, 192, device=device)
    leaves = [t.detach().requires_grad_() for t in (*inputs, state)]
    out, last = rule(kda, leaves[:5], leaves[5])
    whole = torch.autograd.grad(out.float().square().sum() + last.square().sum(), leaves)
    first, between = rule(kda, [t[:, :128] for t in leaves[:5]], leaves[5])
    second, last = rule(kda, [t[:, 128:] for t in leaves[:5]], between)
    parts = torch.autograd.grad(first.float().square().sum() + second.float().square().sum() + last.square().sum(),
                                leaves)
    for x, y in zip(parts, whole):
        close(x, y, 2.0 ** -6)


@OPS
@DEVICE
def test_a_thousand_steps(device, kda):
    """Steps of generation, one after another and several at once, are the sequence; the state stays in one place."""
    inputs, state = problem(kda, 1000, device=device)
    options = dict(use_qk_l2norm=True, use_beta_sigmoid=True)
    out, last = rule(kda, inputs, state, **options)
    step = mg.kda_step if kda else mg.gated_delta_rule_step
    for size in (1, 4):
        now, outs = state.clone(), []
        for t in range(0, 1000, size):
            given = [x[:, t] if size == 1 else x[:, t:t + size] for x in inputs]
            made = step(now, *given, **options)
            outs.append(made[:, None] if size == 1 else made)
        close(out, torch.cat(outs, 1), 2.0 ** -6)
        close(last, now, 2.0 ** -6)


@OPS
@pytest.mark.parametrize("name", ("mild", "strong", "zero gates"))
@DEVICE
def test_long_rows(device, kda, name):
    """100,000 steps, forward and backward; on the CPU 10,000. The end of the row is that of calls on parts of it."""
    steps = 100_000 if device == "cuda" else 10_000
    inputs, state = problem(kda, steps, 1, 1, 32, 32, device=device, name=name)
    leaves = [t.detach().requires_grad_() for t in inputs]
    out, last = rule(kda, leaves, state)
    now, cuts = state, [*range(0, steps, 4096), steps]
    for first, end in zip(cuts, cuts[1:]):
        part, now = rule(kda, [t[:, first:end] for t in inputs], now)
        close(out[:, first:end].detach(), part, 2.0 ** -5)
    close(last.detach(), now, 2.0 ** -5)
    for grad in torch.autograd.grad(out.float().square().sum() + last.square().sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.gpu
@OPS
def test_more_than_2_31_elements(kda):
    """q, k and v of 2^31 elements and more, which lie in one row of memory for each step: heads at its end are those of
    a call of their own."""
    steps, heads, d = 2**17, 130, 128
    g = torch.Generator("cuda").manual_seed(1)
    qkv = torch.randn(1, steps, heads, d, generator=g, device="cuda", dtype=torch.bfloat16) / 12
    assert qkv.numel() > 2**31
    decays = -torch.rand(1, steps, 1, *(d,) * kda, generator=g, device="cuda")
    beta = torch.rand(1, steps, 1, generator=g, device="cuda")
    for place in (0, heads - 1):
        q = qkv[:, :, place:place + 1]
        out, last = rule(kda, [q, q, q, decays, beta], None)
        near = q.contiguous()
        again, last_again = rule(kda, [near, near, near, decays, beta], None)
        assert torch.equal(out, again) and torch.equal(last, last_again)
