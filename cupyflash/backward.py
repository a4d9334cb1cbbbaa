"""Exact attention, backward: gradients from out and lse, without the scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cupyflash import _backward_config, _config, _launch, _packing
from cupyflash._gradients import Gradients, backward_problem
from cupyflash._launch import Gpu, Launch, Simulator
from cupyflash._problem import HALF_TYPES, LOG2_E, Align, Layout, Problem, merge_batch_dims
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
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    grads_out=None,
) -> Gradients:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)`` with respect to q, k and v.

    The weights are computed again from lse, tile by tile. Beside the results it needs memory for two numbers per query
    (and packed copies, where rows are not whole 16-byte chunks).

    Parameters
    ----------
    dout : array
        Gradient with respect to out: its shape and dtype, any strides, stride 0 too.
    q, k, v, softmax_scale, causal, align
        As they were given to :func:`cupyflash.attention`.
    out, lse : array
        What it returned for them, with ``return_lse``.
    dlse : array, optional
        Gradient with respect to lse: its shape, float32.
    grads_out : (dq, dk, dv), optional
        Where to write the gradients, each an array or None: its operand's shape and dtype, any strides, no overlap
        with an input or with each other.

    Returns
    -------
    Gradients
        Unpacks as ``dq, dk, dv``. Each has its operand's shape, kind and dtype and is C-contiguous unless given.
        Over a leading dimension that is 1 or missing in the operand, and over the query heads that share a key head, it
        is summed (in float32, rounded once); a view with stride 0 counts as a full array.

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
    problem, grads_out = backward_problem(
        dout, q, k, v, out, lse, dlse=dlse, softmax_scale=softmax_scale, causal=causal, align=align,
        grads_out=grads_out, dtypes=HALF_TYPES,
    )  # fmt: skip
    device = _launch.device_of(problem.kind, q)
    _config.check_architecture(problem.dtype, device.arch)
    with device:
        gradients = Gradients(
            *(
                device.empty(operand.shape, problem.dtype) if given is None else given
                for operand, given in zip((q, k, v), grads_out, strict=True)
            )
        )
        _launch.run(device, _Backward(problem, device).launches(dout, q, k, v, out, lse, dlse, gradients))
    return gradients


def attention_vjp(
    q,
    k,
    v,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    align: Align | None = None,
    return_lse: bool = False,
) -> tuple[Any, Callable[..., Gradients]]:
    """Attention and its vector-Jacobian product: ``out, pullback``, or ``(out, lse), pullback`` with ``return_lse``.

    ``pullback(dout, dlse=None)`` is :func:`attention_backward` for this call. It keeps q, k, v, out and lse, which
    must not be changed before it is called.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 16)).astype(np.float16)
    >>> out, pullback = attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> bool((dq[0] == 0).all())  # the first query sees one key, whose weight is 1 whatever it is
    True
    """
    options = {"softmax_scale": softmax_scale, "causal": causal, "align": align}
    out, lse = attention(q, k, v, return_lse=True, **options)

    def pullback(dout, dlse=None) -> Gradients:
        return attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)

    return ((out, lse) if return_lse else out), pullback


class _Backward:
    """Collects the launches of one call: copies of what kernels cannot read, the kernels, copies of results."""

    def __init__(self, problem: Problem, device: Simulator | Gpu):
        self.problem, self.device = problem, device
        self.before: list[Launch] = []
        self.after: list[Launch] = []
        self.arrays: dict[str, Any] = {}
        self.layouts: dict[str, Layout] = {}

    def launches(self, dout, q, k, v, out, lse, dlse, gradients: Gradients) -> list[Launch]:
        problem = self.problem
        head_dim, head_dim_v = problem.head_dim, problem.head_dim_v
        self._add("query", q, problem.q, problem.seqlen_q, head_dim)
        self._add("key", k, problem.k, problem.seqlen_k, head_dim)
        self._add("value", v, problem.v, problem.seqlen_k, head_dim_v)
        self._add("dout", dout, problem.layout(dout), problem.seqlen_q, head_dim_v)
        self._add("out", out, problem.layout(out), problem.seqlen_q, head_dim_v)
        for name in "delta", "lse_log2":
            self.arrays[name] = self.device.empty(problem.lse_shape, problem.lse_dtype)
            self.layouts[name] = problem.layout(self.arrays[name][..., None])
        kernels = [self._delta(lse, dlse)]

        # What has no elements needs no kernel, and its strides say nothing.
        key_side = {}
        for name, gradient, shared_heads, rows, columns in (
            ("dquery", gradients.dq, False, problem.seqlen_q, head_dim),
            ("dkey", gradients.dk, True, problem.seqlen_k, head_dim),
            ("dvalue", gradients.dv, True, problem.seqlen_k, head_dim_v),
        ):
            if gradient.size:
                layout = problem.layout(gradient, shared_heads)
                self._add(name, gradient, layout, rows, columns, is_result=True)
                if shared_heads:
                    key_side[name] = self._summed_dims(name)
        if "dquery" in self.arrays:
            kernels.append(self._dq())
        if len(set(key_side.values())) == 1 and _backward_config.one_pass_for_keys_and_values(problem):
            kernels.append(self._dkdv(*key_side))
        else:
            kernels += [self._dkdv(name) for name in key_side]
        return [*self.before, *kernels, *self.after]

    def _add(self, name: str, array, layout: Layout, rows: int, columns: int, *, is_result: bool = False) -> None:
        self.arrays[name], self.layouts[name], copies = _packing.in_chunks_or_packed(
            self.device, array, layout, self.problem.batch_shape, rows, columns, is_result=is_result
        )
        (self.after if is_result else self.before).extend(copies)

    def _contiguous(self, array):
        if array is None or array.flags.c_contiguous:
            return array
        target = self.device.empty(array.shape, array.dtype)
        layout, target_layout = (self.problem.layout(x[..., None]) for x in (array, target))
        matrices = self.problem.batch_shape, self.problem.seqlen_q, 1
        self.before.append(_packing.copy(self.device, array, layout, target, target_layout, *matrices))
        return target

    def _delta(self, lse, dlse) -> Launch:
        problem, names = self.problem, ("out", "dout")
        rows = {"lse": self._contiguous(lse), "dlse": self._contiguous(dlse)}
        rows |= {name: self.arrays[name] for name in ("delta", "lse_log2")}
        sizes, strides = merge_batch_dims(problem.batch_shape, *(self.layouts[name].batch_strides for name in names))
        params = _launch.pack(
            _launch.FLASH_BWD_DELTA,
            **{
                name: {
                    "data": self.device.address(self.arrays[name]),
                    "row_stride": self.layouts[name].row_stride,
                    "batch_stride": batch_strides,
                }
                for name, batch_strides in zip(names, strides, strict=True)
            },
            **{name: 0 if array is None else self.device.address(array) for name, array in rows.items()},
            batch=_launch.batch_shape(sizes),
            num_batches=problem.num_batches,
            seqlen_q=problem.seqlen_q,
            head_dim_v=problem.head_dim_v,
        )
        touched = [*(self.arrays[name] for name in names), *(array for array in rows.values() if array is not None)]
        return Launch(_backward_config.flash_bwd_delta(problem), params, tuple(touched))

    def _dq(self) -> Launch:
        owner, _ = self._sizes("dquery")
        config = _backward_config.flash_bwd_dq(self.problem, self.device.arch, math.prod(owner))
        return self._summing(config, _launch.FLASH_BWD_DQ, "dquery")

    def _dkdv(self, *gradients: str) -> Launch:
        owner, _ = self._sizes(gradients[0])
        config = _backward_config.flash_bwd_dkdv(
            self.problem, self.device.arch, math.prod(owner),
            with_dkey="dkey" in gradients, with_dvalue="dvalue" in gradients,
        )  # fmt: skip
        return self._summing(config, _launch.FLASH_BWD_DKDV, *gradients)

    def _summed_dims(self, gradient: str) -> tuple[bool, ...]:
        """Which batch dimensions a gradient is summed over: those in which its array has no extent."""
        strides = self.layouts[gradient].batch_strides
        return tuple(size != 1 and stride == 0 for size, stride in zip(self.problem.batch_shape, strides, strict=True))

    def _sizes(self, gradient: str) -> tuple[list[int], list[int]]:
        """Batch dimensions in which the gradient has extent, and those over which it is summed."""
        dims = list(zip(self.problem.batch_shape, self._summed_dims(gradient), strict=True))
        return [size for size, summed in dims if not summed], [size for size, summed in dims if summed]

    def _summing(self, config, params_dtype, *gradients: str) -> Launch:
        problem = self.problem
        names = ("query", "key", "value", "dout", "lse_log2", "delta", *gradients)
        summed_dims = self._summed_dims(gradients[0])
        operands = {
            name: {"data": self.device.address(self.arrays[name]), "row_stride": self.layouts[name].row_stride}
            for name in names
        }
        counts = []
        for field, is_summed in ("owner", False), ("reduced", True):
            chosen = [axis for axis, summed in enumerate(summed_dims) if summed == is_summed]
            shape = tuple(problem.batch_shape[axis] for axis in chosen)
            counts.append(math.prod(shape))
            if counts[-1] == 0:  # nothing is added: the kernel must not divide by such a size
                chosen, shape = [], ()
            sizes, strides = merge_batch_dims(
                shape, *(tuple(self.layouts[name].batch_strides[axis] for axis in chosen) for name in names)
            )
            operands[field] = _launch.batch_shape(sizes)
            for name, batch_strides in zip(names, strides, strict=True):
                operands[name][f"{field}_stride"] = batch_strides
        params = _launch.pack(
            params_dtype,
            **operands,
            num_reduced=counts[1],
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            causal_shift=problem.causal_shift,
            scale_log2=problem.softmax_scale * LOG2_E,
            scale=problem.softmax_scale,
        )
        return Launch(config, params, tuple(self.arrays[name] for name in names))
