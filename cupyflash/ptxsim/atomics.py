"""Atomics on memory: reads, modifications and writes of many lanes, as if one lane after another made its own."""

import numpy as np

from .memory import acting
from .numerics import (
    bf16_to_f32,
    bf16x2_to_f32,
    canonical,
    f16_to_f32,
    f16x2_to_f32,
    flush,
    maximum_number,
    minimum_number,
    packed,
    to_bf16,
    to_f16,
)


def atomic(x, m, space, address, size, operation, value, compare, ins):
    """Read-modify-write in lane order; returns the old values. `operation(old, value, compare)`
    acts on typed arrays, whose dtype is that of `value`."""
    dtype = value.dtype
    everyone = np.broadcast_to(address, x.n)
    sel, chosen = acting(x, x.mask if m is None else m, everyone)
    if sel is not None and sel.size == 0:
        return np.zeros(1, dtype)
    value = np.broadcast_to(value, x.n)
    compare = value if compare is None else np.broadcast_to(compare, x.n)
    if sel is not None:
        value, compare = value[sel], compare[sel]
    old = np.empty(chosen.shape, dtype)
    for view, index, lanes in space.locate(x, sel, chosen, size, True, ins):
        typed = view.view(dtype)
        lanes = slice(None) if lanes is None else lanes
        old[lanes] = _in_order(
            x, typed, np.broadcast_to(index, value[lanes].shape), value[lanes], compare[lanes], operation
        )
    if sel is None:
        return old
    spread = np.zeros(x.n, dtype)
    spread[sel] = old
    return spread


def atomic_vector(x, m, space, address, size, operation, values, ins):
    """Elements one after another, each as an atomic of its own: the ISA promises no more. The vector is aligned."""
    sel, chosen = acting(x, x.mask if m is None else m, np.broadcast_to(address, x.n))
    if sel is None or sel.size:
        space.locate(x, sel, chosen, size * len(values), True, ins)
    places = (address + address.dtype.type(size * n) for n in range(len(values)))
    return [atomic(x, m, space, at, size, operation, v, None, ins) for at, v in zip(places, values, strict=True)]


def _in_order(x, memory, index, value, compare, operation):
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.empty(ordered.size, bool)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    starts = np.flatnonzero(first)
    turn = np.arange(ordered.size) - np.repeat(starts, np.diff(np.append(starts, ordered.size)))
    old = np.empty(value.shape, value.dtype)
    by_turn = order[np.argsort(turn, kind="stable")]
    for lanes in np.split(by_turn, np.cumsum(np.bincount(turn))[:-1]):
        at = index[lanes]
        before = memory[at]
        after = operation(before, value[lanes], compare[lanes]).astype(value.dtype, copy=False)
        x.changes += before.tobytes() != after.tobytes()
        memory[at] = after
        old[lanes] = before
    return old


def atomic_add(old, value, compare):
    return old + value


def atomic_add_f32(old, value, compare):
    return canonical(old + value)


def atomic_add_ftz(old, value, compare):
    return flush(flush(old) + flush(value))


def _of_halves(operation, decode, encode):
    return lambda old, value, compare: encode(operation(decode(old), decode(value)))


ATOMICS_OF_HALVES = {
    (name, type_): _of_halves(operation, *coding)
    for name, operation in (("add", np.add), ("min", minimum_number), ("max", maximum_number))
    for type_, coding in {
        "f16": (f16_to_f32, to_f16),
        "bf16": (bf16_to_f32, to_bf16),
        "f16x2": (f16x2_to_f32, lambda x: packed(to_f16(x))),
        "bf16x2": (bf16x2_to_f32, lambda x: packed(to_bf16(x))),
    }.items()
}


def atomic_min(old, value, compare):
    return np.minimum(old, value)


def atomic_max(old, value, compare):
    return np.maximum(old, value)


def atomic_and(old, value, compare):
    return old & value


def atomic_or(old, value, compare):
    return old | value


def atomic_xor(old, value, compare):
    return old ^ value


def atomic_exch(old, value, compare):
    return value


def atomic_cas(old, value, compare):
    return np.where(old == compare, value, old)


def atomic_cas_wide(old, value, compare):
    """Of 16 bytes, which NumPy would compare as complex numbers."""
    same = (old.view(np.uint64) == compare.view(np.uint64)).reshape(-1, 2).all(1)
    return np.where(same, value, old)


def sixteen_bytes(low, high):
    """16 bytes of two 64-bit words."""
    return np.stack(np.broadcast_arrays(low, high), axis=-1).view(np.complex128).reshape(-1)


def atomic_inc(old, value, compare):
    return np.where(old >= value, old.dtype.type(0), old + old.dtype.type(1))


def atomic_dec(old, value, compare):
    return np.where((old == 0) | (old > value), value, old - old.dtype.type(1))
