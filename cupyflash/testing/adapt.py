"""Functions as their authors wrote them, as the checks call them, and what is not asked of them."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from cupyflash import reference
from cupyflash._gradients import Gradients
from cupyflash.testing import layouts
from cupyflash.testing.backward_problems import AttentionBackwardProblem, attention_backward_problems
from cupyflash.testing.problems import ALIGNMENTS, SCALES, attention_problems, same_heads
from cupyflash.testing.problems import leading_dims as any_leading_dims
from cupyflash.testing.values import FAMILIES, require_known
from cupyflash.testing.variants import VARIANTS

OPTIONS = ("softmax_scale", "causal", "align", "return_lse")
LAYOUTS = ("LD", "HLD", "LHD", "BHLD", "BLHD")


class NotApplicable(Exception):
    """A check asked for what the function is not for; the message says what."""


def adapt(
    fn,
    dtypes: Sequence[str] = ("float16", "bfloat16"),
    *,
    layout: str | None = None,
    align: str | None = None,
    grouped: bool = True,
    empty: bool = True,
    empty_rows: bool = True,
    nonfinite: bool = True,
    seqlens: SearchStrategy | None = None,
    head_dims: SearchStrategy | None = None,
    leading_dims: SearchStrategy | None = None,
    families: Sequence[str] = FAMILIES,
    scales: Sequence[float | None] = SCALES,
    views: Sequence[str] = layouts.VIEWS,
    variants: Collection[str] = (),
) -> Adapted:
    """``fn`` as the checks call it, with what it is for: they ask nothing else of it, and :func:`report` says what.

    ``fn`` takes q, k and v, NumPy arrays, and by name those of ``softmax_scale``, ``causal``, ``align`` and
    ``return_lse`` that are in its signature: what is not there is not asked for. ``softmax_scale`` is None where
    head_dim ** -0.5 is meant. It returns out, or (out, lse), as NumPy arrays or what :func:`numpy.asarray` makes one
    of. Where it finds out by itself that it is not for its arguments it may raise :class:`NotApplicable`.

    Parameters
    ----------
    dtypes : names among float16, bfloat16 (that of ml_dtypes), float32 and float64
    layout : "LD", "HLD", "LHD", "BHLD" or "BLHD"
        Which dimensions q, k, v and out have, always, and in which order: batch, heads, length, head_dim. lse is
        (B, H, L) without those that the layout lacks. By default any number, heads before length, and broadcast.
    align : "top-left" or "bottom-right"
        What ``causal`` means where L and S differ, where it is one of them alone. Without it, causal problems of a
        function that does not take ``align`` have L = S.
    grouped, empty, empty_rows, nonfinite : bool
        Whether it is for several query heads to a key head; for dimensions of 0; for queries that see no key (out 0,
        lse -inf); for NaN and infinity in arrays.
    seqlens, head_dims, leading_dims, families, scales, views, variants
        As in :func:`attention_problems`: strategies of a length, of (head_dim, head_dim_v) and of what is before them;
        which values, scales and strides; options of VARIANTS by name, which ``fn`` takes. Where ``views`` is ["plain"],
        arrays are contiguous.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, or the parameter of ``fn`` that no problem has a value for.

    Examples
    --------
    >>> def mine(q, k, v, causal):  # (batch, length, heads, head_dim)
    ...     q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    ...     scores = q @ k.mT / q.shape[-1] ** 0.5
    ...     scores = np.where(np.tri(*scores.shape[-2:]) == 0, -np.inf, scores) if causal else scores
    ...     weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    ...     return np.swapaxes(weights / weights.sum(axis=-1, keepdims=True) @ v, 1, 2)
    >>> adapted = adapt(mine, ["float32"], layout="BLHD", align="top-left", grouped=False, empty=False)
    >>> print(*adapted.left_out, sep="; ")
    softmax_scale: not taken; align: top-left alone; grouped heads; dimensions of 0
    >>> q, k, v = np.ones((3, 1, 2, 5, 8), np.float32)  # the checks call it with heads before length
    >>> out, lse = adapted(q, k, v, causal=True, align="top-left")
    >>> out.shape, lse
    ((1, 2, 5, 8), None)
    >>> adapted(q, k, v, softmax_scale=2.0)
    Traceback (most recent call last):
    cupyflash.testing.adapt.NotApplicable: softmax_scale: not taken
    """
    domain = {name: value for name, value in locals().items() if name != "fn"}
    return Adapted(fn, _taken(fn, domain["variants"]), **_checked(domain))


def adapt_vjp(vjp, dtypes: Sequence[str] = ("float16", "bfloat16"), **domain) -> AdaptedVjp:
    """The same for gradients: ``vjp(q, k, v)`` returns out or (out, lse), and the pullback.

    The pullback gives dq, dk and dv of dout, or of dout and dlse; where it takes one argument, nothing is asked about
    gradients through lse. All arguments are those of :func:`adapt`.

    >>> def mine(q, k, v):
    ...     weights = np.exp(q @ k.mT / q.shape[-1] ** 0.5)
    ...     weights /= weights.sum(axis=-1, keepdims=True)
    ...     def pullback(dout):
    ...         dscores = weights * (dout @ v.mT - (dout * (weights @ v)).sum(axis=-1, keepdims=True))
    ...         return dscores @ k / q.shape[-1] ** 0.5, dscores.mT @ q / q.shape[-1] ** 0.5, weights.mT @ dout
    ...     return weights @ v, pullback
    >>> (out, lse), pullback = adapt_vjp(mine, ["float32"])(*np.ones((3, 4, 8), np.float32))
    >>> [x.shape for x in pullback(np.ones_like(out), None)]
    [(4, 8), (4, 8), (4, 8)]
    """
    arguments = inspect.signature(adapt).bind(vjp, dtypes, **domain)
    arguments.apply_defaults()
    domain = {name: value for name, value in arguments.arguments.items() if name != "fn"}
    return AdaptedVjp(vjp, _taken(vjp, domain["variants"]), **_checked(domain))


def _taken(fn, variants):
    """Which of OPTIONS and VARIANTS the function takes by name."""
    name = getattr(fn, "__name__", type(fn).__name__)
    if not callable(fn):
        raise TypeError(f"fn: a function of q, k and v, not {fn!r}")
    known = (*OPTIONS, *VARIANTS, "seed", "aux")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(f"{name}: has no signature; wrap it in a function of q, k, v and what it takes") from None
    kinds = inspect.Parameter
    by_position = [x for x in parameters if x.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(by_position) < 3 and not any(x.kind is kinds.VAR_POSITIONAL for x in parameters):
        raise TypeError(f"{name}: takes {len(by_position)} arguments by position, and is called with q, k and v")
    for parameter in by_position[3:]:
        if parameter.kind is kinds.POSITIONAL_ONLY and parameter.default is kinds.empty:
            raise TypeError(f"{name}: needs {parameter.name} by position; wrap it in a function that takes it by name")
    named = [x for x in by_position[3:] if x.kind is not kinds.POSITIONAL_ONLY]
    named += [x for x in parameters if x.kind is kinds.KEYWORD_ONLY]
    for parameter in named:
        if parameter.default is kinds.empty and parameter.name not in known:
            raise TypeError(
                f"{name}: needs {parameter.name}, which no problem has; wrap it in a function that takes some of "
                f"{', '.join(OPTIONS)} or of VARIANTS, and says what {parameter.name} is"
            )
    all_taken = any(x.kind is kinds.VAR_KEYWORD for x in parameters)
    taken = known if all_taken else tuple(x.name for x in named if x.name in known)
    for variant in variants:
        if variant not in taken:
            raise TypeError(f"{name}: does not take {variant}, which variants asks for")
    return taken


def _checked(domain: dict[str, Any]) -> dict[str, Any]:
    if domain["layout"] is not None:
        require_known("layout", domain["layout"], LAYOUTS)
    if domain["align"] is not None:
        require_known("align", domain["align"], ALIGNMENTS)
    for name in ("grouped", "empty", "empty_rows", "nonfinite"):
        if not isinstance(domain[name], bool):
            raise TypeError(f"{name}: True or False, not {domain[name]!r}")
    drawn = ("dtypes", "families", "scales", "views", "variants", "seqlens", "head_dims", "leading_dims")
    given = {name: domain[name] for name in drawn if domain[name] is not None}
    attention_problems(**given)  # whose errors name these
    return {**{name: value for name, value in domain.items() if name not in drawn}, "drawn": given}


@dataclass(frozen=True)
class Adapted:
    """What :func:`adapt` returns: a function like :func:`cupyflash.attention`, which raises NotApplicable."""

    fn: Any
    taken: tuple[str, ...]
    layout: str | None
    align: str | None
    grouped: bool
    empty: bool
    empty_rows: bool
    nonfinite: bool
    drawn: dict[str, Any] = field(hash=False)

    def __call__(self, q, k, v, **options):
        """out and lse, which is None where there is none."""
        self._require_asked(q, k, v, options)
        given, passed = dict(zip("qkv", map(self._given, (q, k, v)), strict=True)), self._passed(options)
        with _unchanged({**given, **passed}):
            results = self.fn(*given.values(), **passed)
        return self._split(results)

    @property
    def left_out(self) -> list[str]:
        """What :func:`cupyflash.attention` is for and this function is not asked."""
        left_out = [f"{name}: not taken" for name in ("softmax_scale", "causal") if name not in self.taken]
        if "causal" in self.taken and not self._takes_any_align:
            left_out.append(f"align: {self.align} alone" if self.align else "align: not taken, causal where L = S")
        left_out += [] if self.grouped else ["grouped heads"]
        left_out += [] if self.empty else ["dimensions of 0"]
        left_out += [] if self.empty_rows else ["queries that see no key"]
        left_out += [] if self.nonfinite else ["NaN and infinity"]
        return left_out + (["strides"] if self.is_contiguous else [])

    @property
    def _takes_any_align(self):
        return "align" in self.taken and self.align is None

    @property
    def is_contiguous(self) -> bool:
        """Whether it is given contiguous arrays alone."""
        return set(self.drawn["views"]) == {"plain"}

    def problems(self) -> SearchStrategy:
        """Problems that the function is for."""
        return attention_problems(**self._strategies()).map(self._fitted)

    def _strategies(self):
        drawn = dict(self.drawn)
        if "softmax_scale" not in self.taken:
            drawn["scales"] = [None]
        if "causal" not in self.taken:
            drawn["causal"] = st.just(False)
        if "leading_dims" not in drawn:
            drawn["leading_dims"] = self._leading_dims()
        if not self.empty and "seqlens" in drawn:
            drawn["seqlens"] = drawn["seqlens"].filter(bool)
        return drawn

    def _leading_dims(self):
        if self.layout is not None:
            return same_heads(len(self.layout) - 2, grouped=self.grouped, empty=self.empty)
        return any_leading_dims().filter(self._are_leading_asked)

    def _are_leading_asked(self, leading):
        heads = [x[-1] for x in leading if x]
        is_grouped = len(set(heads) - {1}) > 1
        return (self.empty or all(map(all, leading))) and (self.grouped or not is_grouped)

    def _fitted(self, problem):
        """A problem of these strategies as the function takes it."""
        if not self.empty:
            problem = replace(problem, seqlen_q=max(problem.seqlen_q, 1), seqlen_k=max(problem.seqlen_k, 1))
        if self._takes_any_align or problem.align is None:
            return problem
        # Some are square also where the alignment is known: there, what is said of the other one holds, too.
        if self.align is None or problem.seed % 4 == 1:
            problem = replace(problem, seqlen_k=problem.seqlen_q)
        return replace(problem, align=self.align or problem.align)

    def _require_asked(self, q, k, v, options):
        why = next(self._reasons(q, k, v, options), None)
        if why is not None:
            raise NotApplicable(why)

    def _reasons(self, q, k, v, options):
        """Why it is not for these arguments, one after the other."""
        leading, seqlen_q, seqlen_k = (q.shape[:-2], k.shape[:-2], v.shape[:-2]), q.shape[-2], k.shape[-2]
        if options.get("softmax_scale") is not None and "softmax_scale" not in self.taken:
            yield "softmax_scale: not taken"
        if options.get("causal") and "causal" not in self.taken:
            yield "causal: not taken"
        is_other = options.get("align") not in (None, self.align)
        if is_other and not self._takes_any_align and seqlen_q != seqlen_k:
            yield f"align: {self.align} alone" if self.align else "align: not taken"
        for name, value in options.items():
            if name not in OPTIONS and value is not None and name not in self.taken:
                yield f"{name}: not taken"
        if self.layout is not None:
            own = len(self.layout) - 2
            if any(len(x) != own for x in leading) or leading[1] != leading[2] or leading[0][:-1] != leading[1][:-1]:
                yield f"other dimensions than {self.layout}, or broadcast"
            elif leading[0] != leading[1] and (leading[1][-1] == 0 or leading[0][-1] % leading[1][-1]):
                yield "broadcast heads"
        is_grouped = all(leading) and len({1, leading[0][-1], leading[1][-1]}) == 3
        if not self.grouped and (is_grouped or (self.layout is not None and leading[0] != leading[1])):
            yield "grouped heads"
        if not self.empty and not all(x.size for x in (q, k, v)):
            yield "dimensions of 0"
        if not self.nonfinite and not all(np.isfinite(x).all() for x in (q, k, v)):
            yield "NaN and infinity"
        if not self.empty_rows and not _every_query_sees_a_key(q, k, v, options):
            yield "queries that see no key"

    def _passed(self, options):
        always = {"return_lse": True, **options}
        return {name: value for name, value in always.items() if name in self.taken}

    def _given(self, x):
        """An operand as the function takes it."""
        if self.layout in ("LHD", "BLHD"):
            x = np.swapaxes(x, -2, -3)
        return np.ascontiguousarray(x) if self.is_contiguous else x

    def _got(self, x, what):
        """A result of the operands' dimensions as the checks take it."""
        x = _array(x, what)
        if self.layout is not None and x.ndim != len(self.layout):
            raise AssertionError(f"{what}: shape {x.shape}, expected dimensions {', '.join(self.layout)}")
        return np.swapaxes(x, -2, -3) if self.layout in ("LHD", "BLHD") else x

    def _split(self, results):
        if not isinstance(results, tuple | list):
            results = results, None
        if len(results) != 2:
            raise TypeError(f"the function returned {len(results)} results, expected out or (out, lse)")
        out, lse = results
        return self._got(out, "out"), None if lse is None else _array(lse, "lse")


