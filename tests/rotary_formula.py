"""The rotary embedding in PyTorch's operations."""

import torch


def turned(x, cos, sin, interleaved):
    """x [B, T, H, D], cos and sin [B or 1, T, A], in what precision their types promote to; then as x."""
    a, (c, s) = cos.shape[-1], (t.unsqueeze(2) for t in (cos, sin))
    r = x[..., :2 * a]
    u, v = (r[..., ::2], r[..., 1::2]) if interleaved else (r[..., :a], r[..., a:])
    pair = u * c - v * s, v * c + u * s
    r = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([r.to(x.dtype), x[..., 2 * a:]], -1)


def rows_of(table, b, t, positions=None, offsets=None):
    """The rows [B, T, A] of a table [T', A] or [B, T', A]; zeros where there is none."""
    at = torch.arange(t, device=table.device).expand(b, t) if positions is None else positions.expand(b, t)
    if offsets is not None:
        at = at + (offsets if isinstance(offsets, int) else offsets[:, None])
    table = table.expand(b, *table.shape[-2:])
    inside = (at >= 0) & (at < table.shape[1])
    found = table.gather(1, at.clamp(0, table.shape[1] - 1).long()[..., None].expand(b, t, table.shape[2]))
    return found * inside[..., None]


def dtypes_of(device):
    return (torch.bfloat16, torch.float16) if device == "cuda" else (torch.bfloat16, torch.float16, torch.float32)
