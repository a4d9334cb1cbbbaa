"""What strangers' kernels get wrong is seen by the checks within 200 default problems; the right ones pass them all."""

import functools

import pytest

from cupyflash import testing
from tests.testing_kit import caught, strangers

SEEDS = range(5)


@pytest.mark.parametrize("fault", strangers.FORWARD_FAULTS)
def test_a_fault_of_the_forward_is_seen(fault):
    assert caught.forward(fault) is not None


@pytest.mark.parametrize("fault", strangers.BACKWARD_FAULTS)
def test_a_fault_of_the_backward_is_seen(fault):
    assert caught.backward(fault) is not None


@pytest.mark.deep
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("after", "fault"),
    [(caught.forward, fault) for fault in strangers.FORWARD_FAULTS]
    + [(caught.backward, fault) for fault in strangers.BACKWARD_FAULTS],
)
def test_a_fault_is_seen_whatever_the_seed(after, fault, seed):
    assert after(fault, seed) is not None


@pytest.mark.parametrize("tile", [strangers.TILE, 8])
def test_the_right_ones_pass_every_check(tile, monkeypatch):
    monkeypatch.setattr(strangers, "TILE", tile)
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    small = {"seqlens": testing.seqlens(70), "head_dims": testing.head_dims().filter(lambda dims: max(dims) <= 64)}
    forward = testing.report(testing.adapt(strangers.attention, dtypes, **small), examples=4)
    assert not forward.failures, str(forward)
    assert all(x.examples for x in forward.findings), str(forward)
    backward = testing.report(testing.adapt_vjp(strangers.attention_vjp, dtypes, **small), examples=4)
    assert not backward.failures, str(backward)
    assert all(x.examples for x in backward.findings), str(backward)


@pytest.mark.parametrize(
    ("fault", "reaching"),
    [("NaN through scores of masked keys", "passed"), ("NaN through values of masked keys", "failed")],
)
def test_a_leak_is_wrong_only_where_there_is_something_to_leak(fault, reaching):
    """Which is why check_within_bound alone is no test of masks."""
    fn = testing.adapt(functools.partial(strangers.attention, fault=fault), seqlens=testing.seqlens(40))
    checks = [
        testing.check_within_bound,
        testing.check_masked_keys_have_no_influence,
        testing.check_nonfinite_values_change_only_rows_that_see_them,
        testing.check_nonfinite_values_reach_who_sees_them,  # NaN in values, none in keys
    ]
    found = testing.report(fn, checks=checks, examples=50)
    assert [x.verdict for x in found.findings] == ["passed", "failed", "failed", reaching]
