"""The PyTorch forms that the ops' tests compare with."""

import pytest
import torch

from conftest import SEED
from delta_forms import HARD, by_chunks, exactly, hard, recurrence


@pytest.mark.parametrize("channels", (False, True), ids=("gated delta rule", "KDA"))
@pytest.mark.parametrize("name", HARD)
def test_by_chunks_in_float64_is_the_recurrence(name, channels):
    *inputs, state, dout, dlast = hard(name, SEED, 1, 130, 1, 2, 16, 8, channels=channels, rows=3, dtype=torch.float32)
    inputs = [t if t is None else t.double().requires_grad_() for t in (*inputs, state)]
    tensors = [t for t in inputs if t is not None]

    def run(form):
        out, last = form(*inputs[:5], 0.3, inputs[5], (0, 1, 66, 125))
        return out, last, *torch.autograd.grad((out, last), tensors, (dout.double(), dlast.double()))
    right = run(recurrence)
    for found in map(run, (by_chunks, exactly)):
        assert (found[0][:, 125:] == 0).all()
        for x, y in zip(found, right):
            assert x.isfinite().all()
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11 * float(y.detach().abs().max()))
