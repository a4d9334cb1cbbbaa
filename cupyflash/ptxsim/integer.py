"""Integer instructions on arrays of lanes, where NumPy's operators mean something else."""

import numpy as np

_BITS = {1: 8, 2: 16, 4: 32, 8: 64}


def _width(a):
    return _BITS[a.dtype.itemsize]


def unsigned(a):
    """The same bits as an unsigned integer."""
    return a.view(f"u{a.dtype.itemsize}")


def shl(a, n):
    """PTX clamps shift amounts: shifting by the width or more gives 0. `n` is uint32."""
    width = _width(a)
    if n.size == 1:
        return a << a.dtype.type(n[0]) if n[0] < width else a & a.dtype.type(0)
    return np.where(n < width, a << np.minimum(n, width - 1).astype(a.dtype), a.dtype.type(0))


def shr(a, n):
    """Logical for unsigned, arithmetic for signed; the amount is clamped at the width."""
    width = _width(a)
    if a.dtype.kind == "i":
        return a >> np.minimum(n, width - 1).astype(a.dtype)
    if n.size == 1:
        return a >> a.dtype.type(n[0]) if n[0] < width else a & a.dtype.type(0)
    return np.where(n < width, a >> np.minimum(n, width - 1).astype(a.dtype), a.dtype.type(0))


def wide(a):
    """Twice the width, sign-extended for signed."""
    return a.astype(f"{a.dtype.kind}{2 * a.dtype.itemsize}")


def mul_wide(a, b):
    return wide(a) * wide(b)


def mul_hi(a, b):
    if a.dtype.itemsize < 8:
        return (mul_wide(a, b) >> a.dtype.type(_width(a))).astype(a.dtype)
    low, ua, ub = np.uint64(0xFFFFFFFF), unsigned(a), unsigned(b)
    half = np.uint64(32)
    a0, a1, b0, b1 = ua & low, ua >> half, ub & low, ub >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    high = a1 * b1 + (middle >> half) + (((middle & low) + a0 * b1) >> half)
    if a.dtype.kind == "i":
        zero = np.uint64(0)
        high = high - np.where(a < 0, ub, zero) - np.where(b < 0, ua, zero)
    return high.view(a.dtype)


def div(a, b):
    """Truncates; division by zero gives all ones, as GPUs do."""
    zero = b == 0
    if a.dtype.kind == "u":
        return np.where(zero, a.dtype.type(np.iinfo(a.dtype).max), a // np.where(zero, a.dtype.type(1), b))
    safe = np.where(zero, a.dtype.type(1), b)
    quotient = a // safe
    quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(zero, a.dtype.type(-1), quotient)


def rem(a, b):
    zero = b == 0
    safe = np.where(zero, a.dtype.type(1), b)
    return np.where(zero, a, np.fmod(a, safe) if a.dtype.kind == "i" else a % safe)


def add_sat(a, b):
    return np.clip(wide(a) + wide(b), *_limits(a.dtype)).astype(a.dtype)


def sub_sat(a, b):
    return np.clip(wide(a) - wide(b), *_limits(a.dtype)).astype(a.dtype)


def _limits(dtype):
    info = np.iinfo(dtype)
    return info.min, info.max


def sad(a, b, c):
    """c + |a - b|, unsigned in the sum."""
    difference = np.where(a < b, unsigned(b) - unsigned(a), unsigned(a) - unsigned(b))
    return (unsigned(c) + difference).view(a.dtype)


def popc(a):
    return np.bitwise_count(a).astype(np.uint32)


def brev(a):
    b = np.ascontiguousarray(a).view(np.uint8).reshape(-1, a.dtype.itemsize)[:, ::-1]
    return np.ascontiguousarray(_REVERSED[b]).view(a.dtype).reshape(-1)


_REVERSED = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)


def bfind(a, shiftamt=False):
    """Position of the most significant one (of the most significant non-sign bit for signed);
    all ones if there is none. With `shiftamt`, the shift that brings it to the top."""
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a)
    u = unsigned(a)
    found = np.full(u.shape, -1, np.int64)
    rest = u
    shift = _width(u) // 2
    position = np.zeros(u.shape, np.int64)
    while shift:
        high = rest >> u.dtype.type(shift)
        upper = high != 0
        position += np.where(upper, shift, 0)
        rest = np.where(upper, high, rest)
        shift //= 2
    found = np.where(u != 0, position, found)
    if shiftamt:
        found = np.where(u != 0, _width(u) - 1 - found, found)
    return found.astype(np.uint32)


