"""A kernel's profile laid out for reading: source lines with what they cost, and the bounds of several devices."""

import dataclasses

from ..devices import BOUNDED
from ..errors import CompileError, CompilerMissing
from ..occupancy import known
from .sources import line_texts


@dataclasses.dataclass(frozen=True)
class Cell:
    """One number of a line: its text, a note beside it, how long its bar is (0 to 1), and whether to warn."""

    text: str = ""
    note: str = ""
    bar: float = 0.0
    warns: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A source line with its cells, or, where `number` is None, a gap of `skipped` lines."""

    number: int | None
    text: str = ""
    cells: tuple = ()
    skipped: int = 0


def columns(kernel):
    """Headings of the columns that this kernel has numbers for, each with a function from a line to its Cell."""
    found = [("warp instructions", _instructions), ("lanes", _lanes)]
    if any(_sectors(line) for line in kernel.lines):
        found.append(("global sectors", _global))
    if any(line.shared_wavefronts for line in kernel.lines):
        found.append(("shared wavefronts", _shared))
    return [(heading, make(kernel)) for heading, make in found]


LEGEND = (
    "Bars compare lines. Red: under 90 % of the lanes active or of the sectors useful, or over 1.1 times the ideal "
    "wavefronts (bank conflicts); blue: none of these."
)


def annotated(kernel, most=None, context=2):
    """(file, rows) of each file in which the kernel executed lines, in the order of the work they did.

    `most` keeps so many lines, those that did most; `context` lines around each are shown, too.
    """
    kept, makers = _kept(kernel, most), [make for _, make in columns(kernel)]
    texts = line_texts(kernel.module.code)
    files = {}
    for line in kept:
        files.setdefault(line.file, {})[line.line] = line
    work = {file: sum(line.warp_instructions for line in lines.values()) for file, lines in files.items()}
    return [(file, _rows(file, files[file], texts, makers, context)) for file in sorted(files, key=lambda f: -work[f])]


def facts(kernel):
    """(name, value) of what one wants to know first, as text; what does not apply is left out."""
    shape = kernel.shape
    found = [("launched", f"{_dims(shape.grid)} blocks of {_dims(shape.block)} threads, {shape.arch}")]
    if kernel.launches > 1:
        found.append(("launches", f"{kernel.launches:,}"))
    found += [
        ("warp instructions", f"{kernel.warp_instructions:,}"),
        ("active lanes", _percent(kernel.active_lane_efficiency)),
    ]
    if kernel.global_load_sectors:
        efficiency = _percent(kernel.global_load_efficiency)
        found.append(("global loads", f"{kernel.global_load_sectors:,} sectors, {efficiency} efficient"))
    if kernel.global_store_sectors:
        efficiency = _percent(kernel.global_store_efficiency)
        found.append(("global stores", f"{kernel.global_store_sectors:,} sectors, {efficiency} efficient"))
    if kernel.shared_wavefronts:
        ideal = kernel.shared_ideal_wavefronts
        found.append(("shared memory", f"{kernel.shared_wavefronts:,} wavefronts, {ideal:,} without bank conflicts"))
    if kernel.mma_flops:
        found.append(("tensor FLOPs", f"{kernel.mma_flops:,}"))
    return found + demands(kernel)


def demands(kernel):
    """(name, value) of resources and occupancy, as text; none where there is no compiler to tell."""
    found, shape = [], kernel.shape
    if (needs := when_known(lambda: kernel.resources)) is not None:
        spills = needs.spill_store_bytes + needs.spill_load_bytes
        spilled = f"{spills:,} bytes spilled" if spills else "no spills"
        found.append(("a thread needs", f"{needs.registers} registers, {spilled}"))
        shared = needs.static_shared_bytes + shape.dynamic_shared_bytes
        found.append(("a block needs", f"{shared:,} bytes of shared memory"))
    if not known(shape.arch):
        found.append(("an SM holds", f"limits of {shape.arch} are not known"))
    elif (fit := when_known(lambda: kernel.occupancy)) is not None:
        limits = " and ".join(fit.limited_by)
        found.append(("an SM holds", f"{fit.blocks} blocks, {fit.warps} of {fit.max_warps} warps, limited by {limits}"))
    return found


def bounds(kernel):
    """The LowerBound on each device that reports are given for, and the resources that any of them needs."""
    found = [kernel.lower_bound(arch) for arch in BOUNDED]
    names = [name for name in found[0].resources if any(bound.resources[name] for bound in found)]
    return found, names


def when_known(get):
    """What `get` returns; None where there is no compiler to tell, or no limits of the architecture are known."""
    try:
        return get()
    except (CompilerMissing, CompileError, ValueError):
        return None


def _kept(kernel, most):
    lines = [line for line in kernel.lines if line.file != "PTX"]
    if most is None or len(lines) <= most:
        return lines
    return sorted(lines, key=lambda line: -_weight(line, kernel))[:most]


def _weight(line, kernel):
    """A line's largest share of anything that is shown."""
    totals = ((line.warp_instructions, kernel.warp_instructions), (_sectors(line), _sectors(kernel)))
    shared = (line.shared_wavefronts, kernel.shared_wavefronts)
    return max(part / whole for part, whole in (*totals, shared) if whole)


def _rows(file, lines, texts, makers, context):
    near = {n + d for n in lines for d in range(-context, context + 1) if (file, n + d) in texts} | set(lines)
    rows, previous = [], None
    for number in sorted(near):
        if previous is not None and number > previous + 1:
            rows.append(Row(None, skipped=number - previous - 1))
        line = lines.get(number)
        cells = tuple(make(line) if line else Cell() for make in makers)
        rows.append(Row(number, texts.get((file, number), ""), cells))
        previous = number
    return rows


def _instructions(kernel):
    largest = max((line.warp_instructions for line in kernel.lines), default=1)
    return lambda line: Cell(f"{line.warp_instructions:,}", bar=line.warp_instructions / largest)


def _lanes(kernel):
    def cell(line):
        share = line.active_lane_efficiency
        return Cell() if share is None else Cell(_percent(share), bar=share * (share < 0.9), warns=share < 0.9)

    return cell


def _global(kernel):
    largest = max(_sectors(line) for line in kernel.lines)

    def cell(line):
        if not (sectors := _sectors(line)):
            return Cell()
        ideal = line.global_load_ideal_sectors + line.global_store_ideal_sectors
        note = f"{_percent(ideal / sectors)} useful" if ideal < sectors else ""
        return Cell(f"{sectors:,}", note, sectors / largest, ideal < 0.9 * sectors)

    return cell


def _shared(kernel):
    largest = max(line.shared_wavefronts for line in kernel.lines)

    def cell(line):
        if not line.shared_wavefronts:
            return Cell()
        times = line.shared_wavefronts / line.shared_ideal_wavefronts
        note = f"{times:.3g} x ideal" if times > 1 else ""
        return Cell(f"{line.shared_wavefronts:,}", note, line.shared_wavefronts / largest, times > 1.1)

    return cell


def _sectors(counts):
    return counts.global_load_sectors + counts.global_store_sectors


def _percent(share):
    return f"{100 * share:.3g} %"


def _dims(triple):
    used = triple if triple[2] > 1 else triple[:2] if triple[1] > 1 else triple[:1]
    return " x ".join(map(str, used))
