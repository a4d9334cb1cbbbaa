import pytest

from experiments import simulator_speed
from tests.experiments.running import run


def test_quick(tmp_path, monkeypatch):
    monkeypatch.setattr(simulator_speed, "STEPS", 20)
    rows, outcomes = run("simulator_speed", tmp_path, "--quick")
    values = {(row["what"], row["how"]): row["value"] for row in rows}
    seconds = {(row["what"], row["how"]): row["seconds"] for row in rows if row["seconds"]}
    forward = "float16 forward (1, 128, 64)"
    for how in ("cupyflash", "cupyflash, profile", "cupyflash, sanitize", simulator_speed.NUMPY):
        gflop = 4 * 128**2 * 64 / 1e9
        assert values[forward, how] == pytest.approx(gflop / seconds[forward, how], rel=1e-4)
    backward = "float64 backward (1, 32, 64)", "cupyflash"
    assert values[backward] == pytest.approx(14 * 32**2 * 64 / 1e9 / seconds[backward], rel=1e-4)
    for name in simulator_speed.SCALAR_TYPES:
        steps = 1e6 * seconds[f"scalar kernel, {name}", "cupyflash"] / values[f"scalar kernel, {name}", "cupyflash"]
        assert 20 * 4 < steps < 20 * 60  # instructions of a warp, for each pass of the loop
    assert 20 < values[f"{forward}, memory of the process", "cupyflash"] < 600

    watched = float(outcomes[1].found)
    assert watched == pytest.approx(seconds[forward, "cupyflash, profile"] / seconds[forward, "cupyflash"], rel=1e-2)
    rows[1]["seconds"] = 2 * rows[0]["seconds"]  # profile
    slow = simulator_speed.outcomes(rows)[1]
    assert slow.found == "2" and not slow.holds and slow.note


def test_the_peer_in_tritons_interpreter_is_right():
    for name in ("torch", "triton"):
        pytest.importorskip(name)
    assert simulator_speed.triton_seconds(1, 128) > 0
