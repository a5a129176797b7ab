"""flash-linear-attention: its functions of linear attention and of the delta rules on Margay's kernels.

FLA asks a registry of backends in some of its functions; there Margay is one more, with the highest priority. The other
functions are replaced by name in all modules of FLA that have them, as `fla.ops.retention` and `fla.layers.simple_gla`
do. Layers and models that are made of them run on Margay's kernels with no other change.

`fla.ops.utils` and functions of one step (`fused_recurrent_*`) but those of the delta rules stay FLA's.
"""

import functools
import importlib
import inspect
import os
import sys

import torch

import margay
from margay.drop_ins import delta_rules
from margay.drop_ins.fallback import Refused, fall_back
from margay.drop_ins.switch import Switch

MOST_K = 256
MOST_BASED_K, MOST_BASED_V = 32, 128


# ---- FLA's functions, with its arguments. Each looks at what it is given and returns a function that computes it, or
# ---- raises Refused.

def _check(q, k, v):
    delta_rules.check_tensors(q, k, v)
    if not q.ndim == k.ndim == v.ndim == 4 or q.shape != k.shape or q.shape[:3] != v.shape[:3]:
        raise Refused("q, k and v that differ in batch, steps or heads")


def _check_options(options, sizes=tuple(1 << i for i in range(31))):
    """Results do not depend on chunk_size, but FLA looks at it. sizes: those that it takes."""
    if options.keys() - {"chunk_size"}:
        raise Refused("other arguments")
    if options.get("chunk_size") not in (None, *sizes):
        raise Refused("a chunk_size that FLA does not take")


def _scan(q, k, v, g, scale, state, cu_seqlens, z=None, normalize=False):
    """A function for (out, state, z). g: tensor, None, or a function that makes it of q."""
    _check(q, k, v)
    delta_rules.check_scale(scale)
    heads, dim = q.shape[2:]
    sequences = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    if dim > MOST_K:
        raise Refused(f"a head dim of q and k over {MOST_K}")
    if isinstance(g, torch.Tensor) and tuple(g.shape) not in ((heads,), tuple(q.shape[:3])):
        raise Refused("decays that are neither of heads nor of steps of heads")
    if cu_seqlens is not None and len(q) != 1:
        raise Refused("packed sequences in a batch")
    for t, shape in ((state, (sequences, heads, dim, v.shape[3])), (z, (sequences, heads, dim))):
        if t is not None and tuple(t.shape) != shape:
            raise Refused("an initial state of another shape")
    return functools.partial(_compute, q, k, v, g, scale, state, cu_seqlens, z, normalize)


def _compute(q, k, v, g, scale, state, cu_seqlens, z, normalize):
    g = g(q) if callable(g) and not isinstance(g, torch.Tensor) else g
    if normalize and (state is not None or z is not None):
        like, float32 = (state if z is None else z), torch.float32
        sizes = len(like), *q.shape[2:]
        state = q.new_zeros(*sizes, v.shape[3], dtype=float32) if state is None else state
        z = q.new_zeros(*sizes, dtype=float32) if z is None else z
    out, after = margay.linear_attention(q, k, v, g, scale=scale, normalize=normalize,
                                         initial_state=(state, z) if normalize and state is not None else state,
                                         output_final_state=True, cu_seqlens=cu_seqlens)
    return out, *(after if normalize else (after, None))


def _simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, **options):
    _check_options(options)
    if g is not None and g_gamma is not None:
        raise Refused("decays of heads and of steps together")
    if g is None and g_gamma is not None:
        g = g_gamma.detach()                         # FLA has no gradient of it either
    turned = initial_state.transpose(-1, -2) if state_v_first and initial_state is not None else initial_state
    compute = _scan(q, k, v, g, scale, turned, cu_seqlens)

    def run():
        out, state, _ = compute()
        if not output_final_state:
            return out, None
        return out, state.transpose(-1, -2).contiguous() if state_v_first else state
    return run


def _fused_chunk_simple_gla(q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
                            cu_seqlens=None):
    return _simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens)


def _parallel_simple_gla(q, k, v, g=None, scale=None, output_attentions=False, cu_seqlens=None, cu_seqlens_cpu=None):
    if output_attentions:
        raise Refused("output_attentions")
    return _simple_gla(q, k, v, g, None, scale, cu_seqlens=cu_seqlens)


