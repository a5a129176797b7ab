"""Attention's public functions: docstrings, options, and checks in the terms of these functions.

A call goes to the module of the library its tensors come from, attention_torch or attention_numpy, which allocates the
outputs and calls the C function. `_C` checks all that it is given; the checks here say what the arguments must agree
on.
"""

from margay import _shared

MAX_HEAD_DIM = 256
DROPS_ALL = 1 - 2.0**-17       # the least probability that drawn_dropout makes 1
FAR = 1 << 30     # more keys than a sequence can have


def attention(q, k, v, *, causal=False, scale=None, window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None,
              dropout_p=0.0, dropout_seed=None, return_lse=False, deterministic=False, q_descale=None, k_descale=None,
              v_descale=None):
    """softmax(scale q k^T) v.

    q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv]; Hq is a multiple of Hk (grouped queries); 1 <= D, Dv <= 256.
    bfloat16 or float16, on the CPU also float32. PyTorch tensors are differentiable; NumPy arrays give NumPy arrays.

    causal: query i sees keys up to i + Nk - Nq (bottom-right aligned). A row without keys is 0, its lse -inf.
    scale: of the scores, positive; 1 / sqrt(D) if None.
    window: (left, right): query i sees keys i + Nk - Nq - left to i + Nk - Nq + right only; negative or None: no bound.
    softcap: scaled scores x become softcap tanh(x / softcap), if not 0.
    sink: float32 [Hq], a logit of each head that is part of the softmax's sum, and of lse, and has no value;
        differentiable.
    alibi_slopes: float32 [Hq] or [B, Hq]: scores fall by slope |i + Nk - Nq - j|.
    dropout_p: probability of each softmax probability to become 0, rounded to a multiple of 1 / 65536, which must be
        less than 1; the others grow by 1 / (1 - dropout_p), so that the mean stays.
    dropout_seed: 64-bit integer that, with batch, head, row and key, decides what is dropped; drawn from torch's
        default generator if None.
    return_lse: also return the natural-log log-sum-exp of the scaled scores, float32 [B, Hq, Nq]; differentiable too.
    deterministic: bitwise equal gradients in every run, at some cost; also on under
        `torch.use_deterministic_algorithms(True)`.

    q_descale, k_descale, v_descale: of torch.float8_e4m3fn tensors only, float32 [B, Hk], positive or 0: what q, k and
    v are to be multiplied by; 1 if None. q's too is given for each key head. The output of 8-bit tensors is bfloat16,
    their probabilities are rounded to e4m3 in the product with v, and they have no gradient and none of window,
    softcap, sink, alibi_slopes and dropout.

    The output [B, Hq, Nq, Dv] has its dimensions in memory in the order of q's, head dim last. Any strides are taken,
    but a tensor whose last dimension is not contiguous, or has negative strides, and on CUDA one whose address or
    strides are not multiples of 16 bytes, is copied first; `explain` says so. Gradients of gradients and forward-mode
    derivatives are not implemented.
    """
    library = _library_of("attention", "q", q)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        check_no_features(read_features(library, window, softcap, sink, alibi_slopes, dropout_p, dropout_seed))
        return library.attention_fp8(q, k, v, (q_descale, k_descale, v_descale), causal, scale, return_lse)
    if (type(window) is tuple and window == (-1, -1) and softcap == 0.0 and sink is None and alibi_slopes is None and
            dropout_p == 0.0):
        return library.attention(q, k, v, causal, scale, return_lse, deterministic)
    features = read_features(library, window, softcap, sink, alibi_slopes, dropout_p, dropout_seed)
    return library.attention_features(q, k, v, features, causal, scale, return_lse, deterministic)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, scale=None,
                     window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None, dropout_p=0.0, dropout_seed=None,
                     return_lse=False, deterministic=False):
    """Attention of many sequences that are packed one behind the other.

    q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv]: the sequences' rows. cu_seqlens_q, cu_seqlens_k: integers [B + 1] on
    the same device, which begin with 0, do not fall, and end with at most Tq and Tk; sequence b is rows cu_seqlens_q[b]
    to cu_seqlens_q[b + 1] - 1. Empty sequences are welcome. max_seqlen_q, max_seqlen_k: at least the rows of the
    longest sequence; rows beyond are not computed. On CUDA none of this is checked, for that would stop the GPU, and
    starts that break it can overwrite other memory; MARGAY_SYNC=1 in the environment checks every call. Everything else
    as in `attention`, for each sequence by itself: NaN in one does not reach another. Rows behind the last sequence may
    hold anything; their results and gradients are 0, their lse is -inf. Returns [Tq, Hq, Dv], and lse [Hq, Tq].
    """
    library = _library_of("attention", "q", q)
    if type(k) is not type(q) or type(v) is not type(q):
        library.check_kinds("attention", q=q, k=k, v=v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        _shared.check_rank("attention", name, t, 3, "[rows of all sequences, heads, head dim]")
    starts = library.as_starts("cu_seqlens_q", cu_seqlens_q), library.as_starts("cu_seqlens_k", cu_seqlens_k)
    longest = [_shared.integer("attention", name, n)
               for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))]
    features = read_features(library, window, softcap, sink, alibi_slopes, dropout_p, dropout_seed, *starts, *longest)
    result = library.attention_features(*map(library.packed, (q, k, v)), features, causal, scale, return_lse,
                                        deterministic)
    return (library.unpacked(result[0]), result[1][0]) if return_lse else library.unpacked(result)


