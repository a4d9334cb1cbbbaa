"""Does a GPU compute what the simulator computes, bit for bit? ``python -m experiments.gpu.hardware kernels``

NVRTC makes PTX of a kernel once, for the architecture of the card. The simulator runs this PTX, with tensor cores as
float32 sums and with the model of the card's, and so does the GPU, whose driver assembles it; there also the machine
code is run that NVRTC makes, as the library does. Every launch begins with the same bytes in memory, and all arrays
that it may touch are compared behind it.

"kernels" are the launches of whole calls, "instructions" single ones (``instructions.py``), where a
difference is judged by the error that the PTX ISA states. In kernels whose PTX has no approximate instruction and no
tensor-core sums all bits must be equal. Else a difference is judged by those that the simulator has with itself:
between its two models, and with approximations that are off by as much as the ISA allows.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

import cupyflash
from cupyflash import _launch, _source, naive, ptxsim
from cupyflash._config import compute_capability
from cupyflash._launch import Launch
from experiments.experiment import Row
from experiments.gpu import bits, tables
from experiments.gpu.instructions import BLOCK, INSTRUCTIONS, LANES, Instruction
from experiments.gpu.stopwatch import reason

#: Whose tensor cores a card of this compute capability has; the first that is not less.
TENSOR_CORES = {80: "ampere", 87: "ampere", 89: "ada", 90: "hopper", 121: "blackwell"}
#: What the PTX ISA does not fix to the bit.
_APPROXIMATE = re.compile(r"(?:^|[;{])\s*(?:@!?%\w+ )?(mma|\w+\.approx|div\.full)\b", re.MULTILINE)
#: How much farther than the simulator from itself, for differences are of few elements here.
FACTOR = 4
SAME, APPROXIMATE, FINDING = "same bits", "documented approximation", "finding"
POISON = 0xA5


def models(arch: str) -> tuple[str, ...]:
    """Of tensor cores, in the simulator: the fast one, and that of the architecture."""
    if compute_capability(arch) < min(TENSOR_CORES):
        return ("fp32",)
    own = [name for most, name in TENSOR_CORES.items() if compute_capability(arch) <= most]
    return "fp32", own[0] if own else "blackwell"


def approximations(ptx: str) -> list[str]:
    """Names of the instructions whose results the PTX ISA leaves open.

    >>> approximations(" ex2.approx.ftz.f32 %r1, %r2; // rcp.approx\\n @%p1 mma.sync.aligned.m16n8k16 {%r1")
    ['ex2.approx', 'mma']
    """
    return sorted({found[1] for found in _APPROXIMATE.finditer(ptx)})


# The same memory on the card


@dataclass(frozen=True)
class Region:
    """Bytes of host memory that arrays lie in, and what to do with an address in them."""

    start: int
    host: np.ndarray  # of uint8, the memory itself

    @property
    def stop(self) -> int:
        return self.start + self.host.size


def regions(arrays: Sequence[np.ndarray]) -> list[Region]:
    """What the arrays span, gaps included; what overlaps is one region."""
    spans = sorted(np.lib.array_utils.byte_bounds(array) for array in arrays if array.size)
    merged: list[list[int]] = []
    for low, high in spans:
        if merged and low < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    return [Region(low, _memory(low, high - low)) for low, high in merged]


def _memory(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def moved(array: np.ndarray, memory: Sequence[Region], addresses: Sequence[int]) -> int:
    """Where an array is once each region is at one of the addresses; 0 for one without elements."""
    place = array.__array_interface__["data"][0]
    return next((to + place - x.start for x, to in zip(memory, addresses, strict=True) if x.start <= place < x.stop), 0)


class Card:
    """Runs launches on the GPU, on copies of host memory."""

    def __init__(self, cupy: Any, folder: Path):
        self._cupy, self._folder = cupy, folder
        self.arch = f"sm_{cupy.cuda.Device().compute_capability}"

    def from_ptx(self, ptx: str, name: str) -> Any:
        """A kernel that the driver assembles. One that knows only older PTX is told that it is older.

        What newer versions of the ISA add is not in our kernels; the driver would say so.
        """
        own = re.search(r"^\.version (\d+)\.(\d+)$", ptx, re.MULTILINE)
        for version in _versions_down_from(int(own[1]), int(own[2])):
            text = f"{ptx[: own.start()]}.version {version}{ptx[own.end() :]}"
            path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()}.ptx"
            path.write_text(text)
            try:
                return self._cupy.RawModule(path=str(path)).get_function(name)
            except RuntimeError as error:  # CUDADriverError
                if "UNSUPPORTED_PTX_VERSION" not in str(error):
                    raise
        raise RuntimeError(f"the driver knows no PTX from {own[0].strip('.')} down")

    def from_source(self, source: str, name: str) -> Any:
        """A kernel that NVRTC assembles, as the library has it."""
        return self._cupy.RawModule(code=source, options=_launch.OPTIONS).get_function(name)

    def after(self, kernel: Any, launch: Launch, memory: Sequence[Region]) -> list[np.ndarray]:
        """What the launch leaves in each region, which stays as it is on the host."""
        copies = [self._copied(region) for region in memory]
        addresses = [copy.data.ptr for copy in copies]
        config = launch.config
        if config.shared_bytes:
            kernel.max_dynamic_shared_size_bytes = config.shared_bytes
        params = launch.params.at(moved(array, memory, addresses) for array in launch.arrays)
        kernel((config.grid,), (config.block,), (params,), shared_mem=config.shared_bytes)
        return [copy.get() for copy in copies]

    def _copied(self, region: Region) -> Any:
        """As far from a multiple of 256 bytes as on the host, for kernels that load 16 at a time."""
        misalignment = region.start % 256
        memory = self._cupy.empty(misalignment + region.host.size, np.uint8)[misalignment:]
        memory.set(region.host)
        return memory

    def results(self, kernel: Any, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """The first array as a kernel of one instruction leaves it, for all lanes."""
        copies = [self._cupy.asarray(array.view(np.uint8)) for array in arrays]
        kernel((LANES // BLOCK,), (BLOCK,), tuple(copies))
        return copies[0].get().view(arrays[0].dtype)


def _versions_down_from(major: int, minor: int) -> Iterator[str]:
    """Of the PTX ISA, to that of CUDA 11.4.

    >>> list(_versions_down_from(9, 1))[:4]
    ['9.1', '9.0', '8.9', '8.8']
    """
    while (major, minor) >= (7, 4):
        yield f"{major}.{minor}"
        major, minor = (major, minor - 1) if minor else (major - 1, 9)


# Single instructions


def compare_instructions(device: Card) -> Iterator[Row]:
    """A row for each instruction that the card has, and for mma for each model."""
    have = [x for x in INSTRUCTIONS if x.arch <= compute_capability(device.arch)]
    source = "".join(x.source for x in have)
    ptx = ptxsim.compile_ptx(source, _launch.OPTIONS, device.arch)
    simulated = _simulated(source, device.arch)
    for instruction in have:
        poison = np.zeros(instruction.result.shape, instruction.result.dtype)
        poison.view(np.uint8)[...] = POISON
        arrays = [poison, *instruction.inputs()]
        kernels = {
            "driver": lambda name=instruction.kernel: device.from_ptx(ptx, name),
            "NVRTC": lambda name=instruction.kernel: device.from_source(source, name),
        }
        for assembler, kernel in kernels.items():
            found = device.results(kernel(), arrays)
            for model in models(device.arch) if instruction.is_mma else ("",):
                expected = poison.copy()
                with ptxsim.settings(arch=device.arch, **({"mma": model} if model else {})):
                    kernel_there = simulated.get_function(instruction.kernel)
                    kernel_there((LANES // BLOCK,), (BLOCK,), (expected, *arrays[1:]))
                verdict = judge_instruction(instruction, model, arrays[1], found, expected)
                yield _row(instruction.ptx, instruction.kernel, assembler, model, "result", found, expected, verdict)


def judge_instruction(instruction: Instruction, model: str, operand, found, expected) -> str:
    """By the ISA, which says nothing of the sums of tensor cores; but a model of them claims to be right."""
    apart = bits.difference(found, expected)
    if not apart.differ:
        return SAME
    if apart.one_is_nan:
        return FINDING
    if instruction.is_mma:
        return APPROXIMATE if model == "fp32" else FINDING
    if instruction.allowed is None:
        return FINDING
    differ = (bits.bits_of(found) != bits.bits_of(expected)) & ~np.isnan(expected)
    operand, found, expected = (x[differ] for x in (operand, found, expected))
    with np.errstate(all="ignore"):
        distance = np.abs(found.astype(float) - expected.astype(float))
        within = distance <= instruction.allowed(operand.astype(float), expected)
    return APPROXIMATE if within.all() else FINDING


# Whole kernels


class Comparing(_launch.Simulator):
    """The simulator, which runs every launch on the card, too, and keeps the rows of what differs."""

    def __init__(self, device: Card, call: str):
        with ptxsim.settings(arch=device.arch):
            super().__init__()
        self.device, self.call = device, call
        self.rows: list[Row] = []
        self.empty = self._poisoned

    @staticmethod
    def _poisoned(shape, dtype) -> np.ndarray:
        """What a kernel does not write is the same on both, and no number that it could have written."""
        array = np.empty(shape, dtype)
        array.view(np.uint8)[...] = POISON
        return array

    def launch(self, launch: Launch) -> None:
        config = launch.config
        source = _source.render(config.file, config.defines, config.user_functions)
        ptx = ptxsim.compile_ptx(source, _launch.OPTIONS, self.arch)
        memory = regions(launch.arrays)
        before = [region.host.copy() for region in memory]
        found = self._on_card(launch, memory, {
            "driver": lambda: self.device.from_ptx(ptx, config.name),
            "NVRTC": lambda: self.device.from_source(source, config.name),
        })  # fmt: skip
        inexact = approximations(ptx)
        simulated = {}
        for name, choices in self._variants(inexact):
            for region, content in zip(memory, before, strict=True):
                region.host[...] = content
            with ptxsim.settings(arch=self.arch, **choices):
                super().launch(launch)
            simulated[name] = [region.host.copy() for region in memory]
        for assembler, after in found.items():
            for model in models(self.arch) if "mma" in inexact else models(self.arch)[:1]:
                self._compare(launch, assembler, model, memory, before, after, simulated, inexact)

    def _on_card(self, launch: Launch, memory, kernels: dict[str, Callable[[], Any]]) -> dict[str, list[np.ndarray]]:
        """What each kernel leaves in memory; one that fails is a row."""
        found = {}
        for assembler, kernel in kernels.items():
            try:
                found[assembler] = self.device.after(kernel(), launch, memory)
            except Exception as error:  # of the driver or the compiler: the simulator goes on with the call
                self.rows.append(failed(self.call, error, launch.config.name, assembler))
        return found

    def _variants(self, inexact: list[str]) -> list[tuple[str, dict[str, Any]]]:
        """The last one is what later launches see."""
        own = models(self.arch)[-1]
        variants = [("noise", {"mma": own, "ulp_noise": 2})] if inexact else []
        if "mma" in inexact and own != "fp32":
            variants.append((own, {"mma": own}))
        return [*variants, ("fp32", {"mma": "fp32"})]

    def _compare(self, launch: Launch, assembler, model, memory, before, after, simulated, inexact) -> None:
        """A row for each array that the launch changes, there or here."""
        for number, array in enumerate(launch.arrays):
            if not array.size:
                continue
            own = {name: _view(array, memory, content) for name, content in simulated.items()}
            found, expected, untouched = _view(array, memory, after), own[model], _view(array, memory, before)
            if not any(bits.difference(x, untouched).differ for x in (found, expected)):
                continue
            apart = [bits.difference(x, expected).largest for x in own.values()]
            verdict = judge_kernel(found, expected, inexact, max(apart))
            self.rows.append(
                _row(
                    self.call, launch.config.name, assembler, model if "mma" in inexact else "",
                    f"{number}: {array.dtype} {array.shape}", found, expected, verdict,
                    because=" ".join(inexact), simulated=max(apart),
                )
            )  # fmt: skip


def _view(array: np.ndarray, memory: Sequence[Region], content: Sequence[np.ndarray]) -> np.ndarray:
    """The array, had its region this content."""
    address = array.__array_interface__["data"][0]
    for region, held in zip(memory, content, strict=True):
        if region.start <= address < region.stop:
            view = np.ndarray(array.shape, array.dtype, held, address - region.start, array.strides)
            return np.ascontiguousarray(view)
    raise AssertionError("an array of no region")


def judge_kernel(found: np.ndarray, expected: np.ndarray, inexact: Sequence[str], simulated: float) -> str:
    """``simulated`` is how far the simulator's own results are apart; where they are not, an ulp is allowed."""
    apart = bits.difference(found, expected)
    if not apart.differ:
        return SAME
    if not inexact or apart.one_is_nan or found.dtype.kind != expected.dtype.kind or expected.dtype.kind in "iub":
        return FINDING
    size = np.abs(expected.astype(float))
    largest = size[np.isfinite(size)].max(initial=0)
    ulp = largest * float(ml_dtypes.finfo(expected.dtype).eps)
    infinite = np.isinf(found.astype(float)) != np.isinf(expected.astype(float))
    return FINDING if infinite.any() or apart.largest > FACTOR * max(simulated, ulp) else APPROXIMATE


