import doctest
import re
import shlex

from cupyflash.ptxsim.__main__ import main as ptxsim_main
from experiments import kernel_debugging, record
from tests.experiments.running import run


def test_quick(tmp_path):
    rows, outcomes = run("kernel_debugging", tmp_path, "--quick")
    assert all(outcome.holds for outcome in outcomes)
    values = {(row["variant"], row["line"], row["what"], row["order"]): row["value"] for row in rows}
    tiles = (kernel_debugging.TRANSPOSE_SIZE // 32) ** 2
    assert values["PADDING=0", 15, "shared wavefronts", None] == tiles * 32 * 32  # one for each lane of each warp
    assert values["PADDING=1", 15, "shared wavefronts", None] == tiles * 32
    races = {(row["variant"], row["line"], row["other_line"]) for row in rows if row["what"] == "shared race"}
    assert races == {("FIRST_BARRIER", 11, 15), ("FIRST_BARRIER", 12, 15)}
    for variant, fails in (("FIRST_BARRIER", True), ("SECOND_BARRIER", False)):
        assert values[variant, None, "wrong elements", "lockstep"] == 0
        assert (values[variant, None, "wrong elements", "random, seed 0"] > 0) == fails
        when, order = kernel_debugging.timeline_of([row for row in rows if row["variant"] == variant])
        assert order == "random, seed 0" and sorted(when.flat) == list(range(8 * 4 * 2))  # warps, tiles, accesses
        assert kernel_debugging.overwritten(when).any() == fails
    # What is drawn on the page is what is counted now.
    committed, _ = record.read_csv(record.RESULTS / "kernel_debugging.csv")
    assert [row for row in committed if row["order"] in (None, "lockstep", "random, seed 0")] == rows


def test_outcomes_notice_what_is_wrong():
    committed, _ = record.read_csv(record.RESULTS / "kernel_debugging.csv")
    assert all(outcome.holds for outcome in kernel_debugging.outcomes(committed))
    for wrong, judged in (
        ({"what": "shared wavefronts", "variant": "PADDING=0", "line": 15}, 0),
        ({"what": "shared wavefronts", "variant": "PADDING=1", "line": 15}, 1),
        ({"what": "wrong elements", "variant": "FIRST_BARRIER", "order": "lockstep"}, 4),
        ({"what": "wrong elements", "variant": "SECOND_BARRIER", "order": "random, seed 7"}, 5),
    ):
        rows = [{**row, "value": row["value"] + 1} if wrong.items() <= row.items() else row for row in committed]
        assert rows != committed
        assert [index for index, o in enumerate(kernel_debugging.outcomes(rows)) if not o.holds] == [judged]
    without_races = [row for row in committed if row["what"] != "shared race"]
    assert not kernel_debugging.outcomes(without_races)[2].holds


def test_the_page_shows_what_its_commands_print(monkeypatch, capsys):
    folder = kernel_debugging.SOURCES.parent
    monkeypatch.chdir(folder.parent)
    page = (folder / "ptxsim.md").read_text().replace("\\\n", "")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    examples = re.findall(r"^    \$ python -m cupyflash\.ptxsim (.*)\n((?:    .*\n)+)", page, re.MULTILINE)
    assert len(examples) == page.count("$ python") == 4
    for command, shown in examples:
        assert ptxsim_main(shlex.split(command)) == int("shared race" in shown)
        printed = capsys.readouterr().out
        assert doctest.OutputChecker().check_output(shown, printed, flags), printed


def test_the_page_links_files_that_are_there():
    folder = kernel_debugging.SOURCES.parent
    links = re.findall(r"\]\(([^)#]+)\)", (folder / "ptxsim.md").read_text())
    assert "results/kernel_debugging.png" in links
    assert [link for link in links if not (folder / link).exists()] == []
