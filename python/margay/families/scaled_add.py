"""scaled_add, the op of the first kernel."""

from margay._shared import functions, of_row


def scaled_add(a, b, scale=1.0):
    """a + scale b, both [M, N] of one dtype: bfloat16 or float16, on the CPU also float32. Differentiable in a and
    b."""
    return (functions.get("scaled_add") or of_row("scaled_add"))(a, b, scale)
