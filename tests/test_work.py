"""How much the forward kernel does, counted by the simulator, against what the algorithm asks for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyflash import testing
from cupyflash.testing import AttentionProblem as Problem
from tests import work

ARCHITECTURES = ["sm_75", "sm_80"]


@settings(max_examples=15)
@given(
    arch=st.sampled_from(ARCHITECTURES),
    seqlens=st.tuples(testing.seqlens(), st.integers(1, 400)).filter(all),
    head_dims=st.sampled_from([(16, 16), (64, 64), (24, 72), (128, 128)]),
    align=st.sampled_from([None, "bottom-right", "top-left"]),
)
def test_nothing_is_read_multiplied_or_awaited_twice(arch, seqlens, head_dims, align):
    """Nothing beyond the ends is read, and no key tile is visited of which no query sees a key."""
    problem = Problem("float16", (2,), (2,), (2,), *seqlens, *head_dims, causal=align is not None, align=align)
    work.assert_least(problem, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("head_dims", [(16, 16), (32, 64), (80, 48), (128, 128), (256, 256)])
def test_work_of_each_size_of_tile(arch, head_dims):
    work.assert_least(Problem("float16", (), (), (), 130, 300, *head_dims, causal=True, align="bottom-right"), arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("align", [None, "bottom-right"])
def test_only_boundary_tiles_cost_a_mask(arch, align):
    problem = Problem(head_dim=64, head_dim_v=64, causal=align is not None, align=align, softmax_scale=1e-37)
    work.assert_fewest_masks(problem, arch)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_only_a_new_maximum_costs_a_rescaling(arch):
    work.assert_fewest_rescales(Problem(head_dim=64, head_dim_v=64), arch)
