"""The rows of kernels.def that take a case of attention or gemm, against each other and the first peer (GPU).

Conditions in kernels.def rest on this. Cases are those of the benchmarks attention and gemm; --rows names the rows by a
regular expression. Of attention it times the forward only: a preference holds for one thread, and autograd has its own.
Prints, writes nothing.
"""
import contextlib
import dataclasses
import itertools
import re

import torch

from margay import _C
from margay.bench.attention import attention
from margay.bench.gemm import gemm
from margay.bench.harness import GpuTimer, check, measure, result_of


def problem_of(case):
    """The op of a case and its problem, as `explain` takes it."""
    f = case.fields
    if "direction" in f:
        batch, heads = attention.TOKENS // f["n"], attention.WIDTH // f["d"]
        return "attention_fwd_fp8" if f["dtype"] == attention.FP8 else "attention_fwd", {
            "dtype": f["dtype"], "gpu": True, "d": f["d"], "batch": batch, "heads_q": heads, "heads_k": heads,
            "nq": f["n"], "nk": f["n"], "causal": f["mask"] == "causal"}
    return "matmul", {"dtype": f["dtype"], "gpu": True, "m": f["m"], "n": f["n"], "k": f["k"],
                      "trans_a": f["layout"][0] == "t", "trans_b": f["layout"][1] == "t"}


def takers(case, pattern):
    """Names of the rows that take the case, the one that dispatch chooses first."""
    op, problem = problem_of(case)
    names = []
    for row in _C.kernels():
        if row["op"] == op and re.search(pattern, row["name"]):
            with preferred(row["name"]):
                if _C.explain(op, **problem)[0] == row["name"]:
                    names.append(row["name"])
    return names


@contextlib.contextmanager
def preferred(name):
    """This thread's calls go to the row of that name where it takes them."""
    _C.prefer(name)
    try:
        yield
    finally:
        _C.prefer(None)


def preferring(name, call):
    def run():
        with preferred(name):
            return call()
    return run


def run(options, arguments):
    if not torch.cuda.is_available():
        raise SystemExit("rows: needs a GPU")
    timer = GpuTimer()
    for case in itertools.chain(attention.cases(arguments.dims, arguments.dtype),
                                gemm.cases(arguments.dtypes, arguments.layouts)):
        if not re.search(options.only, case.name) or case.fields.get("direction") == "backward":
            continue
        problem = case.build()
        ours, peer, *_ = problem.runners
        runners = {peer: problem.runners[peer],
                   **{name: preferring(name, problem.runners[ours]) for name in takers(case, arguments.rows)}}
        problem = dataclasses.replace(problem, runners=runners)
        check(problem)
        result = result_of(case, problem, {}, measure(problem, timer, options), timer.device)
        print(f"{case.name}: " + ", ".join(f"{name} {result['ms'][peer] / ms:.3f}"
                                           for name, ms in result["ms"].items()), flush=True)
    return True
