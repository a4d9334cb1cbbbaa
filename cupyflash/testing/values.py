"""Families of values, each of which stresses one term of the error bounds or one path of the kernels."""

import math

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

FAMILIES = [
    "normal",
    "heavy-tailed",
    "peaked",
    "offset",
    "duplicates",
    "subnormal",
    "rising to tiny values",
    "one sign",
    "rising",
    "jumping",
    "cancelling",
    "underflowing weights",
    "huge values",
    "constant",
]
DOUT_FAMILIES = ["normal", "normal", "one", "one sign", "sparse", "small", "large"]
#: With values of the family "integers" and this scale, weights are powers of two and every sum is exact.
EXACT_SCALE = math.log(2)


def require_known(argument, value, allowed):
    """ValueError that names the argument and what is allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{argument}: {value!r} is none of {', '.join(map(repr, dict.fromkeys(allowed)))}")


def element_type(name):
    """The NumPy dtype, bfloat16 among them."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def family(name, rng, shapes, dtype):
    """q, k, v in float64 that stress one error term, or one path of the online softmax."""
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    seqlen_k, head_dim = shapes[1][-2:]
    key_idx = np.arange(seqlen_k)[:, None]
    if name == "heavy-tailed":  # a few channels and a few entries are large
        channels = 1 + 20 * (rng.random(head_dim) < 0.05)
        q, k = q * channels, k * channels
        v = v * np.exp(rng.standard_normal(v.shape))
    elif name == "peaked":
        q = 8 * q
    elif name == "offset":  # all scores of a row share a large offset
        k = k + 20 * rng.standard_normal(head_dim)
    elif name == "duplicates":
        k, v = (x[..., key_idx[:, 0] // 7, :] for x in (k, v))
    elif name == "subnormal":
        v = v * 20 * float(ml_dtypes.finfo(dtype).smallest_subnormal)
        k = k * 20 * float(ml_dtypes.finfo(dtype).smallest_subnormal)
    elif name == "one sign":
        v = np.abs(v) + 0.5
    elif name.startswith("rising"):  # every tile has a new maximum
        q, k = np.abs(q), np.abs(k) * (0.1 + key_idx * 3 / max(seqlen_k, 1))
        if name == "rising to tiny values":
            v = v * 20 * float(ml_dtypes.finfo(dtype).smallest_subnormal)
    elif name == "jumping":  # every 16 keys the scores rise so far that what was summed before no longer counts
        q, k = 1 + 0.1 * q, (0.3 * k + 12 * (key_idx // 16)) / math.sqrt(head_dim)
    elif name == "cancelling":
        sign = np.where(key_idx % 2, -1, 1)
        k, v = k[..., key_idx[:, 0] // 2, :], sign * v[..., key_idx[:, 0] // 2, :]
    elif name == "underflowing weights":  # one key leads, all others together matter through large values
        q, k = np.ones_like(q), np.full_like(k, -17.7 / math.sqrt(head_dim))
        v = np.full_like(v, 6e4)
        k[..., :1, :], v[..., :1, :] = 0, 0
    elif name == "huge values":
        v = np.sign(v) * float(ml_dtypes.finfo(dtype).max) * rng.random(v.shape)
    elif name == "constant":
        v = np.ones_like(v)
    elif name == "integers":  # scores from -4 to 4
        q, k, v = np.sign(q), np.rint(k).clip(-1, 1), np.rint(2 * v).clip(-7, 7)
        q[np.argsort(rng.random(q.shape)).argsort() >= 4] = 0
    return q, k, v


def hostile_values(operands=("q", "k", "v"), values=(np.nan, np.inf, -np.inf), max_size=3):
    """Strategy of lists of (operand, position, value) for :func:`with_values`: which element becomes what."""
    place = st.tuples(st.sampled_from(operands), st.integers(0, 2**20), st.sampled_from(values))
    return st.lists(place, min_size=1, max_size=max_size)


def hostile_places(rng, names):
    """One to three (operand, position, value) as :func:`hostile_values` draws them, from a NumPy generator."""
    names, values = list(names), [np.nan, np.inf, -np.inf]
    return [
        (names[rng.integers(len(names))], int(rng.integers(2**20)), values[rng.integers(3)])
        for _ in range(rng.integers(1, 4))
    ]


def with_values(arrays, places):
    """Copies of the named arrays with the values at those places, positions taken modulo the size.

    >>> with_values({"q": np.zeros((1, 2)), "k": np.zeros((1, 2))}, [("k", 3, np.inf)])
    [array([[0., 0.]]), array([[ 0., inf]])]
    """
    spoilt = {name: np.array(array, order="C") for name, array in arrays.items()}
    for name, position, value in places:
        spoilt[name].reshape(-1)[position % spoilt[name].size] = value
    return list(spoilt.values())


def dout_family(name, rng, shape):
    dout = rng.standard_normal(shape)
    if name == "one":
        dout = np.ones(shape)
    elif name == "one sign":
        dout = np.abs(dout) + 0.5
    elif name == "sparse":
        dout = dout * (rng.random(shape) < 0.05)
    elif name == "small":
        dout = dout * 1e-6
    elif name == "large":
        dout = dout * 1000
    return dout
