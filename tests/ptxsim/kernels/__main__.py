"""The table of this folder's kernels: `python -m tests.ptxsim.kernels > tests/ptxsim/kernels/README.md`."""

import re
from pathlib import Path

from cupyflash import ptxsim
from cupyflash.ptxsim.parse import parse

FOLDER = Path(__file__).parent
CHOICES = {  # of families that do not compile without any
    "attention": {"name_expressions": ("tiled<32>", "tiled_backward_keys<2>")},
    "hgemm": {"options": ("-DKIND=f16",), "name_expressions": ("pipelined<Swizzled, 3>",)},
    "cooperative_grid": {"enable_cooperative_groups": True},
}
# What nearly every kernel has.
ARITHMETIC = "add and cvt cvta div fma mad max min mul neg not or rem selp setp shl shr sub xor"
EVERYDAY = {*ARITHMETIC.split(), "bra", "call", "ld", "mov", "ret", "st"}
HEAD = """# Kernels as people write them

Each family is a `.cu` file, and beside it is the test that holds it against NumPy, `test_<family>.py`: in lockstep and
in a random order of warps, plain and under the sanitizer, which must find nothing; and with faults planted, which must
show ([`conftest.py`](conftest.py) has the four ways to run). `python -m pytest tests/ptxsim/kernels/test_reduction.py`
runs one family.

`python -m tests.ptxsim.kernels` makes this table. Instructions are those of sm_90 that are not everyday arithmetic,
loads and stores.

| family | what it shows | kernels | instructions |
|---|---|---|---|
"""


def families():
    """Names of the `.cu` files."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


def summary(family):
    """The first sentence of the comment that a file begins with."""
    comment = re.match(r"(?:// .*\n)+", (FOLDER / f"{family}.cu").read_text()).group()
    return re.split(r"\.\s", comment.replace("// ", "").replace("\n", " "))[0]


def row(family):
    """One line of the table."""
    code, choices = (FOLDER / f"{family}.cu").read_text(), CHOICES.get(family, {})
    module = ptxsim.RawModule(code=code, **choices)
    ptx = ptxsim.compile_ptx(code, choices.get("options", ()), name_expressions=choices.get("name_expressions"))
    opcodes = {ins.opcode for function in parse(ptx).functions.values() for ins in function.code} - EVERYDAY
    kernels, opcodes = (", ".join(f"`{name}`" for name in names) for names in (module.kernels, sorted(opcodes)))
    return f"| [`{family}`]({family}.cu) | {summary(family)} | {kernels} | {opcodes} |\n"


if __name__ == "__main__":
    with ptxsim.settings(arch="sm_90"):
        print(HEAD + "".join(map(row, families())), end="")
