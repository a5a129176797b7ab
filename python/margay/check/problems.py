"""Problems for the rows of kernels.def: small, odd, long enough that every ring wraps, on two multiprocessors. A
problem is a call of the op's C function on random tensors; the launch of the row in question is handed to the checker,
all others run as usual."""

import contextlib
import ctypes
import functools
import random
import zlib

import numpy as np

from margay import _C, _op
from margay.check.compiled import Kernel, csrc

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3", "float32": "float"}
SMS = 2
TAKE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64)


class Array:
    """A tensor of any of our types: NumPy has no bfloat16 and no 8-bit floats, so the type is told through DLPack by
    hand."""
    CODES = {"bfloat16": (4, 16, np.uint16), "float16": (2, 16, np.float16),
             "float32": (2, 32, np.float32), "uint8": (1, 8, np.uint8), "int32": (0, 32, np.int32),
             "float8_e4m3fn": (10, 8, np.uint8)}

    def __init__(self, *shape, dtype="float32", values=None):
        code, bits, _ = self.CODES[dtype]
        if values is None:
            self.data = random_data(shape, dtype).copy()
        elif np.isscalar(values):
            self.data = np.full(shape, encoded(np.float32([values]), dtype)[0])
        else:
            self.data = encoded(np.broadcast_to(np.float32(values), shape), dtype)
        self.sizes = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*(stride // self.data.itemsize for stride in self.data.strides))
        self.managed = Managed(self.data.ctypes.data, 1, 0, len(shape), code,
                               bits, 1, self.sizes, self.strides, 0, None, None)

    def turned(self):
        """The transposed matrix, or matrices."""
        other, turn = object.__new__(Array), lambda n: (ctypes.c_int64 * len(n))(*n[:-2], n[-1], n[-2])
        other.data = self.data
        other.sizes, other.strides = turn(self.sizes), turn(self.strides)
        m = self.managed
        other.managed = Managed(m.data, 1, 0, len(self.sizes), m.code, m.bits, 1, other.sizes, other.strides, 0, None,
                                None)
        return other

    def __dlpack__(self, **_):
        return new_capsule(ctypes.addressof(self.managed), b"dltensor", None)

    def __dlpack_device__(self):
        return (1, 0)


def encoded(values, dtype):
    """Float32 values in the bits of a type."""
    if dtype == "bfloat16":
        values = np.ascontiguousarray(values).view(np.uint32) >> 16
    if dtype == "float8_e4m3fn":
        bits = np.ascontiguousarray(values).view(np.uint32)
        values = np.clip((bits & 0x7FFFFFFF).astype(np.int64) - (120 << 23), 0, 126 << 20) >> 20 | bits >> 24 & 128
    return np.ascontiguousarray(values.astype(Array.CODES[dtype][2]))


@functools.lru_cache(64)       # a problem is called for every schedule and mutant
def random_data(shape, dtype):
    return encoded(np.random.default_rng(0).standard_normal(shape, np.float32), dtype)


class Managed(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32), ("index", ctypes.c_int32),
                ("dims", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Place:
    """Where problems get their tensors: `tensor(*shape, dtype, values)`, random numbers where no value is given."""
    tensor = Array


def new(*shape, dtype="float32", values=None):
    return _Place.tensor(*shape, dtype=dtype, values=values)


def turned(matrix):
    return matrix.turned() if isinstance(matrix, Array) else matrix.mT


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


# ---- the problems of each op: (label, call). A call returns its outputs.

def constants(row):
    return {name.strip(): int(value) for name, value in (part.split("=") for part in row["constants"].split(","))}


# Where `large` is asked, two more come first: one that fills a GPU, and one of few blocks and long loops, where copies
# come fast.


def attention(row, backward, large):
    c, dtype = constants(row), row["dtype"]
    rows, keys = 64 * c.get("NC", 2), c.get("BN", 128)
    d, dv = {64: (40, 40), 128: (128, 128), 192: (168, 104), 256: (200, 200)}[c["D"]]
    shapes = [(2 * rows + 17, 5 * keys + 3, False, False), (rows + 9, 3 * keys, True, True),
              (3 * rows, keys // 2, True, False),
              (30, 2 * keys + 1, False, True), (3 * rows, 3 * rows + 33, True, True, 3)]
    if dtype == "float8_e4m3fn":
        d = dv = {64: 48, 128: 128, 256: 208}[c["D"]]
        shapes.append((9 * rows, keys // 2, True, False, 2))     # many tasks without keys
    if backward:
        # The last: a warpgroup without keys
        shapes = [(5 * 128 + 17, 300, False, False), (600, 200, True, True),
                  (150, 333, True, False), (30, 2000, False, True), (150, 60, True, False, 3)]
        # 21 heads: zeros of dq from other blocks
        if row["source"] in ("attention_bwd", "attention_bwd_wide", "attention_bwd_narrow") and c["FEATURES"] < 2:
            shapes.append((130, 130, True, False, 3, 14))
    if row["source"] == "attention_bwd":   # tasks whose first and last steps a warpgroup does not see, behind others
        shapes += [(300, 300, True, False, 3), (1300, 1300, True, False)]
    if row["source"] == "attention_bwd_cluster":          # an odd number of steps: one head, three blocks of queries
        shapes.append((150, 300, False, False, 1, 1))
    if c.get("FEATURES") == 2:      # tasks behind one whose last key block is seen whole
        shapes.append((4 * rows, 4 * rows, False, True))
    kinds = FEATURES[0 if c["D"] == 192 else c.get("FEATURES")]   # of others the rows beside expect another width
    if large:
        yield "large", lambda: call_attention(row, dtype, d, dv, 1500, 1500, True, True, backward, 4, 16, kinds[0])
        yield "few blocks", lambda: call_attention(row, dtype, d, dv, 2 * rows,
                                                   2000, False, True, backward, kind=kinds[0])
    for i, (nq, nk, causal, extra, *batch) in enumerate(shapes):
        kind = kinds[i % len(kinds)]
        label = (f"{'causal' if causal else 'full'} {nq}x{nk}" + (" counter" if extra and not backward else "") +
                 (f" {kind}" if kind else ""))
        yield (label, lambda nq=nq, nk=nk, causal=causal, extra=extra, kind=kind, batch=batch:
               call_attention(row, dtype, d, dv, nq, nk, causal, extra, backward, *batch, kind=kind))


# What the problems of a row with these FEATURES take in turn.
FEATURES = {0: (None,), 1: ("window",), 2: ("window", "packed"), 3: ("packed", "scores", "window"),
            None: (None, "packed")}


def features_of(kind, heads, nq, nk):
    """The last arguments of the C functions."""
    if kind is None:
        return ()
    left, right = (-1, -1) if kind == "packed" else (nk // 2, 60)
    if kind != "scores":
        last = nq - nq // 10, nk - nk // 10       # behind it, rows of no sequence
        starts = ([new(4, dtype="int32", values=(0, n // 3, n // 3, n)) for n in last]
                  if kind == "packed" else (None, None))
        return left, right, 0.0, 0.0, 0, None, None, *starts, *(n - n // 3 for n in last)
    return left, right, 30.0, 0.1, 1, new(heads), new(1, heads, values=0.01), None, None, 0, 0


def call_attention(row, dtype, d, dv, nq, nk, causal, extra, backward, batch=1, heads=2, kind=None):
    batch = 1 if kind == "packed" else batch
    q_shape, k_shape = (batch, heads, nq, d), (batch, max(1, heads // 2), nk, d)
    out_shape, v_shape = (*q_shape[:3], dv), (*k_shape[:3], dv)
    q, k, v = (new(*shape, dtype=dtype) for shape in (q_shape, k_shape, v_shape))
    out, lse = new(*out_shape, dtype="bfloat16" if dtype == "float8_e4m3fn" else dtype), new(*q_shape[:3])
    if dtype == "float8_e4m3fn":
        factors = [new(batch, heads // 2, values=0.5 + i) if extra else None for i in range(3)]
        _C.attention_fwd_fp8(out, lse, q, k, v, new(16, dtype="uint8", values=0) if extra else None,
                             *factors, 0.0, causal)
        return out, lse
    features = features_of(kind, heads, nq, nk)
    if not backward:
        _C.attention_fwd(out, lse, q, k, v, 0.0, causal, new(16, dtype="uint8", values=0) if extra else None, *features)
        return out, lse
    deterministic = constants(row).get("DETERMINISTIC") == 1 or (extra and "DETERMINISTIC" not in constants(row))
    grads = [new(*shape, dtype=dtype) for shape in (q_shape, k_shape, v_shape)]
    read, numbers = (new(*out_shape, dtype=dtype), q, k, v, out, lse, None), (0.0, causal, deterministic, *features)
    _C.attention_bwd(*grads, *read, aligned_bytes(_C.attention_bwd_workspace(*read, *numbers)), *numbers)
    return grads


def aligned_bytes(size):
    if _Place.tensor is not Array:
        return new(size, dtype="uint8", values=0)
    workspace = Array(size + 256, dtype="uint8", values=0)
    workspace.managed.data += -workspace.managed.data % 256
    workspace.sizes[0] = size
    return workspace


# label, batch, queries, heads, key heads, keys, page size (0: not paged), lengths, splits, options
DECODE = (("ragged, 3 splits", 3, 1, 6, 2, 700, 0, (700, 0, 333), 3, {}),
          ("pages of 16, window", 2, 3, 8, 1, 400, 16, (371, 90), 2, dict(causal=True, left=150)),
          ("2 row blocks, pages of 48", 1, 70, 2, 2, 480, 48, (450,), 1, dict(softcap=5.0, sink=True)),
          ("whole cache", 2, 1, 4, 4, 900, 0, None, 1, dict(slopes=True)),
          ("blocks loaded for nothing", 8, 1, 2, 1, 700, 0, (0, 700, 90, 0, 1, 260, 0, 500), 3, {}))


def attention_decode(row, large):
    problems = ([("large", 8, 1, 32, 4, 4000, 64, tuple(range(500, 4001, 500)), 0, {}),
                 ("few blocks", 1, 1, 8, 2, 8000, 0, None, 2, {})] if large else [])
    d = {64: 40, 128: 128, 256: 200}[constants(row).get("D", 128)]
    for label, *problem in (*problems, *DECODE):
        if row["op"] != "attention_combine" or problem[7] != 1:
            yield label, lambda problem=problem: call_decode(row["dtype"], d, *problem)


def call_decode(dtype, d, batch, queries, heads, k_heads, keys, page, lengths, splits, options):
    o = dict(causal=False, left=-1, softcap=0.0, sink=False, slopes=False) | options
    pages = -(-keys // page) if page else 0
    cache = (batch * pages + 1, page, k_heads, d) if page else (batch, keys, k_heads, d)
    q, k, v, out = (new(batch, queries, heads, d, dtype=dtype), new(*cache, dtype=dtype),
                    new(*cache, dtype=dtype), new(batch, queries, heads, d, dtype=dtype))
    lse = new(batch, heads, queries)
    table = (new(batch, pages, dtype="int32", values=np.arange(batch * pages)[::-1].reshape(batch, pages).copy())
             if page else None)
    lengths = new(batch, dtype="int32", values=np.array(lengths)) if lengths else None
    settings = 0.0, o["causal"], o["left"], -1, o["softcap"], -1, splits
    read = (q, k, v, lengths, table, None, new(heads) if o["sink"] else None,
            new(1, heads, values=0.1) if o["slopes"] else None)
    size = _C.attention_decode_workspace(*read, *settings)
    _C.attention_decode(out, lse, *read, aligned_bytes(size) if size else None, *settings)
    return out, lse


def append_kv(row, large):
    for label, batch, rows, page in (*([("large", 16, 700, 64)] if large else []),
                                     ("dense", 2, 5, 0), ("pages", 3, 70, 16)):
        def call(batch=batch, rows=rows, page=page):
            caches = [new(*((batch * 50, page, 2, 72) if page else (batch, 100, 2, 72)), dtype=row["dtype"])
                      for _ in range(2)]
            table = new(batch, 50, dtype="int32", values=np.arange(batch * 50).reshape(batch, 50)) if page else None
            _C.append_kv(*caches, *(new(batch, rows, 2, 72, dtype=row["dtype"]) for _ in range(2)),
                         new(batch, dtype="int32", values=20), table, None, 0)
            return caches
        yield label, call


def matmul(row, large):
    c, dtype = constants(row), row["dtype"]
    m, n, k = 64 * c["NC"] * c["CLUSTER_SIZE"], c["BN"], 64 * c["STAGES"]
    labels = {3000: "large", 2 * m: "few blocks"} if large else {}
    shapes = [(3000, 3000, 1000, True), (2 * m, 2 * n, 4000, False)] if large else []
    nothing = [] if c["TA"] or c["TB"] else [(m, n, 0, False)]      # dispatch gives K = 0 to no other row
    for m, n, k, bias in (*shapes, *nothing, (2 * m + 32, 2 * n + 40, 2 * k + 24, False),
                          (m, n + 8, k + 64, True), (5 * m - 24, n, 64, True)):
        def call(m=m, n=n, k=k, bias=bias):
            a = turned(new(k, m, dtype=dtype)) if c["TA"] else new(m, k, dtype=dtype)
            b = turned(new(n, k, dtype=dtype)) if c["TB"] else new(k, n, dtype=dtype)
            out = new(m, n, dtype=dtype)
            _C.matmul(out, a, b, new(n, dtype=dtype) if bias else None, 1)
            return out,
        yield labels.get(m, f"{m}x{n}x{k}" + (" bias" if bias else "")), call


# label, steps, state less than N, what else is given
SSD = (("plain", 64 * 5 + 10, 0, ""), ("one chunk", 64, 8, "none"), ("states, seq_idx", 130, 0, "seq_idx"),
       ("states, packed", 400, 0, "packed"))


def ssd(row, large):
    c = constants(row)
    block, n, dim = c["HEADS"] * c["GROUPS"] // c["SPLIT"], c["N"], 64 * c["SPLIT"]
    shapes = [("large", 1, 1000, 66 * block, n, ""), ("few blocks", 2, 1000, 4 * block, n, "")] if large else []
    shapes += [(f"{steps} steps, {label}", 1, steps, 2 * block, n - less, kind) for label, steps, less, kind in SSD]
    shapes += [("1700 steps, cut", 1, 1700, block, n, "seq_idx")]
    for label, *problem in shapes:
        yield label, lambda problem=problem: call_ssd(row["dtype"], dim, *problem)


def ssd_cuts(row, large):
    """Of few heads: 2 segments or 4, of which the last is not this kernel's."""
    n = constants(row).get("N", 64)
    for label, steps, heads, dim, n, kind in (*([("large", 20000, 2, 64, n, "states")] if large else []),
                                              ("two heads", 1700, 2, 64, 64, "states"),
                                              ("one head, seq_idx", 2100, 1, 48, n - 8, "seq_idx"),
                                              ("two parts", 1100, 1, 128, n, "states")):
        yield (f"{steps} steps, {label}" if label != "large" else label,
               lambda x=(steps, heads, n, kind), dim=dim: call_ssd(row["dtype"], dim, 1, *x))


def call_ssd(dtype, dim, batch, steps, heads, n, kind):
    x, b, c = (new(batch, steps, heads, dim, dtype=dtype), new(batch, steps, 1, n, dtype=dtype),
               new(batch, steps, 1, n, dtype=dtype))
    dt = new(batch, steps, heads, values=np.random.default_rng(0).uniform(0.01, 0.2, (batch, steps, heads)))
    starts = (0, steps // 4, steps // 4, steps // 4 + 64, steps)
    rows = len(starts) - 1 if kind == "packed" else batch
    y, states = new(batch, steps, heads, dim, dtype=dtype), new(rows, heads, dim, n)
    cuts = min(640 // (rows * heads + 1), steps // 512)
    more = kind not in ("", "none")
    _C.ssd(y, None if kind == "none" else states, new(rows, cuts, heads, dim, n),
           new(rows, cuts, heads), x, dt, new(heads, values=-1.0), b, c, new(heads) if kind == "" else None,
           new(heads) if more else None, new(rows, heads, dim, n) if more else None,
           new(batch, steps, dtype="int32", values=np.arange(steps) // 50) if kind == "seq_idx" else None,
           new(len(starts), dtype="int32", values=starts) if kind == "packed" else None, more)
    return y, states


# label, steps, heads, groups, head dim, state less than N, what else is given. Heads of many columns, so that few
# blocks take several units each.
SSD_BWD = (("wide heads", 640, 1, 1, 488, 0, "seq_idx"), ("groups", 130, 2, 2, 128, 8, "states"),
           ("one chunk", 40, 4, 1, 128, 0, ""), ("packed", 140, 1, 1, 200, 0, "packed"))
SSD_BWD_GIVEN = {"": ("d",), "states": ("dfinal_states", "initial_states", "dt_bias", "dinitial_states", "ddt_bias"),
                 "seq_idx": ("seq_idx", "d", "dd"),
                 "packed": ("cu_seqlens", "initial_states", "dinitial_states", "d", "dd")}


def ssd_bwd(row, large):
    c = constants(row)
    shapes = [("large", 3000, 16, 2, 128, 0, ""), ("few blocks", 640, 2, 1, 256, 0, "")] if large else []
    if large and row["op"] == "ssd_bwd_join":  # few chunks and groups, so that blocks share heads
        shapes[0] = "large", 1500, 16, 1, 128, 0, ""
    if row["op"] == "ssd_bwd_states":          # few heads, whose chunks are cut into parts
        shapes.append(("parts", 1040, c["WG"], 1, 64, 0, "states"))
    for label, steps, heads, groups, dim, *problem in [*shapes, *SSD_BWD]:
        heads *= 2 if row["op"] == "ssd_bwd_join" else 1       # it adds what blocks have that share a group's heads
        if label == "packed" and row["op"] == "ssd_bwd":       # an odd number of units: not the stages' multiple
            dim = 184
        problem = c.get("N", c.get("W", 64)), steps, heads, groups, dim, *problem
        yield label, lambda problem=problem: call_ssd_bwd(row["dtype"], *problem)


def call_ssd_bwd(dtype, most, steps, heads, groups, dim, less, kind):
    batch, starts = 1, (0, steps // 2, steps)
    sizes = dict(B=batch, T=steps, H=heads, P=dim, G=groups, N=most - less,
                 STARTS=len(starts) if kind == "packed" else -1)
    op = _op.Row("ssd_bwd")
    for size, _, code in op.lets:
        sizes[size] = int(eval(code, {}, sizes))
    sizes["ROWS"] = sizes["R"]
    values = dict(dt=np.random.default_rng(0).uniform(0.01, 0.2, (batch, steps, heads)), a=-1.0,
                  seq_idx=np.arange(steps) // 50, cu_seqlens=starts)
    kinds = dict(half=dtype, float32="float32", int32="int32")
    fields = [f for f in op.arguments if f["role"] != "num"]
    tensors = {f["name"]: new(*(sizes[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=values.get(f["name"]))
               for f in fields if f["name"] in SSD_BWD_GIVEN[kind] or f["role"] not in ("opt", "optout")}
    _C.ssd_bwd(*(tensors.get(f["name"]) for f in fields), kind == "states")
    return [tensors[f["name"]] for f in op.results if f["name"] in tensors]


# label, steps, columns of q and k, 16 more of a row of four parts, of v less than there may be, what is given besides
BASED = (("chunks", 64 * 4 + 10, 16, 8, ()),
         ("states", 130, 16, 0, ("{}initial_state", "{}initial_sums", "{}final_state", "{}final_sums")),
         ("packed", 600, 8, 0, ("cu_seqlens", "{}final_state", "{}final_sums")))
BASED_CUT = ("cut", 1100, 1, 16, 8, ("{}initial_state", "{}initial_sums", "{}final_state", "{}final_sums"))


def based(row, large, backward=False):
    c = constants(row)
    most, many = 64 * c.get("GROUPS", 1), 16 * c.get("MANY", 0)
    shapes = [("large", 3000, 70, 16, 0, ()), ("few blocks", 2000, 4, 16, 0, ())] if large else []
    problems = [*shapes, *((label, steps, 2, *rest) for label, steps, *rest in BASED if "MANY" in c), BASED_CUT]
    if row["op"] == "based_join":       # rows of many heads are not cut
        problems = [problem for problem in problems if problem[0] != "large"]
    for label, steps, heads, k, *problem in problems:
        problem = row["dtype"], most, steps, heads, k + many, *problem, backward
        yield label, lambda problem=problem: call_based(*problem)


def call_based(dtype, most, steps, heads, k, less, given, backward):
    starts = (0, steps // 4, steps // 4, steps // 4 + 64, steps)
    packed = "cu_seqlens" in given
    sizes = dict(B=1, T=steps, H=heads, K=k, V=most - less, STARTS=len(starts) if packed else -1,
                 normalize=steps != 130)
    op = _op.Row("based_bwd" if backward else "based")
    for size, _, code in op.lets:
        sizes[size] = int(eval(code, {}, sizes))
    # of the backward also what was given to the forward
    given = {name.format(d) for name in given for d in ("d" * backward, "") if d or "final" not in name or not backward}
    kinds = dict(half=dtype, float32="float32", int32="int32")
    fields = [f for f in op.arguments if f["role"] != "num"]
    values = dict(cu_seqlens=starts, norm=np.random.default_rng(0).uniform(1, 20, (1, heads, sizes["NORMS"])))
    tensors = {f["name"]: new(*(sizes[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=values.get(f["name"]))
               for f in fields if f["name"] in given or f["role"] not in ("opt", "optout")}
    getattr(_C, op.name)(*(tensors.get(f["name"]) for f in fields), 0.0, sizes["normalize"])
    return [tensors[f["name"]] for f in op.results if f["name"] in tensors]


def based_bwd(row, large):
    return based(row, large, True)


# label, steps, heads, features less than 64, what else is given, window, sliding
HEDGEHOG = (("plain", 330, 1, 0, "", 64, False), ("one chunk", 40, 2, 8, "states", 64, False),
            ("packed", 400, 1, 0, "packed", 64, False), ("cut", 1700, 1, 0, "states", 64, False))
HEDGEHOG_LOCAL = (("sliding", 330, 1, 0, "states", 50, True), ("packed", 300, 1, 8, "packed", 32, False),
                  ("cut", 1100, 1, 0, "states", 16, False))
HEDGEHOG_GIVEN = {"": (), "states": ("initial_state", "final_state", "dfinal_state", "dinitial_state"),
                  "packed": ("cu_seqlens", "initial_state", "final_state", "dinitial_state")}


def hedgehog(row, large):
    c = constants(row)
    shapes = [("large", 3000, 8, 0, "", 64, False), ("few blocks", 2000, 2, 0, "states", 64, False)] if large else []
    local = c.get("LOCAL")
    shapes += (HEDGEHOG_LOCAL if local else HEDGEHOG if local == 0 else HEDGEHOG[:3] + HEDGEHOG_LOCAL[:1])
    if row["op"] in ("hedgehog_bwd", "hedgehog_bwd_maps"):
        shapes.append(("runs of chunks", 330, 8, 0, "", 64, False))
    if row["op"] in ("hedgehog_bwd_scan", "hedgehog_bwd_back"):
        shapes.append(("states, more chunks", 330, 2, 0, "states", 16 if local else 64, False))
    if row["op"] in ("hedgehog_cuts", "hedgehog_join"):
        shapes = [shape for shape in (*shapes, HEDGEHOG[3], HEDGEHOG_LOCAL[2]) if shape[0] not in ("plain", "packed")
                  and shape[1] > 1000]
    for label, *problem in shapes:
        yield label, lambda problem=problem: call_hedgehog(owner(row), row["dtype"], c.get("D", 64), *problem)


def call_hedgehog(name, dtype, dim, steps, heads, less, kind, window, sliding):
    starts, op = (0, steps // 4, steps // 4, steps // 4 + 64, steps), _op.Row(name)
    known = dict.fromkeys(op.sizes, -1) | dict(B=1, T=steps, H=heads, K=dim, V=dim - less, F=64 - less,
                                               STARTS=len(starts) if kind == "packed" else -1)
    known |= dict(window=window, sliding=sliding, scale=0.0, cu_seqlens=kind == "packed")
    op.derive(known)
    values = dict(window_factor=0.6, linear_factor=0.4, den=2.0, cu_seqlens=starts)
    kinds = dict(half=dtype, float32="float32", int32="int32")
    tensors = {f["name"]: new(*(known[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=values.get(f["name"]))
               for f in op.arguments if f["role"] != "num"
               and (f["name"] in HEDGEHOG_GIVEN[kind] or f["role"] not in ("opt", "optout"))}
    getattr(_C, name)(*(tensors.get(f["name"]) for f in op.arguments if f["role"] != "num"), window, sliding, 0.0)
    return [tensors[f["name"]] for f in op.results if f["name"] in tensors]


# label, steps, heads, what is given besides. Sweeps are of many heads, or of short sequences, or of long ones, which
# are cut: only those have the states of cuts.
SWEEPS = (("plain", 250, 2, ("dfinal_state", "dinitial_state", "initial_state")), ("one chunk", 40, 2, ()),
          ("packed", 230, 2, ("cu_seqlens", "dinitial_state", "dfinal_state")),
          ("cut", 4100, 1, ("dfinal_state", "dinitial_state", "initial_state")))


def linear_attention_sweep(row, large):
    """Of few columns: the checker's time is that of tiles. With the gradient of g where the row has its sums."""
    dots = "dots" in row["op"] or row["op"].endswith("cuts")
    n = {"d64": 8, "d128": 72}.get(row["name"].split("_")[-1], 8)
    shapes = [("large", 3000, 70, ())] if large else []
    shapes += [x for x in SWEEPS if x[0] == "cut" or not row["op"].endswith("cuts")]
    for label, steps, heads, given in shapes:
        if dots:
            given += ("g", "dg") if label != "packed" else ("g_head", "dg_head")
        yield label, lambda problem=(steps, heads, n, given): call_linear_attention_bwd(row["dtype"], *problem)


def call_linear_attention_bwd(dtype, steps, heads, n, given):
    starts = (0, steps // 4, steps // 4, steps // 4 + 64, steps)
    here = lambda name, size: size if name in given else -1  # noqa: E731
    sizes = dict(B=1, T=steps, H=heads, K=n, V=n, HG=here("g", heads), HH=here("g_head", heads),
                 STARTS=here("cu_seqlens", len(starts)))
    op = _op.Row("linear_attention_bwd")
    for size, _, code in op.lets:
        sizes[size] = int(eval(code, {}, sizes))
    sizes["ROWS"] = sizes["R"]
    values = dict(g=-0.1, g_head=-0.1, cu_seqlens=starts)
    kinds = dict(half=dtype, float32="float32", int32="int32")
    fields = [f for f in op.arguments if f["role"] != "num"]
    tensors = {f["name"]: new(*(sizes[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=values.get(f["name"]))
               for f in fields if f["name"] in given or f["role"] not in ("opt", "optout")}
    _C.linear_attention_bwd(*(tensors.get(f["name"]) for f in fields))
    return [tensors[f["name"]] for f in op.results if f["name"] in tensors]


# label, steps, what is given besides. Decays are strong in some chunks and mild in others.
KDA = (("log decays", 330, ("initial_state", "final_state")), ("gates", 200, ("a_log", "dt_bias")),
       ("packed", 300, ("a_log", "cu_seqlens", "initial_state", "final_state")))

KDA_CUT = ("kda_segments", "kda_cuts")
KDA_STEEP = ("steep", 560, ("steep",))           # of kda_prepare.cu: what it does with steep gates is a way of its own
KDA_OWN = ("own heads", 330, ())                 # of q and k, so that their gradients are no shares
KDA_BESIDE = ("beside", 1400, ())                # of one head: the pass leaves a multiprocessor to the preparation
# In one kernel a block has two heads or one
KDA_WHOLE = (("states", 330, ("initial_state", "final_state")), ("gates", 200, ("a_log", "dt_bias")),
             ("steep", 560, ("steep",)), ("far", 560, ("far",)), ("one chunk", 40, ("final_state",)),
             ("packed", 300, ("a_log", "cu_seqlens", "initial_state", "final_state")))


def kda(row, large):
    keep = ("keep",) * row["name"].endswith("_kept")
    if row["op"] in KDA_EARLY:
        back = row["op"] != "kda_early"
        for label, heads, given in (("states", 1 if back else 2, ("initial_state", "final_state")),
                                    ("raw", 1, ("a_log", "dt_bias", *["keep"] * back)), ("slow", 1, ("slow",)),
                                    *[("apart", 1, ("apart",))] * (not back)):
            yield label, lambda heads=heads, given=("form4", *given, *keep): call_kda(
                "kda_bwd" if back else "kda", row["dtype"], 120, 104, heads, 2100 if back else 1100, given)
        if large:
            yield "large", lambda: call_kda("kda_bwd" if back else "kda", row["dtype"], 128, 128, 8, 8200,
                                            ("form4", *keep))
        return
    cut = row["op"] in KDA_CUT
    name = "kda" if cut or row["op"] in ("kda", "kda_prepare", "kda_decays") else "kda_bwd"
    columns = constants(row)
    if row["op"] == "kda_whole":
        for label, steps, given in [*KDA_WHOLE, *[("large", 900, ("a_log",))] * large]:
            yield label, lambda steps=steps, given=given, heads=40 if label == "large" else 3: call_kda(
                "kda", row["dtype"], columns["D"] - 8, 104, heads, steps, (*given, *keep, "whole"))
        return
    shapes = [("large", 3000, ("a_log",)), ("few blocks", 640, ("a_log",))] if large else []
    if cut:
        shapes = [("large", 8200, ())] if large else []
        shapes += [("cut", 1100, ("initial_state", "final_state", "form")), ("once", 600, ("form",))]
    tiles = ("inverses", "reads") if row["op"] == "kda_tiles" else ()
    if row["op"] in ("kda", "kda_prepare") and "v128" not in row["name"]:
        shapes.append(KDA_BESIDE)
    if row["source"] == "kda_prepare":
        shapes.append(KDA_STEEP)
    if row["op"] == "kda_bwd":
        shapes.append(KDA_OWN)
    for label, *problem in [*shapes, *(KDA[1:] if row["op"] == "kda_decays" else KDA * (not cut))]:
        problem[1] += tiles
        # Where rows are few, a GPU splits the columns of v, or it cuts the rows.
        many = label in ("large", "few blocks") and (row["op"] == "kda" or "v128" in row["name"])
        heads = 120 if many else 1 if label in ("beside", "own heads") else 2
        yield label, lambda problem=problem, heads=heads: call_kda(
            name, row["dtype"], columns.get("D", columns.get("N")) - 8, 128 if "v128" in row["name"] else 40, heads,
            *problem)


def call_kda(name, dtype, k, v, heads, steps, given):
    starts, op = (0, steps // 4, steps // 4, steps // 4 + 64, steps - 7), _op.Row(name)
    given += tuple("d" + t for t in (*given, "g", "beta"))
    known = dict.fromkeys(op.sizes, -1) | dict(B=1, T=steps, H=1, HV=heads, K=k, V=v,
                                               HH=heads if "a_log" in given else -1,
                                               STARTS=len(starts) if "cu_seqlens" in given else -1)
    known |= dict(scale=0.0, lower_bound=0.0, beta_form=len(given) % 3, l2norm="a_log" in given, state_v_first=False,
                  form=4 if "form4" in given else 3 if "form" in given else 1 if "whole" in given else
                  2 * (name == "kda"), keep="keep" in given)
    known |= {f["name"]: f["name"] in given or f["role"] not in ("opt", "optout") for f in op.arguments
              if f["role"] != "num"}
    op.derive(known)
    known["ROWS"] = known["R"]
    if "inverses" in given and name == "kda_bwd":
        known["KEPT"] = 64 * known["CHUNKS"]
        op.derive(known)
    known |= dict(S1=k, S2=v)
    numbers = [f["name"] for f in op.arguments if f["role"] == "num"]
    step, channel = np.arange(steps)[:, None, None], np.arange(k)
    strong = step % 128 == 5
    if "steep" in given or "far" in given:
        # in both panels of 64 channels, in none, or in one; a team has several of these in turn
        strong = (step % 64 < 8) & (step // 128 % np.where(channel < 64, 2, 3) == 0)
    # far: a group's steps are too far from those around it for one middle, and not so from its own
    if "form4" in given:                          # as early() has it
        strong &= False
    weak = -0.01 if "slow" in given else -0.1
    various = np.random.default_rng(0).standard_normal((1, steps, 1, v))      # whose columns do not round alike
    values = dict(g=np.where(strong, -10.5 if "far" in given else -20.0, weak)[None], a_log=-1.0,
                  **dict(dt_bias=-1.5) if "form4" in given else {},
                  **dict(v=np.where(step < 200, 1e6, 1.0) * various) if "apart" in given else {},
                  beta=-4.6 if known["beta_form"] else 0.01, cu_seqlens=starts)    # beta |k|^2 < 2: no state runs off
    kinds = dict(half=dtype, real=dtype, float32="float32", int32="int32")
    tensors = {f["name"]: new(*(known[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=values.get(f["name"]))
               for f in op.arguments if f["role"] != "num" and known[f["name"]]}
    getattr(_C, name)(*(tensors.get(f["name"]) for f in op.arguments if f["role"] != "num"),
                      *(known[n] for n in numbers))
    return [tensors[f["name"]] for f in op.results if f["name"] in tensors]


DELTA = (("states", 330, 1, 2, ("g", "initial_state", "final_state")), ("none", 70, 1, 1, ()),
         ("packed", 410, 1, 1, ("g", "a_log", "dt_bias", "cu_seqlens", "l2norm", "beta_form", "final_state")))
DELTA_CUT = ("delta_segments", "delta_cuts", "delta_join")
DELTA_EARLY = ("delta_fades", "delta_early", "delta_meets", "delta_keep_early", "delta_back_early")
KDA_EARLY = ("kda_early", "kda_keep_early", "kda_back_early")
DELTA_BWD = ("gated_delta_rule_bwd", "delta_keep", "delta_back")


def gated_delta_rule(row, large):
    """Of few columns: the checker's time is that of tiles. Chunks are prepared before the pass where the row wants it,
    and rows are cut."""
    n = 8 if "_k64" in row["name"] else 72
    if row["op"] in DELTA_EARLY:
        yield from early(row, large, n)
        return
    form = 3 if row["op"] in DELTA_CUT else 2 if "prepare" in row["name"] else 1
    op = "gated_delta_rule_bwd" if row["op"] in DELTA_BWD else "gated_delta_rule"
    given = ("g", "l2norm")
    whole = ("cu_seqlens",) if "prepare" in row["name"] else ()      # packed rows are not cut
    many = (8, 16) if row["name"].endswith("_prepared") else (33, 132)       # rows of many heads are cut
    shapes = [("large", 2000, *many, given), ("few blocks", 3000, 1, 2, given + whole)] if large else []
    cut = row["op"] in DELTA_CUT
    if cut:
        shapes = [("large", 20000, 2, 2, ("g",))] if large else []
        shapes += [("cut", 2600, 1, 1, ("g", "initial_state", "final_state")), ("once", 1100, 1, 1, ())]
    for label, *problem in (*shapes, *DELTA * (not cut)):
        if row["op"] == "gated_delta_rule_bwd":          # chunks are dealt out to blocks
            problem[0] *= 2
        if label == "few blocks" and op == "gated_delta_rule_bwd" and "v128" in row["name"]:
            problem[1:3] = 17, 34                        # below, a GPU splits the columns of v
        if row["op"] != "delta_norms" or "l2norm" in problem[3]:
            # A pair has five roles a block, and the checker runs 64 at once: of four packed rows one half of v
            v = 128 if "v128" in row["name"] else 64 if "_prepared" in row["name"] and label == "packed" else 72
            yield label, lambda x=problem, v=v: call_gated_delta_rule(op, row["dtype"], *x, n, v, form)


def early(row, large, k):
    """Segments that begin early: where gates forget; where one is as slow as none may be; where what came of it is not
    right. Those who guess and judge are kimi delta attention's, too. How early, and whether states are alike, must not
    hang on what was drawn: on a GPU that is something else."""
    back = row["op"] in ("delta_keep_early", "delta_back_early")
    shared = row["op"] in ("delta_fades", "delta_meets")
    name, steps = "gated_delta_rule" + "_bwd" * back, 2100 if back else 1100
    keep = row["name"].endswith("_kept")
    once, usual = np.arange(steps)[:, None, None] < 200, dict(k=None, beta=0.01, a_log=-2.2, dt_bias=0.0)
    for label, t, heads, given, values in (
            *[("large", 8200, (4, 8), ("g", "l2norm"), {})] * large,
            ("states", steps, (1, 2), ("g", "initial_state", "final_state"), {}),
            ("slow", steps, (1, 1), ("g",), dict(g=-0.01)), ("raw", steps, (1, 1), ("g", "a_log", "dt_bias"), {}),
            *[("apart", steps, (1, 1), ("g",), dict(v=np.where(once, 1e20, 1.0)[None]))] * (not back)):
        yield label, lambda t=t, heads=heads, given=given, values=values: call_gated_delta_rule(
            name, row["dtype"], t, *heads, given, k, 72, 4, keep, usual | values)
    whose = ("kda_bwd", 2100) if row["op"] == "delta_meets" else ("kda", 1100)
    for label, given in (("channels", ("form4",)), ("raw channels", ("form4", "a_log", "dt_bias"))) if shared else ():
        yield label, lambda given=given: call_kda(whose[0], row["dtype"], 120, 104, 1, whose[1], given)


def call_gated_delta_rule(name, dtype, steps, heads, v_heads, given, k, v, form, keep=False, others={}):
    starts = (0, steps // 4, steps // 4, steps // 4 + 64, steps - 5)
    given += tuple("d" + t for t in (*given, "beta"))
    sizes = dict(B=1, T=steps, H=heads, HV=v_heads, K=k, V=v, STARTS=len(starts) if "cu_seqlens" in given else -1)
    sizes |= dict(HH=v_heads if "a_log" in given else -1, NORMS=-1, KEPT=-1)
    sizes |= dict(form=form, state_v_first=0, l2norm=int("l2norm" in given), S1=-1, S2=-1, keep=int(keep))
    op = _op.Row(name)
    for size, _, code in op.lets:
        sizes[size] = int(eval(code, {}, sizes))
    sizes |= dict(ROWS=sizes["R"], S1=k, S2=v)
    values = dict(g=-0.1, beta=0.5, k=0.1, cu_seqlens=starts) | others
    kinds = dict(half=dtype, float32="float32", int32="int32")
    tensors = {f["name"]: new(*(sizes[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=values.get(f["name"]))
               for f in op.arguments
               if f["role"] != "num" and (f["name"] in given or f["role"] not in ("opt", "optout"))}
    absent = {f["name"]: None for f in op.arguments if f["role"] in ("opt", "optout")}
    getattr(_C, name)(**absent | tensors, l2norm="l2norm" in given, form=form, beta_form=2 * ("beta_form" in given),
                      **dict(keep=keep) if name == "gated_delta_rule" else {})
    return [tensors[f["name"]] for f in op.results if f["name"] in tensors]


def scaled_add(row, large):
    for m, n in (*([(3000, 3000)] if large else []), (700, 336), (64, 64), (100, 8)):
        def call(m=m, n=n):
            out, a, b = (new(m, n, dtype=row["dtype"]) for _ in range(3))
            _C.scaled_add(out, a, b, 0.5)
            return out,
        yield "large" if m == 3000 else f"{m}x{n}", call


def causal_conv1d(row, large):
    """Plain, with states, with numbers of sequences, packed."""
    dtype, w, backward = row["dtype"], constants(row)["TAPS"], row["op"] != "causal_conv1d"
    shapes = [("large", "plain", 4, 3000, 2048), ("few blocks", "states", 1, 3000, 264)] if large else []
    shapes += [("", "states", 2, 700, 520), ("", "seq_idx", 1, 300, 264), ("", "packed", 1, 700, 264)]
    for label, kind, b, t, c in shapes:
        def call(kind=kind, b=b, t=t, c=c):
            packed = new(4, dtype="int32", values=(0, t // 3, t // 3, t - 5)) if kind == "packed" else None
            seq_idx = new(b, t, dtype="int32", values=np.arange(t) % 97 // 40 - 1.0) if kind == "seq_idx" else None
            places = 3 if kind == "packed" else b
            initial = new(places, w - 1, c, dtype=dtype) if kind in ("states", "packed") else None
            x, weight, bias = new(b, t, c, dtype=dtype), new(c, w), new(c)
            of = dict(x=x, weight=weight, bias=bias, initial_states=initial, silu=True)
            of |= dict(cu_seqlens=packed) if kind == "packed" else dict(seq_idx=seq_idx)
            name = "causal_conv1d" + ("_packed" if kind == "packed" else "") + ("_bwd" if backward else "")
            states = new(places, w - 1, c, dtype=dtype)
            if not backward:
                out = new(b, t, c, dtype=dtype)
                getattr(_C, name)(out=out, final_states=states, **of)
                return out, states
            partials = new(_conv_parts(b, t, c), w + 1, c)
            dx, dweight, dbias = new(b, t, c, dtype=dtype), new(c, w), new(c)
            dinitial = None if initial is None else new(places, w - 1, c, dtype=dtype)
            getattr(_C, name)(dx=dx, dweight=dweight, dbias=dbias, dinitial_states=dinitial, partials=partials,
                              dout=new(b, t, c, dtype=dtype), dfinal_states=states, **of)
            return dx, dweight, dbias
        yield label or f"{kind} {b}x{t}x{c}", call


def _conv_parts(b, t, c):
    """PARTS of the row."""
    return eval({let: code for let, _, code in _op.Row("causal_conv1d_bwd").lets}["PARTS"], {}, dict(B=b, T=t, C=c))


# batch, heads, elements of a row, of a filter, causal, gates, precise. Several heads in a tile, which is not full; more
# tiles than a block's warpgroups have; a filter for each tile; blocks, with some in front of a circular row.
FFT = ((1, 300, 128, 128, True, True, False), (9, 2, 4096, 4096, True, True, False),
       (1, 21, 4096, 2000, False, False, False), (9, 7, 2048, 2000, False, True, False),
       (3, 3, 8192, 5000, True, True, False), (3, 2, 16384, 16384, False, True, False))
FFT_BLOCKS = ((3, 2, 5000, 4800, False, True, True), (2, 3, 9000, 300, True, False, True))


def fft_conv(row, large):
    """Forward, and, of rows that gradients run, backward."""
    gradients = row["op"] in ("fft_conv_bwd", "fft_conv_parts")
    takes, blocks, pieces = constants(row).get("TAKES"), constants(row).get("R"), constants(row)["PIECES"]
    problems = FFT_BLOCKS if row["op"] in ("fft_conv_spectra", "fft_conv_sums") else [
        p for p in FFT if p[2] == 4096 * blocks] if blocks else [
        p for p in FFT if p[2] <= 4096 and takes in (None, 1 + (not p[4]))]
    if row["op"] == "fft_conv_parts" or row["name"].endswith("_long"):
        problems = FFT[-2:]
    if row["op"] == "fft_conv_sums" and pieces == 2:
        problems += FFT[2:3]
    if row["op"] == "fft_conv_filters" and pieces == 2:
        problems += FFT[-2:]
    if large:
        problems = ((8, 300 if problems[0][2] < 8192 else 60, *problems[0][2:]), (1, 5, *problems[-1][2:]), *problems)
    for b, h, n, taps, causal, gates, precise in problems:
        def call(b=b, h=h, n=n, taps=taps, causal=causal, gates=gates, precise=precise, backward=False):
            dtype = "float16" if row["op"] == "fft_conv_filters" and pieces == 2 else row["dtype"]
            rows = lambda: new(b, h, n, dtype=dtype)  # noqa: E731
            of = dict(u=rows(), k=new(h, taps), skip=new(h) if gates else None, pregate=rows() if gates else None,
                      postgate=rows() if gates else None, causal=causal, precise=precise)
            op = _op.Row("fft_conv_bwd" if backward else "fft_conv")
            sizes = dict(B=b, H=h, L=n, LK=taps, GIVEN=-1, causal=causal)
            for let, _, code in op.lets:
                sizes[let] = int(eval(code, {}, sizes))
            scratch = {f["name"]: new(sizes[f["sizes"][0]], values=0) for f in op.work}
            if not backward:
                out = rows()
                _C.fft_conv(out=out, **scratch, **of)
                return out,
            made = dict(du=rows(), dk=new(h, taps), dskip=new(h) if gates else None)
            if gates:
                made |= dict(dpregate=rows(), dpostgate=rows())
            _C.fft_conv_bwd(**made, **scratch, dout=rows(), **of)
            return tuple(t for t in made.values() if t is not None)
        label = f"{b}x{h}x{n} * {taps}{' causal' if causal else ''}{' gates' if gates else ''}"
        if not gradients and (precise or row["op"] != "fft_conv_sums"):
            yield label, call
        if gradients or blocks or row["op"] == "fft_conv_sums":
            yield label + " backward", functools.partial(call, backward=True)


def causal_conv1d_step(row, large):
    dtype, w = row["dtype"], constants(row)["TAPS"]
    for b, t, c, length, ring in ((2, 1, 264, 4, False), (3, 9, 520, 12, False), (2, 4, 264, 5, True)):
        def call(b=b, t=t, c=c, length=length, ring=ring):
            out, state = new(b, t, c, dtype=dtype), new(b + 1, length, c, dtype=dtype)
            used = new(b, dtype="int32", values=7) if ring else None
            _C.causal_conv1d_step(out=out, state=state, x=new(b, t, c, dtype=dtype), weight=new(c, w), bias=new(c),
                                  cache_seqlens=used, slots=new(b, dtype="int32", values=np.arange(b) - 1.0), silu=True)
            return out, state
        yield f"{b}x{t}x{c}, state {length}" + (" ring" if ring else ""), call


def rotary(row, large):
    """Columns of all kinds: beside the pairs, interleaved, of several tables, from positions that there are not."""
    dtype, odd, short = row["dtype"], row["op"].endswith("_ones"), row["name"].endswith("_k64")
    shapes = [("large", 2, 64, 32, 8, 128, 64, {})] if large else []
    shapes += [("", 2, 5, 6, 2, 80, 32, dict(interleaved=True)), ("", 1, 7, 33, 0, 96, 48, dict(offset=-2)),
               ("", 3, 4, 1, 1, 256, 128, {})]
    if short:
        shapes = [(label, b, t, h, hk, 64 if d > 80 else 48, 32 if d > 80 else 16, more)
                  for label, b, t, h, hk, d, _, more in shapes]
    for label, b, t, heads, k_heads, d, angles, numbers in shapes:
        def call(b=b, t=t, heads=heads, k_heads=k_heads, d=d - 14 * odd, angles=angles - 9 * odd, numbers=numbers):
            q, k = (new(b, t, h, d, dtype=dtype) for h in (heads, k_heads))
            out = [new(b, t, h, d, dtype=dtype) for h in (heads, k_heads)]
            positions = new(b, t, dtype="int32", values=np.arange(t) * 2.0)
            of = dict(cos=new(b, t + 3, angles), sin=new(b, t + 3, angles), positions=positions,
                      offsets=new(b, dtype="int32", values=1.0), **numbers)
            _C.rotary(q_out=out[0], k_out=out[1], q=q, k=k, **of)
            return out
        yield label or f"{b}x{t}x{heads}+{k_heads}x{d}", call


def qk_norm_rotary(row, large):
    """With a cache and without, of pages and of places that there are not, weights of both types and none."""
    dtype, odd = row["dtype"], row["op"].endswith("_ones")
    shapes = [("large", 2, 64, 32, 8, 128, 64, None, {})] if large else []
    shapes += [("", 2, 5, 6, 2, 80, 32, "pages", dict(interleaved=True)), ("", 1, 7, 33, 1, 64, 32, None, {}),
               ("", 3, 4, 1, 5, 256, 128, "caches", dict(length=3))]
    for label, b, t, heads, k_heads, d, angles, kept, numbers in shapes:
        def call(b=b, t=t, heads=heads, k_heads=k_heads, d=d - 14 * odd, angles=angles - 9 * odd, kept=kept,
                 numbers=numbers):
            q, k, v, q_out = (new(b, t, h, d, dtype=dtype) for h in (heads, k_heads, k_heads, heads))
            of = dict(q_out=q_out, q=q, k=k, q_weight=new(d), cos=new(b, t + 9, angles), sin=new(b, t + 9, angles),
                      **numbers)
            if not kept:
                out = new(b, t, k_heads, d, dtype=dtype)
                _C.qk_norm_rotary(k_out=out, k_weight=new(d, dtype=dtype), **of)
                return q_out, out
            caches = [new(b + 1, t + 2, k_heads, d, dtype=dtype) for _ in "kv"]
            table = new(b, 2, dtype="int32", values=np.arange(2 * b).reshape(b, 2) - 1.0) if kept == "pages" else None
            lengths = new(b, dtype="int32", values=t - 1.0) if kept == "pages" else None
            _C.qk_norm_rotary_append(k_cache=caches[0], v_cache=caches[1], v=v, page_table=table, cache_seqlens=lengths,
                                     **of)
            return q_out, *caches
        yield label or f"{b}x{t}x{heads}+{k_heads}x{d} {kept}", call


def qk_norm_rotary_bwd(row, large):
    """More tasks than blocks, weights of both types and none, gradients that nobody wants."""
    dtype, odd = row["dtype"], row["op"].endswith("_ones")
    shapes = [("large", 2, 64, 32, 8, 128, 64, True, {})] if large else []
    shapes += [("", 2, 9, 6, 2, 80, 32, True, dict(interleaved=True)), ("", 1, 40, 33, 1, 64, 32, True, {}),
               ("", 3, 4, 1, 5, 256, 128, False, {})]
    for label, b, t, heads, k_heads, d, angles, both, numbers in shapes:
        def call(b=b, t=t, heads=heads, k_heads=k_heads, d=d - 14 * odd, angles=angles - 9 * odd, both=both,
                 numbers=numbers):
            q, k, dq_out, dk_out, dq, dk = (new(b, t, h, d, dtype=dtype) for h in (heads, k_heads) * 3)
            parts = min(b * t, 528)
            made = dict(dq=dq if both else None, dk=dk, dq_weight=new(d),
                        dk_weight=new(d, dtype=dtype) if both else None)
            _C.qk_norm_rotary_bwd(**made, partials=new(parts, 2 * ((d + 7) // 8 * 8)), dq_out=dq_out, dk_out=dk_out,
                                  q=q, k=k, q_weight=new(d), k_weight=new(d, dtype=dtype) if both else None,
                                  cos=new(b, t + 9, angles), sin=new(b, t + 9, angles), **numbers)
            return [t for t in made.values() if t is not None]
        yield label or f"{b}x{t}x{heads}+{k_heads}x{d}" + " both" * both, call


def cross_entropy_rows(row, large):
    """Rows that count and one that does not, of few stretches and of many, with and without gradients."""
    shapes = [("large", 1024, 32000, {})] if large else []
    shapes += [("", 5, 9000, dict(label_smoothing=0.1, z_loss=1e-3, softcap=9.0)), ("", 3, 4096, {}), ("", 4, 7, {})]
    for label, m, n, numbers in shapes:
        def call(m=m, n=n, numbers=numbers):
            loss, lse, logits = new(m), new(m), new(m, n, dtype=row["dtype"])
            targets = new(m, dtype="int32", values=[-100, *(i % n * 1.0 for i in range(m - 1))])
            scale = new(m if m == 5 else 1, values=0.5) if m != 4 else None
            _C.cross_entropy_rows(loss=loss, lse=lse, logits=logits, targets=targets, scale=scale, **numbers)
            return loss, lse, logits
        yield label or f"{m}x{n}", call


def cross_entropy_scaled(row, large):
    """In place and from sums, of parts that are whole and that are not."""
    for label, m, n in (("in place", 3, 4100), ("sums", 3, 5000)):
        def call(m=m, n=n, sums=label == "sums"):
            out = new(m, n, dtype=row["dtype"])
            _C.cross_entropy_scaled(out, new(m, n) if sums else None, new(1, values=0.5))
            return (out,)
        yield label, call


# rows, groups, columns, what is read besides x. A block has 64 lines to one, which 1 to 16 warps share; of the last two
# sums of a line cross warps and warpgroups.
NORMS = (("16 lines", 150, 1, 40, "residual"), ("4 lines", 40, 1, 200, "gate first"),
         ("groups", 20, 3, 512, "gate last"), ("a warpgroup", 9, 1, 1000, ""), ("two", 7, 1, 2040, "residual"))


def norm(row, large):
    c = constants(row)
    whole = 1024 * c.get("J", 1) * c["GROUPS"]
    if c.get("LINES"):                     # each member has a line or more, the last ones of some have none
        members, columns = c["GROUPS"] // c["SPAN"] * c["LINES"], 1024 * c["J"] * c["SPAN"] // c["LINES"]
        if "EARLY" in c:
            for rows in (9 * members + 1, 2):
                yield "alone", lambda rows=rows: call_norm(row["dtype"], False, rows, 1, columns - 8, "residual alone")
            return
        gates = [] if "STAGES" in c else [("gate first", 2 * members + 1, "gate first"), ("gate last", 3, "gate last")]
        for label, rows, kind in [("with what is added", 9 * members + 1, "residual of 16 bits"), ("plain", 2, ""),
                                  *gates]:
            yield label, lambda x=(row["dtype"], row["op"] != "norm_fwd", rows, 1, columns - 8, kind): call_norm(*x)
        return
    shapes = [("large", 3000, 1, 4096, "residual"), ("few blocks", 600, 1, 4096, "")] if large else []
    if row["op"] == "norm_bwd_post":
        shapes += [*NORMS[:2], ("groups", 20, 3, 100, "gate last")]
    else:
        shapes += NORMS if c["LONG"] == 0 and whole == 4096 else NORMS[:2] if c["LONG"] else ()
        shapes += [("whole blocks", 5, 1, whole - 64 if not c["LONG"] else 2 * whole + 22, kind)
                   for kind in ("residual", "gate first", "gate last")]
    for label, *problem in shapes:
        yield (label if label in ("large", "few blocks") else f"{label}, {problem[-1]}",
               lambda x=(row["dtype"], row["op"] != "norm_fwd", *problem): call_norm(*x))


def call_norm(dtype, backward, rows, groups, columns, kind):
    alone = kind == "residual alone"           # but for a weight, and all of 16 bits
    name = "layer_norm_residual" if kind.startswith("residual") else "gated_rms_norm" if kind else "layer_norm"
    name = "rms_norm_residual" if alone else name + "_bwd" * backward
    op = _op.Row(name)
    known = dict.fromkeys(op.sizes, -1) | dict(B=rows, G=groups, N=columns)
    known |= {f["name"]: f["role"] != "num" for f in op.inputs} | {f["name"]: _op.default(f) for f in op.numbers}
    known |= dict(dropout_p=0.0 if alone else 0.25, gate_first=kind == "gate first")
    op.derive(known)
    kinds = dict(half=dtype, real=dtype if kind.endswith(("bits", "alone")) else "float32", float32="float32",
                 int32="int32")
    tensors = {f["name"]: new(*(known[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=dict(rstd=1.0, seed=7).get(f["name"]))
               for f in op.arguments if f["role"] != "num" and not (alone and f["name"] in ("bias", "seed"))}
    getattr(_C, name)(**tensors, **{f["name"]: known[f["name"]] for f in op.numbers})
    return [tensors[f["name"]] for f in op.results]


def norm_fp8(row, large):
    """As `norm`, with a scale for each row and with one that is given. Columns are multiples of four: words of four
    bytes belong to one warpgroup."""
    c = constants(row)
    lines, whole = c["LINES"], 1024 * c["J"] * (c["SPAN"] if c["LINES"] else c["GROUPS"])
    shapes = ([(9 * c["GROUPS"] // c["SPAN"] + 1, whole - 8), (2, whole - 64)] if lines else
              [(150, 40), (5, 2 * whole + 20)] if c["LONG"] else
              [(150, 40), (40, 200), (20, 512), (9, 1000), (5, whole - 64)])
    for i, (rows, columns) in enumerate([(3000, 4096), (600, 4096)] * large + shapes):
        kind = "" if i % 2 else "residual of 16 bits" if lines else "residual"
        label = ("large", "few blocks")[i] if large and i < 2 else f"{rows}x{columns}" + f" {kind}" * bool(kind)
        for given in (False, True):
            yield (label + ", scale given" * given,
                   lambda x=(row["dtype"], rows, columns, kind, given): call_norm_fp8(*x))


def call_norm_fp8(dtype, rows, columns, kind, given):
    op = _op.Row("rms_norm_fp8" if given else "layer_norm_fp8")
    known = dict.fromkeys(op.sizes, -1) | dict(B=rows, N=columns, K=2, R=1)
    absent = (() if given else ("out_scale",)) + (() if kind else ("residual", "new_residual", "seed"))
    kinds = dict(half=dtype, real=dtype if kind.endswith("bits") else "float32")
    tensors = {f["name"]: new(*(known[size] for size in f["sizes"]), dtype=kinds.get(f["kind"], f["kind"]),
                              values=dict(out_scale=0.01, seed=7).get(f["name"]))
               for f in op.arguments if f["role"] != "num" and f["name"] not in absent}
    getattr(_C, op.name)(**tensors, dropout_p=0.25 if kind else 0.0)
    return [tensors[f["name"]] for f in op.results if f["name"] in tensors]


# steps, samples, places, what is given besides; of the last sample there is no state
STEPS = ((0, 2, 2, ()), (3, 3, 5, ("slots", "z", "d", "dt_bias", "g")), (1, 2, 3, ("slots", "d_wide", "g_head")))


def step_of_generation(row, large):
    """One step, and several; of rows of one number at a time, columns that are no multiple of four. They are even:
    words of four bytes belong to one block."""
    shapes = [("large", 8, 64, 64, ("slots", "z", "d", "dt_bias", "g"))] if large else []
    ssd = row["op"].startswith("ssd")
    for label, steps, batch, places, given in [*shapes, *(("", *rest) for rest in STEPS)]:
        c, odd = constants(row), row["op"].endswith("_ones")
        most = c["COLS" if ssd else "ROWS"] - (6 if odd else 4 * min(steps, 3))
        sizes = dict(B=batch, T=steps, SLOTS=places, H=2, P=40, G=1, N=most, K=most, V=50 if odd else 52, HG=2, HH=2)
        slots = [*range(places - 1, places - batch, -1), -1]
        yield (label or f"{steps} steps of {batch} samples, {most}",
               lambda x=(row["dtype"], ssd, sizes, given, slots): call_step(*x))


def call_step(dtype, ssd, sizes, given, slots):
    op = _op.Row(("ssd" if ssd else "linear_attention") + ("_steps" if sizes["T"] else "_step"))
    values = dict(dt=0.1, a=-1.0, g=-0.1, g_head=-0.1, slots=slots)
    kinds = dict(half=dtype, real="float32", int32="int32")
    fields = [f for f in op.arguments if f["role"] != "num"]
    tensors = {f["name"]: new(*(sizes[size] for size in f["sizes"]), dtype=kinds[f["kind"]],
                              values=values.get(f["name"]))
               for f in fields if f["name"] in given or f["role"] != "opt"}
    if sizes["T"] == 1:
        tensors["state"] = new(*(sizes[size] for size in ("SLOTS", *(("H", "P", "N") if ssd else ("H", "K", "V")))),
                               dtype=dtype)
    getattr(_C, op.name)(**tensors)
    return [tensors[f["name"]] for f in (*op.results, op.inputs[0])]


# steps, samples, places, what is given besides, numbers; of the last sample there is no state
DELTA_STEPS = ((0, 2, 2, ("g",), dict(l2norm=True, still=True)),
               (3, 3, 5, ("g", "a_log", "dt_bias", "slots", "states"), dict(beta_form=2)),
               (2, 2, 9, ("g", "a_log", "kept", "accepted"), dict(l2norm=True)))
DELTA_ONCE = ((0, 2, 2, ("g",), dict(l2norm=True)), (1, 3, 5, ("g", "a_log", "dt_bias", "slots"), dict(beta_form=2)))


def step_of_delta_rule(row, large):
    """One step, and several; of rows of one number at a time as in step_of_generation."""
    c, odd = constants(row), row["op"].endswith("_ones")
    most = c["ROWS" if c["DOWN"] else "COLS"]
    several, most_steps = (DELTA_ONCE, 1) if c["ONCE"] else (DELTA_STEPS, 8)
    large = [("large", most_steps, 64, 64, ("g", "a_log", "dt_bias", "slots"), dict(l2norm=True))] * large
    for label, steps, batch, places, given, numbers in [*large, *(("", *rest) for rest in several)]:
        wide, keys = max(steps, 1), most - (6 if odd else 4 * steps)
        sizes = dict(B=batch, T=steps, SLOTS=places, H=1, HV=2, K=keys, V=50 if odd else 52, KEEP=wide, STEPS=wide,
                     ROWS=batch)
        yield (label or f"{steps} steps of {batch} samples, {keys}",
               lambda x=(row, sizes, given, numbers): call_delta_step(*x))


def call_delta_step(row, sizes, given, numbers):
    name = "kda_step" if constants(row)["CHANNELS"] else "gated_delta_rule_step"
    op, batch, places, dtype = _op.Row(name + "s" * bool(sizes["T"])), sizes["B"], sizes["SLOTS"], row["dtype"]
    values = dict(g=-0.1, a_log=0.0, beta=0.5, k=0.05, slots=[*range(places - 1, places - batch, -1), -1],
                  kept=np.arange(batch * sizes["KEEP"]).reshape(batch, -1) * 1.0, accepted=[*range(batch, 0, -1)])
    short = sizes["T"] == 3 or "BYTES == 2" in row["when"]
    kind = lambda f: (dtype if f["kind"] == "half" or f["name"] in ("state", "states") and short  # noqa: E731
                      else "float32" if f["kind"] == "real" else f["kind"])
    fields = {f["name"]: f for f in op.arguments
              if f["role"] != "num" and (f["name"] in given or f["role"] != "opt")}
    tensors = {name: new(*(sizes[size] for size in f["sizes"]), dtype=kind(f), values=values.get(name))
               for name, f in fields.items()}
    if not constants(row)["DOWN"]:
        for name in {"state", "states"} & {*tensors}:
            *lead, keys, columns = (sizes[size] for size in fields[name]["sizes"])
            tensors[name] = turned(new(*lead, columns, keys, dtype=kind(fields[name])))
    getattr(_C, op.name)(**tensors, **numbers)
    return [tensors[name] for name in ("out", "state", "states") if name in tensors]


def from_row(kernel, large):
    """Random problems from the op's row in ops.def: sizes for which NEEDS and the kernel's condition hold, values in
    the ranges of DRAW."""
    op, r = _op.Row(owner(kernel)), random.Random(zlib.crc32(kernel["name"].encode()))
    # Rows of 16 bytes, which the GPU's maps ask for
    whole = {f["sizes"][-1] for f in op.inputs if f["kind"] == "half"}
    condition, facts = _op.condition(kernel["when"]), dict(true=True, gpu=False, sms=SMS)
    for i in range(5 if large else 3):
        label = ("large", "few blocks")[i] if large and i < 2 else None
        # The first: so many tasks that rings go round
        undrawn = (1, 3000) if label == "large" else (400, 1000) if i == 0 else (1, 300)
        for _ in range(10000):
            n = op.problem(r, *undrawn, whole)
            if eval(condition, {}, facts | n):
                break
        else:
            raise RuntimeError(f"{kernel['name']}: no sizes were found for which {kernel['when']} holds")

        def call(n=n):
            tensors = [f for f in op.arguments if f["role"] != "num" and n.get(f["name"], True)]
            given = {f["name"]: drawn_tensor(op, f, n, kernel["dtype"]) for f in tensors}
            getattr(_C, op.name)(**given)
            return [given[f["name"]] for f in op.results]
        yield label or ", ".join(f"{size}={n[size]}" for size in op.sizes if n[size] >= 0), call


def drawn_tensor(op, f, n, dtype):
    shape = [n[size] for size in f["sizes"]]
    values = np.random.default_rng(0).uniform(*op.draw[f["name"]], shape) if f["name"] in op.draw else None
    return new(*shape, dtype=dtype if f["kind"] == "half" else "float32" if f["kind"] == "real" else f["kind"],
               values=values)


def owner(row):
    """The op that launches a row of kernels.def, or None."""
    return row["owner"]


OPS = {"attention_fwd": lambda row, large: attention(row, False, large),
       "attention_fwd_fp8": lambda row, large: attention(row, False, large),
       "attention_bwd": lambda row, large: attention(row, True, large),
       "attention_bwd_pre": lambda row, large: attention(row, True, large),
       "attention_bwd_post": lambda row, large: attention(row, True, large),
       "attention_decode": attention_decode, "attention_combine": attention_decode,
       "append_kv": append_kv, "matmul": matmul,
       "ssd": ssd, "ssd_cuts": ssd_cuts, "ssd_join": ssd_cuts,
       "ssd_bwd": ssd_bwd, "ssd_bwd_states": ssd_bwd, "ssd_bwd_join": ssd_bwd,
       "ssd_bwd_sums": ssd_bwd, "scaled_add": scaled_add,
       "hedgehog": hedgehog, "hedgehog_cuts": hedgehog, "hedgehog_join": hedgehog, "hedgehog_bwd": hedgehog,
       "hedgehog_bwd_window": hedgehog, "hedgehog_bwd_scan": hedgehog, "hedgehog_bwd_back": hedgehog,
       "hedgehog_bwd_maps": hedgehog, "hedgehog_bwd_sums": hedgehog,
       "based": based, "based_bwd": based_bwd, "based_bwd_kv": based_bwd, "based_join": based,
       "causal_conv1d": causal_conv1d, "causal_conv1d_bwd": causal_conv1d, "causal_conv1d_bwd_post": causal_conv1d,
       "rotary": rotary, "rotary_ones": rotary, "qk_norm_rotary": qk_norm_rotary, "qk_norm_rotary_ones": qk_norm_rotary,
       "qk_norm_rotary_bwd": qk_norm_rotary_bwd, "qk_norm_rotary_bwd_ones": qk_norm_rotary_bwd,
       "cross_entropy_rows": cross_entropy_rows, "cross_entropy_scaled": cross_entropy_scaled,
       "fft_conv": fft_conv, "fft_conv_bwd": fft_conv, "fft_conv_filters": fft_conv,
       "fft_conv_parts": fft_conv, "fft_conv_spectra": fft_conv, "fft_conv_sums": fft_conv,
       **dict.fromkeys(("norm_fwd", "norm_bwd", "norm_bwd_post"), norm), "norm_fp8": norm_fp8,
       "causal_conv1d_step": causal_conv1d_step, "linear_attention_forth": linear_attention_sweep,
       "linear_attention_back": linear_attention_sweep, "linear_attention_forth_dots": linear_attention_sweep,
       "linear_attention_back_dots": linear_attention_sweep, "linear_attention_cuts": linear_attention_sweep,
       **dict.fromkeys(("kda", "kda_decays", "kda_prepare", "kda_whole", "kda_segments", "kda_cuts", "kda_bwd",
                        "kda_keep", "kda_back", "kda_tiles", *KDA_EARLY), kda),
       "gated_delta_rule": gated_delta_rule, "delta_prepare": gated_delta_rule, "delta_norms": gated_delta_rule,
       **dict.fromkeys((*DELTA_CUT, *DELTA_EARLY), gated_delta_rule),
       "gated_delta_rule_bwd": gated_delta_rule, "delta_keep": gated_delta_rule, "delta_back": gated_delta_rule,
       "ssd_step": step_of_generation, "ssd_step_ones": step_of_generation,
       "linear_attention_step": step_of_generation, "linear_attention_step_ones": step_of_generation,
       **{op + form: step_of_delta_rule for op in ("gated_delta_rule_step", "kda_step")
          for form in ("", "_ones", "_turned", "_turned_ones")}}


def of_op(row, large):
    """Those that somebody chose, or else random ones, or None."""
    choose = OPS.get(row["op"]) or owner(row) and from_row
    return choose and choose(row, large)


def rows():
    return {row["name"]: row for row in _C.kernels()}


def kernel_of(row, source=None):
    """The row's kernel, or another file in its place."""
    name = row["name"] if source is None else f"{source.name} as {row['name']}"
    return Kernel(source or next(csrc().glob(f"*/{row['source']}.cu")), TYPES[row["dtype"]], row["constants"], name)


class Problem:
    """The launches of a row in a call. `run` gives the first report of a seed, or None; `reported` is whose. In those
    called "beside" kernels run at the same time on a GPU: all launches are checked, in their order, with what the one
    in front has told."""

    def __init__(self, kernel, label, call=None, row=None):
        self.kernel, self.label, self.call, self.row = kernel, label, call, row
        self.reported, self.others = kernel, {}

    def of(self, name):
        """The kernel that checks launches of this row, or None."""
        if name == self.row["name"]:
            return self.kernel
        if self.label != "beside":
            return None
        if name not in self.others:
            self.others[name] = kernel_of(rows()[name])
        return self.others[name]

    def run(self, seed, sms=None, **options):
        if not self.call:
            return self.kernel.run_example(seed, **options)
        reports, launches, told = [], [], []

        @TAKE
        def take(name, params, blocks):
            kernel = self.of(name.decode())
            if not kernel:
                return False
            launches.append(kernel)
            if any(reports):                      # what would be behind it might wait for ever
                return True
            changes = options if kernel is self.kernel else dict(rules_off=options.get("rules_off", 0))
            reports.append(kernel.run(params, blocks, seed, told=told[-1] if told else (), **changes))
            if self.label == "beside":
                told.append(kernel.told())
            self.reported = kernel
            return True
        with intercepting(take, self.row["name"], sms or SMS * self.kernel.cluster):
            self.call()
        if self.kernel not in launches:
            raise RuntimeError(f"{self.kernel.name}: {self.label} did not launch it")
        return next(filter(None, reports), None)       # a call may launch it more than once

    def fewest_sms(self):
        """Multiprocessors of which the call launches the row: one, or as many as `run` has where one is not enough."""
        launched = []

        @TAKE
        def take(name, params, blocks):
            launched.append(name.decode() == self.row["name"])
            return False
        with intercepting(take, self.row["name"], 1):
            self.call()
        return 1 if any(launched) else SMS * self.kernel.cluster


@contextlib.contextmanager
def intercepting(take, name, sms=SMS):
    threads = _C.num_threads()
    _C.prefer(name)
    _C.intercept(ctypes.cast(take, ctypes.c_void_p).value, sms)
    _C.set_num_threads(max(threads, 2 * sms))      # blocks of the rows that run as usual may wait for each other: two
                                                   # for each of `sms` at most
    try:
        yield
    finally:
        _C.set_num_threads(threads)
        _C.intercept(0, 0)
        _C.prefer(None)


class NoProblems(SystemExit):
    """A row that nothing here and no EXAMPLE gives a problem to."""


def problems(row, source=None, large=False):
    """Those of the row's op; of an op that OPS does not have, the file's EXAMPLE."""
    kernel = kernel_of(row, source)
    size = kernel.descriptor.params_bytes
    if source and size != row["params_bytes"]:
        raise SystemExit(f"margay.check: {source.name} takes parameters of {size} bytes, {row['name']}, in whose place "
                         f"it shall be checked, of {row['params_bytes']}")
    found = of_op(row, large)
    if found:
        return [Problem(kernel, label, call, row) for label, call in found]
    if not kernel.has_example:
        raise NoProblems(f"margay.check: {row['name']}: not checked: the op {row['op']} has no row in ops.def and no "
                         f"problems in python/margay/check/problems.py, and {row['source']}.cu has no EXAMPLE")
    return [Problem(kernel, "its EXAMPLE", None, row)]
