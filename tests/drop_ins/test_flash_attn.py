"""flash-attn's functions: signatures, results, caches, padding, installation, refusals."""

import importlib.util
import inspect
import random
import sys
import warnings

import pytest
import torch

import margay as mg
import reference
from cases import DEVICES, check_error
from margay import bert_padding, flash_attn, flash_attn_interface
from margay.drop_ins import fallback, flash_attn2

pytestmark = pytest.mark.usefixtures("one_thread")

COMMON = ("dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
          "deterministic=False, return_attn_probs=False")
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
DESCALE = "q_descale=None, k_descale=None, v_descale=None"
SIGNATURES = {      # of flash-attn 2.8 and FlashAttention-3, without annotations
    flash_attn.flash_attn_func: f"(q, k, v, {COMMON})",
    flash_attn.flash_attn_qkvpacked_func: f"(qkv, {COMMON})",
    flash_attn.flash_attn_kvpacked_func: f"(q, kv, {COMMON})",
    flash_attn.flash_attn_varlen_func: f"(q, k, v, {LENGTHS}, {COMMON}, block_table=None)",
    flash_attn.flash_attn_varlen_qkvpacked_func: f"(qkv, cu_seqlens, max_seqlen, {COMMON})",
    flash_attn.flash_attn_varlen_kvpacked_func: f"(q, kv, {LENGTHS}, {COMMON})",
    flash_attn.flash_attn_with_kvcache:
        "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, cache_leftpad=None, "
        "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, "
        "num_splits=0, return_softmax_lse=False)",
    bert_padding.unpad_input: "(hidden_states, attention_mask, unused_mask=None)",
    bert_padding.pad_input: "(hidden_states, indices, batch, seqlen)",
    bert_padding.unpad_input_for_concatenated_sequences: "(hidden_states, attention_mask_in_length)",
    flash_attn_interface.flash_attn_func:
        f"(q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALE}, window_size=(-1, -1), attention_chunk=0, "
        "softcap=0.0, num_splits=1, "
        "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False)",
    flash_attn_interface.flash_attn_qkvpacked_func:
        f"(qkv, softmax_scale=None, causal=False, {DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False)",
    flash_attn_interface.flash_attn_varlen_func:
        f"(q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None, {DESCALE}, "
        "window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
        "return_attn_probs=False)",
    flash_attn_interface.flash_attn_with_kvcache:
        "(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
        "cache_batch_idx=None, "
        "cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
        "rotary_seqlens=None, "
        f"{DESCALE}, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False)",
    flash_attn_interface.flash_attn_combine: "(out_partial, lse_partial, out=None, out_dtype=None)",
    flash_attn_interface.get_scheduler_metadata:
        "(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
        "qkv_dtype=torch.bfloat16, headdim_v=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, "
        "causal=False, window_size=(-1, -1), "
        "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0)",
}
SIZES = (1, 2, 17, 33, 63, 64, 65, 97)
OPTIONS = ("plain", "causal", "window", "causal window", "softcap", "scale", "everything", "alibi", "batch alibi")
FORMS = [(form, kind) for form in ("func", "qkvpacked", "kvpacked", "3") for kind in OPTIONS
         if form != "3" or "alibi" not in kind]
CACHES = [(page, extra) for page in (0, 16, 1, 4, 8)
          for extra in ("nothing", "append", "rotary", "rotary halves", "int lengths", "leftpad", "batch idx", "both")]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__.split('.')[-1]}.{f.__name__}")
def test_signature(function):
    assert str(inspect.signature(function)) == SIGNATURES[function]


def options_of(kind, r, heads, batch, device):
    """Options of flash-attn 2, and the reference's."""
    window = ((r.choice((0, 3, 20, -1)), r.choice((0, 3, 20, -1))) if kind in ("window", "causal window", "everything")
              else (-1, -1))
    slopes = None
    if "alibi" in kind or kind == "everything":
        slopes = torch.rand((batch, heads) if kind == "batch alibi" else (heads,),
                            generator=torch.Generator().manual_seed(r.randrange(2**31))).to(device)
    causal = "causal" in kind or kind == "everything"
    softcap = 3.0 if kind in ("softcap", "everything") else 0.0
    scale = 0.3 if kind in ("scale", "everything") else None
    theirs = dict(softmax_scale=scale, causal=causal, window_size=window, softcap=softcap, alibi_slopes=slopes)
    return theirs, dict(scale=scale, causal=causal, window=window, softcap=softcap, alibi_slopes=slopes)


def tensors(r, device, dtype, *shapes):
    g = torch.Generator().manual_seed(r.randrange(2**31))
    return [torch.randn(shape, generator=g).to(device, dtype).requires_grad_() for shape in shapes]


def compare(function, exact_function, inputs, dtype):
    """function(*inputs) to (out, lse) against the exact answer, with gradients of both."""
    out, lse = function(*inputs)
    g = torch.Generator().manual_seed(7)
    dout, dlse = (torch.randn(t.shape, generator=g).to(t.device) for t in (out, lse))
    results = []
    for precision in (dtype, torch.float64):
        leaves = [t.detach().to(precision).requires_grad_() for t in inputs]
        o, s = exact_function(*leaves)
        finite = s.isfinite()
        results.append((o, s, *torch.autograd.grad((o, s[finite]), leaves,
                                                   (dout.to(precision), dlse.to(s.dtype)[finite]),
                                                   materialize_grads=True)))
    plain, exact = results
    finite = exact[1].isfinite()
    assert (torch.equal(lse.isfinite(), finite) and (lse[~finite] == -torch.inf).all() and
            lse.dtype == torch.float32 and out.dtype == dtype)
    gradients = torch.autograd.grad((out, lse[finite]), inputs, (dout.to(dtype), dlse[finite]), materialize_grads=True)
    check_error("out", out.detach(), plain[0].detach(), exact[0].detach(), 2, (2**-19, 2**-19))
    assert (not finite.any() or
            (lse.double() - exact[1])[finite].abs().max() < 2**-17 * (1 + exact[1][finite].abs().max()))
    for name, found, p, e in zip("qkv", gradients, plain[2:], exact[2:]):
        check_error("d" + name, found, p, e, 3, (2**-18, 2**-18))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form, kind", FORMS)
