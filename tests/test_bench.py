"""The benchmark's arithmetic, on times that are given."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import margay
from cases import row_taken
from margay.bench import (causal_conv1d, cross_entropy, delta, fft_conv, harness, linear_attention, norm, report,
                          rotary, rows, ssd, steps)
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


def test_what_memory_bounds_has_its_rate_in_bytes():
    """2 ms for 6e9 bytes are 3000 GB/s, three quarters of a copy's 4e9 in 1 ms."""
    result = run(harness.Problem({"margay": runner(2.0), "peer": runner(4.0)}, 1e-3, 0, 6e9,
                                 beside={"copy": (runner(1.0), 4e9)}))
    assert "tflops" not in result and result["gbs"] == pytest.approx({"margay": 3e3, "peer": 1.5e3, "copy": 4e3})
    assert result["of_rate"] == pytest.approx({"copy": 0.75})
    assert "2.000 ms, 3000 GB/s, 2.00 x peer, 0.75 of the rate of copy" in harness.describe(result)
    assert set(result["first_ms"]) == {"margay", "peer"}
    content = {"family": "some", "cases": [result | {"memory_mb": {"margay": 5.0, "peer": 60.0}}],
               "environment": {"cpu": "CPU", "threads": 1, "torch": "2"}}
    table = [line.split("|")[2:-1] for line in report.table(content).splitlines()[:3]]
    assert [[cell.strip() for cell in line] for line in (table[0], table[2])] == [
        ["ms", "GB/s", "of copy", "times as fast as peer", "MB", "MB of peer"],
        ["2.000", "3000", "75%", "2.00", "5", "60"]]


def test_a_peer_that_is_absent_or_fails_is_left_out(capsys):
    def fails():
        raise ZeroDivisionError("of its compiler")

    fails.ms = 1.0
    assert harness.peer("no_such_package.ops", "call") is None and harness.peer("math", "sqrt")(9) == 3
    assert "no_such_package.ops: absent" in capsys.readouterr().out
    result = run(harness.Problem({"margay": runner(1.0), "peer": fails}, 1e-3, 1e9))
    assert result["speed_ratio"] == {} and "peer refuses: of its compiler" in capsys.readouterr().out


def test_a_peer_that_is_known_to_be_wrong_is_timed_and_named():
    result = run(harness.Problem({"margay": runner(1.0), "peer": runner(2.0, 3.0)}, 1e-3, 1e9, doubted=("peer",)))
    assert result["wrong"] == ["peer"] and result["speed_ratio"] == {"peer": 2.0}
    content = {"family": "some", "cases": [result], "environment": {"cpu": "CPU", "threads": 1, "torch": "2"}}
    assert "2.00 (wrong)" in report.table(content)


def test_families_of_scans_compare_themselves_with_torch(tmp_path):
    """Small problems on the CPU: the peers' arithmetic is right, and the result file has a table and panels."""
    options = harness.Options(tmp_path, rounds=1, measure_ms=0.01)
    families = {"ssd": ssd.cases([(1, 256, 2, 32)], "cpu"), "causal_conv1d": causal_conv1d.cases([(1, 70, 8)], "cpu"),
                "fft_conv": fft_conv.cases([(1, 2, 128, True, True), (2, 1, 90, False, False)], "cpu"),
                "linear_attention": linear_attention.cases(shapes=[(1, 256, 2, 32)], device="cpu"),
                "rotary": rotary.cases([(1, 64, 4, 2, 16)], "cpu"),
                "cross_entropy": cross_entropy.cases([(33, 16, 300)], "cpu"),
                "delta": delta.cases({kind: [(1, 128, 1, 2)] for kind in ("gdn", "kda steep")}, {}, "cpu"),
                "norm": norm.cases([(70, 64)], [(40, 64, 32)], "cpu"),
                "steps": steps.cases([(2, 3)], [(2, 3)], [(2, 2, 1, "VK"), (1, 2, 3, "KV")], device="cpu")}
    for family, cases in families.items():
        assert harness.run_family(family, list(cases), harness.timer_for("cpu"), options), family
        content = json.loads(next(tmp_path.glob(f"{family}-*.json")).read_text())
        assert "times as fast as torch" in report.table(content)
        assert all(len(values) == len(labels) for _, labels, series in report.panels(content)
                   for values in series.values())


def test_a_step_of_llama_is_that_of_transformers(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from margay.bench import llama

    patched, patch = [], margay.patch
    monkeypatch.setattr(margay, "patch", lambda model: patched.append(model) or patch(model))
    small = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, vocab_size=99)
    cases = llama.cases([(2, 1, 40)], small, "cpu", torch.float32)
    assert harness.run_family("llama", cases, harness.timer_for("cpu"), harness.Options(tmp_path, "", 1, 0.01))
    assert all(map(margay.unpatch, patched)) and len(patched) == 1
    (case,) = json.loads(next(tmp_path.glob("llama-*.json")).read_text())["cases"]
    assert case["error"]["eager"] <= 1e-4 and set(case["first_ms"]) == {"margay", "eager"}


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
@pytest.mark.parametrize("family", ["attention", "causal_conv1d", "cross_entropy", "decode", "delta", "features",
                                    "fft_conv", "gemm", "hedgehog", "linear_attention", "llama", "norm", "rotary",
                                    "rows", "ssd", "steps"])
def test_a_family_that_needs_a_gpu_says_so(family):
    code, out, err = bench(family)
    assert code == 2 and "needs a GPU" in err and err.count("\n") == 1
