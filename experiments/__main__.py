"""``python -m experiments list | run NAME | all | draw NAME``."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments import backends, pages, parallel, record
from experiments.experiment import CATALOGUE, NAMES, Experiment, Outcome, load

FULL, QUICK = "full", "quick"
NEEDED = ("distributed", "hypothesis", "matplotlib")  # beside what the library does


class CommandError(Exception):
    """What the command cannot do, in one line."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the status is 1 where one of ``all`` failed, 2 for what cannot be, 130 after Ctrl-C."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f'no {" and no ".join(missing)}: pip install "cupyflash[experiments]"', file=sys.stderr)
        return 2
    args = _parser().parse_args(arguments)
    try:
        with _where_measured(getattr(args, "dask", None)):
            return args.run(args)
    except CommandError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing of this experiment is written", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Claims about attention, measured.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="every experiment and its question").set_defaults(run=_list)

    run = commands.add_parser("run", help="one experiment: a CSV, a figure, and what came out")
    experiments = run.add_subparsers(required=True, metavar="NAME", dest="name")
    for name in NAMES:
        own = experiments.add_parser(
            name, help=_question(name), description=_doc(name), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        experiment = load(name)
        for size, default in experiment.full.items():
            _add_size(own, size, default, experiment.quick[size])
        _add_common(own)
        own.set_defaults(run=_run)

    every = commands.add_parser("all", help="all experiments")
    _add_common(every)
    every.set_defaults(run=_all)

    draw = commands.add_parser("draw", help="figures again, from the CSVs that are there; and the pages")
    draw.add_argument("names", nargs="*", type=_name, metavar="NAME", help="default: all")
    draw.set_defaults(run=_draw)
    return parser


def _add_size(parser: argparse.ArgumentParser, size: str, default: Any, quick: Any) -> None:
    values = default if isinstance(default, list) else [default]
    parser.add_argument(
        f"--{size.replace('_', '-')}",
        dest=f"size_{size}",
        type=_whole(min(1, *values)) if isinstance(values[0], int) else type(values[0]),
        choices=values if isinstance(values[0], str) else None,
        nargs="+" if isinstance(default, list) else None,
        metavar=size.upper(),
        help=f"default {_shown(default)}; with --quick {_shown(quick)}",
    )


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if int(text) < least:
            raise ValueError
        return int(text)

    parse.__name__ = f"number (whole, from {least})"
    return parse


def _name(text: str) -> str:
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(NAMES)}")
    return text


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds for each experiment")
    parser.add_argument(
        "--backend", choices=backends.BACKENDS, default="sim", help="default sim; gpu where no counters are needed"
    )
    parser.add_argument(
        "--dask", metavar="ADDRESS", help="of a Dask scheduler whose workers, started in this folder, measure the cases"
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="default experiments/results, its folder small for other sizes"
    )


@contextlib.contextmanager
def _where_measured(dask: str | None) -> Iterator[None]:
    """On the cluster whose scheduler is at ``dask``, or here."""
    if dask is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(parallel.on_dask(dask))
        except RuntimeError as error:
            raise CommandError(f"--dask {dask}: {error}") from error
        yield


def _shown(size: Any) -> str:
    return " ".join(map(str, size)) if isinstance(size, list) else str(size)


def _doc(name: str) -> str:
    return importlib.import_module(f"experiments.{name}").__doc__


def _question(name: str) -> str:
    return _doc(name).splitlines()[0]


def _list(args: argparse.Namespace) -> int:
    for part, names in CATALOGUE.items():
        print(part)
        for name in names:
            print(f"  {name:<18} {_question(name)}")
    return 0


def _run(args: argparse.Namespace) -> int:
    experiment = load(args.name)
    given = {size: getattr(args, f"size_{size}") for size in experiment.full}
    given = {size: value for size, value in given.items() if value is not None}
    if args.backend == "gpu" and not experiment.on_gpu:
        raise CommandError(f"--backend gpu: {args.name} is about the simulator's counters or models")
    backend = _backend(args)
    if not given:
        _finish(args.name, backend, args, given)
        return 0
    try:
        _finish(args.name, backend, args, given)
    except CommandError:
        raise
    except Exception as error:  # sizes that do not go together
        raise CommandError(f"{args.name} cannot be measured so: {type(error).__name__}: {error}") from error
    return 0


