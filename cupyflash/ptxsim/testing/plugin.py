"""The plugin's options, hooks, marker and fixture."""

import contextlib

import pytest

from ..errors import CompileError, SimulationError
from ..sanitizer import KINDS, Report, sanitize
from ..settings import ARCHITECTURES, SCHEDULES, current, settings
from .launches import launches
from .marker import choices_for
from .traceback import without_the_simulator

_PLUGIN = "cupyflash.ptxsim.testing"
_REFUSALS = (SimulationError, CompileError, TypeError, ValueError)  # what a launch raises; the messages say it all
_replaced = pytest.StashKey()
_counted = pytest.StashKey()  # name -> launches, of this process and its workers
_chosen = pytest.StashKey()  # of a test, by its markers
_found = pytest.StashKey()  # the first finding in a phase of a test that fails by itself


def pytest_addoption(parser):
    group = parser.getgroup("ptxsim", "kernels that are launched through CuPy")
    group.addoption(
        "--ptxsim",
        choices=("off", "on", "auto"),
        default="off",
        help="on: `import cupy` gives a stand-in whose kernels run in cupyflash.ptxsim. off: CuPy stays as it is "
        "installed (default). auto: on where CuPy finds no GPU",
    )
    group.addoption("--ptxsim-arch", choices=ARCHITECTURES, default="sm_80", help="GPU to imitate; default sm_80")
    group.addoption("--ptxsim-schedule", choices=SCHEDULES, default="lockstep", help="order of warps; default lockstep")
    group.addoption("--ptxsim-seed", type=int, default=0, metavar="N", help="of the random schedule; default 0")
    group.addoption("--ptxsim-sanitize", action="store_true", help="fail a test in which the sanitizer finds something")
    group.addoption(
        "--ptxsim-allow",
        action="append",
        default=[],
        choices=KINDS,
        metavar="KIND",
        help='of findings that fail no test, such as "global race" where threads race on purpose; may be repeated; '
        f"one of: {', '.join(KINDS)}",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before conftest.py is imported, which may import the project, which imports CuPy."""
    _choose(early_config, early_config.known_args_namespace)


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "ptxsim(sanitize=True, allow=[kinds], arch=..., schedule=..., seed=..., mma=...): how the simulator "
        "runs the kernels of a test",
    )
    _choose(config, config.option)  # where a conftest.py has asked for the plugin
    config.stash[_counted] = launches
    option = config.option
    chosen = contextlib.ExitStack()
    chosen.enter_context(settings(arch=option.ptxsim_arch, schedule=option.ptxsim_schedule, seed=option.ptxsim_seed))
    config.add_cleanup(chosen.close)


def _choose(config, option):
    """Replace CuPy, if that is the choice; the option then says what has been done."""
    if _replaced in config.stash:
        option.ptxsim = "on"
        return
    if option.ptxsim == "auto":
        option.ptxsim = "off" if _has_gpu() else "on"
    if option.ptxsim == "off":
        return
    try:
        from .replacement import AlreadyImported, replace_cupy

        undo = replace_cupy()
    except ImportError as error:
        raise pytest.UsageError(f"--ptxsim=on: needs CuPy and NVRTC, though no GPU: {error}") from error
    except AlreadyImported as error:
        raise pytest.UsageError(
            f"--ptxsim=on: CuPy is in use already, by {error}; load the plugin earlier: -p {_PLUGIN}"
        ) from error
    config.stash[_replaced] = True
    config.add_cleanup(undo)


def _has_gpu():
    try:
        import cupy
    except ImportError as error:
        raise pytest.UsageError(f"--ptxsim=auto: needs CuPy: {error}") from error
    return cupy.is_available()


def pytest_report_header(config):
    return f"kernels: {_description(config)}"


def _description(config):
    if config.option.ptxsim == "off":
        return "CuPy as it is installed"
    choices = current()
    seed = f" (seed {choices.seed})" if choices.schedule == "random" else ""
    checks = "on" if config.option.ptxsim_sanitize else "off"
    return f"simulator ({choices.arch}, {choices.schedule} schedule{seed}, sanitizer {checks})"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from _simulated(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    return (yield from _simulated(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    return (yield from _simulated(item, "teardown"))


def _simulated(item, when):
    """One phase of a test, with the choices for it; it fails with what the sanitizer finds."""
    refusal = None
    if when == "setup":
        try:
            item.stash[_chosen] = choices_for(item)
        except ValueError as error:
            refusal = error
    if _chosen not in item.stash:
        result = yield  # other plugins set up what they take down later
        if refusal:
            pytest.fail(f"@pytest.mark.ptxsim: {refusal}", pytrace=False)
        return result
    watched, allowed, choices = item.stash[_chosen]
    with settings(**choices), sanitize() if watched else contextlib.nullcontext(Report()) as report:
        try:
            result = yield
        except BaseException as error:
            if findings := _findings(report, allowed):
                item.stash[_found] = findings[0]
                item.add_report_section(when, "sanitizer", _text(findings))
            if isinstance(error, _REFUSALS) and not item.config.option.fulltrace:
                error.__traceback__ = without_the_simulator(error.__traceback__)
            raise
    if findings := _findings(report, allowed):
        pytest.fail(_text(findings), pytrace=False)
    return result


def _findings(report, allowed):
    return [finding for finding in report.findings if finding.kind not in allowed]


def _text(findings):
    return "\n".join(map(str, findings))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """The line of the summary begins with what the sanitizer has found, where a test has failed by itself."""
    report = yield
    finding, crash = item.stash.get(_found, None), getattr(report.longrepr, "reprcrash", None)
    if finding and crash:
        crash.message = f"{finding.kind}, {finding.where}; {crash.message}"
    item.stash[_found] = None
    return report


@pytest.fixture(name="simulated_cupy")
def fixture_of_simulated_cupy():
    """A module to use in place of `cupy` whose kernels run in the simulator, whatever ``--ptxsim`` says."""
    from .namespace import simulated_cupy

    return simulated_cupy()


def pytest_terminal_summary(terminalreporter, config):
    counted = config.stash[_counted]
    if not counted and config.option.ptxsim == "off":
        return
    terminalreporter.write_sep("=", f"CUDA kernels: {_description(config)}")
    width = max(map(len, counted), default=0)
    for name in sorted(counted):
        terminalreporter.write_line(f"{name:{width}}  {_times(counted[name])}")
    if not counted:
        terminalreporter.write_line("none")


def _times(launches):
    return "never launched" if not launches else f"{launches:,} launch{'es' * (launches > 1)}"


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_PLUGIN] = dict(launches)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    for name, count in getattr(node, "workeroutput", {}).get(_PLUGIN, {}).items():
        node.config.stash[_counted][name] += count
