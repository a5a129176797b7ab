"""margay.nn.GatedDeltaNet and margay.nn.KimiDeltaAttention against their recurrences in float64, and the weights of
the layers that models have."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import margay as mg
from cases import DEVICES, check_error
from delta_forms import by_chunks, gates, normalised, recurrence, rounding, strength

GDN, KDA = mg.nn.GatedDeltaNet, mg.nn.KimiDeltaAttention
LAYERS = {
    "GDN": (GDN, {}),
    "GDN, grouped": (GDN, dict(num_v_heads=4, expand_v=2)),
    "GDN, no gate": (GDN, dict(use_gate=False, conv_size=3)),
    "GDN, beta to 2": (GDN, dict(allow_neg_eigval=True, conv_bias=True)),
    "GDN, wide values": (GDN, dict(head_dim=72, expand_v=2)),
    "GDN, odd sizes": (GDN, dict(head_dim=20, num_heads=3, conv_size=2)),
    "KDA": (KDA, {}),
    "KDA, grouped": (KDA, dict(num_v_heads=4, expand_v=1.5)),
    "KDA, bounded": (KDA, dict(lower_bound=-5.0, gate_bias=True)),
    "KDA, beta to 2": (KDA, dict(allow_neg_eigval=True, conv_bias=True, conv_size=3)),
    "KDA, whole gates": (KDA, dict(gate_rank=0)),
    "KDA, odd sizes": (KDA, dict(head_dim=20, num_heads=3, gate_rank=5, conv_size=2)),
}
TWO = "GDN, grouped", "KDA"


@pytest.fixture(autouse=True)
def small_problems(one_thread):
    pass


def layer(name, device="cpu", dtype=None, **more):
    cls, options = LAYERS[name]
    torch.manual_seed(3)
    made = cls(**(dict(hidden_size=48, num_heads=2, head_dim=16) | options | more))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim < 3:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return made.to(device, dtype or (torch.float32 if device == "cpu" else torch.bfloat16))


def exactly(made, weights, u, starts=(0,)):
    """The layer step by step in the precision of its weights {name: tensor}, and the last states. Of 16 bits is what
    each part results in, not what is inside of a convolution or a norm."""
    w, kda, dtype = weights, isinstance(made, KDA), torch.promote_types(u.dtype, torch.float32)
    rule = recurrence if u.dtype == torch.float64 else by_chunks
    if kda:
        qkv = torch.cat([u @ w[f"{name}_proj.weight"].T for name in "qkv"], -1)
        f, g = "forget_gate.f_", "g_"
        raw = u @ w[f + "a_proj.weight"].T @ w[f + "b_proj.weight"].T if made.gate_rank else u @ w[f + "proj.weight"].T
        raw = raw.unflatten(-1, (-1, made.head_dim))
        z = u @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T if made.gate_rank else u @ w["g_proj.weight"].T
        z = torch.sigmoid(z + w.get("g_b_proj.bias", 0))
        logits, rates, biases = u @ w["b_proj.weight"].T, w["forget_gate.A_log"].flatten(), w["forget_gate.dt_bias"]
        names, bound = ("o_norm.weight", "o_proj.weight"), made.lower_bound
    else:
        qkv, raw = u @ w["in_proj_qkv.weight"].T, u @ w["in_proj_a.weight"].T
        z = F.silu(u @ w["in_proj_z.weight"].T) if made.use_gate else torch.ones_like(u[..., :1])
        logits, rates, biases = u @ w["in_proj_b.weight"].T, w["A_log"], w["dt_bias"]
        names, bound = ("norm.weight", "out_proj.weight"), None
    taps, outs, pasts, states = w["conv1d.weight"][:, 0], [], [], []
    for first, end in zip(starts, (*starts[1:], u.shape[1])):
        part = slice(first, end)
        wide = F.pad(qkv[:, part], (0, 0, made.conv_size - 1, 0))
        convolved = sum(wide[:, i:i + end - first].to(dtype) * taps[:, i] for i in range(made.conv_size))
        convolved = F.silu(convolved + w.get("conv1d.bias", 0)).to(u.dtype)
        q, k, v = convolved.split((made.key_dim, made.key_dim, made.value_dim), -1)
        q, k = (normalised(t.unflatten(-1, (-1, made.head_dim))) for t in (q, k))
        v = v.unflatten(-1, (-1, made.head_v_dim))
        out, state = rule(q, k, v, gates(raw[:, part], rates, biases, bound),
                          strength(logits[:, part], made.allow_neg_eigval))
        outs.append(out)
        pasts.append(F.pad(qkv[:, part], (0, 0, made.conv_size, 0))[:, -made.conv_size:].mT)
        states.append(state)
    out = torch.cat(outs, 1).to(u.dtype).to(dtype)
    normed = (out * (out.square().mean(-1, keepdim=True) + made.norm_eps).rsqrt() * w[names[0]]).to(u.dtype)
    return (normed.flatten(2) * z) @ w[names[1]].T, torch.cat(pasts), torch.cat(states)


def close_to_plain(made, u, found, starts=(0,)):
    """found: out, where it is given, and the last states. Of a layer of float32, to its rounding; else they are as far
    from exact as those of plain PyTorch are: a state is of float32, but what goes into it is not."""
    exact = exactly(made, leaves_of(made, u), u.cpu().double(), starts)[-len(found):]
    found, names = [t.detach().cpu() for t in found], ("out", "past", "state")[-len(found):]
    if u.dtype == torch.float32:
        for name, a, b in zip(names, found, exact):
            close(name, a, b)
        return
    plain = exactly(made, {name: t.cpu() for name, t in made.state_dict().items()}, u.cpu(), starts)[-len(found):]
    for name, a, b, c in zip(names, found, plain, exact):
        check_error(name, a, b, c, rounding=rounding(name, a, b - c, u.dtype))


def leaves_of(made, u):
    leaves = {name: t.detach().cpu().double().requires_grad_() for name, t in made.state_dict().items()}
    leaves["u"] = u.detach().cpu().double().requires_grad_()
    return leaves


def close(name, found, exact, tolerance=None):
    """By the largest value of all; what a layer adds up in bfloat16 is that far from exact."""
    if tolerance is None:
        tolerance = 1e-4 if found.dtype == torch.float32 else 0.05
    found = found.detach().cpu().double()
    assert found.shape == exact.shape and found.isfinite().all(), name
    if exact.numel():
        error, size = float((found - exact).abs().max()), float(exact.abs().max())
        assert error <= tolerance * size + 1e-12, f"{name}: {error:.2e} of {size:.2e}"


def inputs(device, *shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def check(made, u, run, starts=(0,)):
    """run(u): the layer's result. Values and all gradients."""
    leaves = leaves_of(made, u)
    exact = exactly(made, leaves, leaves["u"], starts)[0]
    dout = inputs("cpu", *exact.shape, seed=1)
    u = u.detach().requires_grad_()
    out = run(u)
    close("out", out, exact.detach())
    given = dict(made.named_parameters()) | {"u": u}
    found = torch.autograd.grad(out, list(given.values()), dout.to(out))
    wanted = torch.autograd.grad(exact, [leaves[name] for name in given], dout.double())
    for name, a, b in zip(given, found, wanted):
        close("gradient of " + name, a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(device, name):
    made = layer(name, device)
    check(made, inputs(device, 2, 71, 48), made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", (1, 2, 3, 63, 64, 65, 130))
@pytest.mark.parametrize("name", TWO)
def test_lengths(device, name, steps):
    made = layer(name, device)
    check(made, inputs(device, 2, steps, 48), made)


@pytest.mark.parametrize("name", TWO)
def test_no_steps(name):
    assert layer(name)(torch.zeros(2, 0, 48)).shape == (2, 0, 48)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TWO)
def test_packed(device, name):
    made, starts = layer(name, device), (0, 1, 40, 105)
    at = torch.tensor((*starts, 130), device=device)
    check(made, inputs(device, 1, 130, 48), lambda u: made(u, cu_seqlens=at), starts)


def generation(layer_idx=0):
    return SimpleNamespace(seqlen_offset=0, key_value_memory_dict={})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prompt", (0, 1, 3, 70))
@pytest.mark.parametrize("name", LAYERS)
def test_generation(device, name, prompt):
    """A prompt, one step, a few steps, many: as the whole sequence, and so are the states."""
    made, u = layer(name, device, layer_idx=5), inputs(device, 2, prompt + 26, 48)
    with torch.no_grad():
        memory, outs, at = generation(), [], 0
        for steps in (prompt, 1, 1, 8, 16):
            if not steps:
                memory.key_value_memory_dict[5] = made.allocate_inference_cache(2)
            else:
                outs.append(made(u[:, at:at + steps], inference_params=memory))
            memory.seqlen_offset = at = at + steps
            memory.seqlen_offset = max(1, memory.seqlen_offset)
        close_to_plain(made, u, (torch.cat(outs, 1), *memory.key_value_memory_dict[5]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TWO)
def test_generation_of_packed_prompts(device, name):
    made, u = layer(name, device, layer_idx=0), inputs(device, 1, 75, 48)
    memory, starts = generation(), (0, 2, 70)
    with torch.no_grad():
        made(u, cu_seqlens=torch.tensor((*starts, 75), device=device), inference_params=memory)
        close_to_plain(made, u, memory.key_value_memory_dict[0], starts)


# ---- weights

def random_weights(module, seed=7):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((1 if parameter.ndim < 2 else 0) + 0.2 * torch.randn(parameter.shape, generator=g))
    return module


def other_layers():
    """name: (a layer of transformers, ours of its size)."""
    from transformers import KimiLinearConfig, Qwen3_5TextConfig, Qwen3NextConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    gdn = dict(hidden_size=48, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
               linear_value_head_dim=24, linear_conv_kernel_dim=4, num_hidden_layers=1,
               layer_types=["linear_attention"])
    kda = dict(hidden_size=48, linear_num_heads=2, linear_head_dim=16, linear_conv_kernel_dim=4, num_hidden_layers=1,
               layer_types=["linear_attention"])
    ours = lambda: GDN(48, 2, 16, 4, 1.5)  # noqa: E731
    return {"qwen3_next": (lambda: Qwen3NextGatedDeltaNet(Qwen3NextConfig(**gdn), 0), ours),
            "qwen3_5": (lambda: Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**gdn), 0), ours),
            "kimi_linear": (lambda: KimiLinearDeltaAttention(KimiLinearConfig(**kda), 0), lambda: KDA(48, 2, 16))}


