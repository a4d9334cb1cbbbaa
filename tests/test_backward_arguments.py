"""What a backward call refuses, and what it launches."""

import cupy
import ml_dtypes
import numpy as np
import pytest
from cupy_backends.cuda.libs import nvrtc

import cupyflash
from cupyflash import _backward_config, _config, _launch, _source
from cupyflash._gradients import backward_problem
from tests import test_launch
from tests.test_config import ARCHITECTURES, HEAD_DIMS, problem
from tests.test_launch import offsets
from tests.test_problem import fake_cupy

gpu = test_launch.gpu  # a fixture
dtypes = pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])


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


def refuses(error, match, dtype=np.float16, **changes):
    with pytest.raises(error, match=match):
        backward_problem(**arguments(dtype, **changes))


@dtypes
@pytest.mark.parametrize("name", ["dout", "out"])
def test_matrices_that_do_not_belong_to_the_inputs(name, dtype):
    right = arguments(dtype)[name]
    refuses(ValueError, rf"{name}: shape \(2, 4, 8, 8\), expected \(2, 4, 9, 8\)", dtype, **{name: right[..., :8, :]})
    refuses(ValueError, rf"{name}: shape \(4, 9, 8\), expected \(2, 4, 9, 8\)", dtype, **{name: right[0]})
    foreign = right.dtype.newbyteorder()
    for other in {np.float16, np.float32, np.float64, foreign} - {dtype}:
        given = np.dtype(other).str
        refuses(TypeError, rf"{name}: dtype {given}, expected {right.dtype}", dtype, **{name: right.astype(other)})
    bfloat16 = right.astype(ml_dtypes.bfloat16)
    refuses(TypeError, rf"{name}: dtype bfloat16, expected {right.dtype}", dtype, **{name: bfloat16})
    refuses(TypeError, rf"{name}: expected a numpy.ndarray .* not float", dtype, **{name: 1.0})
    odd = np.zeros(right.nbytes + 1, np.uint8)[1:].view(dtype).reshape(right.shape)
    size = right.itemsize
    refuses(ValueError, rf"{name}: its elements do not lie at multiples of their {size} bytes", dtype, **{name: odd})


@dtypes
@pytest.mark.parametrize("name", ["lse", "dlse"])
def test_row_values_that_do_not_belong_to_the_inputs(name, dtype):
    right = arguments(dtype)["lse"]
    expected = right.dtype
    assert backward_problem(**arguments(dtype, dlse=right))[0].lse_dtype == expected
    refuses(ValueError, rf"{name}: shape \(2, 4, 9, 1\), expected \(2, 4, 9\)", dtype, **{name: right[..., None]})
    for other in {np.float16, np.float32, np.float64} - {expected.type}:
        given = np.dtype(other).str
        refuses(TypeError, rf"{name}: dtype {given}, expected {expected}", dtype, **{name: right.astype(other)})
    refuses(TypeError, rf"{name}: expected a numpy.ndarray .* not list", dtype, **{name: [0.0]})
    odd = np.zeros(right.nbytes + 1, np.uint8)[1:].view(expected).reshape(right.shape)
    refuses(ValueError, rf"{name}: its elements do not lie at multiples", dtype, **{name: odd})


def test_out_and_lse_of_another_dtype_of_inputs():
    """What attention returned for the same values in float32 does not belong to float64 inputs, nor the other way."""
    double, single = arguments(np.float64), arguments(np.float32)
    refuses(TypeError, "out: dtype <f4, expected float64", np.float64, out=single["out"])
    refuses(TypeError, "lse: dtype <f4, expected float64", np.float64, lse=single["lse"])
    refuses(TypeError, "out: dtype <f8, expected float32", np.float32, out=double["out"], lse=double["lse"])
    refuses(TypeError, "lse: dtype <f8, expected float32", np.float32, lse=double["lse"])


