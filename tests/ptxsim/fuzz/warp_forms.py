"""Instructions across a warp. Here a formula maps the operands of all lanes that take part to the results of each."""

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass

from .. import exact
from ..test_warp import shuffle_source
from .forms import Form


@dataclass(frozen=True)
class WarpForm(Form):
    """`formula(lanes, operands)`: lane numbers, and per source the list of its values; returns tuples of results.

    The last operand that is written is the mask of the lanes that take part.
    """

    formula: Callable = None


def warp_form(text, signature, formula, **more):
    sources, results = (tuple(part.split()) for part in signature.split("->"))
    return WarpForm(text, sources, results, formula, **more)


def shuffles():
    for mode in ("up", "down", "bfly", "idx"):

        def formula(lanes, a, b, c, mode=mode):
            values = dict(zip(lanes, a, strict=True))
            out = []
            for lane, distance, clamp in zip(lanes, b, c, strict=True):
                source, inside = shuffle_source(mode, lane, distance, clamp)
                out.append((values.get(source), int(inside)))
            return out

        three = "b32 b32 b32"
        yield warp_form(f"shfl.sync.{mode}.b32", f"{three} -> b32 pred", formula, small=(1, 2))
        value = lambda *x, f=formula: [row[:1] for row in f(*x)]  # noqa: E731
        yield warp_form(f"shfl.sync.{mode}.b32", f"{three} -> b32", value, small=(1, 2))


def votes():
    functions = {"all": all, "any": any, "uni": lambda p: len(set(p)) == 1}
    for name, function in functions.items():
        yield warp_form(
            f"vote.sync.{name}.pred", "pred -> pred", lambda lanes, p, f=function: [(int(f(p)),)] * len(lanes)
        )
    yield warp_form(
        "vote.sync.ballot.b32", "pred -> b32", lambda lanes, p: [(mask(zip(lanes, p, strict=True)),)] * len(lanes)
    )
    yield warp_form("activemask.b32", "-> b32", lambda lanes: [(mask((k, 1) for k in lanes),)] * len(lanes))
    yield warp_form("elect.sync", "-> b32 pred", lambda lanes: [(min(lanes), int(k == min(lanes))) for k in lanes])


def mask(pairs):
    return sum(1 << lane for lane, yes in pairs if yes)


def matches():
    for t in ("b32", "b64"):

        def any_(lanes, a):
            return [(mask((lane, x == y) for lane, x in zip(lanes, a, strict=True)),) for y in a]

        def all_(lanes, a):
            same = len(set(a)) == 1
            return [(mask((k, same) for k in lanes), int(same))] * len(lanes)

        yield warp_form(f"match.any.sync.{t}", f"{t} -> b32", any_)
        yield warp_form(f"match.all.sync.{t}", f"{t} -> b32", lambda lanes, a, f=all_: [r[:1] for r in f(lanes, a)])
        yield warp_form(f"match.all.sync.{t}", f"{t} -> b32 pred", all_)


def reductions():
    logic = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
    for t, functions in (
        ("u32", {"add": operator.add, "min": min, "max": max}),
        ("s32", {"add": operator.add, "min": min, "max": max}),
        ("b32", logic),
    ):
        for name, function in functions.items():
            yield warp_form(
                f"redux.sync.{name}.{t}",
                f"{t} -> {t}",
                lambda lanes, a, f=function: [(functools.reduce(f, a),)] * len(lanes),
            )


def float_reductions():
    for name, function in (("min", exact.minimum), ("max", exact.maximum)):
        for magnitude, nan in itertools.product(("", ".abs"), ("", ".NaN")):

            def reduced(lanes, a, f=function, magnitude=magnitude, nan=nan):
                values = [abs(x) for x in a] if magnitude else a
                return [(functools.reduce(lambda x, y: f(x, y, bool(nan)), values),)] * len(lanes)

            yield warp_form(f"redux.sync.{name}{magnitude}{nan}.f32", "f32 -> f32", reduced)


def all_forms():
    for group in (shuffles, votes, matches, reductions, float_reductions):
        yield from group()
