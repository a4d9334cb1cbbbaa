"""The pytest plugin, in processes of their own: projects that launch kernels through CuPy, without a GPU."""

import argparse
import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import cupy
import pytest

import experiments
from cupyflash.ptxsim.sanitizer import KINDS, Finding
from cupyflash.ptxsim.settings import ARCHITECTURES, current
from cupyflash.ptxsim.testing import plugin, replacement

EXAMPLE = Path(experiments.__file__).parent / "examples" / "raw_kernels"
ROOT = EXAMPLE.parents[2]
PLUGIN = "-p", "cupyflash.ptxsim.testing"


def python(folder, *arguments, status=0):
    """What a process says that imports this cupyflash, with no plugin but those that it is told of."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in [name for name in environment if name.startswith(("PYTEST_XDIST", "PYTEST_CURRENT", "PYTEST_ADDOPTS"))]:
        del environment[name]
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    said = done.stdout + done.stderr
    assert done.returncode == status, said
    return said


def run_pytest(folder, *arguments, status=0):
    return python(folder, "-m", "pytest", "-p", "no:cacheprovider", *arguments, status=status)


def project(folder, options="", **files):
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = {options}\n")
    return folder


def test_the_example_does_what_its_page_says():
    page = (EXAMPLE / "README.md").read_text()
    examples = re.findall(r"^    \$ python -m pytest (.*)\n((?:    .*\n)+)", page, re.MULTILINE)
    assert len(examples) == page.count("$ python") == 4
    for command, shown in examples:
        said = run_pytest(EXAMPLE, *shlex.split(command), status=int("failed" in shown))
        shown = re.sub("^    ", "", shown, flags=re.MULTILINE) + "...\n"
        assert doctest.OutputChecker().check_output(shown, said, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE), said
    for link in re.findall(r"\]\(([^)#]+)\)", page):
        assert (EXAMPLE / link).exists()


KERNELS = '''
import cupy as cp
import cupyx

half = cp.RawKernel(r"""
extern "C" __global__ void half(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] / 2; }
""", "half")
arch = cp.RawKernel(r"""
extern "C" __global__ void arch(int* out) { *out = __CUDA_ARCH__; }
""", "arch")
unused = cp.RawKernel("", "unused")
'''
CONFTEST = """
pytest_plugins = ["cupyflash.ptxsim.testing"]
"""
TESTS = """
import numpy as np
import pytest

def launch(x):
    import kernels
    y = kernels.cp.zeros(32, kernels.cp.float32)
    kernels.half((1,), (32,), (x, y))
    return y

def test_right():
    import kernels
    assert (launch(kernels.cp.ones(32, kernels.cp.float32)) == 0.5).all()

def test_uninitialised():
    import kernels
    launch(kernels.cp.empty(32, kernels.cp.float32))

def test_uninitialised_and_wrong():
    import kernels
    assert launch(kernels.cp.empty(32, kernels.cp.float32))[0] == 0

@pytest.fixture
def prepared():
    import kernels
    return launch(kernels.cp.empty(32, kernels.cp.float32))

def test_uninitialised_in_a_fixture(prepared):
    pass

def test_out_of_bounds():
    import kernels
    launch(kernels.cp.ones(31, kernels.cp.float32))

@pytest.mark.ptxsim(sanitize=False)
def test_not_watched():
    import kernels
    launch(kernels.cp.empty(32, kernels.cp.float32))

@pytest.mark.ptxsim(allow=["uninitialised global memory"])
def test_allowed():
    test_not_watched()

@pytest.mark.ptxsim(allow=["uninitialised global memory"])
def test_out_of_bounds_allowing_something_else():
    test_out_of_bounds()

@pytest.mark.ptxsim(arch="sm_86")
class TestArchitectures:
    @pytest.mark.parametrize("unused", [0])
    def test_of_the_class(self, unused):
        assert self.arch() == 860

    @pytest.mark.ptxsim(arch="sm_75")
    def test_its_own(self):
        assert self.arch() == 750

    def arch(self):
        import kernels
        out = kernels.cp.zeros((), int)
        kernels.arch((1,), (1,), (out,))
        return int(out)

def test_architecture_of_the_run(simulated_cupy):
    import kernels
    assert TestArchitectures().arch() == 900 and kernels.cp is simulated_cupy

