import pytest

from experiments import tiling
from tests.experiments.running import run

SIZES = ("--quick", "--seqlen", "200", "--masks", "causal", "window", "--lengths", "64", "1024")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("tiling", tmp_path_factory.mktemp("tiling"), *SIZES)


def of(rows, **wanted):
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def test_outcomes_hold(found):
    assert [outcome.what for outcome in found[1] if not outcome.holds] == []


def test_without_a_causal_mask_or_a_second_length_there_is_less_to_say(found):
    rows = [row for row in found[0] if row["mask"] != "causal" and row["seqlen"] != 1024]
    assert len(tiling.outcomes(rows)) == len(found[1]) - 2


def test_visits_by_hand(found):
    """Tiles of 128 queries (dk and dv: 16) and 64 keys, over 200 of each."""
    visits = tiling.kind_of(found[0], "visit")

    def listed(kernel, mask):
        return [
            (row["block"], row["owned_from"], row["step"], row["tile"], row["masked"])
            for row in of(visits, kernel=kernel, mask=mask)
        ]

    assert listed(tiling.FORWARD, "causal") == [
        (0, 128, 1, 0, False),
        (0, 128, 2, 1, False),
        (0, 128, 3, 2, True),
        (0, 128, 4, 3, True),
        (1, 0, 1, 0, True),
        (1, 0, 2, 1, True),
    ]
    # Query 151 is the first that does not see key 0, query 199 sees keys 49 to 199.
    assert [row[2:] for row in listed(tiling.FORWARD, "window")[:4]] == [
        (1, 0, True),
        (2, 1, False),
        (3, 2, True),
        (4, 3, True),
    ]
    assert listed(tiling.DKDV, "causal")[-1] == (3, 192, 1, 12, True)
    assert [row[3] for row in listed(tiling.DKDV, "causal")[:13]] == list(range(13))


def test_what_is_expected_of_a_window():
    """Queries 192 to 199 are the last; were there 223, it would not see key 64."""
    row = {"mask": "window", "seqlen": 200, "block_m": 32, "block_n": 64, "kernel": tiling.DKDV}
    assert tiling.expected_visits(row)[64] == [(2, True), (3, True), (4, False), (5, False), (6, True)]
    assert tiling.expected_visits(row | {"kernel": tiling.DQ})[192] == [(0, True), (1, False), (2, False), (3, True)]


def test_bytes_by_hand(found):
    (half,) = of(tiling.kind_of(found[0], "tile set"), kernel=tiling.FORWARD)
    assert (half["block_m"], half["block_n"]) == (128, 128)
    assert half["launched_bytes"] == 3 * 128 * 64 * 2
    shortest, longest = tiling.kind_of(found[0], "scores")
    assert longest["scores_bytes"] == 2**22 and longest["launched_bytes"] == shortest["launched_bytes"] == 65536


def test_bytes_without_tensor_cores():
    tiles = {"BLOCK_M": 64, "BLOCK_N": 32}
    assert tiling.parts_of(tiling.DKDV, 8, 64, tiles) == {
        "keys": 32 * 64 * 8,
        "values": 32 * 64 * 8,
        "in_turn": 64 * 64 * 8,
        "weights": 32 * 64 * 8,
    }
    assert tiling.parts_of(tiling.FORWARD, 4, 128, {"BLOCK_M": 32, "BLOCK_N": 16})["weights"] == 32 * 128


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("visit", {"masked": lambda masked: not masked}),
        ("visit", {"tile": lambda tile: tile + 1}),
        ("visit", {"step": lambda step: -step}),
        ("visit", {"counted_flops": lambda flops: flops - 1}),
        ("visit", {"same_bits": lambda same: False}),
        ("tile set", {"launched_bytes": lambda size: size + 16}),
        ("tile set", {"limit_bytes": lambda limit: 1024}),
        ("scores", {"launched_bytes": lambda size: size + 16}),
        ("scores", {"scores_bytes": lambda size: 16}),
    ],
)
def test_a_wrong_row_is_noticed(found, kind, change):
    rows = [dict(row) for row in found[0]]
    wrong = tiling.kind_of(rows, kind)[1]
    wrong.update({name: changed(wrong[name]) for name, changed in change.items()})
    assert any(not outcome.holds for outcome in tiling.outcomes(rows))
