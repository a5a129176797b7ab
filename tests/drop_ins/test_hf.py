"""transformers models with attn_implementation="margay" against eager attention, in float32 on the CPU and bfloat16 on
a GPU."""

import random
import warnings

import pytest
import torch

import margay as mg
import reference
from cases import DEVICES, check_error
from hf_models import no_fallback, padding, tokens, transformers
from margay.drop_ins import fallback, hf

TEXT = dict(vocab_size=99, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=128)
GROUPED = TEXT | dict(num_key_value_heads=2, head_dim=16)
WINDOW = GROUPED | dict(sliding_window=6, attention_dropout=0.0)
DECODERS = {
    "Llama": (GROUPED, {}), "Qwen3": (GROUPED, {}), "Mistral": (WINDOW, {}),
    "Gemma2": (WINDOW | dict(query_pre_attn_scalar=16, attn_logit_softcapping=5.0), {}),
    "Gemma3": (WINDOW | dict(query_pre_attn_scalar=16, sliding_window_pattern=2), {}),
    # All experts: rounding must not choose others
    "GptOss": (WINDOW | dict(num_local_experts=2, num_experts_per_tok=2), {}),
    "GPT2": (dict(vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=128,
                  resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), {}),
}
NAMES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"), "GPT2": ("GPT2Config", "GPT2LMHeadModel")}


@pytest.fixture(autouse=True)
def registered(monkeypatch, one_thread):
    """And a fallback is an error. Short rows are computed by kernels too, but in the test of that rule."""
    monkeypatch.setattr(hf, "_SHORT", 0)
    with hf.register(), no_fallback(monkeypatch):
        yield


def decoder(name, device="cpu"):
    config, model = NAMES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    torch.manual_seed(0)
    options, _ = DECODERS[name]
    model = getattr(transformers, model)(
        getattr(transformers, config)(**options, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    for parameter in model.parameters():          # larger than the initialisation, so that attention is not nearly
                                                  # uniform
        parameter.data *= 1.5 if parameter.dim() > 1 else 1
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)


def both(model, run, rtol=2e-4):
    """run(model) gives logits of what counts: the same, and the same gradients, with either attention."""
    results = {}
    for name in ("eager", "margay"):
        model.set_attn_implementation(name)
        model.zero_grad()
        logits = run(model)
        logits.float().square().mean().backward()
        results[name] = logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    if next(model.parameters()).dtype == torch.bfloat16:
        rtol = 0.05
    (exact, gradients), (found, ours) = results["eager"], results["margay"]
    assert found.isfinite().all() and (found - exact).abs().max() <= rtol * exact.abs().max()
    assert set(gradients) == set(ours)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert ours[name].isfinite().all(), name
        assert (ours[name] - gradient).abs().max() <= rtol * (gradient.abs().max() + 0.01 * largest), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder(device, name):
    model, ids = decoder(name, device), tokens(3, 19, device=device)
    both(model, lambda m: m(ids).logits)
    both(model, lambda m: m(ids, attention_mask=torch.ones_like(ids)).logits)
    for side in ("left", "right"):
        mask = padding(3, 19, side, device)
        both(model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("name", DECODERS)
def test_packed(name):
    """Position numbers that start again separate sequences: each gets the logits that it has alone."""
    model, ids = decoder(name), tokens(2, 24)
    position_ids = torch.stack([torch.cat([torch.arange(n) for n in lengths])
                                for lengths in ((5, 1, 11, 7), (20, 4, 0, 0))])
    both(model, lambda m: m(ids, position_ids=position_ids, use_cache=False).logits)
    both(model, lambda m: m(ids[:1], position_ids=position_ids[:1], use_cache=False).logits)
    model.set_attn_implementation("margay")
    packed = model(ids, position_ids=position_ids, use_cache=False).logits
    if name == "GptOss":                          # whose positions are not relative: eager attention differs from the
                                                  # sequence alone as well
        return
    torch.testing.assert_close(packed[0, 6:17], model(ids[:1, 6:17]).logits[0], rtol=1e-4, atol=1e-4)


def test_flash_attention_kwargs():
    model, ids = decoder("Llama"), tokens(1, 24)
    position_ids = torch.cat([torch.arange(n) for n in (5, 12, 7)])[None]
    cu_seqlens = torch.tensor([0, 5, 17, 24], dtype=torch.int32)
    kwargs = dict(cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, max_length_q=12, max_length_k=torch.tensor(12))
    model.set_attn_implementation("margay")
    expected = model(ids, position_ids=position_ids, use_cache=False).logits
    torch.testing.assert_close(model(ids, position_ids=position_ids, use_cache=False, **kwargs).logits, expected)
    attention = model.model.layers[0].self_attn
    q, k = torch.randn(1, 4, 24, 16), torch.randn(1, 2, 24, 16)
    given, _ = hf.attention(attention, q, k, k, None, scaling=0.25, **kwargs)
    made, _ = hf.attention(attention, q, k, k, cu_seqlens[None, None, None], scaling=0.25)
    torch.testing.assert_close(given, made)


@pytest.mark.parametrize("cache", ("dynamic", "static"))
@pytest.mark.parametrize("name", DECODERS)
def test_generate(name, cache):
    """The same tokens as eager attention, over more steps than the window is long, padded and not."""
    model, ids = decoder(name), tokens(3, 9)
    for mask in (torch.ones_like(ids), padding(3, 9, "left")):
        found = {}
        for implementation in ("eager", "margay"):
            model.set_attn_implementation(implementation)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=8,
                                    min_new_tokens=8, do_sample=False, cache_implementation=cache,
                                    disable_compile=True, output_logits=True, return_dict_in_generate=True)
            found[implementation] = output.sequences, torch.stack(output.logits)
        assert torch.equal(found["eager"][0], found["margay"][0])
        torch.testing.assert_close(found["margay"][1], found["eager"][1], rtol=1e-3, atol=1e-3)


def test_chunked_prefill():
    """A prompt in parts: more keys than queries."""
    model, ids = decoder("Gemma2"), tokens(2, 21)
    results = []
    for name in ("eager", "margay"):
        model.set_attn_implementation(name)
        cache, parts = transformers.DynamicCache(config=model.config), []
        for part in ids.split((7, 5, 1, 8), 1):
            parts.append(model(part, past_key_values=cache).logits)
        results.append(torch.cat(parts, 1))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ("Bert", "ModernBert"))
