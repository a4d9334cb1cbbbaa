"""Kernels of this folder compiled for debugging (-G): variables in local memory, generic addresses, all calls left."""

from functools import partial

import pytest

from . import (
    test_cooperative_groups,
    test_layer_norm,
    test_lock,
    test_reduction,
    test_scan,
    test_sgemm,
    test_softmax,
    test_sort,
    test_transpose,
)
from .conftest import WAYS, Launcher, name_of

TESTS = {
    "arg_max": test_reduction.test_arg_max,
    "bitonic": test_sort.test_bitonic,
    "filter": test_cooperative_groups.test_filter,
    "groups": test_cooperative_groups.test_tiles_of_several_warps,
    "layer_norm": test_layer_norm.test_running_moments,
    "lock": partial(test_lock.test_locks_of_threads, kernel="of_threads"),
    "look_back": test_scan.test_look_back,
    "sgemm": partial(test_sgemm.test_product, kernel="double_buffered"),
    "softmax": test_softmax.test_warp_per_row,
    "transpose": test_transpose.test_matrices_of_a_warp,
}


@pytest.mark.parametrize("way", WAYS[1:3], ids=name_of)
@pytest.mark.parametrize("test", TESTS.values(), ids=TESTS)
def test_kernels(test, way):
    test(Launcher(options=("-G",), **way))
