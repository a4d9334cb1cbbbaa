"""Does the test-suite pass on this GPU? ``python -m experiments.gpu.suite first|rest``

Files of tests that compute attention, each by a pytest of its own with ``--backend gpu``: a kernel that faults spoils
no other file. "first" are those of plain attention, forward and backward, in all dtypes; "rest" are all others. A row
has the counts of a file, or how it ended; the first failures are named.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.experiment import Row
from experiments.gpu import tables
from experiments.gpu.steps import ROOT

FIRST = ("test_corners", "test_attention", "test_backward", "test_fma", "test_fma_backward", "test_invariants")
COUNTS = ("tests", "failures", "errors", "skipped")
MOST_NAMED = 5
#: A test that is given the backend, and so runs where ``--backend`` says.
_USES_BACKEND = re.compile(r"^def test_\w+\([^)]*\bbackend\b", re.MULTILINE)


def files(part: str) -> list[str]:
    """Names of the files in ``tests`` that use the backend, in order."""
    found = {path.stem for path in (ROOT / "tests").glob("test_*.py") if _USES_BACKEND.search(path.read_text())}
    first = [name for name in FIRST if name in found]
    return first if part == "first" else sorted(found - set(first))


def run(name: str) -> Row:
    """A row of one file."""
    with tempfile.TemporaryDirectory(prefix="cupyflash-") as folder:
        report = Path(folder) / "report.xml"
        # One thread in each: NumPy's would only wait for one another.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *_options(), f"tests/{name}.py", f"--junitxml={report}"],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not report.exists():
            return _row(name, error=done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no report")
        return of_report(name, report.read_text(encoding="utf-8"))


def _options() -> list[str]:
    """Where pytest-xdist is installed a worker for each core, to 8: most of the time goes to compiling."""
    workers = ["-n", str(min(os.cpu_count() or 1, 8))] if importlib.util.find_spec("xdist") else []
    return ["-q", "-p", "experiments.gpu.suite", "--backend", "gpu", *workers]


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """As a plugin of these runs: leave out the tests that are not given the backend, which run without a GPU."""
    chosen = [item for item in items if "backend" in getattr(item, "fixturenames", ())]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen


def of_report(name: str, xml: str) -> Row:
    """A row of what pytest says in JUnit's format."""
    suite = ElementTree.fromstring(xml).find(".//testsuite")
    bad = [case.get("name", "") for case in suite.iter("testcase") if case.find("failure") is not None]
    bad += [case.get("name", "") for case in suite.iter("testcase") if case.find("error") is not None]
    counts = {count: int(suite.get(count, 0)) for count in COUNTS}
    return _row(name, **counts, seconds=float(suite.get("time", 0)), named=" ".join(bad[:MOST_NAMED]))


def _row(name: str, *, tests=0, failures=0, errors=0, skipped=0, seconds=0.0, named="", error="") -> Row:
    return {
        "file": name,
        "tests": tests,
        "failures": failures,
        "errors": errors,
        "skipped": skipped,
        "seconds": seconds,
        "failing": named,
        "error": error,
    }


def measure(cupy: Any, args: argparse.Namespace) -> Iterator[list[Row]]:
    """A row for each file."""
    for name in files(args.part):
        yield [run(name)]


def passed(row: Row) -> bool:
    return row["tests"] > 0 and not (row["failures"] or row["errors"] or row["error"])


def summary(rows: Sequence[Row]) -> str:
    """Counts, and what failed."""
    lines = [f"  {row['file']}: {row['failing'] or row['error']}" for row in rows if not passed(row)]
    good = sum(row["tests"] - row["failures"] - row["errors"] - row["skipped"] for row in rows)
    bad = sum(row["failures"] + row["errors"] for row in rows)
    return "\n".join([*lines, f"{len(rows)} files, {good} tests passed, {bad} failed"])


def main(arguments: list[str] | None = None) -> int:
    """Write a row for each file; the status is 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu.suite", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("first", "rest"))
    return tables.main(
        parser,
        arguments,
        lambda args: f"tests_{args.part}.csv",
        measure,
        summary,
        lambda rows: not all(map(passed, rows)),
    )


if __name__ == "__main__":
    sys.exit(main())
