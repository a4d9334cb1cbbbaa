"""A case of the battery: one problem, where it runs, and what is asked of the result."""

import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from cupyflash import _launch, _source, ptxsim
from tests.backends import Simulator

SIMULATOR = Simulator()


@dataclass(frozen=True)
class Case:
    """Kinds of cases say what the call is."""

    judge: Callable[["Case"], None]
    problem: Any
    arch: str = "sm_80"

    def call(self) -> None:
        """The call that the case is about."""
        raise NotImplementedError

    def sources(self) -> tuple[str, ...]:
        """What its kernels are compiled from, as the files are now."""
        return tuple(_rendered(kernel) for kernel in launched(self))

    def ptx(self, sources: tuple[str, ...]) -> tuple[str, ...]:
        """Digests of what such sources compile to, without what debuggers read."""
        return tuple(_digest(source, self.arch) for source in sources)


@functools.cache
def launched(case: Case) -> tuple[tuple[str, tuple, Any], ...]:
    """Files, constants and expressions of the kernels that the call launches, none of which is run."""
    found = {}

    def note(_, launch):
        config = launch.config
        found[config.file, tuple(config.defines.items()), config.user_functions] = None

    with mock.patch.object(_launch.Simulator, "launch", note):
        case.call()
    return tuple(found)


@functools.lru_cache(maxsize=500)
def _digest(source: str, arch: str) -> str:
    return hashlib.sha256(_ptx(source, arch).encode()).hexdigest()


def text_of(case: Case, file: str) -> str:
    """PTX of the case's kernel in ``file``."""
    (kernel,) = (kernel for kernel in launched(case) if kernel[0] == file)
    return _ptx(_rendered(kernel), case.arch)


def _rendered(kernel: tuple[str, tuple, Any]) -> str:
    file, defines, user_functions = kernel
    return _source.render(file, dict(defines), user_functions)


def _ptx(source: str, arch: str) -> str:
    ptx = ptxsim.compile_ptx(source, _launch.OPTIONS, arch=arch).partition(".section")[0]
    # The compiler leaves constants in the module that no kernel uses.
    ptx = re.sub(r"^\.global .* (\w+) = .*\n", lambda m: m[0] if ptx.count(m[1]) > 1 else "", ptx, flags=re.MULTILINE)
    return "\n".join(line for line in ptx.splitlines() if not line.lstrip().startswith((".loc", ".file", "//", "}")))
