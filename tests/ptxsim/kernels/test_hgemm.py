"""Matrix products on tensor cores: `hgemm.cu`."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import ptxsim

KINDS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def product(launch, kernel, m=70, k=72, kind="f16"):
    rng = np.random.default_rng(m + k)
    a, b = (rng.normal(size=shape).astype(KINDS[kind]) for shape in ((m, k), (k, 64)))
    d = ptxsim.empty((m, 64), np.float32)
    grid, block = ((m // 16, 8), 32) if kernel == "from_device_memory" else (-(-m // 64), 128)
    launch("hgemm", kernel, grid, block, a, b, d, np.int32(m), np.int32(k), options=(f"-DKIND={kind}",))
    wide_a, wide_b = a.astype(float), b.astype(float)
    return d, wide_a @ wide_b, (k + 2) * 2.0**-23 * (abs(wide_a) @ abs(wide_b))


@pytest.mark.parametrize(
    "kernel, m, k, kind",
    [
        ("from_device_memory", 32, 48, "f16"),
        ("from_device_memory", 32, 48, "bf16"),
        ("pipelined<Plain, 2>", 70, 72, "f16"),
        ("pipelined<Padded, 2>", 64, 40, "f16"),
        ("pipelined<Swizzled, 2>", 70, 72, "f16"),
        ("pipelined<Swizzled, 2>", 70, 72, "bf16"),
        ("pipelined<Swizzled, 3>", 70, 136, "f16"),
        ("pipelined<Swizzled, 3>", 64, 32, "bf16"),
    ],
)
def test_product(launch, kernel, m, k, kind):
    d, exact, bound = product(launch, kernel, m, k, kind)
    assert (abs(d - exact) <= bound).all()


@pytest.mark.parametrize(
    "layout, fill_a, read_a, read_b", [("Plain", 1, 4, 8), ("Padded", 2, 1, 1), ("Swizzled", 1, 1, 1)]
)
def test_wavefronts_of_a_layout(launcher, layout, fill_a, read_a, read_b):
    """Counted by phases of 128 bytes. A step fills 32 of A and 32 of B, and each of four warps reads 2 * 4 and 2 * 16.

    Eight rows that ldmatrix reads at once are 64 bytes apart in A and 128 in B, which is 4 and 8 to a bank. Two padded
    rows of A, which cp.async fills at once, are 80 bytes apart: four banks are those of both.
    """
    with ptxsim.profile() as profile:
        product(launcher, f"pipelined<{layout}, 2>", 64, 64)
    (counters,) = profile.kernels
    assert counters.mma_flops == 2 * 64 * 64 * 64
    assert counters.shared_ideal_wavefronts == 2 * (32 + 32 + 4 * 2 * (4 + 16))
    assert counters.shared_wavefronts == 2 * (32 * fill_a + 32 + 4 * 2 * (4 * read_a + 16 * read_b))


@pytest.mark.parametrize(
    "before, after, kind",
    [
        ('"n"(STAGES - 2)', '"n"(STAGES - 1)', "missing cp.async wait"),
        ("    __syncthreads();  // this step has come, and the stage of the one before is free\n", "", "shared race"),
        ("first_row + row < m && ", "", "out of bounds"),
    ],
    ids=["wait", "barrier", "rows"],
)
def test_faults_are_found(planted, before, after, kind):
    launch = planted(before, after)
    product(launch, "pipelined<Swizzled, 2>")
    assert kind in launch.kinds


@pytest.mark.parametrize(
    "before, after",
    [
        ("A::at(warp * 16 + lane % 16, half", "Plain<4>::at(warp * 16 + lane % 16, half"),
        (".x4.trans.shared", ".x4.shared"),
        ("mma(sum[n + 1], fa, fb + 2);", "mma(sum[n + 1], fa, fb);"),
        ("inside ? b + (start + row)", "inside ? b + (start + (row ^ 1))"),
    ],
    ids=["swizzle", "trans", "fragment", "row"],
)
def test_faults_show_in_the_product(planted, before, after):
    d, exact, bound = product(planted(before, after), "pipelined<Swizzled, 2>")
    assert not (abs(d - exact) <= bound).all()
