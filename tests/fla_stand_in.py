"""What stands in for FLA: modules of its names, made for a test and forgotten behind it."""

import importlib
import sys
import textwrap

from margay.drop_ins import fallback

# The package, and a registry like its own
REGISTRY = {
    "fla/__init__.py": "calls = []",
    "fla/backends.py": """
        import functools
        import inspect

        class BaseBackend:
            backend_type, priority, implementation, verifier = "base", 5, None, None

        registries = {}

        def register(entry_point, *, backend, verifier=None):
            def decorator(implementation):
                registered = backend()
                registered.implementation, registered.verifier = implementation, verifier
                registries[inspect.unwrap(entry_point)][registered.backend_type] = registered
                return implementation
            return decorator

        def dispatch(function):
            backends = registries[function] = {}

            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                for backend in sorted(backends.values(), key=lambda b: b.priority):
                    if backend.verifier(*args, **kwargs)[0]:
                        return backend.implementation(*args, **kwargs)
                return function(*args, **kwargs)
            return wrapper
        """,
}


def stand_in(modules, tmp_path, monkeypatch):
    """A fresh copy of {path: text}, without which of Margay's switch knows nothing; a generator of the package."""
    for name, text in modules.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fallback, "_warned", set())
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "fla"}
    yield importlib.import_module("fla")
    if "margay.drop_ins.fla" in sys.modules:           # where a test has failed
        sys.modules["margay.drop_ins.fla"].unregister()
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]
    sys.modules.update(hidden)


def flat(results):
    """Of results that may be tuples, those that are not None."""
    return [t for r in results for t in (r if isinstance(r, tuple) else (r,)) if t is not None]
