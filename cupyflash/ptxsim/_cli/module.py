"""The module that a command is about: a file of CUDA C++ or PTX, and one kernel of it."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
from collections.abc import Iterator

import numpy as np

from cupyflash import ptxsim
from cupyflash._cli.errors import CommandError
from cupyflash.ptxsim._cli.arguments import Argument
from cupyflash.ptxsim.compile import SOURCE_NAME
from cupyflash.ptxsim.kernel import Kernel
from cupyflash.ptxsim.ptx_file import is_ptx
from cupyflash.ptxsim.templates import kernel_templates


class Source:
    """The file that a command names. `code`: its text under its own name; `options` find what it includes."""

    def __init__(self, args: argparse.Namespace):
        self.path, self.arch = args.source, args.arch
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from error
        self.is_ptx = self.path.suffix == ".ptx" or is_ptx(text)
        if self.is_ptx and args.option:
            raise CommandError(f"--option {args.option[0]}: is for NVRTC, {self.path} is PTX")
        name = json.dumps(self.path.name, ensure_ascii=False)
        self.code = f"#line 1 {name}\n{text}"
        includes = (f"-I{self.path.parent}",) if re.search(r'^\s*#\s*include\s*"', text, re.MULTILINE) else ()
        self.options = (*args.option, *includes)

    def ptx(self) -> str:
        """The PTX that NVRTC makes of it."""
        if self.is_ptx:
            raise CommandError(f"{self.path}: is PTX already")
        with self.compiling():
            return ptxsim.compile_ptx(self.code, self.options, self.arch)

    def kernel(self, name: str | None, cooperative: bool) -> Kernel:
        """The kernel of a name, by default the only one, for the settings in force."""
        expressions = () if name is None or name.isidentifier() else (name,)
        module = self._module(cooperative, expressions)
        if name is None:
            if len(module.kernels) != 1:
                raise CommandError(f"--kernel: is needed, the file has {self._choices(module.kernels)}")
            (name,) = module.kernels
        try:
            return module.get_function(name)
        except ValueError as error:
            return self._by_expression(name, cooperative, error)

    def _by_expression(self, name: str, cooperative: bool, error: ValueError) -> Kernel:
        """A C++ function, whose name in PTX is another; CommandError of the error where there is none."""
        if not self.is_ptx and name.isidentifier():
            with contextlib.suppress(ptxsim.CompileError):
                return self._module(cooperative, (name,)).get_function(name)
        said = str(error).partition("; a C++ function needs")[0]  # as above: overloaded, or no kernel
        said = re.sub(r"name_expressions=\((.*?),\)", r"--kernel \1", said)
        raise CommandError(f"--kernel: {said}") from error

    def _module(self, cooperative: bool, expressions: tuple[str, ...]) -> ptxsim.RawModule:
        choices = {"enable_cooperative_groups": cooperative}
        if not self.is_ptx:
            return ptxsim.RawModule(code=self.code, options=self.options, name_expressions=expressions, **choices)
        try:
            return ptxsim.RawModule(path=str(self.path), **choices)
        except ValueError as error:
            said = str(error).removeprefix(f"path: {str(self.path)!r} ").replace("settings: arch", "--arch")
            raise CommandError(f"{self.path}: {said}") from error

    def _choices(self, kernels: list[str]) -> str:
        """What --kernel may name."""
        if kernels or self.is_ptx:
            return ", ".join(kernels) or "no kernel"
        templates = [f"'{name}<float>'" for name in kernel_templates(self.code)]
        return (
            f"no kernel but templates: name an instance, such as {', '.join(templates)}" if templates else "no kernel"
        )

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """What NVRTC or the simulator refuses, in as many lines as they take."""
        try:
            yield
        except ptxsim.CompileError as error:
            log = str(error).replace(f'the compilation of "{SOURCE_NAME}"', f'the compilation of "{self.path.name}"')
            raise CommandError(log, lines=True) from error
        except NotImplementedError as error:
            raise CommandError(error, lines=True) from error


def set_global(module: ptxsim.RawModule, name: str, argument: Argument) -> None:
    """Give a variable the bytes of an argument, for the settings in force."""
    try:
        memory = module.get_global(name)
    except ValueError as error:
        raise CommandError(f"--global {name}={argument.text}: {error}") from error
    data = np.frombuffer(argument.value.tobytes(), np.uint8)
    if data.size != memory.size:
        said = f"{data.size} bytes, the variable has {memory.size}"
        raise CommandError(f"--global {name}={argument.text}: {said}")
    memory[:] = data
