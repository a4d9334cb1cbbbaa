import math

import numpy as np
import pytest

from experiments import online_softmax
from tests.experiments.running import run

SEQLEN, TILE = 384, 128  # flash_fwd's tile for head_dim 64 on sm_80


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("online_softmax", tmp_path_factory.mktemp("online"), "--seqlen", str(SEQLEN), "--tiles", "32", "128")


def test_outcomes_hold(found):
    rows, outcomes = found
    assert [row["distribution"] for row in rows] == [
        name for name in online_softmax.DISTRIBUTIONS for _ in range(SEQLEN // TILE)
    ]
    assert [outcome.what for outcome in outcomes if not outcome.holds] == []


def test_states_of_query_0(found):
    for name, of_one in online_softmax.of_distributions(found[0]).items():
        q, k, v = (x.astype(np.longdouble) for x in online_softmax.inputs(name, SEQLEN))
        scores = k @ q[0] / np.sqrt(np.longdouble(q.shape[-1]))
        before = -math.inf
        for row in of_one:
            seen = scores[: row["keys_seen"]]
            weights = np.exp(seen - seen.max())
            assert row["row_max"] == pytest.approx(float(seen.max()), rel=1e-5)
            assert row["row_sum"] == pytest.approx(float(weights.sum()), rel=1e-5)
            assert row["lse_so_far"] == pytest.approx(float(np.log(np.exp(seen).sum())), rel=1e-5)
            assert row["out_so_far"] == pytest.approx(
                float(weights @ v[: row["keys_seen"], 0] / weights.sum()), abs=1e-5
            )
            assert row["rescale"] == pytest.approx(math.exp(before - float(seen.max())), rel=1e-5)
            before = float(seen.max())
        assert of_one[-1]["lse_so_far"] == pytest.approx(of_one[0]["kernel_lse"], rel=1e-5)


def test_rescalings_are_records(found):
    q, k, _ = online_softmax.inputs("normal", SEQLEN)
    scores = q.astype(float) @ k.astype(float).T
    records = 0
    for row in scores:
        records += sum(row[j] > row[:j].max() for j in range(1, SEQLEN))
    first = found[0][0]
    assert first["rescales_per_row_key_by_key"] == pytest.approx(records / len(scores), rel=1e-5)
    tiles = scores.reshape(len(scores), -1, TILE).max(axis=-1)
    assert first["rescales_per_row"] == pytest.approx(
        np.mean([sum(row[t] > row[:t].max() for t in range(1, len(row))) for row in tiles]), rel=1e-5
    )


def test_a_forgotten_rescaling_is_not_equal():
    scores, values = np.array([[0.0, 1, 3, 2]], np.float32), np.ones((4, 1), np.float32)
    assert online_softmax.equal_exactly(scores, values, 2) and online_softmax.equal_bits(scores, values, 2)
    assert online_softmax.online(scores, values, 2, np.exp2)[-1].row_sum == 1 / 8 + 1 / 4 + 1 + 1 / 2

    def forgetful(x):  # factors are one-dimensional, weights are not
        return np.exp2(x) if x.ndim > 1 else np.where(x == -math.inf, x.dtype.type(0), x.dtype.type(1))

    forgotten, two_pass = online_softmax.both(scores, values, 2, forgetful)
    assert forgotten.row_sum == 2 + 1 and two_pass.row_sum == 1 / 8 + 1 / 4 + 1 + 1 / 2


def test_one_tile_shows_nothing_of_rescaling(found):
    rows = [row | {"kernel_tiles": 128} for row in found[0] if row["keys_seen"] == TILE]
    assert [outcome.what.split(" the kernel")[0] for outcome in online_softmax.outcomes(rows)] == [
        "groups of 16 rows that",
        "error of",
    ]


@pytest.mark.parametrize(
    ("column", "wrong"),
    [
        ("whole_rational_equal", False),
        ("whole_float32_equal", False),
        ("whole_kernel_equal", False),
        ("float32_sum_ulps", 17),
        ("float64_lse_ulps", 3),
        ("float32_out_ulps_median", 3.0),
        ("online_sum_rms_error", 1.0),
        ("rescales_per_row", 0.5),
        ("rescales_per_row_key_by_key", 1.0),
        ("rescales_per_row_threshold_8", 4.0),
        ("rows_rescaled", 0.01),
        ("least_row_sum", 0.99),
        ("kernel_groups", 3),
        ("threshold_8_groups_in_numpy", 3),
        ("kernel_equal", True),
        ("threshold_8_lse_error_over_bound", 1.01),
    ],
)
def test_a_wrong_row_is_noticed(found, column, wrong):
    rows = [{**row, column: wrong} for row in found[0]]
    assert sum(not outcome.holds for outcome in online_softmax.outcomes(rows)) >= 1
