"""The protocol checker: silent on the library's kernels, loud on everything else."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("numpy")
if not (shutil.which("g++") or shutil.which("c++")) or not shutil.which("addr2line"):
    pytest.skip("needs a C++ compiler and addr2line", allow_module_level=True)

from margay.check import __main__ as command
from margay.check.compiled import MUTATIONS, OPS, RULES, Kernel, csrc, options_in
from margay.check.device import TRACED
from margay.check.mutants import read_harmless
from margay.check.problems import problems, rows

HERE = Path(__file__).resolve().parent
BAD = sorted((HERE / "known_bad").glob("*.cu"))
CLEAN_SEEDS, BAD_SEEDS = 20, 20
ONE_DTYPE = ".*_(bf16|e4m3)(_.*)?"    # other element types are the same protocol


def run(*arguments, timeout=900):
    result = subprocess.run([sys.executable, "-m", "margay.check", *map(str, arguments)], capture_output=True, text=True, timeout=timeout, cwd=csrc().parent)
    return result.returncode, result.stdout, result.stderr


def expected(path):
    """The rules and fields that the file's comment promises: one of each; what comes first may depend on the schedule."""
    rules, fields = re.search(r"^// Expected: ([\w|-]+) on (\S+)$", path.read_text(), re.M).groups()
    return rules.split("|"), fields.split("|")


# ---- the library

def test_library_is_clean():
    """Every kernel, at least three problems each that wrap their rings."""
    code, out, err = run("--seeds", CLEAN_SEEDS)
    assert code == 0, out + err
    kernels, runs = map(int, re.search(r"(\d+) kernels, (\d+) runs, 0 reported", out).groups())
    assert kernels == len(rows()) and runs >= 3 * CLEAN_SEEDS * kernels


def test_mutants():
    """Every mutant of every synchronising call is reported at every seed, or listed with its reason."""
    code, out, err = run("--mutate", "--seeds", 2, "--json", ONE_DTYPE)
    results = [json.loads(line) for line in out.splitlines()]
    survivors = [f"{result['kernel']}: {line}" for result in results for line in result["survivors"]]
    assert code == 0 and not survivors, "\n".join(survivors) + err
    total, reported = (sum(result[key] for result in results) for key in ("mutants", "reported"))
    assert total > 1000 and reported >= 0.95 * total
    excused = [line for result in results for line in result["harmless"]]
    unused = [entry for entry in read_harmless(csrc() / "check" / "harmless.txt") if not any(line.endswith(f": {entry[3]}") for line in excused)]
    assert not unused, "harmless.txt excuses what is reported or not there"


def test_a_run_is_quick():
    for name in ("attention_fwd_bf16_d64", "attention_bwd_bf16_d64", "matmul_bf16_nn_128x256", "ssd_fwd_bf16_n128"):
        problem = problems(rows()[name])[1]
        problem.run(0)
        start = time.perf_counter()
        problem.run(1)
        assert time.perf_counter() - start < 0.2


# ---- the corpus of known mistakes

@pytest.fixture(scope="module")
def kernels():
    return {path.stem: Kernel(path, *options_in(path.read_text())) for path in BAD}


def test_corpus_size():
    assert len(BAD) >= 15


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_known_bad(path, kernels):
    kernel, (rules, fields) = kernels[path.stem], expected(path)
    for seed in range(BAD_SEEDS):
        report = kernel.run_example(seed)
        assert report, f"seed {seed}: no report"
        assert report["rule"] in rules, f"seed {seed}: {report['rule']}: {kernel.filled(report)}"
        assert (re.match(r"\w*", kernel.place(report["place"]) or "")[0] or "-") in fields, f"seed {seed}: on {kernel.place(report['place'])}"
        assert report["pc"] == 0 or kernel.where(report["pc"]), "the report names no line"


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule, kernels):
    """Without the rule something of the corpus goes unreported."""
    mine = [kernel for name, kernel in kernels.items() if rule in expected(HERE / "known_bad" / f"{name}.cu")[0]]
    assert mine, f"no item of the corpus expects {rule}"
    assert any(kernel.run_example(seed, rules_off=1 << RULES.index(rule)) is None for kernel in mine for seed in range(4))


# ---- names that the runtime, the debug build and the tool have in common

def enumerators(path, name):
    body = re.search(rf"enum {name} \{{(.*?)\}}", (csrc() / path).read_text(), re.S)[1]
    return [re.sub(r"\s*=.*", "", entry.strip()) for entry in body.split(",") if entry.strip()]


