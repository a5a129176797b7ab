"""Bad input at attention's features, packed sequences, decoding and the flash-attn functions; rows of
docs/bad_inputs.md, as in tests/test_bad_input.py."""

import math
import re

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import margay as mg
from cases import DEVICES
from margay import _C, flash_attn, flash_attn_interface
from margay.drop_ins import torch_attention
from margay.families.attention.attention import check_starts
from refusals import Wrapped, refused, run_python, tensors

INT32 = dict(dtype=torch.int32)


def qkv(**options):
    return tensors((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 64), **options)


def packed(device="cpu", dtype=torch.bfloat16):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"""
    return [*tensors((100, 4, 64), (120, 2, 64), (120, 2, 64), device=device, dtype=dtype),
            torch.tensor([0, 30, 100], device=device, **INT32),
            torch.tensor([0, 50, 120], device=device, **INT32), 70, 70]


def decode(device="cpu", dtype=torch.bfloat16):
    """q, k_cache, v_cache"""
    return tensors((2, 1, 4, 64), (3, 80, 2, 64), (3, 80, 2, 64), device=device, dtype=dtype)


def append(device="cpu"):
    """k_cache, v_cache, k, v"""
    return tensors((3, 80, 2, 64), (3, 80, 2, 64), (2, 1, 2, 64), (2, 1, 2, 64), device=device)


def numbers(*values, device="cpu"):
    return torch.tensor(values, device=device, **INT32)


def with_argument(arguments, i, value):
    return [value if i == j else t for j, t in enumerate(arguments)]


@pytest.mark.parametrize("compiled", (False, True))
def test_bad_01_attention_dtype(compiled):
    if compiled:
        torch._dynamo.reset()
    wrap = (lambda f: torch.compile(f, fullgraph=True, backend="eager")) if compiled else lambda f: f
    error = Exception if compiled else TypeError
    e4m3, unknown = torch.float8_e4m3fn, "expected bfloat16, float16 or, on the CPU, float32"
    attention, varlen, generation, grow = map(wrap,
                                              (mg.attention, mg.attention_varlen, mg.attention_decode, mg.append_kv))
    for dtype, name in ((torch.float8_e5m2, "float8_e5m2"), (torch.int8, "int8"), (torch.float64, "float64")):
        refused(error, f"attention: q has dtype {name}, {unknown}", attention, *(t.to(dtype) for t in qkv()),
                window=(3, 3))
        refused(error, f"attention: q has dtype {name}, {unknown}", varlen, *(t.to(dtype) for t in packed()[:3]),
                *packed()[3:])
        refused(error, f"attention_decode: q has dtype {name}, {unknown}", generation, *(t.to(dtype) for t in decode()))
        refused(error, f"append_kv: k_cache has dtype {name}, {unknown}", grow, *(t.to(dtype) for t in append()),
                cache_seqlens=3)
    refused(error, "attention: k has dtype float16, expected bfloat16 (same as q)", varlen,
            *with_argument(packed(), 1, packed()[1].half()))
    refused(error, "attention_decode: k_cache has dtype float16, expected bfloat16 (same as q)", generation,
            *with_argument(decode(), 1, decode()[1].half()))
    refused(error, "append_kv: k has dtype float16, expected bfloat16 (same as k_cache)", grow,
            *with_argument(append(), 2, append()[2].half()), cache_seqlens=3)
    for name in ("sink", "alibi_slopes"):
        for dtype in (torch.int32, torch.bool, torch.complex64, e4m3):
            refused(error, f"{name} is a tensor of dtype {str(dtype)[6:]}, expected a float32 tensor", attention,
                    *qkv(), **{name: torch.zeros(4).to(dtype)})
            refused(error, f"attention_decode: {name} is a tensor of", generation, *decode(),
                    **{name: torch.zeros(4).to(dtype)})


def test_bad_01_attention_kind():
    for wrong, kind in (([0.0] * 4, "list"), (0.5, "float"), (numpy.zeros(4, "f"), "ndarray")):
        for name in ("sink", "alibi_slopes"):
            refused(TypeError, f"attention: {name} is {kind}, expected a float32 tensor", mg.attention, *qkv(),
                    **{name: wrong})
            refused(TypeError, f"attention_decode: {name} is {kind}, expected a float32 tensor", mg.attention_decode,
                    *decode(), **{name: wrong})
    for i, name in enumerate(("q", "k", "v")):
        refused(TypeError, f"attention: {name} is list, expected", mg.attention, *with_argument(qkv(), i, [1]),
                window=(3, 3))
        refused(TypeError, f"flash_attn_func: {name} is list, expected torch.Tensor", flash_attn.flash_attn_func,
                *with_argument(qkv(), i, [1]))
        refused(TypeError, f"flash_attn_func: {name} is list, expected torch.Tensor",
                flash_attn_interface.flash_attn_func, *with_argument(qkv(), i, [1]))
    for i, name in enumerate(("q", "k_cache", "v_cache")):
        refused(TypeError, f"attention_decode: {name} is list, expected", mg.attention_decode,
                *with_argument(decode(), i, [1]))
    for i, name in enumerate(("k_cache", "v_cache", "k", "v")):
        refused(TypeError, f"append_kv: {name} is list, expected", mg.append_kv, *with_argument(append(), i, [1]),
                cache_seqlens=3)
    for i, name in enumerate(("k", "v"), 1):
        for wrong, kind in ((numpy.zeros((120, 2, 64), "f"), "ndarray"), (None, "NoneType")):
            refused(TypeError, f"attention: {name} is {kind}, expected torch.Tensor (same as q)", mg.attention_varlen,
                    *with_argument(packed(), i, wrong))
    for i, name in enumerate(("k_cache", "v_cache"), 1):
        refused(TypeError, f"attention_decode: {name} is NoneType, expected torch.Tensor (same as q)",
                mg.attention_decode, *with_argument(decode(), i, None))
    for i, name in enumerate(("v_cache", "k", "v"), 1):
        refused(TypeError, f"append_kv: {name} is NoneType, expected torch.Tensor (same as k_cache)", mg.append_kv,
                *with_argument(append(), i, None), cache_seqlens=3)
    array = decode(dtype=torch.float32)[0].numpy()
    refused(TypeError, "attention_decode: k_cache is Tensor, expected numpy.ndarray (same as q)", mg.attention_decode,
            array, *decode()[1:])
    refused(TypeError, "flash_attn_qkvpacked_func: qkv is NoneType, expected torch.Tensor",
            flash_attn.flash_attn_qkvpacked_func, None)


def test_bad_02_attention_shape():
    for wrong in ((3,), (2, 4)):
        refused(ValueError, "attention: sink has", mg.attention, *qkv(), sink=torch.zeros(wrong))
    refused(ValueError, "attention: alibi_slopes has size 3 in dimension 1, expected 4 (H of q)", mg.attention, *qkv(),
            alibi_slopes=torch.zeros(3))
    for wrong in ((), (1, 2, 4)):
        refused(ValueError,
                f"attention: alibi_slopes has shape {list(wrong)}, expected [heads of q] or [batch, heads of q]",
                mg.attention, *qkv(), alibi_slopes=torch.zeros(wrong))
        refused(ValueError, f"attention_decode: alibi_slopes has shape {list(wrong)}, expected", mg.attention_decode,
                *decode(), alibi_slopes=torch.zeros(wrong))
    varlen = packed()
    for i, shape, message in ((0, (4, 100, 4, 64), "attention: q has shape [4, 100, 4, 64], expected 3 dimensions"),
                              (0, (100, 3, 64), "attention: k has 2 heads, expected a divisor of the 3 heads of q"),
                              (1, (120, 2, 32), "attention: k has shape [1, 2, 120, 32], expected head dim 64"),
                              (2, (90, 2, 64), "attention: v has shape [1, 2, 90, 64], expected rows 120")):
        refused(ValueError, message, mg.attention_varlen, *with_argument(varlen, i, torch.zeros(shape).bfloat16()))
    for i, shape, message in ((0, (2, 4, 64), "attention_decode: q has shape [2, 4, 64], expected 4 dimensions"),
                              (1, (80, 2, 64),
                               "attention_decode: k_cache has shape [80, 2, 64], expected 4 dimensions"),
                              (2, (3, 80, 2, 32),
                               "attention_decode: v_cache has size 32 in dimension 3, expected 64 (K of q)"),
                              (2, (3, 50, 2, 64),
                               "attention_decode: v_cache has size 50 in dimension 1, expected 80 (ROWS of k_cache)"),
                              (1, (3, 80, 0, 64),
                               "attention_decode: v_cache has size 2 in dimension 2, expected 0 (HK of")):
        arguments = with_argument(decode(), i, torch.zeros(shape).bfloat16())
        refused(ValueError, message, mg.attention_decode, *arguments)
        refused(ValueError, message, mg.attention_decode, *(t.float().numpy() for t in arguments))
    for i, shape, message in ((2, (2, 2, 64), "append_kv: k has shape [2, 2, 64], expected 4 dimensions"),
                              (2, (2, 1, 3, 64),
                               "append_kv: k has size 3 in dimension 2, expected 2 (HK of k_cache)"),
                              (3, (2, 2, 2, 64), "append_kv: v has size 2 in dimension 1, expected 1 (NEW of k)")):
        refused(ValueError, message, mg.append_kv, *with_argument(append(), i, torch.zeros(shape).bfloat16()),
                cache_seqlens=3)
    refused(ValueError,
            "flash_attn_qkvpacked_func: qkv has shape [2, 5, 2, 4, 64], expected [batch, rows, 3, heads, head dim]",
            flash_attn.flash_attn_qkvpacked_func, torch.zeros(2, 5, 2, 4, 64))
    refused(ValueError,
            "flash_attn_varlen_kvpacked_func: kv has shape [9, 3, 4, 64], expected [rows, 2, heads, head dim]",
            flash_attn.flash_attn_varlen_kvpacked_func, torch.zeros(9, 4, 64), torch.zeros(9, 3, 4, 64), numbers(0, 9),
            numbers(0, 9), 9, 9)


def test_bad_03_04_attention_device():
    """Also where one argument is on the meta device: its operator would return a tensor without values."""
    meta = lambda t: t.to("meta")
    for name, t in (("sink", torch.zeros(4)), ("alibi_slopes", torch.zeros(4))):
        refused(ValueError, f"attention: {name} is on meta, expected cpu (same as q)", mg.attention, *qkv(),
                **{name: meta(t)})
        refused(ValueError, f"attention_decode: {name} is on meta, expected cpu (same as q)", mg.attention_decode,
                *decode(), **{name: meta(t)})
    for i, name in enumerate(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")):
        message = "expected meta" if i == 0 else f"attention: {name} is on meta, expected cpu (same as q)"
        refused(ValueError, message, mg.attention_varlen, *with_argument(packed(), i, meta(packed()[i])))
    for name in ("cache_seqlens", "cache_batch_idx"):
        refused(ValueError, f"attention_decode: {name} is on meta, expected cpu", mg.attention_decode, *decode(),
                **{name: meta(numbers(1, 2))})
    refused(ValueError, "attention_decode: v_cache is on meta, expected cpu", mg.attention_decode,
            *with_argument(decode(), 2, meta(decode()[2])))
    for i, name in enumerate(("k_cache", "v_cache", "k", "v")[1:], 1):
        refused(ValueError, f"append_kv: {name} is on meta, expected cpu (same as k_cache)", mg.append_kv,
                *with_argument(append(), i, meta(append()[i])), cache_seqlens=3)
    with FakeTensorMode():
        cuda = lambda arguments, index=0: [t.to(f"cuda:{index}") if isinstance(t, torch.Tensor) else t
                                           for t in arguments]
        refused(ValueError, "attention: cu_seqlens_q is on cpu, expected cuda:0", mg.attention_varlen,
                *cuda(packed()[:3]), *packed()[3:])
        refused(ValueError, "attention_decode: cache_seqlens is on cpu, expected cuda:0", mg.attention_decode,
                *cuda(decode()), cache_seqlens=numbers(1, 2))
        if torch.cuda.device_count() != 1:   # with one, torch refuses the second itself
            refused(ValueError, "attention: sink is on cuda:1, expected cuda:0", mg.attention, *cuda(qkv()),
                    sink=torch.zeros(4, device="cuda:1"))
            refused(ValueError, "append_kv: k is on cuda:1, expected cuda:0", mg.append_kv, *cuda(append()[:2]),
                    *cuda(append()[2:], 1), cache_seqlens=3)


@pytest.mark.gpu
def test_bad_03_attention_device_on_gpu():
    q, k, v, starts_q, starts_k, *longest = packed("cuda")
    refused((TypeError, ValueError), "cu_seqlens_q is on", mg.attention_varlen, q, k, v, starts_q.cpu(), starts_k,
            *longest)
    refused((TypeError, ValueError), "sink is on", mg.attention, *qkv(device="cuda"), sink=torch.zeros(4))
    refused((TypeError, ValueError), "cache_seqlens is on", mg.attention_decode, *decode("cuda"),
            cache_seqlens=numbers(1, 2))
    refused((TypeError, ValueError), "is on", mg.append_kv, *append("cuda")[:2], *append()[2:], cache_seqlens=3)
    assert mg.attention_varlen(q, k, v, starts_q, starts_k, *longest).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_06_07_attention_strides(device):
    contiguous = "expected a contiguous last dimension; call .contiguous() first"
    spread = lambda t: t.mT.contiguous().mT
    for i in range(3):
        arguments = packed(device)
        assert torch.equal(mg.attention_varlen(*with_argument(arguments, i, spread(arguments[i]))),
                           mg.attention_varlen(*arguments))
        arguments = decode(device)
        given = with_argument(arguments, i, spread(arguments[i]))
        for options in ({}, dict(num_splits=3, cache_seqlens=numbers(70, 33, device=device))):
            assert torch.equal(mg.attention_decode(*given, **options), mg.attention_decode(*arguments, **options))
            name = ("q", "k_cache", "v_cache")[i]
            assert [line for line in mg.explain(mg.attention_decode, *given, **options).splitlines()
                    if "copied" in line] == [
f"  {name} is copied first: its last dimension is not contiguous"]
    pages, values = tensors((6, 16, 2, 64), (6, 16, 2, 64), device=device, seed=3)
    table = numbers(4, 2, 5, 0, 1, 3, device=device).view(2, 3)
    q = decode(device)[0]
    assert torch.equal(mg.attention_decode(q, pages, values, page_table=spread(table)),
                       mg.attention_decode(q, pages, values, page_table=table))
    for i in (2, 3):
        arguments, others = append(device), append(device)
        mg.append_kv(*with_argument(arguments, i, spread(arguments[i])), cache_seqlens=3)
        mg.append_kv(*others, cache_seqlens=3)
        assert torch.equal(arguments[0], others[0]) and torch.equal(arguments[1], others[1])
    for i, name in enumerate(("k_cache", "v_cache")):         # which is written
        refused(ValueError, f"append_kv: {name} has shape", mg.append_kv,
                *with_argument(append(device), i, spread(append(device)[i])), cache_seqlens=3)
        refused(ValueError, contiguous, mg.append_kv, *with_argument(append(device), i, spread(append(device)[i])),
                cache_seqlens=3)
    refused(ValueError, contiguous, mg.append_kv, *(spread(t) if i < 3 else t for i, t in enumerate(append(device))),
            cache_seqlens=3)
    arrays = [t.numpy()[..., ::-1] for t in decode(dtype=torch.float32)]
    assert numpy.array_equal(mg.attention_decode(*arrays), mg.attention_decode(*map(numpy.ascontiguousarray, arrays)))
    # Starts with gaps between them and expanded inputs are read in place or copied: never refused, never misread.
    q, k, v, starts_q, starts_k, *longest = packed(device)
    gaps = torch.stack((starts_q, torch.full_like(starts_q, 99)), 1)[:, 0]
    assert torch.equal(mg.attention_varlen(q, k, v, gaps, starts_k, *longest),
                       mg.attention_varlen(q, k, v, starts_q, starts_k, *longest))
    one = torch.ones(1, device=device)
    for call, arguments in ((mg.attention, qkv(device=device)), (mg.attention_decode, decode(device))):
        for options in (dict(sink=one.expand(4)), dict(alibi_slopes=one.expand(4)),
                        dict(alibi_slopes=one.expand(2, 4))):
            dense = {name: t.contiguous() for name, t in options.items()}
            assert torch.equal(call(*arguments, **options), call(*arguments, **dense))
    q, k, v = decode(device)
    wide = [t[:1].expand(3, -1, -1, -1) for t in (k, v)]
    assert torch.equal(mg.attention_decode(q, *wide), mg.attention_decode(q, *(t.contiguous() for t in wide)))
    cache, other, *_ = append(device)
    rows = [t.expand(2, 1, 2, 64) for t in tensors((1, 1, 2, 64), (1, 1, 1, 64), device=device)]
    mg.append_kv(cache, other, *rows, cache_seqlens=3)
    assert torch.equal(cache[:2, 3:4], rows[0]) and torch.equal(other[:2, 3:4], rows[1])


def test_bad_09_attention_head_dim():
    for dim, error in ((257, NotImplementedError), (0, (NotImplementedError, ValueError))):
        wide = lambda *shape: torch.zeros(*shape, dim).bfloat16()
        refused(error, "head dim", mg.attention, wide(1, 2, 5), wide(1, 2, 5), wide(1, 2, 5), window=(3, 3))
        refused(error, "head dim", mg.attention_varlen, wide(5, 2), wide(5, 2), wide(5, 2), numbers(0, 5),
                numbers(0, 5), 5, 5)
        refused(error, "head dim", mg.attention_decode, wide(1, 1, 2), wide(1, 5, 2), wide(1, 5, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_10_11_attention_empty(device):
    q, k, v = qkv(device=device)
    sink = torch.ones(4, device=device)
    out, lse = mg.attention(q[:0], k[:0], v[:0], sink=sink, return_lse=True)
    assert out.shape == (0, 4, 70, 64) and lse.shape == (0, 4, 70)
    assert mg.attention(q[:, :0], k[:, :0], v[:, :0], sink=sink[:0]).shape == (2, 0, 70, 64)
    out, lse = mg.attention(q, k[:, :, :0], v[:, :, :0], sink=sink, return_lse=True)
    assert (out == 0).all() and (lse == 1).all()                     # the sink is all that the row has
    q, k, v, *_ = packed(device)
    none, zeros = numbers(0, device=device), numbers(0, 0, 0, device=device)
    # no sequence: its rows are not computed
    assert mg.attention_varlen(q, k, v, none, none, 0, 0).shape == q.shape
    assert mg.attention_varlen(q[:0], k[:0], v[:0], zeros, zeros, 0, 0).shape == (0, 4, 64)
    out, lse = mg.attention_varlen(q, k[:0], v[:0], numbers(0, 30, 100, device=device), zeros, 70, 0, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    q, k, v = decode(device)
    assert (mg.attention_decode(q[:0], k, v).shape == (0, 1, 4, 64)
            and mg.attention_decode(q[:, :0], k, v).shape == (2, 0, 4, 64))
    assert mg.attention_decode(q[:, :, :0], k[:, :, :0], v[:, :, :0]).shape == (2, 1, 0, 64)
    for options in (dict(cache_seqlens=0), dict(cache_seqlens=numbers(0, 0, device=device))):
        out, lse = mg.attention_decode(q, k, v, return_lse=True, **options)
        assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = mg.attention_decode(q, k[:, :0], v[:, :0], sink=sink, return_lse=True)
    assert (out == 0).all() and (lse == 1).all()
    refused(ValueError,
            "attention_decode: B = 2 (dimension 0 of q), CACHES = 0 (dimension 0 of k_cache), page_table is "
            "missing, cache_batch_idx is missing, expected k_cache with a cache for each sequence",
            mg.attention_decode, q, k[:0], v[:0])
    cache, other, new, _ = append(device)
    before = cache.clone()
    for some in (new[:0], new[:, :0]):
        mg.append_kv(cache, other, some, some.clone(), cache_seqlens=3)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("device", DEVICES)
def test_bad_15_16_17_append_outputs(device):
    cache, other, k, v = append(device)
    before = cache.clone()
    refused(BufferError, "append_kv: k_cache is written, but shares memory with v_cache", mg.append_kv, cache, cache, k,
            v, cache_seqlens=3)
    refused(BufferError, "append_kv: k_cache is written, but shares memory with k", mg.append_kv, cache, other,
            cache[:2, 3:4], v, cache_seqlens=3)
    refused(BufferError, "its elements may share memory", mg.append_kv, cache[:1].expand(3, -1, -1, -1), other, k, v,
            cache_seqlens=3)
    read_only = numpy.zeros((3, 80, 2, 64), "f")
    read_only.flags.writeable = False
    refused(BufferError, "append_kv: k_cache is written, but its memory is read-only", mg.append_kv, read_only,
            numpy.zeros_like(read_only), *[numpy.ones((2, 1, 2, 64), "f")] * 2, cache_seqlens=3)
    assert torch.equal(cache, before) and (read_only == 0).all()


def test_bad_18_attention_gradient():
    """What has no gradient says so instead of losing one."""
    wanted = lambda t: t.clone().requires_grad_()
    slopes = torch.ones(4).requires_grad_()
    refused(NotImplementedError, "attention: alibi_slopes requires a gradient, which is not computed", mg.attention,
            *qkv(), alibi_slopes=slopes)
    refused(NotImplementedError, "attention: alibi_slopes requires", flash_attn.flash_attn_func,
            *(t.transpose(1, 2) for t in qkv()), alibi_slopes=slopes)
    refused(NotImplementedError, "attention_decode: an argument requires a gradient", mg.attention_decode,
            *with_argument(decode(), 0, wanted(decode()[0])))
    refused(NotImplementedError, "append_kv: an argument requires a gradient", mg.append_kv,
            *with_argument(append(), 2, wanted(append()[2])), cache_seqlens=3)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            assert not mg.attention(*qkv(), alibi_slopes=slopes).requires_grad
            assert not mg.attention_decode(*with_argument(decode(), 0, wanted(decode()[0]))).requires_grad
            assert mg.attention_varlen(*packed(), softcap=3.0).isfinite().all()
            cache, other, k, v = append()                              # tensors of inference mode may be written in it
            mg.append_kv(cache, other, k, v, cache_seqlens=3)
            assert torch.equal(cache[:2, 3:4], k)


STARTS = [
    ("q", (5, 30, 100), "attention: cu_seqlens_q[0] is 5, expected 0"),
    ("q", (-5, 30, 100), "attention: cu_seqlens_q[0] is -5, expected 0"),
    ("q", (0, 60, 30),
     "attention: cu_seqlens_q[2] is 30, expected 60 (the one before) to 100 (the rows that there are)"),
    ("q", (0, -2**31, 100),
     "attention: cu_seqlens_q[1] is -2147483648, expected 0 (the one before) to 100 (the rows that there are)"),
    ("q", (0, 30, 100_000),
     "attention: cu_seqlens_q[2] is 100000, expected 30 (the one before) to 100 (the rows that there are)"),
    ("k", (0, 50, 2**31 - 1),
     "attention: cu_seqlens_k[2] is 2147483647, expected 50 (the one before) to 120 (the rows that there are)"),
    ("q", (0, 5, 100), "attention: max_seqlen_q is 70, expected at least 95 (rows of sequence 1)"),
    ("k", (0, 100, 120), "attention: max_seqlen_k is 70, expected at least 100 (rows of sequence 0)"),
]


@pytest.mark.parametrize("which, starts, message", STARTS)
@pytest.mark.parametrize("kind", ("torch", "numpy", "operator", "gradient", "flash_attn"))
def test_bad_21_starts(which, starts, message, kind):
    """On the CPU every start is looked at, before anything is written."""
    arguments = with_argument(packed(), 3 + (which == "k"), numbers(*starts))
    call = mg.attention_varlen
    if kind == "numpy":
        arguments = [t.numpy() if isinstance(t, torch.Tensor) else t
                     for t in (*(t.float() for t in arguments[:3]), *arguments[3:])]
    if kind == "gradient":
        arguments[0].requires_grad_()
    if kind == "flash_attn":
        call = flash_attn.flash_attn_varlen_func
    if kind == "operator":
        q, k, v, starts_q, starts_k, longest_q, longest_k = arguments
        call, arguments = torch.ops.margay.attention_features, [*(t.transpose(0, 1)[None] for t in (q, k, v)), None,
                                                                None, starts_q, starts_k, -1, -1, 0.0, 0.0, longest_q,
                                                                longest_k, None, None, False, False]
    refused(ValueError, message, call, *arguments)


def test_bad_21_starts_of_the_raw_layer():
    q, k, v, starts_q, starts_k, *longest = packed()
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.full_like(q, math.nan)
    features = -1, -1, 0.0, 0.0, 0, None, None, numbers(0, 30, 100_000), starts_k, *longest
    refused(ValueError, "attention: cu_seqlens_q[2] is 100000", _C.attention_fwd, out, None, q, k, v, 0.125, False,
            None, *features)
    size = _C.attention_bwd_workspace(out, q, k, v, q, None, None, 0.125, False, False, *features)
    lse, workspace = torch.zeros(1, 4, 100), torch.zeros(size, dtype=torch.uint8)
    grads = [torch.full_like(t, math.nan) for t in (q, k, v)]
    refused(ValueError, "attention_backward: cu_seqlens_q[2] is 100000", _C.attention_bwd, *grads, out, q, k, v, q, lse,
            None, workspace, 0.125, False, False, *features)
    assert all(t.isnan().all() for t in (out, *grads))


@pytest.mark.parametrize("which, starts, message", STARTS)
def test_bad_21_starts_as_python_checks_them(which, starts, message):
    """What MARGAY_SYNC=1 asks on CUDA says the same."""
    refused(ValueError, message, check_starts, which, list(starts), 100 if which == "q" else 120, 70)
    check_starts("q", [0, 30, 30, 100], 100, 70)


@pytest.mark.parametrize("wild", (2**32 + 5, -2**32 + 5, 2**31, -2**31 - 1, 2**63 - 1))
def test_bad_21_starts_of_64_bits(wild):
    """What int32 cannot hold is not wrapped into something that it can."""
    for i, name in ((3, "cu_seqlens_q"), (4, "cu_seqlens_k")):
        arguments = packed()
        arguments[i] = torch.tensor([0, wild, 20])
        message = f"attention: {name}[1] is {wild}, expected 0 to 2^31 - 1 (int32)"
        refused(ValueError, message, mg.attention_varlen, *arguments)
        arrays = [t.float().numpy() if t.is_floating_point() else t.numpy() for t in arguments[:5]]
        refused(ValueError, message, mg.attention_varlen, *arrays, *arguments[5:])
        # reads no value: the nearest number that there is
        compiled = torch.compile(mg.attention_varlen, fullgraph=True, backend="eager")
        refused(Exception, f"attention: {name}[1] is {2**31 - 1 if wild > 0 else -2**31}, expected 0 (the one before)",
                compiled, *arguments)


@pytest.mark.gpu
def test_bad_21_starts_on_gpu():
    """MARGAY_SYNC=1 refuses what would overwrite other memory."""
    result = run_python("""
