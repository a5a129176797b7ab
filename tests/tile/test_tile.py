"""Every tile operation against its formula in numpy, on the CPU for each instruction set it has, and on the GPU where
there is one.

The kernels are in ops.cu, their rows in ops.def. MARGAY_TILE_LIBS names a folder where their libraries are kept between
runs; one that lies there is used as it is where its compiler is missing."""

import ctypes
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
TYPES = ("bf16", "fp16", "float")
ISAS = {"base": ["-Os"] if platform.machine() == "x86_64" else []}      # as setup.py compiles it
if platform.machine() == "x86_64":
    ISAS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISAS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq",
                      "-mavx512bf16", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
SHAPES = re.findall(r"^OP\((\w+), (\d+), (\d+), (\d+), (\d+), (\d+), (\d+)\)", (HERE / "ops.def").read_text(), re.M)
ROWS = [(body, *map(int, shape)) for body, *shape in SHAPES]


def cpu_runs(flags):
    words = set(Path("/proc/cpuinfo").read_text().split()) if os.path.exists("/proc/cpuinfo") else set()
    need = {f[2:].replace("avx512bf16", "avx512_bf16") for f in flags if f.startswith("-m") and "prefer" not in f}
    return need <= words


def has_gpu():
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        return False


TARGETS = [(isa, t) for isa, flags in ISAS.items() if cpu_runs(flags) for t in TYPES]
if has_gpu():
    TARGETS += [("sm90", "bf16"), ("sm90", "fp16")]


def build(target, elem, folder):
    """Compile ops.cu for a target; the library's path."""
    out = Path(folder) / f"ops_{target}_{elem}.so"
    sources = [HERE / "ops.cu", HERE / "ops.def", *CSRC.rglob("tile/**/*.h")]
    if target == "sm90":
        compiler = os.environ.get("NVCC") or shutil.which("nvcc")
        flags = ["-O3", "-gencode=arch=compute_90a,code=sm_90a", "-Xcompiler", "-fPIC", "-cudart", "static"]
    else:
        compiler = os.environ.get("CXX") or shutil.which("g++")
        flags = ["-O2", "-ftree-vectorize", "-fPIC", "-x", "c++", "-Wall", "-Wextra",
                 "-Werror", "-fno-exceptions", "-fno-rtti",
                 "-fno-threadsafe-statics", "-fvisibility=hidden", *ISAS[target]]
    if out.exists() and (not compiler or all(s.stat().st_mtime < out.stat().st_mtime for s in sources)):
        return out
    if not compiler:
        pytest.skip("no compiler for " + target)
    subprocess.run([compiler, "-std=c++17", *flags, "-shared", f"-I{CSRC}",
                    f"-DELEM={elem}", "-DCONSTANTS=UNUSED=0", "-o", str(out),
                    str(HERE / "ops.cu")], check=True)
    return out


# ---- element types as numpy arrays: bf16 lives in uint16
def encode(x, elem):
    x = np.asarray(x, np.float32)
    if elem == "float":
        return x
    if elem == "fp16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    u = x.view(np.uint32)
    rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def decode(x, elem):
    if elem == "bf16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


class Params(ctypes.Structure):
    _fields_ = [("a", ctypes.c_char * 128), ("b", ctypes.c_char * 128), ("c", ctypes.c_char * 128),
                *((name, ctypes.c_void_p) for name in ("x", "y", "e", "out", "counter")),
                *((name, ctypes.c_int) for name in ("row", "col", "head", "batch", "m", "n"))]


