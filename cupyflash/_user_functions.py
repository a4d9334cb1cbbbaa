"""A user's score_mod and mask_mod, from expressions to CUDA functions that every kernel may include."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._arrays import BFLOAT16, FLOAT16

#: How a function receives an array. What is no pointer reads 16-bit floats as float (pair.cuh).
ARRAY_TYPES = {
    np.dtype(dtype): f"const {name}*"
    for dtype, name in (
        (np.bool_, "bool"),
        (np.int8, "signed char"),
        (np.uint8, "unsigned char"),
        (np.int16, "short"),
        (np.uint16, "unsigned short"),
        (np.int32, "int"),
        (np.uint32, "unsigned int"),
        (np.int64, "long long"),
        (np.uint64, "unsigned long long"),
        (np.float32, "float"),
        (np.float64, "double"),
    )
} | {FLOAT16: "::HalfArray", BFLOAT16: "::BFloat16Array"}

PLACES = ("b", "h", "i", "j", "L", "S")
_FILES = ("score_mod", "mask_mod", "aux")  # that compiler messages name
_MESSAGE = re.compile(r"^(?P<file>\w[\w./]*)\((?P<line>\d+)\): (catastrophic )?error", re.MULTILINE)
_CALLED_FROM = re.compile(r'at line (?P<line>\d+) of "?(?P<file>score_mod|mask_mod)\b')

_NOT_AN_ARRAY = "expression must have pointer-to-object type"  # the second subscript of rel[i][j]
_NOTES = re.compile(r"\n[^\n]*note #")  # about the kernels' own lines


@dataclass(frozen=True)
class UserFunctions:
    """Expressions, and the arrays that they may name: (name, dtype) of each."""

    score_mod: str | None
    mask_mod: str | None
    aux: tuple[tuple[str, np.dtype], ...]

    @property
    def constants(self) -> dict[str, int]:
        """Of variant.cuh."""
        return {name.upper(): 1 for name in ("score_mod", "mask_mod") if getattr(self, name) is not None}

    def source(self, defines: Mapping[str, int | str]) -> str:
        """What stands for ``#include "user_functions.cuh"`` in a kernel with these constants.

        An expression is the body of a function whose parameters are what it may name, so that they hide whatever the
        kernels call by these names. Types are qualified, for parameters hide types, too; a constant of the name of an
        array is undefined meanwhile. Messages of the compiler count the expression's own lines.
        """
        hidden = [name for name, _ in self.aux if name in defines]
        return "\n".join(
            [
                '#include "pair.cuh"',
                '#include "differentiable.cuh"',
                "struct AuxArrays {",
                *(f"    {ARRAY_TYPES[dtype]} array_{number};" for number, (_, dtype) in enumerate(self.aux)),
                "};",
                *(f"#undef {name}" for name in hidden),
                *self._function("score_mod", "::Differentiable", "const ::Differentiable score"),
                *self._function("mask_mod", "bool"),
                *(f"#define {name} {defines[name]}" for name in hidden),
                "",
            ]
        )

    def _function(self, name: str, result: str, *first: str) -> list[str]:
        expression = getattr(self, name)
        if expression is None:
            return []
        arrays = [f", {ARRAY_TYPES[dtype]} const {array}" for array, dtype in self.aux]
        places = ", ".join([*first, *(f"const int {place}" for place in PLACES)])
        with_score = bool(first)
        outer = (
            "Dual score, const Pair& pair, const AuxArrays& aux"
            if with_score
            else "const Pair& pair, const AuxArrays& aux"
        )
        inner = ["Differentiable(score)"] * with_score + [f"pair.{place}" for place in PLACES]
        inner += [f"aux.array_{number}" for number in range(len(self.aux))]
        call = f"{name}_expression({', '.join(inner)})"
        return [
            f"__device__ __forceinline__ {result} {name}_expression({places}",
            '#line 1 "aux"',
            *arrays,
            ") {",
            "return (",
            f'#line 1 "{name}"',
            expression,
            ");",
            '#line 1 "user_functions.cuh"',
            "}",
            f"__device__ __forceinline__ {'Dual' if with_score else 'bool'} {name}({outer}) {{",
            f"    return {f'opened({call})' if with_score else call};",
            "}",
        ]

    def error(self, log: str) -> ValueError | None:
        """What to say where the compiler's log is about these functions."""
        found = self._faulty(log)
        if found is None:
            return None
        name, line, message = found
        if name == "aux":
            array, _ = self.aux[min(line, len(self.aux)) - 1]
            return ValueError(
                f"aux: {array!r} cannot be the name of a variable in CUDA C++; the compiler says\n{message}"
            )
        expression = getattr(self, name)
        if _NOT_AN_ARRAY in message and self.aux:
            message += f"\n{_flat(self.aux[0][0])}"
        return ValueError(
            f"{name}: {expression!r} is not a CUDA C++ expression of the names allowed; the compiler says\n{message}"
        )

    def _faulty(self, log: str) -> tuple[str, int, str] | None:
        """File, line and text of the first error that has to do with a user's line."""
        for message in log.split("\n\n"):
            match = _MESSAGE.search(message)
            if match is None:
                continue
            if match["file"] in _FILES:
                return match["file"], int(match["line"]), _NOTES.split(message[match.start() :])[0].rstrip()
            if called := _CALLED_FROM.search(message):
                what = message.partition("error: ")[2].partition("\n")[0]
                return called["file"], int(called["line"]), f"{called['file']}({called['line']}): error: {what}"
        return None


