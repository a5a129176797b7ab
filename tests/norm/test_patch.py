"""margay.patch: small transformers models with random weights compute the same, and are themselves again afterwards.
In float32 on the CPU, in bfloat16 on a GPU."""

import collections
import copy
import operator
import pickle
import sys

import pytest
import torch

import hf_models
import margay as mg
from cases import DEVICES
from hf_models import in_float32, make, no_worse, padding, results, tokens, transformers

SMALL = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = SMALL | dict(num_key_value_heads=2, head_dim=16)
RMS, LAYER, GATED = "root mean square norm", "layer norm", "gated root mean square norm"
ROTARY, NORMED = "margay.rotary", "margay.qk_norm_rotary"
LOSS = "loss", "margay.cross_entropy, with the last projection, in training"
SCAN = "scan of Mamba-2", "margay.integrations.mamba"
DENSE = {("attention", "attn_implementation='margay'"): 1, ("feed-forward", "stays"): 2, LOSS: 1}
# options, and how often each kind of piece is replaced by what
MODELS = {
    "Llama": (SMALL | dict(num_key_value_heads=2),
              DENSE | {("rotary embedding", ROTARY): 2, (RMS, "margay.rms_norm"): 5}),
    "Qwen3": (GROUPED, DENSE | {("rotary embedding", NORMED): 2, (RMS, NORMED): 4, (RMS, "margay.rms_norm"): 5}),
    "GPTNeoX": (SMALL, DENSE | {("rotary embedding", ROTARY): 2, (LAYER, "margay.layer_norm"): 5}),
    "Gemma2": (GROUPED | dict(final_logit_softcapping=5.0, attn_logit_softcapping=8.0, sliding_window=16,
                              query_pre_attn_scalar=16),
               DENSE | {("rotary embedding", ROTARY): 2, (RMS, "margay.rms_norm, zero_centred"): 9}),
    "Cohere": (SMALL | dict(num_key_value_heads=2, logit_scale=0.25),
               DENSE | {("rotary embedding", ROTARY): 2, (LAYER, "margay.layer_norm"): 3}),
    "Qwen3Next": (GROUPED | dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16,
                                 linear_value_head_dim=24, num_experts=0, mlp_only_layers=[0, 1],
                                 layer_types=["linear_attention", "full_attention"]),
                  DENSE | {("rotary embedding", NORMED): 1, (RMS, NORMED): 2, (RMS, "margay.rms_norm, zero_centred"): 5,
                           (GATED, "margay.gated_rms_norm"): 1, ("delta rules", "margay.integrations.delta"): 1}),
    "Mamba2": (dict(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16,
                    n_groups=2, chunk_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2),
               {(GATED, "margay.gated_rms_norm, gate first"): 2, (RMS, "margay.rms_norm"): 3,
                SCAN: 1, LOSS: 1}),
    "FalconH1": (GROUPED | dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2,
                                mamba_chunk_size=32, mamba_d_ssm=128, mamba_rms_norm=True,
                                mamba_norm_before_gate=False),
                 DENSE | {("rotary embedding", ROTARY): 2, (RMS, "margay.rms_norm"): 5,
                          (GATED, "margay.gated_rms_norm, gate first"): 2, SCAN: 1}),
}
NEED_HUB = "Qwen3Next", "Mamba2", "FalconH1"
LOGITS = lambda model: model(tokens(2, 21, device=model.device), use_cache=False).logits  # noqa: E731


def model_of(family, device="cpu"):
    if family in NEED_HUB:
        hf_models.hub_kernels()
    model = make(family, MODELS[family][0])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn(p.shape))
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


@pytest.fixture(autouse=True)
def strict(monkeypatch, one_thread):
    """Nothing falls back, and what a test leaves patched is undone."""
    patched, patch = [], mg.patch

    def kept(model):
        patched.append(model)
        return patch(model)
    monkeypatch.setattr(mg, "patch", kept)
    with hf_models.no_fallback(monkeypatch):
        yield
    for model in patched:
        if isinstance(model, torch.nn.Module):
            mg.unpatch(model)
    assert "margay" not in transformers.AttentionInterface().keys()


@pytest.fixture
def losses(monkeypatch):
    """Calls of cross_entropy that patch makes."""
    from margay.drop_ins import patch_loss

    return hf_models.count(monkeypatch, {patch_loss: ("cross_entropy",)})