@pytest.mark.parametrize("name", ("qwen3_next", "qwen3_5", "kimi_linear"))
def test_weights_of_transformers(name):
    """With them, both compute what float64 does, but for float32's rounding."""
    pytest.importorskip("transformers")
    make, ours = other_layers()[name]
    theirs, ours = random_weights(make()), ours()
    ours.load_state_dict(theirs.state_dict())
    u = inputs("cpu", 2, 70, 48)
    with torch.no_grad():
        exact = exactly(ours, leaves_of(ours, u), u.double(), (0,))[0]
        close("theirs", theirs(u), exact, 1e-5)
        close("ours", ours(u), exact, 1e-5)
    back = ours.state_dict_as(name)
    assert back.keys() == theirs.state_dict().keys()
    assert all(torch.equal(back[key], value) for key, value in theirs.state_dict().items())


FLA = {"GDN, grouped": {"A_log": (4,), "dt_bias": (4,), "q_proj.weight": (32, 48), "k_proj.weight": (32, 48),
                        "v_proj.weight": (128, 48), "a_proj.weight": (4, 48), "b_proj.weight": (4, 48),
                        "q_conv1d.weight": (32, 1, 4), "k_conv1d.weight": (32, 1, 4), "v_conv1d.weight": (128, 1, 4),
                        "g_proj.weight": (128, 48), "o_norm.weight": (32,), "o_proj.weight": (48, 128)},
       "KDA, bounded": {"A_log": (2,), "dt_bias": (32,), "q_proj.weight": (32, 48), "k_proj.weight": (32, 48),
                        "v_proj.weight": (32, 48), "q_conv1d.weight": (32, 1, 4), "k_conv1d.weight": (32, 1, 4),
                        "v_conv1d.weight": (32, 1, 4), "f_proj.0.weight": (16, 48), "f_proj.1.weight": (32, 16),
                        "b_proj.weight": (2, 48), "g_proj.0.weight": (16, 48), "g_proj.1.weight": (32, 16),
                        "g_proj.1.bias": (32,), "o_norm.weight": (16,), "o_proj.weight": (48, 32)}}


