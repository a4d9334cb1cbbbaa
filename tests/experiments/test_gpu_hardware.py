"""Simulator against hardware, where the hardware is the simulator with other settings and planted faults."""

import argparse
import re
from collections import Counter
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import cupyflash
import kernels_cu
from cupyflash import _launch, naive, ptxsim
from experiments.gpu import bits, calls, hardware, instructions, on_card
from experiments.gpu.hardware import APPROXIMATE, FINDING, SAME
from tests.experiments.fake_gpu import FakeCupy

HALF = calls.Call("float16", lambda: small(np.float16))
FMA = calls.Call("float32", lambda: small(np.float32))


def small(dtype, library=cupyflash):
    """Forward and backward of 20 queries and keys."""
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 20, 16)).astype(dtype)
    out, lse = library.attention(q, k, v, return_lse=True)
    return library.attention_backward(dout, q, k, v, out, lse)


def compared(folder, *chosen, comparison=hardware.compare_kernels, **card):
    cupy = FakeCupy(**card)
    return list(comparison(on_card.Card(cupy, folder), *([chosen] if chosen else []))), cupy


def verdicts(rows, **which):
    return Counter(row["verdict"] for row in rows if all(row[name] == value for name, value in which.items()))


@pytest.mark.parametrize(("arch", "model", "chosen"), [("sm_80", "ampere", (HALF, FMA)), ("sm_90", "hopper", (HALF,))])
def test_hardware_that_is_the_simulator_has_the_same_bits(tmp_path, arch, model, chosen):
    """With tensor cores of the card's model; as float32 sums they differ, as documented."""
    rows, cupy = compared(tmp_path, *chosen, arch=arch, mma=model)
    assert {row["tensor_cores"] for row in rows} == {"fp32", model, ""}
    assert set(verdicts(rows, tensor_cores=model)) == set(verdicts(rows, tensor_cores="")) == {SAME}
    assert not verdicts(rows)[FINDING] and verdicts(rows, tensor_cores="fp32")[APPROXIMATE]
    kernels = {"flash_fwd", "flash_bwd_delta", "flash_bwd_dkdv", "flash_bwd_dq"}
    kernels |= {f"{name}_fma" for name in kernels if FMA in chosen and name != "flash_bwd_delta"}
    assert {row["kernel"] for row in rows} == kernels
    assert set(cupy.loaded) == {(assembler, name) for assembler in ("driver", "NVRTC") for name in kernels}


def test_every_array_that_a_kernel_writes_is_compared(tmp_path):
    rows, _ = compared(tmp_path, HALF, mma="ampere")
    written = {(row["kernel"], row["array"]) for row in rows}
    assert written == {
        ("flash_fwd", "3: float16 (1, 20, 16)"), ("flash_fwd", "4: float32 (1, 20)"),
        ("flash_bwd_delta", "3: float32 (1, 20)"), ("flash_bwd_delta", "4: float32 (1, 20)"),
        ("flash_bwd_dkdv", "6: float16 (1, 20, 16)"), ("flash_bwd_dkdv", "7: float16 (1, 20, 16)"),
        ("flash_bwd_dq", "6: float16 (1, 20, 16)"),
    }  # fmt: skip


def test_kernels_that_overwrite_their_input_begin_with_the_same(tmp_path):
    """The softmax of the standard method."""
    call = calls.Call("standard method", lambda: small(np.float16, naive))
    rows, _ = compared(tmp_path, call, mma="ampere", after=one_bit("weighted_values", 1))
    assert {row["kernel"] for row in rows if row["verdict"] != SAME} == {"weighted_values"}
    assert "softmax" in {row["kernel"] for row in rows}


def one_bit(kernel, bit):
    """A fault: after this kernel, one bit of one element in each array of the card is another."""

    def after(name, arrays):
        if name == kernel:
            for array in arrays:
                array.view(np.uint8).reshape(-1)[-2] ^= bit

    return after


def test_one_bit_of_an_exact_kernel_is_a_finding(tmp_path):
    rows, _ = compared(tmp_path, HALF, mma="ampere", after=one_bit("flash_bwd_delta", 1))
    delta = [row for row in rows if row["kernel"] == "flash_bwd_delta"]
    assert delta and all(row["verdict"] == FINDING and row["differ"] == 1 for row in delta)
    assert not [row for row in rows if row["kernel"] != "flash_bwd_delta" and row["verdict"] == FINDING]