class Ops:
    def __init__(self, target, elem, folder):
        self.target, self.elem = target, elem
        self.path = str(build(target, elem, folder))
        self.lib = ctypes.CDLL(self.path)
        self.lib.op_buffer.restype = ctypes.c_void_p
        self.lib.op_buffer.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self.lib.op_fetch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.lib.op_release.argtypes = [ctypes.c_void_p]
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.lib.op_map.argtypes = [pointer, pointer, number, pointer, pointer, number, number]

    def run(self, name, maps, vectors, blocks=1, **numbers):
        """maps: {"a": (array [batch, head, row, column], box rows)}; vectors: {"x": array}. All of them as they are
        after the run."""
        memory = ctypes.create_string_buffer(ctypes.sizeof(Params) + 64)   # the maps are aligned to 64 bytes
        p = Params.from_address((ctypes.addressof(memory) + 63) // 64 * 64)
        arrays = {k: v[0] for k, v in maps.items()} | vectors
        buffers = {k: self.lib.op_buffer(v.tobytes(), v.nbytes) for k, v in arrays.items()}
        try:
            for k, (array, box, *cols) in maps.items():
                size = (ctypes.c_int64 * 4)(*array.shape[::-1])
                stride = (ctypes.c_int64 * 4)(*array.strides[::-1])
                where = ctypes.addressof(p) + getattr(Params, k).offset
                assert self.lib.op_map(where, buffers[k], array.itemsize, size,
                                       stride, box, cols[0] if cols else 64) == 0
            for k in vectors:
                setattr(p, k, buffers[k])
            for k, v in numbers.items():
                setattr(p, k, v)
            assert getattr(self.lib, name)(ctypes.byref(p), blocks) == 0
            result = {}
            for k, v in arrays.items():
                result[k] = np.empty_like(v)
                assert self.lib.op_fetch(result[k].ctypes.data, buffers[k], v.nbytes) == 0
            return result
        finally:
            for b in buffers.values():
                self.lib.op_release(b)


@pytest.fixture(scope="module")
def libraries():
    folder = os.environ.get("MARGAY_TILE_LIBS")
    with tempfile.TemporaryDirectory() as temporary:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        yield folder or temporary


@pytest.fixture(scope="module", params=TARGETS, ids="-".join)
def ops(request, libraries):
    return Ops(*request.param, libraries)


def random(rng, elem, *shape):
    return encode(rng.standard_normal(shape), elem)


def same(got, want):
    """Equal bit for bit, any NaN standing for all."""
    np.testing.assert_array_equal(got, want)


def close(got, want, scale, tolerance):
    error = np.abs(got.astype(np.float64) - want)
    assert np.all(error <= tolerance * scale), f"worst {np.max(error / scale)}"


# ---- formulas: what body(shape) makes of inputs
def window(array, row, col, rows, cols):
    """rows x cols from (row, col) of a matrix, zeros outside."""
    out = np.zeros((rows, cols), array.dtype)
    r0, c0 = max(0, -row), max(0, -col)
    part = array[max(0, row):max(0, row + rows), max(0, col):max(0, col + cols)]
    out[r0:r0 + part.shape[0], c0:c0 + part.shape[1]] = part
    return out


PLACES = {"inside": dict(row=16, col=64, head=1, batch=1), "corner": dict(row=80, col=96, head=2, batch=0)}


class Case:
    """Inputs of one row, and the tiles its kernel sees."""

    def __init__(self, ops, row, place):
        self.ops, self.body, (self.RA, self.CA, self.RB, self.CB, self.N, self.I) = ops, row[0], row[1:]
        self.name = "_".join(map(str, row))
        self.rng = np.random.default_rng(sum(map(ord, self.name)))
        elem = ops.elem
        self.place = PLACES[place]
        self.A = random(self.rng, elem, 2, 3, 120, 200)
        self.B = random(self.rng, elem, 1, 1, self.RB, self.CB)
        self.C = random(self.rng, elem, 2, 3, 120, 200)
        at = self.place
        self.a = window(decode(self.A, elem)[at["batch"], at["head"]], at["row"], at["col"], self.RA, self.CA)
        self.b = decode(self.B, elem)[0, 0]
        self.x = self.rng.standard_normal(self.N).astype(np.float32)
        self.y = self.rng.standard_normal(64).astype(np.float32)
        self.e = random(self.rng, elem, self.N)
        self.limits = dict(m=50, n=self.N - 5)
        self.out = np.full(2 * 64 * self.N, np.nan, np.float32)

    def run(self):
        maps = {"a": (self.A, self.RA), "b": (self.B, self.RB), "c": (self.C, self.RB)}
        vectors = {"x": self.x, "y": self.y, "e": self.e, "out": self.out, "counter": np.array([5, 6, 7], np.int32)}
        self.result = self.ops.run(self.name, maps, vectors, **self.place, **self.limits)
        return self.result["out"]

    def matrix(self):
        return self.run()[:64 * self.N].reshape(64, self.N)

    def t(self):
        return self.x[None, :] + self.y[:, None]

    def check_stored(self, want):
        """`want`, a tile of floats, is in C at the place, rounded; everything around it as it was."""
        self.run()
        expected, at = self.C.copy(), self.place
        target = expected[at["batch"], at["head"], at["row"]:at["row"] + self.RB, at["col"]:at["col"] + self.CB]
        target[...] = encode(want, self.ops.elem)[:target.shape[0], :target.shape[1]]
        same(decode(self.result["c"], self.ops.elem), decode(expected, self.ops.elem))


def check_product(c):
    a, b = c.a.astype(np.float64), c.b.astype(np.float64)
    name, I = c.body, c.I
    if name == "mma_AtB_window":
        ca, cb = (0, 32 * I) if c.N == 32 else (64 * I, 64 * I)
        a, b = a[:, ca:ca + 64], b[:, cb:cb + c.N]
    if name == "mma_ABt_part_register":
        b = b[:, 64 * I:64 * I + c.CA]
    if name in ("mma_ABt_rows_shared", "mma_AtBt_rows_shared"):
        b = b[I:I + c.N]
    if name == "mma_AB_rows_register":
        b = b[I:I + c.CA]
    if name in ("mma_AB_cols_shared", "mma_AB_cols_register"):
        b = b[:, I:I + c.N]
    if "_At" in name:
        a = a.T
    if "Bt" in name:
        b = b.T
    close(c.matrix(), 2 * a @ b, 1 + np.abs(a) @ np.abs(b), 4e-6)


def check_copy(c):
    I, N, name = c.I, c.N, c.body
    if name == "load_float":
        want = np.full((64, N), np.nan, np.float32)
        want[:c.limits["m"], :c.limits["n"]] = c.a[:, I:I + N][:c.limits["m"], :c.limits["n"]]
        return same(c.matrix(), want)
    tile = c.b.copy()
    if name == "load_elem":
        tile[:, I:I + N] = c.a[:, I:I + N]
    elif name == "load_transposed":
        tile = c.a.T
    elif name == "gathered_rows":
        tile[:] = 0
        for r in range(c.limits["m"]):
            tile[r, :c.limits["n"]] = decode(c.e, c.ops.elem)[r % 3:r % 3 + c.limits["n"]]
    elif name in ("cleared_rows", "cleared_by_warp"):
        tile[:I] = tile[c.limits["m"]:] = 0
    elif name == "down_the_rows":
        above = np.vstack([np.zeros((1, N), np.float32), tile[:-1, I:I + N]])
        x = np.where(np.arange(N) < c.limits["n"], c.x, 0)
        tile[:, I:I + N] = tile[:, I:I + N] - above + x
        want = c.out[:2 * N].copy()
        want[:2 * c.limits["n"]:2] = 2 * (x - np.where(np.arange(N) < c.limits["m"],
                                                       decode(c.e, c.ops.elem), 0))[:c.limits["n"]]
        c.check_stored(tile)
        return same(c.result["out"][:2 * N], want)
    elif name == "store_float":
        tile[:, I:I + N] = c.t()
    elif name == "store_converted":
        tile[:, :N] = c.t()
    elif name == "store_converted_part":
        tile = c.t()[:, I:I + 64]
    elif name == "store_transposed":
        tile = c.t().T
    elif name in ("store_with_row_col", "store_triangle"):
        t, u, v = c.t(), c.y[:, None], c.x[None, :]
        low = np.arange(N)[None, :] <= np.arange(64)[:, None]
        low = low.T if name == "store_triangle" and I else low
        f = t + u - v
        tile = (np.where(low, f, 2 * t) if name == "store_with_row_col"
                else np.where(low, f, 0) + 3 * np.eye(64, N, dtype=np.float32))
    c.check_stored(tile)


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 127.75, 128, 129, -125.9, -126, -127, -200, 1e-38, 3e38],
                   np.float32)


def check_scalar(c):
    c.y[:] = np.linspace(-1, 1, 64)
    c.x[:] = 0
    c.x[:16] = SPECIAL
    c.x[16:] = c.rng.standard_normal(c.N - 16) * 40
    c.y[:8] = 0
    if c.I == 1:
        c.x[20:] = np.exp(c.x[20:])
        c.x[40:] = 1 + c.x[40:] * 1e-3
    t = c.t()
    f = (np.exp2, np.log2, np.reciprocal, lambda x: 1 / np.sqrt(x), lambda x: np.fmax(np.sqrt(np.abs(x)), 0),
         np.tanh, lambda x: np.clip(x, -0.75, 2))[c.I]
    with np.errstate(all="ignore"):
        want = f(t.astype(np.float64))
        single = want.astype(np.float32)
    got = c.matrix()
    same(np.isnan(got), np.isnan(want))
    small = np.abs(want) < 2.0**-126
    if c.I != 0:
        small |= np.abs(t) < 2.0**-126
    same(got[np.isinf(single) & ~small], single[np.isinf(single) & ~small])
    usual = np.isfinite(single) & ~small
    # log2 has a zero at 1 that the GPU's instruction meets with an absolute error
    scale = np.abs(want) + (0.5 if c.I == 1 and c.ops.target == "sm90" else 0)
    close(got[usual], want[usual], scale[usual], 2.0**-21 if c.I == 5 else 2.0**-22)
    tiny = np.abs(want[small]) < 2.0**-126
    assert np.all(np.abs(got[small][tiny]) <= 2.0**-126)


