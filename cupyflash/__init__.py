"""Exact attention for NumPy and CuPy arrays, compiled from CUDA C++ at first use.

``attention`` runs the tiled kernels, ``reference.attention`` is exact and ``bounds.attention`` says how far from it
each element may be; all take the same arguments, and each has its ``attention_backward``. ``attention_varlen`` is for
packed batches, ``naive.attention`` the standard method, without most options; ``warmup`` compiles ahead. CuPy arrays
are computed on their GPU, NumPy arrays by the same kernels in the simulator ``ptxsim``. ``testing``, which needs
Hypothesis, puts attention of one's own to the test.
"""

from cupyflash import bounds, naive, reference
from cupyflash._block_mask import BlockMask
from cupyflash._gradients import Gradients
from cupyflash._numerics import Numerics
from cupyflash.attention import attention
from cupyflash.backward import attention_backward, attention_vjp
from cupyflash.block_mask import block_mask
from cupyflash.dropout import dropout_mask
from cupyflash.merge import merge
from cupyflash.varlen import attention_varlen, attention_varlen_backward, attention_varlen_vjp
from cupyflash.warmup import warmup

__all__ = [
    "BlockMask",
    "Gradients",
    "Numerics",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "block_mask",
    "bounds",
    "dropout_mask",
    "merge",
    "naive",
    "reference",
    "warmup",
]

__version__ = "0.1.0"
