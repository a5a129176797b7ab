"""margay.patch: small transformers models with random weights compute the same, and are themselves again afterwards."""

import pytest
import torch

import margay as mg
from hf_models import make, results, tokens

SMALL = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=64)
MODELS = {
    "Llama": (SMALL | dict(num_key_value_heads=2), {"root mean square norm": 5, "attention": 1}),
    "Qwen3": (SMALL | dict(num_key_value_heads=2, head_dim=16), {"root mean square norm": 9, "attention": 1}),
    "GPTNeoX": (SMALL, {"layer norm": 5, "attention": 1}),
    "Gemma": (SMALL | dict(num_key_value_heads=1, head_dim=16), {"root mean square norm": 5, "attention": 1}),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_computes_the_same(family):
    options, expected = MODELS[family]
    model, ids = make(family, options), tokens(2, 21)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.2 * torch.randn(p.shape))
    run = lambda model: model(ids).logits  # noqa: E731
    logits, grads = results(model, run)
    before = {name: vars(module).keys() for name, module in model.named_modules()}
    implementation = model.config._attn_implementation
    state = {name: t.clone() for name, t in model.state_dict().items()}
    pieces = mg.patch(model)
    print(*pieces, sep="\n")
    replaced = [piece.kind for piece in pieces if piece.replaced]
    assert {kind: replaced.count(kind) for kind in replaced} == expected
    assert any(not piece.replaced and piece.kind == "rotary embedding" and piece.how for piece in pieces)
    ours, our_grads = results(model, run)
    assert not torch.equal(ours, logits)
    assert torch.allclose(ours, logits, rtol=1e-4, atol=1e-4 * float(logits.abs().max()))
    for name, grad in grads.items():
        assert torch.allclose(our_grads[name], grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()) + 1e-7), name
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert mg.unpatch(model) and not mg.unpatch(model)
    assert before == {name: vars(module).keys() for name, module in model.named_modules()}
    assert model.config._attn_implementation == implementation
    assert torch.equal(results(model, run)[0], logits)


def test_twice_is_once():
    model = make("Llama", MODELS["Llama"][0])
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


def test_what_computes_something_else_stays():
    class OddRMSNorm(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.weight, self.eps, self.factor = torch.nn.Parameter(torch.randn(8)), 1e-6, factor

        def forward(self, x):
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight * self.factor

    model = torch.nn.ModuleList([OddRMSNorm(1.0), OddRMSNorm(1.5), torch.nn.LayerNorm(8, device="meta")])
    pieces = {piece.name: piece for piece in mg.patch(model)}
    assert pieces["0"].replaced and not pieces["1"].replaced and not pieces["2"].replaced
    assert pieces["1"].how == "it computes something else" and "no values yet" in pieces["2"].how
    mg.unpatch(model)


def test_gated_norms():
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    theirs = MambaRMSNormGated(32, 8)
    torch.nn.init.normal_(theirs.weight)
    model, x, z = torch.nn.ModuleList([theirs]), torch.randn(3, 32), torch.randn(3, 32)
    before = theirs(x, z)
    pieces = mg.patch(model)
    assert pieces[0].how == "margay.gated_rms_norm, gate first" and torch.allclose(theirs(x, z), before, atol=1e-5)
    mg.unpatch(model)