def _row(call, kernel, assembler, model, array, found, expected, verdict, *, because="", simulated=0.0) -> Row:
    apart = bits.difference(found, expected)
    return {
        "call": call,
        "kernel": kernel,
        "assembled_by": assembler,
        "tensor_cores": model,
        "array": array,
        "elements": apart.elements,
        "differ": apart.differ,
        "largest_ulp": apart.largest_ulp,
        "largest_difference": apart.largest,
        "largest_in_simulator": simulated,
        "one_is_nan": apart.one_is_nan,
        "approximate": because,
        "verdict": verdict,
        "error": "",
    }


def failed(call: str, error: Exception, kernel: str = "", assembler: str = "") -> Row:
    """A comparison that could not be made."""
    nothing = np.zeros(0, np.float32)
    return {**_row(call, kernel, assembler, "", "", nothing, nothing, FINDING), "error": reason(error)}


@functools.cache
def _simulated(source: str, arch: str) -> ptxsim.RawModule:
    with ptxsim.settings(arch=arch):
        return ptxsim.RawModule(code=source, options=_launch.OPTIONS)


@dataclass(frozen=True)
class Call:
    """A call of the library, with normal inputs: every launch of it is compared."""

    name: str
    run: Callable[[], Any]
    dtype: str = "float16"


