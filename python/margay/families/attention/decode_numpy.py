"""attention_decode and append_kv on NumPy arrays."""

import numpy as np

from margay import _C
from margay._numpy import as_float32, check_kinds, with_copies  # noqa: F401
from margay.families.attention.decode import APPEND_NAMES, NAMES, PAGE_UNIT, check_ranks, needs_order


def attention_decode(tensors, options, want_lse):
    q, k_cache, v_cache, seqlens, page_table, index, *others = tensors
    check_kinds("attention_decode", NAMES[3:], **dict(zip(NAMES, tensors)))
    check_ranks("attention_decode", q=q, k_cache=k_cache, v_cache=v_cache)
    if needs_order(page_table, index, k_cache, v_cache) and (index is None or index.shape[0] == q.shape[0]):
        page_table = _table_rows(page_table, index)
        if k_cache.shape[1] % PAGE_UNIT and page_table.shape[0] == q.shape[0]:
            k_cache, v_cache = _pages_in_order(k_cache, page_table), _pages_in_order(v_cache, page_table)
            page_table = None
        tensors = q, k_cache, v_cache, seqlens, page_table, None, *others
    out = np.empty(q.shape, q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32) if want_lse else None
    size = _C.attention_decode_workspace(*tensors, *options)
    workspace = np.empty(size // 8 + 2, np.int64).view(np.uint8)[:size] if size else None
    with_copies(lambda *tensors: _C.attention_decode(out, lse, *tensors, workspace, *options), *tensors)
    return out, lse


def append_kv(tensors, length):
    check_kinds("append_kv", APPEND_NAMES[4:], **dict(zip(APPEND_NAMES, tensors)))
    check_ranks("append_kv", **dict(zip(APPEND_NAMES[:4], tensors)))
    k_cache, v_cache, k, v, seqlens, page_table, index = tensors
    if index is not None and needs_order(page_table, index) and index.shape[0] == k.shape[0]:
        page_table, index = _table_rows(page_table, index), None
    with_copies(lambda *rest: _C.append_kv(k_cache, v_cache, *rest, length), k, v, seqlens, page_table, index)


def _table_rows(table, index):
    """As decode_torch.table_rows."""
    if index is None:
        return table
    there = (index >= 0) & (index < table.shape[0])
    rows = np.full((index.shape[0], table.shape[1]), -1, np.int32)
    rows[there] = table[index[there]]
    return rows


def _pages_in_order(cache, table):
    """As decode_torch.cache_rows."""
    there = (table >= 0) & (table < cache.shape[0])
    rows = np.zeros((*table.shape, *cache.shape[1:]), cache.dtype)
    rows[there] = cache[table[there]]
    return rows.reshape(table.shape[0], -1, *cache.shape[2:])
