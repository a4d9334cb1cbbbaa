"""Code runs without a mask wherever all lanes of its warps are together: before they part and after they have met."""

import collections

import numpy as np
import pytest

from cupyflash import attention
from cupyflash.ptxsim.machine import Chunk

from .launching import launch, poisoned

BLOCKS, THREADS, TAIL = 4, 128, 9

KERNEL = """
extern "C" __global__ void k(const int* x, int* out, int tail) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, s = 0;
    PARTING
    out[i] = s;
    #pragma unroll 1
    for (int j = 0; j < tail; j++) { s = s * 3 + x[i]; __syncthreads(); }
    out[i] = s;
}"""

LOOP = '_Pragma("unroll 1") for (int j = 0; j < COUNT; j++) s += x[j];'
LANES = np.arange(BLOCKS * THREADS)
PARTINGS = {
    "branch": (f"if (x[i] & 1) {{ {LOOP.replace('COUNT', '5')} }} else s = 2;", np.where(LANES % 2, 10, 2)),
    "trip counts of lanes": (LOOP.replace("COUNT", "(x[i] & 7)"), np.cumsum(LANES)[LANES % 8] - LANES % 8),
    "trip counts of warps": (LOOP.replace("COUNT", "threadIdx.x / 32"), np.array([0, 0, 1, 3])[LANES % THREADS // 32]),
    "trip counts of blocks": (LOOP.replace("COUNT", "blockIdx.x"), np.array([0, 0, 1, 3])[LANES // THREADS]),
}


@pytest.fixture
def ran(monkeypatch):
    """(block, lanes of the group, whether it has a mask) of every basic block that has run."""
    seen = []
    follow = Chunk.follow

    def noted(chunk, x, block, result):
        seen.append((block.index, x.n, x.mask is not None))
        return follow(chunk, x, block, result)

    monkeypatch.setattr(Chunk, "follow", noted)
    return seen


def run(parting, tail=TAIL):
    x, out = np.arange(BLOCKS * THREADS, dtype=np.int32), poisoned(BLOCKS * THREADS, np.int32)
    launch(KERNEL.replace("PARTING", parting), BLOCKS, THREADS, x, out, np.int32(tail))
    return out


def runs_of_the_tail(ran, parting):
    """What runs more often if the loop at the end does: (lanes, masked) -> runs of each further pass."""
    counts = []
    for tail in (TAIL, TAIL + 10):
        ran.clear()
        run(parting, tail)
        counts.append(collections.Counter((lanes, masked) for _, lanes, masked in ran))
    counts[1].subtract(counts[0])
    return {how: count / 10 for how, count in counts[1].items() if count}


@pytest.mark.parametrize("name", PARTINGS)
def test_a_loop_after_a_parting_runs_for_all_and_has_no_mask(ran, name):
    parting, expected = PARTINGS[name]
    out = run(parting)
    for _ in range(TAIL):
        expected = expected * 3 + LANES
    np.testing.assert_array_equal(out, expected.astype(np.int32))
    assert len({lanes for _, lanes, _ in ran}) > 1 or any(masked for *_, masked in ran)  # they have parted
    ((lanes, masked),) = runs_of_the_tail(ran, parting)
    assert (lanes, masked) == (BLOCKS * THREADS, False)


@pytest.mark.parametrize(
    "leaving, left",
    [
        ("threadIdx.x / 32 % 2", BLOCKS * THREADS // 2),
        ("blockIdx.x != 2", THREADS),
        ("i < 64", BLOCKS * THREADS - 64),
    ],
)
def test_warps_that_have_exited_are_out_of_the_way(ran, leaving, left):
    """Their lanes take no part in what the others run, which has no mask."""
    parting = f"if ({leaving}) return;"
    assert (run(parting) != poisoned(1, np.int32)).sum() == left
    ((lanes, masked),) = runs_of_the_tail(ran, parting)
    assert (lanes, masked) == (left, False)


def test_blocks_of_causal_attention_need_no_mask_when_others_have_ended(ran):
    """Blocks of queries have different numbers of key tiles."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 512, 64)).astype(np.float16)
    attention(q, k, v, causal=True)
    assert len({lanes for _, lanes, _ in ran}) >= 4
    assert not any(masked for *_, masked in ran)
