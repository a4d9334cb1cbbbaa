"""What the addresses of a warp cost, against the definitions written out for one warp at a time."""

import collections

import numpy as np
import pytest

from cupyflash.ptxsim.profile.patterns import Costs, Warps
from cupyflash.ptxsim.profile.sectors import KeySet, SectorMap

SIZES = (1, 2, 4, 8, 16)


def sectors_of(addresses, size):
    """Distinct 32-byte sectors, and how many hold the distinct bytes."""
    data = {a + byte for a in addresses for byte in range(size)}
    return len({byte // 32 for byte in data}), -(-len(data) // 32)


def wavefronts_of(lanes, size):
    """The most distinct words in one of 32 banks, for all phases, and the phases. `lanes`: addresses or None."""
    found = []
    step = {8: 16, 16: 8}.get(size, 32)
    for first in range(0, 32, step):
        words = {(a + byte) // 4 for a in lanes[first : first + step] if a is not None for byte in range(size)}
        if words:
            found.append(max(collections.Counter(word % 32 for word in words).values()))
    return sum(found), len(found)


def passes_of(addresses, size):
    return (max(collections.Counter(addresses).values()),)


def patterns(size, seed):
    """Many kinds of warps: (name, addresses of 12 warps, mask or None)."""
    rng = np.random.default_rng((size, seed))
    lanes = np.arange(12 * 32)
    base = 32 * int(rng.integers(1 << 20))
    some = rng.random(lanes.size) < 0.4
    for name, elements in {
        "in a row": lanes,
        "strided": 3 * lanes,
        "banks": 32 * (lanes % 32) + lanes // 32,
        "backwards": 5000 - lanes,
        "one": 0 * lanes,
        "swizzled": lanes ^ (lanes // 8 % 8),
        "few": rng.integers(0, 7, lanes.size),
        "random": rng.integers(0, 1 << 12, lanes.size),
        "one for each warp": lanes // 32 * 3,
    }.items():
        for mask in (None, some, lanes % 32 >= 5, lanes // 32 % 2 == 1, some & (lanes < 64)):
            yield name, base + size * elements, mask


@pytest.mark.parametrize(
    "cost, expected", [("sectors", sectors_of), ("passes", passes_of), ("wavefronts", wavefronts_of)]
)
@pytest.mark.parametrize("size", SIZES)
def test_costs(cost, expected, size):
    costs = Costs()
    for name, address, mask in [*patterns(size, 1), *patterns(size, 2)]:
        acts = np.ones(address.size, bool) if mask is None else mask
        warps = Warps(address, mask, max(size, 4) if cost == "wavefronts" else 32)
        want = []
        for row, active in zip(address.reshape(-1, 32).tolist(), acts.reshape(-1, 32).tolist(), strict=True):
            lanes = [a if on else None for a, on in zip(row, active, strict=True)]
            if any(active):
                want.append(expected(lanes if cost == "wavefronts" else [a for a in lanes if a is not None], size))
        found = np.ravel(getattr(costs, cost)(warps, size)) if cost != "sectors" else costs.sectors(warps, size)[:2]
        assert tuple(found) == tuple(np.sum(want, axis=0)), name
        assert (warps.count, warps.lanes) == (len(want), np.count_nonzero(acts))


def test_one_pattern_of_several_sizes():
    """Costs that are remembered are those of the size: a broadcast has as many phases as it has."""
    costs, warps = Costs(), Warps(np.zeros(64, np.int64), None, 16)
    found = {size: tuple(costs.wavefronts(warps, size)) for size in (4, 8, 16, 4)}
    assert found == {4: (2, 2), 8: (4, 4), 16: (8, 8)}


@pytest.mark.parametrize("size", SIZES)
def test_sectors_are_those_that_lanes_touch(size):
    costs = Costs()
    for name, address, mask in patterns(size, 3):
        warps = Warps(address, mask, 32)
        acts = np.ones(address.size, bool) if mask is None else mask
        row, sector = np.broadcast_arrays(*costs.sectors(warps, size)[2:])
        which = np.arange(12) if warps.which is None else warps.which
        found = set(zip(which[row].ravel().tolist(), sector.ravel().tolist(), strict=True))
        lanes = np.arange(address.size)[acts]
        assert found == set(zip((lanes // 32).tolist(), (address[acts] // 32).tolist(), strict=True)), name


def test_lanes_of_far_apart_arrays():
    """The heap and mapped memory of a process are 2**45 bytes apart."""
    address = np.where(np.arange(64) % 2, 0x7F0000000000, 0x550000000000) + 4 * np.arange(64)
    for idle in (0, 3):
        warps = Warps(address, np.arange(64) % 32 >= idle, 32)
        assert Costs().sectors(warps, 4)[:2] == tuple(2 * n for n in sectors_of(address[idle:32].tolist(), 4))


def test_a_map_of_sectors():
    """Segments that share a sector are one range; each owner has its own flags, and owners of a kind a union."""
    map_ = SectorMap([(64, 130), (140, 200), (3200, 3232)])
    assert map_.size == 5 + 1  # sectors 2 to 6, and 100
    for owner, touched in ((("load", 1), [2, 4, 4]), (("load", 2), [4, 100, 6]), (("store", 1), [6, 5])):
        map_.mark(owner, map_.positions(np.array(touched)))
    assert map_.counts() == {("load", 1): 2, ("load", 2): 3, ("store", 1): 2}
    assert (map_.union("load"), map_.union("store"), map_.union("atomic")) == (4, 2, 0)
    outside = map_.positions(np.array([0, 50, 1 << 40, -1]))
    assert outside.min() >= 0 and outside.max() < map_.size


@pytest.mark.parametrize("size", [50_000, 10**12])
def test_a_set_of_keys(size):
    """Dense or sparse, also when it is merged on the way."""
    rng = np.random.default_rng(size)
    keys, members = KeySet(size), set()
    assert keys.count() == 0
    for _ in range(5):
        new = rng.integers(0, min(size, 10**7), (3, 100_000))
        keys.add(new)
        members.update(new.ravel().tolist())
    assert keys.count() == len(members)
