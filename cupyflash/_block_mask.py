"""Which blocks of queries and keys a mask leaves something of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash._arrays import check_same_place
from cupyflash._layouts import Layout, Placeholder, operand_layout
from cupyflash._lengths import batches_and_heads
from cupyflash._shapes import Arrangement
from cupyflash._user_functions import names_in

BITS = 32


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A ``mask_mod`` with the blocks that it leaves a pair of, from :func:`cupyflash.block_mask`.

    ``bits`` is uint32 of shape (batch, num_heads, query blocks, ceil(key blocks / 32)), key block n at bit n % 32 of
    word n // 32; batch and num_heads are 1 where all have the same.
    """

    mask_mod: str
    aux: Mapping[str, Any]
    seqlen_q: int
    seqlen_k: int
    block_size: int
    bits: Any

    @property
    def density(self) -> float:
        """The part of all blocks that is not skipped."""
        blocks = self.to_dense()
        return float(blocks.mean()) if blocks.size else 0.0

    def to_dense(self) -> np.ndarray:
        """Bool on the host, (batch, num_heads, query blocks, key blocks): whether a block has a pair that is left."""
        words = self.bits if isinstance(self.bits, np.ndarray) else self.bits.get()
        num_blocks = -(-self.seqlen_k // self.block_size)
        blocks = words[..., None] >> np.arange(BITS, dtype=np.uint32) & 1
        return blocks.reshape(*words.shape[:-1], words.shape[-1] * BITS)[..., :num_blocks].astype(bool)

    def __repr__(self) -> str:
        batch, num_heads = self.bits.shape[:2]
        return (
            f"BlockMask({self.mask_mod!r}, seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}, batch={batch}, "
            f"num_heads={num_heads}, block_size={self.block_size}, density={self.density:.3g})"
        )

    def check_fits(self, arrangement: Arrangement, q: Any, *, with_lengths: bool) -> None:
        """Raise unless it is one for this call."""
        check_same_place(self.bits, "mask_mod", q, arrangement.kind)
        if with_lengths or arrangement.packed:
            raise ValueError(f"mask_mod: {self!r} is not for batches with lengths of their own; give the expression")
        sizes = {"seqlen_q": arrangement.seqlen_q, "seqlen_k": arrangement.seqlen_k}
        for name, size in sizes.items():
            if getattr(self, name) != size:
                raise ValueError(f"mask_mod: {self!r} is not for {name} {size}")
        allowed = batches_and_heads(arrangement.leading_shape)
        for name, own, size in zip(("batch", "num_heads"), self.bits.shape, allowed, strict=False):
            if own not in (1, size):
                raise ValueError(f"mask_mod: {self!r}, expected {name} 1 or {size}")
            place, plural = ("b", "batches") if name == "batch" else ("h", "heads")
            if own < size and place in names_in(self.mask_mod):
                raise ValueError(
                    f"mask_mod: depends on {place}, but its block mask was made for {name} {own}; the call has {size} "
                    f"{plural}: use block_mask(..., {name}={size})"
                )

    def joined_aux(self, aux: Any) -> Any:
        """Its arrays and those that a call gives for its score_mod."""
        if not isinstance(aux, Mapping):
            return self.aux if aux is None else aux
        for name in aux:
            if name in self.aux and aux[name] is not self.aux[name]:
                raise ValueError(f"aux: {name!r} is an array of the BlockMask already")
        return {**self.aux, **aux}

    def layout(self, arrangement: Arrangement) -> Layout:
        """Of the bits, as a matrix for each matrix of the result."""
        leading = arrangement.leading_shape
        batch, num_heads, *rows = self.bits.shape
        if len(leading) < 2:
            shape = (batch,) if leading else ()
        else:
            shape = (*(leading[:-1] if batch > 1 else ()), num_heads)
        bits = Placeholder.contiguous((*shape, *rows), self.bits.dtype)
        return operand_layout("mask", bits, leading, arrangement.grouped_heads)
