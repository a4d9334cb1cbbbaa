"""Kernels as people write them, a family to a `.cu` file, and beside each the test that holds it against NumPy.

`README.md` lists them. `conftest.py` has the fixture `launch`, which launches in each of the ways that a kernel must
bear, and `planted`, which launches it with a fault that somebody may make.
"""
