"""What one thread and one block of a compiled kernel occupy, as NVRTC's assembler (ptxas) reports it."""

import dataclasses
import functools
import re

from .compile import assembler_log
from .settings import ARCHITECTURES, current

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(\w+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")


@dataclasses.dataclass(frozen=True)
class Resources:
    """What ptxas gives a kernel: registers, spills and stack in bytes for each thread, the rest for each block.

    Spills are those of the kernel's own code, once for each place in the code; the stack includes functions that
    it calls. Shared memory is the static part.
    """

    kernel: str
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    barriers: int

    def as_dict(self):
        """All of it by name."""
        return dataclasses.asdict(self)


def resources(module, kernel=None, arch=None):
    """What a kernel needs on a GPU of an architecture. NVRTC assembles the code for it; no GPU is needed.

    Parameters
    ----------
    module : RawModule or str
        A module, or CUDA C++ source without options.
    kernel : str, optional
        A kernel's name, or a name expression of the module; default: the only kernel.
    arch : str, optional
        Such as ``"sm_90"``; default: that of the settings in force.

    Raises
    ------
    ValueError
        For an unknown kernel or architecture, without `kernel` where there are several, and for a module of a PTX file.
    CompileError
        Where the code does not compile for this architecture.

    >>> source = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }'
    >>> resources(source, arch="sm_90").spill_store_bytes
    0
    """
    code, options, names = (
        (module, (), ()) if isinstance(module, str) else (module.code, module.options, module.name_expressions)
    )
    if code is None:
        raise ValueError(f"module: loaded from {module.file_path!r}, but NVRTC assembles CUDA C++ only")
    arch = arch or current().arch
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch: {arch!r}, must be one of {', '.join(ARCHITECTURES)}")
    log, lowered = assembler_log(code, options, arch, names)
    found = _parsed(log)
    if kernel is None and len(found) == 1:
        return next(iter(found.values()))
    titles = {name: expression for expression, name in lowered.items()}
    known = ", ".join(titles.get(name, name) for name in found) or "none"
    if kernel is None:
        raise ValueError(f"kernel: must be given, the module has {known}")
    name = lowered.get(kernel, kernel)
    if name not in found:
        raise ValueError(f"no kernel {kernel!r} in what was compiled for {arch}; there is {known}")
    return found[name]


@functools.lru_cache(64)
def _parsed(log):
    """Resources of each kernel by its lowered name. The log also tells of functions that kernels call."""
    found, entry, about = {}, None, None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = about = match[1]
            found[entry] = {"kernel": entry, "arch": match[2]}
        elif match := _PROPERTIES.search(line):
            about = match[1]
        elif entry is None:
            continue
        elif (match := _FRAME.search(line)) and about == entry:
            sizes = (int(size) for size in match.groups())
            found[entry].update(zip(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), sizes, strict=True))
        elif match := _USED.search(line):
            found[entry]["registers"] = int(match[1])
            for name, pattern in (("barriers", _BARRIERS), ("static_shared_bytes", _SHARED), ("stack_bytes", _STACK)):
                if (used := pattern.search(line)) or name not in found[entry]:
                    found[entry][name] = int(used[1]) if used else 0
    return {name: Resources(**values) for name, values in found.items()}
