"""transformers models with Mamba-2 layers, with margay.integrations.mamba and without, in float32 on the CPU and
bfloat16 on a GPU; and the modules that stand under the names mamba_ssm and causal_conv1d."""

import importlib
import importlib.util
import inspect
import sys
import types

import pytest
import torch

import hf_models
import margay as mg
from cases import DEVICES
from hf_models import in_float32, padding, reasons, results, tokens, transformers
from margay.drop_ins import causal_conv1d, mamba_ssm

hub_kernels = hf_models.hub_kernels()
TEXT = dict(vocab_size=99, hidden_size=64, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False)
ATTENDS = TEXT | dict(intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
MIXES = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=32)
FALCON = ATTENDS | MIXES | dict(mamba_d_ssm=128)
# All experts: rounding must not choose others
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=2)
MODELS = {
    "Mamba2": TEXT | dict(num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=32),
    "FalconH1": FALCON | dict(mamba_rms_norm=True, mamba_norm_before_gate=False),
    "FalconH1 without norm": FALCON | dict(mamba_rms_norm=False),
    "Bamba": ATTENDS | MIXES | dict(attn_layer_indices=[1]),
    "GraniteMoeHybrid": ATTENDS | MIXES | EXPERTS | dict(layer_types=["mamba", "attention"],
                                                        shared_intermediate_size=64),
    "Zamba2": ATTENDS | dict(num_hidden_layers=3, n_mamba_heads=8, mamba_headdim=16, mamba_d_state=16, mamba_ngroups=2,
                             chunk_size=32, layers_block_type=["mamba", "mamba", "hybrid"], num_mem_blocks=1,
                             adapter_rank=8, use_mem_rope=True),
    "NemotronH": ATTENDS | dict(layers_block_type=["mamba", "attention", "mamba"], mamba_num_heads=8, mamba_head_dim=16,
                                ssm_state_size=16, n_groups=2, chunk_size=32, head_dim=16),
}
OTHERS = {
    "Qwen3Next": ATTENDS | dict(head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
                                linear_value_head_dim=16, num_experts=0, mlp_only_layers=[0, 1],
                                layer_types=["linear_attention", "full_attention"]),
    "Lfm2": ATTENDS | dict(layer_types=["conv", "full_attention"], conv_L_cache=3, block_ff_dim=96),
    "Mamba": TEXT | dict(state_size=8, intermediate_size=128, expand=2),
}


@pytest.fixture(autouse=True)
def strict(monkeypatch, one_thread):
    with hf_models.no_fallback(monkeypatch):
        yield
    mg.integrations.mamba.unregister()


def make(name, device="cpu", dtype=None):
    return hf_models.make(name.split()[0], (MODELS | OTHERS)[name], device, dtype)


@pytest.fixture
def calls(monkeypatch):
    return hf_models.count(monkeypatch, {mg.mamba: ("ssd", "ssd_step"), mg: ("causal_conv1d", "causal_conv1d_step")})


def with_and_without(run):
    """The results of run() with transformers' PyTorch functions and with Margay's."""
    before = run()
    with mg.integrations.mamba.register():
        return before, run()


