"""How the tests run an experiment: by its command, small, into a folder of their own."""

from experiments import record
from experiments.__main__ import main
from experiments.experiment import Outcome, Row, load

PNG = b"\x89PNG"


def run(name: str, folder, *arguments: str) -> tuple[list[Row], list[Outcome]]:
    """``python -m experiments run NAME ...``; the rows that it wrote, and what came out."""
    assert main(["run", name, *arguments, "--results", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.csv", f"{name}.png", f"{name}.svg"]
    assert (folder / f"{name}.png").read_bytes()[:4] == PNG
    rows, environment = record.read_csv(folder / f"{name}.csv")
    assert tuple(environment) == record.ENVIRONMENT and all(environment.values())
    return rows, load(name).outcomes(rows)
