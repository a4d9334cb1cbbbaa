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
from tests.mutants.generate import planted

CAUSAL = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}
#: One head, two tiles in both directions; in the last two a tile of queries sees no key, and one of keys no query.
PROBLEMS = {
    "half": (Problem("float16", (), (), (), 130, 130, 16, 16, **CAUSAL), "sm_80"),
    "one stage of queries": (Problem("float16", (), (), (), 66, 70, 80, 80, **CAUSAL), "sm_120"),
    "one stage of keys": (Problem("float16", (), (), (), 130, 130, 16, 16, **CAUSAL), "sm_120"),
    "float": (Problem("float32", (), (), (), 65, 70, 16, 16, **CAUSAL), "sm_80"),
    "no keys": (Problem("float16", (), (), (), 150, 5, 16, 16, **CAUSAL), "sm_80"),
    "no queries": (Problem("float16", (), (), (), 5, 150, 16, 16, **TOP_LEFT), "sm_80"),
}
BARRIER, ANY, WARP = "__syncthreads();", "__syncthreads_or(", "__syncwarp();"
WAIT, COMMIT = "cp_async_wait_group<0>();", "cp_async_commit_group();"
STATEMENT = re.compile("|".join(map(re.escape, (BARRIER, ANY, WARP, WAIT, COMMIT))))
RACE, NO_WAIT = "shared race", "missing cp.async wait"
DEADLOCK, DIVERGENT = "deadlock", "divergent barrier"
UNDEFINED = "undefined behaviour"  # some lanes of a warp alone at an instruction that all have to execute together

FAULTS = {
    "flash_fwd.cu": [
        (WAIT, "half", NO_WAIT, "mma_abt<", "key_loader.load_async(params.seqlen_k)"),
        (BARRIER, "half", RACE, "value_loader.load_async", "mma_ab<"),
        (WAIT, "half", NO_WAIT, "mma_ab<", "value_loader.load_async"),
        (ANY, "half", RACE, "spread_nonfinite", "value_loader.load_async"),
        (BARRIER, "half", RACE, "remove_nonfinite", "_nonfinite"),
        (BARRIER, "half", RACE, "key_loader.load_async(keys_left)", "mma_abt<"),
        (WAIT, "no keys", NO_WAIT, "st_shared(out_tile", "TileLoader<BLOCK_M, HEAD_DIM,"),
        (BARRIER, "no keys", RACE, "st_shared(out_tile", "TileLoader<BLOCK_M, HEAD_DIM,"),
        (WARP, "half", RACE, "store_rows", "st_shared(out_tile"),
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
        (COMMIT, "half", NO_WAIT, "float2 delta = ld_shared_v2", "delta_loader.load_async"),
        (WAIT, "half", NO_WAIT, "mma_abt<ELEMENT, HEAD_DIM,", "query_loader.load_async"),
        (BARRIER, "half", RACE, "query_loader.load_async", "mma_ab<ELEMENT>(dkey"),
        (ANY, "half", UNDEFINED, "mma_ab<ELEMENT>(dvalue", None),
        (BARRIER, "half", RACE, "remove_nonfinite<ELEMENT>(dout_loader", "_nonfinite"),
        (BARRIER, "half", RACE, "mma_ab<ELEMENT>(dvalue", "remove_nonfinite<ELEMENT>(dout_loader"),
        (BARRIER, "one stage of queries", RACE, "query_loader.load_async", "mma_ab<ELEMENT>(dkey"),
        (WAIT, "no queries", NO_WAIT, "store_fragments<ELEMENT>(key_tile", "TileLoader<BLOCK_N, HEAD_DIM,"),
        (BARRIER, "no queries", RACE, "store_fragments<ELEMENT>(key_tile", "TileLoader<BLOCK_N, HEAD_DIM,"),
        (WARP, "half", RACE, "store_rows", "store_fragments<ELEMENT>(key_tile"),
    ],
    "flash_bwd_dq.cu": [
        (WAIT, "half", NO_WAIT, "mma_abt<ELEMENT, HEAD_DIM,", "key_loader.load_async"),
        (BARRIER, "half", RACE, "key_loader.load_async", "mma_ab"),
        (ANY, "half", UNDEFINED, "mma_ab<ELEMENT>(dquery", None),
        (BARRIER, "half", RACE, "remove_nonfinite", "_nonfinite"),
        (BARRIER, "half", RACE, "mma_ab<ELEMENT>(dquery", "remove_nonfinite"),
        (BARRIER, "one stage of keys", RACE, "key_loader.load_async", "mma_ab"),
        (WAIT, "no keys", NO_WAIT, "store_fragments", "TileLoader<BLOCK_M, HEAD_DIM,"),
        (BARRIER, "no keys", RACE, "store_fragments", "TileLoader<BLOCK_M, HEAD_DIM,"),
        (WARP, "half", RACE, "store_rows", "store_fragments"),
    ],
    "flash_bwd_dkdv_fma.cu": [
        (BARRIER, "float", RACE, "query_loader.load_async", "multiply<WeightTile>(tile_dkey"),
        (WAIT, "float", NO_WAIT, "multiply_transposed<KeyTile", "query_loader.load_async"),
        (BARRIER, "float", RACE, "multiply_transposed<KeyTile", "query_loader.load_async"),
        (BARRIER, "float", RACE, "dout_loader.load_async", "multiply_transposed<KeyTile"),
        (WAIT, "float", NO_WAIT, "multiply_transposed<ValueTile", "dout_loader.load_async"),
        (BARRIER, "float", RACE, "multiply_transposed<ValueTile", "dout_loader.load_async"),
        (ANY, "float", DIVERGENT, "they are gone", "the query tile has landed again"),
        (BARRIER, "float", RACE, "remove_nonfinite", "_nonfinite"),
        (BARRIER, "float", RACE, "multiply<WeightTile>(tile_dvalue", "remove_nonfinite"),
        (BARRIER, "float", RACE, "query_reloader.load_async", "multiply<WeightTile>(tile_dvalue"),
        (WAIT, "float", NO_WAIT, "multiply<WeightTile>(tile_dkey", "query_reloader.load_async"),
        (BARRIER, "float", RACE, "multiply<WeightTile>(tile_dkey", "query_reloader.load_async"),
        (BARRIER, "float", RACE, "multiply<WeightTile>(tile_dkey", "remove_nonfinite"),
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
        (BARRIER, "float", RACE, "multiply<DscoreTile>", "remove_nonfinite"),
    ],
}  # fmt: skip
PLANTED = [(file, number, *fault) for file, faults in FAULTS.items() for number, fault in enumerate(faults)]


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


@pytest.mark.parametrize(("file", "problem"), sorted({(file, problem) for file, _, _, problem, *_ in PLANTED}))
def test_nothing_is_found_as_they_are(file, problem):
    assert findings(file, problem) == []


@pytest.mark.parametrize(("file", "number", "statement", "problem", "kind", "where", "other"), PLANTED)
def test_without_it_the_lines_are_named(file, number, statement, problem, kind, where, other):
    with planted(file, without(file, number)):
        found = findings(file, problem)
    named = [(f.kind, line_of(file, f.where, *f.calls), line_of(file, f.other, *f.other_calls)) for f in found]
    assert any(
        (where or "") in here and (other or "") in there for found_kind, here, there in named if found_kind == kind
    ), "\n".join(map(str, named or ["nothing found"]))
