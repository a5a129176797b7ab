"""The public functions.

A call goes to the module of the library its tensors come from, `_torch` or `_numpy`, which allocates the outputs and calls the C function of the
op. `_C` checks all that it is given; the checks here say what the arguments must agree on in the terms of these functions.
"""

import importlib
import math
import sys

ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
MAX_HEAD_DIM = 256
SMALLEST_SCALE = 2.0**-126     # of float32, without loss of precision
LARGEST_SCALE = (2 - 2.0**-23) * 2.0**127
DROPS_ALL = 1 - 2.0**-17       # the least probability that drawn_dropout makes 1
REQUIRED = frozenset(("q", "k", "v", "k_cache", "v_cache", "a", "b"))     # tensors that may not be None


def attention(q, k, v, *, causal=False, scale=None, window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None, dropout_p=0.0, dropout_seed=None,
              return_lse=False, deterministic=False, q_descale=None, k_descale=None, v_descale=None):
    """softmax(scale q k^T) v.

    q [B, Hq, Nq, D], k [B, Hk, Nk, D], v [B, Hk, Nk, Dv]; Hq is a multiple of Hk (grouped queries); 1 <= D, Dv <= 256. bfloat16 or float16, on the
    CPU also float32. PyTorch tensors are differentiable; NumPy arrays give NumPy arrays.

    causal: query i sees keys up to i + Nk - Nq (bottom-right aligned). A row without keys is 0, its lse -inf.
    scale: of the scores, positive; 1 / sqrt(D) if None.
    window: (left, right): query i sees keys i + Nk - Nq - left to i + Nk - Nq + right only; negative or None: no bound.
    softcap: scaled scores x become softcap tanh(x / softcap), if not 0.
    sink: float32 [Hq], a logit of each head that is part of the softmax's sum, and of lse, and has no value; differentiable.
    alibi_slopes: float32 [Hq] or [B, Hq]: scores fall by slope |i + Nk - Nq - j|.
    dropout_p: probability of each softmax probability to become 0, rounded to a multiple of 1 / 65536, which must be less than 1; the others grow by
        1 / (1 - dropout_p), so that the mean stays.
    dropout_seed: 64-bit integer that, with batch, head, row and key, decides what is dropped; drawn from torch's default generator if None.
    return_lse: also return the natural-log log-sum-exp of the scaled scores, float32 [B, Hq, Nq]; differentiable too.
    deterministic: bitwise equal gradients in every run, at some cost; also on under `torch.use_deterministic_algorithms(True)`.

    q_descale, k_descale, v_descale: of torch.float8_e4m3fn tensors only, float32 [B, Hk], positive or 0: what q, k and v are to be multiplied by; 1 if
    None. q's too is given for each key head. The output of 8-bit tensors is bfloat16, their probabilities are rounded to e4m3 in the product with v, and
    they have no gradient and none of window, softcap, sink, alibi_slopes and dropout.

    The output [B, Hq, Nq, Dv] has its dimensions in memory in the order of q's, head dim last. Any strides are taken, but a tensor whose last dimension is
    not contiguous, or has negative strides, and on CUDA one whose address or strides are not multiples of 16 bytes, is copied first; `explain` says so.
    Gradients of gradients and forward-mode derivatives are not implemented.
    """
    library = _library_of("attention", "q", q)
    if q_descale is not None or k_descale is not None or v_descale is not None:
        check_no_features(_features(library, window, softcap, sink, alibi_slopes, dropout_p, dropout_seed))
        return library.attention_fp8(q, k, v, (q_descale, k_descale, v_descale), causal, scale, return_lse)
    if type(window) is tuple and window == (-1, -1) and softcap == 0.0 and sink is None and alibi_slopes is None and dropout_p == 0.0:
        return library.attention(q, k, v, causal, scale, return_lse, deterministic)
    features = _features(library, window, softcap, sink, alibi_slopes, dropout_p, dropout_seed)
    return library.attention_features(q, k, v, features, causal, scale, return_lse, deterministic)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal=False, scale=None, window=(-1, -1), softcap=0.0,
                     sink=None, alibi_slopes=None, dropout_p=0.0, dropout_seed=None, return_lse=False, deterministic=False):
    """Attention of many sequences that are packed one behind the other.

    q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv]: the sequences' rows. cu_seqlens_q, cu_seqlens_k: integers [B + 1] on the same device, which begin
    with 0, do not fall, and end with at most Tq and Tk; sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. Empty sequences are welcome.
    max_seqlen_q, max_seqlen_k: at least the rows of the longest sequence; rows beyond are not computed. On CUDA none of this is checked, for that would
    stop the GPU, and starts that break it can overwrite other memory; MARGAY_SYNC=1 in the environment checks every call.
    Everything else as in `attention`, for each sequence by itself: NaN in one does not reach another. Rows behind the last sequence may hold anything; their
    results and gradients are 0, their lse is -inf. Returns [Tq, Hq, Dv], and lse [Hq, Tq].
    """
    library = _library_of("attention", "q", q)
    if type(k) is not type(q) or type(v) is not type(q):
        library.check_kinds("attention", q=q, k=k, v=v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        _check_rank("attention", name, t, 3, "[rows of all sequences, heads, head dim]")
    starts = library.as_starts("cu_seqlens_q", cu_seqlens_q), library.as_starts("cu_seqlens_k", cu_seqlens_k)
    longest = _integer("attention", "max_seqlen_q", max_seqlen_q), _integer("attention", "max_seqlen_k", max_seqlen_k)
    features = _features(library, window, softcap, sink, alibi_slopes, dropout_p, dropout_seed, *starts, *longest)
    result = library.attention_features(*map(library.packed, (q, k, v)), features, causal, scale, return_lse, deterministic)
    return (library.unpacked(result[0]), result[1][0]) if return_lse else library.unpacked(result)


def dropout_mask(p, seed, batch, heads, rows, keys):
    """What `attention` with dropout_p = p and dropout_seed = seed keeps: bool [batch, heads, rows, keys], a CPU tensor. Heads are q's."""
    integers = dict(seed=seed, batch=batch, heads=heads, rows=rows, keys=keys)
    integers = [_integer("dropout_mask", name, n) for name, n in integers.items()]
    return importlib.import_module("margay._torch").dropout_mask(_dropout(p), *integers)


_FAR = 1 << 30     # more keys than a sequence can have


def _window(window, op="attention"):
    try:
        left, right = (-1 if bound is None else max(-1, min(bound if isinstance(bound, int) else bound.__index__(), _FAR)) for bound in window)
    except (AttributeError, TypeError, ValueError):
        raise TypeError(f"{op}: window is {window!r}, expected a pair of integers (left, right)") from None
    return left, right


def _number(op, name, x):
    try:
        return float(x)
    except OverflowError:
        found = f"an integer of {x.bit_length()} bits" if isinstance(x, int) else "too large"
        raise ValueError(f"{op}: {name} is {found}, expected a number that float32 can hold") from None
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} is {x!r}, expected a number") from None


