"""Gradients of bias, alibi_slopes and attn_sink, from lse and delta and from what the kernels of q leave per query."""

from __future__ import annotations

from typing import Any

from cupyflash import _launch, _option_gradients_config, _variant
from cupyflash._gradients import Gradients
from cupyflash._launch import Launch
from cupyflash._layouts import Layout, operand_layout
from cupyflash._option_gradients_config import Sums
from cupyflash._summation import summation


def launches(call: Any, gradients: Gradients) -> list[Launch]:
    """Of the call that :mod:`cupyflash.backward` collects, after all kernels of its other gradients."""
    result = []
    if gradients.dbias is not None and gradients.dbias.size:
        result += _dbias(call, gradients.dbias)
    for name, operand, terms in (
        ("dalibi_slopes", "alibi_slopes", {"values": "dslope_rows"}),
        ("dattn_sink", "attn_sink", {"values": "delta", "lse": "lse", "attn_sink": "attn_sink"}),
    ):
        gradient = getattr(gradients, name)
        if gradient is not None and gradient.size:
            arrays = {role: call.arrays[array] for role, array in terms.items()}
            layouts = {role: call.layouts[array] for role, array in terms.items()}
            lengths = _variant.lengths(call.problem)
            if lengths and "seqlens_q" in call.arrays:
                arrays["seqlens_q"], layouts["seqlens_q"] = call.arrays["seqlens_q"], call.layouts["seqlens_q"]
            layout = _operand_layout(call.problem, operand, gradient)
            result.append(_row_sum(call, arrays, layouts, gradient, layout, lengths))
    return result


def _dbias(call, gradient) -> list[Launch]:
    problem = call.problem
    layout = _operand_layout(problem, "bias", gradient)
    rows, columns = (1, 1, *gradient.shape)[-2:]
    sums = Sums(queries=rows == 1 != problem.seqlen_q, keys=columns == 1 != problem.seqlen_k)
    if not (sums.queries and sums.keys):
        return [_pair_sum(call, gradient, layout, sums)]
    # One number for all pairs: sums over keys, for each query, and then over queries.
    terms = call.device.empty((*problem.leading_shape, problem.seqlen_q, 1), problem.lse_dtype)
    terms_layout = _operand_layout(problem, "bias", terms)
    sums_over_keys = [_pair_sum(call, terms, terms_layout, Sums(queries=False, keys=True))] if terms.size else []
    return [*sums_over_keys, _row_sum(call, {"values": terms}, {"values": terms_layout}, gradient, layout)]


def _pair_sum(call, gradient, layout: Layout, sums: Sums) -> Launch:
    call.arrays["dbias"], call.layouts["dbias"] = gradient, layout
    terms = call.terms("dbias")
    config = _option_gradients_config.flash_bwd_dbias(
        call.problem, call.device.arch, gradient.dtype, sums, terms.num_owners
    )
    params_dtype = _launch.flash_bwd_dbias_params(call.params_dtype("dbias"))
    return call.launch(config, params_dtype, terms, dbias_column_stride=layout.column_stride)


def _row_sum(call, arrays, layouts, gradient, layout: Layout, lengths: int = 0) -> Launch:
    """``arrays`` by the names that ``row_sum`` has for them."""
    problem = call.problem
    arrays, layouts = {**arrays, "result": gradient}, {**layouts, "result": layout}
    sums = summation(problem.batch_shape, layout, layouts)
    params = _launch.pack(
        _launch.row_sum_params(with_lengths=lengths > 0, with_sink="attn_sink" in arrays),
        **{
            name: {"data": arrays[name], "row_stride": layouts[name].row_stride, **strides}
            for name, strides in sums.strides.items()
        },
        **sums.shapes,
        num_reduced=sums.num_reduced,
        seqlen_q=problem.seqlen_q,
    )
    sink = arrays["attn_sink"].dtype if "attn_sink" in arrays else None
    config = _option_gradients_config.row_sum(problem, gradient.dtype, sums.num_owners, lengths=lengths, sink=sink)
    return Launch(config, *params)


def _operand_layout(problem, name: str, array) -> Layout:
    return operand_layout(name, array, problem.leading_shape, problem.grouped_heads)
