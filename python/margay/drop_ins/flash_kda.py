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
    if dt_bias is not None:
        dt_bias = dt_bias.reshape(g.shape[2:])
    result, last = margay.kda(
        q, k, v, g, beta, scale=scale, initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=True, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound or None,
        use_gate=True, use_qk_l2norm=True, use_beta_sigmoid=True, state_v_first=True)
    out.copy_(result)
    if final_state is not None:
        final_state.copy_(last)
