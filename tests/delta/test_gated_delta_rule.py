"""gated_delta_rule against the recurrence in float64: hard gates, keys and values, odd sizes, packed rows, all forms of
the computation."""

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from delta_cases import AROUND, DTYPES, REFLECTED, SHAPES, random_tests, skip
from delta_forms import HARD, by_chunks, exactly, gates, hard, normalised, remainder_rounding, rounding, strength
from margay._shared import of_row

FORMS = ("one kernel", "prepared", "cut", "early")    # the last two: the second where rows are short
STEPS = (1, 15, 16, 17, 63, 64, 65, 300)


def run(form, q, k, v, g, beta, scale=None, state=None, starts=None, *, gate=(None, None), beta_form=0, norms=False,
        v_first=False):
    """The row's function, which takes the form."""
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=q.device)
    state = None if state is None else state.mT.contiguous() if v_first else state
    g = None if g is None else g.float()
    out, last = of_row("gated_delta_rule")(q, k, v, g, beta.float(), *gate, state, starts, scale or 0.0, beta_form,
                                           norms, v_first, 1 + FORMS.index(form))
    return out, last.mT if v_first else last


def check(ours, plain, exact, dtype, g, other=None, remainder=0.0):
    """other: exact results of keys that differ by half of an eps, of an input that makes much of such a difference.
    remainder: of remainder_rounding()."""
    for i, (name, *three) in enumerate(zip(("out", "final_state"), ours, plain, exact)):
        relative, absolute = rounding(name, three[0], three[1] - three[2], dtype, g)
        absolute += 2.0**-126 + i * remainder      # kernels may make 0 of what is subnormal
        if not three[0].numel():
            continue
        if three[0].numel() < 500:                 # the plain form's largest error is small by chance
            absolute += torch.finfo(dtype).eps * float(three[2].abs().max())
        absolute = [absolute] * 3
        if exact[1].shape[2] < 4:                  # weights of few columns are alike, and so is their rounding
            absolute[2] += torch.finfo(dtype).eps / 8 * float(three[2].abs().mean())
        if other is not None:
            change = (other[i] - three[2]).abs()
            absolute = list(a + 2 * float(b) for a, b in zip(absolute, (change.max(), change.mean(), change.mean())))
        # In float32 the plain form substitutes where blocks are multiplied here.
        check_error(name, *three, factor=3 if dtype == torch.float32 else 2,
                    rounding=(relative, tuple(absolute)))


def with_other_keys(name, q, k, dtype, *others):
    if name in REFLECTED:
        return exactly(q, k.double() * (1 + torch.finfo(dtype).eps / 2), *others)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_hard(device, dtype, name, form):
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    q, k, v, g, beta, state, _, _ = hard(name, 3, 1, 210, 1, 2, 100, 72, dtype=dtype, device=device)
    ours = run(form, q, k, v, g, beta, state=state)
    assert all(map(torch.equal, ours, run(form, q, k, v, g, beta, state=state)))
    check(ours, by_chunks(q, k, v, g, beta, state=state), exactly(q, k, v, g, beta, state=state), dtype, g,
          with_other_keys(name, q, k, dtype, v, g, beta, None, state))


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_sizes(device, dtype, shape, form):
    skip(device, dtype)
    dtype, (b, h, hv, d, dv) = getattr(torch, dtype), shape
    for steps in STEPS:
        for with_state in (False, True):
            q, k, v, g, beta, state, _, _ = hard("usual", steps, b, steps, h, hv, d, dv, dtype=dtype, device=device)
            state = state if with_state else None
            ours = run(form, q, k, v, g, beta, 0.5, state)
            assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
            check(ours, by_chunks(q, k, v, g, beta, 0.5, state), exactly(q, k, v, g, beta, 0.5, state), dtype, g)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_options(device, dtype, form):
    """Gates, sigmoids of beta and norms as models have them, of large and of zero rows too; states [V, K]."""
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    q, k, v, _, beta, state, _, _ = hard("usual", 5, 2, 150, 2, 4, 80, 100, dtype=dtype, device=device)
    q, k = 3 * q, 20 * k
    k[0, 7], q[1, 30] = 0, 0
    r = torch.Generator().manual_seed(6)
    raw, logits = (torch.randn(2, 150, 4, generator=r).to(device) for _ in range(2))
    a_log, dt_bias = (torch.randn(4, generator=r).to(device) for _ in range(2))
    for bias, beta_form in ((dt_bias, 2), (None, 1)):
        found = run(form, q, k, v, raw, logits, None, state, gate=(a_log, bias), beta_form=beta_form, norms=True,
                    v_first=True)
        g, w = gates(raw, a_log, bias), strength(logits, beta_form == 2)
        wide = [normalised(t.double()) for t in (q, k)]
        plain = by_chunks(normalised(q), normalised(k), v, g, w, state=state)
        check(found, plain, exactly(*wide, v, g, w, state=state), dtype, g)


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device, dtype, form):
    """As the sequences by themselves, empty ones too; what stands behind a sequence does not reach it; out is 0 behind
    the last."""
    skip(device, dtype)
    starts, dtype = (0, 70, 70, 134, 135, 300), getattr(torch, dtype)
    q, k, v, g, beta, state, _, _ = hard("to -20", 9, 1, 350, 1, 2, 100, 128, dtype=dtype, rows=5, device=device)
    for t in (q, k, v, g, beta):
        t[:, 300:] = torch.nan
    out, last = run(form, q, k, v, g, beta, None, state, starts, norms=True)
    assert (out[:, 300:] == 0).all()
    for i, (first, end) in enumerate(zip(starts, starts[1:])):
        x, y = run(form, *(t[:, first:end] for t in (q, k, v, g, beta)), None, state[i:i + 1], norms=True)
        assert torch.equal(x, out[:, first:end]) and torch.equal(y[0], last[i])
    q[:, 70:134] = k[:, 70:134] = v[:, 70:134] = torch.nan
    again, last_again = run(form, q, k, v, g, beta, None, state, starts, norms=True)
    for part in (slice(0, 70), slice(134, 300)):
        assert torch.equal(out[:, part], again[:, part])
    assert torch.equal(last[[0, 1, 3, 4]], last_again[[0, 1, 3, 4]])


