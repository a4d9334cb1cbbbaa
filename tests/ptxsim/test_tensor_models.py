"""settings(mma=...): every model bit for bit against integer arithmetic, and what follows from its definition."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash.ptxsim.tensor_models import multiply_add

from . import block_fma
from .launching import SCHEDULES, launch, poisoned, schedule_name
from .test_tensor_core import DTYPES, a_position, b_position, multiply, pack, unpack_accumulator

TRUNCATING = tuple(block_fma.TRUNCATIONS)
every_model = pytest.mark.parametrize("model", block_fma.MODELS)
every_truncation = pytest.mark.parametrize("model", TRUNCATING)
every_shape = pytest.mark.parametrize("k, kind", [(16, "f16"), (16, "bf16"), (8, "f16"), (8, "bf16")])


def bits(x):
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def expected(model, kind, a, b, c):
    """Bits of every element of a (n, 16, k), b (n, k, 8), c (n, 16, 8)."""
    output, d = "f16" if c.dtype == np.float16 else "f32", np.empty(c.shape, bits(c).dtype)
    a, b, c = bits(a).tolist(), bits(b.swapaxes(1, 2).copy()).tolist(), bits(c).tolist()
    for n, i, j in np.ndindex(d.shape):
        d[n, i, j] = block_fma.dot(model, kind, a[n][i], b[n][j], c[n][i][j], output)
    return d


def check(model, kind, a, b, c):
    got = bits(multiply(a, b, c, a.shape[2], kind, "sm_80", mma=model))
    want = expected(model, kind, a, b, c)
    wrong = np.argwhere(got != want)
    first = tuple(wrong[0]) if wrong.size else ()
    assert not wrong.size, f"{len(wrong)} wrong, the first at {first}: {got[first]:#x}, not {want[first]:#x}"


def finite_bits(rng, shape, dtype):
    """Finite numbers of uniformly random bits: all exponents, subnormals too."""
    pattern = rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, shape).astype(f"u{np.dtype(dtype).itemsize}")
    x = pattern.view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        x[~np.isfinite(x)] = 0
    return x


def operands(what, k, kind, rng):
    """Two matrices of each operand."""
    dtype = DTYPES[kind]
    shapes = (2, 16, k), (2, k, 8)
    a, b = (rng.normal(size=s).astype(dtype) for s in shapes)
    c = rng.normal(size=(2, 16, 8)).astype(np.float32)
    if what == "bits":
        return *(finite_bits(rng, s, dtype) for s in shapes), finite_bits(rng, c.shape, np.float32)
    if what == "spread":
        a, b = ((x.astype(float) * 2.0 ** rng.integers(-13, 6, x.shape)).astype(dtype) for x in (a, b))
        return a, b, (c * 2.0 ** rng.integers(-40, 10, c.shape)).astype(np.float32)
    if what == "cancellation":
        a[..., k // 2 :] = -a[..., : k // 2]
        b[:, k // 2 :] = (b[:, : k // 2].astype(float) * (1 + 2.0**-7 * rng.integers(0, 2, (2, k // 2, 8)))).astype(
            dtype
        )
        return a, b, (c * 2.0 ** rng.integers(-30, 0, c.shape)).astype(np.float32)
    if what == "against the addend":
        return a, b, -(a.astype(float) @ b.astype(float)).astype(np.float32)
    if what == "ties":  # sums that lie half-way between float32 numbers, or beside that
        a = rng.choice([1, -1, 2.0**-12, 2.0**-13, -(2.0**-12), 0.0], a.shape).astype(dtype)
        b = rng.choice([1, 2.0**-12, -(2.0**-12), 2.0**-11, 0.0], b.shape).astype(dtype)
        return a, b, rng.choice(np.array([1, -1, 1 + 2.0**-23, 2, 0], np.float32), c.shape)
    if what == "far from ties":  # the same, decided by terms far below, or by none
        far = (
            2.0 ** -np.array([0, 24, 24, 36, 60, 80, 120]) if kind == "bf16" else 2.0 ** -np.array([0, 12, 12, 20, 24])
        )
        a = (rng.choice(far, a.shape) * rng.choice([0, 0, 1, 1, -1], a.shape)).astype(dtype)
        b = (rng.choice(far[:3], b.shape) * rng.choice([0, 1, 1, 1], b.shape)).astype(dtype)
        return a, b, rng.choice(np.array([1, -1, 1 + 2.0**-23, 2, 0], np.float32), c.shape)
    if what == "zeros":
        a, b = (np.where(rng.random(x.shape) < 0.9, np.copysign(0.0, x.astype(float)), x).astype(dtype) for x in (a, b))
        a[0] = np.copysign(0.0, a[0].astype(float)).astype(dtype)
        c = np.where(rng.random(c.shape) < 0.7, np.copysign(np.float32(0), c), c)
        a[0, 3], b[0], c[0, 3] = dtype(-0.0), abs(b[0].astype(float)).astype(dtype), -0.0  # nothing but -0
        a[1, 0, :3], b[1, :3] = (1, 2.0**-12, 2.0**-20), ((1,), (2.0**-12,), (2.0**-20,))
        return a, b, np.where(np.arange(16)[:, None] == 0, np.float32(2.0**20), c)
    if what == "below the grid's least unit":
        a, b = ((x.astype(float) * (2.0**-73 if kind == "bf16" else 2.0**-12)).astype(dtype) for x in (a, b))
        return a, b, np.where(rng.random(c.shape) < 0.5, c * np.float32(2.0**-148), np.float32(0))
    if what == "subnormal":  # results, addends and bfloat16 factors
        scale = 2.0**-12 if kind == "f16" else 2.0**-70
        a, b = ((x.astype(float) * scale * 2.0 ** rng.integers(-8, 3, x.shape)).astype(dtype) for x in (a, b))
        return a, b, (c * 2.0 ** rng.integers(-150, -124, c.shape)).astype(np.float32)
    if what == "large":
        scale = 2.0**14 if kind == "f16" else 2.0**64
        a, b = ((np.sign(x.astype(float)) * scale * rng.choice([1, 0.5], x.shape)).astype(dtype) for x in (a, b))
        return a, b, rng.choice(np.array([3e38, -3e38, 2.0**127, 0], np.float32), c.shape)
    if what == "special":
        for x in (a, b, c):
            x[rng.random(x.shape) < 0.03] = np.inf
            x[rng.random(x.shape) < 0.02] = -np.inf
            x[rng.random(x.shape) < 0.01] = np.nan
            x[rng.random(x.shape) < 0.05] = 0
        return a, b, c
    return a, b, c


CASES = (
    "normal",
    "bits",
    "spread",
    "cancellation",
    "against the addend",
    "ties",
    "far from ties",
    "below the grid's least unit",
    "zeros",
    "subnormal",
    "large",
    "special",
)


@pytest.mark.parametrize("what", CASES)
@every_shape
@every_model
def test_every_bit(model, k, kind, what):
    check(model, kind, *operands(what, k, kind, np.random.default_rng(len(what) + k)))


def scalar(model, products, c, kind="f16"):
    """c + sum of a few products (a, b) as one instruction gives it, in each place of the tile."""
    a, b = np.zeros((2, 16, 16)), np.zeros((2, 16, 8))
    for n, (x, y) in enumerate(products):
        a[:, :, n], b[:, n] = x, y
    out = multiply(a, b, np.full((2, 16, 8), c, np.float32), 16, kind, "sm_80", mma=model)
    assert (out == out[0, 0, 0]).all()
    return float(out[0, 0, 0])


def test_volta_is_not_monotone_and_later_models_are_here():
    """A smaller addend gives a larger sum, where the terms lose bits to a larger power of two."""
    four = [(2.0**-12, 2.0**-12)] * 4
    assert scalar("volta", four, 1 - 2.0**-24) == 1 + 2.0**-23
    assert scalar("volta", four, 1.0) == 1.0
    for model in ("ampere", "ada", "hopper", "blackwell"):
        assert scalar(model, four, 1 - 2.0**-24) <= scalar(model, four, 1.0) == 1 + 2.0**-22


@pytest.mark.parametrize("model, kept", [("volta", 23), ("ampere", 24), ("ada", 24), ("hopper", 25), ("blackwell", 25)])
def test_bits_kept_below_the_largest_term(model, kept):
    """1 + x - 1 shows the smallest x that is not cut off; and beyond `width` products no bit is spared."""
    for exponent in range(20, 28):
        products = [(1, 1), (-1, 1), (2.0**-14, 2.0 ** (14 - exponent))]
        assert scalar(model, products, 0.0) == (2.0**-exponent if exponent <= kept else 0.0), exponent


@pytest.mark.parametrize("model, width", [(name, values[0]) for name, values in block_fma.TRUNCATIONS.items()])
def test_products_summed_at_a_time(model, width):
    """A term too small for the grid survives where its largest partner comes in an earlier sum and cancels there."""
    for place in range(2, 16):
        products = [(1, 1), (-1, 1)] + [(0, 0)] * (place - 2) + [(2.0**-14, 2.0**-14)]
        assert scalar(model, products, 0.0) == (2.0**-28 if place >= width else 0.0), place


def test_exact_where_float64_loses_what_decides():
    """Sums of three sizes: the large cancel, or they leave a subnormal half-way between two others."""

    def powers(*exponents):
        return [(np.copysign(2.0 ** -(abs(e) // 2), e), 2.0 ** -(abs(e) - abs(e) // 2)) for e in exponents]

    minus_one = [(-1, 1)]
    assert scalar("exact", powers(60, 115) + minus_one + powers(-60, 110), 1.0, "bf16") == 2.0**-110 + 2.0**-115
    assert scalar("exact", powers(60, 120) + minus_one + powers(-60), 1.0, "bf16") == 2.0**-120
    assert scalar("exact", powers(140, 150, 200, 260, -200), 0.0, "bf16") == 2.0**-140 + 2.0**-149
    assert scalar("exact", powers(140, 150, 200, -260, -200), 0.0, "bf16") == 2.0**-140


def test_exact_does_not_depend_on_the_order():
    rng = np.random.default_rng(5)
    for kind in DTYPES:
        a, b, c = operands("bits", 16, kind, rng)
        first = multiply(a, b, c, 16, kind, "sm_80", mma="exact")
        order = rng.permutation(16)
        again = multiply(a[:, :, order], b[:, order], c, 16, kind, "sm_80", mma="exact")
        np.testing.assert_array_equal(bits(first), bits(again))


@every_model
def test_zeros_contribute_nothing(model):
    """The sum of 4 products is the same when the other 12 are zeros times anything finite, of any exponent."""
    rng = np.random.default_rng(6)
    a, b, c = operands("spread", 16, "bf16", rng)
    a[:, :, 4:], b[:, 4:] = 0, 0
    first = multiply(a, b, c, 16, "bf16", "sm_80", mma=model)
    b[:, 4:] = finite_bits(rng, b[:, 4:].shape, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits(first), bits(multiply(a, b, c, 16, "bf16", "sm_80", mma=model)))


@every_model
def test_signs_and_powers_of_two(model):
    """Truncation is toward zero on a grid that moves with the exponents: -a, -c give -d; 8 a, 8 c give 8 d."""
    a, b, c = operands("spread", 16, "bf16", np.random.default_rng(7))
    d = multiply(a, b, c, 16, "bf16", "sm_80", mma=model)
    np.testing.assert_array_equal(multiply(-a, b, -c, 16, "bf16", "sm_80", mma=model), -d)
    np.testing.assert_array_equal(multiply(8 * a, b, 8 * c, 16, "bf16", "sm_80", mma=model), 8 * d)


# Relative error of sums of 1 * v, v uniform in (0.5, 1.5), at 4096 and 16384 terms.
DRIFT = {"volta": -6.1e-5, "ampere": -1.5e-5, "ada": -1.5e-5, "hopper": -7.8e-6, "blackwell": -7.8e-6}


@every_model
def test_truncation_drifts_downward_with_length(model):
    v = np.random.default_rng(8).uniform(0.5, 1.5, (1, 16384, 8)).astype(np.float16).astype(np.float64)
    for length in (4096, 16384):
        ones, c = np.ones((1, 1, length)), np.zeros((1, 1, 8), np.float32)
        got = multiply_add(model, "f16", ones, v[:, :length], c, [16] * (length // 16))
        total = v[:, :length].sum(1)
        error = (got[:, 0] - total) / total
        if length == 4096 or model == "exact":
            assert (abs(error) < 1e-6).all()
        else:
            assert (error < 0).all() and 0.6 < error.mean() / DRIFT[model] < 1.6, error


CHAIN = """
#define MMA(a) asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
    "{%8, %9}, {%0, %1, %2, %3};" : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]) \
    : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "r"(fb[0]), "r"(fb[1]))