import torch, margay as mg
q = torch.zeros(100, 4, 64, device="cuda", dtype=torch.bfloat16)
for starts in (torch.tensor([0, 60, 30], dtype=torch.int32), torch.tensor([0, 2**32 + 5, 20])):
    starts = starts.cuda()
    try: mg.attention_varlen(q, q, q, starts, starts, 70, 70)
    except ValueError as error: print(error)
""".replace("import torch", "import os; os.environ['MARGAY_SYNC'] = '1'\nimport torch"))
    assert "attention: cu_seqlens_q[2] is 30, expected 60" in result.stdout, result.stderr
    assert "attention: cu_seqlens_q[1] is 2147483647, expected 0 (the one before)" in result.stdout, result.stderr


WILD = (-1, 100_000, 2_147_480_000, -2_147_480_000, 6, 7)      # of 6 pages


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("plain", (False, True))
def test_bad_21_pages_lengths_caches(device, plain):
    """Numbers on the device that name nothing: a page or cache that does not exist reads as zeros and takes no writes,
    a length is cut to what there is."""
    module = torch_attention if plain else mg
    q, k, v = decode(device)
    pages, values = tensors((6, 16, 2, 64), (6, 16, 2, 64), device=device, seed=3)
    table = numbers(*WILD, device=device).view(2, 3)
    out, lse = module.attention_decode(q, pages, values, page_table=table, return_lse=True)
    assert (out == 0).all() and torch.allclose(lse, torch.full_like(lse, math.log(48)))
    half = table.clone()
    # one page each; what the table has behind a sequence's end is not read
    half[:, 0] = numbers(4, 2, device=device)
    first = module.attention_decode(q, pages, values, page_table=half, cache_seqlens=16)
    assert torch.equal(first, module.attention_decode(q, pages[[4, 2]], values[[4, 2]]))
    whole, caches = module.attention_decode(q, k, v), numbers(-1, 3, device=device)
    assert (module.attention_decode(q, k, v, cache_batch_idx=caches) == 0).all()
    assert torch.equal(module.attention_decode(q, k, v, cache_seqlens=numbers(100_000, 2**31 - 1, device=device)),
                       whole)
    out, lse = module.attention_decode(q, k, v, cache_seqlens=numbers(-3, -2**31, device=device), return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    for options, row in ((dict(page_table=table, cache_seqlens=20), None),
                         (dict(cache_batch_idx=caches, cache_seqlens=3), None),
                         (dict(cache_seqlens=numbers(-1, -2**31, device=device)), None),
                         (dict(cache_seqlens=numbers(80, 2**31 - 1, device=device)), None),
                         (dict(cache_seqlens=numbers(79, 80, device=device)), 0)):
        cache, other, new, more = append(device)
        if "page_table" in options:
            cache, other = pages.clone(), values.clone()
        elif "cache_batch_idx" not in options:
            # the first of three rows may have a place
            new, more = (t.expand(2, 3, 2, 64).contiguous() for t in (new, more))
        expected = cache.clone(), other.clone()
        if row is not None:
            expected[0][row, 79], expected[1][row, 79] = new[row, 0], more[row, 0]
        module.append_kv(cache, other, new, more, **options)
        assert torch.equal(cache, expected[0]) and torch.equal(other, expected[1])


@pytest.mark.parametrize("device", DEVICES)
def test_bad_21_flash_attn_tables(device):
    """flash-attn's own arguments: pages behind a sequence's last, padding on the left, rows of rotation."""
    q = tensors((7, 4, 64), device=device)[0]
    pages, values = tensors((6, 16, 2, 64), (6, 16, 2, 64), device=device, seed=3)
    table = numbers(4, *WILD[1:3], 2, 5, WILD[3], device=device).view(2, 3)
    starts, rows = numbers(0, 3, 7, device=device), numbers(0, 16, 16 + 20, device=device)
    out = flash_attn.flash_attn_varlen_func(q, pages, values, starts, rows, 4, 20, block_table=table)
    k, v = (torch.cat((t[4], t[2], t[5, :4])) for t in (pages, values))
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(q, k, v, starts, rows, 4, 20))
    q, k, v = decode(device)
    assert flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=numbers(5, 6, device=device),
                                              cache_leftpad=numbers(100, -3, device=device)).shape == q.shape
    angles = torch.zeros(10, 16, device=device)
    new = tensors((2, 1, 2, 64), device=device)[0]
    out = flash_attn.flash_attn_with_kvcache(q, k[:, :9], v[:, :9], k=new, v=new.clone(),
                                             cache_seqlens=numbers(70, -8, device=device), rotary_cos=angles + 1,
                                             rotary_sin=angles)
    assert out.isfinite().all()


def test_bad_22_lengths():
    starts = "expected the starts of the sequences, an int32 tensor [B + 1]"
    for wrong, kind in ((packed()[3].float(), "a tensor of dtype float32"),
                        (packed()[3].bool(), "a tensor of dtype bool"), ([0, 30, 100], "list"), (None, "NoneType"),
                        (packed()[3].numpy(), "ndarray")):
        for i, name in ((3, "cu_seqlens_q"), (4, "cu_seqlens_k")):
            refused(TypeError, f"attention: {name} is {kind}, {starts}", mg.attention_varlen,
                    *with_argument(packed(), i, wrong))
    assert torch.equal(mg.attention_varlen(*with_argument(packed(), 3, packed()[3].long())),
                       mg.attention_varlen(*packed()))
    refused(ValueError, "attention: cu_seqlens_k has size 3 in dimension 0, expected 2 (STARTS of cu_seqlens_q)",
            mg.attention_varlen, *with_argument(packed(), 3, numbers(0, 70)))
    for wrong in (numbers(0), numbers()):
        refused(ValueError, "attention: cu_seqlens_k has size 3 in dimension 0, expected", mg.attention_varlen,
                *with_argument(packed(), 3, wrong))
    refused(ValueError, "attention: cu_seqlens_q has 2 dimensions, expected 1", mg.attention_varlen,
            *with_argument(packed(), 3, packed()[3][None]))
    for wrong in (None, 9.5, "9"):
        refused(TypeError, f"attention: max_seqlen_q is {wrong!r}, expected an integer", mg.attention_varlen,
                *with_argument(packed(), 5, wrong))
    for wrong in (-1, 2**40):
        refused(ValueError, f"max_seqlen_q is {wrong}, max_seqlen_k is 70, expected 0 to 2^30",
                mg.attention_varlen, *with_argument(packed(), 5, wrong))
    refused(TypeError, "flash_attn_varlen_func: cu_seqlens_q is torch.int64, expected an int32 tensor",
            flash_attn.flash_attn_varlen_func, *with_argument(packed(), 3, packed()[3].long()))
    for call, arguments in ((mg.attention_decode, decode()), (mg.append_kv, append())):
        op, like = call.__name__, "k" if call is mg.append_kv else "q"
        for dtype in (torch.int64, torch.float32):
            refused(TypeError, f"{op}: cache_seqlens has dtype {str(dtype)[6:]}, expected int32", call, *arguments,
                    cache_seqlens=numbers(3, 4).to(dtype))
            refused(TypeError, f"{op}: cache_batch_idx has dtype {str(dtype)[6:]}, expected int32", call, *arguments,
                    cache_seqlens=3, cache_batch_idx=numbers(0, 1).to(dtype))
        refused(ValueError, f"{op}: cache_seqlens has size 3 in dimension 0, expected 2 (B of {like})", call,
                *arguments, cache_seqlens=numbers(1, 2, 3))
        refused(ValueError, f"{op}: cache_seqlens has 0 dimensions, expected 1", call, *arguments,
                cache_seqlens=numbers(3)[0])
        for wrong, kind in ((3.5, "float"), ([3, 4], "list"), ("3", "str")):
            refused(TypeError, f"{op}: cache_seqlens is {kind}, expected an int32 tensor or an int", call, *arguments,
                    cache_seqlens=wrong)
        for wrong in (-1, 81, 2**40):
            refused(ValueError, f"{op}: cache_seqlens is {wrong}, expected 0 to", call, *arguments, cache_seqlens=wrong)
        refused(TypeError, f"{op}: page_table is list, expected torch.Tensor", call, *arguments, cache_seqlens=3,
                page_table=[[0]])
        refused(ValueError, f"{op}: page_table has", call, *arguments, cache_seqlens=3, page_table=numbers(0, 1))
        refused(ValueError, "TABLE = 1 (dimension 0 of page_table), expected a row of page_table for each",
                call, *arguments,
                cache_seqlens=3, page_table=numbers(0, 1)[None])
        # in place, and what is brought in order first
        for pages in (arguments, [t[:, :15] if t.shape[1] == 80 else t for t in arguments]):
            table = numbers(0, 1, 1, 0)[:, None]
            refused(ValueError, f"{op}: cache_batch_idx has size 3 in dimension 0, expected 2 (B of {like})", call,
                    *pages, cache_seqlens=3, page_table=table, cache_batch_idx=numbers(0, 1, 2))
            refused(TypeError, f"{op}: cache_batch_idx has dtype int64, expected int32", call, *pages, cache_seqlens=3,
                    page_table=table, cache_batch_idx=numbers(0, 1).long())
            refused(TypeError, f"{op}: page_table has dtype int64, expected int32", call, *pages, cache_seqlens=3,
                    page_table=table[:2].long())
            refused(ValueError, "TABLE = 4 (dimension 0 of page_table), expected a row of page_table for each",
                    call, *pages,
                    cache_seqlens=3, page_table=table)


def test_bad_32_tracing():
    """Compiled and fake: the same results, the same refusals, no value read."""
    torch._dynamo.reset()
    calls = [(mg.attention_varlen, packed(), dict(softcap=3.0)),
             (mg.attention_decode, decode(), dict(cache_seqlens=numbers(5, 80))),
             (mg.attention, qkv(), dict(window=(5, 0), sink=torch.ones(4), alibi_slopes=torch.ones(4)))]
    for call, arguments, options in calls:
        expected = call(*arguments, **options)
        assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments, **options), expected)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t
            out = call(*map(fake, arguments), **{name: fake(t) for name, t in options.items()})
        assert out.shape == expected.shape and out.stride() == expected.stride() and out.dtype == expected.dtype
    cache, other, k, v = append()
    torch.compile(mg.append_kv, fullgraph=True, backend="aot_eager")(cache, other, k, v, cache_seqlens=3)
    assert torch.equal(cache[:2, 3:4], k) and torch.equal(other[:2, 3:4], v)
    refused(Exception, "attention: sink is a tensor of dtype int32",
            torch.compile(mg.attention, fullgraph=True, backend="eager"), *qkv(), sink=numbers(1, 2, 3, 4))


def test_bad_32_numbers_that_change():
    """The first call of a process compiled; then windows, lengths, seeds and splits that change from call to call,
    which torch.compile makes symbols."""
    result = run_python("""
