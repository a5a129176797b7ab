"""What mg_check refuses."""
import pytest

from mocked import BUFFER, CPU, CUDA, FP32, INT32, INT64, OK, TYPE, UINT8, VALUE, qkv, tensor


def refused(rt, status, message, op="attention", **change):
    arguments = qkv(device=CPU)
    arguments.update(change)
    assert rt.attention(**arguments) == status
    assert rt.error().startswith(f"{op}: {message}"), rt.error()


def test_bad_01_dtype(rt):
    refused(rt, TYPE, "k has dtype float32, expected bfloat16 (same as q)", k=tensor([2, 4, 200, 64], dtype=FP32))
    refused(rt, TYPE, "q has dtype int64, expected bfloat16, float16 or float32",
            q=tensor([2, 4, 100, 64], dtype=INT64))
    refused(rt, TYPE, "lse has dtype bfloat16, expected float32", lse=tensor([2, 4, 100]))
    assert rt.attention(**qkv(dtype=FP32, device=CUDA)) == TYPE
    assert rt.error() == "attention: q has dtype float32, expected bfloat16 or float16 (float32 only on the CPU)"


def test_bad_02_rank_and_missing(rt):
    refused(rt, VALUE, "k has 3 dimensions, expected 4", k=tensor([4, 200, 64]))
    refused(rt, TYPE, "v is missing, expected a tensor", v=None)


def test_bad_03_04_device(rt):
    refused(rt, TYPE, "k is on a CUDA device, expected the CPU (same as q)", k=tensor([2, 4, 200, 64], device=CUDA))
    arguments = qkv()
    arguments["v"].device_index = 1
    assert rt.attention(**arguments) == VALUE
    assert rt.error() == "attention: v is on cuda:1, expected cuda:0 (same as q)"


def test_bad_06_07_strides(rt):
    shape = [2, 4, 200, 64]
    refused(rt, VALUE, "k has shape [2, 4, 200, 64] and strides [51200, 12800, 1, 200], expected a contiguous last "
            "dimension; call .contig",
            k=tensor(shape, [51200, 12800, 1, 200]))
    refused(rt, VALUE, "k has shape [2, 4, 200, 64] and strides [51200, -12800, 64, 1], expected no negative ones",
            k=tensor(shape, [51200, -12800, 64, 1]))
    refused(rt, VALUE, "lse has shape [2, 4, 100] and strides [800, 200, 2], expected a contiguous tensor",
            lse=tensor([2, 4, 100], [800, 200, 2], dtype=FP32))