def clz(a):
    u = unsigned(a)
    return np.where(u == 0, np.uint32(_width(u)), np.uint32(_width(u) - 1) - bfind(u))


def bfe(a, position, length):
    """Bit field extract; the sign of a signed field is its top bit, or bit msb if it passes that."""
    msb = _width(a) - 1
    p, n = (position & np.uint32(255)).astype(np.int64), (length & np.uint32(255)).astype(np.int64)
    u = unsigned(a)
    shifted = np.where(p > msb, u.dtype.type(0), u >> np.minimum(p, msb).astype(u.dtype))
    keep = _ones(n, u.dtype)
    field = shifted & keep
    if a.dtype.kind == "i":
        sign_at = np.minimum(p + n - 1, msb)
        negative = (n > 0) & ((u >> np.maximum(sign_at, 0).astype(u.dtype)) & u.dtype.type(1) != 0)
        available = np.clip(msb + 1 - p, 0, None)
        field = np.where(negative, field | ~_ones(np.minimum(n, available), u.dtype), field)
    return field.view(a.dtype)


def bfi(a, b, position, length):
    """The low `length` bits of a inserted into b at `position`."""
    msb = _width(b) - 1
    p, n = (position & np.uint32(255)).astype(np.int64), (length & np.uint32(255)).astype(np.int64)
    place = np.minimum(p, msb).astype(b.dtype)
    mask = np.where(p > msb, b.dtype.type(0), _ones(n, b.dtype) << place)
    return (b & ~mask) | ((a << place) & mask)


def _ones(count, dtype):
    width = np.dtype(dtype).itemsize * 8
    top = np.dtype(dtype).type(np.iinfo(dtype).max)
    shift = np.clip(width - count, 0, width - 1).astype(dtype)
    return np.where(count == 0, np.dtype(dtype).type(0), top >> shift)


def bmsk(position, length, clamp):
    p, n = position.astype(np.int64), length.astype(np.int64)
    if clamp:
        p, n = np.minimum(p, 32), np.minimum(n, 32)
    else:
        p, n = p & 31, n & 31
    ones = (np.uint64(1) << n.astype(np.uint64)) - np.uint64(1)
    return (ones << p.astype(np.uint64)).astype(np.uint32)


def fns(mask, base, offset):
    """Where the set bit number |offset| is, counted from bit `base` on, upwards or (offset < 0) downwards; with an
    offset of 0 `base`, if that bit is set. All ones where there is none.
    """
    mask, base, offset = (a.astype(np.int64)[:, None] for a in (mask, base, offset))
    places = np.arange(32)
    set_ = (mask >> places & 1 != 0) & (base < 32)
    up, down = set_ & (places >= base), set_ & (places <= base)
    number = np.where(offset > 0, up.cumsum(1), down[:, ::-1].cumsum(1)[:, ::-1])
    found = np.where(offset > 0, up, np.where(offset < 0, down, up & down)) & (number == np.maximum(abs(offset), 1))
    return np.where(found.any(1), found.argmax(1), 2**32 - 1).astype(np.uint32)


def absolute_differences(a, b, count, total):
    """|a - b| of `count` unsigned parts of each word, in their places; with a total, that and their sum."""
    x, y = (np.ascontiguousarray(v).view(f"u{4 // count}").reshape(-1, count) for v in (a, b))
    difference = np.where(x < y, y - x, x - y)
    if total is None:
        return difference.view(np.uint32).reshape(-1)
    return total + difference.sum(-1, dtype=np.uint32)


def in_halves(operation, a, b, kind, relu):
    """An operation on both halves of each word, which are integers of this kind; with `relu` nothing is below 0."""
    x, y = (np.ascontiguousarray(v).view(kind).reshape(-1, 2) for v in (a, b))
    result = operation(x, y)
    if relu:
        result = np.maximum(result, 0)
    return np.ascontiguousarray(result).view(np.uint32).reshape(-1)


