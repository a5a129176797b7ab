"""Times rows of kernels.def for the attention backward against each other, in one process, in turns:

    python tools/backward_rows.py attention_bwd_bf16_d128 attention_bwd_bf16_d128_x2 [--rounds 5] [--lengths 512,4096]
                                  [--group 1] [--deterministic]

batch * N = 16384, heads * D = 2048. Prints ms and TFLOP/s of the whole backward (three kernels), the first row's time
over each row's, and the largest difference of gradients to the first row's, relative to the largest gradient. Dispatch
replaces a row whose condition does not hold: its name is then printed with a question mark.
"""

import argparse
import re
import statistics

import torch

from margay import _C


def problem(n, d, dtype, causal, deterministic, group):
    batch, heads = 16384 // n, 2048 // d
    g = torch.Generator(device="cuda").manual_seed(0)
    q, dout = (torch.randn(batch, heads, n, d, generator=g, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, heads // group, n, d, generator=g, device="cuda", dtype=dtype) for _ in range(2))
    out, lse = torch.empty_like(q), torch.empty(batch, heads, n, device="cuda")
    _C.attention_fwd(out, lse, q, k, v, 0.0, causal)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    read, numbers = (dout, q, k, v, out, lse, None), (0.0, causal, deterministic)
    workspace = torch.empty(_C.attention_bwd_workspace(*read, *numbers), dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    call = lambda: _C.attention_bwd(*grads, *read, workspace, *numbers, stream=stream)
    fields = dict(dtype=str(dtype)[6:], gpu=True, d=d, batch=batch, heads_q=heads,
                  heads_k=heads // group, nq=n, nk=n, causal=causal, deterministic=deterministic)
    return call, grads, fields, 10 * batch * heads * n * n * d / (2 if causal else 1)


def sample(call, flush, repeats=10):
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    dtype, d = re.match(r"attention_bwd_(bf16|fp16)_d(\d+)", options.rows[0]).groups()
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for causal in (False, True):
        for n in map(int, options.lengths.split(",")):
            call, grads, fields, flop = problem(n, int(d), {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype],
                                                causal, options.deterministic, options.group)
            times, reference, texts = {row: [] for row in options.rows}, None, []
            for _ in range(options.rounds):
                for row in options.rows:
                    _C.prefer(row)
                    times[row].append(sample(call, flush))
            for row in options.rows:
                _C.prefer(row)
                for t in grads:
                    t.fill_(float("nan"))
                call()
                results = [t.float() for t in grads]
                reference = reference or results
                worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(results, reference))
                worst = float("nan") if any(t.isnan().any() for t in results) else worst
                ms, doubt = (statistics.median(times[row]),
                             "" if _C.explain("attention_bwd", **fields)[0] == row else "?")
                ratio = statistics.median(a / b for a, b in zip(times[options.rows[0]], times[row]))
                texts.append(f"{row}{doubt} {ms:.3f} ms {flop / ms / 1e9:.0f} TF x{ratio:.3f} diff {worst:.1e}")
            _C.prefer(None)
            print(f"N={n} {'causal' if causal else 'full'}: " + " | ".join(texts), flush=True)


if __name__ == "__main__":
    main()
