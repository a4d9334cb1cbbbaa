"""All kernels under the simulator's sanitizer: nothing is found in any variant, and missing barriers are."""

import itertools
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

import cupyflash
import kernels_cu
from cupyflash import _launch, naive, ptxsim
from cupyflash.testing import AttentionBackwardProblem as BackwardProblem
from cupyflash.testing import AttentionProblem as Problem
from cupyflash.testing import Lengths, Operand, Variants
from tests.mutants.generate import planted

CAUSAL = {"causal": True, "align": "bottom-right"}
TOP_LEFT = {"causal": True, "align": "top-left"}
PACKED = ("reversed axes", "every third column", "odd rows", "reversed everywhere")
ONE = ((), (), ())
BATCH = ((2,), (2,), (2,))
GROUPED = ((2, 6), (1, 3), (2, 3))


@dataclass(frozen=True)
class Variant:
    """Forward and backward of one problem. ``nonfinite``: each operand has a NaN that a causal mask hides in part."""

    problem: BackwardProblem
    arch: str = "sm_80"
    nonfinite: bool = False
    method: str = "tiled"
    schedule: str = "lockstep"

    def __str__(self):
        f = self.problem.forward
        words = [f.dtype, f"{f.seqlen_q}x{f.seqlen_k}x{f.head_dim}x{f.head_dim_v}", self.arch]
        words += [f.align] * f.causal + list(f.variants.names) + ["nonfinite"] * self.nonfinite
        words += [self.schedule] * (self.schedule != "lockstep") + [self.method] * (self.method != "tiled")
        return "-".join(words)

    def run(self):
        """All launches of the two calls."""
        problem = self.problem.forward
        q, k, v = problem.inputs()
        dout, dlse = self.problem.cotangents()
        if self.nonfinite:
            for array, row in (q, 1), (k, -2), (v, -1), (dout, 2):
                array[..., row, 0] = np.nan
        module = {"tiled": cupyflash, "standard": naive}[self.method]
        out = None if problem.views[3] == "plain" else problem.empty_out()
        options = problem.options
        with ptxsim.settings(arch=self.arch, schedule=self.schedule):
            more = {"return_max": True} if problem.variants.names else {}
            out, lse, *_ = module.attention(q, k, v, out=out, return_lse=True, **more, **options)
            module.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)


def variant(dtype, seqlen_q, seqlen_k, head_dim, head_dim_v, arch="sm_80", *, leading=ONE, **options):
    """A Variant with the options of a problem and its own."""
    own = {name: options.pop(name) for name in ("nonfinite", "method", "schedule") if name in options}
    problem = Problem(dtype, *leading, seqlen_q, seqlen_k, head_dim, head_dim_v, **options)
    return Variant(BackwardProblem(problem, with_dlse=True), arch, **own)


BOTH_LENGTHS = {"seqlens_q": Lengths("random"), "seqlens_k": Lengths("random")}
SINK, SLOPES = Operand("normal", "heads", "float32"), Operand("normal", "heads", "float32")
RIGHT = {"align": "bottom-right"}
#: Options, in sets of those that do not hide each other.
OPTIONS = {
    "band": ({**RIGHT}, Variants(window_size=(70, 20), alibi_slopes=SLOPES, attn_sink=SINK)),
    "pairs": ({}, Variants(softcap=1.5, mask=Operand("random"), bias=Operand("normal", "pairs"), dropout_p=0.3)),
    "lengths": ({**CAUSAL}, Variants(**BOTH_LENGTHS, window_size=(40, 0), attn_sink=SINK)),
    "expressions": ({}, Variants(score_mod="relative bias", mask_mod="documents", seqlens_k=Lengths("random"))),
    "parts": ({**RIGHT}, Variants(split_size=128, window_size=(100, 5), attn_sink=SINK, seqlens_q=Lengths("some 0"))),
    "one bias": ({}, Variants(bias=Operand("normal", "number"), seqlens_q=Lengths("random"))),
    "bias of keys": ({**CAUSAL}, Variants(bias=Operand("some -inf", "keys"), dropout_p=0.3)),
    "bias of queries": ({}, Variants(bias=Operand("normal", "queries", "float64"), mask=Operand("empty rows"))),
}


def summed(form):
    """Options whose gradients are sums, and whose forward is joined of parts."""
    return {"variants": Variants(bias=Operand("normal", form), attn_sink=SINK, split_size=128)}


