"""Every check of a function, whatever comes out of the others, and what each has found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from hypothesis import Phase
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy
from tqdm import tqdm

from cupyflash.testing.adapt import Adapted, AdaptedVjp, NotApplicable, adapted
from cupyflash.testing.gradient_checks import VJP_CHECKS
from cupyflash.testing.invariants import FORWARD_CHECKS
from cupyflash.testing.ready import over_problems, taken_by

VERDICTS = PASSED, ROUNDED, FAILED, LEFT_OUT = "passed", "passed within bounds", "failed", "not applicable"
_REPEAT = "to repeat, with names of cupyflash.testing"


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    ``verdict`` is one of "passed", "passed within bounds" (not bit for bit, which was asked first), "failed" and "not
    applicable". ``examples`` is how many problems passed, or after how many the failure was seen; ``said`` what is
    wrong with ``problem``, the smallest failing one, or why nothing was asked; ``repeat`` the call that does it again.
    """

    check: str
    verdict: str
    examples: int = 0
    said: str = ""
    problem: Any = None
    repeat: str = ""


@dataclass(frozen=True)
class Report:
    """Findings in the order of the checks; ``str`` is a table of them, and all about the failures below it."""

    findings: tuple[Finding, ...]
    left_out: tuple[str, ...]

    @property
    def failures(self) -> list[Finding]:
        """Those of checks that failed."""
        return [x for x in self.findings if x.verdict == FAILED]

    def __getitem__(self, check: str) -> Finding:
        """The finding of a check by its name."""
        return next(x for x in self.findings if x.check == check)

    def __str__(self):
        width = max(len(x.check) for x in self.findings)
        lines = [f"not asked: {'; '.join(self.left_out) or 'nothing'}"]
        for x in self.findings:
            lines.append(f"{x.check:{width}}  {x.verdict}{_details(x)}")
        for x in self.failures:
            lines += ["", x.check, *(f"  {line}" for line in [*x.said.splitlines(), x.repeat])]
        return "\n".join(lines)


def report(
    fn,
    *,
    examples: int = 100,
    seed: int | None = None,
    checks: Sequence[Callable] | None = None,
    problems: SearchStrategy | None = None,
    bound: Callable | None = None,
) -> Report:
    """Run every check of ``fn``, a function that :func:`adapt` or :func:`adapt_vjp` returns or takes.

    Each gets ``examples`` problems, by default the function's own; the same ones in each run, or others for each
    ``seed``. ``checks`` are FORWARD_CHECKS or, of what adapt_vjp returns, VJP_CHECKS. What is asked to hold bit for bit
    and does not is asked again within ``bound``, which is :func:`bounds.attention` or
    :func:`bounds.attention_backward` unless another one is given. A terminal shows how far it is.

    Raises TypeError or ValueError that names the argument, or the strategy that drew what is no problem.

    >>> import numpy as np
    >>> from cupyflash import testing
    >>> def mine(q, k, v):  # no maximum is subtracted
    ...     weights = np.exp(q @ k.mT / np.float32(q.shape[-1] ** 0.5))
    ...     return weights / weights.sum(axis=-1, keepdims=True) @ v
    >>> domain = {"layout": "BHLD", "grouped": False, "empty": False, "nonfinite": False}
    >>> adapted = testing.adapt(mine, ["float32"], **domain)
    >>> with np.errstate(all="ignore"):
    ...     found = report(adapted, checks=[testing.check_within_bound, testing.check_signs])
    >>> print(found)  # doctest: +ELLIPSIS
    not asked: softmax_scale: not taken; causal: not taken; grouped heads; dimensions of 0; NaN and infinity
    check_within_bound  failed, after ... examples: out[0, 0, 0, 0] is nan, exact ...
    """
    fn = adapted(fn)
    known = VJP_CHECKS if isinstance(fn, AdaptedVjp) else FORWARD_CHECKS
    checks = known if checks is None else checks
    _require_arguments(examples, seed, checks, known, problems, bound)
    options = {} if bound is None else {"bound": bound}
    problems = fn.problems() if problems is None else problems
    findings = []
    for check in (bar := tqdm(checks, unit="check", leave=False, disable=None)):
        bar.set_postfix_str(check.__name__)
        findings.append(_finding(check, fn, problems, examples, seed, taken_by(check, options)))
    return Report(tuple(findings), tuple(fn.left_out))