def test_dense(device, form, kind, seed):
    r = random.Random(seed)
    dtype = r.choice((torch.bfloat16, torch.float16) if device == "cuda"
                     else (torch.bfloat16, torch.float16, torch.float32))
    batch, kv_heads, dim = r.choice((1, 2, 3)), r.choice((1, 2)), r.choice((8, 17, 40, 64))
    heads = kv_heads if form == "qkvpacked" else kv_heads * r.choice((1, 2, 3))
    rows = r.choice(SIZES)
    columns = rows if form == "qkvpacked" or r.random() < 0.5 else r.choice(SIZES)
    theirs, ours = options_of(kind, r, heads, batch, device)
    inputs = tensors(r, device, dtype, (batch, rows, heads, dim), (batch, columns, kv_heads, dim),
                     (batch, columns, kv_heads, dim))
    if form == "3":                               # which has no ALiBi
        del ours["alibi_slopes"], theirs["alibi_slopes"]

    def function(q, k, v):
        if form == "3":
            return flash_attn_interface.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
        if form == "func":
            out, lse, nothing = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
            assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, **theirs))
        elif form == "kvpacked":
            out, lse, nothing = flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2),
                                                                    return_attn_probs=True, **theirs)
        else:
            out, lse, nothing = flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2),
                                                                     return_attn_probs=True, **theirs)
        assert nothing is None
        return out, lse

    compare(function, lambda q, k, v: reference.rows_first(q, k, v, **ours), inputs, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form, kind", FORMS)
def test_varlen(device, form, kind, seed):
    """Sequences of any length, 0 and 1 among them."""
    r = random.Random(seed)
    dtype = r.choice((torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16, torch.float32))
    kv_heads, dim, batch = r.choice((1, 2)), r.choice((16, 33, 64)), 4
    heads = kv_heads if form == "qkvpacked" else kv_heads * r.choice((1, 2))
    lengths_q = [r.choice((0, 1, 5, 31, 64, 70)) for _ in range(batch)]
    lengths_k = lengths_q if form == "qkvpacked" else [r.choice((0, 1, 5, 31, 64, 70)) for _ in range(batch)]
    lengths_q[1], lengths_k[1] = 13, 13
    theirs, ours = options_of(kind, r, heads, batch, device)
    inputs = tensors(r, device, dtype, (sum(lengths_q), heads, dim), (sum(lengths_k), kv_heads, dim),
                     (sum(lengths_k), kv_heads, dim))
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32) for lengths in (lengths_q, lengths_k))
    counts = cu_q, cu_k, max(lengths_q), max(lengths_k)
    if form == "3":                               # which has no ALiBi
        del ours["alibi_slopes"], theirs["alibi_slopes"]

    def function(q, k, v):
        if form == "3":
            return flash_attn_interface.flash_attn_varlen_func(q, k, v, *counts, return_attn_probs=True, **theirs)
        if form == "func":
            found = flash_attn.flash_attn_varlen_func(q, k, v, *counts, return_attn_probs=True, **theirs)
            longest = torch.tensor(counts[2], device=device), torch.tensor(counts[3], device=device)
            assert torch.equal(found[0], flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **theirs))
        elif form == "kvpacked":
            found = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1),
                                                               *counts, return_attn_probs=True, **theirs)
        else:
            found = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1),
                                                                cu_q, counts[2], return_attn_probs=True, **theirs)
        assert found[2] is None
        return found[:2]

    compare(function, lambda q, k, v: reference.packed(q, k, v, lengths_q, lengths_k, **ours), inputs, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ("q", "k", "qk"))
def test_varlen_used(device, which, seed):
    """Of each sequence so many rows: none, some, all, and more than it has. What is not used holds NaN."""
    r = random.Random(seed)
    dtype, heads, dim = torch.bfloat16, 2, r.choice((16, 33, 64))
    lengths = {name: [r.choice((0, 1, 31, 64, 70)), 40, 33, 17, r.choice((0, 1, 31, 64, 70))] for name in "qk"}
    used = {name: [r.randint(0, 70), 0, r.randint(1, 32), 99, r.randint(0, 70)] if name in which else lengths[name]
            for name in "qk"}
    theirs, ours = options_of("causal", r, heads, 5, device)
    del ours["alibi_slopes"], theirs["alibi_slopes"]
    starts, rows = {}, {}
    for name, sizes in lengths.items():
        starts[name] = torch.tensor([0, *sizes]).cumsum(0).to(device, torch.int32)
        used[name] = [min(a, b) for a, b in zip(used[name], sizes)]
        rows[name] = [first + i for first, n in zip(starts[name].tolist(), used[name]) for i in range(n)]
    inputs = tensors(r, device, dtype, *((sum(lengths[name]), heads, dim) for name in "qkk"))
    with torch.no_grad():
        for name, t in zip("qkk", inputs):
            t[sorted(set(range(len(t))) - set(rows[name]))] = torch.nan
    given = {f"seqused_{name}": torch.tensor([99 if n == m else n for n, m in zip(used[name], lengths[name])],
                                             dtype=torch.int32, device=device) for name in which}

    def function(q, k, v):
        args = q, k, v, starts["q"], starts["k"], max(lengths["q"]), max(lengths["k"])
        assert torch.equal(flash_attn_interface.flash_attn_varlen_func(*args, **given, **theirs),
                           (both := flash_attn_interface.flash_attn_varlen_func(
                               *args, **given, return_attn_probs=True, **theirs))[0])
        return both

    def plain(q, k, v):
        out, lse = reference.packed(q[rows["q"]], k[rows["k"]], v[rows["k"]], used["q"], used["k"], **ours)
        place = torch.tensor(rows["q"], device=device, dtype=torch.int64)
        return (torch.zeros(len(q), *out.shape[1:], dtype=out.dtype, device=device).index_copy(0, place, out),
                torch.full((lse.shape[0], len(q)), -torch.inf, dtype=lse.dtype,
                           device=device).index_copy(1, place, lse))

    compare(function, plain, inputs, dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_used_rows_have_places_of_their_own(device):
    starts, used = (torch.tensor(t, dtype=torch.int32, device=device) for t in ((0, 5, 5, 20, 30), (2, 3, 99, -1)))
    behind, source, place = flash_attn2.used_rows("f", "q", used, starts, 40)
    assert behind.tolist() == [0, 2, 2, 17, 17] and torch.equal(source[place], torch.arange(40, device=device))
    assert (place[:5].tolist() == [0, 1, 17, 18, 19] and place[5:20].tolist() == [*range(2, 17)] and
            place[20:].tolist() == [*range(20, 40)])


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_pages(device, seed):
    r = random.Random(seed)
    size, batch, lengths_q, lengths_k = 8, 3, [3, 1, 7], [21, 8, 0]
    q, pages_k, pages_v = (t.detach() for t in tensors(r, device, torch.bfloat16,
                                                       (11, 4, 32), (12, size, 2, 32), (12, size, 2, 32)))
    table = torch.tensor(r.sample(range(12), 9)).reshape(batch, 3).to(device, torch.int32)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (lengths_q, lengths_k))
    out = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 7, 21, causal=True, block_table=table)
    k, v = (torch.cat([pages[table[i].long()].flatten(0, 1)[:n] for i, n in enumerate(lengths_k)])
            for pages in (pages_k, pages_v))
    plain, exact = (reference.packed(*(t.to(d) for t in (q, k, v)), lengths_q, lengths_k, causal=True)[0]
                    for d in (torch.bfloat16, torch.float64))
    check_error("out", out, plain, exact, 2, (2**-19, 2**-19))


def paged(k, v, page, r):
    """Copies of the caches [B, N, Hk, D], in pages behind a table [B, N / page] or as they are."""
    if not page:
        return k.clone(), v.clone(), None
    pages = k.shape[1] // page
    table = torch.tensor(r.sample(range(len(k) * pages), len(k) * pages), device=k.device).reshape(len(k), pages)
    places = [torch.empty_like(t).unflatten(1, (pages, page)).flatten(0, 1).index_copy(
                  0, table.flatten(), t.unflatten(1, (pages, page)).flatten(0, 1)) for t in (k, v)]
    return *places, table.int()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("version", (2, 3))
