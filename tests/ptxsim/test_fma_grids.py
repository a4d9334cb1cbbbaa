"""Outer products of a thread's tile, which run as grids of multiply-adds: each one is rounded once, as alone."""

import math
from fractions import Fraction

import numpy as np
import pytest

from cupyflash.ptxsim import fma

from . import exact
from .launching import launch, poisoned

STEPS, ROWS, COLUMNS, LANES = 3, 3, 4, 1280
INSTRUCTIONS = {
    "fma.rn.f32": (np.float32, "f", dict(fmt=exact.F32)),
    "fma.rn.ftz.f32": (np.float32, "f", dict(fmt=exact.F32, ftz=True)),
    "fma.rn.f64": (np.float64, "d", dict(fmt=exact.F64)),
}


def tile_kernel(instruction):
    """Column 0 and its factors are the same for all lanes; what is out holds the accumulators of every step."""
    dtype, constraint, _ = INSTRUCTIONS[instruction]
    t = "float" if dtype is np.float32 else "double"
    return f"""extern "C" __global__ void tile(const {t}* a, const {t}* b, const {t}* c, {t}* out, int lanes) {{
        int lane = blockIdx.x * blockDim.x + threadIdx.x;
        {t} acc[{ROWS}][{COLUMNS}], x[{STEPS}][{ROWS}], y[{STEPS}][{COLUMNS}];
        #pragma unroll
        for (int k = 0; k < {STEPS}; k++) {{
            for (int i = 0; i < {ROWS}; i++) x[k][i] = a[(k * {ROWS} + i) * lanes + lane];
            for (int j = 0; j < {COLUMNS}; j++) y[k][j] = b[(k * {COLUMNS} + j) * lanes + (j ? lane : 0)];
        }}
        for (int i = 0; i < {ROWS}; i++) for (int j = 0; j < {COLUMNS}; j++)
            acc[i][j] = c[(i * {COLUMNS} + j) * lanes + lane];
        #pragma unroll
        for (int k = 0; k < {STEPS}; k++)
            for (int i = 0; i < {ROWS}; i++) for (int j = 0; j < {COLUMNS}; j++)
                asm("{instruction} %0, %1, %2, %0;" : "+{constraint}"(acc[i][j]) :
                    "{constraint}"(x[k][i]), "{constraint}"(y[k][j]));
        #pragma unroll
        for (int i = 0; i < {ROWS}; i++) for (int j = 0; j < {COLUMNS}; j++)
            out[(i * {COLUMNS} + j) * lanes + lane] = acc[i][j];
    }}"""


def operands(rng, dtype, ordinary):
    """Factors and addends; unless `ordinary`, with every kind of special among them."""
    info = np.finfo(dtype)
    shapes = (STEPS, ROWS, LANES), (STEPS, COLUMNS, LANES), (ROWS, COLUMNS, LANES)
    found = []
    for shape in shapes:
        few_bits = rng.integers(-8, 9, shape) * 0.125
        x = np.where(rng.random(shape) < 0.3, few_bits, rng.normal(size=shape)).astype(dtype)
        if not ordinary:
            tiny, huge = info.tiny, info.max
            specials = [
                0.0,
                -0.0,
                np.inf,
                -np.inf,
                np.nan,
                huge,
                -huge,
                tiny,
                -tiny,
                tiny / 8,
                -3 * info.smallest_subnormal,
            ]
            specials += [np.sqrt(tiny), np.sqrt(huge), 1 + info.eps, 1 - info.eps / 2]
            x = np.where(rng.random(shape) < 0.4, rng.choice(np.array(specials, dtype), shape), x)
        found.append(x)
    a, b, c = found
    cancelled = -(a[0][:, None] * b[0][None]) * (1 + info.eps * rng.integers(-2, 3, c.shape))
    return a, b, np.where(rng.random(c.shape) < 0.3, cancelled.astype(dtype), c)


