"""margay.nn.MultiheadAttention against torch.nn.MultiheadAttention."""

import inspect
import random
import warnings

import pytest
import torch

import margay as mg
from cases import DEVICES
from margay.drop_ins import fallback

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def same_precision():
    """PyTorch's plain path multiplies 16-bit operands in float32 unless told not to: an error to compare with is that
    of 16 bits."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())


def layers(device="cpu", dtype=torch.float32, **options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(48, 4, **options).to(device, dtype)
    ours = mg.nn.MultiheadAttention(48, 4, **options).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def test_signature_and_state():
    for name in ("__init__", "forward"):
        found, expected = (inspect.signature(getattr(c, name)).parameters.values()
                           for c in (mg.nn.MultiheadAttention, torch.nn.MultiheadAttention))
        assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected]
    for options in ({}, dict(bias=False), dict(kdim=20, vdim=24), dict(add_bias_kv=True)):
        ours, theirs = layers(**options)
        assert ({n: p.shape for n, p in ours.state_dict().items()} ==
                {n: p.shape for n, p in theirs.state_dict().items()})
        theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", (dict(), dict(bias=False), dict(kdim=20, vdim=24), dict(dropout=0.0)), ids=str)
@pytest.mark.parametrize("layout", ("rows first", "batch first", "no batch"))
@pytest.mark.parametrize("mask", (None, "causal", "padding"))
@pytest.mark.parametrize("same", (True, False))
def test_equals_torch(device, options, layout, mask, same, seed):
    """Within twice the error of torch's, against float64."""
    if same and "kdim" in options:
        same = False
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    r = random.Random(seed)
    rows, batch = r.choice((1, 7, 33)), 3
    columns = rows if same else rows + r.choice((0, 5))
    ours, theirs = layers(device, dtype, batch_first=layout == "batch first", **options)
    exact = layers(device, torch.float64, batch_first=layout == "batch first", **options)[1]
    exact.load_state_dict(theirs.state_dict())
    g = torch.Generator().manual_seed(seed)
    widths = 48, options.get("kdim", 48), options.get("vdim", 48)
    inputs = [torch.randn(batch, n, w, generator=g) for n, w in zip((rows, columns, columns), widths)]
    inputs = [t[0] if layout == "no batch" else t if layout == "batch first" else t.transpose(0, 1) for t in inputs]
    arguments = dict(need_weights=False)
    if mask == "causal":
        arguments.update(attn_mask=torch.ones(rows, columns, dtype=torch.bool, device=device).triu(1), is_causal=True)
    if mask == "padding":
        padding = torch.rand(batch, columns, generator=g) < 0.4
        padding[:, 0] = False
        arguments["key_padding_mask"] = (padding[0] if layout == "no batch" else padding).to(device)
    results = []
    for layer in (ours, theirs, exact):
        leaves = [t.to(device, layer.out_proj.weight.dtype).requires_grad_() for t in (inputs[:1] if same else inputs)]
        q, k, v = leaves * 3 if same else leaves
        with warnings.catch_warnings():
            warnings.simplefilter("error", mg.FallbackWarning)
            out, weights = layer(q, k, v, **arguments)
        assert weights is None
        results.append((out, *torch.autograd.grad(out.square().sum(), (*leaves, *layer.parameters()))))
    for i, (found, plain, right) in enumerate(zip(*results)):
        error, allowed = ((t.double() - right).abs().max() for t in (found, plain))
        assert found.shape == right.shape and error <= 3 * allowed + 1e-5 * (1 + right.abs().max()), i


@pytest.mark.parametrize("reason, options, arguments", [
    ("need_weights is True", {}, {}),
    ("attn_mask without is_causal", {}, dict(need_weights=False, attn_mask=torch.ones(7, 7).triu(1).bool())),
    ("key_padding_mask that is not bool", {}, dict(need_weights=False, key_padding_mask=torch.zeros(3, 7))),
    ("key_padding_mask with is_causal", {}, dict(need_weights=False, key_padding_mask=torch.zeros(3, 7).bool(),
                                                 attn_mask=torch.ones(7, 7).triu(1).bool(), is_causal=True)),
    ("add_bias_kv or add_zero_attn", dict(add_bias_kv=True), dict(need_weights=False)),
    ("add_bias_kv or add_zero_attn", dict(add_zero_attn=True), dict(need_weights=False)),
])
def test_falls_back(reason, options, arguments):
    ours, theirs = layers(batch_first=True, **options)
    x = torch.randn(3, 7, 48)
    with pytest.warns(mg.FallbackWarning, match=f"MultiheadAttention: {reason}; computed by PyTorch"):
        found = ours(x, x, x, **arguments)
    expected = theirs(x, x, x, **arguments)
    assert torch.equal(found[0], expected[0]) and (found[1] is expected[1] is None or
                                                   torch.equal(found[1], expected[1]))


def test_refuses():
    ours, _ = layers()
    x = torch.randn(7, 3, 48)
    with pytest.raises(RuntimeError, match="is_causal is True and attn_mask is None"):
        ours(x, x, x, need_weights=False, is_causal=True)


def test_dropout():
    ours, _ = layers(dropout=0.5)
    x = torch.randn(7, 3, 48)
    assert not torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])


def test_inside_torchs_encoder():
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(48, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(3, 7, 48)
    expected = encoder(x)
    ours = mg.nn.MultiheadAttention(48, 4, batch_first=True)
    ours.load_state_dict(encoder.self_attn.state_dict())
    encoder.self_attn = ours
    torch.testing.assert_close(encoder(x), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_last_dimension_is_not_contiguous(device):
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    ours, _ = layers(device, torch.bfloat16, batch_first=True)
    layer = mg.nn.Attention(48, 4).to(device, torch.bfloat16)
    given = x.mT.contiguous().mT
    assert torch.equal(ours(given, given, given, need_weights=False)[0], ours(x, x, x, need_weights=False)[0])
    assert torch.equal(layer(given), layer(x))
    q, k, v = (torch.randn(2, 4, 9, 12, generator=torch.Generator().manual_seed(i)).to(device, torch.bfloat16)
               for i in range(3))
    assert torch.equal(layer.attend(*(t.mT.contiguous().mT for t in (q, k, v))), layer.attend(q, k, v))
