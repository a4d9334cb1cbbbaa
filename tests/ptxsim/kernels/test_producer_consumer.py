"""Matrix times vector, its tiles streamed by one warp for others: `producer_consumer.cu`."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .conftest import Launcher

ROWS, COLUMNS, THREADS = 64, 16, 96
ARCHITECTURES = {"named_barriers": "sm_75", "tokens": "sm_80", "parity": "sm_90", "asynchronous_copies": "sm_90"}


def operands(tiles, blocks=2):
    rng = np.random.default_rng(tiles)
    matrix = rng.normal(size=(blocks * ROWS, tiles * COLUMNS)).astype(np.float32)
    x = rng.normal(size=tiles * COLUMNS).astype(np.float32)
    return matrix, x, ptxsim.empty(blocks * ROWS, np.float32)


def run(launch, kernel, tiles):
    matrix, x, y = operands(tiles)
    arch = ARCHITECTURES[kernel]
    launch("producer_consumer", kernel, 2, THREADS, matrix, x, y, np.int32(matrix.shape[1]), arch=arch)
    return y, matrix, x


def is_right(y, matrix, x):
    """Within the bound of a sum of so many products, one after another (Higham 2002, equation 3.7)."""
    bound = (x.size + 1) * 2.0**-24 * (abs(matrix).astype(float) @ abs(x))
    return (abs(y - matrix.astype(float) @ x) <= bound).all()


@pytest.mark.parametrize("tiles", [1, 8])
@pytest.mark.parametrize("kernel", ARCHITECTURES)
def test_the_product_is_right(launch, kernel, tiles):
    assert is_right(*run(launch, kernel, tiles))


# kernel, what is there, what is there instead, and what the sanitizer finds, under every schedule
FAULTS = {
    "a named barrier is not waited for": (
        "named_barriers",
        "consumer_wait(int stage, int) { sync(filled(stage)); }",
        "consumer_wait(int stage, int) {}",
        "shared race",
    ),
    "no arrival at a named barrier": (
        "named_barriers",
        "producer_commit(int stage) { arrive(filled(stage)); }",
        "producer_commit(int stage) {}",
        "deadlock",
    ),
    "a free stage is not waited for, by token": (
        "tokens",
        "{ arrive_and_wait(&ready[stage]); }",
        "{ (void)__mbarrier_arrive(&ready[stage]); }",
        "mbarrier arrival",
    ),
    "a filled stage is not waited for, by token": (
        "tokens",
        "{ arrive_and_wait(&filled[stage]); }",
        "{ (void)__mbarrier_arrive(&filled[stage]); }",
        "uninitialised shared memory",
    ),
    "no arrival, by token": ("tokens", "{ (void)__mbarrier_arrive(&filled[stage]); }", "{}", "deadlock"),
    "a free stage is not waited for": ("parity", "wait(&ready[stage], round + 1 & 1);", "", "mbarrier arrival"),
    "a filled stage is not waited for": ("parity", "wait(&filled[stage], round & 1);", "", "shared race"),
    "no arrival of consumers": ("parity", "if (threadIdx.x % 32 == 0) arrive(&ready[stage]);", "", "deadlock"),
    "no arrival of the producer": ("parity", "if (threadIdx.x % 32 == 0) arrive(&filled[stage]);", "", "deadlock"),
    "a warp's arrival before all of it has read": (
        "parity",
        "__syncwarp();  // of a warp one thread arrives for all",
        "",
        "shared race",
    ),
    "an arrival before all of the warp has written": (
        "parity",
        "__syncwarp();  // one producer arrives for all",
        "",
        "shared race",
    ),
    "too many arrivals": (
        "parity",
        "if (threadIdx.x % 32 == 0) arrive(&filled[stage]);",
        "arrive(&filled[stage]);",
        "mbarrier arrival",
    ),
    "one barrier is not initialised": ("parity", "init(&filled[stage], producers);", "", "no mbarrier"),
    "copies are not waited for": (
        "asynchronous_copies",
        "wait(&filled[stage], round & 1);",
        "",
        "missing cp.async wait",
    ),
    "an arrival that does not wait for copies": (
        "asynchronous_copies",
        "{ arrive_with_copies(&filled[stage]); }",
        "{ arrive(&filled[stage]); }",
        "missing cp.async wait",
    ),
    "copies add to what they should take away": ("asynchronous_copies", ".noinc", "", "deadlock"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_shows_under_every_schedule(planted, name):
    kernel, before, after, kind = FAULTS[name]
    for settings in ({"schedule": "lockstep"}, {"schedule": "random", "seed": 3}):
        launch = planted(before, after, **settings)
        run(launch, kernel, 8)
        assert kind in launch.kinds, settings


def test_barriers_used_before_all_know_of_them(planted):
    for settings, kind in (({}, "shared race"), ({"schedule": "random", "seed": 3}, "no mbarrier")):
        launch = planted("__syncthreads();  // of the channel", "", **settings)
        run(launch, "parity", 1)
        assert launch.kinds == {kind}


def test_a_deadlock_names_the_barrier_and_what_it_lacks():
    launch = Launcher(("if (threadIdx.x % 32 == 0) arrive(&ready[stage]);", ""))
    with pytest.raises(ptxsim.Deadlock) as error:
        run(launch, "parity", 8)
    line = next(n for n, t in enumerate(launch.source("producer_consumer").splitlines(), 1) if "mbarrier.init" in t)
    assert f"64 threads waiting at the mbarrier of kernel.cu:{line} called at kernel.cu:" in str(error.value)
    assert "which lacks 2 of 2 arrivals" in str(error.value)
