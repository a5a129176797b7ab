"""mg.hedgehog and its gradients against the quadratic form and the recurrence in float64.

A result may have twice the error of the same attention in PyTorch, by chunks, with the operands of its products rounded
to 16 bits; a gradient three times."""

import dataclasses

import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from hedgehog_cases import CHUNK, GIVEN, Case, exact, inputs_of, plain, quadratic, random_case, recurrence
from margay import _C, _op

GPU_TYPES = (torch.bfloat16, torch.float16)
FACTORS = ("window_factor", "linear_factor")


def call(inputs, case, **options):
    """out and the state, its sums behind it."""
    state = inputs["initial_state"]
    out, (s, z) = mg.hedgehog(
        *(inputs[name] for name in GIVEN[:7]), window=case.window, sliding=case.sliding, scale=case.scale,
        initial_state=None if state is None else (state[..., :-1], state[..., -1]), output_final_state=True,
        cu_seqlens=inputs["cu_seqlens"], **options)
    return out, torch.cat([s, z[..., None]], -1)


def cotangents(case, inputs):
    g = torch.Generator().manual_seed(case.seed + 1)
    dout = torch.randn(inputs["v"].shape, generator=g).to(inputs["v"])
    return dout, torch.randn(case.rows, case.heads, 2 * case.count, case.dim_v + 1, generator=g).to(dout.device)


