"""What is compared on a GPU computes attention, and is given what its library asks for."""

import ctypes
import math
import sys
import types

import ml_dtypes
import numpy as np
import pytest

from cupyflash import reference
from experiments.gpu import contenders, cudnn_graph, problems, speed
from experiments.gpu.contenders import OURS
from experiments.gpu.problems import BACKWARD, FORWARD, Problem, Shape
from tests.experiments.fake_gpu import FakeCupy


def exact(problem, direction):
    q, k, v, dout = (x.astype(np.float64) for x in problem.host)
    out, lse = reference.attention(q, k, v, causal=problem.shape.causal, return_lse=True)
    if direction == FORWARD:
        return (out,)
    return tuple(reference.attention_backward(dout, q, k, v, out, lse, causal=problem.shape.causal))


SHAPES = [Shape(2, 3, 3, 40, 40, 16), Shape(1, 2, 2, 40, 40, 16, causal=True), Shape(1, 4, 2, 5, 40, 16)]


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in contenders.contenders() if name.startswith((OURS, "CuPy"))])
def test_contenders_compute_attention(name, shape, direction):
    """On NumPy arrays, with NumPy in CuPy's place and the simulator in the GPU's; twice, for their inputs must stay."""
    problem = Problem(shape, np)
    call = contenders.contenders()[name].prepare(problem, direction)
    call()
    for result, value in zip(call(), exact(problem, direction), strict=True):
        assert result.shape == value.shape and result.dtype == np.float16
        assert np.abs(result - value).max() < 0.02 * np.abs(value).max()


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "MATH"])
def test_torch_on_a_cpu(backend, dtype, direction, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(problems, "TORCH_DEVICE", "cpu")
    for causal in False, True:
        problem = Problem(Shape(2, 3, 3, 40, 40, 16, causal, dtype), np)
        agrees(contenders.torch_attention(backend, problem, direction), problem, direction)


def agrees(call, problem, direction):
    """The first head of each result, all of which have their operand's shape, twice."""
    for results in call(), call():
        for result, value in zip(results, exact(problem, direction), strict=True):
            assert tuple(result.shape) == value.shape
            assert speed.difference([contenders.on_host(result)], [value[0, 0]]) < speed.AGREEMENT


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_flash_attn_is_given_its_layout(shape, direction, monkeypatch):
    torch = pytest.importorskip("torch")

    def flash_attn_func(q, k, v, causal):
        assert q.shape == (shape.batch, shape.seqlen_q, shape.heads, shape.head_dim) and q.is_contiguous()
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)

    monkeypatch.setattr(problems, "TORCH_DEVICE", "cpu")
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    problem = Problem(shape, np)
    agrees(contenders.flash_attn(problem, direction), problem, direction)


class FakeCudnn:
    """Graphs that compute by the reference, in the memory that they are given pointers to."""

    data_type = types.SimpleNamespace(HALF=np.float16, BFLOAT16=ml_dtypes.bfloat16, FLOAT=np.float32)
    heur_mode = types.SimpleNamespace(A=1, FALLBACK=2)
    steps = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")

    class Tensor:
        def __init__(self, dtype, dim=None, stride=None):
            self.dtype, self.dim, self.stride, self.is_output = dtype, dim, stride, False

        def set_output(self, is_output):
            self.is_output = is_output
            return self

        def set_dim(self, dim):
            self.dim = dim
            return self

        def set_stride(self, stride):
            self.stride = stride
            return self

        def set_data_type(self, dtype):
            self.dtype = dtype
            return self

        def at(self, pointer):
            assert self.stride[-1] == 1 and self.stride[0] == math.prod(self.dim[1:])
            memory = (ctypes.c_char * (math.prod(self.dim) * np.dtype(self.dtype).itemsize)).from_address(pointer)
            return np.frombuffer(memory, self.dtype).reshape(self.dim)

    class Graph:
        def __init__(self, io_data_type, intermediate_data_type, compute_data_type, handle):
            assert intermediate_data_type is compute_data_type is np.float32 and handle == "handle"
            self.dtype, self.done = io_data_type, []
            for step in FakeCudnn.steps:
                setattr(self, step, lambda *modes, step=step: self.done.append(step))

        def tensor(self, name, dim, stride):
            return FakeCudnn.Tensor(self.dtype, dim, stride)

        def sdpa(self, **given):
            self.given, self.results = given, [FakeCudnn.Tensor(self.dtype) for _ in range(2)]
            return self.results

        def sdpa_backward(self, **given):
            self.given, self.results = given, [FakeCudnn.Tensor(self.dtype) for _ in range(3)]
            return self.results

        def get_workspace_size(self):
            return 0

        def execute(self, pointers, workspace, handle):
            assert tuple(self.done) == FakeCudnn.steps and handle == "handle" and workspace
            arrays = {name: x.at(pointers[x]) for name, x in self.given.items() if isinstance(x, FakeCudnn.Tensor)}
            options = {"softmax_scale": self.given["attn_scale"], "causal": self.given["use_causal_mask"]}
            q, k, v = (arrays[name] for name in "qkv")
            if "dO" in arrays:
                lse = arrays["stats"][..., 0]
                values = reference.attention_backward(arrays["dO"], q, k, v, arrays["o"], lse, **options)
            else:
                out, lse = reference.attention(q, k, v, return_lse=True, **options)
                values = (out, lse[..., None])
            for tensor, value in zip(self.results, values, strict=True):
                if tensor.is_output:
                    tensor.at(pointers[tensor])[...] = value

    def __init__(self):
        self.pygraph = self.Graph
        self.create_handle = lambda: "handle"
        self.set_stream = lambda handle, stream: None


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("shape", SHAPES)
def test_cudnn_is_given_the_memory_of_each_tensor(shape, direction, monkeypatch):
    cupy = FakeCupy()
    cupy.cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=0)
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn())
    problem = Problem(shape, cupy)
    call = cudnn_graph.cudnn_attention(problem, direction)
    agrees(lambda: [x.array for x in call()], problem, direction)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_takes_the_graphs(dtype, causal):
    """As far as it says so without a GPU."""
    cudnn = pytest.importorskip("cudnn")
    shape = Shape(2, 4, 2, 128, 128, 64, causal, dtype)
    for with_lse in False, True:
        cudnn_graph.forward_graph(cudnn, shape, None, with_lse=with_lse)[0].validate()
    cudnn_graph.backward_graph(cudnn, shape, None)[0].validate()


def test_what_is_installed_takes_part(monkeypatch):
    monkeypatch.setattr(contenders.importlib.util, "find_spec", lambda name: None)
    assert next(iter(contenders.contenders())) == OURS and len(contenders.contenders()) == 4
    monkeypatch.setattr(contenders.importlib.util, "find_spec", str)
    assert set(contenders.TORCH_BACKENDS) | {"flash-attn", "cuDNN"} < set(contenders.contenders())


def test_the_first_head_of_a_result():
    result = np.arange(24, dtype=np.float16).reshape(2, 3, 2, 2)
    assert contenders.on_host(result).tolist() == [[0, 1], [2, 3]]
    on_card = types.SimpleNamespace(get=lambda: result[1, 0])
    assert contenders.on_host({(0, 0): on_card}).tolist() == [[12, 13], [14, 15]]
