"""gated_delta_rule_step and kda_step against the recurrence in float64: random problems, all arguments, several steps
at once, states in a pool in either order, states kept behind tokens, memory in any order."""

import random

import pytest
import torch
from torch.nn.functional import softplus

import margay as mg
from cases import DEVICES
from step_cases import Draw, compare, host

DIMS = (1, 3, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 256)


def log_decay(g, a_log, dt_bias, lower_bound, kda):
    """In float64; [.., heads] or, of kda, [.., heads, K]."""
    g = g.double() if dt_bias is None else g.double() + dt_bias.double()
    if a_log is None and lower_bound is None:
        return g
    rate = torch.ones(()) if a_log is None else a_log.double().exp()
    rate = rate[:, None] if kda and a_log is not None else rate
    return -rate * softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)


def expected(state, q, k, v, decay, beta, at, token_at, accepted, kept, kept_at, scale, l2norm, update):
    """Of states [places, heads, K, V]: out, then (states afterwards, what rounding may have done to them) of the pool
    and of kept. decay: log decays [B, T, heads, K or 1]. All in float64."""
    (batch, steps, heads, _), group = v.shape, v.shape[2] // q.shape[2]
    q, k, v = q.double(), k.double(), v.double()
    if l2norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q, k = (t.repeat_interleave(group, 2) for t in (q, k))
    pool, pool_size = state.double().clone(), torch.zeros_like(state.double())
    behind = None if kept is None else kept.double().clone()
    behind_size = None if kept is None else torch.zeros_like(behind)
    out, size = torch.zeros_like(v), torch.zeros_like(v)
    for i in range(batch):
        if at is not None:
            slot = int(at[i])
        elif token_at is not None:
            token = 0 if accepted is None else int(accepted[i]) - 1
            slot = int(token_at[i, token]) if 0 <= token < token_at.shape[1] else -1
        else:
            slot = i
        if not 0 <= slot < len(pool):
            continue
        now, large = state.double()[slot], torch.zeros_like(pool[slot])
        for t in range(steps):
            kt, qt, b = k[i, t][..., None], q[i, t][..., None], beta[i, t].double()[:, None]
            old = decay[i, t].exp()[..., None] * now
            u = b * (v[i, t] - (kt * old).sum(1))
            large = decay[i, t].exp()[..., None] * large + old.abs() + kt.abs() * (
                b.abs() * (v[i, t].abs() + (kt * old).abs().sum(1)))[:, None]
            now = old + kt * u[:, None]
            out[i, t] = scale * (qt * now).sum(1)
            size[i, t] = scale * (qt.abs() * large).sum(1)
            place = -1 if token_at is None else int(token_at[i, t])
            if 0 <= place < len(pool):
                pool[place], pool_size[place] = now, large
            place = -1 if kept is None else i if kept_at is None else int(kept_at[i])
            if kept is not None and 0 <= place < len(kept):
                behind[place, t], behind_size[place, t] = now, large
        if update and token_at is None:
            pool[slot], pool_size[slot] = now, large
    return out, size, (pool, pool_size), (behind, behind_size)


def ordered(p, v_first, transposed, *shape, dtype):
    """New states of logical shape [.., K, V]: the tensor that is given, in its order and memory."""
    *lead, dim, dim_v = shape
    if v_first:
        dim, dim_v = dim_v, dim
    return p.new(*lead, dim_v, dim, dtype=dtype).mT if transposed else p.new(*lead, dim, dim_v, dtype=dtype)


