"""The standard method of attention, which stores every score: the baseline that a tiled kernel is compared with."""

from __future__ import annotations

import math

from cupyflash import _backward_config, _config, _launch, _packing
from cupyflash._gradients import Gradients, backward_problem, made
from cupyflash._launch import Launch
from cupyflash._layouts import Layout, merge_batch_dims
from cupyflash._options import Align
from cupyflash._problem import Problem, attention_problem
from cupyflash._summation import summation


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

    Shapes, dtypes, options, results and errors are those of :func:`cupyflash.attention`. Scores and weights are stored
    in the inputs' dtype, as frameworks do: a float16 score beyond 65504 overflows. Extra device memory: L * S elements
    per head.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 8))
    >>> attention(q, k, v).dtype
    dtype('float64')
    """
    problem = attention_problem(
        q, k, v, softmax_scale=softmax_scale, causal=causal, align=align, return_lse=return_lse, out=out
    )
    device = _launch.device_of(problem.kind, q)
    configs = _config.attention_naive(problem, device.arch)
    with device:
        if out is None:
            out = device.empty(problem.out_shape, problem.dtype)
        lse = device.empty(problem.lse_shape, problem.lse_dtype) if return_lse else None
        scores = device.empty((problem.num_batches, problem.seqlen_q, problem.seqlen_k), problem.dtype)
        params = _forward_params(problem, q, k, v, out, scores, lse)
        _launch.run(device, [Launch(config, *params) for config in configs])
    return (out, lse) if return_lse else out


def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    grads_out=None,
) -> Gradients:
    """The same function as :func:`cupyflash.attention_backward`, in kernels that write P, dP and dS to device memory.

    Arguments, results and errors are those of :func:`cupyflash.attention_backward`. out and lse are not used: P is
    computed again as the forward does. Extra device memory: 2 * L * S elements per head.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 8))
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> dv.dtype, bool(np.allclose(dv.sum(axis=0), 4))
    (dtype('float64'), True)
    """
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, softmax_scale=softmax_scale, causal=causal, align=align, grads_out=grads_out
    )
    device = _launch.device_of(problem.kind, q)
    scores_config, softmax_config, _ = _config.attention_naive(problem, device.arch)
    with device:
        gradients = made(device, problem, (q, k, v), grads_out)
        shape = (problem.num_batches, problem.seqlen_q, problem.seqlen_k)
        weights, dscores = (device.empty(shape, problem.dtype) for _ in range(2))
        params = _forward_params(problem, q, k, v, out, weights, None)
        launches = [Launch(config, *params) for config in (scores_config, softmax_config)]
        dlse, copies = _packing.contiguous_rows(device, problem, dlse)
        launches += copies

        arrays = {"query": q, "key": k, "value": v, "dout": dout, "weights": weights, "dscores": dscores}
        pairs = _pair_layout(problem)
        layouts = {
            "query": problem.q,
            "key": problem.k,
            "value": problem.v,
            "dout": problem.layout(dout),
            "weights": pairs,
            "dscores": pairs,
        }
        launches += [_backward_launch(problem, name, arrays, layouts, pairs, dlse) for name in ("dweights", "dscores")]
        for name, gradient in zip(("dquery", "dkey", "dvalue"), gradients, strict=True):
            if gradient.size:  # an array without elements has strides that say nothing
                layout = problem.layout(gradient, shared_heads=name != "dquery")
                launches.append(
                    _backward_launch(
                        problem, name, {**arrays, "gradient": gradient}, {**layouts, "gradient": layout},
                        layout, None,
                    )
                )  # fmt: skip
        _launch.run(device, launches)
    return gradients


def _pair_layout(problem: Problem) -> Layout:
    """Of an array (batch, seqlen_q, seqlen_k) whose batches are not merged."""
    size = problem.seqlen_q * problem.seqlen_k
    shape = problem.batch_shape
    strides = tuple(math.prod(shape[axis + 1 :]) * size for axis in range(len(shape)))
    return Layout(strides, problem.seqlen_k, 1)


def _backward_launch(problem: Problem, name: str, arrays, layouts, owner: Layout, dlse) -> Launch:
    terms = summation(problem.batch_shape, owner, layouts)
    matrices = {
        operand: {
            "data": arrays[operand],
            "row_stride": layouts[operand].row_stride,
            "column_stride": layouts[operand].column_stride,
            **strides,
        }
        for operand, strides in terms.strides.items()
    }
    params = _launch.pack(
        _launch.attention_naive_bwd_params(problem.lse_dtype),
        **matrices,
        **terms.shapes,
        dlse=dlse,
        num_owners=terms.num_owners,
        num_reduced=terms.num_reduced,
        **_sizes(problem),
    )
    return Launch(_backward_config.attention_naive_bwd(problem, name, terms.num_owners), *params)


def _forward_params(problem: Problem, q, k, v, out, scores, lse):
    layouts = {"query": problem.q, "key": problem.k, "value": problem.v, "out": problem.layout(out)}
    sizes, batch_strides = merge_batch_dims(problem.batch_shape, *(layout.batch_strides for layout in layouts.values()))
    operands = {
        name: {
            "data": array,
            "row_stride": layouts[name].row_stride,
            "column_stride": layouts[name].column_stride,
            "batch_stride": strides,
        }
        for name, array, strides in zip(layouts, (q, k, v, out), batch_strides, strict=True)
    }
    return _launch.pack(
        _launch.attention_naive_params(problem.lse_dtype),
        **operands,
        scores=scores,
        lse=lse,
        batch=_launch.batch_shape(sizes),
        num_batches=problem.num_batches,
        **_sizes(problem),
    )


def _sizes(problem: Problem) -> dict[str, float]:
    return {
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        # Without a mask every query sees the last key.
        "causal_shift": problem.causal_shift if problem.causal else problem.seqlen_k,
        "scale": problem.softmax_scale,
    }
