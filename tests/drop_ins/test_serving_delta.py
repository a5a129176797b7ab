"""FlashInfer's and FlashKDA's signatures of the delta rules."""

import pytest
import torch

import margay as mg
from cases import DEVICES
from delta_forms import gates, hard, normalised, recurrence, strength

STARTS = 0, 5, 5, 70


@pytest.fixture(autouse=True)
def small_problems(one_thread):
    pass


def problem(device, heads=2, values=4, channels=False, steps=70, b=1, d=32, dv=32):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    *inputs, state, _, _ = hard("usual", 3, b, steps, heads, values, d, dv, channels=channels, dtype=dtype, rows=3,
                                device=device)
    return *inputs, state


def close(found, exact, limit=1e-5):
    limit = limit if found.dtype == torch.float32 and found.device.type == "cpu" else 0.02
    assert found.shape == exact.shape and (found.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", ((2, 2, 4), (2, 2, 2), (4, 2, 2)), ids=("grouped v", "equal", "grouped q"))
@pytest.mark.parametrize("norm", (False, True))
def test_flashinfer(device, heads, norm):
    of_q, of_k, of_v = heads
    most = max(heads)
    q = problem(device, of_q, of_q)[0]
    _, k, v, g, beta, _ = problem(device, of_k, of_v)
    *_, g, beta, state = problem(device, of_q, most)
    exact, last = recurrence(*(normalised(t) if norm else t for t in (q, k.repeat_interleave(of_q // of_k, 2))),
                             v.repeat_interleave(most // of_v, 2), g, beta, None, state, STARTS)
    starts = torch.tensor(STARTS, device=device)
    given = dict(g=g[0].exp(), beta=beta[0].float(), cu_seqlens=starts, use_qk_l2norm_in_kernel=norm,
                 initial_state=state.mT.contiguous())
    out, found = mg.flashinfer.chunk_gated_delta_rule(q[0], k[0], v[0], **given, output_final_state=True)
    close(out, exact[0])
    close(found, last.mT)
    again = torch.empty_like(out)
    assert mg.flashinfer.chunk_gated_delta_rule(q[0], k[0], v[0], **given, output=again) is again
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("device", DEVICES)
def test_flashinfers_pool(device, dtype):
    q, k, v, g, beta, state = problem(device)
    pool = torch.full((6, 4, 32, 32), 7.0, device=device, dtype=dtype)
    at = torch.tensor([4, 0, 3], device=device)
    pool[at] = state.mT.to(dtype)
    exact, last = recurrence(q, k, v, g, beta, None, pool[at].mT, STARTS)
    out, found = mg.flashinfer.chunk_gated_delta_rule(
        q[0], k[0], v[0], g[0].exp(), beta[0], initial_state=pool, output_state=pool, output_final_state=True,
        cu_seqlens=torch.tensor(STARTS, device=device, dtype=torch.int32), state_indices=at.int())
    close(out, exact[0])
    assert found is pool and (pool[[1, 2, 5]] == 7).all()
    close(pool[at].float() if dtype == torch.float32 else pool[at], last.mT)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("device", DEVICES)
def test_flashinfers_pool_has_no_place_for_what_fills_up_a_batch(device, dtype):
    """A negative index is not the pool's last place. Nothing waits for the GPU to find it."""
    q, k, v, g, beta, state = problem(device)
    starts = torch.tensor(STARTS, device=device, dtype=torch.int32)
    for places in ([4, -1, 0], [-1, 5, -2**31], [-1, -1, -1]):
        at = torch.tensor(places, device=device, dtype=torch.int32)
        there = at >= 0
        pool = torch.full((6, 4, 32, 32), float("nan"), device=device, dtype=dtype)
        pool[at[there].long()] = state.mT.to(dtype)[there]
        before = pool.clone()
        begin = torch.where(there[:, None, None, None], state.mT.to(dtype), 0.0).mT
        exact, last = recurrence(q, k, v, g, beta, None, begin, STARTS)
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("error")
        try:
            out, found = mg.flashinfer.chunk_gated_delta_rule(
                q[0], k[0], v[0], g[0].exp(), beta[0], initial_state=pool, output_state=pool, output_final_state=True,
                cu_seqlens=starts, state_indices=at)
        finally:
            if device != "cpu":
                torch.cuda.set_sync_debug_mode("default")
        close(out, exact[0])
        assert found is pool
        others = [i for i in range(6) if i not in places]
        assert pool[others].isnan().all() and torch.equal(pool.isnan(), before.isnan())
        for i, place in enumerate(places):
            if place >= 0:
                close(pool[place].float() if dtype == torch.float32 else pool[place], last[i].mT)


def test_flashinfers_defaults():
    q, k, v, *_ = problem("cpu")
    zeros, ones = torch.zeros(1, 70, 4), torch.ones(1, 70, 4)
    exact, _ = recurrence(q, k, v, zeros, ones, None, None, STARTS)
    close(mg.flashinfer.chunk_gated_delta_rule(q[0], k[0], v[0], cu_seqlens=torch.tensor(STARTS), scale=0.0), exact[0])
    factors = torch.rand(70, 4).masked_fill(torch.rand(70, 4) < 0.2, 0.0)
    exact, _ = recurrence(q, k, v, factors.log()[None], ones, None, None, STARTS)
    close(mg.flashinfer.chunk_gated_delta_rule(q[0], k[0], v[0], factors, cu_seqlens=torch.tensor(STARTS)), exact[0],
          1e-4)                                            # a sum of their logarithms is large


def test_flashinfer_refused():
    q, k, v, *_ = (t[0] for t in problem("cpu"))
    starts, call = torch.tensor(STARTS), mg.flashinfer.chunk_gated_delta_rule
    for error, words, run in (
            (NotImplementedError, "checkpoint_every_n_tokens is 64, expected 0 and no checkpoints",
             lambda: call(q, k, v, cu_seqlens=starts, checkpoint_every_n_tokens=64)),
            (ValueError, "cu_seqlens is None, expected the starts of the sequences", lambda: call(q, k, v)),
            (ValueError, "q, k and v have 4, 3 and 3 dimensions, expected 3 [T, heads, columns]",
             lambda: call(q[None], k, v, cu_seqlens=starts)),
            (ValueError, "state_indices are up to 3, expected at most 2 (places of initial_state)",
             lambda: call(q, k, v, cu_seqlens=starts, initial_state=torch.zeros(3, 4, 32, 32),
                          state_indices=torch.arange(3) + 1)),
            (TypeError, "initial_state has dtype float64, expected float32, bfloat16 or float16",
             lambda: call(q, k, v, cu_seqlens=starts, initial_state=torch.zeros(3, 4, 32, 32).double())),
            (ValueError, "output_state is None, expected a pool of states where state_indices and output_final_state "
             "are given", lambda: call(q, k, v, cu_seqlens=starts, state_indices=torch.arange(3),
                                       output_final_state=True))):
        with pytest.raises(error) as raised:
            run()
        assert str(raised.value) == "chunk_gated_delta_rule: " + words


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("state_type", (torch.float32, torch.bfloat16, None))
def test_flash_kda(device, packed, state_type):
    q, k, v, _, _, state = problem(device, 2, 2, True, b=1 if packed else 3)
    r = torch.Generator().manual_seed(5)
    make = lambda *size: torch.randn(size, generator=r).to(device)  # noqa: E731
    g, beta, rates, biases = make(*q.shape).to(q.dtype), make(*q.shape[:3]).to(q.dtype), make(2), make(2, 32)
    given = None if state_type is None else state.mT.to(state_type).contiguous()
    exact, last = recurrence(normalised(q), normalised(k), v, gates(g, rates, biases, -5.0), strength(beta), 0.3,
                             None if given is None else given.mT, STARTS if packed else None)
    out, end = torch.full_like(v, torch.nan), None if given is None else torch.full_like(given, torch.nan)
    starts = torch.tensor(STARTS, device=device) if packed else None
    assert mg.flash_kda.fwd(3 * q, k / 2, v, g, beta, 0.3, out, rates, biases.flatten(), -5.0, initial_state=given,
                            final_state=end, cu_seqlens=starts) is None
    close(out, exact)
    if end is not None:
        close(end, last.mT)


def test_flash_kda_without_decay():
    q, k, v, g, beta, _ = problem("cpu", 2, 2, True)
    out = torch.empty_like(v)
    mg.flash_kda.fwd(q, k, v, g, beta, 0.3, out, torch.zeros(2), torch.zeros(2, 32), 0.0)
    close(out, recurrence(normalised(q), normalised(k), v, None, strength(beta), 0.3)[0])
