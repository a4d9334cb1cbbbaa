"""`cupy.random` of the simulated device: NumPy's generators, so the numbers of a seed are not those of a GPU."""

import cupy
import numpy as np

from .array import computed_by, on_device

_NATIVE_DTYPE = {  # methods of NumPy's that take a dtype; CuPy has it for others, too
    np.random.RandomState: {"randint"},
    np.random.Generator: {"integers", "random", "standard_exponential", "standard_gamma", "standard_normal"},
}


_OF_CUPY = {  # CuPy's methods; it imports its Generator, with cuRAND, when somebody asks for it
    np.random.RandomState: dir(cupy.random.RandomState),
    np.random.Generator: (
        "beta",
        "binomial",
        "chisquare",
        "dirichlet",
        "exponential",
        "f",
        "gamma",
        "geometric",
        "hypergeometric",
        "integers",
        "logseries",
        "poisson",
        "power",
        "random",
        "standard_exponential",
        "standard_gamma",
        "standard_normal",
        "uniform",
    ),
}


class Drawing:
    """What draws numbers: the methods that CuPy's and NumPy's generators have in common."""

    def __init__(self, generator):
        self._generator = generator

    def __getattr__(self, name):
        kind = type(self._generator)
        if name.startswith("_") or name not in _OF_CUPY[kind] or not hasattr(kind, name):
            raise AttributeError(f"cupy.random.{kind.__name__}.{name}: not simulated", name=name, obj=self)
        method = getattr(self._generator, name)
        compute = computed_by(method)
        if name in _NATIVE_DTYPE[kind]:
            return compute

        def draw(*args, dtype=None, **kwargs):
            drawn = compute(*args, **kwargs)
            if isinstance(drawn, int | float):
                drawn = on_device(np.asarray(drawn))
            return drawn if dtype is None else drawn.astype(dtype)

        return draw


def random_state(seed=None):
    return Drawing(np.random.RandomState(seed))


def default_rng(seed=None):
    return Drawing(np.random.default_rng(seed))


_shared = random_state()  # that of the functions, as CuPy's is apart from NumPy's

RANDOM = {
    **{name: getattr(_shared, name) for name in dir(cupy.random) if callable(getattr(_shared, name, None))},
    **dict.fromkeys(("random", "ranf", "sample"), _shared.random_sample),
    "RandomState": random_state,
    "default_rng": default_rng,
}
