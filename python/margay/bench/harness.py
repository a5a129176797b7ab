"""Interleaved measurements.

A case is one problem with several runners, Margay's first. Their results are compared before anything is timed. Then
every round times every runner once, in rotating order, so that clocks and temperature treat all alike. A runner's time
is the median of its rounds, a ratio the median of the rounds' ratios.
"""
import contextlib
import dataclasses
import datetime
import functools
import importlib
import json
import math
import platform
import re
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Callable

import torch

import margay
from margay.bench import report

# What the card really reaches: FLOP/s of cuBLAS bf16 products of random numbers, bytes/s of a device-to-device copy
# (read + write).
CEILINGS = {"h200": (680e12, 4.28e12), "h100": (680e12, 3.0e12)}
FLUSH_BYTES = 256 << 20              # more than any L2
# the device waits this long before each sample, so that a slow host call is not in the device's time
HIDE_CYCLES = 400_000


@dataclasses.dataclass
class Problem:
    runners: dict[str, Callable]     # name -> call; the first is ours; each returns a tensor or a tuple of tensors
    tolerance: float                 # of |ours - peer| / |peer|
    flops: float = 0                 # 0: memory bounds it, and its rate is in bytes
    bytes: float = 0
    rate: float = 1                  # of the card's products, in those of 16 bits
    # name -> other work, in flops or, where ours has none, in bytes, to compare rates with
    beside: dict[str, tuple[Callable, float]] = dataclasses.field(default_factory=dict)
    doubted: tuple = ()              # peers that may be wrong: they are timed all the same, and the table says so
    memory: bool = False             # also measure what a call of each runner needs at its peak
    first_ms: dict[str, float] = dataclasses.field(default_factory=dict)      # of the first calls, which `check` makes


@dataclasses.dataclass
class Case:
    name: str
    fields: dict                     # what the table's columns show
    build: Callable[[], Problem]


@dataclasses.dataclass
class Options:
    out: Path = Path("benchmarks/results")
    only: str = ""
    rounds: int = 5
    measure_ms: float = 20
    seconds: float = math.inf
    peers: tuple = ()                # empty: all
    plot: bool = False               # also write FAMILY-DEVICE.png


def gradient(call, inputs, dout):
    """The backward of a call, through autograd for every runner. The forward runs at the first call: a backend may
    refuse it."""
    @functools.cache
    def graph():
        leaves = [t.detach().requires_grad_() for t in inputs]
        return call(*leaves), leaves

    def backward():
        out, leaves = graph()
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return backward


def step(call, inputs, douts):
    """Forward and backward, as training runs them. Of several outputs, `douts` has None for those without gradient."""
    leaves = [t.detach().requires_grad_() for t in inputs]

    def run():
        outs = call(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        pairs = [(out, dout) for out, dout in zip(outs, douts) if dout is not None]
        return torch.autograd.grad([out for out, _ in pairs], leaves, [dout for _, dout in pairs])
    return run


@functools.cache
def peer(module, name):
    """A function of a package that may be here; None where it is absent."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:                                        # whatever its import meets
        print(f"{module}: absent ({str(error).splitlines()[0] if str(error) else type(error).__name__})", flush=True)
        return None


def device_slug():
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia ", "").split(" ")[0])
    return margay.info()["isa"]


# ---- clocks

class Clock:
    """SM clock and power, sampled by a running nvidia-smi; silent where there is none."""

    def __enter__(self):
        self.samples, self.process = [], None
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(["nvidia-smi", "-i", "0", "--query-gpu=clocks.sm,power.draw",
                                             "--format=csv,noheader,nounits", "-lms", "100"], stdout=subprocess.PIPE,
                                            stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_):
        if self.process:
            self.process.terminate()
            self.process.wait()

    def _read(self):
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                clock, power = map(float, line.split(","))
                self.samples.append((time.monotonic(), clock, power))

    def since(self, start):
        """Median clock in MHz and power in W since `start`."""
        now = [sample for sample in self.samples if sample[0] >= start] or self.samples[-1:]
        return {"sm_mhz": statistics.median(s[1] for s in now),
                "watts": statistics.median(s[2] for s in now)} if now else {}


# ---- timers: milliseconds of one call, the median over about measure_ms

class GpuTimer:
    def __init__(self, hide_cycles=HIDE_CYCLES):
        self.device, self.hide_cycles = device_slug(), hide_cycles
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def once(self, call):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        torch.cuda._sleep(self.hide_cycles)
        start.record()
        call()
        end.record()
        return start, end

    def measure(self, call, n):
        pairs = [self.once(call) for _ in range(n)]
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    def samples(self, ms, measure_ms):
        return max(3, min(50, int(measure_ms / (ms + 0.3))))

    def peak(self, call):
        """Megabytes that a call has at its peak, results included, inputs not."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20


class CpuTimer:
    def __init__(self):
        self.device = margay.info()["isa"]

    def measure(self, call, n):
        times = []
        for _ in range(n):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)

    def samples(self, ms, measure_ms):
        return max(3, min(1000, int(measure_ms / ms)))


