"""The tests of attention over Dask arrays, tested: with a fault in its offsets, results are not those of one call.

A fault is planted in the text of one module, and all of :mod:`cupyflash.distributed` is run anew with it.
"""

import functools
import sys
from types import ModuleType
from unittest import mock

import dask
import numpy as np
import pytest
from dask import array as da

import cupyflash
from cupyflash import distributed

MODULES = ("_graph", "_operands", "_functions", "_grid", "attention", "backward")
FAULTS = [
    ("causal", "_grid", "int(shift) + first_query - first_key", "int(shift) - first_query + first_key"),
    ("causal", "_grid", "int(shift) + first_query - first_key", "int(shift) + first_query"),
    ("causal", "_grid", "int(shift) + first_query - first_key", "int(shift) - first_key"),
    ("causal", "_grid", "first_key - (end_query - 1) <= ", "first_key - (end_query - 1) < "),
    ("band", "_grid", "end_key - 1 - first_query >= ", "end_key - 1 - first_query > "),
    ("lengths", "_grid", "self.problem, name), place) - start", "self.problem, name), place)"),
    ("lengths", "_grid", '"seqlens_k") - _lengths(problem, "seqlens_q")', '"seqlens_k")'),
    ("lengths", "_grid", "cuts[axis - len(shape)] |= {int(n) + 1 for", "cuts[axis - len(shape)] |= {int(n) + 2 for"),
    ("lengths", "attention", "slice(int(lengths[batch]), None))] = -np.inf", "slice(int(lengths[batch]), None))] = 0"),
    ("lengths", "backward", "without_sink if number else everything", "everything"),
    ("heads", "_grid", "[0] // self.problem.grouped_heads[1]", "[1] // self.problem.grouped_heads[1]"),
    ("heads", "_operands", "query_ends.update(end * group for end in key_ends)", "query_ends.update(key_ends)"),
    ("places", "_grid", "batch = batch * size + start", "batch = batch + start"),
    ("places", "_grid", "(batch, head, first_query, first_key)", "(batch, head, first_key, first_query)"),
    ("places", "_grid", "cuts[axis - len(shape)] |= set(range(size))", "pass"),
    ("places", "_grid", "head = starts.pop() if len(sizes) >= 2 else 0", "head = starts.pop() * 0"),
    ("origin", "_functions", "[b - {problem.origin[0]}]", "[b]"),
    ("origin", "_functions", '"L": ("seqlens_q", "seqlen_q")', '"L": ("seqlens_k", "seqlen_k")'),
    ("origin", "_grid", "tuple(map(add, self.problem.origin, (batch", "tuple(map(add, (0, 0, 0, 0), (batch"),
]  # fmt: skip


@functools.cache
def case(name):
    """q, k, v and dout, cut unlike each other, options, and what one call gives."""
    rng = np.random.default_rng(0)
    leading, key_heads = {"places": ((2, 2, 2), (2, 2, 2)), "heads": ((2, 6), (2, 2))}.get(name, ((2, 4), (2, 2)))
    q, k, v, dout = (
        rng.standard_normal((*heads, seqlen, 8)).astype(np.float32)
        for heads, seqlen in ((leading, 9), (key_heads, 14), (key_heads, 14), (leading, 9))
    )
    options = {
        "causal": {"causal": True, "align": "bottom-right"},
        "band": {"window_size": (0, 2), "align": "top-left"},
        "lengths": {
            "window_size": (5, 2), "align": "bottom-right", "seqlens_q": np.array([6, 9]),
            "seqlens_k": np.array([14, 4]), "attn_sink": np.linspace(0, 1, 4, dtype=np.float32),
        },
        "heads": {},
        "places": {"mask_mod": "(8 * b + 3 * h + 2 * i + j) % 7 < 3"},
        "origin": {
            "score_mod": "score + 0.1f * (L - 2 * S) * (j % 3)", "mask_mod": "(b + i + 2 * j) % 7 != 0",
            "origin": (3, 0, 2, 1), "seqlens_k": np.array([14, 9]),
        },
    }[name]  # fmt: skip
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gradients = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    if name == "heads":
        chunks = [(2, heads, length, 8) for heads, length in (((1, 5), 9), (2, 14), (2, 14), (6, 9))]
    elif name == "places":
        chunks = [(2, 1, 1, length, 8) for length in (5, 14, 14, 9)]
    else:
        chunks = [(2, 4, length, 8) for length in ((2, 3, 4), 6, 14, 9)]
    parts = [da.from_array(x, chunks=sizes) for x, sizes in zip((q, k, v, dout), chunks, strict=True)]
    return parts, options, [out, lse, *given(gradients)]


def given(gradients):
    return [gradient for gradient in vars(gradients).values() if gradient is not None]


def is_right(name, attention, attention_backward):
    (q, k, v, dout), options, expected = case(name)
    out, lse = attention(q, k, v, return_lse=True, **options)
    if not are_close(dask.compute(out, lse, scheduler="synchronous"), expected[:2]):
        return False
    gradients = given(attention_backward(dout, q, k, v, *expected_in_chunks(out, lse, expected), **options))
    return are_close(dask.compute(*gradients, scheduler="synchronous"), expected[2:])


def are_close(results, expected):
    return all(np.allclose(x, right, rtol=1e-4, atol=1e-4) for x, right in zip(results, expected, strict=True))


def expected_in_chunks(out, lse, expected):
    """out and lse of one call, in the chunks of those that were computed: not to compute them once more."""
    return [da.from_array(x, chunks=lazy.chunks) for lazy, x in zip((out, lse), expected, strict=False)]


@pytest.mark.parametrize("name", sorted({fault[0] for fault in FAULTS}))
def test_without_a_fault_results_are_those_of_one_call(name):
    assert is_right(name, distributed.attention, distributed.attention_backward)


@pytest.mark.parametrize(("name", "module", "text", "instead"), FAULTS)
def test_a_fault_is_seen(name, module, text, instead):
    with mock.patch.dict(sys.modules):
        for part in MODULES:
            path = f"cupyflash.distributed.{part}"
            original = sys.modules[path]
            with open(original.__file__, encoding="utf-8") as file:
                source = file.read()
            if part == module:
                assert source.count(text) == 1
                source = source.replace(text, instead)
            sys.modules[path] = planted = ModuleType(path)
            exec(compile(source, original.__file__, "exec"), planted.__dict__)
        attention, backward = (sys.modules[f"cupyflash.distributed.{part}"] for part in MODULES[-2:])
        try:
            seen = not is_right(name, attention.attention, backward.attention_backward)
        except (ValueError, LookupError, RuntimeError):
            seen = True  # chunks that do not go together, or an array that does not reach so far
    assert seen
