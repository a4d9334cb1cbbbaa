"""What does a tile cost in machine code, and which part of a multiprocessor (SM) is busy longest? No GPU is needed.

Every tensor-core kernel is compiled to machine code as CuPy would, for each head_dim and architecture. Of the loop over
tiles that carry no mask, the disassembly (``sass``) gives the issue slots for each HMMA, the tensor-core product of
16 x 8 x 16, and the instructions of each unit; the simulator runs one block over a tile more and gives the products and
the turns of shared memory (wavefronts) that this takes. Work over rate is the least number of cycles that a tile keeps
each unit busy: the units work side by side, so the longest of these is a lower bound, and how far the others stay below
the tensor cores says how much room is left for what no such table knows, latency and waiting.

Units of machine code, as Nsight Compute's documentation assigns instructions: float (FFMA, FMUL, FADD, IMAD), ALU
(integers, logic, comparisons, minimum and maximum, packed conversions to float16), exp (MUFU). ``least_*`` are the same
by ``cupyflash.ptxsim.cost_model``, of what any assembler must keep of the PTX. Rates are those of
``cupyflash.ptxsim.devices``; from sm_90 on its tensor cores are those of instructions that these kernels do not use.
The code depends on the version of NVRTC, which the table names.

float16; slots with every rescaling done, and at rest, with none.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

import cupyflash
from cupyflash import _backward_config, _config, _source, ptxsim
from cupyflash._cli.compiled import cubin
from cupyflash._config import KernelConfig
from cupyflash._problem import Problem, attention_problem
from cupyflash.ptxsim.devices import DEVICES, SCHEDULERS, Device
from cupyflash.ptxsim.occupancy import occupancy
from experiments import record, sass
from experiments.experiment import Experiment, Outcome, Row
from experiments.parallel import measure_all

FORWARD, DKDV, DQ = KERNELS = "flash_fwd", "flash_bwd_dkdv", "flash_bwd_dq"
PRODUCTS = {FORWARD: 2, DKDV: 4, DQ: 3}  # of a tile of queries and one of keys
BACKWARD_PRODUCTS = 5  # S, dP, dQ, dK, dV; kernels that share none compute S and dP more than once
NO_MASK, CAUSAL = MASKS = "none", "causal"
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
BOARDS = ("A100", "RTX A6000", "RTX 4090", "L40S", "H100", "B200", "RTX 5090", "RTX PRO 6000")

FLOAT = {"FFMA", "FMUL", "FADD", "IMAD"}
EXP = {"MUFU"}
ALU = set(
    "F2FP FMNMX FMNMX3 FSEL FSETP IADD IADD3 IABS IMNMX ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P SEL SHF VIADD VIADDMNMX "
    "VIMNMX VIMNMX3".split()
)
ELSEWHERE = set(  # tensor cores, memory, and the scheduler alone; so are those of the scalar unit, which begin with U
    "HMMA LDSM LDS STS LDGSTS LDGDEPBAR LDL STL LDC LDCU SHFL DEPBAR BAR BRA BSSY BSYNC CALL NOP S2R S2UR R2UR VOTE "
    "WARPSYNC CS2R SYNCS".split()
)
UNITS = ("tensor", "shared", "issue", "float", "alu", "exp")  # columns *_cycles
MODELLED = {"shared": "shared memory", "issue": "issue", "float": "FP32", "alu": "ALU", "exp": "MUFU"}

# What is to be reached, by head_dim: issue slots for each HMMA on sm_80.
FORWARD_SLOTS = {64: 4.3, 128: 3.45, 256: 3.2}
FORWARD_SLOTS_AT_REST = {128: 3.0}
BACKWARD_SLOTS = {64: 5.0, 128: 4.2}
LARGEST_STACK = 32  # bytes of a thread
LARGEST_SHARE = 0.8  # of the tensor cores' cycles, of any other unit on an A100, forward
SHARE_HEAD_DIMS = (64, 128)
HOPPER_WITHIN = 0.05


@dataclass(frozen=True)
class Case:
    """One kernel as it is compiled."""

    kernel: str
    head_dim: int
    mask: str
    arch: str

    @cached_property
    def config(self) -> KernelConfig:
        """Constants and shared memory, which no length changes."""
        problem = problem_of(self.head_dim, self.mask)
        if self.kernel == FORWARD:
            return _config.forward(problem, self.arch)
        if self.kernel == DQ:
            return _backward_config.dq(problem, self.arch, 1)
        return _backward_config.dkdv(problem, self.arch, 1, with_dkey=True, with_dvalue=True)

    @property
    def source(self) -> str:
        return _source.render(self.config.file, self.config.defines, self.config.user_functions)


def problem_of(head_dim: int, mask: str = NO_MASK) -> Problem:
    """Of one query and one key."""
    operand = np.empty((1, head_dim), np.float16)
    return attention_problem(operand, operand, operand, causal=mask == CAUSAL)


def cases(kernels: list[str], head_dims: list[int], masks: list[str], archs: list[str]) -> list[Case]:
    """All that is compiled."""
    return [Case(*case) for case in itertools.product(kernels, head_dims, masks, archs)]


def measure(kernels: list[str], head_dims: list[int], masks: list[str], archs: list[str]) -> list[Row]:
    """Rows of each board of an architecture."""
    found = measure_all(rows_of, cases(kernels, head_dims, masks, archs), work=lambda case: case.head_dim)
    return [row for rows in found for row in rows]


def rows_of(case: Case) -> list[Row]:
    """What the code says, what the simulator counts, and both as cycles of each board."""
    config = case.config
    kernel = sass.read(cubin(case.source, case.arch))[config.name]
    loop, needs = kernel.interior_loop, kernel.resources
    fit = occupancy(case.arch, config.block, needs.registers, needs.static_shared_bytes + config.shared_bytes)
    fewer, more = (one_block(case, tiles) for tiles in (1, 2))
    warps = config.block // 32
    row = {
        "kernel": case.kernel,
        "head_dim": case.head_dim,
        "mask": case.mask,
        "arch": case.arch,
        "block_m": config.defines["BLOCK_M"],
        "block_n": config.defines["BLOCK_N"],
        "warps": warps,
        "registers": needs.registers,
        "stack_bytes": needs.stack_bytes,
        "shared_bytes": needs.static_shared_bytes + config.shared_bytes,
        "blocks_per_sm": fit.blocks,
        "occupancy_limited_by": " and ".join(fit.limited_by),
        "slots": loop.slots,
        "rescaling_slots": loop.rescaling,
        "hmma": loop.hmma,
        "slots_per_hmma": loop.slots_per_hmma,
        "slots_per_hmma_at_rest": loop.least_slots_per_hmma,
        "local_in_loop": loop.local,
        "local_elsewhere": kernel.local_elsewhere,
        "hmma_counted": (more.mma_flops - fewer.mma_flops) / (2 * 16 * 8 * 16 * warps),
        "wavefronts": more.shared_wavefronts - fewer.shared_wavefronts,
        "ideal_wavefronts": more.shared_ideal_wavefronts - fewer.shared_ideal_wavefronts,
        "excess_wavefronts_elsewhere": fewer.shared_wavefronts - fewer.shared_ideal_wavefronts,
    }
    return [
        {**row, "device": name, **cycles(loop, warps, DEVICES[name], fewer, more)}
        for name in BOARDS
        if DEVICES[name].arch == case.arch
    ]


def one_block(case: Case, tiles: int) -> ptxsim.KernelProfile:
    """What one block does that walks over so many tiles without a mask, and over as many with one as it must.

    Scores grow from tile to tile, so that the forward rescales in each.
    """
    block_m, block_n = case.config.defines["BLOCK_M"], case.config.defines["BLOCK_N"]
    owns_keys = case.kernel == DKDV
    seqlen_q = block_n + tiles * block_m if owns_keys else block_m
    seqlen_k = block_n if owns_keys else block_m + tiles * block_n
    options = {"causal": True, "align": "top-left" if owns_keys else "bottom-right"} if case.mask == CAUSAL else {}
    rng = np.random.default_rng(0)
    q, dout, out, dq = (rng.standard_normal((seqlen_q, case.head_dim)).astype(np.float16) for _ in range(4))
    k, v, dk, dv = (rng.standard_normal((seqlen_k, case.head_dim)).astype(np.float16) for _ in range(4))
    k *= (1 + np.arange(seqlen_k) // block_n)[:, None].astype(np.float16)
    with ptxsim.settings(arch=case.arch), ptxsim.profile() as profile:
        if case.kernel == FORWARD:
            cupyflash.attention(q, k, v, out=out, **options)
        else:
            lse = np.full(seqlen_q, 20, np.float32)  # counts depend on no value
            cupyflash.attention_backward(dout, q, k, v, out, lse, grads_out=(dq, dk, dv), **options)
    (found,) = (kernel for kernel in profile.kernels if kernel.module.code == case.source)
    return found


def cycles(
    loop: sass.MainLoop, warps: int, device: Device, fewer: ptxsim.KernelProfile, more: ptxsim.KernelProfile
) -> Row:
    """Of a tile, on one SM: each unit's, and how many the model says at least."""
    lanes = 32 * warps
    before, after = (kernel.lower_bound(device.name).resources for kernel in (fewer, more))  # of the one block that ran
    counts = {"float": 0, "alu": 0, "exp": 0}
    for name, count in loop.names.items():
        unit = unit_of(name)
        if unit:
            counts[unit] += count
    least = {unit: after[name] - before[name] for unit, name in MODELLED.items()}
    found = {
        "tensor": loop.hmma * warps * 16 * 8 * 16 / device.tensor_f16,
        "shared": more.shared_wavefronts - fewer.shared_wavefronts,
        "issue": loop.slots * warps / SCHEDULERS,
        "float": counts["float"] * lanes / device.fp32,
        "alu": counts["alu"] * lanes / device.alu,
        "exp": counts["exp"] * lanes / device.mufu,
    }
    return {
        **{f"{unit}_cycles": found[unit] for unit in UNITS},
        **{f"least_{unit}_cycles": least[unit] for unit in MODELLED},
        "busiest_beside_tensor": max(UNITS[1:], key=found.get),
        "share_of_tensor": max(found[unit] for unit in UNITS[1:]) / found["tensor"],
    }


