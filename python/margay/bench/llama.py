"""A training step of layers of Llama-3-8B with loss, margay.patch against transformers, torch.compile, Liger (GPU).

Forward and backward of `transformers`' model with random weights in bfloat16, without an optimizer's step, which is the
same for all. Linear layers are torch's in all. eager: sdpa attention. liger: as apply_liger_kernel_to_llama makes it,
with flash-attn 4 where that can be imported. The runners share their weights. Flops are those of products and
attention. Memory is a step's at its peak, gradients included; `first_ms` of the result file are the first steps.
"""
import copy
import functools

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, peer, run_family

LLAMA_3_8B = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
                  vocab_size=128256, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
SHAPES = [(4, 1, 4096)]                     # layers, samples, tokens of each
HIDE_CYCLES = 10_000_000
_SHOWN = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"


def model_of(layers, options, device, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=8192, attn_implementation="sdpa",
                         **{"bos_token_id": None, "eos_token_id": None} | options)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).train()


def another(model):
    """A model of its own with the same parameters."""
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    made = copy.deepcopy(model, shared)
    made.set_attn_implementation(model.config._attn_implementation)
    return made


def step(model, ids):
    shown = [dict(model.named_parameters(remove_duplicate=False))[name] for name in _SHOWN]

    def run(call=model):
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found = loss.detach(), *(p.grad for p in shown)
        for p in model.parameters():             # which all runners have
            p.grad = None
        return found
    return run


def by_liger(model, ids):
    """Liger replaces a name of transformers' module, too: it is Liger's only during its own steps."""
    apply = peer("liger_kernel.transformers", "apply_liger_kernel_to_llama")
    if not apply:
        return None
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    apply(model=model)
    theirs = {name: value for name, value in vars(modeling_llama).items() if before.get(name) is not value}
    vars(modeling_llama).update({name: before[name] for name in theirs})
    if peer("flash_attn.cute", "flash_attn_func"):
        model.set_attn_implementation("flash_attention_4")
    run = step(model, ids)

    def switched():
        vars(modeling_llama).update(theirs)
        try:
            return run()
        finally:
            vars(modeling_llama).update({name: before[name] for name in theirs})
    return switched


def build(layers, batch, tokens, options=None, device="cuda", dtype=torch.bfloat16):
    options = options or LLAMA_3_8B
    eager = model_of(layers, options, device, dtype)
    ids = torch.randint(0, eager.config.vocab_size, (batch, tokens), device=device)
    eager.lm_head(torch.ones(16, eager.config.hidden_size, device=device, dtype=dtype)).sum()     # loads cuBLAS for all
    ours = another(eager)
    left = [piece for piece in margay.patch(ours) if not piece.replaced]
    print("   ", "; ".join(sorted({f"{piece.kind} stays: {piece.how}" for piece in left})))
    runners = {"margay": step(ours, ids), "eager": step(eager, ids)}
    if device == "cuda":
        torch.compiler.reset()
        compiled = another(eager)
        runners["compiled"] = functools.partial(step(compiled, ids), torch.compile(compiled, dynamic=False))
        if liger := by_liger(another(eager), ids):
            runners["liger"] = liger
    config = eager.config
    columns = config.hidden_size // config.num_attention_heads
    weights = sum(p.numel() for name, p in eager.named_parameters() if p.dim() == 2 and "embed" not in name)
    scores = layers * config.num_attention_heads * tokens * tokens // 2 * 2 * columns
    return Problem(runners, 6e-2, batch * (6 * tokens * weights + 7 * scores), memory=True)


def cases(shapes=SHAPES, options=None, device="cuda", dtype=torch.bfloat16):
    for layers, batch, tokens in shapes:
        fields = {"group": "training step", "direction": "training step", "layers": layers, "batch": batch,
                  "n": tokens, "dtype": str(dtype).removeprefix("torch.")}
        yield Case(f"training step, {layers} layers of Llama-3-8B, {batch} x {tokens} tokens", fields,
                   functools.partial(build, layers, batch, tokens, options, device, dtype))


def run(options, arguments):
    return run_family("llama", cases(), GpuTimer(HIDE_CYCLES), options)
