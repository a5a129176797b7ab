"""Fast kernels for attention-like layers. Importing loads no tensor library and makes no CUDA call."""

from margay._decode import append_kv, attention_decode
from margay.drop_ins.fallback import FallbackWarning
from margay.ops import attention, attention_varlen, dropout_mask, explain, info, linear_attention, matmul, scaled_add, ssd, ssd_step

__version__ = "0.1.0"
_MODULES = ("flash_attn", "flash_attn_interface", "integrations", "mamba", "nn")
_FUNCTIONS = {"enable_sdpa": "margay.drop_ins.sdpa", "install_as_flash_attn": "margay.drop_ins.flash_attn2"}     # of modules that need torch
__all__ = ["FallbackWarning", "append_kv", "attention", "attention_decode", "attention_varlen", "dropout_mask", "explain", "info", "linear_attention", "matmul", "scaled_add", "ssd", "ssd_step", *_MODULES, *_FUNCTIONS]


def __getattr__(name):
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"margay.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'margay' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
