"""Matrix products in float32: `sgemm.cu`."""

import itertools

import numpy as np
import pytest

from cupyflash import ptxsim

ODD = (33, 17, 29)
WHOLE = (32, 96, 48)
SHAPES = {  # kernel -> block, elements of C that a block computes along x and y, (m, n, k)
    "naive": ((32, 4), (32, 4), ODD),
    "coalesced": ((32, 4), (32, 4), ODD),
    "shared_tile": ((16, 16), (16, 16), ODD),
    "column_of_results": (256, (32, 32), WHOLE),
    "square_of_results": (64, (32, 32), WHOLE),
    "vectorised": (64, (32, 32), WHOLE),
    "double_buffered": (64, (32, 32), WHOLE),
}


def product(launch, kernel):
    block, (x, y), (m, n, k) = SHAPES[kernel]
    rng = np.random.default_rng(k)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((m, k), (k, n)))
    c = ptxsim.empty((m, n), np.float32)
    along_x, along_y = (m, n) if kernel == "naive" else (n, m)
    grid = (-(-along_x // x), -(-along_y // y))
    launch("sgemm", kernel, grid, block, a, b, c, *map(np.int32, (m, n, k)))
    wide_a, wide_b = a.astype(float), b.astype(float)
    return c, wide_a @ wide_b, (k + 1) * 2.0**-24 * (abs(wide_a) @ abs(wide_b))


@pytest.mark.parametrize("kernel", SHAPES)
def test_product(launch, kernel):
    c, exact, bound = product(launch, kernel)
    assert (abs(c - exact) <= bound).all()


@pytest.mark.parametrize(
    "kernel, before, after, kind",
    [
        ("shared_tile", "    __syncthreads();  // the tile has been used\n", "", "shared race"),
        (
            "double_buffered",
            "    __syncthreads();  // before the next fetch overwrites this buffer\n",
            "",
            "shared race",
        ),
        ("double_buffered", "cp.async.wait_group 1;", "cp.async.wait_group 2;", "missing cp.async wait"),
        ("vectorised", "/ 4 + t % 2]", "/ 4 + t % 2 + 1000]", "out of bounds"),
    ],
    ids=["tile", "buffer", "wait", "bounds"],
)
def test_faults_are_found(planted, kernel, before, after, kind):
    launch = planted(before, after)
    product(launch, kernel)
    assert kind in launch.kinds


def test_loads_of_the_ladder(launcher):
    """Sectors for each multiply-add fall from step to step."""
    sectors = []
    for kernel in ("naive", "coalesced", "shared_tile", "vectorised"):
        _, _, (m, n, k) = SHAPES[kernel]
        with ptxsim.profile() as profile:
            product(launcher, kernel)
        sectors.append(profile.kernels[0].global_load_sectors / (m * n * k))
    assert all(more > 1.5 * less for more, less in itertools.pairwise(sectors)), sectors
