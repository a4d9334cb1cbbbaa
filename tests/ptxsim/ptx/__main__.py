"""Compiles calls.cu with the NVRTC of a shared library: `python -m tests.ptxsim.ptx .../libnvrtc.so.12`.

The files here are made by NVRTC 12.9 (pip package nvidia-cuda-nvrtc-cu12 12.9.86), optimised and for debugging (-G);
their heads say so. They have the options that CuPy passes, and are not to be changed by hand.
"""

import ctypes
import os
import sys
from pathlib import Path

OPTIONS = ("-std=c++17", "-ftz=true", "-arch=compute_80", "--device-as-default-execution-space", "-lineinfo")


def compiled(nvrtc, source, options):
    """The PTX of a source."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    call(nvrtc.nvrtcCreateProgram, ctypes.byref(program), source, b"calls.cu", 0, None, None)
    call(nvrtc.nvrtcCompileProgram, program, len(options), (ctypes.c_char_p * len(options))(*map(str.encode, options)))
    call(nvrtc.nvrtcGetPTXSize, program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    call(nvrtc.nvrtcGetPTX, program, text)
    return text.value.decode()


def call(function, *args):
    if code := function(*args):
        raise RuntimeError(f"{function.__name__} returned {code}")


if __name__ == "__main__":
    folder, library = Path(__file__).resolve().parent, ctypes.CDLL(sys.argv[1])
    source = (folder / "calls.cu").read_bytes()
    os.chdir("/")  # its name gets into the PTX
    for name, options in (("nvrtc_12", OPTIONS), ("nvrtc_12_debug", (*OPTIONS, "-G"))):
        (folder / f"calls_{name}.ptx").write_text(compiled(library, source, options))
