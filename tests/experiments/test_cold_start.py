import pytest

from experiments import cold_start
from tests.experiments.running import run


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run("cold_start", tmp_path_factory.mktemp("cold_start"), "--quick")


def test_quick(found):
    rows, outcomes = found
    seconds = {row["what"]: row["seconds"] for row in rows}
    assert len(seconds) == len(rows) == 10 and min(seconds.values()) > 0
    # What has to be: each of these does what the one before does, and more.
    assert seconds[cold_start.START] < seconds["import numpy"] < seconds["import cupyflash"]
    assert seconds["import cupyflash"] < seconds[cold_start.WARM] < seconds[cold_start.EMPTY]
    assert seconds[cold_start.AGAIN] < seconds[cold_start.WARM]
    assert seconds[cold_start.PTX] < seconds[cold_start.MACHINE_CODE]
    warm = next(outcome for outcome in outcomes if outcome.what.startswith("first result, warm"))
    assert float(warm.found) == pytest.approx(seconds[cold_start.WARM] / seconds[cold_start.EMPTY], rel=0.05)


@pytest.mark.parametrize(
    ("what", "factor", "missed"),
    [
        ("import cupyflash", 50, ["import cupyflash over"]),
        (cold_start.WARM, 50, ["first result over", "first result, warm"]),
        (cold_start.AGAIN, 100, ["second result"]),
        (cold_start.PTX, 1000, [cold_start.PTX]),
        (cold_start.MACHINE_CODE, 1000, [cold_start.MACHINE_CODE, "seconds to machine code"]),
    ],
)
def test_slower_is_noticed(found, what, factor, missed):
    steady = {"Python starts": 1, "import numpy": 2, "import cupyflash": 4, "first result, empty cache": 20,
              "first result, warm cache": 12, "second result": 0.5, cold_start.PTX: 0.5,
              cold_start.MACHINE_CODE: 1}  # fmt: skip
    rows = [row | {"seconds": steady[row["what"]]} for row in found[0] if row["what"] in steady]
    assert all(outcome.holds for outcome in cold_start.outcomes(rows))
    for row in rows:
        row["seconds"] *= factor if row["what"] == what else 1
    found_missed = [outcome for outcome in cold_start.outcomes(rows) if not outcome.holds]
    assert len(found_missed) == len(missed)
    for outcome, begin in zip(found_missed, missed, strict=True):
        assert outcome.what.startswith(begin) and len(outcome.note) > 40
