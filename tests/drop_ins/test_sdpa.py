"""F.scaled_dot_product_attention on Margay: what it computes, what it leaves to PyTorch, how it is switched."""

import math
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import margay as mg
import reference
from cases import DEVICES, check_error
from margay.drop_ins import fallback, kernel_or_torch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def computed(monkeypatch):
    """The calls that Margay computed; warnings start anew."""
    monkeypatch.setattr(fallback, "_warned", set())
    calls = []
    for name in ("attention", "attention_packed"):
        function = getattr(kernel_or_torch, name)
        monkeypatch.setattr(kernel_or_torch, name, lambda *a, function=function, name=name, **o: calls.append(name) or
                            function(*a, **o))
    return calls


def qkv(device="cpu", dtype=torch.bfloat16, heads=(4, 4), rows=(33, 33), dims=(32, 32), seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = (2, heads[0], rows[0], dims[0]), (2, heads[1], rows[1], dims[0]), (2, heads[1], rows[1], dims[1])
    return [torch.randn(shape, generator=g).to(device, dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ("full", "causal", "gqa", "cross", "causal, more keys",
                                  "values wider", "scale", "key mask", "one key mask", "three dimensions"))
def test_computes(device, case, computed, seed):
    r = random.Random(seed)
    dtype = r.choice((torch.bfloat16, torch.float16) if device == "cuda"
                     else (torch.bfloat16, torch.float16, torch.float32))
    rows = r.choice((1, 17, 33, 65))
    columns = rows + r.choice((1, 13, 40)) if case in ("cross", "causal, more keys") else rows
    inputs = qkv(device, dtype, (4, 2) if case == "gqa" else (2, 2), (rows, columns),
                 (16, 40 if case == "values wider" else 16), seed)
    options, exact_options = {}, {}
    if case.startswith("causal"):
        options["is_causal"] = True
        exact_options["visible"] = torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
    if case == "gqa":
        options["enable_gqa"] = True
    if case == "scale":
        options["scale"] = exact_options["scale"] = 0.21
    if case.endswith("key mask"):
        mask = torch.rand(1 if case.startswith("one") else 2, 1, 1, columns,
                          generator=torch.Generator().manual_seed(seed)) < 0.6
        mask[0] |= torch.arange(columns) == 0
        options["attn_mask"] = exact_options["visible"] = mask.to(device)
    squeeze = (lambda t: t[:, 0]) if case == "three dimensions" else lambda t: t
    dout = torch.randn(inputs[0].shape[:3] + inputs[2].shape[3:],
                       generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with mg.enable_sdpa():
        out = F.scaled_dot_product_attention(*map(squeeze, inputs), **options)
    assert computed == ["attention_packed" if "mask" in case else "attention"]
    gradients = torch.autograd.grad(out, inputs, squeeze(dout))
    results = []
    for precision in (dtype, torch.float64):
        leaves = [t.detach().to(precision).requires_grad_() for t in inputs]
        o, _ = reference.attention(*leaves, **exact_options)
        o = squeeze(o)
        results.append((o.detach(), *torch.autograd.grad(o, leaves, squeeze(dout).to(precision))))
    for name, factor, found, plain, exact in zip(("out", "dq", "dk", "dv"),
                                                 (2, 3, 3, 3), (out.detach(), *gradients), *results):
        check_error(name, found, plain, exact, factor, (2**-18, 2**-18))


BOOL = torch.ones(9, 9, dtype=torch.bool).tril()


@pytest.mark.parametrize("reason, change, options", [
    ("attn_mask", lambda q, k, v: (q, k, v), dict(attn_mask=BOOL)),
    ("attn_mask", lambda q, k, v: (q, k, v), dict(attn_mask=torch.zeros(2, 1, 1, 9))),
    ("dtype float64 on cpu", lambda q, k, v: (q.double(), k.double(), v.double()), dict(is_causal=True)),
    ("a head dim over 256", lambda q, k, v: (q, k, v.repeat(1, 1, 1, 20)), {}),
    ("is_causal with more queries than keys", lambda q, k, v: (q, k[:, :, :5], v[:, :, :5]), dict(is_causal=True)),
    ("batches that are broadcast", lambda q, k, v: (q, k[:1], v[:1]), {}),
    ("5 dimensions", lambda q, k, v: (q[None], k[None], v[None]), {}),
    ("a scale that is not positive", lambda q, k, v: (q, k, v), dict(scale=-0.3)),
])
def test_falls_back(reason, change, options, computed):
    inputs = change(*(t.detach().float() for t in qkv(rows=(9, 9), dims=(16, 16))))
    expected = F.scaled_dot_product_attention(*inputs, **options)
    with mg.enable_sdpa():
        with pytest.warns(mg.FallbackWarning,
                          match=f"^scaled_dot_product_attention: {reason}; computed by PyTorch$") as caught:
            assert torch.equal(F.scaled_dot_product_attention(*inputs, **options), expected)
        assert len(caught) == 1 and caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            F.scaled_dot_product_attention(*inputs, **options)
    assert not computed


@pytest.mark.parametrize("reason, options", [("a scale that float32 cannot hold", dict(scale=math.inf)),
                                             ("a scale that float32 cannot hold", dict(scale=1e39)),
                                             ("a scale that is not positive", dict(scale=math.nan)),
                                             ("a dropout probability of 1", dict(dropout_p=1 - 1e-8))])
def test_numbers_that_only_torch_computes(reason, options, computed):
    inputs = qkv(dtype=torch.float32)
    expected = F.scaled_dot_product_attention(*inputs, **options)
    with mg.enable_sdpa(), pytest.warns(mg.FallbackWarning, match=reason):
        assert torch.allclose(F.scaled_dot_product_attention(*inputs, **options), expected, equal_nan=True)
    assert not computed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", (False, True))
def test_last_dimension_is_not_contiguous(device, masked, computed):
    """What torch takes is computed, forward and backward, whichever tensor has it."""
    tensors = [t.detach() for t in qkv(device)]
    mask = (torch.arange(33, device=device) < torch.tensor([33, 20], device=device)[:, None, None, None]
            if masked else None)

    def run(*given):
        leaves = [t.detach().requires_grad_() for t in given]
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[0])

    for spread in (lambda t: t.mT.contiguous().mT, lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
                   lambda t: t[..., :1].expand(t.shape)):
        for which in (0, 1, 2, None):
            given = [spread(t) if which in (None, i) else t for i, t in enumerate(tensors)]
            with mg.enable_sdpa():
                found, dense = run(*given), run(*(t.contiguous() for t in given))
                # deterministic or not, dq is added up by atomics on a GPU
                assert torch.equal(found[0], dense[0]) and all(torch.allclose(a, b, atol=2**-6 * float(b.abs().max()))
                                                               for a, b in zip(found, dense))
    assert len(computed) == 24


def test_errors_are_torchs(computed):
    q, k, v = qkv()
    with mg.enable_sdpa():
        for inputs, options in (((q, k[..., :8], v), {}), ((q, k[:, :3], v[:, :3]), {}),
                                ((q, k, v), dict(attn_mask=BOOL, is_causal=True)), ((q, k.float(), v), {})):
            with pytest.raises((RuntimeError, ValueError)) as ours:
                F.scaled_dot_product_attention(*inputs, **options)
            with mg_off(), pytest.raises((RuntimeError, ValueError)) as theirs:
                F.scaled_dot_product_attention(*inputs, **options)
            assert str(ours.value) == str(theirs.value)
    assert not computed


class mg_off:
    """PyTorch's own, inside of enable_sdpa."""

    def __enter__(self):
        self.context = sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
        self.context.__enter__()

    def __exit__(self, *exception):
        self.context.__exit__(*exception)


def test_sdpa_kernel_is_obeyed(computed):
    q, k, v = qkv()
    with mg.enable_sdpa():
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
            warnings.simplefilter("error", mg.FallbackWarning)
            F.scaled_dot_product_attention(q, k, v)
        assert not computed
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, v)
    assert computed == ["attention"]


def test_switch(computed):
    q, k, v = qkv()
    imported_before = F.scaled_dot_product_attention

    def count():
        computed.clear()
        imported_before(q, k, v)
        return len(computed)

    assert count() == 0
    one = mg.enable_sdpa()
    assert count() == 1
    with mg.enable_sdpa() as two:
        assert count() == 1
        one.disable()
        one.disable()
        assert count() == 1
    assert count() == 0
    two.disable()
    assert count() == 0
    with pytest.raises(KeyError), mg.enable_sdpa():
        raise KeyError
    assert count() == 0
    tag = torch.compiler.config.cache_key_tag
    with mg.enable_sdpa():
        assert torch.compiler.config.cache_key_tag != tag
    assert torch.compiler.config.cache_key_tag == tag


def test_modes(computed):
    """inference_mode, no_grad, autocast, vmap, export, layers: the call arrives, or PyTorch's answer does."""
    q, k, v = qkv(dtype=torch.float32)
    expected = F.scaled_dot_product_attention(q, k, v)
    with mg.enable_sdpa():
        with torch.inference_mode():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
        with torch.no_grad():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
        with torch.autocast("cpu", torch.bfloat16):
            out = F.scaled_dot_product_attention(q, k, v)
        assert out.dtype == torch.bfloat16 and len(computed) == 3
        torch.testing.assert_close(torch.vmap(F.scaled_dot_product_attention)(q, k, v), expected)
        assert len(computed) == 4
        computed.clear()
        layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        layer(*(torch.randn(2, 9, 32) for _ in range(3)), need_weights=False)
        assert computed == ["attention"]


def test_forward_derivative():
    q, k, v = (t.detach().float() for t in qkv())
    with mg.enable_sdpa(), sdpa_kernel(SDPBackend.MATH):
        out, tangent = torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, k, v), (q,), (torch.ones_like(q),))
    assert torch.isfinite(tangent).all()


def test_dropout(computed):
    q, k, v = (t.detach().float() for t in qkv())
    with mg.enable_sdpa():
        torch.manual_seed(0)
        one = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        torch.manual_seed(0)
        assert torch.equal(one, F.scaled_dot_product_attention(q, k, v, dropout_p=0.4))
        assert not torch.equal(one, F.scaled_dot_product_attention(q, k, v)) and len(computed) == 3


def test_refuses_another_schema(monkeypatch):
    from margay.drop_ins import sdpa

    monkeypatch.setattr(sdpa, "_SCHEMA", "aten::something()")
    with pytest.raises(RuntimeError, match="enable_sdpa: torch .* has aten::scaled_dot_product_attention.*, expected "
                       "aten::something"):
        mg.enable_sdpa()
