"""Ready checks of attention: changes of the inputs that change nothing, or change the result in a known way.

Each takes the function under test, ``fn(q, k, v, *, softmax_scale, causal, align, return_lse=True) -> (out, lse)`` on
NumPy arrays (lse may be None where there is none: it is not checked then), and a problem, a strategy of problems, or
nothing: then :func:`attention_problems` draws. Of problems with variants, ``fn`` gets their options, too. A check makes
the problem fit first (no mask, other values, ...). Of a function that lacks some of these arguments, or that
:func:`adapt` says what it is for, only what it has is asked; NotApplicable is raised where that is nothing.

Checks with ``bitwise=True`` compare bit for bit, as holds of a function whose every row and head is computed on its own
and in an order that depends on nothing but position. With ``bitwise=False`` both results may be off by the bound of
their inputs, ``bound(q, k, v, *, softmax_scale, causal, align, return_lse=True)``, with the same options, which is
:func:`bounds.attention` unless another one is given.
"""

from dataclasses import replace

import numpy as np

from cupyflash import bounds
from cupyflash.testing.adapt import NotApplicable, adapted
from cupyflash.testing.assertions import assert_attention_within_bound, assert_same_bits
from cupyflash.testing.problems import attention_problems
from cupyflash.testing.ready import Relation, assert_agree, choices, invariant, ready_check, run_all
from cupyflash.testing.values import hostile_places, with_values
from cupyflash.testing.variants import ANYWHERE, BATCH_BLIND, PREFIX_BLIND, contiguous, of_head, taken


@ready_check(attention_problems)
def check_within_bound(fn, problem, *, bound=bounds.attention):
    """Every element of out and lse is within its bound of the reference, and as finite."""
    inputs = problem.inputs()
    out, lse = fn(*inputs, return_lse=True, **problem.options)
    assert_attention_within_bound(out, lse, *inputs, bound=bound, **problem.options)


@invariant(bitwise=True)
def check_two_runs(problem):
    """The same call twice gives the same."""
    inputs = problem.inputs()
    yield Relation(inputs, inputs, problem.options)


@invariant(bitwise=True)
def check_strides(problem):
    """Views give what their contiguous copies give."""
    if problem == problem.plain():
        raise NotApplicable("strides: all arrays are contiguous")
    inputs, options = problem.inputs(), problem.options
    yield Relation(inputs, tuple(np.array(x, order="C") for x in inputs), options, contiguous(options))


@invariant(bitwise=True)
def check_batch_independence(problem):
    """A head alone, with leading dimensions of 1, gives what it gives among the others."""
    problem = problem.keeping(*BATCH_BLIND)
    inputs, options = problem.inputs(), problem.options
    for index in some_heads(problem):
        alone = tuple(head(x, index, g) for x, g in zip(inputs, (1, problem.group, problem.group), strict=True))
        where = tuple(slice(i, i + 1) for i in index)
        yield Relation(
            inputs,
            alone,
            options,
            of_head(options, index),
            expected=lambda out, lse, where=where: (out[where], lse[where]),
        )


@invariant(bitwise=True)
def check_query_independence(problem):
    """Other queries may change: every other row of the result stays."""
    q, k, v = problem.inputs()
    other = np.array(q)
    other[..., 1::2, :] *= q.dtype.type(choices(problem).choice([0, -1, 3]))
    yield Relation((q, k, v), (other, k, v), problem.options, part=lambda out, lse: (out[..., ::2, :], lse[..., ::2]))


@invariant(bitwise=True)
def check_query_permutation(problem):
    """Permuted queries, with their masks and biases, permute the rows of the result. Not causal."""
    problem = problem.permutable("seqlens_k")
    q, k, v = problem.inputs()
    rows = choices(problem).permutation(problem.seqlen_q)
    yield Relation(
        (q, k, v),
        (q[..., rows, :], k, v),
        problem.options,
        taken(problem.options, rows=rows),
        expected=lambda out, lse: (out[..., rows, :], lse[..., rows]),
    )


