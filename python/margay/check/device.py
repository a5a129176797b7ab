"""The hardware's answer to the checker's question.

Each kernel is launched on the GPU many times, as it is and as a debug build (TRACED: csrc/tile/sm90/trace.h).
- Results of all launches are compared bitwise. Debug builds run with random delays in one role at a time. A race that
  timing can show, shows.
- Every role's synchronising calls are written down, and compared with the same role's calls in the checker's run of the
  same problem on one multiprocessor. So what was checked is what runs.
"""

import ctypes
import functools
import hashlib
import os
import random
import shutil
import subprocess
import time

from margay.check import problems as cpu
from margay.check.compiled import OPS, cache, csrc, included
from margay.check.text import dim, red

NVCC_FLAGS = ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a", "-cubin"]
WARPS, CAPACITY, RUNS, LONGEST = 32, 4096, 24, (100, 1000, 10000)     # runs with delays per role; ns
TRACED = OPS[1:15]                                                    # synchronising calls; init is not traced


class State(ctypes.Structure):
    _fields_ = [("events", ctypes.c_void_p), ("capacity", ctypes.c_uint32),
                ("delayed", ctypes.c_uint32), ("longest", ctypes.c_uint32), ("seed", ctypes.c_uint32)]


class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("x", ctypes.c_uint),
                ("y", ctypes.c_uint), ("z", ctypes.c_uint), ("rest", ctypes.c_char * 52)]


class Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)]


def cubin_of(kernel, dtype, constants, traced):
    """Path of the cubin of the kernel's file, of a debug build if `traced`.

    nvcc makes it unless it was made before, perhaps on another machine.
    """
    flags = NVCC_FLAGS + ["-DTRACED"] * traced
    text = (repr((flags, dtype, constants)).encode() +
            b"".join(path.read_bytes() for path in included(kernel.source)
                     if not {"cpu", "check"} & set(path.parts[-2:])))
    out = cache() / f"{kernel.source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.cubin"
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc")
    if not out.exists():
        if not nvcc:
            raise SystemExit(f"margay.check --device: needs nvcc, or {out} built elsewhere by `margay.check --device`")
        out.parent.mkdir(parents=True, exist_ok=True)
        plain = constants.replace(",", "\\,")
        command = [nvcc, *flags, f"-I{csrc()}", "-DKERNEL=traced", f"-DELEM={dtype}",
                   f"-DCONSTANTS={plain}", "-o", f"{out}.new", str(kernel.source)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"margay.check: {' '.join(command)}\n{result.stderr}")
        os.replace(f"{out}.new", out)
    return out


@functools.cache
def driver():
    return ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    error = getattr(driver(), name)(*arguments)
    if error:
        text = ctypes.c_char_p()
        driver().cuGetErrorName(error, ctypes.byref(text))
        raise RuntimeError(f"{name}: {text.value.decode() if text.value else error}")


