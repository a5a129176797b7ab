"""torch.func and its relatives: grad, vmap, Jacobians, per-sample gradients; what is refused; tracers; the count of
writes that autograd keeps."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

import margay as mg
import reference
from cases import DEVICES, check_error

pytestmark = pytest.mark.usefixtures("one_thread")
ROUNDING = (2**-18, 2**-18)
SINK = torch.tensor([0.5, -1.0])
SLOPES = torch.tensor([0.3, 0.1])


def tensors(device, *shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
            for shape in shapes]


def with_sdpa(**options):
    def attention(*inputs):
        with mg.enable_sdpa(), warnings.catch_warnings():
            warnings.simplefilter("error", mg.FallbackWarning)
            return F.scaled_dot_product_attention(*inputs, **options)
    return attention


def plain(**options):
    """The definition, in the precision of q. What is no input is made to fit it."""
    return lambda q, k, v: reference.attention(q, k, v, **{n: t.to(q.device, q.dtype) if isinstance(t, torch.Tensor) and
                                                           t.is_floating_point() else t
                                                           for n, t in options.items()})[0]


def ours(**options):
    return lambda q, k, v: mg.attention(q, k, v, **{n: t.to(q.device) if isinstance(t, torch.Tensor) else t
                                                    for n, t in options.items()})


KEYS = torch.tensor([[True] * 5 + [False] * 4, [False, True, True] * 3])[:, None, None]
FUNCTIONS = {
    "attention": (ours(), plain()),
    "operator": (lambda q, k, v: torch.ops.margay.attention(q, k, v, None, True)[0], plain(causal=True)),
    "window": (ours(causal=True, window=(3, 0), softcap=2.0), plain(causal=True, window=(3, 0), softcap=2.0)),
    "sink and slopes": (ours(sink=SINK, alibi_slopes=SLOPES), plain(sink=SINK, alibi_slopes=SLOPES)),
    "sdpa": (with_sdpa(), plain()),
    "sdpa of keys": (lambda q, k, v: with_sdpa(attn_mask=KEYS.to(q.device))(q, k, v),
                     lambda q, k, v: plain(visible=KEYS.to(q.device))(q, k, v)),
}


def loss(f):
    return lambda *inputs: f(*inputs).square().sum()


def batched_gradients(f):
    def gradients(*inputs):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = f(*leaves)
        douts = torch.stack([torch.ones_like(out),
                             torch.arange(out.numel(), device=out.device).view_as(out).to(out.dtype) / out.numel()])
        return torch.autograd.grad(out, leaves, douts, is_grads_batched=True)
    return gradients


def vjp_outside(f):
    """The backward runs when the transform is over, with and without grad mode."""
    def derivative(*inputs):
        out, pull = vjp(f, *inputs)
        with torch.no_grad():
            return pull(torch.ones_like(out)), pull(out.detach())
    return derivative


ALL = (0, 1, 2)
TRANSFORMS = {
    "grad": lambda f: grad(loss(f), ALL),
    "vjp": vjp_outside,
    "jacrev": lambda f: jacrev(lambda *inputs: f(*inputs)[:, :, ::4], ALL),
    "vectorized jacobian": lambda f: lambda *inputs:
        torch.autograd.functional.jacobian(lambda *x: f(*x)[:, :, ::4], inputs, vectorize=True),
    "is_grads_batched": batched_gradients,
}
COMPOSED = {
    "vmap": lambda f, dims: vmap(f, dims),
    "vmap(grad)": lambda f, dims: vmap(grad(loss(f), ALL), dims),
    "grad(vmap)": lambda f, dims: grad(loss(vmap(f, dims)), ALL),
    "vmap(jacrev)": lambda f, dims: vmap(jacrev(lambda *inputs: f(*inputs)[:1, :, ::8], ALL), dims),
    "vmap(vmap)": lambda f, dims: lambda *inputs:
        vmap(vmap(f, dims), (None, 0, None))(inputs[0], torch.stack((inputs[1], inputs[1] / 2)), inputs[2]),
    "backward through vmap": lambda f, dims: backward_through(lambda *inputs: vmap(f, dims)(*inputs)),
}


def backward_through(f):
    def gradients(*inputs):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        return torch.autograd.grad(f(*leaves).square().sum(), leaves)
    return gradients


def check(transformed, inputs, factor=3):
    """transformed: of Margay and of the definition. The rule of the house: three times the error that the definition
    has in the same precision."""
    found, plain_found = (tree_leaves(f(*inputs)) for f in transformed)
    exact = tree_leaves(transformed[1](*(t.double() for t in inputs)))
    assert len(found) == len(plain_found) == len(exact)
    for i, leaves in enumerate(zip(found, plain_found, exact)):
        check_error(f"result {i}", *(t.detach() for t in leaves), factor, ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives(device, function, transform):
    inputs = tensors(device, (2, 2, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    check([TRANSFORMS[transform](f) for f in FUNCTIONS[function]], inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", ((0, 0, 0), (0, None, 0), (None, 1, None), (-1, 2, 3)))
@pytest.mark.parametrize("transform", COMPOSED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_vmap(device, function, transform, dims):
    inputs = [t if dim is None else torch.stack((t, t / 2, -t), dim)
              for t, dim in zip(tensors(device, *[(2, 2, 9, 8)] * 3), dims)]
    check([COMPOSED[transform](f, dims) for f in FUNCTIONS[function]], inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", ((0, 0, 0, 0, None), (0, None, 1, None, 0),
                                  (None, None, None, -1, 1), (0, 0, 0, None, None)))
def test_vmap_of_sinks_and_slopes(device, dims):
    """A sink that differs from sample to sample has gradients of its own; grouped heads, dv other than d."""
    sizes = (2, 4, 9, 8), (2, 2, 13, 8), (2, 2, 13, 5)
    inputs = [*tensors(device, *sizes), torch.tensor([0.5, -1.0, 0.0, 3.0], device=device),
              torch.tensor([0.3, 0.1, 0.0, 0.2], device=device)]
    inputs = [t if dim is None else torch.stack((t, t / 2, t / 4), dim) for t, dim in zip(inputs, dims)]
    found, expected = (lambda q, k, v, s, a: mg.attention(q, k, v, sink=s, alibi_slopes=a),
                       lambda q, k, v, s, a: reference.attention(q, k, v, sink=s, alibi_slopes=a)[0])
    check([vmap(f, dims) for f in (found, expected)], inputs)
    check([vmap(grad(loss(f), (0, 1, 2, 3)), dims) for f in (found, expected)], inputs)
    check([grad(loss(vmap(f, dims)), (0, 1, 2, 3)) for f in (found, expected)], inputs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dims", ((0, 0, 0, None, None), (0, None, None, 0, None), (0, 0, 0, None, 0)))
def test_vmap_of_packed_sequences(device, dims):
    """Of samples that are packed the same way, and of samples that are not."""
    lengths = [[5, 0, 9], [4, 1, 9], [14, 0, 0]]
    starts = torch.tensor([[0, *torch.tensor(n).cumsum(0)] for n in lengths], dtype=torch.int32, device=device)
    starts_k = torch.tensor([0, 7, 9, 16], dtype=torch.int32, device=device)
    q, k, v = tensors(device, (3, 17, 2, 8), (3, 17, 2, 8), (3, 17, 2, 8))
    sinks = torch.tensor([[0.5, -1.0], [0.0, 2.0], [1.0, 1.0]], device=device)
    inputs = [t if dim == 0 else t[0] for t, dim in zip((q, k, v, sinks, starts), dims)]
    f = lambda q, k, v, s, cu: mg.attention_varlen(q, k, v, cu, starts_k, 17, 17, causal=True, sink=s)
    sample = lambda i: [t if dim is None else t[i] for t, dim in zip(inputs, dims)]
    gradients = grad(loss(f), (0, 1, 2, 3))

    def each(inputs, dims):
        out, dq, dk, dv, ds = [], [], [], [], []
        for i in range(3):
            q, k, v, s, cu = [t if dim is None else t[i] for t, dim in zip(inputs, dims)]
            leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, s)]
            rows, _ = reference.packed(leaves[0][:14], leaves[1][:16], leaves[2][:16],
                                       cu.diff().tolist(), [7, 2, 7], causal=True, sink=leaves[3])
            for results, t in zip((out, dq, dk, dv, ds), (F.pad(rows, (0, 0, 0, 0, 0, 3)).detach(),
                                                          *torch.autograd.grad(rows.square().sum(), leaves))):
                results.append(t)
        return [torch.stack(results) for results in (out, dq, dk, dv, ds)]

    found = [vmap(f, dims)(*inputs), *vmap(gradients, dims)(*inputs)]
    exact = each([t.double() if t.is_floating_point() else t for t in inputs], dims)
    for name, factor, *results in zip(("out", "dq", "dk", "dv", "dsink"), (2, 3, 3, 3, 3),
                                      found, each(inputs, dims), exact):
        check_error(name, *results, factor, ROUNDING)
    assert torch.equal(found[0][1], f(*sample(1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("randomness", ("error", "same", "different"))
def test_vmap_of_dropout(device, randomness):
    q, k, v = tensors(device, (3, 2, 2, 33, 8), (2, 2, 33, 8), (2, 2, 33, 8))
    q = q[:1].expand(3, -1, -1, -1, -1)

    def f(q, seed=None):
        return mg.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)

    with_seed = vmap(lambda q: f(q, 5), randomness=randomness)(q)
    assert torch.equal(with_seed, f(q[0], 5).expand_as(with_seed)), \
        "the same seed does not give the same in every sample"
    assert torch.equal(vmap(grad(lambda q: f(q, 5).float().square().sum()), randomness=randomness)(q)[2],
                       grad(lambda q: f(q, 5).float().square().sum())(q[2]))
    if randomness == "error":
        with pytest.raises(RuntimeError, match="attention: dropout_seed is None, which torch.vmap.randomness='error'. "
                           "does not allow; expected a seed"):
            vmap(f)(q)
        return
    torch.manual_seed(0)
    out = vmap(f, randomness=randomness)(q)
    assert torch.equal(out[0], out[1]) == (randomness == "same")
    torch.manual_seed(0)
    gradients = vmap(grad(lambda q: f(q).float().sum()), randomness=randomness)(q)
    torch.manual_seed(0)
    leaf = q.clone().requires_grad_()
    expected, = torch.autograd.grad(vmap(f, randomness=randomness)(leaf).float().sum(), leaf)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", (None, "relu", "gelu", "silu"))
def test_matmul(device, activation):
    act = {None: lambda x: x, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation]
    functions = lambda a, b, c: mg.matmul(a, b, bias=c, activation=activation), lambda a, b, c: act(a @ b + c)
    a, b, c = inputs = tensors(device, (5, 7), (7, 6), (6,))
    check([grad(loss(f), ALL) for f in functions], inputs)
    check([jacrev(f, ALL) for f in functions], inputs)
    check([batched_gradients(f) for f in functions], inputs)
    if device == "cpu":                       # bfloat16's second derivatives are mostly rounding
        check([jacrev(jacrev(loss(f))) for f in functions], inputs)
    for dims in ((0, None, None), (0, 0, 0), (None, 2, None), (1, 2, 1), (None, None, 0)):
        samples = [t if dim is None else torch.stack((t, t / 2, -t), dim) for t, dim in zip(inputs, dims)]
        check([vmap(f, dims) for f in functions], samples)
        check([vmap(grad(loss(f), ALL), dims) for f in functions], samples)
    more, = tensors(device, (3, 2, 5, 7), seed=1)
    assert torch.equal(vmap(lambda a: mg.matmul(a, b))(more), mg.matmul(more, b))


@pytest.mark.parametrize("device", DEVICES)
def test_per_sample_gradients(device):
    """vmap(grad(functional_call)) of a layer of ours, and of one of torch's on Margay."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).transpose(1, 3).unbind(2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gradients(layer, precision, x):
        """Of torch's attention, sample by sample."""
        layer = copy.deepcopy(layer).to(precision)
        layer.attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        each = [torch.autograd.grad(layer(t.to(precision)).square().sum(), list(layer.parameters())) for t in x]
        return [torch.stack(ts) for ts in zip(*each)]

    x, = tensors(device, (4, 1, 9, 16), seed=1)
    for layer in (mg.nn.Attention(16, 2, 1), Block()):
        layer = layer.to(device, dtype)
        parameters = {name: t.detach() for name, t in layer.named_parameters()}
        with mg.enable_sdpa():
            found = vmap(grad(lambda p, x: functional_call(layer, p, (x,)).square().sum()), (None, 0))(parameters, x)
        for name, *results in zip(parameters, found.values(), gradients(layer, dtype, x),
                                  gradients(layer, torch.float64, x)):
            check_error(name, *results, 3, ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
def test_fallback_in_a_transform(device):
    """What enable_sdpa leaves to PyTorch is PyTorch's under a transform as well."""
    inputs = tensors(device, *[(3, 2, 2, 9, 8)] * 3)
    mask = torch.ones(9, 9, dtype=torch.bool, device=device).tril()
    f = vmap(grad(loss(lambda *inputs: F.scaled_dot_product_attention(*inputs, mask)), ALL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")               # of torch's batching rules
        expected = f(*inputs)
        with mg.enable_sdpa():
            assert all(map(torch.equal, f(*inputs), expected))


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_in_a_transform(device):
    q, k, v = (t.float() for t in tensors(device, *[(3, 2, 2, 9, 8)] * 3))
    with torch.autocast(device, torch.bfloat16):
        found = vmap(grad(lambda q, k, v: mg.attention(q, k, v).float().square().sum(), ALL))(q, k, v)
        expected = [torch.stack(ts)
                    for ts in zip(*[backward_through(lambda *x: mg.attention(*x, deterministic=True).float())(*t)
                                    for t in zip(q, k, v)])]
    for a, b in zip(found, expected):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_vmap_of_decode(device):
    q, k, v = tensors(device, (3, 2, 1, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8))
    found = vmap(lambda q: mg.attention_decode(q, k, v, cache_seqlens=7, return_lse=True))(q)
    expected = [mg.attention_decode(x, k, v, cache_seqlens=7, return_lse=True) for x in q]
    assert all(torch.equal(a, torch.stack(b)) for a, b in zip(found, zip(*expected)))


def test_compiled():
    """A transform inside of one graph."""
    q, k, v = tensors("cpu", *[(3, 2, 2, 9, 8)] * 3)
    for options in (dict(causal=True), dict(window=(2, 2))):
        f = vmap(grad(loss(lambda q, k, v: mg.attention(q, k, v, **options)), ALL))
        torch._dynamo.reset()
        for a, b in zip(torch.compile(f, fullgraph=True)(q, k, v), f(q, k, v)):
            torch.testing.assert_close(a, b)


def test_functionalize():
    q, k, v = tensors("cpu", *[(2, 2, 9, 8)] * 3)
    assert torch.equal(torch.func.functionalize(mg.attention)(q, k, v), mg.attention(q, k, v))


# ---- what is refused


def calls(device):
    q, k, v = tensors(device, *[(2, 2, 9, 8)] * 3)
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    starts = torch.tensor([0, 9], dtype=torch.int32, device=device)
    return {
        "attention": (q, lambda q: mg.attention(q, k, v)),
        "attention k": (k, lambda k: mg.attention(q, k, v)),
        "attention window": (v, lambda v: mg.attention(q, k, v, window=(2, 2))),
        "attention operator": (q, lambda q: torch.ops.margay.attention(q, k, v)[0]),
        "attention varlen": (rows[0][0],
                             lambda q: mg.attention_varlen(q, rows[1][0], rows[2][0], starts, starts, 9, 9)),
        "attention_decode": (rows[0], lambda q: mg.attention_decode(q, rows[1], rows[2])),
        "attention_decode cache": (rows[1], lambda k: mg.attention_decode(rows[0], k, rows[2])),
        "matmul": (q[0, 0], lambda a: mg.matmul(a, k[0, 0].mT)),
        "matmul bias": (q[0, 0, :, 0].contiguous(), lambda c: mg.matmul(k[0, 0], q[0, 0].mT, bias=c)),
        "append_kv": (rows[0][:, :1], lambda k: mg.append_kv(rows[1].clone(), rows[2].clone(), k, k, cache_seqlens=3)),
    }


def with_dual(f, x, requires_grad):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x.clone().requires_grad_(requires_grad),
                                                             torch.ones_like(x)))).tangent


