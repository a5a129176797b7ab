"""Registration with other libraries; each module asks for its library when it is imported."""

import importlib

__all__ = ["delta", "fla", "hf", "mamba"]


def __getattr__(name):
    if name in __all__:
        return importlib.import_module(f"margay.integrations.{name}")
    raise AttributeError(f"module 'margay.integrations' has no attribute {name!r}")