def _softcap(op, x):
    """As mg_check_softcap in csrc/runtime/check.c, before float32 makes 0 or infinity of it."""
    x = _number(op, "softcap", x)
    if x != 0 and not 2.0**-150 < x < 2.0**128 - 2.0**103:
        raise ValueError(f"{op}: softcap is {x:g}, expected 0 (none) or a positive number that float32 holds")
    return x


def _integer(op, name, x):
    if isinstance(x, int):                         # torch.compile traces no __index__
        return x
    if isinstance(x, float) or not hasattr(x, "__index__"):
        raise TypeError(f"{op}: {name} is {x!r}, expected an integer")
    return int(x)


def _dropout(p):
    """The probability that is drawn."""
    p = _number("attention", "dropout_p", p)
    if not 0 <= p < 1:
        raise ValueError(f"attention: dropout_p is {p:g}, expected 0 to less than 1")
    if p >= DROPS_ALL:
        raise ValueError(f"attention: dropout_p is {p!r}, which is rounded to a multiple of 1 / 65536 and becomes 1, "
                         f"expected at most 65535 / 65536 = {65535 / 65536}")
    return drawn_dropout(p)


def drawn_dropout(p):
    """p as 16 random bits draw it."""
    return round(p * 65536) / 65536


def _features(library, window=(-1, -1), softcap=0.0, sink=None, alibi_slopes=None, dropout_p=0.0, seed=None, cu_seqlens_q=None, cu_seqlens_k=None,
              max_seqlen_q=0, max_seqlen_k=0):
    """margay._features.Features; its seed is None where one is to be drawn."""
    left, right = _window(window)
    softcap, dropout_p = _softcap("attention", softcap), _dropout(dropout_p)
    sink, alibi_slopes = _feature_tensors(library, "attention", sink, alibi_slopes)
    if seed is not None:
        seed = _integer("attention", "dropout_seed", seed)
    return library.Features(left, right, softcap, dropout_p, seed if dropout_p else 0, sink, alibi_slopes, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def _feature_tensors(library, op, sink, slopes):
    if slopes is not None:
        slopes = library.as_float32(op, "alibi_slopes", slopes)
        if slopes.ndim == 1:
            slopes = slopes[None]
        elif slopes.ndim != 2:
            raise ValueError(f"{op}: alibi_slopes has shape {_shape(slopes)}, expected [heads of q] or [batch, heads of q]")
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
            raise ValueError(f"attention: cu_seqlens_{name}[{i + 1}] is {start}, expected {before} (the one before) to {total} (the rows that there are)")
        if start - before > max_seqlen:
            raise ValueError(f"attention: max_seqlen_{name} is {max_seqlen}, expected at least {start - before} (rows of sequence {i})")


def matmul(a, b, *, bias=None, activation=None, out=None):
    """activation(a b + bias).

    a [..., M, K], b [K, N], bias [N]. bfloat16 or float16, on the CPU also float32; sums in float32. activation: None, "relu", "gelu", "gelu_tanh" or
    "silu".

    out: [..., M, N] to write to, its last dimension contiguous, where no gradient is asked. Transposed views are read in place. A tensor neither of whose
    last two dimensions is contiguous, or with negative strides, and on CUDA one whose address or strides are not multiples of 16 bytes, is copied first;
    `explain` says so.
    """
    return _library_of("matmul", "a", a).matmul(a, b, bias, activation_code(activation), out)


class Explanation(str):
    """Text, and `kernels`: the names of the rows of kernels.def that compute the parts of a call, None where no kernel does."""


_EXPLAINED = {"attention": ("q", "k", "v"), "attention_decode": ("q", "k_cache", "v_cache"), "matmul": ("a", "b")}


def scaled_add(a, b, scale=1.0):
    """a + scale b, both [M, N] of one dtype: bfloat16 or float16, on the CPU also float32. Differentiable in a and b."""
    return (_functions.get("scaled_add") or _of_row("scaled_add"))(a, b, scale)


def linear_attention(q, k, v, *, scale=None, initial_state=None, output_final_state=False):
    """out_t = scale S_t^T q_t with S_t = S_(t-1) + k_t v_t^T: attention without a softmax, causal.

    q, k [B, T, H, K], v [B, T, H, V], out [B, T, H, V]; 1 <= K, V <= 128. bfloat16 or float16, on the CPU also float32.
    PyTorch tensors are differentiable; NumPy arrays give NumPy arrays.

    scale: 1 / sqrt(K) if None.
    initial_state: S_0, float32 [B, H, K, V]; zero if None; differentiable.
    output_final_state: return (out, S_T), S_T float32 [B, H, K, V].
    """
    scale = attention_scale(scale, "linear_attention")
    out, state = (_functions.get("linear_attention") or _of_row("linear_attention"))(q, k, v, initial_state, scale)
    return (out, state) if output_final_state else out


def ssd(x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf), initial_states=None, seq_idx=None,
        cu_seqlens=None, return_final_states=False):
    """Mamba-2's scan: S_t = e^(dt_t A) S_(t-1) + dt_t x_t B_t^T, y_t = S_t C_t + D x_t, times silu(z_t).

    x, z, y [batch, T, H, P], B, C [batch, T, G, N], G a divisor of H; bfloat16 or float16, on the CPU also float32; 1 <= P <= 128, 1 <= N <= 256.
    dt [batch, T, H], A, dt_bias [H], D [H] or [H, P]: of any of these types, computed with in float32. All but seq_idx and cu_seqlens are differentiable.

    dt_bias, dt_softplus, dt_limit: dt becomes dt + dt_bias, then softplus of that, then at least dt_limit[0] and at most dt_limit[1].
    initial_states: S_0, [batch, H, P, N]; zero if None. Of sequence 0 where seq_idx is given.
    seq_idx: integers [batch, T]; where it changes, the state begins anew with zeros.
    cu_seqlens: integers [sequences + 1]: x has batch 1 and sequence i steps cu_seqlens[i] to cu_seqlens[i + 1] - 1; the states are then those of
        the sequences, [sequences, H, P, N].
    return_final_states: return (y, S_T), S_T float32 [batch, H, P, N].
    """
    from margay import _ssd

    return _ssd.ssd(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, cu_seqlens, return_final_states)