def problem(seed, device, kda):
    """(label, state, positional, named, exact, kept)"""
    p = Draw(seed, device)
    r = p.r
    p.steps, p.several = (1, False) if p.yes(0.4) else (r.choice((1, 2, 3, 4, 5, 6, 7, 8)), True)
    lead, heads_k = (p.batch, p.steps), r.choice((1, 2, 3))
    heads, dim, dim_v = heads_k * r.choice((1, 1, 2, 4)), r.choice(DIMS), r.choice(DIMS)
    l2norm = p.yes()
    q, k, v = p.new(*lead, heads_k, dim), p.new(*lead, heads_k, dim), p.new(*lead, heads, dim_v)
    if not l2norm:
        k.mul_(dim ** -0.5)
    kind, of_key = lambda: r.choice((torch.float32, p.dtype)), (dim,) * kda  # noqa: E731
    g, gate, a_log, dt_bias, lower = p.new(*lead, heads, *of_key, dtype=kind()), p.yes(), None, None, None
    if gate:
        a_log, dt_bias = p.new(heads, dtype=kind()), p.new(heads, *of_key, dtype=kind()) if p.yes() else None
        if kda and p.yes():
            lower, a_log = -5.0, a_log if p.yes() else None
    elif not kda and p.yes(0.3):
        g = None
    else:
        g = g.abs().neg()
    beta, sigmoid = p.new(*lead, heads, dtype=kind()), p.yes()
    if not sigmoid:
        beta = beta.sigmoid()
    double, scale, update = sigmoid and p.yes(), r.choice((None, 0.3)), p.yes(0.8)
    v_first, transposed = p.yes(), p.yes()
    (places, at), token_at, accepted, kept, kept_at = p.slots(), None, None, None, None
    keep = r.choice(("", "", "tokens", "accepted", "both", "states"))
    if keep in ("tokens", "accepted", "both"):
        wide = p.steps + r.choice((0, 2))
        places = p.batch * wide + p.batch
        token_at = torch.randperm(places, generator=p.g)[:p.batch * (wide + 1)].view(p.batch, -1)
        at = token_at[:, wide].clone() if keep == "both" else None
        token_at = torch.where(torch.rand(p.batch, wide, generator=p.g) < 0.8, token_at[:, :wide], -1).to(device)
        at = at if at is None else at.to(device)
        if keep == "accepted":
            accepted = torch.randint(0, wide + 2, (p.batch,), generator=p.g).to(device)
    state = ordered(p, v_first, transposed, places, heads, dim, dim_v, dtype=p.state_dtype)
    if keep == "states":
        wide, rows = p.steps + r.choice((0, 2)), p.batch + r.choice((0, 2))
        kept = ordered(p, v_first, transposed, rows, wide, heads, dim, dim_v, dtype=p.state_dtype)
        if p.yes():
            kept_at = torch.where(torch.rand(p.batch, generator=p.g) < 0.8,
                                  torch.randperm(rows, generator=p.g)[:p.batch], -1).to(device)
    label = (f"{p.label} {heads_k}x{heads}x{dim}x{dim_v} {'kda' if kda else 'gdn'} gate={gate} lower={lower} at={at} "
             f"keep={keep} v_first={v_first} transposed={transposed} l2norm={l2norm}")
    c = lambda t: None if t is None else t.cpu()  # noqa: E731
    decay = torch.zeros(*lead, heads).double() if g is None else log_decay(c(g), c(a_log), c(dt_bias), lower, kda)
    weight = c(beta).double()
    if sigmoid:
        weight = weight.sigmoid() * (1 + double)
    turn = lambda t: t.mT if v_first and t is not None else t  # noqa: E731
    exact = expected(turn(c(state)), c(q), c(k), c(v), decay if kda else decay[..., None], weight, *host(
        at, token_at, accepted), turn(c(kept)), c(kept_at), scale or dim ** -0.5, l2norm, update)
    one = lambda t: t if p.several or t is None else t[:, 0]  # noqa: E731
    named = dict(A_log=a_log, dt_bias=dt_bias, use_gate=gate, scale=scale, use_qk_l2norm=l2norm,
                 use_beta_sigmoid=sigmoid, allow_neg_eigval=double, state_v_first=v_first, state_indices=at,
                 token_indices=token_at, num_accepted_tokens=accepted, intermediate_states=kept,
                 intermediate_indices=kept_at, update_state=update)
    if kda:
        named["lower_bound"] = lower
    return label, p, state, (one(q), one(k), one(v), one(g), one(beta)), named, exact, kept, turn


@pytest.mark.parametrize("kda", (False, True), ids=("gdn", "kda"))
@pytest.mark.parametrize("device", DEVICES)
def test_random_problems(device, kda):
    first = random.randrange(1 << 30)
    for seed in range(first, first + (500 if device == "cuda" else 200)):
        label, p, state, tensors, named, (out, size, pool, behind), kept, turn = problem(seed, device, kda)
        before = state.clone()
        found = (mg.kda_step if kda else mg.gated_delta_rule_step)(state, *tensors, **named)
        compare(label, found if p.several else found[:, None], turn(state), out, size, *pool, p.dtype)
        if kept is not None:
            compare(f"{label} kept", found if p.several else found[:, None], turn(kept), out, size, *behind, p.dtype)
        if not named["update_state"] and named["token_indices"] is None:
            assert torch.equal(state, before), label


