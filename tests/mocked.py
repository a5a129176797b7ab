"""The library over tests/mock/kernel_rows.def and a driver that records its calls (tests/mock/libcuda.c); tensors of
any kind for the module."""
import ctypes
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

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


def build(folder):
    """The libraries, in `folder`."""
    sources = [*sorted((CSRC / "runtime").glob("*.c")), MOCK / "rows.c"]
    common = ["-shared", "-DMARGAY_CUDA=1", "-DMARGAY_X86=1", f"-I{MOCK}", f"-I{CSRC}", *sources]
    libraries = ["-lm", "-lpthread", "-ldl"]
    compile_c("-o", folder / "libcuda.so", "-shared", f"-I{CSRC}", MOCK / "libcuda.c")
    compile_c("-o", folder / "old_libcuda.so", "-shared", MOCK / "old_libcuda.c")
    compile_c("-o", folder / "libmargay.so", *common, *libraries)
    include = sysconfig.get_paths()["include"]
    limited = ["-DPy_LIMITED_API=0x030A0000", "-fvisibility=hidden"]
    compile_c("-o", folder / "_C.so", f"-I{include}", *limited, CSRC / "module.c", *common, *libraries)


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("device", ctypes.c_int),
                ("device_index", ctypes.c_int),
                ("dims", ctypes.c_int), ("read_only", ctypes.c_bool), ("shape", ctypes.c_int64 * 8),
                ("stride", ctypes.c_int64 * 8)]


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


class Forward(ctypes.Structure):
    """mg_attention_fwd_args."""
    _fields_ = [*((name, ctypes.c_void_p) for name in ("out", "lse", "q", "k", "v")),
                ("scale", ctypes.c_float), ("causal", ctypes.c_bool),
                ("workspace", ctypes.c_void_p), ("left", ctypes.c_int64), ("right", ctypes.c_int64),
                ("softcap", ctypes.c_float), ("dropout_p", ctypes.c_float),
                ("seed", ctypes.c_uint64),
                *((name, ctypes.c_void_p) for name in ("sink", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")),
                ("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64), ("stream", ctypes.c_void_p)]


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
        return self.c.test_launch(ROWS.index(row), device, index, ctypes.c_void_p(stream),
                                  ctypes.byref(params), ctypes.c_int64(blocks))

    def attention(self, out, lse, q, k, v, causal=False):
        args = Forward.in_dll(self.c, "mg_attention_fwd_defaults")
        args = Forward.from_buffer_copy(args)
        for name, t in dict(out=out, lse=lse, q=q, k=k, v=v).items():
            setattr(args, name, None if t is None else ctypes.addressof(t))
        args.scale, args.causal = 1.0, causal
        return self.c.mg_attention_fwd(ctypes.byref(args))

    def check(self, op, tensors):
        """Of an op's arguments, which begin with its tensors; numbers behind them are 0, and so are optional
        tensors."""
        number = ctypes.c_int()
        assert self.c.mg_op_find(ctypes.byref(number), op.encode()) == 0
        args = (ctypes.POINTER(Tensor) * (len(tensors) + 16))(*(None if t is None else ctypes.pointer(t)
                                                                for t in tensors))
        return self.c.mg_check(number, args, (ctypes.c_int64 * 256)(), False)


def in_child(function):
    """Exit status of a fork that runs the function, 0 where it returned True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def qkv(dtype=BF16, device=CUDA, d=64, **more):
    shapes = {"out": [2, 4, 100, d], "q": [2, 4, 100, d], "k": [2, 4, 200, d], "v": [2, 4, 200, d]}
    tensors = {name: tensor(shape, dtype=dtype, device=device, data=(i + 1) << 24)
               for i, (name, shape) in enumerate(shapes.items())}
    return {"lse": None, **tensors, **more}


# ---- the module, and what is given to it

def load_module(built, folder):
    """A private copy of the module."""
    path = shutil.copy(built / "_C.so", folder / "_C.so")
    loader = importlib.machinery.ExtensionFileLoader("_C", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_C", loader))
    loader.exec_module(module)
    return module


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("dims", ctypes.c_int32),
                ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p),
                ("byte_offset", ctypes.c_uint64)]


class DLManaged(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64),
                ("tensor", DLTensor)]


def new_capsule(pointer, name):
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(pointer, name, None)


class Fake:
    """A tensor of any kind that the memory of this machine cannot hold: exports through __dlpack__ and remembers how it
    was asked."""

    def __init__(self, shape, strides="compact", data=1 << 24, code=4, bits=16,
                 device=(2, 0), lanes=1, flags=0, major=1, offset=0):
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


def call(module, t, **stream):
    return module.attention_fwd(t["out"], t.get("lse"), t["q"], t["k"], t["v"], 1.0, False, **stream)


class Table(ctypes.Structure):
    """DLPackExchangeAPI of a type whose objects are Fakes on device 0; `streams` are the devices whose current stream
    was asked for."""

    Borrow = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
    Stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
    _fields_ = [("version", ctypes.c_uint32 * 2), ("previous", ctypes.c_void_p),
                ("unused", ctypes.c_void_p * 3), ("borrow", Borrow),
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
        super().__init__((ctypes.c_uint32 * 2)(major, 3), address, (ctypes.c_void_p * 3)(),
                         Table.Borrow(borrow), Table.Stream(stream))


def tabled(table):
    capsule = new_capsule(ctypes.addressof(table), b"dlpack_exchange_api")
    return type("Tabled", (Fake,), {"__dlpack_c_exchange_api__": capsule, "keep": table})
