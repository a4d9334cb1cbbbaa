"""Text of source lines, as `#line` directives number them."""

import re

from ..compile import SOURCE_NAME

_DIRECTIVE = re.compile(r'\s*#\s*(?:line\s+)?(\d+)(?:\s+"([^"]*)")?\s*$')


def line_texts(code):
    """(file, line number) -> text of every line of a module's CUDA C++; None, where that is not known, has no lines.

    >>> line_texts('a\\n#line 7 "k.cuh"\\nb')
    {('kernel.cu', 1): 'a', ('k.cuh', 7): 'b'}
    """
    file, number, texts = SOURCE_NAME, 1, {}
    for text in (code or "").splitlines():
        directive = _DIRECTIVE.match(text)
        if directive:
            file, number = directive[2] or file, int(directive[1])
        else:
            texts[file, number] = text
            number += 1
    return texts
