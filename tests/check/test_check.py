"""The protocol checker: silent on the library's kernels, loud on everything else."""

import json
import os
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
from margay.check.compiled import MUTATIONS, OPS, RULES, Kernel, checking, csrc, options_in, tool, vocabulary
from margay.check.device import NVCC_FLAGS, TRACED
from margay.check.mutants import read_harmless
from margay.check.problems import OPS as OPS_WITH_PROBLEMS
from margay.check.problems import problems, rows

HERE = Path(__file__).resolve().parent
BAD = sorted((HERE / "known_bad").glob("*.cu"))
ONE_DTYPE = ".*_(bf16|e4m3)(_.*)?"    # other element types are the same protocol
FULL = os.environ.get("MARGAY_TEST_FULL") == "1"    # repetitions too: `make test FULL=1`
CLEAN_SEEDS, FEW_SEEDS, MUTANT_SEEDS, BAD_SEEDS = (20, 2, 2, 20) if FULL else (6, 2, 1, 20)


def run(*arguments, timeout=2400, env=()):
    result = subprocess.run([sys.executable, "-m", "margay.check", *map(str, arguments)],
                            capture_output=True, text=True, timeout=timeout, cwd=csrc().parent,
                            env={**os.environ, **dict(env)})
    return result.returncode, result.stdout, result.stderr


def expected(path):
    """The rules and fields that the file's comment promises: one of each; what comes first may depend on the
    schedule."""
    rules, fields = re.search(r"^// Expected: ([\w|-]+) on (\S+)$", path.read_text(), re.M).groups()
    return rules.split("|"), fields.split("|")


# ---- the library

def clean(seeds, pattern):
    """How many kernels were found clean."""
    code, out, err = run("--seeds", seeds, pattern)
    assert code == 0, out + err
    kernels, runs = map(int, re.search(r"(\d+) kernels, (\d+) runs, 0 reported", out).groups())
    assert runs >= 3 * seeds * kernels
    return kernels


def test_library_is_clean():
    """Every kernel, at least three problems each that wrap their rings. Rows of fp16 are twins of rows of bf16, but for
    those whose constants say that they compute otherwise (FLOATS) or that another number of teams or blocks fits
    (TEAMS, LINES): elements of the same size, the same source and constants, and so the same calls in the same order.
    Rows of fp32 are computed on the CPU alone, where nothing is asynchronous. Both are run at few seeds, and of those
    with the same operations only the last, the largest: FEATURES, TA, TB and PAIRS choose operations."""
    what = lambda row: tuple(row[field] for field in ("op", "source", "where", "constants", "shared_bytes", "threads"))
    of_type = lambda dtype: {name: row for name, row in rows().items() if row["dtype"] == dtype}
    found = [what(row) for row in of_type("bfloat16").values()]
    twins = {name: row for name, row in of_type("float16").items() if what(row) in found}
    otherwise = [row for name, row in of_type("float16").items() if name not in twins]
    assert twins and all(re.search(r"\b(FLOATS|TEAMS|LINES)=1\b", row["constants"]) for row in otherwise)
    few = twins | {name: row for name, row in of_type("float32").items() if row["where"] == "cpu"}
    choices = r"\b(?:FEATURES|T[AB]|PAIRS) *= *\d+"
    last = {(row["source"], row["dtype"], *re.findall(choices, row["constants"])): name for name, row in few.items()}
    chosen = list(few) if FULL else list(last.values())
    assert {few[name]["source"] for name in chosen} == {row["source"] for row in few.values()}
    assert clean(CLEAN_SEEDS, f"(?!({'|'.join(few)})$).*") == len(rows()) - len(few)
    assert clean(FEW_SEEDS, "|".join(chosen)) == len(chosen)