def test_names_agree():
    plain = lambda entry, prefix: entry.removeprefix(prefix).lower().replace("commit", "mma_commit")
    ops = [plain(entry, "CK_OP_") for entry in enumerators("check/check.h", "ck_op")]
    traced = [plain(entry, "TRACE_") for entry in enumerators("tile/sm90/sync.h", "traced")]
    assert ops == list(OPS) and traced == ops[1:1 + len(traced)] == list(TRACED)
    assert [entry.removeprefix("CK_").lower().replace("_", " ") for entry in enumerators("check/check.h", "ck_mutation")] == list(MUTATIONS)
    rules = re.findall(r'"([\w-]+)"', re.search(r"rules\[CK_RULES\] = \{(.*?)\}", (csrc() / "check" / "report.c").read_text(), re.S)[1])
    assert rules == list(RULES) and len(enumerators("check/check.h", "ck_rule")) == len(rules) + 1
    manual = (csrc().parent / "docs" / "protocol.md").read_text()
    assert not [rule for rule in RULES if f"`{rule}`" not in manual]


# ---- the command

def test_report_fits_a_screen_and_repeats():
    path = HERE / "known_bad" / "early_release.cu"
    code, out, _ = run(path)
    assert code == 1 and out.count("\n") < 45 and max(map(len, out.splitlines())) < 200
    for part in ("early_release: overwrite", "on       tile[0]", "loader[0] of block 0", "early_release.cu:", "against  compute[0]"):
        assert part in out
    again = re.search(r"again: python -m margay\.check (.*)", out)[1].split()
    assert run(*again)[1].splitlines()[:4] == out.splitlines()[:4]


def test_json():
    code, out, _ = run("--json", HERE / "known_bad" / "early_release.cu")
    found = json.loads(out)
    assert code == 1 and found["rule"] == "overwrite" and found["buffer"] == "tile[0]" and found["here"]["operation"] == "tma_load"


def test_one_problem_of_a_row():
    code, out, _ = run("scaled_add_bf16", "--shapes", "64x64", "--seed", 3)
    assert code == 0 and "1 kernel, 1 runs, 0 reported" in out


@pytest.mark.parametrize("arguments, message", [
    (("nothing",), "no row of kernels.def is called nothing"),
    (("absent.cu",), "there is no file absent.cu"),
    (("--rules-off", "dream"), "there is no rule dream"),
    ((str(csrc() / "kernels" / "gemm.cu"),), "needs --type and --constants"),
    ((str(csrc() / "kernels" / "scaled_add.cu"), "--type", "bf16", "--constants", "STAGES=2"), "has no EXAMPLE"),
])
def test_wrong_arguments(arguments, message):
    code, out, err = run(*arguments)
    assert code not in (0, None) and message in out + err and "Traceback" not in err


def test_file_in_the_place_of_a_row(tmp_path):
    """A variant of a library kernel, checked with the row's problems: the proxy fence of a release after register reads left out."""
    text = (csrc() / "kernels" / "ssd_fwd.cu").read_text()
    bad = tmp_path / "ssd_without_fence.cu"
    bad.write_text(text.replace("ring<2> dt_ring, x_ring[ALL];", "ring<2, ASYNC_READS> dt_ring, x_ring[ALL];"))
    assert bad.read_text() != text
    code, out, err = run(bad, "--as", "ssd_fwd_bf16_n128")
    assert code == 1 and "fence-read" in out and "no fence_async by the reader" in out, out + err
    good = tmp_path / "ssd_same.cu"
    good.write_text(text)
    assert run(good, "--as", "ssd_fwd_bf16_n128")[0] == 0


# ---- the GPU's side

@pytest.mark.gpu
@pytest.mark.parametrize("row", ["attention_fwd_bf16_d64", "matmul_bf16_nn_128x256_pair", "ssd_fwd_bf16_n128"])
def test_device(row):
    code, out, err = run("--device", row)
    assert code == 0 and " 0 findings" in out, out + err


@pytest.mark.gpu
def test_device_shows_a_missing_fence(tmp_path):
    """The race of the first scan kernel that was tried on a GPU: a copy overtakes what was read through registers, now and then."""
    bad = tmp_path / "race.cu"
    bad.write_text((csrc() / "kernels" / "ssd_fwd.cu").read_text().replace("ring<2> dt_ring, x_ring[ALL];", "ring<2, ASYNC_READS> dt_ring, x_ring[ALL];"))
    start = time.monotonic()
    code, out, err = run("--device", bad, "--as", "ssd_fwd_bf16_n128_x2")
    assert code == 1 and "results change" in out and time.monotonic() - start < 60, out + err
