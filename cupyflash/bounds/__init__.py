"""Rigorous bounds on the error of each element of a result, against :mod:`cupyflash.reference`.

``attention``, ``attention_varlen``, their ``_backward`` and ``merge`` bound the functions of those names in
:mod:`cupyflash`, ``attention_naive`` and ``attention_naive_backward`` those in :mod:`cupyflash.naive`,
``attention_in_parts`` attention in :mod:`cupyflash.distributed`.
A bound is infinite where a call promises nothing. ``attention_terms`` and ``attention_backward_terms`` say what each
source of error contributes to a bound.
"""

from cupyflash.bounds.backward import attention_backward, attention_backward_terms, attention_naive_backward
from cupyflash.bounds.forward import attention, attention_terms
from cupyflash.bounds.merge import merge
from cupyflash.bounds.naive import attention_naive
from cupyflash.bounds.parts import attention_in_parts
from cupyflash.bounds.varlen import attention_varlen, attention_varlen_backward

__all__ = [
    "attention",
    "attention_backward",
    "attention_backward_terms",
    "attention_in_parts",
    "attention_naive",
    "attention_naive_backward",
    "attention_terms",
    "attention_varlen",
    "attention_varlen_backward",
    "merge",
]
