"""Chunks of kda that are prepared while the pass over the sequence is under way. What comes out is, bit by bit, what
packed rows have, whose chunks are all prepared before; of one kernel, where matrices of chunks are kept."""

import contextlib
import ctypes

import pytest
import torch

from cases import DEVICES
from delta_cases import check_alike, skip
from delta_forms import hard
from margay import _C
from margay._shared import of_row

STEPS = 64 * 21 + 7                               # the last four chunks are two, the last chunk is not whole
IN_FRONT = 7 * 128                     # bytes of the pass's parameters: seven maps, then `done`, `wave` and `taken`
GATES = ("given", "raw")


def wave_of(row, params):
    """Heads of a wave, of the pass's parameters; 0: all chunks have been prepared before, or this is not the pass."""
    if "prepare" in row or "_v" not in row:
        return 0
    done = ctypes.c_void_p.from_address(params + IN_FRONT).value
    return ctypes.c_int.from_address(params + IN_FRONT + 8).value if done else 0


def taken_of(params):
    """Whether one kernel has taken the packed rows, as the pass behind it sees; None: it was not tried."""
    taken = ctypes.c_void_p.from_address(params + IN_FRONT + 16).value
    return ctypes.c_float.from_address(taken).value > 0 if taken else None


@contextlib.contextmanager
def multiprocessors(count, launches, taken=None):
    """On the CPU, launches as on a GPU of `count` multiprocessors, and taken_of() of each pass."""
    def note(row, params, blocks):
        launches.append((row.decode(), blocks, wave_of(row.decode(), params)))
        if taken is not None and row.startswith(b"kda_bf16"):
            taken.append(taken_of(params))
        return False
    take = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)(note)
    _C.intercept(ctypes.cast(take, ctypes.c_void_p).value, count)
    try:
        yield
    finally:
        _C.intercept(0, 0)


def problem(heads, dtype, device, raw, steps=STEPS, form=0):
    """What is slowly prepared is prepared before: float16 with more than 64 channels."""
    channels = 64 if dtype == torch.float16 else 128
    q, k, v, g, beta, state = hard("usual", 11, 2, steps, heads // 2, heads, channels, 100, channels=True, dtype=dtype,
                                   device=device)[:6]
    gate = ((torch.linspace(-1, 1, heads, device=device), torch.zeros(heads, channels, device=device)) if raw else
            (None, None))

    def run(q, k, v, g, beta, state, starts):
        return of_row("kda")(q, k, v, g.float(), beta.float(), *gate, state, starts, 0.0, 0.0, int(raw), raw, False, form)
    return run, (q, k, v, g, beta), state


def check(run, tensors, state, calls, count, device):
    """Launches of the last call; on the CPU, of `count` multiprocessors."""
    there = (lambda to: multiprocessors(count, to)) if device == "cpu" else (lambda to: contextlib.nullcontext())
    starts = torch.tensor([0, tensors[0].shape[1]], dtype=torch.int32, device=device)
    launches, packed = [], []
    with there(launches):
        found = [run(*tensors, state, None) for _ in range(calls)]
    with there(packed):
        right = [run(*(t[i:i + 1] for t in tensors), state[i:i + 1], starts) for i in range(2)]
    for out, last in found:
        for i, (packed_out, packed_last) in enumerate(right):
            assert torch.equal(out[i:i + 1], packed_out) and torch.equal(last[i:i + 1], packed_last)
    return launches[-2:], packed[-2:]


@pytest.mark.parametrize("raw", (False, True), ids=GATES)
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("device", DEVICES)
def test_beside(device, dtype, raw):
    skip(device, dtype)
    on_cpu = device == "cpu"
    run, tensors, state = problem(2 if on_cpu else 16, getattr(torch, dtype), device, raw)
    launches, packed = check(run, tensors, state, 1 if on_cpu else 30, 16, device)
    if on_cpu:                                    # the pass has 8 of 16: four rows of heads, two blocks for columns
        (prepare, prepared_by, _), (sweep, blocks, wave) = launches
        assert "prepare" in prepare and prepared_by == 16
        assert "prepare" not in sweep and blocks == 8 and wave == 4
        assert packed[0][1] == 16 and packed[1][2] == 0


# On the CPU 16 multiprocessors: 28 heads are waves of 6, of all columns, and 8 of 3, of 64 columns. The last has less.
@pytest.mark.parametrize("heads, blocks, wave", ((14, 28, 6), (4, 16, 3)))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("device", DEVICES)
def test_waves(device, dtype, heads, blocks, wave):
    skip(device, dtype)
    on_cpu = device == "cpu"
    run, tensors, state = problem(heads if on_cpu else 10 * heads, getattr(torch, dtype), device, False, 64 * 9 + 7, 2)
    launches, _ = check(run, tensors, state, 1 if on_cpu else 30, 16, device)
    if on_cpu:
        assert [n for _, n, _ in launches] == [16, blocks] and launches[1][2] == wave


