"""The reader of machine code, on disassemblies written by hand whose loops are known, and on real cubins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyflash import ptxsim
from cupyflash._cli.compiled import cubin as machine_code
from experiments import control_flow, cubin, sass
from experiments.cost_table import FORWARD, NO_MASK, Case

EXIT = ["EXIT", ".L_end:", "BRA `(.L_end)"]
PRODUCT, EXP = "HMMA.16816.F32 R0, R4, R8, R0", "MUFU.EX2 R1, R2"


def disassembly(*lines: str, kernel: str = "attention", arch: str = "sm_80") -> str:
    """As nvdisasm prints it: a label ends in a colon, all else are instructions, 16 bytes each."""
    text, address = [f"\t.target\t{arch}", f'\t.section\t.text.{kernel},"ax",@progbits', f"{kernel}:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            guard, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
            text.append(f"        /*{address:04x}*/              {guard:>5} {rest} ;")
            address += 16
    return "\n".join(text)


def loops(*lines: str) -> list[sass.MainLoop]:
    (code,) = sass.parse(disassembly(*lines))
    return sass.main_loops(code)


def test_a_loop():
    (loop,) = loops("MOV R1, R2", ".L_a:", PRODUCT, PRODUCT, EXP, "FADD R1, R1, R2", "@P0 BRA `(.L_a)", *EXIT)
    assert (loop.address, loop.slots, loop.hmma, loop.rescaling, loop.local) == (0x10, 5, 2, 0, 0)
    assert loop.slots_per_hmma == loop.least_slots_per_hmma == 2.5 and not loop.unknown
    assert loop.names == {"HMMA": 2, "MUFU": 1, "FADD": 1, "BRA": 1}


def test_a_product_of_half_the_size_is_half_a_product():
    (loop,) = loops(
        ".L_a:", "HMMA.1688.F32 R0, R4, R8, R0", "HMMA.1688.F32.BF16 R0, R4, R8, R0", EXP, "@P0 BRA `(.L_a)"
    )
    assert (loop.hmma, loop.slots_per_hmma) == (1, 4)


SKIPPED = (".L_a:", PRODUCT, EXP, "VOTE.ANY P1, P2", "@!P1 BRA `(.L_b)", "FMUL R0, R0, R1", "FMUL R0, R0, R1", ".L_b:",
           "@P3 BRA `(.L_c)", "LDGSTS.E.128 [R1], [R2.64]", ".L_c:", "@P0 BRA `(.L_a)", *EXIT)  # fmt: skip


def test_what_is_skipped_is_told_apart_unless_it_copies():
    (loop,) = loops(*SKIPPED)
    assert (loop.slots, loop.rescaling, loop.least_slots_per_hmma) == (9, 2, 7)
    assert [[ins.name for ins in part] for part in loop.optional] == [["FMUL", "FMUL"], ["LDGSTS"]]


def test_a_pair_of_warps_shares_the_work():
    """Each has a product of its own beside the common one, and one of them has all exponentials."""
    first, second = (
        ["@P1 BRA `(.L_b)", EXP, EXP, ".L_b:"],
        ["@P1 BRA `(.L_c)", PRODUCT, "BRA `(.L_d)", ".L_c:", PRODUCT],
    )
    (loop,) = loops(".L_a:", PRODUCT, *first, *second, ".L_d:", "@P0 BRA `(.L_a)", *EXIT)
    assert (loop.hmma, loop.names["MUFU"], loop.names["BRA"], loop.rescaling) == (2, 1, 3.5, 0)
    assert loop.slots == 2 + 1 + 3.5 and loop.slots_per_hmma == 3.25


def test_a_branch_alone_is_no_rescaling():
    (loop,) = loops(".L_a:", PRODUCT, EXP, "@P1 BRA `(.L_b)", "BRA `(.L_c)", ".L_b:", "FMUL R0, R0, R1", ".L_c:",
                    "@P0 BRA `(.L_a)", *EXIT)  # fmt: skip
    assert (loop.slots, loop.rescaling) == (6, 1)


def test_code_far_away_belongs_to_the_loop_that_jumps_there_and_back():
    far = [".L_far:", "FMUL R0, R0, R1", "BRA `(.L_b)"]
    (loop,) = loops(".L_a:", PRODUCT, EXP, "@P1 BRA `(.L_far)", ".L_b:", "@P0 BRA `(.L_a)", "EXIT", *far)
    assert (loop.slots, loop.rescaling) == (6, 2)


def test_what_is_skipped_together_is_one_part_wherever_it_lies():
    before, behind = [".L_low:", "FMUL R0, R0, R1", "BRA `(.L_b)"], [".L_high:", "FADD R0, R0, R1", "BRA `(.L_low)"]
    main = [".L_a:", PRODUCT, EXP, "@P1 BRA `(.L_high)", ".L_b:", "@P0 BRA `(.L_a)", "EXIT"]
    (loop,) = loops("BRA `(.L_a)", *before, *main, *behind)
    assert [[ins.name for ins in part] for part in loop.optional] == [["FMUL", "BRA", "FADD", "BRA"]]


def test_both_sides_of_a_branch_are_skipped_by_the_other():
    sides = ["@P1 BRA `(.L_b)", "FADD R1, R1, R1", "BRA `(.L_c)", ".L_b:", "FMUL R1, R1, R1", ".L_c:"]
    (loop,) = loops(".L_a:", PRODUCT, EXP, *sides, "@P0 BRA `(.L_a)", "EXIT")
    assert not loop.divided and sorted(len(part) for part in loop.optional) == [1, 2]


def test_interior_and_boundary_loops_and_no_others():
    interior = [".L_a:", PRODUCT, EXP, "@P0 BRA `(.L_a)"]
    boundary = [".L_b:", PRODUCT, EXP, "FSEL R1, R1, R2, P1", "@P0 BRA `(.L_b)"]
    others = [".L_c:", EXP, "@P0 BRA `(.L_c)", ".L_d:", PRODUCT, "@P0 BRA `(.L_d)"]
    (code,) = sass.parse(disassembly(*others, *boundary, *interior, *EXIT))
    kernel = sass.Kernel(code, cubin.KernelResources("attention"))
    assert [loop.slots for loop in kernel.main_loops] == [4, 3] and kernel.interior_loop.slots == 3


def test_the_innermost_of_nested_loops():
    inner = [".L_b:", PRODUCT, EXP, "@P0 BRA `(.L_b)"]
    (loop,) = loops(".L_a:", "IADD3 R1, R1, R2, RZ", *inner, "@P1 BRA `(.L_a)", *EXIT)
    assert loop.slots == 3
    # A loop of products alone inside makes as many passes as nobody knows: the figure would be wrong.
    products = [".L_b:", PRODUCT, "@P0 BRA `(.L_b)"]
    (loop,) = loops(".L_a:", EXP, *products, "@P1 BRA `(.L_a)", *EXIT)
    assert loop.unknown == "loops at 0x10"


def test_spills():
    lines = ["STL [R1], R2", ".L_a:", PRODUCT, EXP, "LDL.LU R2, [R1]", "@P0 BRA `(.L_a)", "LDL R2, [R1+0x4]", *EXIT]
    (code,) = sass.parse(disassembly(*lines))
    kernel = sass.Kernel(code, cubin.KernelResources("attention"))
    assert (kernel.interior_loop.local, kernel.local_elsewhere) == (1, 2)


@pytest.mark.parametrize(
    "branch",
    ["@P0 BRA `(.L_a)", "@!UP1 BRA `(.L_a)", "BRA.U UP0, `(.L_a)", "BRA !P0, `(.L_a)", "@P0 CALL.REL.NOINC `(.L_a)"],
)
def test_branches_that_may_be_taken(branch):
    (loop,) = loops(".L_a:", PRODUCT, EXP, branch, "MOV R1, R2", *EXIT)
    assert loop.slots == 3


@pytest.mark.parametrize("branch", ["@!PT BRA `(.L_a)", "BRA.DIV UR4, `(.L_a)", "BSSY B0, `(.L_a)", "@P0 EXIT"])
def test_branches_that_are_never_taken_or_are_none(branch):
    assert not loops(".L_a:", PRODUCT, EXP, branch, "MOV R1, R2", *EXIT)


def test_threads_may_leave_within_a_loop():
    (loop,) = loops(".L_a:", PRODUCT, "@P1 EXIT", EXP, "@P0 BRA `(.L_a)", *EXIT)
    assert loop.slots == 4 and not loop.optional


def test_what_follows_a_branch_that_is_always_taken_is_not_reached():
    for always in "BRA `(.L_b)", "@PT BRA `(.L_b)", "BRA.U UPT, `(.L_b)":
        assert not loops(".L_a:", PRODUCT, EXP, always, "@P0 BRA `(.L_a)", ".L_b:", *EXIT)


@pytest.mark.parametrize(
    "line",
    [
        "BRX R4 -0x70", "JMP `(.L_a)", "BREAK B0", "BSYNC B0", "BRA.CONV `(.L_a)", "BRA `(.L_nowhere)", "BRA 0x40",
        "HGMMA.64x128x16.F32 R0, gdesc[UR4], R0", "IMMA.16816.S8.S8 R0, R4, R8, R0", "HMMA.884.F32 R0, R4, R8, R0",
        "HMMA.SP.16832.F32 R0, R4, R8, R0", "HMMA.16816.SP.F32 R0, R4, R8, R0", "UTCHMMA gdesc[UR4], gdesc[UR6]",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(line):
    with pytest.raises(sass.SassError, match=line.split()[0]):
        loops(".L_a:", PRODUCT, EXP, line, "@P0 BRA `(.L_a)", *EXIT)


def test_where_parted_threads_meet_is_understood():
    parted = ["BSSY B0, `(.L_c)", "@P1 BRA `(.L_b)", "FMUL R1, R1, R1", ".L_b:", "BSYNC B0", ".L_c:"]
    (loop,) = loops(".L_a:", PRODUCT, EXP, *parted, "@P0 BRA `(.L_a)", *EXIT)
    assert (loop.slots, loop.rescaling) == (7, 1)


def test_a_call_in_the_loop_is_said():
    (loop,) = loops(".L_a:", PRODUCT, EXP, "CALL.REL.NOINC `($attention$slowpath)", "@P0 BRA `(.L_a)", *EXIT)
    assert loop.unknown == "calls at 0x20"


def test_a_cycle_with_two_entries_is_refused():
    with pytest.raises(sass.SassError, match="entered elsewhere"):
        loops("@P0 BRA `(.L_b)", ".L_a:", PRODUCT, ".L_b:", EXP, "@P1 BRA `(.L_a)", *EXIT)


@pytest.mark.parametrize("text", ["", "\t.target sm_80", disassembly(), disassembly("!!!")])
def test_what_is_no_disassembly_is_refused(text):
    with pytest.raises(sass.SassError, match=r"no code|no instruction"):
        sass.parse(text)


GRAPHS = st.integers(1, 7).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, n - 1), max_size=2, unique=True), min_size=n, max_size=n)
)


@given(GRAPHS)
def test_a_dominator_is_a_node_without_which_there_is_no_way(graph):
    found = control_flow.dominators(graph)
    assert found.keys() == control_flow.reached(graph, [0])
    for node in found:
        without = {d for d in found if node not in control_flow.reached(graph, [0], within=set(found) - {d})}
        assert found[node] == without


@given(GRAPHS)
def test_a_natural_loop_is_entered_by_its_header_alone_and_goes_back_to_it(graph):
    try:
        loops = control_flow.natural_loops(graph)
    except control_flow.IrreducibleError:
        return
    live = control_flow.reached(graph, [0])
    on_cycles = {node for node in live if node in control_flow.reached(graph, graph[node])}
    assert on_cycles == set().union(*loops.values())
    for header, loop in loops.items():
        before = control_flow.predecessors(graph)
        assert all(set(before[node]) & live <= loop for node in loop - {header})
        for node in loop:
            assert header in control_flow.reached(graph, graph[node], within=loop)
        for region in control_flow.optional_regions(graph, header, loop):
            assert region and region <= loop - {header}


SHARED = r"""
extern "C" __global__ void __launch_bounds__(64) twice(float* x) {
    __shared__ float s[100];
    s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] *= s[threadIdx.x ^ 1]; }
