"""The runtime and the module without a GPU: rows of tests/mock/kernels.def over a driver that records its calls (tests/mock/libcuda.c).

Every test gets fresh copies of the libraries, so that it starts with a driver not yet opened. Also examples/attention.c and the ABI in
runtime/driver_api.h against cuda.h.
"""
import ctypes
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC, MOCK = ROOT / "csrc", ROOT / "tests" / "mock"
CC = [*os.environ.get("CC", "cc").split(), "-std=c17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-fPIC"]
ROWS = ["plain", "clustered", "on_cpu", "huge", "misnamed", "forward", "forward_fp32"]
OK, TYPE, VALUE, UNSUPPORTED, BUFFER, MEMORY, RUNTIME = range(7)
BF16, FP16, FP32, FP64, INT32, INT64, UINT8, E4M3 = range(8)
CPU, CUDA = range(2)


def compile_c(*words):
    result = subprocess.run([*CC, *map(str, words)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    sources = [*sorted((CSRC / "runtime").glob("*.c")), MOCK / "rows.c"]
    common = ["-shared", "-DMARGAY_CUDA=1", "-DMARGAY_X86=1", f"-I{MOCK}", f"-I{CSRC}", *sources]
    libraries = ["-lm", "-lpthread", "-ldl"]
    compile_c("-o", folder / "libcuda.so", "-shared", f"-I{CSRC}", MOCK / "libcuda.c")
    compile_c("-o", folder / "old_libcuda.so", "-shared", MOCK / "old_libcuda.c")
    compile_c("-o", folder / "libmargay.so", *common, *libraries)
    include = sysconfig.get_paths()["include"]
    limited = ["-DPy_LIMITED_API=0x030A0000", "-fvisibility=hidden"]
    compile_c("-o", folder / "_C.so", f"-I{include}", *limited, CSRC / "module.c", *common, *libraries)
    return folder


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("device", ctypes.c_int), ("device_index", ctypes.c_int),
                ("dims", ctypes.c_int), ("read_only", ctypes.c_bool), ("shape", ctypes.c_int64 * 8), ("stride", ctypes.c_int64 * 8)]


def compact(shape):
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return strides[::-1]


def tensor(shape, stride=None, data=1 << 20, dtype=BF16, device=CPU, index=0, read_only=False):
    t = Tensor(data, dtype, device, index, len(shape), read_only)
    t.shape[:len(shape)] = shape
    t.stride[:len(shape)] = stride or compact(shape)
    return t


class Params(ctypes.Structure):
    _fields_ = [("magic", ctypes.c_int), ("hits", ctypes.c_void_p)]


class Options(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_float), ("causal", ctypes.c_bool), ("deterministic", ctypes.c_bool), ("features", ctypes.c_void_p)]


class Runtime:
    """A private copy of the library and of the mock driver."""

    def __init__(self, built, folder, monkeypatch, driver="libcuda.so"):
        shutil.copy(built / driver, folder / "driver.so")
        shutil.copy(built / "libmargay.so", folder / "libmargay.so")
        monkeypatch.setenv("MARGAY_DRIVER", str(folder / "driver.so"))
        self.mock = ctypes.CDLL(str(folder / "driver.so"))
        self.c = ctypes.CDLL(str(folder / "libmargay.so"))
        self.c.mg_last_error.restype = ctypes.c_char_p
        if driver == "libcuda.so":
            self.mock.mock_log.restype = ctypes.c_char_p

    def error(self):
        return self.c.mg_last_error().decode()

    def log(self):
        text = self.mock.mock_log().decode().splitlines()
        self.mock.mock_clear()
        return text

    def launch(self, row="plain", blocks=8, device=CUDA, index=0, stream=0x10, hits=None, magic=42):
        params = Params(magic, ctypes.addressof(hits) if hits is not None else None)
        return self.c.test_launch(ROWS.index(row), device, index, ctypes.c_void_p(stream), ctypes.byref(params), ctypes.c_int64(blocks))

    def attention(self, out, lse, q, k, v, causal=False):
        views = [None if t is None else ctypes.byref(t) for t in (out, lse, q, k, v)]
        return self.c.mg_attention_fwd(*views, None, ctypes.byref(Options(1.0, causal, False)), None)

    def check(self, op, tensors):
        number = ["attention_fwd", "attention_bwd", "attention_bwd_pre", "attention_bwd_post", "matmul", "scaled_add"].index(op)
        tensors = [*tensors, *[None] * 4]      # attention's last four are optional
        array = (ctypes.POINTER(Tensor) * len(tensors))(*(None if t is None else ctypes.pointer(t) for t in tensors))
        return self.c.mg_check(number, array)


@pytest.fixture
def rt(built, tmp_path, monkeypatch):
    return Runtime(built, tmp_path, monkeypatch)


# ---- launches

def test_launch_geometry(rt):
    assert rt.launch("plain", blocks=8) == OK
    log = rt.log()
    assert log[-2] == "cuLaunchKernelEx plain grid=8,1,1 block=128,1,1 shared=1024 cluster=0 stream=0x10 params=42 context=0"
    assert log[-1] == "cuCtxPopCurrent" and rt.mock.mock_depth() == 0


def test_launch_cluster(rt):
    assert rt.launch("clustered", blocks=12, magic=7) == OK
    assert "cuLaunchKernelEx clustered grid=12,1,1 block=384,1,1 shared=200000 cluster=2 dependent stream=0x10 params=7 context=0" in (log := rt.log())
    assert "cuKernelSetAttribute clustered 9=100 device=0" in log     # of a row that is FOLLOWED


def test_loaded_once_in_relaxed_capture_mode(rt):
    assert rt.launch() == OK
    log = rt.log()
    first, last = (i for i, line in enumerate(log) if line.startswith("cuThreadExchangeStreamCaptureMode"))
    assert log[first].endswith(" 2") and log[last].endswith(" 0") and rt.mock.mock_mode() == 0
    assert log[first + 1:last] == ["cuLibraryLoadData image=plain options=0", "cuLibraryGetKernel plain",
                                   "cuKernelSetAttribute plain 8=1024 device=0"]
    assert rt.launch() == OK
    assert [line.split()[0] for line in rt.log()] == ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"]


def test_empty_grid_launches_nothing(rt):
    assert rt.launch(blocks=0) == OK
    assert not [line for line in rt.log() if "Launch" in line or "Load" in line]


