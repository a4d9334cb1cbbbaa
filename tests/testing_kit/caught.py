"""After how many problems a check sees a fault."""

import functools

from hypothesis import Phase

from cupyflash import testing
from cupyflash.testing.ready import over_problems
from tests.testing_kit import strangers

MOST = 200  # problems
#: Nothing is wrong with their results until a key that is masked is NaN.
_ONLY_WITH_NAN = {
    "NaN through scores of masked keys": testing.check_masked_keys_have_no_influence,
    "NaN through values of masked keys": testing.check_masked_keys_have_no_influence,
}


def forward(fault, seed=None):
    """The number of default problems, of 200 at most, up to the first that is wrong; None if there is none."""
    fn = testing.adapt(functools.partial(strangers.attention, fault=fault))
    return after(_ONLY_WITH_NAN.get(fault, testing.check_within_bound), fn, seed)


def backward(fault, seed=None):
    """The same for gradients."""
    vjp = testing.adapt_vjp(functools.partial(strangers.attention_vjp, fault=fault))
    return after(testing.check_gradients_within_bound, vjp, seed)


def after(check, fn, seed):
    """The same for a check of a function; without a seed the problems are the same in each run."""
    tried = 0

    def one(problem):
        nonlocal tried
        tried += 1
        check.one(fn, problem)

    try:
        over_problems(
            one, fn.problems(), seed=seed, max_examples=MOST, database=None, derandomize=seed is None,
            phases=(Phase.generate,), report_multiple_bugs=False,
        )  # fmt: skip
    except AssertionError:
        return tried
    return None
