"""A kernel's profile as a figure: its source lines with bars, and what bounds it on several devices."""

from .annotated import LEGEND, annotated, bounds, columns, facts

_LINES = 24  # of source, of those that do most
_LINE = 0.17  # inches
_CODE_WIDTH = 100  # characters
_BLUE, _RED, _GREY, _INK = "#cfe3f7", "#ffd7d5", "#8c959f", "#1b1f24"
_COLUMN = 1.95  # inches
_BAR = 0.5  # inches, of the longest; numbers stand beside it


def figure(kernel):
    """A Matplotlib figure. Of a kernel with more lines than fit, those that do most are shown."""
    pyplot = _pyplot()
    headings = [heading for heading, _ in columns(kernel)]
    files = annotated(kernel, _LINES, context=1)
    rows = sum(len(rows) + 2 for _, rows in files)
    terms, (found, names) = facts(kernel), bounds(kernel)
    top = len(terms) + len(found) + 6
    width, height = 7.6 + _COLUMN * len(headings), _LINE * (top + rows + 1) + 0.3
    drawn = pyplot.figure(figsize=(width, height), layout="none")
    axes = drawn.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    y = _head(axes, kernel, terms)
    y = _bounds(axes, found, names, y + _LINE, width)
    _sources(axes, files, headings, y + _LINE)
    return drawn


def write(kernel, path):
    """Write the figure as a PNG file."""
    drawn = figure(kernel)
    drawn.savefig(path, format="png", dpi=160)
    _pyplot().close(drawn)


def _pyplot():
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("figures need Matplotlib: pip install matplotlib") from error
    return pyplot


def _text(axes, x, y, text, **style):
    axes.text(x, y, text.replace("$", r"\$"), va="center", **{"fontsize": 8, "color": _INK, **style})


def _head(axes, kernel, terms):
    _text(axes, 0.2, 0.22, kernel.name, fontsize=12, weight="bold", family="monospace")
    y = 0.22 + 1.5 * _LINE
    for name, value in terms:
        _text(axes, 0.2, y, name, color=_GREY)
        _text(axes, 1.5, y, value)
        y += _LINE
    return y


def _bounds(axes, found, names, y, width):
    _text(axes, 0.2, y, "cycles at least (lower bound, not an estimate)", weight="bold")
    y += _LINE
    step = min((width - 2.2) / max(len(names), 1), 1.2)
    for n, name in enumerate(names):
        _text(axes, 2.0 + step * (n + 0.9), y, name, ha="right", color=_GREY, fontsize=7)
    for bound in found:
        y += _LINE
        _text(axes, 0.2, y, f"{bound.device} ({bound.arch})")
        if not names:
            _text(axes, 2.0, y, bound.limited_by)
        for n, name in enumerate(names):
            cycles, right = bound.resources[name], 2.0 + step * (n + 0.92)
            _bar(axes, right - 0.9 * step, y, 0.4 * step * cycles / (bound.cycles or 1), _BLUE)
            weight = "bold" if name == bound.limited_by else "normal"
            _text(axes, right - 0.02, y, f"{cycles:,.0f}", ha="right", weight=weight, fontsize=7.5)
    return y + _LINE


def _sources(axes, files, headings, y):
    code = {"family": "monospace", "fontsize": 7.5}
    left = 7.5
    _text(axes, 0.2, y, LEGEND, color=_GREY, fontsize=7)
    y += 1.5 * _LINE
    for file, rows in files:
        _text(axes, 0.2, y, file, weight="bold")
        for n, heading in enumerate(headings):
            _text(axes, left + _COLUMN * (n + 0.95), y, heading, ha="right", color=_GREY, fontsize=7)
        for row in rows:
            y += _LINE
            if row.number is None:
                _text(axes, 0.7, y, f"{row.skipped} lines", color=_GREY, fontsize=6.5, style="italic")
                continue
            _text(axes, 0.55, y, str(row.number), ha="right", color=_GREY, **code)
            _text(axes, 0.7, y, _fitted(row.text), **code)
            for n, cell in enumerate(row.cells):
                right = left + _COLUMN * (n + 0.95)
                _bar(axes, right - 0.93 * _COLUMN, y, _BAR * cell.bar, _RED if cell.warns else _BLUE)
                shown = f"{cell.text}   {cell.note}" if cell.note else cell.text
                _text(axes, right - 0.03, y, shown, ha="right", fontsize=7.5)
        y += 2 * _LINE


def _bar(axes, left, y, width, colour):
    if width:
        axes.barh(y, width, 0.8 * _LINE, left=left, color=colour)


def _fitted(text):
    text = text.rstrip().replace("\t", "    ")
    return text if len(text) <= _CODE_WIDTH else text[: _CODE_WIDTH - 3] + "..."
