"""What a backward call refuses, and what it launches."""

import cupy
import ml_dtypes
import numpy as np
import pytest
from cupy_backends.cuda.libs import nvrtc

import cupyflash
from cupyflash import _backward_config, _config, _launch, _source
from cupyflash._gradients import backward_problem
from cupyflash._problem import HALF_TYPES
from tests import test_launch
from tests.test_config import ARCHITECTURES, HEAD_DIMS, problem
from tests.test_launch import offsets

gpu = test_launch.gpu  # a fixture


def arguments(dtype=np.float16, **changes):
    """Of a call that is right, but for the changes."""
    rng = np.random.default_rng(0)
    lse_dtype = np.float64 if dtype == np.float64 else np.float32
    arrays = {
        "dout": (2, 4, 9, 8),
        "q": (2, 4, 9, 16),
        "k": (2, 2, 7, 16),
        "v": (2, 7, 8),
        "out": (2, 4, 9, 8),
    }
    made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in arrays.items()}
    return {**made, "lse": rng.standard_normal((2, 4, 9)).astype(lse_dtype), **changes}


def refuses(error, match, **changes):
    with pytest.raises(error, match=match):
        backward_problem(**arguments(**changes), dtypes=HALF_TYPES)


@pytest.mark.parametrize("name", ["dout", "out"])
def test_matrices_that_do_not_belong_to_the_inputs(name):
    right = arguments()[name]
    refuses(ValueError, rf"{name}: shape \(2, 4, 8, 8\), expected \(2, 4, 9, 8\)", **{name: right[..., :8, :]})
    refuses(ValueError, rf"{name}: shape \(4, 9, 8\), expected \(2, 4, 9, 8\)", **{name: right[0]})
    refuses(TypeError, rf"{name}: dtype <f4, expected float16", **{name: right.astype(np.float32)})
    refuses(TypeError, rf"{name}: dtype bfloat16, expected float16", **{name: right.astype(ml_dtypes.bfloat16)})
    refuses(TypeError, rf"{name}: dtype >f2, expected float16", **{name: right.astype(">f2")})
    refuses(TypeError, rf"{name}: expected a numpy.ndarray .* not float", **{name: 1.0})
    odd = np.zeros(right.nbytes + 1, np.uint8)[1:].view(np.float16).reshape(right.shape)
    refuses(ValueError, rf"{name}: its elements do not lie at multiples of their 2 bytes", **{name: odd})


@pytest.mark.parametrize("name", ["lse", "dlse"])
def test_row_values_that_do_not_belong_to_the_inputs(name):
    right = arguments()["lse"]
    refuses(ValueError, rf"{name}: shape \(2, 4, 9, 1\), expected \(2, 4, 9\)", **{name: right[..., None]})
    refuses(TypeError, rf"{name}: dtype <f8, expected float32", **{name: right.astype(np.float64)})
    refuses(TypeError, rf"{name}: dtype <f2, expected float32", **{name: right.astype(np.float16)})
    refuses(TypeError, rf"{name}: expected a numpy.ndarray .* not list", **{name: [0.0]})
    double = arguments(np.float64)
    assert backward_problem(**double)[0].lse_dtype == np.float64
    with pytest.raises(TypeError, match="lse: dtype <f4, expected float64"):
        backward_problem(**{**double, "lse": right})


def test_the_forward_arguments_are_checked_too():
    refuses(ValueError, "align: a causal mask with seqlen_q 9 and seqlen_k 7 needs", causal=True)
    refuses(ValueError, "softmax_scale: nan is not finite", softmax_scale=float("nan"))
    single = arguments(np.float32)
    with pytest.raises(TypeError, match="q: dtype float32 is not one of float16, bfloat16"):
        backward_problem(**single, dtypes=HALF_TYPES)


def test_grads_out_that_do_not_fit():
    made = arguments()
    dq, dk, dv = (np.zeros_like(made[name]) for name in "qkv")
    backward_problem(**made, grads_out=(dq, dk, dv))
    backward_problem(**made, grads_out=[None, dk.swapaxes(-1, -2).copy().swapaxes(-1, -2), None])
    refuses(TypeError, r"grads_out: expected \(dq, dk, dv\), each an array or None, not 2 items", grads_out=(dq, dk))
    refuses(TypeError, r"grads_out: expected \(dq, dk, dv\), .* not ndarray", grads_out=dq)
    refuses(ValueError, r"dk: shape \(2, 4, 9, 16\), expected \(2, 2, 7, 16\)", grads_out=(None, dq, None))
    refuses(TypeError, "dv: dtype <f4, expected float16", grads_out=(None, None, dv.astype(np.float32)))
    refuses(TypeError, "dq: expected a numpy.ndarray", grads_out=(1, None, None))
    refuses(
        ValueError,
        "dv: elements overlap",
        grads_out=(None, None, np.lib.stride_tricks.as_strided(dv, strides=(0,) * 3)),
    )
    dv.flags.writeable = False
    refuses(ValueError, "dv: is read-only", grads_out=(None, None, dv))


