"""Each barrier and each wait of the kernels is needed, and without it the sanitizer names the lines that it orders.

The statements of a kernel are listed in the order of its file, with one finding that is due without each: its kind, and
what stands in the two lines of the kernel that it names, or that called those. Of several reads that a write collides
with, the sanitizer names one: where that is not certain, what all of their lines have in common is expected.
"""

import functools
import re
from unittest import mock

import numpy as np
import pytest

import kernels_cu
from cupyflash import _launch, attention, attention_backward, ptxsim
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from cupyflash.testing import Lengths, Operand, Variants
from tests.mutants.generate import planted

CAUSAL = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}
#: Keys are removed by a mask, scores changed, and a bias and a sink have gradients.
OPTIONS = Variants(softcap=1.5, mask=Operand("random"), bias=Operand("normal", "keys"), attn_sink=Operand("normal"))
LENGTHS = Variants(seqlens_q=Lengths("random"), seqlens_k=Lengths("random"))
#: One head, two tiles in both directions; in the last two a tile of queries sees no key, and one of keys no query.
PROBLEMS = {
    "half": (Problem("float16", (), (), (), 130, 130, 16, 16, **CAUSAL), "sm_80"),
    "one stage of keys": (Problem("float16", (), (), (), 130, 130, 16, 16, **CAUSAL), "sm_120"),
    "float": (Problem("float32", (), (), (), 65, 70, 16, 16, **CAUSAL), "sm_80"),
    "no keys": (Problem("float16", (), (), (), 150, 5, 16, 16, **CAUSAL), "sm_80"),
    "no queries": (Problem("float16", (), (), (), 5, 150, 16, 16, **TOP_LEFT), "sm_80"),
    "shared queries": (Problem("float32", (), (2,), (2,), 65, 70, 16, 16), "sm_80"),
    "no keys, shared queries": (Problem("float32", (), (2,), (2,), 70, 5, 16, 16, **CAUSAL), "sm_80"),
    "no queries, shared keys": (Problem("float32", (2,), (), (2,), 5, 70, 16, 16, **TOP_LEFT), "sm_80"),
    "half, options": (Problem("float16", (), (), (), 130, 130, 16, 16, variants=OPTIONS), "sm_80"),
    "float, options": (Problem("float32", (), (), (), 65, 70, 16, 16, variants=OPTIONS), "sm_80"),
    "half, lengths": (Problem("float16", (), (), (), 140, 140, 16, 16, variants=LENGTHS), "sm_80"),
    "float, lengths": (Problem("float32", (), (), (), 75, 80, 16, 16, variants=LENGTHS), "sm_80"),
}
BARRIER, ANY, WARP = "__syncthreads();", "__syncthreads_or(", "__syncwarp();"
WAIT, COMMIT = "cp_async_wait_group<0>();", "cp_async_commit_group();"
ARRIVE, MEET = "bar_arrive(SENT, NUM_THREADS);", "bar_sync(SENT, NUM_THREADS);"
STATEMENT = re.compile("|".join(map(re.escape, (BARRIER, ANY, WARP, WAIT, COMMIT, ARRIVE, MEET))))
RACE, NO_WAIT = "shared race", "missing cp.async wait"
DEADLOCK, DIVERGENT = "deadlock", "divergent barrier"
UNDEFINED = "undefined behaviour"  # some lanes of a warp alone at an instruction that all have to execute together

