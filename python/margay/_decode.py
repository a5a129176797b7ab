"""Attention for generation: new queries against a cache of keys and values, and the cache's growth. Forward only."""

from margay import ops

NAMES = ("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cache_batch_idx", "sink", "alibi_slopes")
APPEND_NAMES = ("k_cache", "v_cache", "k", "v", "cache_seqlens", "page_table", "cache_batch_idx")
MOST_SPLITS = 128


def attention_decode(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, cache_batch_idx=None, causal=False, scale=None, window=(-1, -1),
                     softcap=0.0, sink=None, alibi_slopes=None, num_splits=0, return_lse=False):
    """softmax(scale q k^T) v over the keys that a cache holds.

    q [B, Nq, Hq, D]; k_cache, v_cache [B or more, N, Hk, D], or with a page_table [pages, page size, Hk, D]; Hq is a multiple of Hk; 1 <= D <= 256.
    bfloat16 or float16, on the CPU also float32. Forward only; PyTorch tensors or NumPy arrays.

    cache_seqlens: keys of each sequence, int32 [B] on the device of q, or one int; the whole cache if None. Whatever the cache holds behind them, NaN
        included, has no influence.
    page_table: int32 [B, n]; page j of a sequence holds its keys from j * page size on. The page size is a multiple of 16. A page that does not exist
        reads as zeros.
    cache_batch_idx: int32 [B], the cache of each sequence; its own number if None.
    causal: query i of a sequence of n keys is at e = n - Nq + i and sees keys up to e. window: it sees keys e - left to e + right; -1 is no limit.
    scale: of the scores, positive; 1 / sqrt(D) if None. softcap: scores become softcap tanh(score / softcap); 0 leaves them.
    sink: float32 [Hq], a logit for each head that only enters the denominator (and the lse). alibi_slopes: float32 [Hq] or [B, Hq], score -= slope |e - key|.
    num_splits: parts that the keys are cut into, which are computed in parallel and then added up; chosen if 0.
    return_lse: also return the natural-log log-sum-exp of the scores, float32 [B, Hq, Nq].

    The output is [B, Nq, Hq, D]. A row without keys is 0, its lse -inf (or the sink). Never synchronises, and can be captured in a CUDA graph: lengths and
    pages are read when the kernels run. The same call gives the same bits. Caches whose last dimension is not contiguous, or has negative strides, and on
    CUDA those whose address or strides are not multiples of 16 bytes, are copied first, all of them in every call: that costs far more than the attention.
    `explain` says so.
    """
    face = _face("attention_decode", "q", q)
    length, seqlens = _length("attention_decode", cache_seqlens)
    left, right = ops._window(window, "attention_decode")
    scale = ops.attention_scale(scale, "attention_decode")
    sink, alibi_slopes = ops._feature_tensors(face, "attention_decode", sink, alibi_slopes)
    softcap = ops._number("attention_decode", "softcap", softcap)
    num_splits = ops._integer("attention_decode", "num_splits", num_splits)
    if not 0 <= num_splits <= MOST_SPLITS:
        raise ValueError(f"attention_decode: num_splits is {num_splits}, expected 0 (chosen) to {MOST_SPLITS}")
    out, lse = face.attention_decode((q, k_cache, v_cache, seqlens, page_table, cache_batch_idx, sink, alibi_slopes),
                                     (scale, bool(causal), left, right, softcap, length, num_splits), return_lse)
    return (out, lse) if return_lse else out


def append_kv(k_cache, v_cache, k, v, *, cache_seqlens, page_table=None, cache_batch_idx=None):
    """Write k and v [B, new, Hk, D] into the caches, in place, behind cache_seqlens keys (int32 [B], or one int), which stays as it is.

    The caches, page_table and cache_batch_idx are those of `attention_decode`; the last dimension of a cache, which is written, must be contiguous. What would land behind a cache's end or on a page that does not exist is
    dropped. Sequences must not share the places they write to.
    """
    face = _face("append_kv", "k_cache", k_cache)
    if cache_seqlens is None:
        raise TypeError("append_kv: cache_seqlens is None, expected an int32 tensor or an int")
    length, seqlens = _length("append_kv", cache_seqlens)
    face.append_kv((k_cache, v_cache, k, v, seqlens, page_table, cache_batch_idx), length)


