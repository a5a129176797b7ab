"""Bad input at gated_delta_rule, kda, their backwards and their steps, one test per row of docs/bad_inputs.md that they
have something to say about."""

import math
import mmap
import warnings

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import margay as mg
from cases import DEVICES
from margay import _C, _op
from refusals import SPREADS, Wrapped, probe_sizes, refused, run_python, tensors

OPS = ("gated_delta_rule", "kda")
STEPS = ("gated_delta_rule_step", "kda_step")
B, T, H, HV, K, V = 2, 70, 2, 4, 24, 40
HALVES = "bfloat16, float16 or, on the CPU, float32"
FLOATS = "expected bfloat16, float16, float32 or float64"


def problem(op, device="cpu", dtype=torch.bfloat16, **change):
    """Arguments by name: of a step with its state, of a sequence without one. g is negative, beta positive, both are
    float32."""
    lead, keys = (B,) if op in STEPS else (B, T), (K,) if op.startswith("kda") else ()
    shapes = dict(state=(B, HV, K, V)) if op in STEPS else {}
    shapes |= dict(q=(*lead, H, K), k=(*lead, H, K), v=(*lead, HV, V), g=(*lead, HV, *keys), beta=(*lead, HV)) | change
    made = dict(zip(shapes, tensors(*shapes.values(), dtype=dtype, device=device)))
    made |= dict(k=made["k"] / 8, g=-made["g"].float().abs(), beta=made["beta"].float().sigmoid())
    return made | {name: made[name].float() for name in ("state",) if name in made}


def run(op, inputs, **options):
    """A step works on a copy of its state."""
    if "state" in inputs and isinstance(inputs["state"], torch.Tensor):
        inputs = inputs | {"state": inputs["state"].clone()}
    return getattr(mg, op)(**inputs, **options)


def packed(op, **options):
    """As one batch entry, for cu_seqlens."""
    return {name: t[:1] for name, t in problem(op, **options).items()}


