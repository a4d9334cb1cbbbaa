"""Mutants of the kernels: small faults, made from patterns in their sources, that the tests have to catch.

``python -m tests.mutants`` makes all, runs the battery of :mod:`tests.mutants.battery` on each and prints a table.
"""
