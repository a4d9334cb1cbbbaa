"""Each experiment runs small, and its CSV holds what experiments/README.md claims."""

import csv
import itertools
import math
import sys

import numpy as np
import pytest

import cupyflash
from experiments import (
    bound_audit,
    io_table,
    io_traffic,
    memory,
    online_softmax,
)

PNG = b"\x89PNG"


def run(experiment, folder, monkeypatch, *arguments, figures=("",)):
    """Run an experiment as its command does; returns the rows of the one CSV that it writes."""
    monkeypatch.setattr(sys, "argv", [experiment.__name__, *arguments, "--results", str(folder)])
    experiment.main()
    name = experiment.__name__.rpartition(".")[2]
    pictures = [f"{name}{figure}.png" for figure in figures]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.csv", *pictures]
    assert all((folder / picture).read_bytes()[:4] == PNG for picture in pictures)
    comments, rows = read(folder / f"{name}.csv")
    said = "\n".join(comments)
    assert "date: 20" in said and "cores" in said and "NVRTC 1" in said
    assert f"python -m experiments.{name} {' '.join(arguments)}" in said
    return rows


def read(path):
    """Comments and rows of a CSV."""
    lines = path.read_text().splitlines()
    comments = list(itertools.takewhile(lambda line: line.startswith("#"), lines))
    return comments, list(csv.DictReader(lines[len(comments) :]))


def test_io_traffic(tmp_path, monkeypatch):
    rows = run(io_traffic, tmp_path, monkeypatch, "--seqlens", "64", "192", "--head-dims", "32", "16")
    assert [(row["direction"], int(row["head_dim"]), int(row["seqlen"])) for row in rows] == [
        (direction, head_dim, seqlen)
        for direction in ("forward", "backward")
        for head_dim in (16, 32)
        for seqlen in (64, 192)
    ]
    for row in rows:
        direction = row.pop("direction")
        row = {name: int(value) for name, value in row.items()}
        square, operand = 2 * row["seqlen"] ** 2, 2 * row["seqlen"] * row["head_dim"]
        if direction == "forward":
            assert row["standard_formula"] == 4 * square + 4 * operand
            assert row["ours_least_formula"] == 4 * operand
        else:
            assert row["standard_formula"] == 10 * square + 10 * operand
            assert row["ours_least_formula"] == 13 * operand + 28 * row["seqlen"]
        for counted in "ours_least", "ours_requested", "standard_least":
            formula = "standard_formula" if counted == "standard_least" else f"{counted}_formula"
            assert row[counted] == row[formula]
        assert row["standard_requested"] > row["standard_least"]


def test_io_table(tmp_path, monkeypatch):
    monkeypatch.setattr(io_table, "SEQLEN", 128)
    rows = run(io_table, tmp_path, monkeypatch)
    gigabytes = {(row["method"], row["source"]): float(row["total_gb"]) for row in rows}
    assert gigabytes["standard", "published, A100"] == 40.3 and gigabytes["flash", "published, A100"] == 4.4
    for method in ("naive", "cupyflash"):
        formula = gigabytes[method, "by formula, each launch once"]
        counted = gigabytes[method, "counted on one head, times 1024, each launch once"]
        excess = (counted - formula) * 1e9 / 1024
        assert abs(excess) <= 1  # the table has six digits
    assert gigabytes["naive", "by formula, each launch once"] == pytest.approx(1024 * 14 * 2 * 128 * (128 + 64) / 1e9)
    for row in rows:
        if row["forward_gb"]:
            assert float(row["forward_gb"]) + float(row["backward_gb"]) == pytest.approx(
                float(row["total_gb"]), rel=1e-5
            )
    kernels = [kernel for r in io_traffic.DIRECTIONS for kernel in io_traffic.profiled(cupyflash, r, 128, 64)]
    assert float(rows[-1]["gflop"]) == pytest.approx(1024 * sum(kernel.mma_flops for kernel in kernels) / 1e9, rel=1e-5)


def test_formulas_of_the_published_table():
    standard, with_passes, flash = (row["total_gb"] for row in io_table.algorithms())
    # N x N numbers are 2.147 GB, N x D are 0.134.
    assert standard == pytest.approx(11 * 2.147 + 12 * 0.1342, rel=1e-3)
    assert with_passes == pytest.approx(17 * 2.147 + 12 * 0.1342, rel=1e-3)
    assert flash == pytest.approx((2 + 3 * 4 + 4 + 5 * 4) * 0.1342, rel=1e-3)


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


def test_bound_audit(tmp_path, monkeypatch):
    monkeypatch.setattr(bound_audit, "SEQLEN", 48)
    rows = run(bound_audit, tmp_path, monkeypatch, "--seqlens", "48", "--head-dims", "16")
    assert [(r["dtype"], r["seqlen_q"], r["seqlen_k"], r["head_dim"], r["result"], r["family"]) for r in rows] == [
        (dtype, *lengths, "16", result, family)
        for dtype in bound_audit.DTYPES
        for many, results in bound_audit.RESULTS.items()
        for lengths in [("16", "48") if many == "keys" else ("48", "16")]
        for family in bound_audit.FAMILIES
        for result in results
    ]
    for row in rows:
        if row["unbounded"] == "1":
            assert row["largest"] == row["median"] == row["row"] == row["leading_term"] == ""
        else:
            assert 0 <= float(row["median"]) <= float(row["largest"]) <= 1
            assert (row["column"] == "") == (row["result"] == "lse")
            assert 0 < float(row["its_share"]) <= 1
        if row["family"] == "normal" and row["result"] in ("out", "dv"):
            assert (row["leading_term"] == "rounding of P") == row["dtype"].endswith("float16")
    normal = [float(row["largest"]) for row in rows if row["family"] == "normal" and row["dtype"].endswith("float16")]
    assert min(normal) > 1e-3  # errors are not compared with themselves


def test_bound_audit_finds_the_largest_ratio():
    exact, bound = np.zeros((2, 3)), np.array([[1.0, 4, np.inf], [2, 0, 1]])
    found = np.array([[0.5, -3, np.nan], [-1, 0, 0]])
    assert bound_audit.summary(found, exact, bound) == pytest.approx(
        {"largest": 0.75, "median": 0.5, "unbounded": 1 / 6, "row": 0, "column": 1}
    )
    found[1, 1] = 1e-300
    assert bound_audit.summary(found, exact, bound)["largest"] == math.inf
    assert bound_audit.summary(found[0], exact[0], bound[0])["column"] is None
    assert bound_audit.summary(found, exact, np.full((2, 3), np.inf))["largest"] is None


@pytest.mark.parametrize("module", [bound_audit, io_table, io_traffic, memory, online_softmax])
def test_unknown_options_are_refused(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__name__, "--wrong"])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    assert "--wrong" in capsys.readouterr().err
