"""Tensor-core instructions: ldmatrix and relatives, and mma.sync as matrix products.

With `settings(mma="fp32")` a chain of accumulations is one product: the products of 16-bit numbers and nearly
all their sums are exact in float64, so that an element does not depend on its place in the matrix, as it does
with a float32 product of the BLAS; it is rounded to float32 at the end. The other models: tensor_models.py.

Lane l of a warp has g = l >> 2 and t = l & 3. A fragment register of 8 rows holds row g, columns
2t and 2t + 1, so an array over lanes is, reshaped, a stack of 8 x 4 matrices of pairs.
"""

import numpy as np

from .memory import SHARED_WINDOW, WINDOW_SHIFT
from .numerics import bf16_to_f32, canonical, f16_to_f32, f16x2_to_f32, pair
from .scratch import scratch
from .tensor_models import multiply_add

WARP = 32
_SERIAL_SIZE = 1 << 18  # rows * columns * inner dimension
_DECODE = {"f16": f16_to_f32, "bf16": bf16_to_f32}
_F16_SCALE = 2.0**112  # of a float32 with the bits of a binary16 number: the difference of the exponents' biases


_SMALLEST = np.array([1], np.uint32).view(np.float32)


def _keeps_subnormals():
    """Whether this thread computes with float32 subnormals, which those of halves become on their way; XLA's flush."""
    return _SMALLEST.astype(np.float64)[0] != 0


def in_shared(address):
    """A 64-bit address that may be generic, as an address in shared memory."""
    return np.where(address >> WINDOW_SHIFT == 1, address - SHARED_WINDOW, address)


def _require_whole_warps(x, m, ins):
    if m is not None and not m.all():
        raise x.error(
            ins, int(np.argmin(np.broadcast_to(m, x.n))), f"{ins} needs every lane of the warp, one is missing"
        )


def _rows(x, m, address, count, write, ins):
    """The flat array of 16-byte rows, and the index (count, warps, 8) of the rows that lanes name."""
    _require_whole_warps(x, m, ins)
    sel = None
    address = np.broadcast_to(address, x.n)
    if count < 4:
        key = ("rows", count)
        if key not in x.memo:
            x.memo[key] = np.arange(x.n).reshape(-1, WARP)[:, : 8 * count].reshape(-1)
        sel = x.memo[key]
        address = address[sel]
    ((view, index, _),) = x.shared.locate(x, sel, address, 16, write, ins)
    return view, index.reshape(-1, count, 8).swapaxes(0, 1)


def ldmatrix(x, m, address, count, trans, ins):
    """`count` 8x8 matrices of 16-bit elements: (count, lanes) uint32."""
    view, index = _rows(x, m, address, count, False, ins)
    rows = view.take(index)
    return transposed(rows.view(np.uint32)) if trans else rows.view(np.uint32).reshape(count, -1)


def transposed(words):
    """Each 8x8 matrix of halves transposed; (count, warps, 8 * 4) words to (count, lanes)."""
    count = words.shape[0]
    halves = words.view(np.uint16).reshape(count, -1, 8, 8)
    return np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32).reshape(count, -1)


def stmatrix(x, m, address, values, trans, ins):
    view, index = _rows(x, m, address, len(values), True, ins)
    words = np.stack([np.broadcast_to(v, x.n) for v in values]).reshape(len(values), -1, 32)
    if trans:
        words = transposed(words)
    view[index.reshape(-1)] = np.ascontiguousarray(words).view(np.complex128).reshape(-1)
    x.changes += 1


def movmatrix(x, m, a, ins):
    _require_whole_warps(x, m, ins)
    return transposed(np.array(np.broadcast_to(a, x.n)).reshape(1, -1, 32))[0]