#: Each set of options in a type on tensor cores and in one on register tiles.
WITH_OPTIONS = [
    variant(dtype, *lengths, 16, 16, arch, **mask, variants=options, nonfinite=True)
    for (mask, options), archs in zip(
        OPTIONS.values(), itertools.cycle([("sm_80", "sm_75"), ("sm_90", "sm_80")]), strict=False
    )
    for dtype, lengths, arch in zip(("float16", "float32"), ((130, 140), (20, 70)), archs, strict=True)
]
#: More than one tile in both directions and two blocks of each kernel, but where lengths are the point.
VARIANTS = [
    variant("float16", 150, 270, 64, 64),
    variant("float16", 130, 140, 64, 64, "sm_75", **CAUSAL),
    variant("float16", 130, 140, 64, 64, "sm_90", **TOP_LEFT),
    variant("float16", 129, 130, 64, 64, "sm_120", **CAUSAL, schedule="random"),
    variant("bfloat16", 130, 140, 64, 64, **CAUSAL, nonfinite=True),
    variant("bfloat16", 140, 130, 64, 48, **TOP_LEFT, nonfinite=True),
    variant("float16", 130, 140, 8, 8, **CAUSAL, softmax_scale=-0.3),
    variant("bfloat16", 130, 140, 16, 16, "sm_120", leading=BATCH),
    variant("float16", 129, 135, 16, 80, **CAUSAL, leading=((1, 4), (1, 2), (1, 2))),
    variant("float16", 129, 135, 64, 48, "sm_75", views=PACKED),
    variant("float16", 129, 135, 57, 43, **CAUSAL, views=PACKED),
    variant("bfloat16", 140, 140, 128, 128, **CAUSAL),
    variant("float16", 140, 140, 128, 128, "sm_75", **TOP_LEFT, nonfinite=True),
    variant("float16", 140, 70, 144, 32, "sm_90", **CAUSAL, nonfinite=True, views=PACKED),
    variant("float16", 130, 66, 250, 203, **TOP_LEFT),
    variant("float16", 66, 70, 256, 256, "sm_75"),
    variant("bfloat16", 66, 70, 256, 256, "sm_120", **CAUSAL, nonfinite=True),
    variant("bfloat16", 130, 70, 256, 256, "sm_90"),
    variant("float16", 260, 30, 64, 64, **CAUSAL),  # most queries see no key
    variant("float16", 20, 0, 16, 16),
    variant("float16", 0, 20, 16, 16),
    variant("float16", 1, 1, 16, 16),
    variant("float16", 130, 130, 16, 16, leading=((2,), (), ()), **CAUSAL),
    variant("float16", 130, 130, 16, 16, leading=((), (2,), (2,))),
    variant("float32", 66, 70, 64, 64),
    variant("float32", 66, 70, 64, 48, "sm_75", **CAUSAL, nonfinite=True),
    variant("float32", 66, 70, 16, 80, "sm_120", **TOP_LEFT, views=PACKED),
    variant("float32", 66, 70, 128, 128, "sm_90", **CAUSAL, nonfinite=True),
    variant("float32", 33, 36, 256, 256),
    variant("float64", 66, 66, 64, 64, "sm_90", **CAUSAL, nonfinite=True),
    variant("float64", 65, 66, 16, 16, "sm_75", **CAUSAL, leading=((1, 4), (1, 2), (1, 2))),
    variant("float64", 33, 36, 128, 128, "sm_120"),
    variant("float64", 18, 20, 250, 203, **TOP_LEFT),
    *WITH_OPTIONS,
    variant("float16", 34, 20, 250, 203, "sm_75", **summed("queries"), views=PACKED),
    variant("bfloat16", 66, 130, 16, 16, "sm_120", **summed("keys"), leading=BATCH),
    variant("float64", 34, 70, 16, 16, "sm_75", **summed("keys"), views=PACKED),
    variant("float64", 20, 20, 16, 16, "sm_90", **summed("queries"), leading=((2,), (), ())),
    variant("float64", 18, 20, 250, 203, "sm_120", **summed("keys")),
    *(
        variant(dtype, 20, 33, 16, 8, arch, **mask, method="standard", views=views, leading=leading)
        for dtype, arch, mask, views, leading in [
            ("float16", "sm_75", CAUSAL, ("plain",) * 4, GROUPED),
            ("bfloat16", "sm_90", TOP_LEFT, PACKED, ONE),
            ("float32", "sm_80", {}, ("plain",) * 4, ((2,), (), ())),
            ("float64", "sm_120", CAUSAL, PACKED, GROUPED),
        ]
    ),
]


