"""settings(workers=n): launches spread over processes end as those of one, down to output and exceptions."""

import signal
import sys

import numpy as np
import pytest

from cupyflash import attention, ptxsim
from cupyflash.ptxsim import workers

from .launching import launch, module, poisoned

pytestmark = pytest.mark.skipif(not workers.AVAILABLE, reason="worker processes need Linux")

BLOCKS, THREADS = 23, 64
MANY_CHUNKS = {"chunk_lanes": 2 * THREADS}  # 12 chunks

SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float* both) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = 2 * x[i];
    both[i] = 3 * both[i];
}"""


@pytest.mark.parametrize("count", [2, 3, 40])
@pytest.mark.parametrize("schedule", ["lockstep", "random"])
def test_processes_write_what_one_writes(count, schedule):
    x = np.arange(BLOCKS * THREADS, dtype=np.float32)
    y, both = poisoned(x.shape, x.dtype), x + 1
    launch(SCALE, BLOCKS, THREADS, x, y, both, workers=count, schedule=schedule, **MANY_CHUNKS)
    np.testing.assert_array_equal(y, 2 * x)
    np.testing.assert_array_equal(both, 3 * (x + 1))


def test_attention_is_the_same_to_the_bit():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((3, 200, 32)).astype(np.float16) for _ in range(3))
    results = []
    for count in (1, 2):
        with ptxsim.settings(workers=count, chunk_lanes=256):
            results.append(attention(q, k, v, return_lse=True))
    for one, two in zip(*results, strict=True):
        assert one.tobytes() == two.tobytes()


def test_the_work_is_in_other_processes(monkeypatch):
    forks = []
    monkeypatch.setattr(workers.os, "fork", lambda fork=workers.os.fork: forks.append(fork()) or forks[-1])
    x = np.ones(BLOCKS * THREADS, np.float32)
    launch(SCALE, BLOCKS, THREADS, x, x.copy(), x.copy(), workers=3, **MANY_CHUNKS)
    assert len(forks) == 2
    with ptxsim.profile():
        launch(SCALE, BLOCKS, THREADS, x, x.copy(), x.copy(), workers=3, **MANY_CHUNKS)
    assert len(forks) == 2


def test_device_variables_are_taken_over():
    source = """
    extern "C" __device__ int seen[23];
    extern "C" __global__ void mark() { if (threadIdx.x == 0) seen[blockIdx.x] = blockIdx.x + 1; }"""
    launch(source, BLOCKS, THREADS, workers=2, **MANY_CHUNKS)
    np.testing.assert_array_equal(
        module(source, "sm_80").get_global("seen").view(np.int32)[:BLOCKS], np.arange(1, BLOCKS + 1)
    )


def test_output_comes_in_order(capsys):
    source = """
    #include <cstdio>
    extern "C" __global__ void say() { if (threadIdx.x == 0) printf("block %d\\n", blockIdx.x); }"""
    source = source.replace("#include <cstdio>", 'extern "C" __device__ int printf(const char*, ...);')
    launch(source, BLOCKS, THREADS, workers=3, **MANY_CHUNKS)
    assert capsys.readouterr().out == "".join(f"block {n}\n" for n in range(BLOCKS))


@pytest.mark.parametrize("bad", [(3, 20), (20,), (12, 17)])
def test_the_lowest_block_that_fails_is_told(bad):
    """And memory is as it was when one process stops there."""
    source = """
    extern "C" __global__ void fail(const int* bad, int* out, int count) {
        bool fails = false;
        for (int i = 0; i < count; i++) fails |= bad[i] == blockIdx.x;
        out[blockIdx.x * blockDim.x + threadIdx.x + (fails ? 1 << 20 : 0)] = blockIdx.x;
    }"""
    bad, told, outs = np.array(bad, np.int32), [], []
    for count in (1, 3):
        out = np.full(BLOCKS * THREADS, -1, np.int32)
        with pytest.raises(ptxsim.MemoryFault, match=rf"block \({bad[0]}, 0, 0\)") as caught:
            launch(source, BLOCKS, THREADS, bad, out, np.int32(bad.size), workers=count, **MANY_CHUNKS)
        told.append(str(caught.value).split("; kernel ")[1])  # after the address
        outs.append(out)
    assert told[0] == told[1]
    np.testing.assert_array_equal(*outs)


def test_progress_counts_up_to_all_blocks_and_may_interrupt():
    x, calls = np.ones(BLOCKS * THREADS, np.float32), []
    arguments = (SCALE, BLOCKS, THREADS, x, x.copy(), x.copy())
    launch(*arguments, workers=3, progress=lambda done, total: calls.append((done, total)), **MANY_CHUNKS)
    assert calls == sorted(calls) and calls[-1] == (BLOCKS, BLOCKS)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(*arguments, workers=3, progress=stop, **MANY_CHUNKS)
    with pytest.raises(ChildProcessError):  # none is left
        workers.os.waitpid(-1, workers.os.WNOHANG)


def test_a_caller_that_ignores_the_end_of_children():
    x, both = np.arange(BLOCKS * THREADS, dtype=np.float32), np.ones(BLOCKS * THREADS, np.float32)
    y = poisoned(x.shape, x.dtype)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        launch(SCALE, BLOCKS, THREADS, x, y, both, workers=3, **MANY_CHUNKS)
    finally:
        signal.signal(signal.SIGCHLD, before)
    np.testing.assert_array_equal(y, 2 * x)


TOGETHER = {
    "atomicAdd(counter, 1)": True,
    "*(volatile int*)counter = 1": True,
    "__threadfence()": True,
    "__threadfence_block()": False,
    "atomicAdd(&shared, 1)": False,
    "*(volatile int*)&shared = 1": False,
    "*counter = 1": False,
}


@pytest.mark.parametrize("statement", TOGETHER)
def test_kernels_whose_blocks_may_work_together(statement):
    source = f"""extern "C" __global__ void k(int* counter) {{
        __shared__ int shared; shared = 0; {statement}; __syncthreads(); if (shared) counter[1] = 0; }}"""
    with ptxsim.settings():
        program = module(source)._load("sm_80").program("k")
    assert program.communicates == TOGETHER[statement]


def test_atomics_count_right():
    source = 'extern "C" __global__ void count(int* counter) { atomicAdd(counter, 1); }'
    counter = np.zeros(1, np.int32)
    launch(source, BLOCKS, THREADS, counter, workers=3, **MANY_CHUNKS)
    assert counter[0] == BLOCKS * THREADS


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_bad_counts_are_refused(count):
    with pytest.raises(ValueError, match="workers"), ptxsim.settings(workers=count):
        pass


def test_where_processes_cannot_be_forked(monkeypatch):
    monkeypatch.setattr(sys.modules["cupyflash.ptxsim.settings"], "AVAILABLE", False)
    with ptxsim.settings(workers=1), pytest.raises(ValueError, match="platform"), ptxsim.settings(workers=2):
        pass