@pytest.mark.parametrize("page, extra", CACHES)
@pytest.mark.parametrize("kinds", (("plain", "softcap", "window"), ("causal", "causal window")),
                         ids=lambda kinds: kinds[0])
def test_cache(device, version, page, extra, kinds, seed):
    r = random.Random(seed)
    kind = r.choice(kinds)
    dtype = torch.bfloat16
    batch, capacity, heads, kv_heads, dim, new = 3, 64, 4, 2, 32, r.choice((1, 5))
    rows = new if extra != "nothing" else r.choice((1, 3))
    theirs, ours = options_of(kind, r, heads, batch, device)
    if version == 3:
        del theirs["alibi_slopes"]
    appended, indexed, padded = (extra not in ("nothing", "batch idx"), extra in ("batch idx", "both"),
                                 extra in ("leftpad", "both"))
    q, k, v = (t.detach() for t in tensors(r, device, dtype, (batch, rows, heads, dim),
                                           (batch, new, kv_heads, dim), (batch, new, kv_heads, dim)))
    caches = batch + 2 if indexed else batch
    cache_k, cache_v = (t.detach() for t in tensors(r, device, dtype, (caches, capacity, kv_heads, dim),
                                                    (caches, capacity, kv_heads, dim)))
    lengths = [20] * batch if extra == "int lengths" else [r.randrange(rows, capacity - new) for _ in range(batch)]
    leftpad = [r.randrange(n) for n in lengths] if padded else [0] * batch
    index = r.sample(range(caches), batch) if indexed else list(range(batch))
    arguments = dict(cache_seqlens=20 if extra == "int lengths"
                     else torch.tensor(lengths, dtype=torch.int32, device=device))
    cos = sin = None
    if extra.startswith("rotary"):
        angle = torch.rand(capacity + 8, 8, generator=torch.Generator().manual_seed(seed)) * 6
        cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
        arguments.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=extra == "rotary")
    if padded:
        arguments["cache_leftpad"] = torch.tensor(leftpad, dtype=torch.int32, device=device)
    if indexed:
        arguments["cache_batch_idx"] = torch.tensor(index, dtype=torch.int32, device=device)

    def answer(precision):
        outs, lses, keys = [], [], []
        for i in range(batch):
            a, b, c = q[i].to(precision), k[i].to(precision), v[i].to(precision)
            if cos is not None:
                ordered = ours["causal"] or ours["window"] != (-1, -1)
                positions = torch.arange(rows) + lengths[i] if ordered else torch.full((rows,), lengths[i])
                a = reference.rotate(a, cos, sin, positions, extra == "rotary")
                b = reference.rotate(b, cos, sin, torch.arange(new) + lengths[i], extra == "rotary")
            kept = [t[index[i], leftpad[i]:lengths[i]].to(precision) for t in (cache_k, cache_v)]
            b, c = (torch.cat(pair) for pair in zip(kept, (b, c))) if appended else kept
            out, lse = reference.rows_first(a[None], b[None], c[None], **ours)
            outs.append(out[0])
            lses.append(lse[0])
            keys.append(b)
        return torch.stack(outs), torch.stack(lses), keys

    (plain, _, _), (exact, exact_lse, keys) = answer(dtype), answer(torch.float64)
    k_cache, v_cache, table = paged(cache_k, cache_v, page, r)
    if page:
        arguments["block_table" if version == 2 else "page_table"] = table
    module = flash_attn if version == 2 else flash_attn_interface
    new_rows = (k, v) if appended else (None, None)
    out, lse, *rest = module.flash_attn_with_kvcache(q, k_cache, v_cache, *new_rows,
                                                     return_softmax_lse=True, **arguments, **theirs)
    assert rest == ([None, None] if version == 3 else [])
    # q and k are rounded once more behind the rotation
    rounding = (2**-19, 2**-19) if cos is None else (2**-8, 2**-8)
    check_error("out", out, plain, exact, 2, rounding)
    finite = exact_lse.isfinite()
    assert (torch.equal(lse.isfinite(), finite) and
            ((lse - exact_lse)[finite].abs() < (1e-4 if cos is None else 0.05)).all())
    # What was appended is in the cache, and nothing else has changed
    for i in range(batch):
        held = k_cache[table[index[i]].long()].flatten(0, 1) if page else k_cache[index[i]]
        end = lengths[i] + (new if appended else 0)
        assert (held[leftpad[i]:end] - keys[i]).abs().max() <= (0 if cos is None else 2**-6)
        assert torch.equal(held[end:], cache_k[index[i], end:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", (0, 16, 4))
@pytest.mark.parametrize("form", ("packed", "packed rotary", "packed both", "chunk", "packed chunk both",
                                  "qv", "packed qv both", "values", "chunk values", "8 bits", "packed 8 bits both"))
@pytest.mark.parametrize("kind", ("plain", "causal", "window"))
def test_cache_of_3(device, page, form, kind, seed):
    """FlashAttention-3's: packed queries and new keys, chunks, qv, values of another head dim, 8 bits, each with what
    shifts rows (both: batch idx, leftpad)."""
    r = random.Random(seed)
    has = {name: name in form for name in ("packed", "rotary", "both", "chunk", "qv", "values", "8 bits")}
    batch, capacity, heads, kv_heads, dim = 4, 64, 4, 2, 32
    dim_v = 48 if has["values"] or has["qv"] else dim
    dtype = held_dtype = torch.bfloat16
    rows, new = ([r.choice((0, 1, 3, 7)) for _ in range(batch)] if has["packed"] else [r.choice((1, 5))] * batch
                 for _ in range(2))
    rows[0], new[0] = max(rows), max(new)
    theirs, ours = options_of(kind, r, heads, batch, device)
    del theirs["alibi_slopes"], ours["alibi_slopes"]
    shapes = [(sum(rows), heads, dim), (sum(new), kv_heads, dim), (sum(new), kv_heads, dim_v),
              (sum(rows), heads, dim_v)]
    caches = batch + 2 if has["both"] else batch
    values = [t.detach() for t in tensors(r, device, dtype, *shapes, (caches, capacity, kv_heads, dim),
                                          (caches, capacity, kv_heads, dim_v))]
    if has["8 bits"]:
        held_dtype, values = torch.float8_e4m3fn, [t.to(torch.float8_e4m3fn).to(dtype) for t in values]
    q, k, v, qv, cache_k, cache_v = values
    lengths = [r.randrange(max(rows), capacity - max(new)) for _ in range(batch)]
    leftpad = [r.randrange(n + 1) for n in lengths] if has["both"] else [0] * batch
    index = r.sample(range(caches), batch) if has["both"] else list(range(batch))
    chunk = r.choice((1, 7, 20, 1000)) if has["chunk"] else 0
    descales = ([torch.rand(batch, kv_heads, generator=torch.Generator().manual_seed(seed)).to(device) + 0.5
                 for _ in range(3)] if has["8 bits"] else [None] * 3)
    cos = sin = None
    if has["rotary"]:
        angle = torch.rand(capacity + 8, 8, generator=torch.Generator().manual_seed(seed)) * 6
        cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)

    def answer(precision):
        outs, lses, keys = [], [], []
        new_rows = list(zip(*(t.to(precision).split(new) for t in (k, v))))
        for i, (a, a_v) in enumerate(zip(*(t.to(precision).split(rows) for t in (q, qv)))):
            b, c = new_rows[i]
            if cos is not None:
                positions = (torch.arange(rows[i]) + lengths[i] if ours["causal"] or
                             ours["window"] != (-1, -1) else torch.full((rows[i],), lengths[i]))
                a, b = (reference.rotate(a, cos, sin, positions, True),
                        reference.rotate(b, cos, sin, torch.arange(new[i]) + lengths[i], True))
            b, c = (torch.cat((t[index[i], leftpad[i]:lengths[i]].to(precision), more))
                    for t, more in ((cache_k, b), (cache_v, c)))
            keys.append(b)
            if has["8 bits"]:
                a, b, c = (t * s[i].to(precision).repeat_interleave(t.shape[1] // kv_heads)[:, None]
                           for t, s in zip((a, b, c), descales))
            visible, scale = None, ours["scale"]
            if chunk:
                e = torch.arange(rows[i], device=device) + len(b) - rows[i]
                visible = torch.arange(len(b), device=device) // chunk == (e // chunk)[:, None]
            if has["qv"]:
                a, b = torch.cat((a, a_v), -1), torch.cat((b, c), -1)
            out, lse = reference.rows_first(a[None], b[None], c[None], visible=visible, **ours)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs), torch.cat(lses, 1), keys

    (plain, _, _), (exact, exact_lse, keys) = answer(dtype), answer(torch.float64)
    k_cache, v_cache, table = paged(cache_k, cache_v, page, r)
    k_cache, v_cache, q, k, v, qv = (t.to(held_dtype) for t in (k_cache, v_cache, q, k, v, qv))
    int32 = lambda values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    arguments = dict(cache_seqlens=int32(lengths), page_table=table, attention_chunk=chunk,
                     qv=qv if has["qv"] else None, rotary_cos=cos, rotary_sin=sin,
                     **dict(zip(("q_descale", "k_descale", "v_descale"), descales)))
    if has["both"]:
        arguments.update(cache_batch_idx=int32(index), cache_leftpad=int32(leftpad))
    if has["packed"]:
        arguments.update(cu_seqlens_q=int32([0, *rows]).cumsum(0).int(), max_seqlen_q=max(rows),
                         cu_seqlens_k_new=int32([0, *new]).cumsum(0).int())
    else:
        q, k, v, arguments["qv"] = (None if t is None else t.unflatten(0, (batch, -1))
                                    for t in (q, k, v, arguments["qv"]))
    out, lse, *rest = flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache,
                                                                   k, v, return_softmax_lse=True, **arguments, **theirs)
    assert rest == [None, None] and out.dtype == torch.bfloat16
    if not has["packed"]:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    # q and k are rounded once more
    rounding = (2**-19, 2**-19) if cos is None and not has["8 bits"] else (2**-7, 2**-7)
    check_error("out", out, plain, exact, 2, rounding)
    finite = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite) and (lse[~finite] == -torch.inf).all()
    assert ((lse - exact_lse)[finite].abs() < (1e-4 if rounding[0] < 2**-10 else 0.1)).all()
    # What was appended is in the cache, and nothing else has changed
    for i in range(batch):
        held = (k_cache.to(dtype)[table[index[i]].long()].flatten(0, 1) if page else k_cache.to(dtype)[index[i]])
        assert ((held[leftpad[i]:lengths[i] + new[i]] - keys[i]).abs() <= (0 if cos is None else 2**-6)).all()
        assert torch.equal(held[lengths[i] + new[i]:], cache_k[index[i], lengths[i] + new[i]:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("kind", ("plain", "causal", "window", "causal window", "softcap"))
@pytest.mark.parametrize("dim_v", (32, 48, 300))
def test_chunks(device, packed, kind, dim_v, seed):
    """attention_chunk of FlashAttention-3, with gradients, which FlashAttention-3 has not; queries in front of all keys
    among them."""
    r = random.Random(seed)
    dtype, heads, kv_heads, dim, batch = torch.bfloat16, 4, 2, 32, 3
    rows, columns = ([r.choice((1, 5, 31, 70)) for _ in range(batch)] if packed else [r.choice((1, 33, 70))] * batch
                     for _ in range(2))
    chunk = r.choice((1, 3, 16, 33, 500))
    theirs, ours = options_of(kind, r, heads, batch, device)
    del theirs["alibi_slopes"], ours["alibi_slopes"]
    inputs = tensors(r, device, dtype, (sum(rows), heads, dim), (sum(columns), kv_heads, dim),
                     (sum(columns), kv_heads, dim_v))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (rows, columns))

    def function(q, k, v):
        if packed:
            return flash_attn_interface.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(rows), max(columns),
                                                               attention_chunk=chunk, return_attn_probs=True, **theirs)
        out, lse = flash_attn_interface.flash_attn_func(*(t.unflatten(0, (batch, -1)) for t in (q, k, v)),
                                                        attention_chunk=chunk, return_attn_probs=True, **theirs)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    def exact(q, k, v):
        outs = []
        for a, b, c in zip(q.split(rows), k.split(columns), v.split(columns)):
            e = torch.arange(len(a), device=device) + len(b) - len(a)
            visible = torch.arange(len(b), device=device) // chunk == (e // chunk)[:, None]
            outs.append(reference.rows_first(a[None], b[None], c[None], visible=visible, **ours))
        return torch.cat([out[0] for out, _ in outs]), torch.cat([lse[0] for _, lse in outs], 1)
    compare(function, exact, inputs, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("scale", (None, 0.2))
@pytest.mark.parametrize("dim_v", (48, 256))
def test_qv(device, packed, scale, dim_v):
    """Scores are scale (q k^T + qv v^T)."""
    r = random.Random(dim_v)
    inputs = tensors(r, device, torch.bfloat16, (40, 4, 32), (66, 2, 32), (66, 2, dim_v), (40, 4, dim_v))
    cu_q, cu_k = (torch.tensor(n, device=device, dtype=torch.int32) for n in ((0, 20, 40), (0, 33, 66)))

    def function(q, k, v, qv):
        options = dict(softmax_scale=scale, causal=True, return_attn_probs=True)
        if packed:
            return flash_attn_interface.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 20, 33, qv=qv, **options)
        q, k, v, qv = (t.unflatten(0, (2, -1)) for t in (q, k, v, qv))
        out, lse = flash_attn_interface.flash_attn_func(q, k, v, qv=qv, **options)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    def exact(q, k, v, qv):
        return reference.packed(torch.cat((q, qv), -1), torch.cat((k, v), -1),
                                v, [20, 20], [33, 33], causal=True, scale=scale)
    compare(function, exact, inputs, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("kind", ("causal window", "window", "softcap"))
def test_8_bits_multiplied_out(device, packed, kind, seed):
    r = random.Random(seed)
    theirs, ours = options_of(kind, r, 4, 2, device)
    del theirs["alibi_slopes"], ours["alibi_slopes"]
    if kind != "softcap":
        theirs["window_size"] = ours["window"] = (7, 3)           # without a window there is a kernel
    q, k, v = (t.detach().to(torch.float8_e4m3fn)
               for t in tensors(r, device, torch.bfloat16, (2, 20, 4, 64), (2, 33, 2, 64), (2, 33, 2, 64)))
    descales = [torch.rand(2, 2, generator=torch.Generator().manual_seed(i)).to(device) + 0.5 for i in range(3)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    if packed:
        cu_q, cu_k = (torch.tensor(n, device=device, dtype=torch.int32) for n in ((0, 20, 40), (0, 33, 66)))
        out = flash_attn_interface.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)),
                                                          cu_q, cu_k, 20, 33, **names, **theirs).unflatten(0, (2, 20))
    else:
        out = flash_attn_interface.flash_attn_func(q, k, v, **names, **theirs)
    exact = [t.double() * s.double().repeat_interleave(t.shape[2] // 2, 1)[:, None, :, None]
             for t, s in zip((q, k, v), descales)]
    plain, exact = (reference.rows_first(*(t.to(p) for t in exact), **ours)[0] for p in (torch.bfloat16, torch.float64))
    assert out.dtype == torch.bfloat16 and not out.requires_grad
    check_error("out", out, plain, exact, 2, (2**-19, 2**-19))


@pytest.mark.parametrize("options", ({}, dict(window_size=(3, 0)), dict(attention_chunk=5)))
def test_8_bits_have_no_gradient(options):
    """As FlashAttention-3's: the forward takes tensors that want one, the backward raises."""
    q = torch.randn(1, 20, 2, 64).to(torch.float8_e4m3fn).requires_grad_()
    starts = torch.tensor([0, 20], dtype=torch.int32)
    for out in (flash_attn_interface.flash_attn_func(q, q, q, **options),
                flash_attn_interface.flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 20, 20, **options)):
        with pytest.raises(NotImplementedError,
                           match="backward of attention of float8_e4m3fn tensors is not implemented"):
            out.float().sum().backward()


