"""Attention's features, against dense attention of the same work and PyTorch's own paths for them (GPU).

Features are grouped queries, windows, packed sequences, sinks, softcap, ALiBi and dropout. FLOP count the visible pairs
of row and key: 4 D Hq each forward, 2.5 times that backward. Beside each case, in the same rounds, the dense one of the
same work is timed, with as many rows, and as many visible keys a row. The case is to reach its rate.
cuDNN drops other probabilities than we do. There, results are not compared.
"""
import functools
import math
import random

import torch

import margay
from margay.bench.harness import Case, GpuTimer, Problem, gradient, run_family
from torch.nn.attention import SDPBackend

TOKENS, WIDTH, WINDOW, DROPOUT = 32768, 2048, 1024, 0.1


def lengths():
    """16 lengths drawn from 100 to 8192."""
    r = random.Random(0)
    return [r.randint(100, 8192) for _ in range(16)]


def pairs(n, window=None):
    """Visible pairs of a causal sequence."""
    seen = n if window is None else min(n, window + 1)
    return seen * (seen + 1) // 2 + (n - seen) * seen


def same_length():
    """Of as many sequences, equally long, that have as many visible pairs as lengths()."""
    sizes = lengths()
    return round((sum(n * n for n in sizes) / len(sizes)) ** 0.5)


