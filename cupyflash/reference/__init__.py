"""The exact reference: attention written as the definition, with every variant.

Computed in float64, and for float64 inputs in double-double: either way far more precise than what is judged by it.
"""

from cupyflash.reference.backward import attention_backward
from cupyflash.reference.forward import attention
from cupyflash.reference.merge import merge
from cupyflash.reference.varlen import attention_varlen, attention_varlen_backward

__all__ = ["attention", "attention_backward", "attention_varlen", "attention_varlen_backward", "merge"]
