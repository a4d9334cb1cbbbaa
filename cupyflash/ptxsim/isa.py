"""Which PTX instructions the simulator knows, with their types and modifiers, and since which architecture.

A line of the table is: first compute capability (times 10; 75 stands for all) | opcodes | type suffixes in order |
groups of modifiers. `rn/rz` is a group of which at most one may be there, `!rn/rz` one of which exactly one must be,
`!!row/col` one of which two must be; the order of modifiers is free, as compilers differ in it. `min:4` is a min with 4
operands.
"""

import functools
import itertools
from dataclasses import dataclass

from .syntax import Address, Label, Memory, Pair, Register, Special


def _pairs(targets, sources):
    """All `target.source` of two lists of types, but for equal ones."""
    return " ".join(f"{t}.{s}" for t in targets.split() for s in sources.split() if t != s)


_SIGNED, _UNSIGNED = "s16 s32 s64", "u16 u32 u64"
_INT = f"{_UNSIGNED} {_SIGNED}"
_WORDS = "u32 s32 u64 s64"
_BITS = "b16 b32 b64"
_PLAIN = f"{_BITS} {_INT} f32 f64"
_STORED = f"b8 u8 s8 {_PLAIN}"
_RND, _INTEGRAL = "rn/rz/rm/rp", "rni/rzi/rmi/rpi"
_EQUAL = "eq/ne/lt/le/gt/ge"
_FLOAT = f"{_EQUAL}/equ/neu/ltu/leu/gtu/geu/num/nan"
_LOGIC = "and/or/xor"
_SHARED = "shared/shared::cta"
_SPACE = f"global/{_SHARED}/local"
_SCOPE = "cta/gpu/sys"
_L1 = "L1::evict_normal/L1::evict_unchanged/L1::evict_first/L1::evict_last/L1::no_allocate"
_VECTOR = "v2/v4"


def _atomics():
    """Lines of atom and red: their operations, first with the scopes of all architectures, then with .cluster; of
    vectors."""
    for opcode, order, extra in (
        ("atom", "relaxed/acquire/release/acq_rel", "/exch/cas"),
        ("red", "relaxed/release", ""),
    ):
        for since, scope in ((75, _SCOPE), (90, "!cluster")):
            rest = f"{order} {scope} global/{_SHARED}"
            yield f"{since} | {opcode} | u32 | !add/min/max/inc/dec {rest}"
            yield f"{since} | {opcode} | s32 u64 | !add/min/max {rest}"
            yield f"{since} | {opcode} | s64 | !min/max {rest}"
            yield f"{since} | {opcode} | b32 b64 | !and/or/xor{extra} {rest}"
            yield f"{since} | {opcode} | f32 f64 | !add {rest}"
            yield f"{since} | {opcode} | f16 f16x2 | !add !noftz {rest}"
            yield f"90 | {opcode} | bf16 bf16x2 | !add !noftz {rest}"
            if extra:
                yield f"{since} | {opcode} | b16 | !cas {rest}"
        if extra:
            yield f"90 | {opcode} | b128 | !exch/cas {order} {_SCOPE}/cluster global/{_SHARED}"
        rest = f"{order} {_SCOPE}/cluster global"
        yield f"90 | {opcode} | f32 | !add !v2/v4 {rest}"
        yield f"90 | {opcode} | f16 bf16 | !add/min/max !noftz !v2/v4/v8 {rest}"
        yield f"90 | {opcode} | f16x2 bf16x2 | !add/min/max !noftz !v2/v4 {rest}"