extern "C" __global__ void indexed(float* x, int n) {
    float local[8]; for (int i = 0; i < 8; ++i) local[i] = x[i];
    for (int i = 0; i < n; ++i) { int j = x[i]; local[j] += x[j + i]; }
    for (int i = 0; i < 8; ++i) x[i] = local[i]; }
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_a_cubin_says_of_kernels_what_the_assembler_says(arch):
    found = cubin.read(machine_code(SHARED, arch))
    assert found.keys() == {"twice", "indexed"}
    for name, needs in found.items():
        said = ptxsim.resources(SHARED, name, arch)
        assert (needs.registers, needs.static_shared_bytes) == (said.registers, said.static_shared_bytes)
        assert needs.stack_bytes == said.stack_bytes
    assert (found["twice"].threads, found["indexed"].threads) == (64, None)
    assert found["twice"].static_shared_bytes == 400 and found["indexed"].stack_bytes == 32


@pytest.fixture(scope="module")
def real():
    case = Case(FORWARD, 64, NO_MASK, "sm_80")
    return case, machine_code(case.source, case.arch)


def test_a_real_kernel(real, tmp_path, capsys):
    case, content = real
    kernel = sass.read(content)[FORWARD]
    loop = kernel.interior_loop
    tile = case.config.defines
    rows = tile["BLOCK_M"] // tile["NUM_WARPS"]  # of a warp
    assert kernel.code.arch == "sm_80" and len(kernel.main_loops) == 2  # without a mask, and with one
    assert loop.hmma == 2 * (rows // 16) * (tile["BLOCK_N"] // 8) * (64 // 16)
    # Each weight is an exponential of one lane, and so are the factors of rows whose maximum moves.
    assert loop.names["MUFU"] >= rows * tile["BLOCK_N"] // 32
    assert 3 < loop.least_slots_per_hmma < loop.slots_per_hmma < 6
    assert kernel.resources.threads == case.config.block

    path = tmp_path / "forward.cubin"
    path.write_bytes(content)
    assert sass.main([str(path)]) == 0
    head, *rows, foot = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["kernel", "arch", "registers"] and foot == sass.FOOT
    shown = [row.split() for row in rows]
    assert [row[:3] for row in shown] == [[FORWARD, "sm_80", str(kernel.resources.registers)]] * 2
    assert f"{loop.slots_per_hmma:.2f}" in shown[0] and hex(loop.address) in shown[0]


def test_the_command_names_what_it_cannot_read(real, tmp_path, capsys):
    text, cut, other = (tmp_path / name for name in ("text", "cut", "other"))
    text.write_text("no cubin")
    cut.write_bytes(real[1][: len(real[1]) // 2])
    other.write_bytes(machine_code(SHARED, "sm_80"))
    assert sass.main([str(path) for path in (text, cut, other, tmp_path / "nothing")]) == 1
    said = capsys.readouterr().err.splitlines()
    for line, name, reason in zip(
        sorted(said),
        ["cut", "nothing", "other", "other", "text"],
        ["a damaged cubin: the file ends early", "No such file or directory",
         "indexed: no tensor-core products", "twice: no tensor-core products",
         "no cubin: not an ELF file of 64 bits for CUDA"],
        strict=True,
    ):  # fmt: skip
        assert line == f"{tmp_path / name}: {reason}"
    assert sass.main([]) == 2 and "usage" in capsys.readouterr().err
    assert sass.main(["--help"]) == 0 and "usage" in capsys.readouterr().out


NESTED = [".L_a:", EXP, ".L_b:", PRODUCT, "@P0 BRA `(.L_b)", "@P1 BRA `(.L_a)"]
KNOWN = [".L_c:", PRODUCT, EXP, "@P0 BRA `(.L_c)"]


@pytest.mark.parametrize(("lines", "status"), [([*NESTED, *KNOWN, *EXIT], 0), ([*NESTED, *EXIT], 1)])
def test_a_loop_without_figures_is_a_note_where_another_has_them(lines, status, monkeypatch, tmp_path, capsys):
    (code,) = sass.parse(disassembly(*lines))
    kernel = sass.Kernel(code, cubin.KernelResources("attention"))
    monkeypatch.setattr(sass, "read", lambda content: {"attention": kernel})
    path = tmp_path / "nested.cubin"
    path.touch()
    assert sass.main([str(path)]) == status
    said = capsys.readouterr()
    assert said.err == f"{path}: attention: the loop at 0x0 holds loops at 0x10: no figures\n"
    assert bool(said.out) == (status == 0)


def test_code_without_tensor_cores_has_no_main_loop_whatever_else_is_in_it():
    assert not loops(".L_a:", EXP, "BREAK B0", "@P0 BRA `(.L_a)", *EXIT)


@pytest.mark.parametrize("size", [6, 19, 20, 63])
def test_a_file_that_ends_in_its_first_header(real, size):
    with pytest.raises(cubin.CubinError, match=r"no cubin|ends early"):
        cubin.read(real[1][:size])


def test_without_a_disassembler_it_is_said_which_package_has_one(monkeypatch):
    monkeypatch.setattr(sass.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)
    with pytest.raises(sass.SassError, match="pip install"):
        sass.nvdisasm()