@dtypes
@pytest.mark.parametrize("name", ["dout", "out", "lse", "dlse", "dq"])
def test_arrays_of_another_kind_or_device(name, dtype):
    made = arguments(dtype)
    made["dlse"], made["dq"] = made["lse"], made["q"]

    def call(other):
        on_device = {argument: fake_cupy(*x.shape, dtype=x.dtype) for argument, x in made.items()} | {name: other}
        dq = on_device.pop("dq")
        on_device["grads_out"] = (dq, None, None) if name == "dq" else None
        backward_problem(**on_device)

    right = made[name]
    elsewhere = {"dtype": right.dtype, "address": 0x7E0000000000}
    call(fake_cupy(*right.shape, **elsewhere))
    with pytest.raises(TypeError, match=f"{name}: numpy array, but q is a cupy array; one call takes one kind"):
        call(right)
    with pytest.raises(ValueError, match=f"{name}: on device 1, but q is on device 0"):
        call(fake_cupy(*right.shape, **elsewhere, device_id=1))


def test_the_forward_arguments_are_checked_too():
    refuses(ValueError, "align: a causal mask with seqlen_q 9 and seqlen_k 7 needs", causal=True)
    refuses(ValueError, "softmax_scale: nan is not finite", softmax_scale=float("nan"))
    refuses(TypeError, "k: dtype float64, but q has float32", np.float32, k=arguments(np.float64)["k"])


@dtypes
def test_grads_out_that_do_not_fit(dtype):
    made = arguments(dtype)
    dq, dk, dv = (np.zeros_like(made[name]) for name in "qkv")
    backward_problem(**made, grads_out=(dq, dk, dv))
    backward_problem(**made, grads_out=[None, dk.swapaxes(-1, -2).copy().swapaxes(-1, -2), None])

    def grads_refused(error, match, grads_out):
        refuses(error, match, dtype, grads_out=grads_out)

    grads_refused(
        TypeError, r"grads_out: expected \(dq, dk, dv\) or Gradients, each an array or None, not 2 items", (dq, dk)
    )
    grads_refused(TypeError, r"grads_out: expected \(dq, dk, dv\) .* not ndarray", dq)
    grads_refused(ValueError, r"dk: shape \(2, 4, 9, 16\), expected \(2, 2, 7, 16\)", (None, dq, None))
    for other in {np.float16, np.float32, np.float64} - {dtype}:
        match = f"dv: dtype {np.dtype(other).str}, expected {dv.dtype}"
        grads_refused(TypeError, match, (None, None, dv.astype(other)))
    grads_refused(TypeError, "dq: expected a numpy.ndarray", (1, None, None))
    overlapping = np.lib.stride_tricks.as_strided(dv, strides=(0,) * 3)
    grads_refused(ValueError, "dv: elements overlap", (None, None, overlapping))
    dv.flags.writeable = False
    grads_refused(ValueError, "dv: is read-only", (None, None, dv))


@dtypes
@pytest.mark.parametrize("name", ["dout", "q", "k", "v", "out", "lse", "dlse"])
def test_grads_out_that_overlap_an_input(name, dtype):
    made = arguments(dtype)
    made["dlse"] = np.zeros_like(made["lse"])
    memory = np.zeros(2 * 4 * 9 * 16 + 8, dtype)
    dq = memory[: 2 * 4 * 9 * 16].reshape(2, 4, 9, 16)
    shared = memory.view(made[name].dtype)[: made[name].size].reshape(made[name].shape)
    with pytest.raises(ValueError, match=f"dq: overlaps {name} in memory"):
        backward_problem(**{**made, name: shared}, grads_out=(dq, None, None))


@dtypes
def test_grads_out_that_overlap_each_other(dtype):
    q = np.ones((5, 8), dtype)
    lse = np.zeros(5, arguments(dtype)["lse"].dtype)
    memory = np.zeros((2, 5, 8), dtype)
    backward_problem(q, q, q, q, q, lse, grads_out=(memory[0], memory[1], None))
    with pytest.raises(ValueError, match="dv: overlaps dk in memory"):
        backward_problem(q, q, q, q, q, lse, grads_out=(None, memory[1], memory[1, ::-1]))


