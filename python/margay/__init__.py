"""Fast kernels for attention-like layers. Importing loads no tensor library and makes no CUDA call."""

from margay._decode import append_kv, attention_decode
from margay.ops import attention, explain, info, matmul

__version__ = "0.1.0"
__all__ = ["append_kv", "attention", "attention_decode", "explain", "info", "matmul", "nn"]


def __getattr__(name):
    if name == "nn":
        import importlib

        return importlib.import_module("margay.nn")
    raise AttributeError(f"module 'margay' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), "nn"])
