"""Instructions across the 32 lanes of a warp: shuffles, votes, matches, reductions.

Arrays hold the warps one after another. `m` is the mask of active lanes (None: all).
"""

import numpy as np

from .group import WARP, NotConverged
from .numerics import canonical

_ALL = np.uint32(0xFFFFFFFF)


def _spread(x, a):
    return np.broadcast_to(a, x.n)


def bits_of_warps(x, flags):
    """One 32-bit word for each warp, repeated for its lanes."""
    words = np.packbits(np.ascontiguousarray(_spread(x, flags)), bitorder="little").view(np.uint32)
    return np.repeat(words, WARP)


def _gathered(x, m, members, ins):
    """Make sure that the named lanes of every active lane's warp are here (those that have not exited)."""
    if m is None:
        return
    here = bits_of_warps(x, m)
    absent = np.where(_spread(x, m), members & bits_of_warps(x, x.alive()) & ~here, np.uint32(0))
    if not absent.any():
        return
    if x.mask is not None and not (absent & bits_of_warps(x, x.mask)).any():
        raise NotConverged
    lane = int(np.argmax(absent != 0))
    first = (int(absent[lane]) & -int(absent[lane])).bit_length() - 1
    what = f"{ins} names lane {first} of its warp, which its predicate turns off"
    raise x.error(ins, lane, what, "inactive lane")


def sync_warp(x, m, members, ins):
    _gathered(x, m, members, ins)


def shfl(x, m, mode, a, b, c, members, ins):
    """The value of another lane, and whether that lane is in range. All ones where it does not take part: it is
    undefined, which is no fault before somebody uses it."""
    _gathered(x, m, members, ins)
    source, inside = shuffle_source(x, mode, b, c)
    value = a if a.size == 1 else a.take(source)
    absent = absent_sources(x, m, source, inside, members)
    return (value if absent is None else np.where(absent, _ALL, value)), inside


def absent_sources(x, m, source, inside, members):
    """Which active lanes read a lane that is inactive or not in their member mask; None: none does. Lanes that are
    not in their own mask are left out."""
    if m is None and members.size == 1 and members[0] == _ALL:
        return None
    active = _spread(x, True if m is None else m)
    members = _spread(x, members)
    absent = active & inside & ~(active[source] & is_member(members, source))
    absent &= is_member(members, x.lane)
    return absent if absent.any() else None


def is_member(members, lane):
    """Whether lanes are in member masks."""
    return (members >> (lane % WARP).astype(np.uint32)) & np.uint32(1) != 0


def shuffle_source(x, mode, b, c):
    key = (mode, b.tobytes(), c.tobytes()) if b.size == 1 and c.size == 1 else None
    found = x.memo.get(key) if key else None
    if found is None:
        lane = x.lane.astype(np.int64)
        bval, cval, segment = (
            (b & np.uint32(31)).astype(np.int64),
            (c & np.uint32(31)).astype(np.int64),
            (c >> np.uint32(8)) & np.uint32(31),
        )
        segment = segment.astype(np.int64)
        highest = (lane & segment) | (cval & ~segment & 31)
        lowest = lane & segment
        if mode == "up":
            source = lane - bval
            inside = source >= highest
        elif mode == "down":
            source = lane + bval
            inside = source <= highest
        elif mode == "bfly":
            source = lane ^ bval
            inside = source <= highest
        else:
            source = lowest | (bval & ~segment & 31)
            inside = source <= highest
        source = np.where(inside, source, lane) + np.arange(x.n) // WARP * WARP
        found = source, inside
        if key:
            x.memo[key] = found
    return found


