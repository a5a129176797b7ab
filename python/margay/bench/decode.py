"""Attention for generation: one query for each of B sequences, 32 query heads, 4 key heads (or 32: MHA), D = 128, bfloat16, against PyTorch's
scaled_dot_product_attention (flash backend), which reads the same caches. Bound by memory: keys and values are read once, and `of memory` is their bytes over the time,
relative to 4.35 TB/s. `paged`: pages of 64 keys in random order; PyTorch reads the unpaged cache.
"""
import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import margay
from margay.bench.harness import Case, GpuTimer, Problem, run_family

BATCHES = (1, 8, 32, 128)
CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
Q_HEADS, D, PAGE = 32, 128, 64
MOST_BYTES = 40 << 30        # of one cache
BANDWIDTH = 4.35e12


def sdpa(q, k, v):
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=q.shape[2] != k.shape[2]).transpose(1, 2)


def build(batch, context, k_heads, paged):
    torch.manual_seed(0)
    q = torch.randn(batch, 1, Q_HEADS, D, device="cuda").bfloat16()
    k, v = (torch.empty(batch, context, k_heads, D, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2))
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    caches, table = (k, v), None
    if paged:
        table = torch.randperm(batch * context // PAGE, device="cuda").view(batch, -1)
        caches = [torch.empty_like(t).view(-1, PAGE, k_heads, D).index_copy_(0, table.flatten(), t.view(-1, PAGE, k_heads, D)) for t in (k, v)]
        table = table.int()
    ours = functools.partial(margay.attention_decode, q, *caches, cache_seqlens=lengths, page_table=table)
    return Problem({"margay": ours, "torch": functools.partial(sdpa, q, k, v)}, 1e-2, 4 * batch * Q_HEADS * context * D, 2 * k.numel() * 2)


def cases():
    for k_heads, paged in ((4, False), (4, True), (32, False)):
        for batch in BATCHES:
            for context in CONTEXTS:
                if batch * context * k_heads * D * 2 > MOST_BYTES // (2 if paged else 1):
                    continue
                group = f"{Q_HEADS}/{k_heads} heads, {'paged' if paged else 'dense'}"
                fields = {"group": group, "batch": batch, "n": context, "k_heads": k_heads, "paged": paged, "mask": "full"}
                yield Case(f"decode {group} B={batch} N={context}", fields, functools.partial(build, batch, context, k_heads, paged))


def run(options, arguments):
    if not torch.cuda.is_available():
        raise SystemExit("decode: needs a GPU")
    with torch.no_grad():
        return run_family("decode", cases(), GpuTimer(), options)
