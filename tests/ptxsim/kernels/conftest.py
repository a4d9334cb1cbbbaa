"""How a kernel of this folder is launched: rightly in every way, or with a fault, which must show."""

import contextlib
import functools
from pathlib import Path

import pytest

from cupyflash import ptxsim

WAYS = [
    {"schedule": "lockstep"},
    {"schedule": "random", "seed": 1},
    {"schedule": "lockstep", "sanitized": True},
    {"schedule": "random", "seed": 2, "sanitized": True},
]


def name_of(way):
    return way["schedule"] + ("-sanitized" if "sanitized" in way else "")


@functools.cache
def module(code, arch, **choices):
    """Compiled once for all tests of a process."""
    with ptxsim.settings(arch=arch):
        return ptxsim.RawModule(code=code, **choices)


class Launcher:
    """Called as `launch("reduction", "interleaved", grid, block, *args)`: a kernel of `reduction.cu`.

    Whole numbers stand for grids and blocks of one dimension; `name<...>` is an instance of a template, which is
    compiled for itself. `kinds`: what the sanitizer found in the last launch.
    """

    def __init__(self, fault=None, sanitized=False, options=(), **settings):
        self.fault, self.options, self.settings = fault, options, settings
        self.kinds = set()
        self.watched = ptxsim.sanitize if sanitized else contextlib.nullcontext

    def __call__(self, family, kernel, grid, block, *args, shared_mem=0, options=(), arch="sm_80", cooperative=False):
        grid, block = ((n,) if isinstance(n, int) else tuple(n) for n in (grid, block))
        with ptxsim.settings(arch=arch, **self.settings), self.watched() as report:
            expressions = (kernel,) if "<" in kernel else ()
            choices = {"name_expressions": expressions, "enable_cooperative_groups": cooperative}
            function = module(self.source(family), arch, options=self.options + options, **choices).get_function(kernel)
            if shared_mem > 48 * 1024:
                function.max_dynamic_shared_size_bytes = shared_mem
            function(grid, block, args, shared_mem=shared_mem)
        self.kinds = {finding.kind for finding in report.findings} if report else set()
        assert self.fault or not self.kinds, str(report)

    def source(self, family):
        code = (Path(__file__).parent / f"{family}.cu").read_text()
        if self.fault is None:
            return code
        before, after = self.fault
        assert code.count(before) == 1, f"{family}.cu has {code.count(before)} of {before!r}"
        return code.replace(before, after)


@pytest.fixture(params=WAYS, ids=name_of)
def launch(request):
    """A launcher under one schedule, plain or sanitized; the sanitizer must find nothing."""
    return Launcher(**request.param)


@pytest.fixture
def launcher():
    """A launcher in lockstep, neither sanitized nor faulty: for counters."""
    return Launcher()


@pytest.fixture
def planted():
    """`planted(before, after)`: a sanitized launcher of a source with that text replaced; `kinds`: what it found."""
    return lambda before, after, **settings: Launcher((before, after), sanitized=True, **settings)
