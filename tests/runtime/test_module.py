"""The module: arguments, information, explain."""
import re

import pytest

from mocked import call, fakes


@pytest.mark.parametrize("arguments, message", [
    ((), "attention: out is missing, expected a tensor"),
    ((None,) * 5 + (1.0, False) + (None,) + (0,) * 13, "attention_fwd takes at most 20 arguments, got 21"),
    ((None,) * 5 + ("x", False), "attention: scale is 'x', expected a number"),
    ((None,) * 5 + (1.0, False, None, "x"), "attention: left is 'x', expected an integer of 64 bits"),
    ((None,) * 5 + (1.0, False, None, 1 << 63),
     "attention: left is 9223372036854775808, expected an integer of 64 bits"),
    ((None,) * 5 + (1.0, False, None, -1, -1, [1]), "attention: softcap is \\[1\\], expected a number"),
    ((None,) * 5 + (1.0, False, None, -1, -1, 0.0, 0.0, 1.5), "attention: seed is 1.5, expected an integer"),
])
def test_module_arguments(module, arguments, message):
    with pytest.raises(TypeError, match=message):
        module.attention_fwd(*arguments)


def test_features_of_the_backward(module):
    with pytest.raises(TypeError, match=r"attention_backward: left is \[1\], expected an integer of 64 bits"):
        module.attention_bwd_workspace(*(None,) * 7, 1.0, False, False, [1])
    with pytest.raises(TypeError, match=r"attention_backward: left is \[1\], expected an integer of 64 bits"):
        module.attention_bwd(*(None,) * 11, 1.0, False, False, [1])
    with pytest.raises(TypeError, match="attention_bwd has no argument dout_"):
        module.attention_bwd_workspace(dout_=None)


@pytest.mark.parametrize("number", (1e-46, -1e-46, 5e-324, 1e39, -1e300))
def test_bad_39_numbers_that_float32_cannot_hold(module, number):
    """They would be 0, which means the default or nothing, or infinite."""
    message = re.escape(f"{number!r}, expected a number that float32 can hold")
    t = fakes()
    with pytest.raises(ValueError, match="^attention: scale is " + message):
        module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], number, False)
    for place, name in ((2, "softcap"), (3, "dropout_p")):
        features = [-1, -1, 0.0, 0.0, 0, None, None, None, None, 0, 0]
        features[place] = number
        with pytest.raises(ValueError, match=f"^attention: {name} is {message}"):
            module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], 1.0, False, None, *features)
    for place, name in ((11, "scale"), (15, "softcap")):
        arguments = [*(None,) * 11, 1.0, False, -1, -1, 0.0, -1, 0]
        arguments[place] = number
        with pytest.raises(ValueError, match=f"^attention_decode: {name} is {message}"):
            module.attention_decode(*arguments)
    # The smallest that it holds, rounded
    assert module.attention_fwd(t["out"], None, t["q"], t["k"], t["v"], 2e-45, False) is None


def test_bad_40_capsules_are_not_leaked(module):
    import gc
    import sys
    numpy = pytest.importorskip("numpy")
    a = [numpy.zeros((1, 2, 8, 64), numpy.float32) for _ in range(4)]
    before = [sys.getrefcount(x) for x in a]
    for _ in range(20000):
        module.attention_fwd(a[0], None, *a[1:], 1.0, False)
    gc.collect()
    assert [sys.getrefcount(x) for x in a] == before


def test_module_numpy(module):
    numpy = pytest.importorskip("numpy")
    out, q, k, v = (numpy.zeros((1, 2, 8, 64), numpy.float32) for _ in range(4))
    q.flags.writeable = False
    module.attention_fwd(out, None, q, k, v, 1.0, False)
    out.flags.writeable = False
    with pytest.raises(BufferError, match="out is written, but its memory is read-only"):
        module.attention_fwd(out, None, q, k, v, 1.0, False)
    with pytest.raises(BufferError, match="shares memory with k"):
        module.attention_fwd(k[:, :, ::-1][:, :, ::-1], None, q, k, v, 1.0, False)
    with pytest.raises(ValueError, match="expected no negative ones"):
        module.attention_fwd(numpy.zeros_like(v), None, q, k[:, :, ::-1], v, 1.0, False)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_module_torch(module):
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 8, 3, 2, 64, dtype=torch.bfloat16)
    q, k, v = (x[:, :, i].transpose(1, 2) for i in range(3))
    out = torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16)
    module.attention_fwd(out, None, q, k, v, 1.0, False)
    module.attention_fwd(out, None, torch.nn.Parameter(q), k, v, 1.0, False)
    with pytest.raises(BufferError, match="out is written, but shares memory with q"):
        module.attention_fwd(q, None, q, k, v, 1.0, False)
    with pytest.raises(RuntimeError, match="attention: out: Cannot pack tensors on meta$"):
        module.attention_fwd(out.to("meta"), None, q.to("meta"), k, v, 1.0, False)
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode, pytest.raises(Exception):
        module.attention_fwd(out, None, mode.from_tensor(q), k, v, 1.0, False)


