"""mma with float16 accumulators and on tf32: layouts by exact products of integers, and every model bit for bit."""

import numpy as np
import pytest

from cupyflash import ptxsim

from . import block_fma
from .launching import SCHEDULES, launch, poisoned, schedule_name
from .test_tensor_core import a_position, b_position, c_position, pack
from .test_tensor_models import expected, finite_bits

MODELS = ("fp32", *block_fma.MODELS)


def half_c_position(lane, register, half):
    return lane // 4 + 8 * register, lane % 4 * 2 + half


def tf32_a_position(lane, register):
    return lane // 4 + 8 * (register % 2), lane % 4 + 4 * (register // 2)


def tf32_b_position(lane, register):
    return lane % 4 + 4 * register, lane // 4


def words(matrices, position, registers):
    """Matrices of 4-byte numbers as the registers (n, 32, registers) of n warps."""
    lanes = [[matrices[(slice(None), *position(lane, r))] for r in range(registers)] for lane in range(32)]
    return np.ascontiguousarray(np.moveaxis(np.array(lanes), 2, 0)).view(np.uint32)


def matrices(registers, position):
    """The inverse for accumulators: registers (n, 32, count) or, of halves, (n, 32, count, 2)."""
    out = np.empty((len(registers), 16, 8), registers.dtype)
    for place in np.ndindex(registers.shape[1:]):
        out[(slice(None), *position(*place))] = registers[(slice(None), *place)]
    return out


def source(shape, types, counts, constraint, steps=1):
    """A kernel of `steps` instructions that accumulate; `counts`: registers of A, B and C."""
    a, b, c = counts
    places = iter(f"%{n}" for n in range(a + b + c + c))
    groups = ["{" + ", ".join(next(places) for _ in range(n)) + "}" for n in (c, a, b, c)]
    text = f"mma.sync.aligned.{shape}.row.col.{types} {groups[0]}, {groups[1]}, {groups[2]}, {groups[3]};"
    inputs = [f'"r"(a[{a} * i + {n}])' for n in range(a)] + [f'"r"(b[{b} * i + {n}])' for n in range(b)]
    inputs += [f'"{constraint}"(d[{n}])' for n in range(c)]
    outputs = ", ".join(f'"={constraint}"(d[{n}])' for n in range(c))
    kept = "float" if constraint == "f" else "unsigned"
    body = f'asm volatile("{text}" : {outputs} : {", ".join(inputs)});'
    return f"""
    extern "C" __global__ void product(const unsigned* a, const unsigned* b, const {kept}* c, {kept}* out) {{
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      {kept} d[{c}];
      for (int r = 0; r < {c}; ++r) d[r] = c[{c} * i + r];
      {body * steps}
      for (int r = 0; r < {c}; ++r) out[{c} * i + r] = d[r];
    }}"""