def mma(x, m, type_, a, b, c, ins):
    """d = c + sum_k a_k b_k for a grid of tiles.

    a[i][k]: registers of the A fragment of tile row i at step k (2 or 4); b[j][k]: those of B for
    tile column j (1 or 2); c[i][j]: the 4 accumulators. Returns the 4 results of every tile, flat.
    """
    _require_whole_warps(x, m, ins)
    rows, columns = len(a), len(b)
    addends = [register for row in c for tile in row for register in tile]
    model = x.chunk.launch.settings.mma
    left, right, lengths = _factors(x, type_, a, b, even_first=model == "fp32")
    if model != "fp32":
        product = multiply_add(model, type_, left, right, _matrix(x, addends, rows, columns), lengths)
        return list(canonical(_by_register(product, rows, columns).reshape(rows * columns * 4, -1)))
    product = _product(left.reshape(len(right), -1, *left.shape[1:]), right[:, None])
    rounded = scratch("rounded", product.shape, np.float32)
    in_fours = rounded.view(np.complex128).reshape(-1, rows, 2, 8, columns, 2).transpose(1, 4, 2, 5, 0, 3)
    if any(z.size > 1 or z[0] != 0 for z in addends):
        addend = np.stack([np.broadcast_to(z, x.n) for z in addends])
        np.copyto(in_fours, addend.view(np.complex128).reshape(in_fours.shape))
        product += rounded
    np.copyto(rounded, product, casting="same_kind")
    return list(canonical(np.ascontiguousarray(in_fours).view(np.float32).reshape(rows * columns * 4, -1)))


def mma_f16(x, m, type_, a, b, c, ins):
    """The same with float16 accumulators, two in a register: 2 of c and of the results for every tile."""
    _require_whole_warps(x, m, ins)
    rows, columns = len(a), len(b)
    left, right, lengths = _factors(x, type_, a, b)
    registers = (np.broadcast_to(register, x.n) for row in c for tile in row for register in tile)
    addends = [values for register in registers for values in f16x2_to_f32(register).T]
    model = x.chunk.launch.settings.mma
    model = "exact" if model == "fp32" else model
    product = multiply_add(model, type_, left, right, _matrix(x, addends, rows, columns), lengths, "f16")
    bits = _by_register(product, rows, columns).reshape(rows * columns * 2, 2, -1)
    bits = np.where(np.isnan(bits), np.uint16(0x7FFF), bits.view(np.uint16))
    return list(pair(bits[:, 0], bits[:, 1]))