def test_a_large_difference_of_an_approximate_kernel_is_a_finding(tmp_path):
    def negated(name, arrays):
        if name == "flash_fwd":
            for array in arrays:
                array.view(np.uint8).reshape(-1)[-1] ^= 0x80  # the sign of the last number

    rows, _ = compared(tmp_path, HALF, mma="ampere", after=negated)
    assert verdicts(rows, kernel="flash_fwd", tensor_cores="ampere") == {FINDING: 10}


def test_approximations_of_hardware_are_documented(tmp_path):
    """Off by as much as the ISA allows."""
    rows, _ = compared(tmp_path, HALF, mma="ampere", ulp_noise=2, seed=7)
    assert verdicts(rows, kernel="flash_fwd", tensor_cores="ampere")[APPROXIMATE]
    assert not verdicts(rows)[FINDING]
    assert {row["approximate"] for row in rows if row["kernel"] == "flash_fwd"} == {
        "ex2.approx lg2.approx mma rcp.approx"
    }


def test_later_launches_begin_with_what_the_simulator_computed(tmp_path):
    def spoilt(name, arrays):
        if name == "flash_fwd":
            for array in arrays:
                array.view(np.uint8)[...] = 0xFF

    rows, _ = compared(tmp_path, HALF, mma="ampere", after=spoilt)
    assert {row["kernel"] for row in rows if row["verdict"] == FINDING} == {"flash_fwd"}


def test_nan_on_one_side_is_a_finding():
    x = np.array([1, np.nan, 3], np.float32)
    for found, expected in (x, np.float32([1, 2, 3])), (np.float32([1, 2, 3]), x):
        assert hardware.judge_kernel(found, expected, ["mma"], simulated=1e30) == FINDING
    infinite = np.array([1, np.inf], np.float32)
    assert hardware.judge_kernel(infinite, np.float32([1, 2]), ["mma"], simulated=1e30) == FINDING


def test_differences_are_judged_by_the_simulators_own():
    x, y = np.float32([8, 1]), np.float32([8, 1.001])
    assert hardware.judge_kernel(x, x, [], 0.0) == SAME
    assert hardware.judge_kernel(x, y, [], 1.0) == FINDING  # nothing is left open
    assert hardware.judge_kernel(x, y, ["mma"], 0.001) == APPROXIMATE
    assert hardware.judge_kernel(x, y, ["mma"], 0.0001) == FINDING
    assert hardware.judge_kernel(np.float16([8]), np.nextafter(np.float16([8]), 0), ["mma"], 0.0) == APPROXIMATE


def test_what_the_card_refuses_is_a_row_and_the_call_goes_on(tmp_path):
    cupy = FakeCupy(mma="ampere")

    def refuse(name):
        if name == "flash_bwd_dq":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered")

    cupy.refuse = refuse
    rows = list(hardware.compare_kernels(on_card.Card(cupy, tmp_path), [HALF, FMA]))
    errors = [row for row in rows if row["error"]]
    assert [(row["kernel"], row["assembled_by"]) for row in errors] == [
        ("flash_bwd_dq", x) for x in ("driver", "NVRTC")
    ]
    assert all("ILLEGAL_ADDRESS" in row["error"] and row["verdict"] == FINDING for row in errors)
    assert "flash_bwd_dkdv" in {row["kernel"] for row in rows} and rows[-1]["call"] == "float32"


def test_a_call_that_the_simulator_refuses_is_a_row_and_the_others_go_on(tmp_path):
    def fails():
        raise NotImplementedError("wgmma.mma_async is not simulated")

    rows, _ = compared(tmp_path, calls.Call("later", fails), HALF, mma="ampere")
    assert rows[0]["error"] == "NotImplementedError: wgmma.mma_async is not simulated"
    assert rows[-1]["call"] == "float16"
    assert hardware.summary(rows).splitlines()[0] == f"  later:  {rows[0]['error']}"


def test_the_calls_launch_every_kernel_of_the_catalogue():
    """So that a new one is not forgotten."""
    launched = set()

    class Recording(_launch.Simulator):
        def launch(self, launch):
            launched.add(launch.config.file)

    with mock.patch.object(_launch, "device_of", lambda kind, array: Recording()):
        for call in calls.calls():
            call.run()
    assert launched == set(kernels_cu.CATALOGUE)


