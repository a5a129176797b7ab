"""Hugging Face transformers: attn_implementation="margay".

A model asks a mask function once per forward pass, and gives the result to the attention function of every layer. The
mask is one of

    None                    every query sees every key, or the causal part (module.is_causal)
    bool [B, L]             True where a key is no padding; only the first L keys count
    bool [B, w, L]          the same, with a window; L = 0: there is no padding
    int32 [B, w, 1, 1]      the number of keys that count, of a cache that is longer
    int32 [1, w, 1, S + 1]  cu_seqlens of sequences that are packed behind one another
    bool, float, 4 dims     any other mask, which PyTorch computes

w > 1 is a window, which has to be known on the host: 2 n + 1 if n keys to either side are seen, 2 n + 2 if n before the
diagonal. These n are what the mask's function says. Layers name their windows differently, or not at all, so theirs
(sliding_window, as in transformers' own flash attention) counts only where the mask says nothing.

Models hand masks of 4 dimensions on as they are; others they may convert and give to the mask function again, which
leaves those above as they are. What a model asks is told from the function that it gives: that is evaluated at the
edges of the windows it may mean, once for each code and numbers of such functions. Whatever else it is, PyTorch
computes.

A padding mask carries, as attributes, what is known of it on the host and the plans that its layers share
(`margay.drop_ins.padding`). A copy has lost them, and is still right.
"""

import functools
import inspect
import re
import sys

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from margay.drop_ins import kernel_or_torch, padding, torch_attention
from margay.drop_ins.fallback import fall_back
from margay.drop_ins.switch import Switch

_OP = "attn_implementation='margay'"


def register(name="margay"):
    """Make attn_implementation=name known to transformers, until `.disable()` or the end of a `with` block.

    A model whose attention is its own code, which asks for no implementation, takes the name without effect: a
    FallbackWarning says so.
    """
    interfaces = (AttentionInterface, attention), (AttentionMaskInterface, attention_mask)
    if name not in _watched:
        _before[name] = [interface._global_mapping.get(name) for interface, _ in interfaces]
    for interface, function in interfaces:
        interface.register(name, function)
    _watch(name)

    def undo():
        _unwatch(name)
        if name in _watched:                     # another register() is in effect
            return
        for (interface, _), function in zip(interfaces, _before.pop(name)):
            if function is None:
                interface._global_mapping.pop(name, None)
            else:
                interface.register(name, function)

    return Switch(undo)


# ---- models that take the name and never ask for the implementation

_watched: list = []          # names, one for each register() in effect
_before: dict = {}           # what names meant before the first of them
_unwatched: dict = {}        # methods of PreTrainedModel, as they were


def _watch(name):
    _watched.append(name)
    for method, watched in ("_check_and_adjust_attn_implementation", _checks), ("set_attn_implementation", _sets):
        if method not in _unwatched and hasattr(PreTrainedModel, method):
            _unwatched[method] = getattr(PreTrainedModel, method)
            setattr(PreTrainedModel, method, functools.wraps(_unwatched[method])(watched))


def _unwatch(name):
    _watched.remove(name)
    while _unwatched and not _watched:
        setattr(PreTrainedModel, *_unwatched.popitem())


def _checks(model, attn_implementation, *arguments, **options):
    if attn_implementation in _watched and _has_own_attention(model):
        attn_implementation = None               # then it gets what it gets where nothing is named
    return _unwatched["_check_and_adjust_attn_implementation"](model, attn_implementation, *arguments, **options)


