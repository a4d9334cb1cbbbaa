"""``python -m tests.testing_kit [SEEDS]``: after how many problems each fault of a stranger's attention is seen."""

import statistics
import sys

from tests.testing_kit import caught, strangers


def main() -> None:
    """A line for each fault: with fixed problems, then the median and the most over seeds."""
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
    print(f"{'fault':42} fixed  median  most of {len(seeds)} seeds")
    for after, faults in (caught.forward, strangers.FORWARD_FAULTS), (caught.backward, strangers.BACKWARD_FAULTS):
        for fault in faults:
            counts = [caught.MOST + 1 if n is None else n for n in (after(fault, seed) for seed in seeds)]
            print(f"{fault:42} {after(fault)!s:>5}  {statistics.median(counts):6.0f}  {max(counts):4}", flush=True)


if __name__ == "__main__":
    main()
