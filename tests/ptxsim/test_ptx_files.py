"""RawModule(path=...): PTX that somebody else has compiled."""

import re
from pathlib import Path

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim.parse import ParseError, parse

from .launching import poisoned

SOURCE = """
__constant__ float factor = 3;
__device__ int launches;
extern "C" __global__ void __launch_bounds__(64) scale(const float* x, float* out) {
  extern __shared__ float box[];
  int t = threadIdx.x;
  box[t] = x[t] * factor;
  __syncthreads();
  out[t] = box[63 - t];
  if (t == 0) launches++;
}"""


@pytest.fixture(scope="module")
def ptx():
    return ptxsim.compile_ptx(SOURCE, arch="sm_80")


def load(folder, content, name="module.ptx", **choices):
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return ptxsim.RawModule(path=str(path), **choices)


def test_a_file_runs_as_it_is(tmp_path, ptx):
    """Whatever the options; a changed instruction shows."""
    x = np.random.default_rng().integers(-99, 99, 64).astype(np.float32)
    for text, sign in ((ptx, 3), (ptx.replace("mul.ftz.f32", "sub.ftz.f32"), None)):
        module, out = load(tmp_path, text, options=("-DUNUSED",)), poisoned(64, np.float32)
        assert module.kernels == ["scale"] and module.file_path == str(tmp_path / "module.ptx") and module.code is None
        for arch in ("sm_80", "sm_120"):
            with ptxsim.settings(arch=arch):
                module.get_function("scale")((1,), (64,), (x, out), shared_mem=256)
        np.testing.assert_array_equal(out, (x * sign if sign else x - 3)[::-1])
        with ptxsim.settings(arch="sm_80"):
            assert module.get_global("launches").view(np.int32) == 1


def test_profile_and_sanitizer_know_its_lines(tmp_path, ptx):
    x, out = np.zeros(64, np.float32), poisoned(64, np.float32)
    kernel = load(tmp_path, ptx.replace("bar.sync", "// bar.sync")).get_function("scale")
    with ptxsim.profile() as profile:
        kernel((1,), (64,), (x, out), shared_mem=256)
    (measured,) = profile.kernels
    assert measured.global_load_sectors == 8 + 1 and {line.file for line in measured.lines} == {"kernel.cu"}
    assert "scale" in str(profile)
    with ptxsim.sanitize() as report:
        kernel((1,), (64,), (x, out), shared_mem=256)
    assert {f.kind for f in report.findings} == {"shared race"}
    assert {f.where for f in report.findings} <= {"kernel.cu:7", "kernel.cu:9"}


@pytest.mark.parametrize(
    "target, runs",
    [
        ("sm_75", {"sm_75", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120"}),
        ("sm_90", {"sm_90", "sm_100", "sm_103", "sm_120"}),
        ("sm_90a", {"sm_90"}),
        ("sm_100f", {"sm_100", "sm_103"}),
        ("sm_120", {"sm_120"}),
    ],
)
def test_targets(target, runs, tmp_path, ptx):
    text = ptx.replace(".target sm_80", f".target {target}")
    for arch in ("sm_75", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120"):
        with ptxsim.settings(arch=arch):
            if arch in runs:
                assert load(tmp_path, text).kernels == ["scale"]
            else:
                with pytest.raises(ValueError, match=rf"module.ptx' is PTX for {target}, which {arch} cannot run"):
                    load(tmp_path, text)


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"\x7fELF\x02\x01", "is a cubin: machine code does not run here"),
        (b"\x50\xed\x55\xba\x01\x00", "is a fatbin: machine code does not run here"),
        (SOURCE, "is no PTX"),
        (b"\x00\xff\x80", "is no PTX"),
        (b"", "is no PTX"),
    ],
)
def test_files_of_anything_else(content, reason, tmp_path):
    with pytest.raises(ValueError, match=f"path: '.*module.ptx' {reason}"):
        load(tmp_path, content)


FILE = Path(__file__).parent / "ptx" / "calls_nvrtc_12_debug.ptx"


