"""explain is a dry run of the call: what it names is what the call launches, and it leaves no trace."""

import ctypes
import random
import re

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import margay as mg
from cases import DEVICES
from margay import _C


def launched(call):
    """Names of the rows that a call on the CPU launches, on as many threads as usual."""
    names = []
    take = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p,
                            ctypes.c_int64)(lambda row, params, blocks: names.append(row.decode()) or False)
    _C.intercept(ctypes.cast(take, ctypes.c_void_p).value, _C.num_threads())
    try:
        call()
    finally:
        _C.intercept(0, 0)
    return names


CALLS = {       # of mg.attention: dtype, head dims of q and of v, options
    "plain": ("bfloat16", 64, 64, {}),
    "causal": ("float32", 128, 128, dict(causal=True)),
    "narrow values": ("bfloat16", 192, 128, {}),
    "deterministic": ("bfloat16", 64, 64, dict(deterministic=True)),
    "window": ("float16", 64, 64, dict(window=(9, 3))),
    "causal window": ("bfloat16", 256, 256, dict(causal=True, window=(9, -1))),
    "softcap": ("bfloat16", 128, 128, dict(softcap=30.0)),
    "unusual softcap": ("bfloat16", 64, 64, dict(softcap=1e-3)),
    "sink": ("bfloat16", 64, 64, dict(sink=torch.zeros(4))),
    "slopes": ("float32", 64, 64, dict(alibi_slopes=torch.ones(4))),
    "dropout": ("bfloat16", 64, 64, dict(dropout_p=0.25)),
    "gaps": ("bfloat16", 64, 64, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_attention(name):
    dtype, dim, dim_v, options = CALLS[name]
    q, k, v = (torch.randn(2, heads, rows, d, dtype=getattr(torch, dtype), requires_grad=True)
               for heads, rows, d in ((4, 70, dim), (2, 90, dim), (2, 90, dim_v)))
    if name == "gaps":
        k = k.detach().mT.contiguous().mT.requires_grad_()
    forward, backward = mg.explain(mg.attention, q, k, v, **options).kernels
    out = []
    assert launched(lambda: out.append(mg.attention(q, k, v, **options))) == [forward]
    rows = launched(lambda: torch.autograd.grad(out[0].sum(), (q, k, v)))
    assert (backward in rows and [row["name"] for row in _C.kernels() if row["op"] == "attention_bwd"
                                  and row["name"] in rows] == [backward])


def test_attention_decode():
    q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 5000, 2, 64)
    for options in (dict(num_splits=1), dict(num_splits=3), dict(cache_seqlens=40, num_splits=1)):
        (kernel,) = mg.explain(mg.attention_decode, q, cache, cache, **options).kernels
        assert launched(lambda: mg.attention_decode(q, cache, cache, **options))[0] == kernel


@pytest.mark.parametrize("layouts", ("nn", "nt", "tn", "tt"))
def test_matmul(layouts):
    a, b = (torch.randn(70, 70).bfloat16() if layout == "n" else torch.randn(70, 70).bfloat16().T for layout in layouts)
    (kernel,) = mg.explain(mg.matmul, a, b, activation="relu").kernels
    assert launched(lambda: mg.matmul(a, b, activation="relu")) == [kernel]


def test_packed_attention():
    q, k, starts = torch.randn(70, 4, 64, requires_grad=True), torch.randn(90, 2, 64), torch.tensor([0, 30, 70])
    arguments = q, k, k, starts, torch.tensor([0, 50, 90]), 40, 50
    for options in (dict(causal=True), dict(window=(9, 3), softcap=2.0)):
        forward, backward = mg.explain(mg.attention_varlen, *arguments, **options).kernels
        out = []
        assert launched(lambda: out.append(mg.attention_varlen(*arguments, **options))) == [forward]
        assert backward in launched(lambda: torch.autograd.grad(out[0].sum(), q))


def test_append_kv():
    cache, other, new = torch.randn(2, 40, 2, 64), torch.randn(2, 40, 2, 64), torch.randn(2, 3, 2, 64)
    before = cache.clone(), other.clone(), cache._version
    text = mg.explain(mg.append_kv, cache, other, new.mT.contiguous().mT, new, cache_seqlens=5)
    assert torch.equal(cache, before[0]) and torch.equal(other, before[1]) and cache._version == before[2]
    assert "\n  k is copied first: its last dimension is not contiguous" in text
    assert launched(lambda: mg.append_kv(cache, other, new, new, cache_seqlens=5)) == text.kernels


ROWS = {        # of a row of ops.def: function, arguments, options
    "scaled_add": (mg.scaled_add, ((70, 90), (70, 90)), {}),
    "linear_attention": (mg.linear_attention, ((2, 150, 3, 64),) * 3, {}),
    "linear_attention wide": (mg.linear_attention, ((2, 150, 3, 64), (2, 150, 3, 64), (2, 150, 3, 128)),
                              dict(scale=0.5, initial_state=torch.randn(2, 3, 128, 64).mT, output_final_state=True)),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_rows(name, dtype):
    """The first kernel of the forward and of the backward. An op that launches two says which it chose first."""
    function, shapes, options = ROWS[name]
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    text = mg.explain(function, *inputs, **options)
    forward, backward = text.kernels
    out = []
    assert launched(lambda: out.append(function(*inputs, **options)))[0] == forward
    results = out[0] if isinstance(out[0], tuple) else out
    assert launched(lambda: torch.autograd.grad(sum(t.float().sum() for t in results), inputs))[0] == backward
    assert ("initial_state is copied first" in text) == ("initial_state" in options)
    if dtype == torch.float32:
        arrays = [t.detach().numpy() for t in inputs]
        given = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
        assert mg.explain(function, *arrays, **given) == text
    function(*inputs, **options)                               # no later call is dry


@pytest.mark.parametrize("device", DEVICES)
def test_every_function(device):
    """Of each one that takes tensors, forward and backward, if it has one."""
    rows, (a, b) = torch.randn(1, 40, 2, 64, device=device).bfloat16(), torch.randn(2, 8, 8, device=device).bfloat16()
    starts, weight = torch.tensor([0, 40], device=device), torch.randn(64, 4, device=device).bfloat16()
    x, maps = rows[:, :, 0].contiguous(), torch.randn(2, 64, 64, device=device).bfloat16()
    calls = {mg.attention: ((rows,) * 3, {}), mg.attention_varlen: ((*(rows[0],) * 3, starts, starts, 40, 40), {}),
             mg.matmul: ((a, b), {}), mg.attention_decode: ((rows,) * 3, {}),
             mg.append_kv: ((rows.clone(), rows.clone(), rows, rows), dict(cache_seqlens=0)),
             mg.based: ((rows[..., :16],) * 2 + (rows,), {}), mg.linear_attention: ((rows,) * 3, {}),
             mg.scaled_add: ((a, b), {}), mg.rotary: ((rows, rows, *(rows[0, :, 0, :32].float(),) * 2), {}),
             mg.qk_norm_rotary: ((rows, None, *(rows[0, 0, 0],) * 2, *(rows[0, :, 0, :32].float(),) * 2), {}),
             mg.cross_entropy: ((x[0], torch.cat([maps[0]] * 2), starts.repeat(20)), {}),
             mg.layer_norm: ((x,), {}), mg.rms_norm: ((x,), {}), mg.gated_rms_norm: ((x, x), {}),
             mg.gated_delta_rule: ((rows,) * 3, {}),
             mg.hedgehog: ((*(rows,) * 3, maps, maps, torch.ones(2, device=device), 1.0), {}),
             mg.causal_conv1d: ((x, weight), {}), mg.causal_conv1d_step: ((x[:, :1], x[:, :8].clone(), weight), {}),
             mg.ssd: ((rows, rows[..., 0].float(), -torch.ones(2, device=device), rows, rows), {}),
             mg.ssd_step: ((torch.zeros(1, 2, 64, 64, device=device), rows[:, 0], rows[:, 0, :, 0],
                            -torch.ones(2, device=device), rows[:, 0], rows[:, 0]), {}),
             mg.linear_attention_step: ((torch.zeros(1, 2, 64, 64, device=device), *(rows[:, 0],) * 3), {}),
             mg.gated_delta_rule_step: ((torch.zeros(1, 2, 64, 64, device=device), *(rows[:, 0],) * 3), {}),
             mg.fft_conv: ((rows.reshape(1, 80, 64), rows.reshape(80, 64)), {}),
             mg.kda: ((rows,) * 4, {}),
             mg.kda_step: ((torch.zeros(1, 2, 64, 64, device=device), *(rows[:, 0],) * 4), {})}
    one = {"matmul", "cross_entropy", "attention_decode", "append_kv", "causal_conv1d_step", "ssd_step",
           "linear_attention_step", "gated_delta_rule_step", "kda_step"}
    for function, (arguments, options) in calls.items():
        kernels = mg.explain(function, *arguments, **options).kernels
        assert (len(kernels) == 2 - (function.__name__ in one)
                and all("_bf16" in kernel for kernel in kernels)), (function, kernels)
    with pytest.raises(ValueError, match="^explain: op is none, expected one of " +
                       ", ".join(sorted(f.__name__ for f in calls)) + " where"):
        mg.explain("none", a)


@pytest.mark.parametrize("n, dtype", ((300, torch.bfloat16), (64, torch.float64)))
def test_steps_without_a_kernel(n, dtype):
    """What torch's operations compute is not computed, and changes no state."""
    x, b = torch.randn(1, 2, 64, dtype=dtype), torch.randn(1, 2, n, dtype=dtype)
    a, dt = -torch.ones(2, dtype=dtype), torch.ones(1, 2, dtype=dtype)
    for wanted, call in ((torch.randn(1, 2, 64, n), lambda s: mg.explain(mg.ssd_step, s, x, dt, a, b, b)),
                         (torch.randn(1, 2, n, 64), lambda s: mg.explain(mg.linear_attention_step, s, b, b, x))):
        state = wanted.clone()
        found = call(state)
        assert found.kernels == [None] and f"no kernel: PyTorch's operations compute states of {n} with" in found
        assert torch.equal(state, wanted)


def test_arguments_by_position():
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    assert mg.explain(mg.scaled_add, a, b, 2.0).kernels == mg.explain(mg.scaled_add, a, b, scale=2.0).kernels
    bias = torch.randn(16)[::2]
    text = mg.explain(mg.matmul, a, b, bias=bias)
    assert text.startswith("matmul: a [8, 8] float32, b [8, 8] float32, bias [8] float32\n  bias is copied first: its "
                           "last dimension is not")
    with pytest.raises(TypeError, match="^explain: 4 tensors are given, expected a and b for scaled_add"):
        mg.explain(mg.scaled_add, a, b, 2.0, 3)
    with pytest.raises(ValueError, match="^linear_attention: v has size 7 in dimension 0, expected 8 \\(B of q\\)"):
        mg.explain(mg.linear_attention, *(torch.randn(n, 9, 2, 8) for n in (8, 8, 7)))


@pytest.mark.parametrize("device", DEVICES)
def test_leaves_no_trace(device):
    q = torch.randn(1, 2, 40, 64, device=device, dtype=torch.bfloat16)
    cache = torch.randn(1, 40, 2, 64, device=device, dtype=torch.bfloat16)
    expected = mg.attention(q, q, q)
    state = torch.get_rng_state(), numpy.random.get_state()[1].copy()
    calls = []
    if device == "cpu":
        calls = launched(lambda: [mg.explain(mg.attention, q, q, q, dropout_p=0.5),
                                  mg.explain(mg.matmul, q[0, 0], q[0, 0].T),
                                  mg.explain(mg.attention_decode, cache[:, :1], cache, cache),
                                  mg.explain(mg.attention, *[q.float().numpy()] * 3, dropout_p=0.5)])
    assert (calls == [] and torch.equal(torch.get_rng_state(), state[0])
            and (numpy.random.get_state()[1] == state[1]).all())
    with pytest.raises(ValueError, match="^attention: k has shape"):
        mg.explain(mg.attention, q, q[:, :, :, :8], q)
    with pytest.raises(ZeroDivisionError):
        _C.dry_run(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="^dry_run: the call asked for no kernel"):
        _C.dry_run(lambda: None)
    assert torch.equal(mg.attention(q, q, q), expected)          # no later call is dry


def test_explanations_are_strings():
    text = mg.explain("attention", dtype="bfloat16", gpu=True, d=128)
    assert isinstance(text, str) and all(name in text for name in text.kernels) and len(text.kernels) == 2
    assert mg.explain("attention", dtype="bfloat16", gpu=True, d=300).kernels == [None, None]
    (kernel,) = mg.explain("attention", dtype="float8_e4m3fn", gpu=True, d=64).kernels
    assert kernel.startswith("attention_fwd_e4m3_d64")


def test_every_kernel_is_some_problems():
    """A row behind one that takes all its problems would be compiled for nobody."""
    r = random.Random(0)
    rows = {row["name"]: row for row in _C.kernels()}
    told = {*"MNKBRHGTPV", "HV"}                             # the sizes that _C.explain takes
    left = {name for name, row in rows.items()
            if set(re.findall(r"\b[A-Z]\w*", row["when"])) - set(re.findall(r"\b(\w+)=", row["constants"])) <= told}
    judged = set(left)
    for _ in range(6000):
        for op, dtype in sorted({(rows[name]["op"], rows[name]["dtype"]) for name in left}):
            sizes = ("d", "batch", "heads_q", "nq", "nk", "m", "n", "k")
            problem = {size: r.choice((1, 4, 30, 60, 100, 150, 200, 600, 1000, 1500, 9000)) for size in sizes}
            flags = ("gpu", "causal", "deterministic", "trans_a", "trans_b")
            problem |= {flag: r.random() < 0.5 for flag in flags}
            problem |= dict(dv=r.choice((1, problem["d"])), heads_k=r.choice((1, 2)), sms=132, features=r.randrange(5))
            taken = _C.explain(op, dtype=dtype, **problem)[0]
            left.discard(taken)
            if taken and taken not in judged:                # for a size that is not told: nor are those behind it
                behind = list(rows)[list(rows).index(taken):]
                left -= {name for name in behind if (rows[name]["op"], rows[name]["dtype"]) == (op, dtype)}
    assert not left


@pytest.mark.gpu
def test_no_kernel_for_the_dtype_on_the_gpu():
    q = torch.randn(1, 2, 40, 64, device="cuda")
    with pytest.raises(NotImplementedError, match="which has kernels on the CPU only"):
        mg.explain(mg.attention, q, q, q)