def both(model, run):
    """The same logits and gradients with either. In bfloat16 each layer's rounding differs: those of the model in
    float32 are what both are compared with."""
    (plain, gradients), (found, ours) = with_and_without(lambda: results(model, run))
    limits = lambda name, size: 2e-4 * size  # noqa: E731
    if next(model.parameters()).dtype == torch.bfloat16:
        exact, right = results(in_float32(model), run)
        apart = lambda a, b: float((a.float() - b).abs().max())  # noqa: E731
        allowed = {name: 2 * apart(gradients[name], right[name]) for name in right}
        allowed[""] = 2 * apart(plain, exact)
        limits = lambda name, size: allowed[name] + 0.02 * size  # noqa: E731
        plain, gradients = exact, right
    assert found.isfinite().all() and (found - plain).abs().max() <= limits("", float(plain.abs().max()))
    assert set(gradients) == set(ours)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        error, size = float((ours[name] - gradient).abs().max()), float(gradient.abs().max()) + 0.01 * largest
        assert ours[name].isfinite().all() and error <= limits(name, size), f"{name}: {error:.2e} of {size:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(device, name, calls):
    model, ids = make(name, device), tokens(3, 41, device=device)
    both(model, lambda m: m(ids, use_cache=False).logits)
    assert "ssd" in calls and "causal_conv1d" in calls
    mask = padding(3, 41, "left", device)
    both(model, lambda m: m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()])
    both(model.train(), lambda m: m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_generate(device, name, calls):
    """With a cache, padded and not: the same tokens on the CPU; on a GPU the logits of tokens that are given."""
    model, ids = make(name, device), tokens(3, 9, device=device)
    check_own_steps(model)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    for mask in (torch.ones_like(ids), padding(3, 9, "left", device)):
        if device == "cpu":
            before, found = with_and_without(lambda: model.generate(ids, attention_mask=mask, **options))
            assert torch.equal(before, found)
        more = tokens(3, 6, device=device)
        before, found = with_and_without(lambda: continued(model, ids, mask, more))
        size = before.abs().max()
        assert (found - before).abs().max() <= (2e-4 if device == "cpu" else 0.08) * size
    assert {"ssd", "ssd_step", "causal_conv1d", "causal_conv1d_step"} <= set(calls)


def check_own_steps(model):
    norm = getattr(sys.modules[type(model).__module__], "FalconH1RMSNormGated", None)
    if model.config.model_type == "falcon_h1" and model.config.mamba_rms_norm and \
            "input_ndim" not in inspect.getsource(norm.forward):
        pytest.skip("transformers before 5.23 drops a dimension in a step of Falcon-H1's gated norm")


@torch.no_grad()
def continued(model, ids, mask, more):
    """Logits of tokens one at a time behind a first call, through the cache."""
    check_own_steps(model)
    key = "cache_params" if type(model).__name__ in ("Mamba2ForCausalLM", "MambaForCausalLM") else "past_key_values"
    out, logits = model(ids, attention_mask=mask, use_cache=True), []
    for i in range(more.shape[1]):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        out = model(more[:, i:i + 1], attention_mask=None if key == "cache_params" else mask, use_cache=True,
                    **{key: getattr(out, key)})
        logits.append(out.logits.float())
    return torch.cat(logits, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ("Mamba2", "NemotronH", "FalconH1"))
def test_cache_equals_sequence(device, name):
    model, ids = make(name, device), tokens(2, 24, device=device)
    with mg.integrations.mamba.register(), torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, 9:].float()
        found = continued(model, ids[:, :9], torch.ones_like(ids[:, :9]), ids[:, 9:])
    assert (found - whole).abs().max() <= (2e-4 if device == "cpu" else 0.08) * whole.abs().max()


@pytest.mark.parametrize("name", ("Mamba2", "Bamba"))
def test_packed_sequences(name):
    """seq_idx, which PyTorch's functions cannot take: each sequence has the logits that it has alone."""
    model, ids, lengths = make(name), tokens(1, 24), (5, 1, 11, 7)
    packed = dict(seq_idx=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).int()[None], use_cache=False)
    with mg.integrations.mamba.register(), torch.no_grad():
        if name == "Mamba2":                       # whose model hands seq_idx to its layers, but not the one above it
            found = model.lm_head(model.backbone(ids, **packed)[0])
        else:
            found = model(ids, position_ids=torch.cat([torch.arange(n) for n in lengths])[None], **packed).logits
        parts = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OTHERS)
def test_short_convolutions_of_others(device, name, calls):
    model, ids = make(name, device), tokens(2, 19, device=device)
    both(model, lambda m: m(ids, use_cache=False).logits)
    before, found = with_and_without(lambda: continued(model, ids, torch.ones_like(ids), tokens(2, 4, device=device)))
    assert (found - before).abs().max() <= (2e-4 if device == "cpu" else 0.08) * before.abs().max()
    assert {"causal_conv1d", "causal_conv1d_step"} <= set(calls) and "ssd" not in calls


# ---- what falls back

@pytest.mark.parametrize("options, expected", (
    (dict(conv_kernel=5), ["causal_conv1d_fn: a convolution of 5 steps; computed by what transformers had"]),
    (dict(num_heads=1, head_dim=128, n_groups=1, hidden_size=64, state_size=300),
     ["mamba2_chunk_scan: a state of more than 256 columns; computed by what transformers had"]),
    (dict(num_heads=1, head_dim=144, n_groups=1, hidden_size=72),
     ["mamba2_chunk_scan: a head dim over 128; computed by what transformers had"]),
    (dict(hidden_act="gelu"), ["causal_conv1d_fn: activation 'gelu'; computed by what transformers had"])))
def test_falls_back(options, expected, monkeypatch):
    monkeypatch.setitem(MODELS, "Mamba2", MODELS["Mamba2"] | options)
    model, ids = make("Mamba2"), tokens(2, 9)
    before = model(ids, use_cache=False).logits
    with mg.integrations.mamba.register():
        found, warned = reasons(lambda: model(ids, use_cache=False).logits)
    assert warned == expected
    torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-4)


def test_falls_back_for_dtypes():
    model, ids = make("Mamba2", dtype=torch.float64), tokens(2, 9)
    with mg.integrations.mamba.register():
        _, warned = reasons(lambda: model(ids, use_cache=False))
    assert warned == [f"{name}: dtype float64 on cpu; computed by what transformers had"
                      for name in ("causal_conv1d_fn", "mamba2_chunk_scan")]


