"""Problems of hedgehog, their exact answers by the quadratic form and by the recurrence, and the same attention in
PyTorch by chunks."""

import dataclasses
import math
import random

import torch

CHUNK = 64
STEPS = (0, 1, 2, 13, 63, 64, 65, 127, 128, 129, 192, 200, 300, 411)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GIVEN = ("q", "k", "v", "q_map", "k_map", "window_factor", "linear_factor", "initial_state")


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    batch: int = 1
    steps: int = 64
    heads: int = 2
    dim: int = 64
    dim_v: int = 64
    count: int = 64
    window: int = 64
    sliding: bool = False
    initial: bool = False
    packed: tuple = ()
    dtype: torch.dtype = torch.bfloat16
    scale: float | None = None
    sharp: float = 1.0

    def __str__(self):
        return (f"seed{self.seed}-b{self.batch}-t{self.steps}-h{self.heads}-d{self.dim}x{self.dim_v}-f{self.count}"
                f"-{'sliding' if self.sliding else 'blocks'}{self.window}-{'initial-' if self.initial else ''}"
                f"{'packed-' if self.packed else ''}{str(self.dtype)[6:]}")

    @property
    def rows(self):
        return len(self.packed) - 1 if self.packed else self.batch

    def numbers(self):
        return dict(window=self.window, sliding=self.sliding, scale=self.scale or 0.0)


def random_case(seed, dtypes=DTYPES, longest=None):
    r = random.Random(seed)
    steps = r.choice(STEPS) if r.random() < 0.7 else r.randrange(longest or 500)
    sliding = r.random() < 0.3
    window = 64 if r.random() < 0.5 else r.choice((1, 7, 31, 50, 63)) if sliding else r.choice((1, 8, 16, 32))
    packed = ()
    if r.random() < 0.25:
        packed = (0, *sorted(r.randint(0, steps) for _ in range(r.randint(0, 4))), steps)
    dim = r.choice((64, 128, 128, r.randrange(1, 17) * 8))
    return Case(seed, 1 if packed else r.choice((1, 1, 2)), steps, r.choice((1, 2, 3)), dim,
                dim if r.random() < 0.6 else r.randrange(1, 17) * 8, r.choice((64, 64, 32, r.randrange(1, 9) * 8)),
                window, sliding, r.random() < 0.4, packed, r.choice(dtypes), r.choice((None, None, 0.3)),
                r.choice((0.3, 1.0, 3.0)))


def inputs_of(case, device="cpu"):
    g = torch.Generator().manual_seed(case.seed)
    b, t, h, d, v, f = case.batch, case.steps, case.heads, case.dim, case.dim_v, case.count
    normal = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    known = dict(q=normal(b, t, h, d), k=normal(b, t, h, d), v=normal(b, t, h, v),
                 q_map=normal(h, d, f) * case.sharp / d**0.5, k_map=normal(h, d, f) * case.sharp / d**0.5)
    known = {name: x.to(device, case.dtype) for name, x in known.items()}
    known["window_factor"] = torch.rand(h, generator=g).to(device) * 0.9 + 0.1
    known["linear_factor"] = torch.rand(h, generator=g).to(device) * 0.9 + 0.1
    state = None
    if case.initial:
        state = torch.cat([normal(case.rows, h, 2 * f, v), torch.rand(case.rows, h, 2 * f, 1, generator=g)], -1)
        state = state.to(device)
    known["initial_state"] = state
    known["cu_seqlens"] = torch.tensor(case.packed, dtype=torch.int32).to(device) if case.packed else None
    return known


def features(x, w, half=None):
    y = x @ w
    f = torch.cat([torch.softmax(y, -1), torch.softmax(-y, -1)], -1)
    return f if half is None else f.to(half).to(f.dtype)


def visible(steps, window, sliding, device):
    """Which steps a step's window holds, and which are in front of it."""
    i = torch.arange(steps, device=device)
    causal = i[:, None] >= i
    near = i[:, None] - i < window if sliding else i[:, None] // window - i // window <= 1
    return causal & near, causal & ~near


def quadratic(q, k, v, q_map, k_map, window_factor, linear_factor, state, window, sliding, scale):
    """The definition: [B, H, T, ...], state [B, H, 2 F, V + 1]."""
    scale = scale or q.shape[-1] ** -0.5
    f, g = features(q, q_map), features(k, k_map)
    near, far = visible(q.shape[-2], window, sliding, q.device)
    w, l = window_factor[:, None, None], linear_factor[:, None, None]
    a = torch.zeros(*q.shape[:-1], q.shape[-2], dtype=q.dtype, device=q.device)
    if q.shape[-2]:
        s = ((q @ k.mT) * scale).masked_fill(~near, -math.inf)
        a = w * torch.exp(s - s.amax(-1, True)) + l * (f @ g.mT).masked_fill(~far, 0.0)
    v1 = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o = a @ v1
    last = max(q.shape[-2] - 1, 0) // CHUNK * CHUNK
    final = g[..., :last, :].mT @ v1[..., :last, :]
    if state is not None:
        o, final = o + l * (f @ state), final + state
    return o[..., :-1] / o[..., -1:], final


