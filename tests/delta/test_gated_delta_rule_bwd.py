"""Gradients of gated_delta_rule against autograd of the recurrence in float64: hard gates, keys and values, odd sizes,
packed rows, gates and norms as models have them."""

import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from delta_cases import AROUND, DTYPES, GRADIENTS, REFLECTED, SHAPES, random_tests, skip, with_and_without
from delta_forms import (HARD, by_chunks, chance, exactly, gates, hard, normalised, recurrence, rounding, strength,
                         worst_products)
from margay import _op

STEPS = (1, 15, 16, 17, 63, 64, 65, 200)


def inputs(name, seed, *sizes, dtype, device, rows=None, with_state=True):
    """(q, k, v, g, beta, state), what is given of it wanting a gradient, and the results' gradients. Of values near
    float16's limit these are small: the gradient of a key is a product of both."""
    q, k, v, g, beta, state, dout, dlast = hard(name, seed, *sizes, dtype=dtype, device=device, rows=rows)
    if dtype == torch.float16 and "values" in name:
        dout, dlast = dout / 1024, dlast / 1024
    given = [q, k, v, g, beta, state if with_state else None]
    return [t if t is None else t.requires_grad_() for t in given], dout, dlast


def gradients(results, given, dout, dlast):
    """By the places of `given`, None where that is. The reference's results may depend on nothing."""
    wanted = [t for t in given if t is not None]
    pairs = [(t, grad.to(t.dtype)) for t, grad in zip(results, (dout, dlast)) if t.requires_grad]
    outs, of_outs = zip(*pairs) if pairs else ((), ())
    grads = torch.autograd.grad(outs, wanted, of_outs, allow_unused=True) if pairs else [None] * len(wanted)
    found = iter(torch.zeros_like(t) if grad is None else grad for t, grad in zip(wanted, grads))
    return [None if t is None else next(found) for t in given]


def run(q, k, v, g, beta, state, *gate, scale=None, starts=None, v_first=False, **options):
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=q.device)
    state = state.mT.contiguous() if v_first and state is not None else state
    out, last = mg.gated_delta_rule(q, k, v, g, beta, scale=scale, initial_state=state, output_final_state=True,
                                    cu_seqlens=starts, state_v_first=v_first, **options)
    return out, last.mT if v_first else last


def check(ours, plain, exact, dtype, given, other=None, equal=False, last=(None, None), addends=None):
    """last: the final state and its gradient. other: exact gradients of keys that differ by half of an eps, of inputs
    that make much of such a difference. equal: all keys are one, or nearly. Then dq of a step lies along it, and has
    one error. addends: of chance()."""
    q, k, _, g, _, state = given[:6]
    products = worst_products(q, k, *exact[:2])
    for i, (name, *three) in enumerate(zip(GRADIENTS, ours, plain, exact)):
        if three[2] is None or not three[2].numel():
            continue
        relative, absolute = rounding(name, three[0], three[1] - three[2], dtype, g, products)
        # The plain form's errors are small by chance where they are few. Of one key for all, a chunk's steps share that
        # of its state along the key.
        if three[0].numel() < 500 or (equal and name == "dbeta"):
            absolute += 2 * torch.finfo(dtype).eps * float(three[2].abs().max())
        absolute += 2.0**-126                      # kernels may make 0 of what is subnormal
        more = chance(name, three[1] - three[2], three[2], torch.finfo(dtype).eps, (state, exact[5]), last,
                      addends=addends)
        absolute = [absolute + x for x in more]
        if q.shape[3] < 4:                         # weights of few columns are alike, and so is their rounding
            absolute[2] += torch.finfo(dtype).eps / 4 * float(three[2].abs().mean())
        if other is not None:
            change = (other[i] - three[2]).abs()
            absolute = [a + 2 * float(b) for a, b in zip(absolute, (change.max(), change.mean(), change.mean()))]
        independent = three[2].numel() // three[2].shape[-1] if equal and name == "dq" else None
        check_error(name, *three, factor=3, rounding=(relative, tuple(absolute)), independent=independent)