import torch, margay as mg
compiled = lambda f: torch.compile(f, fullgraph=True, backend="eager")
q, cache, packed = torch.randn(1, 2, 50, 64), torch.randn(1, 80, 2, 64), torch.randn(50, 2, 64)
starts = torch.tensor([0, 20, 50], dtype=torch.int32)
dense = lambda n: mg.attention(q, q, q, window=(n, 0), dropout_p=0.1, dropout_seed=n)
decode = lambda n: mg.attention_decode(q[:, :, :1].transpose(1, 2), cache, cache, cache_seqlens=n, window=(n // 3, 0),
                                       num_splits=n // 20)
varlen = lambda n: mg.attention_varlen(packed, packed, packed, starts, starts, n, n)
for call in (dense, decode, varlen):
    traced = compiled(call)
    for n in (30, 50, 70):
        assert torch.equal(traced(n), call(n)), n
""")
    assert result.returncode == 0, result.stderr


def test_bad_38_attention_subclasses():
    for call, arguments in ((mg.attention_varlen, packed()), (mg.attention_decode, decode())):
        expected = call(*arguments)
        out = call(arguments[0].as_subclass(Wrapped), *arguments[1:])
        assert isinstance(out, Wrapped) and torch.equal(out.as_subclass(torch.Tensor), expected)
        assert torch.equal(call(*(torch.nn.Parameter(t, requires_grad=False) if i < 3 else t
                                  for i, t in enumerate(arguments))), expected)
        refused(TypeError, "has layout torch.sparse_coo, expected torch.strided", call,
                *with_argument(arguments, 1, arguments[1].to_sparse()))
    refused(TypeError, "append_kv: k has layout torch.sparse_coo, expected torch.strided", mg.append_kv,
            *with_argument(append(), 2, append()[2].to_sparse()),
            cache_seqlens=3)


def test_bad_39_attention_values():
    expected = mg.attention(*qkv(), window=(-1, -1)), mg.attention_decode(*decode())
    for window in ((2**40, 2**62), (2**70, -5), (-5, -2**70), (None, None)):        # no bound
        assert (torch.equal(mg.attention(*qkv(), window=window), expected[0])
                and torch.equal(mg.attention_decode(*decode(), window=window), expected[1]))
    for window in (4, None, (4,), (4, "x"), (1.5, 0)):
        for call, arguments in ((mg.attention, qkv()), (mg.attention_varlen, packed()),
                                (mg.attention_decode, decode())):
            refused(TypeError, f"window is {window!r}, expected a pair of integers (left, right)", call, *arguments,
                    window=window)
        for module in (flash_attn, flash_attn_interface):
            refused(TypeError, f"flash_attn_func: window is {window!r}, expected a pair", module.flash_attn_func,
                    *qkv(), window_size=window)
    for call, arguments in ((mg.attention, qkv()), (mg.attention_varlen, packed()), (mg.attention_decode, decode())):
        op = "attention_decode" if call is mg.attention_decode else "attention"
        for softcap in (math.nan, math.inf, -1.0, 1e300, 1e-300):
            refused(ValueError, f"{op}: softcap", call, *arguments, softcap=softcap)
        for softcap in (1e-45, 1e-38, 1e38):
            assert call(*arguments, softcap=softcap).isfinite().all()
        for wrong in ("x", None):
            refused(TypeError, f"{op}: softcap is {wrong!r}, expected a number", call, *arguments, softcap=wrong)
        refused(TypeError, f"{op}: scale is 'x', expected a number", call, *arguments, scale="x")
        for scale in (math.nan, math.inf, 0.0, -1.0, 1e-50):
            refused(ValueError, f"{op}: scale is {scale:g}, expected a positive finite number", call, *arguments,
                    scale=scale)
        assert call(*arguments, sink=torch.full((4,), math.nan)).isnan().all()
        assert torch.equal(call(*arguments, sink=torch.full((4,), -math.inf)), call(*arguments))
    for call, arguments in ((mg.attention, qkv()), (mg.attention_varlen, packed())):
        for p in (1.0, -0.1, 1.5, math.nan):
            refused(ValueError, f"attention: dropout_p is {p:g}, expected 0 to less than 1", call, *arguments,
                    dropout_p=p)
        refused(TypeError, "attention: dropout_p is 'x', expected a number", call, *arguments, dropout_p="x")
        for seed in ("x", 1.5):
            refused(TypeError, f"attention: dropout_seed is {seed!r}, expected an integer", call, *arguments,
                    dropout_p=0.5, dropout_seed=seed)
        assert torch.equal(call(*arguments, dropout_p=0.5, dropout_seed=2**100 + 5),
                           call(*arguments, dropout_p=0.5, dropout_seed=5))
    for splits, error in ((-1, ValueError), (129, ValueError), (2**40, ValueError), (1.5, TypeError),
                          (None, TypeError)):
        refused(error, f"attention_decode: num_splits is {splits}, expected", mg.attention_decode, *decode(),
                num_splits=splits)
    assert re.search("unexpected keyword argument",
                     str(pytest.raises(TypeError, mg.attention_decode, *decode(), dropout_p=0.5).value))
