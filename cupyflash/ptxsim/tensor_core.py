"""Tensor-core instructions: ldmatrix and relatives, and mma.sync as matrix products.

With `settings(mma="fp32")` a chain of accumulations is one product: the products of 16-bit numbers and nearly
all their sums are exact in float64, so that an element does not depend on its place in the matrix, as it does
with a float32 product of the BLAS; it is rounded to float32 at the end. The other models: tensor_models.py. Sums of
integers are exact in float64; products of float64 are added one by one, k ascending, by fused multiply-adds.

Lane l of a warp has g = l >> 2 and t = l & 3. A fragment register of 8 rows holds row g, columns 2t and 2t + 1 (of
shorter types more, of longer ones t alone), so an array over lanes is, reshaped, a stack of 8 x 4 matrices of pairs.
"""

import numpy as np

from .exact import exact_f64
from .fma import fma_f64
from .memory import SHARED_WINDOW, WINDOW_SHIFT
from .numerics import bf16_to_f32, canonical, f16_to_f32, f16x2_to_f32, pair
from .scratch import scratch
from .tensor_models import multiply_add

WARP = 32
_SERIAL_SIZE = 1 << 18  # rows * columns * inner dimension
_DECODE = {"f16": f16_to_f32, "bf16": bf16_to_f32}
_BYTES = {"s8": np.int8, "u8": np.uint8}
IN_REGISTER = {
    "f16": 2,
    "bf16": 2,
    "tf32": 1,
    "f64": 1,
    "s8": 4,
    "u8": 4,
    "s4": 8,
    "u4": 8,
    "b1": 32,
}  # numbers of A or B
_F16_SCALE = 2.0**112  # of a float32 with the bits of a binary16 number: the difference of the exponents' biases


_SMALLEST = np.array([1], np.uint32).view(np.float32)


def _keeps_subnormals():
    """Whether this thread computes with float32 subnormals, which those of halves become on their way; XLA's flush."""
    return _SMALLEST.astype(np.float64)[0] != 0


def in_shared(address):
    """A 64-bit address that may be generic, as an address in shared memory."""
    return np.where(address >> WINDOW_SHIFT == 1, address - SHARED_WINDOW, address)


def require_whole_warps(x, m, ins):
    if m is None or m.all():
        return
    here = np.broadcast_to(m, x.n).reshape(-1, WARP)
    warp = int(np.argmin(here.all(1)))
    missing = WARP - int(np.count_nonzero(here[warp]))
    first = warp * WARP + int(np.argmax(here[warp]))  # that is here, so that it is a thread of the block
    what = f"{ins} needs every lane of the warp, {missing} {'is' if missing == 1 else 'are'} missing"
    raise x.error(ins, first, what + x.beyond(first))


def _rows(x, m, address, count, write, ins):
    """The flat array of 16-byte rows, and the index (count, warps, 8) of the rows that lanes name."""
    require_whole_warps(x, m, ins)
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
    require_whole_warps(x, m, ins)
    return transposed(np.array(np.broadcast_to(a, x.n)).reshape(1, -1, 32))[0]


def mma(x, m, types, a, b, c, ins):
    """d = c + sum_k a_k b_k for a grid of tiles.

    `types`: of A and B. a[i][k]: registers of the A fragment of tile row i at step k (2 or 4); b[j][k]: those of B for
    tile column j (1 or 2); c[i][j]: the 4 accumulators. Returns the 4 results of every tile, flat.
    """
    require_whole_warps(x, m, ins)
    rows, columns = len(a), len(b)
    addends = [register for row in c for tile in row for register in tile]
    model = x.chunk.launch.settings.mma
    left, right, lengths = _factors(x, types, a, b, even_first=model == "fp32")
    if model != "fp32":
        product = multiply_add(model, types[0], left, right, _matrix(x, addends, rows, columns), lengths)
        return list(canonical(_by_register(product, rows, columns).reshape(rows * columns * 4, -1)))
    product = _product(left, right)
    rounded = scratch("rounded", product.shape, np.float32)
    in_fours = rounded.view(np.complex128).reshape(-1, rows, 2, 8, columns, 2).transpose(1, 4, 2, 5, 0, 3)
    if any(z.size > 1 or z[0] != 0 for z in addends):
        addend = np.stack([np.broadcast_to(z, x.n) for z in addends])
        np.copyto(in_fours, addend.view(np.complex128).reshape(in_fours.shape))
        product += rounded
    np.copyto(rounded, product, casting="same_kind")
    return list(canonical(np.ascontiguousarray(in_fours).view(np.float32).reshape(rows * columns * 4, -1)))


