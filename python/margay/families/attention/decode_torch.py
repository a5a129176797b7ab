"""attention_decode and append_kv on PyTorch tensors: eager calls go to `_C`, everything that has to see the call gets
an operator."""

import torch

from margay import _C, _shared, _torch, _transforms
from margay._torch import as_float32  # noqa: F401, for decode
from margay.families.attention.decode import APPEND_NAMES, NAMES, PAGE_UNIT, check_ranks, needs_order

_OPTIONAL = "Tensor? cache_seqlens, Tensor? page_table, Tensor? cache_batch_idx"


def attention_decode(tensors, options, want_lse):
    _refuse_gradient("attention_decode", tensors)
    if torch.compiler.is_compiling() or not _torch.c_may_read(*tensors):
        _torch.check_kinds("attention_decode", NAMES[3:], **dict(zip(NAMES, tensors)))
        return torch.ops.margay.attention_decode(*tensors, *options)
    return _decode_forward(tensors, options, want_lse)


def append_kv(tensors, length):
    _refuse_gradient("append_kv", tensors)
    if torch.compiler.is_compiling() or not _torch.c_may_read(*tensors):
        _torch.check_kinds("append_kv", APPEND_NAMES[4:], **dict(zip(APPEND_NAMES, tensors)))
        read = tensors if torch.compiler.is_compiling() else [t if t is None else t.resolve_neg() for t in tensors]
        torch.ops.margay.append_kv(*read, length)
        # torch negates no argument that is written beside one that is None
        for cache, t in zip(tensors[:2], read):
            _torch.copy_back(cache, t)
    else:
        _append(tensors, length)


def _refuse_gradient(op, tensors):
    if torch.is_grad_enabled() and any(t is not None and getattr(t, "requires_grad", False) for t in tensors):
        raise NotImplementedError(f"{op}: an argument requires a gradient, which this op does not have; call it under "
                                  "torch.no_grad(), or margay.attention")


def _decode_forward(tensors, options, want_lse=True):
    if tensors[4] is not None:
        tensors = _pages_in_order(*tensors)
    q = tensors[0]
    if not q.is_cuda:
        _torch.use_torch_threads()
    try:
        size = _C.attention_decode_workspace(*tensors, *options)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device) if size else None
        out, lse = _outputs(q, want_lse)
        _C.attention_decode(out, lse, *tensors, workspace, *options)
    except Exception:
        return _decode_forward_of_copies(tensors, options, want_lse)
    return out, lse


@_shared.one_exception
def _decode_forward_of_copies(tensors, options, want_lse):
    _check_decode(*tensors)
    copies = _without_gaps(tensors[0]), *map(_torch.mappable, tensors[1:3]), *map(_without_gaps, tensors[3:])
    if all(a is b for a, b in zip(copies, tensors)):
        raise
    return _decode_forward(copies, options, want_lse)


def _without_gaps(t):
    return t.contiguous() if t is not None and t.ndim and _torch.has_gaps(t) else t


def _pages_in_order(q, k_cache, v_cache, seqlens, page_table, index, *others):
    """The call with pages that kernels read: the table's rows in the order of the sequences, and keys and values in
    order where pages are of another size."""
    rows = page_table if index is None else index
    if needs_order(page_table, index, k_cache, v_cache) and q.ndim == 4 and rows.shape[0] == q.shape[0]:
        page_table, index = table_rows(page_table, index), None
        if k_cache.shape[1] % PAGE_UNIT:
            with torch.no_grad():
                k_cache, v_cache = (cache_rows(t, page_table, None, q.shape[0]) for t in (k_cache, v_cache))
            page_table = None
    return q, k_cache, v_cache, seqlens, page_table, index, *others


def _append(tensors, length):
    *caches, seqlens, page_table, index = tensors
    if index is not None and needs_order(page_table, index) and index.shape[0] == caches[2].shape[0]:
        tensors = *caches, seqlens, table_rows(page_table, index), None
    if not tensors[0].is_cuda:
        _torch.use_torch_threads()
    try:
        _C.append_kv(*tensors, length)
    except Exception:
        _append_of_copies(tensors, length)
    _torch.written(tensors[:2])


