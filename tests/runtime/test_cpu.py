"""Threads of the CPU, and its instruction set."""
import ctypes
import threading

from mocked import CPU, MEMORY, OK, VALUE, Runtime, in_child


def hits_of(rt, blocks, row="plain"):
    hits = (ctypes.c_int * blocks)()
    assert rt.launch(row, blocks, device=CPU, hits=hits) == OK
    return list(hits)


def test_cpu_runs_every_cluster_once(rt):
    for threads in (1, 2, 5):
        rt.c.mg_set_num_threads(threads)
        assert rt.c.mg_num_threads() == threads
        for blocks in (1, 2, 7, 1000):
            assert hits_of(rt, blocks) == [1] * blocks
        assert hits_of(rt, 10, "clustered") == [1, 0] * 5


def test_cpu_concurrent_callers(rt):
    rt.c.mg_set_num_threads(4)
    wrong = []

    def call():
        for _ in range(100):
            if hits_of(rt, 50) != [1] * 50:
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_bad_33_cpu_memory(rt):
    """A thread without the memory that a cluster needs takes none; where no thread takes part, the call fails, and the
    next one works."""
    lacks = ctypes.c_size_t.in_dll(rt.c, "mock_lacks")
    for threads in (1, 4):
        rt.c.mg_set_num_threads(threads)
        lacks.value = 4096
        hits = (ctypes.c_int * 50)()
        assert rt.launch("plain", 50, device=CPU, hits=hits) == MEMORY and list(hits) == [0] * 50
        assert rt.error() == "scaled_add: out of memory, the kernel plain on the CPU could not get 4096 bytes"
        lacks.value = 0
        assert hits_of(rt, 50) == [1] * 50


def test_cpu_survives_fork(rt):
    rt.c.mg_set_num_threads(4)
    assert hits_of(rt, 100) == [1] * 100
    assert in_child(lambda: hits_of(rt, 100) == [1] * 100) == 0
    assert hits_of(rt, 100) == [1] * 100


def test_number_of_threads(built, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    rt = Runtime(built, tmp_path, monkeypatch)
    assert rt.c.mg_num_threads() == 3
    rt.c.mg_set_num_threads(2)
    assert rt.c.mg_num_threads() == 2
    rt.c.mg_set_num_threads(0)
    assert rt.c.mg_num_threads() == 3


def test_bad_41_number_of_threads(built, tmp_path, monkeypatch):
    """What is no number of threads is passed over."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "default").mkdir()
    default = Runtime(built, tmp_path / "default", monkeypatch).c.mg_num_threads()
    for text, threads in (("99999999999", default), ("4294967299", default),
                          ("1025", default), ("-2", default), ("3x", default), ("", default), ("1024", 1024),
                          (" 7 ", 7), ("5,1", 5)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        folder = tmp_path / (text.strip() or "empty")
        folder.mkdir()
        assert Runtime(built, folder, monkeypatch).c.mg_num_threads() == threads, text


def test_isa_can_be_lowered(built, tmp_path, monkeypatch):
    monkeypatch.setenv("MARGAY_ISA", "base")
    assert Runtime(built, tmp_path, monkeypatch).c.mg_host_isa() == 0


def test_bad_41_isa(built, tmp_path, monkeypatch):
    """A name that means nothing is refused where the CPU would compute."""
    for text in ("garbage", "AVX2", "avx2 "):
        monkeypatch.setenv("MARGAY_ISA", text)
        folder = tmp_path / text
        folder.mkdir()
        rt = Runtime(built, folder, monkeypatch)
        assert (rt.launch(device=CPU) == VALUE and
                rt.error() == f"the environment's MARGAY_ISA is {text}, expected base, avx2 or avx512")
        assert rt.launch() == OK                              # of no concern to a GPU
    for text in ("", "base", "avx2", "avx512"):               # at most: a machine may have less
        monkeypatch.setenv("MARGAY_ISA", text)
        folder = tmp_path / f"{text} known"
        folder.mkdir()
        assert Runtime(built, folder, monkeypatch).launch(device=CPU) == OK
