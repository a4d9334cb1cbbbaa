"""Blocks per SM, worked out by hand from the limits of each architecture."""

import pytest

from cupyflash.ptxsim.occupancy import occupancy

KIB = 1024


@pytest.mark.parametrize(
    "arch, threads, registers, shared, barriers, blocks, limited_by",
    [
        # 64 warps of 32 * 32 = 1,024 registers fill 65,536; so do 8 blocks of 8 warps.
        ("sm_80", 256, 32, 0, 1, 8, {"warps", "registers"}),
        # 33 * 32 = 1,056 is rounded up to 1,280: 12 warps in each quarter of 16,384.
        ("sm_80", 256, 33, 0, 1, 6, {"registers"}),
        # 80 * 32 = 2,560: 6 warps a quarter, 24 in all; 65,536 in one piece would hold 25.
        ("sm_80", 32, 80, 0, 0, 24, {"registers"}),
        ("sm_80", 32, 16, 0, 0, 32, {"blocks"}),
        ("sm_86", 32, 16, 0, 0, 16, {"blocks"}),
        ("sm_89", 64, 16, 0, 0, 24, {"warps", "blocks"}),
        ("sm_75", 1024, 64, 0, 0, 1, {"warps", "registers"}),
        ("sm_80", 1024, 32, 0, 0, 2, {"warps", "registers"}),
        ("sm_89", 1024, 32, 0, 0, 1, {"warps"}),
        ("sm_120", 768, 40, 0, 0, 2, {"warps", "registers"}),
        # 1024 threads of 65 registers: 2,304 go 7 times into a quarter, and 28 warps are no 32.
        ("sm_90", 1024, 65, 0, 0, 0, {"registers"}),
        # 8,192 go twice into a quarter: 8 warps hold a block of 5 and none of 9.
        ("sm_80", 160, 255, 0, 0, 1, {"registers"}),
        ("sm_80", 288, 255, 0, 0, 0, {"registers"}),
        ("sm_80", 32, 256, 0, 0, 0, {"registers"}),
        # Each block takes 1 KiB more: 3 * 49 and not 4 * 48 - of 164; 65 of 164 twice, of 100 once, of 228 three times.
        ("sm_80", 128, 32, 48 * KIB, 1, 3, {"shared memory"}),
        ("sm_80", 128, 128, 64 * KIB, 1, 2, {"shared memory"}),
        ("sm_89", 128, 128, 64 * KIB, 1, 1, {"shared memory"}),
        ("sm_90", 128, 128, 64 * KIB, 1, 3, {"shared memory"}),
        ("sm_100", 128, 128, 64 * KIB, 1, 3, {"shared memory"}),
        ("sm_75", 128, 64, 32 * KIB, 1, 2, {"shared memory"}),
        # 164 / 4 = 41 KiB for each of four: 40 fit, and one byte more does not.
        ("sm_80", 128, 32, 40 * KIB, 1, 4, {"shared memory"}),
        ("sm_80", 128, 32, 40 * KIB + 1, 1, 3, {"shared memory"}),
        # 82 KiB for each of two, with one unit of 128 bytes to spare.
        ("sm_80", 128, 32, 81 * KIB - 127, 1, 2, {"shared memory"}),
        ("sm_80", 128, 32, 163 * KIB, 1, 1, {"shared memory"}),
        ("sm_80", 128, 32, 163 * KIB + 1, 1, 0, {"shared memory"}),
        ("sm_86", 128, 32, 99 * KIB + 1, 1, 0, {"shared memory"}),
        ("sm_90", 128, 32, 227 * KIB, 1, 1, {"shared memory"}),
        # Barriers are short only from sm_90 on.
        ("sm_90", 32, 32, 0, 16, 4, {"barriers"}),
        ("sm_120", 32, 32, 0, 16, 1, {"barriers"}),
        ("sm_80", 32, 32, 0, 16, 32, {"blocks"}),
    ],
)
def test_blocks_by_hand(arch, threads, registers, shared, barriers, blocks, limited_by):
    found = occupancy(arch, threads, registers, shared, barriers)
    assert (found.blocks, set(found.limited_by)) == (blocks, limited_by)
    assert found.warps == blocks * -(-threads // 32)
    assert found.fraction == found.warps / found.max_warps


def test_a_partial_warp_is_a_warp():
    assert occupancy("sm_80", 33, 32).blocks == occupancy("sm_80", 64, 32).blocks == 32
    assert occupancy("sm_80", 65, 32).warps == 63  # 21 blocks of 3 warps


def test_text_and_dict():
    found = occupancy("sm_80", 128, 225, 64 * KIB)
    assert str(found) == "2 blocks, 8 of 64 warps per SM (12%) on sm_80, limited by registers and shared memory"
    assert found.as_dict()["limits"] == {"warps": 16, "blocks": 32, "registers": 2, "shared memory": 2}
    assert found.as_dict()["limited_by"] == ["registers", "shared memory"]


@pytest.mark.parametrize(
    "arch, threads, message",
    [("sm_70", 32, "arch: 'sm_70'"), ("sm_80", 0, "threads: 0, must be 1 to 1024"), ("sm_80", 1025, "threads: 1025")],
)
def test_impossible_sizes_are_refused(arch, threads, message):
    with pytest.raises(ValueError, match=message):
        occupancy(arch, threads, 32)
