"""Attention for generation: new queries against a cache of keys and values, and the cache's growth. Forward only."""

from margay import _shared
from margay.families.attention.attention import FAR, feature_tensors, read_softcap, read_window

NAMES = ("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cache_batch_idx", "sink", "alibi_slopes")
APPEND_NAMES = ("k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx")
MOST_SPLITS = 128
PAGE_UNIT = 16          # rows of a page that kernels read in place are a multiple of it


def attention_decode(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, cache_batch_idx=None, causal=False,
                     scale=None, window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None, num_splits=0,
                     return_lse=False):
    """softmax(scale q k^T) v over the keys that a cache holds.

    q [B, Nq, Hq, D]; k_cache, v_cache [B or more, N, Hk, D], or with a page_table [pages, page size, Hk, D]; Hq is a
    multiple of Hk; 1 <= D <= 256. bfloat16 or float16, on the CPU also float32. Forward only; PyTorch tensors or NumPy
    arrays.

    cache_seqlens: keys of each sequence, int32 [B] on the device of q, or one int; the whole cache if None. Whatever
        the cache holds behind them, NaN included, has no influence.
    page_table: int32 [B, n]; page j of a sequence holds its keys from j * page size on. A page that does not exist
        reads as zeros. Pages of a multiple of 16 keys are read in place; others are copied in order first, n * page
        size rows a sequence.
    cache_batch_idx: int32 [B], the cache of each sequence, with a page_table [any, n] its row of the table; its own
        number if None.
    causal: query i of a sequence of n keys is at e = n - Nq + i and sees keys up to e. window: it sees keys e - left to
        e + right; -1 is no limit.
    scale: of the scores, positive; 1 / sqrt(D) if None. softcap: scores become softcap tanh(score / softcap); 0 leaves
        them.
    sink: float32 [Hq], a logit for each head that only enters the denominator (and the lse). alibi_slopes: float32 [Hq]
        or [B, Hq], score -= slope |e - key|.
    num_splits: parts that the keys are cut into, which are computed in parallel and then added up; chosen if 0.
    return_lse: also return the natural-log log-sum-exp of the scores, float32 [B, Hq, Nq].

    The output is [B, Nq, Hq, D]. A row without keys is 0, its lse -inf (or the sink). Never synchronises, and can be
    captured in a CUDA graph: lengths and pages are read when the kernels run. The same call gives the same bits. Caches
    whose last dimension is not contiguous, or has negative strides, and on CUDA those whose address or strides are not
    multiples of 16 bytes, are copied first, all of them in every call: that costs far more than the attention.
    `explain` says so.
    """
    library = _library_of("attention_decode", "q", q)
    length, seqlens = _length("attention_decode", cache_seqlens)
    left, right = read_window(window, "attention_decode")
    scale = _shared.checked_scale("attention_decode", scale)
    sink, alibi_slopes = feature_tensors(library, "attention_decode", sink, alibi_slopes)
    softcap = read_softcap("attention_decode", softcap)
    num_splits = _shared.integer("attention_decode", "num_splits", num_splits)
    if not 0 <= num_splits <= MOST_SPLITS:
        raise ValueError(f"attention_decode: num_splits is {num_splits}, expected 0 (chosen) to {MOST_SPLITS}")
    out, lse = library.attention_decode((q, k_cache, v_cache, seqlens, page_table, cache_batch_idx, sink, alibi_slopes),
                                     (scale, bool(causal), left, right, softcap, length, num_splits), return_lse)
    return (out, lse) if return_lse else out


def append_kv(k_cache, v_cache, k, v, *, cache_seqlens, page_table=None, cache_batch_idx=None):
    """Write k and v [B, new, Hk, D] into the caches, in place, behind cache_seqlens keys (int32 [B], or one int), which
    stays as it is.

    The caches, page_table and cache_batch_idx are those of `attention_decode`; the last dimension of a cache, which is
    written, must be contiguous. What would land behind a cache's end or on a page that does not exist is dropped.
    Sequences must not share the places they write to.
    """
    library = _library_of("append_kv", "k_cache", k_cache)
    if cache_seqlens is None:
        raise TypeError("append_kv: cache_seqlens is None, expected an int32 tensor or an int")
    length, seqlens = _length("append_kv", cache_seqlens)
    library.append_kv((k_cache, v_cache, k, v, seqlens, page_table, cache_batch_idx), length)


# ---- what explain says besides


def _explain_decode(op, general, named, given):
    k_cache, page_table, notes = named["k_cache"], given.get("page_table"), []
    if page_table is not None:
        named["page_table"] = page_table
    rows = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    if hasattr(given.get("cache_seqlens"), "shape"):
        notes.append(f"  cache_seqlens is not read: planned for the {rows} keys that the cache holds")
    copied = {name: general.why_copied(named[name], mapped=name != "q") for name in NAMES[:3]}
    if page_table is not None and k_cache.shape[1] % PAGE_UNIT:
        notes.append(f"  k_cache and v_cache are copied first, each sequence's {rows} rows in order: pages of "
                     f"{k_cache.shape[1]} keys, "
                     f"and kernels read multiples of {PAGE_UNIT}")
        copied = {"q": copied["q"]}
    return notes, copied, []


def _explain_append(op, general, named, given):
    return [], {name: general.why_copied(named[name], mapped=False) for name in ("k", "v")}, []


EXPLAINED = {"attention_decode": _explain_decode, "append_kv": _explain_append}


# ---- whose tensors these are


def _of_torch():
    from margay.families.attention import decode_torch as library
    return library


def _of_numpy():
    from margay.families.attention import decode_numpy as library
    return library


_library_of = _shared.library_of(_of_torch, _of_numpy)


def _length(op, cache_seqlens):
    """(length of all sequences, -1 for the whole cache; tensor of lengths or None)"""
    if cache_seqlens is None:
        return -1, None
    if isinstance(cache_seqlens, int):                 # first: torch.compile asks no number for its attributes
        length = cache_seqlens
    elif hasattr(cache_seqlens, "shape"):
        # an expanded number has stride 0
        return -1, cache_seqlens.contiguous() if hasattr(cache_seqlens, "contiguous") else cache_seqlens
    elif hasattr(cache_seqlens, "__index__"):
        length = cache_seqlens.__index__()
    else:
        raise TypeError(f"{op}: cache_seqlens is {type(cache_seqlens).__name__}, expected an int32 tensor or an int")
    if not 0 <= length < FAR:
        raise ValueError(f"{op}: cache_seqlens is {length}, expected 0 to what the cache holds")
    return length, None


def needs_order(page_table, cache_batch_idx, *caches):
    """Whether what a page table names has to be brought in order before C takes it. What C refuses is left to C."""
    if page_table is None or cache_batch_idx is None and not (caches and caches[0].ndim == 4
                                                              and caches[0].shape[1] % PAGE_UNIT):
        return False
    first, *others = caches or (page_table,)
    if any(t.ndim != 4 or t.dtype != first.dtype or t.shape[:3] != first.shape[:3] for t in caches):
        return False
    return all(t is None or t.ndim == rank and _shared.dtype_name(t) == "int32"
               and getattr(t, "device", None) == getattr(first, "device", None)
               for t, rank in ((page_table, 2), (cache_batch_idx, 1)))


def check_ranks(op, **tensors):
    """Raise unless all have 4 dimensions and the first one's dtype."""
    (first, like), *_ = tensors.items()
    for name, t in tensors.items():
        _shared.check_rank(op, name, t, 4, "[batch, rows, heads, head dim]")
        _shared.check_dtype(op, name, t, first, like)
