"""Each experiment runs small, and its CSV holds what experiments/README.md claims."""

import csv
import itertools
import math
import sys

import pytest

from experiments import io_traffic, memory, online_softmax

PNG = b"\x89PNG"


def run(experiment, folder, monkeypatch, *arguments):
    """Run an experiment as its command does; returns the rows of the one CSV that it writes."""
    monkeypatch.setattr(sys, "argv", [experiment.__name__, *arguments, "--results", str(folder)])
    experiment.main()
    name = experiment.__name__.rpartition(".")[2]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.csv", f"{name}.png"]
    assert (folder / f"{name}.png").read_bytes()[:4] == PNG
    lines = (folder / f"{name}.csv").read_text().splitlines()
    comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    said = "\n".join(comments)
    assert "date: 20" in said and "cores" in said and "NVRTC 1" in said
    assert f"python -m experiments.{name} {' '.join(arguments)}" in said
    return list(csv.DictReader(lines[len(comments) :]))


def test_io_traffic(tmp_path, monkeypatch):
    rows = run(io_traffic, tmp_path, monkeypatch, "--seqlens", "128", "256", "320", "--head-dims", "64", "16")
    assert [(int(row["head_dim"]), int(row["seqlen"])) for row in rows] == [
        (head_dim, seqlen) for head_dim in (16, 64) for seqlen in (128, 256, 320)
    ]
    for row in rows:
        row = {name: int(value) for name, value in row.items()}
        assert row["ours_least"] == row["ours_least_formula"] == 8 * row["seqlen"] * row["head_dim"]
        assert row["ours_requested"] == row["ours_requested_formula"]
        # S starts within a sector, where NumPy happens to allocate it: one more for each of its four passes.
        assert 0 <= row["standard_least"] - row["standard_formula"] <= 4 * 32
        assert row["standard_formula"] == 8 * row["seqlen"] ** 2 + row["ours_least"]


def test_memory(tmp_path, monkeypatch):
    rows = run(memory, tmp_path, monkeypatch, "--seqlens", "256", "1024")
    for row in rows:
        seqlen = int(row["seqlen"])
        assert int(row["device_bytes"]) == seqlen * (64 * 2 + 4)
        assert int(row["standard_scores_bytes"]) == 2 * seqlen**2
        assert int(row["traced_peak_bytes"]) >= int(row["device_bytes"])
    assert float(rows[1]["device_per_doubling"]) == pytest.approx(2)
    assert 0 < float(rows[1]["traced_peak_per_doubling"]) <= 2.2


def test_online_softmax(tmp_path, monkeypatch):
    rows = run(online_softmax, tmp_path, monkeypatch, "--seqlen", "1024")
    tables = {name: list(table) for name, table in itertools.groupby(rows, key=lambda row: row["distribution"])}
    assert {name: len(table) for name, table in tables.items()} == {"normal": 8, "rising": 8, "peaked": 8}
    normal, rising = tables["normal"][0], tables["rising"][0]
    expected = sum(1 / tile for tile in range(2, 9))
    assert float(normal["expected_per_row"]) == pytest.approx(expected, rel=1e-5)
    # 256 rows, each with a variance below ln 8
    assert float(normal["rescales_per_row"]) == pytest.approx(expected, abs=4 * math.sqrt(math.log(8) / 256))
    assert float(normal["rescales_per_row_key_by_key"]) == pytest.approx(math.log(1024) - 0.42, abs=0.7)
    assert float(rising["rescales_per_row"]) > 6
    after_peak = [float(row["rows_rescaled"]) for row in tables["peaked"] if int(row["keys_seen"]) > 640]
    assert after_peak == [0, 0, 0] and float(tables["peaked"][4]["rows_rescaled"]) == 1
    for table in tables.values():
        assert float(table[0]["kernel_lse_error_over_bound"]) < 1
        assert float(table[0]["kernel_out_error_over_bound"]) < 1
        assert float(table[-1]["lse_so_far"]) == pytest.approx(float(table[-1]["kernel_lse"]), rel=1e-5)
        assert float(table[0]["rescale"]) == 0


@pytest.mark.parametrize(("name", "module"), [("ours", io_traffic), ("memory", memory), ("softmax", online_softmax)])
def test_unknown_options_are_refused(name, module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--wrong"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert "--wrong" in capsys.readouterr().err
