"""Tensor maps."""
import ctypes

import pytest

from mocked import BF16, CPU, CUDA, E4M3, FP32, INT32, OK, TYPE, VALUE


def encode(rt, shape, stride, data=1 << 20, dtype=BF16, rows=128, cols=64, device=CUDA):
    view = (ctypes.c_int64 * 9)()
    quad = ctypes.c_int64 * 4
    status = rt.c.test_map(device, ctypes.c_void_p(data), dtype, quad(*shape), quad(*stride), rows, cols, view)
    return status, list(view)


def test_map_gpu(rt):
    assert encode(rt, [2, 8, 1000, 96], [768000, 96, 768, 1])[0] == OK
    assert rt.log()[-2] == ("cuTensorMapEncodeTiled dtype=9 rank=4 data=0x100000 size=96,1000,8,2 "
                            "stride=1536,192,1536000 box=64,128,1,1 "
                            "step=1 interleave=0 swizzle=3 fill=0")
    assert encode(rt, [1, 1, 300, 128], [7, 13, 128, 1], dtype=FP32, rows=64, cols=128)[0] == OK
    assert rt.log()[-2] == ("cuTensorMapEncodeTiled dtype=7 rank=4 data=0x100000 size=128,300,1,1 stride=512,16,16 "
                            "box=128,64,1,1 "
                            "step=1 interleave=0 swizzle=0 fill=0")
    for cols, swizzle in ((64, 2), (128, 3)):        # 8-bit floats travel as bytes; 64-byte rows have a swizzle of
                                                     # their own
        assert encode(rt, [2, 8, 1000, 96], [768000, 96, 768, 1], dtype=E4M3, rows=64, cols=cols)[0] == OK
        assert rt.log()[-2] == ("cuTensorMapEncodeTiled dtype=0 rank=4 data=0x100000 size=96,1000,8,2 "
                                f"stride=768,96,768000 box={cols},64,1,1 "
                                f"step=1 interleave=0 swizzle={swizzle} fill=0")


def test_map_cpu(rt):
    status, view = encode(rt, [2, 8, 1000, 96], [768000, 96, 768, 1], data=4242, device=CPU)
    assert status == OK and view == [4242, 96, 1000, 8, 2, 2, 1536, 192, 1536000]


@pytest.mark.parametrize("change, message", [
    ({"data": (1 << 20) + 8}, "x is at address 0x100008, expected a multiple of 16 bytes"),
    ({"stride": [768000, 96, 764, 1]},
     "x has a row stride of 764 elements of 2 bytes, expected a multiple of 16 bytes below 2^40"),
    ({"stride": [2**40, 96, 768, 1]}, "x has a batch stride of"),
    ({"stride": [768000, -96, 768, 1]}, "x has a head stride of -96"),
    ({"stride": [768000, 96, 768, 2]}, "x has a column stride of 2, expected 1"),
    ({"shape": [2, 8, 2**31, 96]}, "x has 2147483648 elements in dimension 2"),
    ({"rows": 257}, "x has a box of 257 x 64"),
    ({"cols": 128}, "x has a box of 128 x 128"),
    ({"dtype": INT32}, "x has dtype int32, which has no tensor map"),
])
def test_bad_08_map(rt, change, message):
    arguments = {"shape": [2, 8, 1000, 96], "stride": [768000, 96, 768, 1], **change}
    assert encode(rt, **arguments)[0] in (VALUE, TYPE)
    assert rt.error().startswith("test: " + message)