@pytest.mark.parametrize("form", ("append", "pages", "packed", "chunk"))
def test_cache_compiles(form):
    """To one graph, and to the same bits."""
    g = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(shape, generator=g).bfloat16()  # noqa: E731
    int32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    q, k, v, caches = (normal(2, 3, 4, 32), normal(2, 3, 2, 32), normal(2, 3, 2, 32),
                       [normal(12, 4, 2, 32) for _ in range(2)])
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    options = dict(cache_seqlens=int32(5, 9), page_table=table, causal=True)
    if form == "append":
        caches, options = [t.view(2, 24, 2, 32) for t in caches], dict(cache_seqlens=int32(5, 9), causal=True)
    elif form == "pages":
        options.update(cache_batch_idx=int32(1, 0), cache_leftpad=int32(2, 0),
                       rotary_cos=normal(24, 8), rotary_sin=normal(24, 8))
    elif form == "packed":
        q, k, v = (t.flatten(0, 1)[:4] for t in (q, k, v))
        options.update(cu_seqlens_q=int32(0, 1, 4), cu_seqlens_k_new=int32(0, 3, 4), max_seqlen_q=3)
    else:
        options.update(attention_chunk=4)

    def step(q, k_cache, v_cache, k, v):
        return flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache,
                                                            k, v, **options, return_softmax_lse=True)[:2]
    mine, theirs = ([t.clone() for t in caches] for _ in range(2))
    expected = step(q, *mine, k, v)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *theirs, k, v)
    assert all(torch.equal(a, b) for a, b in zip((*expected, *mine), (*found, *theirs)))