def recurrence(q, k, v, q_map, k_map, window_factor, linear_factor, state, window, sliding, scale):
    """Step by step: a state of the steps in front of the window, the rest by a softmax."""
    scale = scale or q.shape[-1] ** -0.5
    f, g = features(q, q_map), features(k, k_map)
    v1 = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if state is None:
        state = torch.zeros(*q.shape[:2], g.shape[-1], v1.shape[-1], dtype=q.dtype, device=q.device)
    taken, out, kept = 0, [v[..., :0, :]], state
    for i in range(q.shape[-2]):
        first = i - window + 1 if sliding else (i // window - 1) * window
        while taken < first:
            state = state + g[..., taken, :, None] * v1[..., taken, None, :]
            taken += 1
        first = max(first, 0)
        s = (k[..., first:i + 1, :] @ q[..., i, :, None])[..., 0] * scale
        e = window_factor[:, None] * torch.exp(s - s.amax(-1, True))
        o = (e[..., None, :] @ v1[..., first:i + 1, :])[..., 0, :]
        o = o + linear_factor[:, None] * (f[..., i, None, :] @ state)[..., 0, :]
        out.append((o[..., :-1] / o[..., -1:])[..., None, :])
    last = max(q.shape[-2] - 1, 0) // CHUNK * CHUNK
    return torch.cat(out, -2), kept + g[..., :last, :].mT @ v1[..., :last, :]


def by_chunks(q, k, v, q_map, k_map, window_factor, linear_factor, state, window, sliding, scale, half):
    """By products of 16-bit numbers: what products read is rounded, sums are float32."""
    scale = scale or q.shape[-1] ** -0.5
    rounded = lambda t: t.to(half).float()  # noqa: E731
    w, l = window_factor[:, None, None], linear_factor[:, None, None]
    f, g = features(q, q_map, half), features(k, k_map, half)
    v1 = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    near, far = visible(2 * CHUNK, window, sliding, q.device)
    if state is None:
        state = torch.zeros(*q.shape[:2], g.shape[-1], v1.shape[-1], device=q.device)
    out = [v[..., :0, :]]
    for i in range(0, q.shape[-2], CHUNK):
        lo, n = max(i - CHUNK, 0), min(CHUNK, q.shape[-2] - i)
        skip = CHUNK - (i - lo)
        at = (slice(CHUNK, CHUNK + n), slice(skip, CHUNK + n))
        ks, gs, vs = k[..., lo:i + n, :], g[..., lo:i + n, :], v1[..., lo:i + n, :]
        s = ((q[..., i:i + n, :] @ ks.mT) * scale).masked_fill(~near[at], -math.inf)
        a = w * torch.exp(s - s.amax(-1, True)) + l * (f[..., i:i + n, :] @ gs.mT).masked_fill(~far[at], 0.0)
        o = rounded(a) @ vs + l * (f[..., i:i + n, :] @ rounded(state))
        out.append(o[..., :-1] / o[..., -1:])
        if i:
            state = state + g[..., lo:i, :].mT @ v1[..., lo:i, :]
    return torch.cat(out, -2), state


def by_sequences(form, inputs, numbers, dtype, **more):
    """In [B, T, H, D], packed rows one by one."""
    x = {name: t if t is None else t.to(dtype) for name, t in inputs.items() if name != "cu_seqlens"}
    starts, state = inputs["cu_seqlens"], x["initial_state"]
    tensors = [x[name].transpose(1, 2) for name in ("q", "k", "v")]
    others = [x[name] for name in GIVEN[3:7]]
    if starts is None:
        out, final = form(*tensors, *others, state, **numbers, **more)
        return out.transpose(1, 2), final
    outs, finals, ends = [], [], starts.tolist()
    for i, (a, b) in enumerate(zip(ends, ends[1:])):
        out, final = form(*(t[:, :, a:b] for t in tensors), *others, None if state is None else state[i:i + 1],
                          **numbers, **more)
        outs.append(out)
        finals.append(final)
    return torch.cat(outs, 2).transpose(1, 2), torch.cat(finals)


def exact(inputs, numbers, form=quadratic):
    return by_sequences(form, inputs, numbers, torch.float64)


def plain(inputs, numbers):
    half = inputs["q"].dtype
    out, final = by_sequences(by_chunks, inputs, numbers, torch.float32, half=half)
    return out.to(half), final
