"""Attention over Dask arrays, whose chunks are NumPy or CuPy arrays: sequences and batches that outgrow one machine.

``attention`` and ``attention_backward`` make Dask's own graphs, for any of its schedulers. Each chunk of queries meets
each chunk of keys in one task, unless all of that pair is masked.
"""

from cupyflash.distributed.attention import attention
from cupyflash.distributed.backward import attention_backward

__all__ = ["attention", "attention_backward"]
