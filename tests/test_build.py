"""The built extension and what surrounds it: what it needs and exports, its size, clean C code, README tables that match the results."""
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import cubin  # noqa: E402

from margay import _C  # noqa: E402

EXTENSION = Path(_C.__file__)
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def readelf(*options):
    return subprocess.run(["readelf", "--wide", *options, EXTENSION], check=True, capture_output=True, text=True).stdout


def test_extension_needs_only_the_c_library():
    needed = {line.split("[")[1].rstrip("]") for line in readelf("--dynamic").splitlines() if "(NEEDED)" in line}
    assert needed <= SYSTEM_LIBRARIES


def test_extension_exports_only_its_init_function():
    symbols = [line.split() for line in readelf("--dyn-syms").splitlines() if ":" in line]
    assert [s[7] for s in symbols if len(s) == 8 and s[4] in ("GLOBAL", "WEAK") and s[6] != "UND"] == ["PyInit__C"]


def test_extension_is_one_file_for_all_pythons():
    assert EXTENSION.name == "_C.abi3.so"
    assert ".abi3.so" in importlib.machinery.EXTENSION_SUFFIXES


def test_extension_is_small():
    assert EXTENSION.stat().st_size < 25e6


def test_host_code_compiles_without_warnings():
    assert json.loads((ROOT / "build" / "kernels.json").read_text())["warnings"] == {}


def test_library_for_c_programs_was_built():
    assert (ROOT / "build" / "libmargay.a").stat().st_size > 0


def test_readme_tables_match_the_results():
    check = subprocess.run([sys.executable, ROOT / "tools" / "tables.py", "--check"], capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


@pytest.fixture(scope="module")
def setup_py():
    spec = importlib.util.spec_from_file_location("margay_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module            # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_bad_row_is_named(setup_py):
    text = (ROOT / "csrc" / "kernels.def").read_text()
    assert setup_py.kernel_rows(text)
    with pytest.raises(SystemExit, match=rf"kernels\.def:{text.count(chr(10)) + 2}: KERNEL\(short, scaled_add, bf16, ANY, true, STAGES=4\)\nA row is one line"):
        setup_py.kernel_rows(text + "\nKERNEL(short, scaled_add, bf16, ANY, true, STAGES=4)\n")


def test_spills_are_in_the_rows_line(setup_py, tmp_path, monkeypatch):
    def line(log):
        monkeypatch.setattr(setup_py, "ROOT", tmp_path)
        job = setup_py.Job("row sm90", [], [], [".cubin", ".fatbin"], "nvcc")
        (tmp_path / job.path(".log")).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / job.path(".log")).write_text(log)
        return setup_py.spills(job)
    assert line("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 90 registers") == ""
    assert line("    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\nptxas info    : Used 168 registers") == ", SPILLS: 16 bytes stored, 24 loaded"
    assert setup_py.spills(setup_py.Job("row base", [], [], [".o"], "c++")) == ""


def test_cubin_reader_refuses_other_files():
    with pytest.raises(ValueError, match="not an ELF64 file"):
        cubin.kernels(b"\x50\xed\x55\xba" + bytes(100))
