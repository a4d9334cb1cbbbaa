"""A user's score_mod and mask_mod by themselves, in float64: what the reference and bounds take of them.

The kernel pair_functions.cu computes them on the host, in the simulator, from the very expressions and the number type
that the attention kernels are compiled with.
"""

from __future__ import annotations

import math

import numpy as np

from cupyflash import _config, _launch
from cupyflash._arrays import FLOAT64
from cupyflash._lengths import heads_of, per_batch
from cupyflash._problem import Problem
from cupyflash._user_functions import aux_dtype, aux_params, user_functions

THREADS = 256
_FIRST = ("first_batch", "first_head", "first_query", "first_key")
_ARRAYS = ("score", "score_error", "value", "derivative", "value_error", "derivative_error", "keep", "bits")


def evaluate(problem: Problem, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """score_mod of scores, and its derivative in them.

    ``scores`` is float64 of shape (*leading_shape, L, S), and so are the results; 0 where a pair does not exist.
    """
    score = np.ascontiguousarray(scores, float)
    value, derivative = np.zeros_like(score), np.zeros_like(score)
    _run(problem, "score_values", score=score, value=value, derivative=derivative)
    return value, derivative


def evaluate_mask(problem: Problem) -> np.ndarray:
    """mask_mod, bool of shape (*leading_shape, L, S); False where a pair does not exist."""
    keep = np.zeros((*problem.leading_shape, problem.seqlen_q, problem.seqlen_k), bool)
    _run(problem, "mask_values", keep=keep)
    return keep


def evaluate_with_error(
    problem: Problem, scores: np.ndarray, score_error: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """value, derivative, value_error and derivative_error: those of :func:`evaluate`, and how far the kernels of the
    problem's dtype may be from each, given scores that err by at most ``score_error``.

    A running error analysis of the operations that the kernels do (running_error.cuh): infinite where it finds no
    bound, as where more than six comparisons are within the error, and one evaluation for each way that fewer may go.
    What an expression computes without the score is the same in the kernels, bit for bit, up to where it meets the
    score: a constant is then rounded once. In float32 every operation may flush a result to zero; in float64 each
    rounding counts twice, for the kernel and for this function.
    """
    value, derivative = evaluate(problem, scores)
    score = np.ascontiguousarray(scores, float)
    score_error = np.ascontiguousarray(np.broadcast_to(score_error, score.shape), float)
    value_error, derivative_error = np.zeros_like(score), np.zeros_like(score)
    narrow = problem.dtype != FLOAT64
    limits = np.finfo(np.float32 if narrow else np.float64)
    defines = {
        "ERRORS": 1,
        "NARROW": int(narrow),
        "UNIT_ROUNDOFF": "(0x1p-24 + 0x1p-52)" if narrow else "0x1p-52",
        "SMALLEST": float(limits.tiny).hex(),
        "LARGEST": float(limits.max).hex(),
    }
    _run(
        problem, "score_errors", defines, score=score, score_error=score_error, value=value, derivative=derivative,
        value_error=value_error, derivative_error=derivative_error,
    )  # fmt: skip
    return value, derivative, value_error, derivative_error


def _run(problem: Problem, kernel: str, defines: dict[str, int | str] | None = None, **arrays: np.ndarray) -> None:
    pairs = math.prod(problem.leading_shape) * problem.seqlen_q * problem.seqlen_k
    shape = (*problem.leading_shape, problem.seqlen_q, problem.seqlen_k)
    for name, array in arrays.items():
        if array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}, expected {shape}")
    functions = user_functions(problem)
    aux = {name: array if problem.kind == "numpy" else array.get() for name, array in problem.aux.items()}
    lengths = {
        "seqlens_q": _lengths(problem, "seqlens_q", problem.seqlen_q),
        "seqlens_k": _lengths(problem, "seqlens_k", problem.seqlen_k),
    }
    device = _launch.Simulator()
    params = _launch.pack(
        params_dtype(aux),
        **arrays,
        **lengths,
        num_pairs=pairs,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        num_heads=heads_of(problem.leading_shape),
        **dict(zip(_FIRST, problem.origin, strict=True)),
        aux=aux_params(aux),
    )
    config = _config.KernelConfig(
        file="pair_functions",
        name=kernel,
        defines={"THREADS": THREADS, "ERRORS": 0, **functions.constants, **(defines or {})},
        grid=_config.grid_of(_config.ceil_div(pairs, THREADS)),
        block=THREADS,
        user_functions=functions,
    )
    _launch.run(device, [_launch.Launch(config, *params)])


def params_dtype(aux) -> np.dtype:
    return np.dtype(
        [
            *((name, np.uint64) for name in (*_ARRAYS, "seqlens_q", "seqlens_k")),
            ("num_pairs", np.int64),
            *((name, np.int32) for name in ("seqlen_q", "seqlen_k", "num_heads", *_FIRST)),
            ("aux", aux_dtype(aux)),
        ],
        align=True,
    )


def _lengths(problem: Problem, name: str, longest: int) -> np.ndarray:
    """int32, one for each matrix."""
    if problem.packed:
        lengths = np.diff(problem.packed.offsets_q if name == "seqlens_q" else problem.packed.offsets_k)
    else:
        lengths = problem.operands.get(name, np.int32(longest))
    shape = problem.leading_shape
    batches = np.broadcast_to(lengths, per_batch(shape))
    of_heads = batches.reshape((*batches.shape, *(1 for _ in shape[batches.ndim :])))
    return np.broadcast_to(of_heads, shape).astype(np.int32, order="C")