def test_too_many_blocks(rt):
    assert rt.launch(blocks=2**31) == VALUE


def test_bad_05_device_1_while_0_is_current(rt):
    rt.mock.mock_enter(0)
    assert rt.launch(index=1, stream=0) == OK
    log = rt.log()
    assert "cuCtxPushCurrent device=1" in log and log[-2].endswith("stream=(nil) params=42 context=1") and rt.mock.mock_depth() == 1
    assert rt.launch(index=0) == OK           # its attributes are per device; the image is loaded already
    log = rt.log()
    assert "cuKernelSetAttribute plain 8=1024 device=0" in log and not [line for line in log if "Push" in line or "LibraryLoad" in line]


def test_current_context_is_left_alone(rt):
    rt.mock.mock_enter(1)
    assert rt.launch(index=1) == OK
    assert not [line for line in rt.log() if "Push" in line or "Pop" in line]


def test_preload(rt):
    assert rt.c.mg_preload(b"scaled_add", 1) == OK
    loads = [line for line in rt.log() if "cuLibraryLoadData" in line]
    assert loads == [f"cuLibraryLoadData image={name} options=0" for name in ("plain", "clustered", "huge")]
    assert rt.launch(index=1) == OK
    assert not [line for line in rt.log() if "cuLibraryLoadData" in line]
    assert rt.c.mg_preload(b"nonsense", 0) == VALUE
    assert "there is no op nonsense, expected one of attention_fwd, attention_bwd" in rt.error()


def test_image_without_its_kernel(rt):
    assert rt.c.mg_preload(b"matmul", 0) == RUNTIME
    assert "matmul: the kernel misnamed is not in its image: CUDA error 500" in rt.error()
    assert rt.mock.mock_libraries() == 0 and rt.mock.mock_depth() == 0 and rt.mock.mock_mode() == 0


def test_fill(rt):
    assert rt.c.test_fill(CUDA, ctypes.c_void_p(0x1000), 0x7F80, ctypes.c_size_t(2), ctypes.c_int64(5)) == OK
    assert "cuMemsetD16Async 1000 word=7f80 n=5 stream=0x30" in rt.log()
    assert rt.c.test_fill(CUDA, ctypes.c_void_p(0x1000), 0xFF800000, ctypes.c_size_t(4), ctypes.c_int64(6)) == OK
    assert "cuMemsetD32Async 1000 word=ff800000 n=6 stream=0x30" in rt.log()
    for width, word in ((2, 0x7F80), (4, 0xFF800000), (4, 0)):
        memory = (ctypes.c_ubyte * 40)(*[1] * 40)
        assert rt.c.test_fill(CPU, memory, word, ctypes.c_size_t(width), ctypes.c_int64(5)) == OK
        assert bytes(memory) == word.to_bytes(width, "little") * 5 + b"\1" * (40 - 5 * width)


def test_sync_names_the_kernel(built, tmp_path, monkeypatch):
    monkeypatch.setenv("MARGAY_SYNC", "1")
    rt = Runtime(built, tmp_path, monkeypatch)
    assert rt.launch() == OK
    assert rt.log()[-3:] == ["cuStreamIsCapturing stream=0x10", "cuStreamSynchronize stream=0x10", "cuCtxPopCurrent"]
    rt.mock.mock_fail(5, 700)
    assert rt.launch() == RUNTIME
    assert rt.error().startswith("scaled_add: plain failed: CUDA error 700, CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access")
    rt.mock.mock_fail(0, 0)
    rt.mock.mock_capturing(1)
    rt.log()
    assert rt.launch() == OK
    assert not [line for line in rt.log() if "Synchronize" in line]


def test_threads_load_once(rt):
    threads = [threading.Thread(target=rt.launch, args=(name,)) for name in ("plain", "clustered") * 8]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert rt.mock.mock_libraries() == 2


# ---- tensor maps

def encode(rt, shape, stride, data=1 << 20, dtype=BF16, rows=128, cols=64, device=CUDA):
    view = (ctypes.c_int64 * 9)()
    quad = ctypes.c_int64 * 4
    status = rt.c.test_map(device, ctypes.c_void_p(data), dtype, quad(*shape), quad(*stride), rows, cols, view)
    return status, list(view)


def test_map_gpu(rt):
    assert encode(rt, [2, 8, 1000, 96], [768000, 96, 768, 1])[0] == OK
    assert rt.log()[-2] == ("cuTensorMapEncodeTiled dtype=9 rank=4 data=0x100000 size=96,1000,8,2 stride=1536,192,1536000 box=64,128,1,1 "
                            "step=1 interleave=0 swizzle=3 fill=0")
    assert encode(rt, [1, 1, 300, 128], [7, 13, 128, 1], dtype=FP32, rows=64, cols=128)[0] == OK
    assert rt.log()[-2] == ("cuTensorMapEncodeTiled dtype=7 rank=4 data=0x100000 size=128,300,1,1 stride=512,16,16 box=128,64,1,1 "
                            "step=1 interleave=0 swizzle=0 fill=0")
    for cols, swizzle in ((64, 2), (128, 3)):        # 8-bit floats travel as bytes; 64-byte rows have a swizzle of their own
        assert encode(rt, [2, 8, 1000, 96], [768000, 96, 768, 1], dtype=E4M3, rows=64, cols=cols)[0] == OK
        assert rt.log()[-2] == (f"cuTensorMapEncodeTiled dtype=0 rank=4 data=0x100000 size=96,1000,8,2 stride=768,96,768000 box={cols},64,1,1 "
                                f"step=1 interleave=0 swizzle={swizzle} fill=0")


def test_map_cpu(rt):
    status, view = encode(rt, [2, 8, 1000, 96], [768000, 96, 768, 1], data=4242, device=CPU)
    assert status == OK and view == [4242, 96, 1000, 8, 2, 2, 1536, 192, 1536000]