def _matrix_loads():
    """Lines of wmma.load and wmma.store: the types of the fragments by shape."""
    wide = "m16n16k16/m8n32k16/m32n8k16"
    for since, shapes, factors, accumulators in (
        (75, wide, "f16 s8 u8", "f16 f32 s32"),
        (80, wide, "bf16", ""),
        (80, "m16n16k8", "tf32", "f32"),
        (80, "m8n8k4", "f64", "f64"),
        (75, "m8n8k32/m8n8k128", "", "s32"),
    ):
        rest = f"!sync !aligned !row/col !{shapes} global/{_SHARED}"
        if factors:
            yield f"{since} | wmma | {factors} | !load !a/b {rest}"
        if accumulators:
            yield f"{since} | wmma | {accumulators} | !load !c {rest}"
            yield f"{since} | wmma | {accumulators} | !store !d {rest}"
    for operand in ("!a !row", "!b !col"):
        for types, shape in (("s4 u4", "m8n8k32"), ("b1", "m8n8k128")):
            yield f"75 | wmma | {types} | !load !sync !aligned {operand} !{shape} global/{_SHARED}"


def _narrowing():
    """cvt.sat between integers: only where the target lacks some value of the source."""
    for pair in _pairs(f"{_BYTES} {_INT}", f"{_BYTES} {_INT}").split():
        (target, to), (source, of) = ((t[0], int(t[1:])) for t in pair.split("."))
        if to - of < (1 if source == "u" and target == "s" else 0) or (source == "s" and target == "u"):
            yield pair


def _mbarriers():
    """Lines of mbarrier."""
    anywhere = f"{_SHARED}/shared::cluster"
    yield f"80 | mbarrier:2 | b64 | !init {_SHARED}"
    yield f"80 | mbarrier:1 | b64 | !inval {_SHARED}"
    for order in ("", "!release !cta"):
        yield f"80 | mbarrier:2 | b64 | !arrive/arrive_drop {order} {_SHARED}"
        yield f"80 | mbarrier:3 | b64 | !arrive/arrive_drop !noComplete {order} {_SHARED}"
    for order in ("", "!release/relaxed !cta/cluster"):
        yield f"90 | mbarrier:2 mbarrier:3 | b64 | !arrive/arrive_drop {order} {anywhere}"
        yield f"90 | mbarrier:3 | b64 | !arrive/arrive_drop !expect_tx {order} {anywhere}"
    for order in ("", "!relaxed !cta/cluster"):
        yield f"90 | mbarrier:2 | b64 | !expect_tx/complete_tx {order} {anywhere}"
    for order in ("", "!acquire !cta"):
        yield f"80 | mbarrier:3 | b64 | !test_wait parity {order} {_SHARED}"
    yield f"90 | mbarrier:3 | b64 | !test_wait parity !acquire/relaxed !cta/cluster {_SHARED}"
    for order in ("", "!acquire/relaxed !cta/cluster"):
        yield f"90 | mbarrier:3 mbarrier:4 | b64 | !try_wait parity {order} {_SHARED}"
    yield "80 | mbarrier:2 | b64 | !pending_count"


_BYTES, _NEWLINE = "u8 s8", "\n"
_WMMA = "!mma !sync !aligned !!row/col"
_MMA = "!sync !aligned !row !col"
_INT8, _INT4 = (" ".join(f"s32.{a}{n}.{b}{n}.s32" for a in "su" for b in "su") for n in (8, 4))

