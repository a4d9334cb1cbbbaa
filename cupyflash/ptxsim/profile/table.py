"""Profiles as text for a terminal."""

from pathlib import Path

from .annotated import bounds, demands

_WIDTH = 120
_CALLER = 18  # of it for the line that calls a function
_COLUMNS = (  # of the table of lines: heading, counter
    ("instr", "warp_instructions"),
    ("lanes", "active_lane_efficiency"),
    ("branches", "branch_efficiency"),
    ("gld sect", "global_load_sectors"),
    ("gld eff", "global_load_efficiency"),
    ("gst sect", "global_store_sectors"),
    ("gst eff", "global_store_efficiency"),
    ("wavefr", "shared_wavefronts"),
    ("sh eff", "shared_efficiency"),
)


def kernel_table(kernel):
    """All counters of a kernel, one a line; efficiencies that measure nothing are left out."""
    rows = [("launches", kernel.launches), ("warp instructions", kernel.warp_instructions)]
    rows += _largest_first(kernel.instructions)
    for name, value in kernel.counters().items():
        if name == "flops":
            rows += [("scalar flops", sum(value.values())), *_largest_first(value)]
        elif name not in ("instructions", "opcodes", "warp_instructions") and value is not None:
            rows.append((name.replace("_", " "), value))
    rows.append(("block load sectors", kernel.block_load_sectors))
    text = [f"  {label:<28}{_number(value):>20}" for label, value in rows]
    return "\n".join([kernel.name, *text, *_outlook(kernel)])


def _outlook(kernel):
    """Resources, occupancy and what bounds the kernel on several devices, one a line."""
    for name, value in demands(kernel):
        yield f"  {name:<28}{value}"
    yield "  needs at least (a lower bound, not an estimate)"
    for bound in bounds(kernel)[0]:
        yield f"    {f'{bound.device} ({bound.arch})':<26}{_number(round(bound.cycles)):>20} cycles, {bound.limited_by}"


def line_table(kernel, count, by):
    """The `count` lines of a kernel that have most of a counter."""
    lines = kernel.hottest(count, by)
    cells = [[heading for heading, _ in _COLUMNS]]
    cells += [[_number(getattr(line, counter)) for _, counter in _COLUMNS] for line in lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    places = ["line", *(_place(line.file, line.line) for line in lines)]
    texts = ["", *(_text(line) for line in lines)]
    room = _WIDTH - sum(width + 2 for width in widths) - 4
    room -= _CALLER if any(line.callers and not line.text for line in lines) else 0
    places = [place if len(place) <= room else f"...{place[3 - room :]}" for place in places]
    first = max(map(len, places))
    rows = []
    for place, row, text in zip(places, cells, texts, strict=True):
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        rows.append(f"  {place:<{first}}  {numbers}  {text}"[:_WIDTH].rstrip())
    return "\n".join([f"{kernel.name}, lines with most {by.replace('_', ' ')}", *rows])


def _place(file, line):
    """A line; of a header that is installed somewhere, only the last directory is given."""
    parts = Path(file).parts
    return f"{'/'.join(parts[-2:]) if Path(file).is_absolute() else file}:{line}"


def _text(line):
    """What stands in a line; of a function from elsewhere, who calls it."""
    if line.text or not line.callers:
        return line.text.strip()
    return f"from {', '.join(_place(*caller) for caller in sorted(line.callers))}"


def _largest_first(counts):
    return [(f"  {name}", count) for name, count in sorted(counts.items(), key=lambda item: -item[1])]


def _number(value):
    if value is None:
        return "-"
    return f"{100 * value:.1f}%" if isinstance(value, float) else f"{value:,}"
