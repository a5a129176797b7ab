"""The choice of a row."""
from mocked import OK, UNSUPPORTED, qkv


def test_select_and_launch(rt):
    assert rt.attention(**qkv()) == OK
    assert ("cuLaunchKernelEx forward grid=8,1,1 block=256,1,1 shared=100000 cluster=0 stream=(nil) params=42 "
            "context=0") in rt.log()


def test_unsupported_lists_reasons(rt):
    assert rt.attention(**qkv(d=256)) == UNSUPPORTED
    assert rt.error().splitlines() == ["attention: no kernel for bfloat16, d=256, on the GPU",
                                       "  forward needs d <= 128",
                                       "  1 more for other dtypes or devices"]
