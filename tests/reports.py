"""What the tests of reported inputs share: attention and its gradients for one input, judged by their bounds."""

from typing import NamedTuple

import numpy as np

from cupyflash import bounds, reference
from cupyflash.testing import assert_same_bits, assert_within_bound, element_type

DTYPES = ["float16", "bfloat16", "float32", "float64"]
HALF_TYPES = DTYPES[:2]
BOTTOM_RIGHT = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}


class Results(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def normal(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(element_type(dtype)) for shape in shapes]


def output_gradient(out, seed=1):
    return normal(out.dtype.name, out.shape, seed=seed)[0]


def checked(backend, inputs, *, dout=None, dlse=None, out=None, grads_out=None, **options):
    """Results within the bounds of the reference, and the reference's; dout is random where none is given."""
    out, lse = backend.attention(*inputs, out=out, **options)
    exact = reference.attention(*inputs, return_lse=True, **options)
    bound = bounds.attention(*inputs, return_lse=True, **options)
    arguments = (output_gradient(out) if dout is None else dout, *inputs, out, lse)
    gradients = backend.attention_backward(*arguments, dlse=dlse, grads_out=grads_out, **options)
    exact_gradients = reference.attention_backward(*arguments, dlse=dlse, **options)
    gradient_bounds = bounds.attention_backward(*arguments, dlse=dlse, **options)
    results, exact = Results(out, lse, *gradients), Results(*exact, *exact_gradients)
    for name, result, value, allowed in zip(
        Results._fields, results, exact, Results(*bound, *gradient_bounds), strict=True
    ):
        assert result.shape == value.shape and (name == "lse" or result.dtype == inputs[0].dtype)
        assert np.isfinite(allowed).all(), f"nothing is claimed of {name}"
        assert_within_bound(result, value, allowed, name=name)
    return results, exact


def assert_same(results, expected):
    """Each of two results bit for bit."""
    for result, value in zip(results, expected, strict=True):
        assert_same_bits(result, value)
