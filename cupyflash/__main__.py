"""``python -m cupyflash``: attention on files, the kernels as source, PTX and cubin, and a demo."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cupyflash import __version__
from cupyflash._cli import attend, compiled, device, parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 2 after an error, 130 after Ctrl-C."""
    return parser.run(_parser(), arguments)


def _parser() -> parser.Parser:
    commands = parser.Parser(
        prog="cupyflash",
        description="Exact attention for NumPy and CuPy arrays, from CUDA C++ compiled at first use.",
    )
    commands.add_argument("--version", action="version", version=f"cupyflash {__version__}")
    subparsers = commands.add_subparsers(required=True, metavar="COMMAND")
    attend.add_parser(subparsers)
    compiled.add_parsers(subparsers)
    demo = subparsers.add_parser("demo", help="what the library does, on real inputs, in less than a minute")
    demo.add_argument("--device", choices=device.CHOICES, default="auto", help="default auto")
    demo.set_defaults(run=_demo)
    return commands


def _demo(args: argparse.Namespace) -> None:
    from cupyflash import demo

    demo.run(device.choose(args.device, None))


if __name__ == "__main__":
    sys.exit(main())