@pytest.mark.parametrize("device", DEVICES)
def test_padding(device):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(3, 7, 2, 5, generator=g).to(device).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1]], device=device)
    rows, indices, cu_seqlens, longest, lengths = bert_padding.unpad_input(x, mask)
    assert (torch.equal(rows, x[mask.bool()]) and cu_seqlens.tolist() == [0, 3, 8, 12] and
            cu_seqlens.dtype == torch.int32)
    assert (longest, lengths.tolist(), lengths.dtype) == (5, [3, 5, 4], torch.int32)
    back = bert_padding.pad_input(rows, indices, 3, 7)
    assert torch.equal(back, x * mask[:, :, None, None])
    (dx,) = torch.autograd.grad(back.square().sum(), x)
    assert torch.equal(dx, 2 * x * mask[:, :, None, None])
    unused = torch.tensor([[0, 0, 0, 1, 0, 0, 0], [0] * 7, [0] * 7], device=device)
    rows, _, cu_seqlens, longest, lengths = bert_padding.unpad_input(x, mask, unused)
    assert (torch.equal(rows, x[(mask + unused).bool()]) and cu_seqlens.tolist() == [0, 4, 9, 13] and
            (longest, lengths.tolist()) == (5, [3, 5, 4]))
    held = torch.tensor([[2, 3, 0, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]], device=device)
    rows, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, held)
    assert (torch.equal(rows, torch.cat((x[0, :5], x[1], x[2, :3]))) and
            cu_seqlens.tolist() == [0, 2, 5, 12, 13, 14, 15] and longest == 7)


def test_dropout():
    """About the right share is dropped, expectation is kept, torch's seed repeats it, gradients match the mask that was
    drawn."""
    q, k = torch.zeros(1, 64, 2, 16), torch.zeros(1, 500, 2, 16)
    # out shows the weights of 200 keys
    v = torch.eye(500)[None, :, None, :200].expand(1, 500, 2, 200).contiguous().requires_grad_()
    torch.manual_seed(1)
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.3)
    dropped = float((out == 0).float().mean())
    assert abs(dropped - 0.3) < 0.02 and abs(float(out.detach().mean()) * 500 - 1) < 0.03
    torch.manual_seed(1)
    assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, dropout_p=0.3))
    assert not torch.equal(out, flash_attn.flash_attn_func(q, k, v, dropout_p=0.3))
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(dv[0, :200, 0, 0], out[0, :, 0].sum(0).detach())


def test_combine():
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, 3, 16, generator=g) for n in (5, 40, 40))
    parts = [flash_attn_interface.flash_attn_func(q, k[:, i:i + 10], v[:, i:i + 10], return_attn_probs=True)
             for i in range(0, 40, 10)]
    out, lse = flash_attn_interface.flash_attn_combine(torch.stack([p[0] for p in parts]),
                                                       torch.stack([p[1].transpose(1, 2) for p in parts]))
    whole, whole_lse = flash_attn_interface.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse.transpose(1, 2))
    assert flash_attn_interface.get_scheduler_metadata(2, 5, 40, 3, 3, 16, None) is None


def test_packed_heads():
    qkv = torch.randn(2, 9, 8, 16)
    out = flash_attn_interface.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
    assert torch.equal(out, flash_attn_interface.flash_attn_func(*qkv.split((4, 2, 2), 2), causal=True))
    with pytest.raises(ValueError, match="num_heads_q is None"):
        flash_attn_interface.flash_attn_qkvpacked_func(qkv)


# ---- installation


