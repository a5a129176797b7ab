"""margay.nn.Mamba2 and the functions of margay.mamba it is made of, against the layer's recurrence in float64."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import margay as mg
from cases import DEVICES
from margay.mamba import RMSNormGated, mamba_split_conv1d_scan_combined, rmsnorm_fn

SMALL = dict(d_model=48, d_state=16, headdim=16)
LAYERS = {
    "plain": {},
    "groups": dict(ngroups=3),
    "no norm": dict(rmsnorm=False),
    "norm before gate": dict(norm_before_gate=True, ngroups=2),
    "gated MLP": dict(d_ssm=64, ngroups=2),
    "D of columns": dict(D_has_hdim=True),
    "D of columns, no norm, MLP": dict(D_has_hdim=True, rmsnorm=False, d_ssm=32),
    "limits": dict(dt_limit=(0.02, 0.06)),
    "biases": dict(bias=True, d_conv=3),
    "no biases": dict(conv_bias=False, d_conv=2, conv_init=0.5),
    "odd sizes": dict(d_state=24, headdim=24, expand=3),
}


@pytest.fixture(autouse=True)
def small_problems(one_thread):
    pass


def layer(device="cpu", dtype=None, **options):
    torch.manual_seed(3)
    made = mg.nn.Mamba2(**(SMALL | options))
    with torch.no_grad():
        for name in ("D", "norm.weight", "dt_bias"):
            if (parameter := dict(made.named_parameters()).get(name)) is not None:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return made.to(device, dtype or (torch.float32 if device == "cpu" else torch.bfloat16))


def norm(y, weight, eps, group, z, before_gate):
    gate = z * torch.sigmoid(z)
    y = y if before_gate else y * gate
    parts = y.reshape(*y.shape[:-1], -1, group)
    y = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).reshape(y.shape) * weight
    return y * gate if before_gate else y


def recurrence(weights, options, u, starts=()):
    """The layer of mamba_ssm, step by step, in the precision of its weights {name: tensor}. Returns the result and the
    states behind the last step. starts: steps at which a sequence begins, besides 0."""
    w, o = weights, dict(expand=2, ngroups=1, dt_limit=(0.0, math.inf), rmsnorm=True, norm_before_gate=False) | options
    inner = o["expand"] * o["d_model"]
    dim, n, g, p = o.get("d_ssm", inner), o["d_state"], o["ngroups"], o["headdim"]
    heads, mlp = dim // p, inner - dim
    all_ = u @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    z0, x0, z, xbc, dt = all_.split((mlp, mlp, dim, dim + 2 * g * n, heads), -1)
    dt = torch.log1p(torch.exp(dt + w["dt_bias"])).clamp(*o["dt_limit"])
    taps, a, d = w["conv1d.weight"][:, 0], -torch.exp(w["A_log"]), w["D"].reshape(heads, -1)
    past = torch.zeros(len(u), taps.shape[1], taps.shape[0], dtype=u.dtype)
    state, rows = torch.zeros(len(u), heads, p, n, dtype=u.dtype), []
    for t in range(u.shape[1]):
        if t in starts:
            past, state = torch.zeros_like(past), torch.zeros_like(state)
        past = torch.cat((past[:, 1:], xbc[:, t:t + 1]), 1)
        c = (past * taps.T).sum(1) + w.get("conv1d.bias", 0)
        x, b, c = (c * torch.sigmoid(c)).split((dim, g * n, g * n), -1)
        x = x.reshape(-1, heads, p)
        b, c = (m.reshape(-1, g, n).repeat_interleave(heads // g, 1) for m in (b, c))
        state = (torch.exp(dt[:, t] * a)[..., None, None] * state
                 + (dt[:, t, :, None] * x)[..., None] * b[:, :, None])
        rows.append(((state * c[:, :, None]).sum(-1) + d * x).reshape(len(u), dim))
    y = torch.stack(rows, 1) if rows else z.new_zeros(z.shape)
    if o["rmsnorm"]:
        y = norm(y, w["norm.weight"], 1e-5, dim // g, z, o["norm_before_gate"])
    else:
        y = y * z * torch.sigmoid(z)
    y = torch.cat((z0 * torch.sigmoid(z0) * x0, y), -1)
    return y @ w["out_proj.weight"].T + w.get("out_proj.bias", 0), past.transpose(1, 2), state


def exactly(made, options, u, **more):
    """The recurrence of a layer's weights, and leaves {name: tensor} for its gradients."""
    leaves = {name: t.detach().cpu().double().requires_grad_() for name, t in made.state_dict().items()}
    leaves["u"] = u.detach().cpu().double().requires_grad_()
    return recurrence(leaves, SMALL | options, leaves["u"], **more), leaves


