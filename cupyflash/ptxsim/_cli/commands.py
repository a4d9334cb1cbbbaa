"""``profile``, ``sanitize`` and ``ptx``: one launch of a kernel in a file, and what is said of it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cupyflash import ptxsim
from cupyflash._cli import files
from cupyflash._cli.errors import CommandError
from cupyflash._cli.progress import progress_bar
from cupyflash.ptxsim._cli.arguments import GRAMMAR, Argument, parse, parse_globals
from cupyflash.ptxsim._cli.module import Source, set_global
from cupyflash.ptxsim.profile.page import page
from cupyflash.ptxsim.sanitizer.fresh import unwritten
from cupyflash.ptxsim.settings import ARCHITECTURES, SCHEDULES

_BY = (
    "warp_instructions",
    "global_load_sectors",
    "global_store_sectors",
    "shared_wavefronts",
    "mma_flops",
    "divergent_branches",
    "local_requests",
    "atomics",
)
_ADVICE = {  # what a fault says -> what to do about it on the command line
    "in a read-only array": (
        "in: and random: are arrays that the kernel only reads; inout: and inout-random: may be written"
    ),
    "enable_cooperative_groups=True": "--cooperative launches all blocks at once",
    "(shared_mem=": "--shared gives each block its dynamic shared memory, in bytes",
}
_SHOWN = 8  # elements of an array that are printed


def add_parsers(subparsers) -> None:
    profile = _launching(subparsers, "profile", "count what a launch does", "Exit status 1 where the kernel faults.")
    profile.add_argument("--json", type=Path, metavar="FILE", help="write all counters, resources and bounds")
    profile.add_argument("--html", type=Path, metavar="FILE", help="write the source with what each line costs")
    profile.add_argument("--png", type=Path, metavar="FILE", help="the same as a picture; needs Matplotlib")
    profile.add_argument(
        "--by", choices=_BY, default=_BY[0], metavar="COUNTER", help=f"that orders the lines: {', '.join(_BY)}"
    )
    profile.set_defaults(run=_profile)

    sanitize = _launching(
        subparsers, "sanitize", "check a launch for undefined behaviour", "Exit status 1 with findings, 0 without."
    )
    sanitize.add_argument("--json", type=Path, metavar="FILE", help="write all findings")
    sanitize.set_defaults(run=_sanitize)

    ptx = subparsers.add_parser("ptx", help="write the PTX that the simulator executes")
    _add_source(ptx)
    ptx.add_argument("-o", "--output", type=Path, metavar="FILE", help="default stdout")
    ptx.set_defaults(run=_ptx)


def _launching(subparsers, name: str, summary: str, status: str) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {status}",
        epilog=GRAMMAR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_source(parser)
    parser.add_argument("--kernel", metavar="NAME", help="default: the file's only one; a template as 'name<float>'")
    parser.add_argument("--grid", type=_extent, required=True, metavar="X[,Y[,Z]]", help="blocks")
    parser.add_argument("--block", type=_extent, required=True, metavar="X[,Y[,Z]]", help="threads of a block")
    parser.add_argument("--arg", action="append", default=[], dest="args", metavar="ARG", help="see below")
    parser.add_argument("--global", action="append", default=[], dest="globals", metavar="NAME=ARG", help="see below")
    parser.add_argument(
        "--shared", type=_natural, default=0, metavar="BYTES", help="of dynamic shared memory; default 0"
    )
    parser.add_argument("--cooperative", action="store_true", help="all blocks at once, for this_grid().sync()")
    parser.add_argument("--save", action="append", default=[], metavar="N=FILE.npy", help="write argument N afterwards")
    parser.add_argument("--schedule", choices=SCHEDULES, default="lockstep", help="default lockstep")
    parser.add_argument("--schedule-seed", type=_natural, default=0, metavar="N", help="of the random one; default 0")
    parser.add_argument("--seed", type=_natural, default=0, metavar="N", help="of random arguments; default 0")
    return parser


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FILE", help="CUDA C++, whose #include looks beside it, or .ptx")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="sm_80", help="GPU to imitate; default sm_80")
    parser.add_argument("--option", action="append", default=[], metavar="OPTION", help="for NVRTC, such as -DN=4")


def with_joined_options(arguments: Sequence[str]) -> list[str]:
    """``--option -DN=4`` as ``--option=-DN=4``: argparse takes any word that begins with a dash for an option."""
    joined, words = [], iter(arguments)
    for word in words:
        value = next(words, None) if word == "--option" else None
        joined.append(word if value is None else f"{word}={value}")
    return joined


def _extent(text: str) -> tuple[int, ...]:
    numbers = text.split(",")
    if len(numbers) > 3 or not all(map(files.is_natural, numbers)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 4 or 4,2 or 4,2,1")
    return tuple(map(int, numbers))


def _natural(text: str) -> int:
    if not files.is_natural(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _profile(args: argparse.Namespace) -> int:
    targets = _targets(args.json, args.html, args.png)
    if args.png and args.png.suffix.lower() != ".png":
        raise CommandError(f"--png {args.png}: is not of the form FILE.png")
    if args.png and importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"--png {args.png}: needs Matplotlib: pip install matplotlib")
    launch = _Launch(args, targets)
    try:
        with ptxsim.profile() as profile:
            launch.run("profile")
    except ptxsim.SimulationError as error:
        print(f"cupyflash.ptxsim: {error}{launch.advice(str(error))}", file=sys.stderr)
        return 1
    (kernel,) = profile.kernels
    print(f"{kernel}\n\n{kernel.line_table(by=args.by)}")
    launch.finish(
        targets,
        {
            args.json: lambda file: file.write(profile.to_json(indent=1).encode()),
            args.html: lambda file: file.write(page(kernel).encode()),
            args.png: kernel.to_png,
        },
    )
    return 0


def _sanitize(args: argparse.Namespace) -> int:
    targets = _targets(args.json)
    launch = _Launch(args, targets)
    with ptxsim.sanitize() as report:
        launch.run("sanitize")
    print(f"{report}{launch.advice(str(report))}")
    if report.ended:
        print(launch.unwritten())
    document = {"findings": [finding.as_dict() for finding in report.findings]}
    launch.finish(targets, {args.json: lambda file: file.write(json.dumps(document, indent=1).encode())})
    return int(bool(report))


def _ptx(args: argparse.Namespace) -> None:
    targets = _targets(args.output)
    files.check_apart(targets, {args.source.resolve()})
    text = Source(args).ptx()
    if args.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        files.write_files({targets[args.output]: lambda file: file.write(text.encode())})


class _Launch:
    """The launch that a command is about, with its arguments."""

    def __init__(self, args: argparse.Namespace, targets: dict[Path, Path]):
        self.source = Source(args)
        self.args = args
        self.arguments = parse(args.args, args.seed)
        self.globals = parse_globals(args.globals, args.seed)
        self.saved: dict[int, Path] = {}
        for text in args.save:
            number, path = _saved(text, self.arguments)
            if number in self.saved:
                raise CommandError(f"--save {text}: argument {number} is saved already")
            if path.resolve() in targets.values():
                raise CommandError(f"--save {text}: {path}: would be written twice")
            self.saved[number] = path
            targets |= _targets(path)
        inputs = {argument.file for argument in (*self.arguments, *self.globals.values())}
        files.check_apart(targets, {args.source.resolve(), *inputs})

    def run(self, command: str) -> None:
        """Compile and launch, with progress on long work."""
        args = self.args
        with ptxsim.settings(arch=args.arch, schedule=args.schedule, seed=args.schedule_seed), self.source.compiling():
            kernel = self.source.kernel(args.kernel, args.cooperative)
            for name, argument in self.globals.items():
                set_global(kernel.module, name, argument)
            try:
                if args.shared > kernel.max_dynamic_shared_size_bytes:
                    kernel.max_dynamic_shared_size_bytes = args.shared
                with progress_bar(command):
                    kernel(args.grid, args.block, tuple(a.value for a in self.arguments), shared_mem=args.shared)
            except (TypeError, ValueError) as error:
                raise CommandError(_as_options(str(error))) from error

    def advice(self, said: str) -> str:
        """What to do about faults that an option avoids, a line each."""
        return "".join(f"\n{advice}" for sign, advice in _ADVICE.items() if sign in said)

    def unwritten(self) -> str:
        """That a fault has ended the launch, and what it has not written for that."""
        lines = ["the launch ended there"]
        for number, argument in enumerate(self.arguments):
            if argument.text.startswith("out:") and (missing := unwritten(argument.value)):
                of = f"{missing:,} of {argument.value.size:,} elements"
                lines.append(f"{of} of --arg {number}, {argument.text}, were never written")
        return ": ".join([lines[0], "; ".join(lines[1:])]) if lines[1:] else lines[0]

    def finish(self, targets: dict[Path, Path], documents: dict[Path | None, Callable[[BinaryIO], object]]) -> None:
        """Write all files, and print the other arrays that the kernel may have written."""
        contents = {targets[path]: write for path, write in documents.items() if path is not None}
        for number, argument in enumerate(self.arguments):
            array = argument.value
            if number in self.saved:
                contents[targets[self.saved[number]]] = lambda file, array=array: np.save(file, array)
                print(f"\n--arg {number}, {argument.text}: {array.shape} {array.dtype} in {self.saved[number]}")
            elif argument.writable:
                print(f"\n--arg {number}, {argument.text}:\n{_shortened(array)}")
        files.write_files(contents)


def _targets(*paths: Path | None) -> dict[Path, Path]:
    """File as it is given -> what it is, links resolved."""
    given = [path for path in paths if path is not None]
    targets = {path: files.check_target(path) for path in given}
    for path in given:
        if [files.check_target(other) for other in given].count(targets[path]) > 1:
            raise CommandError(f"{path}: would be written twice")
    return targets


def _saved(text: str, arguments: list[Argument]) -> tuple[int, Path]:
    number, equals, path = text.partition("=")
    arrays = [str(n) for n, argument in enumerate(arguments) if isinstance(argument.value, np.ndarray)]
    if not equals or not path.endswith(".npy"):
        raise CommandError(f"--save {text}: is not of the form N=FILE.npy")
    if number not in arrays:
        raise CommandError(
            f"--save {text}: {number} is not one of {', '.join(arrays) or '(none)'}, the array arguments"
        )
    return int(number), Path(path)


def _as_options(message: str) -> str:
    """The launch's error in the words of the command line."""
    shared = (("shared_mem", "--shared"), ("max_dynamic_shared_size_bytes", "--shared"))
    for word, option in ("grid", "--grid"), ("block", "--block"), *shared, ("args", "--arg"):
        message = re.sub(rf"^{word}(\[(\d+)\])?:", lambda m, o=option: f"{o}{' ' * bool(m[2])}{m[2] or ''}:", message)
    return message


def _shortened(array: np.ndarray) -> str:
    if array.dtype.kind == "V":  # bfloat16: NumPy prints its numbers one by one
        array = array.astype(np.float32)
    with np.printoptions(threshold=_SHOWN, edgeitems=2, linewidth=110, precision=6):
        return str(array)
