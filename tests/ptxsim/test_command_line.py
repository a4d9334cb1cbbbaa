"""The simulator's command line, in this process: what it prints and writes, its exit status, its errors."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ptxsim
from cupyflash.ptxsim.__main__ import main

TRANSPOSE = """\
#include "sizes.cuh"
extern "C" __global__ void transpose(const float* in, float* out, int n) {
    __shared__ float tile[TILE][TILE + PADDING];
    tile[threadIdx.y][threadIdx.x] = in[(blockIdx.y * TILE + threadIdx.y) * n + blockIdx.x * TILE + threadIdx.x];
    __syncthreads();
    out[(blockIdx.x * TILE + threadIdx.y) * n + blockIdx.y * TILE + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}
"""
SIZES = """\
#define TILE 32
#ifndef PADDING
#define PADDING 0
#endif
"""
TYPES = """\
template <typename T> __global__ void scale(T* x, T factor, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = x[threadIdx.x] * factor;
}
extern "C" __global__ void gather(const long long* from, const float* x, float* y, bool twice) {
    y[threadIdx.x] = (x ? x[from[threadIdx.x]] : -1.0f) * (twice ? 2 : 1);
}
extern "C" __global__ void count(const unsigned char* x, unsigned* bins, short least) {
    if (x[threadIdx.x] >= least) atomicAdd(bins + x[threadIdx.x], 1u);
}
"""
UNKNOWN = """\
extern "C" __global__ void unknown(float* x) {
    asm volatile("prefetchu.L1 [%0];" :: "l"(x));
    asm volatile("wgmma.fence.sync.aligned;");
}
"""
LAUNCH = "sources/transpose.cu --grid 2,2 --block 32,32"
ARGUMENTS = "--arg in:in.npy --arg out:f32:64x64 --arg i32:64"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, with kernels in sources/ and arrays beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sources").mkdir()
    for name, text in ("transpose.cu", TRANSPOSE), ("sizes.cuh", SIZES), ("types.cu", TYPES), ("unknown.cu", UNKNOWN):
        (tmp_path / "sources" / name).write_text(text)
    rng = np.random.default_rng(0)
    np.save("in.npy", rng.standard_normal((64, 64)).astype(np.float32))
    return tmp_path


def run(arguments, status=0):
    assert main(arguments.split()) == status


def test_profile_of_a_launch(folder, capsys):
    run(f"profile {LAUNCH} {ARGUMENTS} --json counters.json --save 1=out.npy")
    said = capsys.readouterr()
    np.testing.assert_array_equal(np.load("out.npy"), np.load("in.npy").T)
    counters = json.loads((folder / "counters.json").read_text())
    assert counters["transpose"]["shared_wavefronts"] == 4 * 32 * (1 + 32)  # blocks, warps, store and load
    assert "transpose" in said.out and "4,224" in said.out and "  transpose.cu:6 " in said.out
    # Whole sectors, since every array lies as cudaMalloc would place it.
    assert (
        counters["transpose"]["global_load_sectors"] == counters["transpose"]["distinct_store_sectors"] == 64 * 64 / 8
    )
    assert "--arg 1, out:f32:64x64: (64, 64) float32 in out.npy" in said.out
    assert said.err == ""


@pytest.mark.parametrize("option", ["--option -DPADDING=1", "--option=-DPADDING=1"])
def test_options_reach_the_compiler(folder, option):
    run(f"profile {LAUNCH} {ARGUMENTS} {option} --json counters.json")
    counters = json.loads((folder / "counters.json").read_text())
    assert counters["transpose"]["shared_wavefronts"] == counters["transpose"]["shared_ideal_wavefronts"] == 256


def test_all_blocks_at_once(folder, capsys):
    """As `this_grid()` asks for them: by the address of the driver's workspace."""
    (folder / "grid.cu").write_text("""
    extern "C" __global__ void grid(int* out) {
        unsigned low;
        asm("mov.u32 %0, %%envreg2;" : "=r"(low));
        out[blockIdx.x] = low != 0;
    }""")
    for option, value in ("--cooperative", 1), ("", 0):
        run(f"sanitize grid.cu --grid 3 --block 1 {option} --arg out:i32:3 --save 0=out.npy")
        np.testing.assert_array_equal(np.load("out.npy"), [value] * 3)
    (folder / "step.cu").write_text("""
    #include <cooperative_groups.h>
    extern "C" __global__ void step(int* x) {
        extern __shared__ int box[];
        cooperative_groups::this_grid().sync();
        *x = box[threadIdx.x] = 0;
    }""")
    for command in "profile", "sanitize":
        run(f"{command} step.cu --grid 1 --block 1 --arg out:i32:1 --shared 4", 1)
        assert "\n--cooperative launches all blocks at once\n" in "".join(capsys.readouterr())
        run(f"{command} step.cu --grid 1 --block 1 --arg out:i32:1 --cooperative", 1)
        assert "\n--shared gives each block its dynamic shared memory, in bytes\n" in "".join(capsys.readouterr())
    run("sanitize grid.cu --grid 70000 --block 1 --cooperative --arg out:i32:70000", 2)
    assert "--grid: 70000 blocks of grid are too many to be resident at once" in capsys.readouterr().err


def test_results_are_printed_shortened(folder, capsys):
    np.save("in.npy", np.arange(64 * 64, dtype=np.float32).reshape(64, 64))
    run(f"profile {LAUNCH} {ARGUMENTS}")
    printed = capsys.readouterr().out.partition("--arg 1, out:f32:64x64:\n")[2]
    assert (
        printed.split()
        == """
        [[0.000e+00 6.400e+01 ... 3.968e+03 4.032e+03]
         [1.000e+00 6.500e+01 ... 3.969e+03 4.033e+03]
         ...
         [6.200e+01 1.260e+02 ... 4.030e+03 4.094e+03]
         [6.300e+01 1.270e+02 ... 4.031e+03 4.095e+03]]""".split()
    )


def test_resources_bounds_and_figures(folder, capsys):
    run(f"profile {LAUNCH} {ARGUMENTS} --json counters.json --html page.html --png picture.png")
    said = capsys.readouterr().out
    counters = json.loads((folder / "counters.json").read_text())["transpose"]
    registers = counters["resources"]["registers"]
    assert f"{registers} registers, no spills\n" in said
    assert f"{counters['lower_bounds']['A100']['cycles']:,.0f} cycles, shared memory\n" in said
    assert (folder / "picture.png").read_bytes()[:4] == b"\x89PNG"
    page = (folder / "page.html").read_text()
    assert page.lower().startswith("<!doctype html>") and "transpose.cu" in page and "TILE + PADDING" in page


def test_lines_by_a_counter(folder, capsys):
    run(f"profile {LAUNCH} {ARGUMENTS} --by shared_wavefronts")
    table = capsys.readouterr().out.partition("lines with most shared wavefronts\n")[2].splitlines()
    assert [row.split()[0] for row in table[:3]] == ["line", "transpose.cu:6", "transpose.cu:4"] and not table[3]


def test_a_clean_launch_under_the_sanitizer(folder, capsys):
    run(f"sanitize {LAUNCH} {ARGUMENTS} --json report.json --save 1=out.npy --schedule random --schedule-seed 3")
    assert "no findings" in capsys.readouterr().out
    assert json.loads((folder / "report.json").read_text()) == {"findings": []}
    np.testing.assert_array_equal(np.load("out.npy"), np.load("in.npy").T)


def test_a_read_outside_the_arrays_is_found(folder, capsys):
    run(f"sanitize {LAUNCH} {ARGUMENTS.replace('i32:64', 'i32:65')} --json report.json", status=1)
    said = capsys.readouterr().out
    assert "transpose.cu:4" in said
    ended = "the launch ended there: 4,096 of 4,096 elements of --arg 1, out:f32:64x64, were never written\n"
    assert ended in said
    (finding,) = json.loads((folder / "report.json").read_text())["findings"]
    assert finding["where"] == "transpose.cu:4" and finding["kernel"] == "transpose"


def test_a_missing_barrier_is_found(folder, capsys):
    text = TRANSPOSE.replace("    __syncthreads();\n", "\n")
    (folder / "sources" / "transpose.cu").write_text(text)
    run(f"sanitize {LAUNCH} {ARGUMENTS} --json report.json --save 1=out.npy", status=1)
    assert "no findings" not in capsys.readouterr().out
    np.testing.assert_array_equal(np.load("out.npy"), np.load("in.npy").T)  # in lockstep the race does not show
    (finding,) = json.loads((folder / "report.json").read_text())["findings"]
    assert {finding["where"], finding["other"]} == {"transpose.cu:4", "transpose.cu:6"}


def test_a_write_to_an_input_is_found(folder, capsys):
    run(f"sanitize {LAUNCH} --arg in:in.npy --arg in:in.npy --arg i32:64", status=1)
    assert "transpose.cu:6" in capsys.readouterr().out


def test_elements_that_nothing_has_written_are_found(folder, capsys):
    run(f"sanitize {LAUNCH} --arg out:f32:64x64 --arg zeros:f32:64x64 --arg i32:64", status=1)
    assert "uninitialised" in capsys.readouterr().out


STEP = """\
extern "C" __global__ void step(float* x, float* y) {
    if (threadIdx.x < 3) y[threadIdx.x] = 1;
    __syncthreads();
    x[threadIdx.x] += 1;
}
"""


def test_what_a_fault_has_left_unwritten(folder, capsys):
    """Nothing is said of a launch that came to its end, whatever its findings."""
    (folder / "step.cu").write_text(STEP)
    launch = "sanitize step.cu --grid 1 --block 8"
    run(f"{launch} --arg zeros:f32:4 --arg out:f32:20", status=1)
    said = capsys.readouterr().out
    assert "the launch ended there: 17 of 20 elements of --arg 1, out:f32:20, were never written\n" in said
    run(f"{launch} --arg zeros:f32:4 --arg zeros:f32:20", status=1)
    assert "the launch ended there\n" in capsys.readouterr().out
    run(f"{launch} --arg out:f32:8 --arg out:f32:20", status=1)
    said = capsys.readouterr().out
    assert "uninitialised" in said and "ended" not in said


def test_random_arrays_that_a_kernel_writes(folder, capsys):
    """`random:` is for reading, which is said where a kernel writes it; `inout-random:` are the same numbers."""
    (folder / "step.cu").write_text(STEP)
    launch = "step.cu --grid 1 --block 8 --save 0=x.npy --arg"
    advice = "inout: and inout-random: may be written\n"
    run(f"sanitize {launch} random:f32:8 --arg zeros:f32:3", status=1)
    assert advice in capsys.readouterr().out
    before = np.load("x.npy")
    run(f"profile {launch} random:f32:8 --arg zeros:f32:3", status=1)
    assert capsys.readouterr().err.endswith(advice)
    run(f"sanitize {launch} inout-random:f32:8 --arg zeros:f32:3")
    assert advice not in capsys.readouterr().out
    np.testing.assert_array_equal(np.load("x.npy"), before + 1)


def test_the_seed_of_the_data_is_not_that_of_the_schedule(folder, capsys):
    (folder / "order.cu").write_text("""
extern "C" __global__ void order(const float* x, int* place, int* next) {
    if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = atomicAdd(next, 1);
}""")
    found = {}
    for seed, schedule_seed in (0, 0), (1, 0), (0, 1):
        run("profile order.cu --grid 1 --block 512 --schedule random --save 0=x.npy --save 1=place.npy "
            "--arg random:f32:8 --arg out:i32:16 --arg zeros:i32:1 "
            f"--seed {seed} --schedule-seed {schedule_seed}")  # fmt: skip
        found[seed, schedule_seed] = np.load("x.npy"), np.load("place.npy")
    for (x, place), same_data, same_order in (found[1, 0], False, True), (found[0, 1], True, False):
        assert np.array_equal(x, found[0, 0][0]) == same_data
        assert np.array_equal(place, found[0, 0][1]) == same_order


def test_occupancy_of_an_architecture_whose_limits_are_not_known(folder, capsys):
    run(f"profile {LAUNCH} {ARGUMENTS} --arch sm_88 --html page.html")
    assert "limits of sm_88 are not known" in capsys.readouterr().out
    assert "limits of sm_88 are not known" in (folder / "page.html").read_text()


def test_errors_name_a_command_that_helps(folder, capsys, monkeypatch):
    for words in f"sanitize {LAUNCH} --html x", "profile sources/transpose.cu --grid 1", "count", "ptx":
        run(words, status=2)
        command = capsys.readouterr().err.partition("(python -m ")[2].removesuffix(")\n").split()
        assert command[:2] == ["cupyflash.ptxsim", *words.split()[:1]] or command[1:] == ["--help"]
        with pytest.raises(SystemExit) as ended:
            main(command[1:])
        said = capsys.readouterr().out
        assert ended.value.code == 0 and said.startswith(f"usage: {' '.join(command[:-1])}")


def test_a_fault_ends_a_profile(folder, capsys):
    run(f"profile {LAUNCH} {ARGUMENTS.replace('i32:64', 'i32:65')} --json report.json", status=1)
    said = capsys.readouterr()
    assert said.out == "" and "transpose.cu:4" in said.err
    assert not (folder / "report.json").exists()


def test_ptx_is_what_the_simulator_executes(folder, capsys):
    run("ptx sources/transpose.cu --arch sm_90")
    said = capsys.readouterr().out
    assert ".target sm_90" in said and ".visible .entry transpose" in said and '"transpose.cu"' in said
    run("ptx sources/transpose.cu --arch sm_90 --output out.ptx")
    assert (folder / "out.ptx").read_text() == said
    run("ptx sources/transpose.cu --arch sm_90 --option -DPADDING=1")
    assert capsys.readouterr().out != said


def test_arrays_and_scalars_of_all_kinds(folder):
    launch = "sanitize sources/types.cu --grid 1 --block 8"
    np.save("from.npy", np.arange(8)[::-1].astype(">i8"))
    np.save("x.npy", np.arange(8, dtype=np.float32))
    gather = f"{launch} --kernel gather --save 2=y.npy --arg in:from.npy"
    run(f"{gather} --arg in:x.npy --arg out:f32:8 --arg bool:1")
    np.testing.assert_array_equal(np.load("y.npy"), 2 * np.arange(8, dtype=np.float32)[::-1])
    run(f"{gather} --arg null --arg out:f32:2x4 --arg bool:false")
    np.testing.assert_array_equal(np.load("y.npy"), np.full((2, 4), -1, np.float32))
    count = f"{launch} --kernel count --save 1=bins.npy --arg random:u8:8 --arg zeros:u32:100"
    run(f"{count} --arg i16:-5 --seed 1")
    bins = np.load("bins.npy")
    assert bins.dtype == np.uint32 and bins.sum() == 8
    run(f"{count} --arg i16:0x20 --seed 1")
    np.testing.assert_array_equal(np.load("bins.npy"), np.where(np.arange(100) < 32, 0, bins))
    run(f"{count} --arg i16:-5 --seed 2")
    assert (np.load("bins.npy") != bins).any()


def test_a_template_keeps_the_input_file(folder):
    x = np.arange(8, dtype=np.float64)
    np.save("x.npy", x)
    run("sanitize sources/types.cu --kernel scale<double> --grid 1 --block 32 "
        "--arg inout:x.npy --arg f64:2.5 --arg i32:8 --save 0=y.npy")  # fmt: skip
    np.testing.assert_array_equal(np.load("x.npy"), x)
    np.testing.assert_array_equal(np.load("y.npy"), 2.5 * x)


def test_bfloat16_as_numpy_saves_it(folder, capsys):
    x = np.arange(8, dtype=ml_dtypes.bfloat16)
    np.save("x.npy", x)
    text = "#include <cuda_bf16.h>\n" + TYPES
    (folder / "sources" / "bf16.cu").write_text(text)
    launch = (
        "sources/bf16.cu --kernel scale<__nv_bfloat16> --grid 1 --block 32 --arg inout:x.npy --arg bf16:3 --arg i32:8"
    )
    run(f"sanitize {launch} --save 0=y.npy")
    np.testing.assert_array_equal(np.load("y.npy").view(ml_dtypes.bfloat16), 3 * x)
    capsys.readouterr()
    run(f"sanitize {launch}")
    assert "[ 0.  3.  6.  9. 12. 15. 18. 21.]" in capsys.readouterr().out


def test_random_numbers_are_standard_normal_and_reproducible(folder):
    draws = []
    for seed in 0, 0, 1:
        run(f"profile sources/transpose.cu --grid 2,2 --block 32,32 --seed {seed} "
            "--arg random:f32:64x64 --arg out:f32:64x64 --arg i32:64 --save 0=x.npy")  # fmt: skip
        draws.append(np.load("x.npy"))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all()
    assert abs(draws[0].mean()) < 4 / 64 and abs(draws[0].std() - 1) < 4 / 64


def test_a_file_of_ptx(folder, capsys):
    """Profiled and checked like its source."""
    run("ptx sources/transpose.cu --output transpose.ptx")
    run(f"profile {LAUNCH} {ARGUMENTS} --json of_source.json")
    launch = LAUNCH.replace("sources/transpose.cu", "transpose.ptx")
    run(f"profile {launch} {ARGUMENTS} --json of_ptx.json --save 1=out.npy")
    np.testing.assert_array_equal(np.load("out.npy"), np.load("in.npy").T)
    of_source, of_ptx = (
        json.loads((folder / f"of_{name}.json").read_text())["transpose"] for name in ("source", "ptx")
    )
    assert of_ptx["opcodes"] == of_source["opcodes"]
    run(f"sanitize {launch} {ARGUMENTS.replace('i32:64', 'i32:65')}", status=1)
    assert "transpose.cu:4" in capsys.readouterr().out
    (folder / "new.ptx").write_text((folder / "transpose.ptx").read_text().replace(".target sm_80", ".target sm_90"))
    (folder / "none.ptx").write_text("")
    for words, said in (
        (f"profile {launch} {ARGUMENTS} --option -DPADDING=1", "--option -DPADDING=1: is for NVRTC, transpose.ptx is"),
        (f"profile {launch} {ARGUMENTS} --kernel turn", "--kernel: no kernel 'turn' in this module; it has transpose"),
        (f"profile new.ptx {launch.partition(' ')[2]}", "new.ptx: is PTX for sm_90, which sm_80 cannot run (--arch)"),
        (f"profile none.ptx {launch.partition(' ')[2]}", "none.ptx: is no PTX: it has no line with .target sm_"),
        ("ptx transpose.ptx", "transpose.ptx: is PTX already"),
    ):
        run(words, status=2)
        assert capsys.readouterr().err.startswith(f"cupyflash.ptxsim: error: {said}")


def test_kernels_by_their_names_in_the_source(folder, capsys):
    """Neither extern "C" nor a template; among others, in a namespace."""
    (folder / "names.cu").write_text("""
    __global__ void first(int* x) { *x = 1; }
    namespace inner { __global__ void second(int* x) { *x = 2; } }
    template <typename T> __global__ void __launch_bounds__(32) third(T* x) { *x = 3; }
    """)
    for kernel, value in ("first", 1), ("inner::second", 2), ("third<int>", 3):
        run(f"sanitize names.cu --kernel {kernel} --grid 1 --block 1 --arg out:i32:1 --save 0=x.npy")
        assert np.load("x.npy") == value
    (folder / "overloaded.cu").write_text("""
    __global__ void both(int* x) { *x = 1; }
    __global__ void both(float* x) { *x = 2; }
    """)
    run("sanitize overloaded.cu --kernel both --grid 1 --block 1", status=2)
    assert capsys.readouterr().err.endswith("no kernel 'both' in this module; it has _Z4bothPi, _Z4bothPf\n")
    run("sanitize overloaded.cu --kernel _Z4bothPf --grid 1 --block 1 --arg out:f32:1")
    (folder / "template.cu").write_text("template <int N> __global__ void fill(int* x) { *x = N; }")
    run("sanitize names.cu --kernel third --grid 1 --block 1", status=2)
    assert capsys.readouterr().err.endswith("; a template needs its arguments: --kernel 'third<float>'\n")
    run("sanitize template.cu --grid 1 --block 1", status=2)
    said = "--kernel: is needed, the file has no kernel but templates: name an instance, such as 'fill<float>'\n"
    assert capsys.readouterr().err.endswith(said)


def test_variables_of_the_module(folder, capsys):
    (folder / "weigh.cu").write_text("""
    __constant__ float weights[8];
    __device__ short scale = 1;
    extern "C" __global__ void weigh(const float* x, float* y) {
        y[threadIdx.x] = scale * weights[threadIdx.x] + x[threadIdx.x];
    }""")
    launch = "weigh.cu --grid 1 --block 8 --arg random:f32:8 --arg out:f32:8 --save 0=x.npy --save 1=y.npy"
    np.save("weights.npy", np.arange(8, dtype=np.float32))
    run("ptx weigh.cu --output weigh.ptx")
    for file in "weigh.cu", "weigh.ptx":
        run(f"sanitize {launch.replace('weigh.cu', file)} --global weights=in:weights.npy --global scale=i16:-3")
        np.testing.assert_allclose(np.load("y.npy"), np.load("x.npy") - 3 * np.arange(8), rtol=1e-6)
    run(f"profile {launch} --global weights=random:f32:8")
    x, weights = np.load("x.npy"), np.load("y.npy") - np.load("x.npy")
    assert len(set(weights)) == 8 and not np.allclose(x, weights)
    for setting, said in (
        ("weights=random:f32:9", "36 bytes, the variable has 32"),
        ("scale=f32:1", "4 bytes, the variable has 2"),
        ("weight=f32:1", "no global 'weight' in this module; it has weights, scale"),
        ("weights", "is not of the form NAME=ARG"),
        ("weights=out:f32:8", "out:f32:8 has no values"),
        ("weights=null", "null has no values"),
        ("weights=f32:x", "'x' is not a number"),
        ("scale=i16:1 --global scale=i16:2", "scale is set already"),
    ):
        run(f"profile {launch} --global {setting}", status=2)
        said = f"cupyflash.ptxsim: error: --global {setting.rpartition(' ')[2]}: {said}\n"
        assert capsys.readouterr().err == said
    run(f"profile {launch} --global weights=in:weights.npy --json weights.npy", status=2)
    assert "weights.npy: would be written over" in capsys.readouterr().err


BAD = [
    ("", "required: COMMAND"),
    ("count sources/transpose.cu", "invalid choice: 'count'"),
    (f"profile {LAUNCH} {ARGUMENTS} --wrong", "unrecognized arguments: --wrong"),
    ("profile sources/transpose.cu --block 32", "required: --grid"),
    ("profile sources/transpose.cu --grid 1", "required: --block"),
    ("profile missing.cu --grid 1 --block 1", "missing.cu: No such file"),
    ("ptx sources", "sources: Is a directory"),
    ("ptx in.npy", "in.npy: 'utf-8' codec"),
    ("ptx sources/transpose.cu -o sources", "sources: is a directory"),
    ("profile sources/transpose.cu --grid 1,1,1,1 --block 1", "--grid: '1,1,1,1' is not of the form 4 or 4,2"),
    ("profile sources/transpose.cu --grid 2x2 --block 1", "--grid: '2x2' is not of the form"),
    (f"profile sources/transpose.cu --grid 0 --block 32 {ARGUMENTS}", "--grid: (0,), each must be from 1 to"),
    (f"profile sources/transpose.cu --grid 1 --block 32,33 {ARGUMENTS}", "--block: (32, 33, 1) has 1056 threads"),
    (f"profile {LAUNCH} {ARGUMENTS} --shared -4", "--shared: '-4' is not a whole number"),
    (f"profile {LAUNCH} {ARGUMENTS} --shared 200000", "--shared: 204096 bytes"),
    (f"profile {LAUNCH} {ARGUMENTS} --arch sm_1", "--arch: invalid choice: 'sm_1'"),
    (
        f"profile {LAUNCH} {ARGUMENTS} --kernel transform",
        "--kernel: no kernel 'transform' in this module; it has transpose",
    ),
    ("profile sources/types.cu --grid 1 --block 1", "--kernel: is needed, the file has "),
    (f"profile {LAUNCH} --arg in:in.npy", "--arg: 1 arguments, transpose takes 3"),
    (f"profile {LAUNCH} {ARGUMENTS.replace('i32', 'f64')}", "--arg 2: float64 has 8 bytes, transpose takes 4 there"),
    (f"profile {LAUNCH} --arg in.npy", "--arg 0: in.npy: is not one of in:..., inout:..., out:..."),
    (f"profile {LAUNCH} --arg null --arg int:7", "--arg 1: int:7: is not one of"),
    (f"profile {LAUNCH} --arg in:missing.npy", "--arg 0: in:missing.npy: missing.npy: No such file"),
    (f"profile {LAUNCH} --arg in:sources/sizes.cuh", "sources/sizes.cuh: not a readable .npy"),
    (f"profile {LAUNCH} --arg in:text.npy", "--arg 0: in:text.npy: dtype <U1 is neither a number nor bool"),
    (f"profile {LAUNCH} --arg out:float:4", "--arg 0: out:float:4: type 'float' is not one of f16, bf16, f32"),
    (f"profile {LAUNCH} --arg out:f32", "--arg 0: out:f32: shape '' is not of the form"),
    (f"profile {LAUNCH} --arg zeros:f32:4x", "shape '4x' is not of the form 1024 or 8x1024x64"),
    (f"profile {LAUNCH} --arg random:f32:-1", "shape '-1' is not of the form"),
    (f"profile {LAUNCH} --arg out:f64:999999x999999x9999", "--arg 0: out:f64:999999x999999x9999: "),
    (f"profile {LAUNCH} --arg out:f64:9999999x9999999x9999999", "--arg 0: out:f64:9999999x9999999x9999999: "),
    (f"profile {LAUNCH} --arg i32:seven", "--arg 0: i32:seven: 'seven' is not a whole number"),
    (f"profile {LAUNCH} --arg i8:128", "--arg 0: i8:128: 128 is not between -128 and 127"),
    (f"profile {LAUNCH} --arg u32:-1", "--arg 0: u32:-1: -1 is not between 0 and 4294967295"),
    (f"profile {LAUNCH} --arg f32:x", "--arg 0: f32:x: 'x' is not a number"),
    (f"profile {LAUNCH} --arg f16:1e6", "--arg 0: f16:1e6: 1e6 is too large for float16"),
    (f"profile {LAUNCH} --arg bool:2", "--arg 0: bool:2: '2' is not one of 0, 1, false, true"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 1", "--save 1: is not of the form N=FILE.npy"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 1=out.txt", "--save 1=out.txt: is not of the form N=FILE.npy"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 2=out.npy", "--save 2=out.npy: 2 is not one of 0, 1, the array arguments"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 1=no/out.npy", "no/out.npy: there is no directory"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 1=a.npy --json a.npy", "a.npy: would be written twice"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 1=a.npy --save 1=b.npy", "--save 1=b.npy: argument 1 is saved already"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 1=a.npy --save 0=a.npy", "a.npy: would be written twice"),
    (f"profile {LAUNCH} {ARGUMENTS} --save 1=in.npy", "in.npy: would be written over"),
    *(
        (f"profile {LAUNCH} {ARGUMENTS} {option} {path}", f"{path}: would be written over, and is an input")
        for option in ("--json", "--html")
        for path in ("in.npy", "sources/../in.npy", "sources/transpose.cu")
    ),
    (f"sanitize {LAUNCH} {ARGUMENTS} --json sources/transpose.cu", "sources/transpose.cu: would be written over"),
    ("ptx sources/transpose.cu -o sources/transpose.cu", "sources/transpose.cu: would be written over"),
    (f"profile sources/transpose.cu --grid \u0662 --block 32 {ARGUMENTS}", "--grid: '\u0662' is not of the form"),
    (f"profile {LAUNCH} {ARGUMENTS} --seed \u0662", "--seed: '\u0662' is not a whole number"),
    (f"profile {LAUNCH} {ARGUMENTS} --shared 1_0", "--shared: '1_0' is not a whole number"),
    (f"profile {LAUNCH} --arg zeros:f32:\u0662", "shape '\u0662' is not of the form"),
    (f"profile {LAUNCH} --arg i32:1_0", "--arg 0: i32:1_0: '1_0' is not a whole number"),
    (f"profile {LAUNCH} --arg f32:\u0662", "--arg 0: f32:\u0662: '\u0662' is not a number"),
    (f"profile {LAUNCH} {ARGUMENTS} --json no/x.json", "no/x.json: there is no directory"),
    (f"profile {LAUNCH} {ARGUMENTS} --json a --html a", "a: would be written twice"),
    (f"profile {LAUNCH} {ARGUMENTS} --png no/a.png", "no/a.png: there is no directory"),
    (f"profile {LAUNCH} {ARGUMENTS} --png a.jpg", "--png a.jpg: is not of the form FILE.png"),
    (f"profile {LAUNCH} {ARGUMENTS} --by time", "--by: invalid choice: 'time'"),
    (f"profile {LAUNCH} {ARGUMENTS} --schedule odd", "--schedule: invalid choice: 'odd'"),
    (f"profile {LAUNCH} {ARGUMENTS} --seed -1", "--seed: '-1' is not a whole number"),
    (f"profile {LAUNCH} {ARGUMENTS} --schedule-seed x", "--schedule-seed: 'x' is not a whole number"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_commands(folder, capsys, arguments, message):
    np.save("text.npy", np.array(["a"]))
    before = sorted(folder.rglob("*"))
    run(arguments, status=2)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("cupyflash.ptxsim: error: ") and said.err.count("\n") == 1
    assert message in said.err
    assert sorted(folder.rglob("*")) == before


def test_compile_errors_and_unknown_instructions_keep_their_lines(folder, capsys):
    run(f"sanitize {LAUNCH} {ARGUMENTS} --option -DPADDING=(", status=2)
    said = capsys.readouterr().err
    assert "transpose.cu(3): error" in said and said.count("\n") > 3
    assert said.endswith('detected in the compilation of "transpose.cu".\n')
    run("sanitize sources/unknown.cu --grid 1 --block 1 --arg zeros:f32:1 --arch sm_90", status=2)
    assert "wgmma" in (said := capsys.readouterr().err) and "unknown.cu:3" in said


def test_the_module_runs_and_sets_the_exit_status(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(cupyflash.__file__).parents[1]))
    command = [sys.executable, "-m", "cupyflash.ptxsim", "sanitize", *LAUNCH.split(), *ARGUMENTS.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "no findings" in done.stdout and done.stderr == ""
    done = subprocess.run([*command[:-1], "i32:65"], capture_output=True, text=True)
    assert done.returncode == 1 and "transpose.cu:4" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize(
    ("redirection", "reason"), [(">/dev/full", "No space left on device"), (">&-", "stdout is closed")]
)
@pytest.mark.parametrize("arguments", ["--help", "ptx k.cu", "profile k.cu --grid 1 --block 1"])
def test_output_that_cannot_be_written(folder, monkeypatch, redirection, reason, arguments):
    monkeypatch.setenv("PYTHONPATH", str(Path(cupyflash.__file__).parents[1]))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    Path("k.cu").write_text("__global__ void k() {}")
    command = f"'{sys.executable}' -m cupyflash.ptxsim {arguments} {redirection}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, f"cupyflash.ptxsim: error: {reason}\n")


def test_kernels_of_a_module():
    module = ptxsim.RawModule(code=TYPES, name_expressions=("scale<float>",))
    assert {"gather", "count"} < set(module.kernels) and len(module.kernels) == 3