def _sets(model, attn_implementation, *arguments, **options):
    result = _unwatched["set_attn_implementation"](model, attn_implementation, *arguments, **options)
    if isinstance(attn_implementation, dict):    # by the names of parts of the configuration, "" for the whole
        asked = [model.config if not part else getattr(model.config, part, None)
                 for part, name in attn_implementation.items()
                 if isinstance(name, str) and name in _watched]
    else:
        asked = ([m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
                 if attn_implementation in _watched else [])
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(module.config is config for config in asked):
            _has_own_attention(module)
    return result


def own_attention(model):
    """The file of attention that is written in the model's modules, where no implementation is asked for, or None."""
    modules = [c.__module__ for c in type(model).__mro__ if issubclass(c, PreTrainedModel) and c is not PreTrainedModel]
    own = [m for m in modules if _ATTENTION_CLASS.search(_source(m))]
    if own and not any("ALL_ATTENTION_FUNCTIONS" in _source(m) or "AttentionInterface" in _source(m) for m in modules):
        return own[0]
    return None


def _has_own_attention(model):
    """Warns once of those that have; notes others that need eager's masks."""
    own = own_attention(model)
    if own:
        if model.config.get_text_config() is not model.config:   # a frame around models that are asked themselves
            return False
        fall_back(_OP, f"{type(model).__name__} never asks for an attention implementation",
                  "the model's own code", own)
        return True
    if not any(getattr(model, flag, True) for flag in ("_supports_sdpa", "_supports_flash_attn")):
        _reads_its_mask.add(model.config.model_type)
    return False


_ATTENTION_CLASS = re.compile(r"^class \w*Att(ention|n)\w*\((nn\.|torch\.nn\.)?Module\):", re.MULTILINE)


@functools.cache
def _source(module):
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


# ---- the two functions


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None,
              is_causal=None, sliding_window=None, softcap=None, s_aux=None,
              position_bias=None, indices=None, sinks=None, block_indices=None,
              cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None, max_length_k=None,
              cache=None, **kwargs):
    """query [B, Hq, Nq, D], key [B, Hk, Nk, D], value [B, Hk, Nk, Dv] to [B, Nq, Hq, Dv] and None, for the attention
    weights are never stored.

    position_bias [.., Hq, Nq, Nk] is added to the scores; indices [B, Nq, n] are the only keys that a query sees; sinks
    [B, Hq, Nq, 1] are logits without a value. s_aux [Hq] are such logits of heads.
    """
    if cache is not None:
        raise NotImplementedError(f"{_OP}: cache is given (continuous batching), which is not implemented")
    if block_indices is not None:
        raise NotImplementedError(f"{_OP}: block_indices is given (blocks of keys that an indexer chose), which is not "
                                  "implemented; expected None")
    if not query.dtype == key.dtype == value.dtype:
        query, key = query.to(value.dtype), key.to(value.dtype)
    options = dict(scale=scaling, softcap=softcap or 0.0, sink=None if s_aux is None else s_aux.float(),
                   dropout_p=dropout)
    causal = _is_causal(module, is_causal)
    window = -1, -1
    if sliding_window is not None:
        window = sliding_window - 1, 0 if causal else sliding_window - 1
    if attention_mask is not None and (attention_mask.dim() == 3 or attention_mask.dtype == torch.int32):
        causal, window = _said_window(attention_mask.shape[1], causal, window)
        attention_mask = (attention_mask[:, :1] if attention_mask.dim() == 4
                          else attention_mask if attention_mask.shape[2] else None)
    whole = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.dtype != torch.int32
    if whole or position_bias is not None or indices is not None or sinks is not None:
        fall_back(_OP, "a mask that is not made of causal, window, padding and packed sequences" if whole else
                       "position_bias" if position_bias is not None else "sinks of queries"
                       if sinks is not None else "indices of keys")
        mask = _whole_mask(query, key, attention_mask, causal, window, position_bias, indices)
        if sinks is not None:                    # the logits of a key more, whose value is 0
            mask = mask.expand(*query.shape[:3], -1)
            mask = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
            mask = torch.cat((mask, sinks.to(mask.dtype).expand(*mask.shape[:3], 1)), 3)
            key, value = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (key, value))
        return _rows_first(torch_attention.attention(query, key, value, mask=mask, **options)), None

    options["causal"] = causal
    if window[0] >= 0:
        options["window"] = window
    if _is_cu_seqlens(attention_mask):
        cu_seqlens = attention_mask.flatten()
        out = _packed(query, key, value, cu_seqlens, cu_seqlens, query.shape[2], query.shape[2], options)
    elif attention_mask is not None and attention_mask.dim() == 4:
        out = _partly_filled(query, key, value, attention_mask.flatten(), options)
    elif attention_mask is not None:
        return _padded(query, key, value, attention_mask, options), None
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        out = _packed(query, key, value, cu_seq_lens_q.to(torch.int32), cu_seq_lens_k.to(torch.int32),
                      max_length_q, max_length_k, options)
    else:
        out = kernel_or_torch.attention(_OP, query, key, value, **options)
    return _rows_first(out), None