@pytest.mark.parametrize("ordinary", [True, False], ids=["ordinary", "special"])
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_a_tile_of_outer_products(instruction, ordinary):
    dtype, _, rules = INSTRUCTIONS[instruction]
    with np.errstate(all="ignore"):
        a, b, c = operands(np.random.default_rng(11), dtype, ordinary)
    out = poisoned(c.shape, dtype)
    launch(tile_kernel(instruction), LANES // 64, 64, a, b, c, out, np.int32(LANES))
    lanes = range(0, LANES, 5)
    for i, j, lane in ((i, j, lane) for i in range(ROWS) for j in range(COLUMNS) for lane in lanes):
        expected = float(c[i, j, lane])
        for k in range(STEPS):
            expected = exact.fma(float(a[k, i, lane]), float(b[k, j, lane if j else 0]), expected, **rules)
            if expected is None:  # the ISA leaves open whether it is flushed
                break
        else:
            result = float(out[i, j, lane])
            same = math.isnan(result) if math.isnan(expected) else result.hex() == expected.hex()
            assert same, f"{instruction} row {i} column {j} lane {lane}: {result.hex()}, exactly {expected.hex()}"


@pytest.mark.parametrize("factor", [0.75, -0.5, 3.0, 1 + 2.0**-20, 1 / 3, 0.0, 2.0**-70])
@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_a_constant_factor_with_ties(instruction, factor):
    """A literal among the operands, and addends for which many sums lie half-way between two numbers."""
    dtype, constraint, rules = INSTRUCTIONS[instruction]
    t, ptx = (
        ("float", "0f" + np.array(factor, ">f4").tobytes().hex())
        if dtype is np.float32
        else ("double", "0d" + np.array(factor, ">f8").tobytes().hex())
    )
    source = f"""extern "C" __global__ void constant(const {t}* a, const {t}* c, {t}* out) {{
        int lane = threadIdx.x; {t} x = a[lane], y = c[lane];
        asm("{instruction} %0, %1, {ptx}, %0;" : "+{constraint}"(y) : "{constraint}"(x));
        out[lane] = y;
    }}"""
    rng = np.random.default_rng(5)
    a = rng.normal(size=256).astype(dtype)
    if factor == 3.0:
        a[::17], a[5] = 0, np.inf
    elif factor == 2.0**-70:
        a[5] = np.finfo(dtype).max
    elif factor == 1 / 3:  # products that are exact, or were rounded down
        third = Fraction(float(dtype(factor)))
        a = np.resize([0.0, *(x for x in a if third * Fraction(float(x)) >= Fraction(float(x * dtype(factor))))], 256)
        a = np.where(a == 0, 0.5, a).astype(dtype)
    c = (rng.integers(-3, 4, 256) * np.exp2(rng.integers(-3, 4, 256))).astype(dtype)
    c[1::3] = a[1::3] * dtype(4)
    out = poisoned(c.shape, dtype)
    launch(source, 1, 256, a, c, out)
    for x, y, result in zip(a.tolist(), c.tolist(), out.tolist(), strict=True):
        expected = exact.fma(x, float(dtype(factor)), y, **rules)
        same = math.isnan(result) if math.isnan(expected) else result.hex() == expected.hex()
        assert same, f"{instruction} {x.hex()} * {factor} + {y.hex()}: {result.hex()}, exactly {expected.hex()}"


def test_nan_of_float64_does_not_depend_on_other_lanes():
    """Of a NaN product and a NaN addend NumPy passes on the one or the other, by the length of the arrays."""
    one, other = np.array([0x7FF8000000000001, 0xFFF8000000000002], np.uint64).view(np.float64)
    for count in range(1, 70):
        a, b, c = np.full(count, one), np.full(count, 2.0), np.full(count, other)
        for lanes in (slice(None), slice(0, None, 2)):
            x, y, z = a.copy(), b.copy(), c.copy()
            x[lanes] = np.inf if count % 2 else one
            with np.errstate(all="ignore"):
                result = fma.fma_f64(x, y, z)
            assert np.unique(result.view(np.uint64)).size == 1, count