FORWARD = {
    "jvp": lambda f, x: jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "jvp of vmap": lambda f, x: jvp(lambda x: vmap(f)(torch.stack((x, x))), (x,), (torch.ones_like(x),)),
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x, strategy="forward-mode", vectorize=True),
    "hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "dual": lambda f, x: with_dual(f, x, False),
    "dual that requires a gradient": lambda f, x: with_dual(f, x, True),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", FORWARD)
def test_bad_30_forward_mode(device, mode):
    """Refused by name, where zeros came out."""
    for name, (x, f) in calls(device).items():
        op = name.split(" ")[0]
        with pytest.raises(NotImplementedError,
                           match=f"^{op}: .*(forward-mode derivatives|requires a gradient|belongs to a transform)"):
            FORWARD[mode](f, x)
    with forward_ad.dual_level():                      # of which no argument is part
        x, f = calls(device)["attention"]
        assert torch.equal(f(x), calls(device)["attention"][1](x))


@pytest.mark.parametrize("device", DEVICES)
def test_bad_30_transforms(device):
    x, f = calls(device)["attention"]
    with pytest.raises(NotImplementedError, match="^attention: gradients of gradients .* are not implemented$"):
        grad(lambda x: grad(lambda x: f(x).sum())(x).sum())(x)
    x, f = calls(device)["append_kv"]
    with pytest.raises(NotImplementedError, match="^append_kv: an argument belongs to a transform of torch.func"):
        vmap(lambda k: (f(k), k)[1])(torch.stack((x, x)))
    k, v, new = tensors(device, (2, 9, 2, 8), (2, 9, 2, 8), (2, 1, 2, 8))
    vmap(lambda x: (mg.append_kv(k, v, new, new, cache_seqlens=3), x)[1])(new)     # nothing of it is the transform's
    assert torch.equal(k[:, 3:4], new) and torch.equal(v[:, 3:4], new)
    x, f = calls(device)["attention_decode"]
    with pytest.raises(NotImplementedError, match="^attention_decode: an argument requires a gradient"):
        grad(lambda x: f(x).sum())(x)


