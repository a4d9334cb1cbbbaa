"""``cupyflash kernels``, ``source``, ``ptx`` and ``cubin``: what is compiled, and what becomes of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import kernels_cu
from cupyflash import (
    _backward_config,
    _combine,
    _config,
    _launch,
    _option_gradients_config,
    _source,
    _variant,
    ptxsim,
)
from cupyflash._cli import files
from cupyflash._cli.errors import CommandError
from cupyflash._option_gradients_config import Sums
from cupyflash._problem import Problem, attention_problem
from cupyflash.ptxsim.binding import load_nvrtc
from cupyflash.ptxsim.settings import ARCHITECTURES

_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float16", "bfloat16", "float32", "float64")}
_HELP = {
    "source": "write the CUDA C++ that is compiled, one self-contained text",
    "ptx": "write the PTX that the simulator executes",
    "cubin": "write the machine code that CuPy loads; needs NVRTC, but no GPU and no driver",
}
_HALF = ("flash_fwd", "flash_bwd_dkdv", "flash_bwd_dq", "flash_bwd_dbias")
_FMA = tuple(f"{kernel}_fma" for kernel in _HALF)
#: Options that not every kernel has a use for, and the kernels that have one.
_CONSTANTS = {
    "head_dim": _HALF + _FMA,
    "head_dim_v": _HALF + _FMA,
    "causal": _HALF + _FMA,
    "negative_scale": ("flash_fwd",),
}


def add_parsers(subparsers) -> None:
    kernels = subparsers.add_parser("kernels", help="list the kernels")
    kernels.set_defaults(run=_list)
    catalogue = "\n".join(_catalogue())
    for command, summary in _HELP.items():
        parser = subparsers.add_parser(
            command,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"kernels:\n{catalogue}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("kernel", choices=tuple(kernels_cu.CATALOGUE), metavar="KERNEL")
        parser.add_argument("--dtype", choices=tuple(_DTYPES), default="float16", help="default float16")
        parser.add_argument("--head-dim", type=int, metavar="D", help="1 to 256; default 64")
        parser.add_argument("--head-dim-v", type=int, metavar="DV", help="1 to 256; default that of --head-dim")
        parser.add_argument("--causal", action="store_const", const=True, help="the variant with a causal mask")
        parser.add_argument(
            "--negative-scale", action="store_const", const=True, help="the variant for softmax_scale <= 0"
        )
        parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_80", help="default sm_80")
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            required=command == "cubin",
            help="a file" + "; default stdout" * (command != "cubin"),
        )
        parser.set_defaults(run=_write, command=command)


def cubin(source: str, arch: str) -> bytes:
    """Machine code for ``arch``, from NVRTC with the options that ``cupy.RawModule`` gives it."""
    nvrtc = load_nvrtc()
    options = (*_launch.OPTIONS, "-ftz=true", f"-arch={arch}", "--device-as-default-execution-space")
    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        # CuPy's binding takes the last byte for a terminator; it is the padding of the last ELF table.
        return nvrtc.getCUBIN(program) + b"\0"
    except nvrtc.NVRTCError as error:
        raise CommandError(f"NVRTC: {nvrtc.getProgramLog(program) or error}") from error
    finally:
        nvrtc.destroyProgram(program)


def _list(args: argparse.Namespace) -> None:
    print("\n".join(_catalogue()))


def _catalogue() -> list[str]:
    return [f"{name:<19} {summary}" for name, summary in kernels_cu.CATALOGUE.items()]


def _write(args: argparse.Namespace) -> None:
    target = files.check_target(args.output) if args.output else None
    source = _source.render(args.kernel, _defines(args))
    try:
        if args.command == "cubin":
            content = cubin(source, args.arch)
        else:
            text = source if args.command == "source" else ptxsim.compile_ptx(source, _launch.OPTIONS, args.arch)
            content = text.encode()
    except ptxsim.CompileError as error:
        raise CommandError(error) from error
    if target is None:
        sys.stdout.write(content.decode())
        sys.stdout.flush()
    else:
        files.write_files({target: lambda file: file.write(content)})


def _defines(args: argparse.Namespace):
    """The kernel's constants, by the configuration that calls use."""
    for option, kernels in _CONSTANTS.items():
        if getattr(args, option) is not None and args.kernel not in kernels:
            raise CommandError(f"--{option.replace('_', '-')}: {args.kernel} has no variants of it")
    dtype = _DTYPES[args.dtype]
    if args.kernel == "strided_copy":
        return _config.strided_copy((1,), dtype).defines
    names = (
        tuple(_DTYPES)[:2] if args.kernel in _HALF else tuple(_DTYPES)[2:] if args.kernel in _FMA else tuple(_DTYPES)
    )
    if args.dtype not in names:
        raise CommandError(f"--dtype {args.dtype} is not one of {', '.join(names)}, which {args.kernel} takes")
    head_dim = 64 if args.head_dim is None else args.head_dim
    head_dim_v = head_dim if args.head_dim_v is None else args.head_dim_v
    for option, size in ("--head-dim", head_dim), ("--head-dim-v", head_dim_v):
        if not 1 <= size <= 256:
            raise CommandError(f"{option}: {size} is not between 1 and 256")
    q, v = np.empty((1, head_dim), dtype), np.empty((1, head_dim_v), dtype)
    scale = -1.0 if args.negative_scale else None
    try:
        if args.kernel.startswith("attention_naive"):  # one constant for all of its kernels
            return _config.attention_naive(attention_problem(q, q, v), args.arch)[0].defines
        bias = np.empty((1, 1), dtype) if args.kernel.startswith("flash_bwd_dbias") else None
        problem = attention_problem(q, q, v, softmax_scale=scale, causal=bool(args.causal), bias=bias)
        if args.kernel.startswith("flash_fwd"):
            return _config.forward(problem, args.arch).defines
        _config.check_architecture(dtype, args.arch)
        if args.kernel == "flash_combine":
            return _combine.config(dtype, problem.lse_dtype, 1, _variant.defines(problem)).defines
        if args.kernel == "row_sum":
            return _option_gradients_config.row_sum(problem, dtype, 1, lengths=0, sink=None).defines
        return _backward_defines(args.kernel, problem, args.arch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CommandError(str(error).replace("q: dtype", "--dtype")) from error


def _backward_defines(kernel: str, problem: Problem, arch: str):
    if kernel.startswith("flash_bwd_dbias"):
        each_pair = Sums(queries=False, keys=False)
        return _option_gradients_config.flash_bwd_dbias(problem, arch, problem.dtype, each_pair, 1).defines
    if kernel == "flash_bwd_delta":
        return _backward_config.flash_bwd_delta(problem).defines
    if kernel.startswith("flash_bwd_dq"):
        return _backward_config.dq(problem, arch, 1).defines
    both = _backward_config.one_pass_for_keys_and_values(problem)  # otherwise the pass for dk
    return _backward_config.dkdv(problem, arch, 1, with_dkey=True, with_dvalue=both).defines
