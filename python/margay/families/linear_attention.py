"""Attention without a softmax."""

from margay._shared import checked_scale, functions, of_row


def linear_attention(q, k, v, *, scale=None, initial_state=None, output_final_state=False):
    """out_t = scale S_t^T q_t with S_t = S_(t-1) + k_t v_t^T: attention without a softmax, causal.

    q, k [B, T, H, K], v [B, T, H, V], out [B, T, H, V]; 1 <= K, V <= 128. bfloat16 or float16, on the CPU also float32.
    PyTorch tensors are differentiable; NumPy arrays give NumPy arrays.

    scale: 1 / sqrt(K) if None.
    initial_state: S_0, float32 [B, H, K, V]; zero if None; differentiable.
    output_final_state: return (out, S_T), S_T float32 [B, H, K, V].
    """
    scale = checked_scale("linear_attention", scale)
    out, state = (functions.get("linear_attention") or of_row("linear_attention"))(q, k, v, initial_state, scale)
    return (out, state) if output_final_state else out