def _retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **options):
    def decays(q):
        return torch.log1p(-torch.exp2(-5.0 - torch.arange(q.shape[2], dtype=torch.float32, device=q.device)))

    _check_options(options)
    compute = _scan(q, k, v, decays, scale, initial_state, cu_seqlens)
    return lambda: _asked(compute(), output_final_state)


def _parallel_retention(q, k, v, scale=None, output_attentions=False, cu_seqlens=None):
    if output_attentions:
        raise Refused("output_attentions")
    return _retention(q, k, v, scale, cu_seqlens=cu_seqlens)


def _lightning(q, k, v, layer_idx, num_layers, scale=None, initial_state=None, output_final_state=False,
               cu_seqlens=None, **options):
    def decays(q):
        heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
        return -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * heads

    _check_options(options)
    compute = _scan(q, k, v, decays, scale, initial_state, cu_seqlens)
    return lambda: _asked(compute(), output_final_state)


def _linear(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None):
    """With normalize the state is a pair, and its z is there whether or not it is asked for."""
    pair = isinstance(initial_state, tuple)
    if pair and not normalize:
        raise Refused("a pair of states without normalize")
    state, z = initial_state if pair else (initial_state, None)
    z = z if z is None else z.squeeze(1)                                        # [sequences, 1, heads, K]
    compute = _scan(q, k, v, None, scale, state, cu_seqlens, z, normalize)

    def run():
        out, state = _asked((found := compute()), output_final_state)
        return out, (state, found[2].unsqueeze(1)) if normalize else state
    return run


def _asked(found, output_final_state):
    return found[0], found[1] if output_final_state else None


def _based(q, k, v, scale=None, use_norm=True):
    _check(q, k, v)
    delta_rules.check_scale(scale)
    if not (1 <= q.shape[3] <= MOST_BASED_K and 1 <= v.shape[3] <= MOST_BASED_V):
        raise Refused(f"a head dim of q and k over {MOST_BASED_K}, or one of v over {MOST_BASED_V}")
    return functools.partial(margay.based, q, k, v, scale=scale, normalize=use_norm)


def _chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                            use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                            state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
                            cp_context=None, use_gate_in_kernel=False, A_log=None, dt_bias=None, **options):
    _check_options(options, (16, 32, 64))
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                  use_gate_in_kernel, A_log, dt_bias, None, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                  state_v_first, cu_seqlens, cp_context)


def _recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
                                output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                                A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                                state_v_first=False, cu_seqlens=None):
    if gv is not None:
        raise Refused("decays of the values' columns")
    if gk is not None and (g is not None or use_gate_in_kernel):
        raise Refused("decays of heads and of channels together")
    return _delta(q, k, v, g if gk is None else gk, beta, scale, initial_state, output_final_state,
                  use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, None, use_beta_sigmoid_in_kernel,
                  allow_neg_eigval, state_v_first, cu_seqlens)


def _chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
               use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
               allow_neg_eigval=False, safe_gate=False, lower_bound=None, disable_recompute=False,
               return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
               cp_context=None, use_graph=False, max_num_seqs=None, A_log=None, dt_bias=None, **options):
    """safe_gate, disable_recompute, use_graph and max_num_seqs change how FLA computes, not what."""
    _check_options(options, (32, 64))
    if return_intermediate_states:
        raise Refused("return_intermediate_states")
    if safe_gate and use_gate_in_kernel and not (lower_bound is not None and -5 <= lower_bound < 0):
        raise Refused("a safe gate without a lower bound of -5 to 0")
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise Refused("an initial state that is not float32")
    if g.ndim != 4:
        raise Refused("decays of another shape")
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                  use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                  state_v_first, cu_seqlens, cp_context)


def _recurrent_kda(q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None,
                   output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                   use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, lower_bound=None, state_v_first=False,
                   cu_seqlens=None):
    if g.ndim != 4:
        raise Refused("decays of another shape")
    return _delta(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
                  use_gate_in_kernel, A_log, dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                  state_v_first, cu_seqlens)


def _delta(q, k, v, g, beta, scale, initial_state, output_final_state, qk_norm, gate, A_log, dt_bias, lower_bound,
           beta_sigmoid, allow_neg_eigval, state_v_first, cu_seqlens, cp_context=None):
    if cp_context is not None:
        raise Refused("sequences over several devices")
    if allow_neg_eigval and not beta_sigmoid:
        raise Refused("allow_neg_eigval without a sigmoid of beta")
    if not gate:
        A_log = dt_bias = lower_bound = None
    elif g is None or A_log is None and lower_bound is None:
        raise Refused("a gate without A_log")
    compute = delta_rules.plan(q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
                               A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, qk_norm=qk_norm,
                               beta_sigmoid=beta_sigmoid, allow_neg_eigval=allow_neg_eigval,
                               state_v_first=state_v_first)
    return lambda: _asked(compute(), output_final_state)


