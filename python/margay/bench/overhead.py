"""The host's time of a small call, of the first call, of the import.

What a call costs besides the computation: an eager call on a small problem; the first call of a fresh process, after
torch's own start; `import margay`.
"""
import statistics
import subprocess
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import margay
from margay import _C
from margay.bench.harness import device_slug, save

CALLS = 300                          # fewer than a CUDA stream's queue holds: the host never waits for the device
FIRST_CALL = """
import time, torch
q = torch.randn(1, 4, 128, 64, device={device!r}).to(torch.bfloat16)
wait = torch.cuda.synchronize if q.is_cuda else lambda: None
wait()
start = time.perf_counter()
import margay
margay.attention(q, q, q)
wait()
print(time.perf_counter() - start)
"""
# Of an op with gradients, after torch's start, autograd's, the context's and the import: what the op itself loads.
FIRST_CALLS = """
import time, torch, margay
def half(*sizes):
    return torch.randn(*sizes, device={device!r}).to(torch.bfloat16).requires_grad_()
wait = torch.cuda.synchronize if {device!r} == "cuda" else lambda: None
a = half(64, 64)
(a @ a).backward(torch.ones_like(a))
{inputs}
wait()
start = time.perf_counter()
out = {call}
wait()
middle = time.perf_counter()
out.backward(torch.ones_like(out))
wait()
print(middle - start, time.perf_counter() - middle)
"""
OPS = {
    "ssd": ("x, b = half(1, 128, 2, 64), half(1, 128, 1, 128); dt = torch.rand(1, 128, 2, device={device!r}); "
            "a = -torch.rand(2, device={device!r})", "margay.ssd(x, dt, a, b, b)"),
    "linear_attention": ("q = half(1, 128, 2, 128)", "margay.linear_attention(q, q, q)"),
    "causal_conv1d": ("x, weight = half(1, 128, 64), half(64, 4)", "margay.causal_conv1d(x, weight)"),
}
IMPORT = "import time; start = time.perf_counter(); import margay; print(time.perf_counter() - start)"


def fresh_process(program, repeats=5):
    """Median of the seconds that the program prints; of each, where it prints several."""
    printed = [subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
               for _ in range(repeats)]
    medians = [statistics.median(map(float, values)) for values in zip(*map(str.split, printed))]
    return medians[0] if len(medians) == 1 else medians


def first_calls(device):
    for op, (inputs, call) in OPS.items():
        seconds = fresh_process(FIRST_CALLS.format(device=device, inputs=inputs.format(device=device), call=call), 3)
        for what, value in zip(("forward", "backward"), seconds):
            yield {"name": f"first {what} of {op}, after torch's own", "group": "start", "us": value * 1e6}


def host_microseconds(call, device):
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(20):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - start
    wait()
    return elapsed / CALLS * 1e6


def calls(device):
    # on the CPU the call computes: as little as possible
    rows = 128 if device == "cuda" else 1
    q = torch.randn(1, 4, rows, 64, device=device).to(torch.bfloat16)
    g = q.detach().requires_grad_()
    out = torch.empty_like(q)
    return {
        "margay.attention": lambda: margay.attention(q, q, q),
        "margay.attention, gradient wanted": lambda: margay.attention(g, g, g),
        "margay._C.attention_fwd": lambda: _C.attention_fwd(out, None, q, q, q, 0.125, False),
        "torch SDPA": lambda: scaled_dot_product_attention(q, q, q),
        "torch SDPA, gradient wanted": lambda: scaled_dot_product_attention(g, g, g),
    }


def run(options, arguments):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    functions = calls(device)
    rounds = {name: [] for name in functions}
    for _ in range(options.rounds):
        for name, call in functions.items():
            rounds[name].append(host_microseconds(call, device))
    results = [{"name": name, "group": "host time of a call", "us": statistics.median(values), "rounds_us": values}
               for name, values in rounds.items()]
    results.append({"name": "first call in a fresh process", "group": "start",
                    "us": fresh_process(FIRST_CALL.format(device=device)) * 1e6})
    results += first_calls(device)
    results.append({"name": "import margay, without torch", "group": "start", "us": fresh_process(IMPORT) * 1e6})
    for result in results:
        print(f"{result['name']}: {result['us']:.1f} us")
    print("to", save("overhead", results, options, device_slug()))
    return True
