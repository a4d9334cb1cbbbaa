"""What does a call cost on the host once its kernels are compiled: the first that looks as it does, and a repeated one?

CPU time of calls with CuPy arrays, the least of several rounds. No GPU is needed: the arrays are real, the memory
behind them is not, and allocations, kernels and the device are replaced by what does nothing. On a GPU, CuPy's own work
comes on top for each kernel and each allocation, some microseconds; ``experiments.gpu.launches`` measures it there.
float16; decoding has one query for each of 32 heads, over 8 heads of keys.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tqdm import tqdm

from cupyflash import _launch, _plan, attention, attention_backward
from cupyflash._memo import Memo
from experiments import record
from experiments.experiment import Experiment, Outcome, Row

MOST_MICROSECONDS = 60
FORWARD, BACKWARD = "attention", "attention_backward"


class EmptyGpu:
    """CuPy's part of a call, which does nothing; ``launches`` counts."""

    def __init__(self):
        self.launches = 0
        self._address = 0x7F0000000000

    def array(self, *shape: int, dtype: str = "float16"):
        """A cupy.ndarray at an address where nothing is."""
        import cupy

        memory = cupy.cuda.UnownedMemory(self._address, 1 << 40, None, 0)
        self._address += 1 << 32
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def module(self, *, code: str, options: tuple[str, ...]) -> EmptyGpu:
        """In place of cupy.RawModule."""
        return self

    def get_function(self, name: str) -> Callable[..., None]:
        def kernel(grid, block, arguments, *, shared_mem):
            self.launches += 1

        return kernel

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Calls within take this for the machine's GPU, and remember nothing of others."""
        import cupy

        class Device(contextlib.nullcontext):
            compute_capability = "90"

        memory = self.array(1).data

        def allocated(shape, dtype):
            return cupy.ndarray(shape, dtype, memptr=memory)

        replaced = [
            (cupy.cuda, "Device", Device), (cupy, "RawModule", self.module), (cupy, "empty", allocated),
            (cupy, "zeros", allocated), (_launch, "modules", Memo(64)), (_launch, "kernels", Memo(64)),
            (_plan, "plans", Memo(64)),
        ]  # fmt: skip
        with contextlib.ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


def calls(array: Callable[..., Any]) -> dict[tuple[str, str], Callable[[], Any]]:
    """(function, what is particular) -> call; ``array(*shape, dtype="float16")`` makes its arrays."""
    q, k, v = array(2, 32, 1, 128), array(2, 8, 4096, 128), array(2, 8, 4096, 128)
    out = array(2, 32, 1, 128)
    x = array(2, 8, 512, 64)
    lse, slopes = array(2, 8, 512, dtype="float32"), array(8, dtype="float32")
    bias, table = array(8, 512, 512), array(1023, dtype="float32")
    odd = array(2, 8, 512, 99)[..., 1:]
    causal = {"causal": True, "align": "bottom-right"}
    options = {"bias": bias, "alibi_slopes": slopes}
    expression = {"score_mod": "score + table[i - j + 511]", "aux": {"table": table}}
    return {
        (FORWARD, "decoding"): lambda: attention(q, k, v),
        (FORWARD, "decoding, causal, lse"): lambda: attention(q, k, v, return_lse=True, **causal),
        (FORWARD, "decoding, out given"): lambda: attention(q, k, v, out=out),
        (FORWARD, "decoding, keys in parts"): lambda: attention(q, k, v, split_size=512),
        (FORWARD, "bias, slopes, softcap"): lambda: attention(x, x, x, softcap=30.0, **options),
        (FORWARD, "score_mod"): lambda: attention(x, x, x, **expression),
        (FORWARD, "rows of 196 bytes, misaligned"): lambda: attention(odd, odd, odd),
        (BACKWARD, "causal"): lambda: attention_backward(x, x, x, x, x, lse, causal=True),
        (BACKWARD, "bias, slopes"): lambda: attention_backward(x, x, x, x, x, lse, **options),
    }


def microseconds(call: Callable[[], Any], times: int, rounds: int) -> float:
    """CPU time of this process for one call, the least of some rounds."""
    spent = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(times):
            call()
        spent.append((time.process_time() - start) / times)
    return 1e6 * min(spent)


def measure(times: int, rounds: int) -> list[Row]:
    """A row for each call."""
    gpu = EmptyGpu()
    rows = []
    with gpu.in_use():
        for (function, what), call in tqdm(calls(gpu.array).items(), unit="call"):
            call()
            gpu.launches = 0
            call()
            launches = gpu.launches
            repeated = microseconds(call, times, rounds)
            with mock.patch.object(_plan, "signature", lambda *_: None):  # of a call that looks like no other
                planned = microseconds(call, times, rounds)
            row = {"function": function, "call": what, "launches": launches}
            rows.append(row | {"planned_us": planned, "repeated_us": repeated})
    return rows


def draw(figure, rows: list[Row]) -> None:
    """Two bars for each call."""
    axes = figure.subplots()
    bars = ("planned_us", "planned", -0.2, record.EXTRA), ("repeated_us", "repeated", 0.2, record.OURS)
    for column, label, offset, colour in bars:
        places = [place + offset for place in range(len(rows))]
        axes.barh(places, [row[column] for row in rows], 0.38, color=colour, label=label)
        for place, row in zip(places, rows, strict=True):
            axes.annotate(f"{row[column]:.0f}", (row[column], place), (4, 0), textcoords="offset points",
                          va="center", fontsize=8,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    labels = [f"{'backward: ' if row['function'] == BACKWARD else ''}{row['call']} ({row['launches']})" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylabel("call (kernels)")
    axes.set_xlim(right=1.12 * max(row["planned_us"] for row in rows))
    axes.axvline(MOST_MICROSECONDS, color="black", linewidth=0.8, linestyle="--", label=f"{MOST_MICROSECONDS} us")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("host time of a call, launches left out (CPU us)")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False)


def outcomes(rows: list[Row]) -> list[Outcome]:
    """The longest of each function, and what a plan saves."""
    longest = {
        function: max((row for row in rows if row["function"] == function), key=lambda row: row["repeated_us"])
        for function in (FORWARD, BACKWARD)
    }
    least_saved = min(row["planned_us"] / row["repeated_us"] for row in rows)
    return [
        judge_longest(longest[FORWARD], MOST_MICROSECONDS, "(this project's target)"),
        judge_longest(longest[BACKWARD], 2 * MOST_MICROSECONDS, "(predicted: twice a forward call's)"),
        Outcome(
            "a call that is planned over a repeated one, least",
            "at least 3 (predicted)",
            f"{least_saved:.1f}",
            least_saved >= 3,
            _MACHINE,
        ),
    ]


_MACHINE = "it depends on the machine, and on what else was running"


def judge_longest(row: Row, most: float, source: str) -> Outcome:
    """Of a repeated call."""
    return Outcome(
        f"repeated calls of {row['function']}, longest, us",
        f"at most {most} {source}",
        f"{row['repeated_us']:.0f} ({row['call']}; {row['launches']} kernels)",
        row["repeated_us"] <= most,
        _MACHINE,
    )


EXPERIMENT = Experiment(
    claim="A call that looks like an earlier one costs tens of microseconds on the host, since its plan is kept",
    caption="Host time of calls, planned and repeated, with launches that do nothing.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"times": 200, "rounds": 9},
    quick={"times": 20, "rounds": 3},
    figure_size=(9.0, 5.0),
)
