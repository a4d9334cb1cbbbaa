"""Problem and architecture -> launch configuration."""

import ml_dtypes
import numpy as np
import pytest
from cupy_backends.cuda.libs import nvrtc

from cupyflash import _config, _launch, _source, bounds
from cupyflash._problem import attention_problem

ARCHITECTURES = [f"sm_{capability}" for capability in _config.SHARED_MEMORY_PER_BLOCK]
HEAD_DIMS = [(16, 16), (64, 64), (64, 80), (80, 16), (128, 128), (144, 16), (16, 256), (192, 128), (256, 256)]


def problem(head_dim, head_dim_v, dtype=np.float16, leading=(2, 3), seqlen_q=300):
    return attention_problem(
        np.zeros((*leading, seqlen_q, head_dim), dtype),
        np.zeros((5, head_dim), dtype),
        np.zeros((5, head_dim_v), dtype),
    )


def assert_compiles(config, check, arch):
    """The kernel with a static_assert added to it."""
    program = nvrtc.createProgram(_source.render(config.file, config.defines) + check, f"{config.file}.cu", (), ())
    options = (*_launch.OPTIONS, f"-arch={arch}", "--device-as-default-execution-space", "--fdevice-syntax-only")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_tiles_fit_and_whole_warps_share_them(head_dim, head_dim_v, arch):
    config = _config.flash_fwd(problem(head_dim, head_dim_v), arch)
    tile = _config.flash_fwd_tile(head_dim, head_dim_v, arch)
    assert config.shared_bytes <= _config.shared_memory_per_block(arch)
    assert tile.block_m // tile.num_warps in (16, 32) and tile.block_m % tile.num_warps == 0
    assert tile.block_n % 16 == 0 and tile.block_n >= 32  # the error bounds count on 32
    assert config.block == 32 * tile.num_warps
    assert config.grid == 6 * -(-300 // tile.block_m)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86"])
def test_shared_memory_is_what_the_kernel_uses(head_dim, head_dim_v, arch):
    config = _config.flash_fwd(problem(head_dim, head_dim_v), arch)
    used = "max_of(QueryTile::BYTES, OutTile::BYTES) + KeyTile::BYTES + ValueTile::BYTES"
    assert_compiles(config, f'static_assert({used} == {config.shared_bytes}, "bytes");', arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 1), *HEAD_DIMS])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_tiles_fit(dtype, head_dim, head_dim_v, arch):
    config = _config.forward(problem(head_dim, head_dim_v, dtype), arch)
    tile = _config.flash_fwd_fma_tile(np.dtype(dtype), head_dim, head_dim_v, arch)
    smallest, largest = bounds.arithmetic.FMA_TILES
    assert config.name == "flash_fwd_fma"
    assert config.shared_bytes <= min(99 * 1024, _config.shared_memory_per_block(arch))
    assert smallest <= tile.block_n <= largest and tile.block_n % 16 == 0
    assert tile.block_m % (2 * tile.num_warps) == 0
    assert config.grid == 6 * -(-300 // tile.block_m)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_80"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_shared_memory_is_what_the_kernel_uses(dtype, head_dim, head_dim_v, arch):
    config = _config.forward(problem(head_dim, head_dim_v, dtype), arch)
    used = "QueryTile::BYTES + WeightTile::BYTES + max_of(KeyTile::BYTES, ValueTile::BYTES)"
    assert_compiles(config, f'static_assert({used} == {config.shared_bytes}, "bytes");', arch)


def test_constants_depend_on_rounded_head_dims_only():
    def defines(*args, **options):
        return _config.flash_fwd(problem(*args, **options), "sm_80").defines

    assert defines(49, 33) == defines(64, 48, leading=(7,), seqlen_q=1)
    assert defines(64, 48) != defines(64, 64)
    assert defines(64, 64)["ELEMENT"] == "Half" and defines(64, 64, ml_dtypes.bfloat16)["ELEMENT"] == "BFloat16"


def test_architectures_before_sm_75_are_refused():
    with pytest.raises(RuntimeError, match=r"sm_70: the kernels need compute capability 7\.5 or later"):
        _config.flash_fwd(problem(64, 64), "sm_70")


def test_an_unknown_architecture_gets_tiles_that_fit_everywhere():
    assert _config.flash_fwd_tile(256, 256, "sm_130") == _config.flash_fwd_tile(256, 256, "sm_86")


def test_naive_grids_cover_every_element():
    scores, softmax, values = _config.attention_naive(problem(64, 48), "sm_80")
    assert [config.name for config in (scores, softmax, values)] == ["scores", "softmax", "weighted_values"]
    assert scores.grid == -(-6 * 300 * 5 // 256)
    assert softmax.grid == 6 * 300 // 8
    assert values.grid == -(-6 * 300 * 48 // 256)