# ---- tracers


@pytest.mark.parametrize("device", DEVICES)
def test_bad_37_traced(device):
    """torch.jit.trace records the operators; it recorded uninitialised memory."""
    q, k, v = tensors(device, *[(2, 2, 9, 8)] * 3)
    rows = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)

    def append(k_cache, v_cache, new):
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        mg.append_kv(k_cache, v_cache, new, new, cache_seqlens=4)
        return k_cache, v_cache

    def into(a, b):
        out = torch.empty(9, 9, dtype=a.dtype, device=device)
        return mg.matmul(a, b, out=out)

    cases = [(lambda q, k, v: mg.attention(q, k, v, return_lse=True), (q, k, v)),
             (lambda q, k, v: mg.attention(q, k, v, window=(3, 3), sink=SINK.to(device)), (q, k, v)),
             (lambda q, k, v: mg.attention_varlen(q, k, v, starts, starts, 9, 9), [t[0] for t in rows]),
             (lambda q, k, v: mg.attention_decode(q, k, v, cache_seqlens=4), rows),
             (append, (rows[1], rows[2], rows[0][:, :1].contiguous())),
             (lambda a, b: mg.matmul(a, b, activation="gelu"), (q[0], k[0, 0].mT)),
             (into, (q[0, 0], k[0, 0].mT)),
             (mg.nn.Attention(8, 1).to(device, q.dtype).requires_grad_(False), (q[0],))]
    for f, inputs in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(f, tuple(inputs), check_trace=False)
        others = [t * 0.5 for t in inputs]
        assert "margay::" in str(traced.inlined_graph)
        for found, expected in zip(tree_leaves(traced(*others)), tree_leaves(f(*others))):
            assert torch.equal(found, expected)