def shf(low, high, n, left, clamp):
    """Funnel shift of high:low."""
    amount = (np.minimum(n, 32) if clamp else n & np.uint32(31)).astype(np.uint64)
    pair = (high.astype(np.uint64) << np.uint64(32)) | low
    return (pair << amount >> np.uint64(32) if left else pair >> amount).astype(np.uint32)


def prmt(a, b, selector, mode=None):
    """Byte permute of b:a."""
    pair = (b.astype(np.uint64) << np.uint64(32)) | a
    selector = selector.astype(np.uint64)
    shape = np.broadcast(pair, selector).shape
    result = np.zeros(shape, np.uint64)
    for i in range(4):
        nibble = _prmt_nibble(selector, i, mode)
        byte = pair >> ((nibble & np.uint64(7)) << np.uint64(3)) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result |= np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * i)
    return result.astype(np.uint32)


def _prmt_nibble(selector, i, mode):
    if mode is None:
        return selector >> np.uint64(4 * i) & np.uint64(15)
    s = (selector & np.uint64(3)).astype(np.int64)
    table = {
        "f4e": lambda: s + i,
        "b4e": lambda: (s - i) % 8,
        "rc8": lambda: s,
        "ecl": lambda: np.maximum(s, i),
        "ecr": lambda: np.minimum(s, i),
        "rc16": lambda: (s & 1) * 2 + i % 2,
    }
    return table[mode]().astype(np.uint64)


def lop3(a, b, c, table):
    """The function whose truth table is read off by a = 0xF0, b = 0xCC, c = 0xAA."""
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def dp4a(a, b, c):
    """c + the dot product of four bytes; signedness by dtype (int8 or uint8 views)."""
    x = np.ascontiguousarray(a).view(a.dtype.kind + "1").reshape(-1, 4).astype(np.int32)
    y = np.ascontiguousarray(b).view(b.dtype.kind + "1").reshape(-1, 4).astype(np.int32)
    return c.view(np.int32) + (x * y).sum(-1, dtype=np.int32)


def dp2a(a, b, c, high):
    """c + the dot product of the two halves of a with the lower or upper two bytes of b."""
    x = np.ascontiguousarray(a).view(a.dtype.kind + "2").reshape(-1, 2).astype(np.int32)
    y = np.ascontiguousarray(b).view(b.dtype.kind + "1").reshape(-1, 2, 2)[:, int(high)].astype(np.int32)
    return c.view(np.int32) + (x * y).sum(-1, dtype=np.int32)


def mul24(a, b, high):
    """Product of the low 24 bits; its low 32 bits, or bits 16 to 47."""
    shift = a.dtype.type(8)
    product = mul_wide(a << shift >> shift, b << shift >> shift)
    return (product >> product.dtype.type(16) if high else product).astype(a.dtype)


def join(parts, kind):
    """Narrow values, lowest first, as one wider integer."""
    dtype = np.dtype(kind)
    result = parts[0].astype(f"u{dtype.itemsize}")
    for n, part in enumerate(parts[1:], 1):
        result = result | part.astype(result.dtype) << result.dtype.type(8 * part.dtype.itemsize * n)
    return result.view(dtype)


def split(a, count):
    """The reverse: a tuple of narrower values."""
    narrow = f"u{a.dtype.itemsize // count}"
    width = 8 * a.dtype.itemsize // count
    return tuple((a >> a.dtype.type(width * n)).astype(narrow) for n in range(count))


def add_carry(a, b, carry):
    """a + b + carry, and the carry out."""
    s = a + b
    out = s < a
    if carry is not None:
        total = s + carry.astype(s.dtype)
        return total, out | (total < s)
    return s, out


def sub_carry(a, b, carry):
    """a + ~b + carry, and the carry out, which is set where nothing is borrowed; `carry` None counts as set.

    The ISA says that a borrow goes into the flag, and from there into a difference. On GPUs the flag is this carry: an
    addition may follow a subtraction, as in what NVRTC makes of 128-bit divisions.
    """
    s, out = a - b, a >= b
    if carry is None:
        return s, out
    total = s - (~carry).astype(s.dtype)
    return total, out & (total <= s)
