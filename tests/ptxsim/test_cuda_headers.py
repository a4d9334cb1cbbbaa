"""Headers that CuPy gives its kernels: where they are looked for, and what is said where they are not."""

import pytest
from cupy._core.core import assemble_cupy_compiler_options

from cupyflash import ptxsim


def test_headers_are_looked_for_where_cupy_does():
    def directories(options):
        return [option for option in options if option.startswith("-I")]

    with pytest.raises(ptxsim.CompileError) as log:
        ptxsim.compile_ptx("broken", ("-I/mine", "-DX"))
    assert directories(log.value.options) == directories(assemble_cupy_compiler_options(("-I/mine", "-DX")))


def test_the_package_of_missing_headers_is_named():
    with pytest.raises(ptxsim.CompileError, match="pip install nvidia-cuda-crt"):
        ptxsim.compile_ptx('#include "crt/missing.h"')
    with pytest.raises(ptxsim.CompileError) as other:
        ptxsim.compile_ptx('#include "missing.h"')
    assert "pip" not in str(other.value)


def test_headers_of_packages_are_found_in_any_layout(tmp_path, monkeypatch):
    """Those of CUDA 13 share a folder; those of CUDA 12 have one for each package."""
    for file in ("cuda_runtime/include/cuda_fp16.h", "cuda_nvcc/include/crt/mma.h", "cublas/include/cublas.h"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(ptxsim.compile, "_package", lambda name: [tmp_path] if name == "nvidia" else [])
    found = {path.parent.name for path in ptxsim.compile._include_directories()[2]}
    assert found == {"cuda_runtime", "cuda_nvcc"}