class Build:
    """A debug build on the GPU, or one as in the library."""

    def __init__(self, kernel, dtype, constants, traced):
        import torch
        self.kernel, self.torch = kernel, torch
        image = cubin_of(kernel, dtype, constants, traced).read_bytes()
        self.module, self.function, symbol, size = (ctypes.c_void_p(), ctypes.c_void_p(),
                                                    ctypes.c_uint64(), ctypes.c_size_t())
        torch.cuda.synchronize()
        call("cuModuleLoadData", ctypes.byref(self.module), image)
        call("cuModuleGetFunction", ctypes.byref(self.function), self.module, b"traced")
        if traced:
            call("cuModuleGetGlobal_v2", ctypes.byref(symbol), ctypes.byref(size), self.module, b"mg_trace")
        self.state_at = symbol.value
        self.descriptor = kernel.descriptor
        call("cuFuncSetAttribute", self.function, 8, self.descriptor.shared_bytes)
        self.events = None

    def launch(self, params, blocks, traced, delayed, longest, seed):
        torch, d = self.torch, self.descriptor
        if traced:
            self.events = torch.zeros(blocks, WARPS, CAPACITY, 2, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        if self.state_at:
            state = State(self.events.data_ptr() if traced else None, CAPACITY if traced else 0, delayed, longest, seed)
            call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.state_at), ctypes.byref(state),
                 ctypes.c_size_t(ctypes.sizeof(state)))
        memory = ctypes.create_string_buffer(d.params_bytes + 64)
        at = (ctypes.addressof(memory) + 63) // 64 * 64
        ctypes.memmove(at, params, d.params_bytes)
        cluster = Attribute(4, b"", d.cluster, 1, 1, b"")
        config = Config((blocks, 1, 1), (d.threads, 1, 1), d.shared_bytes, torch.cuda.current_stream().cuda_stream,
                        ctypes.pointer(cluster), int(d.cluster > 1))
        call("cuLaunchKernelEx", ctypes.byref(config), self.function, (ctypes.c_void_p * 1)(at), None)
        torch.cuda.synchronize()

    def trace(self, blocks):
        """{(block, warp): [(op, offset or -1, value)]}"""
        events, traces = self.events[:blocks].cpu().numpy(), {}
        for block in range(blocks):
            for warp in range(WARPS):
                count = min(int(events[block, warp, 0, 0]), CAPACITY - 1)
                if count:
                    traces[block, warp] = [(OPS[int(e[0]) & 31], (int(e[0]) >> 5 & 0x3ffffff) - 1, int(e[1]))
                                           for e in events[block, warp, 1:count + 1]]
        return traces


def tensor(*shape, dtype="float32", values=None):
    import torch
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    kind = getattr(torch, dtype)
    if values is not None:
        return torch.as_tensor(values, dtype=kind, device="cuda").expand(shape).contiguous()
    return torch.randn(shape, generator=generator, device="cuda").to(kind)


class on_gpu:
    """Problems get CUDA tensors."""

    def __enter__(self):
        cpu._Place.tensor = staticmethod(tensor)

    def __exit__(self, *_):
        cpu._Place.tensor = cpu.Array


def run_traced(traced, problem, sms, write=False, delayed=0, longest=0, seed=0):
    """(outputs, blocks) of the problem with the row's launches replaced by a Build's; None: by nothing. The blocks and
    the trace are the last launch's, and so are the checker's events."""
    launched = []

    @cpu.TAKE
    def take(name, params, blocks):
        if name.decode() != problem.row["name"]:
            return False
        if traced is None:
            launched.append(blocks)
            return False
        try:
            traced.launch(params, blocks, write, delayed, longest, seed)
            launched.append(blocks)
        except BaseException as error:                     # an exception cannot pass through C
            launched.append(error)
        return True
    with on_gpu(), cpu.intercepting(take, problem.row["name"], sms):
        outputs = problem.call()
    if not launched:
        raise RuntimeError(f"{problem.label} did not launch {problem.row['name']}")
    for error in launched:
        if isinstance(error, BaseException):
            raise error
    return [t.clone() for t in outputs], launched[-1]


# ---- what each role does on both sides

def warps_of(kernel):
    """(first warp, name, threads) of each role member of a block, in the order of the checker's fibers: warpgroups,
    then a warp each."""
    groups = sum(width == 128 for _, width in kernel.members)
    group, other, result = 0, 4 * groups, []
    for name, width in kernel.members:
        result.append((group if width == 128 else other, name, width))
        group, other = group + 4 * (width == 128), other + (width != 128)
    return result


def checker_traces(problem, sms):
    """The same, from a run of the checker on `sms` multiprocessors."""
    if problem.run(0, sms=sms):
        return None
    members, traces = warps_of(problem.kernel), {}
    for event in problem.kernel.events():
        if event.fiber >= 0 and OPS[event.op] in TRACED:
            key = event.fiber // len(members), members[event.fiber % len(members)][0]
            traces.setdefault(key, []).append((OPS[event.op], event.offset,
                                               abs(event.value) if OPS[event.op] == "arrive" else event.value))
    return traces


