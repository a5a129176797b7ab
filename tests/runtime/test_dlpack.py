"""How tensors come into the module."""
import ctypes
import re

import pytest

from mocked import Fake, Old, Table, call, fakes, new_capsule, tabled


def test_module_launches_on_the_given_stream(module):
    t = fakes()
    assert call(module, t, stream=0x5000) is None
    assert any(line.startswith("cuLaunchKernelEx forward") and "stream=0x5000" in line for line in module.log())
    assert t["q"].asked == {"max_version": (1, 3), "stream": 0x5000}
    assert call(module, fakes()) is None and any("stream=(nil)" in line for line in module.log())


def test_module_devices(module):
    call(module, fakes(device=(2, 1)))
    assert any("context=1" in line for line in module.log())
    with pytest.raises(NotImplementedError, match="cuda:2 is an NVIDIA A100"):
        call(module, fakes(device=(2, 2)))
    with pytest.raises(TypeError, match="attention: out is on DLPack device type 7, expected the CPU or a CUDA device"):
        call(module, fakes(device=(7, 0)))


def test_module_old_producers(module):
    t = fakes(Old)
    call(module, t, stream=0x5000)
    assert t["q"].asked == {"stream": 0x5000}
    call(module, fakes(Old, strides=None))


def test_module_offset(module):
    a = fakes()
    a["k"] = Fake([1, 2, 8, 64], data=1 << 24, offset=9 << 24)
    call(module, a)
    a["k"] = Fake([1, 2, 8, 64], data=2 << 24, offset=-(1 << 24) % 2**64)
    with pytest.raises(BufferError, match="attention: out is written, but shares memory with k"):
        call(module, a)


def test_module_exchange_table(module):
    table = Table()
    kind = tabled(table)
    t = fakes(kind, device=(2, 1))
    call(module, t)
    assert table.streams == [(2, 1)] and t["q"].asked is None
    assert any("stream=0x7770" in line and "context=1" in line for line in module.log())
    call(module, t, stream=0x5000)                 # a stream that the caller names is taken as it is
    assert len(table.streams) == 1 and any("stream=0x5000" in line for line in module.log())
    call(module, fakes(kind, device=(1, 0), code=2, bits=32))
    assert len(table.streams) == 1            # the CPU has none


def test_module_exchange_table_of_another_version(module):
    older = Table()
    t = fakes(tabled(Table(2, older)))
    call(module, t)
    assert older.streams and t["q"].asked is None
    t = fakes(tabled(Table(2)))
    call(module, t)
    assert t["q"].asked


def test_bad_38_subclasses_do_not_inherit_the_table(module):
    table = Table()
    t = fakes(type("Wrapper", (tabled(table),), {}))
    call(module, t)
    assert t["q"].asked and not table.streams


def test_bad_40_python_runs_before_memory_is_viewed(module):
    """Python code of an exporter, a type or a number could free or resize what was viewed before it: it has all run
    then."""
    events = []

    class Logging(Fake):
        def __dlpack_device__(self):
            events.append("python")
            return super().__dlpack_device__()

        def __dlpack__(self, **keywords):
            events.append("python")
            return super().__dlpack__(**keywords)

    class Meta(type):
        def __getattribute__(cls, name):
            events.append("python")
            return super().__getattribute__(name)

    class Number(float):
        def __float__(self):
            events.append("python")
            return 1.0

        def __index__(self):
            events.append("python")
            return 0

        __bool__ = __index__ = lambda self: events.append("python") or False

    kind, seen = tabled(Table(events=events)), Meta("Seen", (Fake,), {})
    for which in ("out", "q", "k", "v"):
        for python in (Logging, seen):
            t = fakes(kind)
            t[which] = python([1, 2, 8, 64], data=9 << 24)
            events.clear()
            module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], Number(), Number())
            assert "python" in events and events[-3:] == ["borrow"] * 3 and "borrow" not in events[:-3]