_TABLE = f"""
75 | add sub | {_INT} |
75 | add sub | s32 | !sat
90 | add | u16x2 s16x2 |
75 | add sub mul | f32 | {_RND} ftz sat
75 | add sub mul | f64 | {_RND}
75 | add sub mul | f16 f16x2 | rn ftz sat
90 | add sub mul | bf16 bf16x2 | rn
75 | add sub | {_WORDS} | !cc
75 | addc subc | {_WORDS} | cc
75 | mul mad | {_INT} | !lo/hi
75 | mul mad | u16 s16 u32 s32 | !wide
75 | mad | {_WORDS} | !lo/hi !cc
75 | madc | {_WORDS} | !lo/hi cc
75 | mul24 mad24 | u32 s32 | !lo/hi
75 | fma mad | f32 | !{_RND} ftz sat
75 | fma mad | f64 | !{_RND}
75 | fma | f16 f16x2 | !rn ftz sat
80 | fma | f16 f16x2 | !rn ftz !relu
80 | fma | bf16 bf16x2 | !rn relu
75 | div rem sad | {_INT} |
75 | div | f32 | !approx/full/{_RND} ftz
75 | rcp sqrt | f32 | !approx/{_RND} ftz
75 | div rcp sqrt | f64 | !{_RND}
75 | rcp | f64 | !approx !ftz
75 | rsqrt | f64 | !approx ftz
75 | rsqrt ex2 lg2 sin cos | f32 | !approx ftz
75 | tanh | f32 | !approx
75 | ex2 tanh | f16 f16x2 | !approx
90 | ex2 | bf16 bf16x2 | !approx !ftz
90 | tanh | bf16 bf16x2 | !approx
75 | abs neg | {_SIGNED} f64 |
75 | abs neg | f32 f16 f16x2 | ftz
80 | abs neg | bf16 bf16x2 |
75 | min max | {_INT} f64 |
90 | min max | u16x2 s16x2 |
90 | min max | s32 s16x2 | !relu
75 | min max | f32 | ftz
80 | min max | f32 | ftz !NaN
80 | min max | f16 f16x2 | ftz NaN
80 | min max | bf16 bf16x2 | NaN
86 | min max | f32 f16 f16x2 | ftz NaN !xorsign !abs
86 | min max | bf16 bf16x2 | NaN !xorsign !abs
100 | min:4 max:4 | f32 | ftz NaN abs
75 | copysign | f32 f64 |
75 | testp | f32 f64 | !finite/infinite/number/notanumber/normal/subnormal
75 | dp4a | u32.u32 u32.s32 s32.u32 s32.s32 |
75 | dp2a | u32.u32 u32.s32 s32.u32 s32.s32 | !lo/hi
75 | popc clz brev bfi | b32 b64 |
75 | bfe | {_WORDS} |
75 | bfind | {_WORDS} | shiftamt
75 | bmsk | b32 | !clamp/wrap
75 | fns | b32 |
75 | vabsdiff2 vabsdiff4 | u32.u32.u32 | add
75 | and or xor not | pred {_BITS} |
75 | cnot shl | {_BITS} |
75 | shr | {_BITS} {_INT} |
75 | shf | b32 | !l/r !clamp/wrap
75 | prmt | b32 | f4e/b4e/rc8/ecl/ecr/rc16
75 | lop3 | b32 |
75 | setp | {_BITS} | !eq/ne {_LOGIC}
75 | setp | {_SIGNED} | !{_EQUAL} {_LOGIC}
75 | setp | {_UNSIGNED} | !{_EQUAL}/lo/ls/hi/hs {_LOGIC}
75 | setp | f32 f16 | !{_FLOAT} {_LOGIC} ftz
75 | setp | f64 | !{_FLOAT} {_LOGIC}
90 | setp | bf16 | !{_FLOAT} {_LOGIC}
75 | set | {_pairs("u32 s32 f32", _BITS)} | !eq/ne
75 | set | {_pairs("u32 s32 f32", _SIGNED)} s32.s32 | !{_EQUAL}
75 | set | {_pairs("u32 s32 f32", _UNSIGNED)} u32.u32 | !{_EQUAL}/lo/ls/hi/hs
75 | set | u32.f32 s32.f32 f32.f32 | !{_FLOAT} ftz
75 | set | {_pairs("u32 s32 f32", "f64")} | !{_FLOAT}
75 | set | {_pairs("u16 s16 u32 s32", "f16")} u32.f16x2 s32.f16x2 f16.f16 f16x2.f16x2 | !{_FLOAT} ftz
90 | set | {_pairs("u16 s16 u32 s32", "bf16")} u32.bf16x2 s32.bf16x2 bf16.bf16 bf16x2.bf16x2 | !{_FLOAT}
75 | selp | {_PLAIN} |
75 | slct | {_pairs(_PLAIN, "s32")} s32.s32 |
75 | slct | {_pairs(_PLAIN, "f32")} f32.f32 | ftz
75 | mov | pred b128 {_PLAIN} |
75 | cvt | {_pairs(f"{_BYTES} {_INT}", f"{_BYTES} {_INT}")} {" ".join(f"{t}.{t}" for t in f"{_BYTES} {_INT}".split())} |
75 | cvt | {" ".join(_narrowing())} | !sat
75 | cvt | {_pairs(f"{_BYTES} {_INT}", "f16 f64")} | !{_INTEGRAL} sat
75 | cvt | {_pairs(f"{_BYTES} {_INT}", "f32")} | !{_INTEGRAL} ftz sat
75 | cvt | {_pairs("f16 f64", f"{_BYTES} {_INT}")} | !{_RND} sat
75 | cvt | {_pairs("f32", f"{_BYTES} {_INT}")} | !{_RND} ftz sat
90 | cvt | {_pairs(_INT, "bf16")} | !{_INTEGRAL}
90 | cvt | {_pairs("bf16", _INT)} | !{_RND}
75 | cvt | f64.f16 | sat
75 | cvt | f32.f16 f64.f32 | ftz sat
80 | cvt | f32.bf16 |
90 | cvt | f64.bf16 |
75 | cvt | f32.f64 f16.f32 | !{_RND} ftz sat
75 | cvt | f16.f64 | !{_RND} sat
90 | cvt | bf16.f64 bf16.f16 f16.bf16 | !{_RND}
75 | cvt | f16.f16 f64.f64 | {_INTEGRAL} sat
90 | cvt | bf16.bf16 | !{_INTEGRAL}
75 | cvt | f32.f32 | {_INTEGRAL} ftz sat
80 | cvt | bf16.f32 | !{_RND} ftz
80 | cvt | bf16.f32 f16.f32 | !rn/rz relu satfinite
80 | cvt | f16x2.f32 bf16x2.f32 | !rn/rz relu satfinite
80 | cvt | tf32.f32 | !rna satfinite
90 | cvt | tf32.f32 | !rn/rz relu
100 | cvt | tf32.f32 | !rn/rz relu !satfinite
75 | cvta | u32 u64 | to !global/{_SHARED}/local/const/param
75 | isspacep | | !global/{_SHARED}/local/const/param
90 | isspacep | | !shared::cluster
75 | ld | {_STORED} | weak {_SPACE}/param/const {_VECTOR} ca/cg/cs/lu/cv
75 | ld | {_STORED} | weak global {_VECTOR} {_L1} L2::64B/L2::128B
80 | ld | {_STORED} | weak global {_VECTOR} {_L1} !L2::256B
75 | ld | {_STORED} | !global {_VECTOR} ca/cg/cs !nc
75 | ld | {_STORED} | !global {_VECTOR} !nc {_L1} L2::64B/L2::128B
80 | ld | {_STORED} | !global {_VECTOR} !nc {_L1} !L2::256B
75 | ld | {_STORED} | !volatile {_SPACE} {_VECTOR}
75 | ld | {_STORED} | !relaxed/acquire !{_SCOPE} global/{_SHARED} {_VECTOR} {_L1} L2::64B/L2::128B
90 | ld | {_STORED} | !relaxed/acquire !cluster global/{_SHARED} {_VECTOR} {_L1} L2::64B/L2::128B
75 | ld | {_STORED} | !mmio !relaxed !sys global
100 | ld | b32 u32 s32 f32 | weak !global !v8 nc {_L1}
100 | ld | b64 u64 s64 f64 | weak !global !v4 nc {_L1}
75 | ldu | {_STORED} | global {_VECTOR}
75 | st | {_STORED} | weak {_SPACE}/param {_VECTOR} wb/cg/cs/wt
75 | st | {_STORED} | weak global {_VECTOR} {_L1}
75 | st | {_STORED} | !volatile {_SPACE} {_VECTOR}
75 | st | {_STORED} | !relaxed/release !{_SCOPE} global/{_SHARED} {_VECTOR} {_L1}
90 | st | {_STORED} | !relaxed/release !cluster global/{_SHARED} {_VECTOR} {_L1}
75 | st | {_STORED} | !mmio !relaxed !sys global
100 | st | b32 u32 s32 f32 | weak !global !v8 {_L1}
100 | st | b64 u64 s64 f64 | weak !global !v4 {_L1}
75 | prefetch | | global/local !L1/L2/L2::evict_last/L2::evict_normal
75 | prefetchu | | !L1
80 | applypriority | | global !L2::evict_normal
{_NEWLINE.join(_atomics())}
75 | membar | | !cta/gl/sys
75 | fence | | sc/acq_rel !{_SCOPE}
90 | fence | | sc/acq_rel/acquire/release !{_SCOPE}/cluster
75 | fence membar | | !proxy !alias
90 | fence | | !proxy !async global/{_SHARED}
90 | fence | | !mbarrier_init !release !cluster
75 | bar | | cta !sync/arrive
75 | bar | u32 | cta !red !popc
75 | bar | pred | cta !red !and/or
75 | barrier | | cta !sync/arrive aligned
75 | barrier | u32 | cta !red !popc aligned
75 | barrier | pred | cta !red !and/or aligned
75 | bar | | !warp !sync
{_NEWLINE.join(_mbarriers())}
90 | cp:4 | | !async !bulk !shared::cluster/shared::cta !global !mbarrier::complete_tx::bytes
80 | cp:1 | b64 | !async !mbarrier !arrive noinc {_SHARED}
75 | shfl | b32 | !sync !up/down/bfly/idx
75 | vote | pred | !sync !all/any/uni
75 | vote | b32 | !sync !ballot
75 | match | b32 b64 | !sync !any/all
80 | redux | u32 s32 | !sync !add/min/max
80 | redux | b32 | !sync !{_LOGIC}
100 | redux | f32 | !sync !min/max abs NaN
75 | activemask | b32 |
90 | elect | | !sync
75 | nanosleep | u32 |
75 | bra ret exit call | | uni
75 | brx | | !idx uni
75 | trap brkpt vprintf __assertfail | |
90 | griddepcontrol | | !launch_dependents/wait
80 | cp | | !async !ca/cg !{_SHARED} !global L2::64B/L2::128B/L2::256B
80 | cp | | !async !commit_group/wait_group/wait_all
75 | ldmatrix | b16 | !sync !aligned !m8n8 !x1/x2/x4 trans {_SHARED}
90 | stmatrix | b16 | !sync !aligned !m8n8 !x1/x2/x4 trans {_SHARED}
75 | movmatrix | b16 | !sync !aligned !m8n8 !trans
75 | mma | f32.f16.f16.f32 f16.f16.f16.f16 | {_MMA} !m16n8k8
80 | mma | f32.f16.f16.f32 f16.f16.f16.f16 | {_MMA} !m16n8k16
80 | mma | f32.bf16.bf16.f32 | {_MMA} !m16n8k16/m16n8k8
80 | mma | f32.tf32.tf32.f32 | {_MMA} !m16n8k8/m16n8k4
80 | mma | f64.f64.f64.f64 | {_MMA} !m8n8k4 {_RND}
90 | mma | f64.f64.f64.f64 | {_MMA} !m16n8k4/m16n8k8/m16n8k16 {_RND}
75 | mma | {_INT8} | {_MMA} !m8n8k16 satfinite
80 | mma | {_INT8} | {_MMA} !m16n8k16/m16n8k32 satfinite
75 | mma | {_INT4} | {_MMA} !m8n8k32 satfinite
80 | mma | {_INT4} | {_MMA} !m16n8k32/m16n8k64 satfinite
75 | mma | s32.b1.b1.s32 | {_MMA} !m8n8k128 !xor !popc
80 | mma | s32.b1.b1.s32 | {_MMA} !m8n8k128 !and !popc
80 | mma | s32.b1.b1.s32 | {_MMA} !m16n8k128/m16n8k256 !xor/and !popc
{_NEWLINE.join(_matrix_loads())}
75 | wmma | f32.f32 f16.f16 f32.f16 f16.f32 | {_WMMA} !m16n16k16/m8n32k16/m32n8k16
75 | wmma | s32.s8.s8.s32 s32.u8.u8.s32 | {_WMMA} !m16n16k16/m8n32k16/m32n8k16 satfinite
80 | wmma | f32.bf16.bf16.f32 | {_WMMA} !m16n16k16/m8n32k16/m32n8k16
80 | wmma | f32.tf32.tf32.f32 | {_WMMA} !m16n16k8
80 | wmma | f64.f64.f64.f64 | {_WMMA} !m8n8k4 {_RND}
75 | wmma | s32.s4.s4.s32 s32.u4.u4.s32 | !mma {_MMA} !m8n8k32 satfinite
75 | wmma | s32.b1.b1.s32 | !mma {_MMA} !m8n8k128 !xor !popc
80 | wmma | s32.b1.b1.s32 | !mma {_MMA} !m8n8k128 !and !popc
"""