@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse", "dlse"])
def test_grads_out_that_overlap_an_input(name):
    made = arguments(dlse=np.zeros((2, 4, 9), np.float32))
    memory = np.zeros(2 * 4 * 9 * 16 + 8, np.float16)
    dq = memory[: 2 * 4 * 9 * 16].reshape(2, 4, 9, 16)
    shared = memory.view(made[name].dtype)[: made[name].size].reshape(made[name].shape)
    with pytest.raises(ValueError, match=f"dq: overlaps {name} in memory"):
        backward_problem(**{**made, name: shared}, grads_out=(dq, None, None))


def test_grads_out_that_overlap_each_other():
    q = np.ones((5, 8), np.float16)
    lse = np.zeros(5, np.float32)
    memory = np.zeros((2, 5, 8), np.float16)
    backward_problem(q, q, q, q, q, lse, grads_out=(memory[0], memory[1], None))
    with pytest.raises(ValueError, match="dv: overlaps dk in memory"):
        backward_problem(q, q, q, q, q, lse, grads_out=(None, memory[1], memory[1, ::-1]))


def test_gradients_unpack_in_order():
    gradients = cupyflash.Gradients(1, 2, 3)
    dq, dk, dv = gradients
    assert (dq, dk, dv) == (gradients.dq, gradients.dk, gradients.dv) == (1, 2, 3)


DEFINES = {
    "flash_bwd_delta": {"ELEMENT": "Half"},
    "flash_bwd_dkdv": _backward_config.flash_bwd_dkdv(
        problem(64, 64), "sm_80", 6, with_dkey=True, with_dvalue=True
    ).defines,
    "flash_bwd_dq": _backward_config.flash_bwd_dq(problem(64, 64), "sm_80", 6).defines,
}


def compiles(source, arch="sm_80"):
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    options = (*_launch.OPTIONS, f"-arch={arch}", "--device-as-default-execution-space", "--fdevice-syntax-only")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))


