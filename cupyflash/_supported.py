"""Which options the kernels compute by now; a call with any other is refused, never answered without it."""

from __future__ import annotations

from collections.abc import Collection

from cupyflash._numerics import PLAIN
from cupyflash._problem import Problem

#: Options beside softmax_scale, causal, align and a window's right edge.
FORWARD = frozenset(
    {
        "window_size",
        "softcap",
        "bias",
        "mask",
        "alibi_slopes",
        "attn_sink",
        "seqlens_q",
        "seqlens_k",
        "dropout_p",
        "return_max",
        "score_mod",
        "mask_mod",
        "cu_seqlens",
        "split_size",
        "numerics",
    }
)
BACKWARD = frozenset(
    {
        "window_size",
        "softcap",
        "bias",
        "mask",
        "alibi_slopes",
        "attn_sink",
        "seqlens_q",
        "seqlens_k",
        "dropout_p",
        "split_size",
        "score_mod",
        "mask_mod",
        "numerics",
    }
)
BACKWARD_HALF = BACKWARD | {"cu_seqlens"}


def options_of(problem: Problem) -> set[str]:
    """Names of the options that make the problem another than the plain one.

    >>> import numpy as np
    >>> from cupyflash._problem import attention_problem
    >>> x = np.zeros((4, 8), np.float16)
    >>> sorted(options_of(attention_problem(x, x, x, causal=True, window_size=(2, None), softcap=30.0)))
    ['softcap', 'window_size']
    """
    given = {
        "cu_seqlens": problem.packed is not None,
        "window_size": problem.window[0] is not None,
        "softcap": problem.softcap is not None,
        "dropout_p": problem.dropout_p > 0,
        "score_mod": problem.score_mod is not None,
        "mask_mod": problem.mask_mod is not None,
        "split_size": problem.split_size is not None,
        "numerics": problem.numerics != PLAIN,
    }
    return {*problem.operands, *(name for name, value in given.items() if value)}


def check_supported(problem: Problem, supported: Collection[str], where: str, *, return_max: bool = False) -> None:
    missing = sorted((options_of(problem) | ({"return_max"} if return_max else set())) - set(supported))
    if missing:
        raise NotImplementedError(f"{', '.join(missing)}: not supported by {where} yet")
