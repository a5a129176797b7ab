"""Problems for the rows of kernels.def: small, odd, long enough that every ring wraps, on two multiprocessors. A problem is a call of the op's C
function on random tensors; the launch of the row in question is handed to the checker, all others run as usual."""

import contextlib
import ctypes

import numpy as np

from margay import _C
from margay.check.compiled import Kernel, csrc

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "float"}
SMS = 2
TAKE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)


class Array:
    """A tensor of any of our types: NumPy has no bfloat16, so the type is told through DLPack by hand."""
    CODES = {"bfloat16": (4, 16, np.uint16), "float16": (2, 16, np.float16), "float32": (2, 32, np.float32), "uint8": (1, 8, np.uint8)}

    def __init__(self, *shape, dtype="float32", values=None):
        code, bits, storage = self.CODES[dtype]
        values = np.random.default_rng(0).standard_normal(shape, np.float32) if values is None else np.broadcast_to(np.float32(values), shape)
        if dtype == "bfloat16":
            values = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
        self.data = np.ascontiguousarray(values.astype(storage) if dtype != "bfloat16" else values)
        self.sizes = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*(stride // self.data.itemsize for stride in self.data.strides))
        self.managed = Managed(self.data.ctypes.data, 1, 0, len(shape), code, bits, 1, self.sizes, self.strides, 0, None, None)

    def turned(self):
        """The transposed matrix."""
        other = object.__new__(Array)
        other.data = self.data
        other.sizes, other.strides = (ctypes.c_int64 * 2)(*self.sizes[::-1]), (ctypes.c_int64 * 2)(*self.strides[::-1])
        m = self.managed
        other.managed = Managed(m.data, 1, 0, 2, m.code, m.bits, 1, other.sizes, other.strides, 0, None, None)
        return other

    def __dlpack__(self, **_):
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return (1, 0)


class Managed(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32), ("dims", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


# ---- the problems of each op: (label, call)

def constants(row):
    return {name.strip(): int(value) for name, value in (part.split("=") for part in row["constants"].split(","))}


def attention(row, backward):
    c, dtype = constants(row), row["dtype"]
    rows, keys = 64 * c.get("NC", 2), c.get("BN", 128)
    d = {64: 40, 128: 128, 256: 200}[c["D"]]
    shapes = [(2 * rows + 17, 5 * keys + 3, False, False), (rows + 9, 3 * keys, True, True), (3 * rows, keys // 2, True, False), (30, 2 * keys + 1, False, True)]
    if backward:
        shapes = [(5 * 128 + 17, 300, False, False), (600, 200, True, True), (150, 333, True, False)]
    for nq, nk, causal, extra in shapes:
        label = f"{'causal' if causal else 'full'} {nq}x{nk}" + (" counter" if extra and not backward else "")
        yield label, lambda nq=nq, nk=nk, causal=causal, extra=extra: call_attention(row, dtype, d, nq, nk, causal, extra, backward)


def call_attention(row, dtype, d, nq, nk, causal, extra, backward):
    q, k, v = (Array(1, heads, n, d, dtype=dtype) for heads, n in ((2, nq), (1, nk), (1, nk)))
    out, lse = Array(1, 2, nq, d, dtype=dtype), Array(1, 2, nq)
    if not backward:
        return _C.attention_fwd(out, lse, q, k, v, 0.0, causal, 0, Array(16, dtype="uint8", values=0) if extra else None)
    deterministic = constants(row).get("DETERMINISTIC") == 1 or extra
    size = _C.attention_bwd_workspace(q, k, v, causal, deterministic)
    workspace = Array(size + 256, dtype="uint8", values=0)
    aligned = -workspace.managed.data % 256
    workspace.managed.data += aligned
    workspace.sizes[0] = size
    _C.attention_bwd(Array(1, 2, nq, d, dtype=dtype), Array(1, 1, nk, d, dtype=dtype), Array(1, 1, nk, d, dtype=dtype), Array(1, 2, nq, d, dtype=dtype),
                     q, k, v, out, lse, None, workspace, 0.0, causal, deterministic)


def matmul(row):
    c, dtype = constants(row), row["dtype"]
    m, n, k = 64 * c["NC"] * c["CLUSTER_SIZE"], c["BN"], 64 * c["STAGES"]
    for m, n, k, bias in ((2 * m + 30, 2 * n + 40, 2 * k + 24, False), (m, n + 8, k + 64, True), (5 * m - 20, n, 64, True), (m, n, 0, False)):
        def call(m=m, n=n, k=k, bias=bias):
            a = Array(k, m, dtype=dtype).turned() if c["TA"] else Array(m, k, dtype=dtype)
            b = Array(n, k, dtype=dtype).turned() if c["TB"] else Array(k, n, dtype=dtype)
            _C.matmul(Array(m, n, dtype=dtype), a, b, Array(n, dtype=dtype) if bias else None, 1)
        yield f"{m}x{n}x{k}" + (" bias" if bias else ""), call


def ssd_fwd(row):
    c, dtype = constants(row), row["dtype"]
    heads = c["HEADS"] * c["GROUPS"] * 2
    for steps, n in ((64 * 5 + 10, c["N"]), (64, c["N"] - 8), (130, c["N"])):
        def call(steps=steps, n=n):
            x, b, state = Array(1, steps, heads, 64, dtype=dtype), Array(1, steps, 1, n, dtype=dtype), Array(1, heads, 64, n)
            _C.ssd_fwd(Array(1, steps, heads, 64, dtype=dtype), state, x, Array(1, steps, heads, values=0.1), b, Array(1, steps, 1, n, dtype=dtype),
                       Array(heads, values=-1.0), Array(heads))
        yield f"{steps} steps, state {n}", call


def scaled_add(row):
    for m, n in ((700, 330), (64, 64), (100, 8)):
        yield f"{m}x{n}", lambda m=m, n=n: _C.scaled_add(*(Array(m, n, dtype=row["dtype"]) for _ in range(3)), 0.5)


OPS = {"attention_fwd": lambda row: attention(row, False), "attention_bwd": lambda row: attention(row, True),
       "attention_bwd_pre": lambda row: attention(row, True), "attention_bwd_post": lambda row: attention(row, True), "matmul": matmul, "ssd_fwd": ssd_fwd,
       "scaled_add": scaled_add}


def rows():
    return {row["name"]: row for row in _C.kernels()}


def kernel_of(row):
    return Kernel(csrc() / "kernels" / f"{row['source']}.cu", TYPES[row["dtype"]], row["constants"], row["name"])


class Problem:
    """One launch of a row. `run` gives the report of a seed, or None."""

    def __init__(self, kernel, label, call=None, row=None):
        self.kernel, self.label, self.call, self.row = kernel, label, call, row

    def run(self, seed, **options):
        if not self.call:
            return self.kernel.run_example(seed, **options)
        reports, launches = [], []

        @TAKE
        def take(name, params, blocks):
            if name.decode() != self.kernel.name:
                return False
            launches.append(blocks)
            reports.append(self.kernel.run(params, blocks, seed, **options))
            return True
        with intercepting(take, self.kernel.name):
            self.call()
        if not launches:
            raise RuntimeError(f"{self.kernel.name}: {self.label} did not launch it")
        return reports[0]


@contextlib.contextmanager
def intercepting(take, name):
    _C.prefer(name)
    _C.intercept(ctypes.cast(take, ctypes.c_void_p).value, SMS)
    try:
        yield
    finally:
        _C.intercept(0, 0)
        _C.prefer(None)


def problems(row):
    kernel = kernel_of(row)
    return [Problem(kernel, label, call, row) for label, call in OPS[row["op"]](row)]