@invariant(bitwise=True)
def check_value_column_permutation(problem):
    """Permuted columns of v permute those of out."""
    q, k, v = problem.inputs()
    columns = choices(problem).permutation(problem.head_dim_v)
    yield Relation(
        (q, k, v), (q, k, v[..., columns]), problem.options, expected=lambda out, lse: (out[..., columns], lse)
    )


@invariant(bitwise=False)
def check_key_permutation(problem):
    """Keys and values permuted together, with their masks and biases, change nothing but the order of sums. Not causal.

    Bit for bit only where sums are exact, as those of the family "integers" are with ``softmax_scale=EXACT_SCALE`` if
    weights are powers of two.
    """
    problem = problem.permutable("seqlens_q")
    q, k, v = problem.inputs()
    keys = choices(problem).permutation(problem.seqlen_k)
    options = taken(problem.options, columns=keys)
    yield Relation((q, k, v), (q, k[..., keys, :], v[..., keys, :]), problem.options, options)


@invariant(bitwise=False)
def check_head_dim_permutation(problem):
    """Columns of q and k permuted together change nothing but the order of sums."""
    q, k, v = problem.inputs()
    columns = choices(problem).permutation(problem.head_dim)
    yield Relation((q, k, v), (q[..., columns], k[..., columns], v), problem.options)


@invariant(bitwise=True)
def check_value_powers_of_two(problem):
    """A power of two times v is that power times out. Values of the family "one sign", none of them subnormal; weights
    that sum to 1.
    """
    problem = replace(problem, values="one sign").without("attn_sink", "dropout_p")
    q, k, v = problem.inputs()
    factor = q.dtype.type(2.0 ** choices(problem).integers(-9, 10))
    yield Relation((q, k, v), (q, k, v * factor), problem.options, expected=lambda out, lse: (out * factor, lse))


@invariant(bitwise=True)
def check_query_key_powers_of_two(problem):
    """A power of two moves from k to q. Values of the family "normal", small ones made 1: none becomes subnormal."""
    problem = replace(problem, values="normal")
    *qk, v = problem.inputs()
    q, k = (np.where(np.abs(x) < 2.0**-6, x.dtype.type(1), x) for x in qk)
    factor = q.dtype.type(2.0 ** choices(problem).integers(-6, 7))
    yield Relation((q, k, v), (q * factor, k / factor, v), problem.options)


@invariant(bitwise=True)
def check_signs(problem):
    """-q and -k together change nothing; -v gives -out, but for the sign of zeros."""
    inputs = q, k, v = problem.inputs()
    yield Relation(inputs, (-q, -k, v), problem.options)
    yield Relation(
        inputs, (q, k, -v), problem.options, expected=lambda out, lse: (-out, lse), part=lambda out, lse: (out + 0, lse)
    )


@invariant(bitwise=True)
def check_grouped_heads(problem):
    """Query heads that share a key head give what they give with it repeated. Takes other leading dimensions."""
    batch, num_kv_heads, group = choices(problem).integers((1, 2, 2), (2, 3, 3), endpoint=True)
    leading = (int(batch), int(num_kv_heads))
    problem = replace(problem, leading_q=(leading[0], leading[1] * int(group)), leading_k=leading, leading_v=leading)
    q, k, v = problem.inputs()
    yield Relation((q, k, v), (q, *(np.repeat(x, group, axis=-3) for x in (k, v))), problem.options)