def vote(x, m, mode, p, members, ins):
    """all, any, uni or ballot over the named lanes; exited lanes count for nothing."""
    _gathered(x, m, members, ins)
    plain = m is None and members.size == 1 and members[0] == _ALL
    if plain and p.size == 1:
        if mode == "ballot":
            return np.where(p, _ALL, np.uint32(0))
        return np.ones(1, bool) if mode == "uni" else p
    if plain and mode in ("any", "all"):
        by_warp = p.reshape(-1, WARP).any(1) if mode == "any" else p.reshape(-1, WARP).all(1)
        return np.repeat(by_warp, WARP)
    active = np.ones(x.n, bool) if m is None else _spread(x, m)
    named = bits_of_warps(x, active) & members
    yes = bits_of_warps(x, _spread(x, p) & active) & members
    if mode == "ballot":
        return yes
    if mode == "any":
        return yes != 0
    return yes == named if mode == "all" else (yes == named) | (yes == 0)


def _pairs(x, m, members):
    """(warps, 32, 32) bools: lane i counts lane j."""
    named = (_spread(x, members)[:, None] >> np.arange(WARP, dtype=np.uint32)) & np.uint32(1) != 0
    named = named.reshape(-1, WARP, WARP)
    return named if m is None else named & _spread(x, m).reshape(-1, 1, WARP)


def match(x, m, mode, a, members, ins):
    """any: the lanes with the same value. all: everybody and true if all values are equal, else 0."""
    _gathered(x, m, members, ins)
    values = _spread(x, a).reshape(-1, WARP)
    pairs = _pairs(x, m, members)
    same = (values[:, :, None] == values[:, None, :]) & pairs
    words = np.packbits(same, axis=2, bitorder="little").view(np.uint32).reshape(-1)
    if mode == "any":
        return words, np.ones(1, bool)
    everyone = np.packbits(pairs, axis=2, bitorder="little").view(np.uint32).reshape(-1)
    equal = words == everyone
    return np.where(equal, everyone, np.uint32(0)), equal


def redux(x, m, operation, a, members, ins):
    """Reduction over the named lanes."""
    _gathered(x, m, members, ins)
    info = np.iinfo(a.dtype)
    function, neutral = {
        "add": (np.add, 0),
        "min": (np.minimum, info.max),
        "max": (np.maximum, info.min),
        "and": (np.bitwise_and, info.max if a.dtype.kind == "u" else -1),
        "or": (np.bitwise_or, 0),
        "xor": (np.bitwise_xor, 0),
    }[operation]
    values = _spread(x, a).reshape(-1, 1, WARP)
    chosen = np.where(_pairs(x, m, members), values, a.dtype.type(neutral))
    return function.reduce(chosen, axis=2, dtype=a.dtype).reshape(-1)


def redux_f32(x, m, operation, absolute, nan, a, members, ins):
    """min or max of floats, of their magnitudes if `absolute`; of the numbers among them, unless a `nan` is to win."""
    bits = (np.abs(a) if absolute else a).view(np.int32)
    info, unknown = np.iinfo(np.int32), np.isnan(a)
    neutral = np.int32(info.max if operation == "min" else info.min)  # stands for a NaN in this order, too
    best = redux(x, m, operation, np.where(unknown, neutral, _ordered(bits)), members, ins)
    result = _ordered(best).view(np.float32)
    if nan:
        result = np.where(redux(x, m, "or", unknown.astype(np.int32), members, ins) != 0, np.float32(np.nan), result)
    return canonical(result)


def _ordered(bits):
    """Bits of floats as integers in the same order, -0 below +0; and back."""
    return bits ^ (bits >> np.int32(31) & np.int32(0x7FFFFFFF))


def activemask(x, m):
    return bits_of_warps(x, np.ones(1, bool) if m is None else m)


def elect(x, m, members, ins):
    """The lowest named lane, and whether that is the own lane."""
    _gathered(x, m, members, ins)
    named = members & activemask(x, m)
    lowest = named & (~named + np.uint32(1))
    leader = np.bitwise_count(lowest - np.uint32(1)).astype(np.uint32)
    return leader, x.lane == leader


def clock(x, name):
    """A counter that moves with every look at it."""
    ticks = x.chunk.ticks = x.chunk.ticks + 1
    if name == "clock_hi" or name == "globaltimer_hi":
        return np.zeros(1, np.uint32)
    return np.array([ticks], np.uint64 if name in ("clock64", "globaltimer") else np.uint32)