def test_mutants():
    """Every mutant of every synchronising call is reported at every seed, or listed with its reason. Rows of one source
    have most calls in common: their mutants are dealt out to the rows, but for those that are listed."""
    code, out, err = run("--mutate", *["--once"] * (not FULL), "--seeds", MUTANT_SEEDS, "--json", ONE_DTYPE)
    results = [json.loads(line) for line in out.splitlines()]
    survivors = [f"{result['kernel']}: {line}" for result in results for line in result["survivors"]]
    assert code == 0 and not survivors, "\n".join(survivors) + err
    total, reported = (sum(result[key] for result in results) for key in ("mutants", "reported"))
    excused = [line for result in results for line in result["harmless"]]
    repeated = 0 if FULL else len(excused) - len(set(excused))
    assert total > 1000 and reported >= 0.95 * (total - repeated)
    unused = [entry for entry in read_harmless(csrc() / "check" / "harmless.txt")
              if not any(line.endswith(f": {entry[3]}") for line in excused)]
    assert not unused, "harmless.txt excuses what is reported or not there"


def test_once():
    """Two rows of one file share their mutants: each is tried on one of them, and listed ones on both."""
    names = ["scaled_add_bf16", "scaled_add_fp16"]
    alone, both = ([sum(column)
                    for column in zip(*((total, reported, len(excused)) for total, reported, excused, _ in results))]
                   for results in (command.mutate_kernels(names[:1], command.parse(["--seeds", "1"])),
                                   command.mutate_kernels(names, command.parse(["--once", "--seeds", "1"]))))
    assert alone[0] > 20 and alone[1] == both[1] and both[2] == 2 * alone[2] and both[0] == alone[0] + alone[2]
    assert all(result[0] > 5 for result in command.mutate_kernels(names, command.parse(["--once", "--seeds", "1"])))


def test_a_run_is_quick():
    for name in ("attention_fwd_bf16_d64", "attention_bwd_bf16_d64", "matmul_bf16_nn_128x256", "ssd_bf16_n128"):
        problem = problems(rows()[name])[1]
        problem.run(0)
        times = []
        for seed in range(1, 4):               # the best: other tests run beside this one
            start = time.perf_counter()
            problem.run(seed)
            times.append(time.perf_counter() - start)
        assert min(times) < 0.2


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
        assert (re.match(r"\w*", kernel.place(report["place"]) or "")[0] or
                "-") in fields, f"seed {seed}: on {kernel.place(report['place'])}"
        assert report["pc"] == 0 or kernel.where(report["pc"]), "the report names no line"


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule, kernels):
    """Without the rule something of the corpus goes unreported."""
    mine = [kernel for name, kernel in kernels.items() if rule in expected(HERE / "known_bad" / f"{name}.cu")[0]]
    assert mine, f"no item of the corpus expects {rule}"
    assert any(kernel.run_example(seed, rules_off=1 << RULES.index(rule)) is None
               for kernel in mine for seed in range(4))


REFUSED = sorted((HERE / "refused").glob("*.cu"))


def refusal(path):
    return re.search(r"^// Refused: (.+)$", path.read_text(), re.M)[1]


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_refused_by_the_checker(path):
    """What Hopper does not have is an error of the compilation, whoever compiles."""
    code, out, err = run(path)
    assert (code == 1 and refusal(path) in err and "does not compile" in err and
            "Traceback" not in err and err.count("\n") < 25), out + err


def nvcc():
    return os.environ.get("NVCC") or shutil.which("nvcc")


@pytest.mark.parametrize("backend",
                         ["cpu", pytest.param("sm90", marks=pytest.mark.skipif(not nvcc(), reason="needs nvcc"))])
@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_refused_by_the_build(path, backend, tmp_path):
    dtype, constants = options_in(path.read_text())
    define = [f"-I{csrc()}", "-DKERNEL=refused", f"-DELEM={dtype}", f"-DCONSTANTS={constants}", path]
    command = (["c++", "-x", "c++", "-std=c++17", "-fsyntax-only", "-DISA=base"] if backend == "cpu"
               else [nvcc(), *NVCC_FLAGS, "-o", tmp_path / "out.cubin"])
    result = subprocess.run([*map(str, command), *map(str, define)], capture_output=True, text=True)
    assert result.returncode and refusal(path) in result.stdout + result.stderr, result.stderr


