"""printf and assert in kernels: calls of `vprintf(format, arguments)` and `__assertfail(text, file, line, ...)`.

The arguments of printf lie in local memory, naturally aligned.
"""

import ctypes
import re
import sys

import numpy as np

from .memory import load

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*[\d*]*(?:\.[\d*]+)?)(?P<length>hh|h|ll|l|z|t|j)?(?P<kind>[diouxXcsfFeEgGaAp%])"
)


def vprintf(x, m, format_at, arguments_at, ins):
    """Print for every active lane, in order. Both arguments: where in local memory their pointers lie."""
    formats, buffers = (load(x, m, x.local, at, 8, ins) for at in (format_at, arguments_at))
    active = np.ones(x.n, bool) if m is None else np.broadcast_to(m, x.n)
    formats, buffers = np.broadcast_to(formats, x.n), np.broadcast_to(buffers, x.n)
    texts = {}
    for pointer in np.unique(formats[active]):
        lanes = active & (formats == pointer)
        texts |= zip(np.flatnonzero(lanes).tolist(), _lines(x, lanes, int(pointer), buffers, ins), strict=True)
    sys.stdout.write("".join(texts[lane] for lane in sorted(texts)))


def assertfail(x, m, text_at, line_at, ins):
    """Stop at the first active lane. Arguments: where in local memory the expression and the line number lie."""
    if m is not None and not m.any():
        return
    lane = 0 if m is None or m.size == 1 else int(np.argmax(m))
    pointer, line = (
        int(np.broadcast_to(load(x, m, x.local, at, size, ins), x.n)[lane]) for at, size in ((text_at, 8), (line_at, 4))
    )
    text = ctypes.string_at(pointer).decode(errors="replace")
    raise x.error(ins, lane, f"assertion failed, line {line}: {text}")


def _lines(x, lanes, pointer, buffers, ins):
    """The text of each of these lanes, which share a format."""
    text = ctypes.string_at(pointer).decode(errors="replace")
    columns, offset = [], 0
    for found in _CONVERSION.finditer(text):
        kind = found["kind"]
        if kind == "%":
            continue
        size = 8 if kind in "fFeEgGaAsp" or found["length"] in ("ll", "l", "z", "t", "j") else 4
        offset = -(-offset // size) * size
        bits = load(x, lanes, x.generic, buffers + np.uint64(offset), size, ins)
        offset += size
        columns.append(_typed(kind, np.broadcast_to(bits, x.n)[lanes]))
    python = _CONVERSION.sub(_python_conversion, text)
    rows = zip(*columns, strict=True) if columns else [()] * int(lanes.sum())
    return [python % row for row in rows]


def _typed(kind, bits):
    if kind in "fFeEgGaA":
        return bits.view(np.float64).tolist()
    if kind == "s":
        return [ctypes.string_at(int(p)).decode(errors="replace") for p in bits]
    return bits.view(f"i{bits.itemsize}").tolist() if kind in "dic" else bits.tolist()


def _python_conversion(found):
    kind = {"p": "#x", "a": "g", "A": "G"}.get(found["kind"], found["kind"])
    return f"%{found['flags']}{kind}"