def mma_f16(x, m, types, a, b, c, ins):
    """The same with float16 accumulators, two in a register: 2 of c and of the results for every tile."""
    require_whole_warps(x, m, ins)
    rows, columns = len(a), len(b)
    left, right, lengths = _factors(x, types, a, b)
    registers = (np.broadcast_to(register, x.n) for row in c for tile in row for register in tile)
    addends = [values for register in registers for values in f16x2_to_f32(register).T]
    model = x.chunk.launch.settings.mma
    model = "exact" if model == "fp32" else model
    product = multiply_add(model, types[0], left, right, _matrix(x, addends, rows, columns), lengths, "f16")
    bits = _by_register(product, rows, columns).reshape(rows * columns * 2, 2, -1)
    bits = np.where(np.isnan(bits), np.uint16(0x7FFF), bits.view(np.uint16))
    return list(pair(bits[:, 0], bits[:, 1]))


def mma_s32(x, m, types, a, b, c, ins):
    """The same with integers: sums wrap, or with .satfinite, of one instruction at a time, are clamped. Of bits, the
    product is .and; those that differ (.xor) are the ones of either less those of both, twice."""
    require_whole_warps(x, m, ins)
    rows, columns = len(a), len(b)
    left, right, _ = _factors(x, types, a, b)
    addend = _matrix(x, [register for row in c for tile in row for register in tile], rows, columns)
    product = _product(left, right)
    if "xor" in ins.modifiers:
        ones = left.sum(2).reshape(*product.shape[:3], 1) + right.sum(1)[:, None, None]
        product = ones - 2 * product
    total = product.astype(np.int64).reshape(addend.shape) + addend
    if "satfinite" in ins.modifiers:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return list(_by_register(total.astype(np.int32), rows, columns).reshape(addend[0].size // WARP, -1))


def mma_f64(x, m, types, a, b, c, ins):
    """The same in float64. The ISA promises fused multiply-adds and leaves their order open."""
    require_whole_warps(x, m, ins)
    rows, columns = len(a), len(b)
    left, right, _ = _factors(x, types, a, b)
    total = _matrix(x, [register for row in c for tile in row for register in tile], rows, columns)
    right = np.repeat(right, len(left) // len(right), axis=0)
    rounding = next((mode for mode in ("rz", "rm", "rp") if mode in ins.modifiers), "rn")
    for k in range(left.shape[2]):
        factors = (f.reshape(-1) for f in np.broadcast_arrays(left[:, :, k, None], right[:, k, None]))
        terms = *factors, total.reshape(-1)
        total = (fma_f64(*terms) if rounding == "rn" else exact_f64("fma", rounding, *terms)).reshape(total.shape)
    return list(_by_register(total, rows, columns).reshape(total[0].size // WARP, -1))


def _factors(x, types, a, b, even_first=False):
    """The matrices of the fragments, (warps, rows, k) and (groups of warps that share one, k, 8 columns), and the
    length of each step along k. `even_first`: in a tile, even columns before odd ones, so that the accumulators of
    four lanes lie together."""
    warps, rows, columns = x.warps, len(a), len(b)
    halves = len(a[0][0]) // len(b[0][0])  # of 8 rows, in a tile of A
    slices = sum(len(step) for step in b[0])  # along k, of as many elements as 4 lanes have in a register
    word = np.float64 if types[0] == "f64" else np.uint32
    left = scratch("left bits", (warps, rows, halves, 8, slices, 4), word)
    for i, steps in enumerate(a):
        at = 0
        for registers in steps:
            for n, register in enumerate(registers):
                left[:, i, n % halves, :, at + n // halves] = _fragment(x, register)
            at += len(registers) // halves
    right = scratch("right bits", (warps, columns, 8, slices, 4), word)
    for j, steps in enumerate(b):
        for at, register in enumerate(r for step in steps for r in step):
            right[:, j, :, at] = _fragment(x, register)
    right = right[:: _sharing(x, right)]
    if even_first:
        right = right.reshape(-1, columns, 4, 2, slices, 4).swapaxes(2, 3)
    right = np.ascontiguousarray(right)
    width = 4 * IN_REGISTER[types[0]]
    left = _decoded("left", types[0], left).reshape(warps, rows * halves * 8, slices * width)
    right = _decoded("right", types[1], right).reshape(-1, columns * 8, slices * width)
    return left, right.swapaxes(1, 2), [width * len(step) for step in b[0]]


def _matrix(x, addends, rows, columns):
    """The accumulators of a grid of tiles, 2 or 4 for each, as a matrix for each warp: the inverse of
    `_by_register`."""
    addend = np.stack([np.broadcast_to(z, x.n) for z in addends])
    addend = addend.reshape(rows, columns, -1, 2, x.warps, 8, 4).transpose(4, 0, 2, 5, 1, 6, 3)
    return addend.reshape(x.warps, -1, columns * 8)


def _by_register(tiles, rows, columns):
    """A matrix of tiles of each warp, (warps, 8 or 16 rows, 8 columns), as a view of which the last three axes are the
    lanes and those before them the accumulators of a tile, (rows, columns, 1 or 2, 2)."""
    return tiles.reshape(len(tiles), rows, -1, 8, columns, 4, 2).transpose(1, 4, 2, 6, 0, 3, 5)


def _decoded(side, type_, words):
    """The numbers in registers, of tf32 without the lower 13 bits, which do not count, as float64."""
    if type_ == "f64":
        return words
    if type_ in ("s8", "u8"):
        return words.view(_BYTES[type_]).astype(np.float64)
    if type_ in ("s4", "u4"):
        return _nibbles(type_, words.view(np.uint8)).astype(np.float64)
    if type_ == "b1":
        return np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(np.float64)
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


def _nibbles(type_, bytes_):
    """The two 4-bit numbers in each byte, the lower first."""
    numbers = np.stack([bytes_ & np.uint8(15), bytes_ >> np.uint8(4)], axis=-1)
    return numbers if type_ == "u4" else ((numbers ^ np.uint8(8)) - np.uint8(8)).view(np.int8)


def _sharing(x, right):
    """How many warps in a row have the same second factors: those of a block, or 1."""
    warps = x.chunk.pitch // WARP
    if x.lanes is not None or warps == 1:
        return 1
    right = right.reshape(x.chunk.count, warps, -1)
    same = np.array_equal(right[0, 0], right[0, 1]) and (right[:, 1:] == right[:, :1]).all()
    return warps if same else 1


def _product(left, right):
    """The matrix product of each warp, made of products so small that OpenBLAS does not wake its threads for them."""
    left, right = left.reshape(len(right), -1, *left.shape[1:]), right[:, None]
    product = scratch("product", (*left.shape[:3], right.shape[3]), np.float64)
    width = max(8, _SERIAL_SIZE // (left.shape[2] * left.shape[3]) // 8 * 8)
    for at in range(0, right.shape[3], width):
        part = slice(at, at + width)
        np.matmul(left, right[..., part], out=product[..., part])
    return product


def _fragment(x, register):
    return (register if register.size == x.n else np.broadcast_to(register, x.n)).reshape(-1, 8, 4)
