"""The delta rules in PyTorch: exact, as a program in the inputs' own precision would have them, and hard inputs.

q, k [B, T, H, K], v [B, T, HV, V], HV a multiple of H; g [B, T, HV] (gated delta rule), [B, T, HV, K] (KDA) or None;
beta [B, T, HV]; states [R, HV, K, V], a row for each of the batch or, with starts, for each packed sequence."""

import torch

from cases import effective_count

FORGOTTEN = -1000.0              # of float64, e^FORGOTTEN is 0; sums of it have differences, those of -inf have none


def spread(t, like):
    """Heads of q or k as there are value heads."""
    return t.repeat_interleave(like.shape[2] // max(t.shape[2], 1), 2)


def normalised(t):
    """Rows of l2 norm 1, in the precision of t but at least float32, rounded to that of t."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(t.dtype)


def gates(g, a_log, dt_bias=None, lower_bound=None):
    """Log decays of raw gates g [B, T, HV] or [B, T, HV, K]; a_log [HV], dt_bias [HV] or [HV, K] or [HV K]."""
    wide = torch.promote_types(g.dtype, torch.float32)
    g, rate = g.to(wide), a_log.to(wide).exp()
    if dt_bias is not None:
        g = g + dt_bias.to(wide).reshape(g.shape[2:])
    rate = rate[:, None] if g.ndim == 4 else rate
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * g)
    return -rate * torch.nn.functional.softplus(g)


def strength(beta, negative=False):
    """beta of its logits; up to 2 where eigenvalues may be negative."""
    beta = torch.sigmoid(beta.to(torch.promote_types(beta.dtype, torch.float32)))
    return 2 * beta if negative else beta


def recurrence(q, k, v, g, beta, scale=None, state=None, starts=None):
    """out and the last states in float64, step by step, differentiable. Steps behind the last start are 0. beta may be
    of each column of v: its gradient is then the addends of that of a beta."""
    if starts is not None:
        return of_sequences(recurrence, q, k, v, g, beta, scale, state, starts)
    q, k, v, beta = (t.double() for t in (q, k, v, beta))
    scale = q.shape[3] ** -0.5 if scale is None else scale
    q, k = spread(q, v), spread(k, v)
    b, steps, h, dv = v.shape
    s = torch.zeros(b, h, q.shape[3], dv, dtype=torch.float64, device=q.device) if state is None else state.double()
    rows = [v[:, :0]]
    for t in range(steps):
        if g is not None:
            decay = g[:, t].double().clamp(min=FORGOTTEN).exp()
            s = s * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        error = v[:, t] - (k[:, t, :, None] @ s)[:, :, 0]
        s = s + k[:, t, :, :, None] * (beta[:, t].reshape(b, h, -1) * error)[:, :, None]
        rows.append(scale * (q[:, t, :, None] @ s).transpose(1, 2))
    return torch.cat(rows, 1), s


def of_sequences(form, q, k, v, g, beta, scale, state, starts, *size):
    """`form` of packed sequences, one after the other."""
    of = lambda t, i, j: None if t is None else t[:, i:j]  # noqa: E731
    parts = [form(*(of(t, i, j) for t in (q, k, v, g, beta)), scale, None if state is None else state[n:n + 1], None,
                  *size) for n, (i, j) in enumerate(zip(starts, starts[1:]))]
    behind = torch.zeros_like(v[:, starts[-1]:])
    none = torch.zeros(0, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=v.device)
    outs, states = [out for out, _ in parts], [s for _, s in parts]
    return torch.cat([*outs, behind.to(outs[0].dtype) if outs else behind], 1), torch.cat(states) if states else none


def by_chunks(q, k, v, g, beta, scale=None, state=None, starts=None, size=64, least=None):
    """By chunks: products in the inputs' precision, the state, the decays and the inverse in float32; of float64 all of
    it, which is exact. What needs no state is done of all chunks at once. least: of by_channel(). Where channels have
    decays, rows of q are multiplied anyway, and the scale is in what is rounded then."""
    if starts is not None:
        return of_sequences(by_chunks, q, k, v, g, beta, scale, state, starts, size, least)
    dtype, (b, steps, h, dv), d = q.dtype, v.shape, q.shape[3]
    wide = torch.promote_types(dtype, torch.float32)
    scale = d ** -0.5 if scale is None else scale
    s = torch.zeros(b, h, d, dv, dtype=wide, device=q.device) if state is None else state.to(wide)
    if not steps:
        return v.to(dtype), s
    size = min(size, steps)
    g = torch.zeros(b, steps, h, device=q.device) if g is None else g
    channels = g.ndim == 4
    g = (g if channels else g[..., None]).to(wide)
    g = g.clamp(min=FORGOTTEN if dtype == torch.float64 else -100.0)

    def chunks(t):                       # [B, HV, chunks, size, ...]; steps that only fill a chunk change nothing
        filled = torch.nn.functional.pad(t.transpose(1, 2), (0, 0) * (t.ndim - 3) + (0, -steps % size))
        return filled.unflatten(2, (-1, size))
    if channels:
        q, scale = q.to(wide) * scale, 1.0
    q, k, v, g, beta = map(chunks, (spread(q, v), spread(k, v), v, g, beta.to(wide)))
    p, m = by_head(q, k, g) if g.shape[4] == 1 and d > 1 else by_channel(q, k, g, least)
    identity, l = torch.eye(size, dtype=wide, device=q.device), g.cumsum(3)
    inverse = torch.linalg.solve_triangular(identity + m.tril(-1) * beta[..., None, :], identity, upper=False,
                                            unitriangular=True)
    inverse, p, left = (beta[..., None] * inverse).to(dtype), p.to(dtype), (l[..., -1:, :] - l).exp()
    taken = k.mT if l.shape[4] == 1 else (k.to(wide) * left).to(dtype).mT
    out = []
    for x, y, z, l, left, inverse, p, taken in zip(*(t.unbind(2) for t in (q, k, v, l, left, inverse, p, taken))):
        u = inverse @ (z.to(wide) - read(y, l, s, dtype, channels)).to(dtype)
        out.append(scale * (read(x, l, s, dtype, channels) + (p @ u).to(wide)))
        added = taken @ ((u.to(wide) * left).to(dtype) if l.shape[3] == 1 else u)
        s = s * l[:, :, -1, :, None].exp() + added.to(wide)
    return torch.cat(out, 2)[:, :, :steps].transpose(1, 2).to(dtype), s


def exactly(q, k, v, g, beta, scale=None, state=None, starts=None):
    """What recurrence() is, in a fraction of its time: float64 by chunks. Chunks of decays per channel are short, as a
    weight of each pair of steps and each channel is formed."""
    q, k, v, beta = (t.double() for t in (q, k, v, beta))
    return by_chunks(q, k, v, g, beta, scale, state, starts, 16 if g is not None and g.ndim == 4 else 64)


def read(x, l, s, dtype, channels):
    """e^l x times the state."""
    if not channels:
        return l.exp() * (x @ s.to(dtype)).to(s.dtype)
    return ((x.to(s.dtype) * l.exp()).to(dtype) @ s.to(dtype)).to(s.dtype)


def by_head(q, k, g):
    """e^(l_i - l_j) of q_i.k_j and k_i.k_j, j <= i."""
    l, n = g[..., 0].cumsum(-1), g.shape[-2]
    later = torch.ones(n, n, dtype=torch.bool, device=g.device).tril()
    weights = (l[..., :, None] - l[..., None, :]).masked_fill(~later, -torch.inf).exp()
    return (q @ k.mT).to(g.dtype) * weights, (k @ k.mT).to(g.dtype) * weights


def by_channel(q, k, g, least=None, rows=16):
    """The same of decays per channel, for `rows` rows at a time.

    In float64 e^(l_i - l_j) is formed of every pair and channel. Else it is the product of e^(l_i - m) and e^(m - l_j),
    m of the middle row: within 8 steps of it no exponent of either is above 8 * 10.5, as g is not below -10.5 here,
    where an error of e^-10.5 is left. float16 has not this range: its factors are float32, and their sums are rounded;
    or they are of the type `least`."""
    n, least = g.shape[-2], least or (torch.float32 if k.dtype == torch.float16 else k.dtype)
    exact = k.dtype == torch.float64
    l = (g if exact else g.clamp(min=-10.5)).cumsum(-2)
    results = [], []
    for i in range(0, n, rows):
        end = min(i + rows, n)
        later = torch.ones(n, n, dtype=torch.bool, device=g.device).tril()[i:end, :end]
        at, before = l[..., i:end, :], l[..., :end, :]
        if exact:
            weights = (at[..., :, None, :] - before[..., None, :, :]).masked_fill(~later[..., None], -torch.inf).exp()
            weights = weights * k[..., None, :end, :]
            made = [(weights @ t[..., i:end, :, None])[..., 0] for t in (q, k)]
        else:
            middle = l[..., (i + end - 1) // 2, None, :]
            column = (k[..., :end, :].to(g.dtype) * (middle - before).exp()).to(least)
            made = [(t[..., i:end, :].to(g.dtype) * (at - middle).exp()).to(least) @ column.mT for t in (q, k)]
            made = [torch.where(later, t, 0.0) for t in made]
            made = [(t.to(k.dtype) if least == torch.float32 else t).to(g.dtype) for t in made]
        for result, t in zip(results, made):
            result.append(torch.nn.functional.pad(t, (0, n - end)))
    return tuple(torch.cat(result, -2) for result in results)


def rounding(name, found, plain_error, dtype, g=None, products=0.0):
    """What check_error() allows besides the plain form's errors, relative and absolute, of a result by name.

    Relative: the exponent of a weight is the difference of two sums of g over a chunk, in float32; a state has as many
    decays as there are chunks. Absolute, of a float32 result, which has no rounding of its own: the mean of n
    independent errors is not 0, but below 4 / sqrt(n) of their size, n those that are large, and where elements are few
    the plain form's errors may be small by chance. dg is what is left of sums of q.dq and of k.dk, in float32.
    products: the largest sum of |q dq| or |k dk| of a step, of KDA the largest element."""
    longest = 0.0 if g is None or not g.numel() else min(float(-g.detach().clamp(min=-100).min()) * 64, 6400.0)
    absolute = 2.0 ** -18 * products if name in ("dg", "da_log", "ddt_bias") else 0.0
    if name == "final_state" and g is not None:          # decayed by one factor after the other
        longest += g.shape[1] // 64
    if found.dtype == torch.float32 != dtype and found.numel():
        sizes = plain_error.double().abs().mean(dim=(2, 3) if found.ndim == 4 and g is not None else -1)
        absolute += 4 * float(sizes.mean()) / effective_count(sizes) ** 0.5
    return 2.0 ** -23 * (16 + longest), absolute


def remainder_rounding(g, state, starts=None):
    """Absolute, of a final state: what is left of the initial one has e^l, where a sequence is cut into segments of a
    sum over its chunks in float32. n chunks' roundings of 2^-25 l on average are below 2^-24 sqrt(n) l together."""
    worst = 0.0
    if g is None or state is None or not state.numel():
        return worst
    for n, (i, j) in enumerate(zip(starts, starts[1:]) if starts else ((0, g.shape[1]),)):
        l = g[:, i:j].double().sum(1).clamp(min=FORGOTTEN)
        s = (state[n:n + 1] if starts else state).detach().abs().amax(3).double()
        left = -l * l.exp() * (s if l.ndim == 3 else s.amax(2))
        worst = max(worst, 2.0 ** -24 * (-(-(j - i) // 64)) ** 0.5 * float(left.max()))
    return worst


def chance(name, plain_error, exact, eps, *states, addends=None):
    """Allowed besides of a gradient, of the worst error, of its mean and of its mean away from zero.

    Where few elements are large, the worst error is that of one of them, a product of two factors that are rounded, and
    the plain form's is small by chance. Elements of dg are not independent: those of a chunk share <S, dS> of the state
    before it, as those of dbeta share one inverse. So the mean of n chunks' errors is below 4 / sqrt(n) of their size.
    The kernels take <S, dS> of 16-bit copies, at both ends of a sequence too, where the plain form has float32: a
    rounding of either has a deviation of 0.3 eps, and three of both are 5/4 eps. Of KDA, whose g has channels, both
    sums are over the columns of v alone. states: pairs of S and dS at ends of sequences, or of None. addends: of
    dbeta, the norm of each one's. They are products of two factors that are rounded, too. Of one step the plain form's
    error may be small by chance, and so may the sum; of n steps what that takes away is 1 / sqrt(n) of their size."""
    worst = mean = bias = 0.0
    if effective_count(exact.abs()) < 500:
        worst = eps * float(exact.abs().max())
    if name in ("dg", "dbeta"):
        chunks = exact.shape[0] * -(-exact.shape[1] // 64) * exact.shape[2]
        bias = 4 * float(plain_error.abs().mean()) / chunks ** 0.5
        if name == "dbeta" and addends is not None:
            sizes = 5 / 4 * eps * addends / addends.numel() ** 0.5
            worst, mean, bias = worst + float(sizes.max()), mean + float(sizes.mean()), bias + float(sizes.mean())
        for state, dstate in states:
            if name == "dg" and state is not None and state.numel():
                sizes = 5 / 4 * eps * (state.detach().double() * dstate).norm(dim=(2, 3) if exact.ndim == 3 else 3)
                worst, mean, bias = worst + float(sizes.max()), mean + float(sizes.mean()), bias + float(sizes.mean())
    return worst, mean, bias


def worst_products(q, k, dq, dk, channels=False):
    """`products` of rounding()."""
    if not q.numel():
        return 0.0
    both = [(t.detach().double() * d.double()).abs() for t, d in ((q, dq), (k, dk))]
    return max(float((t if channels else t.sum(3)).max()) for t in both)


GATES = {
    "none": lambda r: None,
    "usual": lambda r: torch.nn.functional.logsigmoid(r + 2),
    "mild": lambda r: -0.08 * r.abs(),
    "zero": lambda r: torch.zeros_like(r),
    "strong": lambda r: torch.full_like(r, -5.0),
    "steep": lambda r: -6.4 * torch.special.ndtr(r),
    "to -20": lambda r: -20 * torch.special.ndtr(r),
    "very strong": lambda r: -300 * torch.special.ndtr(r),
    "some forget all": lambda r: torch.where(r > 1.5, -torch.inf, -0.01 * r.abs()),
    "one stays": lambda r: torch.where(torch.arange(r.shape[-1], device=r.device) == r.shape[-1] // 2, 0.0,
                                       -20.0).expand_as(r).clone(),
}
BETAS = {
    "usual": lambda r: torch.special.ndtr(r),
    "to 2": lambda r: 2 * torch.special.ndtr(r),
    "0": lambda r: torch.zeros_like(r),
    "1": lambda r: torch.ones_like(r),
    "near 2": lambda r: 2 - 0.01 * torch.special.ndtr(r),
    "2": lambda r: torch.full_like(r, 2.0),
    "some 0": lambda r: torch.where(r > 0, torch.special.ndtr(r), 0.0),
}
# name: (gates, beta, keys, values)
HARD = {
    "usual": ("usual", "usual", "random", "random"),
    "no gates": ("none", "usual", "random", "random"),
    "mild": ("mild", "usual", "random", "random"),
    "zero gates": ("zero", "usual", "random", "random"),
    "strong": ("strong", "usual", "random", "random"),
    "steep": ("steep", "usual", "random", "random"),
    "to -20": ("to -20", "to 2", "random", "random"),
    "very strong": ("very strong", "to 2", "random", "random"),
    "some forget all": ("some forget all", "usual", "random", "random"),
    "one stays": ("one stays", "usual", "random", "random"),
    "beta 0": ("mild", "0", "random", "random"),
    "beta some 0": ("mild", "some 0", "random", "random"),
    "beta 1": ("zero", "1", "random", "random"),
    "beta near 2": ("zero", "near 2", "random", "random"),
    "equal keys": ("zero", "usual", "equal", "random"),
    "equal keys, beta 2": ("zero", "2", "equal", "random"),
    "near keys": ("mild", "1", "near", "random"),
    "near keys, beta near 2": ("zero", "near 2", "near", "random"),
    "long keys": ("mild", "to 2", "long", "random"),
    "large values": ("mild", "usual", "random", "large"),
    "large values, strong": ("steep", "to 2", "random", "large"),
    "values of all sizes": ("mild", "usual", "random", "all sizes"),
}


def normal(seed, count, device):
    """A function of sizes that makes normal numbers: on the CPU, the same for all devices, unless they are many."""
    r = torch.Generator(device if count > 2**20 else "cpu").manual_seed(seed)
    return lambda *size: torch.randn(size, generator=r, device=r.device)


def hard(name, seed, b=1, steps=130, h=2, hv=None, d=64, dv=64, *, channels=False, dtype=torch.bfloat16, rows=None,
         device="cpu"):
    """(q, k, v, g, beta, state, dout, dlast) of a name of HARD. Keys have norm 1, "long" ones norm 10 with
    beta |k|^2 <= 2. Values go to 1e30, of float16 to 3e4."""
    gate, beta, keys, values = HARD[name]
    hv, rows = h if hv is None else hv, b if rows is None else rows
    make = normal(seed, b * steps * hv * dv, device)
    unit = lambda t: torch.nn.functional.normalize(t, dim=-1)  # noqa: E731
    q, k, v = unit(make(b, steps, h, d)), unit(make(b, steps, h, d)), make(b, steps, hv, dv)
    if keys in ("equal", "near"):
        k = unit(k[:, :1] + (0.01 * make(b, steps, h, d) if keys == "near" else 0)).expand(b, steps, h, d)
    if keys == "long":
        k = 10 * k
    top = 3e4 if dtype == torch.float16 else 1e30
    if values == "large":
        v = v.clamp(-4, 4) * (top / 4)
    if values == "all sizes":                       # of a column each: 1e-30 to 1e30
        v = v.clamp(-4, 4) * (top / 4) ** torch.linspace(-1, 1, dv, device=v.device)
    beta = BETAS[beta](make(b, steps, hv))
    if keys == "long":
        beta = beta / 100
    g = GATES[gate](make(b, steps, hv, *(d,) * channels))
    state = make(rows, hv, d, dv) * (0.1 if values == "random" else 0.1 * v.abs().max() if steps * hv * b else 1.0)
    dout, dlast = make(b, steps, hv, dv), make(rows, hv, d, dv)
    q, k, v, dout = (t.contiguous().to(device, dtype) for t in (q, k, v, dout))
    g = g if g is None else g.to(device)
    return q, k, v, g, beta.to(device, dtype), state.to(device), dout, dlast.to(device)