@dtypes
def test_a_refused_call_launches_nothing(gpu, dtype):
    lse_dtype = arguments(dtype)["lse"].dtype
    q, lse = gpu.array((4, 8), dtype), gpu.array((4,), lse_dtype)
    other = gpu.array((4,), np.float32 if dtype == np.float64 else np.float64)
    for error, changes in (
        (TypeError, {"lse": other}),
        (TypeError, {"dlse": other}),
        (ValueError, {"out": gpu.array((5, 8), dtype)}),
        (ValueError, {"grads_out": (q, None, None)}),
    ):
        with pytest.raises(error):
            cupyflash.attention_backward(**{**dict(dout=q, q=q, k=q, v=q, out=q, lse=lse), **changes})
    with pytest.raises(TypeError, match=r"grads_out: expected \(dq, dk, dv\)"):
        cupyflash.attention_backward(q, q, q, q, q, lse, grads_out=())
    assert not gpu.launches and not gpu.modules


@dtypes
def test_a_pullback_checks_what_it_is_given(dtype):
    q, k, v = (x.astype(dtype) for x in np.random.default_rng(0).standard_normal((3, 4, 8)))
    (out, lse), pullback = cupyflash.attention_vjp(q, k, v, return_lse=True)
    wrong = np.float32 if dtype == np.float64 else np.float64
    with pytest.raises(TypeError, match=f"dout: dtype {np.dtype(wrong).str}, expected {out.dtype}"):
        pullback(out.astype(wrong))
    with pytest.raises(ValueError, match=r"dout: shape \(4, 7\), expected \(4, 8\)"):
        pullback(out[:, :7])
    with pytest.raises(TypeError, match=f"dlse: dtype {np.dtype(wrong).str}, expected {lse.dtype}"):
        pullback(out, lse.astype(wrong))
    with pytest.raises(ValueError, match=r"dlse: shape \(3,\), expected \(4,\)"):
        pullback(out, dlse=lse[:3])


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
        ("flash_bwd_dkdv", DEFINES["flash_bwd_dkdv"], _launch.flash_bwd_params("dkey", "dvalue")),
        ("flash_bwd_dq", DEFINES["flash_bwd_dq"], _launch.flash_bwd_params("dquery")),
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
    for config, rows in (dq, dq.defines["BLOCK_M"]), (dkdv, 2 * dkdv.defines["BLOCK_N"]):
        assert config.shared_bytes <= _config.shared_memory_per_block(arch)
        assert config.block == 32 * config.defines["NUM_WARPS"]
        assert rows // config.defines["NUM_WARPS"] in (16, 32)  # of a warp: two share the keys of dkdv
    assert dq.grid == 6 * -(-300 // dq.defines["BLOCK_M"]) and dkdv.grid == 3
    assert _backward_config.flash_bwd_delta(call).grid == 6 * 300 // 4


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "sm_75"])
def test_eight_warps_share_a_multiprocessor(arch):
    """Its shared memory is what one block may have and the kilobyte that each block takes besides."""
    roomy = _config.shared_memory_per_block(arch) >= 163 * 1024
    for head_dim in 64, 128:
        call = problem(head_dim, head_dim)
        dq = _backward_config.flash_bwd_dq(call, arch, 6)
        dkdv = _backward_config.flash_bwd_dkdv(call, arch, 3, with_dkey=True, with_dvalue=True)
        for config in [dkdv, dq] if roomy or head_dim == 64 else [dkdv]:
            blocks = 8 // config.defines["NUM_WARPS"]
            assert blocks * (config.shared_bytes + 1024) <= _config.shared_memory_per_block(arch) + 1024


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86"])
def test_shared_memory_is_what_the_kernels_use(head_dim, head_dim_v, arch):
    call = problem(head_dim, head_dim_v)
    dq = _backward_config.flash_bwd_dq(call, arch, 6)
    dkdv = _backward_config.flash_bwd_dkdv(call, arch, 3, with_dkey=True, with_dvalue=False)
    for config, used in (
        (dq, "QueryTile::BYTES + DoutTile::BYTES + NUM_STAGES * STAGE_BYTES"),
        (dkdv, "OWNED_BYTES + STAGE_BYTES + BLOCK_M * BLOCK_N * sizeof(float)"),
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
    assert dkey["band_right"] == -2 and dkey["scale"] == np.float32(1 / 8)


@pytest.mark.parametrize(
    ("shapes", "passes"),
    [
        (((4, 64), (5, 64), (5, 64)), 1),
        (((4, 128), (5, 128), (5, 128)), 1),
        (((4, 256), (5, 256), (5, 256)), 1),
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