@invariant(bitwise=True)
def check_masked_keys_have_no_influence(problem):
    """NaN or infinity in keys and values that a query does not see leaves its row. Causal."""
    align = "bottom-right" if problem.align is None else problem.align
    problem = replace(problem, causal=True, align=align).without("seqlens_q", "seqlens_k")
    inputs, rng = problem.inputs(), choices(problem)
    most = min(
        problem.seqlen_q, problem.seqlen_k - problem.shift - 1
    )  # the first ones, which a last key is masked from
    if most < 1 or not all(x.size for x in inputs):
        raise NotApplicable("no key is masked")
    rows = int(rng.integers(1, most, endpoint=True))
    q, k, v = (np.array(x) for x in inputs)
    first_unseen = max(rows + problem.shift, 0)
    value = rng.choice([np.nan, np.inf, -np.inf])
    k[..., first_unseen:, :], v[..., first_unseen:, :] = value, value
    yield Relation(inputs, (q, k, v), problem.options, part=lambda out, lse: (out[..., :rows, :], lse[..., :rows]))


@invariant(bitwise=True)
def check_causal_prefix(problem):
    """The first queries with the first keys give the first rows of the whole. Causal, aligned top-left."""
    problem = replace(problem, causal=True, align="top-left").keeping(*PREFIX_BLIND)
    inputs, options = problem.inputs(), problem.options
    length = int(choices(problem).integers(0, max(problem.seqlen_q, problem.seqlen_k), endpoint=True))
    prefix, first = tuple(x[..., :length, :] for x in inputs), slice(length)
    yield Relation(
        inputs, prefix, options, taken(options, first, first),
        expected=lambda out, lse: (out[..., :length, :], lse[..., :length]),
    )  # fmt: skip


@invariant(bitwise=True)
def check_alignments(problem):
    """Aligned bottom-right, the queries are the last ones of a square problem, for which alignments agree. Causal."""
    problem = replace(problem, causal=True, align="bottom-right").keeping(*ANYWHERE, "window_size", "alibi_slopes")
    inputs = q, k, v = problem.inputs()
    top_left = replace(problem, align="top-left").options
    if problem.shift >= 0:
        earlier = np.zeros((*q.shape[:-2], problem.shift, q.shape[-1]), q.dtype)
        square = np.concatenate([earlier, q], axis=-2), k, v
        yield Relation(square, inputs, top_left, problem.options, expected=_rows(problem.shift))
    else:
        square = q[..., -problem.shift :, :], k, v
        yield Relation(inputs, square, problem.options, top_left, expected=_rows(-problem.shift))
    same_lengths = (square[0], k, v)
    yield Relation(same_lengths, same_lengths, top_left, replace(problem, align=None).options)


def _rows(first):
    return lambda out, lse: (out[..., first:, :], lse[..., first:])


@invariant(bitwise=True)
def check_decoding(problem):
    """One query, aligned bottom-right, sees every key."""
    problem = replace(problem, seqlen_q=1, causal=True, align="bottom-right").keeping(*ANYWHERE)
    inputs = problem.inputs()
    yield Relation(inputs, inputs, problem.options, problem.unmasked().options)


@ready_check(attention_problems)
def check_one_key(fn, problem, *, bitwise=True, bound=bounds.attention):
    """A query that sees one key gives its value, whatever the score. Values of the family "normal"."""
    problem = replace(problem.unmasked().without("attn_sink"), seqlen_k=1, values="normal")
    inputs = problem.inputs()
    out, _ = fn(*inputs, return_lse=True, **problem.options)
    (*_, v), group = inputs, problem.group
    values = np.broadcast_to(np.repeat(v, group, axis=-3) if group > 1 and v.shape[-3:-2] > (1,) else v, out.shape)
    if bitwise:
        assert_same_bits(out + 0, values + 0, name="out")
    else:
        assert_agree(out, values, bound(*inputs, **problem.options), name="out")


@ready_check(attention_problems)
def check_constant_values(fn, problem, *, bound=bounds.attention):
    """Where v is 1, so is out, within the bound. Not causal."""
    problem = problem.unmasked().without("attn_sink")
    problem = replace(problem, values="constant", seqlen_k=max(problem.seqlen_k, 1))
    inputs = problem.inputs()
    out, _ = fn(*inputs, return_lse=True, **problem.options)
    assert_agree(out, np.ones_like(out), bound(*inputs, **problem.options), name="out")