def test_a_gradient_through_a_step():
    """The functions of one step have none, and would lose it without a word; PyTorch's lead to an error."""
    model, ids = make("Mamba2"), tokens(2, 9)

    def gradient():
        out = model(ids, use_cache=True)
        logits = model(tokens(2, 1), cache_params=out.cache_params).logits
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            logits.square().mean().backward()
        return logits.detach()
    before = gradient()
    with mg.integrations.mamba.register():
        found, warned = reasons(gradient)
    torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-4)
    assert [text.split(";")[0] for text in warned] == [
        "causal_conv1d_update: a gradient through one step",
        "mamba2_selective_state_update: a gradient through one step"]


# ---- on and off

def test_register_is_undone():
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    names = list(mamba_ssm._FUNCTIONS)
    state = lambda: [*(getattr(module, name) for name in names), transformers.PreTrainedModel.__init__,  # noqa: E731
                     hub_kernels.use_kernel_func_from_hub_with_fallback,
                     transformers.integrations.use_kernel_func_from_hub_with_fallback,
                     *(sys.modules.get(name) for name in ("mamba_ssm", "causal_conv1d", "mamba_ssm.ops"))]
    before = state()
    with mg.integrations.mamba.register():
        changed = state()
        assert all(a is not b for a, b in zip(before, changed))
        with mg.integrations.mamba.register():
            assert state() == changed
        assert state() == changed
    assert state() == before
    switch = mg.integrations.mamba.register()
    mg.integrations.mamba.register()
    mg.integrations.mamba.unregister()
    assert state() == before
    switch.disable()
    mg.integrations.mamba.unregister()
    assert state() == before


def test_a_model_that_is_imported_later(calls, monkeypatch):
    name = "transformers.models.mamba2.modeling_mamba2"
    monkeypatch.delitem(sys.modules, name, raising=False)
    ids = tokens(2, 9)
    with mg.integrations.mamba.register():
        module = importlib.import_module(name)
        torch.manual_seed(0)
        config = transformers.Mamba2Config(**MODELS["Mamba2"])
        model = module.Mamba2ForCausalLM(config).eval()
        found = model(ids, use_cache=False).logits
    assert calls == ["causal_conv1d", "ssd"] * 2
    assert not hasattr(module.mamba2_chunk_scan, "margay_replaces")
    torch.testing.assert_close(model(ids, use_cache=False).logits, found, rtol=1e-4, atol=1e-4)
    assert calls == ["causal_conv1d", "ssd"] * 2


def test_all_models_are_found():
    """Every function that these modules ask of mamba_ssm and causal_conv1d."""
    for name in ("mamba2", "falcon_h1", "bamba", "granitemoehybrid", "nemotron_h", "zamba2"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        with mg.integrations.mamba.register():
            assert all(hasattr(getattr(module, function), "margay_replaces") for function in mamba_ssm._FUNCTIONS)


def test_refuses_other_releases(monkeypatch):
    monkeypatch.delattr(hub_kernels, "use_kernel_func_from_hub_with_fallback")
    with pytest.raises(RuntimeError, match="expected release 5.17 or a newer one"):
        mg.integrations.mamba.register()
    assert "mamba_ssm" not in sys.modules


def test_modules_under_other_names(monkeypatch):
    there = types.ModuleType("causal_conv1d")
    monkeypatch.setitem(sys.modules, "causal_conv1d", there)
    with mg.integrations.mamba.install_as_mamba_ssm():
        from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
        from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn as other
        from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states
        from mamba_ssm import Mamba2
        from mamba_ssm.modules.mamba2 import Mamba2 as other_mamba2
        from mamba_ssm.ops.triton.layernorm_gated import RMSNorm, rmsnorm_fn
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
        assert causal_conv1d_fn is other is causal_conv1d.causal_conv1d_fn and Mamba2 is other_mamba2 is mg.nn.Mamba2
        assert causal_conv1d_update is causal_conv1d.causal_conv1d_update
        assert causal_conv1d_varlen_states is causal_conv1d.causal_conv1d_varlen_states
        assert RMSNorm is mg.mamba.RMSNormGated and rmsnorm_fn is mg.mamba.rmsnorm_fn
        for function in (selective_state_update, mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined):
            assert function is getattr(mg.mamba, function.__name__)
        assert importlib.util.find_spec("mamba_ssm") and sys.modules["mamba_ssm"].__version__ >= "2"
        with pytest.raises(ImportError):
            from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # noqa: F401
    assert sys.modules["causal_conv1d"] is there and "mamba_ssm" not in sys.modules


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    model, ids = make("Mamba2", device), tokens(2, 40, device=device)
    with mg.integrations.mamba.register(), torch.no_grad():
        expected = model(ids, use_cache=False).logits
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    assert (found - expected).abs().max() <= (1e-4 if device == "cpu" else 0.02) * expected.abs().max()
