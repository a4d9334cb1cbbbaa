"""What translated code may name: every public function and constant of these modules, and NumPy's ufuncs as np_*."""

from importlib import import_module

import numpy as np

_MODULES = (
    *("approximations", "exact", "fma", "integer", "numerics"),
    *("atomics", "mbarrier_word", "memory", "printf"),
    *("group", "tensor_core", "warp", "wmma"),
)

NAMESPACE = {"np": np, "where": np.where, "logical_not": np.logical_not}
NAMESPACE |= {f"np_{name}": value for name, value in vars(np).items() if isinstance(value, np.ufunc)}
for _name in _MODULES:
    _module = import_module(f".{_name}", __package__)
    NAMESPACE |= {name: value for name, value in vars(_module).items() if not name.startswith("_")}