def user_functions(problem: Any) -> UserFunctions | None:
    """Of a problem, or None where it has none."""
    if problem.score_mod is None and problem.mask_mod is None:
        return None
    aux = tuple((name, array.dtype) for name, array in problem.aux.items())
    return UserFunctions(problem.score_mod, problem.mask_mod, aux)


def aux_dtype(aux: Mapping[str, Any]) -> np.dtype:
    """``AuxArrays``; an empty structure is one byte."""
    return np.dtype([(f"array_{number}", np.uint64) for number in range(len(aux))] or [("empty", np.uint8)], align=True)


def aux_params(aux: Mapping[str, Any]) -> dict[str, Any]:
    """Values of ``AuxArrays``."""
    return {f"array_{number}": array for number, array in enumerate(aux.values())}


#: What may be no part of an expression, so that it cannot end and something else begin.
_FORBIDDEN = re.compile(r"""["'#\\]|%:|%>|:>""")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_BRACKETS = {")": "(", "]": "[", "}": "{"}
#: What an opening bracket is a subscript of; nothing before the captures of a lambda expression.
_SUBSCRIPTED = re.compile(r"(?P<array>(?!return\b)\b[A-Za-z_]\w*|[)\]])\s*$")


def names_in(expression: str) -> set[str]:
    """The identifiers, keywords too.

    >>> sorted(names_in("x[b] > 0x1b /* h */"))
    ['b', 'x']
    """
    return set(re.findall(r"\b[A-Za-z_]\w*", _COMMENT.sub(" ", expression)))


def check_one_expression(name: str, expression: str) -> None:
    """Raise ValueError where the text, put between brackets, would close them, and for a comma in a subscript."""
    code = _COMMENT.sub(" ", expression)
    if forbidden := _FORBIDDEN.search(code):
        raise ValueError(f"{name}: {forbidden[0]!r} in {expression!r} is not a part of an expression")
    opened = []
    for place, character in enumerate(code):
        if character in "([{":
            opened.append(place)
        elif character in _BRACKETS and (not opened or code[opened.pop()] != _BRACKETS[character]):
            raise ValueError(f"{name}: {character!r} in {expression!r} closes nothing")
        elif character == "," and opened and code[opened[-1]] == "[":
            # The comma operator: rel[i, j] is rel[j].
            if found := _SUBSCRIPTED.search(code[: opened[-1]]):
                array = found["array"] if found["array"].isidentifier() else ""
                subscript = code[opened[-1] :].partition("]")[0] + "]"
                raise ValueError(f"{name}: {array + subscript!r}: {_flat(array or 'x')}")


def _flat(array: str) -> str:
    return f"arrays of aux are flat, as in C: {array}[i * n + j]"