def dropout_mask(p, seed, batch, heads, rows, keys):
    """What `attention` with dropout_p = p and dropout_seed = seed keeps: bool [batch, heads, rows, keys], a CPU tensor.
    Heads are q's."""
    integers = dict(seed=seed, batch=batch, heads=heads, rows=rows, keys=keys)
    integers = [_shared.integer("dropout_mask", name, n) for name, n in integers.items()]
    from margay.families.attention.attention_torch import dropout_mask

    return dropout_mask(read_dropout(p), *integers)


def read_window(window, op="attention"):
    try:
        left, right = (-1 if bound is None else
                       max(-1, min(bound if isinstance(bound, int) else bound.__index__(), FAR)) for bound in window)
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"{op}: window is {window!r}, expected a pair of integers (left, right)") from None
    return left, right


def read_softcap(op, x):
    """As csrc/attention/ops.def, before float32 makes 0 or infinity of it."""
    x = _shared.number(op, "softcap", x)
    if x != 0 and not 2.0**-150 < x < 2.0**128 - 2.0**103:
        raise ValueError(f"{op}: softcap is {x:g}, expected 0 (none) or a positive number that float32 holds")
    return x


def read_dropout(p):
    """The probability that is drawn."""
    p = _shared.number("attention", "dropout_p", p)
    if not 0 <= p < 1:
        raise ValueError(f"attention: dropout_p is {p:g}, expected 0 to less than 1")
    if p >= DROPS_ALL:
        raise ValueError(f"attention: dropout_p is {p!r}, which is rounded to a multiple of 1 / 65536 and becomes 1, "
                         f"expected at most 65535 / 65536 = {65535 / 65536}")
    return drawn_dropout(p)


def drawn_dropout(p):
    """p as 16 random bits draw it."""
    return round(p * 65536) / 65536