TYPES = frozenset(
    "pred b1 b8 b16 b32 b64 b128 u4 u8 u16 u32 u64 s4 s8 s16 s32 s64 u16x2 s16x2 f16 bf16 f16x2 bf16x2 tf32 f32 f64 "
    "e4m3x2 e5m2x2".split()
)


@dataclass(frozen=True)
class Line:
    """One line of the table for one opcode: `types` are sequences of suffixes, `groups` triples (modifiers, how many
    there must be at least, at most)."""

    since: int
    opcode: str
    operands: int | None
    types: frozenset
    groups: tuple

    def admits(self, modifiers, operands):
        """Whether an instruction with so many operands is one of this line: its types, and as many modifiers of every
        group as there must be."""
        if tuple(m for m in modifiers if m in TYPES) not in self.types:
            return False
        if self.operands is not None and operands != self.operands:
            return False
        rest = [m for m in modifiers if m not in TYPES]
        taken = 0
        for names, least, most in self.groups:
            count = sum(m in names for m in rest)
            if not least <= count <= most:
                return False
            taken += count
        return taken == len(rest)

    def spellings(self):
        """Every instruction of the line, as (modifiers, types)."""
        choices = []
        for names, least, most in self.groups:
            choices.append([c for n in range(least, most + 1) for c in itertools.product(names, repeat=n)])
        for types in sorted(self.types):
            for chosen in itertools.product(*choices):
                yield tuple(name for one in chosen for name in one), types


