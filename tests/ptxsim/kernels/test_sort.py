"""Sorts: `sort.cu`."""

import numpy as np

from cupyflash import ptxsim

RNG = np.random.default_rng


def bitonic(launch, n=117):
    x = RNG(1).normal(size=n).astype(np.float32)
    expected = np.sort(x)
    launch("sort", "bitonic", 1, 128, x, np.int32(n))
    return x, expected


def test_bitonic(launch):
    np.testing.assert_array_equal(*bitonic(launch))


def test_bitonic_by_shuffles(launch):
    keys, places = RNG(2).integers(0, 9, (3, 32), dtype=np.uint32), ptxsim.empty((3, 32), np.int32)
    launch("sort", "bitonic_by_shuffles", 3, 32, keys, places)
    np.testing.assert_array_equal(places, np.argsort(keys, axis=1, kind="stable"))


def radix(launch, n=119):
    keys, places = RNG(3).integers(0, 2**32, n, dtype=np.uint32), ptxsim.empty(n, np.int32)
    keys[::3] = keys[5]
    expected = np.argsort(keys, kind="stable")
    in_order = keys[expected]
    launch("sort", "radix", 1, 128, keys, places, np.int32(n))
    return (places, expected), (keys, in_order)


def test_radix(launch):
    for got, expected in radix(launch):
        np.testing.assert_array_equal(got, expected)


def test_counting(launch):
    keys, out = RNG(8).integers(0, 256, 999).astype(np.uint8), ptxsim.empty(999, np.uint8)
    launch("sort", "counting", 1, 256, keys, out, np.int32(999))
    np.testing.assert_array_equal(out, np.sort(keys))


def test_merge(launch):
    a, b = (np.sort(RNG(n).integers(0, 99, n)).astype(np.int32) for n in (101, 57))
    out = ptxsim.empty(158, np.int32)
    launch("sort", "merge", 1, 32, a, b, out, np.int32(101), np.int32(57), np.int32(5))
    np.testing.assert_array_equal(out, np.sort(np.concatenate([a, b])))


def test_a_missing_barrier_of_the_network_is_a_race(planted):
    launch = planted("      __syncthreads();  // both have been read\n", "")
    bitonic(launch)
    assert launch.kinds == {"shared race"}


def test_a_missing_barrier_of_the_digits_is_a_race(planted):
    launch = planted("    __syncthreads();  // all counts are places\n", "")
    radix(launch)
    assert "shared race" in launch.kinds


def test_keys_without_an_order_among_equals_are_not_stable(planted):
    (places, expected), _ = radix(planted("__popc(same & lower)", "__popc(same & ~lower) - 1"))
    assert (places != expected).any()
