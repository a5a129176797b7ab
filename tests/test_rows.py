"""What follows from the rows of csrc/ops.def: stubs, the table in docs, and two checkers, C's and Python's, that say
the same."""

import ctypes
import math
import mmap
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from margay import _C, _op

ROOT = Path(__file__).resolve().parent.parent
INCLUDED = re.findall(r'^#include "(.*)"', (ROOT / "csrc" / "ops.def").read_text(), re.M)
DEFINITION = "".join((ROOT / "csrc" / name).read_text() for name in INCLUDED)
ROWS = [_op.Row(name) for name in _op.ROWS]
DTYPES = {"half": np.float32, "real": np.float32, "float32": np.float32, "int32": np.int32, "uint8": np.uint8}
IN_NUMPY = [row for row in ROWS if all(f["kind"] in DTYPES for f in row.arguments if f["role"] != "num")]


def test_arguments_come_first():
    for name, entries in _op.ROWS.items():
        kinds = [f["role"] in ("called", "let", "needs", "takes", "draw", "shown", "anywhere") for f in entries[1:]]
        assert kinds == sorted(kinds), name


def test_every_row_is_seen():
    assert list(_op.ROWS) == re.findall(r"^OP\((\w+),", DEFINITION, re.M)


def test_pages_and_stubs_are_up_to_date():
    result = subprocess.run([sys.executable, str(ROOT / "tools" / "tables.py"), "--check"],
                            capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def problem_of(row, r):
    """Sizes for which NEEDS holds, as the row's DRAW has them, and which tensors are given."""
    return row.problem(r, 1, 40)


def guarded(shape, dtype):
    """Zeros that end where memory does: what reads or writes behind them ends the process."""
    size, page = math.prod(shape) * np.dtype(dtype).itemsize, mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, (-(-size // page) + 1) * page), np.uint8)
    end = memory.size - page
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + end), ctypes.c_size_t(page), 0) == 0
    return memory[end - size:end].view(dtype).reshape(shape)


zeros = np.zeros                                      # `guarded` in a process of its own


def tensors_of(row, n):
    """Of what is written, all that there is; scratch of bytes has more than any op wants."""
    shape = lambda f: [1 << 24] if f["role"] in ("space", "optwork") else [n[size] for size in f["sizes"]]  # noqa: E731
    return {f["name"]: zeros(shape(f), DTYPES[f["kind"]]) for f in row.arguments
            if f["role"] != "num" and n.get(f["name"], True)}


def both(row, tensors, numbers):
    """What C says, and what Python says of the tensors that are read."""
    words = []
    for call in (lambda: getattr(_C, row.name)(**tensors, **numbers),
                 lambda: _op.check(row, {f["name"]: tensors.get(f["name"]) for f in row.inputs},
                                   {f["name"]: _op.default(f) for f in row.numbers} | numbers,
                                   lambda a: str(a.dtype), ("float16", "float32"))):
        try:
            call()
            words.append(None)
        except (TypeError, ValueError) as error:
            words.append((type(error), str(error)))
        except NotImplementedError as error:                  # right, and no kernel for it
            words.append(None if "no kernel for" in str(error) else (type(error), str(error)))
    return words


@pytest.mark.parametrize("row", IN_NUMPY, ids=lambda row: row.name)
def test_both_checkers_say_the_same(row):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    r = random.Random(seed)
    refused = 0
    for _ in range(30):
        n = problem_of(row, r)
        tensors = tensors_of(row, n)
        assert both(row, tensors, {}) == [None, None]
        f = r.choice([f for f in row.inputs if n[f["name"]]])
        kind = r.randrange(4)
        if kind == 0 and f["role"] != "opt":
            tensors[f["name"]] = None
        elif kind == 1:
            shape = list(tensors[f["name"]].shape)
            at = r.randrange(len(shape))
            shape[at] = r.choice((0, shape[at] + 1))
            tensors[f["name"]] = zeros(shape, tensors[f["name"]].dtype)
        elif kind == 2:
            tensors[f["name"]] = zeros((1, *tensors[f["name"]].shape), tensors[f["name"]].dtype)
        else:
            tensors[f["name"]] = zeros(tensors[f["name"]].shape, np.float16)
        in_c, in_python = both(row, tensors, {})
        written = {g["name"] for g in (*row.results, *row.saves, *row.work)}
        if in_c is not None and re.match(rf"{row.called}: (\w+) ", in_c[1])[1] in written:
            continue                                          # of which Python sees nothing; C has them first in its
                                                              # order
        assert in_c == in_python, n
        refused += in_c is not None
    assert refused > 5


def test_nothing_behind_a_tensor_is_touched():
    """By what both checkers take."""
    program = """
import os, random, sys
sys.path.insert(0, sys.argv[1])
import test_rows
random.seed(int(os.environ["MARGAY_TEST_SEED"]))
test_rows.zeros = test_rows.guarded
for row in test_rows.IN_NUMPY:
    print(row.name, flush=True)
    test_rows.test_both_checkers_say_the_same(row)
"""
    result = subprocess.run([sys.executable, "-c", program, str(ROOT / "tests")], capture_output=True,
                            text=True)
    assert result.returncode == 0, f"{result.stdout[-100:]} {result.returncode} {result.stderr[-1000:]}"


def test_a_page_table_without_pages_is_not_read():
    """It may end where memory does. There is no room: the caches stay as they are."""
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from margay import _C
from test_rows import guarded
new = lambda *shape: np.ones(shape, np.float32)
for pages, rows in ((0, 4), (3, 0)):
    q_out, cache, table = new(1, 2, 3, 8), new(6, rows, 1, 8), guarded((1, pages), np.int32)
    _C.qk_norm_rotary_append(q_out=q_out, k_cache=cache, v_cache=cache.copy(), q=new(1, 2, 3, 8), k=2 * new(1, 2, 1, 8),
                             v=new(1, 2, 1, 8), cos=0 * new(1, 9, 4), sin=new(1, 9, 4), page_table=table)
    assert (cache == 1).all() and not (q_out == 1).all()
"""
    result = subprocess.run([sys.executable, "-c", program, str(ROOT / "tests")], capture_output=True, text=True)
    assert result.returncode == 0, f"{result.returncode} {result.stderr[-1000:]}"


COMPUTED = {row.name: [(f, at) for f in row.inputs for at, size in enumerate(f["sizes"])
                       if size in (let for let, _, _ in row.lets)] for row in IN_NUMPY}


@pytest.mark.parametrize("row", [row for row in IN_NUMPY if COMPUTED[row.name]], ids=lambda row: row.name)
def test_what_is_read_has_the_sizes_that_follow(row):
    """Both checkers refuse an input whose size is not what the row computes: a kernel would read behind its end."""
    r = random.Random(2)
    for f, at in COMPUTED[row.name]:
        n = next(n for n in iter(lambda: problem_of(row, r), None) if n[f["name"]])
        tensors = tensors_of(row, n)
        shape = list(tensors[f["name"]].shape)
        for other in {0, shape[at] + 1} - {shape[at]}:
            tensors[f["name"]] = np.zeros([*shape[:at], other, *shape[at + 1:]], DTYPES[f["kind"]])
            in_c, in_python = both(row, tensors, {})
            assert in_c == in_python and in_c and in_c[0] is ValueError, (f["name"], at, n, in_c)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_no_row_divides_by_zero(row):
    """C would end the process. Python's conditions divide where C's do."""
    r = random.Random(1)
    for _ in range(2000):
        given = {f["name"]: f["role"] != "opt" or r.random() < 0.5 for f in row.inputs}
        known = dict.fromkeys(row.sizes, -1)
        known |= {size: r.choice((0, 1, 2, 600)) for f in row.inputs if given[f["name"]] for size in f["sizes"]}
        row.derive(known | given | {f["name"]: r.choice((0, _op.default(f))) for f in row.numbers})


@pytest.mark.parametrize("row", IN_NUMPY, ids=lambda row: row.name)
def test_results_have_the_row_s_sizes(row):
    """A written tensor of another size, dtype or memory is refused, and named."""
    n = problem_of(row, random.Random(1))
    for f in (*row.results, *row.saves, *(f for f in row.work if f["role"] == "work")):
        tensors, name = tensors_of(row, n), row.shown[f["name"]]
        shape = list(tensors[f["name"]].shape)
        for at in range(len(shape)):
            other = [size + (i == at) for i, size in enumerate(shape)]
            with pytest.raises(ValueError, match=f"^{row.called}: {name} has size {other[at]} in dimension {at}, "
                               f"expected {shape[at]} \\("):
                getattr(_C, row.name)(**tensors | {f["name"]: np.zeros(other, tensors[f["name"]].dtype)})
        with pytest.raises(TypeError, match=f"^{row.called}: {name} has dtype float64, expected "):
            getattr(_C, row.name)(**tensors | {f["name"]: np.zeros(shape)})
        if 0 in shape:                                            # nothing would be written
            continue
        read_only = np.zeros(shape, tensors[f["name"]].dtype)
        read_only.flags.writeable = False
        with pytest.raises(BufferError, match=f"{row.called}: {name}"):
            getattr(_C, row.name)(**tensors | {f["name"]: read_only})


def test_arguments_by_position_and_by_name():
    a = np.ones((2, 3), np.float32)
    out = np.zeros_like(a)
    _C.scaled_add(out, a, b=a, scale=2)
    assert (out == 3).all()
    _C.scaled_add(out, a, a)
    assert (out == 2).all()
    for call, words in ((lambda: _C.scaled_add(out, a, c=a), "scaled_add has no argument c"),
                        (lambda: _C.scaled_add(out, a, a, a=a), "scaled_add: a is given twice"),
                        (lambda: _C.scaled_add(out, a), "scaled_add: b is missing, expected a tensor"),
                        (lambda: _C.scaled_add(out, a, a, 1, 0, 0), "scaled_add takes at most 5 arguments, got 6"),
                        (lambda: _C.scaled_add(out, a, a, "x"), "scaled_add: scale is 'x', expected a number"),
                        (lambda: _C.matmul(out, a, a.T, None, 1 << 40),
                         f"matmul: activation is {1 << 40}, expected an integer of 32 bits")):
        with pytest.raises(TypeError) as raised:
            call()
        assert str(raised.value) == words
    with pytest.raises(ValueError, match=r"matmul: activation is 5, expected activation >= 0 && activation <= 4"):
        _C.matmul(np.zeros((2, 2), np.float32), a, a.T, None, 5)


def test_names_of_a_backward():
    row, backward = _op.Row("linear_attention"), _op.Row("linear_attention_bwd")
    _op._check_names(row, backward)
    for field, message in (("results", "writes other; by its row, linear_attention has dq, dk, dv, dg, dg_head, "
                            "dinitial_state, dcu_seqlens"),
                           ("inputs", "reads other; by its row, linear_attention has dout, dfinal_state, q, k, v, "
                            "g, g_head, initial_state, cu_seqlens, out, final_state"),
                           ("numbers", "reads other; by its row, linear_attention has scale")):
        wrong = _op.Row("linear_attention_bwd")
        setattr(wrong, field, [{"name": "other"}])
        with pytest.raises(TypeError, match=f"^linear_attention_bwd: {message}$"):
            _op._check_names(row, wrong)
