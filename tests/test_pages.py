"""The examples of the pages in Markdown run, and give what the pages say."""

import doctest
from pathlib import Path

import pytest

import experiments

PAGES = Path(experiments.__file__).parent
WITH_EXAMPLES = (
    "accuracy.md",
    "distributed.md",
    "error_bound.md",
    "options.md",
    "speed.md",
    "testing_kernels.md",
    "tutorial.md",
)


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples(page):
    failed, tried = doctest.testfile(str(PAGES / page), module_relative=False)
    assert tried > 10 and not failed