@ready_check(attention_problems)
def check_value_linearity(fn, problem, *, bound=bounds.attention):
    """out of a v1 + b v2 is a out1 + b out2, within the bounds, for small integers, of which each sum is exact."""
    q, k, v = problem.inputs()
    rng = choices(problem)
    values = [rng.integers(-3, 4, v.shape).astype(v.dtype) for _ in range(2)]
    a, b = (v.dtype.type(x) for x in rng.integers(1, 8, 2))
    calls = [(q, k, x) for x in (a * values[0] + b * values[1], *values)]
    together, first, second = (fn(*x, return_lse=True, **problem.options)[0].astype(np.float64) for x in calls)
    allowed, allowed_first, allowed_second = (bound(*x, **problem.options) for x in calls)
    a, b = float(a), float(b)
    allowed = allowed + a * allowed_first + b * allowed_second
    assert_agree(together, a * first + b * second, allowed, name="out")


@ready_check(attention_problems)
def check_convexity(fn, problem, *, bound=bounds.attention):
    """Each column of out lies between the smallest and the largest value, within the bound. Not causal."""
    problem = problem.unmasked().without("attn_sink").unbroadcast()
    problem = replace(problem, seqlen_k=max(problem.seqlen_k, 1))
    inputs = problem.inputs()
    out, _ = fn(*inputs, return_lse=True, **problem.options)
    values = inputs[2].astype(np.float64)
    nearest = out.astype(np.float64).clip(values.min(axis=-2, keepdims=True), values.max(axis=-2, keepdims=True))
    assert_agree(out, nearest, bound(*inputs, **problem.options), name="out")


@ready_check(attention_problems)
def check_lse_range(fn, problem, *, bound=bounds.attention):
    """max s <= lse <= max s + ln S for the scores s of a query, within the bound. Not causal."""
    problem = problem.unmasked().keeping("split_size").unbroadcast()
    problem = replace(problem, seqlen_k=max(problem.seqlen_k, 1))
    inputs = problem.inputs()
    _, lse = fn(*inputs, return_lse=True, **problem.options)
    if lse is None:
        raise NotApplicable("lse: none is returned")
    q, k, _ = (x.astype(np.float64) for x in inputs)
    scale = problem.head_dim**-0.5 if problem.softmax_scale is None else problem.softmax_scale
    row_max = (scale * (q @ np.swapaxes(k, -1, -2))).max(axis=-1)
    nearest = lse.astype(np.float64).clip(row_max, row_max + np.log(problem.seqlen_k))
    assert_agree(lse, nearest, bound(*inputs, return_lse=True, **problem.options)[1], name="lse")


@ready_check(attention_problems)
def check_nonfinite_values_change_only_rows_that_see_them(
    fn, problem, *, places=None, bitwise=True, bound=bounds.attention
):
    """NaN and infinities leave every row that does not see them, and spoil the others where the reference is spoilt.

    ``places`` are those of :func:`hostile_values`, in q, k and v; None chooses some.
    """
    inputs = problem.inputs()
    if not all(x.size for x in inputs):
        raise NotApplicable("dimensions of 0")
    places = hostile_places(choices(problem), "qkv") if places is None else places
    spoilt = with_values(dict(zip("qkv", inputs, strict=True)), places)
    clean = fn(*inputs, return_lse=True, **problem.options)
    results = fn(*spoilt, return_lse=True, **problem.options)
    assert_attention_within_bound(*results, *spoilt, bound=bound, **problem.options)
    unseen = np.isfinite(bound(*spoilt, return_lse=True, **problem.options)[1])
    if bitwise:
        for name, result, value in zip(("out", "lse"), results, clean, strict=True):
            if value is not None:
                assert_same_bits(result[unseen], value[unseen], name=name)