def check_form(c):
    t = c.t()
    u = 2 * t + 1
    x, y = c.x[None, :], c.y[:, None]
    t64 = t.astype(np.float64)
    below = np.arange(c.N)[None, :] - np.arange(64)[:, None]   # col - row
    want = [t64 * u - u, t64 * y, t64 * x, t64 * x, t64 * u - x, t64 * u - x,
            None, None, t64 * y, t64, None, None, t64 + t64 * y - 1, *[None] * 5, t64 * np.maximum(y, 0)][c.I]
    if c.I == 10:
        return same(c.matrix(), np.where(below > 3, -np.inf, t))
    if c.I == 11:
        return same(c.matrix(), np.where(below < -5, np.float32(7), t))
    if c.I == 7:
        rows = np.arange(64.0)[:, None]
        return close(c.matrix(), t64 + rows**3 - np.arange(c.N), 200 + rows**3, 1e-6)
    if c.I in (13, 14):
        rows, cols = np.arange(64)[:, None], np.arange(c.N)[None, :]
        second = (rows if c.I == 13 else cols) % 16 >= 8
        added = np.where(second, 1000, 0) + rows - 8 * (second & (c.I == 13)) - 2 * (cols - 8 * (second & (c.I == 14)))
        return close(c.matrix(), t64 + added, np.abs(t64) + 2000, 1e-6)
    if c.I == 16:
        return close(c.matrix(), t64 * (np.arange(64)[:, None] % 8 + 2 * (np.arange(c.N) % 8)) - x,
                     1 + 22 * np.abs(t64), 1e-6)
    if c.I in (15, 17):
        return close(c.matrix(), t64 * (u if c.I == 15 else y) + x + np.arange(64)[:, None] - 2 * np.arange(c.N),
                     2 + t64 * t64 + 400, 1e-6)
    if c.I == 6:
        return same(c.matrix(), np.where(np.arange(c.N)[None, :] <= np.arange(64)[:, None] + 3, t, -np.inf))
    close(c.matrix(), want, 1 + t64 * t64, 1e-6)


def check_elem(c):
    c.check_stored(c.a * c.x[None, :])