FAULTS = {
    "flash_fwd.cu": [
        (WAIT, "half", NO_WAIT, "mma_abt<", "key_loader.load_async(keys_left)"),
        (BARRIER, "half", RACE, "value_loader.load_async", "weights.multiply"),
        (WAIT, "half", NO_WAIT, "weights.multiply", "value_loader.load_async"),
        (ANY, "half", RACE, "spread_nonfinite", "value_loader.load_async"),
        (BARRIER, "half", RACE, "remove_nonfinite", "_nonfinite"),
        (BARRIER, "half", RACE, "key_loader.load_async(keys_left)", "mma_abt<"),
        (WAIT, "no keys", NO_WAIT, "st_shared(out_tile", "query_rows.template load_async"),
        (BARRIER, "no keys", RACE, "st_shared(out_tile", "query_rows.template load_async"),
        (WARP, "half", RACE, "query_rows.template store", "st_shared(out_tile"),
    ],
    "flash_fwd_fma.cu": [
        (BARRIER, "float", RACE, "key_loader.load_async", "multiply<"),
        (WAIT, "float", NO_WAIT, "multiply_transposed", "key_loader.load_async"),
        (BARRIER, "float", RACE, "multiply_transposed", "key_loader.load_async"),
        (BARRIER, "float", RACE, "value_loader.load_async", "multiply_transposed"),
        (WAIT, "float", NO_WAIT, "multiply<", "value_loader.load_async"),
        (BARRIER, "float", RACE, "multiply<", "store_scores"),
        (ANY, "float", DEADLOCK, "every warp has seen the values", None),
        (BARRIER, "float", RACE, "remove_nonfinite", "_nonfinite"),
        (BARRIER, "float", RACE, "multiply<", "remove_nonfinite"),
    ],
    "flash_bwd_dkdv.cu": [
        (COMMIT, "half", NO_WAIT, "ld_shared_v2", "row_loader.load_async"),
        (WAIT, "half", NO_WAIT, "mma_abt<ELEMENT, HEAD_DIM,", "query_loader.load_async"),
        (BARRIER, "half", RACE, "query_loader.load_async", "factors.multiply"),
        (ARRIVE, "half", DEADLOCK, "__syncthreads_or", None),
        (MEET, "half", RACE, "exchange.receive", "exchange.send"),
        (ANY, "half", UNDEFINED, "factors.multiply", None),
        (BARRIER, "half", RACE, "remove_nonfinite<ELEMENT>(dout_loader", "_nonfinite"),
        (BARRIER, "half", RACE, "factors.multiply", "remove_nonfinite<ELEMENT>(dout_loader"),
        (WAIT, "no queries", NO_WAIT, "load_fragments", "TileLoader<BLOCK_N, HEAD_DIM,"),
        (BARRIER, "no queries", RACE, "load_fragments", "TileLoader<BLOCK_N, HEAD_DIM,"),
        (BARRIER, "no queries", RACE, "store_fragments", "load_fragments"),
        (WARP, "half", RACE, "store_rows", "store_fragments"),
    ],
    "flash_bwd_dq.cu": [
        (WAIT, "half", NO_WAIT, "mma_abt<ELEMENT, HEAD_DIM,", "key_loader.load_async"),
        (BARRIER, "half", RACE, "key_loader.load_async", "key_"),
        (ANY, "half", UNDEFINED, "dscore.multiply(dquery", None),
        (BARRIER, "half", RACE, "remove_nonfinite", "_nonfinite"),
        (BARRIER, "half", RACE, "dscore.multiply(dquery", "remove_nonfinite"),
        (BARRIER, "one stage of keys", RACE, "key_loader.load_async", "dscore.multiply(dquery"),
        (WAIT, "no keys", NO_WAIT, "store_fragments", "TileLoader<BLOCK_M, HEAD_DIM,"),
        (BARRIER, "no keys", RACE, "store_fragments", "TileLoader<BLOCK_M, HEAD_DIM,"),
        (WARP, "half", RACE, "store_rows", "store_fragments"),
    ],
    "flash_bwd_dkdv_fma.cu": [
        (BARRIER, "float", RACE, "query_loader.load_async", "accumulate(dkey"),
        (WAIT, "float", NO_WAIT, "multiply_transposed<KeyTile", "query_loader.load_async"),
        (BARRIER, "float", RACE, "multiply_transposed<KeyTile", "query_loader.load_async"),
        (BARRIER, "float", RACE, "dout_loader.load_async", "multiply_transposed<KeyTile"),
        (WAIT, "float", NO_WAIT, "multiply_transposed<ValueTile", "dout_loader.load_async"),
        (BARRIER, "float", RACE, "multiply_transposed<ValueTile", "dout_loader.load_async"),
        (ANY, "float", DIVERGENT, "they are gone", "the query tile has landed again"),
        (BARRIER, "float", RACE, "remove_nonfinite", "_nonfinite"),
        (BARRIER, "float", RACE, "accumulate(dvalue", "remove_nonfinite"),
        (BARRIER, "float", RACE, "query_reloader.load_async", "accumulate(dvalue"),
        (WAIT, "float", NO_WAIT, "accumulate(dkey", "query_reloader.load_async"),
        (BARRIER, "float", RACE, "accumulate(dkey", "query_reloader.load_async"),
        (BARRIER, "float, options", RACE, "remove_nonfinite", "spread_nonfinite(dkey"),
        (BARRIER, "float", RACE, "accumulate(dkey", "remove_nonfinite"),
        (WAIT, "no queries, shared keys", NO_WAIT, "TileLoader<BLOCK_N, HEAD_DIM_V", "TileLoader<BLOCK_N, HEAD_DIM_V"),
    ],
    "flash_bwd_dq_fma.cu": [
        (BARRIER, "float", RACE, "value_loader.load_async", "multiply"),
        (WAIT, "float", NO_WAIT, "multiply_transposed<DoutTile", "value_loader.load_async"),
        (BARRIER, "float", RACE, "multiply_transposed<DoutTile", "value_loader.load_async"),
        (BARRIER, "float", RACE, "key_loader.load_async", "multiply_transposed<DoutTile"),
        (WAIT, "float", NO_WAIT, "multiply_transposed<QueryTile", "key_loader.load_async"),
        (BARRIER, "float", RACE, "multiply_transposed<QueryTile", "key_loader.load_async"),
        (WARP, "float", RACE, "multiply<DscoreTile>", "store_scores"),
        (ANY, "float", DIVERGENT, "they are gone", None),
        (BARRIER, "float, options", RACE, "remove_nonfinite", "spread_nonfinite"),
        (BARRIER, "float", RACE, "multiply<DscoreTile>", "remove_nonfinite"),
        (WAIT, "no keys, shared queries", NO_WAIT, "TileLoader<BLOCK_M", "TileLoader<BLOCK_M"),
        (BARRIER, "shared queries", RACE, "TileLoader<BLOCK_M", "multiply_transposed<"),
    ],
    "flash_bwd_dbias.cu": [
        (BARRIER, "half, options", RACE, "query_loader.load_async", "mma_abt<ELEMENT, HEAD_DIM,"),
        (WAIT, "half, options", NO_WAIT, "mma_abt<ELEMENT, HEAD_DIM_V,", "value_loader.load_async"),
        (BARRIER, "half, options", RACE, "mma_abt<ELEMENT, HEAD_DIM,", "key_loader.load_async"),
        (BARRIER, "half, options", RACE, "partial[warp]", "mma_abt<"),
        (BARRIER, "half, options", RACE, "store_column_sums", "partial[warp]"),
    ],
    "flash_bwd_dbias_fma.cu": [
        (BARRIER, "float, options", RACE, "TileLoader<BLOCK_N, HEAD_DIM_V", "multiply_transposed<QueryTile"),
        (WAIT, "float, options", NO_WAIT, "multiply_transposed<DoutTile", "TileLoader<BLOCK_N, HEAD_DIM_V"),
        (BARRIER, "float, options", RACE, "multiply_transposed<DoutTile", "TileLoader<BLOCK_N, HEAD_DIM_V"),
        (BARRIER, "float, options", RACE, "TileLoader<BLOCK_N, HEAD_DIM,", "multiply_transposed<DoutTile"),
        (WAIT, "float, options", NO_WAIT, "multiply_transposed<QueryTile", "TileLoader<BLOCK_N, HEAD_DIM,"),
        (BARRIER, "float, options", RACE, "multiply_transposed<QueryTile", "TileLoader<BLOCK_N, HEAD_DIM,"),
        (BARRIER, "float, options", RACE, "partial[warp]", "multiply_transposed<QueryTile"),
        (BARRIER, "float, options", RACE, "store_column_sums", "partial[warp]"),
    ],
    "row_sum.cu": [
        (BARRIER, "half, options", RACE, "warp_sums[thread]", "warp_sums[thread / WARP_SIZE] ="),
    ],
}  # fmt: skip
#: The same statements where options lead to other code on either side: file, number, and what is due.
WITH_OPTIONS = [
    ("flash_fwd.cu", 4, "half, options", RACE, "remove_nonfinite", "value_tile, seen"),
    ("flash_fwd_fma.cu", 7, "float, options", RACE, "remove_nonfinite", "columns, seen"),
    ("flash_bwd_dkdv.cu", 5, "half, lengths", UNDEFINED, "factors.multiply", None),
    ("flash_bwd_dkdv.cu", 6, "half, options", RACE, "remove_nonfinite<ELEMENT>(query_loader", "spread_nonfinite"),
    ("flash_bwd_dkdv.cu", 7, "half, lengths", RACE, "factors.multiply", "remove_nonfinite<ELEMENT>(query_loader"),
    ("flash_bwd_dq.cu", 3, "half, options", RACE, "remove_nonfinite", "keys, seen"),
    ("flash_bwd_dkdv_fma.cu", 7, "float, options", RACE, "remove_nonfinite", "dout_columns, seen"),
    ("flash_bwd_dq_fma.cu", 7, "float, lengths", DIVERGENT, "they are gone", None),
]  # fmt: skip
PLANTED = [(file, number, *fault) for file, faults in FAULTS.items() for number, (_, *fault) in enumerate(faults)]
PLANTED += WITH_OPTIONS
IN_EVERY_RUN = PLANTED[::2]