def attention_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0,
                   mask_function=causal_mask_function, attention_mask=None,
                   allow_is_causal_skip=True, local_size=None, use_vmap=False, config=None, device="cpu", **kwargs):
    """The mask as the module's docstring says. attention_mask: bool [B, rows] of what is no padding."""
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.dtype != torch.bool):
        return attention_mask                                                   # made before
    every = dict(batch_size=batch_size, q_length=q_length, kv_length=kv_length,
                 q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
                 attention_mask=attention_mask, allow_is_causal_skip=False, use_vmap=use_vmap, device=device)
    if getattr(config, "model_type", None) in _reads_its_mask:
        return masking_utils.eager_mask(**every, **kwargs)
    meaning = None if use_vmap else _meaning(mask_function, local_size, allow_is_causal_skip, config, kwargs)
    if meaning is None:
        return sdpa_mask(**every)
    packed, left, right = meaning
    w = 1 if left < 0 else 2 * left + (1 if right else 2)
    if right:
        if (not kwargs.get("allow_is_bidirectional_skip", True) or
            right > 0 and not _is_aligned(q_length, kv_length, q_offset, kv_offset)):
            return sdpa_mask(**every)
        mask = _padding_mask(attention_mask, kv_offset, kv_length, w)
        return _nothing_but_window(w, device) if mask is None else mask
    if packed:
        return _cu_seqlens(mask_function, batch_size, q_length, device).expand(-1, w, -1, -1)
    decodes_static = q_length == 1 and (local_size is not None or isinstance(q_offset, torch.Tensor))
    if not allow_is_causal_skip and not decodes_static:                         # of which transformers says the same
        return sdpa_mask(**every)                                               # which the model wants to change
    if isinstance(q_offset, torch.Tensor) and q_length > 1 and not _compiling_or_capturing():
        q_offset = int(q_offset)
    # Of a static cache, whose fill is not known on the host
    if isinstance(q_offset, torch.Tensor):
        filled = (q_offset + (q_length - kv_offset)).to(torch.int32).clamp(max=kv_length)
        if attention_mask is None:
            return filled.expand(batch_size)[:, None, None, None].expand(-1, w, -1, -1)
        if q_length > 1:
            return sdpa_mask(**every)
        return _with_window(_columns(attention_mask, kv_offset, kv_length) &
                            (torch.arange(kv_length, device=device) < filled), w)
    filled = min(q_offset + q_length - kv_offset, kv_length)
    mask = _padding_mask(attention_mask, kv_offset, filled, w)
    if mask is None and filled < kv_length:
        return torch.full((batch_size, 1, 1, 1), filled, dtype=torch.int32, device=device).expand(-1, w, -1, -1)
    return _nothing_but_window(w, device) if mask is None else mask


def _padding_mask(mask, first, count, w):
    """Columns of a mask, with their plan where values can be read; None if there is no padding."""
    if mask is None:
        return None
    if _compiling_or_capturing():
        return _with_window(_columns(mask, first, count), w)
    runs = padding.runs(_columns(mask.cpu(), first, count))     # the one thing that is waited for
    if runs is not None and not runs[0].any() and (runs[1] == count).all():
        return None
    mask = _with_window(_columns(mask, first, count), w)
    mask.margay_runs, mask.margay_plans = runs, {}
    mask.margay_short = count <= _SHORT and runs is not None and bool((runs[0] < runs[1]).all())
    return mask