def _require_arguments(examples, seed, checks, known, problems, bound):
    if isinstance(examples, bool) or not isinstance(examples, Integral):
        raise TypeError(f"examples: how many, not {examples!r}")
    if examples < 1:
        raise ValueError(f"examples: 1 or more, not {examples}")
    if seed is not None and not isinstance(seed, Integral):
        raise TypeError(f"seed: an integer or None, not {seed!r}")
    if not isinstance(checks, Sequence):
        raise TypeError(f"checks: a sequence of them, such as [{getattr(checks, '__name__', checks)}], not {checks!r}")
    if not checks:
        raise ValueError("checks: none given")
    for check in checks:
        if check not in known:
            name = getattr(check, "__name__", repr(check))
            raise ValueError(f"checks: {name} is none of this function, which are {known[0].__name__} and so on")
    if problems is not None and not isinstance(problems, SearchStrategy):
        raise TypeError(f"problems: a strategy, such as st.just({problems!r}), not {problems!r}")
    if bound is not None and not callable(bound):
        raise TypeError(f"bound: a function like bounds.attention, not {bound!r}")


def _finding(check, fn: Adapted, problems, examples: int, seed, options: dict[str, Any]) -> Finding:
    finding = _tried(check, fn, problems, examples, seed, options)
    if finding.verdict == FAILED and "bitwise" in inspect.signature(check).parameters:
        within = _tried(check, fn, problems, examples, seed, {**options, "bitwise": False})
        if within.verdict == FAILED:
            return within
        return replace(finding, verdict=ROUNDED, examples=within.examples)
    return finding


def _tried(check, fn: Adapted, problems, examples: int, seed, options: dict[str, Any]) -> Finding:
    name, tried, first, smallest, failure = check.__name__, 0, None, None, None

    def one(problem):
        nonlocal tried, first, smallest, failure
        try:
            check.one(fn, problem, **options)
        except NotApplicable:
            raise
        except Exception as error:
            tried += 1
            first, smallest, failure = first or tried, problem, error  # the last that Hypothesis tries is the smallest
            raise
        tried += 1

    try:
        passed = over_problems(
            one,
            problems,
            seed=seed,
            max_examples=examples,
            database=None,
            derandomize=seed is None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
        )
    except NotApplicable as reason:
        return Finding(name, LEFT_OUT, said=str(reason))
    except Exception as error:
        if failure is None:
            raise  # nothing has been asked of the function: what draws its problems is wrong
        said, repeat = _said(failure)
        said += "\nnot each time that the same is asked" if isinstance(error, Flaky) else ""
        return Finding(name, FAILED, first, said, smallest, repeat)
    return Finding(name, PASSED, passed)


def _said(failure: Exception) -> tuple[str, str]:
    """What is wrong, and the call that repeats it."""
    if isinstance(failure, AssertionError):
        said, _, repeat = str(failure).rpartition("\n")
        return said, repeat
    notes = [x for x in getattr(failure, "__notes__", ()) if x.startswith(_REPEAT)]
    return f"{type(failure).__name__}: {failure}", notes[-1] if notes else ""


def _details(finding: Finding) -> str:
    if finding.verdict == PASSED:
        return f", {finding.examples} examples"
    if finding.verdict == LEFT_OUT:
        return f": {finding.said}"
    first = finding.said.splitlines()[0] if finding.said else ""
    if finding.verdict == ROUNDED:
        return f", {finding.examples} examples; not bit for bit: {first}"
    return f", after {finding.examples} examples: {first}"