# ---- what reports say

def text_of(name, seed=0):
    code, out, err = run(HERE / "known_bad" / f"{name}.cu", "--seed", seed)
    assert code == 1 and not err, err
    return out


def test_a_crash_names_its_line():
    """A signal in the kernel's code is a report like any other: role, line, problem, seed."""
    for seed in range(4):
        assert re.search(r"division_by_zero: crash   its EXAMPLE, seed \d\n  crashes: divides an integer by zero\n  "
                         r"here     loader\[0\] of block 0, "
                         r"division_by_zero\.cu:19.*\n           if \(i / p\.groups == 3\) break;",
                         text_of("division_by_zero", seed))
        assert re.search(r"crashes: touches address 0x\w+, where no memory is\n  here     compute\[0\] of block 0, "
                         r"words_beyond_end\.cu:38.*\n"
                         r"           store\(p\.sums \+ i \* 64", text_of("words_beyond_end", seed))


def test_a_crash_leaves_the_process_alive(kernels):
    """Also where memory goes away under an operation that takes effect later; and the next kernel runs as before."""
    kernel = kernels["division_by_zero"]
    for seed in range(8):
        assert kernel.run_example(seed)["rule"] == "crash"
        assert kernels["early_release"].run_example(seed)["rule"] == "overwrite"


def test_effect_that_crashes(tmp_path):
    """A copy through a map that points nowhere: reported where it was issued."""
    source = (HERE / "known_bad" / "early_release.cu").read_text()
    bad = tmp_path / "nowhere.cu"
    bad.write_text(re.sub(r"(EXAMPLE\(kernel, 1, p\.in = [^;]*;)", r"\1 ((gmap_cpu *)&p.in)->data = (char *)4096;",
                          source))
    assert bad.read_text() != source
    code, out, err = run(bad)
    assert (code == 1 and "crash" in out and "when what it has issued takes effect" in out and
            "tma_load(s.tile" in out and not err), out + err


def test_a_forgotten_acquire_names_the_reader(kernels):
    """Not only the writer's own earlier write, which a wg_sync would seem to mend."""
    kernel = kernels["producer_without_acquire"]
    reports = [kernel.run_example(seed) for seed in range(BAD_SEEDS)]
    read = [report for report in reports if report["rule"] == "overwrite"]
    assert read and all("consumer[0] of block 0" in kernel.filled(report) for report in read)
    own = [report for report in reports if report["rule"] == "elected"]
    assert all("or an acquire of this stage is missing" in report["text"] for report in own)


def test_reports_show_what_made_the_phase():
    out = text_of("early_release")
    assert re.search(r"loader\[0\] of block 0 waited last for inputs\.empty\[0\], which counts 4 arrivals a phase:\n   "
                     r" phase 0    4 by compute\[0\] of block 0", out)


def test_deadlock_says_who_came_and_who_is_waited_for():
    assert re.search(r"here     loader\[0\] of block 0, missing_release\.cu:\d+, ring_acquire",
                     text_of("missing_release"))
    out = text_of("cluster_peer_not_released")
    assert re.search(r"loader\[0\] of block 0 waits for phase 0 \(parity 0\) of inputs\.empty\[0\]; .* lacks 4 of 8 "
                     r"arrivals and 0 bytes; arrived: compute\[0\] of block 0\n", out)
    assert re.search(r"here     loader\[0\] of block \d, cluster_peer_not_released\.cu:\d+, ring_acquire", out)