def _with_window(mask, w):
    return mask[:, None].expand(-1, w, -1) if w > 1 else mask.view_as(mask)


def _nothing_but_window(w, device):
    return torch.empty((1, w, 0), dtype=torch.bool, device=device) if w > 1 else None


def _said_window(w, causal, window):
    """What a mask of size w in its second dimension says, or what the layer does."""
    if w == 1:
        return causal, window
    n, causal = (w - 1) // 2, w % 2 == 0
    return causal, (n, 0 if causal else n)


def _is_causal(module, is_causal):
    """The call's word, the module's, and the configuration's that makes a decoder bidirectional."""
    if is_causal is None:
        is_causal = (getattr(module, "is_causal", True) and
                     getattr(getattr(module, "config", None), "is_causal", True) is not False)
    return bool(is_causal)


# Types of models that get the masks of eager attention: their layers add to them, or are causal by the mask alone. Most
# say so by supporting neither sdpa nor flash attention.
_reads_its_mask = {"doge", "pegasus_x"}


def _meaning(mask_function, local_size, skips, config, kwargs):
    """(packed, left, right): are there sequences, and which keys the function lets a query see, -1 without a bound.
    None: something else."""
    if torch.compiler.is_compiling():
        return _meaning_by_name(mask_function, local_size, skips, config, kwargs)
    inner = _inner_of_packed(mask_function)
    bounds = _bounds(inner or mask_function)
    if bounds is None:
        return None
    left, right = bounds
    return (inner is not None, left, right) if right in (0, left) else None


def _meaning_by_name(mask_function, local_size, skips, config, kwargs):
    """From what compiled code can see: identity, name, arguments."""
    if mask_function is causal_mask_function:
        return False, -1, 0
    if mask_function is bidirectional_mask_function:
        return False, -1, -1
    if local_size is not None and (local_size != getattr(config, "sliding_window", None) or
                                   getattr(config, "attention_chunk_size", None) is not None):
        return None
    if "allow_is_bidirectional_skip" in kwargs:
        return (None if local_size is None or local_size + _BEYOND < 1
                else (False, local_size + _BEYOND, local_size + _BEYOND))
    if local_size is not None and skips:
        return False, local_size - 1, 0
    if mask_function.__name__ != "and_mask":              # of and_masks(). torch 2.11 does not trace __qualname__
        return None
    return True, -1 if local_size is None else local_size - 1, 0


def _inner_of_packed(mask_function):
    """The function of one sequence, where transformers has joined it with the one that keeps packed sequences apart;
    else None.

    In newer releases it counts within its sequence, which for a band makes no difference.
    """
    parts = _cell(mask_function, "mask_functions", masking_utils.and_masks) or ()
    apart = [_is_made_by(part, getattr(masking_utils, "packed_sequence_mask_function", None)) for part in parts]
    if len(parts) != 2 or sum(apart) != 1:
        return None
    inner = parts[apart.index(False)]
    return _cell(inner, "mask_function", getattr(masking_utils, "remap_positions_for_packed_sequence", None)) or inner


def _is_made_by(function, maker):
    code = getattr(function, "__code__", None)
    return maker is not None and code is not None and code in maker.__code__.co_consts


def _cell(function, name, maker):
    if not _is_made_by(function, maker):
        return None
    return dict(zip(function.__code__.co_freevars, function.__closure__))[name].cell_contents


_known_bounds: dict = {}


def _bounds(mask_function):
    """(left, right) of a function of four indices that is a band along the diagonal, else None."""
    numbers: set = set()
    signature = _signature(mask_function, numbers)
    if signature is None or len(numbers) > 8:
        return None
    if signature not in _known_bounds:
        _known_bounds[signature] = _evaluated_bounds(mask_function, numbers)
    return _known_bounds[signature]


