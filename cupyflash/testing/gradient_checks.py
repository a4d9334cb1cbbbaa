"""Ready checks of gradients: sums that need no reference, and changes of the arguments that change nothing.

Each takes the function under test, ``vjp(q, k, v, *, softmax_scale, causal, align, return_lse=True)``, which gives
``(out, lse), pullback``, where ``pullback(dout, dlse)`` gives dq, dk and dv and dlse may be None: that is
:func:`cupyflash.attention_vjp`. The problem, the strategy or nothing, ``bitwise`` and ``bound`` are as in
:mod:`cupyflash.testing.invariants`; ``bound`` has the signature of :func:`bounds.attention_backward`.

The identities hold for exact gradients; roundings leave a residual. Relative to the magnitudes that are summed, 4 units
of roundoff are allowed in 16 bits, whose sums are float32, and 32 in float32 and float64; and, since the rounding of a
score moves its weight, 4 units of the arithmetic times the largest |scale| |q| . |k|. Nothing is asked of a head where
a gradient, or a dS on the way to it, may overflow: float16 ends at 65504.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from cupyflash import bounds
from cupyflash.testing.adapt import NotApplicable, adapted_vjp
from cupyflash.testing.assertions import assert_gradients_within_bound, assert_same_bits, assert_within_bound
from cupyflash.testing.backward_problems import attention_backward_problems
from cupyflash.testing.invariants import head, some_heads
from cupyflash.testing.ready import (
    Relation,
    assert_agree,
    choices,
    gradient_bounds,
    gradients,
    ready_check,
    run_all,
    vjp_invariant,
)
from cupyflash.testing.values import EXACT_SCALE
from cupyflash.testing.variants import ANYWHERE, BATCH_BLIND, PREFIX_BLIND, contiguous, of_head, taken


def _arguments(problem):
    """dout, dlse, q, k, v."""
    return *problem.cotangents(), *problem.forward.inputs()


@ready_check(attention_backward_problems)
def check_gradients_within_bound(vjp, problem, *, bound=bounds.attention_backward):
    """Every element of dq, dk and dv is within its bound of the reference, and as finite."""
    dout, dlse, *inputs = _arguments(problem)
    (out, lse), pullback = vjp(*inputs, return_lse=True, **problem.options)
    assert_gradients_within_bound(
        pullback(dout, dlse), dout, *inputs, out, lse, dlse=dlse, bound=bound, **problem.options
    )


@vjp_invariant(bitwise=True)
def check_vjp_two_runs(problem):
    """The same call twice gives the same."""
    arguments = _arguments(problem)
    yield Relation(arguments, arguments, problem.options)


@vjp_invariant(bitwise=True)
def check_vjp_strides(problem):
    """Views give what their contiguous copies give, dout among them."""
    if problem == problem.plain():
        raise NotApplicable("strides: all arrays are contiguous")
    arguments, options = _arguments(problem), problem.options
    copies = tuple(None if x is None else np.array(x, order="C") for x in arguments)
    yield Relation(arguments, copies, options, contiguous(options))


@vjp_invariant(bitwise=True)
def check_vjp_batch_independence(problem):
    """A head alone, with leading dimensions of 1, gives what it gives among the others. No operand is broadcast."""
    problem = replace(problem, forward=problem.forward.unbroadcast().keeping(*BATCH_BLIND))
    dout, dlse, *inputs = _arguments(problem)
    options = problem.options
    for index in some_heads(problem.forward):
        where = tuple(slice(i, i + 1) for i in index)
        alone = dout[where], None if dlse is None else dlse[where], *(head(x, index) for x in inputs)
        yield Relation(
            (dout, dlse, *inputs),
            alone,
            options,
            of_head(options, index),
            expected=lambda *grads, where=where: tuple(x[where] for x in grads),
        )


@vjp_invariant(bitwise=False)
def check_vjp_query_permutation(problem):
    """Queries permuted with their cotangents permute dq, and change nothing else but the order of sums. Not causal."""
    problem = replace(problem, forward=problem.forward.permutable("seqlens_k"))
    dout, dlse, q, k, v = _arguments(problem)
    rows = choices(problem.forward).permutation(problem.forward.seqlen_q)
    yield Relation(
        (dout, dlse, q, k, v),
        (dout[..., rows, :], None if dlse is None else dlse[..., rows], q[..., rows, :], k, v),
        problem.options,
        taken(problem.options, rows=rows),
        expected=lambda dq, dk, dv: (dq[..., rows, :], dk, dv),
    )


@vjp_invariant(bitwise=False)
def check_vjp_key_permutation(problem):
    """Keys and values permuted together permute dk and dv. Not causal."""
    problem = replace(problem, forward=problem.forward.permutable("seqlens_q"))
    dout, dlse, q, k, v = _arguments(problem)
    keys = choices(problem.forward).permutation(problem.forward.seqlen_k)
    yield Relation(
        (dout, dlse, q, k, v),
        (dout, dlse, q, k[..., keys, :], v[..., keys, :]),
        problem.options,
        taken(problem.options, columns=keys),
        expected=lambda dq, dk, dv: (dq, dk[..., keys, :], dv[..., keys, :]),
    )


@vjp_invariant(bitwise=True)
def check_vjp_powers_of_two(problem):
    """A negative power of two times dout and dlse is that number times the gradients; not in float16, whose gradients
    may be subnormal. dout of the family "one sign", values "normal".
    """
    forward = replace(problem.forward, values="normal", softmax_scale=None)
    problem = replace(problem, forward=forward, dout_values="one sign")
    dout, dlse, *inputs = _arguments(problem)
    factor = -(2.0 ** choices(forward).integers(-3, 4))
    exact = np.float64 if forward.dtype == "float16" else None
    scaled = dout * dout.dtype.type(factor), None if dlse is None else dlse * dlse.dtype.type(factor), *inputs
    yield Relation(
        (dout, dlse, *inputs),
        scaled,
        problem.options,
        expected=lambda *grads: tuple((x.astype(np.float64) * factor).astype(exact or x.dtype) for x in grads),
        part=lambda *grads: tuple(x + x.dtype.type(0) for x in grads),  # the sign of zeros may differ
        rounded=exact is not None,
    )


@vjp_invariant(bitwise=True)
def check_vjp_causal_prefix(problem):
    """The first queries do not see the last keys: their dq is that of the first keys alone, and they add nothing to
    the last keys' gradients, whatever their dout is. Causal, aligned top-left.
    """
    forward = replace(problem.forward.unbroadcast(), causal=True, align="top-left").keeping(*PREFIX_BLIND)
    problem = replace(problem, forward=forward)
    arguments = dout, dlse, q, k, v = _arguments(problem)
    rows = int(choices(forward).integers(0, forward.seqlen_q, endpoint=True))
    first_dlse, first = None if dlse is None else dlse[..., :rows], slice(rows)
    prefix = dout[..., :rows, :], first_dlse, *(x[..., :rows, :] for x in (q, k, v))
    yield Relation(
        arguments,
        prefix,
        problem.options,
        taken(problem.options, first, first),
        part=lambda dq, dk, dv: (
            dq[..., :rows, :],
            dk[..., :0, :],
            dv[..., :0, :],
        ),  # the last queries add to the others
    )

    other = np.array(dout)
    other[..., :rows, :] *= dout.dtype.type(choices(forward).choice([0, -1, 3]))
    yield Relation(
        arguments,
        (other, dlse, q, k, v),
        problem.options,
        # The sign of zeros may differ, of sums that the first queries' products of zero are added to.
        part=lambda *grads: tuple(x[..., rows:, :] + x.dtype.type(0) for x in grads),
    )


@ready_check(attention_backward_problems)
def check_vjp_grouped_heads(vjp, problem, *, bitwise=True, bound=bounds.attention_backward):
    """Query heads that share a key head have the dq of repeated key heads; dk and dv are sums over the group.

    dk and dv are compared within the bounds, dq too unless ``bitwise``. Takes values of the family "integers", and
    other leading dimensions.
    """
    group = int(choices(problem.forward).integers(2, 3, endpoint=True))
    forward = replace(
        problem.forward, values="integers", softmax_scale=EXACT_SCALE, leading_q=(1, 2 * group), leading_k=(1, 2),
        leading_v=(1, 2),
    )  # fmt: skip
    problem = replace(problem, forward=forward)
    dout, dlse, q, k, v = arguments = _arguments(problem)
    expanded = dout, dlse, q, *(np.repeat(x, group, axis=-3) for x in (k, v))

    def summed(dq, *dkv):
        return dq, *(x.astype(np.float64).reshape(1, 2, group, *x.shape[-2:]).sum(axis=2) for x in dkv)

    results = gradients(vjp, arguments, problem.options)
    full = summed(*gradients(vjp, expanded, problem.options))
    allowed = gradient_bounds(vjp, bound, arguments, problem.options)
    more_allowed = summed(*gradient_bounds(vjp, bound, expanded, problem.options))
    if bitwise:
        assert_same_bits(results[0], full[0], name="dq")
    for name, result, value, *errors in zip(("dq", "dk", "dv"), results, full, allowed, more_allowed, strict=True):
        assert_agree(result, value, sum(errors), name=name)


@dataclass(frozen=True)
class _Head:
    """Arguments and gradients in float64, and magnitudes that roundings are relative to."""

    dtype: np.dtype
    residual: float  # allowed, relative to magnitudes
    scale: float
    dout: np.ndarray  # 0 in rows that see no key, as are the next two
    out: np.ndarray
    dlse: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    weights: np.ndarray
    dscores: np.ndarray  # at most |P| (|dP| + |delta|)
    may_overflow: np.ndarray  # of each head
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    @staticmethod
    def of(vjp, problem):
        forward, (dout, dlse, q, k, v) = problem.forward, _arguments(problem)
        # With a column of ones in k, one in dq is the sum of each row of dS.
        k = np.array(k)
        k[..., -1] = 1
        (out, lse), pullback = vjp(q, k, v, return_lse=True, **problem.options)
        grads = (x.astype(np.float64) for x in pullback(dout, dlse))
        dtype = q.dtype
        dout, q, k, v, out, lse = (x.astype(np.float64) for x in (dout, q, k, v, out, lse))
        dlse = np.zeros_like(lse) if dlse is None else dlse.astype(np.float64)
        scale = forward.head_dim**-0.5 if forward.softmax_scale is None else forward.softmax_scale
        queries, keys = np.ogrid[: forward.seqlen_q, : forward.seqlen_k]
        seen = (
            keys <= queries + forward.shift if forward.causal else np.ones((forward.seqlen_q, forward.seqlen_k), bool)
        )
        sees_keys = seen.any(axis=-1)
        exponent = scale * q @ _transposed(k) - np.where(sees_keys, lse, 0)[..., None]
        weights = np.exp(np.where(seen, exponent, -np.inf))
        dout, dlse = np.where(sees_keys[:, None], dout, 0), np.where(sees_keys, dlse, 0)
        delta = (np.abs(dout) * np.abs(out)).sum(axis=-1) + np.abs(dlse)
        dscores = weights * (np.abs(dout) @ _transposed(np.abs(v)) + delta[..., None])
        sizes_of_dqk = abs(scale) * dscores @ np.abs(k), abs(scale) * _transposed(dscores) @ np.abs(q)
        sizes = dscores, *sizes_of_dqk, _transposed(weights) @ np.abs(dout)
        largest = np.maximum.reduce([x.max(axis=(-2, -1), initial=0) for x in sizes])
        may_overflow = largest > 0.9 * float(ml_dtypes.finfo(dtype).max)  # roundings of 16 bits are less than a tenth
        residual = _residual(scale, q, k, dtype)
        return _Head(dtype, residual, scale, dout, out, dlse, q, k, v, weights, dscores, may_overflow, *grads)

    def assert_equal(self, name, value, expected, magnitude):
        """Within the roundings of the magnitude of what is summed; subnormal results are rounded absolutely."""
        info = ml_dtypes.finfo(self.dtype)
        flushed = max(float(info.smallest_subnormal), 2.0**-1022 if self.dtype == np.float64 else 2.0**-126)
        allowed = self.residual * magnitude + 16 * flushed * max(*self.weights.shape[-2:], 1)
        may_overflow = self.may_overflow.reshape(self.may_overflow.shape + (1,) * (value.ndim - self.may_overflow.ndim))
        assert_agree(value, expected, np.where(may_overflow, np.inf, allowed), name=name)


def _residual(scale, q, k, dtype):
    """What roundings may leave of an identity, as the module's docstring says."""
    unit = float(ml_dtypes.finfo(dtype).eps) / 2
    products = abs(scale) * np.abs(q.astype(np.float64)) @ _transposed(np.abs(k.astype(np.float64)))
    of_scores = 4 * min(unit, 2.0**-24) * products.max(initial=0)
    return (4 if dtype.itemsize == 2 else 32) * unit + of_scores