def ssd_step(state, x, dt, A, B, C, *, D=None, z=None, dt_bias=None, dt_softplus=False, dt_limit=(0.0, math.inf), state_indices=None):
    """One step of `ssd`, for generation: y [batch, H, P], and `state` [batch, H, P, N], of any floating type, becomes the next one in place.

    x, z [batch, H, P], dt [batch, H], B, C [batch, G, N], the rest as for `ssd`.
    state_indices: integers [batch]: sample i has state[state_indices[i]]; a negative one has none, and its y is 0.
    """
    from margay import _ssd

    return _ssd.ssd_step(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, state_indices)


def explain(op, *tensors, **options):
    """Say which kernel computes a call and why the kernels before it do not.

    `explain(mg.attention, q, k, v, causal=True)` for a call, or `explain("attention_fwd", dtype="bfloat16", gpu=True, d=128)` for any problem.
    `explain(mg.attention_decode, q, k_cache, v_cache, cache_seqlens=1000)` also says into how many splits the keys are cut, and why.
    The result is a string whose `kernels` are the kernels' names: of attention the forward's, and the backward's if it has one.
    """
    from margay import _C

    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if tensors:
        lines, parts = _explain_call(name, tensors, options)
    else:
        names = (name,) if name != "attention" else ("attention_fwd_fp8",) if options.get("dtype") == "float8_e4m3fn" else ("attention_fwd", "attention_bwd")
        lines, parts = [], [_C.explain(part, **options) for part in names]
    explanation = Explanation("\n".join([*lines, *(text for _, text in parts)]))
    explanation.kernels = [kernel for kernel, _ in parts]
    return explanation


