"""PyTorch tensors: operators, compilation, autocast, checkpointing, modes, the layers."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import margay as mg
import reference
from cases import DEVICES, check_error, check_lse
from margay.families.attention import attention_torch
from margay.families.gemm import matmul_torch  # noqa: F401  registers its operator

DTYPES = (torch.bfloat16, torch.float32)
PRECISIONS = torch.bfloat16, torch.float64       # of the formula: what is allowed, what is exact
ACTIVATIONS = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
               "silu": F.silu}


def skip_float32_on_cuda(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 runs on the CPU only")


def qkv(device="cpu", dtype=torch.bfloat16, requires_grad=True, layout="rows first"):
    g = torch.Generator().manual_seed(0)
    shapes = (2, 4, 33, 64), (2, 2, 40, 64), (2, 2, 40, 48)
    values = [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]
    if layout == "rows first":
        values = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in values]
    return [t.requires_grad_(requires_grad) for t in values]


def matrices(device="cpu", dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=g).to(device, dtype).requires_grad_() for shape in ((24, 40), (40, 56), (56,))]


# ---- operators


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ("rows first", "heads first"))
def test_opcheck_attention(device, dtype, layout):
    skip_float32_on_cuda(device, dtype)
    q, k, v = qkv(device, dtype, layout=layout)
    torch.library.opcheck(torch.ops.margay.attention.default, (q, k, v, None, True, True))
    torch.library.opcheck(torch.ops.margay.attention.default, (q.detach(), k.detach(), v.detach(), 0.25))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dlse", (False, True))
def test_opcheck_attention_backward(device, dlse):
    q, k, v = qkv(device, requires_grad=False)
    out, lse = mg.attention(q, k, v, return_lse=True)
    torch.library.opcheck(torch.ops.margay.attention_backward.default,
                          (torch.ones_like(out), lse if dlse else None, q, k, v, out, lse, None, False, True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", range(5))
def test_opcheck_matmul(device, activation):
    a, b, bias = matrices(device)
    torch.library.opcheck(torch.ops.margay.matmul.default, (a, b, bias, activation))
    torch.library.opcheck(torch.ops.margay.matmul.default, (a.detach(), b.detach().t().contiguous().t()))


def test_tags():
    for name in ("attention", "attention_backward", "matmul"):
        tags = getattr(torch.ops.margay, name).default.tags
        assert torch.Tag.pt2_compliant_tag in tags and torch.Tag.needs_exact_strides in tags


@pytest.mark.parametrize("device", DEVICES)
def test_operator_and_function_agree(device):
    q, k, v = qkv(device)
    for found, expected in zip(torch.ops.margay.attention(q, k, v, 0.2, True, True),
                               mg.attention(q, k, v, scale=0.2, causal=True, return_lse=True)):
        assert torch.equal(found, expected)
    dout = torch.randn_like(mg.attention(q, k, v).detach())
    one = torch.autograd.grad(torch.ops.margay.attention(q, k, v, None, False, True)[0], (q, k, v), dout)
    two = torch.autograd.grad(mg.attention(q, k, v, deterministic=True), (q, k, v), dout)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(one, two))


# ---- compilation


def results_of(function, inputs, *sent):
    """The results of a function and its gradients where `sent` comes back to them, and ones to the results beside."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    sent = [*(d.to(t.dtype) for d, t in zip(sent, results)), *map(torch.ones_like, results[len(sent):])]
    return *(t.detach() for t in results), *torch.autograd.grad(results, leaves, sent)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", (False, True))