@pytest.mark.parametrize(
    ("kernel", "defines", "dtype"),
    [
        ("flash_bwd_delta", DEFINES["flash_bwd_delta"], _launch.FLASH_BWD_DELTA),
        ("flash_bwd_dkdv", DEFINES["flash_bwd_dkdv"], _launch.FLASH_BWD_DKDV),
        ("flash_bwd_dq", DEFINES["flash_bwd_dq"], _launch.FLASH_BWD_DQ),
        ("attention_naive_bwd", {"ELEMENT": "BFloat16"}, _launch.attention_naive_bwd_params(np.dtype(np.float32))),
        ("attention_naive_bwd", {"ELEMENT": "double"}, _launch.attention_naive_bwd_params(np.dtype(np.float64))),
    ],
)
def test_parameters_are_laid_out_as_the_kernel_declares_them(kernel, defines, dtype):
    checks = [f'static_assert(sizeof(Params) == {dtype.itemsize}, "size");']
    checks += [
        f'static_assert(__builtin_offsetof(Params, {path}) == {offset}, "{path}");' for path, offset in offsets(dtype)
    ]
    compiles(_source.render(kernel, defines) + "\n".join(checks))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_tiles_fit(head_dim, head_dim_v, arch):
    call = problem(head_dim, head_dim_v)
    dq = _backward_config.flash_bwd_dq(call, arch, 6)
    dkdv = _backward_config.flash_bwd_dkdv(call, arch, 3, with_dkey=True, with_dvalue=True)
    for config, rows in (dq, dq.defines["BLOCK_M"]), (dkdv, dkdv.defines["BLOCK_N"]):
        assert config.shared_bytes <= _config.shared_memory_per_block(arch)
        assert config.block == 32 * config.defines["NUM_WARPS"]
        assert rows // config.defines["NUM_WARPS"] in (16, 32)
    assert dq.grid == 6 * -(-300 // dq.defines["BLOCK_M"]) and dkdv.grid == 3
    assert _backward_config.flash_bwd_delta(call).grid == 6 * 300 // 4


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86"])
def test_shared_memory_is_what_the_kernels_use(head_dim, head_dim_v, arch):
    call = problem(head_dim, head_dim_v)
    dq = _backward_config.flash_bwd_dq(call, arch, 6)
    dkdv = _backward_config.flash_bwd_dkdv(call, arch, 3, with_dkey=True, with_dvalue=False)
    for config, used in (
        (dq, "QueryTile::BYTES + DoutTile::BYTES + NUM_STAGES * STAGE_BYTES"),
        (dkdv, "KeyTile::BYTES + ValueTile::BYTES + NUM_STAGES * STAGE_BYTES"),
    ):
        check = f'static_assert({used} == {config.shared_bytes}, "bytes");'
        compiles(_source.render(config.file, config.defines) + check, arch)


def launched(gpu, shapes, **options):
    q, k, v = (gpu.array(shape, np.float16) for shape in shapes)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    gpu.launches.clear()
    gradients = cupyflash.attention_backward(gpu.array(out.shape, np.float16), q, k, v, out, lse, **options)
    return gradients, {name: params for name, _, _, (params,) in gpu.launches}


def names(gpu):
    return [name for name, *_ in gpu.launches]


def test_a_launch_carries_addresses_strides_and_sizes(gpu):
    gradients, params = launched(gpu, ((2, 6, 9, 64), (2, 3, 7, 64), (7, 32)), causal=True, align="bottom-right")
    assert names(gpu) == ["flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkdv", "flash_bwd_dkdv"]
    dq = params["flash_bwd_dq"]
    assert dq["dquery"]["data"] == gradients.dq.data.ptr and dq["num_reduced"] == 1
    assert dq["owner"]["size"].tolist()[:3] == [6, 2, 0] and dq["reduced"]["ndim"] == 0
    assert dq["key"]["owner_stride"].tolist()[:2] == [7 * 64, 0]
    (dkey,), (dvalue,) = (arguments for *_, arguments in gpu.launches[2:])
    assert dkey["dkey"]["data"] == gradients.dk.data.ptr and dkey["num_reduced"] == 2
    assert dkey["owner"]["size"].tolist()[:2] == [6, 0] and dkey["reduced"]["size"].tolist()[:2] == [2, 0]
    assert dkey["query"]["owner_stride"][0] == 2 * 9 * 64 and dkey["query"]["reduced_stride"][0] == 9 * 64
    assert dvalue["dvalue"]["data"] == gradients.dv.data.ptr and dvalue["num_reduced"] == 12
    assert dvalue["owner"]["ndim"] == 0 and dvalue["delta"]["reduced_stride"].tolist()[:2] == [18, 9]
    assert dkey["causal_shift"] == -2 and dkey["scale"] == np.float32(1 / 8)


@pytest.mark.parametrize(
    ("shapes", "passes"),
    [
        (((4, 64), (5, 64), (5, 64)), 1),
        (((4, 128), (5, 128), (5, 128)), 1),
        (((4, 128), (5, 128), (5, 136)), 2),
        (((2, 4, 64), (2, 5, 64), (1, 5, 64)), 2),
        (((2, 4, 64), (1, 5, 64), (5, 64)), 1),
    ],
)
def test_keys_and_values_take_one_pass_where_that_is_possible(gpu, shapes, passes):
    launched(gpu, shapes)
    assert names(gpu) == ["flash_bwd_delta", "flash_bwd_dq", *["flash_bwd_dkdv"] * passes]


def test_what_has_no_elements_is_not_launched(gpu):
    launched(gpu, ((0, 64), (5, 64), (5, 64)))
    assert names(gpu) == ["flash_bwd_dkdv"]
    launched(gpu, ((4, 64), (0, 64), (0, 64)))
    assert names(gpu) == ["flash_bwd_delta", "flash_bwd_dq"]
    launched(gpu, ((0, 4, 64), (5, 64), (5, 64)))
    assert names(gpu) == ["flash_bwd_dkdv"] and gpu.launches[0][3][0]["num_reduced"] == 0


def test_workspace_is_two_numbers_per_query(gpu, monkeypatch):
    allocated = []

    def recorded(shape, dtype):
        allocated.append((shape, np.dtype(dtype)))
        return gpu.array(shape, dtype)

    q = gpu.array((3, 40, 64), np.float16)
    lse = gpu.array((3, 40), np.float32)
    monkeypatch.setattr(cupy, "empty", recorded)
    cupyflash.attention_backward(q, q, q, q, q, lse)
    assert sorted(shape for shape, _ in allocated) == [(3, 40)] * 2 + [(3, 40, 64)] * 3


def test_bfloat16_needs_sm_80(gpu, monkeypatch):
    monkeypatch.setattr(cupy.cuda.Device, "compute_capability", "75")
    q, lse = gpu.array((4, 64), ml_dtypes.bfloat16), gpu.array((4,), np.float32)
    for function in cupyflash.attention_backward, cupyflash.naive.attention_backward:
        with pytest.raises(TypeError, match="q: dtype bfloat16 needs sm_80 or later, and this is sm_75"):
            function(q, q, q, q, q, lse)