def read_features(library, window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None, dropout_p=0.0, seed=None,
                  cu_seqlens_q=None, cu_seqlens_k=None,
              max_seqlen_q=0, max_seqlen_k=0):
    """margay.families.attention.features.Features; its seed is None where one is to be drawn."""
    left, right = read_window(window)
    softcap, dropout_p = read_softcap("attention", softcap), read_dropout(dropout_p)
    sink, alibi_slopes = feature_tensors(library, "attention", sink, alibi_slopes)
    if seed is not None:
        seed = _shared.integer("attention", "dropout_seed", seed)
    return library.Features(left, right, softcap, dropout_p, seed if dropout_p else 0, sink, alibi_slopes, cu_seqlens_q,
                            cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def feature_tensors(library, op, sink, slopes):
    if slopes is not None:
        slopes = library.as_float32(op, "alibi_slopes", slopes)
        if slopes.ndim == 1:
            slopes = slopes[None]
        elif slopes.ndim != 2:
            raise ValueError(f"{op}: alibi_slopes has shape {_shared.shape(slopes)}, expected [heads of q] or [batch, "
                             "heads of q]")
    return None if sink is None else library.as_float32(op, "sink", sink), slopes


def refuse_start(name, starts):
    """Of a list of starts, one of which int32 cannot hold."""
    i = next(i for i, start in enumerate(starts) if not -2**31 <= start < 2**31)
    raise ValueError(f"attention: {name}[{i}] is {starts[i]}, expected 0 to 2^31 - 1 (int32)")


def check_starts(name, starts, total, max_seqlen):
    """What C checks of cu_seqlens_q or cu_seqlens_k on the CPU, of a list."""
    if starts[:1] != [0]:
        raise ValueError(f"attention: cu_seqlens_{name}[0] is {starts[0] if starts else 'missing'}, expected 0")
    for i, (before, start) in enumerate(zip(starts, starts[1:])):
        if not before <= start <= total:
            raise ValueError(f"attention: cu_seqlens_{name}[{i + 1}] is {start}, expected {before} (the one before) to "
                             f"{total} (the rows that there are)")
        if start - before > max_seqlen:
            raise ValueError(f"attention: max_seqlen_{name} is {max_seqlen}, expected at least {start - before} (rows "
                             f"of sequence {i})")


def check_attention(q, k, v):
    """Raise unless the ranks, shapes and dtypes of the arguments agree."""
    if not q.ndim == k.ndim == v.ndim == 4:
        for name, t in (("q", q), ("k", k), ("v", v)):
            _shared.check_rank("attention", name, t, 4, "[batch, heads, rows, head dim]")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        _shared.check_dtype("attention", "k", k, "q", q)
        _shared.check_dtype("attention", "v", v, "q", q)
    batch, heads, _, dim = q.shape
    k_batch, k_heads, k_rows, k_dim = k.shape
    v_batch, v_heads, v_rows, v_dim = v.shape
    if k_batch != batch or v_batch != batch:
        name, t = ("k", k) if k_batch != batch else ("v", v)
        _shared.mismatch("attention", name, t, "batch", 0, "q", q)
    if k_dim != dim:
        _shared.mismatch("attention", "k", k, "head dim", 3, "q", q)
    if v_heads != k_heads:
        _shared.mismatch("attention", "v", v, "heads", 1, "k", k)
    if v_rows != k_rows:
        _shared.mismatch("attention", "v", v, "rows", 2, "k", k)
    if k_heads != heads and (k_heads == 0 or heads % k_heads):
        raise ValueError(f"attention: k has {k_heads} heads, expected a divisor of the {heads} heads of q")
    for name, size in (("q", dim), ("v", v_dim)):
        if size < 1:
            raise ValueError(f"attention: {name} has head dim {size}, expected 1 to {MAX_HEAD_DIM}")
        if size > MAX_HEAD_DIM:
            raise NotImplementedError(f"attention: {name} has head dim {size}, kernels exist up to {MAX_HEAD_DIM}")


def check_no_features(f):
    """Raise if one is given: 8-bit attention has none of them."""
    for name, given in (("window", max(f.left, f.right) >= 0), ("softcap", f.softcap), ("sink", f.sink is not None),
                        ("alibi_slopes", f.alibi_slopes is not None), ("dropout_p", f.dropout_p),
                        ("cu_seqlens_q", f.cu_seqlens_q is not None)):
        if given:
            raise NotImplementedError(f"attention: {name} is given, which exists for bfloat16 and float16, not for "
                                      "float8_e4m3fn")


# ---- what explain says besides


def _explained(op, general, named, given):
    """The backward's kernel is chosen where its workspace is asked for."""
    copied = {name: general.why_copied(named[name]) for name in "qkv"}
    if _shared.dtype_name(named["q"]) == "float8_e4m3fn":
        return [], copied, []
    library, (q, k, v) = _library_of(op, "q", named["q"]), (named[name] for name in "qkv")
    options = {name: given[name] for name in ("window", "softcap", "sink", "alibi_slopes", "dropout_p")
               if name in given}
    if op == "attention_varlen":
        q, k, v = map(library.packed, (q, k, v))
        options |= {name: library.as_starts(name, given[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        options |= {name: given[name] for name in ("max_seqlen_q", "max_seqlen_k")}
    features = read_features(library, **options, seed=0) if options else ()
    return [], copied, [lambda: library.backward_workspace(q, k, v, given.get("causal", False),
                                                           given.get("deterministic", False), features)]


EXPLAINED = {"attention": _explained, "attention_varlen": _explained}


# ---- whose tensors these are


def _of_torch():
    from margay.families.attention import attention_torch as library
    return library


def _of_numpy():
    from margay.families.attention import attention_numpy as library
    return library


_library_of = _shared.library_of(_of_torch, _of_numpy)
