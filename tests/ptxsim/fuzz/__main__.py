"""A long run: python -m tests.ptxsim.fuzz --seconds 600 [--seed 1] [--length 30] [--only cvt,fma]

Prints each failing program, reduced, and the seed that gives it again; ends with 1 if there was one.
"""

import argparse
import random
import sys
import time

from .compare import fails, report, shrunk
from .program import Generator


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.ptxsim.fuzz")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=int, default=25)
    parser.add_argument("--only", help="opcodes, separated by commas")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    options = parser.parse_args()
    only = options.only and set(options.only.split(","))
    seed, found, start = options.seed, 0, time.monotonic()
    while time.monotonic() - start < options.seconds and found < options.failures:
        program = Generator(random.Random(seed), only).program(options.length)
        if fails(program):
            found += 1
            print(f"-- seed {seed}\n{report(shrunk(program))}", flush=True)
        seed += 1
    print(f"{seed - options.seed} programs, {found} failures")
    return bool(found)


sys.exit(main())
