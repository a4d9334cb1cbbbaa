"""settings(): scoped choices, restored on leaving, private to each thread; progress is told and may interrupt."""

import dataclasses
import json
import re
import threading

import numpy as np
import pytest

from cupyflash import ptxsim
from cupyflash.ptxsim.settings import ARCHITECTURES, MMA_MODELS, SCHEDULES, Settings

from .launching import OPTIONS, launch, poisoned

ARCH = 'extern "C" __global__ void arch(int* out) { out[threadIdx.x] = __CUDA_ARCH__; }'


def current_arch():
    """What a module built under the settings in force is compiled for."""
    out = poisoned(1, np.int32)
    ptxsim.RawModule(code=ARCH, options=OPTIONS).get_function("arch")((1,), (1,), (out,))
    return int(out[0])


def test_settings_nest_and_are_restored():
    assert current_arch() == 800
    with ptxsim.settings(arch="sm_90"):
        assert current_arch() == 900
        with ptxsim.settings(schedule="random", seed=3):
            assert current_arch() == 900
            with ptxsim.settings(arch="sm_75"):
                assert current_arch() == 750
        assert current_arch() == 900
    assert current_arch() == 800


def test_settings_are_restored_after_an_error():
    with pytest.raises(KeyError), ptxsim.settings(arch="sm_90"):
        raise KeyError("stop")
    assert current_arch() == 800


def test_settings_do_not_leak_into_other_threads():
    seen = []
    with ptxsim.settings(arch="sm_90"):
        thread = threading.Thread(target=lambda: seen.append(current_arch()))
        thread.start()
        thread.join(60)
    assert seen == [800]


def test_every_choice_is_documented_where_it_is_made():
    names = [field.name for field in dataclasses.fields(Settings)]
    documented = re.findall(r"^    (\w+) : (.*)$", ptxsim.settings.__doc__, re.MULTILINE)
    assert [name for name, _ in documented] == names
    for name, kind in documented:
        default = getattr(Settings(), name)
        assert kind.endswith("optional") if default is None else kind.endswith(f"default {json.dumps(default)}")
    for value in (*ARCHITECTURES, *MMA_MODELS, *SCHEDULES):
        assert f'"{value}"' in ptxsim.settings.__doc__


def test_choices_that_do_not_exist_are_refused_with_those_that_do():
    with pytest.raises(TypeError, match="settings: no choice archh; there are arch, mma, schedule"):
        with ptxsim.settings(archh=1):
            pass


FILL = """
extern "C" __global__ void fill(int* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x; }"""


def test_progress_counts_blocks_up_to_all_of_them():
    calls = []
    out = poisoned((3000, 32), np.int32)
    launch(FILL, 3000, 32, out, progress=lambda done, total: calls.append((done, total)))
    assert calls and calls[-1] == (3000, 3000)
    assert all(total == 3000 for _, total in calls)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    np.testing.assert_array_equal(out, np.repeat(np.arange(3000), 32).reshape(3000, 32))


def test_an_exception_in_progress_reaches_the_caller():
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(FILL, 100, 32, poisoned((100, 32), np.int32), progress=stop)
    out = poisoned((100, 32), np.int32)
    launch(FILL, 100, 32, out)
    assert (out[:, 0] == np.arange(100)).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("chunk_lanes", "workers") for value in (True, np.True_, 0, -1, 1.0, "1")),
        *((name, value) for name in ("ulp_noise", "seed") for value in (True, -1, np.array([1]), None)),
        *((name, value) for name in ("arch", "mma", "schedule") for value in ("", None, ["exact"], 80)),
        ("arch", np.array(["sm_80"])),
        ("arch", np.array(["sm_80", "sm_90"])),
        ("mma", np.array(["exact"])),
        ("progress", "x"),
        ("progress", 0),
    ],
)
def test_what_is_no_setting_is_refused_by_its_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}: .*, must be "), ptxsim.settings(**{name: value}):
        pass


@pytest.mark.parametrize("name", ["ulp_noise", "seed", "chunk_lanes", "workers"])
def test_integers_of_numpy_are_settings(name):
    with ptxsim.settings(**{name: np.uint8(1)}) as chosen:
        assert type(getattr(chosen, name)) is int and getattr(chosen, name) == 1
