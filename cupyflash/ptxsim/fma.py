"""Fused multiply-adds, rounded once: on arrays of any shape, and for grids of independent ones of a block.

A float32 product is exact in float64, and so is all but 2^-29 of its sums' roundings; a float64 product is the sum
of two numbers by Dekker's splitting. Both kernels test cheaply whether the quick way was right for all lanes at once,
and go the exact way for the few where it may not have been.
"""

import itertools

import numpy as np

from .exact import exact_f64
from .numerics import (
    F32_NORMAL,
    canonical,
    flush,
    highest,
    lowest,
    odd_sum,
    round_sum,
    some,
    two_product,
    two_sum,
    upper_half,
)

_PART = 1 << 13  # elements of an array that is worked on at once: a few of them fit the second cache
_ABOVE, _BELOW = np.array(1 + 2.0**-51), np.array(1 - 2.0**-51)
_DROPPED = np.array(64 - 29)
_MIDDLE = -(1 << 63)


def fma_f32(a, b, c, rounding="rn"):
    """float32 a * b + c."""
    if rounding != "rn":
        return canonical(round_sum(np.multiply(a, b, dtype=np.float64), c.astype(np.float64), rounding))
    s, result = _nearest_f32(a, b, c)
    size = np.abs(s)
    if lowest(size) >= F32_NORMAL:
        return result
    return canonical(_with_repairs(result, (size < F32_NORMAL) & (size > 0), a, b, c))


def fma_f32_ftz(a, b, c):
    """The same with a result that is flushed; the operands must be."""
    _, result = _nearest_f32(a, b, c)
    size = np.abs(result)
    if lowest(size) > F32_NORMAL:
        return result
    small = (size <= F32_NORMAL) & (size > 0)
    if some(small):
        return flush(_with_repairs(result, small, a, b, c))
    return canonical(result)


