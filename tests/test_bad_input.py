"""Bad input at the public functions, one test per row of docs/bad_inputs.md.
The raw layer's and the mock driver's: tests/runtime."""

import math
import mmap
import sys
import threading

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import margay as mg
import reference
from cases import DEVICES, AttentionCase, attention_inputs, check_error, exact_attention
from margay import _C
from mocked import Fake
from refusals import Wrapped, refused, run_python, tensors


def qkv(**options):
    return tensors((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 64), **options)


@pytest.mark.parametrize("compiled", (False, True))
def test_bad_01_dtype(compiled):
    attention, matmul = (torch.compile(f, fullgraph=True, backend="eager") if compiled else f
                         for f in (mg.attention, mg.matmul))
    error = Exception if compiled else TypeError              # dynamo wraps what a fake kernel raises
    q, k, v = qkv()
    refused(error, "attention: k has dtype float32, expected bfloat16 (same as q)", attention, q, k.float(), v)
    refused(error, "attention: v has dtype float16, expected bfloat16 (same as q)", attention, q, k, v.half())
    refused(error, "attention: q has dtype float64, expected bfloat16, float16 or, on the CPU, float32", attention,
            q.double(), k.double(), v.double())
    refused(error, "matmul: b has dtype float32, expected bfloat16 (same as a)", matmul, q[0, 0], k[0, 0].float().T)
    refused(error, "matmul: a has dtype int64, expected", matmul, q[0, 0].long(), k[0, 0].long().T)
    with FakeTensorMode():
        q = torch.empty(1, 2, 3, 64, device="cuda")
        refused(NotImplementedError, "attention: q has dtype float32, which has kernels on the CPU only", mg.attention,
                q, q, q)
    if not compiled:
        refused(TypeError, "attention: q is list, expected torch.Tensor or numpy.ndarray", mg.attention, [1.0], k, v)
        refused(TypeError, "attention: k is ndarray, expected torch.Tensor (same as q)", mg.attention, qkv()[0],
                numpy.zeros(3), v)
        refused(TypeError, "attention: v is Tensor, expected numpy.ndarray (same as q)", mg.attention,
                *[numpy.zeros((1, 1, 2, 8), "float32")] * 2, v)


@pytest.mark.parametrize("change, message", [
    (dict(q=(4, 70, 64)), "attention: q has shape [4, 70, 64], expected 4 dimensions [batch, heads, rows, head dim]"),
    (dict(k=(1, 2, 90, 64)),
     "attention: k has shape [1, 2, 90, 64], expected batch 2 in dimension 0 (same as q, which has shape [2, 4, 70, "
     "64])"),
    (dict(k=(2, 2, 90, 32)), "attention: k has shape [2, 2, 90, 32], expected head dim 64 in dimension 3 (same as q"),
    (dict(v=(2, 4, 90, 64)), "attention: v has shape [2, 4, 90, 64], expected heads 2 in dimension 1 (same as k"),
    (dict(v=(2, 2, 91, 64)), "attention: v has shape [2, 2, 91, 64], expected rows 90 in dimension 2 (same as k"),
    (dict(k=(2, 3, 90, 64), v=(2, 3, 90, 64)), "attention: k has 3 heads, expected a divisor of the 4 heads of q"),
    (dict(k=(2, 0, 90, 64), v=(2, 0, 90, 64)), "attention: k has 0 heads, expected a divisor of the 4 heads of q"),
])
def test_bad_02_shape(change, message):
    shapes = dict(q=(2, 4, 70, 64), k=(2, 2, 90, 64), v=(2, 2, 90, 64)) | change
    refused(ValueError, message, mg.attention, *tensors(*shapes.values()))
    refused(ValueError, message, mg.attention, *(t.float().numpy() for t in tensors(*shapes.values())))


@pytest.mark.parametrize("change, message", [
    (dict(a=(5,)), "matmul: a has shape [5], expected [..., M, K]"),
    (dict(b=(2, 5, 7)), "matmul: b has shape [2, 5, 7], expected 2 dimensions [K, N]"),
    (dict(b=(6, 7)), "matmul: b has shape [6, 7], expected [5, N] (K of a, which has shape [3, 4, 5])"),
    (dict(bias=(6,)), "matmul: bias has shape [6], expected [7] (N of b, which has shape [5, 7])"),
    (dict(out=(4, 7)), "matmul: out has shape [4, 7], expected [3, 4, 7]"),
])
def test_bad_02_matmul_shape(change, message):
    shapes = dict(a=(3, 4, 5), b=(5, 7), bias=(7,), out=(3, 4, 7)) | change
    for kind in (lambda t: t, lambda t: t.float().numpy()):
        a, b, bias, out = map(kind, tensors(*shapes.values()))
        refused(ValueError, message, mg.matmul, a, b, bias=bias, out=out)


def test_bad_02_missing():
    q, k, v = qkv()
    for i in range(3):
        some = [t if i == j else None for j, t in enumerate((q, k, v))]
        message = "attention_backward: dout is missing, expected a tensor, or another of size " + "VHH"[i]
        refused(TypeError, message, _C.attention_bwd_workspace, None, *some, None, None, None)


