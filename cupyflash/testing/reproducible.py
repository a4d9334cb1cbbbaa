"""Problems say how to make them again."""

import math
from dataclasses import fields


def pasteable(value):
    """``repr``, evaluated to the same value also where numbers are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{float(value)}')"
    if isinstance(value, list):
        return f"[{', '.join(map(pasteable, value))}]"
    if isinstance(value, tuple):
        return f"({''.join(f'{pasteable(x)}, ' for x in value).removesuffix(' ' if len(value) == 1 else ', ')})"
    return repr(value)


class Reproducible:
    """A dataclass whose ``repr`` names what differs from the defaults, and makes it again when evaluated."""

    def __repr__(self):
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={pasteable(value)}' for name, value in changed)})"

    def _repr_pretty_(self, printer, cycle):
        """What Hypothesis prints."""
        printer.text(repr(self))
