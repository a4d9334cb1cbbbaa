"""What the command lines share: how options are read, and how errors and interruptions end a command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from cupyflash._cli.errors import CommandError
from cupyflash.ptxsim import CompilerMissing


class Parser(argparse.ArgumentParser):
    """Reports a wrong option as every other error: in one line. Options are not abbreviated."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):
        """Nothing that is not known is left to the parser of which this one is a subcommand."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str):
        raise CommandError(f"{message} (python -m {self.prog} --help)")


def run(parser: Parser, arguments: Sequence[str] | None) -> int:
    """Run one command; the exit status is the command's own (None: 0), 2 after an error, 130 after Ctrl-C."""
    try:
        if sys.stdout is None:
            raise CommandError("stdout is closed")
        try:
            args = parser.parse_args(arguments)
            return args.run(args) or 0
        finally:
            sys.stdout.flush()
    except (CommandError, CompilerMissing) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted, nothing written", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of stdout, such as head, has what it wants
        _drop_output()
        return 0
    except OSError as error:  # files have errors of their own: this is stdout's, such as a full device
        print(f"{parser.prog}: error: {error.strerror or error}", file=sys.stderr)
        _drop_output()
        return 2


def _drop_output() -> None:
    """What stdout still holds goes nowhere, so that Python does not try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
