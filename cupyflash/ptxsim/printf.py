"""printf and assert in kernels: calls of `vprintf(format, arguments)` and `__assertfail(text, file, line, ...)`.

The arguments of printf lie in local memory, naturally aligned; strings anywhere that the thread may read.
"""

import re
import sys

import numpy as np

from .memory import load

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*(?:\d+|\*)?(?:\.(?:\d+|\*)?)?)(?P<length>hh|h|ll|l|z|t|j)?(?P<kind>[diouxXcsfFeEgGaAp%])"
    "|%"  # nothing that printf knows: prints itself
)


def vprintf(x, m, format_at, arguments_at, ins):
    """Print for every active lane, in order; the result is how many arguments each of them had. Both arguments: where
    in local memory their pointers lie."""
    formats, buffers = (load(x, m, x.local, at, 8, ins) for at in (format_at, arguments_at))
    active = np.ones(x.n, bool) if m is None else np.broadcast_to(m, x.n)
    formats, buffers = np.broadcast_to(formats, x.n), np.broadcast_to(buffers, x.n)
    texts, counts = {}, np.zeros(x.n, np.uint32)
    for pointer in np.unique(formats[active]):
        lanes = active & (formats == pointer)
        lines, counts[lanes] = _lines(x, lanes, formats, buffers, ins)
        texts |= zip(np.flatnonzero(lanes).tolist(), lines, strict=True)
    sys.stdout.write("".join(texts[lane] for lane in sorted(texts)))
    return counts


def assertfail(x, m, text_at, line_at, ins):
    """Stop at the first active lane. Arguments: where in local memory the expression and the line number lie."""
    if m is not None and not m.any():
        return
    lane = 0 if m is None or m.size == 1 else int(np.argmax(m))
    pointers, lines = (
        np.broadcast_to(load(x, m, x.local, at, size, ins), x.n) for at, size in ((text_at, 8), (line_at, 4))
    )
    (text,), line = _strings(x, np.arange(x.n) == lane, pointers, ins), lines[lane]
    raise x.error(ins, lane, f"assertion failed, line {line}: {text}")


def _lines(x, lanes, formats, buffers, ins):
    """The text of each of these lanes, which share a format, and the number of its arguments."""
    text = _strings(x, lanes & (np.cumsum(lanes) == 1), formats, ins)[0]
    columns, offset = [], 0

    def argument(size):
        nonlocal offset
        offset = -(-offset // size) * size
        bits = load(x, lanes, x.generic, buffers + np.uint64(offset), size, ins)
        offset += size
        return np.broadcast_to(bits, x.n)

    for found in _CONVERSION.finditer(text):
        kind = found["kind"]
        if kind in (None, "%"):
            continue
        columns += [argument(4)[lanes].view(np.int32).tolist() for _ in range(found["flags"].count("*"))]
        bits = argument(8 if kind in "fFeEgGaAsp" or found["length"] in ("ll", "l", "z", "t", "j") else 4)
        columns.append(_strings(x, lanes, bits, ins) if kind == "s" else _typed(found, bits[lanes]))
    python = _CONVERSION.sub(_python_conversion, text)
    rows = zip(*columns, strict=True) if columns else [()] * int(lanes.sum())
    return [python % row for row in rows], len(columns)


def _strings(x, lanes, pointers, ins):
    """What these lanes point at, up to the first zero byte."""
    texts = {lane: bytearray() for lane in np.flatnonzero(lanes).tolist()}
    rest = lanes & (pointers != 0)
    for lane in np.flatnonzero(lanes & ~rest).tolist():
        texts[lane] += b"(null)"
    while rest.any():
        bytes_ = np.broadcast_to(load(x, rest, x.generic, pointers, 1, ins), x.n)
        rest = rest & (bytes_ != 0)
        for lane in np.flatnonzero(rest).tolist():
            texts[lane].append(bytes_[lane])
        pointers = pointers + np.uint64(1)
    return [text.decode(errors="replace") for text in texts.values()]


def _typed(found, bits):
    """Arguments as what Python's conversion takes."""
    kind = found["kind"]
    if kind in "fFeEgG":
        return bits.view(np.float64).tolist()
    if kind in "aA":
        return [_hexadecimal(value, kind) for value in bits.view(np.float64).tolist()]
    if kind == "p":
        return [hex(value) if value else "(nil)" for value in bits.tolist()]
    if kind == "o" and "#" in found["flags"]:
        return [f"0{value:o}" if value else "0" for value in bits.tolist()]
    if kind == "c":
        return (bits & 255).tolist()
    return bits.view(f"i{bits.itemsize}").tolist() if kind in "di" else bits.tolist()


def _hexadecimal(value, kind):
    """As %a writes it: without zeros at its end."""
    digits, exponent, power = value.hex().partition("p")
    text = (digits.rstrip("0").rstrip(".") if exponent else digits) + exponent + power
    return text.upper() if kind == "A" else text


def _python_conversion(found):
    kind, flags = found["kind"], found["flags"]
    if kind in (None, "%"):
        return "%%"
    if kind in "aAp" or (kind == "o" and "#" in flags):
        kind = "s"
    return f"%{flags}{kind}"
