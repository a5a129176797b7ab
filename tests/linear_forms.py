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


def by_chunks(q, k, v, scale, state=None, g=None, starts=None, size=64, kept=None):
    """By chunks, products in the inputs' precision, the state in float32; of float64 all of it, which is exact. With
    starts of packed sequences `state` has one for each. kept: a list, which gets of every chunk the number of its
    steps, the state in front of it, the decay over it, the state behind it, and the weights of its pairs."""
    if starts is not None:
        parts = [by_chunks(q[:, i:j], k[:, i:j], v[:, i:j], scale, None if state is None else state[n:n + 1],
                           g if g is None or g.ndim == 1 else g[:, i:j], kept=kept)
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
        before, s = s, s * l[..., -1, None, None].exp() + (y.mT @ taken).to(wide)
        if kept is not None:
            kept.append((n, before, l[..., -1].exp(), s, scores))
    return torch.cat(out, 2).transpose(1, 2).to(dtype), s


def through_chunks(q, k, v, scale, state, g, starts, dout, dlast=None):
    """Of every chunk and head [chunks, b, h] the norm of e^l S G, of its elements: l the sum of g over the chunk, S the
    state in front of it, G the gradient of the one behind it. <S, G> e^l is in dg of all steps of the chunk, whose
    number [chunks, 1, 1] is the second result. The third, as the first, is the norm of (i - j) W dW, of the chunk's
    pairs j < i, whose weight W decays over i - j steps: the sum of these is in dg of a head."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    state, g = (t if t is None else t.detach().double() for t in (state, g))
    kept = []
    out, last = by_chunks(q, k, v, scale, state, g, starts, kept=kept)
    if not kept:
        none = torch.zeros(0, q.shape[0], q.shape[2])
        return none, torch.zeros(0, 1, 1), none
    results, given = ((out,), (dout.double(),)) if dlast is None else ((out, last), (dout.double(), dlast.double()))
    steps, before, decays, behind, weights = zip(*kept)
    grads = torch.autograd.grad(results, [*behind, *weights], given, allow_unused=True)
    norms = [0 * decay if G is None else decay * (S * G).norm(dim=(2, 3))
             for S, decay, G in zip(before, decays, grads)]
    pairs = []
    for n, w, dw in zip(steps, weights, grads[len(steps):]):
        i = torch.arange(n, device=w.device)
        pairs.append(((i[:, None] - i) * w * dw).norm(dim=(2, 3)))
    return torch.stack(norms).detach().cpu(), torch.tensor(steps)[:, None, None], torch.stack(pairs).detach().cpu()


def rounding(name, found, plain_error, dtype, scale, g=None, through=None, products=0.0):
    """What check_error() allows besides the plain form's errors, relative and absolute, of a result by name; the
    absolute one of the worst error, of its mean and of its mean away from zero.

    Relative: the exponent of a weight is the difference of two sums of g over a chunk, in float32. Absolute, of a
    float32 result, which has no rounding of its own: the mean of n independent errors is not 0, but below 4 /
    sqrt(n) of their size, and where elements are few the plain form's errors may be small by chance. A state's rows
    are not independent with g: a decay of 1 - 2^-10 rounds every element of a head back to itself. Nor are the steps
    of dg: those of a chunk share the error of its <S, G>. The kernel that works on all chunks at once takes it of
    16-bit copies of both, where the plain form has float32: a rounding of either has a deviation of 0.3 eps, and three
    of both are 5/4 eps. So are four of a pair's weight, which has one: both forms round it, but where heads are few
    the plain form's sum may be small by chance. And dg is what is left of sums of q.dq and of k.dk, in float32.
    through: of through_chunks(); products: the largest sum of |q dq| or |k dk| of a step."""
    eps = torch.finfo(dtype).eps
    longest = 0.0 if g is None or not g.numel() else min(float(-g.detach().clamp(min=-64).min()) * 64, 4096.0)
    worst = mean = away = 2.0 ** -18 * products if name == "dg" else 0.0
    if found.dtype == torch.float32 != dtype and found.numel():
        independent = found.shape[:2] if found.ndim == 4 and g is not None else found.shape[:-1]
        by_chance = lambda n: 4 * float(plain_error.abs().mean()) / max(1, n) ** 0.5  # noqa: E731
        worst, mean, away = (x + by_chance(math.prod(independent)) for x in (worst, mean, away))
        if name == "dg" and found.ndim == 3:
            away += by_chance(found.shape[0] * -(-found.shape[1] // 64) * found.shape[2])
        if name == "dg" and through is not None and through[0].numel():
            sizes = 5 / 4 * eps * through[0]
            if found.ndim == 1:                        # a head's decay, of all steps
                shared, own = ((x * x).sum(dim=(0, 1)).sqrt() for x in (through[1] * sizes, 5 / 4 * eps * through[2]))
                sums = (shared * shared + own * own).sqrt()
                worst, mean = worst + float(sums.max()), mean + float(sums.mean())
                away += float(shared.mean()) + float(own.norm()) / own.numel()       # weights' are independent
            else:
                worst, mean = worst + float(sizes.max()), mean + float(sizes.mean())
                away += float(sizes.square().sum().sqrt()) / sizes.numel()
    return 2.0 ** -23 * (16 + longest), (worst, mean, away)
