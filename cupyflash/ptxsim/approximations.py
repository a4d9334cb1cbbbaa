"""The approximate instructions, ex2 and its like: correctly rounded, or off by as much as the PTX ISA allows.

`settings(ulp_noise=k)` moves a result by an amount drawn from the seed, the operation and the operand. As on a GPU,
where tables decide, an operand has the same result in every thread, and odd functions stay odd.
"""

import functools
import hashlib
import math

import numpy as np

from .numerics import bf16_to_f32, f16_to_f32, to_bf16, to_f16

_EXACT = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
}
_ULPS = {"ex2": 2, "rcp": 1}  # of the correctly rounded float32, at most
_LEAST_NORMAL = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}


def approximation(x, name, type_, a):
    """ex2, lg2, sin, cos, tanh, rcp or rsqrt of operands `a`, decoded to float32; `type_`: f32, f16 or bf16.

    float32, or for 16-bit types float64 that remains to be rounded.
    """
    exact = _EXACT[name](a.astype(np.float64))
    settings = x.chunk.launch.settings
    if settings.ulp_noise:
        draw = _draw(a, name == "ex2", _key(name, type_, settings.seed))
        exact = _moved(name, type_, a, exact, settings.ulp_noise, draw)
    return exact.astype(np.float32) if type_ == "f32" else exact


def _moved(name, type_, a, exact, ulps, draw):
    """The result, as float64, moved by `draw`, from -1 to 1, times what is allowed."""
    nearest = _rounded(exact, type_)
    if type_ == "f32" and name in _ULPS:
        center, allowed = nearest, min(ulps, _ULPS[name]) * _spacing(nearest)
    else:
        center, allowed = exact, min(ulps / 2, 1.0) * _documented(name, type_, np.abs(a), np.abs(exact))
    moved = _rounded(center + draw * np.sign(exact) * allowed, type_)
    moved = np.where(np.abs(moved - center) > allowed, nearest, moved)
    if name in ("sin", "cos", "tanh"):
        moved = np.clip(moved, -1.0, 1.0)
    elif name != "lg2":  # a sign stays, and so do normal numbers: .ftz would make 0 of what is smaller
        size = moved * np.sign(nearest)
        least = _LEAST_NORMAL[type_]
        moved = np.where((size <= 0) | ((size < least) & (np.abs(nearest) >= least)), nearest, moved)
    return np.where((nearest == 0) | ~np.isfinite(nearest) | (a == 0) | ~np.isfinite(a), nearest, moved)


def _documented(name, type_, a, exact):
    """The largest error that the PTX ISA states, for magnitudes of operand and result; 0 where it states none."""
    if type_ != "f32":
        if name == "tanh":
            return 2.0**-10.987 if type_ == "f16" else 2.0**-8
        return exact * (2.0**-9.9 if type_ == "f16" else 2.0**-7)
    if name == "lg2":
        return np.where((a > 0.5) & (a < 2), 2.0**-22, 2.0**-22 * exact)
    if name == "tanh":
        return np.where(a < 2.0**-126, 0.0, 2.0**-11 * exact)
    if name == "rsqrt":
        return 2.0**-22.9 * exact
    return np.where(a <= 2 * math.pi, 2.0**-20.5, np.where(a <= 100 * math.pi, 2.0**-14.7, 0.0))


def _rounded(x, type_):
    """To the nearest value of a type, as float64."""
    if type_ == "f16":
        x = f16_to_f32(to_f16(x))
    elif type_ == "bf16":
        x = bf16_to_f32(to_bf16(x))
    return x.astype(np.float32).astype(np.float64)


def _spacing(x):
    return np.spacing(np.abs(x).astype(np.float32)).astype(np.float64)


def _draw(a, signed, key):
    """A float64 in [-1, 1) for each operand, by a mixing function of 64 bits (SplitMix64) of operand and key."""
    h = a.view(np.uint32).astype(np.uint64)
    if not signed:
        h &= np.uint64(0x7FFFFFFF)
    h += np.uint64(key)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    h ^= h >> np.uint64(31)
    return (h >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0


@functools.cache
def _key(name, type_, seed):
    digest = hashlib.blake2b(f"{name} {type_} {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
