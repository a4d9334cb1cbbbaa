"""Kernel sources: one self-contained string per specialisation.

CuPy's compile cache hashes the source text but not the files that it includes, so includes are resolved here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import kernels_cu
from cupyflash._user_functions import UserFunctions

_INCLUDE = re.compile(r'^#include "([^"]+)"$')
_USER_FUNCTIONS = "user_functions.cuh"


def render(kernel: str, defines: Mapping[str, int | str], functions: UserFunctions | None = None) -> str:
    """Return the source of ``kernels_cu/<kernel>.cu`` with its constants defined and its includes written out.

    The include "user_functions.cuh" is no file: it stands for ``functions``, or for nothing. Every other is written out
    once, where it is first named. ``#line`` directives keep file names and line numbers of compiler messages, profiles
    and debuggers those of the files in ``kernels_cu``.

    >>> print(render("strided_copy", {"ELEMENT_BYTES": 2}).partition("#line")[0], end="")
    #define ELEMENT_BYTES 2
    """
    constants = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return constants + _resolved(f"{kernel}.cu", functions.source(defines) if functions else None)


@functools.lru_cache(maxsize=256)
def _resolved(name: str, functions: str | None) -> str:
    return "\n".join(_lines(name, set() if functions else {_USER_FUNCTIONS}, functions)) + "\n"


def _lines(name: str, included: set[str], functions: str | None = None) -> list[str]:
    included.add(name)
    text = functions if name == _USER_FUNCTIONS else kernels_cu.source(name)
    lines = [f'#line 1 "kernels_cu/{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        match = _INCLUDE.match(line)
        if match is None:
            if line.lstrip().startswith("#include"):
                raise ValueError(f'kernels_cu/{name}:{number}: kernels include only "*.cuh" beside them, not {line}')
            lines.append(line)
        elif match[1] in included:
            lines.append("")
        else:
            lines += _lines(match[1], included, functions)
            lines.append(f'#line {number + 1} "kernels_cu/{name}"')
    return lines