def _explain_call(op, tensors, options):
    """Of a dry run of the call, which ends where it has chosen a kernel."""
    from margay import _C

    if op not in _EXPLAINED:
        raise ValueError(f"explain: op is {op}, expected attention, attention_decode or matmul where tensors are given")
    *names, last = _EXPLAINED[op]
    if len(tensors) != len(names) + 1:
        raise TypeError(f"explain: {len(tensors)} tensors are given, expected {', '.join(names)} and {last} for {op}")
    named = dict(zip((*names, last), tensors))
    library = _library_of(op, names[0], tensors[0])
    library.check_kinds(op, **named)
    if options.get("dropout_p"):
        options = {**options, "dropout_seed": 0}               # none is drawn
    with library.without_gradients():
        parts = [_C.dry_run(lambda: getattr(importlib.import_module("margay"), op)(*tensors, **options))]
        if op == "attention" and dtype_name(tensors[0]) != "float8_e4m3fn":
            given = {name: options[name] for name in ("window", "softcap", "sink", "alibi_slopes", "dropout_p") if name in options}
            features = _features(library, **given, seed=0) if given else None
            parts.append(_C.dry_run(lambda: library.backward_workspace(*tensors, options.get("causal", False), options.get("deterministic", False), features)))
    if op == "attention_decode":
        more, copied = importlib.import_module("margay._decode").explain(named, **options)
    else:
        more, copied = [], named
    lines = [f"{op}: " + ", ".join(f"{name} {_shape(t)} {dtype_name(t)}" for name, t in named.items()), *more]
    lines += [f"  {name} is copied first: {why}" for name, t in copied.items() if (why := library.why_copied(t, op == "matmul", (op, name) != ("attention_decode", "q")))]
    return lines, parts


def info():
    """What was built and what it runs on: kernels, instruction set, threads, driver, devices, and why a GPU is not used."""
    from margay import _C

    return _C.info()


