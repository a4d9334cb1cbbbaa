"""Critical sections: `lock.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

THREADS = 34  # of two blocks


def zero():
    return np.zeros(1, np.int32)


def put(launch, kernel):
    items, count = ptxsim.empty(THREADS, np.int32), zero()
    launch("lock", kernel, 2, THREADS // 2, zero(), items, count)
    return items, count


@pytest.mark.parametrize("kernel", ["of_threads", "acquire_then_release"])
def test_locks_of_threads(launch, kernel):
    items, count = put(launch, kernel)
    assert count[0] == THREADS
    np.testing.assert_array_equal(np.sort(items), np.arange(THREADS))


def of_blocks(launch):
    sums = np.zeros(70, np.int32)
    launch("lock", "of_blocks", 4, 64, zero(), sums, np.int32(70))
    return sums


def test_locks_of_blocks(launch):
    np.testing.assert_array_equal(of_blocks(launch), 0 + 1 + 2 + 3 + 4 * np.arange(70))


def test_tickets(launch):
    items, count, drawn = ptxsim.empty(THREADS, np.int32), zero(), ptxsim.empty(THREADS, np.uint32)
    launch("lock", "by_tickets", 2, THREADS // 2, zero(), zero(), items, count, drawn)
    assert count[0] == THREADS
    np.testing.assert_array_equal(items[drawn], np.arange(THREADS))


def test_a_linked_list(launch):
    head, links = np.full(1, -1, np.int32), ptxsim.empty(THREADS, np.int32)
    launch("lock", "linked_list", 2, THREADS // 2, head, links)
    seen, at = [], head[0]
    while at >= 0:
        seen.append(at)
        at = links[at]
    assert sorted(seen) == list(range(THREADS))


def test_a_missing_fence_is_a_race(planted):
    launch = planted("      __threadfence();  // before the lock is given back\n", "")
    put(launch, "of_threads")
    assert "global race" in launch.kinds


def test_a_lock_that_nobody_takes_is_a_race(planted):
    launch = planted("if (atomicCAS(lock, 0, 1) == 0)", "if (atomicCAS(lock, 0, 0) == 0)")
    put(launch, "of_threads")
    assert "global race" in launch.kinds


def test_threads_that_do_not_wait_for_their_block_race(planted):
    launch = planted("  __syncthreads();  // the block has the lock\n", "")
    of_blocks(launch)
    assert "global race" in launch.kinds


def test_a_lock_that_is_not_given_back_hangs(planted):
    launch = planted("  if (threadIdx.x == 0) atomicExch(lock, 0);\n", "")
    of_blocks(launch)
    assert launch.kinds == {"livelock", "deadlock"}  # who spins, and who waits for that thread