def test_compile_attention(device, dynamic):
    def f(q, k, v):
        out, lse = mg.attention(q * 2, k, v, causal=True, return_lse=True, deterministic=True)
        return out.transpose(1, 2).flatten(2).sin(), lse

    def formula(q, k, v):
        out, lse = reference.attention(q * 2, k, v, causal=True)
        return out.transpose(1, 2).flatten(2).sin(), lse

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    for rows in (33, 21):
        inputs = [t.detach()[:, :, :rows].clone() for t in qkv(device)]
        dout = torch.randn(2, rows, 4 * 48, device=device, dtype=torch.bfloat16,
                           generator=torch.Generator(device).manual_seed(2))
        plain, exact = (results_of(formula, [t.to(dtype) for t in inputs], dout) for dtype in PRECISIONS)
        for function in (f, compiled):
            found = results_of(function, inputs, dout)
            check_error("out", found[0], plain[0], exact[0])
            check_lse(found[1], exact[1], inputs[0] * 2, inputs[1], None)
            for i, name in enumerate(("dq", "dk", "dv"), 2):
                check_error(name, found[i], plain[i], exact[i], 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", (None, "gelu"))
def test_compile_matmul(device, activation):
    a, b, bias = matrices(device)

    def f(a, b, bias):
        return mg.matmul(a.unflatten(0, (2, 12)), b, bias=bias, activation=activation)

    def formula(a, b, bias):
        return ACTIVATIONS[activation](a @ b + bias).unflatten(0, (2, 12))

    plain, exact = (results_of(formula, [t.to(dtype) for t in (a, b, bias)]) for dtype in PRECISIONS)
    for function in (f, torch.compile(f, fullgraph=True)):
        for i, (name, found) in enumerate(zip(("out", "da", "db", "dbias"), results_of(function, (a, b, bias)))):
            check_error(name, found, plain[i], exact[i], 3 if i else 2)


def test_compile_under_autocast():
    q, k, v = qkv(dtype=torch.float32)

    @torch.compile(fullgraph=True)
    def f(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return mg.attention(q, k, v)

    with torch.autocast("cpu", torch.bfloat16):
        expected = mg.attention(q, k, v)
    assert f(q, k, v).dtype == torch.bfloat16 and torch.equal(f(q, k, v), expected)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return mg.attention(q, k, v, causal=True)

    inputs = tuple(qkv(requires_grad=False))
    program = torch.export.export(Model(), inputs)
    assert "margay.attention" in str(program.graph) and torch.equal(program.module()(*inputs), Model()(*inputs))


# ---- autocast, checkpointing, determinism


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(device, dtype):
    """Inside autocast the computation is in its dtype; gradients come back in the dtype of the inputs."""
    q, k, v = qkv(device, torch.float32)
    with torch.autocast(device, dtype):
        out = mg.attention(q, k, v)
        operator = torch.ops.margay.attention(q, k, v)[0]
        product = mg.matmul(q[0, 0], k[0, 0].mT)
    assert out.dtype == operator.dtype == product.dtype == dtype
    assert torch.equal(out, mg.attention(*(t.to(dtype) for t in (q, k, v)))) and torch.equal(out, operator)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.sum() + product.sum(), (q, k, v)))
    with torch.autocast(device, dtype, enabled=False), torch.autocast("cpu" if device == "cuda" else "cuda",
                                                                      torch.bfloat16, enabled=device == "cuda"):
        assert device == "cuda" or mg.attention(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoint(device, reentrant):
    q, k, v = qkv(device)

    def f(q, k, v):
        return mg.attention(q, k, v, causal=True, deterministic=True).square()

    plain = torch.autograd.grad(f(q, k, v).sum(), (q, k, v))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    checkpoint(f, *leaves, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip(leaves, plain))


def test_deterministic_algorithms(monkeypatch):
    """torch.use_deterministic_algorithms asks for the deterministic backward."""
    asked = []
    original = attention_torch._C.attention_bwd

    class Recorder:
        def __getattr__(self, name):
            return getattr(mg._C, name)

        def attention_bwd(self, *arguments):
            asked.append(arguments[13])
            return original(*arguments)

    monkeypatch.setattr(attention_torch, "_C", Recorder())
    q, k, v = qkv()
    for on, wanted in ((False, False), (True, False), (False, True)):
        torch.use_deterministic_algorithms(on)
        try:
            torch.autograd.grad(mg.attention(q, k, v, deterministic=wanted).sum(), q)
        finally:
            torch.use_deterministic_algorithms(False)
    assert asked == [False, True, True]


def test_matmul_double_backward():
    def second(product, dtype):
        a, b, bias = (t.detach().to(dtype).requires_grad_() for t in matrices())
        (da,) = torch.autograd.grad(product(a, b, bias).square().sum(), a, create_graph=True)
        return torch.autograd.grad(da.sum(), (a, b))

    formula = lambda a, b, bias: a @ b + bias
    found = second(lambda a, b, bias: mg.matmul(a, b, bias=bias), torch.float32)
    plain, exact = second(formula, torch.float32), second(formula, torch.float64)
    for name, x, plain, exact in zip(("da", "db"), found, plain, exact):
        check_error(name, x, plain, exact, 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matmul_gradient(device, activation):
    inputs = matrices(device)
    dout = torch.randn(24, 56, generator=torch.Generator().manual_seed(3)).to(device, torch.bfloat16)
    formula = lambda a, b, bias: ACTIVATIONS[activation](a @ b + bias)
    found = results_of(lambda a, b, bias: mg.matmul(a, b, bias=bias, activation=activation), inputs, dout)
    plain, exact = (results_of(formula, [t.to(dtype) for t in inputs], dout) for dtype in PRECISIONS)
    for name, x, y, z in zip(("da", "db", "dbias"), found[1:], plain[1:], exact[1:]):
        check_error(name, x, y, z, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_kept(device):
    """No graph, tensor or workspace outlives a backward pass."""
    q, k, v = qkv(device)
    out = mg.attention(q, k, v)
    out.sum().backward()
    kept = [weakref.ref(t) for t in (q, k, v, out)]
    del q, k, v, out
    gc.collect()
    assert all(ref() is None for ref in kept)


def test_inference_mode():
    q, k, v = qkv()
    with torch.inference_mode():
        out = mg.attention(q, k, v)
    assert out.is_inference() and torch.equal(out, mg.attention(q, k, v))


# ---- layers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", (dict(), dict(num_kv_heads=2, bias=True), dict(head_dim=24, causal=False),
                                     dict(scale=0.3)))
def test_layer(device, options):
    torch.manual_seed(0)
    layer = mg.nn.Attention(64, 4, **options).to(device, torch.bfloat16)
    x = torch.randn(2, 19, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    check_layer(layer, layer, x, options)


def check_layer(layer, function, x, options):
    """A function that is to be the layer, with its gradients, against the same layer with attention as a formula."""
    def results(function, layer, x):
        x = x.detach().requires_grad_()
        out = function(x)
        return out.detach(), *torch.autograd.grad(out.sum(), (x, *layer.parameters()))

    def formula(dtype):
        other = mg.nn.Attention(64, 4, **options).to(x.device, dtype)
        other.load_state_dict(layer.state_dict())
        other.attend = lambda q, k, v: reference.attention(q, k, v, causal=other.causal, scale=other.scale)[0]
        return results(other, other, x.to(dtype))

    names = "out", "dx", *(f"gradient of {name}" for name, _ in layer.named_parameters())
    three = results(function, layer, x), formula(x.dtype), formula(torch.float64)
    for i, (name, found, plain, exact) in enumerate(zip(names, *three, strict=True)):
        check_error(name, found, plain, exact, 3 if i else 2)


def test_layer_copies_nothing(monkeypatch):
    """The kernel sees slices of the projection and writes in the layout of the next one."""
    seen = []
    monkeypatch.setattr("margay.nn.attention",
                        lambda q, k, v, **options: seen.extend((q, k, v)) or mg.attention(q, k, v, **options))
    layer = mg.nn.Attention(64, 4, 2)
    layer(torch.randn(2, 19, 64))
    q, k, v = seen
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    out = mg.attention(q, k, v).transpose(1, 2)
    assert out.flatten(2).data_ptr() == out.data_ptr()


def test_layer_refuses():
    with pytest.raises(ValueError, match="num_heads is 3, expected a multiple of num_kv_heads, which is 2"):
        mg.nn.Attention(64, 3, 2)
    with pytest.raises(ValueError,
                       match="embed_dim is 65, expected a multiple of num_heads, which is 4, or a head_dim"):
        mg.nn.Attention(65, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_layer_compiled(device):
    torch.manual_seed(0)
    layer = mg.nn.Attention(64, 4, 2).to(device, torch.bfloat16)
    x = torch.randn(2, 19, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    check_layer(layer, torch.compile(layer, fullgraph=True), x, dict(num_kv_heads=2))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("before", ("torch", "margay"))
def test_one_team_of_threads(before):
    """Kernels run on the threads that PyTorch's OpenMP has; a forked process, where those are gone, has threads of its
    own."""
    program = f"""
import os, numpy, {before}
import torch, margay as mg
from margay import _C
torch.set_num_threads(3)
team = lambda: len(os.listdir("/proc/self/task"))
a = torch.randn(2, 4, 300, 64)
torch.randn(1 << 22).exp_()
alone = team()
out = mg.attention(a, a, a)
assert _C.num_threads() == 3
assert team() == alone, (team(), alone)
child = os.fork()
if child == 0:
    again = torch.empty_like(a)
    _C.attention_fwd(again, None, a, a, a, 0.125, False)
    os._exit(0 if team() == 3 and (again.numpy() == out.numpy()).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