def timer_for(device):
    return GpuTimer() if device == "cuda" else CpuTimer()


# ---- one case

def relative_error(ours, peer):
    """Largest over the outputs of |ours - peer| / |peer| (Frobenius); NaN if either has one."""
    as_tuple = lambda x: x if isinstance(x, (tuple, list)) else (x,)
    errors = [((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)).item()
              for a, b in zip(as_tuple(ours), as_tuple(peer), strict=True)]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def first(problem, name):
    """What a runner's first call returns. Its time counts: a peer may compile."""
    start = time.perf_counter()
    result = problem.runners[name]()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    problem.first_ms[name] = (time.perf_counter() - start) * 1e3
    return result


def check(problem):
    """The errors against each peer. Raises if one exceeds the tolerance; a peer that refuses the problem is dropped."""
    ours, *peers = problem.runners
    result, errors = first(problem, ours), {}
    for peer in peers:
        try:
            expected = first(problem, peer)
        except Exception as error:                                    # also of its compiler
            print(f"    {peer} refuses: {(str(error) or type(error).__name__).splitlines()[0]}")
            del problem.runners[peer]
            continue
        errors[peer] = relative_error(result, expected)
        if not errors[peer] <= problem.tolerance:
            if peer not in problem.doubted:
                raise ArithmeticError(f"differs from {peer} by {errors[peer]:.2e}, accepted {problem.tolerance:.0e}")
            print(f"    {peer} differs by {errors[peer]:.2e}")
    return errors


def measure(problem, timer, options):
    """name -> times of the rounds in ms"""
    calls = problem.runners | {name: call for name, (call, _) in problem.beside.items()}
    names = list(calls)
    count = {}
    for name, call in calls.items():
        timer.measure(call, 1)                                        # first call: libraries load, peers plan
        count[name] = timer.samples(timer.measure(call, 3), options.measure_ms)
    rounds = {name: [] for name in names}
    for i in range(options.rounds):
        for name in names[i % len(names):] + names[:i % len(names)]:
            rounds[name].append(timer.measure(calls[name], count[name]))
    return rounds


def result_of(case, problem, errors, rounds, device):
    ours, *peers = problem.runners
    times = {name: statistics.median(values) for name, values in rounds.items()}
    ratio = {peer: statistics.median(p / o for p, o in zip(rounds[peer], rounds[ours])) for peer in peers}
    result = {"name": case.name, **case.fields, "ms": times, "rounds_ms": rounds, "speed_ratio": ratio, "error": errors,
              "first_ms": problem.first_ms, "date": datetime.date.today().isoformat()}
    if ours_work := problem.flops or problem.bytes:
        work = dict.fromkeys(problem.runners, ours_work) | {name: work for name, (_, work) in problem.beside.items()}
        unit, scale = ("tflops", 1e-9) if problem.flops else ("gbs", 1e-6)
        result[unit] = {name: work[name] / ms * scale for name, ms in times.items()}
        result["of_rate"] = {name: statistics.median(ours_work / o * b / work
                                                     for o, b in zip(rounds[ours], rounds[name]))
                             for name, (_, work) in problem.beside.items()}
    if wrong := [peer for peer in peers if peer in problem.doubted and not errors[peer] <= problem.tolerance]:
        result["wrong"] = wrong
    ceiling = CEILINGS.get(device)
    if ceiling and (problem.flops or problem.bytes):
        result["roofline"] = max(problem.flops / problem.rate / ceiling[0],
                                 problem.bytes / ceiling[1]) / (times[ours] * 1e-3)
    return result