def test_parity_of_the_phase_before_the_first(tmp_path):
    bad = tmp_path / "parity.cu"
    source = (HERE / "known_bad" / "window_beyond_tile.cu").read_text()
    bad.write_text(source.replace("sem_wait(s.full, 0)",
                                  "sem_wait(s.full, 1)").replace("c < 128; c += 48", "c < 96; c += 48"))
    texts = {run(bad, "--seed", seed)[1].split("\n")[1] for seed in range(8)}
    assert any("is the phase before the first: such a wait passes at once" in text for text in texts), texts


# ---- names that the runtime, the debug build and the tool have in common

def enumerators(path, name):
    body = re.search(rf"enum {name} \{{(.*?)\}}", (csrc() / path).read_text(), re.S)[1]
    return [re.sub(r"\s*=.*", "", entry.strip()) for entry in body.split(",") if entry.strip()]


def test_names_agree():
    plain = lambda entry, prefix: entry.removeprefix(prefix).lower().replace("commit", "mma_commit")
    ops = [plain(entry, "CK_OP_") for entry in enumerators("check/check.h", "ck_op")]
    traced = [plain(entry, "TRACE_") for entry in enumerators("tile/sm90/sync.h", "traced")]
    assert ops == list(OPS) and traced == ops[1:1 + len(traced)] == list(TRACED)
    assert [entry.removeprefix("CK_").lower().replace("_", " ")
            for entry in enumerators("check/check.h", "ck_mutation")] == list(MUTATIONS)
    rules = re.findall(r'"([\w-]+)"', re.search(r"rules\[CK_RULES\] = \{(.*?)\}",
                                                (csrc() / "check" / "report.c").read_text(), re.S)[1])
    assert rules == list(RULES) and len(enumerators("check/check.h", "ck_rule")) == len(rules) + 1
    manual = (csrc().parent / "docs" / "protocol.md").read_text()
    assert not [rule for rule in RULES if f"`{rule}`" not in manual]


# ---- the command

def test_report_fits_a_screen_and_repeats():
    path = HERE / "known_bad" / "early_release.cu"
    code, out, _ = run(path)
    assert code == 1 and out.count("\n") < 45 and max(map(len, out.splitlines())) < 200
    for part in ("early_release: overwrite", "on       tile[0]", "loader[0] of block 0",
                 "early_release.cu:", "against  compute[0]"):
        assert part in out
    again = re.search(r"again: python -m margay\.check (.*)", out)[1].split()
    assert run(*again)[1].splitlines()[:4] == out.splitlines()[:4]


def test_json():
    code, out, _ = run("--json", HERE / "known_bad" / "early_release.cu")
    found = json.loads(out)
    assert (code == 1 and found["rule"] == "overwrite" and found["buffer"] == "tile[0]" and
            found["here"]["operation"] == "tma_load")


def test_one_problem_of_a_row():
    code, out, _ = run("scaled_add_bf16", "--shapes", "64x64", "--seed", 3)
    assert code == 0 and "1 kernel, 1 runs, 0 reported" in out


def test_one_thread():
    """Kernels in front of the checked one have blocks that wait for each other."""
    code, out, err = run("attention_bwd_pre_bf16_d192", "--seed", 0, env={"OMP_NUM_THREADS": "1"}, timeout=120)
    assert code == 0 and "0 reported" in out, out + err


@pytest.mark.parametrize("arguments, message", [
    (("nothing",), "no row of kernels.def is called nothing"),
    (("absent.cu",), "there is no file absent.cu"),
    (("--rules-off", "dream"), "there is no rule dream"),
    ((str(csrc() / "gemm" / "gemm.cu"),), "needs --type and --constants"),
    ((str(csrc() / "scaled_add" / "scaled_add.cu"), "--type", "bf16", "--constants", "STAGES=2"), "has no EXAMPLE"),
])
def test_wrong_arguments(arguments, message):
    code, out, err = run(*arguments)
    assert code not in (0, None) and message in out + err and "Traceback" not in err