def statements(file):
    """(text, start) of each barrier and wait of a file, in its order."""
    return [(match[0], match.start()) for match in STATEMENT.finditer(kernels_cu.source(file))]


def without(file, number):
    """The file without one of them; the condition of __syncthreads_or stays, each thread's own."""
    text, (statement, start) = kernels_cu.source(file), statements(file)[number]
    return text[:start] + ("(" if statement == ANY else ";") + text[start + len(statement) :]


@functools.cache
def arguments(problem, forward):
    """Of the call, with NaN in every operand that a causal mask hides in part."""
    inputs, options = BackwardProblem(PROBLEMS[problem][0], with_dlse=True).arguments(attention)
    for array, row in zip(inputs[:4], (2, 1, -2, -1), strict=True):
        array[..., row, 0] = np.nan
    return (inputs[1:4], PROBLEMS[problem][0].options) if forward else (inputs, options)


def findings(file, problem):
    """What is found in the kernel of a file; a call would launch others, too, that it does not need."""
    forward = file.startswith("flash_fwd")
    inputs, options = arguments(problem, forward)
    launch = _launch.Simulator.launch

    def launch_it(simulator, described):
        if f"{described.config.file}.cu" in (file, "flash_bwd_delta.cu"):
            launch(simulator, described)

    with (
        ptxsim.settings(arch=PROBLEMS[problem][1]),
        ptxsim.sanitize() as report,
        mock.patch.object(_launch.Simulator, "launch", launch_it),
    ):
        (attention if forward else attention_backward)(*inputs, **options)
    return report.findings


