"""Problems of ssd, their exact answers by the recurrence, and the same scan in PyTorch by chunks."""

import dataclasses
import math
import random

import torch

CHUNK = 64
STEPS = (0, 1, 2, 13, 63, 64, 65, 127, 128, 129, 192, 200, 300, 411)
LAYOUTS = ("dense", "fused", "gaps")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    steps: int = 130
    batch: int = 1
    heads: int = 4
    groups: int = 1
    dim: int = 64
    state: int = 64
    layout: str = "dense"        # "fused": x, b, c are columns of one tensor; "gaps": NaN between their rows
    dtype: torch.dtype = torch.bfloat16
    d: bool = True
    bias: bool = False
    softplus: bool = False
    limits: tuple = ()           # dt_min, dt_max
    initial: bool = False
    sequences: int = 0           # their number on the average, in seq_idx
    packed: tuple = ()           # cu_seqlens

    def __str__(self):
        words = [f"seed{self.seed}", f"t{self.steps}", f"b{self.batch}", f"h{self.heads}x{self.groups}", f"p{self.dim}",
                 f"n{self.state}", self.layout, str(self.dtype)[6:]]
        words += [name for name in ("d", "bias", "softplus", "initial") if getattr(self, name)]
        words += ["limits"] * bool(self.limits) + [f"seq{self.sequences}"] * bool(self.sequences)
        words += ["packed"] * bool(self.packed)
        return "-".join(words)

    @property
    def rows(self):
        return len(self.packed) - 1 if self.packed else self.batch

    def numbers(self):
        low, high = self.limits or (0.0, math.inf)
        return dict(dt_softplus=self.softplus, dt_min=low, dt_max=high)