# ---- a family

def environment(on_gpu):
    env = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    if on_gpu:
        env.update(gpu=torch.cuda.get_device_name(), cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(),
                   driver=margay.info()["driver"])
    else:
        env.update(cpu=cpu_name(), isa=margay.info()["isa"])
    return env


def cpu_name():
    with contextlib.suppress(OSError):
        if found := re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            return found.group(1)
    return platform.processor()


def describe(result):
    ratios = ", ".join([*(f"{value:.2f} x {peer}" for peer, value in result["speed_ratio"].items()),
                        *(f"{value:.2f} of the rate of {name}" for name, value in result.get("of_rate", {}).items())])
    ours, *others = result["ms"]
    unit, rate = report.rate(result)
    speed = f"{rate[ours]:.3g} {unit}, " if unit == "TFLOP/s" else f"{rate[ours]:.0f} {unit}, " if unit else ""
    memory = ", ".join(f"{mb:.0f} MB" + ("" if name == ours else f" {name}")
                       for name, mb in result.get("memory_mb", {}).items())
    return f"{result['ms'][ours]:.3f} ms, {speed}{ratios}" + (f"; {memory}" if memory else "")


def run_case(case, timer, options, clock):
    start = time.monotonic()
    problem = case.build()
    if options.peers:
        ours = next(iter(problem.runners))
        problem.runners = {name: call for name, call in problem.runners.items() if name == ours
                           or name in options.peers}
    errors = check(problem)
    result = {**result_of(case, problem, errors, measure(problem, timer, options), timer.device), **clock.since(start)}
    if problem.memory and hasattr(timer, "peak"):
        result["memory_mb"] = {name: timer.peak(call) for name, call in problem.runners.items()}
    print(f"{case.name}: {describe(result)}", flush=True)
    return result


def described(family, results, options, device):
    """Results with what they were measured on, and how: the content of a result file."""
    method = {"rounds": options.rounds, "ms_per_measurement": options.measure_ms, "inputs": "normal, seed 0"}
    return {"family": family, "environment": environment(device != margay.info()["isa"]), "method": method,
            "cases": results}


def save(family, results, options, device):
    """Results of cases that were not run now are kept."""
    path = options.out / f"{family}-{device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = {case["name"]: case for case in [*old, *results]}
    path.write_text(json.dumps(described(family, list(cases.values()), options, device), indent=1) + "\n")
    return path


def run_cases(cases, timer, options, keep=lambda results: None):
    """The results, the names of cases that failed, and of those for which there was no time. `keep` gets the results
    after each case: what stops the run loses none."""
    start, results, failed, left = time.monotonic(), [], [], []
    with Clock() as clock:
        for case in cases:
            if options.only and not re.search(options.only, case.name):
                continue
            if time.monotonic() - start > options.seconds:
                left.append(case.name)
                continue
            try:
                results.append(run_case(case, timer, options, clock))
                keep(results)
            except (ArithmeticError, NotImplementedError, RuntimeError, ValueError, TypeError) as error:
                failed.append(case.name)
                print(f"{case.name}: FAILED: {error}", flush=True)
    return results, failed, left


def run_family(family, cases, timer, options):
    """Writes FAMILY-DEVICE.json. Returns whether every case ran and was right."""
    start = time.monotonic()
    keep = lambda results: save(family, results, options, timer.device)  # noqa: E731
    results, failed, left = run_cases(cases, timer, options, keep)
    if results:
        path = keep(results)
        print(f"{report.summary(results)}\n{len(results)} cases to {path} in {time.monotonic() - start:.0f} s")
        if options.plot:
            report.plot(json.loads(path.read_text()), path.with_suffix(".png"))
    if left:
        print(f"time was up; not run: {', '.join(left)}")
    return not failed