@_shared.one_exception
def _append_of_copies(tensors, length):
    _check_append(*tensors)
    copies = *tensors[:2], *map(_without_gaps, tensors[2:])
    if all(a is b for a, b in zip(copies, tensors)):
        raise
    _C.append_kv(*copies, length)


def _check_decode(*tensors):
    named = dict(zip(NAMES, tensors))
    _torch.check_kinds("attention_decode", NAMES[3:], **named)
    check_ranks("attention_decode", **dict(zip(NAMES[:3], tensors)))
    _torch.check_devices("attention_decode", **named)


def _check_append(*tensors):
    _torch.check_kinds("append_kv", APPEND_NAMES[4:], **dict(zip(APPEND_NAMES, tensors)))
    check_ranks("append_kv", **dict(zip(APPEND_NAMES[:4], tensors)))
    _torch.check_devices("append_kv", **dict(zip(APPEND_NAMES, tensors)))


def _outputs(q, want_lse=True):
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, queries, heads, _ = q.shape
    return out, torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device) if want_lse else None


def _decode_fake(*arguments):
    _check_decode(*arguments[:8])
    return _outputs(arguments[0])


def cache_rows(cache, page_table, cache_batch_idx, batch, first=None):
    """[B, N, Hk, D]: each sequence's rows in order, from row `first` [B] on; zeros where a page or a cache does not
    exist."""
    if first is None:
        index = page_table if page_table is not None else cache_batch_idx
        if index is None:
            return cache[:batch]
        rows = _parts(cache, (index,), index)
        return rows if page_table is None else rows.flatten(1, 2)
    size = cache.shape[1]
    rows = size if page_table is None else size * page_table.shape[1]
    place = (torch.arange(rows, device=cache.device) + first[:, None]).clamp(0, max(rows - 1, 0))
    if page_table is not None:
        part = page_table.gather(1, place // max(size, 1)) if rows else place
    else:
        part = (torch.arange(batch, device=cache.device) if cache_batch_idx is None
                else cache_batch_idx)[:, None].expand(batch, rows)
    return _parts(cache, (part, place % max(size, 1)), part)


def _parts(cache, index, part):
    if cache.shape[0] == 0 or part.numel() == 0:
        return cache.new_zeros(*part.shape, *cache.shape[len(index):])
    there = (part >= 0) & (part < cache.shape[0])
    rows = cache[part.long().where(there, 0), *index[1:]]
    return rows.masked_fill_(~there[(...,) + (None,) * (rows.ndim - there.ndim)], 0)


def table_rows(page_table, cache_batch_idx):
    """The rows of a page table that sequences have; a row that does not exist has no pages."""
    if cache_batch_idx is None:
        return page_table
    if page_table.shape[0] == 0:
        return page_table.new_full((cache_batch_idx.shape[0], page_table.shape[1]), -1)
    there = (cache_batch_idx >= 0) & (cache_batch_idx < page_table.shape[0])
    return page_table[cache_batch_idx.long().where(there, 0)].where(there[:, None], -1)


def _decode_kernel(*arguments):
    return _decode_forward(arguments[:8], arguments[8:])


def _append_kernel(*arguments):
    return _append(arguments[:7], arguments[7])


_torch.library.define(f"attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, {_OPTIONAL}, Tensor? sink, "
                      "Tensor? alibi_slopes, float scale, bool causal, int left, int right, float softcap, "
                      "SymInt length, int num_splits) -> (Tensor, Tensor)", tags=_torch._TAGS)
_torch.library.define("append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
                      f"{_OPTIONAL}, SymInt length) -> ()", tags=_torch._TAGS)
for _op, _kernel in (("attention_decode", _decode_kernel), ("append_kv", _append_kernel)):
    for _device in ("CPU", "CUDA"):
        _torch.library.impl(_op, _transforms.without_tangents(_op, _kernel), _device)
torch.library.register_fake("margay::attention_decode", _decode_fake, lib=_torch.library)
torch.library.register_fake("margay::append_kv", lambda *arguments: _check_append(*arguments[:7]), lib=_torch.library)
_transforms.install(_torch.library, "attention_decode", "attention_decode", _transforms.one_by_one)
_transforms.install(_torch.library, "append_kv", "append_kv", None)
