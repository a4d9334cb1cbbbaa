"""Simulation and analysis: `numerical.cu`."""

import itertools
import math

import numpy as np
import pytest

from cupyflash import ptxsim

RNG = np.random.default_rng
FAMILY = "numerical"


def normal(*shape, seed=1, dtype=np.float32):
    return RNG(seed).normal(size=shape).astype(dtype)


def fourier(launch):
    x, out = normal(2, 128, 2).view(np.complex64)[..., 0], ptxsim.empty((2, 128), np.complex64)
    launch(FAMILY, "fourier", 2, 64, x, out)
    return out, np.fft.fft(x.astype(complex))


def test_fourier(launch):
    out, exact = fourier(launch)
    assert (abs(out - exact) <= 4e-7 * np.sqrt((abs(exact) ** 2).mean(1, keepdims=True)) * 7).all()


def test_attraction(launch):
    bodies, pull = normal(75, 4), ptxsim.empty((75, 3), np.float32)
    bodies[:, 3] = abs(bodies[:, 3])
    launch(FAMILY, "attraction", 2, 64, bodies, pull, np.int32(75))
    wide = bodies.astype(float)
    apart = wide[None, :, :3] - wide[:, None, :3]
    weights = wide[:, 3] * ((apart**2).sum(2) + 0.01) ** -1.5
    exact, size = (weights[..., None] * apart).sum(1), (weights[..., None] * abs(apart)).sum(1)
    assert (abs(pull - exact) <= 80 * 2.0**-23 * size).all()


def test_sparse_rows(launch):
    rng, rows = RNG(2), 21
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 20, rows))]).astype(np.int32)
    columns, values = rng.integers(0, 50, starts[-1]).astype(np.int32), normal(starts[-1], dtype=np.float64)
    x, y = normal(50, seed=3, dtype=np.float64), ptxsim.empty(rows)
    launch(FAMILY, "sparse_rows", 3, 64, starts, columns, values, x, y, np.int32(rows))
    exact = [values[a:b] @ x[columns[a:b]] for a, b in itertools.pairwise(starts)]
    np.testing.assert_allclose(y, exact, rtol=1e-13, atol=1e-13)


def blur(launch):
    image, out = RNG(4).integers(0, 256, (19, 45)).astype(np.uint8), ptxsim.empty((19, 45), np.uint8)
    launch(FAMILY, "blur", (2, 3), (32, 8), image, out, np.int32(19), np.int32(45))
    padded = np.pad(image.astype(float), 2, mode="edge")
    binomial = np.array([1, 4, 6, 4, 1])
    views = np.lib.stride_tricks.sliding_window_view(padded, (5, 5))
    return out, np.rint((views * np.outer(binomial, binomial)).sum((2, 3)) / 256)


def test_blur(launch):
    np.testing.assert_array_equal(*blur(launch))


def test_options(launch):
    rng, n = RNG(5), 100
    spot, strike, years = rng.uniform(20, 120, n), rng.uniform(20, 120, n), rng.uniform(0.1, 4, n)
    price = ptxsim.empty(n)
    launch(FAMILY, "options", 2, 64, spot, strike, years, price, 0.03, 0.3, np.int32(n))

    def cdf(d):
        return np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in d])

    root = 0.3 * np.sqrt(years)
    d = (np.log(spot / strike) + (0.03 + 0.045) * years) / root
    exact = spot * cdf(d) - strike * np.exp(-0.03 * years) * cdf(d - root)
    np.testing.assert_allclose(price, exact, rtol=1e-12, atol=1e-11)


def test_count_keys(launch):
    keys = RNG(6).integers(1, 2**63, 40, dtype=np.uint64)[RNG(7).integers(0, 40, 150)]
    slots, counts = np.zeros(64, np.uint64), np.zeros(64, np.uint32)
    launch(FAMILY, "count_keys", 3, 64, keys, slots, counts, np.int32(150), np.int32(64))
    unique, exact = np.unique(keys, return_counts=True)
    found = {int(key): int(count) for key, count in zip(slots, counts, strict=True) if key}
    assert found == dict(zip(unique.tolist(), exact.tolist(), strict=True))