def _transposed(x):
    return np.swapaxes(x, -1, -2)


@ready_check(attention_backward_problems)
def check_vjp_identities(vjp, problem):
    """What sums of exact gradients are, without a reference. No operand is broadcast; moderate values.

    * Moving all keys together moves a query's scores together, and lse with them: the rows of dk sum to scale Q^T dlse.
    * Each row of dS sums to dlse, seen in dq through a column of ones in k.
    * Each row of P sums to 1: the rows of dv sum to those of dout that see a key.
    * out and lse depend on Q K^T alone: Q^T dQ = dK^T K.
    * out is linear in V: <V, dV> = <out, dout>.
    """
    families = {"normal", "duplicates", "one sign"}
    values = problem.forward.values if problem.forward.values in families else "normal"
    forward = replace(problem.forward.unbroadcast(), values=values).keeping()
    x = _Head.of(vjp, replace(problem, forward=forward))
    scale, q, k, v = abs(x.scale), np.abs(x.q), np.abs(x.k), np.abs(x.v)
    dlse_rows, dv_sizes = x.dlse[..., None], _transposed(x.weights) @ np.abs(x.dout)
    x.assert_equal(
        "sum of the rows of dk", x.dk.sum(axis=-2), x.scale * (dlse_rows * x.q).sum(axis=-2),
        scale * (_transposed(x.dscores) @ q).sum(axis=-2),
    )  # fmt: skip
    x.assert_equal("sums of the rows of dS", x.dq[..., -1], x.scale * x.dlse, scale * x.dscores.sum(axis=-1))
    x.assert_equal("sum of the rows of dv", x.dv.sum(axis=-2), x.dout.sum(axis=-2), dv_sizes.sum(axis=-2))
    x.assert_equal(
        "Q^T dQ - dK^T K", _transposed(x.q) @ x.dq, _transposed(x.dk) @ x.k, scale * _transposed(q) @ x.dscores @ k
    )
    x.assert_equal(
        "<V, dV>",
        (x.v * x.dv).sum(axis=(-2, -1)),
        (x.out * x.dout).sum(axis=(-2, -1)),
        (v * dv_sizes).sum(axis=(-2, -1)),
    )


