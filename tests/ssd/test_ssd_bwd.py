"""Gradients of the Mamba-2 scan against those of its recurrence in float64, by torch.autograd.

A gradient may have three times the error of that of the same scan in PyTorch, by chunks, with the operands of its
products rounded to 16 bits. The gradients of dt, a and dt_bias have besides what one rounding of a state and of its
gradient does where a chunk begins: that of the log decay of a step is their inner product. Where few steps decide, one
of a head that forgets at once, PyTorch's roundings may be lucky ones, and of the states that come in it makes none."""

import dataclasses

import pytest
import torch

import margay as mg
from cases import DEVICES, check_error
from margay import _C, _op
from ssd_cases import CHUNK, Case, by_sequences, inputs_of, pieces, plain, random_case, recurrence, steps_of

GPU_TYPES = (torch.bfloat16, torch.float16)
GIVEN = ("x", "dt", "a", "b", "c", "d", "dt_bias", "initial_states")


def sizes_of(case):
    row = _op.Row("ssd_bwd")
    sizes = dict(B=case.batch, T=case.steps, H=case.heads, P=case.dim, G=case.groups, N=case.state,
                 STARTS=len(case.packed) or -1)
    for name, _, code in row.lets:
        sizes[name] = int(eval(code, {}, sizes))
    return row, sizes