def test_module_workspace(module):
    t = fakes()
    assert module.attention_bwd_workspace(None, t["q"], t["k"], t["v"], None, None, None, 0.0, False, True) == 32


def test_module_info(module):
    info = module.info()
    assert info["cuda_built"] and info["kernels"] == 7 and info["driver"] == "13.0" and info["gpu_reason"] is None
    assert info["devices"][2] == {"name": "NVIDIA A100", "cc": "8.0", "sms": 108}
    assert not [line for line in module.log() if "Retain" in line]            # looking costs the devices no memory
    rows = module.kernels()
    assert rows[1] == {"name": "clustered", "op": "scaled_add", "owner": "scaled_add",
                       "source": "scaled_add", "dtype": "bfloat16", "where": "any",
                       "when": "d <= 128", "constants": "D=128, CLUSTER=2",
                       "has_gpu_image": True, "shared_bytes": 200000, "threads": 384, "params_bytes": 16}
    assert not rows[2]["has_gpu_image"]


def test_module_explain(module):
    name, text = module.explain("scaled_add", gpu=True, d=100)
    assert name == "clustered"
    assert text.startswith("scaled_add for bfloat16, d=100, on the GPU: clustered\n  plain needs d <= 64 && !causal\n  "
                           "clustered takes it")
    name, text = module.explain("scaled_add", dtype="float16", gpu=True, d=100)
    assert name is None and "no kernel\n" in text
    assert "huge needs 300000 bytes of shared memory, a block has 232448" in text
    with pytest.raises(ValueError, match="there is no op nonsense"):
        module.explain("nonsense")
    with pytest.raises(ValueError, match="explain: dtype is int8"):
        module.explain("matmul", dtype="int8")
    with pytest.raises(TypeError):
        module.explain("matmul", colour=1)


def test_module_dry_run(module):
    name, text = module.dry_run(lambda: call(module, fakes()))
    assert name == "forward" and "forward takes it" in text and not any("cuLaunch" in line for line in module.log())
    with pytest.raises(RuntimeError, match="^dry_run: the call asked for no kernel"):
        module.dry_run(lambda: None)
    with pytest.raises(TypeError):                            # of the call, before it has asked
        module.dry_run(lambda: call(module, {**fakes(), "q": None}))
    call(module, fakes())
    assert any("cuLaunchKernelEx forward" in line for line in module.log())


@pytest.mark.parametrize("size", ("d", "batch", "heads_q", "heads_k", "nq", "nk", "m", "n", "k", "page"))
def test_bad_39_explain_sizes(module, size):
    for absurd in (-2**63, -1, 2**31, 2**63 - 1):
        with pytest.raises(ValueError, match=re.escape(f"explain: {size} is {absurd}, expected 0 to 2^31 - 1")):
            module.explain("scaled_add", **{size: absurd})
    assert "scaled_add for" in module.explain("scaled_add", **{size: 2**31 - 1})[1]


def test_module_without_driver(module, monkeypatch):
    monkeypatch.setenv("MARGAY_DRIVER", "libcuda_absent.so")
    info = module.info()
    assert info["driver"] is None and info["devices"] == [] and "no NVIDIA driver" in info["gpu_reason"]
    assert "(for an H100, because here: no NVIDIA driver" in module.explain("scaled_add", gpu=True, d=100)[1]
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):
        call(module, fakes())


def test_module_threads_and_preload(module):
    module.set_num_threads(2)
    assert module.num_threads() == 2
    with pytest.raises(ValueError, match="n is -1"):
        module.set_num_threads(-1)
    module.preload("attention_fwd", 1)
    assert any("image=forward" in line for line in module.log())
    with pytest.raises(ValueError, match="there is no op x"):
        module.preload("x", 0)
