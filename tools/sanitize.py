"""Small problems that together use every GPU row of one dtype; for compute-sanitizer, which is slow.

    compute-sanitizer --tool memcheck python tools/sanitize.py
    compute-sanitizer --tool synccheck python tools/sanitize.py
"""

import argparse
import itertools
import math

import torch

import margay
from margay import _C
from margay.check.device import on_gpu
from margay.check.problems import of_op, owner


def tensor(dtype, *shape):
    return torch.randn(*shape, device="cuda").to(dtype)


def attention(dtype, d, nq, nk, causal, deterministic):
    q, k, v = (tensor(dtype, 1, heads, n, d) for heads, n in ((2, nq), (1, nk), (1, nk)))
    out, dout = torch.empty_like(q), torch.randn_like(q)
    lse = torch.empty(q.shape[:3], device="cuda")
    counter = torch.empty(16, dtype=torch.uint8, device="cuda")
    _C.attention_fwd(out, lse, q, k, v, 0.0, causal, counter)
    grads, read, numbers = ([torch.empty_like(t) for t in (q, k, v)], (dout, q, k, v, out, lse, None),
                            (0.0, causal, deterministic))
    _C.attention_bwd(*grads, *read, torch.empty(_C.attention_bwd_workspace(*read, *numbers),
                                                dtype=torch.uint8, device="cuda"), *numbers)
    return out, *grads


def eight_bits(d, nk):
    q, k, v = (tensor(torch.float8_e4m3fn, 1, heads, n, d) for heads, n in ((2, 200), (1, nk), (1, nk)))
    return margay.attention(q, k, v, causal=nk < 2000, v_descale=torch.full((1, 1), 0.5, device="cuda")),


def packed(dtype, d, **options):
    """Sequences of 100, 0, 77 and 230 rows."""
    starts = torch.tensor([0, 100, 100, 177, 407], dtype=torch.int32, device="cuda")
    leaves = [tensor(dtype, 407, heads, d).requires_grad_() for heads in (2, 1, 1)]
    out = margay.attention_varlen(*leaves, starts, starts, 230, 230, causal=True, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, torch.randn_like(out))


# Ops with problems of their own here
BY_HAND = "attention_fwd", "attention_fwd_fp8", "attention_bwd", "attention_decode", "append_kv", "matmul"
ALL_FEATURES = dict(window=(90, 0), softcap=5.0, dropout_p=0.2, dropout_seed=1)


def matmul(dtype, row, m, n, k):
    layout = row["name"].split("_")[2]
    a = tensor(dtype, k, m).t() if layout[0] == "t" else tensor(dtype, m, k)
    b = tensor(dtype, n, k).t() if layout[1] == "t" else tensor(dtype, k, n)
    out = torch.empty(m, n, dtype=dtype, device="cuda")
    _C.prefer(row["name"])
    _C.matmul(out, a, b, tensor(dtype, n), 1)
    _C.prefer(None)
    return out,


def decode(dtype, d, queries, page, splits):
    """Ragged lengths, every option, pages and lengths that do not exist."""
    cache = (9, page, 2, d) if page else (4, 300, 2, d)
    k, v = tensor(dtype, *cache), tensor(dtype, *cache)
    integers = lambda *values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    lengths, table = integers(290, 0, 1000, -7), integers(*range(-1, 11)).view(4, 3) if page else None
    index = None if page else integers(3, 1, 0, 99)
    q, new = tensor(dtype, 4, queries, 6, d), [tensor(dtype, 4, 5, 2, d) for _ in range(2)]
    _C.append_kv(k, v, *new, lengths, table, index, 0)
    settings = 0.0, True, 150, -1, 20.0, -1, splits
    read = q, k, v, lengths, table, index, torch.zeros(6, device="cuda"), torch.rand(4, 6, device="cuda")
    size = _C.attention_decode_workspace(*read, *settings)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    out, lse = torch.empty_like(q), torch.empty(4, 6, queries, device="cuda")
    _C.attention_decode(out, lse, *read, workspace, *settings)
    return out,


def of_row(row, call):
    _C.prefer(row["name"])
    results = call()
    _C.prefer(None)
    return results


def problems(dtype, name):
    for d, (nq, nk), causal, deterministic in itertools.product((40, 128, 256), ((200, 333), (40, 2100), (40, 4200)),
                                                                (False, True), (False, True)):
        if (nk == 4200) <= causal and (nk == 333 or d == 128):
            yield lambda d=d, nq=nq, nk=nk, c=causal, e=deterministic: attention(dtype, d, nq, nk, c, e)
    for deterministic in (False, True):     # pairs of blocks
        yield lambda e=deterministic: attention(dtype, 128, 530, 2100, False, e)
    for d, nk in ((48, 333), (128, 333), (128, 2100), (256, 333)):
        yield lambda d=d, nk=nk: eight_bits(d, nk)
    for d in (40, 128, 200):
        yield lambda d=d: packed(dtype, d)
        yield lambda d=d: packed(dtype, d, sink=torch.randn(2, device="cuda"),
                                 alibi_slopes=torch.rand(4, 2, device="cuda"), **ALL_FEATURES)
    for row in _C.kernels():
        if row["op"] == "matmul" and row["dtype"] == name and row["has_gpu_image"]:
            m, n, k = {"64x128": (56, 200, 104), "64x128_pair": (240, 200, 104), "128x128": (240, 200, 104),
                       "128x256": (1592, 2104, 104)}[row["name"].split("_", 3)[3]]
            yield lambda row=row, m=m, n=n, k=k: matmul(dtype, row, m, n, k)
    for d, queries, page, splits in itertools.product((40, 128, 256), (1, 30), (0, 16, 64), (1, 3)):
        yield lambda d=d, n=queries, page=page, splits=splits: decode(dtype, d, n, page, splits)
    for row in _C.kernels():
        if owner(row) not in BY_HAND and row["dtype"] == name and row["has_gpu_image"]:
            for _, call in of_op(row, False):
                yield lambda row=row, call=call: of_row(row, call)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    name = parser.parse_args().dtype
    count = 0
    with on_gpu():
        for problem in problems(getattr(torch, name), name):
            results = problem()
            assert not any(t.float().abs().sum().item() == math.inf or t.isnan().any() for t in results)
            count += 1
    print(f"{count} problems computed")


if __name__ == "__main__":
    main()