@pytest.mark.parametrize("change, message", [
    ({"data": (1 << 20) + 8}, "x is at address 0x100008, expected a multiple of 16 bytes"),
    ({"stride": [768000, 96, 764, 1]}, "x has a row stride of 764 elements of 2 bytes, expected a multiple of 16 bytes below 2^40"),
    ({"stride": [2**40, 96, 768, 1]}, "x has a batch stride of"),
    ({"stride": [768000, -96, 768, 1]}, "x has a head stride of -96"),
    ({"stride": [768000, 96, 768, 2]}, "x has a column stride of 2, expected 1"),
    ({"shape": [2, 8, 2**31, 96]}, "x has 2147483648 elements in dimension 2"),
    ({"rows": 257}, "x has a box of 257 x 64"),
    ({"cols": 128}, "x has a box of 128 x 128"),
    ({"dtype": INT32}, "x has dtype int32, which has no tensor map"),
])
def test_bad_08_map(rt, change, message):
    arguments = {"shape": [2, 8, 1000, 96], "stride": [768000, 96, 768, 1], **change}
    assert encode(rt, **arguments)[0] in (VALUE, TYPE)
    assert rt.error().startswith("test: " + message)


# ---- drivers that cannot be used

def test_bad_25_no_driver(built, tmp_path, monkeypatch):
    rt = Runtime(built, tmp_path, monkeypatch)
    monkeypatch.setenv("MARGAY_DRIVER", str(tmp_path / "libcuda_absent.so"))
    assert rt.launch() == RUNTIME
    assert re.match(r"no NVIDIA driver: .*libcuda_absent.so: cannot open shared object file", rt.error())
    monkeypatch.setenv("MARGAY_DRIVER", str(tmp_path / "driver.so"))
    assert rt.launch() == OK                  # failure is not remembered


def test_bad_25_stub(rt):
    rt.mock.mock_refuse_lookups(34)
    assert rt.launch() == RUNTIME and "the toolkit's link-time stub, not a driver" in rt.error()


def test_bad_26_old_driver(built, tmp_path, monkeypatch, rt):
    rt.mock.mock_version(11080)
    assert rt.launch() == RUNTIME and "supports CUDA 11.8, at least 12.0 (R525) is needed" in rt.error()
    rt.mock.mock_version(13000)
    rt.mock.mock_refuse_lookups(500)
    assert rt.launch() == RUNTIME and "the NVIDIA driver lacks cuInit of CUDA 2.0" in rt.error()
    (tmp_path / "old").mkdir()
    rt = Runtime(built, tmp_path / "old", monkeypatch, "old_libcuda.so")
    assert rt.launch() == RUNTIME and "older than CUDA 12.0 (R525)" in rt.error()


def test_bad_23_architecture(rt):
    assert rt.launch(index=2) == UNSUPPORTED
    assert "cuda:2 is an NVIDIA A100 of compute capability 8.0; the GPU kernels need 9.0" in rt.error()
    assert rt.launch(index=3) == VALUE and "there is no device cuda:3; this process sees 3" in rt.error()
    assert rt.launch(index=64) == VALUE and "device index 64 is out of range" in rt.error()


