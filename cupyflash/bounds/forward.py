"""Rigorous bounds on the error of each element of out and lse, against the exact result for the same inputs.

With s_j the scaled scores of a row, m their maximum, l = sum_j exp(s_j - m), P_j = exp(s_j - m) / l and O = P V, a
kernel computes the weight of key j in the numerator as P_j (1 + w_j)(1 + t_j)(1 + r_j) and in the denominator as
P_j (1 + w_j)(1 + g_j). w_j is what both share (score, exponential, rescaling), t_j the rounding of P, r_j the
accumulation of P V and g_j that of l. Then exactly

    O^ - O = (sum_j P_j w_j (V_j - O) + sum_j P_j (1 + w_j) (((1 + t_j)(1 + r_j) - 1) V_j - g_j O)) / D,
    D = 1 + sum_j P_j ((1 + w_j)(1 + g_j) - 1):

shared errors multiply V - O, so that they cancel where V is constant. Building blocks: products of n terms by Higham
(2002) for float32 in any order and by the block-truncation model of tensor cores (Fasi et al. 2021; Khattak and
Mikaitis 2025); ex2, rcp and lg2 with the errors that the PTX ISA states. The kernels flush float32 subnormals to zero
(``-ftz=true``): every flushed quantity adds 2^-126 of its own scale. The reference's last rounding, to float64, counts,
which matters for float64 kernels only.

A bound is infinite where the call promises nothing: a row that sees a non-finite input, a product that may overflow
float32, a result that may overflow its dtype, or scores so large that their rounding alone moves a weight by a quarter.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

import ml_dtypes
import numpy as np

from cupyflash._problem import FLOAT64, HALF_TYPES, LOG2_E, Align, Problem, attention_problem
from cupyflash.reference.arrays import on_host, returned, wide
from cupyflash.reference.masks import visible_keys
from cupyflash.reference.scores import pair_scores

U32 = 2.0**-24
FLUSH = 2.0**-126  # below it float32 kernels compute with 0
U64 = 2.0**-53
EXP_ERROR = 5 * U32  # ex2.approx: 2 ulp from the correctly rounded value
MIN_KEY_TILE = 32  # the smallest BLOCK_N: no row is rescaled more often than ceil(S / 32) times
FMA_TILES = (16, 64)  # the fewest and the most rows of a tile that float32 and float64 kernels sum over
ROW_LANES = 16  # share the keys of a tile there
ILL_CONDITIONED = 0.25  # how far the weight of a key may be off, against the row's largest, for a bound to be claimed
SLACK = 1 + 1e-4  # what is of second order: roundings here, and in the reference before its last


@dataclass(frozen=True)
class Precision:
    """Unit roundoff, half the smallest subnormal, and the first value that rounds to infinity."""

    unit: float
    underflow: float
    overflow: float

    @staticmethod
    def of(dtype: np.dtype) -> Precision:
        info = ml_dtypes.finfo(dtype)
        unit = float(info.eps) / 2
        return Precision(unit, float(info.smallest_subnormal) / 2, float(info.max) * (1 + unit / 2))


@dataclass(frozen=True)
class Arithmetic:
    """What kernels compute in: its unit roundoff, and what an operation may lose at most where it underflows."""

    unit: float
    flush: float

    @staticmethod
    def of(dtype: np.dtype) -> Arithmetic:
        """float64 rounds to multiples of 2^-1074 there, exp by 2 of them; float32 flushes, as operand, too."""
        return Arithmetic(U64, 2.0**-1072) if dtype == FLOAT64 else Arithmetic(U32, FLUSH)


def attention(
    q,
    k,
    v,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    return_lse: bool = False,
    out=None,
):
    """Largest error that each element of :func:`cupyflash.attention` may have, against :mod:`cupyflash.reference`.

    Shapes, options and errors are those of :func:`cupyflash.attention`. Returns float64 arrays of the inputs' kind:
    for out (..., L, Dv), with ``return_lse`` also for lse (..., L). A row that sees no key is exact: bound 0, both lse
    -inf. ``out``, float64, receives the first.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 8)).astype(np.float16)
    >>> bound, lse_bound = attention(q, k, v, causal=True, return_lse=True)
    >>> bool((bound < 2e-3 * np.abs(v).max()).all()), bool((lse_bound < 1e-4).all())
    (True, True)
    """
    problem = attention_problem(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align, return_lse=return_lse)
    return _returned(problem, _tiled_bounds, q, k, v, return_lse, out)


def attention_terms(
    q, k, v, *, softmax_scale: float | None = None, causal: bool = False, align: Align | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What each source of error contributes to :func:`attention`: the bounds on out and lse that it has alone.

    Arguments are those of :func:`attention`. A term is a pair of float64 NumPy arrays of the shapes of out and lse,
    infinite where the bound is; to first order the terms sum to it.

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 16, 8)).astype(np.float16)
    >>> terms = {name: out.max() for name, (out, lse) in attention_terms(q, k, v).items()}
    >>> max(terms, key=terms.get)
    'rounding of P'
    """
    problem = attention_problem(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = Exact.of(problem, q, k, v)
        errors = _tiled_errors(problem, exact)
        claimed = [np.isfinite(bound) for bound in _propagated(problem, exact, errors)]
        none = Errors(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        least = _propagated(problem, exact, none)
        alone = {
            name: _propagated(problem, exact, replace(none, **{field: getattr(errors, field) for field in fields}))
            for name, fields in TERMS.items()
        }
        terms = {name: [x - y for x, y in zip(bounds, least, strict=True)] for name, bounds in alone.items()}
    terms["rounding of out"] = least
    shapes = [problem.out_shape, (*problem.lse_shape, 1)]
    for name, bounds in terms.items():
        out, lse = (
            np.broadcast_to(np.where(where, x, np.inf), shape)
            for where, x, shape in zip(claimed, bounds, shapes, strict=True)
        )
        terms[name] = out, lse[..., 0]
    return terms


def attention_naive(
    q,
    k,
    v,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    return_lse: bool = False,
    out=None,
):
    """The same for :func:`cupyflash.naive.attention`, which rounds scores and weights to the inputs' dtype."""
    problem = attention_problem(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align, return_lse=return_lse)
    return _returned(problem, _naive_bounds, q, k, v, return_lse, out)


@dataclass(frozen=True)
class Exact:
    """What the bounds are made of, rounded to float64; the last two axes are (query, key) or (query, column)."""

    visible: np.ndarray  # (L, S) bool
    scores: np.ndarray  # |s|, 0 where masked
    products: np.ndarray  # |softmax_scale| |q| . |k|, 0 where masked
    factors: np.ndarray  # sum of |q| and sum of |k|, together
    relative: np.ndarray  # x = s - m <= 0, -inf where masked
    row_max: np.ndarray  # |m|, with a last axis of length 1 as all that follow
    row_sum: np.ndarray  # l
    lse: np.ndarray  # |lse|, 0 where the row sees no key
    weights: np.ndarray  # P (query, key)
    values: np.ndarray  # V (key, column), non-finite ones replaced by 0
    out: np.ndarray  # O (query, column)
    sees_nonfinite: np.ndarray
    may_overflow: np.ndarray  # a visible q . k, or its product with the scale, in the kernel's arithmetic

    @staticmethod
    def of(problem: Problem, q, k, v) -> Exact:
        q, k, v = on_host(problem, q, k, v)
        visible = visible_keys(problem)
        bad_q, bad_k, bad_v = (~np.isfinite(x).all(axis=-1, keepdims=True) for x in (q, k, v))
        bad_key = bad_k.mT | bad_v.mT
        sees_nonfinite = (visible & (bad_q | bad_key)).any(axis=-1, keepdims=True)
        q, k, v = (np.where(np.isfinite(x), x, 0) for x in (q, k, v))

        scores = pair_scores(problem, *wide(problem.dtype, q, k)).final
        row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        row_max = np.where(row_max == -np.inf, 0, row_max)
        relative, scores, row_max = (np.asarray(x) for x in (scores - row_max, scores, row_max))
        magnitude = np.where(visible, np.abs(q) @ np.abs(k).mT, 0)
        scale = abs(problem.softmax_scale)
        row_sum = np.maximum(np.exp(relative).sum(axis=-1, keepdims=True), 1)
        weights = np.exp(relative) / row_sum
        return Exact(
            visible=visible,
            scores=np.where(visible, np.abs(scores), 0),
            products=scale * magnitude,
            factors=np.abs(q).sum(axis=-1, keepdims=True) + np.abs(k).sum(axis=-1, keepdims=True).mT,
            relative=relative,
            row_max=np.abs(row_max),
            row_sum=row_sum,
            lse=np.abs(row_max + np.log(row_sum)),
            weights=weights,
            values=v,
            out=weights @ v,
            sees_nonfinite=sees_nonfinite,
            may_overflow=(magnitude * max(1, scale * LOG2_E) >= largest(problem) / 2).any(axis=-1, keepdims=True),
        )

    @property
    def distance(self) -> np.ndarray:
        """|x|, 0 where masked."""
        return np.where(self.visible, -self.relative, 0)


@dataclass(frozen=True)
class Errors:
    """The errors of one kernel's steps, as the module's docstring names them; relative unless said."""

    score: np.ndarray  # of the exponent, absolute
    exponential: float  # of exp and of all rescaling factors together, natural log
    row_sum: float  # g
    rounding: float  # t
    underflow: np.ndarray | float  # absolute part of t
    accumulation: float  # r
    flushed: float  # what flushing takes from the sums, absolute
    normalisation: float  # of the division by l at the end
    logarithm: np.ndarray | float  # of ln l and its sum with the maximum, absolute


#: Sources of error as :func:`attention_terms` names them.
TERMS = {
    "scores": ["score"],
    "exponential": ["exponential"],
    "row sum": ["row_sum"],
    "rounding of P": ["rounding", "underflow"],
    "accumulation": ["accumulation"],
    "flushing": ["flushed"],
    "normalisation": ["normalisation"],
    "logarithm": ["logarithm"],
}


def _tiled_errors(problem: Problem, exact: Exact) -> Errors:
    return (_tiled if problem.dtype in HALF_TYPES else _fma)(problem, exact)


def _tiled(problem: Problem, exact: Exact) -> Errors:
    """Of the tiled kernel: online softmax in base 2, P rounded for the tensor cores, float32 accumulators."""
    element = Precision.of(problem.dtype)
    num_keys = problem.seqlen_k
    num_tiles = -(-num_keys // MIN_KEY_TILE)
    # The exponent's argument: q . k; then the rounded scale, the fused multiply-add, the maximum's product and the
    # rescaling arguments, together 6 |x| + |m|; and 8 for what is of second order.
    score = (
        dot_error(problem.head_dim) * exact.products
        + U32 * (6 * exact.distance + exact.row_max + 8)
        + flushed_score(problem, exact, FLUSH)
    )
    # A weight that underflows is rounded absolutely, against a maximum that is itself off by the score error.
    near_max = np.where(exact.relative > -1, score, 0)
    shift = np.exp(2 * np.max(near_max, axis=-1, keepdims=True, initial=0)) / exact.row_sum
    return Errors(
        score=score,
        exponential=(1 + num_tiles) * EXP_ERROR,
        row_sum=gamma(num_keys + num_tiles + 2, U32),
        rounding=element.unit,
        underflow=(element.underflow + 2 * FLUSH) * shift,
        accumulation=dot_error(num_keys) + num_tiles * U32,
        flushed=(num_keys + num_tiles + 3) * FLUSH,
        normalisation=3 * U32,  # reciprocal, 1 ulp, and product
        logarithm=U32 * (4 * exact.row_max + 7 * np.log(exact.row_sum) + 3 * exact.lse) + 2.0**-22 + FLUSH,
    )


def _fma(problem: Problem, exact: Exact) -> Errors:
    """Of the tiled kernel in float32 or float64: online softmax in base e, each tile's P V summed by itself."""
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    num_keys = problem.seqlen_k
    smallest_tile, largest_tile = FMA_TILES
    num_tiles = -(-num_keys // smallest_tile)
    # q . k, the rounded scale and the product with it; then the distance to the running maximum, the rescaling
    # arguments, together 2 |x|, and 8 for what is of second order.
    score = (
        gamma(problem.head_dim + 2, unit) * exact.products
        + unit * (2 * exact.distance + 8)
        + flushed_score(problem, exact, flush, exact.factors)
    )
    return Errors(
        score=score,
        exponential=(1 + num_tiles) * 5 * unit,  # exp: 2 ulp
        row_sum=gamma(num_tiles + largest_tile // ROW_LANES + int(math.log2(ROW_LANES)), unit),
        rounding=0.0,
        underflow=2 * flush,
        accumulation=gamma(min(num_keys, largest_tile) + num_tiles, unit),
        flushed=(num_keys + num_tiles + 3) * flush,
        normalisation=unit,
        logarithm=unit * (4 * np.log(exact.row_sum) + 2 * exact.lse + 2) + 2 * flush,
    )


def naive_errors(problem: Problem, exact: Exact) -> Errors:
    """Of the standard method: S and P are stored in the dtype, everything between is float32 or float64."""
    element = Precision.of(problem.dtype)
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    num_keys = problem.seqlen_k
    return Errors(
        score=_stored_score_error(problem, exact) + unit * (2 * exact.distance + 8),
        exponential=6 * unit,
        row_sum=gamma(num_keys + 5, unit),
        rounding=element.unit if problem.dtype in HALF_TYPES else 0.0,
        underflow=element.underflow + 2 * flush,
        accumulation=gamma(num_keys + 3, unit),  # with the division by l
        flushed=(num_keys + 2) * flush,
        normalisation=0.0,
        logarithm=unit * (4 * np.log(exact.row_sum) + 2 * exact.lse + 2) + 2 * flush,
    )


def _stored_score_error(problem: Problem, exact: Exact) -> np.ndarray:
    element = Precision.of(problem.dtype)
    unit, flush = astuple(Arithmetic.of(problem.dtype))
    stored = element.unit if problem.dtype in HALF_TYPES else 0.0
    product_error = gamma(problem.head_dim + 1, unit) * exact.products
    return (
        product_error
        + (stored + 2 * unit) * (exact.scores + product_error)
        + element.underflow
        + flushed_score(problem, exact, flush, exact.factors)
    )


def score_overflows(problem: Problem, exact: Exact) -> np.ndarray:
    """Rows in which a score that the standard method stores may overflow the dtype."""
    upper = exact.scores + _stored_score_error(problem, exact)
    return (upper >= Precision.of(problem.dtype).overflow).any(axis=-1, keepdims=True)


def _tiled_bounds(problem: Problem, exact: Exact) -> tuple[np.ndarray, np.ndarray]:
    return _propagated(problem, exact, _tiled_errors(problem, exact))


def _naive_bounds(problem: Problem, exact: Exact) -> tuple[np.ndarray, np.ndarray]:
    overflows = score_overflows(problem, exact)
    bounds = _propagated(problem, exact, naive_errors(problem, exact))
    return tuple(np.where(overflows, np.inf, bound) for bound in bounds)


def _propagated(problem: Problem, exact: Exact, errors: Errors) -> tuple[np.ndarray, np.ndarray]:
    """From the errors of the steps to those of out and lse."""
    element = Precision.of(problem.dtype)
    moved_by = weight_error(exact, errors.score + errors.exponential)
    upper_weights = exact.weights + moved_by
    sum_error = errors.row_sum * upper_weights.sum(axis=-1, keepdims=True) + errors.flushed
    denominator = 1 - moved_by.sum(axis=-1, keepdims=True) - sum_error
    moved = (moved_by * exact.row_sum > ILL_CONDITIONED).any(axis=-1, keepdims=True)
    unbounded = exact.sees_nonfinite | exact.may_overflow | moved | (denominator < 0.5)
    denominator = np.maximum(denominator, 0.5)

    magnitudes = np.abs(exact.values)
    out = np.abs(exact.out)
    # A rounding errs by u |x|, or by half the spacing of subnormals (and never by more than a weight flushed to 0).
    rounding_error = np.maximum(errors.rounding * upper_weights, np.minimum(upper_weights, errors.underflow))
    numerator = (
        _spread(moved_by, exact)
        + (1 + errors.accumulation) * (rounding_error @ magnitudes)
        + errors.accumulation * (upper_weights @ magnitudes)
        + sum_error * out
        + errors.flushed
    )
    core = numerator / denominator
    core += errors.normalisation * (out + core)
    overflows = exact.visible.astype(np.float64) @ magnitudes >= largest(problem) / 4
    if problem.dtype in HALF_TYPES:
        overflows = overflows | (out + core >= element.overflow)
        core += np.maximum(element.unit * (out + core), element.underflow)
    core += U64 * out  # of the reference
    lse_bound = -np.log(denominator) + errors.logarithm + U64 * exact.lse

    sees_keys = exact.visible.any(axis=-1, keepdims=True)
    bound = np.where(unbounded | overflows, np.inf, SLACK * core)
    lse_bound = np.where(unbounded, np.inf, SLACK * lse_bound)
    return np.where(sees_keys, bound, 0), np.where(sees_keys, lse_bound, 0)


def weight_error(exact: Exact, error: np.ndarray) -> np.ndarray:
    """How far each weight moves when its exponent moves by ``error``."""
    small = exact.weights * np.expm1(np.minimum(error, 1))
    large = np.exp(np.minimum(exact.relative + error, 1)) / exact.row_sum - exact.weights
    return np.where(error < 1, small, large)


def _spread(moved_by: np.ndarray, exact: Exact) -> np.ndarray:
    """sum_j moved_by_j |V_jc - O_c|, one column at a time: no (L, S, Dv) array."""
    columns = [
        (moved_by * np.abs(exact.values[..., None, :, c] - exact.out[..., c, None])).sum(axis=-1)
        for c in range(exact.values.shape[-1])
    ]
    return np.stack(columns, axis=-1)


def flushed_score(problem: Problem, exact: Exact, flush: float, factors: np.ndarray | float = 0.0) -> np.ndarray:
    """What a score loses where products, partial sums or ``factors`` of q . k are flushed to zero."""
    lost = abs(problem.softmax_scale) * flush * (problem.head_dim + 2 + factors)
    return np.minimum(lost, 2 * exact.products)


def gamma(n: int, unit: float) -> float:
    """Relative error of n roundings in a row: n u / (1 - n u)."""
    return n * unit / (1 - n * unit) if n * unit < 1 else math.inf


def dot_error(n: int) -> float:
    """Error of a product of n terms with a live float32 accumulator, relative to the sum of their magnitudes.

    Blocks of w terms truncated with e extra bits lose 2 ceil(n / w) (w 2^-e + 1) u. That is largest for w = 4, e = 0,
    10 ceil(n / 4) u, which is also above gamma(n + 1), the bound for round-to-nearest in any order.
    """
    return 10 * -(-n // 4) * U32


def largest(problem: Problem) -> float:
    return float(np.finfo(problem.lse_dtype).max)


def _returned(problem: Problem, bounds, q, k, v, return_lse: bool, out):
    with np.errstate(over="ignore", invalid="ignore"):
        bound, lse_bound = bounds(problem, Exact.of(problem, q, k, v))
    return returned(problem, q, [claimed(bound), *[claimed(lse_bound[..., 0])] * return_lse], out)


def claimed(bound: np.ndarray) -> np.ndarray:
    """A bound that is itself beyond float64, inf - inf or 0 inf, claims nothing."""
    return np.where(np.isnan(bound), np.inf, bound)
