"""``python -m experiments list | run NAME | all | draw NAME``."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path
from typing import Any

from experiments import backends, pages, record
from experiments.experiment import CATALOGUE, NAMES, Experiment, Outcome, load


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status is 1 where an experiment could not be finished."""
    args = _parser().parse_args(arguments)
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments", description="Claims about attention, measured.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("list", help="every experiment and its question").set_defaults(run=_list)

    run = commands.add_parser("run", help="one experiment: a CSV, a figure, and what came out")
    experiments = run.add_subparsers(required=True, metavar="NAME", dest="name")
    for name in NAMES:
        experiment = load(name)
        own = experiments.add_parser(
            name, help=_question(name), description=_doc(name), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for size, default in experiment.full.items():
            own.add_argument(
                f"--{size.replace('_', '-')}",
                dest=f"size_{size}",
                type=type(default[0] if isinstance(default, list) else default),
                nargs="+" if isinstance(default, list) else None,
                metavar=size.upper(),
                help=f"default {_shown(default)}; with --quick {_shown(experiment.quick[size])}",
            )
        _add_common(own)
        own.set_defaults(run=_run)

    every = commands.add_parser("all", help="all experiments")
    _add_common(every)
    every.set_defaults(run=_all)

    draw = commands.add_parser("draw", help="figures again, from the CSVs that are there; and the pages")
    draw.add_argument("names", nargs="*", choices=[[], *NAMES], metavar="NAME", help="default: all")
    draw.set_defaults(run=_draw)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds for each experiment")
    parser.add_argument("--backend", choices=backends.BACKENDS, default="sim", help="default sim, the simulator")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="default experiments/results, its folder small for other sizes"
    )


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
    backend = backends.BACKENDS[args.backend]()
    if backend.name == "gpu" and not experiment.on_gpu:
        print(f"--backend gpu: {args.name} is about the simulator's counters or models", file=sys.stderr)
        return 2
    _print_outcomes(_finish(args.name, experiment, backend, args, given))
    return 0


def _all(args: argparse.Namespace) -> int:
    backend, start, failed = backends.BACKENDS[args.backend](), time.perf_counter(), []
    for index, name in enumerate(NAMES, 1):
        experiment = load(name)
        print(f"[{index}/{len(NAMES)}] {name}: {_question(name)}", flush=True)
        if backend.name == "gpu" and not experiment.on_gpu:
            print("    left out: it is about the simulator's counters or models")
            continue
        try:
            _print_outcomes(_finish(name, experiment, backend, args, {}))
        except Exception as error:  # the others are not lost; the status says so
            failed.append(name)
            print(f"    failed: {type(error).__name__}: {error}", flush=True)
    print(f"all in {time.perf_counter() - start:.0f} s; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _finish(name: str, experiment: Experiment, backend, args: argparse.Namespace, given: dict) -> list[Outcome]:
    """Measure, write the CSV, draw from it, judge it; full sizes in the usual place rewrite the pages too."""
    start = time.perf_counter()
    sizes = {**(experiment.quick if args.quick else experiment.full), **given}
    label = "quick" if args.quick else "full"
    if given:
        label = ", ".join(f"{size} {_shown(value)}" for size, value in sizes.items())
    rows = experiment.measure(**({"backend": backend} if experiment.on_gpu else {}), **sizes)
    results = args.results or (record.RESULTS if label == "full" else record.RESULTS / "small")
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.csv"
    record.write_csv(path, rows, record.environment(backend.name, label))
    outcomes = _drawn(name, path)
    if results == record.RESULTS and label == "full":
        pages.rewrite()
    print(f"wrote {path}, .png and .svg in {time.perf_counter() - start:.1f} s")
    return outcomes


def _drawn(name: str, path: Path) -> list[Outcome]:
    experiment, (rows, _) = load(name), record.read_csv(path)
    with record.figure(path, experiment.figure_size) as figure:
        experiment.draw(figure, rows)
    return experiment.outcomes(rows)


def _print_outcomes(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        verdict = "as expected" if outcome.holds else f"differs: {outcome.note}".rstrip(": ")
        print(f"    {outcome.what}: expected {outcome.expected}, found {outcome.found}; {verdict}")


def _draw(args: argparse.Namespace) -> int:
    for name in args.names or NAMES:
        _print_outcomes(_drawn(name, record.RESULTS / f"{name}.csv"))
    pages.rewrite()
    return 0


if __name__ == "__main__":
    sys.exit(main())
