"""The marker `ptxsim`: how the kernels of one test, or of a class of them, are to run."""

import dataclasses

from ..sanitizer import KINDS
from ..settings import Settings, settings

_CHOICES = ("sanitize", "allow", *(field.name for field in dataclasses.fields(Settings)))


def choices_for(item):
    """Whether the sanitizer watches a test, the kinds of findings that do not fail it, and its settings by name.

    ValueError for a choice that there is not, and for a value that it cannot have.
    """
    option = item.config.option
    choices = {"sanitize": option.ptxsim_sanitize, "allow": option.ptxsim_allow}
    for marker in reversed(list(item.iter_markers("ptxsim"))):  # the closest one last
        if marker.args:
            raise ValueError(f"{marker.args[0]!r}: choices are given by name: {', '.join(_CHOICES)}")
        choices.update(marker.kwargs)
    if unknown := sorted(set(choices) - set(_CHOICES)):
        raise ValueError(f"no choice {', '.join(unknown)}; there are {', '.join(_CHOICES)}")
    watched, allowed = choices.pop("sanitize"), choices.pop("allow")
    if not isinstance(allowed, list | tuple | set | frozenset):
        raise ValueError(f"allow: {allowed!r}, must be a list of kinds")
    for kind in allowed:
        if kind not in KINDS:
            raise ValueError(f"allow: no kind {kind!r}; there are {', '.join(KINDS)}")
    with settings(**choices):  # raises what cannot be
        return watched, allowed, choices