def test_kernels_use_the_precompiled_vocabulary():
    """GCC leaves one that does not fit aside: everything would only take twice as long."""
    if not vocabulary():
        pytest.skip("the compiler is not GCC")
    row = "-DKERNEL=checked -DISA=check -DELEM=bf16 -DCONSTANTS=STAGES=2 -DFIELDS=FIELD(inputs)".split()
    result = subprocess.run([tool("CXX"), *checking(), "-Winvalid-pch", "-fsyntax-only", "-x", "c++",
                             "-include", vocabulary(), *row, csrc() / "scaled_add" / "scaled_add.cu"],
                            capture_output=True, text=True)
    assert result.returncode == 0 and result.stderr == ""


def released_early(text):
    """ssd_fwd.cu, x's release in front of the fence that orders its reads."""
    release, read = "  ring_release(s.x_ring[slot], at);\n", "  load_t(x, s.x[at.stage][slot]);\n"
    return text.replace(release, "").replace(read, read + release)


def test_file_in_the_place_of_a_row(tmp_path):
    """A variant of a library kernel, checked with the row's problems: the proxy fence of a release after register reads
    left out."""
    text = (csrc() / "ssd" / "ssd_fwd.cu").read_text()
    bad = tmp_path / "ssd_without_fence.cu"
    bad.write_text(released_early(text))
    assert bad.read_text() != text
    code, out, err = run(bad, "--as", "ssd_bf16_n128")
    assert code == 1 and "fence-read" in out and "no fence_async by the reader" in out, out + err
    good = tmp_path / "ssd_same.cu"
    good.write_text(text)
    assert run(good, "--as", "ssd_bf16_n128")[0] == 0


def test_a_pass_beside_what_it_reads(tmp_path):
    """Chunks after the first are not waited for, which the kernel in front prepares meanwhile."""
    text, row = (csrc() / "delta" / "delta_sweep.cu").read_text(), "kda_bf16_k64_v64"
    wait = "      if (TOLD && p.done && chunk) wait_for_place<THREAD>(p, t, place);\n"
    assert wait in text
    bad = tmp_path / "delta_sweep.cu"
    bad.write_text(text.replace(wait, ""))
    code, out, err = run(bad, "--as", row, "--shapes", "beside")
    assert code == 1 and "global-race" in out and "no grid_wait_part" in out, out + err
    assert run(row, "--shapes", "beside")[0] == 0


def test_other_parameters_in_the_place_of_a_row(tmp_path):
    """Read as the row's, they would be anything."""
    other = tmp_path / "scaled_add.cu"
    # A constant that the row does not have
    other.write_text((csrc() / "scaled_add" / "scaled_add.cu").read_text().replace("STAGES", "4"))
    code, out, err = run(other, "--as", "ssd_bf16_n128")
    sizes = [rows()[name]["params_bytes"] for name in ("scaled_add_bf16", "ssd_bf16_n128")]
    assert code == 1 and (f"scaled_add.cu takes parameters of {sizes[0]} bytes, ssd_bf16_n128, "
                          f"in whose place it shall be checked, of {sizes[1]}") in err
    assert "Traceback" not in err and len(set(sizes)) == 2


def test_a_new_op(tmp_path, monkeypatch):
    """A row whose op has no problems is run on its file's EXAMPLE; without one it is named, and others are checked all
    the same."""
    monkeypatch.delitem(OPS_WITH_PROBLEMS, "scaled_add")
    monkeypatch.setattr("margay.check.problems.owner", lambda op: None)       # nor a row of ops.def to draw some from
    options = command.parse(["--seeds", "2"])
    runs, (finding, as_json) = command.check_kernel("scaled_add_bf16", options)
    assert runs == 0 and as_json["kernel"] == "scaled_add_bf16"
    assert finding == ("margay.check: scaled_add_bf16: not checked: the op scaled_add has no row in ops.def and no "
                       "problems in "
                       "python/margay/check/problems.py, "
                       "and scaled_add.cu has no EXAMPLE")
    source = tmp_path / "scaled_add.cu"
    source.write_text((csrc() / "scaled_add" / "scaled_add.cu").read_text() + "EXAMPLE(kernel, 2, p.a = p.b = p.out = "
                      "example_tensor<elem>(1, 1, 300, 64); p.tasks = 5; p.col_blocks = 1)\n")
    (problem,) = problems(rows()["scaled_add_bf16"], source)
    assert problem.label == "its EXAMPLE" and problem.run(0) is None
    assert command.check_kernel(str(source), command.parse(["--seeds", "2", "--as", "scaled_add_bf16"])) == (2, None)