def inputs(op=mg.gated_delta_rule_step, batch=2, steps=0, heads_k=1, heads=2, dim=8, dim_v=16, dtype=torch.bfloat16,
           device="cpu"):
    g = torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    lead, keys = (batch,) + (steps,) * bool(steps), (dim,) * (op is mg.kda_step)
    tensors = (new(batch, heads, dim, dim_v), new(*lead, heads_k, dim).to(dtype),
               (new(*lead, heads_k, dim) / dim ** 0.5).to(dtype), new(*lead, heads, dim_v).to(dtype),
               -new(*lead, heads, *keys).abs(), torch.rand(*lead, heads, generator=g))
    return [t.to(device) for t in tensors]


OPS = pytest.mark.parametrize("op", (mg.gated_delta_rule_step, mg.kda_step), ids=("gdn", "kda"))


@OPS
@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device, op):
    state, *rest = inputs(op, device=device, steps=2)
    other, at = state.clone(), torch.tensor([1, -1], device=device)
    kept = torch.zeros(2, 3, *state.shape[1:], device=device)
    behind = kept.clone()
    plain = op(state, *rest, state_indices=at, intermediate_states=kept)
    compiled = torch.compile(
        lambda s, kept, *rest: op(s, *rest, state_indices=at, intermediate_states=kept) + 1, backend="aot_eager",
        fullgraph=True)
    assert torch.equal(compiled(other, behind, *rest), plain + 1) and torch.equal(state, other)
    assert torch.equal(kept, behind) and not kept[1].any() and not kept[:, 2].any() and kept[0, :2].all()


