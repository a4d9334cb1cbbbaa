"""Parameter structures, and the CuPy path on real cupy.ndarrays over memory that does not exist."""

import contextlib

import cupy
import ml_dtypes
import numpy as np
import pytest
from cupy_backends.cuda.libs import nvrtc

import cupyflash
from cupyflash import _config, _launch, _source
from cupyflash._memo import Memo
from tests.forgetting import nothing_remembered

FLASH_DEFINES = _config.flash_fwd_defines(np.dtype(np.float16), 64, 64, causal=False, scale_positive=True, arch="sm_80")
FMA_DEFINES = _config.flash_fwd_fma_defines(np.dtype(np.float32), 64, 64, causal=False, arch="sm_80")


def offsets(dtype, prefix=""):
    """Path -> byte offset of every field, those of nested structures too."""
    for name, (field, offset, *_) in dtype.fields.items():
        if name == "empty":  # stands for a structure without members
            continue
        yield prefix + name, offset
        if field.fields:
            yield from ((path, offset + inner) for path, inner in offsets(field, f"{prefix}{name}."))


@pytest.mark.parametrize(
    ("kernel", "defines", "dtype"),
    [
        ("flash_fwd", FLASH_DEFINES, _launch.flash_fwd_params()),
        ("flash_fwd_fma", FMA_DEFINES | {"ELEMENT": "float"}, _launch.flash_fwd_fma_params(np.dtype(np.float32))),
        ("flash_fwd_fma", FMA_DEFINES | {"ELEMENT": "double"}, _launch.flash_fwd_fma_params(np.dtype(np.float64))),
        ("strided_copy", {"ELEMENT_BYTES": 2}, _launch.STRIDED_COPY),
        ("attention_naive", {"ELEMENT": "BFloat16"}, _launch.attention_naive_params(np.dtype(np.float32))),
        ("attention_naive", {"ELEMENT": "double"}, _launch.attention_naive_params(np.dtype(np.float64))),
    ],
)
def test_parameters_are_laid_out_as_the_kernel_declares_them(kernel, defines, dtype):
    checks = [f'static_assert(sizeof(Params) == {dtype.itemsize}, "size");']
    checks += [
        f'static_assert(__builtin_offsetof(Params, {path}) == {offset}, "{path}");' for path, offset in offsets(dtype)
    ]
    program = nvrtc.createProgram(_source.render(kernel, defines) + "\n".join(checks), kernel, (), ())
    options = (*_launch.OPTIONS, "-arch=compute_80", "--device-as-default-execution-space", "--fdevice-syntax-only")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))


def test_the_values_used_last_are_kept():
    memo, made = Memo(2), []

    def get(key):
        return memo.get(key, lambda: made.append(key) or key)

    assert [get(key) for key in ("a", "b", "a", "c", "a", "b")] == ["a", "b", "a", "c", "a", "b"]
    assert made == ["a", "b", "c", "b"]


def test_packing_fills_nested_fields_and_leaves_the_rest_zero():
    template, arrays = _launch.pack(
        _launch.flash_fwd_params(),
        key={"data": "k", "row_stride": -3, "batch_stride": (5, 7)},
        lse="lse",
        batch=_launch.batch_shape((2, 3)),
        scale_log2=0.1,
    )
    assert arrays == ("k", "lse")
    params, others = template.at([2**40, 2**63]), template.at([1, 2])
    assert isinstance(params, np.void) and params.dtype == template.dtype == _launch.flash_fwd_params()
    assert params["key"]["data"] == 2**40 and params["key"]["row_stride"] == -3 and params["lse"] == 2**63
    assert others["key"]["data"] == 1 and others["key"]["row_stride"] == -3 and others["lse"] == 2
    assert params["key"]["batch_stride"].tolist() == [5, 7, 0, 0, 0, 0, 0, 0]
    assert params["batch"]["ndim"] == 2 and params["batch"]["size"].tolist() == [2, 3, 0, 0, 0, 0, 0, 0]
    assert params["scale_log2"] == np.float32(0.1) and params["query"]["data"] == 0