def test_a_file_that_ends_too_early():
    """The line is named, wherever it is cut: between functions it is whole, elsewhere its last line is wrong."""
    text = FILE.read_text()
    parse(text)
    rng = np.random.default_rng()
    for length in [len(text) // 2, *rng.integers(len(text), size=100)]:
        try:
            parse(text[:length])
        except ParseError as error:
            line = int(re.match(r"PTX line (\d+): ", str(error))[1])
            last = text.count("\n", 0, length) + 1
            assert line == last or "initial value" in str(error), (length, error)
    cut = text[: text.index("ret;")]
    with pytest.raises(ParseError, match=rf"^PTX line {cut.count(chr(10)) + 1}: end of file$"):
        parse(cut)


@pytest.mark.parametrize(
    "wrong, right, said",
    [
        ("%f1 %f2;", "%f1, %f2;", "expected ',' or ';', found '%f2'"),
        ("%f1, ;", "%f1, %f2;", "unexpected ';'"),
        ("%f1, {%f1 %f2};", "%f1, %f2;", "expected ',' or '}', found '%f2'"),
        ("%f1, [%f2;", "%f1, %f2;", "expected ']', found ';'"),
        ("%f1, 0x;", "%f1, %f2;", "expected ',' or ';', found 'x'"),
    ],
)
def test_slips_in_an_instruction(wrong, right, said):
    """They are no unknown instructions."""
    text = """.version 8.0
    .target sm_80
    .visible .entry copy() {
        .reg .f32 %f<3>;
        mov.f32 OPERANDS
        ret;
    }"""
    assert parse(text.replace("OPERANDS", right)).functions["copy"].code
    with pytest.raises(ParseError, match=re.escape(f"PTX line 5: {said}")):
        parse(text.replace("OPERANDS", wrong))


def test_ptx_as_source(ptx):
    with pytest.raises(ValueError, match="code: this is PTX: it runs from a file, path="):
        ptxsim.RawModule(code=ptx)


def test_what_a_file_has_not(tmp_path, ptx):
    module = load(tmp_path, ptx)
    with pytest.raises(ValueError, match=r"module: loaded from '.*module.ptx', but NVRTC assembles CUDA C\+\+ only"):
        module.get_function("scale").num_regs  # noqa: B018
    assert module.get_function("scale").max_threads_per_block == 64
    with pytest.raises(ValueError, match=r"no kernel 'box' in this module; it has scale$"):
        module.get_function("box")
    with pytest.raises(ValueError, match="name_expressions: need code"):
        load(tmp_path, ptx, name_expressions=("scale",))
    with pytest.raises(FileNotFoundError, match="absent"):
        ptxsim.RawModule(path=str(tmp_path / "absent.ptx"))


def test_a_block_that_is_required(tmp_path, ptx):
    x, out = np.ones(64, np.float32), poisoned(64, np.float32)
    kernel = load(tmp_path, ptx.replace(".maxntid 64", ".reqntid 64")).get_function("scale")
    for block in ((32,), (32, 2), (16, 2, 2)):
        with pytest.raises(ValueError, match=r"block: \(.*\), scale is compiled for \(64, 1, 1\) only"):
            kernel((1,), block, (x, out), shared_mem=256)
    kernel((1,), (64,), (x, out), shared_mem=256)
    assert (out == 3).all() and kernel.max_threads_per_block == 64


def test_vectors_of_one_register(tmp_path, ptx):
    """As Triton writes loads and stores."""
    text = re.sub(r"(ld\.\w+\.f32\s+)(%\w+),", r"\1{ \2 },", ptx)
    text = re.sub(r"(st\.\w+\.f32\s+\[[^]]*\], )(%\w+);", r"\1{ \2 };", text)
    assert text.count("{ %f") == 5
    x, out = np.random.default_rng().integers(-99, 99, 64).astype(np.float32), poisoned(64, np.float32)
    load(tmp_path, text).get_function("scale")((1,), (64,), (x, out), shared_mem=256)
    np.testing.assert_array_equal(out, 3 * x[::-1])


def test_exactly_one_of_code_and_path(tmp_path, ptx):
    for choices in ({}, {"code": SOURCE, "path": "module.ptx"}, {"code": "", "path": ""}):
        with pytest.raises(TypeError, match="exactly one"):
            ptxsim.RawModule(**choices)
    for name, value in (("code", SOURCE.encode()), ("path", tmp_path / "module.ptx")):
        with pytest.raises(TypeError, match=f"{name}: .*, must be str"):
            ptxsim.RawModule(**{name: value})
