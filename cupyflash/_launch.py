"""Where arrays live and how kernels run there: CuPy arrays on their GPU, NumPy arrays in the simulator.

Both devices have the same methods and are given the same source, options, grid, block, shared memory and argument
bytes (addresses aside). A kernel takes one structure, packed here as a NumPy structured scalar. Addresses in it are
unsigned 64-bit fields, and nothing else is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyflash import _source
from cupyflash._config import KernelConfig
from cupyflash._layouts import MAX_BATCH_DIMS, Layout, merge_batch_dims
from cupyflash._memo import Memo

OPTIONS = ("-std=c++17", "-fmad=false")

_BATCH_STRIDES = (np.int64, (MAX_BATCH_DIMS,))
BATCH_SHAPE = np.dtype([("ndim", np.int32), ("size", np.int32, (MAX_BATCH_DIMS,))], align=True)
#: A matrix with unit column stride, per batch (``Operand`` in common.cuh); strides count elements.
OPERAND = np.dtype([("data", np.uint64), ("row_stride", np.int64), ("batch_stride", *_BATCH_STRIDES)], align=True)
#: The same with any column stride (``Matrix`` in attention_naive.cu).
MATRIX = np.dtype(
    [("data", np.uint64), ("row_stride", np.int64), ("column_stride", np.int64), ("batch_stride", *_BATCH_STRIDES)],
    align=True,
)
#: ``VariantParams`` of the plain kernels: an empty structure.
NO_VARIANT = np.dtype([("empty", np.uint8)])
_SIZES = ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "band_left", "band_right")


def _forward_params(*scales: tuple[str, Any], variant: np.dtype) -> np.dtype:
    return np.dtype(
        [
            *((name, OPERAND) for name in ("query", "key", "value", "out")),
            ("lse", np.uint64),
            ("batch", BATCH_SHAPE),
            *((name, np.int32) for name in _SIZES),
            *scales,
            ("variant", variant),
        ],
        align=True,
    )


def flash_fwd_params(variant: np.dtype = NO_VARIANT) -> np.dtype:
    """Parameters of ``flash_fwd``."""
    return _forward_params(*_HALF_SCALES, variant=variant)


def flash_fwd_fma_params(dtype: np.dtype, variant: np.dtype = NO_VARIANT) -> np.dtype:
    """Parameters of ``flash_fwd_fma``: those of ``flash_fwd``, but the scale itself, in the elements' dtype."""
    return _forward_params(("scale", dtype), variant=variant)


#: An operand of a backward kernel, and what it has per query (``SummedOperand`` and ``RowValues`` in common.cuh).
SUMMED_OPERAND = np.dtype(
    [
        ("data", np.uint64),
        ("row_stride", np.int64),
        ("owner_stride", *_BATCH_STRIDES),
        ("reduced_stride", *_BATCH_STRIDES),
    ],
    align=True,
)
FLASH_BWD_DELTA = np.dtype(
    [
        ("out", OPERAND),
        ("dout", OPERAND),
        *((name, np.uint64) for name in ("lse", "dlse", "delta", "lse_log2")),
        ("batch", BATCH_SHAPE),
        *((name, np.int32) for name in ("num_batches", "seqlen_q", "head_dim_v")),
    ],
    align=True,
)
STRIDED_COPY = np.dtype(
    [
        ("source", np.uint64),
        ("target", np.uint64),
        *((f"{array}_{what}_stride", np.int64) for array in ("source", "target") for what in ("row", "column")),
        ("source_batch_stride", *_BATCH_STRIDES),
        ("target_batch_stride", *_BATCH_STRIDES),
        ("batch", BATCH_SHAPE),
        *((name, np.int32) for name in ("num_batches", "rows", "columns")),
    ],
    align=True,
)


def _flash_bwd_params(gradients: tuple[str, ...], lse: str, *scales: tuple[str, Any], variant: np.dtype) -> np.dtype:
    operands = ("query", "key", "value", "dout", *gradients, lse, "delta")
    return np.dtype(
        [
            *((name, SUMMED_OPERAND) for name in operands),
            ("owner", BATCH_SHAPE),
            ("reduced", BATCH_SHAPE),
            *((name, np.int32) for name in ("num_reduced", *_SIZES)),
            *scales,
            ("variant", variant),
        ],
        align=True,
    )


_HALF_SCALES = (("scale_log2", np.float32), ("scale", np.float32))


def flash_bwd_params(*gradients: str, variant: np.dtype = NO_VARIANT) -> np.dtype:
    """Parameters of ``flash_bwd_dkdv`` and ``flash_bwd_dq``."""
    return _flash_bwd_params(gradients, "lse_log2", *_HALF_SCALES, variant=variant)