def gradients(op, inputs, **options):
    """The output, the last state, and the gradients of all that is given as a tensor."""
    given = inputs | {name: t for name, t in options.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    out, state = getattr(mg, op)(**options | leaves, output_final_state=True)
    loss = out.float().square().sum() + state.square().sum()
    return out.detach(), state.detach(), *torch.autograd.grad(loss, leaves.values())


def gate(op, device="cpu"):
    """What the decay is made from inside."""
    a_log, dt_bias = tensors((HV,), (HV, K) if op.startswith("kda") else (HV,), dtype=torch.float32, device=device)
    return dict(A_log=a_log, dt_bias=dt_bias, use_gate=True)


def raw(op, inputs, **change):
    """A call of _C: what is not given is of zeros, as large as the row says, or absent where it may be."""
    row = _op.Row(op)
    given = {f["name"]: inputs.get(f["name"]) for f in row.inputs}
    known = dict.fromkeys(row.sizes, -1) | {f["name"]: _op.default(f) for f in row.numbers}
    for f in row.inputs:
        known |= {f["name"]: given[f["name"]] is not None}
        if given[f["name"]] is not None:
            known |= zip(f["sizes"], given[f["name"]].shape)
    assert row.derive(known) is None
    dtype = given["q"].dtype if isinstance(given["q"], torch.Tensor) else torch.float32
    for f in (*row.results, *row.saves, *row.work):
        if f["name"] in change or f["role"] == "optout":
            continue
        given[f["name"]] = torch.zeros([known[n] for n in f["sizes"]],
                                       dtype=dtype if f["kind"] == "half" else getattr(torch, f["kind"]))
    given |= {f["name"]: _op.default(f) for f in row.numbers} | change
    getattr(_C, op)(*(given.get(f["name"]) for f in row.arguments))


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("op", OPS)
def test_bad_01_dtype(op, compiled):
    call = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
    error, inputs = Exception if compiled else TypeError, problem(op)
    refused(error, f"{op}: q has dtype float64, expected {HALVES}", call, op,
            {name: t.double() for name, t in inputs.items()})
    refused(error, f"{op}: v has dtype float16, expected bfloat16 (same as q)", call, op,
            inputs | {"v": inputs["v"].half()})
    if not compiled:                                    # dynamo makes a break of the graph of it
        for name in ("g", "beta", "initial_state", "A_log", "dt_bias"):
            given = dict(gate(op), initial_state=torch.zeros(B, HV, K, V)) | inputs
            given[name] = given[name].long()
            refused(TypeError, f"{op}: {name} is a tensor of dtype int64, expected a float32 tensor", run, op, given)
    with FakeTensorMode():
        made = {name: torch.empty(t.shape, device="cuda") for name, t in inputs.items()}
        refused(NotImplementedError, f"{op}: q has dtype float32, which has kernels on the CPU only", run, op, made)


@pytest.mark.parametrize("op", STEPS)
def test_bad_01_dtype_of_steps(op):
    """Mixtures of floating types are computed, by PyTorch."""
    inputs = problem(op)
    for name in inputs:
        for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
            refused(TypeError, f"{op}: {name} has dtype {str(dtype)[6:]}, {FLOATS}", run, op,
                    inputs | {name: inputs[name].to(dtype)})
    refused(TypeError, f"{op}: intermediate_states has dtype bfloat16, expected float32 (same as state)", run, op,
            inputs | {n: inputs[n][:, None] for n in ("q", "k", "v", "g", "beta")},
            intermediate_states=torch.zeros(B, 1, HV, K, V, dtype=torch.bfloat16))


@pytest.mark.parametrize("change, message", [
    (dict(k=(2, 70, 2, 25)), "k has size 25 in dimension 3, expected 24 (K of q)"),
    (dict(v=(2, 69, 4, 40)), "v has size 69 in dimension 1, expected 70 (T of q)"),
    (dict(q=(2, 70, 3, 24), k=(2, 70, 3, 24)),
     "H = 3 (dimension 2 of q), HV = 4 (dimension 2 of v), expected heads of v that are a multiple of those of k"),
    (dict(q=(2, 70, 0, 24), k=(2, 70, 0, 24)),
     "H = 0 (dimension 2 of q), HV = 4 (dimension 2 of v), expected heads of q and k where v has any"),
    (dict(q=(70, 2, 24)), "q has 3 dimensions, expected 4"),
    (dict(beta=(2, 70, 3)), "beta has size 3 in dimension 2, expected 4 (HV of v)"),
])
@pytest.mark.parametrize("op", OPS)
def test_bad_02_shape(op, change, message):
    refused(ValueError, f"{op}: {message}", run, op, problem(op, **change))
    refused(ValueError, f"{op}: {message}", run, op, {n: t.float().numpy() for n, t in problem(op, **change).items()})


@pytest.mark.parametrize("op", OPS)
def test_bad_02_shape_of_gates_and_states(op):
    kda = op == "kda"
    for name, size, message in (
            ("g", (2, 70, 4, 25) if kda else (2, 70, 5), "g has size"),
            ("A_log", (3,), "HV = 4 (dimension 2 of v), HH = 3 (dimension 0 of A_log), expected A_log of a number for "
                            "each head of v" if kda else "A_log has size 3 in dimension 0, expected 4 (HV of v)"),
            ("A_log", (1, 1, 4, 1), "A_log has 4 dimensions, expected 1"),
            ("dt_bias", (95,), "dt_bias has shape [95], expected [HV, K] or [HV K], with HV = 4" if kda else
             "dt_bias has size 95 in dimension 0, expected 4 (HV of v)"),
            ("initial_state", (2, 4, 40, 24), "expected states [K, V] or, with state_v_first, [V, K]"),
            ("initial_state", (1, 4, 24, 40), "expected as many states as there are batches or, with cu_seqlens, "
                                              "sequences")):
        refused(ValueError, message, run, op, problem(op) | gate(op) | {name: torch.zeros(size)})


@pytest.mark.parametrize("op", STEPS)
def test_bad_02_shape_of_steps(op):
    inputs = problem(op)
    for change, message in (
            (dict(q=(24,)), "q has shape [24], expected 3 dimensions [batch, heads, K], or 4 with steps"),
            (dict(v=(2, 1, 4, 40)), "v has shape [2, 1, 4, 40], expected 3 dimensions as q"),
            (dict(k=(2, 2, 25)), "k has shape [2, 2, 25], expected [2, 2, 24]"),
            (dict(q=(2, 3, 24), k=(2, 3, 24)), "v has 4 heads, expected a multiple of the 3 heads of q and k"),
            (dict(state=(2, 4, 40, 24)), "state has shape [2, 4, 40, 24], expected [2, 4, 24, 40]"),
            (dict(state=(3, 4, 24, 40)), "state has shape [3, 4, 24, 40], expected [2, 4, 24, 40]")):
        given = problem(op, **change)
        refused(ValueError, f"{op}: {message}", run, op, given)
        refused(ValueError, f"{op}: {message}", run, op, {name: t.to("meta") for name, t in given.items()})
    refused(ValueError, f"{op}: state has shape [2, 4, 24, 40], expected [.., 40, 24] with state_v_first", run, op,
            inputs, state_v_first=True)
    refused(ValueError, f"{op}: A_log has shape [3], expected [4]", run, op, inputs, **gate(op) | dict(
        A_log=torch.zeros(3)))


@pytest.mark.parametrize("op", OPS + STEPS)
def test_bad_02_missing(op):
    inputs = problem(op)
    refused(TypeError, f"{op}: q is NoneType, expected torch.Tensor or numpy.ndarray", run, op, inputs | {"q": None})
    for name in ("k", "state") if op in STEPS else ("k", "v"):
        refused(TypeError, f"{op}: {name} is NoneType, expected torch.Tensor (same as q)", run, op,
                inputs | {name: None})
    if op == "kda":
        refused(TypeError, "kda: g is NoneType, expected a float32 tensor", run, op, inputs | {"g": None})
    if op == "kda_step":
        refused(TypeError, "kda_step: g is NoneType, expected torch.Tensor (same as q)", run, op, inputs | {"g": None})
    if op in STEPS:
        return refused(TypeError, f"{op}: q is ndarray, expected torch.Tensor", run, op,
                       {name: t.float().numpy() for name, t in inputs.items()})
    arrays = {name: t.float().numpy() for name, t in inputs.items()}
    refused(TypeError, f"{op}: v is a masked array, whose mask would be ignored", run, op,
            arrays | {"v": numpy.ma.masked_array(arrays["v"], False)})


@pytest.mark.parametrize("op", OPS + STEPS)
def test_bad_03_04_device(op):
    inputs = problem(op)
    given = inputs | gate(op) | ({} if op in STEPS else dict(initial_state=torch.zeros(B, HV, K, V)))
    for name in [n for n, t in given.items() if n != "q" and isinstance(t, torch.Tensor)]:
        refused(ValueError, f"{op}: {name} is on meta, expected cpu (same as q)", run, op,
                given | {name: given[name].to("meta")})
    refused(ValueError, "is on cpu, expected meta (same as q)", run, op, inputs | {"q": inputs["q"].to("meta")})
    if torch.cuda.device_count() != 1:
        with FakeTensorMode():
            made = {n: torch.empty(t.shape, dtype=t.dtype, device="cuda:0") for n, t in inputs.items()}
            made["k"] = torch.empty(inputs["k"].shape, dtype=torch.bfloat16, device="cuda:1")
            refused(ValueError, f"{op}: k is on cuda:1, expected cuda:0 (same as q)", run, op, made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("op", OPS)
def test_bad_06_07_08_memory(op, spread, device, one_thread):
    """Computed as dense tensors are, whichever argument it is, forward and backward; NaN lies between the elements."""
    inputs = problem(op, device) | dict(initial_state=tensors((B, HV, K, V), dtype=torch.float32, device=device)[0])
    for which in (*inputs, None):
        given = {name: SPREADS[spread](t) if which in (None, name) else t for name, t in inputs.items()}
        expected = gradients(op, {name: t.contiguous() for name, t in given.items()})
        assert all(torch.equal(a, b) for a, b in zip(gradients(op, given), expected, strict=True)), which
    if spread == "last dimension":
        tensors_ = [given[name] for name in ("q", "k", "v", "g", "beta")]
        assert "q is copied first" in mg.explain(getattr(mg, op), *tensors_)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("op", STEPS)
def test_bad_06_07_08_memory_of_steps(op, spread, device):
    """The state, which is written, may have gaps, and either of its last two dimensions may be the contiguous one."""
    for which in (*problem(op), None):
        given = {name: SPREADS[spread](t) if which in (None, name) else t for name, t in problem(op, device).items()}
        if which in ("state", None) and spread == "expanded":
            refused(BufferError, f"{op}: state is written, but with shape", getattr(mg, op), **given)
            continue
        dense = {name: t.contiguous().clone() for name, t in given.items()}
        found, expected = getattr(mg, op)(**given), getattr(mg, op)(**dense)
        if which in ("state", None):                     # sums over keys that lie across are of another order
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(given["state"], dense["state"])
        else:
            assert torch.equal(found, expected) and torch.equal(given["state"], dense["state"]), which


@pytest.mark.parametrize("size", (129, 256))
@pytest.mark.parametrize("op", OPS)
def test_bad_09_head_dim(op, size):
    wide = (2, 70, 2, size)
    change = dict(q=wide, k=wide) | (dict(g=(2, 70, 4, size)) if op == "kda" else {})
    refused(NotImplementedError, f"{op}: K = {size} (dimension 3 of q), V = 40 (dimension 3 of v), expected heads of 1 "
            "to 128 columns", run, op, problem(op, **change))
    refused(NotImplementedError, f"{op}: K = 24 (dimension 3 of q), V = {size} (dimension 3 of v), expected heads of 1 "
            "to 128 columns", run, op, problem(op, v=(2, 70, 4, size)))
    no_keys = dict(q=(2, 70, 2, 0), k=(2, 70, 2, 0)) | (dict(g=(2, 70, 4, 0)) if op == "kda" else {})
    for change in (dict(v=(2, 70, 4, 0)), no_keys):
        refused(ValueError, "expected K > 0 && V > 0", run, op, problem(op, **change))


@pytest.mark.parametrize("op", STEPS)
def test_bad_09_head_dim_of_steps(op):
    """PyTorch computes keys of more than 256."""
    change = dict(q=(2, 2, 300), k=(2, 2, 300), state=(2, 4, 300, 40))
    inputs = problem(op, **change | (dict(g=(2, 4, 300)) if op == "kda_step" else {}))
    assert run(op, inputs).isfinite().all()
    refused(ValueError, "expected K > 0 && V > 0", run, op, problem(op, v=(2, 4, 0), state=(2, 4, 24, 0)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", (0, 1))
@pytest.mark.parametrize("op", OPS)
def test_bad_10_empty(op, dim, device):
    """No batch, no steps: results and gradients shaped and defined, states those that were given."""
    inputs = {name: t.narrow(dim, 0, 0) for name, t in problem(op, device).items()}
    (state,) = tensors((B * dim, HV, K, V), dtype=torch.float32, device=device)
    out, last, *grads = gradients(op, inputs | {"initial_state": state}, **gate(op, device))
    assert out.shape == inputs["v"].shape and torch.equal(last, state)
    assert torch.equal(grads[5], 2 * state) and not any(t.any() for t in (*grads[:5], *grads[6:]))
    assert [t.shape for t in grads[:5]] == [t.shape for t in inputs.values()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", STEPS)
def test_bad_10_empty_steps(op, device):
    """No samples; no heads; no steps, which leave the state as it was."""
    inputs = problem(op, device)
    assert run(op, {name: t[:0] for name, t in inputs.items()}).shape == (0, HV, V)
    none = {name: t[:, :0] for name, t in inputs.items()}
    assert run(op, none).shape == (B, 0, V)
    before, none = inputs["state"].clone(), {name: t[:, None][:, :0] for name, t in inputs.items() if name != "state"}
    assert getattr(mg, op)(inputs["state"], **none).shape == (B, 0, HV, V) and torch.equal(inputs["state"], before)


def far_apart(near, device):
    """The same numbers, entries of dimension 0 more than 2^31 elements apart."""
    far = 2**31 + 64
    room = far * (len(near) - 1) + near[0].numel()
    if device == "cuda":
        flat = torch.empty(room, dtype=near.dtype, device=device)
    else:
        memory = mmap.mmap(-1, near.element_size() * room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        flat = torch.frombuffer(memory, dtype=near.dtype)
    apart = flat.as_strided(near.shape, (far, *near.stride()[1:]))
    apart.copy_(near)
    return apart


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_bad_13_huge_strides(op, device, one_thread):
    """Forward and backward."""
    inputs = problem(op, device)
    for name in ("q", "v"):
        found = gradients(op, inputs | {name: far_apart(inputs[name], device)})
        assert all(map(torch.equal, found, gradients(op, inputs))), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", STEPS)
def test_bad_13_huge_pool(op, device):
    inputs = problem(op, device)
    expected = getattr(mg, op)(**inputs)
    inputs, after = problem(op, device), inputs["state"]
    inputs["state"] = far_apart(inputs["state"].bfloat16(), device)
    assert (getattr(mg, op)(**inputs) - expected).abs().max() < 0.1
    torch.testing.assert_close(inputs["state"].float(), after, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("op", OPS)
def test_bad_14_33_sizes(op):
    """More of anything than there are numbers or memory for is refused, before anything is written. Nothing of that
    size is there: all rows are the same memory."""
    inputs = problem(op)
    for big in ((1 << 20, 1 << 18), (1 << 26, 1 << 26)):
        huge = {name: t[:1, :1].expand(*big, *t.shape[2:]) for name, t in inputs.items()}
        with pytest.raises((ValueError, RuntimeError, MemoryError)):
            run(op, huge)
    assert run(op, inputs).isfinite().all()


@pytest.mark.parametrize("op", OPS)
def test_bad_15_16_17_outputs_of_the_raw_layer(op):
    inputs = problem(op, dtype=torch.float32)
    refused(BufferError, f"{op}: out is written, but shares memory with v", raw, op, inputs, out=inputs["v"])
    refused(BufferError, "its elements may share memory", raw, op, inputs, out=torch.zeros(V).expand(B, T, HV, V))
    state = torch.zeros(B, HV, K, V)
    refused(BufferError, f"{op}: final_state is written, but shares memory with initial_state", raw, op,
            inputs | {"initial_state": state}, final_state=state)
    locked = numpy.zeros((B, T, HV, V), "float32")
    locked.flags.writeable = False
    with pytest.raises(BufferError, match="read-only|readonly|writable"):
        raw(op, inputs, out=locked)
    out = torch.empty(B, T, HV, V)
    raw(op, inputs, out=out)
    assert torch.equal(out, run(op, inputs))


@pytest.mark.parametrize("op", OPS)
def test_bad_15_16_outputs_of_the_backward(op):
    inputs = problem(op, dtype=torch.float32)
    inputs["dout"] = torch.ones_like(inputs["v"])
    op += "_bwd"
    refused(BufferError, f"{op}: dv is written, but shares memory with dout", raw, op, inputs, dv=inputs["dout"])
    refused(BufferError, "its elements may share memory", raw, op, inputs, dq=torch.zeros(K).expand(B, T, H, K))
    a_log = torch.zeros(HV)
    refused(BufferError, f"{op}: dA_log is written, but shares memory with A_log", raw, op, inputs | {"a_log": a_log},
            da_log=a_log)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", STEPS)
def test_bad_15_16_states(op, device):
    inputs = problem(op, device, torch.bfloat16) | {"state": tensors((B, HV, K, V), device=device)[0]}
    wide = inputs["state"]
    refused(BufferError, f"{op}: state is written, but shares memory with q", getattr(mg, op),
            **inputs | {"q": wide[:, :H, :, 0].as_strided((B, H, K), (HV * K * V, K * V, 1))})
    several = inputs | {name: inputs[name][:, None] for name in ("q", "k", "v", "g", "beta")}
    refused(BufferError, f"{op}: ", getattr(mg, op), **several, intermediate_states=wide[:, None])
    refused(BufferError, f"{op}: intermediate_states is written, but with shape", getattr(mg, op), **several,
            intermediate_states=tensors((1, 1, HV, K, V), device=device)[0].expand(B, 1, HV, K, V))


@pytest.mark.parametrize("op", OPS)
def test_bad_18_30_derivatives(op):
    """Of gradients and forwards there are none; steps for generation have none at all."""
    inputs = {name: t.float().requires_grad_() for name, t in problem(op).items()}
    with pytest.raises(NotImplementedError, match=f"{op}: gradients of gradients .* are not implemented"):
        torch.autograd.grad(run(op, inputs).sum(), inputs["q"], create_graph=True)[0].sum().backward()
    plain = tuple(t.detach() for t in inputs.values())
    refused(NotImplementedError, f"{op}: forward-mode derivatives", torch.func.jvp, getattr(mg, op), plain, plain)


@pytest.mark.parametrize("op", STEPS)
def test_bad_18_30_35_steps_and_autograd(op):
    """A step has no gradient, and its write counts as one in place."""
    inputs = problem(op)
    assert not run(op, {name: t.clone().requires_grad_() for name, t in inputs.items()}).requires_grad
    for way in (lambda q: getattr(mg, op)(**inputs | {"q": q}), ):
        for transform in (torch.func.grad(lambda q: way(q).float().sum()), torch.vmap(way)):
            refused(NotImplementedError, f"{op}: an argument belongs to a transform of torch.func", transform,
                    inputs["q"][None] if transform is not torch.func.grad else inputs["q"])
    state = inputs["state"].clone().requires_grad_().exp()
    getattr(mg, op)(**inputs | {"state": state})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        state.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("op", OPS)
def test_bad_20_not_finite(op, value, device, one_thread):
    """A value that is not finite reaches its column of v, or its heads, from its chunk on, and nothing else."""
    inputs = problem(op, device)
    clean = run(op, inputs)
    for name, head, reached in (("v", 2, (2, 7)), ("q", 1, (slice(2, 4),)), ("k", 1, (slice(2, 4),)), ("beta", 3, (3,)),
                                ("g", 3, (3,))):
        given = inputs | {name: inputs[name].clone()}
        given[name][(1, 66, head, 7)[:given[name].ndim]] = value
        out = run(op, given)
        of_heads = (1, slice(64, None), *reached)
        assert not out[1, 66][reached].isfinite().any() or value == math.inf, name
        out[of_heads] = clean[of_heads]
        assert torch.equal(out, clean), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_bad_20_not_finite_gradients(op, device, one_thread):
    """Other heads and batch entries have the gradients that they had."""
    inputs = problem(op, device)
    clean = gradients(op, inputs)[2:]
    inputs["v"] = inputs["v"].clone()
    inputs["v"][1, 66, 2, 7] = math.nan
    for grad, before in zip(gradients(op, inputs)[2:], clean):
        reached = (1, slice(None), 2 * grad.shape[2] // HV)
        assert grad[reached].isnan().any()
        grad[reached] = before[reached]
        assert torch.equal(grad, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", STEPS)
def test_bad_20_not_finite_states(op, device):
    """What is not finite stays with its sample."""
    inputs = problem(op, device)
    clean = run(op, inputs)
    for name in inputs:
        given = {n: t.clone() for n, t in inputs.items()}
        given[name][1] = math.nan
        out = getattr(mg, op)(**given)
        assert torch.equal(out[0], clean[0]) and given["state"][0].isfinite().all(), name


@pytest.mark.parametrize("op", OPS)
def test_bad_21_starts(op):
    inputs = packed(op)
    for starts, message in (([5, 70], "cu_seqlens[0] is 5, expected 0"), ([0, 40, 30, 70], "cu_seqlens[2] is 30"),
                            ([0, 71], "cu_seqlens[1] is 71"), ([0, -1, 70], "cu_seqlens[1] is -1"),
                            ([0, 2**32 + 70], f"cu_seqlens[1] is {2**31 - 1}"), ([], "STARTS = 0"),
                            ([0], "expected no steps where cu_seqlens has one number")):
        for dtype in (torch.int32, torch.int64) if 2**32 + 70 not in starts else (torch.int64,):
            given = torch.tensor(starts, dtype=dtype)
            refused(ValueError, message, run, op, inputs, cu_seqlens=given)
            if starts:
                arrays = {name: t.float().numpy() for name, t in inputs.items()}
                refused(ValueError, message, run, op, arrays, cu_seqlens=given.numpy())
    refused(ValueError, "expected B == 1 where cu_seqlens is given", run, op, problem(op),
            cu_seqlens=torch.tensor([0, 70]))
    refused(ValueError, "ROWS = 1 (dimension 0 of initial_state), R = 2", run, op, inputs,
            cu_seqlens=torch.tensor([0, 30, 70]), initial_state=torch.zeros(1, HV, K, V))
    expected = run(op, inputs, cu_seqlens=torch.tensor([0, 0, 30, 70], dtype=torch.int32))
    assert torch.equal(run(op, inputs, cu_seqlens=torch.tensor([0, 0, 30, 70])), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_bad_21_steps_behind_the_last_sequence(op, device):
    """Their output and their gradients are 0, and they reach nothing."""
    inputs, starts = packed(op, device=device), torch.tensor([0, 30, 50], device=device)
    expected = gradients(op, {name: t[:, :50].contiguous() for name, t in inputs.items()}, cu_seqlens=starts)
    for t in inputs.values():
        t[:, 50:] = math.nan
    out, state, *grads = gradients(op, inputs, cu_seqlens=starts)
    assert torch.equal(state, expected[1])
    for found, right in zip((out, *grads), (expected[0], *expected[2:]), strict=True):
        assert torch.equal(found[:, :50], right) and not found[:, 50:].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("op", STEPS)
def test_bad_21_places_that_do_not_exist(op, dtype, device):
    """No state is read or written for a place that there is not, and out is 0. float64 is computed by PyTorch."""
    inputs = problem(op, device) | {"state": torch.ones(3, HV, K, V, device=device, dtype=dtype)}
    before, dtypes = inputs["state"].clone(), (torch.int32, torch.int64)
    for places, dtype in (((-1, 3), dtypes), ((-2**31, 2**31 - 1), dtypes), ((2**32, -2**32 + 1), dtypes[1:])):
        for kind in dtype:
            at = torch.tensor(places, dtype=kind, device=device)
            assert not getattr(mg, op)(**inputs, state_indices=at).any()
            assert torch.equal(inputs["state"], before)
    several = inputs | {name: inputs[name][:, None] for name in ("q", "k", "v", "g", "beta")}
    wild = torch.tensor([[2**32], [7]], device=device)
    assert not getattr(mg, op)(**several, token_indices=wild).any() and torch.equal(inputs["state"], before)
    kept = torch.zeros(2, 1, HV, K, V, device=device, dtype=before.dtype)
    getattr(mg, op)(**several, state_indices=torch.tensor([2, -1], device=device), intermediate_states=kept,
                    intermediate_indices=torch.tensor([2**32 + 1, 0], device=device), update_state=False)
    assert not kept.any() and torch.equal(inputs["state"], before)
    here = torch.tensor([[0], [1]], device=device)
    for accepted in ((0, 2), (-2**31, 2**31 - 1), (2**32 + 1, 5)):
        out = getattr(mg, op)(**several, token_indices=here, num_accepted_tokens=torch.tensor(accepted, device=device))
        assert not out.any() and torch.equal(inputs["state"], before)


@pytest.mark.parametrize("op", OPS)
def test_bad_22_starts_of_another_kind(op):
    inputs = packed(op)
    for starts, error, message in (
            (torch.tensor([0.0, 70.0]), TypeError,
             "cu_seqlens is a tensor of dtype float32, expected a tensor of int32"),
            (torch.tensor([False, True]), TypeError,
             "cu_seqlens is a tensor of dtype bool, expected a tensor of int32"),
            ([0, 70], TypeError, "cu_seqlens is list, expected a tensor of int32"),
            (numpy.array([0, 70]), TypeError, "cu_seqlens is ndarray, expected torch.Tensor"),
            (torch.tensor([[0, 70]]), ValueError, "cu_seqlens has 2 dimensions, expected 1"),
            (torch.empty(2, dtype=torch.int32, device="meta"), ValueError, "cu_seqlens is on meta, expected cpu")):
        refused(error, f"{op}: {message}", run, op, inputs, cu_seqlens=starts)


@pytest.mark.parametrize("op", STEPS)
def test_bad_22_places_of_another_kind(op):
    inputs = problem(op)
    several = inputs | {name: inputs[name][:, None] for name in ("q", "k", "v", "g", "beta")}
    kept = torch.zeros(B, 1, HV, K, V)
    for name, wide, others in (("state_indices", False, {}), ("intermediate_indices", False, dict(
            intermediate_states=kept)), ("token_indices", True, {}), ("num_accepted_tokens", False, dict(
                token_indices=torch.zeros(B, 1, dtype=torch.int32)))):
        at = torch.zeros((B, 1) if wide else (B,), dtype=torch.int64)
        for other in (at.float(), at.bool(), at.cfloat(), at[:1], at[None], at.sum()):
            refused(ValueError, f"{op}: {name} is of dtype {other.dtype} and shape {list(other.shape)}, expected", run,
                    op, several, **others, **{name: other})
        refused(TypeError, f"{op}: {name} is list, expected torch.Tensor (same as q)", run, op, several, **others,
                **{name: at.tolist()})
        refused(ValueError, f"{op}: {name} is on meta, expected cpu (same as q)", run, op, several, **others,
                **{name: at.to("meta")})


@pytest.mark.parametrize("op", OPS + STEPS)
def test_bad_28_threads(op):
    """The first calls of a process at once, from several threads."""
    g = "-x[..., 0].abs()" if op.startswith("gated") else "-x.abs()"
    call = (f"mg.{op}(x, x, x, {g}, x[..., 0].sigmoid())" if op in OPS else
            f"mg.{op}(torch.zeros(2, 3, 16, 16), *(t[:, 0] for t in (x, x, x, {g}, x[..., 0].sigmoid())))")
    result = run_python(f"""
import threading, torch, margay as mg
x = torch.randn(2, 150, 3, 16, generator=torch.Generator().manual_seed(0)) / 4
results, barrier = [None] * 8, threading.Barrier(8)
def call(i):
    barrier.wait()
    for _ in range(3): results[i] = {call}
threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
assert all(torch.equal(r, results[0]) for r in results) and results[0].isfinite().all()
""")
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_bad_29_31_streams_and_captures(op):
    """On the current stream, behind what is there already; a graph computes on new values when it is replayed."""
    inputs = problem(op, "cuda")
    expected = run(op, inputs)
    late, stream = inputs | {"q": torch.zeros_like(inputs["q"])}, torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late["q"].copy_(inputs["q"])
        out = run(op, late)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    leaves = {name: t.clone().requires_grad_() for name, t in (inputs | gate(op, "cuda")).items() if name != "use_gate"}
    options = dict(use_gate=True, use_qk_l2norm=True)
    with torch.cuda.graph(graph):
        results = run(op, leaves, **options)
        grads = torch.autograd.grad(results, leaves.values(), torch.ones_like(results))
    with torch.no_grad():
        leaves["q"].mul_(-0.5)
    graph.replay()
    fresh = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    again = run(op, fresh, **options)
    assert torch.equal(results, again)
    assert all(map(torch.equal, grads, torch.autograd.grad(again, fresh.values(), torch.ones_like(again))))


@pytest.mark.parametrize("op", OPS)
def test_bad_32_38_fakes_and_subclasses(op):
    inputs = problem(op)
    expected = run(op, inputs)
    with FakeTensorMode() as mode:
        fake = run(op, {name: mode.from_tensor(t) for name, t in inputs.items()})
    assert fake.shape == expected.shape and fake.stride() == expected.stride() and fake.dtype == expected.dtype
    with torch.inference_mode():
        assert torch.equal(run(op, inputs), expected)
    assert run(op, {name: t.to("meta") for name, t in inputs.items()}).device.type == "meta"
    out = run(op, inputs | {"q": inputs["q"].as_subclass(Wrapped)})
    assert isinstance(out, Wrapped) and torch.equal(out.as_subclass(torch.Tensor), expected)
    refused(TypeError, f"{op}: v has layout torch.sparse_coo, expected torch.strided", run, op,
            inputs | {"v": inputs["v"].to_sparse()})
    batched = torch.vmap(lambda t: run(op, inputs | {"q": t}))(torch.stack((inputs["q"], 2 * inputs["q"])))
    assert torch.equal(batched[0], expected)
    others = {name: t.float() for name, t in inputs.items()}
    negative = torch.complex(others["q"], others["q"]).conj().imag
    assert negative.is_neg() and torch.equal(run(op, others | {"q": negative}), run(op, others | {"q": -others["q"]}))


@pytest.mark.parametrize("op", OPS)
def test_bad_32_compiled(op):
    """With as many arguments left out as may be, the gradients are those of eager mode, gates inside too."""
    inputs = problem(op)
    for options in ({}, gate(op) | dict(use_qk_l2norm=True, use_beta_sigmoid=True)):
        for backend in ("eager", "aot_eager"):
            call = torch.compile(gradients, backend=backend)
            assert all(map(torch.equal, call(op, inputs, **options), gradients(op, inputs, **options)))
        kinds = {name: t for name, t in options.items() if isinstance(t, torch.Tensor)}
        order = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
        leaves = {name: t.detach().requires_grad_() for name, t in (inputs | kinds).items()}
        numbers = {} if not options else dict(beta_form=1, l2norm=True)
        named = [leaves[name] for name in order if name in leaves]
        out, *_ = getattr(torch.ops.margay, op)(*named, **numbers)
        assert all(map(torch.equal, torch.autograd.grad(out.float().square().sum(), named),
                       torch.autograd.grad(run(op, leaves, **{n: x for n, x in options.items() if n not in kinds}
                                               ).float().square().sum(), named)))


@pytest.mark.parametrize("op", STEPS)
def test_bad_32_38_steps(op):
    inputs = problem(op)
    expected = run(op, inputs)
    with FakeTensorMode() as mode:
        fake = run(op, {name: mode.from_tensor(t) for name, t in inputs.items()})
        assert fake.shape == expected.shape and fake.dtype == expected.dtype
        refused(ValueError, f"{op}: k has shape [2, 2, 23], expected [2, 2, 24]", run, op, {
            name: mode.from_tensor(t)[..., :-1] if name == "k" else mode.from_tensor(t) for name, t in inputs.items()})
    with torch.inference_mode():
        assert torch.equal(run(op, inputs), expected)
    out = run(op, inputs | {"q": inputs["q"].as_subclass(Wrapped)})
    assert torch.equal(out.as_subclass(torch.Tensor), expected)
    for name in inputs:
        refused(TypeError, f"{op}: {name} has layout torch.sparse_coo, expected torch.strided", getattr(mg, op),
                **inputs | {name: inputs[name].to_sparse()})
    before = {name: t.double() for name, t in inputs.items()}
    kept = before["state"].clone()
    assert "PyTorch's operations compute" in mg.explain(getattr(mg, op), *before.values())
    assert torch.equal(before["state"], kept)


@pytest.mark.parametrize("op", OPS)
def test_bad_37_traced(op):
    inputs = problem(op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(getattr(mg, op), tuple(inputs.values()), check_trace=False)
    others = [t * 0.5 for t in inputs.values()]
    assert "margay::" in str(traced.inlined_graph) and torch.equal(traced(*others), getattr(mg, op)(*others))


@pytest.mark.parametrize("scale", (math.nan, math.inf, -math.inf, 0.0, -0.125, 1e-50))
@pytest.mark.parametrize("op", OPS + STEPS)
def test_bad_39_scale(op, scale):
    refused(ValueError, f"{op}: scale is {scale:g}, expected a positive finite number", run, op, problem(op),
            scale=scale)


@pytest.mark.parametrize("op", OPS + STEPS)
def test_bad_39_values(op):
    inputs, given = problem(op), gate(op)
    for change, error, message in (
            (dict(scale="a"), TypeError, "scale is 'a', expected a number"),
            (dict(use_gate=True), ValueError, "A_log is None, expected a tensor where use_gate is True"),
            (given | dict(use_gate=False), ValueError, "A_log is given, expected None where use_gate is False"),
            (dict(dt_bias=given["dt_bias"]), ValueError, "dt_bias is given, expected None where use_gate is False"),
            (dict(allow_neg_eigval=True), ValueError,
             "allow_neg_eigval is True, expected False where use_beta_sigmoid is False"),
            (dict(use_beta_sigmoid=True, beta=None), ValueError,
             "beta is None, expected a tensor where use_beta_sigmoid is True")):
        refused(error, f"{op}: {message}", run, op, inputs | change)
    for name in ("causal", "head_first", "use_qk_l2norm_in_kernel"):
        refused(TypeError, f"unexpected keyword argument '{name}'", run, op, inputs, **{name: True})
    if op.startswith("kda"):
        for bound in (0, 5, math.nan, -math.inf, -1e-50):
            refused(ValueError, f"{op}: lower_bound is {bound:g}, expected a negative finite number", run, op, inputs,
                    **given, lower_bound=bound)
        refused(ValueError, f"{op}: lower_bound is -5, expected None where use_gate is False", run, op, inputs,
                lower_bound=-5)
        refused(TypeError, f"{op}: lower_bound is 'a', expected a number", run, op, inputs, **given, lower_bound="a")
        refused(ValueError, f"{op}: lower_bound is an integer of 1329 bits", run, op, inputs, **given,
                lower_bound=-10**400)


@pytest.mark.parametrize("op", OPS + STEPS)
def test_bad_39_sizes_for_explain(op):
    probe_sizes((op, op + ("s" if op in STEPS else "_bwd")), "B T H HV K V R SLOTS STEPS KEEP".split())