@ready_check(attention_backward_problems)
def check_lse_gradient(vjp, problem):
    """Through lse alone, dq is scale dlse times the mean key, which is attention with the keys as values; dv is 0."""
    values = problem.forward.values if problem.forward.values in {"normal", "duplicates", "one sign"} else "normal"
    forward = replace(problem.forward.unbroadcast(), values=values)
    forward = forward.keeping("window_size", "mask", "seqlens_q", "seqlens_k", "mask_mod", "split_size")
    problem = replace(problem, forward=forward, with_dlse=True)
    dout, dlse, q, k, v = _arguments(problem)
    dq, _, dv = gradients(vjp, (np.zeros_like(dout), dlse, q, k, v), problem.options)
    (mean_key, _), _ = vjp(q, k, k, return_lse=True, **problem.options)
    scale = forward.head_dim**-0.5 if forward.softmax_scale is None else forward.softmax_scale
    info, moved = ml_dtypes.finfo(q.dtype), np.abs(scale * dlse.astype(np.float64))[..., None]
    largest = np.abs(k.astype(np.float64)).max(axis=-2, keepdims=True, initial=0)
    # Both roundings of a subnormal dS and of the mean key are absolute.
    absolute = 16 * max(float(info.smallest_subnormal), 2.0**-126) * (1 + largest) * max(forward.seqlen_k, 1)
    allowed = _residual(scale, q, k, q.dtype) * moved * largest + absolute
    expected = scale * dlse.astype(np.float64)[..., None] * mean_key.astype(np.float64)
    assert_within_bound(dq, expected, allowed, name="dq through lse")
    assert_within_bound(dv, np.zeros(v.shape), np.zeros(v.shape), name="dv through lse")