def in_child(function):
    """Exit status of a fork that runs the function, 0 where it returned True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_bad_27_fork(rt):
    assert in_child(lambda: rt.launch() == OK) == 0            # before the first use a fork is fine
    assert rt.launch() == OK
    assert in_child(lambda: rt.launch() == RUNTIME and "use" in rt.error() and "'spawn'" in rt.error()) == 0
    assert rt.launch() == OK


def test_every_failing_call_is_survived(built, tmp_path, monkeypatch):
    """Each driver call of a first launch fails once; the library says so and works at the next attempt, with nothing leaked."""
    (tmp_path / "count").mkdir()
    rt = Runtime(built, tmp_path / "count", monkeypatch)
    assert rt.launch() == OK
    calls = rt.log()
    for n, call in enumerate(calls, 1):
        folder = tmp_path / str(n)
        folder.mkdir()
        rt = Runtime(built, folder, monkeypatch)
        rt.mock.mock_fail(n, 2)
        assert rt.launch() == RUNTIME, call
        assert "CUDA error 2, CUDA_ERROR_OUT_OF_MEMORY (injected by the mock driver)" in rt.error(), call
        undo_failed = call == "cuCtxPopCurrent" or call == "cuThreadExchangeStreamCaptureMode 0"   # nothing can be done about these
        if not undo_failed:
            assert rt.mock.mock_depth() == 0 and rt.mock.mock_mode() == 0, call
        assert rt.launch() == OK, call
        assert rt.mock.mock_libraries() == 1, call


def test_bad_34_sticky_error(rt):
    assert rt.launch() == OK
    rt.mock.mock_fail(3, 700)
    assert rt.launch(blocks=5) == RUNTIME
    assert rt.error().startswith("scaled_add: launch of plain with 5 blocks of 128 threads and 1024 bytes of shared memory failed: "
                                 "CUDA error 700")
    assert "this or an earlier kernel failed asynchronously, MARGAY_SYNC=1 finds the first" in rt.error()
    rt.mock.mock_fail(3, 999)
    assert rt.launch() == RUNTIME and "CUDA error 999, unknown error" in rt.error()


# ---- dispatch

def qkv(dtype=BF16, device=CUDA, d=64, **more):
    shapes = {"out": [2, 4, 100, d], "q": [2, 4, 100, d], "k": [2, 4, 200, d], "v": [2, 4, 200, d]}
    tensors = {name: tensor(shape, dtype=dtype, device=device, data=(i + 1) << 24) for i, (name, shape) in enumerate(shapes.items())}
    return {"lse": None, **tensors, **more}


def test_select_and_launch(rt):
    assert rt.attention(**qkv()) == OK
    assert "cuLaunchKernelEx forward grid=8,1,1 block=256,1,1 shared=100000 cluster=0 stream=(nil) params=42 context=0" in rt.log()


def test_unsupported_lists_reasons(rt):
    assert rt.attention(**qkv(d=256)) == UNSUPPORTED
    assert rt.error().splitlines() == ["attention: no kernel for bfloat16, d=256, on the GPU", "  forward needs d <= 128",
                                       "  1 more for other dtypes or devices"]


# ---- checks

def refused(rt, status, message, op="attention", **change):
    arguments = qkv(device=CPU)
    arguments.update(change)
    assert rt.attention(**arguments) == status
    assert rt.error().startswith(f"{op}: {message}"), rt.error()


def test_bad_01_dtype(rt):
    refused(rt, TYPE, "k has dtype float32, expected bfloat16 (same as q)", k=tensor([2, 4, 200, 64], dtype=FP32))
    refused(rt, TYPE, "q has dtype int64, expected bfloat16, float16 or float32", q=tensor([2, 4, 100, 64], dtype=INT64))
    refused(rt, TYPE, "lse has dtype bfloat16, expected float32", lse=tensor([2, 4, 100]))
    assert rt.attention(**qkv(dtype=FP32, device=CUDA)) == TYPE
    assert rt.error() == "attention: q has dtype float32, expected bfloat16 or float16 (float32 only on the CPU)"


def test_bad_02_rank_and_missing(rt):
    refused(rt, VALUE, "k has 3 dimensions, expected 4", k=tensor([4, 200, 64]))
    refused(rt, TYPE, "v is missing, expected a tensor", v=None)


def test_bad_03_04_device(rt):
    refused(rt, TYPE, "k is on a CUDA device, expected the CPU (same as q)", k=tensor([2, 4, 200, 64], device=CUDA))
    arguments = qkv()
    arguments["v"].device_index = 1
    assert rt.attention(**arguments) == VALUE
    assert rt.error() == "attention: v is on cuda:1, expected cuda:0 (same as q)"


def test_bad_06_07_strides(rt):
    shape = [2, 4, 200, 64]
    refused(rt, VALUE, "k has shape [2, 4, 200, 64] and strides [51200, 12800, 1, 200], expected a contiguous last dimension; call .contig",
            k=tensor(shape, [51200, 12800, 1, 200]))
    refused(rt, VALUE, "k has shape [2, 4, 200, 64] and strides [51200, -12800, 64, 1], expected no negative ones",
            k=tensor(shape, [51200, -12800, 64, 1]))
    refused(rt, VALUE, "lse has shape [2, 4, 100] and strides [800, 200, 2], expected a contiguous tensor",
            lse=tensor([2, 4, 100], [800, 200, 2], dtype=FP32))


def test_expanded_inputs_and_unused_strides_are_taken(rt):
    lse = tensor([2, 1, 1], [1, -7, 99], data=10 << 24, dtype=FP32)
    a = qkv(device=CPU, k=tensor([2, 4, 200, 64], [0, 0, 64, 1], data=9 << 24), lse=lse)
    assert rt.check("attention_fwd", [a[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK, rt.error()


def test_matmul_takes_transposed_views(rt):
    out, a = tensor([8, 16], data=1 << 24), tensor([8, 32], data=2 << 24)
    assert rt.check("matmul", [out, a, tensor([32, 16], [1, 32]), None]) == OK
    assert rt.check("matmul", [out, a, tensor([32, 16], [2, 64]), None]) == VALUE
    assert "one of the last two dimensions contiguous" in rt.error()
    assert rt.check("matmul", [tensor([8, 16], [1, 8], data=1 << 24), a, tensor([32, 16]), None]) == VALUE


def test_bad_08_misaligned_element(rt):
    refused(rt, VALUE, "q is at address 0x100001, expected a multiple of 2", q=tensor([2, 4, 100, 64], data=(1 << 20) + 1))
    refused(rt, VALUE, "q has no memory (a null pointer)", q=tensor([2, 4, 100, 64], data=0))


def test_empty_tensors_have_no_memory_to_check(rt):
    a = qkv(device=CPU, out=tensor([2, 4, 0, 64], data=0), q=tensor([2, 4, 0, 64], data=0))
    assert rt.check("attention_fwd", [a[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK


def test_bad_13_sizes(rt):
    refused(rt, VALUE, "q has shape [2, 4, 2147483648, 64], expected 0 to 2^31 - 1", q=tensor([2, 4, 2**31, 64]))
    refused(rt, VALUE, "q with shape [2, 4, 100, 64] and strides [4611686018427387904, 64, 64, 1] reaches past the end of memory",
            q=tensor([2, 4, 100, 64], [2**62, 64, 64, 1]))
    refused(rt, VALUE, "q with shape [2147483647, 2147483647, 2147483647, 2] and strides",
            q=tensor([2**31 - 1] * 3 + [2], [2**33, 2**32, 2, 1]))
    far = qkv(device=CPU, k=tensor([2, 4, 200, 64], [2**33, 2**31, 64, 1], data=1 << 40))
    assert rt.check("attention_fwd", [far[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK


def test_bad_15_overlap_with_an_input(rt):
    refused(rt, BUFFER, "out is written, but shares memory with q", out=tensor([2, 4, 100, 64], data=(2 << 24) + 64))
    refused(rt, BUFFER, "out is written, but shares memory with lse", out=tensor([2, 4, 100, 64], data=7 << 24),
            lse=tensor([2, 4, 100], data=(7 << 24) + 4, dtype=FP32))


def test_bad_16_output_overlaps_itself(rt):
    refused(rt, BUFFER, "out is written, but with shape [2, 4, 100, 64] and strides [0, 6400, 64, 1] its elements may share",
            out=tensor([2, 4, 100, 64], [0, 6400, 64, 1], data=1 << 24))
    refused(rt, BUFFER, "out is written, but with shape", out=tensor([2, 4, 100, 64], [25600, 6400, 32, 1], data=1 << 24))


def test_bad_17_read_only_output(rt):
    refused(rt, BUFFER, "out is written, but its memory is read-only", out=tensor([2, 4, 100, 64], data=1 << 24, read_only=True))
    arguments = qkv(device=CPU)
    arguments["q"].read_only = True
    assert rt.check("attention_fwd", [arguments[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK


def slices(layout, batch=2, rows=10, heads=4, d=64, base=1 << 20):
    """Three views [batch, heads, rows, d] of one buffer."""
    if layout == "rows":          # [B, N, 3, H, D]
        strides, step = [rows * 3 * heads * d, d, 3 * heads * d, 1], heads * d
    elif layout == "heads":       # [B, N, H, 3, D]
        strides, step = [rows * 3 * heads * d, 3 * d, 3 * heads * d, 1], d
    elif layout == "head first":  # [B, H, N, 3, D]
        strides, step = [rows * 3 * heads * d, rows * 3 * d, 3 * d, 1], d
    else:                         # [B, 3, H, N, D]
        strides, step = [rows * 3 * heads * d, rows * d, d, 1], rows * heads * d
    return [tensor([batch, heads, rows, d], strides, data=base + 2 * i * step) for i in range(3)]


def backward(gradients, like=(2, 4, 10, 64)):
    fresh = [tensor(list(like), data=(i + 9) << 24) for i in range(5)]
    return [*gradients, *fresh, tensor(list(like[:3]), data=15 << 24, dtype=FP32), None, tensor([100], data=16 << 24, dtype=UINT8)]


@pytest.mark.parametrize("layout", ["rows", "heads", "head first", "outer"])
def test_gradients_may_be_slices_of_one_buffer(rt, layout):
    dq, dk, dv = slices(layout)
    assert rt.check("attention_bwd", backward([dq, dk, dv])) == OK, rt.error()
    assert rt.check("attention_bwd", backward([dq, dk, slices(layout)[1]])) == BUFFER
    assert rt.error() == "attention_backward: dk is written, but shares memory with dv"
    for shift in (2, -2):         # one element off: the last column of one is the first of another
        moved = slices(layout, base=(1 << 20) + shift)[1]
        assert rt.check("attention_bwd", backward([dq, moved, dv])) == BUFFER


def addresses(t):
    found = [t.data]
    for n, s in zip(t.shape[:t.dims], t.stride[:t.dims]):
        found = [a + 2 * s * i for a in found for i in range(n)]
    return found


def test_overlap_against_enumeration(rt):
    """Never accepts what overlaps; how often it refuses what does not is bounded."""
    import random
    random.seed(1)
    false_alarms = accepted = 0
    for _ in range(1500):
        def draw():
            shape = [random.randint(1, 3) for _ in range(3)] + [random.randint(1, 4)]
            strides = [random.choice([0, 1, 4, 8, 12, 24, 48]) for _ in range(3)] + [1]
            return tensor(shape, strides, data=(1 << 20) + 2 * random.randint(0, 40))
        out, q = draw(), draw()
        rest = [tensor([1, 1, 1, 1], data=(i + 2) << 24) for i in range(2)]
        wrong = len(set(addresses(out))) < len(addresses(out)) or bool(set(addresses(out)) & set(addresses(q)))
        status = rt.check("attention_fwd", [out, None, q, *rest, None])
        assert status in (OK, BUFFER)
        assert not (wrong and status == OK), (addresses(out), addresses(q))
        accepted += status == OK
        false_alarms += status == BUFFER and not wrong
    assert accepted > 100 and false_alarms < accepted


# ---- the CPU's pool

def hits_of(rt, blocks, row="plain"):
    hits = (ctypes.c_int * blocks)()
    assert rt.launch(row, blocks, device=CPU, hits=hits) == OK
    return list(hits)


def test_cpu_runs_every_cluster_once(rt):
    for threads in (1, 2, 5):
        rt.c.mg_set_num_threads(threads)
        assert rt.c.mg_num_threads() == threads
        for blocks in (1, 2, 7, 1000):
            assert hits_of(rt, blocks) == [1] * blocks
        assert hits_of(rt, 10, "clustered") == [1, 0] * 5


def test_cpu_concurrent_callers(rt):
    rt.c.mg_set_num_threads(4)
    wrong = []

    def call():
        for _ in range(100):
            if hits_of(rt, 50) != [1] * 50:
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_bad_33_cpu_memory(rt):
    """A thread without the memory that a cluster needs takes none; where no thread takes part, the call fails, and the next one works."""
    lacks = ctypes.c_size_t.in_dll(rt.c, "mock_lacks")
    for threads in (1, 4):
        rt.c.mg_set_num_threads(threads)
        lacks.value = 4096
        hits = (ctypes.c_int * 50)()
        assert rt.launch("plain", 50, device=CPU, hits=hits) == MEMORY and list(hits) == [0] * 50
        assert rt.error() == "scaled_add: out of memory, the kernel plain on the CPU could not get 4096 bytes"
        lacks.value = 0
        assert hits_of(rt, 50) == [1] * 50


def test_cpu_survives_fork(rt):
    rt.c.mg_set_num_threads(4)
    assert hits_of(rt, 100) == [1] * 100
    assert in_child(lambda: hits_of(rt, 100) == [1] * 100) == 0
    assert hits_of(rt, 100) == [1] * 100


def test_number_of_threads(built, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    rt = Runtime(built, tmp_path, monkeypatch)
    assert rt.c.mg_num_threads() == 3
    rt.c.mg_set_num_threads(2)
    assert rt.c.mg_num_threads() == 2
    rt.c.mg_set_num_threads(0)
    assert rt.c.mg_num_threads() == 3


def test_bad_41_number_of_threads(built, tmp_path, monkeypatch):
    """What is no number of threads is passed over."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "default").mkdir()
    default = Runtime(built, tmp_path / "default", monkeypatch).c.mg_num_threads()
    for text, threads in (("99999999999", default), ("4294967299", default), ("1025", default), ("-2", default), ("3x", default), ("", default), ("1024", 1024),
                          (" 7 ", 7), ("5,1", 5)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        folder = tmp_path / (text.strip() or "empty")
        folder.mkdir()
        assert Runtime(built, folder, monkeypatch).c.mg_num_threads() == threads, text


def test_isa_can_be_lowered(built, tmp_path, monkeypatch):
    monkeypatch.setenv("MARGAY_ISA", "base")
    assert Runtime(built, tmp_path, monkeypatch).c.mg_host_isa() == 0


def test_bad_41_isa(built, tmp_path, monkeypatch):
    """A name that means nothing is refused where the CPU would compute."""
    for text in ("garbage", "AVX2", "avx2 "):
        monkeypatch.setenv("MARGAY_ISA", text)
        folder = tmp_path / text
        folder.mkdir()
        rt = Runtime(built, folder, monkeypatch)
        assert rt.launch(device=CPU) == VALUE and rt.error() == f"the environment's MARGAY_ISA is {text}, expected base, avx2 or avx512"
        assert rt.launch() == OK                              # of no concern to a GPU
    for text in ("", "base", "avx2", "avx512"):               # at most: a machine may have less
        monkeypatch.setenv("MARGAY_ISA", text)
        folder = tmp_path / f"{text} known"
        folder.mkdir()
        assert Runtime(built, folder, monkeypatch).launch(device=CPU) == OK


# ---- the module

@pytest.fixture
def module(built, tmp_path, rt):
    path = shutil.copy(built / "_C.so", tmp_path / "_C.so")
    loader = importlib.machinery.ExtensionFileLoader("_C", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_C", loader))
    loader.exec_module(module)
    module.log = rt.log
    return module


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("dims", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64)]


class DLManaged(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64),
                ("tensor", DLTensor)]