@pytest.mark.parametrize("name", FLA)
def test_weights_of_fla(name):
    """Names and shapes of its layers, and a result by its own parts."""
    made = layer(name)
    state = made.state_dict_as("fla")
    assert {key: tuple(t.shape) for key, t in state.items()} == FLA[name]
    other = torch.nn.ModuleDict({"mixer": layer(name)})
    random_weights(other)
    other.load_state_dict({f"mixer.{key}": t for key, t in state.items()})
    u = inputs("cpu", 2, 20, 48)
    assert torch.equal(other["mixer"](u), made(u))
    q = torch.nn.functional.linear(u, state["q_proj.weight"])
    mine = (made.q_proj(u) if name.startswith("KDA") else made.in_proj_qkv(u)[..., :32])
    torch.testing.assert_close(q, mine)


def test_weights_of_the_first_kimi_linear():
    made = layer("KDA")
    state = made.state_dict_as("fla")
    names = {"f_proj.0": "f_a_proj", "f_proj.1": "f_b_proj", "g_proj.0": "g_a_proj", "g_proj.1": "g_b_proj"}
    state = {next((new + key[len(old):] for old, new in names.items() if key.startswith(old)), key): t
             for key, t in state.items()}
    other = random_weights(layer("KDA"))
    other.load_state_dict(state | {"A_log": state["A_log"].view(1, 1, -1, 1)})
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), made.parameters()))