@pytest.mark.ptxsim(archh="sm_75")
def test_misspelt():
    pass

@pytest.mark.ptxsim(allow=["uninitialised"])
def test_allowing_no_kind():
    pass

@pytest.mark.ptxsim(arch="sm_91")
def test_no_architecture():
    pass

@pytest.mark.ptxsim(sanitize=False)
def test_refused():
    test_out_of_bounds()

def test_parts_that_cupy_imports_late():
    import kernels
    assert kernels.cp.random.default_rng(0).random(3).shape == (3,)
    for module, name in (kernels.cp.random, "Generator"), (kernels.cp.cuda, "cublas"), (kernels.cupyx, "cusparse"):
        with pytest.raises(AttributeError, match=rf"{module.__name__}\\.{name}: not simulated$"):
            getattr(module, name)

def test_other_parts_of_cupy_are_empty():
    import cupyx.scipy.sparse as sparse
    from cupy._core import core
    from cupyx import jit
    for module, name in (sparse, "csr_matrix"), (core, "ndarray"), (jit, "rawkernel"):
        with pytest.raises(AttributeError, match=rf"{module.__name__}\\.{name}: not simulated"):
            getattr(module, name)
    with pytest.raises(ImportError, match="cupy.fuse: not simulated"):
        from cupy import fuse
    with pytest.raises(ImportError, match="cupyx.profiler.benchmark: not simulated"):
        from cupyx.profiler import benchmark
    with pytest.raises(ModuleNotFoundError, match="cupy.nothing"):
        import cupy.nothing
    from cupy import cuda, testing
    import cupy.cuda.runtime
    assert cupy.cuda is cuda and cuda.is_available()
"""


def test_tests_of_a_project(tmp_path):
    """The plugin comes from its conftest.py; each test has the outcome that its name says, and nothing else."""
    folder = project(tmp_path, kernels=KERNELS, conftest=CONFTEST, test_kernels=TESTS)
    said = run_pytest(folder, "--ptxsim=auto", "--ptxsim-sanitize", "--ptxsim-arch=sm_90", "-rA", status=1)
    outcomes = dict(line.split(" ")[1::-1] for line in said.splitlines() if re.match("(PASSED|FAILED|ERROR) ", line))
    assert {name.split("::")[-1]: outcome for name, outcome in outcomes.items()} == {
        "test_right": "PASSED",
        "test_uninitialised": "FAILED",
        "test_uninitialised_and_wrong": "FAILED",
        "test_uninitialised_in_a_fixture": "ERROR",
        "test_out_of_bounds": "FAILED",
        "test_not_watched": "PASSED",
        "test_allowed": "PASSED",
        "test_out_of_bounds_allowing_something_else": "FAILED",
        "test_of_the_class[0]": "PASSED",
        "test_its_own": "PASSED",
        "test_architecture_of_the_run": "PASSED",
        "test_misspelt": "ERROR",
        "test_allowing_no_kind": "ERROR",
        "test_no_architecture": "ERROR",
        "test_refused": "FAILED",
        "test_parts_that_cupy_imports_late": "PASSED",
        "test_other_parts_of_cupy_are_empty": "PASSED",
    }
    details, summary = said.split("short test summary info")
    assert details.count("uninitialised global memory: thread (0, 0, 0)") == 3
    assert "Captured sanitizer call" in said or "- sanitizer call -" in said
    assert "out of bounds: thread (31, 0, 0)" in said
    assert f"no choice archh; there are sanitize, allow, {', '.join(vars(current()))}\n" in said
    assert f"no kind 'uninitialised'; there are {', '.join(KINDS)}\n" in said and "arch: 'sm_91', must be" in said
    assert said.count("_ ERROR at ") == 4 and "ptxsim/kernel.py" not in said  # one for each, without the way to it
    for name, reason in (
        ("test_uninitialised", "Failed: uninitialised global"),
        ("test_uninitialised_and_wrong", "uninitialised global"),
        ("test_refused", "cupyflash.ptxsim.errors.MemoryFault"),
    ):
        assert re.search(rf"^FAILED \S+::{name} - {reason}", summary, re.MULTILINE)
    assert re.search(r"^kernels: simulator \(sm_90, lockstep schedule, sanitizer on\)$", said, re.MULTILINE)
    assert re.search(r"^arch    3 launches\nhalf    9 launches\nunused  never launched\n", said, re.MULTILINE)


UNCHANGED = """
def test_cupy(simulated_cupy):
    import cupy
    assert cupy.ndarray.__module__ == "cupy" and hasattr(cupy, "fuse") and simulated_cupy is not cupy
    x = simulated_cupy.zeros(1)
    simulated_cupy.RawKernel('extern "C" __global__ void one(double* x) { *x = 1; }', "one")((1,), (1,), (x,))
    assert x == 1

