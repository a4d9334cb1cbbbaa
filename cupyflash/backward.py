"""Exact attention, backward: gradients from out and lse, without the scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from cupyflash import _backward_config, _config, _launch, _option_gradients, _packing, _plan, _variant
from cupyflash._arrays import HALF_TYPES, LOG2_E
from cupyflash._gradients import NAMES, Gradients, backward_problem, made, targets_of, without_results
from cupyflash._launch import Launch
from cupyflash._layouts import Layout, merge_batch_dims
from cupyflash._options import check_flag
from cupyflash._plan import Call, Plan, Planner
from cupyflash._problem import Problem
from cupyflash._summation import Summation, summation, summed_dims
from cupyflash.attention import attention


def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
    dlse=None,
    grads_out=None,
    **options,
) -> Gradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` with respect to q, k, v, bias, alibi_slopes and attn_sink.

    The weights are computed again from lse, tile by tile. Beside the results it needs memory for two numbers per query
    (and packed copies, where rows are not whole 16-byte chunks).

    Parameters
    ----------
    dout : array
        Gradient with respect to out: its shape and dtype, any strides, stride 0 too.
    q, k, v, **options
        As they were given to :func:`cupyflash.attention`, without ``return_lse``, ``return_max`` and ``out``.
    out, lse : array
        What it returned for them, with ``return_lse``.
    dlse : array, optional
        Gradient with respect to lse: its shape and dtype.
    grads_out : (dq, dk, dv) or Gradients, optional
        Where to write the gradients, each an array or None: its operand's shape and dtype, any strides, no overlap
        with an input or with each other.

    Returns
    -------
    Gradients
        Unpacks as ``dq, dk, dv``; ``dbias``, ``dalibi_slopes`` and ``dattn_sink`` are attributes, None where there is
        no such operand. Each has its operand's shape, kind and dtype and is C-contiguous unless given.
        Over a leading dimension that is 1 or missing in the operand, and over the query heads that share a key head, it
        is summed (in float32, for float64 in float64, and rounded once); a view with stride 0 counts as a full array.

    A query that sees no key has gradient 0 and adds nothing to others. A value that is not finite changes only the
    gradients of queries that see it, and of the keys that those see. Results are the same, bit for bit, each time.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :func:`cupyflash.attention`, and where dout, out, lse or dlse do not fit q, k and v.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8)).astype(np.float16)
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = attention_backward(np.ones_like(out), q, k, v, out, lse)
    >>> dq.shape, dq.dtype
    ((2, 5, 8), dtype('float16'))
    >>> bool(np.allclose(dv.sum(axis=-2), 5, atol=0.01))  # each query hands its dout to the keys, in parts
    True
    """
    call = backward_call(dout, q, k, v, out, lse, dlse=dlse, grads_out=grads_out, **options)
    return Gradients(**call.run())


def backward_call(dout, q, k, v, out, lse, *, dlse=None, grads_out=None, **options) -> Call:
    """The call of :func:`attention_backward` with these arguments, validated."""
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    arguments = {**inputs, "dlse": dlse, "grads_out": grads_out}
    return _plan.call(
        "backward",
        arguments,
        without_results(options),  # False is what a plan has for them, too
        validated=lambda: backward_problem(**arguments, **options)[0],
        arrays=lambda: (
            inputs | _plan.given(dlse=dlse) | _plan.optional_arrays(options),
            _plan.given(**vars(targets_of(grads_out))),
        ),
        planned=backward_plan,
    )


def backward_plan(problem: Problem, planner: Planner) -> Plan:
    """Of a backward call; the planner knows its arrays."""
    _config.check_architecture(problem.dtype, planner.arch)
    arrays = planner.arguments
    inputs = [arrays.get(name) for name in ("dout", "q", "k", "v", "out", "lse", "dlse")]
    gradients = made(planner, problem, inputs[1:4], Gradients(**{name: arrays.get(name) for name in NAMES}))
    launches = _Backward(problem, planner).launches(*inputs, gradients)
    return planner.plan(launches, _plan.given(**vars(gradients)))