def explain(q, k_cache, v_cache, *, cache_seqlens=None, page_table=None, num_splits=0, **others):
    """`margay.explain` of an attention_decode."""
    from margay import _C

    face = ops._face("attention_decode", "q", q)
    face.check_kinds("attention_decode", q=q, k_cache=k_cache, v_cache=v_cache)
    check_ranks("attention_decode", q=q, k_cache=k_cache, v_cache=v_cache)
    length, seqlens = _length("attention_decode", cache_seqlens)
    rows = k_cache.shape[1] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    problem = dict(dtype=ops.dtype_name(q), gpu=face.is_gpu(q), d=q.shape[3], batch=q.shape[0], heads_q=q.shape[2], heads_k=k_cache.shape[2], nq=q.shape[1],
                   nk=rows if length < 0 else length, causal=bool(others.get("causal", False)), splits=ops._integer("attention_decode", "num_splits", num_splits),
                   page=0 if page_table is None else k_cache.shape[1])
    named = dict(q=q, k_cache=k_cache, v_cache=v_cache, **({} if page_table is None else dict(page_table=page_table)))
    lines = ["attention_decode: " + ", ".join(f"{name} {ops._shape(t)} {ops.dtype_name(t)}" for name, t in named.items())]
    if seqlens is not None:
        lines.append(f"  cache_seqlens is not read: planned for the {rows} keys that the cache holds")
    lines += [f"  {name} is copied first: {why}" for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache))
              if (why := face.why_copied(t, mapped=name != "q"))]
    return "\n".join([*lines, _C.explain("attention_decode", **problem)])


def _face(op, name, x):
    if ops._face(op, name, x).__name__ == "margay._torch":
        from margay import _decode_torch
        return _decode_torch
    return _Arrays


def _length(op, cache_seqlens):
    """(length of all sequences, -1 for the whole cache; tensor of lengths or None)"""
    if cache_seqlens is None:
        return -1, None
    if isinstance(cache_seqlens, int):                 # first: torch.compile asks no number for its attributes
        length = cache_seqlens
    elif hasattr(cache_seqlens, "shape"):
        return -1, cache_seqlens.contiguous() if hasattr(cache_seqlens, "contiguous") else cache_seqlens     # an expanded number has stride 0
    elif hasattr(cache_seqlens, "__index__"):
        length = cache_seqlens.__index__()
    else:
        raise TypeError(f"{op}: cache_seqlens is {type(cache_seqlens).__name__}, expected an int32 tensor or an int")
    if not 0 <= length < ops._FAR:
        raise ValueError(f"{op}: cache_seqlens is {length}, expected 0 to what the cache holds")
    return length, None


def check_ranks(op, **tensors):
    """Raise unless all have 4 dimensions and the first one's dtype."""
    (first, like), *_ = tensors.items()
    for name, t in tensors.items():
        ops._check_rank(op, name, t, 4, "[batch, rows, heads, head dim]")
        ops._check_dtype(op, name, t, first, like)


class _Arrays:
    """NumPy."""

    @staticmethod
    def as_float32(*arguments):
        from margay import _numpy
        return _numpy.as_float32(*arguments)

    @staticmethod
    def attention_decode(tensors, options, want_lse):
        import numpy as np
        from margay import _C, _numpy
        q, k_cache, v_cache, _, page_table, *_ = tensors
        _numpy._check_arrays("attention_decode", **dict(zip(NAMES, tensors)))
        check_ranks("attention_decode", q=q, k_cache=k_cache, v_cache=v_cache)
        out = np.empty(q.shape, q.dtype)
        lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32) if want_lse else None
        size = _C.attention_decode_workspace(q, k_cache, page_table, *options)
        workspace = np.empty(size // 8 + 2, np.int64).view(np.uint8)[:size] if size else None
        _numpy.with_copies(lambda *tensors: _C.attention_decode(out, lse, *tensors, workspace, *options), *tensors)
        return out, lse

    @staticmethod
    def append_kv(tensors, length):
        from margay import _C, _numpy
        _numpy._check_arrays("append_kv", **dict(zip(APPEND_NAMES, tensors)))
        check_ranks("append_kv", **dict(zip(APPEND_NAMES[:4], tensors)))
        caches, rest = tensors[:2], tensors[2:]
        _numpy.with_copies(lambda *rest: _C.append_kv(*caches, *rest, length), *rest)
