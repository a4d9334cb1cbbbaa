"""Which kernels have been made in this process, and how often each has been launched."""

import collections

launches = collections.Counter()  # name -> launches, 0 for a kernel that exists and was never launched


def made(name):
    launches[name] += 0


def launched(name):
    launches[name] += 1
