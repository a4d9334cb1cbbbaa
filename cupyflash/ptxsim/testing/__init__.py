"""Tests of kernels that a project launches through CuPy, on a machine without a GPU: a plugin for pytest.

    python -m pytest -p cupyflash.ptxsim.testing --ptxsim=on --ptxsim-sanitize

With ``--ptxsim=on``, ``import cupy`` gives the project :func:`simulated_cupy`: its kernels run in the simulator,
on arrays that NumPy computes with. Without that option, and on a machine with a GPU under ``--ptxsim=auto``, CuPy stays
as it is. The options ``--ptxsim-*`` choose architecture and schedule, and have a test fail where the sanitizer finds
something; ``@pytest.mark.ptxsim(...)`` chooses for one test. At the end of a run stands how often each kernel was
launched.
"""

from .plugin import (
    fixture_of_simulated_cupy,
    pytest_addoption,
    pytest_configure,
    pytest_load_initial_conftests,
    pytest_report_header,
    pytest_runtest_call,
    pytest_runtest_makereport,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

__all__ = [
    "fixture_of_simulated_cupy",
    "pytest_addoption",
    "pytest_configure",
    "pytest_load_initial_conftests",
    "pytest_report_header",
    "pytest_runtest_call",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_testnodedown",
    "simulated_cupy",
]


def __getattr__(name):
    if name != "simulated_cupy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .namespace import simulated_cupy  # imports CuPy, which the plugin does not need unless it is asked to

    return simulated_cupy
