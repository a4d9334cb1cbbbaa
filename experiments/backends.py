"""Where an experiment calls cupyflash: both take NumPy arrays and give NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Simulator:
    """NumPy arrays in the simulator."""

    name = "sim"

    def call(self, function: Callable, *arrays, **options) -> Any:
        """``function`` of cupyflash."""
        return function(*arrays, **options)


class Gpu:
    """CuPy arrays on the current GPU."""

    name = "gpu"

    def __init__(self):
        import cupy

        cupy.cuda.Device().compute_capability  # raises where there is none  # noqa: B018
        self._cupy = cupy

    def call(self, function: Callable, *arrays, **options) -> Any:
        """``function`` of cupyflash on copies of the arrays, those among its options too."""
        results = function(*map(self._sent, arrays), **{name: self._sent(value) for name, value in options.items()})
        return tuple(map(self._received, results)) if isinstance(results, tuple) else self._received(results)

    def _sent(self, value):
        if isinstance(value, dict):
            return {name: self._sent(item) for name, item in value.items()}
        return self._cupy.asarray(value) if isinstance(value, np.ndarray) else value

    def _received(self, value):
        return value.get() if isinstance(value, self._cupy.ndarray) else value


Backend = Simulator | Gpu
BACKENDS = {"sim": Simulator, "gpu": Gpu}
