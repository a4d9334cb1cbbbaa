"""Attention over Dask arrays: any chunks, any order of tasks."""

from importlib import import_module
from unittest import mock

import dask
import numpy as np
import pytest
from dask import array as da
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyflash
from cupyflash import bounds, distributed, merge, reference, testing
from tests import distributed_bounds
from tests.distributed_bounds import edges
from tests.test_problem import fake_cupy

attention_module = import_module("cupyflash.distributed.attention")
CUTS = st.sets(st.integers(4, 29), min_size=1, max_size=1)
LENGTHS = {"seqlens_q": np.array([13, 20]), "seqlens_k": np.array([30, 9])}
BOTTOM_RIGHT = {"causal": True, "align": "bottom-right"}


def in_chunks(array, cuts):
    """Cut at the same places, as far as there are such, along all axes of an array but its last."""
    sizes = [np.diff(sorted({0, length, *(n for n in cuts if n < length)})).tolist() for length in array.shape]
    return da.from_array(array, chunks=tuple(map(tuple, [*sizes[:-1], array.shape[-1:]])))


def drawn(seed=0, dtype=np.float16):
    rng = np.random.default_rng(seed)
    shapes = {"q": (2, 4, 20, 8), "k": (2, 2, 30, 8), "v": (1, 2, 30, 8), "dout": (2, 4, 20, 8)}
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes.values()], rng


def options_of(name, rng):
    """Arrays in chunks, and not."""
    slopes, sink = rng.uniform(0, 1, 4).astype(np.float32), rng.standard_normal(4).astype(np.float32)
    bias, mask = rng.standard_normal((4, 1, 30)).astype(np.float32), rng.random((2, 1, 20, 30)) < 0.7
    return {
        "causal": BOTTOM_RIGHT,
        "band": {"window_size": (8, 3), "align": "top-left", "alibi_slopes": slopes, "bias": bias, "mask": mask},
        "lengths": {"window_size": (8, 3), "align": "bottom-right", "attn_sink": sink, **LENGTHS},
        "places": {
            "score_mod": "score * (1 + b) + t[h] * (i - 2 * j + L - S)",
            "mask_mod": "(b + 2 * h + 3 * i + j) % 5 != 0 && i < L && j < S",
            "aux": {"t": rng.uniform(0, 0.1, 4).astype(np.float32)},
            "dropout_p": 0.3,
            "seed": 5,
            "seqlens_k": LENGTHS["seqlens_k"],
            "origin": (1, 0, 3, 2),
        },
    }[name]


def tasks(array, name):
    return sum(str(key[0]).startswith(name) for key in array.dask.to_dict() if isinstance(key, tuple))


@settings(max_examples=2)
@given(cuts=st.tuples(*[CUTS] * 5), leading_cut=st.sampled_from([2, 3, 1]), seed=st.integers(0, 9))
@pytest.mark.parametrize(
    "name", ["causal", "places", *(pytest.param(name, marks=pytest.mark.deep) for name in ("band", "lengths"))]
)
def test_any_chunks(name, cuts, leading_cut, seed):
    (q, k, v, dout), rng = drawn(seed)
    cuts[seed % 5].add(leading_cut)
    options = options_of(name, rng)
    in_parts = dict(options)
    for array in {"mask", "bias"} & set(options):
        in_parts[array] = in_chunks(options[array], cuts[4])
    parts = [in_chunks(x, places) for x, places in zip((q, k, v, dout), cuts[:4], strict=True)]
    out, lse = distributed.attention(*parts[:3], return_lse=True, **in_parts)
    gradients = distributed.attention_backward(parts[3], *parts[:3], out, lse, **in_parts)
    results = dask.compute(out, lse, vars(gradients), scheduler="synchronous")
    pairs = [in_parts[name] for name in ("mask", "bias") if name in in_parts]
    key_edges = edges(-2, *parts[1:3])
    assert_forward_within_bound(results, q, k, v, key_edges, options)
    query_edges = edges(-2, out, parts[3], *(array for array in pairs if array.shape[-2] > 1))
    head_edges = sorted({*edges(-3, out, parts[3]), 2})  # groups of two heads
    of_chunks = edges(-4, out, parts[3]), head_edges, query_edges, key_edges
    allowed = distributed_bounds.gradients(dout, q, k, v, *results[:2], *of_chunks, options)
    for gradient, (exact, error) in allowed.items():
        testing.assert_within_bound(results[2][gradient], exact, error, name=gradient)