#: In every run the types take turns.
IN_DEEP_RUNS = [tested for number, tested in enumerate(WITH_OPTIONS) if number % 4 in (1, 2)]


@pytest.mark.parametrize(
    "tested",
    [pytest.param(v, id=str(v), marks=pytest.mark.deep if v in IN_DEEP_RUNS else ()) for v in VARIANTS],
)
def test_no_findings(tested):
    with ptxsim.sanitize() as report:
        tested.run()
    assert not report, str(report)


@pytest.mark.parametrize("query", [18, 19])
@pytest.mark.parametrize("tested", [variant("float16", 20, 33, 16, 16), variant("bfloat16", 20, 33, 16, 16)], ids=str)
def test_a_result_that_is_not_written_is_found(tested, query):
    """delta of one query, which the kernels of dq and of dk and dv read: there it is half of a pair of queries."""
    text = kernels_cu.source("flash_bwd_delta.cu")
    store = "params.delta[query] = params.dlse"
    assert text.count(store) == 1
    with planted("flash_bwd_delta.cu", text.replace(store, f"if (query != {query}) {store}")):
        with ptxsim.sanitize() as report:
            tested.run()
    found = [finding for finding in report.findings if finding.kind == "uninitialised global memory"]
    assert {finding.kernel for finding in found} == {"flash_bwd_dq", "flash_bwd_dkdv"}, str(report)


def launched(tested):
    """File, entry, constants and grid of each launch of a variant, none of which is run."""
    found = []

    def note(_, launch):
        config = launch.config
        found.append((config.file, config.name, frozenset(config.defines.items()), config.grid))

    with mock.patch.object(_launch.Simulator, "launch", note):
        tested.run()
    return found


def test_the_variants_hold_every_kernel():
    """Each file in all of its element types, with and without a mask, and on each generation."""
    all_launches = [(tested, *launch) for tested in VARIANTS for launch in launched(tested)]
    assert {file for _, file, *_ in all_launches} == set(kernels_cu.CATALOGUE)
    elements, masks, archs, sums, tiled = {}, {}, {}, {}, set()
    for tested, file, _, defines, grid in all_launches:
        constants = dict(defines)
        elements.setdefault(file, set()).add(constants.get("ELEMENT", constants.get("ELEMENT_BYTES")))
        masks.setdefault(file, set()).add(constants.get("BAND_RIGHT"))
        archs.setdefault(file, set()).add(tested.arch)
        sums.setdefault(file, set()).add((constants.get("SUM_QUERIES"), constants.get("SUM_KEYS")))
        lengths = tested.problem.forward
        if "BLOCK_M" in constants and grid > 1:
            if lengths.seqlen_q > constants["BLOCK_M"] and lengths.seqlen_k > constants["BLOCK_N"]:
                tiled.add((file, constants["ELEMENT"], tested.arch))
    for file in kernels_cu.CATALOGUE:
        assert archs[file] == {"sm_75", "sm_80", "sm_90", "sm_120"}, file
    for file in "flash_fwd", "flash_bwd_dkdv", "flash_bwd_dq", "flash_bwd_dbias":
        assert elements[file] == {"Half", "BFloat16"} and elements[f"{file}_fma"] == {"float", "double"}
        assert masks[file] == masks[f"{file}_fma"] == {0, 1}
        for arch in "sm_75", "sm_80", "sm_90", "sm_120":  # more than one tile in both directions, and two blocks
            assert {(file, "Half", arch), (file, "BFloat16", arch)} & tiled
            if file != "flash_bwd_dbias":
                assert {(f"{file}_fma", "float", arch), (f"{file}_fma", "double", arch)} & tiled
    for file in "attention_naive", "attention_naive_bwd", "flash_bwd_delta", "flash_combine":
        assert elements[file] == {"Half", "BFloat16", "float", "double"}
    assert elements["strided_copy"] == {2, 4, 8}
    assert elements["row_sum"] == {"float", "double"}
    for file in "flash_bwd_dbias", "flash_bwd_dbias_fma":
        assert sums[file] == {(0, 0), (1, 0), (0, 1)}, file
    assert ("flash_bwd_dbias_fma", "double", "sm_75") in tiled