def unit_of(name: str) -> str | None:
    """The unit whose rate an opcode takes up beside an issue slot; None for those that have rows of their own."""
    for unit, names in ("float", FLOAT), ("alu", ALU), ("exp", EXP):
        if name in names:
            return unit
    if name in ELSEWHERE or name.startswith("U"):
        return None
    raise sass.SassError(f"{name}: no unit is known for it")


def draw(figure, rows: list[Row]) -> None:
    """Slots for each HMMA at the left; at the right the busiest unit beside the tensor cores, on each board."""
    slots, shares = figure.subplots(1, 2, width_ratios=(1, 1.25), sharey=True)
    rows = [row for row in rows if row["mask"] == NO_MASK] or rows
    kinds = list(dict.fromkeys((row["kernel"], row["head_dim"]) for row in rows))
    labels = [f"{kernel.removeprefix('flash_')} {head_dim}" for kernel, head_dim in kinds]
    draw_slots(slots, rows, kinds)
    draw_shares(shares, rows, kinds)
    slots.set_yticks(range(len(kinds)), labels)
    slots.set_ylim(len(kinds) - 0.4, -0.6)
    slots.set_ylabel("kernel, head_dim")


def draw_slots(axes, rows: list[Row], kinds: list[tuple[str, int]]) -> None:
    """A marker for each architecture; targets as lines."""
    archs = list(dict.fromkeys(row["arch"] for row in rows))
    for n, (arch, marker) in enumerate(zip(archs, "os^vDP", strict=False)):
        those = {(row["kernel"], row["head_dim"]): row for row in rows if row["arch"] == arch}
        places = [(kinds.index(kind) + 0.11 * (n - (len(archs) - 1) / 2), row) for kind, row in those.items()]
        y = [place for place, _ in places]
        colour = record.COLOURS[n]
        axes.plot([row["slots_per_hmma"] for _, row in places], y, marker, color=colour, markersize=5, label=arch)
        rescaling = [(place, row) for place, row in places if row["rescaling_slots"]]
        x = [row["slots_per_hmma_at_rest"] for _, row in rescaling]
        axes.plot(x, [place for place, _ in rescaling], marker, color=colour, markersize=5, markerfacecolor="white")
    for head_dim, target in FORWARD_SLOTS.items():
        if (FORWARD, head_dim) in kinds:
            place = kinds.index((FORWARD, head_dim))
            axes.plot([target] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2)
    axes.set_xlabel("issue slots per HMMA (16 x 8 x 16)")
    axes.set_title("Interior loop; open: at rest, rescaling nothing;\nbar: target, sm_80", fontsize=11)
    axes.legend(fontsize=9, loc="lower right")


