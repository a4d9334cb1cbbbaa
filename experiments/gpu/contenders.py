"""Attention by this library and by others, on a GPU, for the same problem: what is timed, and what memory it takes.

Each is prepared once, with arrays of its own library, and gives a call that returns a tuple of its results, (batch,
heads, seqlen, head_dim): (out,) forward, (dq, dk, dv) backward. What belongs to the forward is done before the call of
a backward.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupyflash
from cupyflash import naive
from experiments.gpu.cudnn_graph import cudnn_attention
from experiments.gpu.problems import FORWARD, Problem
from experiments.gpu.stopwatch import Call

OURS = "cupyflash"
TORCH_BACKENDS = {
    "torch, flash": "FLASH_ATTENTION",
    "torch, efficient": "EFFICIENT_ATTENTION",
    "torch, cudnn": "CUDNN_ATTENTION",
    "torch, math": "MATH",
}


def ours(problem: Problem, direction: str, library: Any = cupyflash, **options) -> Call:
    """By the tiled kernels of this library, or by its standard method."""
    q, k, v, dout = problem.arrays
    if problem.shape.causal:
        options["causal"] = True
    if direction == FORWARD:
        return lambda: (library.attention(q, k, v, **options),)
    out, lse = library.attention(q, k, v, return_lse=True, **options)
    return lambda: tuple(library.attention_backward(dout, q, k, v, out, lse, **options))


def stacked(xp: Any, a: Any, b: Any) -> Any:
    """The product as one writes it. Of stacks, CuPy to 14.2 takes float16 through float32, and no bfloat16.

    (https://github.com/cupy/cupy/pull/10317)
    """
    return xp.matmul(a, b)


def head_by_head(xp: Any, a: Any, b: Any) -> Any:
    """One matrix at a time, which CuPy hands to tensor cores in both dtypes; the host limits many short ones."""
    out = xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    for index in np.ndindex(a.shape[:-2]):
        xp.matmul(a[index], b[index], out=out[index])
    return out


def standard(problem: Problem, direction: str, product: Callable[[Any, Any, Any], Any] = stacked) -> Call:
    """Products with a softmax between them, in the inputs' dtype with sums in float32; for the backward P is kept.

    Query heads that share a key head are rows of one matrix.
    """
    xp, shape = problem.module, problem.shape
    q, k, v, dout = problem.arrays
    q, dout = (x.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim) for x in (q, dout))
    scale = shape.head_dim**-0.5
    if shape.causal:
        hidden = xp.arange(shape.seqlen_k) > xp.arange(shape.seqlen_q)[:, None]
        mask = xp.where(hidden, np.float32(-np.inf), np.float32(0)).astype(q.dtype)
        del hidden

    def weights():
        scores = product(xp, q, k.swapaxes(-1, -2))
        scores *= scale
        if shape.causal:
            scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True, dtype=np.float32).astype(q.dtype)
        return scores

    if direction == FORWARD:
        return lambda: (product(xp, weights(), v).reshape(shape.arrays[0]),)
    p = weights()

    def backward():
        dv = product(xp, p.swapaxes(-1, -2), dout)
        ds = product(xp, dout, v.swapaxes(-1, -2))
        ds -= (ds * p).sum(axis=-1, keepdims=True, dtype=np.float32).astype(q.dtype)
        ds *= p
        ds *= scale
        return product(xp, ds, k).reshape(shape.arrays[0]), product(xp, ds.swapaxes(-1, -2), q), dv

    return backward


def torch_attention(backend: str, problem: Problem, direction: str) -> Call:
    """scaled_dot_product_attention by one of its implementations."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q, k, v):
        grouped = {} if q.shape[1] == k.shape[1] else {"enable_gqa": True}
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.shape.causal, **grouped)

    return _of_tensors(attention, problem.tensors, direction)


def flash_attn(problem: Problem, direction: str) -> Call:
    """The package flash-attn, which has (batch, seqlen, heads, head_dim)."""
    from flash_attn import flash_attn_func

    def attention(q, k, v):
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=problem.shape.causal).transpose(1, 2)

    own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in problem.tensors]
    return _of_tensors(attention, own, direction)


def _of_tensors(attention: Callable, tensors: list[Any], direction: str) -> Call:
    import torch

    *inputs, dout = tensors
    if direction == FORWARD:

        def forward():
            with torch.no_grad():
                return (attention(*inputs),)

        return forward
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


@dataclass(frozen=True)
class Contender:
    """What prepares its call for a problem and a direction, whose memory it takes, and whether for all scores."""

    prepare: Callable[[Problem, str], Call]
    package: str = "cupy"
    stores_scores: bool = False


def contenders() -> dict[str, Contender]:
    """Those that are installed, ours first."""
    found = {
        OURS: Contender(ours),
        "cupyflash, standard method": Contender(functools.partial(ours, library=naive), stores_scores=True),
        "CuPy: matmul, softmax, matmul": Contender(standard, stores_scores=True),
        "CuPy, head by head": Contender(functools.partial(standard, product=head_by_head), stores_scores=True),
    }
    if importlib.util.find_spec("cudnn"):
        found["cuDNN"] = Contender(cudnn_attention)
    if importlib.util.find_spec("torch"):
        for name, backend in TORCH_BACKENDS.items():
            prepare = functools.partial(torch_attention, backend)
            found[name] = Contender(prepare, "torch", stores_scores=backend == "MATH")
        if importlib.util.find_spec("flash_attn"):
            found["flash-attn"] = Contender(flash_attn, "torch")
    return found


def on_host(result: Any) -> np.ndarray:
    """The first head of a result, as float32: enough to see whether two agree."""
    head = result[0, 0]
    if hasattr(head, "detach"):
        return head.detach().float().cpu().numpy()
    return (head.get() if hasattr(head, "get") else head).astype(np.float32)


def free_memory(cupy: Any) -> None:
    """Give back what the libraries keep for later."""
    cupy.get_default_memory_pool().free_all_blocks()
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            torch.cuda.empty_cache()