def _signature(x, numbers):
    """Equal for functions of the same code with the same numbers; collects these. None where there is more to them:
    then they may read a device."""
    if isinstance(x, int) and abs(x) < 1 << 40:
        numbers.add(int(x))
        return x
    if isinstance(x, (tuple, list)):
        parts = *x,
    elif getattr(x, "__code__", None) is not None:
        code = x.__code__
        numbers.update(c for c in code.co_consts if type(c) is int)
        of_module = (x.__globals__.get(name) for name in code.co_names)
        parts = (*(x.__defaults__ or ()), *(cell.cell_contents for cell in x.__closure__ or ()),
                 *(v for v in of_module if isinstance(v, int)))
    else:
        return None
    parts = tuple(_signature(part, numbers) for part in parts)
    return None if None in parts else (getattr(x, "__code__", None), *parts)


def _evaluated_bounds(mask_function, numbers):
    """The band that has the function's value where indices are small, and where they or their distance are near one of
    the numbers."""
    with torch.device("cpu"), torch.no_grad():
        near = torch.tensor([0, *numbers]).abs()[:, None] + torch.arange(-3, 4)
        near = torch.cat((near.flatten(), torch.arange(40), 3 * near.amax() + torch.arange(2))).clamp(min=0).unique()
        q = near[:, None, None]
        k = torch.cat(((q + near).expand(-1, 1, -1), (q - near).expand(-1, 1, -1), near.expand(len(near), 1, -1)),
                      2).clamp(min=0)
        index = torch.arange(2)
        try:
            seen = mask_function(index[:, None, None, None, None], index[:, None, None, None], q, k)
        except Exception:                        # what it needs is not here
            return None
        if seen.dtype != torch.bool:
            return None
        distance = k - q
        edges = sorted({abs(n) + i for n in numbers for i in (-1, 0, 1)} | {0})
        for right in (0, -1, *edges):
            for left in (-1, *edges):
                band = ((distance >= -left) | (left < 0)) & ((distance <= right) | (right < 0))
                if bool((seen == band).all()):
                    return left, right
    return None


def _beyond():
    """How much farther than its sliding_window a layer that looks to both sides sees."""
    make = getattr(masking_utils, "sliding_window_bidirectional_mask_function", None)
    left, right = (0, 0) if make is None else _bounds(make(5))
    return right - 5 if left == right else -1 << 40


_BEYOND = _beyond()


def _is_aligned(q_length, kv_length, q_offset, kv_offset):
    """Is the last query at the last key?"""
    return not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length


def _columns(mask, first, count):
    """Columns first .. first + count of a padding mask; False behind its end. A mask without the columns before `first`
    is taken as it is."""
    if mask.shape[1] != count:
        mask = mask[:, first:first + count]
    return mask if mask.shape[1] == count else torch.nn.functional.pad(mask, (0, count - mask.shape[1]))


def _cu_seqlens(mask_function, batch, rows, device):
    """Sequences begin where a row does not see the one before it."""
    index = torch.arange(rows, device=device)
    sees = mask_function(torch.arange(batch, device=device)[:, None], index[0], index[None, 1:], index[None, :-1])
    begins = torch.nn.functional.pad(~sees.expand(batch, -1), (1, 0), value=True).flatten()
    total = batch * rows
    if not _compiling_or_capturing():
        return torch.nn.functional.pad(begins.nonzero().flatten(), (0, 1),
                                       value=total).to(torch.int32)[None, None, None]
    # Of fixed size: the rest of the sequences is empty
    place = torch.where(begins, begins.cumsum(0) - 1, total + 1)
    ends = torch.full((total + 2,), total, device=device).scatter(0, place, torch.arange(total, device=device))
    return ends[:-1].to(torch.int32)[None, None, None]


def _compiling_or_capturing():
    return torch.compiler.is_compiling() or torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_cu_seqlens(mask):
    return mask is not None and mask.dtype == torch.int32 and mask.shape[3] > 1


def _rows_first(out):
    return out.transpose(1, 2).contiguous()


