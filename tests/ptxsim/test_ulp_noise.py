"""settings(ulp_noise=k): approximations wrong by what the ISA allows, no more, and the same each time."""

import math

import numpy as np
import pytest

from cupyflash import ptxsim

from . import exact
from .instructions import Instruction, InstructionTable
from .launching import SCHEDULES, schedule_name
from .test_approximations import (
    ARGUMENTS,
    EXACT_POINTS,
    agree,
    exp2,
    half,
    single,
    trigonometric,
    within_half,
)


def bfloat16():
    values = tuple(exact.convert(x, exact.BF16) for x in ARGUMENTS)

    def flushed_exp2(x):
        y = exp2(exact.flushed(x))
        return 0.0 if y < 2.0**-126 else y

    def accept(value, got):
        expected = exact.convert(value, exact.BF16)
        if not math.isfinite(expected) or expected == 0:
            return agree(expected, got)
        return abs(got - value) <= 2.0**-7 * value

    one = "bf16 -> bf16"
    yield Instruction("ex2.approx.ftz.bf16", one, flushed_exp2, accept=accept, values=(values,))
    yield Instruction("tanh.approx.bf16", one, math.tanh, accept=within_half(2.0**-8), values=(values,))


TABLE = InstructionTable([instruction for group in (single, trigonometric, half) for instruction in group()])
BF16_TABLE = InstructionTable(bfloat16(), arch="sm_90")
EVERY = [(table, instruction) for table in (TABLE, BF16_TABLE) for instruction in table]


@pytest.mark.parametrize("noise", [0, 1, 2, 50])
@pytest.mark.parametrize("table, instruction", EVERY, ids=[str(instruction) for _, instruction in EVERY])
def test_within_what_the_isa_states(table, instruction, noise):
    with ptxsim.settings(ulp_noise=noise, seed=noise + 1):
        table.check(instruction)


@pytest.mark.parametrize("name, argument, expected", EXACT_POINTS)
def test_points_the_isa_fixes(name, argument, expected):
    for seed in range(5):
        result = run(name, [argument], ulp_noise=2, seed=seed)[0]
        assert agree(expected, float(result)), result


@pytest.mark.parametrize("name, argument", [("ex2.approx.ftz.f32", -126.0), ("rcp.approx.ftz.f32", 2.0**126)])
def test_the_least_normal_number_is_not_flushed(name, argument):
    results = {run(name, [argument], ulp_noise=2, seed=seed)[0] for seed in range(12)}
    assert min(results) == 2.0**-126 < max(results)


def test_powers_of_two_stay_positive():
    for x in (-149.0, -148.0):
        results = {run("ex2.approx.f32", [x], ulp_noise=2, seed=seed)[0] for seed in range(30)}
        assert min(results) >= 2.0**-149 and len(results) > 1


@pytest.mark.parametrize("noise", [1, 2])
def test_bounded_functions_do_not_exceed_one_and_subnormals_pass_tanh(noise):
    for seed in range(4):
        for name in ("tanh.approx.f32", "tanh.approx.f16", "tanh.approx.bf16", "sin.approx.f32", "cos.approx.f32"):
            x = [4.0, -4.0, 6.25, 9.0] if "tanh" in name else [0.0, math.pi / 2, -math.pi / 2, math.pi]
            assert abs(run(name, x, ulp_noise=noise, seed=seed)).max() <= 1
        tiny = [2.0**-127, -(2.0**-149), 2.0**-133]
        assert run("tanh.approx.f32", tiny, ulp_noise=noise, seed=seed).tolist() == tiny


def find(name):
    return next((table, one) for table, one in EVERY if one.name == name)


def run(name, arguments, **settings):
    table, instruction = find(name)
    (operand,) = instruction.operands
    bits = np.array([operand.encode(float(x)) for x in arguments], operand.dtype)
    with ptxsim.settings(**settings):
        result = table.run(instruction, [bits])
    return np.array([instruction.result.decode(int(b)) for b in result])


RANDOM = np.random.default_rng(0)
SPREAD = {
    "ex2": RANDOM.uniform(-120, 120, 3000),
    "rcp": np.exp(RANDOM.uniform(-80, 80, 3000)) * RANDOM.choice([-1, 1], 3000),
    "lg2": np.concatenate([RANDOM.uniform(0.5, 2, 2000), np.exp(RANDOM.uniform(-80, 80, 2000))]),
    "rsqrt": np.exp(RANDOM.uniform(-80, 80, 3000)),
    "tanh": RANDOM.normal(size=3000) * np.exp(RANDOM.uniform(-8, 1, 3000)),
    "sin": RANDOM.uniform(-6.28, 6.28, 3000),
    "cos": RANDOM.uniform(-6.28, 6.28, 3000),
}


def spread(opcode):
    return SPREAD[opcode].astype(np.float32).astype(np.float64)


@pytest.mark.parametrize(
    "name, noise, steps", [("ex2", 1, 1), ("ex2", 2, 2), ("ex2", 9, 2), ("rcp", 1, 1), ("rcp", 9, 1)]
)
def test_every_number_of_ulps_up_to_the_stated_one_occurs(name, noise, steps):
    x = spread(name)
    exact_value = np.exp2(x) if name == "ex2" else 1 / x
    nearest = exact_value.astype(np.float32)
    got = run(f"{name}.approx.ftz.f32", x, ulp_noise=noise).astype(np.float32)
    moved = got.view(np.int32) - nearest.view(np.int32)
    counts = {step: np.mean(moved == step) for step in range(-steps, steps + 1)}
    assert set(moved) == set(counts) and min(counts.values()) > 0.1, counts