# PTX


def test_older_drivers_are_told_an_older_version(tmp_path):
    ptx = ptxsim.compile_ptx('extern "C" __global__ void f(int* x) { *x = 1; }', (), "sm_80")
    assert ".version 9" in ptx
    card = on_card.Card(FakeCupy(arch="sm_80", ptx_version=(8, 4)), tmp_path)
    x = np.zeros(1, np.int32)
    card.from_ptx(ptx, "f")((1,), (1,), (x,))
    assert x[0] == 1
    (loaded,) = (path.read_text() for path in tmp_path.iterdir() if ".version 8.4\n" in path.read_text())
    assert loaded.replace(".version 8.4\n", "") == re.sub(r"\.version .*\n", "", ptx)
    with pytest.raises(RuntimeError, match=r"no PTX from version \d\.\d down"):
        on_card.Card(FakeCupy(ptx_version=(6, 0)), tmp_path).from_ptx(ptx, "f")


def test_other_errors_of_the_driver_are_not_hidden(tmp_path):
    ptx = ptxsim.compile_ptx('extern "C" __global__ void f(int* x) { *x = 1; }', (), "sm_80")
    with pytest.raises(ValueError, match="no kernel 'g'"):
        on_card.Card(FakeCupy(), tmp_path).from_ptx(ptx, "g")


def test_approximations_are_found_in_ptx():
    source = """
extern "C" __global__ void f(float* x) {
    float y = x[0] / x[1];                                // rcp.approx is only said here
    asm("{ .reg .f32 t; lg2.approx.ftz.f32 t, %0;\\n ex2.approx.ftz.f32 %0, t; }" : "+f"(y));
    x[2] = sqrtf(y);
}"""
    for options, expected in (
        ((), {"ex2.approx", "lg2.approx"}),
        (("-prec-div=false", "-prec-sqrt=false"), {"div.full", "ex2.approx", "lg2.approx", "sqrt.approx"}),
    ):
        assert set(hardware.approximations(ptxsim.compile_ptx(source, options, "sm_80"))) == expected


@pytest.mark.parametrize(
    ("arch", "model"),
    [("75", None), ("80", "ampere"), ("86", "ampere"), ("89", "ada"), ("90", "hopper"), ("100", "blackwell"),
     ("120", "blackwell"), ("130", "blackwell")],
)  # fmt: skip
def test_the_model_of_the_card(arch, model):
    assert hardware.models(f"sm_{arch}") == (("fp32", model) if model else ("fp32",))


# Memory


def test_regions_are_what_arrays_span():
    memory = np.zeros(1000, np.uint8)
    first, inside, strided = memory[:100], memory[20:40], memory[300:500:3][::-1]
    found = on_card.regions([inside, strided, first, memory[:0]])
    start = memory.ctypes.data
    assert [(region.start - start, region.stop - start) for region in found] == [(0, 100), (300, 499)]
    found[1].host[...] = 7
    assert (memory[300:499] == 7).all() and memory.sum() == 7 * 199


def test_arrays_move_with_their_regions():
    memory = np.zeros(1000, np.uint8)
    arrays = memory[:100], memory[20:40], memory[300:500][::-1], memory[:0], np.zeros(0)
    found = on_card.regions(arrays)
    assert [on_card.moved(array, found, (5000, 70000)) for array in arrays] == [5000, 5020, 70199, 5000, 0]


# Single instructions


@pytest.fixture
def fewer_lanes(monkeypatch):
    for module in instructions, hardware:
        monkeypatch.setattr(module, "LANES", 2048)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_instructions_of_the_same_hardware(fewer_lanes, tmp_path, arch):
    model = hardware.models(arch)[-1]
    rows, _ = compared(tmp_path, comparison=hardware.compare_instructions, arch=arch, mma=model)
    known = [x for x in instructions.INSTRUCTIONS if x.arch <= int(arch[3:])]
    assert list(dict.fromkeys(row["call"] for row in rows)) == [x.ptx for x in known]
    assert verdicts(rows, tensor_cores=model) == {SAME: 2 * sum(x.is_mma for x in known)}
    assert set(verdicts(rows, tensor_cores="")) == {SAME}