@ready_check(attention_backward_problems)
def check_vjp_linearity(vjp, problem, *, bound=bounds.attention_backward):
    """The gradients of a sum of output gradients are the sums of theirs, within the bounds. Small integers in dout."""
    dout, _, *inputs = _arguments(problem)
    rng = choices(problem.forward)
    parts = [rng.integers(-3, 4, dout.shape).astype(dout.dtype) for _ in range(2)]
    calls = [(x, None, *inputs) for x in (parts[0] + parts[1], *parts)]
    together, *apart = (gradients(vjp, x, problem.options) for x in calls)
    errors = [gradient_bounds(vjp, bound, x, problem.options) for x in calls]
    for name, result, first, second, *allowed in zip(("dq", "dk", "dv"), together, *apart, *errors, strict=True):
        with np.errstate(invalid="ignore"):  # of infinities, where nothing is claimed
            expected = first.astype(np.float64) + second.astype(np.float64)
        assert_agree(result, expected, sum(allowed), name=name)


@ready_check(attention_backward_problems)
def check_vjp_constant_values(vjp, problem, *, bound=bounds.attention_backward):
    """Where v is 1, out does not depend on the scores: without dlse, dq and dk are 0 within the bound. Not causal."""
    forward = replace(problem.forward.unmasked().without("attn_sink"), values="constant")
    problem = replace(problem, forward=forward, with_dlse=False)
    arguments = _arguments(problem)
    results = gradients(vjp, arguments, problem.options)[:2]
    allowed = gradient_bounds(vjp, bound, arguments, problem.options)[:2]
    for name, result, error in zip(("dq", "dk"), results, allowed, strict=True):
        assert_agree(result, np.zeros_like(result), error, name=name)


