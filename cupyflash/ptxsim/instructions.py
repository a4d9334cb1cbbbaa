"""The instruction table as a document: `python -m cupyflash.ptxsim.instructions > cupyflash/ptxsim/INSTRUCTIONS.md`."""

from .isa import LINES

_NOT_HERE = """
* Hopper's and Blackwell's asynchronous units: `wgmma`, `tcgen05`, `cp.async.bulk` but from global to shared
  memory (so no tensor maps, no `bulk_group`, no `multicast`), clusters (`mapa`,
  `barrier.cluster`, `shared::cluster` other than for an `mbarrier` of the own block), `multimem`, `setmaxnreg`
* `mma` of FP8, 6 and 4-bit floats, of sparse and scaled matrices, and Volta's `mma.m8n8k4` of float16
* textures and surfaces (`tex`, `tld4`, `suld`, `sust`), `cvt` to and from 8, 6 and 4-bit floats, stochastic rounding
* video instructions (`vadd` ..., all but `vabsdiff2` and `vabsdiff4` of unsigned numbers), `szext`, `alloca`, cache
  policies (`createpolicy`, `L2::cache_hint`), `discard`
* calls of functions outside the module (but `printf` and `assert`), and of functions whose parameters are registers
* special registers other than thread, block and grid indices, lane and warp numbers, lane masks, clocks and timers,
  those that hold the address of the driver's workspace (`%envreg1`, `%envreg2`: for `this_grid().sync()`), and
  `%reserved_smem_offset_1` (for groups of several warps)
"""


_NEWLINE = "\n"


def _counted(operands):
    return "1 operand" if operands == 1 else f"{operands} operands"


def _row(line):
    groups = []
    for names, least, _ in line.groups:
        one = "/".join(f".{name}" for name in names)
        groups += [one] * least or [f"[{one}]"]
    types = ["." + ".".join(t) if t else "" for t in sorted(line.types)]
    name = line.opcode if line.operands in (None, 3) else f"{line.opcode} ({_counted(line.operands)})"
    return (
        f"| `{name}` | {' '.join(f'`{g}`' for g in groups)} | {' '.join(f'`{t}`' for t in types if t)} | {line.since} |"
    )


_HEAD = """# PTX instructions that the simulator knows

Made by `python -m cupyflash.ptxsim.instructions`. A kernel with any other instruction, modifier, operand or special
register is refused before it runs, with its line in PTX and in CUDA C++.

`[...]` may be left out; of `.a/.b` one is chosen; types are the suffixes in their order. The last column is the first
architecture that has it (sm_75 is the oldest of the simulator).

Arithmetic is that of the ISA bit for bit, in every rounding mode. Where the ISA leaves a result open:

* `ex2`, `lg2`, `sin`, `cos`, `tanh`, `rsqrt` (`.approx`) are computed in float64 and rounded once more. That is the
  correctly rounded value except where the exact one lies within about 2**-52 of the middle between two numbers; then it
  is its neighbour, still within the ISA's bounds. `rcp`, `sqrt` and `div` are correctly rounded always; `div.approx`
  with a divisor above 2**126 gives 0, as on GPUs.
* `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64` round to the upper 32 bits; `rsqrt.approx.f64` is within 1 ulp or so.
* A NaN made by float32, float16 or bfloat16 arithmetic is 0x7fffffff or 0x7fff. An integer division by zero gives all
  ones, its remainder the dividend.
* `sub.cc` and `subc.cc` set the carry flag where nothing is borrowed, and `subc` takes one more where it is clear: the
  flag of GPUs is that of the sum with the complement. Additions may follow subtractions, as in 128-bit divisions.
* `mma` and `wmma` of float64 are chains of fused multiply-adds, k ascending. Which lane holds which element of a `wmma`
  fragment is as in the machine code that NVRTC makes for sm_80: as in the `mma` that the product is made of, tile after
  tile (m16n16k16: two of m16n8k16 side by side; m8n32k16: the transpose of m32n8k16).
* Atomics act lane by lane in the order of lanes, those of a vector element by element. `redux.sync` of floats is an
  instruction of sm_100a and sm_103a only.
* The caches, orders and hints in a load or store change nothing.

Functions that call themselves, directly or through others, have a stack of 16,384 bytes a thread for the parameters
and the variables in local memory of all calls that it is in, each call rounded up to 16 bytes. More is a
`SimulationError`. Lanes of a warp that are in different numbers of such calls do not meet in `shfl`, `vote`, `match`,
`redux` and `bar.warp`: they wait for lanes at their own depth.

| opcode | modifiers | types | sm_ |
|---|---|---|---|
"""


def document():
    """The table as Markdown: what INSTRUCTIONS.md holds."""
    lines = [line for name in sorted(LINES) for line in LINES[name] if name not in ("vprintf", "__assertfail")]
    return f"{_HEAD}{_NEWLINE.join(map(_row, lines))}\n\n## Refused\n{_NOT_HERE}"


if __name__ == "__main__":
    print(document(), end="")