extern "C" __global__ void chain(const unsigned* a, const unsigned* b, float* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned *fa = a + 12 * i, *fb = b + 2 * i;
  float s[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  MMA(fa); MMA(fa + 4); MMA(fa + 8);
  for (int r = 0; r < 4; ++r) out[4 * i + r] = s[r];
}"""


def run_chain(warps, a, b, **settings):
    words = [pack(a[n], a_position, 4).view(np.uint32)[..., 0] for n in range(3)]
    words = np.ascontiguousarray(np.stack(words, 2))
    out = poisoned((warps, 32, 4), np.float32)
    launch(CHAIN, warps // 2, 64, words, pack(b, b_position, 2).view(np.uint32), out, **settings)
    return unpack_accumulator(out)


@pytest.mark.parametrize("settings", [*SCHEDULES, {"chunk_lanes": 64}], ids=schedule_name)
@every_model
def test_a_chain_is_one_instruction_after_another(model, settings):
    """Models that round every instruction, and fp32, which rounds the chain; at every launch the one that is set."""
    rng = np.random.default_rng(9)
    a, b = rng.normal(size=(3, 6, 16, 16)).astype(np.float16), rng.normal(size=(6, 16, 8)).astype(np.float16)
    a[0] *= np.float16(100)  # so that sums lose bits between the instructions
    want = np.ones((6, 16, 8), np.float32)
    for step in a:
        want = expected(model, "f16", step, b, want).view(np.float32)
    once = (1 + a.astype(float).sum(0) @ b.astype(float)).astype(np.float32)
    before = run_chain(6, a, b, mma="fp32", **settings)
    got = run_chain(6, a, b, mma=model, **settings)
    np.testing.assert_array_equal(bits(got), bits(want))
    np.testing.assert_array_equal(before, once)
    np.testing.assert_array_equal(bits(run_chain(6, a, b, **settings)), bits(before))
    assert (bits(got) != bits(before)).mean() > 0.02