def draw_shares(axes, rows: list[Row], kinds: list[tuple[str, int]]) -> None:
    """A cell for each kernel and board; the unit that is busiest nearly everywhere is named once."""
    (usual, _), *others = Counter(row["busiest_beside_tensor"] for row in rows).most_common()
    boards = [name for name in BOARDS if any(row["device"] == name for row in rows)]
    shares = np.full((len(kinds), len(boards)), np.nan)
    for row in rows:
        place = kinds.index((row["kernel"], row["head_dim"])), boards.index(row["device"])
        shares[place] = row["share_of_tensor"]
        dark = row["share_of_tensor"] < 1.2
        unit = row["busiest_beside_tensor"]
        text = f"{row['share_of_tensor']:.0%}" + f"\n{unit}" * (unit != usual)
        axes.text(*place[::-1], text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.imshow(np.log(shares), cmap="viridis", vmin=np.log(0.1), vmax=np.log(4), aspect="auto")
    axes.set_xticks(range(len(boards)), [f"{name}\n{DEVICES[name].arch}" for name in boards], fontsize=8, rotation=30)
    axes.set_xlabel("card, architecture")
    axes.grid(visible=False)
    axes.tick_params(axis="y", labelleft=False)
    axes.set_title(
        "Busiest unit beside the tensor cores, in percent of their cycles for a tile:\n"
        f"{MODELLED[usual]}{', unless the cell names another' if others else ' everywhere'}\n"
        "(H100, B200: at a rate that mma.sync does not reach)",
        fontsize=11,
    )


def outcomes(rows: list[Row]) -> list[Outcome]:
    """The targets, as far as the table has what they are about."""
    hmma = sum(row["hmma"] == row["hmma_counted"] for row in rows)
    found = [
        Outcome(
            "HMMA of the loop read from machine code, and products of a tile counted in the simulator",
            "equal (computed)",
            f"equal in {hmma} of {len(rows)}",
            hmma == len(rows),
        ),
        *slots_outcomes(rows),
        *memory_outcomes(rows),
    ]
    conflicts = sum(row["wavefronts"] - row["ideal_wavefronts"] + row["excess_wavefronts_elsewhere"] for row in rows)
    found.append(
        Outcome(
            "wavefronts of shared memory beyond the ideal, all kernels",
            "0: no bank conflicts (predicted)",
            str(conflicts),
            not conflicts,
        )
    )
    return [*found, *share_outcomes(rows)]


def largest(rows: list[Row], column: str, **wanted) -> float | None:
    """Of the rows with these values; None without such rows."""
    values = [row[column] for row in rows if all(row[name] == value for name, value in wanted.items())]
    return max(values, default=None)


def slots_outcomes(rows: list[Row]) -> list[Outcome]:
    """Forward and backward, the larger of both masks."""
    found = []
    for column, targets, how in (
        ("slots_per_hmma", FORWARD_SLOTS, ""),
        ("slots_per_hmma_at_rest", FORWARD_SLOTS_AT_REST, " at rest"),
    ):
        for head_dim, most in targets.items():
            value = largest(rows, column, kernel=FORWARD, head_dim=head_dim, arch="sm_80")
            if value is not None:
                found.append(at_most(f"forward, head_dim {head_dim}, sm_80: issue slots per HMMA{how}", most, value))
    for head_dim, most in BACKWARD_SLOTS.items():
        parts = [
            (PRODUCTS[kernel], largest(rows, "slots_per_hmma", kernel=kernel, head_dim=head_dim, arch="sm_80"))
            for kernel in (DKDV, DQ)
        ]
        if all(value is not None for _, value in parts):
            value = sum(times * value for times, value in parts) / BACKWARD_PRODUCTS
            what = f"backward, head_dim {head_dim}, sm_80: slots of both kernels per HMMA of the five products"
            found.append(at_most(what, most, value))
    hopper = {head_dim: (hopper_ratio(rows, head_dim)) for head_dim in FORWARD_SLOTS}
    hopper = {head_dim: ratio for head_dim, ratio in hopper.items() if ratio is not None}
    if hopper:
        found.append(
            Outcome(
                f"forward, slots of sm_90 over those of sm_80, head_dim {', '.join(map(str, hopper))}",
                f"at most {1 + HOPPER_WITHIN:g} (predicted)",
                ", ".join(f"{ratio:.3f}" for ratio in hopper.values()),
                max(hopper.values()) <= 1 + HOPPER_WITHIN,
                _CHAOTIC,
            )
        )
    return found


def hopper_ratio(rows: list[Row], head_dim: int) -> float | None:
    """Slots of sm_90 over those of sm_80."""
    values = [
        largest(rows, "slots_per_hmma", kernel=FORWARD, head_dim=head_dim, arch=arch) for arch in ("sm_90", "sm_80")
    ]
    return None if None in values else values[0] / values[1]


_CHAOTIC = "how registers are assigned changes with every detail of the source and with NVRTC's version"


def at_most(what: str, most: float, value: float, note: str = _CHAOTIC) -> Outcome:
    """A target of this project; the number of digits is that of the target."""
    return Outcome(what, f"at most {most:g} (this project's target)", f"{value:.2f}", round(value, 2) <= most, note)


def memory_outcomes(rows: list[Row]) -> list[Outcome]:
    """Spills: none in the loop, little elsewhere."""
    spilling = [row for row in rows if row["local_in_loop"]]
    larger = [row for row in rows if row["stack_bytes"] > LARGEST_STACK]
    return [
        Outcome(
            "kernels with local memory in the interior loop, of all of the table",
            "none (this project's target)",
            named(spilling, "local_in_loop", "instructions"),
            not spilling,
            _CHAOTIC,
        ),
        Outcome(
            "stack of a thread, largest",
            f"at most {LARGEST_STACK} bytes (this project's target)",
            named(larger, "stack_bytes", "bytes") if larger else f"{max(row['stack_bytes'] for row in rows)} bytes",
            not larger,
            _CHAOTIC,
        ),
    ]


def named(rows: list[Row], column: str, unit: str) -> str:
    """Kernels and how much each has."""
    each = {
        f"{row['kernel']} {row['head_dim']} {row['arch']}{' causal' * (row['mask'] == CAUSAL)}": row[column]
        for row in rows
    }
    return "; ".join(f"{kernel}: {value} {unit}" for kernel, value in each.items()) or "none"


def share_outcomes(rows: list[Row]) -> list[Outcome]:
    """The forward on an A100."""
    found = []
    for head_dim in SHARE_HEAD_DIMS:
        those = [row for row in rows if (row["kernel"], row["head_dim"], row["device"]) == (FORWARD, head_dim, "A100")]
        if those:
            row = max(those, key=lambda row: row["share_of_tensor"])
            share = row["share_of_tensor"]
            found.append(
                Outcome(
                    f"forward, head_dim {head_dim}, A100: cycles of the busiest unit beside the tensor cores",
                    f"at most {LARGEST_SHARE:.0%} of theirs (this project's target)",
                    f"{share:.0%}, {row['busiest_beside_tensor']}",
                    share <= LARGEST_SHARE,
                    "that unit has more to do for each product than the tile sizes leave room for",
                )
            )
    return found


EXPERIMENT = Experiment(
    claim="The forward's machine code leaves the tensor cores of an A100 room: 4.4, 3.4 and 3.0 issue slots for an "
    "HMMA at head_dim 64, 128 and 256, no local memory in its loop, no bank conflicts, and at head_dim 64 and 128 no "
    "other unit that works for more than 80 % of their time (at 256 shared memory is the limit); the backward has "
    "limits of its own ([how to read it](speed.md))",
    caption="Left, issue slots for each tensor-core instruction in all loops over tiles; right, how long the busiest "
    "other unit of a multiprocessor works for a tile, in percent of the tensor cores' cycles: above 100 % it is the "
    "limit. Counted in machine code and in the simulator, not measured; a lower bound.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"kernels": [*KERNELS], "head_dims": [64, 96, 128, 256], "masks": [*MASKS], "archs": [*ARCHS]},
    quick={"kernels": [FORWARD], "head_dims": [64], "masks": [NO_MASK], "archs": ["sm_80"]},
    figure_size=(13.0, 7.0),
)
