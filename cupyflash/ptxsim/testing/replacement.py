"""The simulated CuPy in the place of the installed one, for everything that is imported from then on."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ..binding import load_nvrtc
from .namespace import SimulatedModule, simulated_modules

_PACKAGES = ("cupy", "cupyx")


class AlreadyImported(Exception):
    """CuPy was imported before it could be replaced; the message says by which modules."""


class _Finder:
    """Finds CuPy's other modules, too: empty ones, for who imports one may not use it in a test.

    ``from cupyx.profiler import benchmark`` looks for a module if there is no such name, and is told what is lacking.
    """

    @staticmethod
    def find_spec(name, path=None, target=None):
        if not _is_cupy(name):
            return None
        parent, _, _ = name.rpartition(".")
        found = PathFinder.find_spec(name, sys.modules[parent]._directories)
        if found is None:
            raise ModuleNotFoundError(f"{name}: not simulated")
        return ModuleSpec(name, _Loader(found.submodule_search_locations or ()))


class _Loader:
    def __init__(self, directories):
        self.directories = directories

    def create_module(self, spec):
        return SimulatedModule(spec.name, self.directories)

    def exec_module(self, module):
        pass


def replace_cupy():
    """Have ``import cupy`` give the simulated one; return the function that undoes it.

    Raises
    ------
    AlreadyImported
        Where a module outside of CuPy and cupyflash holds something of the installed one.
    CompilerMissing
        Without NVRTC.
    """
    load_nvrtc()  # the binding's own imports of CuPy are of the installed one
    if holders := sorted(set(_holders())):
        raise AlreadyImported(", ".join(holders))
    simulated = simulated_modules()
    installed = {name: module for name, module in sys.modules.items() if _is_cupy(name)}

    def undo():
        sys.meta_path.remove(_Finder)
        for name in [name for name in sys.modules if _is_cupy(name)]:
            del sys.modules[name]
        sys.modules.update(installed)

    for name in installed:
        del sys.modules[name]
    sys.modules.update(simulated)
    sys.meta_path.insert(0, _Finder)
    return undo


def _is_cupy(name):
    return name.split(".")[0] in _PACKAGES


def _holders():
    """Modules that hold a module, a class or an object of the installed CuPy."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in (*_PACKAGES, "cupy_backends", "cupyflash") and isinstance(module, ModuleType):
            contents = object.__getattribute__(module, "__dict__")  # which loads no module that waits to be loaded
            if any(_is_cupy(_origin(value)) for value in list(contents.values())):
                yield name


def _origin(value):
    """The module that a value is, or that its class is of."""
    if isinstance(value, ModuleType):
        return object.__getattribute__(value, "__dict__").get("__name__", "")
    return str((value if isinstance(value, type) else type(value)).__module__)
