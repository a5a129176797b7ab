"""transformers' models with delta rules, with margay.integrations.delta and without, in float32 on the CPU and bfloat16
on a GPU, at small random weights: logits, gradients, generation."""

import importlib
import sys

import pytest
import torch

import hf_models
import margay as mg
from cases import DEVICES
from hf_models import in_float32, no_worse, padding, reasons, results, tokens, transformers

hf_models.hub_kernels()
TEXT = dict(vocab_size=99, hidden_size=64, num_hidden_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            tie_word_embeddings=False, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=128, layer_types=["linear_attention", "full_attention", "linear_attention"])
GDN = TEXT | dict(head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
                  linear_value_head_dim=24)
KDA = TEXT | dict(linear_num_heads=4, linear_head_dim=16, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=None,
                  qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, mlp_layer_types=["dense"] * 3,
                  model_max_length=128)
MODELS = {
    "Qwen3Next": GDN | dict(num_experts=0, mlp_only_layers=[0, 1, 2]),
    "Qwen3_5": GDN,
    "OlmoHybrid": GDN | dict(linear_allow_neg_eigval=True),
    "KimiLinear": KDA,
}


@pytest.fixture(autouse=True)
def strict(monkeypatch, one_thread):
    with hf_models.no_fallback(monkeypatch):
        yield
    mg.integrations.delta.unregister()


def make(name, device="cpu", dtype=None):
    return hf_models.make(name, MODELS[name], device, dtype)


@pytest.fixture
def calls(monkeypatch):
    return hf_models.count(monkeypatch, {mg: ("gated_delta_rule", "gated_delta_rule_step", "kda", "kda_step",
                                              "causal_conv1d", "causal_conv1d_step")})


def rule(name):
    return "kda" if name == "KimiLinear" else "gated_delta_rule"


def both(model, run):
    """The same logits and gradients with either. In bfloat16 each layer's rounding differs: those of the model in
    float32 are what both are compared with."""
    plain, gradients = results(model, run)
    with mg.integrations.delta.register():
        found, ours = results(model, run)
    assert set(gradients) == set(ours)
    if model.dtype == torch.bfloat16:
        exact, right = results(in_float32(model), run)
        no_worse("logits", found, plain, exact)
        for name, gradient in gradients.items():
            no_worse(name, ours[name], gradient, right[name], 3)
        return
    assert found.isfinite().all() and (found - plain).abs().max() <= 5e-4 * plain.abs().max()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        error, size = float((ours[name] - gradient).abs().max()), float(gradient.abs().max()) + 0.01 * largest
        assert ours[name].isfinite().all() and error <= 5e-4 * size, f"{name}: {error:.2e} of {size:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(device, name, calls):
    model, ids = make(name, device), tokens(3, 71, device=device)
    both(model, lambda m: m(ids, use_cache=False).logits)
    assert calls.count(rule(name)) == 2 and "causal_conv1d" in calls
    mask = padding(3, 71, "left", device)
    both(model.train(), lambda m: m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_generate(device, name, calls):
    """float32: the same tokens, with beams too. bfloat16: those of the own logits of the whole sequence."""
    model, ids = make(name, device), tokens(2, 9, device=device)
    run = lambda **more: model.generate(ids, max_new_tokens=12, do_sample=False, **more)  # noqa: E731
    options = {}, dict(num_beams=3), dict(attention_mask=padding(2, 9, "left", device))
    expected = [run(**more) for more in options]
    assert not calls
    with mg.integrations.delta.register():
        found = [run(**more) for more in options]
        assert {rule(name), rule(name) + "_step", "causal_conv1d_step"} <= set(calls)
        if device == "cpu":
            assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            logits = model(found[0], use_cache=False).logits[:, 8:-1].float()
    best, chosen = logits.max(-1).values, logits.gather(2, found[0][:, 9:, None])[..., 0]
    ended = (found[0][:, 9:] == 2).cumsum(1) - (found[0][:, 9:] == 2).long() > 0
    assert ((best - chosen)[~ended] <= (1e-3 if device == "cpu" else 0.1) * logits.abs().max()).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_cache_goes_on(device, name):
    """A prompt, one token, several at once: the logits of the whole."""
    model, ids = make(name, device), tokens(2, 80, device=device)
    with mg.integrations.delta.register():
        whole, parts, cache, at = model(ids, use_cache=False).logits, [], None, 0
        for n in (66, 1, 1, 4, 8):
            found = model(ids[:, at:at + n], past_key_values=cache, use_cache=True)
            parts.append(found.logits)
            cache, at = found.past_key_values, at + n
    assert (torch.cat(parts, 1) - whole).abs().max() <= (5e-4 if device == "cpu" else 0.1) * whole.abs().max()


@pytest.mark.parametrize("name", ("Qwen3Next", "Qwen3_5"))
def test_packed_sequences(name):
    """Which PyTorch's functions cannot take: each sequence has the logits that it has alone."""
    model, lengths = make(name), (5, 1, 11, 70)
    ids = tokens(1, sum(lengths))
    starts = torch.tensor([0, 5, 6, 17, 87], dtype=torch.int32)
    packed = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=70, max_length_k=70,
                  seq_idx=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).int()[None],
                  position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    with mg.integrations.delta.register(), torch.no_grad():
        found = model(ids, use_cache=False, **packed).logits
        parts = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    torch.testing.assert_close(found, torch.cat(parts, 1), rtol=1e-3, atol=1e-4)