class AdaptedVjp(Adapted):
    """What :func:`adapt_vjp` returns: a function like :func:`cupyflash.attention_vjp`, which raises NotApplicable."""

    def __call__(self, q, k, v, **options):
        """(out, lse), and the pullback; lse is the exact one where there is none."""
        self._require_asked(q, k, v, options)
        given, passed = dict(zip("qkv", map(self._given, (q, k, v)), strict=True)), self._passed(options)
        with _unchanged({**given, **passed}):
            results = self.fn(*given.values(), **passed)
        if not isinstance(results, tuple | list) or len(results) != 2 or not callable(results[1]):
            raise TypeError("the function must return out or (out, lse), and the pullback")
        (out, lse), own = self._split(results[0]), results[1]
        if lse is None:
            exact = reference.attention(q, k, v, **{"return_lse": True, **options})[1]
            lse = exact.astype(np.float64 if q.dtype == np.float64 else np.float32)
        arguments = _num_positional(own)

        def pullback(dout, dlse=None):
            if dlse is not None and arguments == 1:
                raise NotApplicable("dlse: the pullback does not take it")
            if not self.nonfinite and not all(np.isfinite(x).all() for x in (dout, dlse) if x is not None):
                raise NotApplicable("NaN and infinity")
            cotangents = {"dout": self._given(dout), "dlse": dlse}
            with _unchanged({**given, **passed, **cotangents}):
                gradients = own(*list(cotangents.values())[:arguments])
            names, of_options = ("dq", "dk", "dv"), {}
            if isinstance(gradients, Gradients):
                of_options = {name: None if x is None else _array(x, name) for name, x in vars(gradients).items()}
            if len(tuple(gradients)) != 3:
                raise TypeError(f"the pullback returned {len(tuple(gradients))} results, expected dq, dk and dv")
            own_gradients = {name: self._got(x, name) for name, x in zip(names, gradients, strict=True)}
            return Gradients(**{**of_options, **own_gradients})

        return (out, lse), pullback

    def problems(self) -> SearchStrategy:
        """Problems that the function is for."""
        return attention_backward_problems(**self._strategies()).map(self._fitted)

    def _fitted(self, problem: AttentionBackwardProblem):
        return replace(problem, forward=super()._fitted(problem.forward))