def test_install():
    before = {name: module for name, module in sys.modules.items() if name.startswith("flash_attn")}
    with mg.install_as_flash_attn():
        import flash_attn as theirs
        from flash_attn import flash_attn_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import pad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        from flash_attn_interface import flash_attn_func as three

        assert (theirs.__version__ == "2.8.3" and importlib.util.find_spec("flash_attn") and
                importlib.util.find_spec("flash_attn_interface"))
        assert (flash_attn_func is flash_attn.flash_attn_func and
                flash_attn_with_kvcache is flash_attn.flash_attn_with_kvcache)
        assert (flash_attn_varlen_func is flash_attn.flash_attn_varlen_func and
                three is flash_attn_interface.flash_attn_func)
        assert pad_input is bert_padding.pad_input
    assert {name: module for name, module in sys.modules.items() if name.startswith("flash_attn")} == before
    switch = mg.install_as_flash_attn()
    switch.disable()
    switch.disable()
    assert {name: module for name, module in sys.modules.items() if name.startswith("flash_attn")} == before


def test_install_hides_what_was_imported(monkeypatch):
    import types

    other, part = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.ops")
    monkeypatch.setitem(sys.modules, "flash_attn", other)
    monkeypatch.setitem(sys.modules, "flash_attn.ops", part)
    with mg.install_as_flash_attn():
        assert sys.modules["flash_attn"] is not other and "flash_attn.ops" not in sys.modules
    assert sys.modules["flash_attn"] is other and sys.modules["flash_attn.ops"] is part


# ---- refusals and fallbacks


@pytest.mark.parametrize("argument", ("q_descale", "k_descale", "v_descale"))
def test_refuses(argument):
    q, cu = torch.randn(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
    message = f"{argument} is given with float32, expected None"
    with pytest.raises(NotImplementedError, match=f"flash_attn_varlen_func: {message}"):
        flash_attn_interface.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5, **{argument: torch.ones(1, 2)})
    with pytest.raises(NotImplementedError, match=f"flash_attn_func: {message}"):
        flash_attn_interface.flash_attn_func(q[None], q[None], q[None], **{argument: torch.ones(1, 2)})
    with pytest.raises(NotImplementedError, match=f"flash_attn_with_kvcache: {message}"):
        flash_attn_interface.flash_attn_with_kvcache(q[None], q[None], q[None],
                                                     q[None], q[None], cache_seqlens=0, **{argument: torch.ones(1, 2)})


def test_refuses_other_arguments():
    q, cu = torch.randn(5, 2, 16), torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"flash_attn_func: q has shape \[5, 2, 16\], expected 4 dimensions \[batch, "
                       r"rows, heads, head dim\]"):
        flash_attn.flash_attn_func(q, q, q)
    with pytest.raises(TypeError, match="flash_attn_func: k is list, expected torch.Tensor"):
        flash_attn.flash_attn_func(q[None], [q], q)
    with pytest.raises(ValueError, match=r"flash_attn_varlen_func: v has shape \[1, 5, 2, 16\], expected 3 dimensions"):
        flash_attn.flash_attn_varlen_func(q, q, q[None], cu, cu, 5, 5)
    with pytest.raises(TypeError,
                       match="flash_attn_varlen_func: cu_seqlens_k is torch.int64, expected an int32 tensor"):
        flash_attn.flash_attn_varlen_func(q, q, q, cu, cu.long(), 5, 5)
    used, varlen = torch.ones(1, dtype=torch.int32), flash_attn_interface.flash_attn_varlen_func
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(TypeError, match=rf"flash_attn_varlen_func: {name} is \[1\] torch.int64, expected an int32 "
                           rf"tensor \[1\]"):
            varlen(q, q, q, cu, cu, 5, 5, **{name: used.long()})
        with pytest.raises(ValueError, match=rf"flash_attn_varlen_func: cu_seqlens_{name[-1]} has shape \[1, 2\], "
                           rf"expected 1 dimension"):
            varlen(q, q, q, cu[None], cu[None], 5, 5, **{name: used})
        for starts, message in (((1, 5), r"\[0\] is 1, expected 0"), ((0, 6), r"\[1\] is 6, expected 0 .* to 5"),
                                ((0, 4, 3), r"\[2\] is 3, expected 4")):
            wrong = torch.tensor(starts, dtype=torch.int32)
            with pytest.raises(ValueError, match=f"cu_seqlens_{name[-1]}{message}"):
                varlen(q, q, q, wrong, wrong, 5, 5, **{name: used.repeat(len(starts) - 1)})
    with pytest.raises(ValueError, match=r"flash_attn_varlen_func: v has 4 rows, expected 5 \(same as k\)"):
        varlen(q, q, q[:4], cu, cu, 5, 5, seqused_k=used)
    with pytest.raises(ValueError, match="expected a divisor of the 2 heads of q"):
        flash_attn.flash_attn_func(q[None], torch.randn(1, 5, 3, 16), torch.randn(1, 5, 3, 16))