@OPS
def test_what_has_no_kernel(op):
    """Mixtures of types give what torch's operations give, and these what the kernels give."""
    for named in (dict(), dict(steps=3)):
        state, *rest = inputs(op, **named)
        several = "steps" in named
        other = dict(state_indices=torch.tensor([1, 0]), use_qk_l2norm=True, use_beta_sigmoid=True)
        kinds = ((torch.float64, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64, torch.float32))
        for kind, inner in kinds:
            mine, near = state.to(kind).clone(), state.clone()
            tensors = [t.to(inner) if t.dtype is torch.bfloat16 else t for t in rest]
            kept = [torch.zeros(2, 3, *state.shape[1:], dtype=t) for t in (kind, torch.float32)]
            given = [dict(intermediate_states=t) if several else {} for t in kept]
            close = dict(atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(op(mine, *tensors, **other, **given[0]),
                                       op(near, *tensors, **other, **given[1]), **close)
            torch.testing.assert_close(mine.float(), near, **close)
            torch.testing.assert_close(kept[0].float(), kept[1], **close)
    state, *rest = inputs(op, steps=3)
    places, accepted = torch.tensor([[2, 0, 1], [3, 5, -1]]), torch.tensor([2, 1])
    pools = [torch.cat((state,) * 3).to(kind) for kind in (torch.float32, torch.float64)]
    found = [op(pool, *rest, token_indices=places, num_accepted_tokens=accepted) for pool in pools]
    torch.testing.assert_close(*found, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(pools[0], pools[1].float(), atol=2e-2, rtol=2e-2)


@OPS
def test_one_token_after_another(op):
    """Several steps are as many calls of one, and any number of accepted ones can go on."""
    state, *rest = inputs(op, steps=4, dim=40, dim_v=72)
    kept = torch.full((2, 4, *state.shape[1:]), torch.nan)
    out = op(state.clone(), *rest, intermediate_states=kept, update_state=False)
    now = state.clone()
    for t in range(4):
        assert torch.equal(op(now, *(x[:, t] for x in rest)), out[:, t]) and torch.equal(now, kept[:, t])
    pool = torch.zeros(8, *state.shape[1:])
    places = torch.tensor([[3, 1, 5, 7], [0, 6, 2, 4]])
    pool[places[:, 0]] = state
    op(pool, *rest, token_indices=places)
    assert torch.equal(pool[places], kept)
    second = op(pool, *(x[:, :2] for x in rest), token_indices=places, num_accepted_tokens=torch.tensor([3, 2]))
    now = torch.stack((kept[0, 2], kept[1, 1]))
    assert torch.equal(second, op(now, *(x[:, :2] for x in rest))) and torch.equal(pool[places[:, 1]], now)


@OPS
@pytest.mark.parametrize("device", DEVICES)
def test_hard_values(op, device):
    """Gates that forget all or nothing, equal keys that beta 2 reflects, large values."""
    state, q, k, v, g, beta = inputs(op, steps=6, dim=64, dim_v=32, heads_k=2, device=device)
    k[:] = torch.nn.functional.normalize(k[:1, :1].float(), dim=-1).to(k.dtype)
    for gate, weight, size in ((-torch.inf, 1.0, 1.0), (0.0, 2.0, 1.0), (-1e-3, 1.0, 1e30), (-300.0, 0.0, 1e30)):
        now, values = state * size, (v.float() * size).to(v.dtype)
        exact = expected(now.cpu(), q.cpu(), k.cpu(), values.cpu(),
                         torch.full_like(g, gate).cpu().double().view(2, 6, 2, -1),
                         torch.full_like(beta, weight).cpu(), None, None, None, None, None, 64 ** -0.5, False, True)
        out = op(now, q, k, values, torch.full_like(g, gate), torch.full_like(beta, weight))
        out, size_out = out / size, exact[1] / size
        (after, large), exact_out = exact[2], exact[0] / size
        compare(f"{gate} {weight} {size}", out, now / size, exact_out, size_out, after / size, large / size, v.dtype)


@OPS
def test_of_no_memory(op):
    tensors = [t.to("meta") for t in inputs(op)]
    assert op(*tensors).shape == op(*inputs(op)).shape
    assert op(*inputs(op, batch=0)).shape == (0, 2, 16)


def test_refused():
    state, q, k, v, g, beta = inputs(steps=2)
    kept, at = torch.zeros(2, 2, *state.shape[1:]), torch.zeros(2, 2).int()
    for given, error, words in (
            (dict(q=q[0, 0]), ValueError, "q has shape [1, 8], expected 3 dimensions"),
            (dict(k=k[:1]), ValueError, "k has shape [1, 2, 1, 8], expected [2, 2, 1, 8]"),
            (dict(q=torch.cat((q,) * 3, 2)), ValueError,
             "v has 2 heads, expected a multiple of the 3 heads of q and k"),
            (dict(state=state[:1]), ValueError, "state has shape [1, 2, 8, 16], expected [2, 2, 8, 16]"),
            (dict(state=state[:1].expand(2, 2, 8, 16)), BufferError, "its elements may share memory"),
            (dict(beta=beta[:, :1]), ValueError, "beta has shape [2, 1, 2], expected [2, 2, 2]"),
            (dict(dt_bias=beta[0, 0]), ValueError, "dt_bias is given, expected None where use_gate is False"),
            (dict(use_gate=True), ValueError, "A_log is None, expected a tensor where use_gate is True"),
            (dict(allow_neg_eigval=True), ValueError, "allow_neg_eigval is True"),
            (dict(state_indices=torch.ones(2)), ValueError, "expected 2 integers"),
            (dict(token_indices=at[:, :1]), ValueError, "expected integers [2, 2 or more]"),
            (dict(num_accepted_tokens=at[0]), ValueError, "expected None without token_indices"),
            (dict(token_indices=at, intermediate_states=kept), ValueError, "expected None where intermediate_states"),
            (dict(intermediate_states=kept[:, :1]), ValueError, "expected [2 or more, 2 or more, 2, 8, 16]"),
            (dict(intermediate_states=kept.bfloat16()), TypeError,
             "has dtype bfloat16, expected float32 (same as state)"),
            (dict(intermediate_states=torch.zeros(2, 2, 2, 16, 8).mT), ValueError, "another dimension contiguous"),
            (dict(intermediate_states=state[None].expand(2, 2, 2, 8, 16)), BufferError, "share"),
            (dict(scale=-1.0), ValueError, "scale is -1, expected a positive finite number"),
            (dict(q=q.float().numpy()), TypeError, "q is ndarray")):
        named = dict(state=state, q=q, k=k, v=v, g=g, beta=beta) | given
        with pytest.raises(error) as raised:
            mg.gated_delta_rule_step(**named)
        assert words in str(raised.value), raised.value
    with pytest.raises(ValueError, match="lower_bound is 1, expected a negative"):
        mg.kda_step(*inputs(mg.kda_step), use_gate=True, lower_bound=1)


@OPS
@pytest.mark.gpu
def test_captured(op):
    state, *rest = inputs(op, device="cuda", steps=2)
    other = state.clone()
    op(other, *rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(other, *rest)
    other.copy_(state)
    for _ in range(3):
        graph.replay()
        assert torch.equal(op(state, *rest), out) and torch.equal(state, other)