# One kernel for both, asked for by `form`: heads are more than blocks, and those that share keys lie in different ones.
@pytest.mark.parametrize("kind", ("usual", "steep", "mixed", "none"))
@pytest.mark.parametrize("device", DEVICES)
def test_whole(device, kind):
    skip(device, "bfloat16")
    heads = 3 if device == "cpu" else 100
    run, tensors, state = problem(2 * heads, torch.bfloat16, device, False, 64 * 5 + 7, 2)
    g = tensors[3]
    if kind == "steep":
        g.mul_(60)
    if kind == "mixed":                           # in both panels of channels, in one, in none; and a step that forgets
        g[:, 64:128].mul_(60)
        g[:, 128:192, :, :40].mul_(20)
        g[:, 200] = -90
    if kind == "none":
        g.zero_()
    args = tensors[0], tensors[1], tensors[2], g.float(), tensors[4].float(), None, None, state
    launches = []
    with multiprocessors(5, launches) if device == "cpu" else contextlib.nullcontext():
        kept, found = (of_row("kda")(*args, None, 0.0, 0.0, 0, False, False, 1, keep) for keep in (True, False))
    starts = torch.tensor([0, g.shape[1]], dtype=torch.int32, device=device)
    for i in range(2):
        right = run(*(t[i:i + 1] for t in tensors), state[i:i + 1], starts)
        assert all(torch.equal(x[None, i], y) for x, y in zip(kept, right, strict=True))
        check_alike([x[None, i] for x in found], right)
    if device == "cpu":
        rows = [(row, blocks) for row, blocks, _ in launches]
        assert rows == [("kda_whole_bf16_k128_kept", 5), ("kda_whole_bf16_k128", 5)]


# Packed rows; a few steps behind them are in none. Of as many heads of rows as multiprocessors one kernel is tried,
# which leaves uneven rows to two.
@pytest.mark.parametrize("lengths, form, rows, takes", (
    (25 * [40], 0, ["whole", "prepare", "kda_bf16"], [True]),
    (24 * [1] + [900], 0, ["whole", "prepare", "kda_bf16"], [False]),
    (25 * [40], 1, ["whole"], []), ([1, 64, 0, 63, 130, 65, 7, 0, 0], 1, ["whole"], [])),
    ids=("even", "uneven", "asked", "ends"))
@pytest.mark.parametrize("raw", (False, True), ids=GATES)
@pytest.mark.parametrize("device", DEVICES)
def test_whole_of_packed_rows(device, raw, lengths, form, rows, takes):
    skip(device, "bfloat16")
    heads, starts = 4 if device == "cpu" else 8, torch.tensor([0, *lengths]).cumsum(0).int()
    _, tensors, state = problem(heads, torch.bfloat16, device, raw, sum(lengths) + 90)
    q, k, v, g, beta = (t[:1].contiguous() for t in tensors)
    gate = ((torch.linspace(-1, 1, heads, device=device), torch.zeros(heads, g.shape[3], device=device)) if raw else
            (None, None))
    states = state[:1] * torch.linspace(-1, 1, len(lengths), device=device)[:, None, None, None]

    def run(form, keep):
        given = [t.detach().requires_grad_() for t in (q, k, v, g.float(), beta.float())]
        out, last = of_row("kda")(*given, *gate, states, starts.to(device), 0.0, 0.0, int(raw), raw, False, form, keep)
        return out, last, *torch.autograd.grad((out.float() ** 2).sum() + last.sum(), given)
    launches, taken = [], []
    with multiprocessors(100, launches, taken) if device == "cpu" else contextlib.nullcontext():
        found = run(form, False)[:2]
    if device == "cpu":
        rows = ["decays"] * raw + rows
        assert taken[:1] == takes
        assert all(name in row for name, (row, _, _) in zip(rows, launches[:len(rows)], strict=True))
    right = run(2, False)[:2]
    check_alike(found, right)
    assert takes != [False] or all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
    for x, y in zip(run(form, True), run(2, True), strict=True):      # with the matrices, from which gradients are made
        assert torch.equal(x, y)


@pytest.mark.parametrize("raw", (False, True), ids=GATES)
@pytest.mark.parametrize("device", DEVICES)
def test_whole_keeps_matrices(device, raw):
    """M and P, from which the backward makes gradients: those that are prepared."""
    skip(device, "bfloat16")
    _, tensors, state = problem(4, torch.bfloat16, device, raw, 64 * 3 + 40)
    q, k, v, g, beta = tensors
    heads, channels = g.shape[2:]
    gate = ((torch.linspace(-1, 1, heads, device=device), torch.zeros(heads, channels, device=device)) if raw else
            (None, None))
    given = [t.float().requires_grad_() if t is g or t is beta else t.requires_grad_() for t in (q, k, v, g, beta)]
    grads = []
    for form in (0, 1):
        out, last = of_row("kda")(*given, *gate, state, None, 0.0, 0.0, int(raw), raw, False, form, True)
        grads.append(torch.autograd.grad((out.float() ** 2).sum() + last.sum(), given))
    for two, one in zip(*grads, strict=True):
        assert torch.equal(one, two)


@pytest.mark.gpu
def test_beside_in_a_graph():
    """Each replay begins with marks of zero, and sees what its inputs are by then."""
    run, tensors, state = problem(16, torch.bfloat16, "cuda", False)
    run(*tensors, state, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*tensors, state, None)
    for scale in (1, 0.5, 2):
        tensors[2].mul_(scale)
        right = run(*tensors, state, None)
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