def _nearest_f32(a, b, c):
    """The sum in float64, and rounded to float32, once where that is in its normal range."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    s = product + c
    result = s.astype(np.float32)
    # A sum may have been rounded to the middle of two numbers: the 29 bits that are dropped, as a signed number
    # at the top of a word, are the lowest one. Then its neighbour on the side that it came from has the right result.
    dropped = s.view(np.int64) << _DROPPED
    if lowest(dropped) == _MIDDLE:
        _, error = two_sum(product, c)
        wrong = (error != 0) & (dropped == _MIDDLE)
        if some(wrong):
            result = np.where(wrong, np.nextafter(s, error * np.inf).astype(np.float32), result)
    return s, result


def _with_repairs(result, doubtful, a, b, c):
    """Where it is doubtful, by way of a sum that is rounded to odd."""
    where = np.nonzero(doubtful)
    a, b, c = (_at(x, where, result.shape).astype(np.float64) for x in (a, b, c))
    result[where] = odd_sum(a * b, c).astype(np.float32)
    return result


def _at(x, where, shape):
    """Elements of an array that is broadcast to a shape."""
    return np.broadcast_to(x, shape)[where]


def fma_f64(a, b, c):
    """float64 a * b + c."""
    a_high, b_high = upper_half(a), upper_half(b)
    a_low, b_low = a - a_high, b - b_high
    high = a * b
    low = a_high * b_high
    low -= high
    low += a_low * b_high
    if b_low.size > 1 or b_low.item():  # not a constant of few bits
        low += a_high * b_low
        low += a_low * b_low
    size = np.abs(high)
    inside = lowest(size) > 1e-250 and highest(size) < 1e290
    if inside and lowest(low) == 0 == highest(low):
        return high + c
    s, s_low = two_sum(high, c)
    rest = low + s_low
    result = s + rest * _ABOVE
    doubtful = result != s + rest * _BELOW  # rest has a relative error of at most 2^-53
    unsure = some(doubtful)
    if unsure:
        result = s + rest  # right if rest is exact, as in a tie
        _, error = two_sum(low, s_low)
        doubtful &= error != 0
        if some(doubtful):
            where = np.nonzero(doubtful)
            result[where] = s[where] + odd_sum(_at(low, where, s.shape), s_low[where])
    # A factor or a sum that was above the range has left a NaN, which is doubtful.
    if inside and (not unsure or lowest(np.isfinite(result))):
        return result
    result = np.where((result == 0) & (rest == 0), s, result)  # an exact zero has the sign of s
    exact = ((size > 1e-250) & (size < 1e290)) | (a == 0) | (b == 0)
    where = np.nonzero(~(exact & np.isfinite(result)))
    if where[0].size:
        result[where] = _fma_f64_exactly(*(_at(x, where, result.shape) for x in (a, b, c)))
    return result


def _fma_f64_exactly(a, b, c):
    """By error-free transforms that end in a sum rounded to odd; near the ends of the range scaled."""
    high, low = two_product(a, b)
    t, t_low = two_sum(c, low)
    v, v_low = two_sum(high, t)
    result = v + odd_sum(t_low, v_low)
    size = np.abs(high)
    safe = (size > 1e-250) & (size < 1e290) & (np.abs(a) < 1e290) & (np.abs(b) < 1e290) & (np.abs(c) < 1e290)
    if not safe.all():
        # A product that is 0 leaves the sum exact, and a NaN or an infinity is what plain arithmetic makes of it.
        # (Which of two NaNs that takes depends on the length of the array: one NaN for all.)
        finite = np.isfinite(a) & np.isfinite(b)
        plain = (a == 0) | (b == 0) | ~finite | ~np.isfinite(c)
        simple = a * b + c
        simple[np.isnan(simple)] = np.nan
        result = np.where(plain & ~safe, np.where(finite & ~np.isfinite(c), c, simple), result)
        unsafe = np.flatnonzero(~safe & ~plain)
        result[unsafe] = _fma_f64_scaled(a[unsafe], b[unsafe], c[unsafe])
    return result


def _fma_f64_scaled(a, b, c):
    """The same for factors and sums of any size: on significands, and scaled back with one rounding."""
    (a_part, a_exponent), (b_part, b_exponent) = np.frexp(a), np.frexp(b)
    exponent = a_exponent + b_exponent
    c_part = np.ldexp(c, -exponent)
    negligible = (c != 0) & (np.abs(c_part) < 1e-200)  # but for the direction in which it points
    c_part = np.where(negligible, np.copysign(1e-200, c), c_part)
    high, low = two_product(a_part, b_part)
    t, t_low = two_sum(c_part, low)
    v, v_low = two_sum(high, t)
    rest = odd_sum(t_low, v_low)
    size = np.abs(np.ldexp(v, exponent))
    # A subnormal of at most 51 bits is rounded right from 53 that were rounded to odd.
    result = np.ldexp(np.where(size < 2.0**-1023, odd_sum(v, rest), v + rest), exponent)
    result = np.where(np.abs(c_part) > 1e200, c, result)  # the product is negligible
    doubtful = np.flatnonzero((size > 2.0**-1024) & (size < 2.0**-1021))
    result[doubtful] = exact_f64("fma", "rn", a[doubtful], b[doubtful], c[doubtful])
    return result


# -- grids ---------------------------------------------------------------------------------------------
def fma_grid(function, a, b, c):
    """function(a[i], b[j], c[i * len(b) + j]) for tuples of arrays: (len(a) * len(b), lanes).

    `c` may also be what a previous call returned.
    """
    a, b = _stacked(a)[:, None], _stacked(b)[None]
    c = (c if isinstance(c, np.ndarray) else _stacked(c)).reshape(a.shape[0], b.shape[1], -1)
    lanes = max(a.shape[2], b.shape[2], c.shape[2])
    count = a.shape[0] * b.shape[1]
    width = max(_PART // count, 32)
    if lanes <= width:
        return function(a, b, c).reshape(count, lanes)
    result = np.empty((a.shape[0], b.shape[1], lanes), a.dtype)
    for first in range(0, lanes, width):
        part = slice(first, first + width)
        result[:, :, part] = function(*(x if x.shape[2] == 1 else x[:, :, part] for x in (a, b, c)))
    return result.reshape(count, lanes)


def _stacked(arrays):
    """Arrays of one element or of one for each lane as the rows of a matrix."""
    sizes = {x.size for x in arrays}
    if len(sizes) == 1:
        return np.concatenate(arrays).reshape(len(arrays), -1)
    result = np.empty((len(arrays), max(sizes)), arrays[0].dtype)
    for row, x in zip(result, arrays, strict=True):
        row[:] = x
    return result


def flush_all(arrays):
    """`flush` of each."""
    together = np.concatenate(arrays)
    flushed = flush(together)
    if flushed is together:
        return arrays
    edges = np.cumsum([0, *(x.size for x in arrays)]).tolist()
    return [flushed[start:stop] for start, stop in itertools.pairwise(edges)]


class FmaBatch:
    """Collects the fma instructions of a block until one of their results is needed by another kind of instruction.

    Those at the same depth of accumulation do not depend on each other. Those that share their first factors and their
    second ones, as the outer products of a thread's tile do, become one grid.
    """

    def __init__(self, translator):
        self.t = translator
        self.pending = {}  # result -> (depth, function, a, b, c, whether it is read once)

    def add(self, i, type_, ftz):
        """fma.rn of float32 or float64, unguarded."""
        t = self.t
        function = "fma_f32_ftz" if ftz else f"fma_{type_}"
        depth, names = 0, []
        for operand in i.operands[1:]:
            name = self.waiting(operand, function)
            if name:
                depth = max(depth, self.pending[name][0] + 1)
            names.append(name or t.use(operand, type_))
        result = t.fresh("f4" if type_ == "f32" else "f8")
        once = (i, i.operands[0].index) in t.used_once
        self.pending[result] = (depth, function, *names, once)
        t.define(i.operands[0], result, type_, ftz)

    def waiting(self, operand, function):
        """The name of an operand that is the pending result of a like instruction, else None."""
        name = self.t.current.get(getattr(operand, "index", None))
        return name if name in self.pending and self.pending[name][1] == function else None

    def emit(self):
        t, pending, self.pending = self.t, self.pending, {}
        self.flush_operands(pending)
        levels = {}
        for result, (depth, function, *names, _) in pending.items():
            if function == "fma_f32_ftz":
                names = [t.casts.get((n, "flush"), n) for n in names]
            levels.setdefault((depth, function), []).append((result, *names))
        grids, chained = {}, set()  # results -> local of the whole grid; results that only the next grid takes
        lines = []
        for (_, function), level in sorted(levels.items()):
            for a, b, c, results in _grids(level):
                if len(results) == 1:
                    arguments = ", ".join(t.broadcast(a[0], b[0], c[0]))
                    lines.append((results, f"{results[0]} = {function}({arguments})"))
                    continue
                addend = grids.get(c)
                if addend and all(pending[name][-1] for name in c):
                    chained.add(c)
                elif not addend:
                    addend = _tuple(c)
                grids[results] = grid = t.fresh("f4")
                lines.append((results, f"{grid} = fma_grid({function}, {_tuple(a)}, {_tuple(b)}, {addend})"))
        for results, line in lines:
            t.line(line)
            if results in grids and results not in chained:
                t.line(f"{_tuple(results)} = {grids[results]}")

    def flush_operands(self, pending):
        """The operands of .ftz instructions that may be subnormal, flushed together."""
        t, loose = self.t, {}
        for _, function, *names, _ in pending.values():
            if function == "fma_f32_ftz":
                loose |= {n: None for n in names if n not in t.flushed and (n, "flush") not in t.casts}
        if len(loose) == 1:
            t.flush_input(*loose)
        elif loose:
            flushed = [t.fresh("f4") for _ in loose]
            t.line(f"{_tuple(flushed)} = flush_all({_tuple(loose)})")
            t.flushed.update(flushed)
            t.casts.update({(name, "flush"): flush for name, flush in zip(loose, flushed, strict=True)})


def _grids(level):
    """(a names, b names, c names, result names), the last two row by row, of instructions of one depth."""
    by_a = {}
    for result, a, b, c in level:
        by_a.setdefault(a, []).append((b, c, result))
    by_b = {}
    for a, row in by_a.items():
        by_b.setdefault(tuple(b for b, _, _ in row), []).append((a, row))
    for b, rows in by_b.items():
        entries = [entry for _, row in rows for entry in row]
        yield tuple(a for a, _ in rows), b, tuple(c for _, c, _ in entries), tuple(r for _, _, r in entries)


def _tuple(names):
    return f"({', '.join(names)},)"