def test_replacing_and_undoing(simulated_cupy):
    import cupy as installed
    from cupyflash.ptxsim.testing.replacement import replace_cupy
    undo = replace_cupy()
    import cupy, cupyx, sys
    assert cupy is simulated_cupy is not installed and sys.modules["cupy.cuda"] is cupy.cuda
    assert not hasattr(cupyx, "errstate")
    undo()
    import cupy, cupyx
    assert cupy is installed and sys.modules["cupy.cuda"] is cupy.cuda and hasattr(cupyx, "errstate")
    from cupy import _core
"""


def test_cupy_stays_as_it_is(tmp_path):
    """Without the plugin's choice, and with its other options; the fixture has kernels for the simulator alone."""
    folder = project(tmp_path, test_cupy=UNCHANGED)
    said = run_pytest(folder, *PLUGIN, "--ptxsim-schedule=random", "--ptxsim-seed=5")
    assert "\nkernels: CuPy as it is installed\n" in said and "one  1 launch\n" in said


def test_options_that_cannot_be(tmp_path):
    for option, choices in ("--ptxsim-allow=uninitialised", KINDS), ("--ptxsim-arch=sm_91", ARCHITECTURES):
        said = run_pytest(project(tmp_path), *PLUGIN, option, status=4)
        assert f"argument {option.split('=')[0]}: invalid choice" in said and all(choice in said for choice in choices)


def test_kinds_of_findings_are_documented():
    page = (EXAMPLE.parents[1] / "testing_kernels.md").read_text()
    section = page.split("## What the sanitizer finds\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert ", ".join(listed) == ", ".join(f"`{kind}`" for kind in KINDS)
    assert set(re.findall('``"(.+?)"``', " ".join(Finding.__doc__.split()))) == set(KINDS)


def test_cupy_in_use_is_not_replaced(tmp_path):
    files = {"conftest": "import kernels\n" + CONFTEST, "kernels": KERNELS, "test_nothing": "def test_nothing(): pass"}
    said = run_pytest(project(tmp_path, **files), "--ptxsim=on", status=4)
    assert "CuPy is in use already, by kernels; load the plugin earlier: -p cupyflash.ptxsim.testing" in said


def test_workers(tmp_path):
    """Those of pytest-xdist replace CuPy before conftest.py imports it, too, and tell what they launched."""
    test = """
import kernels, pytest

@pytest.mark.parametrize("n", range(3))
def test_half(n):
    x, y = kernels.cp.ones(32, "f4"), kernels.cp.zeros(32, "f4")
    kernels.half((1,), (32,), (x, y))
    assert (y == 0.5).all()
"""
    options = "-p cupyflash.ptxsim.testing --ptxsim=auto"
    folder = project(tmp_path, options, conftest="import kernels", kernels=KERNELS, test_half=test)
    said = run_pytest(folder, "-p", "xdist", "-n", "1", "-q")
    assert " CUDA kernels: simulator (" in said and "half    3 launches\n" in said and "3 passed" in said


def test_who_holds_cupy_is_named():
    with pytest.raises(replacement.AlreadyImported, match=r"tests\.ptxsim\.test_kernel_testing_plugin"):
        replacement.replace_cupy()


def test_modules_may_have_no_name(monkeypatch):
    nameless = type(pytest)("nameless")
    del nameless.__name__
    monkeypatch.setattr(experiments, "holds", nameless, raising=False)
    with pytest.raises(replacement.AlreadyImported):
        replacement.replace_cupy()


def test_auto_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(cupy, "is_available", lambda: True)
    option = argparse.Namespace(ptxsim="auto")
    plugin._choose(argparse.Namespace(stash=pytest.Stash()), option)
    assert option.ptxsim == "off"