def test_encoder(device, name):
    """Both directions, padding, and for ModernBert a window to both sides."""
    torch.manual_seed(0)
    if name == "Bert":
        config = transformers.BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    else:
        config = transformers.ModernBertConfig(**TEXT, local_attention=6, global_attn_every_n_layers=2,
                                               pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                               cls_token_id=1, sep_token_id=2)
    model = getattr(transformers, name + "ForMaskedLM")(config).eval().to(
        device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = tokens(3, 19, device=device)
    both(model, lambda m: m(ids).logits)
    mask = padding(3, 19, "right", device)
    both(model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("device", DEVICES)
def test_whisper(device):
    """Cross attention: more keys than queries, nothing causal about them."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(vocab_size=99, num_mel_bins=8, d_model=48, encoder_layers=2,
                                        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                                        encoder_ffn_dim=64, decoder_ffn_dim=64,
                                        max_source_positions=20, max_target_positions=30, dropout=0.0,
                                        pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.WhisperForConditionalGeneration(config).eval().to(device, dtype)
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    ids = tokens(2, 11, device=device)
    both(model, lambda m: m(features, decoder_input_ids=ids).logits)
    mask = padding(2, 11, "right", device)
    both(model, lambda m: m(features, decoder_input_ids=ids, decoder_attention_mask=mask).logits[mask.bool()])


def test_dropout():
    model, ids = decoder("Llama"), tokens(2, 19)
    model.set_attn_implementation("margay")
    expected = model(ids).logits
    model.train()
    torch.testing.assert_close(model(ids).logits, expected)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    torch.manual_seed(0)
    one = model(ids).logits
    torch.manual_seed(0)
    assert torch.equal(one, model(ids).logits) and not torch.allclose(one, expected)
    model.eval()
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpointing(reentrant):
    model, ids = decoder("Gemma2").train(), tokens(2, 19)
    mask = padding(2, 19, "right")
    model.set_attn_implementation("margay")
    gradients = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.zero_grad()
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


def test_autocast():
    model, ids = decoder("Llama"), tokens(2, 19)
    model.set_attn_implementation("margay")
    expected = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        found = model(ids).logits
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("padded", (False, True))
def test_compiled(padded):
    """One graph, forward and backward, with packed positions and with padding."""
    if not padded and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip(f"torch {torch.__version__} cannot trace a nested function's name, which tells packed masks "
                    "from others")
    model, ids = decoder("Llama").train(), tokens(2, 16)
    model.set_attn_implementation("margay")
    arguments = dict(position_ids=torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1), use_cache=False)
    kept = torch.ones(2, 16, dtype=torch.bool)
    if padded:
        arguments = dict(attention_mask=padding(2, 16, "left"), use_cache=False)
        kept = arguments["attention_mask"].bool()
    compiled = torch.compile(lambda ids, **arguments: model(ids, **arguments).logits,
                             fullgraph=True, backend="aot_eager")
    results = []
    for f in (lambda ids, **a: model(ids, **a).logits, compiled):
        model.zero_grad()
        logits = f(ids, **arguments)[kept]
        logits.square().mean().backward()
        results.append((logits.detach(), *(p.grad.clone() for p in model.parameters())))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


# ---- what models ask for


def tiny(config, model, device="cpu", **options):
    torch.manual_seed(0)
    config = getattr(transformers, config)(**dict(pad_token_id=0, bos_token_id=1, eos_token_id=2) | options)
    model = getattr(transformers, model)(config).eval()
    for parameter in model.parameters():
        parameter.data *= 1.5 if parameter.dim() > 1 else 1
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32)


T5GEMMA = GROUPED | dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"],
                         query_pre_attn_scalar=16, attention_dropout=0.0, dropout_rate=0.0)


@pytest.mark.parametrize("device", DEVICES)
def test_t5gemma(device):
    """Its encoder's mask sees sliding_window keys to either side, one more than other layers of the same name."""
    model = tiny("T5GemmaConfig", "T5GemmaForConditionalGeneration", device,
                 encoder=T5GEMMA, decoder=T5GEMMA | dict(cross_attention_hidden_size=48), vocab_size=99,
                 dropout_rate=0.0, attention_dropout=0.0)
    ids, decoder_ids = tokens(3, 19, device=device), tokens(3, 7, device=device)
    both(model, lambda m: m(ids, decoder_input_ids=decoder_ids).logits)
    for side in ("left", "right"):
        both(model, lambda m: m(ids, attention_mask=padding(3, 19, side, device),
                                decoder_input_ids=decoder_ids).logits[1:])


def test_t5gemma_compiled():
    model = tiny("T5GemmaConfig", "T5GemmaForConditionalGeneration", encoder=T5GEMMA,
                 decoder=T5GEMMA | dict(cross_attention_hidden_size=48), vocab_size=99,
                 dropout_rate=0.0, attention_dropout=0.0)
    ids, mask = tokens(3, 19), padding(3, 19, "left")
    encoder = model.get_encoder()
    encoder.set_attn_implementation("margay")
    compiled = torch.compile(lambda mask: encoder(ids, attention_mask=mask).last_hidden_state,
                             fullgraph=True, backend="aot_eager")
    for given in (None, mask):
        expected = encoder(ids, attention_mask=given).last_hidden_state
        kept = torch.ones_like(mask) if given is None else mask
        torch.testing.assert_close(compiled(given)[kept.bool()], expected[kept.bool()], rtol=1e-3, atol=1e-5)


def test_windows_that_layers_do_not_name():
    """Phimoe's mask has a window, its layers have none."""
    model = tiny("PhimoeConfig", "PhimoeForCausalLM", **WINDOW, num_local_experts=2, num_experts_per_tok=2)
    ids = tokens(3, 19)
    both(model, lambda m: m(ids).logits)
    for side in ("left", "right"):
        mask = padding(3, 19, side)
        both(model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.filterwarnings("default::margay.FallbackWarning")
@pytest.mark.parametrize("name", ("Doge", "BigBirdPegasus"))
def test_models_that_read_their_mask(name):
    """Doge's layers make another mask of theirs; those of BigBirdPegasus are causal by their mask alone, and say they
    are not."""
    if name == "Doge":
        model = tiny("DogeConfig", "DogeForCausalLM", **GROUPED, keep_window_size=8)
    else:
        model = tiny("BigBirdPegasusConfig", "BigBirdPegasusForCausalLM", vocab_size=99,
                     d_model=48, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
                     max_position_embeddings=128, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
    ids = tokens(3, 19)
    with pytest.warns(mg.FallbackWarning, match="not made of causal, window"):
        both(model, lambda m: m(ids).logits)
    for side in ("left", "right"):
        mask = padding(3, 19, side)
        both(model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()])
    found = {}
    for implementation in ("eager", "margay"):
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(ids, attention_mask=padding(3, 19, "left"),
                                               max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(found["eager"], found["margay"])


OWN = {
    "GPTJ": dict(n_embd=48, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "Falcon": dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4),
    "Bloom": dict(hidden_size=48, n_layer=2, n_head=4), "Mpt": dict(d_model=48, n_layers=2, n_heads=4, max_seq_len=64),
    "CodeGen": dict(n_embd=48, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("way", ("set", "config"))
def test_models_that_never_ask(name, way):
    """One warning, which names the model; and its attention is what it is without the name."""
    config = getattr(transformers, name + "Config")(vocab_size=99, bos_token_id=1, eos_token_id=2, **OWN[name])
    kind = getattr(transformers, name + "ForCausalLM")
    model = kind(config).eval()
    ids, mask = tokens(3, 9), padding(3, 9, "left")
    expected = model(ids, attention_mask=mask).logits[mask.bool()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "set":
            model.set_attn_implementation("margay")
        else:
            other = kind._from_config(type(config)(**config.to_dict()), attn_implementation="margay").eval()
            other.load_state_dict(model.state_dict())
            model = other
        found = model(ids, attention_mask=mask).logits[mask.bool()]
    ours = [str(w.message) for w in caught if issubclass(w.category, mg.FallbackWarning)]
    assert len(ours) == 1 and f"{name}ForCausalLM never asks" in ours[0] and "the model's own code" in ours[0], ours
    torch.testing.assert_close(found, expected)


def test_models_that_ask_are_not_warned_of():
    decoder("Llama").set_attn_implementation("margay")           # warnings are errors here
    decoder("Llama").set_attn_implementation({"": "margay"})
    transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**GROUPED), attn_implementation="margay")


# ---- the two functions


class Layer(torch.nn.Module):
    is_causal = True


def masks_of(r, kind, batch, rows, past, window):
    """Arguments of the mask function as transformers makes them, and of the attention function."""
    from transformers import masking_utils as m

    columns = past + rows
    arguments = dict(batch_size=batch, q_length=rows, kv_length=columns, q_offset=past,
                     kv_offset=0, mask_function=m.causal_mask_function)
    if window:
        arguments.update(mask_function=m.sliding_window_causal_mask_function(window),
                         local_size=window, config=transformers.MistralConfig(sliding_window=window))
    if kind == "padded":
        mask = torch.zeros(batch, columns, dtype=torch.bool)
        for i in range(batch):
            first = r.randrange(columns)
            mask[i, first:] = True
        arguments["attention_mask"] = mask
    if kind in ("static", "static tensor"):
        arguments["kv_length"] = columns + 9
        if kind == "static tensor":
            arguments["q_offset"] = torch.tensor(past)
    if kind == "packed":
        if not hasattr(m, "packed_sequence_compatibility_function"):
            pytest.skip(f"transformers {transformers.__version__} has no packed_sequence_compatibility_function")
        sequence = torch.tensor([sorted(r.choice((0, 1, 2)) for _ in range(rows)) for _ in range(batch)])
        position = torch.stack([torch.cat([torch.arange(int((s == i).sum())) for i in range(3)]) for s in sequence])
        arguments.update(mask_function=m.packed_sequence_compatibility_function(
                             arguments["mask_function"], position, sequence),
                         allow_is_causal_skip=False)
    return arguments


@pytest.mark.parametrize("kind", ("plain", "padded", "static", "static tensor", "packed"))
@pytest.mark.parametrize("window", (None, 4))
@pytest.mark.parametrize("rows, past", ((13, 0), (1, 7), (5, 8)))
@pytest.mark.parametrize("fixed", (False, True))
def test_mask_means_what_transformers_means(kind, window, rows, past, fixed, seed, monkeypatch):
    """Against the full mask that transformers makes of the same arguments; `fixed`: as where nothing may be read on the
    host."""
    past = 0 if kind == "packed" else past
    r = random.Random(seed)
    monkeypatch.setattr(hf, "_compiling_or_capturing", lambda: fixed)
    arguments = masks_of(r, kind, 2, rows, past, window)
    mask = hf.attention_mask(**arguments)
    whole = transformers.masking_utils.sdpa_mask(**{k: v for k, v in arguments.items()
                                                    if k not in ("allow_is_causal_skip", "local_size", "config")},
                                                 allow_is_causal_skip=False)
    g = torch.Generator().manual_seed(seed)
    columns = arguments["kv_length"]
    q, k, v = (torch.randn(2, h, n, 16, generator=g).requires_grad_()
               for h, n in ((4, rows), (2, columns), (2, columns)))
    assert mask is None or mask.dim() < 4 or mask.dtype == torch.int32, "a mask that PyTorch would compute"
    results = []
    for precision in (torch.float32, torch.float64):
        leaves = [t.detach().to(precision).requires_grad_() for t in (q, k, v)]
        seen = whole[..., :columns]
        out = reference.attention(*leaves, visible=seen)[0].transpose(1, 2)
        kept = torch.ones(2, rows, dtype=torch.bool)
        if kind == "padded":
            kept = arguments["attention_mask"][:, past:past + rows]
        results.append((out[kept].detach(), *torch.autograd.grad(out[kept].sum(), leaves)))
    for needs_gradient in (True, False):
        with torch.set_grad_enabled(needs_gradient):
            out, weights = hf.attention(Layer(), q, k, v, mask, sliding_window=window)
        assert weights is None and out.shape == (2, rows, 4, 16) and out.is_contiguous()
        check_error("out", out[kept].detach(), results[0][0], results[1][0], 2, (2**-19, 2**-19))
        if needs_gradient:
            for name, found, plain, exact in zip("qkv", torch.autograd.grad(out[kept].sum(), (q, k, v)),
                                                 results[0][1:], results[1][1:]):
                check_error("d" + name, found, plain, exact, 3, (2**-18, 2**-18))


@pytest.mark.filterwarnings("default::margay.FallbackWarning")
def test_other_masks_fall_back():
    """A prefix that is seen by all, chunks: computed by PyTorch, and said so; never lost."""
    m = transformers.masking_utils
    q = torch.randn(2, 4, 9, 16)
    prefix = m.or_masks(m.causal_mask_function, lambda b, h, i, j: j < 3)
    chunked = m.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))
    for function, options in ((prefix, dict(use_vmap=True)), (prefix, {}),
                              (chunked, dict(local_size=4,
                                             config=transformers.Llama4TextConfig(attention_chunk_size=4)))):
        fallback._warned.clear()
        arguments = dict(batch_size=2, q_length=9, kv_length=9, mask_function=function)
        mask = hf.attention_mask(**arguments, **options)
        whole = m.sdpa_mask(**arguments, allow_is_causal_skip=False)
        assert torch.equal(mask, whole)
        for more in ({}, dict(softcap=3.0, s_aux=torch.randn(4))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                out, _ = hf.attention(Layer(), q, q, q, mask, **more)
            exact = reference.attention(q.double(), q.double(), q.double(),
                                        visible=whole, softcap=more.get("softcap", 0.0), sink=more.get("s_aux"))[0]
            torch.testing.assert_close(out, exact.transpose(1, 2).float())
            assert bool(more) or any(issubclass(w.category, mg.FallbackWarning) and
                                     "not made of causal, window" in str(w.message) for w in caught)


@pytest.mark.parametrize("mask", (None, "padding", "lengths", "whole"))
@pytest.mark.parametrize("causal", (False, True))
def test_position_bias(mask, causal):
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16)
    bias = torch.randn(1, 4, 5, 9)
    layer = Layer()
    layer.is_causal = causal
    seen = torch.ones(2, 1, 5, 9, dtype=torch.bool)
    filled = torch.tensor([9, 9])
    given = None
    if mask == "padding":
        given = torch.arange(9) >= torch.tensor([[0], [3]])
        seen = seen & given[:, None, None]
    if mask == "lengths":
        filled = torch.tensor([7, 9])
        given = filled.int()[:, None, None, None]
        seen = seen & (torch.arange(9) < filled[:, None])[:, None, None]
    if causal and mask != "whole":
        seen = seen & (torch.arange(9) <= torch.arange(5)[:, None] + (filled - 5)[:, None, None, None])
    if mask == "whole":
        given = seen = torch.rand(2, 1, 5, 9) < 0.7
        seen[..., 0] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mg.FallbackWarning)
        found, _ = hf.attention(layer, q, k, k, given, position_bias=bias, scaling=1.0)
    weights = torch.softmax((q @ k.mT + bias).masked_fill(~seen, -torch.inf), 3)
    torch.testing.assert_close(found, (weights @ k).transpose(1, 2), rtol=1e-4, atol=1e-4)


BANDS = {
    "causal": (lambda m: m.causal_mask_function, (-1, 0)), "all": (lambda m: m.bidirectional_mask_function, (-1, -1)),
    "window": (lambda m: m.sliding_window_causal_mask_function(6), (5, 0)),
    "wide window": (lambda m: m.sliding_window_causal_mask_function(4096), (4095, 0)),
    "both sides": (lambda m: m.sliding_window_bidirectional_mask_function(6), (6, 6)),
    "both sides, exclusive": (lambda m: m.and_masks(lambda b, h, i, j: abs(i - j) < 6, m.bidirectional_mask_function),
                              (5, 5)),
    "unequal sides": (lambda m: m.and_masks(lambda b, h, i, j: (i - j <= 3) & (j - i <= 7)), (3, 7)),
    "chunks": (lambda m: m.and_masks(m.causal_mask_function, lambda b, h, i, j: i // 300 == j // 300), None),
    "prefix": (lambda m: m.or_masks(m.causal_mask_function, lambda b, h, i, j: j < 3), None),
    "by head": (lambda m: m.and_masks(m.causal_mask_function, lambda b, h, i, j: (h == 0) | (j == 0)), None),
    "a tensor": (lambda m: m.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)), None),
    "a far hole": (lambda m: m.and_masks(m.causal_mask_function, lambda b, h, i, j: i - j != 1000), None),
}


@pytest.mark.parametrize("name", BANDS)
def test_bands_of_mask_functions(name):
    make, expected = BANDS[name]
    assert hf._bounds(make(transformers.masking_utils)) == expected == hf._bounds(make(transformers.masking_utils))


@pytest.mark.parametrize("name", ("window", "both sides", "both sides, exclusive", "wide window"))
@pytest.mark.parametrize("kind", ("plain", "padded"))
@pytest.mark.parametrize("named", (None, 3, 7))
def test_the_window_is_the_masks(name, kind, named):
    """Whatever a layer calls its sliding_window."""
    m = transformers.masking_utils
    make, _ = BANDS[name]
    arguments = dict(batch_size=2, q_length=19, kv_length=19, mask_function=make(m))
    kept = torch.ones(2, 19, dtype=torch.bool)
    if kind == "padded":
        kept[0, 11:] = False
        arguments["attention_mask"] = kept
    mask = hf.attention_mask(**arguments, local_size=6, config=transformers.MistralConfig(sliding_window=6))
    whole = m.sdpa_mask(**arguments, allow_is_causal_skip=False)
    q = torch.randn(2, 4, 19, 16)
    out, _ = hf.attention(Layer(), q, q, q, mask, sliding_window=named)
    exact = reference.attention(*(q.double(),) * 3, visible=whole)[0].transpose(1, 2).float()
    torch.testing.assert_close(out[kept], exact[kept])


@pytest.mark.parametrize("kind", ("left", "right", "both sides", "holes", "none kept"))
@pytest.mark.parametrize("causal, window", ((False, None), (True, None), (True, 4)))
@pytest.mark.parametrize("rows, columns", ((37, 37), (5, 37), (1, 37), (37, 20)))
@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("device", DEVICES)
def test_padding_plans(device, kind, causal, window, rows, columns, shared, seed):
    """Runs that stay in place, other masks that are put in order, with the plan of the mask function and without."""
    if causal and rows > columns:
        return
    r, batch = random.Random(seed), 4
    mask = torch.zeros(batch, columns, dtype=torch.bool)
    for i in range(batch):
        first, end = sorted(r.sample(range(columns + 1), 2))
        first, end = 0 if kind == "right" else first, columns if kind == "left" or causal and rows == 1 else end
        mask[i, first:end] = True
        if kind == "holes":
            mask[i, [r.randrange(columns) for _ in range(5)]] ^= True
            mask[i, -1] |= causal and rows == 1                   # the one query is no padding
    if kind == "none kept":
        mask[2] = False
    m = transformers.masking_utils
    seen = mask[:, None, None].expand(-1, 1, rows, -1)
    place = mask.cumsum(1)
    kept = torch.ones(batch, rows, dtype=torch.bool)
    if causal:
        row, column = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)
        seen = seen & (column <= row)
        if rows > 1:
            kept = mask[:, columns - rows:]
        if window:
            distance = place[:, columns - rows:, None] - place[:, None]
            seen = seen & (distance < window)[:, None]
    given = mask.to(device)
    if shared:
        given = hf._padding_mask(given, 0, columns, 1)            # None: nothing is padding
        assert kind == "holes" or given is None or given.margay_runs is not None
    layer = Layer()
    layer.is_causal = causal
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, n, h, 16, generator=g).to(device, dtype).transpose(1, 2)
               for n, h in ((rows, 4), (columns, 2), (columns, 2)))
    nothing = (~kept if rows > 1 and causal else torch.zeros_like(kept)).to(device)
    results = []
    for precision in (dtype, torch.float64):
        leaves = [t.detach().to(precision).requires_grad_() for t in (q, k, v)]
        out = reference.attention(*leaves, visible=seen.to(device))[0].transpose(1, 2)
        out = torch.where(nothing[:, :, None, None], 0, out)
        results.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)))
    rounding = (2**-19, 2**-19) if device == "cpu" else (2**-8, 2**-8)
    for needs_gradient in (True, False):
        leaves = [t.detach().requires_grad_(needs_gradient) for t in (q, k, v)]
        out, _ = hf.attention(layer, *leaves, given, sliding_window=window)
        assert out.shape == (batch, rows, 4, 16) and out.is_contiguous()
        check_error("out", out.detach(), results[0][0], results[1][0], 2, rounding)
        if needs_gradient:
            for name, found, plain, exact in zip("qkv", torch.autograd.grad(out.float().square().sum(), leaves),
                                                 results[0][1:], results[1][1:]):
                size = max(1.0, *(float(t.abs().max()) for t in results[1]))       # what cancels where a gradient is 0
                check_error("d" + name, found, plain, exact, 3, (2 * rounding[0], 2 * rounding[1] * size))


