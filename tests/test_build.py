"""The built extension and what surrounds it: what it needs and exports, its size, clean C code, tables that match the
results."""
import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import cubin  # noqa: E402

from margay import _C  # noqa: E402
from trees import share_cache  # noqa: E402

EXTENSION = Path(_C.__file__)
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2",
                    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def readelf(*options, file=EXTENSION):
    return subprocess.run(["readelf", "--wide", *options, file], check=True, capture_output=True, text=True).stdout


def newest_glibc(file):
    """The newest minor version of glibc 2 that a symbol of the file asks for."""
    return max(int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", readelf("--version-info", file=file)))


def test_extension_needs_only_the_c_library():
    needed = {line.split("[")[1].rstrip("]") for line in readelf("--dynamic").splitlines() if "(NEEDED)" in line}
    assert needed <= SYSTEM_LIBRARIES


def test_extension_exports_only_its_init_function():
    symbols = [line.split() for line in readelf("--dyn-syms").splitlines() if ":" in line]
    assert [s[7] for s in symbols if len(s) == 8 and s[4] in ("GLOBAL", "WEAK") and s[6] != "UND"] == ["PyInit__C"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_extension_runs_with_glibc_2_28():
    assert newest_glibc(EXTENSION) <= 28


def test_extension_is_read_only_once_loaded():
    """RELRO with BIND_NOW: the table of foreign addresses is filled at load time and then protected."""
    assert re.search(r"^\s*GNU_RELRO\b", readelf("--program-headers"), re.M)
    assert re.search(r"\(FLAGS\).*\bBIND_NOW\b", readelf("--dynamic"))


def test_extension_is_one_file_for_all_pythons():
    assert EXTENSION.name == "_C.abi3.so"
    assert ".abi3.so" in importlib.machinery.EXTENSION_SUFFIXES


def test_extension_is_small():
    """In a wheel, which is deflated."""
    assert len(zlib.compress(EXTENSION.read_bytes())) < 25e6


def test_host_code_compiles_without_warnings():
    assert json.loads((ROOT / "build" / "kernels.json").read_text())["warnings"] == {}


def test_library_for_c_programs_was_built():
    assert (ROOT / "build" / "libmargay.a").stat().st_size > 0


def test_docs_tables_match_the_results():
    shown = re.findall(r"^<!-- results: (\S+) -->$", (ROOT / "docs" / "speed.md").read_text(), re.M)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json"))
    check = subprocess.run([sys.executable, ROOT / "tools" / "tables.py", "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


@pytest.fixture(scope="module")
def setup_py():
    spec = importlib.util.spec_from_file_location("margay_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module            # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_rows_use_the_precompiled_vocabulary(setup_py):
    """GCC leaves one that does not fit aside: everything would only take twice as long."""
    (row,) = (row for row in setup_py.all_rows() if row.name == "scaled_add_bf16")
    for isa in setup_py.ISAS:
        vocabulary = setup_py.vocabulary_job(setup_py.cpu_flags(row, isa))
        if not vocabulary:
            pytest.skip("the compiler is not GCC")
        if not vocabulary.done():
            vocabulary.run()
        command = setup_py.cpu_job(row, isa, vocabulary).commands[0]
        result = subprocess.run([*command[:command.index("-c")], "-Winvalid-pch", "-fsyntax-only", command[-1]],
                                cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0 and result.stderr == "" and vocabulary.path(".h").name in " ".join(command)


BAD_ROWS = {
    "x, scaled_add, scaled_add, int8, ANY, true, D=4": "x: element type is int8, expected one of bf16, fp16, e4m3, fp",
    "x, scaled_add, scaled_add, bf16, HERE, true, D=4": "x: place is HERE, expected one of ANY, CPU_ONLY, GPU_ONLY",
    "x_*, scaled_add, scaled_add, {bf16, fp32}, GPU_ONLY, true, D=4": "x_fp32: the GPU has no kernels in fp32",
    "x, scaled_add, absent, bf16, ANY, true, D=4": r"There is no csrc/absent\.cu",
    "x, scaled_add, scaled_add, {bf16, fp16}, ANY, true, D=4": "The name has to say where each of the row's 1 sets",
    "x_*_*, scaled_add, scaled_add, {bf16, fp16}, ANY, true, D=4": "The name has to say where each of the row's 1 sets",
    "x_*_{a}, scaled_add, scaled_add, bf16, ANY, true, D={2, 4}": "The name has to say where each of the row's 1 sets",
    "x_{a,b,c}, scaled_add, scaled_add, bf16, ANY, true, D={2, 4}": ".* as many words in braces as the set has values",
}


def test_a_bad_row_is_named(setup_py):
    text = (ROOT / "csrc" / "scaled_add" / "kernels.def").read_text()
    assert setup_py.kernel_rows(text)
    assert len({row.name for row in setup_py.all_rows()}) == len(setup_py.all_rows()) > 100
    assert sorted(setup_py.families()) == sorted(path.parent.name for path in (ROOT / "csrc").glob("*/kernels.def"))
    with pytest.raises(SystemExit, match=rf"kernels\.def:{text.count(chr(10)) + 2}: KERNEL\(short, scaled_add, bf16, "
                       rf"ANY, true, STAGES=4\)\nA row is KERNEL\("):
        setup_py.kernel_rows(text + "\nKERNEL(short, scaled_add, bf16, ANY, true, STAGES=4)\n")
    where = rf"kernels\.def:{text.count(chr(10)) + 1}: KERNEL.*\n"
    for row, message in BAD_ROWS.items():
        with pytest.raises(SystemExit, match=where + message):
            setup_py.kernel_rows(f"{text}KERNEL({row})\n")


def test_a_bad_size_is_named(setup_py):
    known = setup_py.known_sizes()
    assert {"B", "M", "N", "CHUNKS"} <= known
    for name in setup_py.families():
        setup_py.check_sizes((ROOT / "csrc" / name / "ops.def").read_text(), known)
    for size, message in (("64",
                           r"parts has the size 64, expected a name of MG_SIZES in csrc/margay\.h; .*LET\(K, 64\)"),
                          ("ABSENT", r"parts has the size ABSENT, expected a name of MG_SIZES in csrc/margay\.h$")):
        with pytest.raises(SystemExit, match=rf"^here:2: {message}"):
            setup_py.check_sizes(f"// a comment\nOP(x, IN(a, HALF, M,N) WORK(parts, F32, M,{size},N))", known, "here")
    with pytest.raises(SystemExit, match="LET has the size ABSENT"):
        setup_py.check_sizes("LET(ABSENT, (M + 63) / 64)", known)


def test_sets_are_written_out(setup_py):
    rows = setup_py.kernel_rows("""// KERNEL(no row)
KERNEL(matmul_*_{n,t}{n,t}_d*{,_det}, matmul, gemm, {bf16, fp32}, ANY,   // the type's set comes first
       trans_a == TA && (trans_b == TB || TAB) && N <= D && deterministic == DET,
       TA={0, 1}, TB={0, 1}, D={64, 128}, STAGES=2,
       DET={0, 1})
KERNEL(plain, matmul, gemm, bf16, GPU_ONLY, true, D=64)
""")
    assert len(rows) == 2 * 2 * 2 * 2 * 2 + 1 and len({row.name for row in rows}) == len(rows)
    assert dataclasses.astuple(rows[0]) == ("matmul_bf16_nn_d64", "matmul", "gemm", "bf16", "ANY",
                                            "trans_a == 0 && (trans_b == 0 || TAB) && N <= 64 && deterministic == 0",
                                            "TA=0, TB=0, D=64, STAGES=2, DET=0")
    assert dataclasses.astuple(rows[-2]) == ("matmul_fp32_tt_d128_det", "matmul", "gemm", "float", "CPU_ONLY",
                                             "trans_a == 1 && (trans_b == 1 || TAB) && N <= 128 && deterministic == 1",
                                             "TA=1, TB=1, D=128, STAGES=2, DET=1")
    assert dataclasses.astuple(rows[-1]) == ("plain", "matmul", "gemm", "bf16", "GPU_ONLY", "true", "D=64")
    assert [row.name for row in rows[:3]] == ["matmul_bf16_nn_d64", "matmul_bf16_nn_d64_det", "matmul_bf16_nn_d128"]


def test_spills_are_in_the_rows_line(setup_py, tmp_path, monkeypatch):
    def line(log):
        monkeypatch.setattr(setup_py, "ROOT", tmp_path)
        job = setup_py.Job("row sm90", [], [], [".cubin", ".fatbin"], "nvcc")
        (tmp_path / job.path(".log")).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / job.path(".log")).write_text(log)
        return setup_py.spills(job)
    assert line("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 90 "
                "registers") == ""
    assert line("    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\nptxas info    : Used 168 "
                "registers") == ", SPILLS: 16 bytes stored, 24 loaded"
    assert setup_py.spills(setup_py.Job("row base", [], [], [".o"], "c++")) == ""


def test_cubin_reader_refuses_other_files():
    with pytest.raises(ValueError, match="not an ELF64 file"):
        cubin.kernels(b"\x50\xed\x55\xba" + bytes(100))


# ---- source distribution and wheel

def python(tree, *arguments, **environment):
    """Runs Python in the tree with the tree's margay; returns what it prints."""
    result = subprocess.run([sys.executable, *arguments], cwd=tree,
                            env={**os.environ, "PYTHONPATH": str(tree / "python"), **environment},
                            capture_output=True, text=True)
    assert result.returncode == 0, f"{arguments}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked and built with the rows of one small kernel."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    python(ROOT, "setup.py", "-q", "sdist", "--dist-dir", str(folder))
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    tree = folder / archive.name.removesuffix(".tar.gz")
    share_cache(tree)
    python(tree, "setup.py", "-q", "egg_info", "build_ext", "--inplace", MARGAY_ROWS="scaled_add_.*", MARGAY_CUDA="0")
    return tree


def test_sdist_is_complete(unpacked):
    """Every file of the folders that make and the tests use, but for what is built."""
    names = ["LICENSE", "Makefile", "README.md", "pyproject.toml", "requirements.txt", "requirements-test.txt"]
    for folder in ("benchmarks", "csrc", "docs", "examples", "python/margay", "tests", "tools"):
        files = [file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file()]
        names += [file for file in files
                  if "__pycache__" not in file.parts and file.suffix not in (".so", ".o", ".pyc")]
        assert files, folder
    assert not [str(name) for name in names if not (unpacked / name).is_file()]


def test_sdist_tests_run(unpacked):
    output = python(unpacked, "-m", "pytest", "-q", "-p", "no:cacheprovider",
                    "tests/test_numpy.py", "tests/test_import.py",
                    "-k", "scaled_add or loads_nothing or stubs")
    assert re.search(r"\b[1-9]\d* passed", output) and "error" not in output
    assert python(unpacked, "-c", "import margay; print(margay.__file__)").startswith(str(unpacked))


@pytest.fixture(scope="module")
def wheel(unpacked):
    folder = unpacked / "wheel"
    python(unpacked, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder),
           MARGAY_ROWS="scaled_add_.*", MARGAY_CUDA="0")
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_is_licensed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
        (text,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/LICENSE"))
    assert "License-Expression: Apache-2.0\n" in metadata and "License-File: LICENSE\n" in metadata
    assert "Apache License" in text and "TERMS AND CONDITIONS" in text and "END OF TERMS" in text


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_wheel_says_which_glibc_it_needs(wheel, unpacked):
    tag = re.search(rf"-cp310-abi3-manylinux_2_(\d+)_{platform.machine()}\.whl$", wheel.name)
    assert tag and newest_glibc(unpacked / "python" / "margay" / "_C.abi3.so") <= int(tag[1]) <= 28, wheel.name


def test_auditwheel_agrees(wheel):
    pytest.importorskip("auditwheel")
    output = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel],
                            capture_output=True, text=True, check=True).stdout
    found = re.search(r'tag:\s+"manylinux_2_(\d+)_', output)
    assert found and int(found[1]) <= 28, output
