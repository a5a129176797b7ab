"""margay.nn.LinearAttention, Based and Hedgehog against float64 forms of what they compute."""

import pytest
import torch

import margay as mg

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
CLOSE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def heads(x, weight, n):
    return (x @ weight.double().mT).unflatten(-1, (n, -1)).transpose(1, 2)


def shared(t, n):
    return t.repeat_interleave(n // t.shape[1], 1)


def joined(layer, out):
    return out.transpose(1, 2).flatten(-2) @ layer.o_proj.weight.double().mT


def causal(weights):
    return weights * torch.ones_like(weights).tril()


def product(features, x):
    maps = [(m.weight.double(), m.bias.double()) for m in (features.layer1, features.layer2)]
    return torch.stack([x @ w.mT + b for w, b in maps]).prod(0)


def linear_attention(layer, x):
    n = layer.num_heads
    q, k = heads(x, layer.q_proj.weight, n), heads(x, layer.k_proj.weight, layer.num_kv_heads)
    name = type(layer.feature_map_q).__name__
    of = {"ElementwiseProduct": product, "PositiveElu": lambda _, t: torch.nn.functional.elu(t) + 1,
          "ReLU": lambda _, t: t.relu(), "Identity": lambda _, t: t}[name]
    q, k = of(layer.feature_map_q, q), of(layer.feature_map_k, k)
    q = q / (q.sum(-1, True) + 1e-4) if layer.norm_q else q
    k = k / (k.sum(-1, True) + 1e-4) if layer.norm_k else k
    k, v = shared(k, n), shared(heads(x, layer.v_proj.weight, layer.num_kv_heads), n)
    weights = causal(layer.head_k_dim ** -0.5 * q @ k.mT)
    if layer.gate:
        g = torch.log(1 - 2.0 ** -(5 + torch.arange(n, dtype=torch.float64, device=x.device))).expand(*x.shape[:2], n)
        if layer.gate == "step":
            logits = x @ layer.gk_proj.weight.double().mT + layer.gk_proj.bias.double()
            g = torch.nn.functional.logsigmoid(logits) / 16
        sums = g.transpose(1, 2).cumsum(-1)
        weights = weights * causal((sums[..., :, None] - sums[..., None, :]).clamp(max=0).exp())
    out = weights @ v
    out = out / (weights.sum(-1, True) + 1e-10) if layer.normalize else out
    if isinstance(layer.norm, torch.nn.RMSNorm):
        out = out * (out.square().mean(-1, True) + layer.norm.eps).rsqrt() * layer.norm.weight.double()
    return joined(layer, out)


def based(layer, x):
    n, kv = layer.num_heads, layer.num_key_value_heads
    q, k, v = (heads(x, p.weight, h) for p, h in ((layer.q_proj, n), (layer.k_proj, kv), (layer.v_proj, kv)))
    s = layer.feature_dim ** -0.5 * q @ shared(k, n).mT
    weights = causal(1 + s + s.square() / 2)
    return joined(layer, weights @ shared(v, n) / (weights.sum(-1, True) + layer.eps))


def hedgehog(layer, x):
    n, kv, steps = layer.num_heads, layer.num_kv_heads, torch.arange(x.shape[1], device=x.device)
    q, k, v = (heads(x, p.weight, h) for p, h in ((layer.q_proj, n), (layer.k_proj, kv), (layer.v_proj, kv)))
    k, v = shared(k, n), shared(v, n)
    block = steps // layer.window_size
    inside = ((steps[:, None] - steps < layer.window_size) if layer.sliding else block[:, None] - block <= 1).tril()
    s = (layer.head_dim ** -0.5 * q @ k.mT).masked_fill(~inside, -torch.inf)
    y = [t @ m.mlp.layer.double() for t, m in ((q, layer.feature_map_q), (k, layer.feature_map_k))]
    f, g = (torch.cat((t.softmax(-1), (-t).softmax(-1)), -1) for t in y)
    factor = torch.sigmoid(layer.window_factors.double())
    other = 1 - factor if layer.affine_attention_factors else 1
    weights = factor * (s - s.amax(-1, True)).exp() + other * causal(f @ g.mT) * ~inside
    return joined(layer, weights @ v / weights.sum(-1, True))


CASES = [
    (linear_attention, lambda **place: mg.nn.LinearAttention(64, num_heads=4, **place)),
    (linear_attention, lambda **place: mg.nn.LinearAttention(64, 0.5, 2.0, 2, feature_map="identity", gate="head",
                                                             **place)),
    (linear_attention, lambda **place: mg.nn.LinearAttention(64, num_heads=4, num_kv_heads=2, feature_map="elu",
                                                             do_feature_map_norm=True, output_norm="identity",
                                                             **place)),
    (linear_attention, lambda **place: mg.nn.LinearAttention(64, num_heads=4, num_kv_heads=1, feature_map="elu",
                                                             norm_q=True, norm_k=True, gate="step", **place)),
    (linear_attention, lambda **place: mg.nn.LinearAttention(64, num_heads=4, feature_map="elu", gate="step",
                                                             do_feature_map_norm=True, **place)),
    (based, lambda **place: mg.nn.Based(96, num_heads=4, **place)),
    (based, lambda **place: mg.nn.Based(96, 24, 2, 4, **place)),
    (hedgehog, lambda **place: mg.nn.Hedgehog(64, 2, feature_dim=24, **place)),
    (hedgehog, lambda **place: mg.nn.Hedgehog(64, 4, 2, 32, 16, window_size=16, affine_attention_factors=True,
                                              init_window_factor=0.7, **place)),
    (hedgehog, lambda **place: mg.nn.Hedgehog(64, 2, window_size=50, sliding=True, **place)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_values_and_gradients(case, dtype, device):
    if device == "cuda" and dtype is torch.float32:
        pytest.skip("kernels of float32 are the CPU's")
    exact, make = CASES[case]
    torch.manual_seed(case)
    layer = make(device=device, dtype=dtype)
    width = layer.hidden_size
    x, dout = (torch.randn(2, 131, width, device=device, dtype=dtype) for _ in range(2))
    parameters = [x.requires_grad_(), *layer.parameters()]
    found = torch.autograd.grad(layer(x), parameters, dout)
    out, wide = layer(x), exact(layer, x.double())
    expected = torch.autograd.grad(wide, parameters, dout.double())
    assert out.shape == x.shape and out.dtype == dtype
    for name, a, b in zip(("out", "x", *(n for n, _ in layer.named_parameters())), (out, *found), (wide, *expected)):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error < CLOSE[dtype] * (1 if name == "out" else 3), (name, error)


@pytest.mark.parametrize("case", range(7))
def test_goes_on_from_a_state(case):
    torch.manual_seed(case)
    layer = CASES[case][1]()
    x = torch.randn(2, 140, layer.hidden_size)
    with torch.no_grad():
        whole, (first, state) = layer(x), layer(x[:, :70], output_final_state=True)
        second, last = layer(x[:, 70:], initial_state=state, output_final_state=True)
        torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-4, atol=1e-4)
        if not hasattr(layer, "step"):
            return
        steps = torch.cat([layer.step(part, state) for part in x[:, 70:].split((1, 1, 3, 65), 1)], 1)
    torch.testing.assert_close(steps, second, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_packed_sequences(case):
    layer = CASES[case][1]()
    x, starts = torch.randn(1, 150, layer.hidden_size), (0, 70, 70, 73, 150)
    with torch.no_grad():
        packed = layer(x, cu_seqlens=torch.tensor(starts))
        alone = torch.cat([layer(x[:, i:j]) for i, j in zip(starts, starts[1:]) if j > i], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_compiled(case):
    layer = CASES[case][1]()
    x = torch.randn(2, 70, layer.hidden_size)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def test_state_dicts():
    """Names and shapes of the layers whose weights they take: of FLA and of LoLCATs."""
    shapes = [{name: tuple(t.shape) for name, t in layer.state_dict().items()} for layer in (
        mg.nn.LinearAttention(64, num_heads=4, num_kv_heads=2),
        mg.nn.LinearAttention(64, feature_map="elu", gate="head"),
        mg.nn.LinearAttention(64, feature_map=torch.nn.Linear(8, 16), tie_feature_map_qk=True, gate="step"),
        mg.nn.Based(96, num_heads=4), mg.nn.Hedgehog(256, 2, 1))]
    product = {f"feature_map_{x}.layer{i}.{name}": shape for x in "qk" for i in (1, 2)
               for name, shape in (("weight", (16, 16)), ("bias", (16,)))}
    linear = {"q_proj.weight": (64, 64), "k_proj.weight": (32, 64), "v_proj.weight": (32, 64), "norm.weight": (16,),
              "o_proj.weight": (64, 64)}
    whole = linear | {"k_proj.weight": (64, 64), "v_proj.weight": (64, 64), "norm.weight": (8,)}
    tied = {f"feature_map_{x}.{name}": shape for x in "qk" for name, shape in (("weight", (16, 8)), ("bias", (16,)))}
    assert shapes == [
        product | linear, whole, tied | whole | {"gk_proj.weight": (8, 64), "gk_proj.bias": (8,)},
        {"q_proj.weight": (64, 96), "k_proj.weight": (64, 96), "v_proj.weight": (96, 96), "o_proj.weight": (96, 96)},
        {"q_proj.weight": (256, 256), "k_proj.weight": (128, 256), "v_proj.weight": (128, 256),
         "o_proj.weight": (256, 256), "feature_map_q.mlp.layer": (2, 128, 64), "feature_map_k.mlp.layer": (2, 128, 64),
         "window_factors": (1, 2, 1, 1)}]


def test_a_module_as_feature_map():
    layer = mg.nn.LinearAttention(64, feature_map=torch.nn.Linear(8, 16))
    assert layer.feature_map_q is not layer.feature_map_k and layer(torch.randn(1, 5, 64)).shape == (1, 5, 64)


@pytest.mark.parametrize("make, message", (
    (lambda: mg.nn.LinearAttention(64, num_heads=4, num_kv_heads=3), "LinearAttention: num_heads is 4, expected a mul"),
    (lambda: mg.nn.LinearAttention(60), "LinearAttention: hidden_size * expand_k is 60, expected a multiple of num_"),
    (lambda: mg.nn.LinearAttention(64, gate="channel"), "LinearAttention: gate is 'channel', expected one of None, 'h"),
    (lambda: mg.nn.LinearAttention(64, output_norm="layernorm"), "LinearAttention: output_norm is 'layernorm', expec"),
    (lambda: mg.nn.LinearAttention(64, feature_map="exp"), "LinearAttention: feature_map is 'exp', expected a module"),
    (lambda: mg.nn.Based(64), "Based: hidden_size is 64, expected a multiple of num_heads, which is 12"),
    (lambda: mg.nn.Hedgehog(64, 0), "Hedgehog: num_heads is 0, expected a multiple of the heads of keys and values"),
    (lambda: mg.nn.Hedgehog(64, 2, window_size=48)(torch.randn(1, 9, 64)), "hedgehog: window is 48, ")))
def test_refused(make, message):
    with pytest.raises((ValueError, NotImplementedError)) as found:
        make()
    assert str(found.value).startswith(message), found.value