def compare_traces(problem, ours, theirs):
    """Lines that say where the GPU's order of calls differs from the checker's."""
    if ours is None:
        return ["the checker reports it: mend that first, then compare traces"]
    names, lines = {warp: name for warp, name, _ in warps_of(problem.kernel)}, []
    for key in sorted(ours):
        block, warp = key
        a, b = ours[key][:CAPACITY - 1], theirs.get(key, [])
        if a != b:
            i = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            show = (lambda t: f"{t[i][0]} {problem.kernel.place(t[i][1]) or ''} {t[i][2]}"
                    if i < len(t) else "nothing more")
            lines.append(f"{names[warp]} of block {block}, call {i}: the checker has {show(a)}, the GPU {show(b)}")
    return lines


# ---- work

def check_delays(build, traced, problem):
    """(lines of findings, launches): results of repeated launches, and with each role delayed in turn."""
    import torch
    kernel, runs, bytes_of = problem.kernel, 1, lambda t: t.contiguous().view(torch.uint8)
    want, _ = run_traced(build, problem, all_sms())
    # Others add in any order
    exact = "attention_bwd" not in kernel.name or kernel.ordered or "_pre_" in kernel.name or "_post_" in kernel.name
    for warp, name, width in [(0, "nobody", 0), *warps_of(kernel)]:
        mask = (0xf if width == 128 else width > 0) << warp
        for i in range(RUNS if mask else 8 * RUNS):
            got, _ = run_traced(traced if mask or i % 2 else build, problem, all_sms(),
                                False, mask, LONGEST[i % len(LONGEST)], random.Random(f"{name}{i}").randrange(1 << 30))
            runs += 1
            same = [torch.equal(bytes_of(a), bytes_of(b)) if exact else
                    bool((a.float() - b.float()).norm() <= 1e-2 * b.float().norm()) for a, b in zip(got, want)]
            if not all(same):
                how = (f"when {name} is delayed by up to {LONGEST[i % len(LONGEST)]} ns at its synchronising calls"
                       if mask else "from run to run")
                return [f"results change {how} (after {runs} launches)"], runs
    return [], runs


def check_problem(build, traced, problem):
    """(lines of findings, launches)"""
    if problem.label in ("large", "few blocks"):
        return check_delays(build, traced, problem)
    sms = problem.fewest_sms()
    _, blocks = run_traced(traced, problem, sms, write=True)
    return compare_traces(problem, checker_traces(problem, sms), traced.trace(blocks)), 1


@functools.cache
def all_sms():
    import torch
    return torch.cuda.get_device_properties(0).multi_processor_count


def run(names, options):
    """Build everything; on a machine with a GPU run it too."""
    from margay.check.__main__ import problems_of
    start, bad, launches = time.monotonic(), [], 0
    gpu = has_gpu()
    for name in names:
        found = [problem for problem in problems_of(name, options) if problem.call and problem.row["has_gpu_image"]]
        if not found:
            continue
        row = found[0].row
        dtype = cpu.TYPES[row["dtype"]]
        if not gpu:
            for debug in (False, True) if options.in_place_of else (True,):
                cubin_of(found[0].kernel, dtype, row["constants"], debug)
            continue
        # A row's own launch is the library's
        build = Build(found[0].kernel, dtype, row["constants"], False) if options.in_place_of else None
        traced = Build(found[0].kernel, dtype, row["constants"], True)
        for problem in found:
            findings, runs = check_problem(build, traced, problem)
            launches += runs
            for line in findings:
                bad.append(name)
                print(red(f"{problem.kernel.name}: {problem.label}: ") + line, flush=True)
        print(dim(f"{name}: done, {time.monotonic() - start:.0f} s"), flush=True)
    print(f"{len(names)} kernels, {launches} launches, {len(bad)} findings, {time.monotonic() - start:.0f} s" if gpu
          else f"no GPU here: debug builds of {len(names)} kernels are in {cache()}")
    return not bad


def has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
