"""``python -m tests.mutants``: make every mutant, run the battery on each, list those that it does not catch."""

import argparse
import collections
import itertools
import os
import random
import re
import sys
from pathlib import Path

from tests.mutants import equivalent, generate
from tests.mutants.judge import CAUGHT, EQUIVALENT, NOT_COMPILED, SURVIVED, UNCHANGED
from tests.mutants.workers import run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="worker processes (default: one per core)")
    parser.add_argument("--only", metavar="PATTERN", help="mutants whose description contains this regular expression")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants of each file, always the same ones")
    parser.add_argument("--list", action="store_true", help="print the mutants instead of running them")
    parser.add_argument("--log", type=Path, help="write one line for each mutant to this file")
    arguments = parser.parse_args()

    mutants = [m for m in generate.mutants() if not arguments.only or re.search(arguments.only, f"{m.kind}: {m}")]
    if arguments.sample:
        mutants = sample(mutants, arguments.sample)
    if arguments.list:
        print("\n".join(f"{m.kind}: {m}" for m in mutants))
        return 0
    print(f"{len(mutants)} mutants", flush=True)
    outcomes = []
    for mutant, outcome, _ in run_all(mutants, arguments.jobs, arguments.log):
        explained = outcome == SURVIVED and equivalent.reason(mutant)
        outcomes.append((mutant, EQUIVALENT if explained else outcome))
    print_table(outcomes)
    survivors = [m for m, outcome in outcomes if outcome == SURVIVED]
    for m in survivors:
        print(f"SURVIVED {m.kind}: {m}")
    return 1 if survivors else 0


def sample(mutants, per_file):
    """The files take turns, so that an interrupted run is a sample too."""
    drawn = []
    for file in dict.fromkeys(m.file for m in mutants):
        found = [m for m in mutants if m.file == file]
        drawn.append(random.Random(file).sample(found, min(per_file, len(found))))
    return [m for turn in itertools.zip_longest(*drawn) for m in turn if m is not None]


def print_table(outcomes):
    columns = [CAUGHT, EQUIVALENT, SURVIVED, UNCHANGED, NOT_COMPILED]
    for group in "kind", "file":
        groups = sorted({getattr(m, group) for m, _ in outcomes})
        counts = collections.Counter((getattr(m, group), outcome) for m, outcome in outcomes)
        print(f"{group:24}" + "".join(f"{column:>14}" for column in columns))
        for name in groups:
            print(f"{name:24}" + "".join(f"{counts[name, column]:14}" for column in columns))
        print(f"{'all':24}" + "".join(f"{sum(counts[name, c] for name in groups):14}" for c in columns))


if __name__ == "__main__":
    sys.exit(main())
