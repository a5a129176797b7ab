"""Bad input at ssd, linear_attention and causal_conv1d, one test per row of docs/bad_inputs.md that they have something
to say about."""

import mmap
import math
import random

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import margay as mg
from cases import DEVICES
from margay import _C, _op
from refusals import SPREADS, Wrapped, probe_sizes, refused, run_python, tensors

OPS = ("ssd", "linear_attention", "causal_conv1d")
SHAPES = {
    "ssd": dict(x=(2, 70, 4, 24), dt=(2, 70, 4), A=(4,), B=(2, 70, 2, 16), C=(2, 70, 2, 16)),
    "linear_attention": dict(q=(2, 70, 3, 24), k=(2, 70, 3, 24), v=(2, 70, 3, 40)),
    "causal_conv1d": dict(x=(2, 70, 24), weight=(24, 4)),
}
FIRST, SECOND, LAST = ({op: list(SHAPES[op])[i] for op in OPS} for i in (0, 1, -1))
HALVES = "bfloat16, float16 or, on the CPU, float32"


def problem(op, device="cpu", dtype=torch.bfloat16, **change):
    """Arguments by name. dt is positive and A negative, float32 both."""
    shapes = SHAPES[op] | change
    made = dict(zip(shapes, tensors(*shapes.values(), dtype=dtype, device=device)))
    if op == "ssd":
        made |= dict(dt=made["dt"].float().abs() / 4, A=-made["A"].float().abs())
    return made


def run(op, inputs, **options):
    result = getattr(mg, op)(*inputs.values(), **options)
    return result[0] if isinstance(result, tuple) else result


def packed(op, **options):
    """As one batch entry, for cu_seqlens."""
    return {name: t[:1] if name not in ("A", "weight") else t for name, t in problem(op, **options).items()}


def gradients(op, inputs):
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    out = run(op, leaves)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves.values())


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("op", OPS)
def test_bad_01_dtype(op, compiled):
    call = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
    error, inputs, first = Exception if compiled else TypeError, problem(op), FIRST[op]
    refused(error, f"{op}: {first} has dtype float64, expected {HALVES}", call, op,
            {name: t.double() for name, t in inputs.items()})
    other, name = inputs | {LAST[op]: inputs[LAST[op]].half()}, LAST[op]
    expected = "float32 or bfloat16 (as x)" if op == "causal_conv1d" else f"bfloat16 (same as {first})"
    refused(error, f"{op}: {name} has dtype float16, expected {expected}", call, op, other)
    if op == "ssd":
        refused(error, "ssd: dt is a tensor of dtype int64, expected a float32 tensor", call, op,
                inputs | {"dt": inputs["dt"].long()})
    with FakeTensorMode():
        made = {name: torch.empty(shape, device="cuda") for name, shape in SHAPES[op].items()}
        refused(NotImplementedError, f"{op}: {first} has dtype float32, which has kernels on the CPU only", run, op,
                made)


@pytest.mark.parametrize("op, change, message", [
    ("ssd", dict(dt=(2, 70, 3)), "ssd: dt has size 3 in dimension 2, expected 4 (H of x)"),
    ("ssd", dict(C=(2, 70, 2, 17)), "ssd: C has size 17 in dimension 3, expected 16 (N of B)"),
    ("ssd", dict(B=(2, 70, 3, 16), C=(2, 70, 3, 16)), "ssd: H = 4 (dimension 2 of x), G = 3 (dimension 2 of B)"),
    ("ssd", dict(x=(70, 4, 24)), "ssd: x has 3 dimensions, expected 4"),
    ("linear_attention", dict(k=(2, 70, 3, 25)),
     "linear_attention: k has size 25 in dimension 3, expected 24 (K of q)"),
    ("linear_attention", dict(v=(2, 69, 3, 40)),
     "linear_attention: v has size 69 in dimension 1, expected 70 (T of q)"),
    ("causal_conv1d", dict(weight=(25, 4)), "causal_conv1d: weight has size 25 in dimension 0, expected 24 (C of x)"),
    ("causal_conv1d", dict(weight=(24, 5)),
     "causal_conv1d: W = 5 (dimension 1 of weight), expected W >= 2 && W <= 4"),
])
def test_bad_02_shape(op, change, message):
    refused(ValueError, message, run, op, problem(op, **change))
    refused(ValueError, message, run, op, {name: t.float().numpy() for name, t in problem(op, **change).items()})


