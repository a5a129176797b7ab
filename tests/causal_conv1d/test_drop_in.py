"""margay.causal_conv1d's functions with the layouts and arguments of the package causal-conv1d."""

import pytest
import torch
import torch.nn.functional as F

import margay as mg
from cases import DEVICES
from margay.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states


def in_torch(x, weight, bias, initial, silu):
    """[B, C, T] in float64."""
    x, weight = x.double(), weight.double()
    past = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if initial is None else initial.double()
    e = torch.cat([past, x], 2)
    out = F.conv1d(e, weight[:, None], None if bias is None else bias.double(), groups=x.shape[1])
    return F.silu(out) if silu else out, e[..., e.shape[2] - past.shape[2]:]


@pytest.mark.parametrize("channel_last", (False, True))
@pytest.mark.parametrize("states", (False, True))
@pytest.mark.parametrize("w", (2, 3, 4))
@pytest.mark.parametrize("device", DEVICES)
def test_function(device, w, states, channel_last):
    g = torch.Generator().manual_seed(w)
    make = lambda *size: torch.randn(*size, generator=g).to(device, torch.bfloat16)  # noqa: E731
    x = make(2, 50, 40).transpose(1, 2) if channel_last else make(2, 40, 50)
    initial = make(2, w - 1, 40).transpose(1, 2) if states else None
    weight, bias, dout = (torch.randn(40, w, generator=g).to(device), torch.randn(40, generator=g).to(device),
                          make(2, 40, 50))
    inputs = [t for t in (x, weight, bias, initial) if t is not None]
    for t in inputs:
        t.requires_grad_()
    place = torch.empty(2, w - 1, 40, dtype=x.dtype, device=device).transpose(1, 2)
    out, final = causal_conv1d_fn(x, weight, bias, initial_states=initial, return_final_states=True,
                                  final_states_out=place,
                                  activation="silu")
    exact, last = in_torch(x, weight, bias, initial, True)
    assert out.stride() == x.stride() and torch.allclose(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert final is place and torch.equal(final.double(), last)
    found, wanted = torch.autograd.grad(out, inputs, dout), torch.autograd.grad(exact, inputs, dout.double())
    for a, b in zip(found, wanted):
        assert a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_of_sequences(device):
    x = torch.randn(2, 30, 16, device=device).to(torch.float16).transpose(1, 2)
    weight, numbers = (torch.randn(16, 4, device=device),
                       torch.arange(30, device=device, dtype=torch.int32).div(7, rounding_mode="floor"))
    out = causal_conv1d_fn(x, weight, seq_idx=numbers.expand(2, 30), activation="swish")
    parts = [causal_conv1d_fn(part, weight, activation="swish") for part in x.split([7, 7, 7, 7, 2], 2)]
    assert torch.equal(out, torch.cat(parts, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_update(device):
    """Both memory orders of the state, one step without a dimension of its own, weights of another type than x."""
    x, weight = torch.randn(2, 40, 9, device=device).to(torch.bfloat16), torch.randn(40, 4, device=device)
    out, last = in_torch(x, weight.half().float(), None, None, True)
    state = torch.zeros(2, 40, 4, device=device, dtype=x.dtype)
    other = torch.zeros(2, 4, 40, device=device, dtype=x.dtype).transpose(1, 2)
    for t in range(9):
        y = causal_conv1d_update(x[..., t], state, weight.half(), activation="silu")
        assert y.shape == (2, 40) and torch.allclose(y.double(), out[..., t], rtol=1e-2, atol=1e-2)
    z = causal_conv1d_update(x, other, weight.half(), activation="silu")
    assert z.shape == x.shape and torch.allclose(z.double(), out, rtol=1e-2, atol=1e-2)
    assert torch.equal(state, x[..., -4:]) and torch.equal(other, x[..., -4:])


def test_names():
    """The module's name is the function's: both ways of importing give what they promise."""
    import margay.causal_conv1d
    assert callable(mg.causal_conv1d) and margay.causal_conv1d is mg.causal_conv1d
    assert mg.causal_conv1d.causal_conv1d_fn is causal_conv1d_fn
    with pytest.raises(NotImplementedError, match="^activation must be None, silu, or swish$"):
        causal_conv1d_fn(torch.zeros(1, 8, 4), torch.zeros(8, 4), activation="relu")


def test_states_of_packed_sequences():
    x, starts = torch.randn(20, 3), torch.tensor([0, 2, 2, 20])
    states = causal_conv1d_varlen_states(x, starts, 4)
    assert (torch.equal(states[0], torch.cat([torch.zeros(2, 3), x[:2]]).T) and
            not states[1].any() and torch.equal(states[2], x[-4:].T))