def _group(text):
    names = text.lstrip("!")
    least = len(text) - len(names)
    return tuple(names.split("/")), least, max(least, 1)


def _lines():
    found = {}
    for text in _TABLE.strip().splitlines():
        since, opcodes, types, groups = (part.split() for part in text.split("|"))
        types = frozenset(tuple(t.split(".")) for t in types) or frozenset([()])
        groups = tuple(_group(text) for text in groups)
        for opcode in opcodes:
            name, _, operands = opcode.partition(":")
            count = int(operands) if operands else 3 if name in ("min", "max") else None
            found.setdefault(name, []).append(Line(int(since[0]), name, count, types, groups))
    return found


LINES = _lines()


def types_of(instruction):
    """The type suffixes of an instruction, in order."""
    return [m for m in instruction.modifiers if m in TYPES]


def first_architecture(instruction):
    """The compute capability (times 10) that an instruction needs, as far as it matters from sm_75 on; None if the
    simulator does not know the instruction."""
    return _first_architecture(instruction.opcode, instruction.modifiers, len(instruction.operands))


@functools.cache  # of a kernel's thousands of instructions few differ in their spelling
def _first_architecture(opcode, modifiers, operands):
    return min((line.since for line in LINES.get(opcode, ()) if line.admits(modifiers, operands)), default=None)