def labels_of(ids):
    """Prompts and padding do not count."""
    labels = ids.clone()
    labels[0, :7] = labels[1, 15:] = -100
    return labels


def step(**more):
    def run(model):
        ids = tokens(2, 21, device=model.device)
        return model(input_ids=ids, labels=labels_of(ids), use_cache=False, **more).loss
    return run


def same(model, run):
    """Results of the patched model are those that it has else, which are returned with its own gradients."""
    expected, gradients = results(model, run)
    mg.patch(model)
    found, ours = results(model, run)
    mg.unpatch(model)
    assert set(gradients) == set(ours) and not torch.equal(torch.cat([g.flatten() for g in ours.values()]),
                                                           torch.cat([g.flatten() for g in gradients.values()]))
    if model.dtype == torch.bfloat16:
        exact, right = results(in_float32(model), run)
        no_worse("result", found.to(model.dtype), expected.to(model.dtype), exact)
        for name, gradient in gradients.items():
            no_worse(name, ours[name], gradient, right[name], 3)
        return
    assert found.isfinite().all() and (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        error, size = float((ours[name] - gradient).abs().max()), float(gradient.abs().max()) + 0.01 * largest
        assert ours[name].isfinite().all() and error <= 3e-4 * size, f"{name}: {error:.2e} of {size:.2e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", MODELS)
def test_logits_and_gradients(family, device):
    same(model_of(family, device), LOGITS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", MODELS)
def test_a_step_of_training(family, device, losses):
    """With labels that do not count, the mean over the others, or over as many as a batch of several steps has."""
    model = model_of(family, device).train()
    same(model, step())
    same(model, step(num_items_in_batch=50))
    same(model, step(num_items_in_batch=torch.tensor(50)))
    assert losses == ["cross_entropy"] * 3


@pytest.mark.parametrize("family", MODELS)
def test_each_piece_is_listed_and_undone(family):
    model = model_of(family)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    implementation = model.config._attn_implementation
    file = sys.modules[type(model).__module__]
    names, state = dict(vars(file)), {name: t.clone() for name, t in model.state_dict().items()}
    logits = LOGITS(model)
    pieces = mg.patch(model)
    print(*pieces, sep="\n")
    assert all(piece.how for piece in pieces)
    assert collections.Counter((p.kind, p.how if p.replaced else "stays") for p in pieces) == MODELS[family][1]
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert mg.unpatch(model) and not mg.unpatch(model)
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert {name: kept.keys() for name, kept in after.items()} == {name: kept.keys() for name, kept in before.items()}
    for name, kept in before.items():
        changed = [key for key, value in kept.items() if after[name][key] is not value]
        assert not changed, f"{name}: {changed}"
    assert model.config._attn_implementation == implementation
    assert {key for key in names if names[key] is not vars(file).get(key)} == set()
    assert torch.equal(LOGITS(model), logits)


@pytest.mark.parametrize("family", MODELS)
def test_generation(family):
    """The same tokens, through the cache, greedy and with beams, and of padded prompts."""
    model, ids = model_of(family), tokens(2, 9)
    options = [{}, dict(num_beams=3)] + [dict(attention_mask=padding(2, 9, "left"))] * (family != "Mamba2")
    run = lambda: [model.generate(ids, max_new_tokens=8, do_sample=False, **more) for more in options]  # noqa: E731
    try:
        expected = run()
    except RuntimeError as error:
        version = hf_models.transformers.__version__
        if family != "FalconH1" or not version.startswith("5.17."):
            raise
        pytest.skip(f"transformers {version} does not generate {family}: {error}")
    mg.patch(model)
    assert all(map(torch.equal, run(), expected))
    with torch.no_grad():
        loss = model(ids, labels=ids).loss                   # outside of training the logits are computed
        mg.unpatch(model)
        torch.testing.assert_close(loss, model(ids, labels=ids).loss, rtol=1e-4, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ("Llama", "Qwen3", "Qwen3Next", "FalconH1"))
@pytest.mark.parametrize("reentrant", (False, True))
def test_gradient_checkpointing(family, device, reentrant, losses):
    model = model_of(family, device).train()
    mg.patch(model)
    loss, gradients = results(model, step())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again, ours = results(model, step())
    assert losses == ["cross_entropy"] * 2 and torch.equal(again, loss)
    for name, gradient in gradients.items():
        if device == "cpu":
            assert torch.equal(ours[name], gradient), name
        else:
            assert (ours[name] - gradient).abs().max() <= 2e-2 * gradient.abs().max(), name


def test_all_labels_are_ignored():
    """The mean of nothing is NaN there, too; a count of the whole batch makes 0 of it."""
    model, ids = model_of("Llama").train(), tokens(2, 21)
    nothing = torch.full_like(ids, -100)
    mg.patch(model)
    assert model(ids, labels=nothing).loss.isnan()
    loss = model(ids, labels=nothing, num_items_in_batch=3).loss
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())