def compare(given, dout, dlast, name="", scale=None, starts=None, norms=False, v_first=False):
    dtype = given[0].dtype
    norm = normalised if norms else lambda t: t

    def of(form, change=1.0, given=given):
        q, k, v, g, beta, state = (t if t is None or form is by_chunks else t.detach().double().requires_grad_()
                                   for t in given)
        turned = [q, k, v, g, beta, state]
        results = form(norm(q), norm(k) * change, v, g, beta, scale, state, starts)
        return gradients(results, turned, dout, dlast), results[1]
    options = dict(scale=scale, starts=starts, v_first=v_first, use_qk_l2norm=norms)
    ours = gradients(run(*given, **options), given, dout, dlast)
    assert all(found is None or found.dtype == t.dtype for found, t in zip(ours, given))
    other = of(exactly, 1 + torch.finfo(dtype).eps / 2)[0] if name in REFLECTED else None
    exact, last = of(exactly)
    addends = None
    if 0 < given[4].numel() < 500:
        columns = [*given[:4], given[4][..., None].expand(given[2].shape), given[5]]
        addends = of(recurrence, given=columns)[0][4].norm(dim=3)
    check(ours, of(by_chunks)[0], exact, dtype, given, other, name.startswith(("equal keys", "near keys")),
          (last, dlast), addends)
    return ours


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_hard(device, dtype, name):
    skip(device, dtype)
    given, dout, dlast = inputs(name, 3, 1, 150, 1, 2, 100, 72, dtype=getattr(torch, dtype), device=device)
    ours = compare(given, dout, dlast, name)
    for a, b in zip(ours, gradients(run(*given), given, dout, dlast)):
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_sizes(device, dtype, shape):
    skip(device, dtype)
    b, *others = shape
    for i, steps in enumerate(STEPS):
        given, dout, dlast = inputs("usual", steps, b, steps, *others, dtype=getattr(torch, dtype), device=device,
                                    with_state=i % 2 == 0)
        compare(given, dout, dlast, scale=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_options(device, dtype):
    """Gates, sigmoids of beta and norms as models have them, of large and of zero rows too; states [V, K]."""
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    (q, k, v, _, _, state), dout, dlast = inputs("usual", 5, 2, 150, 2, 4, 80, 100, dtype=dtype, device=device)
    with torch.no_grad():
        q *= 3
        k *= 20
        k[0, 7], q[1, 30] = 0, 0
    r = torch.Generator().manual_seed(6)
    raw, logits = (torch.randn(2, 150, 4, generator=r).to(device).requires_grad_() for _ in range(2))
    a_log, dt_bias = (torch.randn(4, generator=r).to(device).requires_grad_() for _ in range(2))
    for bias, negative in ((dt_bias, True), (None, False)):
        given = [q, k, v, raw, logits, state, a_log, bias]

        def of(form, *tensors, bias=bias, negative=negative):
            q, k, v, raw, logits, state, a_log = tensors[:7]
            g, w = gates(raw, a_log, None if bias is None else tensors[7]), strength(logits, negative)
            return gradients(form(normalised(q), normalised(k), v, g, w, state=state), tensors, dout, dlast)
        ours = gradients(run(*given[:6], v_first=True, A_log=a_log, dt_bias=bias, use_gate=True, use_beta_sigmoid=True,
                             allow_neg_eigval=negative, use_qk_l2norm=True), given, dout, dlast)
        exact = of(exactly, *(t if t is None else t.detach().double().requires_grad_() for t in given))
        check(ours, of(by_chunks, *given), exact, dtype, [*given[:3], gates(raw, a_log, bias), logits, state])


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("device", DEVICES)
def test_packed(device, dtype):
    """As the sequences by themselves, empty ones too; what stands behind a sequence does not reach it; gradients are 0
    behind the last."""
    skip(device, dtype)
    starts = (0, 70, 70, 134, 135, 300)
    given, dout, dlast = inputs("to -20", 9, 1, 350, 2, 4, 100, 128, dtype=getattr(torch, dtype), rows=5, device=device)
    dout[:, 300:] = torch.nan
    with torch.no_grad():
        for t in given[:5]:
            t[:, 300:] = torch.nan
    _op.for_torch("gated_delta_rule")
    ours = gradients(run(*given, starts=starts, use_qk_l2norm=True), given, dout, dlast)
    for grad in ours[:5]:
        assert (grad[:, 300:] == 0).all()
    for i, (first, end) in enumerate(zip(starts, starts[1:])):
        part = [t[:, first:end].detach().requires_grad_() for t in given[:5]]
        part.append(given[5][i:i + 1].detach().requires_grad_())
        alone = gradients(run(*part, use_qk_l2norm=True), part, dout[:, first:end], dlast[i:i + 1])
        for name, a, b in zip(GRADIENTS, alone[:5], ours):
            assert torch.equal(a, b[:, first:end]), (name, i)
        assert torch.equal(alone[5][0], ours[5][i]), i
    with torch.no_grad():
        for t in given[:3]:
            t[:, 70:134] = torch.nan
    again = gradients(run(*given, starts=starts, use_qk_l2norm=True), given, dout, dlast)
    for a, b in zip(again[:5], ours):
        assert torch.equal(a[:, :70], b[:, :70]) and torch.equal(a[:, 134:], b[:, 134:])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_asked_for(device):
    """Some gradients without the others, and of one result, are those of all; small ones are not lost."""
    given, dout, dlast = inputs("mild", 4, 2, 100, 2, 4, 64, 64, dtype=torch.bfloat16, device=device)
    out, last = run(*given)
    both = gradients((out, last), given, dout, dlast)
    for i, t in enumerate(given):
        out, last = run(*(x if x is t else x.detach() for x in given))
        assert torch.equal(torch.autograd.grad((out, last), t, (dout, dlast))[0], both[i]), GRADIENTS[i]
    none = gradients(run(*given), given, dout, torch.zeros_like(dlast))
    wanted = torch.autograd.grad(run(*given)[0], given, dout)
    assert all(map(torch.equal, wanted, none))
    small = gradients(run(*given), given, dout * 2.0**-60, dlast * 2.0**-60)
    for name, a, b in zip(GRADIENTS, small, both):
        torch.testing.assert_close(a * 2.0**60, b, rtol=1e-2, atol=1e-2 * float(b.abs().max()), msg=name)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing(device):
    """No steps, no batch, no heads."""
    for b, steps, h, hv in ((1, 0, 1, 2), (0, 5, 1, 2), (1, 5, 0, 0)):
        given, dout, dlast = inputs("usual", 1, b, steps, h, hv, 16, 24, dtype=torch.bfloat16, device=device)
        a_log, dt_bias = (torch.zeros(hv, device=device, requires_grad=True) for _ in range(2))
        results = run(*given, A_log=a_log, dt_bias=dt_bias, use_gate=True, use_qk_l2norm=True)
        grads = gradients(results, [*given, a_log, dt_bias], dout, dlast)
        for grad, t in zip(grads, [*given, a_log, dt_bias]):
            assert grad.shape == t.shape
        assert torch.equal(grads[5], dlast) and not any(grad.any() for grad in (*grads[:5], *grads[6:]))
    given, dout, dlast = inputs("usual", 1, 1, 40, 1, 2, 16, 24, dtype=torch.bfloat16, device=device, rows=2)
    grads = gradients(run(*given, starts=(0, 0, 40)), given, dout, dlast)
    assert torch.equal(grads[5][0], dlast[0])


# ---- what the forward keeps: factors of norms, matrices of chunks

def arguments(given, starts=None, **numbers):
    """Of the operators, without what is kept: tensors, numbers."""
    q, k, v, g, beta, state, a_log, dt_bias = (None if t is None else t.detach() for t in (*given, None, None)[:8])
    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=q.device)
    numbers = dict(scale=0.0, beta_form=0, l2norm=False, state_v_first=False, form=0, keep=True) | numbers
    tensors = q, k, v, None if g is None else g.float(), beta.float(), a_log, dt_bias, state, starts
    return tensors, tuple(numbers.values())


