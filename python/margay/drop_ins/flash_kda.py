"""FlashKDA's function, with its arguments, for those who serve with it."""

import torch

import margay

__all__ = ["fwd"]


@torch.no_grad()
def fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None,
        cu_seqlens=None):
    """As flash_kda.fwd: Kimi delta attention of raw gates g [B, T, H, K] and logits beta [B, T, H], written to `out`,
    and the last states to `final_state`. q and k are normalised here.

    States are [.., V, K], float32 or bfloat16. dt_bias [H, K] or [H * K] or None. More than flash_kda: float16, on the
    CPU float32, 1 to 128 columns, value heads that are a multiple of the key heads, any strides, lower_bound None. Not
    differentiable.
    """
    gate = dict(use_gate=True, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound)
    if lower_bound == 0:                             # no decay
        g, gate = torch.zeros_like(g), {}
    result, last = margay.kda(q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=True,
                              cu_seqlens=cu_seqlens, use_qk_l2norm=True, use_beta_sigmoid=True, state_v_first=True,
                              **gate)
    out.copy_(result)
    if final_state is not None:
        final_state.copy_(last)