LONG = ((1, 2100, 1, 1, 128, 128), (2, 1030, 1, 2, 72, 40), (1, 2561, 2, 2, 40, 100))


@pytest.mark.parametrize("shape", LONG, ids=str)
@pytest.mark.parametrize("name", ("usual", "zero gates", "beta near 2", "near keys, beta near 2", "large values"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_segments(device, dtype, name, shape):
    """Long rows, cut into as many segments as there is room for."""
    skip(device, dtype)
    dtype, (b, steps, h, hv, d, dv) = getattr(torch, dtype), shape
    q, k, v, g, beta, state, _, _ = hard(name, 7, b, steps, h, hv, d, dv, dtype=dtype, device=device)
    ours = run("cut", q, k, v, g, beta, None, state)
    wide = [t.double() for t in (q, k, v, g, beta)]
    exact, other = by_chunks(*wide, state=state), None
    if name in REFLECTED:
        wide[1] *= 1 + torch.finfo(dtype).eps / 2
        other = by_chunks(*wide, state=state)
    check(ours, by_chunks(q, k, v, g, beta, state=state), exact, dtype, g, other)


@pytest.mark.parametrize("device", DEVICES)
def test_faces(device):
    """The public function's words for what the row takes; memory in other orders; numpy."""
    q, k, v, g, beta, state, _, _ = hard("usual", 11, 2, 90, 2, 4, 64, 40, device=device)
    want = run("prepared", q, k, v, g, beta, None, state)
    found = mg.gated_delta_rule(q, k, v, g.bfloat16().float(), beta, initial_state=state, output_final_state=True)
    want = run("prepared", q, k, v, g.bfloat16(), beta, None, state)
    assert all(map(torch.equal, found, want))
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    found = mg.gated_delta_rule(*heads_first, g.bfloat16(), beta, initial_state=state, output_final_state=True)
    assert all(map(torch.equal, found, want))
    out, last = mg.gated_delta_rule(q, k, v, g.bfloat16(), beta, initial_state=state.mT.contiguous(),
                                    output_final_state=True, state_v_first=True)
    assert torch.equal(out, want[0]) and torch.equal(last.mT, want[1])
    assert torch.equal(mg.gated_delta_rule(q, k, v), run("prepared", q, k, v, None, torch.ones_like(g))[0])
    a_log, dt_bias = torch.zeros(4, device=device), torch.ones(4, device=device)
    found = mg.gated_delta_rule(q, k, v, g, beta, A_log=a_log, dt_bias=dt_bias, use_gate=True, use_beta_sigmoid=True,
                                allow_neg_eigval=True, use_qk_l2norm=True)
    assert torch.equal(found, run("prepared", q, k, v, g, beta, gate=(a_log, dt_bias), beta_form=2, norms=True)[0])
    starts = torch.tensor([0, 50, 90], device=device)
    found = mg.gated_delta_rule(q[:1], k[:1], v[:1], g[:1], beta[:1], cu_seqlens=starts)
    assert torch.equal(found, run("prepared", *(t[:1] for t in (q, k, v, g, beta)), starts=(0, 50, 90))[0])
    if device == "cpu":
        arrays = [t.float().numpy() for t in (q, k, v, g, beta)]
        out, last = mg.gated_delta_rule(*arrays, initial_state=state.numpy(), output_final_state=True)
        want = mg.gated_delta_rule(*map(torch.from_numpy, arrays), initial_state=state, output_final_state=True)
        assert np.array_equal(out, want[0]) and np.array_equal(last, want[1])


@pytest.mark.parametrize("form", FORMS[:2])
@pytest.mark.parametrize("device", DEVICES)
def test_nothing(device, form):
    """No steps, no batch, no heads."""
    for b, steps, h, hv in ((1, 0, 1, 2), (0, 5, 1, 2), (1, 5, 0, 0)):
        q, k, v, g, beta, state, _, _ = hard("usual", 1, b, steps, h, hv, 16, 24, device=device)
        out, last = run(form, q, k, v, g, beta, None, state)
        assert out.shape == v.shape and (torch.equal(last, state) if b and hv else not last.numel())
    q, k, v, g, beta, _, _, _ = hard("usual", 1, 1, 40, 1, 2, 16, 24, device=device)
    out, last = run(form, q, k, v, g, beta, starts=(0,) * 3)
    assert not out.any() and not last.any()


REFUSED = (
    (ValueError, "A_log is None, expected a tensor where use_gate is True", dict(use_gate=True)),
    (ValueError, "g is None, expected a tensor where use_gate is True", dict(use_gate=True, g=None, A_log=(2,))),
    (ValueError, "A_log is given, expected None where use_gate is False", dict(A_log=(2,))),
    (ValueError, "dt_bias is given, expected None where use_gate is False", dict(dt_bias=(2,))),
    (ValueError, "allow_neg_eigval is True, expected False where use_beta_sigmoid is False",
     dict(allow_neg_eigval=True)),
    (ValueError, "k has size 8 in dimension 3", dict(k=(1, 70, 1, 8))),
    (ValueError, "beta has size 71 in dimension 1", dict(beta=(1, 71, 2))),
    (ValueError, "g has size 3 in dimension 2", dict(g=(1, 70, 3))),
    (ValueError, "heads of v that are a multiple of those of k", dict(q=(1, 70, 3, 16), k=(1, 70, 3, 16))),
    (ValueError, r"states \[K, V\] or, with state_v_first, \[V, K\]", dict(initial_state=(1, 2, 24, 16))),
    (ValueError, r"states \[K, V\] or, with state_v_first, \[V, K\]",
     dict(initial_state=(1, 2, 16, 24), state_v_first=True)),
    (ValueError, "as many states as there are batches", dict(initial_state=(2, 2, 16, 24))),
    (ValueError, r"cu_seqlens\[0\] is 1, expected 0", dict(cu_seqlens=torch.tensor([1, 70]))),
    (TypeError, "cu_seqlens is a tensor of dtype float32, expected a tensor of int32", dict(cu_seqlens=torch.zeros(2))),
    ((ValueError, NotImplementedError, RuntimeError), "heads of 1 to 128 columns",
     dict(q=(1, 70, 1, 129), k=(1, 70, 1, 129))),
    ((ValueError, NotImplementedError, RuntimeError), "heads of 1 to 128 columns", dict(v=(1, 70, 2, 256))),
    (ValueError, "scale is -1, expected a positive finite number", dict(scale=-1)),
    (TypeError, "q is list, expected torch.Tensor or numpy.ndarray", dict(q=[1])),
)


@pytest.mark.parametrize("kind, text, other", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(kind, text, other):
    given = dict(q=(1, 70, 1, 16), k=(1, 70, 1, 16), v=(1, 70, 2, 24), g=(1, 70, 2), beta=(1, 70, 2)) | other
    given = {name: torch.zeros(t) if isinstance(t, tuple) else t for name, t in given.items()}
    with pytest.raises(kind, match=f"^gated_delta_rule: .*{text}"):
        mg.gated_delta_rule(**given)


def check_random(p):
    form = p.r.choice(FORMS)
    p.also = f"{form}, "
    q, k, v, g, beta, state, _, _ = hard(p.name, p.seed, *p.sizes, **p.options)
    state = state if p.with_state else None
    ours = run(form, q, k, v, g, beta, p.scale, state, p.starts, norms=p.norms, v_first=p.v_first)
    wide = [normalised(t.double()) if p.norms else t for t in (q, k)]
    exact = exactly(*wide, v, g, beta, p.scale, state, p.starts)
    other = with_other_keys(p.name, *wide, p.dtype, v, g, beta, p.scale, state, p.starts)
    if p.norms:
        q, k = normalised(q), normalised(k)
    check(ours, by_chunks(q, k, v, g, beta, p.scale, state, p.starts), exact, p.dtype, g, other,
          remainder_rounding(g, state, p.starts))


SOME = (0, *AROUND, 200, 257)
test_random, test_random_on_the_gpu = random_tests(check_random, (*SOME, *SOME, 1024, 1100, 1537),
                                                   (*SOME, 700, 1500, 4097))