@pytest.mark.parametrize("name", TWO)
def test_copies_and_pickles(name, tmp_path):
    made, u = layer(name), inputs("cpu", 1, 9, 48)
    torch.save(made, tmp_path / "layer.pt")
    again = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(again(u), made(u)) and torch.equal(copy.deepcopy(made)(u), made(u))
    assert type(again).__module__ == "margay.nn"


def test_refused():
    for words, make in (("GatedDeltaNet: num_v_heads is 3, expected a multiple of num_heads, which is 2",
                         lambda: GDN(48, 2, 16, 3)),
                        ("KimiDeltaAttention: expand_v is 0.7, expected one that makes a whole number of head_dim, "
                         "which is 16", lambda: KDA(48, 2, 16, expand_v=0.7)),
                        ("GatedDeltaNet: conv_size is 5, expected 2 to 4", lambda: GDN(48, 2, 16, conv_size=5)),
                        ("KimiDeltaAttention: head_dim is 0, expected at least 1", lambda: KDA(48, 2, 0)),
                        ("KimiDeltaAttention: lower_bound is 1, expected a negative number",
                         lambda: KDA(48, 2, 16, lower_bound=1)),
                        ("GatedDeltaNet: layer is 'kda', expected 'qwen3_5', 'qwen3_next', 'olmo_hybrid' or 'fla'",
                         lambda: GDN(48, 2, 16).state_dict_as("kda")),
                        ("GatedDeltaNet: inference_params is given and layer_idx is None, expected the layer's number",
                         lambda: GDN(48, 2, 16)(torch.zeros(1, 1, 48), inference_params=generation()))):
        with pytest.raises(ValueError) as raised:
            make()
        assert str(raised.value) == words
    for bound in (float("nan"), -float("inf")):
        with pytest.raises(ValueError, match=f"lower_bound is {bound}, expected a negative number"):
            KDA(48, 2, 16, lower_bound=bound)
    for cls in (GDN, KDA):
        with pytest.raises(NotImplementedError, match=f"^{cls.__name__}: head_dim is 129, kernels exist up to 128$"):
            cls(48, 2, 129)
        with pytest.raises(TypeError, match=f"^{cls.__name__}: cu_seqlens is list, expected a tensor of int32$"):
            cls(48, 2, 16)(torch.zeros(1, 4, 48), cu_seqlens=[0, 4])
