"""The benchmark's arithmetic, on times that are given."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import row_taken
from margay.bench import harness, report, rows
from margay.bench.__main__ import BENCHMARKS
from margay.bench.attention import tables

ROOT = Path(__file__).resolve().parent.parent


class GivenTimes:
    device = "none"

    def measure(self, call, n):
        return call.ms

    def samples(self, ms, measure_ms):
        return 1


def runner(ms, value=1.0):
    call = lambda: torch.full((4,), value)
    call.ms = ms
    return call


def run(problem):
    case = harness.Case("a case", {}, lambda: problem)
    errors = harness.check(problem)
    return harness.result_of(case, problem, errors, harness.measure(problem, GivenTimes(), harness.Options(rounds=3)),
                             GivenTimes.device)


def test_peers_are_compared_and_rates_set_beside():
    """2 ms for 6e9 operations are 3 TFLOP/s, 4 ms of a peer twice as long, and 1 ms for 4e9 a rate of which ours is 3 /
    4."""
    result = run(harness.Problem({"margay": runner(2.0), "peer": runner(4.0)}, 1e-3, 6e9,
                                 beside={"dense": (runner(1.0, 7.0), 4e9)}))
    assert result["ms"] == {"margay": 2.0, "peer": 4.0, "dense": 1.0}
    assert result["tflops"] == pytest.approx({"margay": 3.0, "peer": 1.5, "dense": 4.0})
    assert (result["speed_ratio"] == {"peer": 2.0} and result["of_rate"] == pytest.approx({"dense": 0.75})
            and result["error"] == {"peer": 0.0})
    assert "2.00 x peer, 0.75 of the rate of dense" in harness.describe(result)


@pytest.mark.parametrize("value", (1.1, float("nan")))
def test_a_wrong_peer_is_not_timed(value):
    with pytest.raises(ArithmeticError, match="differs from peer"):
        run(harness.Problem({"margay": runner(1.0), "peer": runner(1.0, value)}, 1e-3, 1e9))


def test_the_table_has_a_graphs_time_by_layers():
    """16 layers of 134 MB in 16 * 36 us are 3.73 TB/s."""
    assert tables.decode_cell({"ms": {"margay": 16 * 0.036}, "layers": 16, "bytes": 16 << 27,
                               "speed_ratio": {"torch": 1.25}}) == "36, 86% (1.2)"


def test_a_preference_ends_with_its_call():
    """Also where the call fails, as a peer's or a row's may."""
    chosen = lambda: row_taken("attention_fwd", dtype="bfloat16", d=64)
    usual, other = chosen(), "attention_fwd_bf16_d128"
    assert rows.preferring(other, chosen)() == other != usual == chosen()

    def fails():
        assert chosen() == other
        raise RuntimeError("not today")

    with pytest.raises(RuntimeError, match="not today"):
        rows.preferring(other, fails)()
    assert chosen() == usual


@pytest.mark.parametrize("name", ("attention-h200", "attention-fp8-h200", "cpu-avx512", "decode-h200", "gemm-h200"))
def test_a_panel_has_a_label_for_each_case(name):
    found = list(report.panels(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())))
    assert found
    for title, labels, series in found:
        assert len(set(labels)) == len(labels), title
        assert all(len(values) == len(labels) for values in series.values()), title


def test_the_headline_has_the_mean_and_the_range():
    cases = [{"direction": "forward", "dtype": "bfloat16", "speed_ratio": {"peer": ratio}} for ratio in (0.5, 2.0, 1.0)]
    line = report.headline({"cases": cases, "environment": {"gpu": "GPU"}})
    assert line == "Times as fast as peer, geometric mean and range (GPU, bfloat16):\nforward 1.00 (0.50 to 2.00)."


def bench(*arguments):
    result = subprocess.run([sys.executable, "-m", "margay.bench", *arguments], capture_output=True, text=True,
                            cwd=ROOT)
    return result.returncode, result.stdout, result.stderr


def test_help_says_what_a_family_measures_and_what_the_defaults_are():
    code, out, _ = bench("--help")
    assert code == 0 and "(default: 20)" in out and all(f"  {family} " in out for family in BENCHMARKS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("family", ["attention", "decode", "features", "gemm", "linear_attention", "rows"])
def test_a_family_that_needs_a_gpu_says_so(family):
    code, out, err = bench(family)
    assert code == 2 and "needs a GPU" in err and err.count("\n") == 1
