"""A kernel's profile as one HTML page that needs nothing else."""

from html import escape

from .annotated import LEGEND, annotated, bounds, columns, facts

_STYLE = """
body { margin: 2rem auto; max-width: 92rem; padding: 0 1.5rem; color: #1b1f24; background: #fff;
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font: 600 1.5rem/1.2 ui-monospace, monospace; margin: 0 0 1rem; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { color: #57606a; margin: .25rem 0 .75rem; max-width: 60rem; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); gap: .6rem 2rem; margin: 0; }
dt { color: #57606a; font-size: .8rem; } dd { margin: 0; }
table { border-collapse: collapse; } th { font-weight: 500; color: #57606a; font-size: .8rem; text-align: right; }
td, th { padding: .1rem .6rem; white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; background-repeat: no-repeat;
  background-position: left center; }
td.n small { color: #57606a; margin-left: .5em; } td.warn, td.warn small { color: #a40e26; }
td.top { font-weight: 650; }
th.l, td.l { text-align: left; }
table.code { width: 100%; font: 12.5px/1.5 ui-monospace, monospace; }
table.code th { font-family: system-ui, sans-serif; position: sticky; top: 0; background: #fff; }
table.code td.no { color: #8c959f; text-align: right; width: 1%; } table.code td.src { white-space: pre; width: 99%; }
table.code td.n { min-width: 7.5rem; } table.code tr.gap td { color: #8c959f; font-size: 11px; text-align: center; }
table.code tr:hover td { background-color: #f6f8fa; }
"""
_BLUE, _RED = "#cfe3f7", "#ffd7d5"


def page(kernel):
    """The page as text."""
    terms = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(kernel))
    name = escape(kernel.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{name}</h1>\n<dl>{terms}</dl>\n"
        f"{_bounds(kernel)}\n{_sources(kernel)}</body></html>\n"
    )


def _bounds(kernel):
    found, names = bounds(kernel)
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for bound in found:
        cells = "".join(
            _cell(f"{bound.resources[name]:,.0f}", bar=bound.resources[name] / (bound.cycles or 1),
                  classes="n top" if name == bound.limited_by else "n")
            for name in names
        )  # fmt: skip
        device = f'<td class="l">{escape(bound.device)} <small>{bound.arch}</small></td>'
        rows.append(f"<tr>{device}{cells}</tr>")
    return (
        "<h2>Cycles it needs at least</h2><p>A lower bound, never an estimate: each unit's work, spread perfectly over "
        "the multiprocessors, at its highest rate. The largest of a row (bold) is the bound; latency comes on top.</p>"
        f'<table><tr><th class="l">device</th>{heads}</tr>{"".join(rows)}</table>'
    )


def _sources(kernel):
    headings = [heading for heading, _ in columns(kernel)]
    heads = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    tables = []
    for file, rows in annotated(kernel):
        body = "".join(_row(row, len(headings)) for row in rows)
        head = f'<tr><th></th><th class="l"></th>{heads}</tr>'
        tables.append(f'<h2>{escape(file)}</h2><table class="code">{head}{body}</table>')
    return "\n".join([f"<p>{escape(LEGEND)}</p>", *tables])


def _row(row, width):
    if row.number is None:
        return f'<tr class="gap"><td></td><td class="l" colspan="{width + 1}">{row.skipped} lines</td></tr>\n'
    cells = "".join(_cell(c.text, c.note, c.bar, "n warn" if c.warns else "n") for c in row.cells)
    return f'<tr><td class="no">{row.number}</td><td class="src">{escape(row.text)}</td>{cells}</tr>\n'


def _cell(text, note="", bar=0.0, classes="n"):
    colour = _RED if "warn" in classes else _BLUE
    style = ""
    if bar:
        style = f' style="background-image:linear-gradient({colour},{colour});background-size:{100 * bar:.1f}% 75%"'
    beside = f"<small>{escape(note)}</small>" if note else ""
    return f'<td class="{classes}"{style}>{escape(text)}{beside}</td>'