def check_reduction(c):
    t = c.t().astype(np.float64)
    got = c.run()[:64]
    if c.I == 0:
        return same(got, np.maximum(c.y, c.t().max(1)))
    if c.I > 3:
        others = int(c.ops.target != "sm90")   # one warp has all rows there
        return same(got, np.where(np.arange(64) // 16 == 1, 1, others).astype(np.float32))
    want = t.sum(1) * (c.y + 1) if c.I == 1 else (t * (t - 1)).sum(1) if c.I == 2 else 2 * t.sum(1)
    close(got, want, 1 + np.abs(t).sum(1) + (t * t).sum(1), 1e-6)


def check_scattered(c):
    elem = c.ops.elem
    got = c.run().view(c.e.dtype)
    want = c.out.view(c.e.dtype).copy()
    for r in range(c.limits["m"]):
        if r % 5:
            want[r * (c.N + c.I):][:c.limits["n"]] = encode(c.t()[r], elem)[:c.limits["n"]]
    same(decode(got, elem), decode(want, elem))


def check_vectors(c):
    y = np.where(np.arange(64) < 50, c.y, -7).astype(np.float32)
    want = np.full(64, np.nan, np.float32)
    n = c.limits["n"]
    want[:n] = (2 * (y.astype(np.float64) * c.x + c.x[3]))[:n]
    got = c.run()[:64]
    same(np.isnan(got), np.isnan(want))
    close(got[:n], want[:n], 4 + np.abs(want[:n]), 1e-6)


def check_columns(c):
    n, m = c.limits["n"], c.limits["m"]
    want = np.full((64, c.N), np.nan, np.float32)
    want[:m] = 1 + np.where(np.arange(c.N) < n, decode(c.e, c.ops.elem), 0)
    same(c.matrix(), want)


def check_sliced(c):
    half = c.N // 2
    same(c.run()[:64 * half].reshape(64, half), np.broadcast_to(1 + c.x[c.I:c.I + half], (64, half)))


def check_accumulators(c):
    want = c.t()
    if c.I == 0:
        want = 2 * want
    else:
        want[:, 32 * (c.I - 1):32 * c.I] += c.t()[:, :32]
    same(c.matrix(), want)


def check_halves(c):
    """Sums of products may be rounded to float32 before fp16: an error of one place of the largest number."""
    t, row, col = (x.astype(np.float16).astype(np.float64) for x in (c.t(), c.y[:, None], c.x[None, :]))
    if c.I:
        half = t[:, c.I - 1::2]
        return same(c.matrix(), np.hstack((half, (2 if c.I == 1 else -2) * half)).astype(np.float32))
    size = np.abs(t)
    close(c.matrix(), 4 * (t * row - t * col) + 2 + t - row, 10 + 9 * size * (np.abs(row) + np.abs(col)) + size, 2**-10)


def check_folds(c):
    """Twice the tile takes the place of its lower rows, and gives its upper ones for them."""
    r, log = np.arange(64), c.I or 1
    low, high = r[r & 8 == 0], r[r & 8 > 0]
    j, half = r // 16 * 8 + r % 8, r // 8 % 2
    place = (j >> log - 1 << log) + (half << log - 1) + (j & (1 << log - 1) - 1)
    t = c.a[place]
    u = 2 * t
    t[high], u[low] = u[low], t[high].copy()
    tile = np.empty_like(t)
    tile[place] = t
    c.check_stored(tile)
    group = place >> c.I
    rows = np.abs(u).max(1)
    most = np.array([rows[group == g].max() for g in group])
    y, z = most.copy(), -most
    y[high], z[low] = z[low], y[high].copy()
    u = (u + y[:, None]) + 4 * z[:, None]
    moved = np.empty_like(u)
    moved[r] = u[2 * j + half]
    same(c.matrix(), np.hstack((moved[:, ::2], moved[:, 1::2])))
    same(c.result["out"][4096:8192].reshape(64, 64), np.hstack((u[:, ::2], u[:, 1::2])))


def check_float_rows(c):
    want = c.t()
    want[50:], want[:, -3:] = 0, 0
    same(c.run()[:64 * c.N].reshape(c.N, 64).T if c.I else c.matrix(), want)


def check_scalars(c):
    same(c.run()[:64], np.full(64, c.limits["m"] + c.limits["n"], np.float32))
    same(c.result["counter"], [5, 0, 0])


def check_slices(c):
    """The matrix in rows of 16, each rotated."""
    def turned(tile, by):
        return np.roll(tile.reshape(64, -1, 16), -by, 2).reshape(tile.shape)
    if c.I < 6:
        return same(c.matrix(), turned(c.t(), (0, 1, -1, 6, 8, 11)[c.I]))
    if c.I < 8:
        return same(c.matrix(), turned(c.a, (10, 1)[c.I - 6]))
    if c.I == 10:
        return same(c.matrix(), np.roll(c.t(), -16, 1))
    c.check_stored(c.a * turned(c.a, 2) if c.I == 8 else c.t())


def check_inverse(c):
    """Of the strict upper triangle of each block of 16, of all, or of each block of 32, with what is above these as it
    is, but for the sign. Errors are those of the terms that substitution adds up in blocks of 8, and beside them of
    products whose factors are two parts of the type's precision each."""
    if c.I in (2, 4):
        return c.check_stored(carried(1 + np.float32(0.125) * c.t(), c.ops.elem, 64 if c.I == 2 else 32))
    eights, blocks, halves = (np.arange(64)[:, None] // n == np.arange(64)[None, :] // n for n in (8, 16, 32))
    inverted = {0: blocks, 1: np.ones((64, 64), bool), 3: halves}[c.I]
    r = np.where(np.triu(inverted, 1), 0.25 * c.t(), 0).astype(np.float64)
    want = np.linalg.inv(np.eye(64) + r)
    scale = np.linalg.inv(np.eye(64) - np.abs(r))
    if c.I == 3:
        want[:32, 32:] = np.float32(-0.25) * c.t()[:32, 32:]
        same(c.matrix()[:32, 32:], want[:32, 32:].astype(np.float32))
    precision = {"bf16": 2.0**-15, "fp16": 2.0**-20, "float": 2.0**-21}[c.ops.elem]
    close(c.matrix()[eights], want[eights], scale[eights], 4e-6)
    close(c.matrix(), want, scale, 4e-6 + precision)
    same(c.matrix()[np.tril(~blocks)], np.zeros(64 * 24, np.float32))


def carried(t, elem, width):
    """What is carried stays in `width` columns."""
    def rounded(x):
        return decode(encode(x, elem), elem)

    def with_left(x, left):
        return x + np.where(np.abs(left) <= np.abs(x) * np.float32(2**-10), left, np.float32(0))
    left, out = np.zeros((64, 4), np.float32), t.copy()
    for i in range(0, 64, 2):
        if i % width == 0:
            left[:] = 0
        x, y = with_left(t[:, i], left[:, i // 2 % 4]), t[:, i + 1]
        out[:, i] = rounded(x)
        if i % width >= width - 8:
            y = with_left(y, x - out[:, i])
        out[:, i + 1] = rounded(y)
        left[:, i // 2 % 4] = x - out[:, i] + (y - out[:, i + 1])
    return out


CHECKS = {"slice_form": check_slices, "inverse_form": check_inverse, "map_scalar": check_scalar,
          "map_form": check_form, "map_elem": check_elem, "row_reduction": check_reduction,
          "scattered_rows": check_scattered, "vectors": check_vectors, "columns": check_columns, "sliced": check_sliced,
          "accumulators": check_accumulators, "half_form": check_halves, "fold_form": check_folds,
          "scalars": check_scalars, "float_rows": check_float_rows}


@pytest.mark.parametrize("row", ROWS, ids=lambda r: "_".join(map(str, r)))
@pytest.mark.parametrize("place", PLACES)
def test_op(ops, row, place):
    case = Case(ops, row, place)
    body = row[0]
    check = CHECKS.get(body) or (check_product if body.startswith("mma") else check_copy)
    check(case)


@pytest.mark.parametrize("elem_value",
                         [1.00390625, 65519.9, 65520.0, 6e-8, 3e-8, 1e-40, 3.4e38, np.inf, -np.inf, np.nan])
def test_rounding(ops, elem_value):
    """Ties, overflow, subnormals and NaN, through the register tile and straight to the shared tile."""
    for row in (r for r in ROWS if r[0] in ("store_float", "store_converted")):
        case = Case(ops, row, "inside")
        with np.errstate(over="ignore"):
            case.x[:] = np.float32(elem_value) * (1 + np.arange(case.N, dtype=np.float32) % 7 / 64)
        case.x[1::2] *= -1
        case.y[:] = 0
        check_copy(case)


@pytest.fixture(scope="module", params=[target for target, elem in TARGETS if elem == "bf16"])
def any_ops(request, libraries):
    """Operations whose types are their own."""
    return Ops(request.param, "bf16", libraries)


def decode_e4m3(x):
    x = x.astype(np.int32)
    exponent, mantissa = x >> 3 & 15, x & 7
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    return np.where(x & 127 == 127, np.nan, np.where(x & 128, -value, value))


E4M3_VALUES = decode_e4m3(np.arange(127, dtype=np.uint8))


def round_e4m3(x):
    """To the nearest of E4M3_VALUES, ties to the one with an even code; beyond them to the last."""
    size = np.minimum(np.abs(np.asarray(x, np.float64)), 448)
    below = np.searchsorted(E4M3_VALUES, size, "right") - 1
    above = np.minimum(below + 1, 126)
    low, high = size - E4M3_VALUES[below], E4M3_VALUES[above] - size
    return np.copysign(E4M3_VALUES[np.where((low < high) | ((low == high) & (below % 2 == 0)), below, above)], x)


def random_e4m3(rng, *shape):
    """Codes of numbers up to 15: NaN and the largest are left out, subnormals and zeros of both signs are in."""
    return (rng.integers(0, 0x58, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)


def e4m3_tolerance(ops, k):
    """Of the sum of |products|, for two products over k. Hopper's matrix instructions add with some 14 bits, once for
    each 32 of the reduction."""
    return 2 * k // 32 * 2.0**-11 if ops.target == "sm90" else 4e-6


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("n, k", [(64, 64), (128, 64), (128, 128), (192, 128), (128, 256)])
def test_e4m3_product(any_ops, n, k, place):
    rng, at, width = np.random.default_rng(n + k), PLACES[place], 128 if k % 128 == 0 else 64
    a, b = random_e4m3(rng, 2, 3, 120, 304), random_e4m3(rng, 2, 3, 240, 304)
    r = any_ops.run(f"e4m3_{n}_{k}", {"a": (a, 64, width), "b": (b, n, width)},
                    {"out": np.full(64 * n, np.nan, np.float32)}, **at)
    x, y = (window(decode_e4m3(t)[at["batch"], at["head"]], at["row"], at["col"], rows, k)
            for t, rows in ((a, 64), (b, n)))
    close(r["out"].reshape(64, n), 2 * x @ y.T, 1 + np.abs(x) @ np.abs(y.T), e4m3_tolerance(any_ops, k))


TURNED = [(64, 64), (128, 64), (128, 128), (192, 128), (128, 256)]


def run_turned(ops, k, n, b, x, y, at):
    r = ops.run(f"turned_{k}_{n}", {"b": (b, 64, 128 if n % 128 == 0 else 64)},
                {"x": x, "y": y, "out": np.full(64 * n, np.nan, np.float32)}, **at)
    return r["out"].reshape(64, n), window(decode_e4m3(b)[at["batch"], at["head"]], at["row"], at["col"], k, n)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("k, n", TURNED)
def test_turned_product(any_ops, k, n, place):
    rng = np.random.default_rng(k + n)
    b, x, y = (random_e4m3(rng, 2, 3, 240, 304), rng.standard_normal(k).astype(np.float32),
               rng.standard_normal(64).astype(np.float32))
    got, tile = run_turned(any_ops, k, n, b, x, y, PLACES[place])
    a = round_e4m3(x[None, :] + y[:, None])
    close(got, 2 * a @ tile, 1 + np.abs(a) @ np.abs(tile), e4m3_tolerance(any_ops, k))


@pytest.mark.parametrize("k, n", TURNED)
def test_rounding_to_e4m3(any_ops, k, n):
    """Through a matrix that picks columns, so that the result is twice the rounded number itself."""
    x = np.concatenate([E4M3_VALUES[:-1] + np.diff(E4M3_VALUES) / 2, E4M3_VALUES,
                        [449, 464, 465, 1e30, 3e38, 1e-10, 2.0**-10, np.nextafter(2.0**-10, 1, dtype=np.float32)]])
    x = np.concatenate([np.nextafter(x.astype(np.float32), np.float32(np.inf)),
                        np.nextafter(x.astype(np.float32), np.float32(0)), x]).astype(np.float32)
    x[::3] *= -1
    where = dict(row=0, col=0, head=0, batch=0)
    for start in range(0, len(x), min(k, n)):
        part = np.resize(x[start:start + min(k, n)], k)
        pick = (np.arange(n) * 5 + 3) % k                  # 5 and k have no common factor: every key where n >= k
        b = np.zeros((1, 1, k, n), np.uint8)
        b[0, 0, pick, np.arange(n)] = 0x38                   # 1
        got, _ = run_turned(any_ops, k, n, b, part, np.zeros(64, np.float32), where)
        same(got, np.broadcast_to(2 * round_e4m3(part)[pick], (64, n)))


def test_nan_to_e4m3(any_ops):
    x = np.zeros(128, np.float32)
    y = np.zeros(64, np.float32)
    y[5] = np.nan
    got, _ = run_turned(any_ops, 128, 128, random_e4m3(np.random.default_rng(0), 1, 1, 128, 128),
                        x, y, dict(row=0, col=0, head=0, batch=0))
    assert np.isnan(got[5]).all() and not np.isnan(np.delete(got, 5, 0)).any()


def test_scan(ops):
    rng = np.random.default_rng(1)
    m = rng.standard_normal((2, 2, 100, 12)).astype(np.float32)
    r = ops.run("scan", {"a": (m, 64, 4)}, {"out": np.full(256, np.nan, np.float32)}, row=60, col=4, head=1, batch=1)
    v = np.zeros(64)
    v[:40] = m[1, 1, 60:, 6]
    sums = np.cumsum(v)
    close(r["out"][:64], sums, 8, 1e-6)
    close(r["out"][64:128], v * sums, 8 * (1 + np.abs(v)), 1e-6)
    close(r["out"][128:192], np.full(64, sums[-1]), 8, 1e-6)
    close(r["out"][192:], sums[-1] + np.arange(64) ** 2, 8 + np.arange(64) ** 2, 1e-6)


def test_parts(ops):
    rng = np.random.default_rng(4)
    a = random(rng, ops.elem, 1, 4, 100, 200)
    r = ops.run("parts", {"a": (a, 16)}, {"out": np.full(64 * 128, np.nan, np.float32)},
                row=50, col=104, head=1, batch=0)
    want = np.zeros((64, 128), np.float32)
    for i in range(3):                                       # the fourth part lies in a head that does not exist
        want[16 * i:16 * i + 16] = window(decode(a, ops.elem)[0, 1 + i], 50 + 16 * (3 - i), 104, 16, 128)
    same(r["out"].reshape(64, 128), want)


def test_zeros(ops):
    r = ops.run("zeros", {}, {"out": np.full(5 * 64, np.nan, np.float32), "counter": np.zeros(1, np.int32)}, blocks=5)
    same(r["out"].reshape(5, 64), np.broadcast_to(np.array([1, 2, 3, 4, 0], np.float32)[:, None], (5, 64)))
    same(r["counter"], [5])


def test_warp(ops):
    rng = np.random.default_rng(5)
    x, e = rng.standard_normal(200).astype(np.float32), random(rng, ops.elem, 64)
    out = np.full(768, np.nan, np.float32)
    r = ops.run("warp", {}, {"x": x, "e": e, "out": out.copy()}, m=43, n=50)["out"]
    v = np.where(np.arange(64) < 50, x[np.minimum(3 * np.arange(64), 199)], -2).astype(np.float32)
    same(r[:64], v)
    same(r[64], v.max())
    close(r[65:66], v.sum(dtype=np.float64), 64, 1e-6)
    close(r[66:67], v[5].astype(np.float64) + v[37], 4, 1e-6)
    for at, values in ((128, encode(v, ops.elem)[:43]), (256, e[1:44]), (384, e[:43])):
        want = out[at:at + 128].copy().view(e.dtype)
        want[:43] = values
        same(decode(r[at:at + 128].view(e.dtype), ops.elem), decode(want, ops.elem))
    down = np.cumsum(v[::-1], dtype=np.float64)[::-1]
    close(r[512:662:3], down[:50], 64, 1e-6)
    assert np.isnan(np.delete(r[512:704], np.arange(0, 150, 3))).all()
    same(r[704:725], decode(e, ops.elem)[:42:2])
    same(r[725:], 0)


@pytest.mark.parametrize("m, n", ((64, 64), (50, 60), (1, 3)))
def test_channels(ops, m, n):
    """Sums down the columns, what is loaded of them, tiles that are weighted with them, and products in two halves."""
    rng = np.random.default_rng(m)
    e, ld = random(rng, ops.elem, 64 * 90), 80
    x, y = rng.standard_normal(64).astype(np.float32), rng.standard_normal(64 * 3).astype(np.float32)
    stored = random(rng, ops.elem, 1, 1, 128, 64)
    out = np.full(256 + 9 * 4096 + 8 * 64, np.nan, np.float32)
    place = ld * np.arange(64)[:, None] + np.arange(64)[None, :]
    given, bias = decode(e, ops.elem)[place], np.where(np.arange(64) < n, x, 0)
    given = np.where((np.arange(64)[:, None] < m), np.where(np.arange(64) < n, given, 0) + bias, 0)
    sums = np.cumsum(np.maximum(given, -1).reshape(4, 16, 64), 1, dtype=np.float64)
    own = (sums[:, 7] + sums[:, 8]) / 2
    within, near = np.abs(sums[:, [0, 15]] - own[:, None]).max(), np.abs(sums[:, 15]).max()
    assert within < 0.99 * near
    y[1] = (within + near) / 2
    r = ops.run("channels", {"c": (stored, 32)}, {"x": x, "y": y, "e": e, "out": out}, row=0, col=ld, m=m, n=n)
    l = 0.5 * np.cumsum(np.maximum(given, -1), 0, dtype=np.float64)
    got, numbers = np.split(r["out"], [256 + 9 * 4096 + 64])
    end, flags = got[:64], got[64:128]
    numbers, weighed = numbers.reshape(7, 64), x * np.arange(1, 65, dtype=np.float32)
    close(numbers[:4], np.maximum(given, -1).reshape(4, 16, 64).sum(1), 16, 1e-6)
    same(numbers[4], weighed)
    same(numbers[5], np.full(64, weighed.max()))
    close(numbers[6], np.full(64, weighed.sum(dtype=np.float64)), np.abs(weighed).sum(), 1e-6)
    close(end[:-3], l[-1, :-3], 256, 1e-6)
    assert np.isnan(end[-3:]).all()
    same(flags, np.full(64, 22110.5, np.float32))         # beyond, so because steep, within, that again, near
    steps = got[128:256].reshape(64, 2)
    same(steps[:m, 0], y[::3][:m])
    assert np.isnan(steps[m:]).all() and np.isnan(steps[:, 1]).all()
    got, within = got[:-4096], got[-4096:].reshape(64, 64)
    close(within, 2 * (l - np.repeat((l[7::16] + l[8::16]) / 2, 16, 0)), 512, 1e-6)
    tiles = got[256:-64].reshape(-1, 64, 64)
    same(got[-64:], np.full(64, 2, np.float32))           # beyond: NaN
    tolerance = {"bf16": 2.0**-8, "fp16": 2.0**-11, "float": 1e-6}[ops.elem]
    middles = l[[15, 15, 47, 47]]
    near = l - np.repeat(middles, 16, 0)
    close(tiles[0], near, 256, 1e-6)
    close(tiles[1], l, 256, 1e-6)
    close(tiles[2], l[-1] - l, 512, 1e-6)
    left = decode(r["c"], ops.elem)[0, 0].reshape(4, 2, 16, 64)
    for half in range(2):
        want = (1 + half) * near.reshape(4, 16, 64)
        want[3] = 3 * near[32:48] if half else want[3]
        close(left[:, half], want, 1 + np.abs(want), tolerance + 1e-5)
    factor, rows = 0.5 * (middles[2] - middles[1]), np.arange(64)[:, None]
    factor = np.where(rows < 32, factor, 1)                 # which sums' roundings grow by, too
    close(tiles[3], factor * near, 1 + np.abs(factor * near) + 0.1 * factor, 1e-4)
    want = tiles[3] * (rows < 48)
    close(tiles[4], want, 1 + np.abs(want), tolerance)
    halves = [2 * tiles[4].astype(np.float64) @ left[1, half].T.astype(np.float64) for half in range(2)]
    bound = 2e-5 * (1 + np.abs(tiles[4]).sum(1).max() * np.abs(left[1]).max())
    close(tiles[5], np.concatenate((np.ones((64, 16)), halves[0] / 2, halves[1] / 2, halves[0]), 1), bound, 1)
    want = 2 + np.concatenate((halves[0],) * 3 + (halves[1],), 1)
    there = np.arange(64)[None, :] // 16 >= rows // 16
    close(tiles[6] * there, want * there, bound, 1)
    same(tiles[7], 2 * tiles[4])


@pytest.mark.parametrize("apart, steps", ((64, 64), (70, 40), (3, 1), (64, 0)))
def test_twins(ops, apart, steps):
    """Products with two tiles at once, whose last rows are cleared."""
    rng = np.random.default_rng(apart + steps)
    b, at = random(rng, ops.elem, 2, 3, 200, 200), dict(batch=1, head=2, row=5, col=64)
    x, y = rng.standard_normal((2, 64)).astype(np.float32)
    r = ops.run("twins", {"b": (b, 64)}, {"x": x, "y": y, "out": np.full(6 * 4096, np.nan, np.float32)}, **at,
                m=apart, n=steps)
    there = (np.arange(64) < steps)[:, None]
    halves = [window(decode(b, ops.elem)[1, 2], 5 + h * apart, 64, 64, 128) * there for h in range(2)]
    a = decode(encode(x[None, :] + y[:, None], ops.elem), ops.elem).astype(np.float64)
    got = r["out"].reshape(3, 2, 64, 64)
    for h, half in enumerate(np.float64(halves)):
        parts = a @ half[:, 64:].T, a @ half[:, :64].T
        for found, want, left in ((got[0, h], halves[0] @ half.T, halves[0]), (got[1, h], parts[0], a),
                                  (got[2, h], sum(parts), a)):
            close(found, want, 1 + np.abs(left).sum(1).max() * np.abs(half).max(), 2e-5)


@pytest.mark.parametrize("m, n", ((64, 64), (50, 40), (1, 3)))
def test_levels(ops, m, n):
    """Sums along steps, what lies between two steps of 16, which pairs are of a level, and sums from the last on."""
    rng = np.random.default_rng(m)
    e, x, y = random(rng, ops.elem, 4096), *rng.standard_normal((2, 64)).astype(np.float32)
    out = np.full(6 * 4096 + 4 * 1024 + 64 + 8192 + 192 + 1200, np.nan, np.float32)
    got = ops.run("levels", {}, {"x": x, "y": y, "e": e, "out": out}, m=m, n=n)["out"]
    steps, channels = np.arange(64)[:, None], np.arange(64)[None, :]
    given = np.where((steps < m) & (channels < n), decode(e, ops.elem).reshape(64, 64).astype(np.float64), 0)
    l = np.cumsum(np.maximum(given, -1), 0)
    take = iter(np.split(got, np.cumsum([4096, 4096, *4 * [4096, 1024], 64, 4096, 4096, 128, 64])))
    close(next(take).reshape(64, 64), l, 256, 1e-6)
    tile = 1 + steps % 8 + 8 * (channels % 16)
    want = l.T + 256 * tile.T + 65536 * (steps + channels)
    close(next(take).reshape(64, 64), want, want, 1e-6)
    for h in (8, 4, 2, 1):
        middle = np.arange(64) // (2 * h) * 2 * h + h - 1
        close(next(take).reshape(64, 64), (l - l[middle]).T, 256, 1e-6)
        pairs = (steps // (2 * h) == channels // (2 * h)) & (steps // h != channels // h)
        want = np.where(pairs[:16, :16], tile[16:32, 32:48], 0).astype(np.float32)
        same(next(take).reshape(4, 16, 16), np.broadcast_to(want, (4, 16, 16)))
    close(next(take), l[5], 256, 1e-6)
    up = 100.0 * steps + channels
    up[63] += 4 * y.astype(np.float64)
    up = np.cumsum(up[::-1], 0)[::-1]
    tile = next(take).reshape(64, 64)
    close(tile[:m, :n], up[:m, :n], 1 + np.abs(up[:m, :n]), 1e-6)
    assert np.isnan(tile[m:]).all() and np.isnan(tile[:, n:]).all()
    want = np.where(steps < m, up + given * np.where(np.arange(64) < n, x, 0) + 2, 0)
    close(next(take).reshape(64, 64), want, 1 + np.abs(want), 1e-6)
    sums = next(take)
    close(sums[:2 * n:2], given[:m].sum(0)[:n], 256, 1e-6)
    assert np.isnan(sums[1::2]).all() and np.isnan(sums[2 * n:]).all()
    close(next(take), want.sum(0), 64 * (1 + np.abs(want).max()), 1e-6)
    kind = {"bf16": np.uint16, "fp16": np.float16, "float": np.float32}[ops.elem]
    rest = next(take).view(kind)
    rows, untouched = np.full(16 * 65, np.nan, np.float32), np.float32([np.nan])
    rows = np.resize(untouched.view(kind), 16 * 65)
    for r in range(16):
        if r < m and r % 5:
            rows[65 * r:65 * r + n] = encode(np.arange(n) + 4 * r, ops.elem)
    assert rest[:16 * 65].tobytes() == rows.tobytes()


def test_own(ops):
    """Products of a warp's own rows, sums over them, neighbouring columns."""
    y = np.random.default_rng(1).integers(-9, 9, 64).astype(np.float32)
    out = np.full(11 * 1024 + 64, np.nan, np.float32)
    got = ops.run("own", {}, {"y": y, "out": out})["out"]
    rows, cols, wide = np.arange(64)[:, None], np.arange(64)[None, :], np.arange(128)[None, :]
    a, b = (3 * rows + 5 * cols) % 11 - 5, (7 * rows + 2 * wide) % 13 - 6
    tiles = got[:11 * 1024].reshape(11, 64, 16)
    first = a[:, 48:] @ a[16:32, 32:48]
    same(tiles[0], first.astype(np.float32))
    same(tiles[1], (first + a[:, :16] @ a[48:, 16:32].T).astype(np.float32))
    same(tiles[2], first.astype(np.float32))
    product = 1 + b @ b.T
    below = np.array([a[c // 2 * 2 + 1, c // 2 * 2] for c in range(64)])
    sums = y + 2 * (product + a.T).sum(0) + 64 * np.arange(64)
    scale = np.where(np.arange(64) % 2, 1000, 100)
    other = product + 10 * a.T[:, np.arange(64) ^ 1] + scale * below
    for i in range(4):
        at = slice(16 * i, 16 * i + 16)
        same(tiles[3 + 2 * i], product[:, at].astype(np.float32))
        same(tiles[4 + 2 * i], other[:, at].astype(np.float32))
    same(got[11 * 1024:], sums.astype(np.float32))


@pytest.mark.parametrize("name, first, ld, m, n", (("matrix_fours", 8, 68, 32, 64), ("matrix_fours", 4, 80, 17, 60),
                                                   ("matrix_fours", 0, 64, 1, 4), ("matrix_ones", 1, 67, 31, 51),
                                                   ("matrix_ones", 3, 65, 50, 70), ("matrix_ones", 0, 64, 0, 0),
                                                   ("matrix_at_once", 4, 80, 17, 60)))
def test_matrices(ops, name, first, ld, m, n):
    """Elements inside of the limits; the others stay as they were."""
    rng = np.random.default_rng(m)
    x, y = rng.standard_normal(64).astype(np.float32), rng.standard_normal(32).astype(np.float32)
    out, e = rng.standard_normal(4600).astype(np.float32), random(rng, ops.elem, 4000)
    got = ops.run(name, {}, {"x": x, "y": y, "e": e, "out": out}, row=first, col=ld, m=m, n=n)
    m, n, small = min(m, 32), min(n, 64), decode(e, ops.elem)
    place = first + ld * np.arange(m)[:, None] + np.arange(n)[None, :]
    r, c = y[:m] + 2 * small[:m], x[:n] + 2 * small[:n]
    t = out[place].astype(np.float64) * r[:, None] + small[3]
    u = small[place].astype(np.float64) * c
    left = np.setdiff1d(np.arange(4000), place)
    close(got["out"][place], t, 1 + np.abs(t), 1e-6)
    same(got["out"][left], out[left])
    rounding = {"bf16": 2.0**-8, "fp16": 2.0**-11, "float": 2.0**-24}[ops.elem]
    close(decode(got["e"], ops.elem)[place], u, 1e-6 + np.abs(u), 1.01 * rounding + 1e-7)
    same(decode(got["e"], ops.elem)[left], small[left])
    # what is outside of the tile's columns is 0 r + k in its rows' sums
    close(got["out"][4000:4000 + m], t.sum(1) + (64 - n) * small[3], 64 * 4, 1e-6)
    close(got["out"][4100:4100 + n], u.sum(0), 32 * 4, 1e-6)
    same(got["out"][4200:4200 + m], np.full(m, 5))
    same(got["out"][4300:4300 + n], np.full(n, 6))
    for at, count, width, found in ((4400, m, 32, y[:m] - small[:m]), (4500, n, 64, x[:n] + small[:n])):
        same(got["out"][at:at + width], np.pad(found, (0, width - count)))
    for at, count in ((4000, m), (4100, n), (4200, m), (4300, n), (4400, 32), (4500, 64)):
        same(got["out"][at + count:at + 100], out[at + count:at + 100])


@pytest.mark.parametrize("m, n", ((48, 64), (47, 33), (1, 1), (0, 0)))
def test_dots(ops, m, n):
    rng = np.random.default_rng(m)
    x, y = rng.standard_normal(64).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    e, out = random(rng, ops.elem, 64), np.full(112, np.nan, np.float32)
    r, small = ops.run("dots", {}, {"x": x, "y": y, "e": e, "out": out}, m=m, n=n)["out"], decode(e, ops.elem)
    for found, vector, count in ((r[:48], x, n), (r[48:], y, m)):
        same(found, np.full(len(found), found[0]))
        products = vector[:count].astype(np.float64) * small[:count]
        close(found[0], products.sum(), 1 + np.abs(products).sum(), 1e-6)


def test_visits(ops):
    rng = np.random.default_rng(6)
    array = random(rng, ops.elem, 1, 2, 100, 200)
    x, y = rng.standard_normal(64).astype(np.float32), rng.standard_normal(64).astype(np.float32)
    vectors = {"x": x, "y": y, "out": np.full(2 * 4352, np.nan, np.float32)}
    r = ops.run("visits", {"a": (array, 64)}, vectors, blocks=2, row=50, col=104, head=1, batch=0)
    a = window(decode(array, ops.elem)[0, 1], 50, 104, 64, 64).astype(np.float64)
    t = (x[None, :] + y[:, None]).astype(np.float64)
    row, col = np.arange(64)[:, None], np.arange(64)[None, :]
    new, for_row, for_column = t * a + y[:, None] + row - 2 * col, t * a, t * x[None, :]
    # On the CPU and on a GPU a sum that starts with 1 has 1 once, or from each of a row's four threads.
    first = 4.0 if ops.target == "sm90" else 1.0
    block = col // 16 - row // 16
    parts = lambda right, on, left: np.where(block > 0, right, np.where(block == 0, on, left))  # noqa: E731
    triangles = parts(new, 1000 + 64 * row + col, -1), parts(for_row, 1, 0), parts(for_column, 2, 0)
    for i, (want, rows, columns) in enumerate(((new, for_row, for_column), triangles)):
        got = r["out"][4352 * i:4352 * (i + 1)]
        close(got[:4096].reshape(64, 64), want, 1 + np.abs(want) + np.abs(t * a), 1e-6)
        close(got[4096:4160], first + rows.sum(1), 1 + np.abs(rows).sum(1), 1e-6)
        close(got[4160:4224], columns.sum(0), 1 + np.abs(columns).sum(0), 1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
def test_rings(ops, dynamic, blocks):
    """7 tasks over persistent blocks, 5 tiles each through 2 stages, two warpgroups in turns."""
    rng = np.random.default_rng(2)
    a = random(rng, ops.elem, 1, 1, 7 * 64, 5 * 64)
    vectors = {"out": np.full(7 * 2 * 64, np.nan, np.float32)}
    if dynamic:
        vectors["counter"] = np.zeros(1, np.int32)
    r = ops.run("rings", {"a": (a, 64)}, vectors, blocks=blocks, m=7, n=5)
    sums = decode(a, ops.elem)[0, 0].astype(np.float64).sum(1).reshape(7, 1, 64)
    close(r["out"].reshape(7, 2, 64), np.broadcast_to(sums, (7, 2, 64)), 20, 1e-5)


def test_clusters(ops):
    rng = np.random.default_rng(3)
    a, b = random(rng, ops.elem, 1, 1, 5 * 64, 64), random(rng, ops.elem, 1, 1, 5 * 64, 128)
    maps = {"a": (a, 32), "b": (b, 64)}
    r = ops.run("clusters", maps, {"out": np.full(4 * 5 * 64 * 128, np.nan, np.float32)}, blocks=4, n=5)
    x, y = (decode(t, ops.elem)[0, 0].astype(np.float64).reshape(5, 64, -1) for t in (a, b))
    want = np.broadcast_to(x @ y, (4, 5, 64, 128))
    close(r["out"].reshape(want.shape), want, 1 + np.abs(x) @ np.abs(y), 4e-6)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("blocks", [2, 6])
def test_exchange(ops, dynamic, blocks):
    """7 tasks over persistent pairs of blocks."""
    vectors = {"out": np.full(2 * 7 * 64 * 64, np.nan, np.float32)}
    if dynamic:
        vectors["counter"] = np.zeros(1, np.int32)
    out = ops.run("exchange", {}, vectors, blocks=blocks, m=7)["out"].reshape(14, -1)
    others = np.arange(14).reshape(7, 2)[:, ::-1].reshape(14, 1)
    assert (out == others).all()


def test_mail(ops):
    """Blocks 1 and 0 of each pair send each other three letters; numbers are exact in every type."""
    out = ops.run("mails", {}, {"out": np.full(4 * 3 * 64 * 64, np.nan, np.float32)}, blocks=4, m=3)["out"]
    block, i, row, col = np.ogrid[:4, :3, :64, :64]
    assert (out.reshape(4, 3, 64, 64) == (row + col + i - 64 * (block ^ 1)) * (1000 * i + row)).all()


def test_deadlock_is_reported(ops):
    if ops.target == "sm90":
        pytest.skip("a GPU hangs")
    code = f"import ctypes; ctypes.CDLL({ops.path!r}).stuck(bytes(1024), 1)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.returncode == -signal.SIGABRT
    assert ("role 0 member 0: sem at shared + 0, phase 0 "
            "(now in phase 0: 1 of 1 arrivals and 0 bytes missing)") in child.stderr
    assert "role 0 member 1: named barrier 3 (128 threads there)" in child.stderr
