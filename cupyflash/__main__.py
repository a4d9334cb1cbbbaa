"""``python -m cupyflash``: attention on files, the kernels as source, PTX and cubin, and a demo."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from cupyflash import __version__
from cupyflash._cli import attend, compiled, device
from cupyflash._cli.errors import CommandError
from cupyflash.ptxsim import CompilerMissing


class _Parser(argparse.ArgumentParser):
    """Reports a wrong option as every other error: in one line. Options are not abbreviated."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str):
        raise CommandError(f"{message} ({self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 after an error, 130 after Ctrl-C."""
    try:
        args = _parser().parse_args(arguments)
        args.run(args)
    except (CommandError, CompilerMissing) as error:
        return _failed(error)
    except KeyboardInterrupt:
        print("cupyflash: interrupted, nothing written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout, such as head, has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _failed(error: Exception) -> int:
    print(f"cupyflash: error: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cupyflash",
        description="Exact attention for NumPy and CuPy arrays, from CUDA C++ compiled at first use.",
    )
    parser.add_argument("--version", action="version", version=f"cupyflash {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    attend.add_parser(subparsers)
    compiled.add_parsers(subparsers)
    demo = subparsers.add_parser("demo", help="what the library does, on real inputs, in less than a minute")
    demo.add_argument("--device", choices=device.CHOICES, default="auto", help="default auto")
    demo.set_defaults(run=_demo)
    return parser


def _demo(args: argparse.Namespace) -> None:
    from cupyflash import demo

    demo.run(device.choose(args.device, None))


if __name__ == "__main__":
    sys.exit(main())
