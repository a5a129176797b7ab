"""Rotary embedding of q and k, in both directions, and behind a norm into a cache, against PyTorch (GPU).

`into a cache`: qk_norm_rotary with pages of 64 keys, against PyTorch's operations and against F.rms_norm, mg.rotary and
mg.append_kv in turn. `normed backward`: that of qk_norm_rotary with both weights' gradients, against PyTorch and
against those of mg.rms_norm and mg.rotary in turn. Bound by memory: q and k (and v) are read and written once. `of
copy` compares that rate with one of a copy of as many bytes, timed in turn with the others. Layouts: `bthd` in the
order of dimensions, `bhtd` as transformers has them. Liger's and FLA's Triton kernels are peers where they can be
imported; Liger's turns q, k and gradients where they are, so it comes last.
"""
import functools

import torch
import torch.nn.functional as F

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, peer, run_family

SHAPES = [(8, 4096, 32, 32, 128), (8, 4096, 32, 8, 128), (8, 4096, 64, 8, 64), (1, 32768, 32, 8, 128),
          (64, 1, 32, 8, 128)]       # batch, steps, heads of q and of k, head dim

PAST, PAGE = 4096, 64                # rows of a cache, and of a page


def by_formula(x, cos, sin):
    """With cosines and sines in x's type, as transformers has it."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def by_torch(cos, sin, q, k):
    return by_formula(q, cos, sin), by_formula(k, cos, sin)


def by_liger(call, cos, sin, q, k):
    """Whose layout is transformers'."""
    return tuple(x.transpose(1, 2) for x in call(q.transpose(1, 2), k.transpose(1, 2), cos, sin))


def by_fla(call, cos, sin, q, k):
    return call(q, cos, sin), call(k, cos, sin)


