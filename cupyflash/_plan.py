"""Plans: what a call launches but for its arrays, made once for all calls that look the same.

A call looks like another where its :func:`signature` is the same: the shapes, strides, dtypes, alignment and place of
its arrays and the values of its options. Whatever a plan is made of is in there, or the call has no signature, and its
plan is made each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _launch
from cupyflash._arrays import address, array_kind, check_written, cupy_array_type
from cupyflash._block_mask import BlockMask
from cupyflash._config import KernelConfig
from cupyflash._gradients import Gradients
from cupyflash._launch import Gpu, Launch, Params, Simulator
from cupyflash._layouts import CHUNK_BYTES, Placeholder
from cupyflash._memo import Memo
from cupyflash._numerics import Numerics
from cupyflash._problem import OPTIONS, Problem

_OPTIONAL_ARRAYS = ("mask", "bias", "alibi_slopes", "attn_sink")
_READ_ON_HOST = ("seqlens_q", "seqlens_k")
_BY_VALUE = (bool, int, str, Numerics)


@dataclass(frozen=True, eq=False)
class Plan:
    """Launches of a call. Arrays are numbers: the call's arguments, then ``constants``, then those ``made`` for it."""

    launches: tuple[tuple[KernelConfig, Params, tuple[int, ...]], ...]
    constants: tuple[Any, ...]
    made: tuple[Placeholder, ...]
    results: Mapping[str, int]


class Planner:
    """In place of a device while launches are planned: there, arrays are placeholders."""

    def __init__(self, device: Simulator | Gpu, arguments: Mapping[str, Any]):
        self.arch, self.from_host = device.arch, device.from_host
        self.arguments = {name: Placeholder.of(array) for name, array in arguments.items()}
        self._made: list[Placeholder] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Placeholder:
        return self._make(shape, dtype, zeroed=False)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Placeholder:
        return self._make(shape, dtype, zeroed=True)

    def _make(self, shape: tuple[int, ...], dtype: Any, *, zeroed: bool) -> Placeholder:
        self._made.append(Placeholder.contiguous(shape, np.dtype(dtype), zeroed=zeroed))
        return self._made[-1]

    def placed(self, problem: Problem) -> Problem:
        """The problem with placeholders for its arguments."""
        operands = {name: self.arguments.get(name, array) for name, array in problem.operands.items()}
        aux = {name: self.arguments[f"aux[{name!r}]"] for name in problem.aux}
        mask = problem.block_mask and replace(problem.block_mask, bits=self.arguments["mask_mod"])
        return replace(problem, operands=operands, aux=aux, block_mask=mask, inputs={})

    def plan(self, launches: Iterable[Launch], results: Mapping[str, Placeholder]) -> Plan:
        """Of launches whose arrays are placeholders; any other array is a constant of the plan."""
        launches = [launch for launch in launches if launch.config.grid]
        constants = {
            id(array): array for launch in launches for array in launch.arrays if not isinstance(array, Placeholder)
        }
        arrays = (*self.arguments.values(), *constants.values(), *self._made)
        number = {id(array): number for number, array in enumerate(arrays)}
        return Plan(
            tuple((config, params, tuple(number[id(x)] for x in pointers)) for config, params, pointers in launches),
            tuple(constants.values()),
            tuple(self._made),
            {name: number[id(array)] for name, array in results.items()},
        )


class Call(NamedTuple):
    """A call that may be made: its plan, and the arrays that the plan calls its arguments."""

    plan: Plan
    device: Simulator | Gpu
    arguments: Sequence[Any]

    def run(self) -> dict[str, Any]:
        """Its results, by name."""
        plan, device = self.plan, self.device
        with device:
            arrays = [*self.arguments, *plan.constants]
            for like in plan.made:
                make = device.zeros if like.zeroed else device.empty
                arrays.append(make(like.shape, like.dtype))
            _launch.run(
                device,
                [Launch(config, params, [arrays[n] for n in numbers]) for config, params, numbers in plan.launches],
            )
        return {name: arrays[number] for name, number in plan.results.items()}

    def compile(self) -> None:
        """Have its kernels ready."""
        with self.device:
            for config, *_ in self.plan.launches:
                self.device.kernel(config)


plans = Memo(512)


def call(
    kind: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    validated: Callable[[], Problem],
    arrays: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
    planned: Callable[[Problem, Planner], Plan],
) -> Call:
    """A call with a plan that is known, or a new one.

    ``arguments`` and ``options`` are what the user gave. ``arrays`` gives those among it that are read and those that
    are written, and is asked once they are known to be arrays. Where the plan is known, a call that looks the same has
    been validated, and only what differs among such calls is left to check.
    """
    known = signature(kind, arguments, options)
    plan = plans.find(known)
    if plan is None:
        problem = validated()
        read, written = arrays()
        made = new_call(problem, read | written, planned)
        if known is not None:
            plans.keep(known, made.plan)
        return made
    read, written = arrays()
    check_written(written, read)
    return Call(plan, _device_of(read["q"]), (*read.values(), *written.values()))


def new_call(problem: Problem, arrays: Mapping[str, Any], planned: Callable[[Problem, Planner], Plan]) -> Call:
    """A call whose plan is its own; ``arrays`` has q, k, v and what :func:`optional_arrays` finds, by their names."""
    device = _device_of(arrays["q"])
    with device:
        planner = Planner(device, arrays)
        plan = planned(planner.placed(problem), planner)
    return Call(plan, device, tuple(arrays.values()))


def given(**arrays: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


def optional_arrays(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays among a call's options whose elements kernels read, named as messages name them."""
    found = {name: options[name] for name in _OPTIONAL_ARRAYS if options.get(name) is not None}
    aux, mask = options.get("aux"), options.get("mask_mod")
    if isinstance(mask, BlockMask):
        aux = mask.joined_aux(aux)
    found |= {f"aux[{name!r}]": array for name, array in (aux or {}).items()}
    return found | ({"mask_mod": mask.bits} if isinstance(mask, BlockMask) else {})


def _device_of(array: Any) -> Simulator | Gpu:
    return _launch.device_of(array_kind(array, "q"), array)


def signature(kind: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Hashable | None:
    """What the plan of a call follows from, or None where that is more than arrays' looks and options' values.

    Values are told apart that Python calls equal: True, 1 and 1.0, or 0.0 and -0.0.
    """
    if any(options.get(name) is not None for name in _READ_ON_HOST):
        return None
    arch = _launch.device_of("numpy", None).arch if isinstance(arguments["q"], np.ndarray) else None
    values = (*arguments.values(), *{**OPTIONS, **options}.values())  # more of them where a name is no option
    try:
        return kind, arch, *[_part(value) for value in values]
    except (_Unknown, RecursionError):  # the latter where a list holds itself
        return None


class _Unknown(Exception):
    """Of an argument that may be anything."""


def _part(value: Any) -> Hashable:
    """Of a signature."""
    if value is None:
        return None
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is cupy_array_type():
        data = value.data
        return value.shape, value.strides, value.dtype, data.ptr % CHUNK_BYTES, data.device_id
    if kind is np.ndarray:
        return value.shape, value.strides, value.dtype, address(value) % CHUNK_BYTES, None
    if kind is tuple or kind is list:
        return kind, tuple([_part(item) for item in value])
    if kind is dict or kind is MappingProxyType:
        return kind, tuple([(_part(name), _part(item)) for name, item in value.items()])
    if kind is Gradients or kind is BlockMask:
        return kind, tuple([_part(item) for item in vars(value).values()])
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    raise _Unknown
