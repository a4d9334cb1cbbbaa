"""The examples of the pages in Markdown run, and give what the pages say."""

import doctest
from pathlib import Path

import pytest

import experiments

PAGES = Path(experiments.__file__).parent


@pytest.mark.parametrize(
    "page", ["error_bound.md", "options.md", "tutorial.md", "accuracy.md", "speed.md", "testing_kernels.md"]
)
def test_examples(page):
    failed, tried = doctest.testfile(str(PAGES / f"{page}.md"), module_relative=False)
    assert tried > 10 and not failed
