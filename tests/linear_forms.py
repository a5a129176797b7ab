"""Linear attention in PyTorch: exact, and as a program in the inputs' own precision would have it."""
import math

import torch


def recurrence(q, k, v, scale, state=None, g=None):
    """out and the last state in float64, step by step, differentiable."""
    q, k, v = (t.double() for t in (q, k, v))
    b, steps, h, d = q.shape
    s = torch.zeros(b, h, d, v.shape[3], dtype=torch.float64, device=q.device) if state is None else state.double()
    rows = []
    for t in range(steps):
        if g is not None:
            s = s * (g if g.ndim == 1 else g[:, t]).double().clamp(min=-64)[..., None, None].exp()
        s = s + k[:, t, :, :, None] * v[:, t, :, None, :]
        rows.append(scale * (q[:, t, :, None, :] @ s)[:, :, 0])
    return torch.stack(rows, 1), s


def plain(q, k, v, scale, state=None):
    """Without decay: one masked product and one with the state."""
    x = torch.einsum("bihd,bjhd->bhij", q, k).tril()
    out = torch.einsum("bhij,bjhd->bihd", x, v)
    s = torch.einsum("bthk,bthv->bhkv", k.float(), v.float())
    if state is not None:
        out = out + torch.einsum("bthk,bhkv->bthv", q, state.to(q.dtype))
        s = s + state
    return (out * scale).to(q.dtype), s


def by_chunks(q, k, v, scale, state=None, g=None, starts=None, size=64):
    """By chunks, products in the inputs' precision, the state in float32; of float64 all of it, which is exact. With
    starts of packed sequences `state` has one for each."""
    if starts is not None:
        parts = [by_chunks(q[:, i:j], k[:, i:j], v[:, i:j], scale, None if state is None else state[n:n + 1],
                           g if g is None or g.ndim == 1 else g[:, i:j])
                 for n, (i, j) in enumerate(zip(starts, starts[1:]))]
        return torch.cat([out for out, _ in parts], 1), torch.cat([s for _, s in parts])
    dtype, (b, steps, h, d) = q.dtype, q.shape
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    g = torch.zeros(h, device=q.device) if g is None else g
    g = g.to(wide).expand(b, steps, h).clamp(min=-64).transpose(1, 2)
    s = torch.zeros(b, h, d, v.shape[3], dtype=wide, device=q.device) if state is None else state.to(wide)
    out = [v[:, :, :0].to(wide)]
    for i in range(0, steps, size):
        x, y, z, l = q[:, :, i:i + size], k[:, :, i:i + size], v[:, :, i:i + size], g[:, :, i:i + size].cumsum(2)
        n = l.shape[2]
        later = torch.ones(n, n, dtype=torch.bool, device=l.device).tril()
        weights = (l[..., :, None] - l[..., None, :]).masked_fill(~later, -torch.inf).exp()
        scores = ((x @ y.mT).to(wide) * weights).to(dtype)
        out.append(scale * ((scores @ z).to(wide) + l.exp()[..., None] * (x @ s.to(dtype)).to(wide)))
        taken = (z.to(wide) * (l[..., -1:] - l).exp()[..., None]).to(dtype)
        s = s * l[..., -1, None, None].exp() + (y.mT @ taken).to(wide)
    return torch.cat(out, 2).transpose(1, 2).to(dtype), s


def rounding(name, found, plain_error, dtype, scale, g=None, states=None, products=0.0):
    """What check_error() allows besides the plain form's errors, relative and absolute, of a result by name.

    Relative: the exponent of a weight is the difference of two sums of g over a chunk, in float32. Absolute, of a
    float32 result, which has no rounding of its own: the mean of n independent errors is not 0, but below 4 /
    sqrt(n) of their size, and where elements are few the plain form's errors may be small by chance. A state's rows
    are not independent with g: a decay of 1 - 2^-10 rounds every element of a head back to itself. Of dg: the
    kernel that works on all chunks at once takes <G, S> of 16-bit copies of the states, also where these are given
    and not of this precision. And dg is what is left of sums of q.dq and of k.dk, in float32. states: S_0, dS and
    the decay between them; products: the largest sum of |q dq| or |k dk| of a step."""
    eps = torch.finfo(dtype).eps
    longest = 0.0 if g is None or not g.numel() else min(float(-g.detach().clamp(min=-64).min()) * 64, 4096.0)
    absolute = 0.0
    if name == "dg":
        absolute += 2.0 ** -18 * products
    if found.dtype == torch.float32 != dtype and found.numel():
        independent = found.shape[:2] if found.ndim == 4 and g is not None else found.shape[:-1]
        absolute += 4 * float(plain_error.abs().mean()) / max(1, math.prod(independent)) ** 0.5
        if name == "dg" and states is not None:
            first, last, decay = states
            absolute += 3 * eps / 2 * float(((first * last).double().norm(dim=(2, 3)) * decay).max())
    return 2.0 ** -23 * (16 + longest), absolute