def run(case, inputs, dy, dstates):
    """Gradients by name, in memory that begins as NaN, as does the scratch."""
    row, sizes = sizes_of(case)
    x = inputs["x"]
    known = dict(inputs, dy=dy, dfinal_states=dstates)
    for f in (*row.results, *row.work):
        shape, dtype = [sizes[size] for size in f["sizes"]], x.dtype if f["kind"] == "half" else torch.float32
        wide = shape[:-1] + [-(-shape[-1] // 8) * 8] if f["name"] == "dx" else shape      # of whole 16 bytes
        known[f["name"]] = torch.full(wide, torch.nan, dtype=dtype, device=x.device)[..., :shape[-1]]
        if f["role"] == "optout" and inputs[f["name"][1:]] is None:
            known[f["name"]] = None
    known.update(case.numbers())
    _C.ssd_bwd(*(known[f["name"]] for f in row.arguments))
    return {name: known["d" + name] for name in GIVEN if inputs[name] is not None}


def gradients(scan, case, inputs, dy, dstates, dtype=None):
    leaves = {name: inputs[name].detach().to(dtype or inputs[name].dtype).requires_grad_() for name in GIVEN
              if inputs[name] is not None}
    y, states = scan({**inputs, **leaves}, case.numbers())
    results = [(t, g.to(t.dtype)) for t, g in ((y, dy), (states, dstates)) if t.requires_grad]
    grads = torch.autograd.grad([t for t, _ in results], list(leaves.values()), [g for _, g in results],
                                allow_unused=True)
    return {name: torch.zeros_like(t) if grad is None else grad for (name, t), grad in zip(leaves.items(), grads)}


def problem(case, device):
    inputs = inputs_of(case, device)
    g = torch.Generator().manual_seed(case.seed + 1)
    dy = torch.randn(*inputs["x"].shape, generator=g).to(device, case.dtype)
    dstates = torch.randn(case.rows, case.heads, case.dim, case.state, generator=g).to(device)
    if case.dim % 8:              # rows begin at multiples of 16 bytes
        dy = torch.nn.functional.pad(dy, (0, -case.dim % 8))[..., :case.dim]
    return inputs, dy, dstates


class Weighed:
    """The recurrence. Its backward leaves what one rounding of the state in front of each chunk, and one of the state's
    gradient behind it, does to the gradient of the log decay of each step: norms of the products, element by element,
    of that state as it has decayed until then and of the gradient that it meets, and the other way round."""

    def __init__(self, case, inputs, dstates):
        self.errors = torch.zeros(2, case.batch, case.steps, case.heads, dtype=torch.float64)
        self.packed, self.dstates = bool(case.packed), dstates.double()
        self.pieces = iter(pieces(inputs["seq_idx"], inputs["cu_seqlens"], case.batch, case.steps))

    def __call__(self, inputs, numbers):
        return by_sequences(self.scan, **inputs, **numbers)

    def scan(self, x, dt, a, b, c, d, state, half):
        batch, _, last, first, end = next(self.pieces)
        later = [torch.zeros_like(state) if last is None else self.dstates[last]]
        ys = [x[:, :0]]
        for t in range(first, end):
            i = slice(t - first, t - first + 1)
            decay, before = torch.exp(dt[:, i] * a[:, None]).detach()[..., None], state.detach()
            begins = (t - first * self.packed) % CHUNK == 0
            old = decay * (before if begins or t == first else old)
            y, state = recurrence(x[:, i], dt[:, i], a, b[:, i], c[:, i], d, state, half)
            state.register_hook(self.hook(self.errors[:, batch, t], decay, before, old, later, begins))
            ys.append(y)
        return torch.cat(ys, 1), state

    @staticmethod
    def hook(errors, decay, before, old, later, begins):
        def weigh(grad):      # from a sequence's last step to its first
            errors[0] = (old * grad).norm(dim=(1, 2))
            errors[1] = (decay * before * later[0]).norm(dim=(1, 2))
            later[0] = decay * (grad if begins else later[0])
        return weigh


def log_decay_rounding(case, inputs, weighed):
    """name -> worst, mean, and mean away from zero, of what rounding of states leaves in a gradient."""
    raw, a = inputs["dt"].double().requires_grad_(), inputs["a"].double().abs()
    bias = None if inputs["dt_bias"] is None else inputs["dt_bias"].double()
    dt = steps_of(raw, bias, **case.numbers())
    slope, = torch.autograd.grad(dt.sum(), raw)
    if not dt.numel():
        return {}
    errors = weighed.errors * torch.finfo(case.dtype).eps
    each = errors.norm(dim=0) * slope * a
    rows = [(i, 0, case.steps) for i in range(case.batch)]
    if case.packed:
        rows = [(0, first, end) for first, end in zip(case.packed, case.packed[1:])]
    # What one rounding does to the steps of a chunk has one sign; different roundings have any.
    chunks = [(i, slice(t, min(t + CHUNK, end))) for i, first, end in rows for t in range(first, end, CHUNK)]
    to_a, to_bias = (torch.stack([(errors * w)[:, i, t].sum(1) for i, t in chunks]).norm(dim=(0, 1))
                     for w in (dt.detach(), slope * a))
    return {name: (float(t.max()), float(t.mean()), float(far.norm() / t.numel()))
            for name, t, far in (("dt", each, to_bias), ("a", to_a, to_a), ("dt_bias", to_bias, to_bias))}


def check(case, device):
    inputs, dy, dstates = problem(case, device)
    ours = {name: t.cpu() for name, t in run(case, inputs, dy, dstates).items()}
    inputs, dy, dstates = {name: t if t is None else t.cpu() for name, t in inputs.items()}, dy.cpu(), dstates.cpu()
    weighed = Weighed(case, inputs, dstates)
    right = gradients(weighed, case, inputs, dy, dstates, torch.float64)
    of_states = log_decay_rounding(case, inputs, weighed)
    rounded = gradients(plain, case, inputs, dy, dstates)
    relative = 0.0
    if inputs["x"].numel():        # as of the scan itself
        dt = steps_of(inputs["dt"], inputs["dt_bias"], **case.numbers()).double()
        longest = (dt * -inputs["a"]).unfold(1, min(CHUNK, case.steps), 1).sum(3).clamp(max=150).max()
        relative = 2**-23 * (16 + float(longest)) * (4 if device == "cuda" else 2)
    for name, found in ours.items():
        rows = max(found.numel(), 1) / found.shape[-1] if found.numel() else 1
        # Float32 results of 16-bit products: where they are few, the plain ones may be right by chance, or wrong in
        # both directions.
        chance = torch.finfo(case.dtype).eps * (0.05 + 0.5 / rows**0.5) if found.dtype is torch.float32 else 0.0
        absolute = tuple(x + 2**-22 for x in of_states.get(name, (0.0,) * 3))
        check_error("d" + name, found, rounded[name], right[name], 3, (relative + chance, absolute))


CHANGES = (
    [dict(steps=t, state=n, heads=3 * g, groups=g) for t in (1, 63, 64, 65, 300) for n in (64, 128) for g in (1, 2)]
    + [dict(steps=1000, heads=2), dict(steps=200, state=256, dim=128), dict(steps=130, state=200, dim=72, sequences=4),
       dict(steps=0)]
    + [dict(dim=5, state=7, layout="gaps", dtype=torch.float32), dict(limits=(0.03, 0.1)), dict(sequences=1000),
       dict(heads=5, layout="fused")])
AWKWARD = [Case(i, batch=2, d=i % 2 == 0, initial=i % 3 > 0, softplus=i % 2 == 1, bias=i % 2 == 1, **change)
           for i, change in enumerate(CHANGES)]
AWKWARD += [Case(100 + i, initial=True, d=True, **change) for i, change in enumerate(
    [dict(steps=333, packed=(0, 100, 100, 164, 165, 333)), dict(steps=64, packed=(0, 64), dim=72),
     dict(steps=200, packed=(0, 0, 63, 127, 200), state=256, dim=128),
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


# Few heads and a large device (on the CPU: many threads): segments are cut into parts.
LONG = [Case(500 + i, d=True, **change) for i, change in enumerate(
    [dict(steps=1100, heads=2, state=128, initial=True), dict(steps=1030, heads=1, softplus=True, bias=True),
     dict(steps=1100, heads=4, state=128, sequences=5, initial=True), dict(steps=1024, heads=1, dim=16, initial=True),
     dict(steps=1100, heads=3, dim=96, state=136, sequences=3, initial=True, batch=2),
     dict(steps=1100, heads=2, state=128, limits=(0.0, 0.001), initial=True)])]      # states that last


@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_parts(case, device):
    threads = _C.num_threads()
    _C.set_num_threads(16)
    try:
        check(case, device)
    finally:
        _C.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
def test_segments(device):
    """Heads have the gradients that they have alone where the scratch does not hold the states of all steps."""
    case = Case(5, steps=1090, heads=512, state=128, initial=True, d=True)
    inputs, dy, dstates = problem(case, device)
    assert sizes_of(case)[1]["LATER"] > 0
    whole = run(case, inputs, dy, dstates)
    part = dataclasses.replace(case, heads=16)
    assert sizes_of(part)[1]["LATER"] == 0
    places = dict(x=2, dt=2, a=0, d=0, dt_bias=0, initial_states=1)
    cut = lambda t, place: t.narrow(place, 100, 16).contiguous()  # noqa: E731
    heads = {name: t if t is None or name not in places else cut(t, places[name]) for name, t in inputs.items()}
    alone = run(part, heads, cut(dy, 2), cut(dstates, 1))
    for name, t in alone.items():
        if name in places:
            assert torch.equal(t, cut(whole[name], places[name])), name
    for name in ("b", "c"):
        assert whole[name].isfinite().all()


@pytest.mark.parametrize("ends", [(0, 70, 130), (0, 64, 128), (0, 0), (0, 100, 100), (0, 200, 230, 299)], ids=str)
@pytest.mark.parametrize("heads, groups, dim, state", [(4, 1, 64, 128), (3, 3, 72, 200)])
@pytest.mark.parametrize("device", DEVICES)
def test_steps_behind_the_last_sequence(device, ends, heads, groups, dim, state):
    """y and the gradients are 0 there, whatever x, dy, b, c and dt are; in front of them nothing changes."""
    steps, end = 300, ends[-1]
    case = Case(7, steps=steps, heads=heads, groups=groups, dim=dim, state=state, initial=True, d=True, bias=True,
                softplus=True, packed=ends)
    inputs, dy, dstates = problem(case, device)
    for t in (inputs["x"], inputs["dt"], inputs["b"], inputs["c"], dy):
        t[:, end:] = torch.nan
    given = dict(dt_bias=inputs["dt_bias"], dt_softplus=True, initial_states=inputs["initial_states"],
                 return_final_states=True)
    cut = {name: t[:, :end] if name in ("x", "dt", "b", "c") else t for name, t in inputs.items()}
    y, states = (mg.ssd(*(inputs[name] for name in "x dt a b c".split()), D=inputs["d"],
                        cu_seqlens=inputs["cu_seqlens"], **given))
    want_y, want_states = (mg.ssd(*(cut[name] for name in "x dt a b c".split()), D=inputs["d"],
                                  cu_seqlens=inputs["cu_seqlens"], **given))
    assert torch.equal(y[:, :end], want_y) and torch.equal(states, want_states) and not y[:, end:].any()
    found = run(case, inputs, dy, dstates)
    want = run(dataclasses.replace(case, steps=end), cut, dy[:, :end], dstates)
    for name in GIVEN:
        part = slice(None), slice(0, end if name in ("x", "dt", "b", "c") else None)
        assert torch.equal(found[name][part[:found[name].ndim]], want[name]), name
        assert name not in ("x", "dt", "b", "c") or not found[name][:, end:].any(), name
    wide = torch.ones(heads, dim, device=device)
    y = mg.ssd(*(inputs[name] for name in "x dt a b c".split()), D=wide, cu_seqlens=inputs["cu_seqlens"])
    assert not y[:, end:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_autograd(device):
    """Through mg.ssd: as C gives it, only what is asked for, and with gradients of one result."""
    case = Case(6, steps=150, heads=4, groups=2, state=64, initial=True, d=True, bias=True, softplus=True)
    inputs, dy, dstates = problem(case, device)
    want = run(case, inputs, dy, dstates)
    leaves = {name: inputs[name].clone().requires_grad_() for name in GIVEN}
    x, dt, a, b, c, d, bias, initial = leaves.values()
    y, states = mg.ssd(x, dt, a, b, c, D=d, dt_bias=bias, dt_softplus=True, initial_states=initial,
                       return_final_states=True)
    grads = torch.autograd.grad((y, states), list(leaves.values()), (dy, dstates))
    for name, grad in zip(leaves, grads):
        assert torch.equal(grad, want[name]), name
    y = mg.ssd(x, dt, a, b.detach(), c.detach(), D=d.detach(), dt_bias=bias.detach(), dt_softplus=True)
    grad, = torch.autograd.grad(y, x, dy)
    assert grad.isfinite().all() and grad.shape == x.shape