@pytest.mark.parametrize("op", OPS)
def test_bad_02_missing(op):
    inputs = problem(op)
    for name in inputs:
        kind = "torch.Tensor or numpy.ndarray" if name == FIRST[op] else f"torch.Tensor (same as {FIRST[op]})"
        refused(TypeError, f"{op}: {name} is NoneType, expected {kind}", run, op, inputs | {name: None})
    arrays = {name: t.float().numpy() for name, t in inputs.items()}
    masked = arrays | {LAST[op]: numpy.ma.masked_array(arrays[LAST[op]], False)}
    refused(TypeError, f"{op}: {LAST[op]} is a masked array, whose mask would be ignored", run, op,
            masked)


@pytest.mark.parametrize("op", OPS)
def test_bad_03_04_device(op):
    inputs, name = problem(op), LAST[op]
    refused(ValueError, f"{op}: {name} is on meta, expected cpu (same as {FIRST[op]})", run, op,
            inputs | {name: inputs[name].to("meta")})
    if op == "ssd":
        refused(ValueError, "ssd: z is on meta, expected cpu (same as x)", run, op, inputs, z=inputs["x"].to("meta"))
    if torch.cuda.device_count() != 1:
        with FakeTensorMode():
            made = {name: torch.empty(t.shape, dtype=t.dtype, device="cuda:0") for name, t in inputs.items()}
            made[name] = torch.empty(inputs[name].shape, dtype=inputs[name].dtype, device="cuda:1")
            refused(ValueError, f"{op}: {name} is on cuda:1, expected cuda:0 (same as {FIRST[op]})", run,
                    op, made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("op", OPS)
def test_bad_06_07_08_memory(op, spread, device, one_thread):
    """Computed as dense tensors are, whichever argument it is, forward and backward; NaN lies between the elements."""
    inputs = problem(op, device)
    for which in (*inputs, None):
        given = {name: SPREADS[spread](t) if which in (None, name) else t for name, t in inputs.items()}
        expected = gradients(op, {name: t.contiguous() for name, t in given.items()})
        assert all(torch.equal(a, b) for a, b in zip(gradients(op, given), expected, strict=True)), which
    if spread == "last dimension":
        assert f"{FIRST[op]} is copied first" in mg.explain(getattr(mg, op), *given.values())


@pytest.mark.parametrize("op, change, message", [
    ("ssd", dict(x=(2, 70, 4, 129)), "ssd: no kernel for bfloat16, B=2, T=70, H=4, G=2, P=129, N=16"),
    ("ssd", dict(B=(2, 70, 2, 257), C=(2, 70, 2, 257)),
     "ssd: no kernel for bfloat16, B=2, T=70, H=4, G=2, P=24, N=257"),
    ("linear_attention", dict(q=(2, 70, 3, 257), k=(2, 70, 3, 257)),
     "linear_attention: q has head dim 257, kernels exist up to 256"),
])
def test_bad_09_head_dim(op, change, message):
    refused(NotImplementedError, message, run, op, problem(op, **change))


@pytest.mark.parametrize("op, change, message", [
    ("ssd", dict(x=(2, 70, 4, 0)), "ssd: P = 0 (dimension 3 of x), N = 16 (dimension 3 of B), expected P > 0"),
    ("linear_attention", dict(v=(2, 70, 3, 0)), "V = 0 (dimension 3 of v), expected K > 0 && V > 0"),
])
def test_bad_09_no_columns(op, change, message):
    refused(ValueError, message, run, op, problem(op, **change))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("op", OPS)
def test_bad_10_empty(op, dim, device):
    """No batch, no steps: results and gradients shaped and defined, states those that were given."""
    inputs = {name: t if name in ("A", "weight") else t.narrow(dim, 0, 0) for name, t in problem(op, device).items()}
    results = gradients(op, inputs)
    assert all(grad.shape == t.shape for grad, t in zip(results[1:], inputs.values(), strict=True))
    assert all((grad == 0).all() for grad in results[1:])
    if op != "causal_conv1d" and dim == 1:
        sizes = (2, 4, 24, 16) if op == "ssd" else (2, 3, 24, 40)
        (state,) = tensors(sizes, dtype=torch.float32, device=device)
        options = {"initial_states": state, "return_final_states": True} if op == "ssd" else {
            "initial_state": state, "output_final_state": True}
        assert torch.equal(getattr(mg, op)(*inputs.values(), **options)[1], state)


@pytest.mark.parametrize("op", OPS)
def test_bad_13_huge_strides(op, one_thread):
    """Batch entries more than 2^31 elements apart."""
    inputs, name, far = problem(op), FIRST[op], 2**31 + 64
    near = inputs[name]
    memory = mmap.mmap(-1, 2 * (far + 2 * near.numel()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    apart = torch.frombuffer(memory, dtype=torch.bfloat16).as_strided(near.shape, (far, *near.stride()[1:]))
    apart.copy_(near)
    assert torch.equal(run(op, inputs | {name: apart}), run(op, inputs))


@pytest.mark.parametrize("op", OPS)
def test_bad_14_sizes(op):
    """More of anything than there are numbers for is refused, not wrapped. Nothing of that size is there: all rows are
    the same memory."""
    inputs = {name: t if name in ("A", "weight") else t[:1, :1].expand(1 << 16, 1 << 16, *t.shape[2:])
              for name, t in problem(op).items()}
    with pytest.raises((ValueError, RuntimeError, MemoryError)):
        run(op, inputs)


@pytest.mark.parametrize("op", ("linear_attention", "causal_conv1d", "based"))
def test_bad_14_steps(op):
    """One step, as often as there are numbers for: no count of blocks or chunks may wrap."""
    shapes = SHAPES["causal_conv1d" if op == "causal_conv1d" else "linear_attention"]
    for steps in (2**30 + 1, 2**31 - 1):
        given = {name: t if name == "weight" else t[:1, :1].expand(1, steps, *t.shape[2:])
                 for name, t in zip(shapes, tensors(*shapes.values()))}
        refused(ValueError, f"{op}: T = {steps} (dimension 1 of {next(iter(given))}), expected at most 2^30 steps",
                run, op, given)


@pytest.mark.parametrize("end", ("", "_bwd"))
@pytest.mark.parametrize("op", (*OPS, "causal_conv1d_packed", "based", "hedgehog", "gated_delta_rule", "kda"))
def test_bad_14_steps_of_rows(op, end):
    """The same of every function whose memory would be too much for a test."""
    row = _op.Row(op + end)
    known = row.problem(random.Random(1), 1, 2)
    needs = lambda steps: (row.derive(known | {"T": steps}) or {"text": None})["text"]  # noqa: E731
    assert needs(2**30) != needs(2**30 + 1) == "at most 2^30 steps"


CUTS = lambda p, n: (torch.empty(2, 0, 4 if p == 24 else 3, p, n), torch.empty(2, 0, 4 if p == 24 else 3))
RAW = {
    "ssd": lambda i, out: _C.ssd(out, None, *CUTS(24, 16), i["x"], i["dt"], i["A"], i["B"], i["C"], None, None, None,
                                 None, None, False, 0.0, math.inf),
    "linear_attention": lambda i, out: _C.linear_attention(out, None, *CUTS(40, 24), i["q"], i["k"], i["v"], None, None,
                                                           None, None, 0.0),
    "causal_conv1d": lambda i, out: _C.causal_conv1d(out, None, i["x"], i["weight"], None, None, None, False),
}


@pytest.mark.parametrize("op", OPS)
def test_bad_15_16_17_outputs_of_the_raw_layer(op):
    inputs = problem(op, dtype=torch.float32)
    out = torch.empty_like(run(op, inputs))
    shared = inputs["v" if op == "linear_attention" else "x"]                   # of the result's shape
    refused(BufferError, f"{op}: {'y' if op == 'ssd' else 'out'} is written, but shares memory with", RAW[op], inputs,
            shared)
    itself = torch.zeros(out.shape[-1]).expand(out.shape)
    refused(BufferError, "its elements may share memory", RAW[op], inputs, itself)
    locked = numpy.zeros(out.shape, "float32")
    locked.flags.writeable = False
    with pytest.raises(BufferError, match="read-only|readonly|writable"):
        RAW[op]({name: t.numpy() for name, t in inputs.items()}, locked)
    RAW[op](inputs, out)
    assert torch.equal(out, run(op, inputs))


@pytest.mark.parametrize("op", OPS)
def test_bad_18_30_derivatives(op):
    """Of gradients and forwards there are none; steps for generation have none at all."""
    inputs = {name: t.float().requires_grad_() for name, t in problem(op).items()}
    with pytest.raises(NotImplementedError, match=f"{op}: gradients of gradients .* are not implemented"):
        first = next(iter(inputs.values()))
        torch.autograd.grad(run(op, inputs).sum(), first, create_graph=True)[0].sum().backward()
    plain = tuple(t.detach() for t in inputs.values())
    refused(NotImplementedError, f"{op}: forward-mode derivatives", torch.func.jvp, getattr(mg, op), plain, plain)
    step = getattr(mg, op + "_step")
    given = {"ssd": lambda x, dt, A, B, C: (torch.zeros(2, 4, 24, 16), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0]),
             "linear_attention": lambda q, k, v: (torch.zeros(2, 3, 24, 40), q[:, 0], k[:, 0], v[:, 0]),
             "causal_conv1d": lambda x, weight: (x[:, :1], torch.zeros(2, 3, 24), weight)}[op]
    if op == "causal_conv1d":
        refused(NotImplementedError, "causal_conv1d_step: an argument requires a gradient", step, *given(**inputs))
    else:
        assert not step(*given(**inputs)).requires_grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("op", OPS)
def test_bad_20_not_finite(op, value, device, one_thread):
    """A value that is not finite reaches its head or channel of its batch entry, and nothing else. A scan's products
    make NaN of 0 times it for the steps before it in its chunk of 64, not for those of other chunks."""
    name = {"ssd": "x", "linear_attention": "v", "causal_conv1d": "x"}[op]
    inputs = problem(op, device)
    clean = run(op, inputs)
    place = (1, 66, 2, 7)[:inputs[name].ndim]
    inputs[name] = inputs[name].clone()
    inputs[name][place] = value
    out = run(op, inputs)
    reached = (1, slice(66 if op == "causal_conv1d" else 64, None), *place[2:])
    assert not out[reached][-2:].isfinite().any()
    out[reached] = clean[reached]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("op", OPS)
def test_bad_21_starts(op):
    inputs = packed(op)
    for starts, message in (([5, 70], "cu_seqlens[0] is 5, expected 0"), ([0, 40, 30, 70], "cu_seqlens[2] is 30"),
                            ([0, 71], "cu_seqlens[1] is 71"), ([0, -1, 70], "cu_seqlens[1] is -1"),
                            ([0, 2**32 + 70], f"cu_seqlens[1] is {2**31 - 1}"), ([], "STARTS = 0")):
        for dtype in (torch.int32, torch.int64) if 2**32 + 70 not in starts else (torch.int64,):
            refused(ValueError, message, run, op, inputs, cu_seqlens=torch.tensor(starts, dtype=dtype))
    refused(ValueError, "B == 1", run, op, problem(op),
            cu_seqlens=torch.tensor([0, 70]))
    expected = run(op, inputs, cu_seqlens=torch.tensor([0, 0, 30, 70], dtype=torch.int32))
    assert torch.equal(run(op, inputs, cu_seqlens=torch.tensor([0, 0, 30, 70])), expected)


@pytest.mark.parametrize("op", OPS)
def test_bad_22_starts_of_another_kind(op):
    inputs = packed(op)
    refused(TypeError, f"{op}: cu_seqlens is a tensor of dtype float32, expected a tensor of int32", run, op, inputs,
            cu_seqlens=torch.tensor([0.0, 70.0]))
    refused(TypeError, f"{op}: cu_seqlens is a tensor of dtype bool, expected a tensor of int32", run, op, inputs,
            cu_seqlens=torch.tensor([False, True]))
    refused(TypeError, f"{op}: cu_seqlens is list, expected a tensor of int32", run, op, inputs, cu_seqlens=[0, 70])
    refused(ValueError, "cu_seqlens is on meta, expected cpu", run, op, inputs,
            cu_seqlens=torch.empty(2, dtype=torch.int32, device="meta"))
    if op != "linear_attention":
        refused(TypeError, f"{op}: seq_idx is a tensor of dtype bfloat16, expected a tensor of int32", run, op,
                problem(op), seq_idx=torch.zeros(2, 70, dtype=torch.bfloat16))
        refused(ValueError, f"{op}: seq_idx has size 69 in dimension 1", run, op, problem(op),
                seq_idx=torch.zeros(2, 69, dtype=torch.int64))


@pytest.mark.parametrize("op", OPS)
def test_bad_28_threads(op):
    """The first calls of a process at once, from several threads."""
    call = {"ssd": "mg.ssd(x, x[..., 0].abs(), -x[0, 0, :, 0].abs(), x[:, :, :1], x[:, :, :1])",
            "linear_attention": "mg.linear_attention(x, x, x)",
            "causal_conv1d": "mg.causal_conv1d(x.flatten(2), x.flatten(2)[0, :4].t())"}[op]
    result = run_python(f"""
import threading, torch, margay as mg
x = torch.randn(2, 150, 3, 16, generator=torch.Generator().manual_seed(0))
results, barrier = [None] * 8, threading.Barrier(8)
def call(i):
    barrier.wait()
    for _ in range(3): results[i] = {call}
threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert all(torch.equal(r, results[0]) for r in results)
""")
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_bad_29_31_streams_and_captures(op):
    """On the current stream, behind what is there already; a graph computes on new values when it is replayed."""
    inputs, first = problem(op, "cuda"), FIRST[op]
    expected = run(op, inputs)
    late, stream = inputs | {first: torch.zeros_like(inputs[first])}, torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late[first].copy_(inputs[first])
        out = run(op, late)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    with torch.cuda.graph(graph):
        results = run(op, leaves)
        grads = torch.autograd.grad(results, leaves.values(), torch.ones_like(results))
    with torch.no_grad():
        leaves[first].mul_(-0.5)
    graph.replay()
    fresh = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    again = run(op, fresh)
    assert torch.equal(results, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(again, fresh.values(),
                                                                            torch.ones_like(again))))


@pytest.mark.parametrize("op", OPS)
def test_bad_32_38_fakes_and_subclasses(op):
    inputs, first = problem(op), FIRST[op]
    expected = run(op, inputs)
    with FakeTensorMode() as mode:
        fake = run(op, {name: mode.from_tensor(t) for name, t in inputs.items()})
    assert fake.shape == expected.shape and fake.stride() == expected.stride() and fake.dtype == expected.dtype
    with torch.inference_mode():
        assert torch.equal(run(op, inputs), expected)
    assert run(op, {name: t.to("meta") for name, t in inputs.items()}).device.type == "meta"
    out = run(op, inputs | {first: inputs[first].as_subclass(Wrapped)})
    assert isinstance(out, Wrapped) and torch.equal(out.as_subclass(torch.Tensor), expected)
    name = LAST[op]
    refused(TypeError, f"{op}: {name} has layout torch.sparse_coo, expected torch.strided", run, op,
            inputs | {name: inputs[name].to_sparse()})
    batched = torch.vmap(lambda t: run(op, inputs | {first: t}))(torch.stack((inputs[first], 2 * inputs[first])))
    assert torch.equal(batched[0], expected)
    wide = inputs[first].float()
    negative = torch.complex(wide, wide).conj().imag
    others = {name: t.float() for name, t in inputs.items()}
    assert negative.is_neg() and torch.equal(run(op, others | {first: negative}), run(op, others | {first: -wide}))


@pytest.mark.parametrize("op", OPS)
def test_bad_33_out_of_memory(op):
    """torch's own error, before anything is written; then the library works."""
    inputs = problem(op)
    huge = {name: t if name in ("A", "weight") else t[:1, :1].expand(1 << 20, 1 << 18, *t.shape[2:])
            for name, t in inputs.items()}
    with pytest.raises((RuntimeError, ValueError)):
        run(op, huge)
    assert run(op, inputs).isfinite().all()


@pytest.mark.parametrize("scale", (math.nan, math.inf, -math.inf, 0.0, -0.125, 1e-50))
def test_bad_39_scale(scale):
    message = f"linear_attention: scale is {scale:g}, expected a positive finite number"
    refused(ValueError, message, run, "linear_attention", problem("linear_attention"), scale=scale)


def test_bad_39_values():
    refused(ValueError, "causal_conv1d: activation is 'relu', expected None, 'silu' or 'swish'", run, "causal_conv1d",
            problem("causal_conv1d"), activation="relu")
    for limit, error, message in (((2.0, 1.0), ValueError, "dt_limit is (2, 1), expected the smaller number first"),
                                  ((math.nan, 1.0), ValueError, "dt_limit is (nan, 1)"),
                                  (3, TypeError, "dt_limit is 3, expected a pair of numbers"),
                                  (("a", 1), TypeError, "dt_limit[0] is 'a', expected a number"),
                                  ((0, 10**400), ValueError, "dt_limit[1] is an integer of 1329 bits")):
        refused(error, "ssd: " + message, run, "ssd", problem("ssd"), dt_limit=limit)
    refused(ValueError, "ssd: seq_idx and cu_seqlens are given, expected one of them", run, "ssd", packed("ssd"),
            seq_idx=torch.zeros(1, 70, dtype=torch.int32), cu_seqlens=torch.tensor([0, 70]))
    refused(TypeError, "ssd: z has dtype int32, expected bfloat16, float16 or float32", run, "ssd", problem("ssd"),
            z=torch.zeros(2, 70, 4, 24, dtype=torch.int32))
    refused(TypeError, "linear_attention: initial_state is Tensor, expected a pair (S_0, z_0)", run, "linear_attention",
            problem("linear_attention"), normalize=True, initial_state=torch.zeros(2, 3, 24, 40))
    for op in OPS:
        refused(TypeError, "unexpected keyword argument 'causal'", run, op, problem(op), causal=True)


@pytest.mark.parametrize("op", OPS)
def test_bad_39_sizes_for_explain(op):
    probe_sizes((op, op + "_bwd"), "B T H G P N K V C W R".split())