def test_bad_37_traced_gradients():
    inputs = [t.requires_grad_() for t in tensors("cpu", *[(2, 2, 9, 8)] * 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda q, k, v: mg.attention(q, k, v, deterministic=True),
                                 tuple(inputs), check_trace=False)
    found, expected = (torch.autograd.grad(f(*inputs).sum(), inputs)
                       for f in (traced, lambda *x: mg.attention(*x, deterministic=True)))
    assert all(map(torch.equal, found, expected))


# ---- writes that autograd has to know of


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ("eager", "operator"))
def test_bad_35_written(device, way):
    """A backward that needs what an output held before raises, as after an operator of torch in place."""
    a, b, out = tensors(device, (4, 8), (8, 8), (4, 8))
    x = torch.ones_like(out, requires_grad=True)
    product = (x * out).sum()
    with torch.no_grad():
        mg.matmul(a, b, out=out) if way == "eager" else out.copy_(torch.ops.margay.matmul(a, b))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    caches = tensors(device, (2, 9, 2, 8), (2, 9, 2, 8))
    new, = tensors(device, (2, 1, 2, 8))
    for i, cache in enumerate(caches):
        x = torch.ones_like(cache, requires_grad=True)
        product, version = (x * cache).sum(), cache._version
        (mg.append_kv(*caches, new, new, cache_seqlens=3) if way == "eager" else
         torch.ops.margay.append_kv(*caches, new, new, None, None, None, 3))
        assert cache._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_35_inference_tensors(device):
    """They have no count, and stay writable."""
    a, b = tensors(device, (4, 8), (8, 8))
    new, = tensors(device, (2, 1, 2, 8))
    with torch.inference_mode():
        out, k, v = torch.zeros_like(a), *torch.zeros(2, 2, 9, 2, 8, dtype=a.dtype, device=device).unbind()
        mg.matmul(a, b, out=out)
        mg.append_kv(k, v, new, new, cache_seqlens=3)
    assert torch.equal(out, mg.matmul(a, b)) and torch.equal(k[:, 3:4], new)
    out.is_inference() and mg.matmul(a, b, out=out)
    mg.append_kv(k, v, new, new, cache_seqlens=4)
    assert torch.equal(v[:, 4:5], new)


