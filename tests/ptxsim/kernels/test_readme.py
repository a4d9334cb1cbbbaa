"""The table of this folder, in `README.md`."""

import re

import pytest

from .__main__ import FOLDER, families, summary


@pytest.mark.parametrize("family", families())
def test_a_family_is_listed(family):
    """With what it shows and its kernels. Their instructions depend on NVRTC."""
    rows = re.findall(rf"^\| \[`{family}`\].*$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert rows, "python -m tests.ptxsim.kernels > tests/ptxsim/kernels/README.md"
    (row,) = rows
    assert row.startswith(f"| [`{family}`]({family}.cu) | {summary(family)} | ")
    kernels = re.findall(r'extern "C" __global__ void ((?!__|name)\w+)\(\w', (FOLDER / f"{family}.cu").read_text())
    assert [name for name in kernels if f"`{name}`" not in row] == []