def new_capsule(pointer, name):
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(pointer, name, None)


class Fake:
    """A tensor of any kind that the memory of this machine cannot hold: exports through __dlpack__ and remembers how it was asked."""

    def __init__(self, shape, strides="compact", data=1 << 24, code=4, bits=16, device=(2, 0), lanes=1, flags=0, major=1, offset=0):
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        strides = compact(shape) if strides == "compact" else strides
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self.managed = DLManaged((ctypes.c_uint32 * 2)(major, 0), None, None, flags, DLTensor(
            data, (ctypes.c_int32 * 2)(*device), len(shape), code, bits, lanes, ctypes.addressof(self.shape),
            ctypes.addressof(self.strides) if strides else None, offset))
        self.device, self.name, self.asked = device, b"dltensor_versioned", None

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **keywords):
        self.asked = keywords
        return new_capsule(ctypes.addressof(self.managed), self.name)


class Old(Fake):
    """Before DLPack 1.0: no versions."""

    def __dlpack__(self, stream=None):
        self.asked = {"stream": stream}
        return new_capsule(ctypes.addressof(self.managed.tensor), b"dltensor")


def fakes(kind=Fake, **more):
    shapes = {"out": [1, 2, 8, 64], "q": [1, 2, 8, 64], "k": [1, 2, 8, 64], "v": [1, 2, 8, 64]}
    return {name: kind(shape, data=(i + 1) << 24, **more) for i, (name, shape) in enumerate(shapes.items())}


