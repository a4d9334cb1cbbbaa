"""cuDNN's attention without a framework: graphs of the package nvidia-cudnn-frontend over the memory of CuPy arrays."""

from __future__ import annotations

import math
from typing import Any

from experiments.gpu.problems import FORWARD, Problem, Shape
from experiments.gpu.stopwatch import Call

_NAMES = ("q", "k", "v", "dout")


def cudnn_attention(problem: Problem, direction: str) -> Call:
    """Plans are made once; each call allocates its results and the workspace, as those of the others do."""
    import cudnn

    xp, shape = problem.module, problem.shape
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=xp.cuda.get_current_stream().ptr)
    q_shape, k_shape, v_shape, _ = shape.arrays
    arrays = dict(zip(_NAMES, problem.arrays, strict=True))
    row_shape = (*q_shape[:-1], 1)

    forward, tensors = forward_graph(cudnn, shape, handle, with_lse=direction != FORWARD)
    _plan(cudnn, forward)

    def run_forward() -> dict[str, Any]:
        results = {"out": xp.empty(q_shape, arrays["q"].dtype)}
        if "lse" in tensors:
            results["lse"] = xp.empty(row_shape, "float32")
        _execute(xp, forward, tensors, {**arrays, **results}, handle)
        return results

    if direction == FORWARD:
        return lambda: (run_forward()["out"],)
    arrays |= run_forward()
    backward, gradients = backward_graph(cudnn, shape, handle)
    _plan(cudnn, backward)

    def run_backward() -> tuple[Any, ...]:
        results = {
            name: xp.empty(size, arrays["q"].dtype)
            for name, size in zip(("dq", "dk", "dv"), (q_shape, k_shape, v_shape), strict=True)
        }
        _execute(xp, backward, gradients, {**arrays, **results}, handle)
        return tuple(results.values())

    return run_backward


def forward_graph(cudnn: Any, shape: Shape, handle: Any, *, with_lse: bool) -> tuple[Any, dict[str, Any]]:
    """The graph, and its tensors by name."""
    graph = _graph(cudnn, shape, handle)
    tensors = {name: _tensor(graph, name, size) for name, size in zip(_NAMES[:3], shape.arrays, strict=False)}
    out, lse = graph.sdpa(**tensors, generate_stats=with_lse, **_options(shape))
    tensors["out"] = _result(out, shape.arrays[0])
    if with_lse:
        tensors["lse"] = _result(lse, (*shape.arrays[0][:-1], 1)).set_data_type(cudnn.data_type.FLOAT)
    return graph, tensors


def backward_graph(cudnn: Any, shape: Shape, handle: Any) -> tuple[Any, dict[str, Any]]:
    """The graph, and its tensors by name."""
    graph = _graph(cudnn, shape, handle)
    tensors = {name: _tensor(graph, name, size) for name, size in zip(_NAMES, shape.arrays, strict=True)}
    tensors["out"] = _tensor(graph, "out", shape.arrays[0])
    row = (*shape.arrays[0][:-1], 1)
    tensors["lse"] = _tensor(graph, "lse", row).set_data_type(cudnn.data_type.FLOAT)
    gradients = graph.sdpa_backward(
        q=tensors["q"],
        k=tensors["k"],
        v=tensors["v"],
        o=tensors["out"],
        dO=tensors["dout"],
        stats=tensors["lse"],
        **_options(shape),
    )
    for name, gradient, size in zip(("dq", "dk", "dv"), gradients, shape.arrays, strict=False):
        tensors[name] = _result(gradient, size)
    return graph, tensors


def _graph(cudnn: Any, shape: Shape, handle: Any) -> Any:
    types = cudnn.data_type
    return cudnn.pygraph(
        io_data_type={"float16": types.HALF, "bfloat16": types.BFLOAT16}[shape.dtype],
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )


def _options(shape: Shape) -> dict[str, Any]:
    return {"attn_scale": shape.head_dim**-0.5, "use_causal_mask": shape.causal}


def _tensor(graph: Any, name: str, shape: tuple[int, ...]) -> Any:
    return graph.tensor(name=name, dim=list(shape), stride=_strides(shape))


def _result(tensor: Any, shape: tuple[int, ...]) -> Any:
    return tensor.set_output(True).set_dim(list(shape)).set_stride(_strides(shape))


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Of a C-contiguous array, in elements.

    >>> _strides((2, 3, 5, 7))
    [105, 35, 7, 1]
    """
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _plan(cudnn: Any, graph: Any) -> None:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()


def _execute(xp: Any, graph: Any, tensors: dict[str, Any], arrays: dict[str, Any], handle: Any) -> None:
    workspace = xp.empty(max(graph.get_workspace_size(), 1), "uint8")
    pointers = {tensor: arrays[name].data.ptr for name, tensor in tensors.items()}
    graph.execute(pointers, workspace.data.ptr, handle=handle)
