"""Segments that begin early, where gates forget: right where they are taken, and where what they left out would be
missed, all as without them, bit by bit."""

import contextlib
import ctypes
import re

import pytest
import torch
import torch.nn.functional as F

from cases import DEVICES
from delta_cases import check_alike
from margay import _C
from margay._shared import of_row

EARLY = re.compile("delta_fades|delta_early|kda_early|delta_meets|(delta|kda)_(keep|back)_early")
REST = re.compile("(gated_delta_rule|kda|(delta|kda)_(keep|back|prepare|cuts|join|segments))_bf16")
OPS = ("gated_delta_rule", "kda")
BOUND = 704            # where the second of three segments of 2100 steps begins, and near it some of kda's ranges
SIZES = ((2100, 1, 2, 128, 128), (2240, 1, 1, 97, 70))


@contextlib.contextmanager
def launches(device, left_out=None):
    """Names of rows, on the CPU. left_out: a pattern of those that are not run."""
    names = []

    def note(row, params, blocks):
        names.append(row.decode())
        return bool(left_out and left_out.match(names[-1]))
    take = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)(note)
    if device == "cpu":
        _C.intercept(ctypes.cast(take, ctypes.c_void_p).value, 4)
    try:
        yield names
    finally:
        if device == "cpu":
            _C.intercept(0, 0)


def problem(op, device, sizes, decay, raw=False, change=lambda inputs: None):
    """decay: the mean of log decays. raw: gates as models have them. change: of the inputs, by name."""
    steps, h, hv, d, dv = sizes
    g = torch.Generator().manual_seed(11)
    randn = lambda *size: torch.randn(size, generator=g)  # noqa: E731
    gates = (2, steps, hv, d) if op == "kda" else (2, steps, hv)
    inputs = dict(q=F.normalize(randn(2, steps, h, d), dim=-1), k=F.normalize(randn(2, steps, h, d), dim=-1),
                  v=randn(2, steps, hv, dv), g=-2 * decay * torch.rand(gates, generator=g),
                  beta=torch.rand(2, steps, hv, generator=g), state=randn(2, hv, d, dv))
    if raw:
        inputs |= dict(g=randn(*gates), a_log=torch.full((hv,), decay).log(),
                       dt_bias=torch.rand(gates[2:], generator=g) - 0.5)
    change(inputs)
    return {name: t.to(device, torch.bfloat16 if name in "qkv" else torch.float32) for name, t in inputs.items()}


def results(op, inputs, form, keep=True, bound=0.0, back=lambda dout: None):
    """out, the final state and gradients by the row's function. back: changes the gradient of out."""
    x = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    numbers = (0.0, bound, 0) if op == "kda" else (0.0, 0)
    out, last = of_row(op)(x["q"], x["k"], x["v"], x["g"], x["beta"], x.get("a_log"), x.get("dt_bias"), x["state"],
                           None, *numbers, False, False, form, keep)
    g = torch.Generator().manual_seed(12)
    dout, dlast = (torch.randn(t.shape, generator=g).to(t.device, t.dtype) for t in (out, last))
    back(dout)
    return out, last, *torch.autograd.grad((out, last), list(x.values()), (dout, dlast))


@pytest.mark.parametrize("keep", (True, False), ids=("kept", "made again"))
@pytest.mark.parametrize("decay", (0.12, 3.2))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_taken(device, op, sizes, decay, keep):
    """On the CPU the kernels behind are not run: all is done before."""
    inputs = problem(op, device, sizes, decay)
    right = results(op, inputs, 2, keep)
    skipped = re.compile(REST.pattern.replace("prepare|", "")) if op == "gated_delta_rule" and not keep else REST
    if op == "kda":                               # prepared chunks are the backward's, too
        skipped = re.compile(REST.pattern.replace("|prepare", ""))
    with launches(device, skipped) as names:
        found = results(op, inputs, 4, keep)
    if device == "cpu":
        assert sum(bool(EARLY.match(name)) for name in names) == (8 if op == "kda" else 9)
    check_alike(found, right)
    for x, y in zip(found, results(op, inputs, 4, keep), strict=True):
        assert torch.equal(x, y)


def forget_slowly(inputs):
    inputs["g"] *= 0.01


def one_slow_head(inputs):
    inputs["g"][:, :, 0] *= 0.001


def one_slow_channel(inputs):
    inputs["g"][..., 5] *= 0.001


def slow_at_one_end(inputs):
    inputs["g"][:, BOUND - 256:BOUND] = 0


def fading_for_one_chunk(inputs):
    """The chunk that is read for the guess says two of its kind would do: there is one."""
    inputs["g"][:, BOUND - 64:BOUND] *= 0.75
    inputs["g"][:, BOUND - 320:BOUND - 64] = 0


