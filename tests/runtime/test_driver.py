"""Drivers that cannot be used, that fail, and that a fork inherits; the ABI in runtime/driver_api.h against cuda.h."""
import os
import re
import shutil
from pathlib import Path

import pytest

from mocked import CSRC, MOCK, OK, RUNTIME, UNSUPPORTED, VALUE, Runtime, compile_c, in_child


def test_bad_25_no_driver(built, tmp_path, monkeypatch):
    rt = Runtime(built, tmp_path, monkeypatch)
    monkeypatch.setenv("MARGAY_DRIVER", str(tmp_path / "libcuda_absent.so"))
    assert rt.launch() == RUNTIME
    assert re.match(r"no NVIDIA driver: .*libcuda_absent.so: cannot open shared object file", rt.error())
    monkeypatch.setenv("MARGAY_DRIVER", str(tmp_path / "driver.so"))
    assert rt.launch() == OK                  # failure is not remembered


def test_bad_25_stub(rt):
    rt.mock.mock_refuse_lookups(34)
    assert rt.launch() == RUNTIME and "the toolkit's link-time stub, not a driver" in rt.error()


def test_bad_26_old_driver(built, tmp_path, monkeypatch, rt):
    rt.mock.mock_version(11080)
    assert rt.launch() == RUNTIME and "supports CUDA 11.8, at least 12.0 (R525) is needed" in rt.error()
    rt.mock.mock_version(13000)
    rt.mock.mock_refuse_lookups(500)
    assert rt.launch() == RUNTIME and "the NVIDIA driver lacks cuInit of CUDA 2.0" in rt.error()
    (tmp_path / "old").mkdir()
    rt = Runtime(built, tmp_path / "old", monkeypatch, "old_libcuda.so")
    assert rt.launch() == RUNTIME and "older than CUDA 12.0 (R525)" in rt.error()


def test_bad_23_architecture(rt):
    assert rt.launch(index=2) == UNSUPPORTED
    assert "cuda:2 is an NVIDIA A100 of compute capability 8.0; the GPU kernels need 9.0" in rt.error()
    assert rt.launch(index=3) == VALUE and "there is no device cuda:3; this process sees 3" in rt.error()
    assert rt.launch(index=64) == VALUE and "device index 64 is out of range" in rt.error()


def test_bad_27_fork(rt):
    assert in_child(lambda: rt.launch() == OK) == 0            # before the first use a fork is fine
    assert rt.launch() == OK
    assert in_child(lambda: rt.launch() == RUNTIME and "use" in rt.error() and "'spawn'" in rt.error()) == 0
    assert rt.launch() == OK


def test_every_failing_call_is_survived(built, tmp_path, monkeypatch):
    """Each driver call of a first launch fails once; the library says so and works at the next attempt, with nothing
    leaked."""
    (tmp_path / "count").mkdir()
    rt = Runtime(built, tmp_path / "count", monkeypatch)
    assert rt.launch() == OK
    calls = rt.log()
    for n, call in enumerate(calls, 1):
        folder = tmp_path / str(n)
        folder.mkdir()
        rt = Runtime(built, folder, monkeypatch)
        rt.mock.mock_fail(n, 2)
        assert rt.launch() == RUNTIME, call
        assert "CUDA error 2, CUDA_ERROR_OUT_OF_MEMORY (injected by the mock driver)" in rt.error(), call
        # Nothing can be done about these
        undo_failed = call == "cuCtxPopCurrent" or call == "cuThreadExchangeStreamCaptureMode 0"
        if not undo_failed:
            assert rt.mock.mock_depth() == 0 and rt.mock.mock_mode() == 0, call
        assert rt.launch() == OK, call
        assert rt.mock.mock_libraries() == 1, call


def test_bad_34_sticky_error(rt):
    assert rt.launch() == OK
    rt.mock.mock_fail(3, 700)
    assert rt.launch(blocks=5) == RUNTIME
    assert rt.error().startswith("scaled_add: launch of plain with 5 blocks of 128 threads and 1024 bytes of shared "
                                 "memory failed: "
                                 "CUDA error 700")
    assert "this or an earlier kernel failed asynchronously, MARGAY_SYNC=1 finds the first" in rt.error()
    rt.mock.mock_fail(3, 999)
    assert rt.launch() == RUNTIME and "CUDA error 999, unknown error" in rt.error()


def test_driver_api_matches_cuda_h(tmp_path):
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    header = next((Path(home) / "include" / "cuda.h" for home in homes
                   if home and (Path(home) / "include" / "cuda.h").exists()), None)
    if not header:
        pytest.skip("no cuda.h")
    compile_c("-o", tmp_path / "abi.o", f"-I{CSRC}", "-isystem", header.parent, "-c", MOCK / "abi.c")