def _packed(query, key, value, cu_seqlens_q, cu_seqlens_k, max_length_q, max_length_k, options):
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    # a length on the device would have to be read: that of a row bounds it
    longest_q, longest_k = (n if isinstance(n, int) else t.shape[0] for n, t in ((max_length_q, q), (max_length_k, k)))
    out = kernel_or_torch.attention_varlen(_OP, q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _partly_filled(query, key, value, lengths, options):
    wants_gradient = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if wants_gradient or options["dropout_p"]:
        return padding.attention(_OP, query, key, value,
                                 torch.arange(key.shape[2], device=key.device) < lengths[:, None], **options)
    options = {name: value for name, value in options.items() if name != "dropout_p"}
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return kernel_or_torch.attention_decode(_OP, q, k, v, cache_seqlens=lengths, **options).transpose(1, 2)


def _padded(query, key, value, mask, options):
    rows, columns = query.shape[2], mask.shape[-1]
    if key.shape[2] != columns:
        key, value = key[:, :, :columns], value[:, :, :columns]
    # Then padding among the queries counts too
    ordered = (options["causal"] or "window" in options) and 1 < rows <= columns
    compiling = torch.compiler.is_compiling()
    runs, plans = (None, {}) if compiling else (getattr(mask, "margay_runs", None), getattr(mask, "margay_plans", {}))
    if (not compiling and not ordered and getattr(mask, "margay_short", False) and
        _is_faster_in_torch(query, key, value, options)):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask[:, None, None],
                                                               options["dropout_p"], scale=options["scale"])
        return _rows_first(out)
    plan = plans.get((rows, ordered))
    if plan is None and runs is not None and not _compiling_or_capturing():
        plan = plans[rows, ordered] = padding.plan_of_runs(*runs, rows, columns, ordered, query.device)
    if plan is None:
        mask = mask if mask.dim() == 2 else mask[:, 0]
        plan = plans[rows, ordered] = padding.plan(mask, mask[:, columns - rows:] if ordered else None, rows)
    return padding.planned_attention(_OP, query, key, value, plan, **options)


_SHORT = 128         # keys


def _is_faster_in_torch(q, k, v, options):
    """As measured: on the CPU, and on Hopper where there will be a backward pass. Short rows fill no block of the
    kernels."""
    wants_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return ((wants_gradient or q.is_cpu) and q.shape[1] == k.shape[1] and q.shape[3] <= 64 and
            not (options["causal"] or "window" in options or options["softcap"]) and options["sink"] is None and
            kernel_or_torch.unsupported(q, k, v, options["scale"]) is None)


def _whole_mask(query, key, mask, causal, window, bias, indices):
    """One mask of 4 dimensions, from any and a bias of the scores."""
    rows, columns = query.shape[2], key.shape[2]
    if _is_cu_seqlens(mask):
        raise NotImplementedError(f"{_OP}: position_bias is given for packed sequences, which is not implemented")
    if mask is not None and mask.dim() == 3:
        mask = mask[:, 0] if mask.shape[2] else None
    if mask is None or mask.dim() == 2 or mask.dtype == torch.int32:
        column = torch.arange(columns, device=query.device)
        filled = columns if mask is None else mask.shape[1] if mask.dim() == 2 else mask
        diagonal = torch.arange(rows, device=query.device)[:, None] + (filled - rows)
        seen = column <= (diagonal if causal else filled - 1)
        if window[0] >= 0:
            seen = seen & (column >= diagonal - window[0]) & (column <= diagonal + window[1])
        if mask is not None and mask.dim() == 2:
            seen = seen & _columns(mask, 0, columns)[:, None, None]
        mask = seen if seen.dim() == 4 else seen.expand(1, 1, rows, columns)
    mask = mask[..., :columns]
    if indices is not None:
        chosen = torch.zeros((*indices.shape[:2], columns), dtype=torch.bool,
                             device=query.device).scatter(2, indices.long(), True)[:, None]
        mask = mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -torch.inf)
    if bias is None:
        return mask
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
