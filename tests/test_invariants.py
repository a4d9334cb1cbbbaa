"""Changes of the inputs that must not change a bit of the result, or change it exactly."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim, testing
from cupyflash.testing import AttentionProblem as Problem
from tests import poisoned
from tests.backends import Simulator

few = settings(max_examples=25)
#: One head of moderate values in a small number of specialisations.
DIMS = st.sampled_from([(16, 16), (64, 64), (57, 48), (128, 128)])


@st.composite
def single_heads(draw, families=("normal", "rising", "peaked", "duplicates"), dtypes=("float16", "bfloat16")):
    causal = draw(st.booleans())
    head_dim, head_dim_v = draw(DIMS)
    return Problem(
        dtype=draw(st.sampled_from(dtypes)),
        seqlen_q=draw(testing.seqlens()),
        seqlen_k=draw(testing.seqlens()),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        align=draw(st.sampled_from(["bottom-right", "top-left"])) if causal else None,
        softmax_scale=draw(st.sampled_from([None, None, 1.0, -0.3])),
        values=draw(st.sampled_from(families)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def assert_same(results, expected):
    """Both out and lse, bit for bit."""
    for result, value in zip(results, expected, strict=True):
        testing.assert_same_bits(result, value)


@few
@given(problem=testing.attention_problems())
def test_the_same_call_twice(backend, problem):
    inputs = problem.inputs()
    assert_same(backend.attention(*inputs, **problem.options), backend.attention(*inputs, **problem.options))


@few
@given(problem=testing.attention_problems())
def test_strides_do_not_matter(backend, problem):
    _, out, lse = poisoned.attention(backend, problem)
    copies = [np.array(array, order="C") for array in problem.inputs()]
    assert_same((out, lse), backend.attention(*copies, **problem.options))


@few
@given(problem=testing.attention_problems(views=("plain", "rows before heads")))
def test_a_head_does_not_depend_on_the_others(backend, problem):
    inputs, out, lse = poisoned.attention(backend, problem)
    leading = out.shape[:-2]
    assume(out.size)
    q, k, v = inputs
    group = 1
    if len(leading) > 1:
        num_kv_heads = max(x.shape[-3] if x.ndim > 2 else 1 for x in (k, v))
        if num_kv_heads > 1 and q.ndim > 2 and q.shape[-3] > 1:
            group = q.shape[-3] // num_kv_heads
    chosen = [index for number, index in enumerate(np.ndindex(leading)) if number % 3 == problem.seed % 3]
    for index in chosen[:3]:
        alone = _matrix(q, index), _matrix(k, index, group), _matrix(v, index, group)
        assert_same((out[index], lse[index]), backend.attention(*alone, **problem.options))


def _matrix(array, index, group=1):
    """The matrix that the result's head at ``index`` is computed from."""
    if index:
        index = (*index[:-1], index[-1] // group)
    own = index[len(index) - (array.ndim - 2) :]
    return array[tuple(0 if n == 1 else i for n, i in zip(array.shape[:-2], own, strict=True))]


@few
@given(problem=single_heads(families=("normal", "rising", "rising to tiny values")), factor=st.sampled_from([0, -1, 3]))
def test_queries_do_not_depend_on_each_other(backend, problem, factor):
    q, k, v = problem.inputs()
    out, lse = backend.attention(q, k, v, **problem.options)
    q[1::2] *= q.dtype.type(factor)
    changed, changed_lse = backend.attention(q, k, v, **problem.options)
    assert_same((changed[::2], changed_lse[::2]), (out[::2], lse[::2]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_at_rest_do_not_see_that_others_are_rescaled(backend, dtype):
    """A multiplication by 1 keeps even sums that are subnormal."""
    q, k, v = Problem(dtype, (), (), (), 64, 500, 64, 40, values="rising to tiny values").inputs()
    q[::2] = 0
    out, lse = backend.attention(q, k, v)
    assert (out[::2] != 0).any()
    q[:] = 0
    at_rest, at_rest_lse = backend.attention(q, k, v)
    assert_same((at_rest[::2], at_rest_lse[::2]), (out[::2], lse[::2]))


@few
@given(problem=single_heads(), order=st.randoms(use_true_random=False))
def test_permutations_of_queries_and_of_value_columns(backend, problem, order):
    problem = replace(problem, causal=False, align=None)
    q, k, v = problem.inputs()
    rows, columns = (_shuffled(n, order) for n in (len(q), v.shape[1]))
    out, lse = backend.attention(q, k, v, **problem.options)
    permuted = backend.attention(q[rows], k, v[:, columns], **problem.options)
    assert_same(permuted, (out[np.ix_(rows, columns)], lse[rows]))


@few
@given(problem=single_heads(families=("integers",)), order=st.randoms(use_true_random=False))
def test_permutations_where_sums_are_exact(backend, problem, order):
    """Of queries, keys, columns of v, and columns of q and k: the tensor cores may add in any order."""
    problem = replace(problem, softmax_scale=testing.EXACT_SCALE, causal=False, align=None)
    q, k, v = problem.inputs()
    rows, keys, columns, dims = (_shuffled(n, order) for n in (len(q), len(k), v.shape[1], q.shape[1]))
    out, lse = backend.attention(q, k, v, **problem.options)
    permuted = backend.attention(
        q[np.ix_(rows, dims)], k[np.ix_(keys, dims)], v[np.ix_(keys, columns)], **problem.options
    )
    assert_same(permuted, (out[np.ix_(rows, columns)], lse[rows]))


def _shuffled(n, order):
    indices = list(range(n))
    order.shuffle(indices)
    return indices


@few
@given(problem=single_heads(families=("integers",), dtypes=("float16",)))
def test_tile_sizes_where_sums_are_exact(problem):
    """Architectures have tiles, and tensor core instructions, of their own."""
    problem = replace(problem, softmax_scale=testing.EXACT_SCALE)
    inputs = problem.inputs()
    simulator = Simulator()
    assert_same(
        simulator.attention(*inputs, arch="sm_75", **problem.options),
        simulator.attention(*inputs, arch="sm_80", **problem.options),
    )


@few
@given(problem=single_heads(), length=st.integers(0, 200))
def test_a_causal_prefix_is_the_result_of_the_prefix(backend, problem, length):
    problem = replace(problem, causal=True, align="top-left")
    q, k, v = problem.inputs()
    out, lse = backend.attention(q, k, v, **problem.options)
    prefix = backend.attention(q[:length], k[:length], v[:length], **problem.options)
    rows = min(length, len(q))
    assert_same((prefix[0][:rows], prefix[1][:rows]), (out[:rows], lse[:rows]))


@few
@given(problem=single_heads(families=("one sign",)), power=st.integers(-9, 9))
def test_powers_of_two_pass_through_the_values(backend, problem, power):
    q, k, v = problem.inputs()
    factor = q.dtype.type(2.0**power)
    out, lse = backend.attention(q, k, v, **problem.options)
    assert_same(backend.attention(q, k, v * factor, **problem.options), (out * factor, lse))


@few
@given(problem=single_heads(families=("normal",)), power=st.integers(-6, 6))
def test_powers_of_two_move_between_queries_and_keys(backend, problem, power):
    q, k, v = problem.inputs()
    q, k = (np.where(np.abs(x) < 2.0**-6, x.dtype.type(1), x) for x in (q, k))  # nothing becomes subnormal
    expected = backend.attention(q, k, v, **problem.options)
    factor = q.dtype.type(2.0**power)
    assert_same(backend.attention(q * factor, k / factor, v, **problem.options), expected)


@few
@given(problem=single_heads())
def test_signs(backend, problem):
    q, k, v = problem.inputs()
    out, lse = backend.attention(q, k, v, **problem.options)
    assert_same(backend.attention(-q, -k, v, **problem.options), (out, lse))
    negated, negated_lse = backend.attention(q, k, -v, **problem.options)
    np.testing.assert_array_equal(negated, -out)  # zeros may differ in sign
    testing.assert_same_bits(negated_lse, lse)


@few
@given(problem=single_heads(), num_kv_heads=st.integers(2, 3), group=st.integers(2, 3), batch=st.integers(1, 2))
def test_grouped_heads_are_repeated_key_heads(backend, problem, num_kv_heads, group, batch):
    problem = replace(
        problem,
        leading_q=(batch, num_kv_heads * group),
        leading_k=(batch, num_kv_heads),
        leading_v=(batch, num_kv_heads),
    )
    q, k, v = problem.inputs()
    repeated = (np.repeat(x, group, axis=1) for x in (k, v))
    assert_same(backend.attention(q, k, v, **problem.options), backend.attention(q, *repeated, **problem.options))


@few
@given(problem=single_heads(), value=st.sampled_from([np.nan, np.inf, -np.inf]), data=st.data())
def test_what_masked_keys_hold_has_no_influence(backend, problem, value, data):
    problem = replace(problem, causal=True, align=problem.align or "bottom-right")
    q, k, v = problem.inputs()
    expected = backend.attention(q, k, v, **problem.options)
    shift = len(k) - len(q) if problem.align == "bottom-right" else 0
    query = data.draw(st.integers(-1, max(len(q) - 1, -1)))
    first_unseen = max(query + shift + 1, 0)
    k[first_unseen:], v[first_unseen:] = value, value
    out, lse = backend.attention(q, k, v, **problem.options)
    rows = query + 1
    assert_same((out[:rows], lse[:rows]), (expected[0][:rows], expected[1][:rows]))


@few
@given(problem=single_heads(families=("normal",)))
def test_alignments_agree_exactly_for_equal_lengths(backend, problem):
    problem = replace(problem, causal=True)
    inputs = problem.inputs()
    (top, top_lse), (bottom, bottom_lse) = (
        backend.attention(*inputs, **replace(problem, align=align).options) for align in ("top-left", "bottom-right")
    )
    if problem.seqlen_q == problem.seqlen_k:
        assert_same((top, top_lse), (bottom, bottom_lse))
        assert_same((top, top_lse), backend.attention(*inputs, **replace(problem, align=None).options))
    elif problem.seqlen_q and problem.seqlen_k:
        # With equal scores lse counts the visible keys: ln(min(i + 1, S)) and ln(i + 1 + S - L) differ in some row.
        inputs[0][...] = 0
        lses = [
            backend.attention(*inputs, **replace(problem, align=align).options)[1]
            for align in ("top-left", "bottom-right")
        ]
        assert (lses[0] != lses[1]).any()


@few
@given(problem=single_heads())
def test_decoding_one_query_sees_every_key(backend, problem):
    inputs = replace(problem, seqlen_q=1).inputs()
    options = {"softmax_scale": problem.softmax_scale}
    assert_same(
        backend.attention(*inputs, causal=True, align="bottom-right", **options),
        backend.attention(*inputs, **options),
    )


@few
@given(problem=single_heads(families=("normal",)))
def test_one_key_gives_its_value(backend, problem):
    problem = replace(problem, seqlen_k=1, causal=False, align=None)
    q, k, v = problem.inputs()
    out, _ = backend.attention(q, k, v, **problem.options)
    np.testing.assert_array_equal(out, np.broadcast_to(v, out.shape))


@few
@given(problem=single_heads(families=("constant",)))
def test_constant_values_come_back(backend, problem):
    """Weights are rounded after they are summed: within two roundings of the dtype."""
    problem = replace(problem, causal=False, align=None)
    q, k, v = problem.inputs()
    assume(len(k))
    out, _ = backend.attention(q, k, v, **problem.options)
    unit = 2.0**-11 if problem.dtype == "float16" else 2.0**-8
    assert (np.abs(out.astype(np.float64) - 1) <= 2 * unit).all()


@few
@given(problem=single_heads())
def test_lse_is_between_the_maximum_and_the_maximum_plus_log_of_the_count(backend, problem):
    problem = replace(problem, causal=False, align=None)
    q, k, v = problem.inputs()
    assume(len(k))
    _, lse = backend.attention(q, k, v, **problem.options)
    scale = problem.head_dim**-0.5 if problem.softmax_scale is None else problem.softmax_scale
    row_max = (scale * (q.astype(np.float64) @ k.astype(np.float64).T)).max(axis=1)
    slack = 1e-4 * (1 + np.abs(row_max))
    assert (lse >= row_max - slack).all() and (lse <= row_max + np.log(len(k)) + slack).all()


@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@settings(max_examples=10)
@given(problem=single_heads(dtypes=("float16",)), seed=st.integers(0, 1000))
def test_the_order_of_warps_does_not_matter(arch, problem, seed):
    """No warp reads what another has yet to write, or writes what another still reads."""
    problem = replace(problem, seqlen_k=problem.seqlen_k + 128)
    results = []
    for schedule in "lockstep", "random":
        with ptxsim.settings(schedule=schedule, seed=seed):
            results.append(Simulator().attention(*problem.inputs(), arch=arch, **problem.options))
    assert_same(*results)


@few
@given(
    problem=testing.attention_problems(families=("normal",)),
    lanes=st.sampled_from([1, 256, 1024]),
)
def test_how_blocks_are_simulated_together_does_not_matter(problem, lanes):
    inputs = problem.inputs()
    expected = Simulator().attention(*inputs, **problem.options)
    with ptxsim.settings(chunk_lanes=lanes):
        assert_same(Simulator().attention(*inputs, **problem.options), expected)