@pytest.mark.parametrize("name", ["band", pytest.param("lengths", marks=pytest.mark.deep)])
def test_forward_with_options(name):
    (q, k, v, _), rng = drawn()
    options = options_of(name, rng)
    parts = [in_chunks(x, {1, 9, 17}) for x in (q, k, v)]
    lazy = distributed.attention(*parts, return_lse=True, return_max=True, **options)
    *results, row_max = dask.compute(*lazy, scheduler="synchronous")
    assert_forward_within_bound(results, q, k, v, edges(-2, *parts[1:]), options)
    testing.assert_same_bits(row_max, cupyflash.attention(q, k, v, return_max=True, **options)[1])


@pytest.mark.parametrize("chunks", [(1, 1, 1), (1, 2, 1), (2, 1, 3), (2, 2, 2)])
def test_places_in_a_batch_of_two_dimensions(chunks):
    """Where each pair is told from every other: a query sees the one key that its place leaves."""
    v = np.eye(16, dtype=np.float32)[None, None, None].repeat(2, 0).repeat(2, 1).repeat(3, 2)
    q = np.zeros((2, 2, 3, 5, 16), np.float32)
    lazy = [da.from_array(x, chunks=(*chunks, 3, 16)) for x in (q, v, v)]
    out = distributed.attention(*lazy, mask_mod="j == (4 * b + h + i + L) % S").compute(scheduler="synchronous")
    batch, head, query = np.ogrid[:4, :3, :5]
    np.testing.assert_array_equal(out.argmax(axis=-1).reshape(4, 3, 5), (4 * batch + head + query + 5) % 16)
    assert (out.max(axis=-1) == 1).all()


def test_arrays_of_expressions_are_whole_in_any_chunks():
    (q, k, v, _), rng = drawn(dtype=np.float32)
    table = rng.standard_normal((2, 4, 20)).astype(np.float32)
    options = {"score_mod": "score + q[(b * 4 + h) * L + i] * L_of_batch[0]", "aux": {"q": table, "L_of_batch": table}}
    expected = cupyflash.attention(q, k, v, **options)
    transposed = da.from_array(np.asfortranarray(table), chunks=(1, 3, 7))
    lazy = [in_chunks(x, {11}) for x in (q, k, v)]
    in_other_order = da.from_array(table.T.copy(), chunks=-1).T  # whose one chunk is a view
    options["aux"] = {"q": transposed, "L_of_batch": in_other_order}
    out = distributed.attention(*lazy, **options).compute(scheduler="synchronous")
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_a_faulty_expression_is_found_in_its_own_line():
    x = da.zeros((1, 4, 8), chunks=-1, dtype=np.float32)
    with pytest.raises(ValueError, match=r'score_mod\(2\): error: identifier "nonsense" is undefined'):
        distributed.attention(x, x, x, score_mod="score + L  // a comment\n + nonsense").compute()


@pytest.mark.parametrize(("sink", "levels"), [(None, 2), (np.zeros(4, np.float32), 3)])
def test_each_level_of_joins_may_round(sink, levels):
    """Three parts are joined on two levels; a sink joins last."""
    (q, k, _, _), _ = drawn()
    ones = np.ones_like(k)
    whole = bounds.attention(q, k, ones, attn_sink=sink)
    in_parts, _ = bounds.attention_in_parts(q, k, ones, [0, 10, 20, 30], attn_sink=sink)
    out = reference.attention(q, k, ones, attn_sink=sink)
    assert (in_parts - whole >= 0.99 * levels * 2.0**-11 * out).all()


@pytest.mark.parametrize("wrong", [[0, 12], [3, 30], [0, 9, 9, 30], [0, 20, 10, 30]])
def test_parts_of_a_bound_are_all_keys_once(wrong):
    (q, k, v, _), _ = drawn()
    with pytest.raises(ValueError, match=r"edges: .* do not increase from 0 to 30"):
        bounds.attention_in_parts(q, k, v, wrong)


def assert_forward_within_bound(results, q, k, v, key_edges, options):
    exact = reference.attention(q, k, v, return_lse=True, **options)
    allowed = bounds.attention_in_parts(q, k, v, key_edges, **options)
    for name, result, right, error in zip(("out", "lse"), results, exact, allowed, strict=False):
        testing.assert_within_bound(result, right, error, name=name)