@ready_check(attention_backward_problems)
def check_vjp_nonfinite_values_change_only_what_sees_them(
    vjp, problem, *, bitwise=True, bound=bounds.attention_backward
):
    """A NaN in a row of dout, q, k or v spoils queries that see it, and keys that those see, and nothing else.

    Causal, with as many keys as queries.
    """
    masked = {"causal": True, "align": "top-left", "seqlen_k": problem.forward.seqlen_q}
    problem = replace(problem, forward=replace(problem.forward.unbroadcast(), **masked).keeping(*ANYWHERE))
    dout, dlse, *inputs = _arguments(problem)
    seqlen = problem.forward.seqlen_q
    if not dout.size:
        raise NotApplicable("dimensions of 0")
    clean = gradients(vjp, (dout, dlse, *inputs), problem.options)
    allowed = [np.zeros(x.shape) for x in clean]
    if not bitwise:
        allowed = [2 * x for x in gradient_bounds(vjp, bound, (dout, dlse, *inputs), problem.options)]
    for position, operand in enumerate(("dout", "q", "k", "v")):
        row = choices(problem.forward).integers(seqlen)
        spoilt = [np.array(x) for x in (dout, *inputs)]
        spoilt[position][..., row, 0] = np.nan
        results = gradients(vjp, (spoilt[0], dlse, *spoilt[1:]), problem.options)
        index = np.arange(seqlen)
        queries = index >= row if operand in "kv" else index == row
        keys = index <= np.flatnonzero(queries)[-1]
        for name, sees, *values in zip(("dq", "dk", "dv"), (queries, keys, keys), results, clean, allowed, strict=True):
            result, expected, error = (x[..., ~sees, :] for x in values)
            if bitwise:
                assert_same_bits(result, expected, name=f"{name} of what a NaN in {operand}[{row}] is masked from")
            else:
                assert_agree(result, expected, error, name=f"{name} of what a NaN in {operand}[{row}] is masked from")


VJP_CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


def check_vjp(vjp, problem=None, *, bitwise=True, bound=bounds.attention_backward):
    """Each of VJP_CHECKS in turn, which stops at the first one that fails; :func:`report` goes on.

    Returns which checks were left out, by name, and why.

    Without a problem or a strategy, each draws 100 of :func:`attention_backward_problems`: what
    :func:`check_attention` says of its problems holds here, too, with dout and the gradients in layouts of their own,
    and with or without dlse. Narrow them by :func:`adapt_vjp`, or as in
    ``attention_backward_problems(["float32"], causal=st.just(False))``. ``bitwise=False`` asks nothing to hold bit for
    bit, but within ``bound``, which is called like :func:`cupyflash.bounds.attention_backward`.

    The default problems are about 4000 calls of ``vjp``, and 15 s on one core beside them and their pullbacks.
    """
    return run_all(VJP_CHECKS, adapted_vjp(vjp), problem, bitwise, bound)
