"""Options, Hypothesis profile and fixtures that all tests share."""

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


def pytest_addoption(parser):
    parser.addoption(
        "--backend",
        choices=("sim", "gpu"),
        default="sim",
        help="where the tests of attention run: the simulator (default), or CuPy arrays on this machine's GPU",
    )


@pytest.fixture(scope="session")
def backend(request):
    """Where attention is computed."""
    return _backend(request.config)


def pytest_generate_tests(metafunc):
    """``arch``, beside ``backend``: each architecture that the backend has."""
    if {"arch", "backend"} <= set(metafunc.fixturenames):
        metafunc.parametrize("arch", _backend(metafunc.config).architectures, scope="session")


def _backend(config):
    if not hasattr(config, "attention_backend"):
        config.attention_backend = backends.Gpu() if config.getoption("--backend") == "gpu" else backends.Simulator()
    return config.attention_backend