def multiply(a, b, c, arch="sm_80", steps=1, **settings):
    """D = A B + C, `steps` times: float16 matrices with float16 accumulators, float32 ones as tf32."""
    k = a.shape[2]
    if a.dtype == np.float16:
        counts, types, constraint = (k // 4, k // 8, 2), "f16.f16.f16.f16", "r"
        fragments = [pack(a, a_position, counts[0]), pack(b, b_position, counts[1]), pack(c, half_c_position, 2)]
        fragments = [x.view(np.uint32) for x in fragments]
        out = poisoned((len(a), 32, 2), np.uint32)
    else:
        counts, types, constraint = (k // 2, k // 4, 4), "f32.tf32.tf32.f32", "f"
        fragments = [words(a, tf32_a_position, counts[0]), words(b, tf32_b_position, counts[1])]
        fragments.append(words(c, c_position, 4).view(np.float32))
        out = poisoned((len(a), 32, 4), np.float32)
    text = source(f"m16n8k{k}", types, counts, constraint, steps)
    launch(text, len(a) // 2, 64, *map(np.ascontiguousarray, fragments), out, arch=arch, **settings)
    if a.dtype == np.float16:
        return matrices(out.view(np.float16).reshape(len(a), 32, 2, 2), half_c_position)
    return matrices(out, c_position)


SHAPES = [(np.float16, 8, "sm_75"), (np.float16, 16, "sm_80"), (np.float32, 4, "sm_80"), (np.float32, 8, "sm_80")]
every_shape = pytest.mark.parametrize("dtype, k, arch", SHAPES)


@every_shape
@pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)
@pytest.mark.parametrize("model", ["fp32", "volta", "hopper"])
def test_exact_products(dtype, k, arch, settings, model):
    """Every element of A, B and C in its place; more tiles than one, and another chunk for each."""
    rng = np.random.default_rng(k)
    a, b, c = (rng.integers(-9, 10, (8, *s)).astype(dtype) for s in ((16, k), (k, 8), (16, 8)))
    out = multiply(a, b, c, arch, mma=model, chunk_lanes=64, **settings)
    np.testing.assert_array_equal(out, a.astype(float) @ b + c)


def operands(what, dtype, k, rng):
    a, b, c = (rng.normal(size=(2, *s)) for s in ((16, k), (k, 8), (16, 8)))
    if what == "bits":
        return tuple(finite_bits(rng, x.shape, dtype) for x in (a, b, c))
    if what == "spread":
        a, b, c = (x * 2.0 ** rng.integers(-12, 3, x.shape) for x in (a, b, c))
    if what == "ties":
        a, b = (rng.choice([0, 1, -1, 2.0**-11, 2.0**-12, -(2.0**-12)], x.shape) for x in (a, b))
        c = rng.choice([1, -1, 1 + 2.0**-10, 2, 0, 2.0**-14], c.shape)
    if what == "large":
        top = 2.0**8 if dtype == np.float16 else 2.0**64
        a, b, c = np.sign(a) * top, np.sign(b) * top / 2, rng.choice([60000.0, -60000.0, 0], c.shape)
    if what == "special":
        for x in (a, b, c):
            x[rng.random(x.shape) < 0.04] = rng.choice([np.inf, -np.inf, np.nan, 0, -0.0])
    if what == "subnormal":
        a, b, c = a * 2.0**-9, b * 2.0**-9, c * 2.0**-18
    return a.astype(dtype), b.astype(dtype), c.astype(dtype)


@pytest.mark.parametrize("what", ["normal", "bits", "spread", "ties", "large", "special", "subnormal"])
@pytest.mark.parametrize("model", block_fma.MODELS)
@every_shape
def test_every_bit(dtype, k, arch, model, what):
    a, b, c = operands(what, dtype, k, np.random.default_rng(k))
    got = multiply(a, b, c, arch, mma=model)
    want = expected(model, "f16" if dtype == np.float16 else "tf32", a, b, c)
    np.testing.assert_array_equal(got.view(want.dtype), want)


@pytest.mark.parametrize("model", ["fp32", "exact", "ampere", "hopper"])
def test_float16_accumulators_are_rounded_by_every_instruction(model):
    rng = np.random.default_rng(3)
    a, b, c = (rng.normal(size=(2, *s)).astype(np.float16) for s in ((16, 16), (16, 8), (16, 8)))
    want = c
    for _ in range(3):
        want = expected("exact" if model == "fp32" else model, "f16", a, b, want).view(np.float16)
    got = multiply(a, b, c, steps=3, mma=model)
    np.testing.assert_array_equal(got, want)
    assert (got != (c + 3 * (a.astype(float) @ b)).astype(np.float16)).any()


@pytest.mark.parametrize("model, expected_units", [("exact", 3), ("volta", 2), ("ampere", 2), ("hopper", 3)])
def test_a_subnormal_addend_is_aligned_as_its_format_has_it(model, expected_units):
    """2 units and a half and 2**-39: the last decides, if it is not cut off 2**-23, -24 or -25 below 2**-14."""
    a, b = np.zeros((2, 16, 16), np.float16), np.zeros((2, 16, 8), np.float16)
    a[:, :, 0], b[:, 0], a[:, :, 1], b[:, 1] = 2.0**-12, 2.0**-13, 2.0**-20, 2.0**-19
    c = np.full((2, 16, 8), 2 * 2.0**-24, np.float16)
    assert (multiply(a, b, c, mma=model) == expected_units * 2.0**-24).all()


@pytest.mark.parametrize("model", ["fp32", "exact", "ampere"])
def test_lower_bits_of_tf32_do_not_count(model):
    rng = np.random.default_rng(4)
    a, b, c = (rng.normal(size=(2, *s)).astype(np.float32) for s in ((16, 8), (8, 8), (16, 8)))
    a_short, b_short = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    np.testing.assert_array_equal(multiply(a, b, c, mma=model), multiply(a_short, b_short, c, mma=model))


@pytest.mark.parametrize("stored, reported", [(1, False), (2, True)])
def test_an_undefined_row_of_float16_accumulators_is_undefined(stored, reported):
    """Registers 1 and 3 of A hold rows 8 to 15, and so does the second accumulator."""
    kernel = source("m16n8k16", "f16.f16.f16.f16", (4, 2, 2), "r").replace("r < 2; ++r) out", f"r < {stored}; ++r) out")
    a = ptxsim.empty((32, 4), np.uint32)
    a[:, ::2] = 0
    zeros = np.zeros((32, 2), np.uint32)
    with ptxsim.sanitize() as report:
        launch(kernel, 1, 32, a, zeros, zeros, ptxsim.empty((32, 2), np.uint32))
    assert bool(report.findings) == reported
