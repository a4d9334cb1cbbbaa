"""``cupyflash attend``: attention on array files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from cupyflash import attention, ptxsim
from cupyflash._cli import device, files
from cupyflash._cli.errors import CommandError
from cupyflash.ptxsim.settings import ARCHITECTURES

_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float16", "bfloat16", "float32", "float64")}

_DESCRIPTION = """\
Attention on array files: softmax(scale q k^T) v for q (..., L, D), k (..., S, D), v (..., S, Dv), as
cupyflash.attention computes it.

Inputs are three .npy files, or one .npz with arrays q, k, v (or --names), of one dtype: float16, float32 or float64;
--dtype casts. NumPy's format does not know bfloat16 and holds it as two opaque bytes per element (dtype V2):
--dtype bfloat16 reads such arrays as they are. A bfloat16 result is written as float32, which holds its values
exactly; --raw-bfloat16 writes V2, for numpy.load(...).view(ml_dtypes.bfloat16).
"""


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "attend",
        help="attention on array files",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE", help="q.npy k.npy v.npy, or one .npz")
    parser.add_argument("-o", "--output", type=Path, required=True, help=".npy, or .npz with arrays out and lse")
    parser.add_argument("--names", nargs=3, metavar=("Q", "K", "V"), help="names of the arrays in an .npz input")
    parser.add_argument("--lse", type=Path, metavar="FILE", help="also write the log-sum-exp of each row, .npy")
    parser.add_argument("--causal", action="store_true", help="query i sees the keys j <= i + shift")
    parser.add_argument("--align", choices=("bottom-right", "top-left"), help="shift S - L, or 0; with --causal")
    parser.add_argument("--softmax-scale", type=float, metavar="X", help="default 1 / sqrt(D)")
    parser.add_argument("--dtype", choices=tuple(_DTYPES), help="what the kernel computes in")
    parser.add_argument("--raw-bfloat16", action="store_true", help="write a bfloat16 result as V2")
    parser.add_argument(
        "--device", choices=device.CHOICES, default="auto", help="auto: a GPU where CuPy finds one, else the simulator"
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, help="GPU that the simulator imitates; default sm_80")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Read, compute, write; raises CommandError, with nothing written."""
    outputs = _check_outputs(args)
    if args.names and len(args.inputs) != 1:
        raise CommandError("--names: names arrays of an .npz input, but there are several files")
    arrays = files.read_operands(args.inputs, args.names or ("q", "k", "v"))
    dtype = _DTYPES.get(args.dtype)
    q, k, v = (files.as_element(array, name, dtype) for name, array in arrays.items())
    if args.raw_bfloat16 and q.dtype != _DTYPES["bfloat16"]:
        raise CommandError(f"--raw-bfloat16: the result is {q.dtype}; --dtype bfloat16 computes in bfloat16")

    place = device.choose(args.device, args.arch)
    start = time.perf_counter()
    out, lse = _attention(args, place, q, k, v)
    seconds = time.perf_counter() - start
    stored = out
    if out.dtype == _DTYPES["bfloat16"]:
        stored = out.view("V2") if args.raw_bfloat16 else out.astype(np.float32)
    files.write_files({path: _contents(what, stored, lse) for path, what in outputs.items()})

    print(f"attention of {q.dtype} q {q.shape}, k {k.shape}, v {v.shape} {place.description}: {seconds:.2f} s")
    for path, what in outputs.items():
        shape = lse.shape if what == "lse" else out.shape
        dtype = lse.dtype if what == "lse" else stored.dtype
        print(f"{path}: {what} {shape} {dtype}")


def _check_outputs(args: argparse.Namespace) -> dict[Path, str]:
    """Output file -> "out", "lse" or "out and lse"."""
    target = files.check_target(args.output)
    if target.suffix not in (".npy", ".npz"):
        raise CommandError(f"{args.output}: the output's name must end in .npy or .npz")
    outputs = {target: "out" if target.suffix == ".npy" else "out and lse"}
    if args.lse:
        if target.suffix == ".npz":
            raise CommandError(f"--lse {args.lse}: {args.output} holds lse already")
        lse_target = files.check_target(args.lse)
        if lse_target.suffix != ".npy":
            raise CommandError(f"--lse {args.lse}: the name must end in .npy")
        if lse_target == target:
            raise CommandError(f"--lse {args.lse}: is the output for out as well")
        outputs[lse_target] = "lse"
    for path in args.inputs:
        if path.resolve() in outputs:
            raise CommandError(f"{path}: is an input and an output; the output needs another name")
    return outputs


def _attention(args: argparse.Namespace, place: device.Device, q, k, v) -> tuple[np.ndarray, np.ndarray]:
    try:
        with place.working("attention"):
            out, lse = attention(
                *(place.to_device(x) for x in (q, k, v)),
                softmax_scale=args.softmax_scale,
                causal=args.causal,
                align=args.align,
                return_lse=True,
            )
            return place.to_host(out), place.to_host(lse)
    except ptxsim.SimulationError:
        raise  # a defect of a kernel or of the simulator: the traceback is wanted
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise CommandError(error) from error


def _contents(what: str, out: np.ndarray, lse: np.ndarray) -> Callable[[Any], None]:
    if what == "out and lse":
        return partial(np.savez, out=out, lse=lse)
    return partial(np.save, arr=out if what == "out" else lse)
