"""What an experiment is, and the catalogue of all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]  # of a CSV: column -> int, float, str, bool or None

CATALOGUE = {
    "What attention costs": (
        "online_softmax",
        "tiling",
        "io_traffic",
        "io_table",
        "intensity",
        "recomputation",
        "memory",
        "sparse_work",
        "dask_chunks",
    ),
    "Whether it can be fast": ("cost_table", "modelled_time", "cold_start", "host_time"),
    "How accurate it is": (
        "bound_audit",
        "fa3_table3",
        "biased_rounding",
        "accumulators",
        "exp_models",
        "stability",
        "reduction_order",
        "backward_delta",
        "fp8_p_range",
        "real_activations",
    ),
    "The simulator": ("simulator_speed", "kernel_debugging"),
}
NAMES = tuple(name for names in CATALOGUE.values() for name in names)


@dataclass(frozen=True)
class Outcome:
    """One number or fact of a claim: what was expected, what came out, and whether that is the same."""

    what: str
    expected: str
    found: str
    holds: bool
    note: str = ""  # how and why it differs; every outcome that does not hold has one

    @property
    def verdict(self) -> str:
        """In words."""
        return "as expected" if self.holds else f"differs: {self.note}".rstrip(": ")


@dataclass(frozen=True)
class Experiment:
    """A claim, how it is measured, drawn and judged. The module's docstring says the rest.

    ``full`` and ``quick`` are the sizes, which ``measure`` takes by name; a command's options are named like them.
    ``draw`` and ``outcomes`` see the rows as they are read back from the CSV, floats with six digits.
    """

    claim: str  # one sentence, with who says so where it is published
    caption: str  # what the figure shows, one sentence
    measure: Callable[..., list[Row]]
    draw: Callable[[Any, list[Row]], None]  # on an empty matplotlib Figure
    outcomes: Callable[[list[Row]], list[Outcome]]
    full: Mapping[str, Any]
    quick: Mapping[str, Any]
    figure_size: tuple[float, float] = (10.0, 5.0)  # inches
    on_gpu: bool = False  # whether measure takes ``backend``, a backends.Backend; else it needs the simulator


def load(name: str) -> Experiment:
    """The experiment of ``experiments/NAME.py``."""
    return importlib.import_module(f"experiments.{name}").EXPERIMENT
