"""kda against the recurrence in float64: hard gates, keys and values, odd sizes, packed rows, gates and norms as models
have them."""

import numpy as np
import pytest
import torch

import delta_cases
import margay as mg
from cases import DEVICES
from delta_cases import AROUND, DTYPES, REFLECTED, SHAPES, random_tests, skip, with_other_keys
from delta_forms import GATES, HARD, by_chunks, exactly, gates, hard, normal, normalised, remainder_rounding, strength
from margay._shared import of_row

STEPS = (1, 15, 16, 17, 63, 64, 65, 300)


def run(q, k, v, g, beta, scale=None, state=None, starts=None, **options):
    """A `form` is taken by the row's function alone."""
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=q.device)
    if "form" in options:
        return of_row("kda")(q, k, v, g.float(), beta.float(), None, None, state, starts, scale or 0.0, 0.0, 0, False,
                             False, options["form"])
    return mg.kda(q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=True, cu_seqlens=starts,
                  **options)


def problem(name, seed, *sizes, **options):
    q, k, v, g, *others = hard(name, seed, *sizes, channels=True, **options)[:6]
    return q, k, v, zeros(q, v) if g is None else g, *others


def zeros(q, v):
    return torch.zeros(*v.shape[:3], q.shape[3], device=q.device)


def check(ours, plain, exact, dtype, g, other=None, size=0.0, remainder=0.0):
    delta_cases.check(ours, plain, exact, dtype, g, other, factors(dtype), 4 * size if factors(dtype) else size,
                      remainder)


def factors(dtype):
    """Of float16 the plain form's weights have one rounding, ours two, and so have the tiles that come of steep gates:
    where numbers are few, and where they cancel, an error of a quarter of eps is left."""
    return dtype if dtype == torch.float16 else None