def adapted(fn) -> Adapted:
    """A function that may not be adapted yet."""
    return fn if isinstance(fn, Adapted) else adapt(fn)


def adapted_vjp(vjp) -> AdaptedVjp:
    """The same for gradients."""
    return vjp if isinstance(vjp, AdaptedVjp) else adapt_vjp(vjp)


def _num_positional(fn):
    """2, or 1 where the signature says so."""
    try:
        inspect.signature(fn).bind(None, None)
    except TypeError:
        return 1
    except ValueError:
        return 2
    return 2


@contextlib.contextmanager
def _unchanged(arguments):
    """AssertionError that names an argument that a call writes to."""
    arrays = {**arguments, **arguments.get("aux", {})}
    before = {name: x.tobytes() for name, x in arrays.items() if isinstance(x, np.ndarray)}
    yield
    for name, values in before.items():
        if arrays[name].tobytes() != values:
            raise AssertionError(f"{name}: changed by the call, which may only read it")


def _array(x, what):
    """A copy: the function may use its buffers again."""
    try:
        array = np.array(x)
    except Exception as error:
        raise TypeError(f"{what}: {type(x).__name__} is no NumPy array, nor made one: {error}") from error
    if array.dtype == object:
        raise TypeError(f"{what}: {type(x).__name__} is no NumPy array")
    return array


def _every_query_sees_a_key(q, k, v, options):
    """Whatever the values are."""
    options = {name: value for name, value in options.items() if name != "return_lse"}
    zeros = (np.zeros((*x.shape[:-1], 1), x.dtype) for x in (q, k, v))
    return np.isfinite(reference.attention(*zeros, return_lse=True, **options)[1]).all()
