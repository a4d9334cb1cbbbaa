"""CUDA C++ to PTX by NVRTC, through CuPy's own binding, with a disk cache that needs neither."""

import hashlib
import importlib.util
import os
import re
import sys
import tempfile
import threading
import uuid
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path

from .binding import load_nvrtc
from .errors import CompileError
from .own_process import call_apart
from .settings import current

SOURCE_NAME = "kernel.cu"
_FORMAT = "1"  # of a cache entry
_PACKAGES = (  # that may hold NVRTC, its binding and its headers
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-runtime",
    "nvidia-cuda-runtime-cu12",
    "nvidia-cuda-crt",
    "nvidia-cuda-nvcc-cu12",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "cupy",
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)', re.MULTILINE)
_HINTS = {  # what NVRTC says -> what to know besides
    'cannot open source file "crt/': (
        "The headers crt/*.h come with: pip install nvidia-cuda-crt (for CUDA 12, nvidia-cuda-nvcc-cu12)"
    ),
    "device-side kernel launch": "Kernels that launch kernels (dynamic parallelism) do not run in the simulator",
}
# After these NVRTC 13.5 compiles otherwise than before, to the end of its process, with or without them.
_LASTING_OPTIONS = ("-G", "--device-debug", "-Ofc", "--Ofast-compile")
_INCLUDE_OPTIONS = ("-I", "--include-path", "-include", "--pre-include")


def compile_ptx(code, options=(), arch=None, name_expressions=None):
    """Compile CUDA C++ as ``cupy.RawModule`` would on a GPU of this ``arch``, and return its PTX.

    Parameters
    ----------
    code : str
        CUDA C++ source.
    options : tuple of str
        NVRTC options; CuPy's own are added as CuPy does. Its ``-ftz=true`` stands behind yours, so that an own
        ``-ftz=false`` has no effect: only inline PTX without ``.ftz`` keeps float32 subnormals; ``-std=c++17`` is added
        unless given. Headers are looked for in CuPy's CUB, Thrust and libcu++ first, then in your directories, then
        among CuPy's own and those of the CUDA toolkit; ``mma.h`` needs ``nvidia-cuda-crt`` (for CUDA 12,
        ``nvidia-cuda-nvcc-cu12``). With ``-G`` or ``-Ofc`` NVRTC runs in a process of its own, since it would compile
        all that follows otherwise.
    arch : str, optional
        Such as ``"sm_80"``; default: that of the settings in force.

    Raises
    ------
    CompileError
        With NVRTC's log.
    CompilerMissing
        Without NVRTC or CuPy, where the PTX is not in the cache.
    """
    return compile_module(code, options, arch, name_expressions)[0]


def compile_module(code, options=(), arch=None, name_expressions=None):
    """As `compile_ptx`, and also the mapping from name expressions to lowered names."""
    virtual = f"compute_{(arch or current().arch).removeprefix('sm_')}"
    return _compiled(code, options, virtual, name_expressions, _ptx)


def assembler_log(code, options=(), arch=None, name_expressions=None):
    """What ptxas says of each kernel when it makes machine code for ``arch``, and the mapping from name expressions
    to lowered names. No GPU is needed; errors as in `compile_ptx`.
    """
    return _compiled(code, options, arch or current().arch, name_expressions, _log)


def _ptx(nvrtc, program):
    return nvrtc.getPTX(program).decode().rstrip("\0")


def _log(nvrtc, program):
    return nvrtc.getProgramLog(program)


def _compiled(code, options, target, name_expressions, text_of):
    """What `text_of` reads from the program compiled for a target, or the cache from an earlier time."""
    if not isinstance(options, tuple):
        raise TypeError(f"options: {type(options).__name__}, must be a tuple of str")
    names = tuple(name_expressions or ())
    arguments = _with_cupy_options(options, target)
    if text_of is _log:
        arguments = (*arguments, "--ptxas-options=-v")
    key = None if _reads_files(code, options) else _cache_key(code, arguments, names)
    cached = key and _CACHE.read(key)
    if cached is None:
        apart = any(option.startswith(_LASTING_OPTIONS) for option in options)
        run = partial(call_apart, _run_nvrtc) if apart else _run_nvrtc
        cached = run(code, arguments, names, text_of)
        if key:
            _CACHE.write(key, cached)
    lowered, text = cached.split("\n", 1)
    return text, dict(zip(names, lowered.split("\t"), strict=False))


def _with_cupy_options(options, target):
    standard = () if any(o.startswith(("-std=", "--std=")) for o in options) else ("-std=c++17",)
    own = ("-ftz=true", f"-arch={target}", "--device-as-default-execution-space", "-lineinfo")
    return (*options, *standard, *own)