REFUSED = {       # arguments of flash_attn_with_kvcache, q [2, 1, 4, 16] and a cache of 2 times 8 rows with 2 heads,
                  # and what the error says
    "heads": (dict(q=torch.randn(2, 1, 3, 16)), "q has 3 heads and k_cache has 2"),
    "head dim": (dict(q=torch.randn(2, 1, 4, 24)), r"q has shape \[2, 1, 4, 24\], expected \[any, any, any, 16\]"),
    "dtype": (dict(q=torch.randn(2, 1, 4, 16).bfloat16()), "k_cache has dtype float32, expected bfloat16"),
    "batch":
    (dict(q=torch.randn(3, 1, 4, 16)),
     r"(k has shape \[2, 1, 2, 16\], expected \[3, any, 2, 16\]|page_table has shape \[2, 1\], expected \[3, any\])"),
    "k": (dict(k=torch.randn(2, 1, 2, 24)), r"k has shape \[2, 1, 2, 24\], expected \[2, any, 2, 16\]"),
    "v rows": (dict(v=torch.randn(2, 2, 2, 16)), r"v has shape \[2, 2, 2, 16\], expected \[2, 1, 2, 16\]"),
    "v dtype": (dict(v=torch.randn(2, 1, 2, 16).half()), "v has dtype float16, expected float32"),
    "v dims": (dict(v=torch.randn(2, 2, 16)), r"v has shape \[2, 2, 16\], expected 4 dimensions"),
    "v list": (dict(v=[1.0]), "v is list, expected torch.Tensor"),
    "table list": (dict(block_table=[[0], [1]]), "page_table is list, expected a tensor of dtype int32"),
    "lengths dims": (dict(cache_seqlens=torch.tensor(3, dtype=torch.int32)),
                     r"cache_seqlens has shape \[\], expected \[2\]"),
    "lengths float": (dict(cache_seqlens=3.0), "cache_seqlens is float, expected an int or an int32 tensor"),
    "v missing": (dict(v=None), "v is None"),
    "k missing": (dict(k=None), "k is None"),
    "no lengths": (dict(cache_seqlens=None), "cache_seqlens is None"),
    "full": (dict(cache_seqlens=8), "cache_seqlens is 8, expected 0 to 7 .what the cache holds, less the 1 rows of k"),
    "negative": (dict(cache_seqlens=-1), "cache_seqlens is -1, expected 0 to 7"),
    "lengths dtype": (dict(cache_seqlens=torch.zeros(2, dtype=torch.int64)),
                      "cache_seqlens is a tensor of dtype int64, expected a tensor of dtype int32"),
    "lengths": (dict(cache_seqlens=torch.zeros(3, dtype=torch.int32)),
                r"cache_seqlens has shape \[3\], expected \[2\]"),
    "index": (dict(cache_batch_idx=torch.zeros(3, dtype=torch.int32)),
              r"cache_batch_idx has shape \[3\], expected \[2\]"),
    "leftpad": (dict(cache_leftpad=torch.zeros(3, dtype=torch.int32)),
                r"cache_leftpad has shape \[3\], expected \[2\]"),
    "leftpad dtype": (dict(cache_leftpad=torch.zeros(2)), "cache_leftpad is a tensor of dtype float32"),
    "table": (dict(block_table=torch.zeros(3, 1, dtype=torch.int32)),
              r"page_table has shape \[3, 1\], expected \[2, any\]"),
    "table dtype": (dict(block_table=torch.zeros(2, 1)), "page_table is a tensor of dtype float32"),
    "scale": (dict(softmax_scale=torch.inf), "softmax_scale is inf"),
    "scale type": (dict(softmax_scale="x"), "scale is .x., expected a number"),
    "softcap": (dict(softcap=-1.0), "softcap is -1.0, expected 0 or a positive finite number"),
    "window": (dict(window_size=3), "window is 3, expected a pair of integers"),
    "splits": (dict(num_splits=129), "num_splits is 129, expected 0"),
    "splits type": (dict(num_splits=1.5), "num_splits is 1.5, expected an integer"),
    "alibi": (dict(alibi_slopes=torch.zeros(3)), r"alibi_slopes has shape \[3\], expected \[4\]"),
    "rotary": (dict(rotary_cos=torch.zeros(9, 9), rotary_sin=torch.zeros(9, 9)),
               r"rotary_cos has shape \[9, 9\], expected \[rows, at most 8\]"),
    "rotary shapes": (dict(rotary_cos=torch.zeros(9, 4), rotary_sin=torch.zeros(9, 5)),
                      r"rotary_sin has shape \[9, 5\]"),
    "rotary half": (dict(rotary_cos=torch.zeros(9, 4)), "rotary_sin is None"),
    "gradient": (dict(q=torch.randn(2, 1, 4, 16, requires_grad=True)), "q requires a gradient"),
    "values": (dict(v=torch.randn(2, 1, 2, 24)), r"v has shape \[2, 1, 2, 24\], expected \[2, 1, 2, 16\]"),
    "device": (dict(q=torch.randn(2, 1, 4, 16, device="meta")), "k_cache is on cpu, expected meta"),
    "3 packed": (dict(cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32), q=torch.randn(2, 4, 16)),
                 "max_seqlen_q is None"),
    "3 packed dims": (dict(cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32), max_seqlen_q=1),
                      r"q has shape \[2, 1, 4, 16\], expected 3 dimensions"),
    "3 packed starts": (dict(cu_seqlens_q=torch.tensor([0, 1, 2]), q=torch.randn(2, 4, 16), max_seqlen_q=1),
                        "cu_seqlens_q is a tensor of dtype int64"),
    "3 packed new": (dict(cu_seqlens_k_new=torch.tensor([0, 1], dtype=torch.int32),
                          k=torch.randn(2, 2, 16), v=torch.randn(2, 2, 16)),
                     r"cu_seqlens_k_new has shape \[2\], expected \[3\]"),
    "3 chunk": (dict(attention_chunk=-1), "attention_chunk is -1, expected 0"),
    "3 qv": (dict(qv=torch.randn(2, 1, 4, 17)), r"qv has shape \[2, 1, 4, 17\], expected \[2, 1, 4, 16\]"),
    "3 descale": (dict(k_descale=torch.ones(2, 2)), "k_descale is given with float32"),
}


@pytest.mark.parametrize("paged", (False, True))
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_leaves_the_cache(name, paged):
    with torch.set_grad_enabled(paged or name == "gradient"):
        _check_refused(name, paged)


def _check_refused(name, paged):
    change, message = REFUSED[name]
    module = flash_attn_interface if name.startswith("3") else flash_attn
    caches = [torch.randn(2, 8, 2, 16) for _ in range(2)]
    before = [t.clone() for t in caches]
    new = [torch.randn(2, 1, 2, 16) for _ in range(2)]
    call = dict(q=torch.randn(2, 1, 4, 16), k_cache=caches[0], v_cache=caches[1],
                k=new[0], v=new[1], cache_seqlens=torch.tensor([3, 4], dtype=torch.int32)) | change
    if paged and "block_table" not in change:
        call["page_table" if name.startswith("3") else "block_table"] = torch.tensor([[1], [0]], dtype=torch.int32)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=f"flash_attn_with_kvcache: {message}"):
        module.flash_attn_with_kvcache(**call)
    assert all(torch.equal(a, b) for a, b in zip(before, caches))


def test_cache_refuses():
    q = torch.randn(1, 1, 2, 16)
    cache = torch.randn(1, 8, 2, 16)
    for message, arguments in (("v is None", dict(k=q)), ("cache_seqlens is None", dict(k=q, v=q)),
                               ("k is None", dict(rotary_cos=q, rotary_sin=q)),
                               ("rotary_sin is None", dict(k=q, v=q, cache_seqlens=3, rotary_cos=q))):
        with pytest.raises(ValueError, match=f"flash_attn_with_kvcache: {message}"):
            flash_attn.flash_attn_with_kvcache(q, cache, cache, **arguments)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: q has dtype float8_e4m3fn"):
        flash_attn.flash_attn_with_kvcache(*(t.to(torch.float8_e4m3fn) for t in (q, cache, cache)))


@pytest.mark.parametrize("reason, shape, dtype, options", [
    ("dtype float64 on cpu", (1, 7, 2, 16), torch.float64, {}),
    ("a head dim over 256", (1, 7, 2, 264), torch.float32, dict(causal=True)),
    ("a scale that is not positive", (1, 7, 2, 16), torch.float32, dict(softmax_scale=-0.5)),
    ("a scale that float32 cannot hold", (1, 7, 2, 16), torch.float32, dict(softmax_scale=1e39)),
    ("a dropout probability of 1", (1, 7, 2, 16), torch.float32, dict(dropout_p=1.0)),
    ("a dropout probability of 1", (1, 7, 2, 16), torch.float32, dict(dropout_p=1 - 1e-8))])
