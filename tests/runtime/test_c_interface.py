"""The library from a C program."""
import subprocess

import pytest

from mocked import CSRC, ROOT, compile_c


def test_example_attention(tmp_path):
    library = ROOT / "build" / "libmargay.a"
    if not library.exists():
        pytest.skip("build/libmargay.a has not been built")
    compile_c("-o", tmp_path / "attention", f"-I{CSRC}", ROOT / "examples" / "attention.c",
              library, "-lm", "-lpthread", "-ldl")
    result = subprocess.run([tmp_path / "attention"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "agree" in result.stdout