def close(name, found, exact, tolerance=None):
    """By the largest value of all; what a layer adds up in bfloat16 is that far from exact."""
    if tolerance is None:
        tolerance = 2e-5 if found.dtype == torch.float32 else 0.03
    found = found.detach().cpu().double()
    assert found.shape == exact.shape and found.isfinite().all(), name
    if exact.numel():
        error, size = float((found - exact).abs().max()), float(exact.abs().max())
        assert error <= tolerance * size + 1e-12, f"{name}: {error:.2e} of {size:.2e}"


def inputs(device, *shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def check(made, options, u, run, **more):
    """run(u): the layer's result. Values and all gradients."""
    (exact, *_), leaves = exactly(made, options, u, **more)
    dout = inputs("cpu", *exact.shape, seed=1)
    u = u.detach().requires_grad_()
    out = run(u)
    close("out", out, exact.detach())
    given = dict(made.named_parameters()) | {"u": u}
    found = torch.autograd.grad(out, list(given.values()), dout.to(out))
    wanted = torch.autograd.grad(exact, [leaves[name] for name in given], dout.double())
    for name, a, b in zip(given, found, wanted):
        close("gradient of " + name, a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(device, name):
    made = layer(device, **LAYERS[name])
    check(made, LAYERS[name], inputs(device, 2, 71, 48), made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", (1, 2, 3, 63, 64, 65, 130))
def test_lengths(device, steps):
    made = layer(device, ngroups=2)
    check(made, dict(ngroups=2), inputs(device, 2, steps, 48), made)


def test_no_steps():
    assert layer()(torch.zeros(2, 0, 48)).shape == (2, 0, 48)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_steps(device):
    made, u = layer(device), inputs(device, 3, 20, 48)
    assert torch.equal(made(u.flatten(0, 1), seqlen=20), made(u).flatten(0, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by", ("seq_idx", "cu_seqlens"))
def test_sequences(device, by):
    starts, u = (0, 1, 8, 72, 90), inputs(device, 1, 90, 48)
    made = layer(device)
    numbers = torch.zeros(1, 90, dtype=torch.long)
    numbers[:, list(starts[1:-1])] = 1
    given = {"seq_idx": numbers.cumsum(1).to(device)} if by == "seq_idx" else {
        "cu_seqlens": torch.tensor(starts, device=device)}
    check(made, {}, u, lambda u: made(u, **given), starts=starts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_steps(device, name):
    """One step at a time, and a few: as the sequence, with the same states behind it."""
    made, u = layer(device, **LAYERS[name]), inputs(device, 2, 30, 48)
    (exact, past, state), _ = exactly(made, LAYERS[name], u)
    for lengths in ((1,) * 30, (3, 1, 9, 1, 1, 15)):
        states = made.allocate_inference_cache(2, 30)
        outs = [made.step(part, *states) for part in u.split(lengths, 1)]
        assert all(new is old for new, old in zip(outs[-1][1:], states))
        close("out", torch.cat([out for out, *_ in outs], 1), exact.detach())
        assert states[0].shape == past.shape and states[1].dtype == torch.float32
        close("conv_state", states[0], past.detach(), 2e-6 if device == "cpu" else 0.02)
        close("ssm_state", states[1], state.detach(), 2e-5 if device == "cpu" else 0.03)


@pytest.mark.parametrize("device", DEVICES)
def test_a_thousand_steps(device):
    made, u = layer(device), inputs(device, 1, 1000, 48)
    states = made.allocate_inference_cache(1, 1000)
    out = torch.cat([made.step(part, *states)[0] for part in u.split(1, 1)], 1)
    close("out", out, made(u).detach().cpu().double())


def test_states_of_another_type():
    made, u = layer(dtype=torch.float32), inputs("cpu", 2, 9, 48)
    states = made.allocate_inference_cache(2, 9, dtype=torch.bfloat16)
    assert states[0].dtype == states[1].dtype == torch.bfloat16
    close("out", torch.cat([made.step(part, *states)[0] for part in u.split(1, 1)], 1), made(u).detach().double(), 0.02)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", (1, 2, 3, 20))
def test_inference_params(device, first):
    made, u = layer(device, layer_idx=5), inputs(device, 2, 24, 48)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    outs = [made(u[:, :first], inference_params=cache)]
    for t in range(first, 24):
        cache.seqlen_offset = t
        outs.append(made(u[:, t:t + 1], inference_params=cache))
    (exact, *_), _ = exactly(made, {}, u)
    close("out", torch.cat(outs, 1), exact.detach())
    assert list(cache.key_value_memory_dict) == [5]


@pytest.mark.parametrize("device", DEVICES)
def test_inference_of_packed_sequences(device):
    """The states behind each sequence, one of them shorter than the convolution: then one step of each."""
    made, starts = layer(device, layer_idx=0), (0, 2, 13, 30)
    u, more = inputs(device, 1, 30, 48), inputs(device, 3, 1, 48, seed=2)
    cache = SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})
    out = made(u, cu_seqlens=torch.tensor(starts, device=device), inference_params=cache)
    cache.seqlen_offset = 30
    last = made(more, inference_params=cache)
    for i, (start, end) in enumerate(zip(starts, starts[1:])):
        (exact, *_), _ = exactly(made, {}, torch.cat((u[:, start:end], more[i:i + 1]), 1))
        close("out", torch.cat((out[:, start:end], last[i:i + 1]), 1), exact.detach())


def test_state_dict():
    """Names and shapes of mamba_ssm.Mamba2's state dict, whose options these are."""
    def shapes(**options):
        return {n: tuple(t.shape) for n, t in mg.nn.Mamba2(**options).state_dict().items()}

    assert shapes(d_model=256) == {
        "dt_bias": (8,), "A_log": (8,), "D": (8,), "in_proj.weight": (1288, 256), "conv1d.weight": (768, 1, 4),
        "conv1d.bias": (768,), "norm.weight": (512,), "out_proj.weight": (256, 512)}
    assert shapes(d_model=64, d_state=32, d_conv=2, expand=3, headdim=32, d_ssm=128, ngroups=2, D_has_hdim=True,
                  bias=True, conv_bias=False) == {
        "dt_bias": (4,), "A_log": (4,), "D": (128,), "in_proj.weight": (516, 64), "in_proj.bias": (516,),
        "conv1d.weight": (256, 1, 2), "norm.weight": (128,), "out_proj.weight": (64, 192), "out_proj.bias": (64,)}
    assert "norm.weight" not in shapes(d_model=64, rmsnorm=False)
    names = ("d_model d_state d_conv conv_init expand headdim d_ssm ngroups A_init_range D_has_hdim rmsnorm "
             "norm_before_gate dt_min dt_max dt_init_floor dt_limit bias conv_bias chunk_size use_mem_eff_path "
             "layer_idx process_group sequence_parallel device dtype")
    assert list(inspect.signature(mg.nn.Mamba2).parameters) == names.split()


def test_first_weights():
    made = mg.nn.Mamba2(64, headdim=1, dt_min=0.01, dt_max=0.05, A_init_range=(2, 3), conv_init=0.25)
    dt, a = F.softplus(made.dt_bias), made.A_log.exp()
    assert dt.min() > 0.0099 and dt.max() < 0.0501 and dt.max() > 2 * dt.min()
    assert a.min() >= 1.99 and a.max() <= 3.01 and made.conv1d.weight.abs().max() <= 0.25
    assert all(p._no_weight_decay for p in (made.dt_bias, made.A_log, made.D)) and (made.D == 1).all()
    half = mg.nn.Mamba2(64, dtype=torch.bfloat16)
    assert {t.dtype for n, t in half.state_dict().items() if n != "D"} == {torch.bfloat16}
    assert half.D.dtype == torch.float32 and mg.nn.Mamba2(64, device="meta").in_proj.weight.is_meta


@pytest.mark.parametrize("options, message", (
    (dict(headdim=36), "Mamba2: d_ssm is 128, expected a multiple of headdim, which is 36"),
    (dict(d_ssm=256), "up to expand . d_model, which is 128"), (dict(ngroups=3), "expected a divisor of the 2 heads"),
    (dict(A_init_range=(0, 1)), "A_init_range is")))
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        mg.nn.Mamba2(64, **options)


def test_other_refusals():
    with pytest.raises(NotImplementedError, match="process_group"):
        mg.nn.Mamba2(64, process_group=object())
    with pytest.raises(ValueError, match="layer_idx is None"):
        layer()(torch.zeros(1, 2, 48), inference_params=SimpleNamespace(seqlen_offset=0, key_value_memory_dict={}))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    made = layer(device, torch.float32)
    u = inputs(device, 2, 40, 48).float().requires_grad_()
    (exact, *_), _ = exactly(made, {}, u)
    with torch.autocast(device, torch.bfloat16):
        out = made(u)
    assert out.dtype == torch.bfloat16
    close("out", out, exact.detach())
    out.float().sum().backward()
    assert u.grad.isfinite().all() and made.A_log.grad.dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    if device == "cpu":
        pytest.importorskip("torch._inductor", reason="torch has no compiler")
    made, u = layer(device), inputs(device, 2, 40, 48)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    close("out", compiled(u), made(u).detach().cpu().double(), 1e-5 if device == "cpu" else 0.02)


# ---- the functions


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_function_of_all(device, name):
    """mamba_ssm's function, of a layer's parameters: the layer."""
    options = LAYERS[name]
    made, u = layer(device, **options), inputs(device, 2, 40, 48)
    seq_idx = torch.arange(40, device=device).div(7, rounding_mode="floor").int().expand(2, -1)
    d, wide = made.D, options.get("D_has_hdim", False)
    run = lambda **more: mamba_split_conv1d_scan_combined(  # noqa: E731
        made.in_proj(u), made.conv1d.weight[:, 0], made.conv1d.bias, made.dt_bias, -made.A_log.float().exp(),
        d.unflatten(0, (-1, made.headdim)) if wide else d, 256, dt_limit=made.dt_limit,
        rmsnorm_weight=made.norm.weight if made.rmsnorm else None, rmsnorm_eps=1e-5,
        headdim=None if wide else made.headdim, ngroups=made.ngroups, norm_before_gate=made.norm_before_gate, **more)
    last = dict(outproj_weight=made.out_proj.weight, outproj_bias=made.out_proj.bias)
    assert torch.equal(run(**last), made(u))
    assert torch.equal(run(**last, seq_idx=seq_idx), made(u, seq_idx=seq_idx))
    out, state = run(return_final_states=True)
    assert torch.equal(made.out_proj(out), made(u))
    close("state", state, exactly(made, options, u)[0][2].detach(), 2e-5 if device == "cpu" else 0.03)


def test_function_of_all_continues():
    """Initial states are those of the scan alone, as mamba_ssm's: where the convolution's taps are of one step."""
    made, u = layer(rmsnorm=False), inputs("cpu", 2, 40, 48)
    with torch.no_grad():
        made.conv1d.weight[..., :-1] = 0
    run = lambda u, **more: mamba_split_conv1d_scan_combined(  # noqa: E731
        made.in_proj(u), made.conv1d.weight[:, 0], made.conv1d.bias, made.dt_bias, -made.A_log.exp(), made.D, 64,
        headdim=16, return_final_states=True, **more)
    whole, last = run(u)
    first, state = run(u[:, :23])
    second, end = run(u[:, 23:], initial_states=state)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(end, last)


@pytest.mark.parametrize("gate", (False, True))
@pytest.mark.parametrize("before", (False, True))
@pytest.mark.parametrize("group", (None, 8))
def test_gated_norm(gate, before, group):
    g = torch.Generator().manual_seed(1)
    x, z, weight, bias = (torch.randn(*size, generator=g).requires_grad_() for size in ((3, 5, 24), (3, 5, 24), (24,),
                                                                                     (24,)))
    leaves = [t.detach().double().requires_grad_() for t in (x, z, weight, bias)]
    ones = torch.full_like(leaves[1], 1.2784645427610738)       # whose silu is 1
    exact = norm(leaves[0], 1, 1e-6, group or 24, leaves[1] if gate else ones, False if not before else True)
    # the bias is added in front of a gate that comes later
    exact = norm(leaves[0], 1, 1e-6, group or 24, ones, True) if gate and before else exact
    exact = exact * leaves[2] + leaves[3]
    if gate and before:
        exact = exact * leaves[1] * torch.sigmoid(leaves[1])
    out = rmsnorm_fn(x, weight, bias, z if gate else None, group_size=group, norm_before_gate=before)
    close("out", out, exact.detach(), 1e-6)
    given = [t for t in (x, z if gate else None, weight, bias) if t is not None]
    wanted = [t for t, used in zip(leaves, (True, gate, True, True)) if used]
    for a, b in zip(torch.autograd.grad(out.square().sum(), given),
                    torch.autograd.grad(exact.square().sum(), wanted)):
        close("gradient", a, b, 1e-5)
    made = RMSNormGated(24, 1e-6, group, before)
    assert list(made.state_dict()) == ["weight"]
    torch.testing.assert_close(made(x, z if gate else None),
                               rmsnorm_fn(x, made.weight, None, z if gate else None, 1e-6, group, before))
    assert rmsnorm_fn(x.half(), weight, bias).dtype == torch.float16
