"""Representative specialisations compile to machine code for every architecture, with the product's options."""

import re

import ml_dtypes
import numpy as np
import pytest
from cupy_backends.cuda.libs import nvrtc

from cupyflash import _config, _launch, _source

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SPECIALISATIONS = [
    (np.dtype(dtype), head_dims, causal)
    for dtype in (np.float16, BFLOAT16)
    for head_dims, causal in [
        ((16, 16), False),
        ((64, 64), False),
        ((64, 64), True),
        ((128, 128), True),
        ((192, 128), False),
        ((256, 256), True),
    ]
    if dtype == np.float16 or head_dims in ((64, 64), (256, 256))  # both types are one template
]


def compiled(source, arch, *options):
    """The finished program; NVRTC needs neither driver nor GPU."""
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(
            program, (*_launch.OPTIONS, "-ftz=true", "--device-as-default-execution-space", f"-arch={arch}", *options)
        )
        return nvrtc.getCUBIN(program) if arch.startswith("sm_") else nvrtc.getPTX(program)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


FIRST_AND_LAST = ARCHITECTURES[0], ARCHITECTURES[-1]


def flash_fwd_source(dtype, head_dims, causal, arch, scale_positive=True):
    defines = _config.flash_fwd_defines(dtype, *head_dims, causal=causal, scale_positive=scale_positive, arch=arch)
    return _source.render("flash_fwd", defines)


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch in FIRST_AND_LAST else pytest.mark.deep) for arch in ARCHITECTURES]
)
@pytest.mark.parametrize(
    ("dtype", "head_dims", "causal"),
    SPECIALISATIONS,
    ids=[f"{dtype}-{d}-{dv}{'-causal' * causal}" for dtype, (d, dv), causal in SPECIALISATIONS],
)
def test_flash_fwd_compiles_to_a_cubin(dtype, head_dims, causal, arch):
    if dtype == BFLOAT16 and arch == "sm_75":
        with pytest.raises(TypeError, match="bfloat16 needs sm_80"):
            _config.check_architecture(dtype, arch)
        return
    assert compiled(flash_fwd_source(dtype, head_dims, causal, arch), arch)[:4] == b"\x7fELF"


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_scales_that_are_not_positive_compile_to_a_cubin(arch):
    assert compiled(flash_fwd_source(np.dtype(np.float16), (64, 64), True, arch, scale_positive=False), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_other_kernels_compile_to_cubins(arch):
    for element in ("Half", "float", "double") + ("BFloat16",) * (arch != "sm_75"):
        assert compiled(_source.render("attention_naive", {"ELEMENT": element}), arch)
    for size in 2, 4, 8:
        assert compiled(_source.render("strided_copy", {"ELEMENT_BYTES": size}), arch)


@pytest.mark.parametrize(
    ("kernel", "defines", "params"),
    [
        (
            "flash_fwd",
            _config.flash_fwd_defines(np.dtype(np.float16), 64, 64, causal=True, scale_positive=True, arch="sm_80"),
            _launch.flash_fwd_params(),
        ),
        ("strided_copy", {"ELEMENT_BYTES": 2}, _launch.STRIDED_COPY),
        ("attention_naive", {"ELEMENT": "Half"}, _launch.attention_naive_params(np.dtype(np.float32))),
        ("attention_naive", {"ELEMENT": "double"}, _launch.attention_naive_params(np.dtype(np.float64))),
    ],
)
def test_kernels_take_as_many_bytes_as_are_sent(kernel, defines, params):
    ptx = compiled(_source.render(kernel, defines), "compute_80").decode()
    declared = re.findall(r"\.param \.align (\d+) \.b8 \w+_param_0\[(\d+)\]", ptx)
    assert declared and set(declared) == {(str(params.alignment), str(params.itemsize))}
    assert "_param_1" not in ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_float_operation_is_fused_by_the_compiler(arch):
    """-fmad=false reaches the kernel: the fused operations are those the source asks for, one for each weight."""
    ptx = compiled(flash_fwd_source(np.dtype(np.float16), (64, 64), False, arch), arch.replace("sm", "compute"))
    tile = _config.flash_fwd_tile(64, 64, arch)
    weights_of_a_lane = tile.block_m * tile.block_n // (32 * tile.num_warps)
    fused = ptx.decode().count("fma.rn")
    assert fused > 0 and fused % weights_of_a_lane == 0
