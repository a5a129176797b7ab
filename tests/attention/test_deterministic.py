"""deterministic=True: bitwise equal gradients in every one of 50 runs, while something else keeps the machine busy, so
that blocks start, wait and end in another order each time. On the GPU a second stream multiplies matrices of changing
sizes; on the CPU other threads do."""

import random
import threading

import pytest
import torch

import margay as mg
from cases import DEVICES

RUNS = 50
DENSE = {f"d{dim}{'-causal' * causal}{'-grouped' * (heads > 2)}": dict(dim=dim, heads=heads,
                                                                       options=dict(causal=causal))
         for dim in (64, 128, 256) for causal, heads in ((False, 2), (True, 2), (True, 4))}
FULL = dict(causal=True, window=(150, 0), softcap=20.0, dropout_p=0.2, dropout_seed=5, sink=True, slopes=True)
CASES = {**DENSE, **{f"d{dim}-window": dict(dim=dim, heads=4, options=dict(window=(100, 30)))
                     for dim in (64, 128, 256)},
         **{f"d{dim}-packed": dict(dim=dim, heads=4, packed=True, options=dict(causal=True)) for dim in (64, 128, 256)},
         **{f"d{dim}-full": dict(dim=dim, heads=4, options=FULL) for dim in (64, 128, 256)},
         **{f"d{dim}-full-packed": dict(dim=dim, heads=4, packed=True, options=FULL) for dim in (64, 128, 256)}}


class Load:
    """Work beside the test's, of changing size, until the `with` block ends."""

    def __init__(self, device, seed):
        self.device, self.random, self.rounds, self.stop = device, random.Random(seed), 0, threading.Event()
        self.failure = None
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(1 if device == "cuda" else 2)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        while not self.rounds and any(thread.is_alive() for thread in self.threads):
            self.stop.wait(0.001)
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join()
        if self.failure:
            raise self.failure

    def _run(self, i):
        try:
            self._on_gpu() if self.device == "cuda" else self._on_cpu(i)
        except Exception as error:
            self.failure = error

    def _on_gpu(self):
        stream, done = torch.cuda.Stream(), []
        with torch.cuda.stream(stream):
            a = torch.randn(4096, 4096, device="cuda").bfloat16()
            while not self.stop.is_set():
                n = self.random.choice((64, 200, 512, 1000, 2048, 4096))
                torch.mm(a[:n, :n], a[:n, :n])
                done.append(stream.record_event())
                self.rounds += 1
                if len(done) > 16:                   # never far ahead, so that it ends with the test
                    done.pop(0).synchronize()
        stream.synchronize()

    def _on_cpu(self, i):
        r = random.Random(i)
        a = torch.randn(300, 300)
        while not self.stop.is_set():
            n = r.choice((5, 50, 128, 300))
            a[:n, :n] @ a[:n, :n]
            self.rounds += 1


def problem(device, seed, dim, heads, options, packed=False):
    """A function that gives the gradients."""
    g = torch.Generator().manual_seed(seed)
    dtype, options = torch.bfloat16, dict(options)
    draw = lambda *shape: torch.randn(shape, generator=g).to(device, dtype)
    rows = 1111 if device == "cuda" else 197
    leaves = []
    if options.pop("sink", False):
        options["sink"] = torch.randn(heads, generator=g).to(device).requires_grad_()
        leaves.append(options["sink"])
    if options.pop("slopes", False):
        options["alibi_slopes"] = torch.rand(heads, generator=g).to(device) / 8
    if packed:
        lengths = [rows, 1, 0, rows // 3, rows // 2 + 1]
        starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        q, k, v, dout = (draw(sum(lengths), heads, dim), draw(sum(lengths), 2, dim), draw(sum(lengths), 2, dim),
                         draw(sum(lengths), heads, dim))
        call = lambda: mg.attention_varlen(q, k, v, starts, starts, rows, rows, deterministic=True, **options)
    else:
        q, k, v, dout = (draw(2, heads, rows, dim), draw(2, 2, rows + 70, dim), draw(2, 2, rows + 70, dim),
                         draw(2, heads, rows, dim))
        call = lambda: mg.attention(q, k, v, deterministic=True, **options)
    leaves += [t.requires_grad_() for t in (q, k, v)]
    return lambda: torch.autograd.grad(call(), leaves, dout)


def bits(t):
    return t.detach().view(torch.int16 if t.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_under_load(device, case, seed):
    gradients = problem(device, seed, **CASES[case])
    first = [t.clone() for t in gradients()]
    assert all(t.isfinite().all() and t.any() for t in first)
    with Load(device, seed) as load:
        before = load.rounds
        same = [torch.stack([(bits(a) == bits(b)).all() for a, b in zip(first, gradients())]) for _ in range(RUNS)]
        ran = load.rounds - before
    same = torch.stack(same).cpu()
    print(f"{ran} rounds of other work, {(~same.all(1)).sum()} of {RUNS} runs differ")
    assert ran > 0 and same.all(), f"differ in {(~same).sum(0).tolist()} of {RUNS} runs"


@pytest.mark.parametrize("threads", (1, 2, 5))
def test_threads_of_the_cpu_change_nothing(threads, seed):
    """The number of threads is part of the load: who computes a block does not decide its bits."""
    gradients = problem("cpu", seed, **CASES["d64-full-packed"])
    first = [t.clone() for t in gradients()]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, gradients()))
    finally:
        torch.set_num_threads(before)