def test_padding_is_worked_out_once():
    """Layers do nothing but look at their tensors differently and call the kernel; they read no values."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if not function.is_view:
                seen.append(function.name())
            return function(*arguments, **(options or {}))

    seen: list = []
    mask = padding(4, 33, "right").bool()
    made = hf.attention_mask(batch_size=4, q_length=33, kv_length=33,
                             mask_function=transformers.masking_utils.bidirectional_mask_function, attention_mask=mask)
    layer = Layer()
    layer.is_causal = False
    q, k, v = (torch.randn(4, 33, 4, 16).transpose(1, 2) for _ in range(3))
    hf.attention(layer, q, k, v, made)
    with Operators():
        hf.attention(layer, q, k, v, made)
    assert seen == ["margay::attention_features"], seen


@pytest.mark.gpu
def test_layers_do_not_wait():
    model = tiny("BertConfig", "BertModel", "cuda", **TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.set_attn_implementation("margay")
    ids, mask = tokens(3, 19, device="cuda"), padding(3, 19, "right", "cuda")
    made = hf.attention_mask(batch_size=3, q_length=19, kv_length=19,
                             mask_function=transformers.masking_utils.bidirectional_mask_function,
                             attention_mask=mask.bool())
    hidden = model.embeddings(ids)
    model.encoder(hidden, attention_mask=made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.encoder(hidden, attention_mask=made)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", DEVICES)
def test_short_rows(device, monkeypatch):
    """PyTorch computes short padded batches where it is faster; a sequence without keys still gives 0, and gradients
    that are finite."""
    monkeypatch.setattr(hf, "_SHORT", 128)
    model = tiny("BertConfig", "BertForMaskedLM", device, **TEXT, hidden_dropout_prob=0.0,
                 attention_probs_dropout_prob=0.0)
    ids, mask = tokens(3, 19, device=device), padding(3, 19, "right", device)
    calls = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    model.set_attn_implementation("margay")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda *a, **o: calls.append(1) or sdpa(*a, **o))
    model(ids, attention_mask=mask).logits
    assert calls
    both(model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()])
    calls.clear()
    mask[1] = 0
    model.set_attn_implementation("margay")
    model.zero_grad()
    model(ids, attention_mask=mask).logits.float().square().mean().backward()
    assert not calls and all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("default::margay.FallbackWarning")
@pytest.mark.parametrize("given", ("indices", "sinks", "both", "bias and window"))
def test_other_arguments_of_layers(given):
    """The keys that an indexer chose, logits of queries without a value, a bias of scores beside a window: never
    lost."""
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    seen = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9)
    arguments, scores = {}, q @ k.repeat_interleave(2, 1).mT / 4
    if given in ("indices", "both"):
        indices = torch.stack([torch.stack([torch.randperm(9)[:4] for _ in range(9)]) for _ in range(2)])
        indices[:, :, 0] = 0
        arguments["indices"] = indices.int()
        seen = seen & torch.zeros(2, 9, 9, dtype=torch.bool).scatter(2, indices, True)[:, None]
    if given == "bias and window":
        arguments.update(position_bias=torch.randn(1, 4, 9, 9), sliding_window=3)
        scores = scores + arguments["position_bias"]
        seen = seen & torch.ones(9, 9, dtype=torch.bool).triu(-2)
    scores = scores.masked_fill(~seen, -torch.inf)
    if given in ("sinks", "both"):
        arguments["sinks"] = torch.randn(2, 4, 9, 1)
        scores = torch.cat((scores, arguments["sinks"]), 3)
    with pytest.warns(mg.FallbackWarning):
        found, _ = hf.attention(Layer(), q, k, k, None, **arguments)
    torch.testing.assert_close(found, (scores.softmax(3)[..., :9] @ k.repeat_interleave(2, 1)).transpose(1, 2))


def test_refuses_blocks_of_keys():
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match="block_indices is given"):
        hf.attention(Layer(), q, q, q, None, block_indices=torch.zeros(1, 1, 3, 1, dtype=torch.int32))


def test_refuses_continuous_batching():
    q = torch.randn(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match="cache is given"):
        hf.attention(Layer(), q, q, q, None, cache=object())


def test_register_is_undone():
    attention, mask = (transformers.AttentionInterface._global_mapping,
                       transformers.AttentionMaskInterface._global_mapping)
    with hf.register("margay test"):
        assert attention["margay test"] is hf.attention and mask["margay test"] is hf.attention_mask
        switch = hf.register("sdpa")
        assert attention["sdpa"] is hf.attention
        switch.disable()
    assert "margay test" not in attention and "margay test" not in mask and attention["sdpa"] is not hf.attention
    model = transformers.PreTrainedModel
    hf._unwatch("margay")
    try:
        assert "margay" not in model.set_attn_implementation.__code__.co_filename
        assert "margay" not in model._check_and_adjust_attn_implementation.__code__.co_filename
    finally:
        hf._watch("margay")
    assert "margay" in model.set_attn_implementation.__code__.co_filename


@pytest.mark.parametrize("device", DEVICES)
def test_last_dimension_is_not_contiguous(device):
    """As a model's projections may leave it: computed on a copy."""
    module = torch.nn.Module()
    q, k, v = (torch.randn(2, heads, 33, 16, generator=torch.Generator().manual_seed(heads)).to(device, torch.bfloat16)
               for heads in (4, 2, 2))
    padded = torch.arange(33, device=device) < torch.tensor([33, 20], device=device)[:, None]
    filled = torch.tensor([33, 20], dtype=torch.int32, device=device)[:, None, None, None]
    for mask in (None, padded, filled):
        expected, _ = hf.attention(module, q, k, v, mask, is_causal=False)
        for which in range(3):
            given = [t.mT.contiguous().mT if i == which else t for i, t in enumerate((q, k, v))]
            out, _ = hf.attention(module, *given, mask, is_causal=False)
            assert torch.equal(out[0], expected[0]) and torch.equal(out[1, :20], expected[1, :20])