def test_bad_03_device():
    q, k, v = qkv()
    refused(ValueError, "attention: k is on meta, expected cpu (same as q)", mg.attention, q, k.to("meta"), v)
    refused(ValueError, "matmul: b is on meta, expected cpu (same as a)", mg.matmul, q[0, 0], k[0, 0].T.to("meta"))
    with FakeTensorMode():
        q = torch.empty(2, 4, 70, 64, device="cuda:0", dtype=torch.bfloat16)
        refused(ValueError, "attention: v is on cpu, expected cuda:0 (same as q)", mg.attention, q, q, q.cpu())


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs no GPU, for fake tensors, or two")
def test_bad_04_two_gpus():
    with FakeTensorMode():
        q, k = (torch.empty(2, 4, 70, 64, device=device, dtype=torch.bfloat16) for device in ("cuda:0", "cuda:1"))
        refused(ValueError, "attention: k is on cuda:1, expected cuda:0 (same as q)", mg.attention, q, k, k)
        a, b = (torch.empty(64, 64, device=device, dtype=torch.bfloat16) for device in ("cuda:0", "cuda:1"))
        refused(ValueError, "matmul: b is on cuda:1, expected cuda:0 (same as a)", mg.matmul, a, b)


SPREADS = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "every other": lambda t: torch.stack((t, torch.full_like(t, math.nan)), -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[..., :1].expand(t.shape),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", SPREADS)
def test_bad_06_last_dimension(device, spread):
    """A last dimension that is not contiguous: computed by way of a copy, forward and backward, whichever argument has
    it; explain says so."""
    spread = SPREADS[spread]
    tensors = attention_inputs(AttentionCase(6, 2, 4, 2, 70, 90, 40, 40), device)
    for which in (*range(4), None):
        given = [spread(t) if which in (None, i) else t for i, t in enumerate(tensors)]
        results = gradients(*given)
        assert all(torch.equal(a, b) for a, b in zip(results, gradients(*(t.contiguous() for t in given)))), which
        assert results[0].stride(-1) == 1
        lines = mg.explain(mg.attention, *given[:3]).splitlines()
        assert all((f"  {name} is copied first: its last dimension is not contiguous" in lines) == (which in (None, i))
                   for i, name in enumerate("qkv"))
    q, k, v, _ = map(spread, tensors)
    dense = [t.contiguous() for t in (q, k, v)]
    for options in (dict(window=(9, 3)), dict(softcap=3.0), dict(dropout_p=0.5, dropout_seed=1)):
        assert torch.equal(mg.attention(q, k, v, **options), mg.attention(*dense, **options))
    for compute in (torch.ops.margay.attention,
                    lambda *t: torch.compile(mg.attention, backend="aot_eager")(*t, return_lse=True)):
        out, lse = compute(q, k, v)
        assert torch.equal(out, mg.attention(*dense)) and lse.isfinite().all()
    with FakeTensorMode() as mode:                            # tracing sees the strides that the call gives
        fake = mg.attention(*map(mode.from_tensor, (q, k, v)))
    assert fake.shape == out.shape and fake.stride() == mg.attention(q, k, v).stride()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_06_last_dimension_fp8(device):
    q, k, v = (t.to(torch.float8_e4m3fn) for t in qkv(device=device))
    expected = mg.attention(q, k, v)
    for which in range(3):
        given = [t.mT.contiguous().mT if i == which else t for i, t in enumerate((q, k, v))]
        assert torch.equal(mg.attention(*given), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_06_matrix(device):
    """Strides in neither of the last two dimensions, of a, b and bias; a transposed matrix is read in place."""
    a, b, bias = tensors((70, 40), (40, 90), (90,), device=device)
    expected = mg.matmul(a, b, bias=bias)
    apart = lambda t: torch.full([2 * n for n in t.shape], math.nan, dtype=t.dtype,
                                 device=device)[(slice(None, None, 2),) * t.ndim].copy_(t)
    for given in ((apart(a), b, bias), (a, apart(b), bias), (a, b, apart(bias)), tuple(map(apart, (a, b, bias)))):
        assert torch.equal(mg.matmul(given[0], given[1], bias=given[2]), expected)
        lines = mg.explain(mg.matmul, *given[:2]).splitlines()
        assert all((f"  {name} is copied first: neither of its last two dimensions is contiguous" in lines) ==
                   (t.stride(-1) != 1) for name, t in zip("ab", given))
        leaves = [t.detach().requires_grad_() for t in given]
        dense = [t.detach().contiguous().requires_grad_() for t in given]
        grads = (torch.autograd.grad(mg.matmul(x, y, bias=z), (x, y, z), expected) for x, y, z in (leaves, dense))
        assert all(torch.equal(x, y) for x, y in zip(*grads))
    assert "copied" not in mg.explain(mg.matmul, a, b.mT.contiguous().mT)
    assert torch.equal(mg.matmul(a, b.mT.contiguous().mT, bias=bias), expected)
    refused(ValueError, "matmul: out has shape [70, 90] and strides [360, 2], expected a contiguous last dimension",
            mg.matmul, a, b, out=apart(expected))


def test_bad_06_07_arrays():
    """NumPy: gaps, expanded and negative strides."""
    q, k, v = (t.float().numpy() for t in qkv())
    expected = mg.attention(q, k, v)
    turned = [numpy.ascontiguousarray(t[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1] for t in (q, k, v)]
    assert all(t.strides[3] < 0 for t in turned)
    assert numpy.array_equal(mg.attention(*turned), expected)
    assert numpy.array_equal(mg.attention(*turned, window=(500, 500), sink=numpy.full(4, -numpy.inf, "f")), expected)
    assert "\n  k is copied first: it has negative strides" in mg.explain(mg.attention, q, turned[1], v)
    for spread in (lambda t: numpy.repeat(t, 2, -1)[..., ::2], lambda t: numpy.broadcast_to(t[..., :1], t.shape),
                   lambda t: numpy.asfortranarray(t)):
        given = [spread(t) for t in (q, k, v)]
        assert numpy.array_equal(mg.attention(*given), mg.attention(*map(numpy.ascontiguousarray, given)))
        a, b = given[0][0, 0], given[1][0, 0].T
        assert numpy.array_equal(mg.matmul(a, b, bias=b[0]),
                                 mg.matmul(*map(numpy.ascontiguousarray, (a, b)), bias=numpy.ascontiguousarray(b[0])))
        cache = [numpy.swapaxes(t, 1, 2) for t in given]
        assert numpy.array_equal(mg.attention_decode(*cache), mg.attention_decode(*map(numpy.ascontiguousarray, cache)))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_07_strides(device):
    q, k, v = qkv(device=device)
    one = k[:1].expand(2, -1, -1, -1)
    assert torch.equal(mg.attention(q, one, one), mg.attention(q, one.contiguous(), one.contiguous()))
    # the stride of a dimension of size 1 means nothing
    odd = q[:1].as_strided((1, 4, 70, 64), (3, *q.stride()[1:]))
    assert torch.equal(mg.attention(odd, k[:1], v[:1]), mg.attention(q[:1], k[:1], v[:1]))
    array = numpy.zeros((1, 2, 5, 8), "float32")
    refused(ValueError, "attention: k has shape [1, 2, 5, 8] and strides [80, 40, -8, 1], expected no negative ones",
            _C.attention_fwd, array.copy(), None, array, array[:, :, ::-1], array, 0.5, False)
    refused(ValueError,
            "attention: k has shape [2, 2, 90, 64] and strides [11520, 5760, 1, 90], expected a contiguous last "
            "dimension; call .contiguous() first",
            _C.attention_fwd, torch.empty_like(q), None, q, k.mT.contiguous().mT, v, 0.5, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", (64, 65))
def test_bad_08_alignment(device, dim):
    """An address or a stride that TMA does not take: computed all the same, forward and backward; explain says how."""
    q, k, v, dout = attention_inputs(AttentionCase(3, 2, 4, 2, 70, 90, dim, dim), device)
    expected = gradients(q, k, v, dout)
    wide = [torch.full((*t.shape[:3], dim + 7), math.nan, dtype=t.dtype, device=device) for t in (q, k, v, dout)]
    for w, t in zip(wide, (q, k, v, dout)):
        w[..., 3:3 + dim] = t
    shifted = [w[..., 3:3 + dim] for w in wide]
    assert all(torch.equal(a, b) for a, b in zip(gradients(*shifted), expected))
    assert ("q is copied first: its address or strides" in mg.explain(mg.attention, *shifted[:3])) == (device == "cuda")
    a, b = wide[0][0, 0, :, 3:3 + dim], wide[1][0, 0, :, 3:3 + dim]
    product = mg.matmul(q[0, 0].contiguous(), k[0, 0].contiguous().mT)
    out = torch.full((70, 97), math.nan, dtype=q.dtype, device=device)
    assert torch.equal(mg.matmul(a, b.mT), product) and torch.equal(mg.matmul(a, b.mT, out=out[:, 3:93]), product)
    assert out[:, :3].isnan().all() and out[:, 93:].isnan().all()


def gradients(q, k, v, dout):
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = mg.attention(*leaves, causal=True, deterministic=True)
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def test_bad_09_head_dim():
    q, k, v = tensors((1, 2, 3, 257), (1, 2, 3, 257), (1, 2, 3, 64))
    refused(NotImplementedError, "attention: q has head dim 257, kernels exist up to 256", mg.attention, q, k, v)
    refused(NotImplementedError, "attention: v has head dim 257, kernels exist up to 256", mg.attention, v, v, k)
    refused(ValueError, "attention: q has head dim 0, expected 1 to 256", mg.attention, q[..., :0], k[..., :0], v)
    refused(ValueError, "attention: v has head dim 0, expected 1 to 256", mg.attention, v, v, v[..., :0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", ((0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5)))
def test_bad_10_empty(device, shape):
    batch, heads, rows, kv_rows = shape
    q, k, v = tensors((batch, heads, rows, 64), (batch, heads, kv_rows, 64), (batch, heads, kv_rows, 40), device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = mg.attention(*leaves, return_lse=True)
    assert out.shape == (batch, heads, rows, 40) and lse.shape == (batch, heads, rows)
    for t, grad in zip(leaves, torch.autograd.grad(out.sum() + lse.sum(), leaves)):
        assert grad.shape == t.shape and (grad == 0).all()
    for a, b in (((0, 5), (5, 3)), ((2, 5), (5, 0)), ((3, 0, 5), (5, 7))):
        a, b = tensors(a, b, device=device)
        assert mg.matmul(a, b).shape == (*a.shape[:-1], b.shape[1])


@pytest.mark.parametrize("device", DEVICES)
def test_bad_11_no_keys(device):
    q, k, v = tensors((2, 2, 5, 64), (2, 2, 0, 64), (2, 2, 0, 64), device=device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = mg.attention(*leaves, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves)
    assert (dq == 0).all() and dk.shape == k.shape and dv.shape == v.shape
    a, b, bias = tensors((3, 0), (0, 5), (5,), device=device)
    assert (mg.matmul(a, b) == 0).all()
    assert torch.equal(mg.matmul(a, b, bias=bias, activation="relu"), bias.relu().expand(3, 5))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_12_masked_rows(device):
    case = AttentionCase(4, 1, 2, 2, 200, 70, causal=True)     # rows 0 to 129 see no key
    q, k, v, dout = attention_inputs(case, device)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = mg.attention(*leaves, causal=True, return_lse=True)
    assert (out[:, :, :130] == 0).all() and (lse[:, :, :130] == -math.inf).all() and lse[:, :, 130:].isfinite().all()
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    assert (dq[:, :, :130] == 0).all() and not (dk.isnan().any() or dv.isnan().any())
    _, _, _, dk_visible, dv_visible = exact_attention(case, q[:, :, 130:], k, v, dout[:, :, 130:])
    assert ((dk - dk_visible).abs().max() < 2**-6 * dk_visible.abs().max()
            and (dv - dv_visible).abs().max() < 2**-6 * dv_visible.abs().max())


@pytest.mark.parametrize("device", DEVICES)
def test_bad_13_huge_strides(device):
    """Batches more than 2^31 elements apart."""
    far, shape = 2**31 + 64, (2, 2, 70, 64)
    strides, count = (far, 70 * 64, 64, 1), far + 2 * 70 * 64
    # address space only: a page costs memory when it is written
    if device == "cpu":
        no_reserve = 0x4000
        memory = mmap.mmap(-1, 2 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
        flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    else:
        flat = torch.empty(count, dtype=torch.bfloat16, device=device)
    q, k, v = tensors(shape, shape, shape, device=device)
    far_k = flat.as_strided(shape, strides)
    far_k.copy_(k)
    assert torch.equal(mg.attention(q, far_k, v), mg.attention(q, k, v))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_13_huge_workspace(device):
    """More than 2^31 bytes of accumulators for dq."""
    # where computing that much takes long: a workspace larger than it needs to be
    if device == "cpu":
        q, k, v, dout = tensors(*((1, 1, 70, 64),) * 4)
        memory = mmap.mmap(-1, 2**31 + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        out, lse, grads = torch.empty_like(q), torch.empty(1, 1, 70), [torch.empty_like(t) for t in (q, k, v)]
        _C.attention_fwd(out, lse, q, k, v, 0.125, False)
        _C.attention_bwd(*grads, dout, q, k, v, out, lse, None, torch.frombuffer(memory, dtype=torch.uint8), 0.125,
                         False, False)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        for grad, expected in zip(grads, torch.autograd.grad(mg.attention(*leaves, scale=0.125), leaves, dout)):
            assert torch.equal(grad, expected)
        return
    if torch.cuda.mem_get_info()[1] < 40 << 30:
        pytest.skip("less than 40 GiB of GPU memory")
    g = torch.Generator(device).manual_seed(0)
    q, k, v, dout = (torch.randn(8, 32, 16400, 128, generator=g, device=device, dtype=torch.bfloat16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    whole = torch.autograd.grad(mg.attention(*leaves, causal=True), leaves, dout)
    for b in (0, 7):
        parts = [t.detach()[b:b + 1].requires_grad_() for t in leaves]
        for grad, part in zip(whole, torch.autograd.grad(mg.attention(*parts, causal=True), parts, dout[b:b + 1])):
            assert (grad[b].float() - part[0].float()).norm() <= 2**-8 * part.float().norm()
    del whole, leaves, q, k, v, dout
    # many short sequences, each with room for a whole block
    rows = [torch.randn(44000, 32, 64, generator=g, device=device, dtype=torch.bfloat16) for _ in range(4)]
    leaves = [t.requires_grad_() for t in rows[:3]]
    starts = torch.arange(0, 44001, 40, dtype=torch.int32, device=device)
    packed = torch.autograd.grad(mg.attention_varlen(*leaves, starts, starts, 40, 40), leaves, rows[3])
    dense = [t.detach().view(1100, 40, 32, 64).transpose(1, 2).requires_grad_() for t in leaves]
    for grad, other in zip(packed, torch.autograd.grad(mg.attention(*dense), dense,
                                                       rows[3].view(1100, 40, 32, 64).transpose(1, 2))):
        assert (grad.float() - other.transpose(1, 2).reshape(-1, 32, 64).float()).norm() <= 2**-8 * grad.float().norm()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_14_many_blocks(device):
    """More (batch, head) pairs than the y or z dimension of a grid holds."""
    q, k, v = tensors((700, 100, 1, 8), (700, 100, 3, 8), (700, 100, 3, 8), device=device)
    plain, exact = (reference.attention(*(t.to(dtype) for t in (q, k, v)))[0] for dtype in (q.dtype, torch.float64))
    check_error("out", mg.attention(q, k, v), plain, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_15_overlap(device):
    (a,) = tensors((64, 64), device=device)
    before = a.clone()
    refused(BufferError, "matmul: out is written, but shares memory with a", mg.matmul, a, before, out=a)
    refused(BufferError, "matmul: out is written, but shares memory with b", mg.matmul, before, a, out=a.mT.mT)
    assert torch.equal(a, before)
    halves = torch.cat((a, a), 1)                             # the two halves of one buffer share no memory
    assert torch.equal(mg.matmul(halves[:, :64], before, out=halves[:, 64:]), mg.matmul(a, before))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_16_output_overlaps_itself(device):
    a, b = tensors((64, 64), (64, 64), device=device)
    out = torch.zeros(1, 64, dtype=a.dtype, device=device).expand(64, 64)
    refused(BufferError,
            "matmul: out is written, but with shape [64, 64] and strides [0, 1] its elements may share memory",
            mg.matmul, a, b, out=out)


def test_bad_17_read_only():
    a = numpy.ones((8, 8), "float32")
    out = numpy.zeros((8, 8), "float32")
    out.flags.writeable = False
    with pytest.raises(BufferError, match="matmul: out"):
        mg.matmul(a, a, out=out)
    assert (out == 0).all()
    a.flags.writeable = False
    assert (mg.matmul(a, a) == 8).all()                       # only read: fine


def test_bad_18_gradient():
    q, k, v = (t.requires_grad_() for t in qkv())
    out = torch.empty_like(q)
    _C.attention_fwd(out, None, q, k, v, 0.125, False)         # the raw layer computes on the memory
    assert not out.requires_grad
    assert mg.attention(q, k, v).requires_grad and torch.ops.margay.attention(q, k, v)[0].requires_grad
    for unwanted in (0, 1, 2):                                # a gradient for some of the inputs
        inputs = [t.detach() if i == unwanted else t for i, t in enumerate((q, k, v))]
        wanted = [t for t in inputs if t.requires_grad]
        assert all(g.shape == t.shape for g, t in zip(torch.autograd.grad(mg.attention(*inputs).sum(), wanted), wanted))
    with pytest.raises(NotImplementedError, match="attention: gradients of gradients .* are not implemented"):
        torch.autograd.grad(mg.attention(q, k, v).sum(), q, create_graph=True)[0].sum().backward()


def test_bad_19_in_place():
    q, k, v = (t.requires_grad_() for t in qkv())
    scaled = q * 2
    out = mg.attention(scaled, k, v)
    scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    a = q[0, 0]
    refused(RuntimeError, "matmul: out is given, which supports no gradient, but an argument requires one", mg.matmul,
            a, k[0, 0].mT, out=torch.empty(70, 90, dtype=a.dtype))
    with torch.no_grad():
        out = torch.empty(70, 90, dtype=a.dtype)
        assert mg.matmul(a, k[0, 0].mT, out=out) is out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", (math.nan, math.inf))
def test_bad_20_not_finite(device, value):
    """A value that is not finite reaches the rows that depend on it, and no others."""
    for name, rows in (("q", slice(40, 41)), ("k", slice(40, None)), ("v", slice(40, None))):
        inputs = dict(zip("qkv", attention_inputs(AttentionCase(5, 2, 2, 2, 90, 90), device)))
        inputs[name][1, 1, 40, 7] = value
        # 0 times it in the rows above is NaN by IEEE rules: not looked at
        if name == "v":
            assert not mg.attention(*inputs.values(), causal=True)[1, 1, 40:, 7].isfinite().any()
        else:
            finite = mg.attention(*inputs.values(), causal=True).isfinite().all(3)
            assert finite[0].all() and finite[1, 0].all() and finite[1, 1, :40].all()
            if math.isnan(value):
                assert not finite[1, 1, rows].any()
    leaves = [t.requires_grad_() for t in attention_inputs(AttentionCase(5, 2, 2, 2, 90, 90, layout="gaps"),
                                                           device)[:3]]
    grads = torch.autograd.grad(mg.attention(*leaves, causal=True).sum(), leaves)       # the gaps are NaN
    assert all(g.isfinite().all() for g in grads)


def test_bad_24_device_sizes():
    """Which kernel is taken depends on the multiprocessors that a device has, not on a constant."""
    problem = dict(dtype="bfloat16", gpu=True, m=1024, n=1024, k=512)
    small, large = (mg.explain("matmul", sms=sms, **problem) for sms in (16, 132))
    assert small.splitlines()[0].split(": ")[-1] != large.splitlines()[0].split(": ")[-1]


def test_bad_28_threads():
    """The first calls of a process at once, from several threads."""
    program = """
import threading, torch, margay as mg
q = torch.randn(2, 2, 150, 64, generator=torch.Generator().manual_seed(0))
results, barrier = [None] * 8, threading.Barrier(8)
def call(i):
    barrier.wait()
    for _ in range(5): results[i] = mg.attention(q, q, q, causal=True)
threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert all(torch.equal(r, results[0]) for r in results)
"""
    result = run_python(program)
    assert result.returncode == 0, result.stderr


def test_bad_28_messages():
    """A message belongs to the thread whose call failed."""
    q, k, v = qkv()
    failures = []

    def call(wrong):
        for _ in range(200):
            try:
                mg.matmul(*wrong)
            except ValueError as error:
                failures.append(str(error) == f"matmul: b has size {wrong[1].shape[0]} in dimension 0, expected 64 (K "
                                              "of a)")

    threads = [threading.Thread(target=call, args=((q[0, 0], k[0, 0, :n]),)) for n in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 800 and all(failures)


@pytest.mark.gpu
def test_bad_29_streams():
    """Work goes to the current stream of the tensors' device, behind what is there already."""
    q, k, v = qkv(device="cuda")
    expected = mg.attention(q, k, v)
    late, stream = torch.zeros_like(q), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        out = mg.attention(late, k, v)
        assert not stream.query()                             # nothing waited for the sleep
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_bad_31_graph_capture():
    """The first call of a process inside a capture; the replay computes on new values."""
    program = """
import torch, margay as mg
def inputs(seed):
    torch.manual_seed(seed)
    return [torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
q, k, v, dout = inputs(0)
leaves = [t.requires_grad_() for t in (q, k, v)]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = mg.attention(*leaves, causal=True, deterministic=True)
    grads = torch.autograd.grad(out, leaves, dout)
for seed in (1, 2):
    new = inputs(seed)
    with torch.no_grad():
        for t, n in zip((q, k, v, dout), new): t.copy_(n)
    graph.replay()
    fresh = [t.requires_grad_() for t in new[:3]]
    expected = mg.attention(*fresh, causal=True, deterministic=True)
    assert torch.equal(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(expected, fresh, new[3])))
"""
    result = run_python(program)
    assert result.returncode == 0, result.stderr


def test_bad_33_out_of_memory():
    q = torch.zeros(1, 1, 1, 64).expand(1, 1 << 20, 1 << 20, 64)
    k = torch.zeros(1, 1, 2, 64)
    with pytest.raises(RuntimeError, match="memory"):
        mg.attention(q, k, k)
    assert (mg.attention(k, k, k) == 0).all()


@pytest.mark.parametrize("threads", (1, 3))
def test_bad_33_cpu_memory(threads):
    """No address space for a kernel's stacks and shared memory: MemoryError, and the same call works when there is
    some."""
    result = run_python(f"""
import resource, numpy, margay as mg
from margay import _C
_C.set_num_threads({threads})
a = numpy.random.default_rng(0).standard_normal((2, 3, 200, 64), "f")
out = numpy.empty_like(a)
call = lambda: _C.attention_fwd(out, None, a, a, a, 0.125, True)
for room in (0, 1 << 20, 3 << 20, 5 << 20):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try: call()
    except MemoryError as error: message = str(error)
    else: message = "computed"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(message)
call()
_C.set_num_threads(1)
other = out.copy()
call()
assert (out == other).all()
""")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert (len(lines) == 4 and all(line.startswith("attention: out of memory, the kernel attention_fwd_")
                                    for line in lines)), result.stdout


def test_bad_36_shutdown():
    """Calls while the interpreter ends, and a thread pool that is there when it does."""
    program = """
import atexit, numpy, margay as mg
a = numpy.ones((1, 1, 300, 64), "float32")
class Late:
    def __del__(self, call=mg.attention, a=a): call(a, a, a)
mg.attention(a, a, a)
keep = Late()
atexit.register(lambda: mg.attention(a, a, a))
"""
    result = run_python(program)
    assert result.returncode == 0, result.stderr
    assert "Fatal" not in result.stderr and "Segmentation" not in result.stderr


def test_bad_38_subclasses():
    q, k, v = qkv()
    expected = mg.attention(q, k, v)
    out = mg.attention(q.as_subclass(Wrapped), k, v)
    assert (isinstance(out, Wrapped) and torch.equal(out.as_subclass(torch.Tensor), expected)
            and "margay.attention" in "".join(Wrapped.seen))
    meta = mg.attention(*(t.to("meta") for t in (q, k, v)))
    assert meta.device.type == "meta" and meta.shape == expected.shape
    with FakeTensorMode() as mode:
        fake = mg.attention(*map(mode.from_tensor, (q, k, v)))
    assert fake.shape == expected.shape and fake.stride() == expected.stride()
    refused(TypeError, "attention: k has layout torch.sparse_coo, expected torch.strided", mg.attention, q,
            k.to_sparse(), v)
    refused(TypeError, "matmul: a has layout torch.sparse_coo, expected torch.strided", mg.matmul,
            q[0, 0].float().to_sparse(), k[0, 0].float().T)
    negative = torch.complex(q.float(), q.float()).conj().imag
    assert (negative.is_neg() and torch.equal(mg.attention(negative, k.float(), v.float()),
                                              mg.attention(-q.float(), k.float(), v.float())))
    batched = torch.vmap(mg.attention, in_dims=(0, None, 0))(torch.stack((q, q * 2)), k, torch.stack((v, v)))
    assert torch.equal(batched, torch.stack((expected, mg.attention(q * 2, k, v))))
    parameters = [torch.nn.Parameter(t) for t in (q, k, v)]
    assert torch.equal(mg.attention(*parameters), expected)


@pytest.mark.parametrize("scale", (math.nan, math.inf, -math.inf, 0.0, -0.125, 1e-50))
def test_bad_39_scale(scale):
    q, k, v = qkv()
    message = f"attention: scale is {scale:g}, expected a positive finite number"
    refused(ValueError, message, mg.attention, q, k, v, scale=scale)
    refused(ValueError, message, torch.ops.margay.attention, q, k, v, scale)
    refused(ValueError, message, mg.attention, *(t.float().numpy() for t in (q, k, v)), scale=scale)


def test_bad_39_values():
    q, k, v = qkv()
    refused(ValueError, "matmul: activation is 'tanh', expected one of None, 'relu', 'gelu', 'gelu_tanh', 'silu'",
            mg.matmul, q[0, 0], k[0, 0].T, activation="tanh")
    for window in (4, (4,), (4, 0, 0), (4, "x"), (1.5, 0)):
        refused(TypeError, f"attention: window is {window!r}, expected a pair of integers (left, right)", mg.attention,
                q, k, v, window=window)
    refused(TypeError, "unexpected keyword argument 'windows'", mg.attention, q, k, v, windows=(4, 0))
    refused(ValueError, "explain: op is softmax, expected one of append_kv, attention, attention_decode, ", mg.explain,
            "softmax", q)


def test_bad_02_none():
    """A tensor that is missing, wherever one has to be."""
    for kind, expected in ((lambda t: t, "torch.Tensor"), (lambda t: t.float().numpy(), "numpy.ndarray")):
        q, k, v = map(kind, qkv())
        for options in ({}, dict(window=(3, 3)), dict(dropout_p=0.5)):
            refused(TypeError, f"attention: k is NoneType, expected {expected} (same as q)", mg.attention, q, None, v,
                    **options)
            refused(TypeError, f"attention: v is NoneType, expected {expected} (same as q)", mg.attention, q, k, None,
                    **options)
        refused(TypeError, f"matmul: b is NoneType, expected {expected} (same as a)", mg.matmul, q[0, 0], None)
        refused(TypeError, "explain: 2 tensors are given, expected q, k and v for attention", mg.explain, mg.attention,
                q, k)
        refused(TypeError, "explain: 1 tensors are given, expected a and b for matmul", mg.explain, mg.matmul, q[0, 0])
        refused(TypeError, f"attention: v is NoneType, expected {expected} (same as q)", mg.explain, mg.attention, q, k,
                None)
    refused(TypeError, "attention: q is NoneType, expected torch.Tensor or numpy.ndarray", mg.attention, None, k, v)


def test_bad_02_masked_arrays():
    array = numpy.ones((1, 2, 5, 8), "f")
    masked = numpy.ma.masked_array(array, array > 0)
    for i, name in enumerate("qkv"):
        for options in ({}, dict(window=(2, 0))):
            refused(TypeError, f"attention: {name} is a masked array, whose mask would be ignored", mg.attention,
                    *(masked if i == j else array for j in range(3)), **options)
    refused(TypeError, "attention: sink is a masked array", mg.attention, array, array, array, sink=masked[0, :, 0, 0])
    refused(TypeError, "matmul: b is a masked array", mg.matmul, array[0, 0], masked[0, 0].T)
    refused(TypeError, "without a mask, which would be ignored", _C.matmul, array[0, 0, :, :5].copy(), array[0, 0],
            masked[0, 0].T, None, 0)


def test_bad_39_numbers():
    q, k, v = qkv()
    large = 10**400
    for name in ("scale", "softcap", "dropout_p"):
        refused(ValueError, f"attention: {name} is an integer of 1329 bits, expected a number that float32 can hold",
                mg.attention, q, k, v, **{name: large})
    refused(ValueError, "attention_decode: scale is an integer of 1329 bits", mg.attention_decode,
            *(t.transpose(1, 2) for t in (q, k, v)), scale=large)
    refused(ValueError, "attention: scale is 1e+39, expected a positive finite number", mg.attention, q, k, v,
            scale=1e39)
    for wrong in (["relu"], {}, 1, b"relu"):
        refused(TypeError, f"matmul: activation is {wrong!r}, expected one of None, 'relu'", mg.matmul, q[0, 0],
                k[0, 0].T, activation=wrong)
    refused(TypeError, "dropout_mask: seed is None, expected an integer", mg.dropout_mask, 0.5, None, 1, 1, 2, 2)
    refused(TypeError, "dropout_mask: rows is 1.5, expected an integer", mg.dropout_mask, 0.5, 3, 1, 1, 1.5, 2)
    refused(ValueError, "expected a number that float32 can hold", _C.attention_fwd, torch.empty_like(q), None, q, k, v,
            1e-46, False)
    expected = mg.attention(q, k, v, window=(5, 3))
    for window in (numpy.array((5, 3)), torch.tensor((5, 3)), [5, 3]):       # a pair all the same
        assert torch.equal(mg.attention(q, k, v, window=window), expected)
    for window in (numpy.array((5.0, 3.0)), torch.tensor((5, 3, 1)), numpy.zeros((2, 2), int)):
        refused(TypeError, f"attention: window is {window!r}, expected a pair of integers (left, right)", mg.attention,
                q, k, v, window=window)
    for name in ("sink", "alibi_slopes"):
        refused(TypeError, f"attention: {name} has layout torch.sparse_coo, expected torch.strided", mg.attention, q, k,
                v, **{name: torch.ones(4).to_sparse()})


def test_bad_39_explain():
    """In a process of its own: a division may kill it."""
    result = run_python("""
from margay import _C
names = "d batch heads_q heads_k nq nk m n k page".split()
for op in ("attention_fwd", "attention_bwd", "attention_decode", "append_kv", "matmul"):
    for name in names + ["sms", "features"]:
        for absurd in (-2**63, -1, 2**31, 2**63 - 1):
            try: _C.explain(op, **{"heads_q": 4, "heads_k": 2, "batch": 1, "nq": 1, "nk": 9, "d": 64, name: absurd})
            except (ValueError, OverflowError): continue
            raise SystemExit(f"{op} {name} {absurd}")
    for large in (2**31 - 1, 2**30, 2**20 + 1):
        for gpu in (False, True):
            _C.explain(op, gpu=gpu, splits=3, span=2**63 - 1, **{name: large for name in names})
try: _C.explain("attention_decode", heads_q=-2**63, heads_k=-1, batch=1, nq=1)
except ValueError as error: print(error)
""")
    assert (result.returncode == 0
            and result.stdout == "explain: heads_q is -9223372036854775808, expected 0 to 2^31 - 1\n"), \
        result.stderr + result.stdout


def test_bad_14_more_blocks_than_int_holds():
    """Sizes whose products do not fit are refused, not wrapped."""
    starts, far = torch.zeros(65537, dtype=torch.int32), 1 << 22
    starts[-1] = 64
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 1, 8).expand(1, 1, far, 8)
    features = -1, -1, 0.0, 0.0, 0, None, None, starts, starts, 64, far
    message = ("attention_backward: 2147483648 blocks of keys (65536 packed sequences, 1 heads, 32768 blocks for up to "
               "4194304 keys), at most 2^30 are accepted")
    refused(ValueError, message, _C.attention_bwd_workspace, None, q, k, k, None, None, None, 0.0, False,
            False, *features)
    rows = torch.zeros(far, 1, 8)
    leaves = [t.clone().requires_grad_() for t in (rows[:64], rows, rows)]
    out = mg.attention_varlen(*leaves, starts, starts, 64, far)
    refused(ValueError, message, out.sum().backward)
    # more than torch has numbers for
    wide = lambda *shape, code=2: Fake(shape, [0] * (len(shape) - 1) + [1], device=(1, 0), code=code, bits=32)
    for shape, bad in (((2**20, 2**11, 1, 8), "batch * heads"),
                       ((2**33, 2**33, 1, 8), "expected 0 to 2^31 - 1 in every dimension"),
                       ((1, 1, 2**31, 8), "expected 0 to 2^31 - 1 in every dimension"),
                       ((1, -4, 9, 8), "expected 0 to 2^31 - 1 in every dimension")):
        t = wide(*shape)
        refused(ValueError, bad, _C.attention_bwd_workspace, None, t, t, t)
    options = 0.5, False, -1, -1, 0.0, -1, 0
    for shape, bad in (((2**31 - 1, 2**31 - 1, 2**31 - 1, 8), "expected batch * heads * queries below 2^30"),
                       ((2**33, 2**33, 1, 8), "expected 0 to 2^31 - 1"), ((1, -1, 2, 8), "expected 0 to 2^31 - 1")):
        t = wide(*shape)
        refused(ValueError, bad, _C.attention_decode_workspace, t, t, t, None, None, None, None, None, *options)
    cache, other = torch.zeros(2, 1, 16, 4, 8).unbind(0)
    new, table = wide(2**31 - 1, 2**31 - 1, 4, 8), wide(2**31 - 1, 1, code=0)
    refused(ValueError, "new rows, at most 2^30 are accepted", _C.append_kv, cache, other, new, new, None, table, None,
            0)


@pytest.mark.parametrize("seconds", (dict(left=2**63 - 1, right=5), dict(left=5, right=2**63 - 1),
                                     dict(left=2**63 - 1, right=2**63 - 1)))
def test_bad_39_windows_of_the_raw_layer(seconds):
    q, k, v = qkv()
    results = []
    for left, right in (seconds.values(), [min(n, 500) for n in seconds.values()]):
        results.append(torch.empty_like(q))
        _C.attention_fwd(results[-1], None, q, k, v, 0.125, False, None, left, right)
    assert torch.equal(*results)


def test_bad_40_exporters_that_change_other_arguments():
    """What is viewed is what is there when all Python code has run."""
    result = run_python("""
import numpy, torch
from margay import _C
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 70, 64) for _ in range(3))
class Resizing:
    def __init__(self, t, change): self.t, self.change = t, change
    def __dlpack_device__(self): return self.t.__dlpack_device__()
    def __dlpack__(self, **keywords):
        self.change()
        return self.t.__dlpack__(**keywords)
for _ in range(20):
    out = torch.zeros(1, 2, 70, 64)
    gone = lambda t: Resizing(t, lambda: out.untyped_storage().resize_(0))
    for arguments in ((q, gone(k), v), (q, k, gone(v))):
        try: _C.attention_fwd(out, None, *arguments, 0.125, False)
        except ValueError as error: assert "attention: out has no memory (a null pointer)" in str(error), error
        else: raise SystemExit("out was not seen to be gone")
        out = torch.zeros(1, 2, 70, 64)
class Subclass(numpy.ndarray):
    def __dlpack__(self, **keywords):
        first.resize((1, 2, 0, 64), refcheck=False)
        return super().__dlpack__(**keywords)
result, array = numpy.full((1, 2, 70, 64), 7, "f"), numpy.ones((1, 2, 70, 64), "f")
first = array.copy()
try: _C.attention_fwd(result, None, first, array.view(Subclass), array, 0.125, False)
except ValueError as error: print(error)
assert (result == 7).all()
class Number(float):
    def __float__(self):
        out.untyped_storage().resize_(0)
        return 0.125
try: _C.attention_fwd(out, None, q, k, v, Number(0.125), False)
except ValueError as error: print(error)
""")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0].startswith("attention: out has size 70 in dimension 2, expected 0")


def test_bad_41_isa():
    result = run_python("""
import numpy, margay as mg
a = numpy.ones((4, 4), "f")
for _ in range(2):
    try: mg.matmul(a, a)
    except ValueError as error: print(error)
print(mg.info()["isa"])
try: mg.explain(mg.matmul, a, a)
except ValueError as error: print(error)
""".replace("import numpy", "import os; os.environ['MARGAY_ISA'] = 'garbage'\nimport numpy"))
    message = "the environment's MARGAY_ISA is garbage, expected base, avx2 or avx512"
    first, second, isa, explain = result.stdout.splitlines()
    assert first == second == explain == message and isa.endswith(f" ({message})"), result.stdout + result.stderr


def test_bad_40_capsules():
    """Many calls through __dlpack__ leave neither references nor memory behind."""
    a = numpy.ones((1, 1, 2, 8), "float32")
    references = sys.getrefcount(a)
    for _ in range(2000):
        mg.attention(a, a, a)
    assert sys.getrefcount(a) == references