def calls() -> list[Call]:
    """From the plain kernels to those of options; together they launch every kernel of the catalogue."""
    plain = [
        ("float16", 128, False), ("bfloat16", 64, True), ("float32", 64, True), ("float64", 64, False),
        ("float16", 256, True),
    ]  # fmt: skip
    found = [
        Call(f"{dtype}, head_dim {head_dim}{', causal' * causal}", _plain(dtype, head_dim, causal), dtype)
        for dtype, head_dim, causal in plain
    ]
    for dtype in "float16", "float32":
        found += [
            Call(f"standard method, {dtype}", _plain(dtype, 32, True, naive), dtype),
            Call(f"options and their gradients, {dtype}", _options(dtype), dtype),
            Call(f"split keys, {dtype}", _forward(dtype, split_size=128), dtype),
            Call(f"rows that are no whole chunks, {dtype}", _forward(dtype, head_dim=37), dtype),
        ]
    return found


def _inputs(dtype: str, head_dim: int, seqlen: int = 150) -> list[np.ndarray]:
    """q with two heads, k and v with one: more than a tile of queries and of keys, and a part of one."""
    rng = np.random.default_rng(head_dim)
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return [rng.standard_normal((1, heads, seqlen, head_dim)).astype(dtype) for heads in (2, 1, 1)]