def gradients(form, case, inputs, dout, dstate, dtype=None):
    """Results and gradients by name."""
    leaves = {name: inputs[name].detach().to(dtype or inputs[name].dtype).requires_grad_() for name in GIVEN
              if inputs[name] is not None}
    out, state = form({**inputs, **leaves})
    found = {"out": out.detach(), "final_state": state.detach()}
    pairs = [(t, g.to(t.dtype)) for t, g in ((out, dout), (state, dstate)) if t.requires_grad]
    grads = torch.autograd.grad([t for t, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True)
    return found | {"d" + name: torch.zeros_like(t) if grad is None else grad
                    for (name, t), grad in zip(leaves.items(), grads)}


def of_factors(case, inputs, dout, out):
    """What the gradient of a factor may be off by: products of dout and a rounded out, each by half a unit of itself,
    add up like random numbers. PyTorch's has no rounded out."""
    eps = torch.finfo(case.dtype).eps
    size = (dout.double() * out.double()).square().sum((0, 1, 3)).sqrt()
    w, l = (inputs[name].double() for name in FACTORS)
    return {"dwindow_factor": float((eps * size / w).max()), "dlinear_factor": float((eps * size / l).max())}


def of_pairs(exact, eps):
    """Of the bias of dk. The scores' gradients of a step add up to 0: two keys share the rounding of one number."""
    sizes = exact.abs().sum(3)
    sizes = torch.nn.functional.pad(sizes, (0, 0, 0, sizes.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    return 2 * eps * float(sizes.square().sum().sqrt()) / exact.numel() if exact.numel() else 0.0


def check(case, device):
    inputs = inputs_of(case, device)
    dout, dstate = cotangents(case, inputs)
    found = gradients(lambda x: call(x, case), case, inputs, dout, dstate)
    inputs = {name: t if t is None else t.cpu() for name, t in inputs.items()}
    dout, dstate = dout.cpu(), dstate.cpu()
    right = gradients(lambda x: exact(x, case.numbers()), case, inputs, dout, dstate, torch.float64)
    rounded = gradients(lambda x: plain(x, case.numbers()), case, inputs, dout, dstate)
    eps = torch.finfo(case.dtype).eps
    sums = of_factors(case, inputs, dout, right["out"]) if dout.numel() else {}
    longest = [inputs[name].double().norm(dim=3) for name in "qk"]
    scores = float(longest[0].amax() * longest[1].amax()) if dout.numel() else 0.0
    relative = 2**-23 * (16 + scores * abs(case.scale or case.dim**-0.5))
    for name, t in found.items():
        # Float32 results of 16-bit products: where they are few, the plain ones may be right by chance.
        chance = eps * (0.1 + 0.5 / max(t.numel() / max(t.shape[-1], 1), 1) ** 0.5) if t.dtype is torch.float32 else 0.0
        absolute = sums.get(name, 0.0) + 2**-20
        absolute = absolute, absolute, absolute + (of_pairs(right[name], eps) if name == "dk" else 0.0)
        check_error(name, t.cpu(), rounded[name], right[name], 2 if name in ("out", "final_state") else 3,
                    (relative + chance, absolute))


SIZES = ([dict(steps=t) for t in (0, 1, 2, 63, 64, 65, 127, 128, 129, 192, 300)]
         + [dict(steps=t, window=w) for t in (1, 64, 65, 200) for w in (1, 16, 32)]
         + [dict(steps=t, window=w, sliding=True) for t in (1, 63, 64, 65, 200) for w in (1, 50, 64)]
         + [dict(steps=700, heads=1), dict(steps=300, dim=128, dim_v=128, count=64), dict(steps=130, dim=40, dim_v=72),
            dict(steps=200, count=32), dict(steps=200, count=7, dim=5, dim_v=9, dtype=torch.float32),
            dict(steps=150, scale=0.5), dict(steps=0, batch=2), dict(batch=0, steps=70), dict(steps=200, sharp=20.0)])
AWKWARD = [Case(i, initial=i % 2 == 1 and size.get("batch") != 0, dtype=size.pop("dtype", torch.bfloat16), **size)
           for i, size in enumerate(SIZES)]
AWKWARD += [Case(100 + i, initial=True, **change) for i, change in enumerate(
    [dict(steps=333, packed=(0, 100, 100, 164, 165, 333)), dict(steps=64, packed=(0, 64), dim=128, dim_v=128),
     dict(steps=200, packed=(0, 0, 63, 127, 200), window=16),
     dict(steps=200, packed=(0, 70, 200), sliding=True, window=40),
     dict(steps=0, packed=(0, 0, 0))])]


@pytest.mark.parametrize("case", AWKWARD, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_awkward(case, device, one_thread):
    if device == "cuda" and case.dtype is torch.float32:
        pytest.skip("computed on the CPU only")
    check(case, device)


@pytest.mark.parametrize("case", [random_case(i) for i in range(2000, 2200)], ids=str)
def test_random(case, one_thread):
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [random_case(i, GPU_TYPES) for i in range(3000, 3500)], ids=str)
def test_random_on_a_gpu(case):
    check(case, "cuda")


@pytest.mark.parametrize("case", [Case(i, steps=t, window=w, sliding=s, initial=i % 2 == 0, dtype=torch.float32)
                                  for i, (t, w, s) in enumerate([(200, 64, False), (150, 8, False), (140, 64, True),
                                                                 (100, 13, True)])], ids=str)
def test_recurrence(case):
    """The quadratic form is what a recurrence gives."""
    inputs = inputs_of(case)
    for a, b in zip(exact(inputs, case.numbers(), quadratic), exact(inputs, case.numbers(), recurrence)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# Long rows of few heads, of which each thread takes a part.
@pytest.mark.parametrize("threads", (1, 4, 7))
@pytest.mark.parametrize("case", [Case(i, steps=4200 + i, heads=1, window=w, sliding=s, initial=i % 2 == 0, dim=64,
                                       dtype=torch.float32)
                                  for i, (w, s) in enumerate([(64, False), (64, False), (16, False), (33, True)])],
                         ids=str)
def test_segments(case, threads):
    _C.set_num_threads(threads)
    try:
        check(case, "cpu")
    finally:
        _C.set_num_threads(0)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(i, steps=20000 + i, heads=2, window=w, sliding=s, initial=i % 2 == 0, dim=128,
                                       dim_v=128)
                                  for i, (w, s) in enumerate([(64, False), (64, False), (16, False), (33, True)])],
                         ids=str)
def test_segments_on_a_gpu(case):
    """As steps in packed rows of one sequence, which are not cut."""
    inputs = inputs_of(case, "cuda")
    dout, dstate = cotangents(case, inputs)
    cut = gradients(lambda x: call(x, case), case, inputs, dout, dstate)
    inputs["cu_seqlens"] = torch.tensor([0, case.steps], dtype=torch.int32, device="cuda")
    whole = gradients(lambda x: call(x, case), case, inputs, dout, dstate)
    for name, t in cut.items():
        size = float(whole[name].abs().max())
        assert float((t.float() - whole[name].float()).abs().max()) <= 2**-6 * size, name


@pytest.mark.parametrize("window, sliding", ((64, False), (16, False), (50, True)))
@pytest.mark.parametrize("device", DEVICES)
def test_packed(window, sliding, device):
    """Packed sequences have what they have alone, though a neighbour is NaN."""
    ends = (0, 1, 70, 134, 134, 333)
    case = Case(3, steps=333, packed=ends, initial=True, window=window, sliding=sliding, dim_v=128)
    inputs = inputs_of(case, device)
    dout, dstate = cotangents(case, inputs)
    for name in ("q", "k", "v"):
        inputs[name][:, 70:134] = torch.nan
    found = gradients(lambda x: call(x, case), case, inputs, dout, dstate)
    for i, (a, b) in enumerate(zip(ends, ends[1:])):
        if a == 70:
            continue
        alone = dataclasses.replace(case, packed=(), steps=b - a)
        part = {name: t[:, a:b] if name in ("q", "k", "v") else t for name, t in inputs.items()}
        part |= dict(initial_state=inputs["initial_state"][i:i + 1], cu_seqlens=None)
        want = gradients(lambda x: call(x, alone), alone, part, dout[:, a:b], dstate[i:i + 1])
        assert torch.equal(found["final_state"][i:i + 1], want["final_state"])
        assert torch.equal(found["dinitial_state"][i:i + 1], want["dinitial_state"])
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(found[name][:, a:b], want[name]), (name, i)


@pytest.mark.parametrize("window, sliding", ((64, False), (32, False), (20, True)))
def test_calls_that_go_on(window, sliding):
    """A call begins with the chunk that the state of the call before does not have."""
    case = Case(4, steps=450, window=window, sliding=sliding, dtype=torch.float32)
    inputs = inputs_of(case)
    whole, last = call(inputs, case)
    first = 256
    _, state = call({name: t[:, :first] if name in ("q", "k", "v") else t for name, t in inputs.items()}, case)
    rest = {name: t[:, first - CHUNK:] if name in ("q", "k", "v") else t for name, t in inputs.items()}
    out, final = call(dict(rest, initial_state=state), case)
    torch.testing.assert_close(out[:, CHUNK:], whole[:, first:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(final, last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_written(device):
    """All of what C writes, in memory that begins as NaN."""
    case = Case(5, steps=200, heads=2, initial=True, dim=64, dim_v=64)
    inputs = inputs_of(case, device)
    dout, dstate = cotangents(case, inputs)
    known = dict(inputs, dout=dout, dfinal_state=dstate)
    for op in ("hedgehog", "hedgehog_bwd"):
        row = _op.Row(op)
        sizes = dict(B=1, T=200, H=2, K=64, V=64, F=64, STARTS=-1, R=-1, F2=-1, V1=-1) | case.numbers()
        row.derive(sizes)
        for f in (*row.results, *row.saves, *row.work):
            dtype = case.dtype if f["kind"] == "half" else torch.float32
            known[f["name"]] = torch.full([sizes[n] for n in f["sizes"]], torch.nan, dtype=dtype, device=device)
        getattr(_C, op)(*(known[f["name"]] for f in row.arguments if f["role"] != "num"), *case.numbers().values())
        for f in (*row.results, *row.saves):
            assert known[f["name"]].isfinite().all(), f["name"]


@pytest.mark.parametrize("ties", (2, 5))
def test_equal_scores(ties):
    """A maximum that several steps share has its gradient from each alike, as PyTorch's amax."""
    case = Case(6, steps=100, dtype=torch.float32)
    inputs = inputs_of(case)
    inputs["k"][:, :ties] = 3 * inputs["q"][:, 40:41]
    dout, dstate = cotangents(case, inputs)
    found = gradients(lambda x: call(x, case), case, inputs, dout, dstate)
    want = gradients(lambda x: exact(x, case.numbers()), case, inputs, dout, dstate, torch.float64)
    for name in ("dq", "dk"):
        torch.testing.assert_close(found[name].double(), want[name], rtol=1e-4, atol=1e-4)


def test_numbers_as_factors_and_numpy():
    case = Case(7, steps=100, dtype=torch.float32)
    inputs = inputs_of(case)
    given = [inputs[name] for name in GIVEN[:5]]
    a = mg.hedgehog(*given, 0.5, 1)
    b = mg.hedgehog(*given, torch.full((2,), 0.5), torch.ones(2))
    assert torch.equal(a, b)
    assert (mg.hedgehog(*(t.numpy() for t in given), 0.5, 1) == a.numpy()).all()


def test_compiled():
    case = Case(8, steps=130, initial=True, dtype=torch.float32)
    inputs = inputs_of(case)
    leaves = [inputs[name].requires_grad_() for name in GIVEN[:7]]
    state = inputs["initial_state"]

    def step(*leaves):
        out, (s, _) = mg.hedgehog(*leaves, initial_state=(state[..., :-1], state[..., -1]), output_final_state=True)
        return out.sum() + s.sum()
    grads = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for a, b in zip(torch.autograd.grad(compiled(*leaves), leaves), grads):
        torch.testing.assert_close(a, b)


def test_explained():
    case = Case(9, steps=100)
    given = [inputs_of(case)[name] for name in GIVEN[:7]]
    assert mg.explain(mg.hedgehog, *given).kernels == ["hedgehog_bf16_d64", "hedgehog_bwd_bf16_d64"]
    assert mg.explain(mg.hedgehog, *given, sliding=True).kernels[0] == "hedgehog_bf16_d64_local"


def refused(kind, message, **changes):
    case = Case(10, steps=70)
    inputs = inputs_of(case)
    options = {name: changes.pop(name) for name in ("window", "sliding", "scale", "initial_state", "cu_seqlens")
               if name in changes}
    inputs |= {name: change(inputs[name]) if callable(change) else change for name, change in changes.items()}
    with pytest.raises(kind, match=message):
        mg.hedgehog(*(inputs[name] for name in GIVEN[:7]), **options)


def test_refusals():
    refused(ValueError, r"^hedgehog: v has size 69 in dimension 1, expected 70 \(T of q\)", v=lambda t: t[:, :69])
    refused(ValueError, r"^hedgehog: k_map has size 63 in dimension 2, expected 64 \(F of q_map\)",
            k_map=lambda t: t[..., :63])
    refused(ValueError, r"^hedgehog: window_factor has size 3 in dimension 0, expected 2", window_factor=torch.ones(3))
    refused(TypeError, "^hedgehog: linear_factor is str, expected a tensor or a number", linear_factor="1")
    refused(NotImplementedError, "^hedgehog: window is 65, expected windows of 1 to 64 steps", window=65)
    refused(ValueError, "^hedgehog: window is 0, expected window > 0", window=0)
    refused(NotImplementedError, "^hedgehog: window is 48, .*expected blocks that 64 is a multiple of", window=48)
    refused(ValueError, "^hedgehog: scale is -1, expected a positive finite number", scale=-1)
    refused(TypeError, r"^hedgehog: initial_state is Tensor, expected a pair \(S_0, z_0\)",
            initial_state=torch.zeros(1, 2, 128, 64))
    refused(ValueError, "^hedgehog: initial_state has shapes",
            initial_state=(torch.zeros(1, 2, 128, 64), torch.ones(3)))
    refused(ValueError, "^hedgehog: .*as many states as there are batches",
            initial_state=(torch.zeros(3, 2, 128, 64), torch.zeros(3, 2, 128)))
    refused(ValueError, r"^hedgehog: cu_seqlens\[1\] is 60, expected 70", cu_seqlens=torch.tensor([0, 60]))
    refused(ValueError, r"^hedgehog: cu_seqlens\[1\] is 80, expected 0 .* to 70", cu_seqlens=torch.tensor([0, 80, 70]))
    refused(TypeError, "^hedgehog: cu_seqlens is list, expected a tensor of int32", cu_seqlens=[0, 70])
