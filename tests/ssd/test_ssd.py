"""The Mamba-2 scan against its recurrence in float64.

An answer may have twice the error of the same scan in PyTorch, by chunks, with the operands of its products rounded
to 16 bits, plus rounding: see `check_error`."""

import math

import pytest
import torch

from cases import DEVICES, Guarded, check_error
from margay import _C
from ssd_cases import AWKWARD, CHUNK, ODD, Case, exact, inputs_of, plain, random_case, steps_of

GPU_TYPES = (torch.bfloat16, torch.float16)


def run(case, inputs):
    dim = case.dim
    x = inputs["x"]
    rows = *x.shape[:3], -(-dim // 8) * 8          # of whole 16 bytes
    y = torch.full(rows, math.nan, dtype=x.dtype, device=x.device)[..., :dim]
    state = torch.full((case.rows, case.heads, dim, case.state), math.nan, device=x.device)
    cuts = min(640 // (case.rows * case.heads + 1), case.steps // 512)
    work = dict(cuts=torch.full((case.rows, cuts, case.heads, dim, case.state), math.nan, device=x.device),
                decays=torch.full((case.rows, cuts, case.heads), math.nan, device=x.device))
    _C.ssd(y, state, **work, **inputs, **case.numbers())
    return y, state


def check_results(case, inputs, y, state):
    inputs = {name: t if t is None else t.cpu() for name, t in inputs.items()}
    relative = 0.0
    if inputs["x"].numel():        # a weight's exponent is the difference of two sums of dt a over a chunk; e^-150 is nothing
        dt = steps_of(inputs["dt"], inputs["dt_bias"], **case.numbers()).double()
        longest = (dt * -inputs["a"]).unfold(1, min(CHUNK, case.steps), 1).sum(3).clamp(max=150).max()
        relative = 2**-23 * (16 + float(longest))
    # The chunks' sums are added to the state one after the other; tensor cores make a chunk's of four, and cut off what
    # float32 does not hold.
    parts = -(-case.steps // CHUNK) * (4 if y.is_cuda else 1) * 2**-23
    wanted = plain(inputs, case.numbers()), exact(inputs, case.numbers())
    for name, found, rounded, right in zip(("y", "state"), (y, state), *wanted):
        check_error(name, found.cpu(), rounded, right, 2, (relative + parts * (name == "state"), 2**-22))


WHERE = [(case, device) for case in AWKWARD + ODD for device in ("cpu", "cuda")]
WHERE = [pytest.param(*where, marks=pytest.mark.gpu) if where[1] == "cuda" else where for where in WHERE]


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