FUNCTIONS = {
    "fla.ops.simple_gla": {"chunk_simple_gla": _simple_gla, "fused_chunk_simple_gla": _fused_chunk_simple_gla,
                           "parallel_simple_gla": _parallel_simple_gla},
    "fla.ops.retention": {"chunk_retention": _retention, "fused_chunk_retention": _retention,
                          "parallel_retention": _parallel_retention},
    "fla.ops.lightning_attn": {"chunk_lightning_attn": _lightning},
    "fla.ops.linear_attn": {"chunk_linear_attn": _linear, "fused_chunk_linear_attn": _linear},
    "fla.ops.based": {"parallel_based": _based, "fused_chunk_based": _based},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": _chunk_gated_delta_rule,
                                 "fused_recurrent_gated_delta_rule": _recurrent_gated_delta_rule},
    "fla.ops.kda": {"chunk_kda": _chunk_kda, "fused_recurrent_kda": _recurrent_kda},
}


# ---- the switch

_replaced: list = []         # (FLA's function, its replacement)
_registered: set = set()     # FLA's functions that ask the registry, which keeps what it has got
_users: list = []            # one for each register() in effect


def register():
    """Let FLA's functions of linear attention and of the delta rules run on Margay's kernels, until `.disable()`, the
    end of a `with` block or `unregister()`.

    What no kernel computes, FLA does, with a FallbackWarning for each reason. Modules other than FLA's that have
    imported a function by name keep what they have, where FLA does not ask its registry.
    """
    if not _users:
        for module, functions in FUNCTIONS.items():
            package = _package(module)
            for name, plan in functions.items():
                original = getattr(package, name, None)
                if original is not None and not _in_registry(original, name, plan):
                    _replaced.append((original, _replacement(original, name, plan)))
        _put(_replaced)
    user = object()
    _users.append(user)
    return Switch(lambda: _leave(user))


def unregister():
    """Undo every `register()`."""
    for user in list(_users):
        _leave(user)


def _leave(user):
    if user in _users:
        _users.remove(user)
        if not _users:
            _put((ours, original) for original, ours in _replaced)
            _replaced.clear()


def _package(name):
    """None where this release of FLA does not have it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:                       # FLA itself is missing, or what it needs
            raise
        return None


def _put(pairs):
    """Put the second of each pair wherever a module of FLA has the first."""
    news = {id(old): new for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "fla" and module is not None:
            for attribute, value in list(vars(module).items()):
                if id(value) in news:
                    setattr(module, attribute, news[id(value)])


def _plan(name, plan, arguments, options):
    """The function that computes a call, or None after a warning; and the reason for that."""
    try:
        return plan(*arguments, **options), None
    except Refused as refused:
        reason = str(refused)
    fall_back(name, reason, by="FLA")
    return None, reason


def _binds(signature, arguments, options):
    try:
        signature.bind(*arguments, **options)
    except TypeError:                                # FLA says what is wrong with them, or takes more
        return False
    return True


def _replacement(original, name, plan):
    signature = inspect.signature(plan)

    @functools.wraps(original)
    def replaced(*arguments, **options):
        compute = _binds(signature, arguments, options) and _plan(name, plan, arguments, options)[0]
        return compute() if compute else original(*arguments, **options)
    return torch.compiler.disable(replaced)          # as FLA's own


def _in_registry(original, name, plan):
    """Does FLA ask its registry in this function? Then Margay is in it. A registry forgets nothing: what it has looks
    at the switch."""
    if original in _registered:
        return True
    if os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1":
        return False
    try:
        from fla.backends import BaseBackend, register as add
    except ImportError:                              # of a release before there was one
        return False
    signature = inspect.signature(plan)

    class Margay(BaseBackend):
        backend_type = "margay"
        priority = -1

    def verify(*arguments, **options):
        if not _users:
            return False, "margay is switched off"
        if not _binds(signature, arguments, options):
            return False, "other arguments"
        compute, reason = _plan(name, plan, arguments, options)
        return compute is not None, reason

    def implementation(*arguments, **options):
        return plan(*arguments, **options)()

    try:
        add(original, backend=Margay, verifier=verify)(implementation)
    except (KeyError, TypeError):                    # it does not ask
        return False
    _registered.add(original)
    return True
