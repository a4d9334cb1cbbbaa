"""The standard method of attention, which stores every score: the baseline that a tiled kernel is compared with."""

from __future__ import annotations

from cupyflash import _config, _launch
from cupyflash._launch import Launch
from cupyflash._problem import Align, attention_problem, merge_batch_dims


def attention(
    q,
    k,
    v,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    return_lse: bool = False,
    out=None,
):
    """The same function as :func:`cupyflash.attention`, in three kernels that write S and P to device memory.

    Shapes, options, results and errors are those of :func:`cupyflash.attention`. q, k and v may also be float32, and
    float64 with everything computed in float64 (lse too). Scores and weights are stored in the inputs' dtype, as
    frameworks do: a float16 score beyond 65504 overflows. Extra device memory: L * S elements per head.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 8))
    >>> attention(q, k, v).dtype
    dtype('float64')
    """
    problem = attention_problem(q, k, v, softmax_scale=softmax_scale, causal=causal, align=align, out=out)
    device = _launch.device_of(problem.kind, q)
    configs = _config.attention_naive(problem, device.arch)
    with device:
        if out is None:
            out = device.empty(problem.out_shape, problem.dtype)
        lse = device.empty(problem.lse_shape, problem.lse_dtype) if return_lse else None
        scores = device.empty((problem.num_batches, problem.seqlen_q, problem.seqlen_k), problem.dtype)
        layouts = {"query": problem.q, "key": problem.k, "value": problem.v, "out": problem.layout(out)}
        sizes, batch_strides = merge_batch_dims(
            problem.batch_shape, *(layout.batch_strides for layout in layouts.values())
        )
        operands = {
            name: {
                "data": device.address(array),
                "row_stride": layouts[name].row_stride,
                "column_stride": layouts[name].column_stride,
                "batch_stride": strides,
            }
            for name, array, strides in zip(layouts, (q, k, v, out), batch_strides, strict=True)
        }
        params = _launch.pack(
            _launch.attention_naive_params(problem.lse_dtype),
            **operands,
            scores=device.address(scores),
            lse=0 if lse is None else device.address(lse),
            batch=_launch.batch_shape(sizes),
            num_batches=problem.num_batches,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            # Without a mask every query sees the last key.
            causal_shift=problem.causal_shift if problem.causal else problem.seqlen_k,
            scale=problem.softmax_scale,
        )
        arrays = (q, k, v, out, scores, *(() if lse is None else (lse,)))
        _launch.run(device, [Launch(config, params, arrays) for config in configs])
    return (out, lse) if return_lse else out