def test_falls_back(monkeypatch):
    monkeypatch.setitem(MODELS, "Qwen3_5", GDN | dict(linear_key_head_dim=136))
    model, ids = make("Qwen3_5"), tokens(2, 9)
    before = model(ids, use_cache=False).logits
    with mg.integrations.delta.register():
        found, warned = reasons(lambda: model(ids, use_cache=False).logits)
    assert warned == ["torch_chunk_gated_delta_rule: a head dim of q and k over 128; computed by what transformers had"]
    torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-4)


def test_falls_back_for_dtypes():
    model, ids = make("KimiLinear", dtype=torch.float64), tokens(2, 9)
    with mg.integrations.delta.register():
        _, warned = reasons(lambda: model(ids, use_cache=False))
    assert warned == [f"{name}: dtype float64 on cpu; computed by what transformers had"
                      for name in ("causal_conv1d_fn", "chunk_kimi_delta_attention")]


NAMES = {"qwen3_next": False, "qwen3_5": False, "qwen3_5_moe": False, "olmo_hybrid": False, "kimi_linear": True}


def names_of(kda):
    rules = (("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention") if kda else
             ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"))
    return *rules, "causal_conv1d_fn", "causal_conv1d_update"


def test_register_is_undone():
    modules = {name: importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in NAMES}
    state = lambda: [getattr(modules[m], name) for m, kda in NAMES.items() for name in names_of(kda)]  # noqa: E731
    init, before = transformers.PreTrainedModel.__init__, state()
    with mg.integrations.delta.register():
        changed = state()
        assert all(hasattr(t, "margay_replaces") for t in changed)
        with mg.integrations.delta.register():
            assert state() == changed
        assert state() == changed and transformers.PreTrainedModel.__init__ is not init
    assert state() == before and transformers.PreTrainedModel.__init__ is init
    both_of = mg.integrations.delta, mg.integrations.mamba
    for first, second in (both_of, both_of[::-1]):
        one, two = first.register(), second.register()
        one.disable()
        convolutions = [modules[m].causal_conv1d_fn for m in NAMES]
        assert all(hasattr(t, "margay_replaces") for t in convolutions)
        two.disable()
        assert state() == before and transformers.PreTrainedModel.__init__ is init


def test_a_model_that_is_imported_later(calls, monkeypatch):
    name = "transformers.models.qwen3_5.modeling_qwen3_5"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with mg.integrations.delta.register():
        module = importlib.import_module(name)
        torch.manual_seed(0)
        model = module.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**MODELS["Qwen3_5"])).eval()
        model(tokens(2, 9), use_cache=False)
    assert calls == ["causal_conv1d", "gated_delta_rule"] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ("Qwen3_5", "KimiLinear"))
def test_compiled(device, name):
    model, ids = make(name, device), tokens(2, 70, device=device)
    with torch.no_grad():
        exact = in_float32(model)(ids, use_cache=False).logits
    with mg.integrations.delta.register(), torch.no_grad():
        expected = model(ids, use_cache=False).logits
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
        if device == "cpu":
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
        else:                            # the compiler's own norms and activations round elsewhere
            no_worse("logits", found, expected, exact)