def test_instructions_that_are_off_as_the_isa_allows(fewer_lanes, tmp_path):
    rows, _ = compared(tmp_path, comparison=hardware.compare_instructions, mma="ampere", ulp_noise=2, seed=5)
    assert not verdicts(rows)[FINDING]
    moved = {row["call"].split(".")[0] for row in rows if row["verdict"] == APPROXIMATE and not row["tensor_cores"]}
    assert moved == {"ex2", "rcp", "lg2", "rsqrt", "tanh"}


def test_an_instruction_that_the_card_refuses_is_a_row(fewer_lanes, tmp_path):
    cupy = FakeCupy()

    def refuse(name):
        if name == "rcp_approx_ftz_f32":
            raise RuntimeError("CUDA_ERROR_INVALID_PTX: a PTX JIT compilation failed")

    cupy.refuse = refuse
    rows = list(hardware.compare_instructions(on_card.Card(cupy, tmp_path)))
    errors = [row for row in rows if row["error"]]
    assert [(row["call"], row["assembled_by"]) for row in errors] == [
        ("rcp.approx.ftz.f32", assembler) for assembler in ("driver", "NVRTC")
    ]
    assert rows[-1]["call"].startswith("mma")


def test_a_tensor_core_unlike_its_model_is_a_finding(fewer_lanes, tmp_path):
    rows, _ = compared(tmp_path, comparison=hardware.compare_instructions, mma="volta")
    assert verdicts(rows, tensor_cores="ampere")[FINDING] and not verdicts(rows, tensor_cores="fp32")[FINDING]


@pytest.mark.parametrize("instruction", instructions.INSTRUCTIONS, ids=lambda x: x.ptx)
def test_a_planted_bit_is_judged(instruction, tmp_path):
    """By the ISA where it says how far a result may be off, which is never as far as the sign."""
    expected = np.full(instruction.result.shape, 1.5).astype(instruction.result.dtype)
    found, operand = expected.copy(), np.ones_like(expected)
    bits.bits_of(found)[3, 0] += 1
    beyond = expected.copy()
    beyond[3, 0] = -beyond[3, 0]
    model = "ampere" if instruction.is_mma else ""
    one_ulp = hardware.judge_instruction(instruction, model, operand, found, expected)
    assert one_ulp == (APPROXIMATE if instruction.allowed else FINDING)
    assert hardware.judge_instruction(instruction, model, operand, beyond, expected) == FINDING
    assert hardware.judge_instruction(instruction, model, operand, expected, expected) == SAME
    if instruction.is_mma:
        assert hardware.judge_instruction(instruction, "fp32", operand, found, expected) == APPROXIMATE


def test_the_ends_of_what_the_isa_allows():
    exponential, logarithm = instructions.INSTRUCTIONS[0], instructions.INSTRUCTIONS[2]
    assert exponential.ptx.startswith("ex2") and logarithm.ptx.startswith("lg2")
    one, x = np.float32([[1]]), np.float32([[0.75]])
    for steps, verdict in (2, APPROXIMATE), (3, FINDING):
        found = one.copy()
        bits.bits_of(found)[...] += steps
        assert hardware.judge_instruction(exponential, "", x, found, one) == verdict
    for error, verdict in (0.9, APPROXIMATE), (1.2, FINDING):
        expected = np.log2(x)
        found = (expected + error * 2.0**-22).astype(np.float32)
        assert hardware.judge_instruction(logarithm, "", x, found, expected) == verdict


def test_inputs_have_every_kind_of_number():
    (x,) = instructions.INSTRUCTIONS[0].inputs()
    size = np.abs(x)
    assert np.isnan(x).any() and np.isinf(x).any() and ((size > 0) & (size < 2.0**-126)).any()
    assert np.signbit(x[x == 0]).any() and not np.signbit(x[x == 0]).all()
    assert ((size > 1e-3) & (size < 1e3)).mean() > 0.4


def test_a_table_is_written_row_by_row(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "calls", lambda: [replace(HALF, name="one")])
    cupy = FakeCupy(mma="ampere")
    rows = [row for found in hardware.measure(cupy, argparse.Namespace(what="kernels")) for row in found]
    assert rows and {row["call"] for row in rows} == {"one"}