class Recorder:
    """In place of cupy.RawModule: records what would be compiled and launched."""

    def __init__(self):
        self.modules, self.launches = [], []

    def RawModule(self, *, code, options):
        self.modules.append((code, options))
        recorder = self

        class Kernel:
            def __init__(self, name):
                self.name, self.max_dynamic_shared_size_bytes = name, 0

            def __call__(self, grid, block, args, *, shared_mem):
                assert shared_mem == self.max_dynamic_shared_size_bytes
                recorder.launches.append((self.name, grid, block, args))

        class Module:
            get_function = staticmethod(Kernel)

        return Module()


class Memory:
    """Hands out cupy.ndarrays at addresses that do not exist."""

    def __init__(self):
        self.next = 0x7F0000000000

    def array(self, shape, dtype, offset=0):
        memory = cupy.cuda.UnownedMemory(self.next, 1 << 30, None, 0)
        self.next += 1 << 30
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, offset))


@pytest.fixture
def gpu(monkeypatch):
    """CuPy as on a machine with one sm_90 GPU, as far as launches go."""

    class Device(contextlib.nullcontext):
        compute_capability = "90"

    recorder, memory = Recorder(), Memory()
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    monkeypatch.setattr(cupy, "RawModule", recorder.RawModule)
    monkeypatch.setattr(cupy, "empty", memory.array)
    monkeypatch.setattr(cupy, "zeros", memory.array)
    recorder.array = memory.array
    with nothing_remembered():
        yield recorder


def test_other_lengths_batches_and_strides_compile_nothing(gpu):
    for shape, view in (
        ((2, 4, 64), np.asarray),
        ((3, 5, 7, 64), np.asarray),
        ((2, 64, 6), lambda x: x.swapaxes(1, 2)),
    ):
        q, k, v = (gpu.array(shape, np.float16) for _ in range(3))
        if view is not np.asarray:
            q, k, v = view(q), view(k), view(v)
        cupyflash.attention(q, k, v)
    names = [name for name, *_ in gpu.launches]
    assert names == ["flash_fwd", "flash_fwd", "strided_copy", "strided_copy", "strided_copy", "flash_fwd"]
    assert len(gpu.modules) == 2
    assert all(options == ("-std=c++17", "-fmad=false") for _, options in gpu.modules)


def test_a_launch_carries_addresses_strides_and_sizes(gpu):
    q, k = gpu.array((2, 90, 6, 64), np.float16), gpu.array((2, 88, 3, 64), np.float16)
    v = gpu.array((88, 32), np.float16)
    out, lse = cupyflash.attention(
        q.swapaxes(1, 2), k.swapaxes(1, 2)[..., ::-1, :], v, softmax_scale=-0.5, causal=True, align="bottom-right",
        return_lse=True,
    )  # fmt: skip
    ((name, grid, block, (params,)),) = gpu.launches
    assert (name, grid, block) == ("flash_fwd", (12,), (128,))
    assert params["query"]["data"] == q.data.ptr and params["query"]["row_stride"] == 6 * 64
    assert params["query"]["batch_stride"].tolist()[:3] == [90 * 6 * 64, 128, 64]
    assert params["key"]["data"] == k.data.ptr + 87 * 3 * 64 * 2 and params["key"]["row_stride"] == -3 * 64
    assert params["key"]["batch_stride"].tolist()[:3] == [88 * 3 * 64, 64, 0]
    assert params["value"]["batch_stride"].tolist()[:3] == [0, 0, 0] and params["value"]["row_stride"] == 32
    assert params["out"]["data"] == out.data.ptr and params["lse"] == lse.data.ptr
    assert params["batch"]["ndim"] == 3 and params["batch"]["size"].tolist()[:3] == [2, 3, 2]
    sizes = [int(params[name]) for name in ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "band_right")]
    assert sizes == [90, 88, 64, 32, -2]
    assert params["scale_log2"] == np.float32(-0.5 * np.log2(np.e))
    assert "#define BAND_RIGHT 1\n#define SCALE_POSITIVE 0\n" in gpu.modules[0][0]


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda array: array((4, 64), np.float16), 0),
        (lambda array: array((4, 64), np.float16, 8), 1),
        (lambda array: array((4, 128), np.float16)[:, ::2], 1),
        (lambda array: array((4, 65), np.float16)[:, :64], 1),
        (lambda array: array((4, 68), np.float16)[:, :64], 1),
        (lambda array: array((4, 72), np.float16)[:, 8:], 0),
        (lambda array: array((4, 72), np.float16)[::-1, :64], 0),
        (lambda array: array((1, 65), np.float16)[:, :64], 0),
        (lambda array: cupy.broadcast_to(array((1, 64), np.float16), (4, 64)), 0),
        (lambda array: cupy.broadcast_to(array((4, 1), np.float16), (4, 64)), 1),
    ],
)
def test_what_chunks_cannot_read_is_packed(gpu, make, copies):
    k, v = gpu.array((5, 64), np.float16), gpu.array((5, 64), np.float16)
    cupyflash.attention(make(gpu.array), k, v)
    assert [name for name, *_ in gpu.launches] == ["strided_copy"] * copies + ["flash_fwd"]