def build(b, t, h, hk, d, layout, direction, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)

    def make(heads):
        if layout == "bhtd":
            return torch.randn(b, heads, t, d, device=device, dtype=dtype).transpose(1, 2)
        return torch.randn(b, t, heads, d, device=device, dtype=dtype)
    q, k, dq, dk = make(h), make(hk), make(h), make(hk)
    angles = torch.arange(t, device=device)[:, None] * 10000 ** -(torch.arange(d // 2, device=device) / (d // 2))
    cos, sin = angles.cos(), angles.sin()
    wide = [torch.cat((x, x), -1)[:, None].to(dtype) for x in (cos, sin)]
    calls = {"margay": lambda q, k: margay.rotary(q, k, cos, sin), "torch": functools.partial(by_torch, *wide)}
    if device == "cuda":
        torch.compiler.reset()                               # it keeps code for few shapes
        calls["compiled"] = functools.partial(torch.compile(by_torch, dynamic=False), *wide)
        if layout == "bthd" and (call := peer("fla.modules.rotary", "rotary_embedding")):
            calls["fla"] = functools.partial(by_fla, call, *(x.to(dtype) for x in (cos, sin)))
        if layout == "bthd" and (call := peer("liger_kernel.transformers.functional", "liger_rope")):
            calls["liger"] = functools.partial(by_liger, call, *(x[None, :, 0] for x in wide))
    of_direction = {"forward": functools.partial, "backward": lambda call, *qk: gradient(call, qk, (dq, dk))}[direction]
    runners = {name: of_direction(call, *((q.clone(), k.clone()) if name == "liger" else (q, k)))
               for name, call in calls.items()}
    if direction == "forward":
        runners["margay"] = functools.partial(margay.rotary, q, k, cos, sin)
    size = q.nbytes + k.nbytes
    x, y = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Problem(runners, 2e-2, 0, 2 * size, beside={"copy": (lambda: y.copy_(x), 2 * size)})


def build_cached(b, t, h, hk, d, device="cuda", dtype=torch.bfloat16):
    """The caches are full behind the call."""
    torch.manual_seed(0)
    room = max(t, PAST)
    q, k, v = torch.randn(b, t, h + 2 * hk, d, device=device, dtype=dtype).split((h, hk, hk), 2)
    weight = torch.randn(d, device=device, dtype=dtype)
    angles = torch.randn(room, d // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    lengths = torch.full((b,), room - t, device=device, dtype=torch.int32)
    pages = b * room // PAGE
    table = torch.randperm(pages, device=device, dtype=torch.int32).view(b, -1)
    new = lambda: [torch.zeros(pages, PAGE, hk, d, device=device, dtype=dtype) for _ in "kv"]  # noqa: E731
    at = lengths[:, None].long() + torch.arange(t, device=device)
    places = (table.gather(1, at // PAGE).long() * PAGE + at % PAGE).flatten()
    wide = [torch.cat((x, x), -1).to(dtype)[at][:, :, None] for x in (cos, sin)]
    rows = at.int()

    def normed(x):
        return weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def by_torch(k_cache, v_cache):
        q_out, k_out = (by_formula(normed(x), *wide) for x in (q, k))
        for cache, x in ((k_cache, k_out), (v_cache, v)):
            cache.view(-1, hk, d)[places] = x.flatten(0, 1)
        return q_out

    def by_parts(k_cache, v_cache):
        q_out, k_out = margay.rotary(*(F.rms_norm(x, (d,), weight, 1e-6) for x in (q, k)), cos, sin, positions=rows)
        margay.append_kv(k_cache, v_cache, k_out, v, cache_seqlens=lengths, page_table=table)
        return q_out

    def ours(k_cache, v_cache):
        return margay.qk_norm_rotary(q, k, weight, weight, cos, sin, v=v, k_cache=k_cache, v_cache=v_cache,
                                     cache_seqlens=lengths, page_table=table)
    calls = {"margay": ours, "torch": by_torch, "parts": by_parts}
    if device == "cuda":
        torch.compiler.reset()
        calls["compiled"] = torch.compile(by_torch, dynamic=False)
    of = {name: new() for name in calls}
    runners = {name: lambda call=call, caches=of[name]: (call(*caches), *caches) for name, call in calls.items()}
    size = q.nbytes + k.nbytes + v.nbytes
    x, y = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Problem(runners, 2e-2, 0, 2 * size, beside={"copy": (lambda: y.copy_(x), 2 * size)})


def build_normed(b, t, h, hk, d, device="cuda", dtype=torch.bfloat16):
    """Gradients of q, k and both weights: three streams."""
    torch.manual_seed(0)
    q, dq = (torch.randn(b, t, h, d, device=device, dtype=dtype) for _ in range(2))
    k, dk = (torch.randn(b, t, hk, d, device=device, dtype=dtype) for _ in range(2))
    weights = [torch.rand(d, device=device).to(dtype) + 0.5 for _ in "qk"]
    angles = torch.randn(t, d // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    wide = [torch.cat((x, x), -1)[:, None].to(dtype) for x in (cos, sin)]

    def by_torch(q, k, q_weight, k_weight):
        return tuple(by_formula(F.rms_norm(x, (d,), w, 1e-6), *wide) for x, w in ((q, q_weight), (k, k_weight)))

    def by_parts(q, k, q_weight, k_weight):
        return margay.rotary(margay.rms_norm(q, q_weight), margay.rms_norm(k, k_weight), cos, sin)
    calls = {"margay": lambda *x: margay.qk_norm_rotary(*x, cos, sin), "torch": by_torch, "parts": by_parts}
    if device == "cuda":
        torch.compiler.reset()
        calls["compiled"] = torch.compile(by_torch, dynamic=False)
    runners = {name: gradient(call, (q, k, *weights), (dq, dk)) for name, call in calls.items()}
    size = q.nbytes + k.nbytes
    x, y = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Problem(runners, 3e-2, 0, 3 * size, beside={"copy": (lambda: y.copy_(x), 2 * size)})


def cases(shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for b, t, h, hk, d in shapes:
        fields = {"group": "into a cache", "direction": "into a cache", "b": b, "t": t, "h": h, "hk": hk, "d": d,
                  "dtype": str(dtype).removeprefix("torch.")}
        yield Case(f"into a cache B={b} T={t} H={h} HK={hk} D={d}", fields,
                   functools.partial(build_cached, b, t, h, hk, d, device, dtype))
    for b, t, h, hk, d in shapes:
        fields = {"group": "normed backward", "direction": "normed backward", "b": b, "t": t, "h": h, "hk": hk, "d": d,
                  "dtype": str(dtype).removeprefix("torch.")}
        yield Case(f"normed backward B={b} T={t} H={h} HK={hk} D={d}", fields,
                   functools.partial(build_normed, b, t, h, hk, d, device, dtype))
    for direction in ("forward", "backward"):
        for b, t, h, hk, d in shapes:
            for layout in ("bthd", "bhtd") if t > 1 and direction == "forward" else ("bthd",):
                fields = {"group": direction, "direction": direction, "b": b, "t": t, "h": h, "hk": hk, "d": d,
                          "layout": layout, "dtype": str(dtype).removeprefix("torch.")}
                yield Case(f"{direction} B={b} T={t} H={h} HK={hk} D={d} {layout}", fields,
                           functools.partial(build, b, t, h, hk, d, layout, direction, device, dtype))


def run(options, arguments):
    return run_family("rotary", cases(), GpuTimer(), options)
