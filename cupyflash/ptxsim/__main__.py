"""``python -m cupyflash.ptxsim``: one launch of a CUDA kernel on this machine, profiled or checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cupyflash._cli import parser
from cupyflash.ptxsim._cli import commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 where the kernel is at fault, 2 after an error, 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else arguments
    return parser.run(_parser(), commands.with_joined_options(words))


def _parser() -> parser.Parser:
    found = parser.Parser(prog="cupyflash.ptxsim", description="CUDA kernels profiled and checked without a GPU.")
    subparsers = found.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parsers(subparsers)
    return found


if __name__ == "__main__":
    sys.exit(main())
