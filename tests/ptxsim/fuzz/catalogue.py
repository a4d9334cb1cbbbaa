"""Every form that the fuzz knows."""

from . import (
    approximate_forms,
    choice_forms,
    convert_forms,
    float_forms,
    integer_forms,
    memory_forms,
    warp_forms,
)

SCALAR = tuple(
    form
    for module in (integer_forms, float_forms, approximate_forms, convert_forms, choice_forms)
    for form in module.all_forms()
)
WARP = tuple(warp_forms.all_forms())
MEMORY = tuple(memory_forms.all_forms())
FORMS = (*SCALAR, *WARP, *MEMORY)


def by_opcode(forms):
    """Opcode -> its forms, so that a choice of opcode first gives rare ones their share."""
    found = {}
    for form in forms:
        found.setdefault(form.opcode, []).append(form)
    return found