def test_quantised_product(launch):
    a, b = RNG(8).integers(-128, 128, (5, 24)).astype(np.int8), RNG(9).integers(-128, 128, (33, 24)).astype(np.int8)
    scale, out = normal(5), ptxsim.empty((5, 33), np.float32)
    launch(FAMILY, "quantised_product", 5, 33, a, b, scale, out, np.int32(6))
    np.testing.assert_array_equal(out, scale[:, None] * (a.astype(np.int32) @ b.T.astype(np.int32)).astype(np.float32))


def test_philox(launch):
    out, key = ptxsim.empty((64, 4), np.uint32), (0x243F6A88, 0x85A308D3)
    launch(FAMILY, "philox", 2, 32, out, *map(np.uint32, key))
    for i, row in enumerate(out.tolist()):
        c, (k0, k1) = [i, 0, 0, 0], key
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            low = 0xFFFFFFFF
            c = [(p1 >> 32) ^ c[1] ^ k0, p1 & low, (p0 >> 32) ^ c[3] ^ k1, p0 & low]
            k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
        assert row == c


def edit_distance(launch):
    a, b = RNG(10).integers(97, 101, 37).astype(np.int8), RNG(11).integers(97, 101, 45).astype(np.int8)
    out = ptxsim.empty(1, np.int32)
    sizes = np.int32(a.size), np.int32(b.size)
    launch(FAMILY, "edit_distance", 1, 64, a, b, out, *sizes, shared_mem=3 * 4 * (a.size + 1))
    row = list(range(b.size + 1))
    for i, x in enumerate(a):
        new = [i + 1]
        for j, y in enumerate(b):
            new.append(min(new[-1] + 1, row[j + 1] + 1, row[j] + (x != y)))
        row = new
    return out[0], row[-1]


def test_edit_distance(launch):
    got, exact = edit_distance(launch)
    assert got == exact


def solve(launch, n=11):
    matrix, right = normal(n, n, dtype=np.float64), normal(n, seed=2, dtype=np.float64)
    expected = np.linalg.solve(matrix, right)
    launch(FAMILY, "solve", 1, n + 1, matrix, right, np.int32(n), shared_mem=8 * n * (n + 1))
    return right, expected


def test_solve(launch):
    np.testing.assert_allclose(*solve(launch), rtol=1e-10)


def test_visit(launch):
    rng, n = RNG(12), 60
    degree = rng.integers(0, 4, n)
    starts, edges = np.concatenate([[0], np.cumsum(degree)]).astype(np.int32), rng.integers(0, n, degree.sum())
    edges, level = edges.astype(np.int32), np.full(n, -1, np.int32)
    level[0], frontier, depth = 0, np.zeros(1, np.int32), 0
    expected, seen, queue = np.full(n, -1), {0}, [0]
    expected[0] = 0
    for v in queue:
        for w in edges[starts[v] : starts[v + 1]].tolist():
            if w not in seen:
                seen.add(w)
                expected[w] = expected[v] + 1
                queue.append(w)
    while frontier.size:
        depth += 1
        following, count = ptxsim.empty(n, np.int32), np.zeros(1, np.int32)
        sizes = np.int32(frontier.size)
        launch(FAMILY, "visit", 2, 32, starts, edges, frontier, sizes, level, following, count, np.int32(depth))
        frontier = np.sort(following[: count[0]])
    np.testing.assert_array_equal(level, expected)


@pytest.mark.parametrize(
    "problem, before",
    [
        (fourier, "    __syncthreads();  // of the pass before\n"),
        (blur, "  __syncthreads();  // of the tile\n"),
        (edit_distance, "    __syncthreads();  // of the antidiagonal\n"),
        (solve, "    __syncthreads();  // the pivot has been read\n"),
    ],
    ids=["fourier", "blur", "edit_distance", "solve"],
)
def test_a_missing_barrier_is_a_race(planted, problem, before):
    launch = planted(before, "")
    problem(launch)
    assert "shared race" in launch.kinds