def _factors(x, type_, a, b, even_first=False):
    """The matrices of the fragments, (warps, 16 rows, k) and (groups of warps that share one, k, 8 columns), and the
    length of each step along k. `even_first`: in a tile, even columns before odd ones, so that the accumulators of
    four lanes lie together."""
    warps, rows, columns = x.warps, len(a), len(b)
    slices = sum(len(step) for step in b[0])  # along k, of as many elements as 4 lanes have in a register
    left = scratch("left bits", (warps, rows, 2, 8, slices, 4), np.uint32)
    for i, steps in enumerate(a):
        at = 0
        for registers in steps:
            for n, register in enumerate(registers):
                left[:, i, n % 2, :, at + n // 2] = _fragment(x, register)
            at += len(registers) // 2
    right = scratch("right bits", (warps, columns, 8, slices, 4), np.uint32)
    for j, steps in enumerate(b):
        for at, register in enumerate(r for step in steps for r in step):
            right[:, j, :, at] = _fragment(x, register)
    right = right[:: _sharing(x, right)]
    if even_first:
        right = right.reshape(-1, columns, 4, 2, slices, 4).swapaxes(2, 3)
    right = np.ascontiguousarray(right)
    width = 4 if type_ == "tf32" else 8
    left = _decoded("left", type_, left).reshape(warps, rows * 16, slices * width)
    right = _decoded("right", type_, right).reshape(-1, columns * 8, slices * width)
    return left, right.swapaxes(1, 2), [width * len(step) for step in b[0]]


def _matrix(x, addends, rows, columns):
    """The accumulators of a grid of tiles, 4 for each, as a matrix for each warp: the inverse of `_by_register`."""
    addend = np.stack([np.broadcast_to(z, x.n) for z in addends])
    addend = addend.reshape(rows, columns, 2, 2, -1, 8, 4).transpose(4, 0, 2, 5, 1, 6, 3)
    return addend.reshape(-1, rows * 16, columns * 8)


def _by_register(tiles, rows, columns):
    """A matrix of tiles of each warp, (warps, 16 rows, 8 columns), as a view of which the last three axes are the lanes
    and those before them the accumulators of a tile, (rows, columns, 2, 2)."""
    return tiles.reshape(-1, rows, 2, 8, columns, 4, 2).transpose(1, 4, 2, 6, 0, 3, 5)


def _decoded(side, type_, words):
    """Pairs of 16-bit numbers, or tf32, of which the lower 13 bits do not count, as float64."""
    if type_ == "tf32":
        values = scratch(side, words.shape, np.float64)
        np.copyto(values, (words & np.uint32(0xFFFFE000)).view(np.float32))
        return values
    bits = words.view(np.uint16)
    values = scratch(side, bits.shape, np.float64)
    if type_ == "f16" and ((bits & np.uint16(0x7FFF)).max() < 0x7C00) and _keeps_subnormals():  # nor infinite or NaN
        shifted = scratch("shifted", bits.shape, np.int32)
        np.copyto(shifted, bits.view(np.int16))
        shifted <<= 13
        shifted &= -0x70002000  # without the copies of the sign below it
        np.copyto(values, shifted.view(np.float32))
        values *= _F16_SCALE
    else:
        np.copyto(values, _DECODE[type_](bits))
    return values


def _sharing(x, right):
    """How many warps in a row have the same second factors: those of a block, or 1."""
    warps = x.chunk.pitch // WARP
    if x.lanes is not None or warps == 1:
        return 1
    right = right.reshape(x.chunk.count, warps, -1)
    same = np.array_equal(right[0, 0], right[0, 1]) and (right[:, 1:] == right[:, :1]).all()
    return warps if same else 1


def _product(left, right):
    """A stack of matrix products, each small enough that OpenBLAS does not wake its threads for it."""
    product = scratch("product", (*left.shape[:3], right.shape[3]), np.float64)
    width = max(8, _SERIAL_SIZE // (left.shape[2] * left.shape[3]) // 8 * 8)
    for at in range(0, right.shape[3], width):
        part = slice(at, at + width)
        np.matmul(left, right[..., part], out=product[..., part])
    return product


def _fragment(x, register):
    return (register if register.size == x.n else np.broadcast_to(register, x.n)).reshape(-1, 8, 4)


class _Chain:
    """mma instructions that accumulate into one tile. float16 accumulators are rounded each time: one instruction."""

    def __init__(self, instruction, types, c):
        self.instruction, self.type, self.c = instruction, types[1], c
        self.function = "mma" if types[0] == "f32" else "mma_f16"
        self.a, self.b, self.d = [], [], None


class MmaBatch:
    """Collects the mma instructions of a block, and writes each grid of tiles as one product.

    Chains that accumulate over k become the inner dimension, tiles that share A fragments the
    columns, tiles that share B fragments the rows.
    """

    def __init__(self, translator):
        self.t = translator
        self.chains = {}  # the names of a chain's results -> chain
        self.results = set()

    def add(self, i, types):
        t = self.t
        d, a, b, c = ((o if isinstance(o, tuple) else (o,)) for o in i.operands)
        a_names = tuple(t.use(r, "b32") for r in a)
        b_names = tuple(t.use(r, "b32") for r in b)
        c_names = tuple(t.current.get(getattr(r, "index", None)) for r in c)
        chain = self.chains.get(c_names)
        kept, local = ("f32", "f4") if types[0] == "f32" else ("b32", "u4")
        continued = (
            chain is not None
            and (kept, chain.type) == ("f32", types[1])
            and all((chain.instruction, r.index) in t.used_once for r in c)
        )
        if continued:
            del self.chains[c_names]
        else:
            chain = _Chain(i, types, tuple(t.use(r, kept) for r in c))
        chain.instruction = i
        chain.a.append(a_names)
        chain.b.append(b_names)
        chain.d = tuple(t.fresh(local) for _ in d)
        self.chains[chain.d] = chain
        self.results.update(chain.d)
        for register, name in zip(d, chain.d, strict=True):
            t.define(register, name, kept)

    def emit(self):
        chains, self.chains = list(self.chains.values()), {}
        self.results.clear()
        by_a = {}
        for chain in chains:
            by_a.setdefault((chain.function, chain.type, tuple(chain.a)), []).append(chain)
        by_b = {}
        for (*kind, a), row in by_a.items():
            by_b.setdefault((*kind, tuple(tuple(c.b) for c in row)), []).append((a, row))
        for (function, type_, b), rows in by_b.items():
            a = tuple(a for a, _ in rows)
            c = tuple(tuple(chain.c for chain in row) for _, row in rows)
            names = [name for _, row in rows for chain in row for name in chain.d]
            site = self.t.site(rows[0][1][0].instruction)
            text = f"{function}(x, m, {type_!r}, {_tuple(a)}, {_tuple(b)}, {_tuple(c)}, {site})"
            self.t.lines.append(f"({', '.join(names)},) = {text}")


def _tuple(nested):
    """Nested tuples of names as Python source."""
    return nested if isinstance(nested, str) else f"({', '.join(_tuple(n) for n in nested)},)"