def _reads_files(code, options):
    """Whether the PTX may depend on files of the user, which can change behind the back of the cache."""
    if any(option.startswith(_INCLUDE_OPTIONS) for option in options):
        return True
    return any(os.path.isfile(name) for name in _INCLUDE.findall(code))


def _run_nvrtc(code, arguments, names, text_of):
    nvrtc = load_nvrtc()
    first, own, toolkit = _include_directories()
    arguments = (*map("-I{}".format, first), *arguments, *map("-I{}".format, (*own, *toolkit)))
    program = nvrtc.createProgram(code, SOURCE_NAME, (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, arguments)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program) or str(error)
            hints = "".join(f"\n{hint}\n" for said, hint in _HINTS.items() if said in log)
            raise CompileError(log + hints, code, arguments) from None
        text = text_of(nvrtc, program)
        lowered = "\t".join(nvrtc.getLoweredName(program, name) for name in names)
    finally:
        nvrtc.destroyProgram(program)
    return lowered + "\n" + text.replace(f'"{os.getcwd()}/', '"')


def _include_directories():
    """Where CuPy looks for headers: before the directories of the user, its own behind them, those of the toolkit."""
    include = [root / "_core" / "include" for root in _package("cupy")]
    first = [d / "cupy" / "_cccl" / name for d in include for name in ("cub", "thrust", "libcudacxx")]
    toolkit = [d for root in _package("nvidia") for d in root.glob("*/include") if _holds_headers(d)]
    return first, include, toolkit


def _holds_headers(directory):
    return (directory / "cuda_fp16.h").exists() or (directory / "crt" / "mma.h").exists()


def _package(name):
    """Directories of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    return [Path(root) for root in (found and found.submodule_search_locations) or ()]


def _nvrtc_version():
    """Versions of NVRTC and of what surrounds it; where NVRTC is a package, known without loading it."""
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    if not any("nvrtc" in name for name in found):  # from a CUDA toolkit: only the library itself knows
        found.append(f"NVRTC {load_nvrtc().getVersion()}")
    return " ".join(found)


def _cache_key(code, arguments, names):
    parts = (_FORMAT, _nvrtc_version(), *arguments, "", *names, "", code)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() + ".ptx"


def cache_directory() -> Path:
    """Where compiled kernels are kept: CUPYFLASH_CACHE_DIR, or the user's cache directory.

    A relative CUPYFLASH_CACHE_DIR counts from the current directory, as it is when a kernel is compiled.
    Raises RuntimeError where that is in a home directory and the user has none.
    """
    if chosen := os.environ.get("CUPYFLASH_CACHE_DIR"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cupyflash"


class _Cache:
    """Entries in the cache directory; where that cannot be written, in one that lasts as long as this process."""

    def __init__(self):
        self.temporary = None
        self.lock = threading.Lock()

    def read(self, key):
        """The text of a sound entry, or None."""
        for directory in self.directories():
            try:
                digest, text = (directory / key).read_bytes().decode().split("\n", 1)
            except (OSError, ValueError):
                continue
            if digest == hashlib.sha256(text.encode()).hexdigest():
                return text
        return None

    def directories(self):
        """Where an entry may be."""
        found = [Path(self.temporary.name)] if self.temporary else []
        try:
            return [cache_directory(), *found]
        except RuntimeError:
            return found

    def write(self, key, text):
        try:
            _write(cache_directory() / key, text)
            return
        except (OSError, RuntimeError) as error:
            reason = error
        try:
            with self.lock:
                if self.temporary is None:
                    self.temporary = tempfile.TemporaryDirectory(prefix="cupyflash-", ignore_cleanup_errors=True)
                    message = f"compiled kernels are kept until this process ends, in {self.temporary.name}, because"
                    warnings.warn(
                        f"{message} of {reason!r}; CUPYFLASH_CACHE_DIR chooses a directory", stacklevel=_callers_level()
                    )
            _write(Path(self.temporary.name) / key, text)
        except OSError:
            pass


def _callers_level():
    """The `stacklevel`, for a warning of the function that asks, of the first frame outside of this package."""
    package, frame, level = __name__.split(".")[0], sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level


_CACHE = _Cache()


def _write(entry, text):
    content = (hashlib.sha256(text.encode()).hexdigest() + "\n" + text).encode()
    temporary = entry.with_suffix(f".{uuid.uuid4().hex}")
    entry.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "xb", opener=_readable_by_all) as file:
            file.write(content)
        os.replace(temporary, entry)
    finally:
        temporary.unlink(missing_ok=True)


def _readable_by_all(path, flags):
    return os.open(path, flags, 0o644)