@ready_check(attention_problems)
def check_nonfinite_values_reach_who_sees_them(fn, problem, *, bitwise=True, bound=bounds.attention):
    """One NaN for each key and each column in turn: a query's element is spoilt if it sees the key, and only then.

    Causal, with as many keys as queries.
    """
    problem = problem.keeping(*ANYWHERE).unbroadcast()
    problem = replace(problem, causal=True, align="top-left", seqlen_k=problem.seqlen_q)
    q, k, v = problem.inputs()
    clean, _ = fn(q, k, v, return_lse=True, **problem.options)
    if not clean.size:
        raise NotApplicable("dimensions of 0")
    allowed = np.zeros(clean.shape) if bitwise else 2 * bound(q, k, v, **problem.options)
    queries, columns = np.arange(problem.seqlen_q)[:, None], problem.head_dim_v
    for first in range(0, problem.seqlen_k, columns):
        keys = np.arange(first, min(first + columns, problem.seqlen_k))
        spoilt = np.array(v)
        spoilt[..., keys, keys - first] = np.nan
        out, _ = fn(q, k, spoilt, return_lse=True, **problem.options)
        reached = np.zeros(out.shape, bool)
        reached[..., keys - first] = keys <= queries
        asked = reached | np.isfinite(allowed)
        expected = np.where(reached, out.dtype.type(np.nan), clean)
        assert_same_bits(np.isnan(out) & asked, np.isnan(expected) & asked, name="NaN of out")
        if bitwise:
            kept = ~np.isnan(expected)
            assert_same_bits(out[kept], expected[kept], name="finite part of out")
        else:
            assert_agree(out, clean, np.where(reached, np.inf, allowed), name="finite part of out")


def some_heads(problem):
    """Up to three positions among the leading dimensions."""
    positions = list(np.ndindex(problem.leading))
    chosen = choices(problem).permutation(len(positions))[:3]
    return [positions[i] for i in chosen]


def head(array, index, group=1):
    """What the result's head at ``index`` is computed from, with leading dimensions of 1."""
    if index:
        index = (*index[:-1], index[-1] // group)
    own = index[len(index) - (array.ndim - 2) :]
    return array[tuple(slice(0, 1) if n == 1 else slice(i, i + 1) for n, i in zip(array.shape[:-2], own, strict=True))]


FORWARD_CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


def check_attention(fn, problem=None, *, bitwise=True, bound=bounds.attention):
    """Each of FORWARD_CHECKS in turn, which stops at the first one that fails; :func:`report` goes on.

    Returns which checks were left out, by name, and why: what ``fn`` does not take, or :func:`adapt` says it is not
    for.

    Without a problem or a strategy, each draws 100 of :func:`attention_problems`: float16 and bfloat16 (that of
    ml_dtypes), half of them causal in both alignments, heads that are grouped, broadcast or missing, lengths from 0 to
    200, batch dimensions of 0, head dimensions that are no multiples of 8, negative and zero strides, NaN around every
    array. Some checks put NaN and infinity in the arrays, too: plain p @ v, where p is 0 for a masked key, gives
    0 * NaN = NaN and fails check_masked_keys_have_no_influence, rightly, as a query does not see that key.

    What your function is not for is left out by :func:`adapt`, or by a strategy:
    ``attention_problems(["float32"], causal=st.just(False), seqlens=st.integers(1, 64))``; see there for the rest.
    ``bitwise=False`` asks nothing to hold bit for bit, but within ``bound``, which is called as
    ``bound(q, k, v, *, softmax_scale, causal, align, return_lse=False)`` like :func:`cupyflash.bounds.attention`.

    The default problems are about 5000 calls of ``fn``, and 15 s on one core beside them.
    """
    return run_all(FORWARD_CHECKS, adapted(fn), problem, bitwise, bound)