def _all(args: argparse.Namespace) -> int:
    backend, start, failed = _backend(args), time.perf_counter(), []
    for index, name in enumerate(NAMES, 1):
        print(f"[{index}/{len(NAMES)}] {name}: {_question(name)}", flush=True)
        if args.backend == "gpu" and not load(name).on_gpu:
            print("    left out: it is about the simulator's counters or models")
            continue
        try:
            _finish(name, backend, args, {})
        except CommandError:
            raise
        except Exception as error:  # the others are not lost; the status says so
            failed.append(name)
            print(f"    failed: {type(error).__name__}: {error}", flush=True)
    print(f"all in {time.perf_counter() - start:.0f} s; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _backend(args: argparse.Namespace) -> backends.Backend:
    try:
        return backends.BACKENDS[args.backend]()
    except Exception as error:  # of the driver, or no CuPy
        raise CommandError(f"--backend {args.backend}: CuPy finds no usable GPU ({error})") from error


def _finish(name: str, backend: backends.Backend, args: argparse.Namespace, given: dict) -> None:
    """Measure, write the CSV, draw from it, judge it; full sizes in the usual place rewrite the pages too."""
    experiment, start = load(name), time.perf_counter()
    sizes = {**(experiment.quick if args.quick else experiment.full), **given}
    label = QUICK if args.quick else FULL
    if given:
        label = ", ".join(f"{size} {_shown(value)}" for size, value in sizes.items())
    path = _folder(args.results, label) / f"{name}.csv"
    rows = experiment.measure(**({"backend": backend} if experiment.on_gpu else {}), **sizes)
    record.write_csv(path, rows, record.joined(parallel.everywhere(record.environment, backend.name, label)))
    outcomes = _drawn(experiment, path)
    print(f"wrote {path}, .png and .svg in {time.perf_counter() - start:.1f} s")
    _print_outcomes(outcomes, label)
    if path.parent == record.RESULTS:
        _rewrite_pages()


def _folder(results: Path | None, label: str) -> Path:
    """Where to write, made before anything is measured."""
    if results is None:
        folder = record.RESULTS if label == FULL else record.RESULTS / "small"
    else:
        folder = results.resolve()
    if label != FULL and folder == record.RESULTS:
        raise CommandError(f"--results {results}: the pages show what is there, which is of full sizes")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--results {results}: {error}") from error
    if not os.access(folder, os.W_OK):
        raise CommandError(f"--results {results}: cannot be written to")
    return folder


def _drawn(experiment: Experiment, path: Path) -> list[Outcome]:
    rows, _ = record.read_csv(path)
    with record.figure(path, experiment.figure_size) as figure:
        experiment.draw(figure, rows)
    return experiment.outcomes(rows)


def _print_outcomes(outcomes: list[Outcome], label: str) -> None:
    for outcome in outcomes:
        print(f"    {outcome.what}: expected {outcome.expected}, found {outcome.found}; {outcome.verdict}")
    if label != FULL:
        print("    (what is expected is expected of the full sizes)")


def _rewrite_pages() -> None:
    missing = [name for name in NAMES if not (record.RESULTS / f"{name}.csv").exists()]
    if missing:
        print(f"the pages stay as they are: no results of {', '.join(missing)}")
    else:
        pages.rewrite()


def _draw(args: argparse.Namespace) -> int:
    for name in args.names or NAMES:
        path = record.RESULTS / f"{name}.csv"
        writes_it = f"python -m experiments run {name} writes it"
        if not path.exists():
            raise CommandError(f"{path}: not there; {writes_it}")
        try:
            label = record.read_csv(path)[1]["sizes"]
        except ValueError as error:
            raise CommandError(f"{error}; {writes_it}") from error
        if label != FULL:
            raise CommandError(f"{path}: of other sizes ({label}); {writes_it}")
        _print_outcomes(_drawn(load(name), path), label)
    _rewrite_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