def flash_bwd_fma_params(dtype: np.dtype, *gradients: str, variant: np.dtype = NO_VARIANT) -> np.dtype:
    """Parameters of ``flash_bwd_dkdv_fma`` and ``flash_bwd_dq_fma``: lse as it is, the scale in the elements' dtype."""
    return _flash_bwd_params(gradients, "lse", ("scale", dtype), variant=variant)


def flash_bwd_dbias_params(base: np.dtype) -> np.dtype:
    """Parameters of ``flash_bwd_dbias`` and ``flash_bwd_dbias_fma``: of the kernels above, and one more."""
    fields = [(name, base[name]) for name in base.names]
    return np.dtype([*fields, ("dbias_column_stride", np.int64)], align=True)


def row_sum_params(*, with_lengths: bool, with_sink: bool) -> np.dtype:
    """Parameters of ``row_sum``."""
    operands = ["values", "result", *["seqlens_q"] * with_lengths, *["lse", "attn_sink"] * with_sink]
    return np.dtype(
        [
            *((name, SUMMED_OPERAND) for name in operands),
            ("owner", BATCH_SHAPE),
            ("reduced", BATCH_SHAPE),
            ("num_reduced", np.int32),
            ("seqlen_q", np.int32),
        ],
        align=True,
    )


def attention_naive_params(scale_dtype: np.dtype) -> np.dtype:
    """Parameters of the three naive kernels; the scale is float64 for float64."""
    sizes = ("num_batches", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "causal_shift")
    return np.dtype(
        [
            *((name, MATRIX) for name in ("query", "key", "value", "out")),
            ("scores", np.uint64),
            ("lse", np.uint64),
            ("batch", BATCH_SHAPE),
            *((name, np.int32) for name in sizes),
            ("scale", scale_dtype),
        ],
        align=True,
    )


#: As SUMMED_OPERAND, with any column stride (``SummedMatrix`` in attention_naive_bwd.cu).
SUMMED_MATRIX = np.dtype(
    [
        ("data", np.uint64),
        ("row_stride", np.int64),
        ("column_stride", np.int64),
        ("owner_stride", *_BATCH_STRIDES),
        ("reduced_stride", *_BATCH_STRIDES),
    ],
    align=True,
)


def attention_naive_bwd_params(scale_dtype: np.dtype) -> np.dtype:
    """Parameters of the five naive kernels of the backward; the scale is float64 for float64."""
    matrices = ("query", "key", "value", "dout", "weights", "dscores", "gradient")
    sizes = ("num_owners", "num_reduced", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "causal_shift")
    return np.dtype(
        [
            *((name, SUMMED_MATRIX) for name in matrices),
            ("dlse", np.uint64),
            ("owner", BATCH_SHAPE),
            ("reduced", BATCH_SHAPE),
            *((name, np.int32) for name in sizes),
            ("scale", scale_dtype),
        ],
        align=True,
    )


_ADDRESS = np.dtype(np.uint64)


@dataclass(frozen=True, eq=False)
class Params:
    """A kernel's argument, with 0 in place of the addresses in it."""

    dtype: np.dtype
    words: np.ndarray  # its bytes, 8 by 8
    places: tuple[int, ...]  # of the addresses among them

    def at(self, addresses: Iterable[int]) -> np.void:
        """The argument with these addresses."""
        words = self.words.copy()
        for place, address in zip(self.places, addresses, strict=True):
            words[place] = address
        return words.view(self.dtype)[0]