def call(module, t, stream=()):
    return module.attention_fwd(t["out"], t.get("lse"), t["q"], t["k"], t["v"], 1.0, False, *stream)


def test_module_launches_on_the_given_stream(module):
    t = fakes()
    assert call(module, t, [0x5000]) is None
    assert any(line.startswith("cuLaunchKernelEx forward") and "stream=0x5000" in line for line in module.log())
    assert t["q"].asked == {"max_version": (1, 3), "stream": 0x5000}
    assert call(module, fakes()) is None and any("stream=(nil)" in line for line in module.log())


def test_module_devices(module):
    call(module, fakes(device=(2, 1)))
    assert any("context=1" in line for line in module.log())
    with pytest.raises(NotImplementedError, match="cuda:2 is an NVIDIA A100"):
        call(module, fakes(device=(2, 2)))
    with pytest.raises(TypeError, match="attention: out is on DLPack device type 7, expected the CPU or a CUDA device"):
        call(module, fakes(device=(7, 0)))


def test_module_old_producers(module):
    t = fakes(Old)
    call(module, t, [0x5000])
    assert t["q"].asked == {"stream": 0x5000}
    call(module, fakes(Old, strides=None))


def test_module_offset(module):
    a = fakes()
    a["k"] = Fake([1, 2, 8, 64], data=1 << 24, offset=9 << 24)
    call(module, a)
    a["k"] = Fake([1, 2, 8, 64], data=2 << 24, offset=-(1 << 24) % 2**64)
    with pytest.raises(BufferError, match="attention: out is written, but shares memory with k"):
        call(module, a)


class Table(ctypes.Structure):
    """DLPackExchangeAPI of a type whose objects are Fakes on device 0; `streams` are the devices whose current stream was asked for."""

    Borrow = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
    Stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    _fields_ = [("version", ctypes.c_uint32 * 2), ("previous", ctypes.c_void_p), ("unused", ctypes.c_void_p * 3), ("borrow", Borrow),
                ("stream", Stream)]

    def __init__(self, major=1, previous=None, events=None):
        def borrow(fake, out):
            out[0] = fake.managed.tensor
            if events is not None:
                events.append("borrow")
            return 0

        def stream(kind, index, out):
            self.streams.append((kind, index))
            out[0] = 0x7770
            return 0

        self.streams, self.keep = [], previous
        address = ctypes.addressof(previous) if previous is not None else None
        super().__init__((ctypes.c_uint32 * 2)(major, 3), address, (ctypes.c_void_p * 3)(), Table.Borrow(borrow), Table.Stream(stream))


def tabled(table):
    capsule = new_capsule(ctypes.addressof(table), b"dlpack_exchange_api")
    return type("Tabled", (Fake,), {"__dlpack_c_exchange_api__": capsule, "keep": table})


def test_module_exchange_table(module):
    table = Table()
    kind = tabled(table)
    t = fakes(kind, device=(2, 1))
    call(module, t)
    assert table.streams == [(2, 1)] and t["q"].asked is None
    assert any("stream=0x7770" in line and "context=1" in line for line in module.log())
    call(module, t, [0x5000])                 # a stream that the caller names is taken as it is
    assert len(table.streams) == 1 and any("stream=0x5000" in line for line in module.log())
    call(module, fakes(kind, device=(1, 0), code=2, bits=32))
    assert len(table.streams) == 1            # the CPU has none


def test_module_exchange_table_of_another_version(module):
    older = Table()
    t = fakes(tabled(Table(2, older)))
    call(module, t)
    assert older.streams and t["q"].asked is None
    t = fakes(tabled(Table(2)))
    call(module, t)
    assert t["q"].asked


def test_bad_38_subclasses_do_not_inherit_the_table(module):
    table = Table()
    t = fakes(type("Wrapper", (tabled(table),), {}))
    call(module, t)
    assert t["q"].asked and not table.streams


def test_bad_40_python_runs_before_memory_is_viewed(module):
    """Python code of an exporter, a type or a number could free or resize what was viewed before it: it has all run then."""
    events = []

    class Logging(Fake):
        def __dlpack_device__(self):
            events.append("python")
            return super().__dlpack_device__()

        def __dlpack__(self, **keywords):
            events.append("python")
            return super().__dlpack__(**keywords)

    class Meta(type):
        def __getattribute__(cls, name):
            events.append("python")
            return super().__getattribute__(name)

    class Number(float):
        def __float__(self):
            events.append("python")
            return 1.0

        def __index__(self):
            events.append("python")
            return 0

        __bool__ = __index__ = lambda self: events.append("python") or False

    kind, seen = tabled(Table(events=events)), Meta("Seen", (Fake,), {})
    for which in ("out", "q", "k", "v"):
        for python in (Logging, seen):
            t = fakes(kind)
            t[which] = python([1, 2, 8, 64], data=9 << 24)
            events.clear()
            module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], Number(), Number())
            assert "python" in events and events[-3:] == ["borrow"] * 3 and "borrow" not in events[:-3]