def line_of(file, *places):
    """Text of the first of these places that is in the file."""
    for place in places:
        name, _, number = (place or "").rpartition(":")
        if name == f"kernels_cu/{file}":
            return kernels_cu.source(file).splitlines()[int(number) - 1].strip()
    return ""


def test_every_barrier_and_wait_is_listed():
    for file in kernels_cu.CATALOGUE:
        found = [statement for statement, _ in statements(f"{file}.cu")]
        assert found == [statement for statement, *_ in FAULTS.get(f"{file}.cu", [])], file


def every_other(cases, in_every_run):
    return [case if case in in_every_run else pytest.param(*case, marks=pytest.mark.deep) for case in cases]


def used_by(faults):
    return sorted({(file, problem) for file, _, problem, *_ in faults})


@pytest.mark.parametrize(("file", "problem"), every_other(used_by(PLANTED), used_by(IN_EVERY_RUN)))
def test_nothing_is_found_as_they_are(file, problem):
    assert findings(file, problem) == []


@pytest.mark.parametrize(("file", "number", "problem", "kind", "where", "other"), every_other(PLANTED, IN_EVERY_RUN))
def test_without_it_the_lines_are_named(file, number, problem, kind, where, other):
    with planted(file, without(file, number)):
        found = findings(file, problem)
    named = [(f.kind, line_of(file, f.where, *f.calls), line_of(file, f.other, *f.other_calls)) for f in found]
    assert any(
        (where or "") in here and (other or "") in there for found_kind, here, there in named if found_kind == kind
    ), "\n".join(map(str, named or ["nothing found"]))
