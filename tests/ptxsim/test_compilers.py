"""The same kernels by two versions of NVRTC, optimised and for debugging (-G), where every call stays a call."""

import functools
from pathlib import Path

import numpy as np
import pytest

from cupyflash import ptxsim

from . import launching
from .launching import OPTIONS, SCHEDULES, poisoned, schedule_name

FOLDER = Path(__file__).parent / "ptx"
DEBUG = (*OPTIONS, "-G")


@functools.cache
def module(made):
    """calls.cu by the installed NVRTC with these options, or a PTX file made of it."""
    if isinstance(made, str):
        return ptxsim.RawModule(path=str(FOLDER / made))
    return launching.module((FOLDER / "calls.cu").read_text(), options=made)


FILES = ["calls_nvrtc_12.ptx", "calls_nvrtc_12_debug.ptx"]
each_compiler = pytest.mark.parametrize("made", [OPTIONS, DEBUG, *FILES], ids=["installed", "installed-debug", *FILES])
every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def launch(made, name, block, *args, **settings):
    """Run a kernel on two blocks or, of one thread, on one; the sanitizer finds nothing."""
    with ptxsim.settings(**settings), ptxsim.sanitize() as report:
        module(made).get_function(name)((1 if block == 1 else 2,), (block,), args)
    assert not report.findings, report


def test_what_made_the_files():
    for name in FILES:
        head = (FOLDER / name).read_text().split(".version")[0]
        assert "release 12.9" in head and "-G" not in head


@each_compiler
@every_schedule
def test_recursion_with_structures(made, settings):
    def descend(value, path, tag, depth, above):
        own = [a + depth * i for i, a in enumerate(above)]
        path = list(path)
        path[depth % 3] += own[depth & 3]
        if depth == 0:
            return value, path, tag
        below, found, tags = descend(value, path, tag, depth - 1, own)
        return below + value * own[(found[1] + depth) & 3], found, tags + tag

    x = np.random.default_rng(5).integers(-99, 99, 64).astype(np.float64)
    out, paths = poisoned(64, np.float64), poisoned((64, 4), np.int32)
    with ptxsim.settings(**settings), ptxsim.sanitize() as report:
        module(made).get_function("recursion")((1,), (64,), (x, out, paths))
    assert not report.findings, report
    for t in range(64):
        value, path, tag = descend(x[t], [1, 2, 3], 1, t % 4, [t, 2, 3, 4])
        assert (out[t], paths[t].tolist()) == (value, [*path, tag])


@each_compiler
@every_schedule
def test_pointers_and_virtual_functions(made, settings):
    x, out = np.random.default_rng(6).normal(size=50).astype(np.float32), poisoned(50, np.float32)
    launch(made, "pointers", 50, x, out, **settings)
    t = np.arange(50)
    area = x * x
    area = np.where(t % 3, 3 * area, area)
    area = np.where(t % 3 == 2, 5 * area, area)
    np.testing.assert_array_equal(out, np.where(t & 1, area + 1, 2 * area))


@each_compiler
@every_schedule
def test_functions_in_which_threads_meet(made, settings):
    x = np.random.default_rng(7).normal(size=(2, 128)).astype(np.float32)
    out, votes = poisoned((2, 128), np.float32), poisoned((2, 128), np.uint32)
    launch(made, "reduction", 128, x, out, votes, **settings)
    highest = x.max(1, keepdims=True)
    np.testing.assert_array_equal(out, x - highest)
    words = np.packbits(x == highest, axis=1, bitorder="little").view(np.uint32)
    np.testing.assert_array_equal(votes, np.repeat(words, 32, axis=1))


@each_compiler
def test_printing(made, capfd):
    out = poisoned(1, np.int32)
    launch(made, "prints", 1, out, np.int32(3))
    assert out[0] == 4 + 5 + 3
    assert capfd.readouterr().out.split("\n") == [*(f"{node} of 3" for node in (1, 2, 4, 5, 3)), ""]


@each_compiler
def test_a_loop_without_an_end(made):
    """Also where each turn stores the same to local memory again."""
    with pytest.raises(ptxsim.Deadlock, match="repeating a loop for ever"):
        module(made).get_function("endless")((1,), (1,), (np.zeros(1, np.int32),))
