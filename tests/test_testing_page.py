"""The example of experiments/testing.md runs, and gives what the page says."""

import doctest
from pathlib import Path

import experiments

PAGE = Path(experiments.__file__).parent / "testing.md"


def test_the_ten_lines():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert tried > 4 and not failed