def great_values(inputs):
    """What is left of the first ones is more than all that comes."""
    inputs["v"][:, :BOUND - 128] *= 2.0**40


def one_great_value(inputs):
    inputs["v"][:, :BOUND - 128, :, 3] *= 2.0**40


def nan(inputs):
    inputs["v"][:, 70, :, 3] = torch.nan


def infinite_state(inputs):
    inputs["state"][:] = torch.inf


CHANGES = (forget_slowly, one_slow_head, slow_at_one_end, fading_for_one_chunk, great_values, one_great_value, nan,
           infinite_state)


@pytest.mark.parametrize("op, change", (*((op, change) for op in OPS for change in CHANGES), ("kda", one_slow_channel)),
                         ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("device", DEVICES)
def test_left(device, op, change):
    """Where a guess says no, or what came of it is not right. NaN and infinity are where they would be. Gradients of
    states do not depend on values: their pass may be taken."""
    inputs = problem(op, device, SIZES[0], 0.12, change=change)
    right = results(op, inputs, 2)
    with launches(device) as names:
        found = results(op, inputs, 4)
    assert device != "cpu" or any("early" in name for name in names)
    for i, (x, y) in enumerate(zip(found, right, strict=True)):
        assert torch.equal(x.isfinite(), y.isfinite()), i
        x, y = (t.nan_to_num(posinf=1, neginf=-1) for t in (x, y))
        if i < 2 or "slow" in change.__name__ and change is not slow_at_one_end:
            assert torch.equal(x, y), i
        else:
            check_alike([x], [y])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_left_by_the_backward(device, op):
    """Great gradients behind a segment: the pass that goes back is done anew, the one that goes forth is not."""
    def back(dout):
        dout[:, BOUND + 128:] *= 2.0**40
    inputs = problem(op, device, SIZES[0], 0.12)
    right = results(op, inputs, 2, back=back)
    found = results(op, inputs, 4, back=back)
    check_alike(found, right)
    small = slice(0, BOUND - 256)
    for i in (2, 3, 4):                           # of steps in front of it, which have what is left
        check_alike([found[i][:, small]], [right[i][:, small]])


@pytest.mark.parametrize("op, bound", (("gated_delta_rule", 0.0), ("kda", 0.0), ("kda", -5.0)))
@pytest.mark.parametrize("device", DEVICES)
def test_raw_gates(device, op, bound):
    inputs = problem(op, device, SIZES[1], 0.5, raw=True)
    right = results(op, inputs, 2, bound=bound)
    skipped = re.compile(REST.pattern.replace("|prepare", "") if op == "kda" else REST.pattern)
    with launches(device, skipped):
        found = results(op, inputs, 4, bound=bound)
    check_alike(found, right)


@pytest.mark.gpu
@pytest.mark.parametrize("op, shape, decay", (
    ("gated_delta_rule", (16384, 4, 8, 128, 128), 0.1), ("gated_delta_rule", (8192, 4, 8, 128, 128), 0.0005),
    ("kda", (16384, 4, 4, 128, 128), 3.2), ("kda", (16384, 4, 4, 128, 128), 0.08),
    ("kda", (8192, 4, 4, 128, 128), 0.0005)))
def test_chosen_by_size(op, shape, decay):
    """As calls without a form have it; also in a graph, whose replays see other gates."""
    inputs = problem(op, "cuda", shape, decay)
    run = lambda form: of_row(op)(  # noqa: E731
        *(inputs[name] for name in ("q", "k", "v", "g", "beta")), None, None, inputs["state"], None,
        *((0.0, 0.0, 0) if op == "kda" else (0.0, 0)), False, False, form)
    check_alike(results(op, inputs, 0), results(op, inputs, 2))
    run(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(0)
    for factor in (1, 0.01, 100):
        inputs["g"].mul_(factor)
        graph.replay()
        check_alike(found, run(2))


@pytest.mark.parametrize("heads", (34, 66))
@pytest.mark.parametrize("device", DEVICES)
def test_heads_of_one_kernel(device, heads):
    """Two segments of each: no matrices are prepared, nor kept. Slow gates are one kernel's."""
    for decay in (0.12, 0.001):
        inputs = problem("gated_delta_rule", device, (1100, heads // 2, heads // 2, 66, 70), decay)
        with launches(device, REST if decay > 0.1 else None) as names:
            found = results("gated_delta_rule", inputs, 4, False)[:2]
        right = results("gated_delta_rule", inputs, 1, False)[:2]
        if device == "cpu":
            assert "delta_early_bf16_k128" in names and not any("prepare" in name for name in names[:4])
        check_alike(found, right)
        if decay < 0.1:
            assert all(map(torch.equal, found, right))