@pytest.mark.parametrize("variable, what", [("CXX", "a C++ compiler"), ("CC", "a C compiler"),
                                            ("LD", "a linker"), ("NM", "nm"), ("ADDR2LINE", "addr2line")])
def test_missing_tool_is_one_line(variable, what):
    code, out, err = run("scaled_add_bf16", env={variable: "/nowhere/tool"})
    assert (code == 1 and err.count("\n") == 1 and f"margay.check: needs {what}" in err and
            "/nowhere/tool was not found" in err)


def test_missing_sources_are_one_line(tmp_path):
    shutil.copytree(Path(command.__file__).parents[1], tmp_path / "margay",
                    ignore=shutil.ignore_patterns("__pycache__"))
    result = subprocess.run([sys.executable, "-m", "margay.check", "scaled_add_bf16"],
                            capture_output=True, text=True, cwd=tmp_path,
                            env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (result.returncode == 1 and result.stderr.count("\n") == 1 and
            "set MARGAY_CSRC" in result.stderr), result.stderr


def test_missing_numpy_is_one_line(tmp_path):
    hidden = "import sys, runpy, importlib.util as u; f = u.find_spec; " \
             "u.find_spec = lambda n, *a: None if n == 'numpy' else f(n, *a); " \
             "sys.argv = ['check', '--list']; runpy.run_module('margay.check', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, cwd=csrc().parent)
    assert result.returncode == 1 and result.stderr == "margay.check: needs NumPy, which is not installed\n"


def test_a_reader_that_stops_reading():
    """`margay.check ... | head -1`"""
    path = HERE / "known_bad" / "early_release.cu"
    reading = subprocess.Popen([sys.executable, "-u", "-m", "margay.check",
                                str(path), str(HERE / "known_bad" / "phase_overtaken.cu"), "--jobs", "1"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=csrc().parent)
    reading.stdout.readline()
    reading.stdout.close()
    assert reading.stderr.read() == "" and reading.wait() != 0


def test_a_process_that_dies_is_named(monkeypatch):
    monkeypatch.setattr(command, "start_cheaply", lambda: None)
    with pytest.raises(SystemExit, match="a process died while it checked one or two"):
        command.each(dies, ["one", "two"], command.parse(["--jobs", "2"]), lambda name, result: None)


def dies(name, options):
    os._exit(1)


def test_help_says_what_the_manual_says():
    code, out, _ = run("--help")
    assert code == 0
    for part in ("EXAMPLE(kernel", "// margay.check: bf16", "Exit status: 0", "docs/protocol.md", "whole name"):
        assert part in out


# ---- the GPU's side

@pytest.mark.gpu
@pytest.mark.parametrize("row", ["attention_fwd_bf16_d64", "matmul_bf16_nn_64x128_pair", "ssd_bf16_n128"])
def test_device(row):
    code, out, err = run("--device", row)
    assert code == 0 and " 0 findings" in out, out + err


@pytest.mark.gpu
def test_device_shows_a_missing_fence(tmp_path):
    """The race of the first scan kernel that was tried on a GPU: a copy overtakes what was read through registers, now
    and then."""
    bad = tmp_path / "race.cu"
    bad.write_text(released_early((csrc() / "ssd" / "ssd_fwd.cu").read_text()))
    start = time.monotonic()
    code, out, err = run("--device", bad, "--as", "ssd_bf16_n128_x2")
    assert code == 1 and "results change" in out and time.monotonic() - start < 60, out + err