def random_case(seed, dtypes=DTYPES):
    """Sizes that the GPU's tensor copies can address in every layout."""
    r = random.Random(seed)
    yes = lambda p: r.random() < p  # noqa: E731
    groups = r.choice((1, 1, 2, 3))
    heads = groups * r.choice((1, 1, 2, 3, 4, 4, 8))
    steps = r.choice(STEPS) if yes(0.8) else r.randrange(500)
    dim, state = 8 * r.randint(1, 8 if yes(0.6) else 16), 8 * r.randint(1, 16 if yes(0.7) else 32)
    batch = r.choice((1, 1, 2, 3))
    packed, sequences = (), 0
    kind = r.choice(("plain", "plain", "seq_idx", "packed"))
    if kind == "packed":
        batch = 1
        inner = sorted(r.choice((0, steps, r.randint(0, steps), r.randint(0, steps) // 64 * 64))
                       for _ in range(r.randint(0, 6)))
        packed = (0, *inner, steps)
    if kind == "seq_idx":
        sequences = r.choice((1, 2, 4, 20, 1000))
    limits = (), (), (0.02, 0.1), (0.0, 0.05), (0.01, math.inf)
    return Case(seed, steps, batch, heads, groups, dim, state, r.choice(LAYOUTS), r.choice(dtypes), yes(0.7), yes(0.4),
                yes(0.4), r.choice(limits), yes(0.5), sequences, packed)


AWKWARD = [Case(i, **change) for i, change in enumerate(
    [dict(steps=t, state=n, groups=g, batch=2) for t in (0, 1, 64, 65, 300, 1000) for n in (64, 128) for g in (1, 2)]
    + [dict(heads=8, state=128), dict(heads=8, groups=2, dim=40, state=96), dict(steps=70, groups=4, state=128),
       dict(steps=200, dim=16, state=24), dict(batch=0), dict(heads=0), dict(dim=8, state=8),
       dict(heads=12, groups=3, dim=8, state=120, layout="gaps"), dict(dim=128, state=128, initial=True, steps=200),
       dict(dim=72, state=200, steps=65, heads=3), dict(dim=128, state=256, sequences=3, initial=True, d=False),
       dict(state=256, steps=200, packed=(0, 0, 63, 127, 127, 192, 200), initial=True),
       dict(steps=0, packed=(0, 0, 0), initial=True), dict(steps=0, initial=True), dict(steps=0, packed=(0,)),
       dict(packed=(0, 1, 2, 66, 130), heads=8, state=128)])]
# Rows of "gaps" begin at multiples of 16 bytes whatever they hold: sizes that are multiples of nothing.
ODD = [Case(100 + i, layout="gaps", **change) for i, change in enumerate(
    [dict(dim=1, state=1), dict(dim=5, state=7, heads=3), dict(dim=63, state=65, heads=6, groups=2, batch=2),
     dict(dim=33, state=127, heads=1), dict(dim=64, state=127, heads=8, steps=129),
     dict(dim=7, state=3, heads=5, groups=5, steps=65), dict(dim=65, state=129, heads=1, steps=65),
     dict(dim=127, state=255, heads=2, steps=129, initial=True),
     dict(dim=13, state=3, heads=3, packed=(0, 65, 70, 130), initial=True)])]


def inputs_of(case, device="cpu"):
    """The op's inputs by name. Memory beside them is NaN."""
    g = torch.Generator().manual_seed(case.seed)
    randn = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    shapes = (case.heads, case.dim), (case.groups, case.state), (case.groups, case.state)
    x, b, c = (randn(case.batch, case.steps, *shape).to(case.dtype) for shape in shapes)
    dt = randn(case.batch, case.steps, case.heads) - 2.5
    if not case.softplus:
        dt = torch.nn.functional.softplus(dt)
    a = -torch.exp(torch.rand(case.heads, generator=g) * 2.77)
    a[1:2] = -200.0                                # a head that forgets at once: e^(-l) would overflow
    d = randn(case.heads) if case.d else None
    bias = 0.5 * randn(case.heads) if case.bias else None
    initial = randn(case.rows, case.heads, case.dim, case.state) if case.initial else None
    seq_idx = starts = None
    if case.sequences:                             # begins with 0 or with another one: that has not the initial state
        changes = torch.rand(case.batch, case.steps, generator=g) < case.sequences / max(case.steps, 1)
        seq_idx = changes.int().cumsum(1, dtype=torch.int32)
        if case.seed % 3 == 0:
            seq_idx = torch.where(seq_idx % 3 == 2, -1, seq_idx)
    if case.packed:
        starts = torch.tensor(case.packed, dtype=torch.int32)
    if case.layout == "fused":
        fused = torch.cat([t.flatten(2) for t in (x, b, c)], 2).to(device)
        x, b, c = (t.unflatten(2, shape) for t, shape in zip(fused.split([h * size for h, size in shapes], 2), shapes))
    if case.layout == "gaps":
        x, b, c = (widened(t, device) for t in (x, b, c))
        if seq_idx is not None:
            seq_idx = widened(seq_idx, device)
    values = dict(x=x, dt=dt, a=a, b=b, c=c, d=d, dt_bias=bias, initial_states=initial, seq_idx=seq_idx,
                  cu_seqlens=starts)
    return {name: t if t is None else t.to(device) for name, t in values.items()}


def widened(t, device):
    """A copy of t whose rows begin 16 bytes and more behind one another."""
    unit = 16 // t.element_size()
    columns = -(-t.shape[-1] // unit) * unit + 2 * unit
    wide = torch.full((*t.shape[:-1], columns), math.nan if t.is_floating_point() else -7, dtype=t.dtype, device=device)
    view = wide[..., unit:unit + t.shape[-1]]
    return view.copy_(t)


def steps_of(dt, dt_bias, dt_softplus, dt_min, dt_max):
    dt = dt if dt_bias is None else dt + dt_bias
    return (torch.nn.functional.softplus(dt) if dt_softplus else dt).clamp(dt_min, dt_max)


def pieces(seq_idx, cu_seqlens, batch, steps):
    """(batch, row of the initial state or None, row of the final state or None, first step, end) of every sequence."""
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        return [(0, i, i, first, end) for i, (first, end) in enumerate(zip(starts, starts[1:]))]
    found = []
    for i in range(batch):
        ids = [0] * steps if seq_idx is None else seq_idx[i].tolist()
        cuts = [t for t in range(1, steps) if ids[t] != ids[t - 1]]
        for first, end in zip([0, *cuts], [*cuts, steps]):
            begin = i if first == 0 and (not steps or ids[0] == 0) else None
            found.append((i, begin, i if end == steps else None, first, end))
    return found


def by_sequences(scan, x, dt, a, b, c, d=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
                 dtype=torch.float64, **numbers):
    """y and the last states, each sequence by itself: scan(x, dt, a, b, c, d, S) of tensors [heads, steps, ...] gives y
    and S."""
    batch, steps, heads, dim = x.shape
    n = b.shape[3]
    half = x.dtype
    given = x, dt, a, b, c, d, dt_bias, initial_states
    x, dt, a, b, c, d, dt_bias, initial_states = (t if t is None else t.to(dtype) for t in given)
    dt = steps_of(dt, dt_bias, **numbers)
    b, c = (t.repeat_interleave(heads // max(t.shape[2], 1), 2) for t in (b, c))
    rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
    y, states = torch.empty_like(x), x.new_zeros(rows, heads, dim, n)
    d = x.new_zeros(heads) if d is None else d
    for i, begin, last, first, end in pieces(seq_idx, cu_seqlens, batch, steps):
        state = x.new_zeros(heads, dim, n) if begin is None or initial_states is None else initial_states[begin]
        x_one, dt_one, b_one, c_one = (t[i, first:end].transpose(0, 1) for t in (x, dt, b, c))
        y_one, state = scan(x_one, dt_one, a, b_one, c_one, d, state, half)
        y[i, first:end] = y_one.transpose(0, 1)
        if last is not None:
            states[last] = state
    return y, states


def recurrence(x, dt, a, b, c, d, state, half):
    """The definition."""
    ys = [x[:, :0]]
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)[:, None, None]
        state = decay * state + (dt[:, t, None] * x[:, t])[..., None] * b[:, t, None, :]
        ys.append(((state @ c[:, t, :, None])[..., 0] + d[:, None] * x[:, t])[:, None])
    return torch.cat(ys, 1), state


def by_chunks(x, dt, a, b, c, d, state, half):
    """By products of 16-bit numbers: what products read is rounded, sums are float32."""
    rounded, ys = lambda t: t.to(half).float(), [x[:, :0]]  # noqa: E731
    for i in range(0, x.shape[1], CHUNK):
        xs, dts, bs, cs = (t[:, i:i + CHUNK] for t in (x, dt, b, c))
        l = (dts * a[:, None]).cumsum(1)
        # Beside the diagonal the exponent may be anything.
        later = torch.ones(l.shape[1], l.shape[1], dtype=torch.bool, device=l.device).triu(1)
        decay = torch.exp((l[..., :, None] - l[..., None, :]).masked_fill(later, -math.inf))
        weights = cs @ bs.mT * decay * dts[..., None, :] + torch.diag_embed(d[:, None].expand_as(l))
        ys.append(torch.exp(l)[..., None] * (cs @ rounded(state).mT) + rounded(weights) @ xs)
        end = l[..., -1:]
        state = torch.exp(end)[..., None] * state + rounded(xs * (dts * torch.exp(end - l))[..., None]).mT @ bs
    return torch.cat(ys, 1), state


def exact(inputs, numbers):
    return by_sequences(recurrence, **inputs, **numbers)


def plain(inputs, numbers):
    y, states = by_sequences(by_chunks, **inputs, **numbers, dtype=torch.float32)
    return y.to(inputs["x"].dtype), states