def attention_vjp(
    q,
    k,
    v,
    *,
    return_lse: bool = False,
    return_max: bool = False,
    **options,
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and its vector-Jacobian product: ``result, pullback``; result is what :func:`attention` returns.

    ``options`` are those of :func:`attention`, without ``out``. ``pullback(dout, dlse=None)`` is
    :func:`attention_backward` for this call. It keeps its inputs, out and lse, which must not be changed before it is
    called.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 16)).astype(np.float16)
    >>> out, pullback = attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> bool((dq[0] == 0).all())  # the first query sees one key, whose weight is 1 whatever it is
    True
    """
    if "out" in options:
        raise TypeError("out: attention_vjp makes the array that its pullback keeps")
    check_flag("return_lse", return_lse)
    out, lse, *row_max = attention(q, k, v, return_lse=True, return_max=return_max, **options)

    def pullback(dout, dlse=None) -> Gradients:
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)

    results = (out, *([lse] if return_lse else []), *row_max)
    return (results if len(results) > 1 else out), pullback


_OPERANDS = ("query", "key", "value", "dout")


class _Backward:
    """Collects the launches of one call: copies of what kernels cannot read, the kernels, copies of results."""

    def __init__(self, problem: Problem, device: Planner):
        self.problem, self.device = problem, device
        self.half = problem.dtype in HALF_TYPES
        self.slopes = ("dslope_rows",) if "alibi_slopes" in problem.operands else ()
        self.before: list[Launch] = []
        self.after: list[Launch] = []
        self.arrays: dict[str, Any] = {}
        self.layouts: dict[str, Layout] = {}

    def launches(self, dout, q, k, v, out, lse, dlse, gradients: Gradients) -> list[Launch]:
        problem = self.problem
        head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
        self._add("query", q, problem.q, problem.rows_q, head_dim)
        self._add("key", k, problem.k, problem.rows_k, head_dim)
        self._add("value", v, problem.v, problem.rows_k, head_dim_v)
        self._add("dout", dout, problem.layout(dout), problem.rows_q, head_dim_v)
        self._add("out", out, problem.layout(out), problem.rows_q, head_dim_v)
        self.arrays |= _variant.arrays(problem, self.device)
        self.layouts |= _variant.layouts(problem)
        self._add_rows("lse", lse)
        self._add_rows("dlse", dlse)
        for name in ("delta", "lse_log2") if self.half else ("delta",):
            self._add_rows(name, self.device.empty(problem.lse_shape, problem.lse_dtype))
        if self.slopes:
            self._add_rows(*self.slopes, self.device.empty(problem.lse_shape, problem.lse_dtype))
        kernels = [self._delta()]

        # What has no elements needs no kernel, and its strides say nothing.
        key_side = {}
        for name, gradient, shared_heads, rows, columns in (
            ("dquery", gradients.dq, False, problem.rows_q, head_dim),
            ("dkey", gradients.dk, True, problem.rows_k, head_dim),
            ("dvalue", gradients.dv, True, problem.rows_k, head_dim_v),
        ):
            if gradient.size:
                layout = problem.layout(gradient, shared_heads)
                self._add(name, gradient, layout, rows, columns, is_result=True)
                if shared_heads:
                    key_side[name] = summed_dims(problem.batch_shape, self._owned(name))
        if "dquery" in self.arrays:
            kernels.append(self._dq())
        if len(set(key_side.values())) == 1 and _backward_config.one_pass_for_keys_and_values(problem):
            kernels.append(self._dkdv(*key_side))
        else:
            kernels += [self._dkdv(name) for name in key_side]
        kernels += _option_gradients.launches(self, gradients)
        return [*self.before, *kernels, *self.after]

    def _add(self, name: str, array, layout: Layout, rows: int, columns: int, *, is_result: bool = False) -> None:
        self.arrays[name], self.layouts[name], copies = _packing.in_chunks_or_packed(
            self.device, array, layout, self.problem.batch_shape, rows, columns, is_result=is_result
        )
        (self.after if is_result else self.before).extend(copies)

    def _add_rows(self, name: str, array) -> None:
        """One value per query, or None."""
        if array is not None:
            self.arrays[name], copies = _packing.contiguous_rows(self.device, self.problem, array)
            self.layouts[name] = self.problem.row_values_layout(self.arrays[name])
            self.before += copies

    def _delta(self) -> Launch:
        problem, names = self.problem, ("out", "dout")
        # Sequences of a packed batch are one after the other: its rows are a matrix of each head.
        first_axis = 1 if problem.packed else 0
        batch_shape = problem.batch_shape[first_axis:]
        sizes, strides = merge_batch_dims(
            batch_shape, *(self.layouts[name].batch_strides[first_axis:] for name in names)
        )
        params = _launch.pack(
            _launch.FLASH_BWD_DELTA,
            **{
                name: {
                    "data": self.arrays[name],
                    "row_stride": self.layouts[name].row_stride,
                    "batch_stride": batch_strides,
                }
                for name, batch_strides in zip(names, strides, strict=True)
            },
            **{name: self.arrays.get(name) for name in ("lse", "dlse", "delta", "lse_log2")},
            batch=_launch.batch_shape(sizes),
            num_batches=math.prod(batch_shape),
            seqlen_q=problem.rows_q,
            head_dim_v=problem.head_dim_v,
        )
        return Launch(_backward_config.flash_bwd_delta(problem), *params)

    def _dq(self) -> Launch:
        terms = self.terms("dquery", *self.slopes)
        config = _backward_config.dq(self.problem, self.device.arch, terms.num_owners)
        return self.launch(config, self.params_dtype("dquery", with_dslope=bool(self.slopes)), terms)

    def _dkdv(self, *gradients: str) -> Launch:
        terms = self.terms(*gradients)
        config = _backward_config.dkdv(
            self.problem, self.device.arch, terms.num_owners,
            with_dkey="dkey" in gradients, with_dvalue="dvalue" in gradients,
        )  # fmt: skip
        return self.launch(config, self.params_dtype("dkey", "dvalue"), terms)

    def params_dtype(self, *gradients: str, with_dslope: bool = False) -> np.dtype:
        variant = _variant.params_dtype(self.problem, _launch.SUMMED_OPERAND, with_dslope=with_dslope)
        if self.half:
            return _launch.flash_bwd_params(*gradients, variant=variant)
        return _launch.flash_bwd_fma_params(self.problem.dtype, *gradients, variant=variant)

    def terms(self, *gradients: str) -> Summation:
        """What gradients that are summed over the same dimensions are made of."""
        names = [*_OPERANDS, "lse_log2" if self.half else "lse", "delta", *_variant.layouts(self.problem), *gradients]
        layouts = {name: self.layouts[name] for name in names}
        return summation(self.problem.batch_shape, self._owned(gradients[0]), layouts)

    def _owned(self, gradient: str) -> Layout:
        """Its layout, for what has an extent: a packed array's sequences have one, without a stride."""
        layout = self.layouts[gradient]
        if self.problem.packed and gradient in ("dquery", "dkey", "dvalue"):
            return replace(layout, batch_strides=(1, *layout.batch_strides[1:]))
        return layout

    def launch(self, config, params_dtype, terms: Summation, **own: Any) -> Launch:
        problem = self.problem
        operands = {
            name: {
                "data": self.arrays.get(name),
                "row_stride": self.layouts[name].row_stride,
                **strides,
            }
            for name, strides in terms.strides.items()
        }
        params = _launch.pack(
            params_dtype,
            **{name: values for name, values in operands.items() if name in params_dtype.names},
            **terms.shapes,
            num_reduced=terms.num_reduced,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            **_variant.band(problem),
            **({"scale_log2": problem.softmax_scale * LOG2_E} if self.half else {}),
            scale=problem.softmax_scale,
            variant=_variant.params(problem, operands),
            **own,
        )
        return Launch(config, *params)
