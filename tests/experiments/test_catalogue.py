"""The command, the records and the pages of the experiments; each experiment has a test file of its own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import __main__, backends, pages, record
from experiments.__main__ import main
from experiments.experiment import CATALOGUE, NAMES, Experiment, Outcome, load

ALL = pytest.mark.parametrize("name", NAMES)


@ALL
def test_each_has_its_results_its_test_and_sizes_of_the_same_names(name):
    experiment = load(name)
    assert isinstance(experiment, Experiment) and experiment.full.keys() == experiment.quick.keys()
    assert (Path(__file__).parent / f"test_{name}.py").exists()
    for suffix in "csv", "png", "svg":
        assert (record.RESULTS / f"{name}.{suffix}").stat().st_size > 0
    assert record.read_csv(record.RESULTS / f"{name}.csv")[1]["sizes"] == "full"


@ALL
def test_what_does_not_hold_is_explained(name):
    outcomes = pages.committed_outcomes(name)
    assert outcomes
    for outcome in outcomes:
        assert outcome.holds or len(outcome.note) > 40, outcome


def test_every_file_of_results_is_of_an_experiment():
    files = {f"{name}.{suffix}" for name in NAMES for suffix in ("csv", "png", "svg")}
    assert {path.name for path in record.RESULTS.iterdir() if path.is_file()} == files


def test_the_pages_say_what_the_results_say():
    """``python -m experiments draw`` writes them again."""
    assert pages.tables() in pages.README.read_text(encoding="utf-8")
    assert pages.gallery() == pages.GALLERY.read_text(encoding="utf-8")


def test_list(capsys):
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(part in said for part in CATALOGUE) and all(f"  {name} " in said for name in NAMES)


@pytest.mark.parametrize(
    "arguments", [[], ["run"], ["run", "nothing"], ["run", "sparse_work", "--wrong"], ["draw", "nothing"], ["all", "x"]]
)
def test_commands_that_are_not_known_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: python -m experiments" in capsys.readouterr().err


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [
        {"a": 1, "b": 0.123456789, "c": np.float32(3), "d": True, "e": None, "f": "float16, 'x'"},
        {"a": -2, "b": float("nan"), "c": 1e300, "d": np.False_, "e": None, "f": "1.5.2"},
    ]
    environment = record.environment("sim", "quick")
    record.write_csv(tmp_path / "x.csv", rows, environment)
    read, where = record.read_csv(tmp_path / "x.csv")
    assert where == environment and tuple(where) == record.ENVIRONMENT
    assert read[0] == {**rows[0], "b": 0.123457}
    assert np.isnan(read[1].pop("b")) and read[1] == {"a": -2, "c": 1e300, "d": False, "e": None, "f": "1.5.2"}
    assert (tmp_path / "x.csv").read_text().startswith(",".join((*record.ENVIRONMENT, *rows[0])))


def small(name="small", *, fail=False, holds=True):
    """An experiment of one number."""

    def measure(sizes, factor):
        if fail:
            raise ArithmeticError("no result")
        return [{"size": size, "square": size**2 * factor} for size in sizes]

    def draw(figure, rows):
        lines, image = figure.subplots(1, 2)
        lines.plot([row["size"] for row in rows], [row["square"] for row in rows])
        image.imshow([[row["size"] for row in rows]], clip_path=image.patch)

    def outcomes(rows):
        return [Outcome("the last", "a square", str(rows[-1]["square"]), holds, "" if holds else "measured wrongly")]

    return Experiment(
        "claim", "caption", measure, draw, outcomes, {"sizes": [1, 5], "factor": 1.0}, {"sizes": [2], "factor": 1.0}
    )


@pytest.fixture
def of_three(monkeypatch):
    """A catalogue of three, the second of which fails."""
    found = {"first": small(), "second": small(fail=True), "third": small(holds=False)}
    monkeypatch.setattr(__main__, "NAMES", tuple(found))
    monkeypatch.setattr(__main__, "load", found.get)
    monkeypatch.setattr(__main__, "_doc", lambda name: f"What is {name}?\n\nNothing.")
    return found


def test_all_goes_on_after_a_failure_and_says_so(of_three, tmp_path, capsys):
    assert main(["all", "--quick", "--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "[2/3] second: What is second?" in said and "failed: ArithmeticError: no result" in said
    assert "failed: second" in said.splitlines()[-1]
    assert "expected a square, found 4; differs: measured wrongly" in said
    assert {path.stem for path in tmp_path.iterdir()} == {"first", "third"}


def test_sizes_are_options_and_recorded(of_three, tmp_path):
    assert main(["run", "first", "--sizes", "3", "4", "--factor", "0.5", "--results", str(tmp_path)]) == 0
    rows, environment = record.read_csv(tmp_path / "first.csv")
    assert rows == [{"size": 3, "square": 4.5}, {"size": 4, "square": 8.0}]
    assert environment["sizes"] == "sizes 3 4, factor 0.5"
    assert main(["run", "first", "--results", str(tmp_path)]) == 0
    assert [row["size"] for row in record.read_csv(tmp_path / "first.csv")[0]] == [1, 5]


def test_only_full_sizes_are_written_to_the_usual_place_and_rewrite_the_pages(of_three, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(pages, "rewrite", lambda: written.append(True))
    monkeypatch.setattr(record, "RESULTS", tmp_path / "usual")
    monkeypatch.setattr(__main__, "NAMES", ("first",))
    main(["run", "first", "--results", str(tmp_path / "other")])
    main(["run", "first", "--quick"])
    main(["run", "first", "--factor", "2"])
    assert not written and [path.name for path in (tmp_path / "usual").iterdir()] == ["small"]
    main(["run", "first"])
    assert written == [True] and (tmp_path / "usual" / "first.csv").exists()


def test_the_published_results_are_of_full_sizes(of_three, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    for sizes in ["--quick"], ["--factor", "2"]:
        assert main(["run", "first", *sizes, "--results", f"{tmp_path}/x/.."]) == 2
        assert "of full sizes" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_where_results_cannot_go_is_said_before_measuring(of_three, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in "file", "file/folder":
        of_three["first"] = small(fail=True)
        assert main(["run", "first", "--results", str(tmp_path / folder)]) == 2
        assert capsys.readouterr().err.startswith(f"--results {tmp_path / folder}: ")


@pytest.mark.parametrize("sizes", [["--sizes", "0"], ["--sizes", "-1"], ["--sizes", "1.5"], ["--factor", "x"]])
def test_sizes_that_are_none_are_refused(of_three, tmp_path, capsys, sizes):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "first", *sizes, "--results", str(tmp_path)])
    assert "usage" in capsys.readouterr().err


def test_sizes_that_do_not_go_together_are_one_line(of_three, tmp_path, capsys):
    of_three["second"] = small(fail=True)
    assert main(["run", "second", "--factor", "2", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "second cannot be measured so: ArithmeticError: no result\n"
    with pytest.raises(ArithmeticError):  # a fault of the experiment, not of the sizes
        main(["run", "second", "--results", str(tmp_path)])


def test_ctrl_c_keeps_the_file_of_before(of_three, tmp_path, capsys):
    assert main(["run", "first", "--results", str(tmp_path)]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def interrupted(sizes, factor):
        raise KeyboardInterrupt

    of_three["first"] = replace(small(), measure=interrupted)
    assert main(["run", "first", "--results", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "interrupted: nothing of this experiment is written\n"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_row_that_cannot_be_written_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "x.csv"
    record.write_csv(path, [{"a": 1}], record.environment("sim", "full"))
    with pytest.raises(ValueError, match="b"):
        record.write_csv(path, [{"a": 2}, {"b": 3}], record.environment("sim", "full"))
    assert record.read_csv(path)[0] == [{"a": 1}] and [x.name for x in tmp_path.iterdir()] == ["x.csv"]


def test_drawing_needs_results_and_pages_need_those_of_all(of_three, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert main(["draw", "first"]) == 2
    assert "python -m experiments run first writes it" in capsys.readouterr().err
    assert main(["run", "first"]) == 0 and main(["draw", "first"]) == 0
    assert capsys.readouterr().out.count("the pages stay as they are: no results of second, third") == 2


@pytest.mark.parametrize(
    "damage", [lambda x: b"", lambda x: x.split(b"\n")[0], lambda x: x[:-9], lambda x: b"\xff\0" + x]
)
def test_a_damaged_table_is_named(of_three, tmp_path, monkeypatch, capsys, damage):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    main(["run", "first"])
    path = tmp_path / "first.csv"
    path.write_bytes(damage(path.read_bytes()))
    assert main(["draw", "first"]) == 2
    assert f"{path}: not a whole table of an experiment; python -m" in capsys.readouterr().err


def test_only_full_sizes_are_drawn_again(of_three, tmp_path, monkeypatch, capsys):
    main(["run", "first", "--quick", "--results", str(tmp_path)])
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert main(["draw", "first"]) == 2
    assert "of other sizes (quick)" in capsys.readouterr().err


def test_no_row_of_the_tables_has_too_many_cells():
    rows = [row.replace(pages.BAR, "") for row in pages.tables().splitlines() if row.startswith("|")]
    assert {row.count("|") for row in rows} == {5, 6}
    outcome = Outcome("|a|", "b", "c", holds=True)
    assert outcome.verdict == "as expected" and replace(outcome, holds=False, note="d").verdict == "differs: d"


def test_the_same_rows_are_the_same_figure(of_three, tmp_path):
    for folder in "a", "b":
        main(["run", "first", "--results", str(tmp_path / folder)])
    for suffix in "png", "svg":
        assert (tmp_path / "a" / f"first.{suffix}").read_bytes() == (tmp_path / "b" / f"first.{suffix}").read_bytes()


def test_the_simulators_own_are_refused_on_a_gpu(of_three, tmp_path, monkeypatch, capsys):
    class Given(backends.Simulator):
        name = "gpu"

    monkeypatch.setitem(backends.BACKENDS, "gpu", Given)
    of_three["third"] = replace(small(), on_gpu=True, measure=lambda backend, sizes, factor: [{"size": 1, "square": 1}])
    assert main(["run", "first", "--backend", "gpu", "--results", str(tmp_path)]) == 2
    assert "--backend gpu: first" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(["all", "--backend", "gpu", "--results", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == {"third"}
    assert record.read_csv(tmp_path / "third.csv")[1]["backend"] == "gpu"


def test_without_the_packages_of_the_extra_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(__main__.importlib.util, "find_spec", lambda name: None)
    assert main(["list"]) == 2
    assert (
        capsys.readouterr().err
        == 'no distributed and no hypothesis and no matplotlib: pip install "cupyflash[experiments]"\n'
    )