def test_bits_depend_on_the_chunks_alone():
    (q, k, v, _), _ = drawn()
    q, k, v = (in_chunks(x[:1, :2], {7, 13}) for x in (q, k, v))
    out, lse = distributed.attention(q, k, v, return_lse=True, **BOTTOM_RIGHT)
    again = distributed.attention(q, k, v, return_lse=True, **BOTTOM_RIGHT)
    assert again[0].name == out.name
    results = out, lse, *distributed.attention_backward(out, q, k, v, *again, **BOTTOM_RIGHT)
    expected = dask.compute(*results, scheduler="synchronous")
    rng = np.random.default_rng(0)
    with mock.patch("dask.local.order", lambda graph: dict(zip(graph, rng.permutation(len(graph)), strict=True))):
        shuffled = dask.compute(*results, scheduler="synchronous")
    in_threads = dask.compute(*results, num_workers=4)
    for result, *others, right in zip(results, in_threads, shuffled, expected, strict=True):
        for other in others:
            testing.assert_same_bits(other, right)
        last = result.blocks[tuple(count - 1 for count in result.numblocks)]
        chunk = last.compute(scheduler="synchronous")  # without the tasks of others
        testing.assert_same_bits(chunk, right[tuple(slice(-size, None) for size in chunk.shape)])


def test_what_other_processes_send_may_lie_anywhere():
    """Half of a message's arrays of 2 bytes may be at odd addresses: here, all are, and so is what is made of them."""

    def moved(array):
        memory = np.empty(array.nbytes + 1, np.uint8)
        place = memory[1:].view(array.dtype).reshape(array.shape)
        place[...] = array
        return place

    (q, k, v, _), _ = drawn()
    q, k, v = (in_chunks(x[:1, :2], {7, 13}) for x in (q, k, v))
    out, lse = distributed.attention(q, k, v, return_lse=True, **BOTTOM_RIGHT)
    q, k, v, moved_out, moved_lse = (x.map_blocks(moved, dtype=x.dtype) for x in (q, k, v, out, lse))
    sent = (
        *distributed.attention(q, k, v, return_lse=True, **BOTTOM_RIGHT),
        *distributed.attention_backward(moved_out, q, k, v, moved_out, moved_lse, **BOTTOM_RIGHT),
    )
    with mock.patch.object(attention_module, "_merge", lambda outs, lses: tuple(map(moved, merge(outs, lses)))):
        results = dask.compute(*sent, scheduler="synchronous")
    for result, expected in zip(results, dask.compute(out, lse, scheduler="synchronous"), strict=False):
        testing.assert_same_bits(result, expected)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 16),
        ({"causal": True}, 10),
        ({"window_size": (16, 0)}, 7),
        ({"window_size": (17, 0)}, 7 + 2),
        ({"causal": True, "align": 1}, 13),
        ({"causal": True, "align": 17}, 15),
        ({"causal": True, "align": -15}, 10),
        ({"causal": True, "align": -16}, 6),
        ({"seqlens_q": np.array([16]), "seqlens_k": np.array([17])}, 2),
        ({"seqlens_q": np.array([20]), "seqlens_k": np.array([20]), **BOTTOM_RIGHT}, 3),
    ],
)
def test_what_is_masked_makes_no_task(options, pairs):
    x = da.zeros((1, 1, 64, 8), chunks=(1, 1, 16, 8), dtype=np.float16)
    out, lse = distributed.attention(x, x, x, return_lse=True, **options)
    assert tasks(out, "attention-pair") - tasks_without_keys(out) == pairs
    dq, _, _ = distributed.attention_backward(x, x, x, x, out, lse, **options)
    assert tasks(dq, "attention-backward-pair") == pairs


def tasks_without_keys(out):
    return sum("none" in key for key in out.dask.to_dict() if isinstance(key, tuple))


