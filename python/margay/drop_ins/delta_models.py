"""Models of transformers with delta rules (Qwen3-Next, Qwen3.5, OLMo-Hybrid; Kimi Linear and others with Kimi delta
attention) and their short convolutions, on Margay's functions."""

import torch

from margay.drop_ins import delta_rules, mamba_ssm, models
from margay.drop_ins.fallback import Refused
from margay.drop_ins.switch import Switch

__all__ = ["register", "unregister"]

_users: list = []            # one for each register() in effect


def register():
    """Let models of transformers compute the gated delta rule, Kimi delta attention and their short convolutions with
    Margay, until `.disable()`, the end of a `with` block or `unregister()`.

    What no kernel computes goes to what was there before, with a FallbackWarning for each reason.
    """
    user = models.bind(_PLANS)
    _users.append(user)
    return Switch(lambda: _leave(user))


def unregister():
    """Undo every `register()`."""
    for user in list(_users):
        _leave(user)


def _leave(user):
    if user in _users:
        _users.remove(user)
        models.release(user)


# ---- the functions of the models' modules. A step of generation has a state that the model's cache holds and that is
# ---- written back there: it becomes the next one in place.

def _chunks(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
            use_qk_l2norm_in_kernel=False, cu_seqlens=None, **_):
    return _plan(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)


def _steps(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
           cu_seqlens=None, **_):
    return _plan(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
                 in_place=output_final_state)


def _plan(q, k, v, g, beta, state, output_final_state, qk_norm, cu_seqlens, in_place=False):
    compute = delta_rules.plan(q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens, qk_norm=qk_norm,
                               in_place=in_place)

    def run():
        out, last = compute()
        return out, last if output_final_state else None
    return run


def _of_channels(plan):
    def of_channels(query, key, value, g, *arguments, **options):
        if not isinstance(g, torch.Tensor) or g.ndim != 4:
            raise Refused("decays of another shape")
        return plan(query, key, value, g, *arguments, **options)
    return of_channels


_PLANS = {"torch_chunk_gated_delta_rule": _chunks, "torch_recurrent_gated_delta_rule": _steps,
          "chunk_kimi_delta_attention": _of_channels(_chunks),
          "recurrent_kimi_delta_attention": _of_channels(_steps), **mamba_ssm.CONVOLUTIONS}
