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

Options of the call that are for Python alone: alibi_slopes, attn_sink, seqlens, score_mod, mask_mod, split_size,
numerics, return_max, packed batches and gradients.
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
    parser.add_argument(
        "--align",
        choices=("bottom-right", "top-left"),
        help="shift S - L, or 0; --causal and --window need it where L != S",
    )
    parser.add_argument(
        "--window",
        nargs=2,
        type=_side,
        metavar=("LEFT", "RIGHT"),
        help="query i sees the keys i + shift - LEFT to i + shift + RIGHT; 'all' leaves a side open",
    )
    parser.add_argument("--mask", type=Path, metavar="FILE", help="bool .npy, broadcast to (..., L, S): True = attend")
    parser.add_argument(
        "--bias", type=Path, metavar="FILE", help="float .npy, broadcast to (..., L, S), added to scores"
    )
    parser.add_argument("--softcap", type=float, metavar="X", help="scores become X tanh(score / X)")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="P", help="probability to drop a weight")
    parser.add_argument("--seed", type=int, metavar="N", help="which weights are dropped; --dropout needs it")
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
    if args.dropout and args.seed is None:
        raise CommandError(f"--dropout {args.dropout}: needs --seed N, which says what is dropped")
    arrays = files.read_operands(args.inputs, args.names or ("q", "k", "v"))
    dtype = _DTYPES.get(args.dtype)
    q, k, v = (files.as_element(array, name, dtype) for name, array in arrays.items())
    mask = None if args.mask is None else files.read_npy(args.mask)
    bias = None if args.bias is None else _read_bias(args.bias, dtype)
    if args.raw_bfloat16 and q.dtype != _DTYPES["bfloat16"]:
        raise CommandError(f"--raw-bfloat16: the result is {q.dtype}; --dtype bfloat16 computes in bfloat16")

    place = device.choose(args.device, args.arch)
    start = time.perf_counter()
    out, lse = _attention(args, place, q, k, v, mask=mask, bias=bias)
    seconds = time.perf_counter() - start
    stored = out
    if out.dtype == _DTYPES["bfloat16"]:
        stored = out.view("V2") if args.raw_bfloat16 else out.astype(np.float32)
    files.write_files({path: _contents(what, stored, lse) for path, what in outputs.items()})

    print(f"attention of {q.dtype} q {q.shape}, k {k.shape}, v {v.shape} {place.description}: {seconds:.2f} s")
    for path, what in outputs.items():
        arrays = {"out": stored, "lse": lse}
        written = (f"{name} {arrays[name].shape} {arrays[name].dtype}" for name in what.split(" and "))
        print(f"{path}: {', '.join(written)}")


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
    for path in (*args.inputs, args.mask, args.bias):
        if path is not None and path.resolve() in outputs:
            raise CommandError(f"{path}: is an input and an output; the output needs another name")
    return outputs


def _side(text: str) -> int | None:
    """One side of a window."""
    if text != "all" and not files.is_natural(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number of at least 0 nor 'all'")
    return None if text == "all" else int(text)


def _read_bias(path: Path, dtype: np.dtype | None) -> np.ndarray:
    """In its own dtype; opaque bytes are what the inputs' are."""
    array = files.read_npy(path)
    return files.as_element(array, f"{path} (bias)", dtype if array.dtype == files.OPAQUE else None)


def _attention(args: argparse.Namespace, place: device.Device, q, k, v, **optional) -> tuple[np.ndarray, np.ndarray]:
    try:
        with place.working("attention"):
            out, lse = attention(
                *(place.to_device(x) for x in (q, k, v)),
                **{name: None if x is None else place.to_device(x) for name, x in optional.items()},
                softmax_scale=args.softmax_scale,
                causal=args.causal,
                window_size=args.window,
                align=args.align,
                softcap=args.softcap,
                dropout_p=args.dropout,
                seed=args.seed,
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
