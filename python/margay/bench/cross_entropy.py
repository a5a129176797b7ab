"""The last projection and its loss, forward and backward, against PyTorch, torch.compile, Liger and quack (GPU).

Products are 3 x 2 M K V flops of a training step. Memory is a call's at its peak, gradients included.
"""
import functools

import torch
import torch.nn.functional as F

import margay
from margay.bench.harness import Case, GpuTimer, Problem, peer, run_family

SHAPES = [(8192, 4096, 128256), (8192, 2048, 50304), (4096, 4096, 32000)]       # rows, columns of hidden, words
HIDE_CYCLES = 2_000_000


def by_torch(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def by_liger(call):
    return lambda hidden, weight, targets: call()(weight, hidden, targets)


def step(call, hidden, weight, targets):
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))

    def run():
        loss = call(hidden, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))
    return run


def build(m, k, v, direction, device="cuda", dtype=torch.bfloat16):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, k, device=device, dtype=dtype) for n in (m, v))
    weight /= k**0.5
    targets = torch.randint(0, v, (m,), device=device)
    calls = {"margay": margay.cross_entropy, "torch": by_torch}
    if device == "cuda":
        torch.compiler.reset()
        calls["compiled"] = torch.compile(by_torch, dynamic=False)
        if call := peer("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss"):
            calls["liger"] = by_liger(call)
        if call := peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy"):
            calls["quack"] = call
    of_direction = {"forward": functools.partial, "training step": step}[direction]
    runners = {name: of_direction(call, hidden, weight, targets) for name, call in calls.items()}
    products = 1 if direction == "forward" else 3
    return Problem(runners, 2e-2, products * 2 * m * k * v, memory=True,
                   beside={"matmul": (lambda: hidden[:2048] @ weight.T, 2 * 2048 * k * v)})


def cases(shapes=SHAPES, device="cuda", dtype=torch.bfloat16):
    for direction in ("forward", "training step"):
        for m, k, v in shapes:
            fields = {"group": direction, "direction": direction, "m": m, "n": v, "k": k,
                      "dtype": str(dtype).removeprefix("torch.")}
            yield Case(f"{direction} M={m} K={k} V={v}", fields,
                       functools.partial(build, m, k, v, direction, device, dtype))


def run(options, arguments):
    return run_family("cross_entropy", cases(), GpuTimer(HIDE_CYCLES), options)
