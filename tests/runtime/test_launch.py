"""Launches: geometry, streams, contexts, images."""
import ctypes
import threading

from mocked import CPU, CUDA, OK, RUNTIME, VALUE, Runtime


def test_launch_geometry(rt):
    assert rt.launch("plain", blocks=8) == OK
    log = rt.log()
    assert (log[-2] ==
            "cuLaunchKernelEx plain grid=8,1,1 block=128,1,1 shared=1024 cluster=0 stream=0x10 params=42 context=0")
    assert log[-1] == "cuCtxPopCurrent" and rt.mock.mock_depth() == 0


def test_launch_cluster(rt):
    assert rt.launch("clustered", blocks=12, magic=7) == OK
    assert ("cuLaunchKernelEx clustered grid=12,1,1 block=384,1,1 shared=200000 cluster=2 dependent stream=0x10 "
            "params=7 context=0") in (log := rt.log())
    assert "cuKernelSetAttribute clustered 9=100 device=0" in log     # of a row that is FOLLOWED


def test_loaded_once_in_relaxed_capture_mode(rt):
    assert rt.launch() == OK
    log = rt.log()
    first, last = (i for i, line in enumerate(log) if line.startswith("cuThreadExchangeStreamCaptureMode"))
    assert log[first].endswith(" 2") and log[last].endswith(" 0") and rt.mock.mock_mode() == 0
    assert log[first + 1:last] == ["cuLibraryLoadData image=plain options=0", "cuLibraryGetKernel plain",
                                   "cuKernelSetAttribute plain 8=1024 device=0"]
    assert rt.launch() == OK
    assert [line.split()[0] for line in rt.log()] == ["cuCtxGetCurrent", "cuCtxPushCurrent",
                                                      "cuLaunchKernelEx", "cuCtxPopCurrent"]


def test_empty_grid_launches_nothing(rt):
    assert rt.launch(blocks=0) == OK
    assert not [line for line in rt.log() if "Launch" in line or "Load" in line]


def test_too_many_blocks(rt):
    assert rt.launch(blocks=2**31) == VALUE


def test_bad_05_device_1_while_0_is_current(rt):
    rt.mock.mock_enter(0)
    assert rt.launch(index=1, stream=0) == OK
    log = rt.log()
    assert ("cuCtxPushCurrent device=1" in log and log[-2].endswith("stream=(nil) params=42 context=1") and
            rt.mock.mock_depth() == 1)
    assert rt.launch(index=0) == OK           # its attributes are per device; the image is loaded already
    log = rt.log()
    assert ("cuKernelSetAttribute plain 8=1024 device=0" in log and
            not [line for line in log if "Push" in line or "LibraryLoad" in line])


def test_current_context_is_left_alone(rt):
    rt.mock.mock_enter(1)
    assert rt.launch(index=1) == OK
    assert not [line for line in rt.log() if "Push" in line or "Pop" in line]


def test_preload(rt):
    assert rt.c.mg_preload(b"scaled_add", 1) == OK
    loads = [line for line in rt.log() if "cuLibraryLoadData" in line]
    assert loads == [f"cuLibraryLoadData image={name} options=0" for name in ("plain", "clustered", "huge")]
    assert rt.launch(index=1) == OK
    assert not [line for line in rt.log() if "cuLibraryLoadData" in line]
    assert rt.c.mg_preload(b"nonsense", 0) == VALUE
    assert "there is no op nonsense, expected one of scaled_add, scaled_add_bwd, matmul, " in rt.error()


def test_image_without_its_kernel(rt):
    assert rt.c.mg_preload(b"matmul", 0) == RUNTIME
    assert "matmul: the kernel misnamed is not in its image: CUDA error 500" in rt.error()
    assert rt.mock.mock_libraries() == 0 and rt.mock.mock_depth() == 0 and rt.mock.mock_mode() == 0


def test_fill(rt):
    assert rt.c.test_fill(CUDA, ctypes.c_void_p(0x1000), 0x7F80, ctypes.c_size_t(2), ctypes.c_int64(5)) == OK
    assert "cuMemsetD16Async 1000 word=7f80 n=5 stream=0x30" in rt.log()
    assert rt.c.test_fill(CUDA, ctypes.c_void_p(0x1000), 0xFF800000, ctypes.c_size_t(4), ctypes.c_int64(6)) == OK
    assert "cuMemsetD32Async 1000 word=ff800000 n=6 stream=0x30" in rt.log()
    for width, word in ((2, 0x7F80), (4, 0xFF800000), (4, 0)):
        memory = (ctypes.c_ubyte * 40)(*[1] * 40)
        assert rt.c.test_fill(CPU, memory, word, ctypes.c_size_t(width), ctypes.c_int64(5)) == OK
        assert bytes(memory) == word.to_bytes(width, "little") * 5 + b"\1" * (40 - 5 * width)


def test_sync_names_the_kernel(built, tmp_path, monkeypatch):
    monkeypatch.setenv("MARGAY_SYNC", "1")
    rt = Runtime(built, tmp_path, monkeypatch)
    assert rt.launch() == OK
    assert rt.log()[-3:] == ["cuStreamIsCapturing stream=0x10", "cuStreamSynchronize stream=0x10", "cuCtxPopCurrent"]
    rt.mock.mock_fail(5, 700)
    assert rt.launch() == RUNTIME
    assert rt.error().startswith("scaled_add: plain failed: CUDA error 700, CUDA_ERROR_ILLEGAL_ADDRESS (an illegal "
                                 "memory access")
    rt.mock.mock_fail(0, 0)
    rt.mock.mock_capturing(1)
    rt.log()
    assert rt.launch() == OK
    assert not [line for line in rt.log() if "Synchronize" in line]


def test_threads_load_once(rt):
    threads = [threading.Thread(target=rt.launch, args=(name,)) for name in ("plain", "clustered") * 8]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert rt.mock.mock_libraries() == 2
