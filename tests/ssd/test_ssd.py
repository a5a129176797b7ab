"""The Mamba-2 scan against its recurrence in float64.

An answer may have twice the error of the same scan in PyTorch, by chunks, with the operands of its products rounded
to 16 bits, plus rounding: see `check_error`."""

import math

import numpy as np
import pytest
import torch

import margay as mg
from cases import DEVICES, Guarded, check_error
from margay import _C, _op
from margay.mamba import mamba_chunk_scan_combined, selective_state_update
from ssd_cases import AWKWARD, CHUNK, ODD, Case, exact, inputs_of, plain, random_case, steps_of

GPU_TYPES = (torch.bfloat16, torch.float16)


def outputs(case, device, y=None):
    """y, the last states and the scratch, poisoned."""
    columns = -(-case.dim // 8) * 8                # rows of whole 16 bytes
    cuts = min(640 // (case.rows * case.heads + 1), case.steps // 512)
    new = lambda *shape, dtype=torch.float32: torch.full(shape, math.nan, dtype=dtype, device=device)  # noqa: E731
    if y is None:
        y = new(case.batch, case.steps, case.heads, columns, dtype=case.dtype)[..., :case.dim]
    return dict(y=y, final_states=new(case.rows, case.heads, case.dim, case.state),
                cuts=new(case.rows, cuts, case.heads, case.dim, case.state), decays=new(case.rows, cuts, case.heads))


def run(case, inputs):
    out = outputs(case, inputs["x"].device)
    _C.ssd(**out, **inputs, **case.numbers())
    return out["y"], out["final_states"]


def check_results(case, inputs, y, state):
    inputs = {name: t if t is None else t.cpu() for name, t in inputs.items()}
    relative = 0.0
    # A weight's exponent is the difference of two sums of dt a over a chunk.
    if inputs["x"].numel():
        dt = steps_of(inputs["dt"], inputs["dt_bias"], **case.numbers()).double()
        longest = (dt * -inputs["a"]).unfold(1, min(CHUNK, case.steps), 1).sum(3).max()
        relative = 2**-23 * (16 + float(longest))
    # The chunks' sums are added to the state one after the other; tensor cores make a chunk's of four, and cut off what
    # float32 does not hold.
    # A few steps' rounded weights may all be too small, in one order of operations and not in another.
    parts = -(-case.steps // CHUNK) * (4 if y.is_cuda else 1) * 2**-23
    parts += 2 * torch.finfo(case.dtype).eps / max(state.numel(), 1) ** 0.5
    wanted = plain(inputs, case.numbers()), exact(inputs, case.numbers())
    for name, found, rounded, right in zip(("y", "state"), (y, state), *wanted):
        check_error(name, found.cpu(), rounded, right, 2, (relative + parts * (name == "state"), 2**-22))


WHERE = [(case, "cpu") for case in AWKWARD + ODD]
# The GPU's copies ask for rows of whole 16 bytes, which those of y are here and those of the inputs with "gaps".
WHERE += [pytest.param(case, "cuda", marks=pytest.mark.gpu) for case in AWKWARD + ODD]


@pytest.mark.parametrize("case, device", WHERE, ids=str)
def test_awkward(case, device, one_thread):
    inputs = inputs_of(case, device)
    check_results(case, inputs, *run(case, inputs))


@pytest.mark.parametrize("case", [random_case(i) for i in range(200)], ids=str)
def test_random(case, one_thread):
    inputs = inputs_of(case)
    check_results(case, inputs, *run(case, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [random_case(i, GPU_TYPES) for i in range(1000, 1500)], ids=str)
def test_random_on_a_gpu(case):
    inputs = inputs_of(case, "cuda")
    check_results(case, inputs, *run(case, inputs))


# Few heads and a large device (on the CPU: many threads): rows are cut into segments.
LONG = [Case(500 + i, **change) for i, change in enumerate(
    [dict(steps=5000, heads=2, state=128, initial=True), dict(steps=3200, heads=1, softplus=True, bias=True),
     dict(steps=1100, heads=4, state=128, sequences=5, initial=True),
     dict(steps=2133, heads=8, groups=2, state=128, sequences=9), dict(steps=1024, heads=1, initial=True),
     dict(steps=1100, heads=3, dim=96, state=136, sequences=3, initial=True, batch=2),
     dict(steps=1100, heads=6, groups=3, dim=128, state=104, dtype=torch.float16, initial=True)])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", LONG, ids=str)
def test_segments(case, device):
    threads = _C.num_threads()
    _C.set_num_threads(9)
    try:
        inputs = inputs_of(case, device)
        check_results(case, inputs, *run(case, inputs))
    finally:
        _C.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [random_case(i, GPU_TYPES) for i in range(300, 330)] + AWKWARD[:4] + AWKWARD[-4:],
                         ids=str)
def test_writes_outputs_only(case, device, one_thread):
    inputs = inputs_of(case, device)
    before = {name: t if t is None else t.clone() for name, t in inputs.items()}
    out = outputs(case, device)
    guarded = {name: Guarded(t.shape, t.dtype, device) for name, t in out.items() if name in ("y", "final_states")}
    _C.ssd(**out | {name: g.view for name, g in guarded.items()}, **inputs, **case.numbers())
    for name, g in guarded.items():
        g.check(name)
    assert all(t is None or torch.equal(t, before[name]) for name, t in inputs.items()), "an input was written"
    check_results(case, inputs, guarded["y"].view, guarded["final_states"].view)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", ((), (0, 64, 100, 129)))
def test_y_with_gaps(device, packed, one_thread):
    """What is between the rows of y stays as it was."""
    case = Case(7, steps=129, batch=1 if packed else 2, heads=8, dim=40, state=72, packed=packed)
    inputs = inputs_of(case, device)
    wide = torch.full((case.batch, 129, 8, 64), math.nan, dtype=torch.bfloat16, device=device)
    out = outputs(case, device, wide[..., 16:56])
    _C.ssd(**out, **inputs, **case.numbers())
    check_results(case, inputs, out["y"], out["final_states"])
    assert wide[..., :16].isnan().all() and wide[..., 56:].isnan().all()


def test_nan_stays_in_its_head(one_thread):
    """NaN in x reaches its own head from its step on, and nothing else."""
    case = Case(8, steps=200, batch=2, heads=8, state=128)
    inputs = inputs_of(case)
    y, state = run(case, inputs)
    inputs["x"][1, 130, 5] = math.nan
    found_y, found_state = run(case, inputs)
    assert found_y[1, 130:, 5].isnan().all() and found_state[1, 5].isnan().all()
    found_y[1, 128:, 5], found_state[1, 5] = y[1, 128:, 5], state[1, 5]        # a product is of a chunk: 0 times NaN
    assert torch.equal(found_y, y) and torch.equal(found_state, state)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_sequence(device, one_thread):
    """What follows a packed sequence in memory, in one chunk with it, does not reach it."""
    case = Case(9, steps=200, heads=8, state=128, packed=(0, 50, 150, 200), initial=True)
    inputs = inputs_of(case, device)
    y, state = run(case, inputs)
    for name in ("x", "dt", "b", "c"):
        inputs[name][:, 50:150] = math.nan
    found_y, found_state = run(case, inputs)
    others = [*range(50), *range(150, 200)]
    assert torch.equal(found_y[:, others], y[:, others]) and torch.equal(found_state[[0, 2]], state[[0, 2]])
    assert found_y[:, 50:150].isnan().all() and found_state[1].isnan().all()


def test_check_can_fail(one_thread):
    """An element off by one typical magnitude is found, a step left out, and a state that is not decayed once."""
    case = Case(9, steps=300, state=128)
    inputs = inputs_of(case)
    y, state = run(case, inputs)
    check_results(case, inputs, y, state)
    off, without, late = y.clone(), y.clone(), state.clone()
    off[0, 100, 2, 7] += float(y.float().abs().mean())
    without[0, 64] = y[0, 63]
    late[:, 3] *= 1.01
    for wrong in ((off, state), (without, state), (y, late), (y * 1.01, state), (torch.nextafter(y, y * 0), state)):
        with pytest.raises(AssertionError):
            check_results(case, inputs, *wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [64, 128, 256])
def test_repeats_bitwise(n):
    case = Case(1, steps=1000, batch=2, heads=8, state=n)
    inputs = inputs_of(case, "cuda")
    first = run(case, inputs)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(run(case, inputs), first))


@pytest.mark.parametrize("change, error, message", [
    (dict(B=(1, 5, 3, 16), C=(1, 5, 3, 16)), ValueError,
     r"ssd: H = 4 \(dimension 2 of x\), G = 3 \(dimension 2 of B\), expected H == 0 \|\| \(G > 0 && H % G == 0\)"),
    (dict(B=(1, 5, 1, 0), C=(1, 5, 1, 0)), ValueError,
     r"ssd: P = 8 \(dimension 3 of x\), N = 0 \(dimension 3 of B\), expected P > 0 && N > 0"),
    (dict(B=(1, 5, 1, 300), C=(1, 5, 1, 300)), NotImplementedError,
     "(?s)ssd: no kernel for bfloat16.*P <= 128 && N <= 256"),
    (dict(initial_states=(2, 4, 8, 16)), ValueError,
     r"ssd: ROWS = 2 .*, R = 1, expected as many states as there are batches"),
    (dict(cu_seqlens=(0, 3, 2, 5)), ValueError,
     r"ssd: cu_seqlens\[2\] is 2, expected 3 \(the one before\) to 5 \(the steps that there are\)"),
    (dict(cu_seqlens=(1, 5)), ValueError, r"ssd: cu_seqlens\[0\] is 1, expected 0"),
    (dict(cu_seqlens=(0, 6)), ValueError, r"ssd: cu_seqlens\[1\] is 6, expected 0 \(the one before\) to 5"),
    (dict(cu_seqlens=(0,)), ValueError, r"ssd: .*STARTS = 1.*, expected STARTS != 1 \|\| T == 0"),
    (dict(cu_seqlens=(0, 5), seq_idx=True), ValueError, "ssd: seq_idx and cu_seqlens are given, expected one of them"),
    (dict(dt_limit=(1, 0)), ValueError, r"ssd: dt_limit is \(1, 0\), expected the smaller number first"),
    (dict(dt_limit=3), TypeError, "ssd: dt_limit is 3, expected a pair of numbers"),
    (dict(z=(1, 5, 4, 9)), ValueError, r"ssd: z has shape \[1, 5, 4, 9\], expected \[1, 5, 4, 8\] \(as x\)"),
    (dict(D=(4, 9)), ValueError, r"ssd: D has shape \[4, 9\], expected \[heads\] or \[heads, head dim\] of x"),
    (dict(seq_idx="x"), TypeError, "ssd: seq_idx is str, expected a tensor of int32"),
    (dict(dt=(1, 5, 3)), ValueError, "ssd: dt has size 3 in dimension 2, expected 4"),
])
def test_refused(change, error, message):
    shapes = dict(x=(1, 5, 4, 8), dt=(1, 5, 4), A=(4,), B=(1, 5, 1, 16), C=(1, 5, 1, 16))

    def made(name, value):
        if name == "cu_seqlens":
            return torch.tensor(value, dtype=torch.int32)
        if name == "seq_idx":
            return torch.zeros(1, 5, dtype=torch.int32) if value is True else value
        return value if name == "dt_limit" else torch.zeros(value, dtype=torch.bfloat16)
    with pytest.raises(error, match=message):
        mg.ssd(**{name: made(name, value) for name, value in (shapes | change).items()})


# ---- the public functions


def arguments_of(case, device="cpu"):
    """mg.ssd's, of a case of the row."""
    names = dict(a="A", b="B", c="C", d="D")
    values = {names.get(name, name): t for name, t in inputs_of(case, device).items()}
    low, high = case.numbers()["dt_min"], case.numbers()["dt_max"]
    return values | dict(dt_softplus=case.softplus, dt_limit=(low, high), return_final_states=True)


PUBLIC = [Case(700, steps=70, heads=4, state=24, dim=40, bias=True, softplus=True, limits=(0.02, 0.3), initial=True),
          Case(701, steps=100, batch=2, state=128, sequences=4, initial=True, d=False),
          Case(702, steps=130, heads=6, groups=3, packed=(0, 13, 70, 130), initial=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", PUBLIC, ids=str)
def test_public(case, device):
    """The row's results; other dtypes of what float32 computes; D of columns and z by PyTorch's own operations."""
    inputs, arguments = inputs_of(case, device), arguments_of(case, device)
    y, states = run(case, inputs)
    found_y, found_states = mg.ssd(**arguments)
    assert torch.equal(found_y, y) and torch.equal(found_states, states)
    if arguments["seq_idx"] is not None:
        arguments["seq_idx"] = arguments["seq_idx"].long()
        assert torch.equal(mg.ssd(**arguments)[0], y)
    half = {name: t.bfloat16() for name, t in arguments.items() if name in ("dt", "A", "dt_bias") and t is not None}
    wide = {name: t.float() for name, t in half.items()}
    assert torch.equal(mg.ssd(**arguments | half)[0], mg.ssd(**arguments | wide)[0])
    d, z = torch.randn(*y.shape[2:], device=device), torch.randn(y.shape, device=device).bfloat16()
    plain_y = mg.ssd(**arguments | dict(D=None))[0].float()
    want = ((plain_y + d * arguments["x"].float()) * torch.nn.functional.silu(z.float())).to(y.dtype)
    found = mg.ssd(**arguments | dict(D=d, z=z))[0]
    assert found.dtype == y.dtype and torch.allclose(found.float(), want.float(), rtol=2**-7, atol=1e-6)
    noncontiguous = arguments | dict(x=arguments["x"].transpose(1, 3).contiguous().transpose(1, 3))
    assert torch.equal(mg.ssd(**noncontiguous)[0], y)


@pytest.mark.parametrize("device", DEVICES)
def test_states_are_carried(device):
    """Two calls, the second from the first one's state, are one call."""
    case = Case(710, steps=192, batch=2, heads=4, state=64, softplus=True)
    arguments = arguments_of(case, device)
    y, states = mg.ssd(**arguments)

    def cut(part):
        return {name: t[:, part] if name in ("x", "dt", "B", "C") else t for name, t in arguments.items()}
    first, state = mg.ssd(**cut(slice(0, 128)))
    second, end = mg.ssd(**cut(slice(128, None)) | dict(initial_states=state))
    assert torch.equal(torch.cat([first, second], 1), y) and torch.equal(end, states)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_are_the_separate_sequences(device):
    case = PUBLIC[2]
    arguments = arguments_of(case, device)
    y, states = mg.ssd(**arguments)
    for i, (first, end) in enumerate(zip(case.packed, case.packed[1:])):
        one = {name: t[:, first:end] if name in ("x", "dt", "B", "C") else t for name, t in arguments.items()}
        one |= dict(initial_states=arguments["initial_states"][i:i + 1], cu_seqlens=None)
        y_one, state = mg.ssd(**one)
        assert torch.equal(y_one, y[:, first:end]) and torch.equal(state[0], states[i])


def test_numpy():
    case = Case(720, steps=70, heads=4, state=24, dim=40, dtype=torch.float32, bias=True, initial=True)
    arguments = arguments_of(case)
    arrays = {name: t.numpy() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    z, d = np.random.default_rng(0).standard_normal((1, 70, 4, 40), np.float32), np.ones((4, 40), np.float32)
    for found, want in zip(mg.ssd(**arrays), mg.ssd(**arguments)):
        assert isinstance(found, np.ndarray) and np.array_equal(found, want.numpy())
    found = mg.ssd(**arrays | dict(z=z, D=d))[0]
    want = mg.ssd(**arguments | dict(z=torch.tensor(z), D=torch.ones(4, 40)))[0]
    assert np.allclose(found, want.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    """As torch.compile and transforms see it."""
    case = PUBLIC[1]
    inputs = inputs_of(case, device)
    _op.for_torch("ssd")
    torch.library.opcheck(torch.ops.margay.ssd.default, (*inputs.values(), True, 0.0, 1.0),
                          test_utils=("test_schema", "test_faketensor"))
    arguments = arguments_of(case, device)
    with torch.no_grad():
        want = mg.ssd(**arguments)
        compiled = torch.compile(lambda **a: mg.ssd(**a), fullgraph=True, backend="aot_eager")
        assert all(map(torch.equal, compiled(**arguments), want))


@pytest.mark.parametrize("device", DEVICES)
def test_mamba_ssm_s_names(device):
    case = PUBLIC[0]
    arguments = arguments_of(case, device)
    low_high = arguments.pop("dt_limit")
    del arguments["cu_seqlens"]
    y, states = mamba_chunk_scan_combined(chunk_size=256, dt_limit=low_high, **arguments)
    assert all(map(torch.equal, (y, states), mg.ssd(**arguments, dt_limit=low_high)))
    case = PUBLIC[2]
    arguments = arguments_of(case, device)
    starts, initial = arguments.pop("cu_seqlens"), arguments.pop("initial_states")
    arguments.pop("dt_limit")
    y, last, states = mamba_chunk_scan_combined(chunk_size=256, cu_seqlens=starts, initial_states=initial[:1],
                                                return_varlen_states=True, **arguments)
    own = torch.cat([initial[:1], torch.zeros_like(initial[1:])])
    want = mg.ssd(**arguments, cu_seqlens=starts, initial_states=own)
    assert torch.equal(y, want[0]) and torch.equal(states, want[1]) and torch.equal(last[0], states[-1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("indexed", (False, True))
def test_steps_are_the_sequence(device, indexed):
    """1000 steps, one after the other, are the whole; in the pool of states nothing else changes."""
    case = Case(730, steps=1000, batch=2, heads=4, groups=2, dim=16, state=24, dtype=torch.float32, bias=True,
                softplus=True, limits=(0.01, 0.2), initial=True)
    arguments = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in arguments_of(case).items()}
    y, states = mg.ssd(**arguments_of(case))
    pool = torch.full((5, *states.shape[1:]), 7.0, device=device)
    at = torch.tensor([3, 1], device=device)
    pool[at] = arguments["initial_states"]
    state = pool if indexed else arguments["initial_states"].clone()
    per_step = ("x", "dt", "B", "C")
    rest = {name: arguments[name] for name in ("A", "D", "dt_bias", "dt_softplus", "dt_limit")}
    ys = [mg.ssd_step(state, *(arguments[name][:, t] for name in ("x", "dt")), rest["A"],
                      *(arguments[name][:, t] for name in per_step[2:]),
                      **{name: t for name, t in rest.items() if name != "A"}, state_indices=at if indexed else None)
          for t in range(case.steps)]
    assert torch.allclose(torch.stack(ys, 1).cpu(), y, rtol=1e-3, atol=1e-3)
    assert torch.allclose((state[at] if indexed else state).cpu(), states, rtol=1e-4, atol=1e-4)
    assert not indexed or (pool[[0, 2, 4]] == 7).all()


def test_step_as_mamba_ssm():
    g = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    state, x, dt, a = randn(2, 4, 8, 16), randn(2, 4, 8), randn(2, 4), -randn(4).exp()
    b, c = randn(2, 2, 1, 16)
    d, bias, z = randn(4), randn(4), randn(2, 4, 8)
    mine, other = state.clone(), state.clone()
    y = mg.ssd_step(mine, x, dt, a, b, c, D=d, z=z, dt_bias=bias, dt_softplus=True)
    wide = lambda t, *more: t[(..., *([None] * len(more)))].expand(*t.shape, *more)  # noqa: E731
    found = selective_state_update(other, x, wide(dt, 8), wide(a, 8, 16), b, c, wide(d, 8), z, wide(bias, 8), True)
    assert torch.equal(found, y) and torch.equal(other, mine)
    with pytest.raises(NotImplementedError, match="dt has shape .*, expected one value for each head"):
        selective_state_update(other, x, randn(2, 4, 8), wide(a, 8, 16), b, c)
    none = mg.ssd_step(mine, x, dt, a, b, c, state_indices=torch.tensor([1, -1]))
    assert (none[1] == 0).all() and torch.equal(mine[0], other[0]) and not torch.equal(mine[1], other[1])