def test_empty_dimensions():
    q, k, v = (da.zeros(shape, chunks=-1, dtype=np.float16) for shape in ((0, 2, 3, 8), (0, 2, 4, 8), (0, 2, 4, 8)))
    assert distributed.attention(q, k, v).compute().shape == (0, 2, 3, 8)
    q, k = da.ones((2, 3, 8), chunks=1, dtype=np.float16).rechunk({-1: -1}), da.ones((2, 0, 8), dtype=np.float16)
    out, lse = dask.compute(*distributed.attention(q, k, k, return_lse=True))
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (0, 1, 0)])
def test_an_axis_of_one_has_one_chunk_that_counts(sizes):
    """Filters and concatenations leave empty chunks."""
    (q, k, v, dout), _ = drawn(dtype=np.float32)
    q, k, v, dout = q[:1, :, :1], k[:, :1], v[:, :1], dout[:, :, :1]
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    lazy_q = da.from_array(q, chunks=(sizes, (4,), sizes, (8,)))
    lazy_k, lazy_v = (da.from_array(x, chunks=(x.shape[0], sizes, (30,), (8,))) for x in (k, v))
    lazy = distributed.attention(lazy_q, lazy_k, lazy_v, return_lse=True)
    gradients = distributed.attention_backward(da.from_array(dout), lazy_q, lazy_k, lazy_v, *lazy)
    results = dask.compute(*lazy, *gradients, scheduler="synchronous")
    expected = cupyflash.attention_backward(dout, q, k, v, out, lse)
    for result, right in zip(results, (out, lse, *expected), strict=True):
        assert result.shape == right.shape
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sink", [1e300, -1e300, np.inf, -np.inf])
def test_a_sink_beyond_the_range_of_lse(sink):
    (q, k, v, _), _ = drawn(dtype=np.float32)
    options = {"attn_sink": np.full(4, sink), "seqlens_q": np.array([13, 20])}
    expected = cupyflash.attention(q, k, v, return_lse=True, **options)
    lazy = distributed.attention(*(in_chunks(x, {11}) for x in (q, k, v)), return_lse=True, **options)
    for result, right in zip(dask.compute(*lazy, scheduler="synchronous"), expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-5)


def test_refusals():
    x = da.zeros((2, 4, 16, 8), chunks=(1, 2, 8, 8), dtype=np.float16)
    with pytest.raises(ValueError, match=r"k: head_dim 8 is in chunks of \(4, 4\); expected one"):
        distributed.attention(x, x.rechunk({-1: 4}), x)
    with pytest.raises(TypeError, match=r"v: expected a dask\.array\.Array, not numpy\.ndarray of shape"):
        distributed.attention(x, x, np.zeros((2, 4, 16, 8), np.float16))
    with pytest.raises(ValueError, match="q: has chunks of unknown sizes"):
        distributed.attention(x[x[:, 0, 0, 0] > 0], x, x)
    with pytest.raises(ValueError, match="k: head_dim 6, but q has 8"):
        distributed.attention(x, x[..., :6], x)
    with pytest.raises(ValueError, match="needs one of 'bottom-right'"):
        distributed.attention(x, x[..., :9, :], x[..., :9, :], causal=True)
    with pytest.raises(TypeError, match="out: Dask arrays are not written to"):
        distributed.attention(x, x, x, out=x)
    with pytest.raises(TypeError, match="grads_out: Dask arrays are not written to"):
        distributed.attention_backward(x, x, x, x, x, x[..., 0], grads_out=(x, x, x))
    with pytest.raises(TypeError, match="gradient_dtype: is not an option"):
        distributed.attention_backward(x, x, x, x, x, x[..., 0], gradient_dtype=np.float32)
    with pytest.raises(ValueError, match="align: 2147483647 with seqlen_q 16 and seqlen_k 16 is further than"):
        distributed.attention(x, x, x, align=2**31 - 1, alibi_slopes=np.zeros(4, np.float16))
    with pytest.raises(TypeError, match="mask_mod: a BlockMask is of whole arrays; give its expression"):
        distributed.attention(x, x, x, mask_mod=cupyflash.block_mask("j <= i", 16, 16))
    with pytest.raises(TypeError, match=r"aux\['t'\]: dtype <c16 is not bool"):
        distributed.attention(x, x, x, mask_mod="t[i]", aux={"t": np.zeros(3, complex)})
    with pytest.raises(TypeError, match=r"seqlens_k: the graph is made by it; use seqlens_k\.compute\(\)"):
        distributed.attention(x, x, x, seqlens_k=da.ones(2, dtype=np.int32))
    with pytest.raises(
        TypeError, match=r"q: expected a numpy.* not dask\.array\..*; cupyflash\.distributed takes them"
    ):
        cupyflash.attention(x, x, x)
    with pytest.raises(TypeError, match="return_max: expected True or False"):
        distributed.attention(x, x, x, return_max=1)
    with pytest.raises(TypeError, match="nonsense: is not an option"):
        distributed.attention(x, x, x, nonsense=1)
    distributed.attention(x, x, x, dropout_p=0.0, score_mod=None, out=None)


def test_chunks_of_two_kinds():
    x = da.zeros((2, 4, 16, 8), chunks=(1, 2, 8, 8), dtype=np.float16)
    on_gpu = da.Array(x.dask, x.name, x.chunks, meta=fake_cupy(0, 0, 0, 0))
    with pytest.raises(TypeError, match="k: cupy chunks, but q has numpy chunks"):
        distributed.attention(x, on_gpu, x)