_SPECIALS = frozenset(
    "laneid warpid nwarpid smid nsmid gridid lanemask_eq lanemask_lt lanemask_le lanemask_ge lanemask_gt "
    "clock clock_hi clock64 globaltimer globaltimer_lo globaltimer_hi dynamic_smem_size total_smem_size "
    "reserved_smem_offset_1 envreg1 envreg2 _".split()
) | {f"{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"}


# Numbers of operands -> the opcodes that take so many; addc, subc and madc have the carry flag as one more.
_COUNTS = {
    (1,): "activemask nanosleep bra",
    (2,): "abs neg not cnot popc clz brev bfind rcp sqrt rsqrt ex2 lg2 sin cos tanh testp mov ld ldu st red cvta "
    "isspacep ldmatrix stmatrix movmatrix elect brx",
    (3,): "add sub mul mul24 div rem copysign and or xor shl shr bmsk set vote match redux",
    (4,): "fma mad mad24 sad bfe fns vabsdiff2 vabsdiff4 shf prmt selp slct dp4a dp2a mma addc subc",
    (5,): "bfi lop3 shfl madc",
    (2, 3): "cvt",
    (3, 4): "setp atom",
}
_OPERANDS = {opcode: counts for counts, opcodes in _COUNTS.items() for opcode in opcodes.split()}