STATED = {
    "lg2.approx.f32": lambda x, y: np.where((x > 0.5) & (x < 2), 2.0**-22, 2.0**-22 * abs(y)),
    "rsqrt.approx.f32": lambda x, y: 2.0**-22.9 * y,
    "tanh.approx.f32": lambda x, y: 2.0**-11 * abs(y),
    "sin.approx.f32": lambda x, y: 2.0**-20.5,
    "cos.approx.f32": lambda x, y: 2.0**-20.5,
    "tanh.approx.f16": lambda x, y: 2.0**-10.987,
    "tanh.approx.bf16": lambda x, y: 2.0**-8,
}
FUNCTIONS = {"lg2": np.log2, "rsqrt": lambda x: x**-0.5, "tanh": np.tanh, "sin": np.sin, "cos": np.cos}


@pytest.mark.parametrize("noise, share", [(1, 0.5), (2, 1.0), (7, 1.0)])
@pytest.mark.parametrize("name", STATED)
def test_the_stated_error_is_reached_and_shared_out(name, noise, share):
    """Half of it with 1, all of it with 2; in both directions, and as often small as large."""
    opcode, _, type_ = name.split(".")
    x = spread(opcode)
    if type_ != "f32":
        x = np.array([exact.convert(v, exact.F16 if type_ == "f16" else exact.BF16) for v in x])
    y = FUNCTIONS[opcode](x)
    error = (run(name, x, ulp_noise=noise, seed=4) - y) / STATED[name](x, y)
    rounding = 0.3 if opcode in ("lg2", "rsqrt") else 0.1 if type_ == "f32" else 0.5  # half an ulp, as a share
    assert 0.8 * share < error.max() < share + rounding and 0.8 * share < -error.min() < share + rounding
    assert abs(error).max() <= 1
    assert abs(error.mean()) < 0.1 and abs(abs(error).mean() - share / 2) < 0.15


@pytest.mark.parametrize("settings", [*SCHEDULES, {"chunk_lanes": 96}], ids=schedule_name)
def test_a_function_of_seed_and_operand(settings):
    """Not of the thread, the chunk or the schedule: the random schedule's seed is the noise's, too."""
    seed = settings.get("seed", 0)
    for name in ("ex2.approx.ftz.f32", "tanh.approx.f32", "tanh.approx.f16"):
        x = spread(name.split(".")[0])
        x = np.array([exact.convert(v, exact.F16) for v in x]) if name.endswith("f16") else x
        once = run(name, x, ulp_noise=2, seed=seed)
        np.testing.assert_array_equal(run(name, x[::-1], **{**settings, "ulp_noise": 2, "seed": seed})[::-1], once)
        other = run(name, x, ulp_noise=2, seed=seed + 1)
        assert np.mean(other != once) > (0.5 if name.endswith("f32") else 0.2)


def test_instructions_err_independently():
    """ex2(x) and rcp(x) of the same operand are not moved alike, nor is an operand like its neighbour."""
    x = spread("ex2")
    errors = [
        run("ex2.approx.ftz.f32", v, ulp_noise=2).astype(np.float32)
        for v in (x, np.nextafter(x.astype(np.float32), np.float32(200)))
    ]
    a, b = (e.view(np.int32) - np.exp2(x).astype(np.float32).view(np.int32) for e in errors)
    c = run("rcp.approx.ftz.f32", x, ulp_noise=2).astype(np.float32).view(np.int32) - (1 / x).astype(np.float32).view(
        np.int32
    )
    assert abs(np.corrcoef(a, c)[0, 1]) < 0.08 and abs(np.corrcoef(a, b)[0, 1]) < 0.08


@pytest.mark.parametrize("name", ["rcp.approx.f32", "tanh.approx.f32", "sin.approx.f32", "tanh.approx.f16"])
def test_odd_functions_stay_odd(name):
    x = spread(name.split(".")[0])
    x = np.array([exact.convert(v, exact.F16) for v in x]) if name.endswith("f16") else x
    np.testing.assert_array_equal(run(name, -x, ulp_noise=2), -run(name, x, ulp_noise=2))


def test_rounded_instructions_have_no_noise():
    table = InstructionTable(
        [
            Instruction("rcp.rn.f32", "f32 -> f32", lambda a: exact.div(1.0, a)),
            Instruction("sqrt.rn.f32", "f32 -> f32", exact.sqrt),
            Instruction("rcp.rn.f64", "f64 -> f64", lambda a: exact.div(1.0, a, exact.F64)),
        ]
    )
    with ptxsim.settings(ulp_noise=2):
        for instruction in table:
            table.check(instruction)


@pytest.mark.parametrize("noise", [-1, 1.5, True, "2"])
def test_what_is_no_number_of_ulps_is_refused(noise):
    with pytest.raises(ValueError, match="ulp_noise"), ptxsim.settings(ulp_noise=noise):
        pass