def test_expanded_inputs_and_unused_strides_are_taken(rt):
    lse = tensor([2, 1, 1], [1, -7, 99], data=10 << 24, dtype=FP32)
    row, rows = [2, 1, 1, 64], [2, 1, 200, 64]
    a = qkv(device=CPU, out=tensor(row, data=7 << 24), q=tensor(row, data=8 << 24),
            k=tensor(rows, [0, 0, 64, 1], data=9 << 24), v=tensor(rows), lse=lse)
    assert rt.check("attention_fwd", [a[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK, rt.error()


def test_matmul_takes_transposed_views(rt):
    out, a = tensor([8, 16], data=1 << 24), tensor([8, 32], data=2 << 24)
    assert rt.check("matmul", [out, a, tensor([32, 16], [1, 32]), None]) == OK
    assert rt.check("matmul", [out, a, tensor([32, 16], [2, 64]), None]) == VALUE
    assert "one of the last two dimensions contiguous" in rt.error()
    assert rt.check("matmul", [tensor([8, 16], [1, 8], data=1 << 24), a, tensor([32, 16]), None]) == VALUE


def test_bad_08_misaligned_element(rt):
    refused(rt, VALUE, "q is at address 0x100001, expected a multiple of 2",
            q=tensor([2, 4, 100, 64], data=(1 << 20) + 1))
    refused(rt, VALUE, "q has no memory (a null pointer)", q=tensor([2, 4, 100, 64], data=0))


def test_empty_tensors_have_no_memory_to_check(rt):
    a = qkv(device=CPU, out=tensor([2, 4, 0, 64], data=0), q=tensor([2, 4, 0, 64], data=0))
    assert rt.check("attention_fwd", [a[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK


def test_bad_13_sizes(rt):
    refused(rt, VALUE, "q has shape [2, 4, 2147483648, 64], expected 0 to 2^31 - 1", q=tensor([2, 4, 2**31, 64]))
    refused(rt, VALUE,
            "q with shape [2, 4, 100, 64] and strides [4611686018427387904, 64, 64, 1] reaches past the end of memory",
            q=tensor([2, 4, 100, 64], [2**62, 64, 64, 1]))
    refused(rt, VALUE, "q with shape [2147483647, 2147483647, 2147483647, 2] and strides",
            q=tensor([2**31 - 1] * 3 + [2], [2**33, 2**32, 2, 1]))
    far = qkv(device=CPU, k=tensor([2, 4, 200, 64], [2**33, 2**31, 64, 1], data=1 << 40))
    assert rt.check("attention_fwd", [far[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK


def test_bad_15_overlap_with_an_input(rt):
    refused(rt, BUFFER, "out is written, but shares memory with q", out=tensor([2, 4, 100, 64], data=(2 << 24) + 64))
    refused(rt, BUFFER, "out is written, but shares memory with lse", out=tensor([2, 4, 100, 64], data=7 << 24),
            lse=tensor([2, 4, 100], data=(7 << 24) + 4, dtype=FP32))


def test_bad_16_output_overlaps_itself(rt):
    refused(rt, BUFFER,
            "out is written, but with shape [2, 4, 100, 64] and strides [0, 6400, 64, 1] its elements may share",
            out=tensor([2, 4, 100, 64], [0, 6400, 64, 1], data=1 << 24))
    refused(rt, BUFFER, "out is written, but with shape",
            out=tensor([2, 4, 100, 64], [25600, 6400, 32, 1], data=1 << 24))


def test_bad_17_read_only_output(rt):
    refused(rt, BUFFER, "out is written, but its memory is read-only",
            out=tensor([2, 4, 100, 64], data=1 << 24, read_only=True))
    arguments = qkv(device=CPU)
    arguments["q"].read_only = True
    assert rt.check("attention_fwd", [arguments[name] for name in ("out", "lse", "q", "k", "v")] + [None]) == OK


def slices(layout, batch=2, rows=10, heads=4, d=64, base=1 << 20):
    """Three views [batch, heads, rows, d] of one buffer."""
    if layout == "rows":          # [B, N, 3, H, D]
        strides, step = [rows * 3 * heads * d, d, 3 * heads * d, 1], heads * d
    elif layout == "heads":       # [B, N, H, 3, D]
        strides, step = [rows * 3 * heads * d, 3 * d, 3 * heads * d, 1], d
    elif layout == "head first":  # [B, H, N, 3, D]
        strides, step = [rows * 3 * heads * d, rows * 3 * d, 3 * d, 1], d
    else:                         # [B, 3, H, N, D]
        strides, step = [rows * 3 * heads * d, rows * d, d, 1], rows * heads * d
    return [tensor([batch, heads, rows, d], strides, data=base + 2 * i * step) for i in range(3)]


def backward(gradients, like=(2, 4, 10, 64)):
    fresh = [tensor(list(like), data=(i + 9) << 24) for i in range(5)]
    return [*gradients, *fresh, tensor(list(like[:3]), data=15 << 24, dtype=FP32),
            None, tensor([100], data=16 << 24, dtype=UINT8)]


@pytest.mark.parametrize("layout", ["rows", "heads", "head first", "outer"])
def test_gradients_may_be_slices_of_one_buffer(rt, layout):
    dq, dk, dv = slices(layout)
    assert rt.check("attention_bwd", backward([dq, dk, dv])) == OK, rt.error()
    assert rt.check("attention_bwd", backward([dq, dk, slices(layout)[1]])) == BUFFER
    assert rt.error() == "attention_backward: dk is written, but shares memory with dv"
    for shift in (2, -2):         # one element off: the last column of one is the first of another
        moved = slices(layout, base=(1 << 20) + shift)[1]
        assert rt.check("attention_bwd", backward([dq, moved, dv])) == BUFFER


def addresses(t):
    found = [t.data]
    for n, s in zip(t.shape[:t.dims], t.stride[:t.dims]):
        found = [a + 2 * s * i for a in found for i in range(n)]
    return found


def test_overlap_against_enumeration(rt):
    """Never accepts what overlaps; how often it refuses what does not is bounded."""
    import random
    random.seed(1)
    false_alarms = accepted = 0
    for _ in range(1500):
        shared = [random.randint(1, 3), random.randint(1, 4)]

        def draw():
            shape = [random.randint(1, 3) for _ in range(2)] + shared
            strides = [random.choice([0, 1, 4, 8, 12, 24, 48]) for _ in range(3)] + [1]
            return tensor(shape, strides, data=(1 << 20) + 2 * random.randint(0, 40))
        out, q = draw(), draw()
        v_cache, v = (tensor(t.shape[:4], data=(i + 2) << 24) for i, t in enumerate((out, q)))
        pages = tensor([q.shape[0], 1], data=5 << 24, dtype=INT32)
        wrong = len(set(addresses(out))) < len(addresses(out)) or bool(set(addresses(out)) & set(addresses(q)))
        status = rt.check("append_kv", [out, v_cache, q, v, None, pages])
        assert status in (OK, BUFFER)
        assert not (wrong and status == OK), (addresses(out), addresses(q))
        accepted += status == OK
        false_alarms += status == BUFFER and not wrong
    assert accepted > 100 and false_alarms < accepted
