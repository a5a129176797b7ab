"""Modules that stand under the names of other packages."""

import contextlib
import importlib.machinery
import sys
import types

from margay.drop_ins.switch import Switch


def stand_in(name, contents, doc, version, is_package=False):
    """A module of this name with {name: object}. A package finds no modules but those that stand there too."""
    module = types.ModuleType(name, doc)
    module.__dict__.update(contents, __version__=version)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    return module


def of_module(name, source, version, is_package=False):
    """One with all public names of a module."""
    return stand_in(name, {name: getattr(source, name) for name in source.__all__}, source.__doc__, version, is_package)


class StandIns(Switch):
    """Lets imports find these modules, and nothing else of their packages, until `disable()`."""

    def __init__(self, *modules):
        super().__init__(self._remove)
        self._packages = {module.__name__.split(".")[0] for module in modules}
        self._hidden = self._take()
        for module in modules:
            sys.modules[module.__name__] = module
            parent, _, name = module.__name__.rpartition(".")
            if parent:
                setattr(sys.modules[parent], name, module)

    @contextlib.contextmanager
    def lifted(self):
        """Imports find what was there before."""
        standing = self._take()
        sys.modules.update(self._hidden)
        try:
            yield
        finally:
            self._hidden = self._take()
            sys.modules.update(standing)

    def _remove(self):
        self._take()
        sys.modules.update(self._hidden)

    def _take(self):
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in self._packages}