def _plain(dtype: str, head_dim: int, causal: bool, library=cupyflash) -> Callable[[], Any]:
    def run():
        q, k, v = _inputs(dtype, head_dim)
        out, lse = library.attention(q, k, v, causal=causal, return_lse=True)
        library.attention_backward(q[..., ::-1, :].copy(), q, k, v, out, lse, causal=causal)

    return run


def _forward(dtype: str, head_dim: int = 64, **options) -> Callable[[], Any]:
    return lambda: cupyflash.attention(*_inputs(dtype, head_dim), return_lse=True, **options)


def _options(dtype: str) -> Callable[[], Any]:
    def run():
        q, k, v = _inputs(dtype, 32)
        rng = np.random.default_rng(0)
        options = {
            "causal": True,
            "softcap": 5.0,
            "bias": rng.standard_normal((2, 150, 150)).astype(q.dtype),
            "alibi_slopes": rng.random(2).astype(np.float32),
            "attn_sink": rng.standard_normal(2).astype(np.float32),
            "dropout_p": 0.25,
            "seed": 3,
        }
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
        cupyflash.attention_backward(q[..., ::-1, :].copy(), q, k, v, out, lse, **options)

    return run


def compare_kernels(device: Card, chosen: Sequence[Call] | None = None) -> Iterator[Row]:
    """The rows of every launch of every call; a call that fails is one row, and the others go on."""
    for call in calls() if chosen is None else chosen:
        if call.dtype == "bfloat16" and compute_capability(device.arch) < 80:
            continue
        comparing = Comparing(device, call.name)
        try:
            with mock.patch.object(_launch, "device_of", lambda kind, array, own=comparing: own):
                call.run()
        except Exception as error:  # of the driver, the compiler or the simulator: a finding, too
            comparing.rows.append(failed(call.name, error))
        yield from comparing.rows


COMPARISONS = {"instructions": compare_instructions, "kernels": compare_kernels}


def measure(cupy: Any, args: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of one of the comparisons."""
    with tempfile.TemporaryDirectory(prefix="cupyflash-") as folder:
        for row in COMPARISONS[args.what](Card(cupy, Path(folder))):
            yield [row]


def summary(rows: Sequence[Row]) -> str:
    """In one line, and the findings in one each."""
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (SAME, APPROXIMATE, FINDING)}
    findings = dict.fromkeys(
        f"  {row['call']}: {row['kernel']} {row['error']}".rstrip() for row in rows if row["verdict"] == FINDING
    )
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return "\n".join([*findings, f"{len(rows)} comparisons: {said}"])


def main(arguments: list[str] | None = None) -> int:
    """Write a row for each comparison; the status is 1 where one could not be made."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.hardware", description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=COMPARISONS)
    return tables.main(
        parser,
        arguments,
        lambda args: f"hardware_{args.what}.csv",
        measure,
        summary,
        lambda rows: any(row["error"] for row in rows),
    )


if __name__ == "__main__":
    sys.exit(main())
