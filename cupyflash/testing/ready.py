"""What ready checks have in common: where problems come from, how results are compared, how a failure is repeated."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, currently_in_test_context, given, reject, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from cupyflash import bounds
from cupyflash.testing.adapt import NotApplicable, adapted, adapted_vjp
from cupyflash.testing.assertions import assert_same_bits, assert_within_bound
from cupyflash.testing.backward_problems import AttentionBackwardProblem, attention_backward_problems
from cupyflash.testing.problems import AttentionProblem, attention_problems
from cupyflash.testing.reproducible import pasteable

_HOPELESS = 60  # problems in a row that a function is not for: it is for none


def ready_check(problems: Callable[[], SearchStrategy]):
    """Makes ``check(fn, problem, **options)`` take a strategy, too, or nothing: all problems it draws are checked.

    ``fn`` is adapted, unless it is. What goes wrong, be it in ``fn``, is told with the call that repeats it, and
    NotApplicable is raised where all that is asked is what ``fn`` is not for.
    """
    is_forward = problems is attention_problems
    kind, as_adapted = (AttentionProblem, adapted) if is_forward else (AttentionBackwardProblem, adapted_vjp)

    def decorator(check):
        def one(fn, problem, **options):
            if not isinstance(problem, kind):
                raise TypeError(f"{check.__name__}: one {kind.__name__} or a strategy of them, not {problem!r}")
            try:
                check(fn, problem, **options)
            except NotApplicable:
                raise
            except AssertionError as error:
                idea = " ".join(check.__doc__.split("\n\n")[0].split())
                about = f"{check.__name__.removeprefix('check_').replace('_', ' ')}: {idea}"
                raise AssertionError(f"{error}\n{about}\n{_to_repeat(check, problem, options)}") from None
            except Exception as error:
                # What add_note does, which Python 3.10 lacks: there the exceptiongroup of Hypothesis prints notes.
                error.__notes__ = [*getattr(error, "__notes__", ()), _to_repeat(check, problem, options)]
                raise

        def applied(fn, problem=None, **options):
            fn = as_adapted(fn)
            problem = fn.problems() if problem is None else problem
            if isinstance(problem, SearchStrategy):
                return over_problems(lambda problem: one(fn, problem, **options), problem)
            return one(fn, problem, **options)

        @functools.wraps(check)
        def ready(fn, problem=None, **options):
            try:
                applied(fn, problem, **options)
            except NotApplicable:
                if currently_in_test_context():
                    reject()  # of the test's own problems
                raise

        ready.applied, ready.one = applied, one
        return ready

    return decorator


def _to_repeat(check, problem, options):
    """The call, with those options that are not the check's defaults."""
    names, call = "names of cupyflash.testing", f"{check.__name__}(fn, {problem!r}"
    defaults = {name: parameter.default for name, parameter in inspect.signature(check).parameters.items()}
    for name, value in options.items():
        if value is defaults.get(name, inspect.Parameter.empty):
            continue
        if name == "bound":
            known = [known for known in bounds.__all__ if getattr(bounds, known) is value]
            names += "" if known else " and with your bound"
            call += f", bound={f'bounds.{known[0]}' if known else 'bound'}"
        else:
            call += f", {name}={pasteable(value)}"
    return f"to repeat, with {names}: {call})"


def over_problems(one, strategy, *, seed=None, **more_settings):
    """``one`` of each problem that the strategy draws, but for those that the function is not for.

    How many it was for; where it was for none, NotApplicable says why; ValueError where none could be drawn.
    """
    why, applied = Counter(), 0
    healthy = [*settings.default.suppress_health_check, HealthCheck.filter_too_much, HealthCheck.too_slow]

    @settings(**{"deadline": None, "suppress_health_check": healthy, **more_settings})
    @given(strategy)
    def every_problem(problem):
        nonlocal applied
        if not applied and why.total() >= _HOPELESS:
            return
        try:
            one(problem)
        except NotApplicable as reason:
            why[str(reason)] += 1
            if why.total() < _HOPELESS or applied:
                reject()
            return
        except BaseException:
            applied += 1
            raise
        applied += 1

    try:
        (every_problem if seed is None else hypothesis.seed(seed)(every_problem))()
    except Unsatisfiable:
        if not why:
            raise ValueError(
                "nothing was drawn: no length of seqlens, or what else a strategy draws, is one that is asked for"
            ) from None
    if not applied:
        raise NotApplicable(why.most_common(1)[0][0])
    return applied


