"""Attention over Dask arrays: any chunks, any order of tasks."""

import math
from importlib import import_module
from unittest import mock

import dask
import numpy as np
import pytest
from dask import array as da
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import Gradients, bounds, distributed, merge, reference, testing
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
    }[name]


def tasks(array, name):
    return sum(str(key[0]).startswith(name) for key in array.dask.to_dict() if isinstance(key, tuple))


@settings(max_examples=2)
@given(cuts=st.tuples(*[CUTS] * 5), leading_cut=st.sampled_from([2, 3, 1]), seed=st.integers(0, 9))
@pytest.mark.parametrize(
    "name", ["causal", *(pytest.param(name, marks=pytest.mark.deep) for name in ("band", "lengths"))]
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
    assert_forward_within_bound(results, q, k, v, options)
    testing.assert_gradients_within_bound(Gradients(**results[2]), dout, q, k, v, *results[:2], **options)


@pytest.mark.parametrize("name", ["band", "lengths"])
def test_forward_with_options(name):
    (q, k, v, _), rng = drawn()
    options = options_of(name, rng)
    parts = [in_chunks(x, {1, 9, 17}) for x in (q, k, v)]
    results = dask.compute(*distributed.attention(*parts, return_lse=True, **options), scheduler="synchronous")
    assert_forward_within_bound(results, q, k, v, options)


def assert_forward_within_bound(results, q, k, v, options):
    """What a part gives is a mean of values; it is rounded, and so is what each level of the tree makes of it."""
    exact = reference.attention(q, k, v, return_lse=True, **options)
    magnitude = reference.attention(q, k, np.abs(v), **options)
    levels = math.ceil(math.log2(k.shape[-2])) + 1
    out_bound, lse_bound = bounds.attention(q, k, v, return_lse=True, **options)
    lse_bound += 8 * levels * np.finfo(np.float32).eps * (1 + np.abs(np.where(np.isfinite(exact[1]), exact[1], 0)))
    testing.assert_within_bound(results[0], exact[0], out_bound + levels * np.finfo(q.dtype).eps * magnitude)
    testing.assert_within_bound(results[1], exact[1], lse_bound)


def test_bits_depend_on_the_chunks_alone():
    (q, k, v, _), _ = drawn()
    q, k, v = (in_chunks(x[:1, :2], {7, 13}) for x in (q, k, v))
    out, lse = distributed.attention(q, k, v, return_lse=True, **BOTTOM_RIGHT)
    again = distributed.attention(q, k, v, return_lse=True, **BOTTOM_RIGHT)
    assert again[0].name == out.name
    results = out, lse, *distributed.attention_backward(out, q, k, v, *again, **BOTTOM_RIGHT)
    expected = dask.compute(*results, scheduler="synchronous")
    for result, in_threads, right in zip(results, dask.compute(*results, num_workers=4), expected, strict=True):
        testing.assert_same_bits(in_threads, right)
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
    for options in {"dropout_p": 0.5, "seed": 1}, {"score_mod": "score"}, {"mask_mod": "i > j"}, {"return_max": True}:
        with pytest.raises(NotImplementedError, match=f"{next(iter(options))}: "):
            distributed.attention(x, x, x, **options)
    with pytest.raises(TypeError, match="nonsense: is not an option"):
        distributed.attention(x, x, x, nonsense=1)
    distributed.attention(x, x, x, dropout_p=0.0, score_mod=None)


def test_chunks_of_two_kinds():
    x = da.zeros((2, 4, 16, 8), chunks=(1, 2, 8, 8), dtype=np.float16)
    on_gpu = da.Array(x.dask, x.name, x.chunks, meta=fake_cupy(0, 0, 0, 0))
    with pytest.raises(TypeError, match="k: cupy chunks, but q has numpy chunks"):
        distributed.attention(x, on_gpu, x)
