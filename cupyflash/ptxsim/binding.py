"""CuPy's binding of NVRTC, loaded where it can be and clearly refused where it cannot."""

import atexit
import os
import shutil
import tempfile

from .errors import CompilerMissing


def load_nvrtc():
    """The module ``cupy_backends.cuda.libs.nvrtc``, with its library loaded.

    Raises
    ------
    CompilerMissing
        Without CuPy or without NVRTC.
    """
    give_cupy_a_cache()
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()  # the binding looks for its library at the first call
    except (ImportError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CompilerMissing(
            f'NVRTC is needed to compile kernels: pip install "cupyflash[cuda13]" (or [cuda12]); {reason}'
        ) from error
    return nvrtc


def give_cupy_a_cache():
    """Where CuPy could not make its own cache directory, and so could not be imported, choose a temporary one."""
    if "CUPY_CACHE_DIR" in os.environ:
        return
    default = os.path.expanduser("~/.cupy/kernel_cache")
    try:
        if not default.startswith("~"):
            os.makedirs(default, exist_ok=True)
            return
    except OSError:
        pass
    temporary = tempfile.mkdtemp(prefix="cupyflash-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    os.environ.setdefault("CUPY_CACHE_DIR", temporary)