def test_falls_back_with_one_warning(reason, shape, dtype, options, monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
    with pytest.warns(mg.FallbackWarning, match=f"flash_attn_func: {reason}; computed by PyTorch") as caught:
        out = flash_attn.flash_attn_func(q, k, v, **options)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flash_attn.flash_attn_func(q, k, v, **options)
    if options.get("dropout_p"):
        assert (out == 0).all()
        return
    if options.get("softmax_scale", 0) > 1:                   # every score is infinite or NaN
        assert out.isnan().all()
        return
    exact, _ = reference.rows_first(*(t.double() for t in (q, k, v)), scale=options.get("softmax_scale"),
                                    causal=options.get("causal", False))
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("module", (flash_attn, flash_attn_interface))
def test_last_dimension_is_not_contiguous(module, device):
    """A copy is computed on; only a cache that is written has to be contiguous."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(2, 40, heads, 16, generator=torch.Generator().manual_seed(heads)).to(device, dtype)
               for heads in (4, 2, 2))
    spread = lambda t: t.mT.contiguous().mT
    starts = torch.tensor([0, 40, 80], dtype=torch.int32, device=device)
    for which in range(3):
        given = [spread(t) if i == which else t for i, t in enumerate((q, k, v))]
        assert torch.equal(module.flash_attn_func(*given, causal=True), module.flash_attn_func(q, k, v, causal=True))
        packed, rows = ([t.flatten(0, 1) for t in (q, k, v)] for _ in range(2))
        packed[which] = spread(packed[which])
        assert torch.equal(module.flash_attn_varlen_func(*packed, starts, starts, 40, 40),
                           module.flash_attn_varlen_func(*rows, starts, starts, 40, 40))
        assert torch.equal(module.flash_attn_with_kvcache(*given, cache_seqlens=33),
                           module.flash_attn_with_kvcache(q, k, v, cache_seqlens=33))
        new = [spread(t[:, :1].contiguous()) if i == which else t[:, :1].contiguous() for i, t in enumerate((k, k, v))]
        outs = [module.flash_attn_with_kvcache(q, k.clone(), v.clone(), k=a, v=b, cache_seqlens=33)
                for a, b in (new[1:], (k[:, :1], v[:, :1]))]
        assert torch.equal(*outs)
    out = module.flash_attn_qkvpacked_func(spread(torch.stack((k, k, v), 2)), causal=True)
    assert torch.equal(out, module.flash_attn_func(k, k, v, causal=True))
    before = k.clone()
    with pytest.raises(ValueError, match="append_kv: v_cache has shape .* expected a contiguous last dimension"):
        module.flash_attn_with_kvcache(q, before, spread(v), k=k[:, :1], v=v[:, :1], cache_seqlens=33)
    assert torch.equal(before, k)


@pytest.mark.parametrize("reason, size, dim_v", [("a cache whose keys and values differ in head dim", 6, 24),
                                                 ("a cache whose keys and values differ in head dim", 16, 24)])
def test_cache_falls_back(reason, size, dim_v, monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, dim_v)
    pages_k, pages_v, table = (torch.randn(4, size, 2, 16), torch.randn(4, size, 2, dim_v),
                               torch.tensor([[3, 1], [0, 2]], dtype=torch.int32))
    with pytest.warns(mg.FallbackWarning, match=f"flash_attn_with_kvcache: {reason}") as caught:
        out = flash_attn_interface.flash_attn_with_kvcache(q, pages_k, pages_v,
                                                           k, v, cache_seqlens=torch.tensor([5, 7], dtype=torch.int32),
                                                           page_table=table)
    assert len(caught) == 1
    for i, n in enumerate((6, 8)):
        keys, values = (pages[table[i].long()].flatten(0, 1)[None, :n] for pages in (pages_k, pages_v))
        assert torch.equal(keys[0, -1], k[i, 0]) and torch.equal(values[0, -1], v[i, 0])
        torch.testing.assert_close(out[i], reference.rows_first(q[i:i + 1], keys, values)[0][0])


# ---- S_dmask: with dropout, return_attn_probs gives the probabilities, negative where they were dropped


def from_probabilities(signed, v, p):
    """out = dropped softmax times v, from S_dmask; heads first."""
    signed = signed.double()
    return (signed.abs() * (signed >= 0) / (1 - p)) @ v.double().repeat_interleave(signed.shape[1] // v.shape[1], 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ("plain", "causal", "window", "softcap", "alibi",
                                  "batch alibi", "everything", "fallback", "half"))
def test_dropped_probabilities(device, kind, seed):
    r = random.Random(seed)
    dtype = torch.float16 if kind == "half" else torch.bfloat16
    theirs, ours = options_of(kind, r, 4, 2, device)
    dim = 260 if kind == "fallback" else 40
    q, k, v = (t.detach() for t in tensors(r, device, dtype, (2, 70, 4, dim), (2, 90, 2, dim), (2, 90, 2, dim)))
    if kind == "half":
        q *= 30                                    # probabilities below the smallest of float16
    p = 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mg.FallbackWarning)
        torch.manual_seed(seed)
        out, lse, signed = flash_attn.flash_attn_func(q, k, v, p, return_attn_probs=True, **theirs)
        torch.manual_seed(seed)
        if kind != "fallback":                     # the same draw as without them
            assert torch.equal(out, flash_attn.flash_attn_func(q, k, v, p, **theirs))
        undropped = flash_attn.flash_attn_func(q, k, v, 0.0, return_attn_probs=True, **theirs)
    assert (undropped[2] is None and signed.shape == (2, 4, 70, 90) and signed.dtype == dtype and
            not signed.requires_grad)
    assert 0.2 < (signed < 0).float().mean() < 0.4
    sums = signed.abs().double().sum(3)
    empty = undropped[1] == -torch.inf
    assert (sums[~empty] - 1).abs().max() < 2**-6 and (sums[empty] < 2**-16).all()
    error = (from_probabilities(signed, v.transpose(1, 2), p) - out.transpose(1, 2).double()).abs().max()
    assert error < 2**-6 * v.abs().max(), error
    if kind == "half":
        torch.manual_seed(seed)
        drawn = int(torch.randint(-2**63, 2**63 - 1, (1,)))
        assert torch.equal(signed >= 0, mg.dropout_mask(p, drawn, 2, 4, 70, 90).to(device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ("plain", "causal", "batch alibi", "everything", "fallback"))
def test_dropped_probabilities_varlen(device, kind, seed):
    r = random.Random(seed)
    theirs, _ = options_of(kind, r, 4, 3, device)
    dim, p, lengths_q, lengths_k = 260 if kind == "fallback" else 40, 0.3, (33, 0, 70), (64, 5, 90)
    q, k, v = (t.detach() for t in tensors(r, device, torch.bfloat16, (103, 4, dim), (159, 2, dim), (159, 2, dim)))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).to(device, torch.int32) for n in (lengths_q, lengths_k))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mg.FallbackWarning)
        out, lse, signed = flash_attn.flash_attn_varlen_func(q, k, v, cu_q,
                                                             cu_k, 70, 90, p, return_attn_probs=True, **theirs)
    assert signed.shape == (3, 4, 70, 90) and signed.dtype == torch.bfloat16
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k)):
        assert (signed[b, :, n:] == 0).all() and (signed[b, :, :, m:] == 0).all()
        if n:
            rows, keys = slice(cu_q[b], cu_q[b] + n), slice(cu_k[b], cu_k[b] + m)
            expected = from_probabilities(signed[b:b + 1, :, :n, :m], v[keys].transpose(0, 1)[None],
                                          p)[0].transpose(0, 1)
            assert 0.2 < (signed[b, :, :n, :m] < 0).float().mean() < 0.4
            assert (expected - out[rows].double()).abs().max() < 2**-6 * v.abs().max()