def kept_and_made(given, dout, dlast, **options):
    tensors, numbers = arguments(given, **options)
    return with_and_without("gated_delta_rule", tensors, numbers, (dout.to(tensors[0].dtype), dlast))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_kept(device, dtype):
    """Gradients are the same, bit by bit, with what the forward kept and without: of whole chunks and others, of packed
    rows, with norms and gates as models have them. One kernel keeps no matrices."""
    skip(device, dtype)
    dtype = getattr(torch, dtype)
    for seed, (b, steps, h, hv, d, dv, rows, starts, numbers) in enumerate((
            (2, 200, 1, 2, 100, 72, None, None, dict()), (1, 128, 2, 2, 64, 64, None, None, dict(l2norm=True)),
            (1, 300, 1, 2, 128, 40, 4, (0, 70, 70, 134, 290), dict(l2norm=True, form=2)),
            (1, 1100, 1, 1, 40, 100, None, None, dict(form=3, state_v_first=True)),
            (1, 100, 1, 2, 64, 64, None, None, dict(l2norm=True, form=1)),
            (3, 70, 1, 12, 16, 16, None, None, dict(scale=0.5)))):
        given, dout, dlast = inputs("usual", seed, b, steps, h, hv, d, dv, dtype=dtype, device=device, rows=rows)
        if numbers.get("state_v_first"):
            given[5], dlast = given[5].detach().mT.contiguous(), dlast.mT.contiguous()
        if numbers.get("l2norm"):
            given += [torch.zeros(hv, device=device), torch.ones(hv, device=device)]
        norms, *matrices = kept_and_made(given, dout, dlast, starts=starts, **numbers)
        rule_rows = b if starts is None else len(starts) - 1
        prepared = numbers.get("form", 0) > 1 or not numbers.get("form") and rule_rows * hv <= 33
        chunks = -(-steps // 64) if starts is None else steps // 64 + rule_rows
        assert norms.shape == (2 * numbers.get("l2norm", False), b, h, steps)
        assert all(t.shape == (b, hv, 64 * chunks * prepared, 64) for t in matrices)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_kept(device):
    """Calls without a gradient keep nothing. Others keep 16 KB for each chunk and head of few heads, and no matrix of
    many, for as many backward passes as come; less where the call is computed again."""
    from torch.utils.checkpoint import checkpoint

    packed = []

    def pack(t):
        packed.append(t)
        return t

    def kept():
        inputs = {t.data_ptr() for t in given if t is not None}
        found = sum(t.numel() * t.element_size() for t in packed if t.data_ptr() not in inputs)
        packed.clear()
        return found

    for heads, matrices in ((4, 4 * 4 * 2), (34, 0)):
        given, dout, dlast = inputs("mild", 4, 1, 200, 2, heads, 64, 64, dtype=torch.bfloat16, device=device)
        given[4] = given[4].detach().float().requires_grad_()
        norms = 2 * 2 * 200 * 4
        options = dict(use_qk_l2norm=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            with torch.no_grad():
                assert run(*given, **options)[0].grad_fn is None
            with torch.inference_mode():
                run(*given, **options)
            assert run(*(t if t is None else t.detach() for t in given), **options)[0].grad_fn is None
            assert not packed
            results = run(*given, **options)
        assert kept() == norms + matrices * 64 * 64 * 2
        first = torch.autograd.grad(results, given, (dout, dlast), retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(results, given, (dout, dlast))):
            assert torch.equal(a, b)
        again = checkpoint(lambda *given: run(*given, **options), *given, use_reentrant=False)
        for a, b in zip(first, torch.autograd.grad(again, given, (dout, dlast))):
            assert torch.equal(a, b)
        if device == "cuda":
            with torch.no_grad():
                results = again = None
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                results = run(*given, **options)
                blocks = [-(-t.numel() * t.element_size() // 512) * 512 for t in results]
                assert torch.cuda.memory_allocated() - before == sum(blocks)


@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    """As torch.compile and transforms see it. A backward under autocast computes in the forward's dtype."""
    given, dout, dlast = inputs("mild", 4, 1, 150, 1, 2, 64, 64, dtype=torch.bfloat16, device=device)
    given[4] = given[4].detach().float().requires_grad_()
    tensors, numbers = arguments(given, l2norm=True)
    _op.for_torch("gated_delta_rule")
    tensors = [None if t is None else t.requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.margay.gated_delta_rule.default, (*tensors, *numbers))
    call = lambda *given: run(*given, use_qk_l2norm=True)  # noqa: E731
    want = gradients(call(*given), given, dout, dlast)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(want, gradients(compiled(*given), given, dout, dlast)):
        assert torch.equal(a, b)
    results, vjp = torch.func.vjp(call, *given)
    other = torch.float16 if device == "cpu" else torch.bfloat16
    for dtype in (None, torch.float16, other):
        with torch.autocast(device, dtype, enabled=dtype is not None):
            found = vjp((dout.to(results[0].dtype), dlast))
        for a, b in zip(want, found):
            assert torch.equal(a, b), dtype
    pairs = torch.stack((dout, 2 * dout)).to(results[0].dtype), torch.stack((dlast, 2 * dlast))
    for a, b in zip(want, torch.func.vmap(vjp)(pairs)):
        assert torch.equal(a, b[0])


@pytest.mark.gpu
def test_segments():
    """Heads have the gradients that they have alone where the scratch does not hold the states of all steps."""
    given, dout, dlast = inputs("mild", 2, 1, 1100, 1024, 1024, 128, 128, dtype=torch.bfloat16, device="cuda")
    whole = gradients(run(*given), given, dout, dlast)
    cut = lambda t, place: t.detach().narrow(place, 100, 16).contiguous()  # noqa: E731
    part = [cut(t, 1 if i == 5 else 2).requires_grad_() for i, t in enumerate(given)]
    alone = gradients(run(*part), part, cut(dout, 2), cut(dlast, 1))
    for i, name in enumerate(GRADIENTS[:6]):
        assert torch.equal(cut(whole[i], 1 if i == 5 else 2), alone[i]), name
    kept_and_made(given, dout, dlast, form=2)


def check_random(p):
    given, dout, dlast = inputs(p.name, p.seed, *p.sizes, **p.options, with_state=p.with_state)
    compare(given, dout, dlast, p.name, p.scale, p.starts, p.norms, p.v_first)


test_random, test_random_on_the_gpu = random_tests(check_random, (0, *AROUND, 150), (0, *AROUND, 150, 700, 1500))