def activation_code(name):
    known = name is None or isinstance(name, str)
    if not known or name not in ACTIVATIONS:
        error = ValueError if known else TypeError
        raise error(f"matmul: activation is {name!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[name]


def attention_scale(scale, op="attention"):
    """The scale as a float, 0 for the default."""
    if scale is None:
        return 0.0
    scale = _number(op, "scale", scale)
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise ValueError(f"{op}: scale is {scale:g}, expected a positive finite number")
    return scale


def check_attention(q, k, v):
    """Raise unless the ranks, shapes and dtypes of the arguments agree."""
    if not q.ndim == k.ndim == v.ndim == 4:
        for name, t in (("q", q), ("k", k), ("v", v)):
            _check_rank("attention", name, t, 4, "[batch, heads, rows, head dim]")
    if k.dtype != q.dtype or v.dtype != q.dtype:
        _check_dtype("attention", "k", k, "q", q)
        _check_dtype("attention", "v", v, "q", q)
    batch, heads, _, dim = q.shape
    k_batch, k_heads, k_rows, k_dim = k.shape
    v_batch, v_heads, v_rows, v_dim = v.shape
    if k_batch != batch or v_batch != batch:
        name, t = ("k", k) if k_batch != batch else ("v", v)
        _mismatch("attention", name, t, "batch", 0, "q", q)
    if k_dim != dim:
        _mismatch("attention", "k", k, "head dim", 3, "q", q)
    if v_heads != k_heads:
        _mismatch("attention", "v", v, "heads", 1, "k", k)
    if v_rows != k_rows:
        _mismatch("attention", "v", v, "rows", 2, "k", k)
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
                        ("alibi_slopes", f.alibi_slopes is not None), ("dropout_p", f.dropout_p), ("cu_seqlens_q", f.cu_seqlens_q is not None)):
        if given:
            raise NotImplementedError(f"attention: {name} is given, which exists for bfloat16 and float16, not for float8_e4m3fn")


def check_matmul(a, b, bias):
    """Raise unless the ranks, shapes and dtypes of the arguments agree."""
    if a.ndim < 2:
        raise ValueError(f"matmul: a has shape {_shape(a)}, expected [..., M, K]")
    _check_rank("matmul", "b", b, 2, "[K, N]")
    _check_dtype("matmul", "b", b, "a", a)
    if a.shape[-1] != b.shape[0]:
        raise ValueError(f"matmul: b has shape {_shape(b)}, expected [{a.shape[-1]}, N] (K of a, which has shape {_shape(a)})")
    if bias is not None:
        _check_rank("matmul", "bias", bias, 1, "[N]")
        _check_dtype("matmul", "bias", bias, "a", a)
        if bias.shape[0] != b.shape[1]:
            raise ValueError(f"matmul: bias has shape {_shape(bias)}, expected [{b.shape[1]}] (N of b, which has shape {_shape(b)})")


def check_out(out, a, b):
    shape = (*a.shape[:-1], b.shape[1])
    if tuple(out.shape) != shape:
        raise ValueError(f"matmul: out has shape {_shape(out)}, expected {list(shape)}")
    _check_dtype("matmul", "out", out, "a", a)


def one_exception(function):
    """Of a function that is called where an exception is handled: what it raises stands alone."""
    def called(*arguments):
        try:
            return function(*arguments)
        except Exception as error:
            raise error from None
    return called


def dtype_name(t):
    return str(t.dtype).removeprefix("torch.")


def memory_order(strides):
    """The dimensions before the last from the outermost to the innermost in memory."""
    return sorted(range(len(strides) - 1), key=lambda i: -strides[i])


_functions: dict = {}   # of rows of ops.def


def _of_row(name):
    from margay import _op

    return _functions.setdefault(name, _op.function(name))


_libraries: dict = {}   # type of a tensor -> module that computes with it


def _library_of(op, name, x):
    return _libraries.get(type(x)) or _find_library(op, name, x)


def _find_library(op, name, x):
    """Looks only at libraries that are imported: x would not exist without its own."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(x, torch.Tensor):      # imported by statements, which torch.compile can trace
        from margay import _torch as library
    elif numpy is not None and isinstance(x, numpy.ndarray):
        from margay import _numpy as library
    else:
        library = None
    if library is not None:
        _libraries[type(x)] = library
        return library
    raise TypeError(f"{op}: {name} is {type(x).__name__}, expected torch.Tensor or numpy.ndarray")


def _shape(t):
    return list(t.shape)


def _check_rank(op, name, t, rank, layout):
    if t.ndim != rank:
        raise ValueError(f"{op}: {name} has shape {_shape(t)}, expected {rank} dimensions {layout}")


def _check_dtype(op, name, t, other_name, other):
    if t.dtype != other.dtype:
        raise TypeError(f"{op}: {name} has dtype {dtype_name(t)}, expected {dtype_name(other)} (same as {other_name})")


def _mismatch(op, name, t, what, dim, other_name, other):
    raise ValueError(f"{op}: {name} has shape {_shape(t)}, expected {what} {other.shape[dim]} in dimension {dim} "
                     f"(same as {other_name}, which has shape {_shape(other)})")
