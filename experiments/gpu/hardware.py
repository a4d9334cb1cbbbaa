"""Does a GPU compute what the simulator computes, bit for bit? ``python -m experiments.gpu.hardware kernels``

NVRTC makes PTX of a kernel once, for the architecture of the card. The simulator runs this PTX, with tensor cores as
float32 sums and with the model of the card's, and so does the GPU, whose driver assembles it; there also the machine
code is run that NVRTC makes, as the library does. Every launch begins with the same bytes in memory, and all arrays
that it may touch are compared behind it.

"kernels" are the launches of whole calls (``calls.py``), "instructions" single ones (``instructions.py``), where a
difference is judged by the error that the PTX ISA states. In kernels whose PTX has no approximate instruction and no
tensor-core sums all bits must be equal. Else a difference is judged by those that the simulator has with itself:
between its two models, and with approximations that are off by as much as the ISA allows.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from cupyflash import _launch, _source, ptxsim
from cupyflash._config import compute_capability
from cupyflash._launch import Launch
from experiments.experiment import Row
from experiments.gpu import bits, tables
from experiments.gpu.calls import Call, calls
from experiments.gpu.instructions import BLOCK, INSTRUCTIONS, LANES, Instruction
from experiments.gpu.on_card import Card, Region, regions
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
            try:
                found = device.first_after(kernel(), LANES // BLOCK, BLOCK, arrays)
            except Exception as error:  # of the driver or the compiler
                yield failed(instruction.ptx, error, instruction.kernel, assembler)
                continue
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
        """What a kernel does not write is the same on both, and nothing that it would write."""
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
    if not inexact or apart.one_is_nan or expected.dtype.kind in "iub":
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