def test_bad_40_masked_arrays(module):
    numpy = pytest.importorskip("numpy")
    out, q, k, v = (numpy.zeros((1, 2, 8, 64), numpy.float32) for _ in range(4))
    for masked in (numpy.ma.masked_array(k), numpy.ma.masked_array(k, k == 0)):
        with pytest.raises(TypeError, match=r"attention: k is <class 'numpy\.ma\S*MaskedArray'>, expected a tensor .* without a mask"):
            module.attention_fwd(out, None, q, masked, v, 1.0, False)


class Shapeless(Fake):
    """Dimensions, and no pointer to their sizes."""

    def __init__(self, shape):
        super().__init__(shape)
        self.managed.tensor.shape = None


@pytest.mark.parametrize("change, error, message", [
    ({"q": Shapeless([1, 2, 8, 64])}, ValueError, "attention: q has 4 dimensions and no shape (a null pointer)"),
    ({"q": 3}, TypeError, "attention: q is <class 'int'>, expected a tensor"),
    ({"q": Fake}, TypeError, "attention: q is <class 'type'>, expected a tensor"),
    ({"q": None}, TypeError, "attention: q is missing"),
    ({"q": Fake([1, 2, 8, 64], code=5)}, TypeError, "attention: q has DLPack type code 5 of 16 bits and 1 lanes"),
    ({"q": Fake([1, 2, 8, 64], lanes=2)}, TypeError, "2 lanes"),
    ({"q": Fake([1] * 9)}, ValueError, "attention: q has 9 dimensions, expected at most 8"),
    ({"q": Fake([1, 2, 8, 64], major=2)}, BufferError, "attention: q is exported by DLPack 2.0, expected 1.x"),
    ({"q": Fake([1, 2, 8, 64], flags=2)}, BufferError, "attention: q exports a copy of its memory, expected a view"),
    ({"out": Fake([1, 2, 8, 64], flags=1)}, BufferError, "attention: out is written, but its memory is read-only"),
    ({"q": Fake([1, 2, 8, 64], device=(1, 0))}, TypeError, "attention: out is on a CUDA device, expected the CPU"),
    ({"q": Fake([2, 8, 64])}, ValueError, "attention: q has 3 dimensions, expected 4"),
])
def test_module_refuses(module, change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(module, {**fakes(), **change})


def test_module_producer_errors(module):
    class Broken(Fake):
        def __dlpack__(self, **keywords):
            raise BufferError("not today")

    class Used(Fake):
        def __dlpack__(self, **keywords):
            return new_capsule(ctypes.addressof(self.managed), b"used_dltensor_versioned")

    class Deviceless(Fake):
        def __dlpack_device__(self):
            raise RuntimeError("nowhere")

    for kind, error, message in ((Broken, BufferError, "attention: k: not today"), (Used, TypeError, "an unused DLPack capsule"),
                                 (Deviceless, RuntimeError, "attention: k: nowhere")):
        with pytest.raises(error, match=message):
            call(module, {**fakes(), "k": kind([1, 2, 8, 64])})


def test_bad_40_exceptions_that_are_no_string(module):
    """An exporter's exception arrives as what it is, also where its class is not made from a text alone."""
    class Two(Exception):
        def __init__(self, code, reason):
            super().__init__(code, reason)

    class Other(Exception):
        def __new__(cls, *arguments):
            return ValueError("another") if len(arguments) == 1 else super().__new__(cls, *arguments)

    raised = []

    class Broken(Fake):
        def __dlpack__(self, **keywords):
            raise raised[-1]

    for error in (Two(7, "not today"), UnicodeDecodeError("ascii", b"x", 0, 1, "not today"), Other(7, "not today")):
        raised.append(error)
        with pytest.raises(type(error)) as found:
            call(module, {**fakes(), "k": Broken([1, 2, 8, 64])})
        assert found.value is error and "not today" in str(error) and found.value.__context__ is None
    with pytest.raises(KeyError, match="attention: k: 'not there'"):
        raised.append(KeyError("not there"))
        call(module, {**fakes(), "k": Broken([1, 2, 8, 64])})


@pytest.mark.parametrize("arguments, message", [
    ((), "attention_fwd takes 7 to 10 positional arguments, got 0"),
    ((None,) * 11, "got 11"),
    ((None,) * 5 + ("x", False), "must be real number"),
    ((None,) * 5 + (1.0, False, "x"), "int"),
    ((None,) * 5 + (1.0, False, 0, None, [1]), "attention: features is <class 'list'>, expected None or a tuple \\(left, right, softcap"),
    ((None,) * 5 + (1.0, False, 0, None, 3), "attention: features is <class 'int'>, expected None or a tuple"),
    ((None,) * 5 + (1.0, False, 0, None, (1,)), "features\\(\\) takes exactly 11 arguments \\(1 given\\)"),
])
def test_module_arguments(module, arguments, message):
    with pytest.raises(TypeError, match=message):
        module.attention_fwd(*arguments)


def test_features_of_the_backward(module):
    with pytest.raises(TypeError, match="attention_backward: features is <class 'list'>, expected None or a tuple"):
        module.attention_bwd_workspace(None, None, None, False, False, [1])
    with pytest.raises(TypeError, match="attention_backward: features is <class 'list'>, expected None or a tuple"):
        module.attention_bwd(*(None,) * 11, 1.0, False, False, 0, [1])


@pytest.mark.parametrize("number", (1e-46, -1e-46, 5e-324, 1e39, -1e300))
def test_bad_39_numbers_that_float32_cannot_hold(module, number):
    """They would be 0, which means the default or nothing, or infinite."""
    message = re.escape(f"{number!r}, expected a number that float32 can hold")
    t = fakes()
    with pytest.raises(ValueError, match="^attention: scale is " + message):
        module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], number, False)
    for place, name in ((2, "softcap"), (3, "dropout")):
        features = [-1, -1, 0.0, 0.0, 0, None, None, None, None, 0, 0]
        features[place] = number
        with pytest.raises(ValueError, match=f"^attention: {name} is {message}"):
            module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], 1.0, False, 0, None, tuple(features))
    for place, name in ((11, "scale"), (15, "softcap")):
        arguments = [*(None,) * 11, 1.0, False, -1, -1, 0.0, -1, 0]
        arguments[place] = number
        with pytest.raises(ValueError, match=f"^attention_decode: {name} is {message}"):
            module.attention_decode(*arguments)
    assert module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], 2e-45, False) is None      # the smallest that it holds, rounded