def test_logits_of_training_are_there_when_they_are_read(losses):
    model, ids = model_of("Llama").train(), tokens(2, 21)
    expected = model(ids).logits
    mg.patch(model)
    out = model(ids, labels=ids)
    assert losses and out.logits.shape == expected.shape and out.logits.dtype == expected.dtype
    torch.testing.assert_close(out.logits.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(out.logits[:, -1], expected[:, -1], rtol=1e-4, atol=1e-4)


def test_logits_that_are_read_are_a_tensor():
    """Under every operator, and written in place."""
    model, ids = model_of("Llama").train(), tokens(2, 21)
    mg.patch(model)
    plain = model(ids).logits.detach()
    for read in (abs, operator.neg, lambda x: x + 1, lambda x: 1 - x, lambda x: x * x, lambda x: x / 3, lambda x: 2 / x,
                 lambda x: x // 0.5, lambda x: 3 // x, lambda x: x % 0.5, lambda x: 1 % x, lambda x: x ** 2,
                 lambda x: 2 ** x, lambda x: x @ plain.mT, lambda x: plain.mT @ x, lambda x: x > 0, lambda x: x[:, 1],
                 lambda x: torch.softmax(x, -1), lambda x: torch.stack([x, x]), lambda x: x.mul_(2)):
        logits = model(ids, labels=ids).logits
        assert not isinstance(logits, torch.Tensor)
        assert torch.equal(read(logits) + 0, read(plain.clone()) + 0) and len(logits) == 2
    logits = model(ids, labels=ids).logits
    logits[0, 0] = 7.0
    assert (logits[0, 0] == 7).all() and torch.equal(logits[1], plain[1])


def test_logits_are_never_in_memory():
    """But for a chunk of them within cross_entropy, whose tests count those."""
    logits = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            made = function(*arguments, **(options or {}))
            logits.extend(t.shape for t in (made if isinstance(made, tuple) else (made,))
                          if isinstance(t, torch.Tensor) and t.shape[-1:] == (999,))
            return made
    model, ids = make("Llama", SMALL | dict(vocab_size=999)).train(), tokens(5, 60)
    for patched in (False, True):
        logits.clear()
        if patched:
            mg.patch(model)
        with Count():
            model(ids, labels=ids, use_cache=False).loss.backward()
        assert bool(logits) is not patched


@pytest.mark.parametrize("family", ("Llama", "Qwen3"))
def test_compiled(family):
    """What is patched may be compiled, in one graph."""
    model = model_of(family).train()
    mg.patch(model)
    loss, gradients = results(model, step())
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    again, ours = results(model, lambda _: step()(compiled))
    torch.testing.assert_close(again, loss, rtol=1e-4, atol=0)
    for name, gradient in gradients.items():
        assert (ours[name] - gradient).abs().max() <= 1e-3 * gradient.abs().max() + 1e-6, name


@pytest.mark.parametrize("family", ("Llama", "Qwen3Next", "FalconH1"))
def test_copies(family):
    """A copy computes itself what modules do, can be patched and undone, and outlives what it is a copy of. So does
    what is loaded of a patched model that was saved whole."""
    model = model_of(family).train()
    expected, before = step()(model), {name: vars(m).keys() for name, m in model.named_modules()}
    implementation = model.config._attn_implementation
    mg.patch(model)
    copies = [copy.deepcopy(model) for _ in range(3)]
    copies += [pickle.loads(pickle.dumps(one)) for one in (model, copies[0])]
    found = step()(model)
    mg.unpatch(model)
    for one in (copies[0], copies[4]):
        torch.testing.assert_close(step()(one), expected, rtol=1e-4, atol=0)
    for one in (copies[1], copies[3]):
        pieces = mg.patch(one)
        assert collections.Counter((p.kind, p.how if p.replaced else "stays") for p in pieces) == MODELS[family][1]
        assert torch.equal(step()(one), found)
    for one in copies:
        assert mg.unpatch(one) and one.config._attn_implementation == implementation
        assert before == {name: vars(m).keys() for name, m in one.named_modules()}
    for one in copies:                       # scans are switched on for all of them
        assert torch.equal(step()(one), expected)


def test_attention_that_no_name_reaches():
    """Is listed as what stays."""
    model = transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2,
                                                                     num_attention_heads=4)).eval()
    expected = LOGITS(model)
    pieces = [piece for piece in mg.patch(model) if piece.kind == "attention"]
    assert len(pieces) == 1 and not pieces[0].replaced and "never ask" in pieces[0].how
    torch.testing.assert_close(LOGITS(model), expected, rtol=1e-4, atol=1e-4)