def test_bad_40_masked_arrays(module):
    numpy = pytest.importorskip("numpy")
    out, q, k, v = (numpy.zeros((1, 2, 8, 64), numpy.float32) for _ in range(4))
    for masked in (numpy.ma.masked_array(k), numpy.ma.masked_array(k, k == 0)):
        with pytest.raises(TypeError, match=r"attention: k is <class 'numpy\.ma\S*MaskedArray'>, expected a tensor .* "
                           r"without a mask"):
            module.attention_fwd(out, None, q, masked, v, 1.0, False)


class Shapeless(Fake):
    """Dimensions, and no pointer to their sizes."""

    def __init__(self, shape):
        super().__init__(shape)
        self.managed.tensor.shape = None


@pytest.mark.parametrize("change, error, message", [
    ({"q": Shapeless([1, 2, 8, 64])}, ValueError, "attention: q has 4 dimensions and no shape (a null pointer)"),
    ({"q": 3}, TypeError, "attention: q is <class 'int'>, expected a tensor"),
    ({"q": Fake}, TypeError, "attention: q is <class 'type'>, expected a tensor"),
    ({"q": None}, TypeError, "attention: q is missing"),
    ({"q": Fake([1, 2, 8, 64], code=5)}, TypeError, "attention: q has DLPack type code 5 of 16 bits and 1 lanes"),
    ({"q": Fake([1, 2, 8, 64], lanes=2)}, TypeError, "2 lanes"),
    ({"q": Fake([1] * 9)}, ValueError, "attention: q has 9 dimensions, expected at most 8"),
    ({"q": Fake([1, 2, 8, 64], major=2)}, BufferError, "attention: q is exported by DLPack 2.0, expected 1.x"),
    ({"q": Fake([1, 2, 8, 64], flags=2)}, BufferError, "attention: q exports a copy of its memory, expected a view"),
    ({"out": Fake([1, 2, 8, 64], flags=1)}, BufferError, "attention: out is written, but its memory is read-only"),
    ({"q": Fake([1, 2, 8, 64], device=(1, 0))}, TypeError, "attention: out is on a CUDA device, expected the CPU"),
    ({"q": Fake([2, 8, 64])}, ValueError, "attention: q has 3 dimensions, expected 4"),
])
def test_module_refuses(module, change, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(module, {**fakes(), **change})


def test_module_producer_errors(module):
    class Broken(Fake):
        def __dlpack__(self, **keywords):
            raise BufferError("not today")

    class Used(Fake):
        def __dlpack__(self, **keywords):
            return new_capsule(ctypes.addressof(self.managed), b"used_dltensor_versioned")

    class Deviceless(Fake):
        def __dlpack_device__(self):
            raise RuntimeError("nowhere")

    for kind, error, message in ((Broken, BufferError, "attention: k: not today"),
                                 (Used, TypeError, "an unused DLPack capsule"),
                                 (Deviceless, RuntimeError, "attention: k: nowhere")):
        with pytest.raises(error, match=message):
            call(module, {**fakes(), "k": kind([1, 2, 8, 64])})


def test_bad_40_exceptions_that_are_no_string(module):
    """An exporter's exception arrives as what it is, also where its class is not made from a text alone."""
    class Two(Exception):
        def __init__(self, code, reason):
            super().__init__(code, reason)

    class Other(Exception):
        def __new__(cls, *arguments):
            return ValueError("another") if len(arguments) == 1 else super().__new__(cls, *arguments)

    raised = []

    class Broken(Fake):
        def __dlpack__(self, **keywords):
            raise raised[-1]

    for error in (Two(7, "not today"), UnicodeDecodeError("ascii", b"x", 0, 1, "not today"), Other(7, "not today")):
        raised.append(error)
        with pytest.raises(type(error)) as found:
            call(module, {**fakes(), "k": Broken([1, 2, 8, 64])})
        assert found.value is error and "not today" in str(error) and found.value.__context__ is None
    with pytest.raises(KeyError, match="attention: k: 'not there'"):
        raised.append(KeyError("not there"))
        call(module, {**fakes(), "k": Broken([1, 2, 8, 64])})