def test_bad_40_capsules_are_not_leaked(module):
    import gc
    import sys
    numpy = pytest.importorskip("numpy")
    a = [numpy.zeros((1, 2, 8, 64), numpy.float32) for _ in range(4)]
    before = [sys.getrefcount(x) for x in a]
    for _ in range(20000):
        module.attention_fwd(a[0], None, *a[1:], 1.0, False)
    gc.collect()
    assert [sys.getrefcount(x) for x in a] == before


def test_module_numpy(module):
    numpy = pytest.importorskip("numpy")
    out, q, k, v = (numpy.zeros((1, 2, 8, 64), numpy.float32) for _ in range(4))
    q.flags.writeable = False
    module.attention_fwd(out, None, q, k, v, 1.0, False)
    out.flags.writeable = False
    with pytest.raises(BufferError, match="out is written, but its memory is read-only"):
        module.attention_fwd(out, None, q, k, v, 1.0, False)
    with pytest.raises(BufferError, match="shares memory with k"):
        module.attention_fwd(k[:, :, ::-1][:, :, ::-1], None, q, k, v, 1.0, False)
    with pytest.raises(ValueError, match="expected no negative ones"):
        module.attention_fwd(numpy.zeros_like(v), None, q, k[:, :, ::-1], v, 1.0, False)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_module_torch(module):
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 8, 3, 2, 64, dtype=torch.bfloat16)
    q, k, v = (x[:, :, i].transpose(1, 2) for i in range(3))
    out = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    module.attention_fwd(out, None, q, k, v, 1.0, False)
    module.attention_fwd(out, None, torch.nn.Parameter(q), k, v, 1.0, False)
    with pytest.raises(BufferError, match="out is written, but shares memory with q"):
        module.attention_fwd(q, None, q, k, v, 1.0, False)
    with pytest.raises(RuntimeError, match="attention: out: Cannot pack tensors on meta$"):
        module.attention_fwd(out.to("meta"), None, q.to("meta"), k, v, 1.0, False)
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode, pytest.raises(Exception):
        module.attention_fwd(out, None, mode.from_tensor(q), k, v, 1.0, False)


def test_module_workspace(module):
    t = fakes()
    assert module.attention_bwd_workspace(t["q"], t["k"], t["v"], False, True) == 32


def test_module_info(module):
    info = module.info()
    assert info["cuda_built"] and info["kernels"] == 7 and info["driver"] == "13.0" and info["gpu_reason"] is None
    assert info["devices"][2] == {"name": "NVIDIA A100", "cc": "8.0", "sms": 108}
    assert not [line for line in module.log() if "Retain" in line]            # looking costs the devices no memory
    rows = module.kernels()
    assert rows[1] == {"name": "clustered", "op": "scaled_add", "source": "scaled_add", "dtype": "bfloat16", "where": "any",
                       "when": "d <= 128", "constants": "D=128, CLUSTER=2", "has_gpu_image": True, "shared_bytes": 200000, "threads": 384, "params_bytes": 16}
    assert not rows[2]["has_gpu_image"]


def test_module_explain(module):
    name, text = module.explain("scaled_add", gpu=True, d=100)
    assert name == "clustered" and text.startswith("scaled_add for bfloat16, d=100, on the GPU: clustered\n  plain needs d <= 64 && !causal\n  clustered takes it")
    name, text = module.explain("scaled_add", dtype="float16", gpu=True, d=100)
    assert name is None and "no kernel\n" in text
    assert "huge needs 300000 bytes of shared memory, a block has 232448" in text
    with pytest.raises(ValueError, match="there is no op nonsense"):
        module.explain("nonsense")
    with pytest.raises(ValueError, match="explain: dtype is int8"):
        module.explain("matmul", dtype="int8")
    with pytest.raises(TypeError):
        module.explain("matmul", colour=1)


def test_module_dry_run(module):
    name, text = module.dry_run(lambda: call(module, fakes()))
    assert name == "forward" and "forward takes it" in text and not any("cuLaunch" in line for line in module.log())
    with pytest.raises(RuntimeError, match="^dry_run: the call asked for no kernel"):
        module.dry_run(lambda: None)
    with pytest.raises(TypeError):                            # of the call, before it has asked
        module.dry_run(lambda: call(module, {**fakes(), "q": None}))
    call(module, fakes())
    assert any("cuLaunchKernelEx forward" in line for line in module.log())


@pytest.mark.parametrize("size", ("d", "batch", "heads_q", "heads_k", "nq", "nk", "m", "n", "k", "page"))
def test_bad_39_explain_sizes(module, size):
    for absurd in (-2**63, -1, 2**31, 2**63 - 1):
        with pytest.raises(ValueError, match=re.escape(f"explain: {size} is {absurd}, expected 0 to 2^31 - 1")):
            module.explain("scaled_add", **{size: absurd})
    assert "scaled_add for" in module.explain("scaled_add", **{size: 2**31 - 1})[1]


def test_module_without_driver(module, monkeypatch):
    monkeypatch.setenv("MARGAY_DRIVER", "libcuda_absent.so")
    info = module.info()
    assert info["driver"] is None and info["devices"] == [] and "no NVIDIA driver" in info["gpu_reason"]
    assert "(for an H100, because here: no NVIDIA driver" in module.explain("scaled_add", gpu=True, d=100)[1]
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        call(module, fakes())


def test_module_threads_and_preload(module):
    module.set_num_threads(2)
    assert module.num_threads() == 2
    with pytest.raises(ValueError, match="n is -1"):
        module.set_num_threads(-1)
    module.preload("attention_fwd", 1)
    assert any("image=forward" in line for line in module.log())
    with pytest.raises(ValueError, match="there is no op x"):
        module.preload("x", 0)


# ---- the driver's ABI

def test_driver_api_matches_cuda_h(tmp_path):
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    header = next((Path(home) / "include" / "cuda.h" for home in homes if home and (Path(home) / "include" / "cuda.h").exists()), None)
    if not header:
        pytest.skip("no cuda.h")
    compile_c("-o", tmp_path / "abi.o", f"-I{CSRC}", "-isystem", header.parent, "-c", MOCK / "abi.c")


# ---- the C interface

def test_example_attention(tmp_path):
    library = ROOT / "build" / "libmargay.a"
    if not library.exists():
        pytest.skip("build/libmargay.a has not been built")
    compile_c("-o", tmp_path / "attention", f"-I{CSRC}", ROOT / "examples" / "attention.c", library, "-lm", "-lpthread", "-ldl")
    result = subprocess.run([tmp_path / "attention"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agree" in result.stdout