def test_rotation_by_several_functions():
    model = make("DeepseekV3", SMALL | dict(num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                                            topk_group=1, moe_intermediate_size=32, q_lora_rank=24, kv_lora_rank=16,
                                            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16))
    expected = LOGITS(model)
    stays = {piece.how for piece in mg.patch(model) if piece.kind == "rotary embedding" and not piece.replaced}
    assert stays == {"its forward has several functions for it: apply_rotary_pos_emb_interleave, apply_rotary_pos_emb"}
    torch.testing.assert_close(LOGITS(model), expected, rtol=1e-4, atol=1e-4)


def test_two_models():
    """Either is undone first."""
    one, other = model_of("Llama"), model_of("Qwen3")
    for first, second in ((one, other), (other, one)):
        mg.patch(one), mg.patch(other)
        expected = LOGITS(second)
        mg.unpatch(first)
        assert torch.equal(LOGITS(second), expected) and LOGITS(first).isfinite().all()
        mg.unpatch(second)


def test_twice_is_once():
    model = model_of("Llama")
    first = mg.patch(model)
    assert mg.patch(model) == first
    mg.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_no_model_of_transformers():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.LayerNorm((8,), bias=False))
    x = torch.randn(4, 8)
    before = model(x)
    pieces = {piece.name: piece for piece in mg.patch(model)}
    assert pieces["1"].replaced and pieces["2"].replaced and not pieces[""].replaced
    assert "no model of transformers" in str(pieces[""])
    assert torch.allclose(model(x), before, atol=1e-5)
    mg.unpatch(model)
    with pytest.raises(TypeError, match="patch: model is int, expected torch.nn.Module"):
        mg.patch(3)
    with pytest.raises(ValueError, match="patch: model is compiled"):
        mg.patch(torch.compile(model))


def test_what_computes_something_else_stays():
    class OddRMSNorm(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight, self.eps, self.factor = torch.nn.Parameter(torch.randn(8)), 1e-6, factor

        def forward(self, x):
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight * self.factor

    class OddLayerNorm(OddRMSNorm):
        pass

    model = torch.nn.ModuleList([OddRMSNorm(1.0), OddRMSNorm(1.5), torch.nn.LayerNorm(8, device="meta"),
                                 OddLayerNorm(1.0), OddLayerNorm(1.5)])
    pieces = {piece.name: piece for piece in mg.patch(model)}
    assert pieces["0"].replaced and not pieces["1"].replaced and not pieces["2"].replaced
    assert pieces["1"].how == "it computes something else" and "no values yet" in pieces["2"].how
    assert pieces["3"].how == "margay.rms_norm" and pieces["4"].how == "it computes something else"
    mg.unpatch(model)


def test_gated_norms():
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    theirs = MambaRMSNormGated(32, 8)
    torch.nn.init.normal_(theirs.weight)
    model, x, z = torch.nn.ModuleList([theirs]), torch.randn(3, 32), torch.randn(3, 32)
    calls = (lambda: theirs(x, z), lambda: theirs(x, gate=z), lambda: theirs(x))
    before = [call() for call in calls]
    pieces = mg.patch(model)
    assert pieces[0].how == "margay.gated_rms_norm, gate first"
    for call, expected in zip(calls, before):
        assert torch.allclose(call(), expected, atol=1e-5)
    mg.unpatch(model)