def unknown_operand(operand):
    """The first part of an operand that has no meaning here, or None."""
    if isinstance(operand, Special):
        return None if operand.name in _SPECIALS else f"%{operand.name}"
    if isinstance(operand, Label):
        return operand.name
    if isinstance(operand, Memory):
        operand = operand.address
        if isinstance(operand, tuple):
            return "an operand of textures, surfaces or tensor maps"
    if isinstance(operand, Address):
        return unknown_operand(operand.base)
    if isinstance(operand, Pair):
        operand = (operand.value, operand.predicate)
    if isinstance(operand, tuple):
        return next((u for u in map(unknown_operand, operand) if u is not None), None)
    return None


def _complaint(instruction):
    """Why an instruction is not supported, or None."""
    if first_architecture(instruction) is None:
        return str(instruction)
    named = instruction.operands
    if instruction.opcode in ("bra", "brx"):
        named = named[:-1]
    elif instruction.opcode == "call":
        named = named.passed
    if len(instruction.operands) not in _OPERANDS.get(instruction.opcode, (len(instruction.operands),)):
        return f"{instruction} with {len(instruction.operands)} operands"
    cluster = instruction.opcode == "mbarrier" and "shared::cluster" in instruction.modifiers
    if cluster and isinstance(instruction.operands[0], Register):
        return f"{instruction} with a result"
    if instruction.opcode == "mov" and all(isinstance(o, tuple) for o in instruction.operands):
        return f"{instruction} from vector to vector"
    unknown = unknown_operand(named)
    return None if unknown is None else f"{instruction} with {unknown}"


def check_support(function, name, arch):
    """Raise NotImplementedError, under the kernel's name, with every instruction, one a line, that the simulator does
    not know, or that the architecture does not have."""
    capability = int(arch[3:])
    unknown = [(i, text) for i in function.code if (text := _complaint(i))]
    if unknown:
        lines = [f"  {text} ({i.place})" for i, text in unknown]
        raise NotImplementedError("\n".join([f"{name}: the simulator does not know these instructions:", *lines]))
    since = {i: first_architecture(i) for i in function.code}
    early = [i for i in function.code if since[i] > capability]
    if early:
        lines = [f"  {i} needs sm_{since[i]} ({i.place})" for i in early]
        raise NotImplementedError("\n".join([f"{name}: {arch} does not have these instructions:", *lines]))
