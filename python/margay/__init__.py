"""Fast kernels for attention-like layers. Importing loads no tensor library and makes no CUDA call."""

from margay.families.attention.attention import attention, attention_varlen, dropout_mask
from margay.families.attention.decode import append_kv, attention_decode
from margay.families.based import based
from margay.families.causal_conv1d.causal_conv1d import causal_conv1d, causal_conv1d_step
from margay.families.cross_entropy import cross_entropy
from margay.families.delta import gated_delta_rule
from margay.families.delta_steps import gated_delta_rule_step, kda_step
from margay.families.fft_conv import fft_conv, fft_conv_filter
from margay.families.gemm.matmul import matmul
from margay.families.hedgehog import hedgehog
from margay.families.kda import kda
from margay.families.linear_attention import linear_attention, linear_attention_step
from margay.families.norm import gated_rms_norm, layer_norm, rms_norm
from margay.families.qk_norm_rotary import qk_norm_rotary
from margay.families.rotary import rotary
from margay.families.scaled_add import scaled_add
from margay.families.ssd import ssd, ssd_step

__version__ = "0.1.0"
_MODULES = ("flash_attn", "flash_attn_interface", "flash_kda", "flashfftconv", "flashinfer", "integrations", "mamba",
            "nn")
# name -> its module
_LATER = {"explain": "margay._explain", "info": "margay._explain", "FallbackWarning": "margay.drop_ins.fallback",
          "enable_sdpa": "margay.drop_ins.sdpa", "install_as_flash_attn": "margay.drop_ins.flash_attn2",
          "patch": "margay.drop_ins.patch", "unpatch": "margay.drop_ins.patch"}
__all__ = ["append_kv", "attention", "attention_decode", "attention_varlen", "based", "causal_conv1d",
           "causal_conv1d_step", "cross_entropy", "dropout_mask", "fft_conv", "fft_conv_filter", "gated_delta_rule",
           "gated_delta_rule_step", "gated_rms_norm", "hedgehog", "kda", "kda_step", "layer_norm", "linear_attention",
           "linear_attention_step", "matmul", "qk_norm_rotary", "rms_norm", "rotary", "scaled_add", "ssd", "ssd_step",
           *_MODULES, *_LATER]


def __getattr__(name):
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"margay.{name}")
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'margay' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