# ---- signs that torch owes


def negated(t):
    return torch._neg_view(-t)


def test_bad_38_negative_bit():
    """torch negates some views when they are read (the imaginary part of a conjugate); C would read the memory."""
    q, k, v = tensors("cpu", *[(2, 2, 9, 8)] * 3)
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    starts = torch.tensor([0, 9], dtype=torch.int32)
    assert negated(q).is_neg() and torch.equal(negated(q), q)
    for f, inputs in ((mg.attention, (q, k, v)), (lambda *x: mg.attention(*x, window=(2, 2)), (q, k, v)),
                      (mg.attention_decode, rows),
                      (lambda *x: mg.attention_varlen(*x, starts, starts, 9, 9), [t[0] for t in rows]),
                      (mg.matmul, (q[0, 0], k[0, 0].mT)),
                      (lambda q, s: mg.attention(q, k, v, sink=s), (q, SINK)),
                      (lambda q, s: mg.attention(q, k, v, alibi_slopes=s), (q, SLOPES))):
        for i in range(len(inputs)):
            assert torch.equal(f(*inputs[:i], negated(inputs[i]), *inputs[i + 1:]), f(*inputs))
    out = negated(torch.zeros(9, 9))
    assert torch.equal(mg.matmul(q[0, 0], k[0, 0].mT, out=out), mg.matmul(q[0, 0], k[0, 0].mT))
    for i in range(4):
        arguments = [torch.zeros_like(rows[0]), torch.zeros_like(rows[0]), rows[1][:, :1], rows[2][:, :1]]
        arguments[i] = negated(arguments[i])
        mg.append_kv(*arguments, cache_seqlens=3)
        assert torch.equal(arguments[0][:, 3:4], rows[1][:, :1]) and torch.equal(arguments[1][:, 3:4], rows[2][:, :1])
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for options in ({}, dict(window=(2, 2))):
        results = mg.attention(*leaves, return_lse=True, **options)
        douts = [torch.ones_like(t) for t in results]
        expected = torch.autograd.grad(results, leaves, douts, retain_graph=True)
        for signs in ((1, 0), (0, 1)):
            found = torch.autograd.grad(results, leaves, [negated(t) if sign else t for t, sign in zip(douts, signs)],
                                        retain_graph=True)
            assert all(map(torch.equal, found, expected))