def test_a_broadcast_operand_is_packed_once(gpu):
    q, k = gpu.array((3, 4, 5, 63), np.float16), gpu.array((1, 2, 7, 63), np.float16)
    cupyflash.attention(q, k, k)
    (_, _, _, (copy,)), *_ = [launch for launch in gpu.launches if launch[3][0].dtype == _launch.STRIDED_COPY][1:]
    assert copy["num_batches"] == 2 and copy["rows"] == 7 and copy["columns"] == 63
    assert copy["target_row_stride"] == 64
    assert gpu.launches[-1][0] == "strided_copy" and gpu.launches[-1][3][0]["target_row_stride"] == 63


@pytest.mark.parametrize("shape", [(0, 4, 64), (3, 0, 64)])
def test_nothing_is_launched_for_empty_results(gpu, shape):
    q, k = gpu.array(shape, np.float16), gpu.array((5, 64), np.float16)
    assert cupyflash.attention(q, k, k).shape == shape
    assert cupyflash.naive.attention(q, k, k).shape == shape
    assert gpu.launches == []


def test_without_keys_the_result_is_still_written(gpu):
    q, k = gpu.array((4, 63), np.float16), gpu.array((0, 63), np.float16)
    cupyflash.attention(q, k, k)
    cupyflash.naive.attention(q, k, k)
    names = [name for name, *_ in gpu.launches]
    assert names == ["strided_copy", "flash_fwd", "strided_copy", "softmax", "weighted_values"]


def test_bfloat16_needs_sm_80(gpu, monkeypatch):
    monkeypatch.setattr(cupy.cuda.Device, "compute_capability", "75")
    q = gpu.array((4, 64), ml_dtypes.bfloat16)
    for function in cupyflash.attention, cupyflash.naive.attention:
        with pytest.raises(TypeError, match="q: dtype bfloat16 needs sm_80 or later, and this is sm_75"):
            function(q, q, q)


def test_more_blocks_than_a_launch_has_are_refused(gpu):
    q, k = cupy.broadcast_to(gpu.array((1, 1, 8), np.float16), (2**31, 1, 8)), gpu.array((1, 8), np.float16)
    with pytest.raises(ValueError, match="2147483648 thread blocks, more than the 2147483647"):
        cupyflash.attention(q, k, k)


def test_a_gpu_array_without_a_gpu_says_so(monkeypatch):
    q = Memory().array((4, 64), np.float16)

    def no_driver(*_):
        raise cupy.cuda.runtime.CUDARuntimeError(35)

    monkeypatch.setattr(cupy.cuda, "Device", no_driver)
    with pytest.raises(RuntimeError, match=r"q: a cupy\.ndarray on device 0, but CuPy finds no usable GPU"):
        cupyflash.attention(q, q, q)
