"""Kernel sources: one self-contained string per specialisation.

CuPy's compile cache hashes the source text but not the files that it includes, so includes are resolved here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import kernels_cu

_INCLUDE = re.compile(r'^#include "([^"]+)"$')


def render(kernel: str, defines: Mapping[str, int | str]) -> str:
    """Return the source of ``kernels_cu/<kernel>.cu`` with its constants defined and its includes written out.

    Every file is included once, where it is first named. ``#line`` directives keep file names and line numbers of
    compiler messages, profiles and debuggers those of the files in ``kernels_cu``.

    >>> print(render("strided_copy", {"ELEMENT_BYTES": 2}).partition("#line")[0], end="")
    #define ELEMENT_BYTES 2
    """
    constants = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    return constants + _resolved(f"{kernel}.cu")


@functools.cache
def _resolved(name: str) -> str:
    return "\n".join(_lines(name, set())) + "\n"


def _lines(name: str, included: set[str]) -> list[str]:
    included.add(name)
    lines = [f'#line 1 "kernels_cu/{name}"']
    for number, line in enumerate(kernels_cu.source(name).splitlines(), start=1):
        match = _INCLUDE.match(line)
        if match is None:
            if line.lstrip().startswith("#include"):
                raise ValueError(f'kernels_cu/{name}:{number}: kernels include only "*.cuh" beside them, not {line}')
            lines.append(line)
        elif match[1] in included:
            lines.append("")
        else:
            lines += _lines(match[1], included)
            lines.append(f'#line {number + 1} "kernels_cu/{name}"')
    return lines
