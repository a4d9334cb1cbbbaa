"""Options, Hypothesis profile and fixtures that all tests share."""

import gc

import hypothesis
import pytest

from tests import backends

hypothesis.settings.register_profile(
    "cupyflash",
    deadline=None,  # the first example of a specialisation compiles it
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("cupyflash")

# Parsed kernels are kept, millions of objects that no collection can free; at Python's own thresholds an eighth of the
# time of the tests goes into looking at them.
gc.set_threshold(10_000, 10, 10)


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        choices=("sim", "gpu"),
        default="sim",
        help="where the tests of attention run: the simulator (default), or CuPy arrays on this machine's GPU",
    )


def pytest_configure(config):
    """A GPU that is asked for and missing ends the run before any test."""
    config.attention_backend = backends.Gpu() if config.getoption("--backend") == "gpu" else backends.Simulator()


@pytest.fixture(scope="session")
def backend(request):
    """Where attention is computed."""
    return request.config.attention_backend


def pytest_generate_tests(metafunc):
    """``arch``, beside ``backend``: each architecture that the backend has."""
    if {"arch", "backend"} <= set(metafunc.fixturenames):
        metafunc.parametrize("arch", metafunc.config.attention_backend.architectures, scope="session")