def relative_error(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


def size_of(q, k, v, scale):
    norms = [float(t.double().norm(dim=-1).max()) if t.numel() else 0.0 for t in (q, k)]
    return (scale or q.shape[3]**-0.5) * norms[0] * norms[1] * float(v.abs().max() if v.numel() else 0)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_hard(device, dtype, name):
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    q, k, v, g, beta, state = problem(name, 3, 1, 210, 1, 2, 100, 72, dtype=dtype, device=device)
    ours = run(q, k, v, g, beta, state=state)
    assert all(map(torch.equal, ours, run(q, k, v, g, beta, state=state)))
    check(ours, by_chunks(q, k, v, g, beta, state=state), exactly(q, k, v, g, beta, state=state), dtype, g,
          with_other_keys(name, q, k, dtype, v, g, beta, None, state))


# What a step's log decay is: of all channels, of one and the others, of steps in turn.
STEEP = {
    "-5": lambda g: g - 5, "0": lambda g: g, "-9.9": lambda g: g - 9.9, "-10.1": lambda g: g - 10.1,
    "-20": lambda g: g - 20,
    "-1000": lambda g: g - 1000, "-inf": lambda g: g - torch.inf,
    "a channel 0, the others -20": lambda g: torch.where(torch.arange(g.shape[3]) == 3, 0.0, g - 20),
    "a channel -1000, the others 0": lambda g: torch.where(torch.arange(g.shape[3]) == 3, g - 1000, 0.0),
    "a step -1000 in eight": lambda g: torch.where(torch.arange(g.shape[1])[:, None, None] % 8 == 5, g - 1000, -0.01),
    "-1e-6": lambda g: g - 1e-6,
}


@pytest.mark.parametrize("kind", STEEP)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_gates(device, dtype, kind):
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    for steps, d in zip(STEPS, (128, 64, 100, 128, 40, 128, 72, 128)):
        q, k, v, _, beta, state = problem("usual", steps, 1, steps, 1, 2, d, 40, dtype=dtype)
        g = STEEP[kind](torch.zeros(1, steps, 2, d)).expand(1, steps, 2, d)
        q, k, v, g, beta, state = (t.to(device) for t in (q, k, v, g, beta, state))
        ours = run(q, k, v, g, beta, state=state)
        assert all(t.isfinite().all() for t in ours)
        check(ours, by_chunks(q, k, v, g, beta, state=state), exactly(q, k, v, g, beta, state=state), dtype, g)


@pytest.mark.parametrize("device", DEVICES)
def test_long(device):
    """-5 a step in every channel, for thousands of steps."""
    steps = 10_000 if device == "cuda" else 4000
    q, k, v, g, beta, state = problem("strong", 21, 1, steps, 1, 1, 64, 64, device=device)
    ours = run(q, k, v, g, beta, state=state)
    exact = exactly(q, k, v, g, beta, state=state)
    check(ours, by_chunks(q, k, v, g, beta, state=state), exact, torch.bfloat16, g)


@pytest.mark.parametrize("gate, length, d", ((0.0, 1, 64), (-0.0001, 10, 128), (-0.001, 1, 64)))
@pytest.mark.parametrize("device", DEVICES)
def test_reflected_for_thousands_of_steps(device, gate, length, d):
    """Equal keys with beta |k|^2 = 2: no error fades, and states grow where the keys that are multiplied are longer
    than those given. float16 is as exact as the plain form with one decay for all channels, which rounds no factors;
    with decays of channels, too."""
    steps, heads = 4101, 4
    q, k, v, _, beta, state = problem("equal keys, beta 2", 31, 1, steps, heads, heads, d, 32, dtype=torch.float16)
    beta, k, r = beta.float() / length**2, k * length, torch.Generator().manual_seed(32)
    of_steps, of_channels = (2 * gate * torch.rand(1, steps, heads, n, generator=r) for n in (1, d))
    q, k, v, beta, state, of_steps, of_channels = (t.to(device) for t in (q, k, v, beta, state, of_steps, of_channels))
    plain = by_chunks(q, k, v, of_steps[..., 0], beta, state=state)
    exact = exactly(q, k, v, of_steps[..., 0], beta, state=state)
    allowed = [2 * relative_error(x, y) + 2.0**-10 for x, y in zip(plain, exact)]
    for g, exact in ((of_steps.expand_as(of_channels), exact),
                     (of_channels, exactly(q, k, v, of_channels, beta, state=state))):
        for name, x, y, most in zip(("out", "final_state"), run(q, k, v, g, beta, state=state), exact, allowed):
            error = relative_error(x, y)
            assert error <= most, f"{name}: relative error {error:.3g}, allowed {most:.3g}"


@pytest.mark.parametrize("device", DEVICES)
def test_segments(device):
    """Scratch is that of 8 + 16384 / (heads + 1) chunks of a head: of 1023 heads, 24."""
    q, k, v, g, beta, state = problem("mild", 23, 1, 64 * 25 + 3, 1, 1023, 8, 8, device=device)
    heads = slice(0, None, 400)
    ours = run(q, k, v, g, beta, state=state)
    few = run(q, k, *(t[:, :, heads] for t in (v, g, beta)), None, state[:, heads])
    assert torch.equal(ours[0][:, :, heads], few[0]) and torch.equal(ours[1][:, heads], few[1])


LONG = ((1, 2100, 1, 1, 128, 128), (2, 1030, 1, 2, 72, 40))


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("name", ("usual", "steep", "one stays", "beta near 2", "large values"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_cut(device, dtype, name, shape):
    """Long rows, cut into as many segments as there is room for."""
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    q, k, v, g, beta, state = problem(name, 7, *shape, dtype=dtype, device=device)
    ours = run(q, k, v, g, beta, None, state, form=3)
    check(ours, by_chunks(q, k, v, g, beta, state=state), exactly(q, k, v, g, beta, state=state), dtype, g)


@pytest.mark.parametrize("device", DEVICES)
def test_cut_in_parts(device):
    """Scratch for 48 chunks of a hundred heads at a time, and two segments of them."""
    q, k, v, g, beta, state = problem("usual", 7, 1, 64 * 50 + 3, 25, 100, 72, 8, device=device)
    ours = run(q, k, v, g, beta, None, state, form=3)
    some, keys = slice(0, None, 24), slice(0, None, 6)
    q, k, (v, g, beta), state = q[:, :, keys], k[:, :, keys], (t[:, :, some] for t in (v, g, beta)), state[:, some]
    ours, exact = (ours[0][:, :, some], ours[1][:, some]), exactly(q, k, v, g, beta, state=state)
    check(ours, by_chunks(q, k, v, g, beta, state=state), exact, torch.bfloat16, g)


@pytest.mark.parametrize("device", DEVICES)
def test_a_reset(device):
    """Behind a step of -1000 in every channel nothing is left of what was before its chunk but e^-10.5 of what pairs of
    steps of that chunk have of it, and nothing at all of that where the step is a chunk's first."""
    for step, allowed in ((64, 0.0), (70, 4e-5)):
        q, k, v, g, beta, state = problem("mild", 22, 1, 200, 1, 2, 128, 64, device=device)
        g[:, step] = -1000
        found, want = run(q, k, v, g, beta, state=1000 * state), run(q, k, v, g, beta, state=0 * state)
        largest = float((1000 * state).norm(dim=2).max())
        for x, y in ((found[0][:, step:], want[0][:, step:]), (found[1], want[1])):
            assert float((x.float() - y.float()).abs().max()) <= allowed * largest + 2**-8 * (step > 64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_sizes(device, dtype, shape):
    skip(device, dtype)
    dtype, (b, h, hv, d, dv) = getattr(torch, dtype), shape
    for steps in STEPS:
        for with_state in (False, True):
            q, k, v, g, beta, state = problem("steep", steps, b, steps, h, hv, d, dv, dtype=dtype, device=device)
            state = state if with_state else None
            ours = run(q, k, v, g, beta, 0.5, state)
            assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
            check(ours, by_chunks(q, k, v, g, beta, 0.5, state), exactly(q, k, v, g, beta, 0.5, state), dtype, g,
                  size=size_of(q, k, v, 0.5))


@pytest.mark.parametrize("wide", (False, True), ids=("g of 16 bits", "g of float32"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_options(device, dtype, wide):
    """Gates, sigmoids of beta and norms as models have them, of large and of zero rows too; states [V, K]."""
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    q, k, v, _, beta, state = problem("usual", 5, 2, 150, 2, 4, 80, 100, dtype=dtype, device=device)
    q, k = 3 * q, 20 * k
    k[0, 7], q[1, 30] = 0, 0
    r = torch.Generator().manual_seed(6)
    raw, logits = torch.randn(2, 150, 4, 80, generator=r).to(device), torch.randn(2, 150, 4, generator=r).to(device)
    if not wide:
        raw, logits = raw.to(dtype), logits.to(dtype)
    a_log, dt_bias = torch.randn(4, generator=r).to(device), torch.randn(4, 80, generator=r).to(device)
    for bias, bound, doubled in ((dt_bias, None, True), (None, None, False), (dt_bias, -5, False), (None, -30, True)):
        out, last = run(q, k, v, raw, logits, None, state.mT.contiguous(), A_log=a_log, use_gate=True,
                        use_qk_l2norm=True, dt_bias=bias if bias is None or doubled else bias.flatten(),
                        lower_bound=bound, use_beta_sigmoid=True, allow_neg_eigval=doubled, state_v_first=True)
        g, w = gates(raw, a_log, bias, bound), strength(logits, doubled)
        exact = exactly(*(normalised(t.double()) for t in (q, k)), v, g, w, state=state)
        check((out, last.mT), by_chunks(normalised(q), normalised(k), v, g, w, state=state), exact, dtype, g)


@pytest.mark.parametrize("raw", (False, True), ids=("log decays", "gates"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device, dtype, raw):
    """As the sequences by themselves, empty ones too; what stands behind a sequence does not reach it; out is 0 behind
    the last."""
    skip(device, dtype)
    starts, dtype = (0, 70, 70, 134, 135, 300), getattr(torch, dtype)
    q, k, v, g, beta, state = problem("to -20", 9, 1, 350, 1, 2, 100, 128, dtype=dtype, rows=5, device=device)
    options = dict(use_qk_l2norm=True)
    if raw:
        options |= dict(use_gate=True, use_beta_sigmoid=True, A_log=torch.zeros(2, device=device))
    for t in (q, k, v, g, beta):
        t[:, 300:] = torch.nan
    out, last = run(q, k, v, g, beta, None, state, starts, **options)
    assert (out[:, 300:] == 0).all()
    for i, (first, end) in enumerate(zip(starts, starts[1:])):
        x, y = run(*(t[:, first:end] for t in (q, k, v, g, beta)), None, state[i:i + 1], **options)
        assert torch.equal(x, out[:, first:end]) and torch.equal(y[0], last[i])
    q[:, 70:134] = k[:, 70:134] = v[:, 70:134] = torch.nan
    again, last_again = run(q, k, v, g, beta, None, state, starts, **options)
    for part in (slice(0, 70), slice(134, 300)):
        assert torch.equal(out[:, part], again[:, part])
    assert torch.equal(last[[0, 1, 3, 4]], last_again[[0, 1, 3, 4]])


@pytest.mark.parametrize("device", DEVICES)
def test_faces(device):
    """Memory in other orders, other types, numpy; a state handed on."""
    q, k, v, g, beta, state = problem("usual", 11, 2, 90, 2, 4, 64, 40, device=device)
    want = run(q, k, v, g, beta, None, state)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, g)]
    assert all(map(torch.equal, run(*heads_first, beta, None, state), want))
    assert all(map(torch.equal, run(q, k, v, g.double(), beta.double(), None, state.double()), want))
    out, last = run(q, k, v, g, beta, None, state.mT.contiguous(), state_v_first=True)
    assert torch.equal(out, want[0]) and torch.equal(last.mT, want[1])
    assert torch.equal(mg.kda(q, k, v, g), run(q, k, v, g, torch.ones_like(beta))[0])
    first, half = run(*(t[:, :64] for t in (q, k, v, g, beta)), None, state)
    second, last = run(*(t[:, 64:] for t in (q, k, v, g, beta)), None, half)
    assert torch.equal(torch.cat((first, second), 1), want[0]) and torch.equal(last, want[1])
    if device == "cpu":
        arrays = [t.float().numpy() for t in (q, k, v, g, beta)]
        out, last = mg.kda(*arrays, initial_state=state.numpy(), output_final_state=True)
        want = mg.kda(*map(torch.from_numpy, arrays), initial_state=state, output_final_state=True)
        assert np.array_equal(out, want[0]) and np.array_equal(last, want[1])


@pytest.mark.parametrize("device", DEVICES)
def test_nothing(device):
    """No steps, no batch, no heads."""
    for b, steps, h, hv in ((1, 0, 1, 2), (0, 5, 1, 2), (1, 5, 0, 0)):
        q, k, v, g, beta, state = problem("usual", 1, b, steps, h, hv, 16, 24, device=device)
        out, last = run(q, k, v, g, beta, None, state)
        assert out.shape == v.shape and (torch.equal(last, state) if b and hv else not last.numel())
    q, k, v, g, beta, _ = problem("usual", 1, 1, 40, 1, 2, 16, 24, device=device)
    out, last = run(q, k, v, g, beta, starts=(0,) * 3)
    assert not out.any() and not last.any()


REFUSED = (
    (ValueError, "A_log is None, expected a tensor where use_gate is True", dict(use_gate=True)),
    (ValueError, "A_log is given, expected None where use_gate is False", dict(A_log=(2,))),
    (ValueError, "lower_bound is -5, expected None where use_gate is False", dict(lower_bound=-5)),
    (ValueError, "lower_bound is 1, expected a negative finite number", dict(use_gate=True, A_log=(2,), lower_bound=1)),
    (ValueError, "allow_neg_eigval is True, expected False where use_beta_sigmoid is False",
     dict(allow_neg_eigval=True)),
    (ValueError, "g has 3 dimensions, expected 4", dict(g=(1, 70, 2))),
    (ValueError, "g has size 8 in dimension 3", dict(g=(1, 70, 2, 8))),
    (ValueError, "beta has size 71 in dimension 1", dict(beta=(1, 71, 2))),
    (ValueError, "dt_bias has size 8 in dimension 1", dict(use_gate=True, A_log=(2,), dt_bias=(2, 8))),
    (ValueError, "heads of v that are a multiple of those of k", dict(q=(1, 70, 3, 16), k=(1, 70, 3, 16))),
    (ValueError, r"states \[K, V\] or, with state_v_first, \[V, K\]", dict(initial_state=(1, 2, 24, 16))),
    (ValueError, "as many states as there are batches", dict(initial_state=(2, 2, 16, 24))),
    (ValueError, r"cu_seqlens\[0\] is 1, expected 0", dict(cu_seqlens=torch.tensor([1, 70]))),
    (TypeError, "g is NoneType, expected a float32 tensor", dict(g=None)),
    ((ValueError, NotImplementedError, RuntimeError), "heads of 1 to 128 columns",
     dict(q=(1, 70, 1, 129), k=(1, 70, 1, 129), g=(1, 70, 2, 129))),
    (ValueError, "scale is -1, expected a positive finite number", dict(scale=-1)),
    (TypeError, "q is list, expected torch.Tensor or numpy.ndarray", dict(q=[1])),
)


@pytest.mark.parametrize("kind, text, other", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(kind, text, other):
    given = dict(q=(1, 70, 1, 16), k=(1, 70, 1, 16), v=(1, 70, 2, 24), g=(1, 70, 2, 16), beta=(1, 70, 2)) | other
    given = {name: torch.zeros(t) if isinstance(t, tuple) else t for name, t in given.items()}
    with pytest.raises(kind, match=f"^kda: .*{text}"):
        mg.kda(**given)


def check_random(p):
    q, k, v, g, beta, state = problem(p.name, p.seed, *p.sizes, **p.options)
    other_gates = p.r.choice((None, *GATES))               # of other strengths than the name says
    p.also = f"{other_gates}, "
    if other_gates and "keys" not in p.name and "large" not in p.name:
        b, steps, _, hv, d, _ = p.sizes
        g = GATES[other_gates](normal(p.seed, b * steps * hv * d, p.device)(b, steps, hv, d))
        g = zeros(q, v) if g is None else g.to(p.device)
    state = state if p.with_state else None
    given = state if state is None or not p.v_first else state.mT.contiguous()
    out, last = run(q, k, v, g, beta, p.scale, given, p.starts, use_qk_l2norm=p.norms, state_v_first=p.v_first)
    wide = [normalised(t.double()) if p.norms else t for t in (q, k)]
    exact = exactly(*wide, v, g, beta, p.scale, state, p.starts)
    other = with_other_keys(p.name, *wide, p.dtype, v, g, beta, p.scale, state, p.starts)
    if p.norms:
        q, k = normalised(q), normalised(k)
    plain = by_chunks(q, k, v, g, beta, p.scale, state, p.starts)
    check((out, last.mT if p.v_first else last), plain, exact, p.dtype, g, other, size_of(q, k, v, p.scale),
          remainder_rounding(g, state, p.starts))


SOME = (0, *AROUND, 200, 257)
test_random, test_random_on_the_gpu = random_tests(check_random, SOME, (*SOME, 700, 1500, 4097))
