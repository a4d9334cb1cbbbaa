"""Kernels compiled and calls planned ahead."""

from unittest import mock

import numpy as np
import pytest

import cupyflash
from cupyflash import _launch, _plan
from tests.forgetting import nothing_remembered
from tests.test_cupy_path import recorded_gpu
from tests.test_plan import array, forward


@pytest.fixture
def gpu():
    with recorded_gpu() as recorder:
        yield recorder


@pytest.mark.parametrize("options", [{}, {"split_size": 128}, {"return_max": True, "return_lse": True}])
def test_warmup_leaves_nothing_to_compile(gpu, options):
    arguments = forward(q=array(2, 4, 5, 64, offset=2), **options)
    cupyflash.warmup(**arguments, backward=True)
    compiled, plans = len(gpu.compiled), len(_plan.plans.values)
    assert gpu.launches == [] and compiled and plans == 2
    cupyflash.attention(**arguments)
    options = {name: x for name, x in arguments.items() if name not in ("return_lse", "return_max")}
    out, lse = array(2, 4, 5, 32), array(2, 4, 5, dtype=np.float32)
    cupyflash.attention_backward(dout=array(2, 4, 5, 32), out=out, lse=lse, **options)
    assert gpu.launches and len(gpu.compiled) == compiled and len(_plan.plans.values) == plans


def test_warmup_of_the_simulator():
    x = np.ones((3, 4, 24), np.float16)
    with nothing_remembered(), mock.patch.object(_launch.Simulator, "launch", side_effect=AssertionError):
        cupyflash.warmup(x, x, x)
        assert len(_launch.modules.values) == 1
        cupyflash.warmup(x, x, x, backward=True, return_lse=True)
        assert len(_launch.modules.values) == 4
    with pytest.raises(TypeError, match="backward: expected True or False, not 1"):
        cupyflash.warmup(x, x, x, backward=1)
    with pytest.raises(ValueError, match=r"^score_mod: "):
        cupyflash.warmup(x, x, x, score_mod="sscore")