def dense(d, n, kv_heads, sequences):
    torch.manual_seed(0)
    heads = WIDTH // d
    make = lambda h: torch.randn(sequences, n, h, d, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    return make(heads), make(kv_heads or heads), make(kv_heads or heads), make(heads)


def flash(q, k, v, causal, window):
    """PyTorch's own flash attention: scaled_dot_product_attention does not reach its windows."""
    rows_first = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(*rows_first, None, None, q.shape[2], k.shape[2], 0.0, causal, False,
                                                  window_size_left=window, window_size_right=0)[0]
    return out.transpose(1, 2)


def causal_case(d, n, sequences, backward):
    """Dense, and its flops."""
    q, k, v, dout = dense(d, n, None, sequences)
    work = 4 * sequences * q.shape[1] * pairs(n) * d
    if backward:
        return gradient(functools.partial(margay.attention, causal=True), (q, k, v), dout), 2.5 * work
    return functools.partial(margay.attention, q, k, v, causal=True), work


def problem(runners, inputs, dout, backward, tolerance, work, beside):
    """Of causal calls, or of their backwards, which have twice the error and 2.5 times the work."""
    calls = {name: functools.partial(f, causal=True) for name, f in runners.items()}
    if backward:
        return Problem({name: gradient(call, inputs, dout) for name, call in calls.items()}, 2 * tolerance, 2.5 * work,
                       beside=beside)
    return Problem({name: functools.partial(call, *inputs) for name, call in calls.items()}, tolerance, work,
                   beside=beside)


def build(d, n, kv_heads, window, sequences, backward):
    q, k, v, dout = dense(d, n, kv_heads, sequences)
    ours = functools.partial(margay.attention, **({} if window is None else {"window": (window, 0)}))
    runners, beside = {"margay": ours}, {}
    if window is None:
        runners["cuDNN"] = lambda q, k, v, causal: _grouped(q, k, v, causal)
    elif not backward:
        runners["torch flash"] = lambda q, k, v, causal: flash(q, k, v, causal, window)
    if kv_heads or window:
        length = n if window is None else 2 * window
        beside[f"dense N={length}"] = causal_case(d, length, TOKENS // length, backward)
    work = 4 * sequences * q.shape[1] * pairs(n, window) * d
    return problem(runners, (q, k, v), dout, backward, 1e-2, work, beside)


def _grouped(q, k, v, causal, dropout=0.0):
    with torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal,
                                                                enable_gqa=q.shape[1] != k.shape[1])


def build_with(name, d, n, backward):
    q, k, v, dout = dense(d, n, None, TOKENS // n)
    heads = q.shape[1]
    options = {"sink": {"sink": torch.zeros(heads, device="cuda")}, "softcap": {"softcap": 30.0},
               "dropout": {"dropout_p": DROPOUT},
               "ALiBi": {"alibi_slopes": torch.linspace(0.01, 0.5, heads, device="cuda")}}[name]
    runners = {"margay": functools.partial(margay.attention, **options)}
    if name == "dropout":
        runners["cuDNN"] = lambda q, k, v, causal: _grouped(q, k, v, causal, DROPOUT)
    work, beside = 4 * TOKENS // n * heads * pairs(n) * d, {f"dense N={n}": causal_case(d, n, TOKENS // n, backward)}
    return problem(runners, (q, k, v), dout, backward, math.inf, work, beside)


def build_narrow(backward):
    """Values narrower than keys: 192 columns and 128."""
    torch.manual_seed(0)
    make = lambda columns: torch.randn(TOKENS // 4096, 4096, WIDTH // 128, columns, dtype=torch.bfloat16,
                                       device="cuda").transpose(1, 2)
    q, k, v, dout = make(192), make(192), make(128), make(128)
    runners = {"margay": margay.attention, "cuDNN": _grouped}
    work = 2 * TOKENS // 4096 * q.shape[1] * pairs(4096) * (192 + 128)
    beside = {"dense N=4096": causal_case(128, 4096, TOKENS // 4096, backward)}
    return problem(runners, (q, k, v), dout, backward, 1e-2, work, beside)


def build_packed(d, backward):
    torch.manual_seed(0)
    sizes, heads = lengths(), WIDTH // d
    starts = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    q, k, v, dout = (torch.randn(sum(sizes), heads, d, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    ours = lambda q, k, v, causal: margay.attention_varlen(q, k, v, starts, starts, max(sizes), max(sizes),
                                                           causal=causal)
    runners = {"margay": ours}
    if not backward:
        peer, longest = torch.ops.aten._flash_attention_forward, max(sizes)
        runners["torch flash"] = lambda q, k, v, causal: peer(q, k, v, starts, starts, longest, longest, 0.0, causal,
                                                              False)[0]
    work = 4 * heads * sum(map(pairs, sizes)) * d
    beside = {f"dense, {len(sizes)} of {same_length()}": causal_case(d, same_length(), len(sizes), backward)}
    return problem(runners, (q, k, v), dout, backward, 1e-2, work, beside)


def cases():
    for backward in (False, True):
        for d in (64, 128):
            direction = "backward" if backward else "forward"
            group = {"group": f"{direction} D={d} bfloat16, causal", "direction": direction, "d": d}
            kinds = {"dense N=4096": (4096, None, None, TOKENS // 4096),
                     "GQA 8:1 N=4096": (4096, WIDTH // d // 8, None, TOKENS // 4096),
                     "dense N=2048": (2048, None, None, TOKENS // 2048),
                     "window 1024 N=16384": (16384, None, WINDOW, TOKENS // 16384),
                     f"dense, 16 of {same_length()}": (same_length(), None, None, 16)}
            for name, arguments in kinds.items():
                yield Case(f"{direction} D={d} {name}", group | {"kind": name},
                           functools.partial(build, d, *arguments, backward))
            for name in ("sink", "softcap", "ALiBi", "dropout"):
                yield Case(f"{direction} D={d} {name} N=4096", group | {"kind": f"{name} N=4096"},
                           functools.partial(build_with, name, d, 4096, backward))
            if d == 128:
                yield Case(f"{direction} D=192/128 N=4096", group | {"kind": "q, k of 192 columns N=4096"},
                           functools.partial(build_narrow, backward))
            yield Case(f"{direction} D={d} packed, 16 of 100..8192", group | {"kind": "packed, 16 of 100..8192"},
                       functools.partial(build_packed, d, backward))


def run(options, arguments):
    return run_family("features", cases(), GpuTimer(), options)