def pack(dtype: np.dtype, **fields: Any) -> tuple[Params, tuple[Any, ...]]:
    """A kernel's argument, and the arrays whose addresses it holds.

    A field that is itself a structure is given as a dict, a short array is filled with 0. For an address the array is
    given, or None.
    """
    values = np.zeros(1, dtype)
    pointers: dict[int, Any] = {}
    _fill(values[0], fields, pointers, 0)
    words = values.view(_ADDRESS)
    return Params(dtype, words, tuple(byte // _ADDRESS.itemsize for byte in pointers)), tuple(pointers.values())


def _fill(params: np.void, fields: dict[str, Any], pointers: dict[int, Any], start: int) -> None:
    """Put values into ``params``, which are at byte ``start`` of the argument, and arrays by their byte there."""
    for name, value in fields.items():
        field, offset = params.dtype.fields[name][:2]
        if isinstance(value, dict):
            _fill(params[name], value, pointers, start + offset)
        elif field == _ADDRESS:
            if value is not None:
                pointers[start + offset] = value
        elif isinstance(value, tuple):
            params[name][: len(value)] = value
        else:
            params[name] = value


def batch_shape(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Field values of ``BATCH_SHAPE``."""
    return {"ndim": len(sizes), "size": sizes}


def operands(
    shape: tuple[int, ...], arrays: Mapping[str, Any], layouts: Mapping[str, Layout]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Field values of ``BATCH_SHAPE`` and, for each layout over ``shape``, of ``OPERAND``; no array: address 0."""
    sizes, batch_strides = merge_batch_dims(shape, *(layout.batch_strides for layout in layouts.values()))
    fields = {
        name: {
            "data": arrays.get(name),
            "row_stride": layouts[name].row_stride,
            "batch_stride": strides,
        }
        for name, strides in zip(layouts, batch_strides, strict=True)
    }
    return batch_shape(sizes), fields


class Launch(NamedTuple):
    """One kernel launch, and the arrays whose addresses its parameters hold."""

    config: KernelConfig
    params: Params
    arrays: Sequence[Any]


class Simulator:
    """Runs kernels on NumPy arrays, in place."""

    def __init__(self):
        from cupyflash import ptxsim
        from cupyflash.ptxsim.sanitizer import current_report

        self._ptxsim = ptxsim
        with ptxsim.settings() as current:
            self.arch: str = current.arch
        self.empty = np.empty if current_report() is None else ptxsim.empty
        self.zeros = np.zeros

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *exception) -> None:
        pass

    def from_host(self, array: np.ndarray) -> np.ndarray:
        return array

    def kernel(self, config: KernelConfig) -> Callable[..., None]:
        source = _source.render(config.file, config.defines, config.user_functions)
        with _explained(config, self._ptxsim.CompileError):
            module = modules.get(
                ("ptxsim", self.arch, source), lambda: self._ptxsim.RawModule(code=source, options=OPTIONS)
            )
            kernel = module.get_function(config.name)
        if config.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = config.shared_bytes
        return kernel

    def launch(self, launch: Launch) -> None:
        config = launch.config
        kernel = self.kernel(config)
        params = launch.params.at(array.ctypes.data for array in launch.arrays)
        with self._ptxsim.device_memory(*launch.arrays):
            kernel((config.grid,), (config.block,), (params,), shared_mem=config.shared_bytes)


class Gpu:
    """Runs kernels on CuPy arrays of one device, on the current stream."""

    def __init__(self, device_id: int):
        import cupy

        self._cupy = cupy
        self._device_id = device_id
        try:
            self._device = cupy.cuda.Device(device_id)
            self.arch: str = f"sm_{self._device.compute_capability}"
        except RuntimeError as error:  # CUDARuntimeError, and a driver that is missing or too old
            raise RuntimeError(
                f"q: a cupy.ndarray on device {device_id}, but CuPy finds no usable GPU there ({error}); "
                "NumPy arrays run in the simulator"
            ) from error
        self.empty = cupy.empty
        self.zeros = cupy.zeros

    def __enter__(self) -> Gpu:
        """Make the device current, for allocations and launches."""
        self._device.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self._device.__exit__(*exception)

    def from_host(self, array: np.ndarray):
        return self._cupy.asarray(array)

    def kernel(self, config: KernelConfig) -> Callable[..., None]:
        # Per device: the shared-memory limit is an attribute of the kernel there.
        return kernels.get((self._device_id, config), lambda: self._loaded(config))

    def launch(self, launch: Launch) -> None:
        config = launch.config
        params = launch.params.at(array.data.ptr for array in launch.arrays)
        self.kernel(config)((config.grid,), (config.block,), (params,), shared_mem=config.shared_bytes)

    def _loaded(self, config: KernelConfig) -> Callable[..., None]:
        source = _source.render(config.file, config.defines, config.user_functions)
        module = modules.get(("cupy", None, source), lambda: self._cupy.RawModule(code=source, options=OPTIONS))
        with _explained(config, self._cupy.cuda.compiler.CompileException):
            kernel = module.get_function(config.name)
            if config.shared_bytes:
                kernel.max_dynamic_shared_size_bytes = config.shared_bytes
        return kernel


def device_of(kind: str, array: Any) -> Simulator | Gpu:
    """The device that arrays of this kind and place are computed on."""
    return Simulator() if kind == "numpy" else Gpu(array.device.id)


def run(device: Simulator | Gpu, launches: Iterable[Launch]) -> None:
    """Run the launches in order; an empty grid is skipped, for which CuPy would launch one block.

    Where a user's expression does not compile, none is run.
    """
    launches = [launch for launch in launches if launch.config.grid]
    for launch in launches:
        if launch.config.user_functions:
            device.kernel(launch.config)
    for launch in launches:
        device.launch(launch)


@contextlib.contextmanager
def _explained(config: KernelConfig, error_type: type[Exception]) -> Iterator[None]:
    """What the compiler says of a user's expression is a ValueError."""
    try:
        yield
    except error_type as error:
        explained = config.user_functions and config.user_functions.error(str(error))
        if not explained:
            raise
        raise explained from error


modules = Memo(64)  # one of the simulator takes megabytes; CuPy's are in its cache on the disk, too
kernels = Memo(1024)