def run_all(checks, fn, problem, bitwise, bound):
    """Each check with the options that it takes; ``bitwise=True`` leaves each its default.

    The names of those that did not apply, and why.
    """
    options = {"bound": bound} if bitwise else {"bound": bound, "bitwise": False}
    left_out = {}
    for check in checks:
        try:
            check.applied(fn, problem, **taken_by(check, options))
        except NotApplicable as reason:
            left_out[check.__name__] = str(reason)
    return left_out


def taken_by(check, options):
    """Those of the options that the check has."""
    parameters = inspect.signature(check).parameters
    return {name: value for name, value in options.items() if name in parameters}


@dataclass(frozen=True)
class Relation:
    """Changed arguments, and what their results should be by those of the original ones."""

    original: tuple
    changed: tuple
    options: dict[str, Any]
    changed_options: dict[str, Any] | None = None  # where they differ
    expected: Callable = lambda *results: results  # results of the original -> those of the changed arguments
    part: Callable = lambda *results: results  # what of both is compared
    rounded: bool = False  # whether roundings may differ: then results are never compared bit for bit


def invariant(*, bitwise: bool):
    """A ready check of the forward from a function of the problem that gives relations.

    ``bitwise`` is the default of the check's parameter.
    """
    default = bitwise

    def decorator(relations: Callable[[Any], Iterable[Relation]]):
        def check(fn, problem, *, bitwise=default, bound=bounds.attention):
            _assert_related(("out", "lse"), _attention, _attention_bounds, fn, bound, relations(problem), bitwise)

        return ready_check(attention_problems)(_named_like(check, relations))

    return decorator


def vjp_invariant(*, bitwise: bool):
    """The same for the backward: arguments are dout, dlse, q, k, v, and results dq, dk, dv."""
    default = bitwise

    def decorator(relations: Callable[[Any], Iterable[Relation]]):
        def check(vjp, problem, *, bitwise=default, bound=bounds.attention_backward):
            names = ("dq", "dk", "dv")
            _assert_related(names, gradients, gradient_bounds, vjp, bound, relations(problem), bitwise)

        return ready_check(attention_backward_problems)(_named_like(check, relations))

    return decorator


def _named_like(check, relations):
    check.__name__, check.__qualname__ = relations.__name__, relations.__qualname__
    check.__doc__, check.__module__ = relations.__doc__, relations.__module__
    return check


def _assert_related(names, call, call_bound, fn, bound, relations, bitwise):
    original = results = None
    for relation in relations:
        options, changed_options = relation.options, relation.changed_options or relation.options
        if relation.original is not original:
            original, results = relation.original, call(fn, relation.original, options)
        expected = relation.part(*relation.expected(*results))
        changed = relation.part(*call(fn, relation.changed, changed_options))
        if bitwise and not relation.rounded:
            for name, result, value in zip(names, changed, expected, strict=True):
                assert_same_bits(result, value, name=name)
            continue
        allowed = relation.part(*relation.expected(*call_bound(fn, bound, original, options)))
        more_allowed = relation.part(*call_bound(fn, bound, relation.changed, changed_options))
        for name, result, value, *errors in zip(names, changed, expected, allowed, more_allowed, strict=True):
            assert_agree(result, value, sum(map(np.abs, errors)), name=name)


def assert_agree(result, other, allowed, *, name):
    """Two inexact results differ by no more than ``allowed``; where that is infinite, nothing is asked."""
    assert result.shape == other.shape, f"{name}: shape {result.shape}, expected {other.shape}"
    result, other = (np.where(np.isfinite(allowed), x.astype(np.float64), 0) for x in (result, other))
    assert_within_bound(result, other, allowed, name=name)


def _attention(fn, inputs, options):
    out, lse = fn(*inputs, return_lse=True, **options)
    return out, np.zeros(out.shape[:-1], np.float32) if lse is None else lse


def _attention_bounds(_, bound, inputs, options):
    return bound(*inputs, return_lse=True, **options)


def gradients(vjp, arguments, options):
    """dq, dk, dv of dout, dlse, q, k, v."""
    dout, dlse, *inputs = arguments
    _, pullback = vjp(*inputs, return_lse=True, **options)
    return tuple(pullback(dout, dlse))


def gradient_bounds(vjp, bound, arguments, options):
    """Their bounds, which depend on the out and lse that the backward starts from."""
    dout, dlse, *inputs = arguments
    (out, lse), _ = vjp(*inputs, return_lse=True, **options)
    return tuple(bound(dout, *inputs, out, lse, dlse=dlse, **options))


def choices(problem) -> np.random.Generator:
    """Random numbers of a problem's seed that are not those of its arrays."""
    return np.random.default_rng([problem.seed, 1])
