"""Which PTX instructions the simulator knows, with their types and modifiers.

A line is: opcodes | types | optional modifiers | modifiers that must be there. Modifiers are a set:
their order varies between compilers. An instruction is supported if some line admits it.
"""

_INT = "u16 s16 u32 s32 u64 s64"
_BITS = "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64 f16 bf16 f16x2 bf16x2"
_SHARED = "shared shared::cta"
_ORDER = "relaxed acquire release acq_rel cta cluster gpu sys"
_CACHE = (
    f"v2 v4 v8 volatile weak mmio {_ORDER} ca cg cs cv lu wb wt nc L1::no_allocate L1::evict_last L1::evict_first "
    "L1::evict_normal L1::evict_unchanged L2::64B L2::128B L2::256B"
)
_HALF = "f16 f16x2 bf16 bf16x2"
_COMPARE = "eq ne lt le gt ge lo ls hi hs equ neu ltu leu gtu geu num nan"

_TABLE = f"""
add sub | {_INT} | |
add sub | s32 | sat |
add sub mul | f32 | rn rz rm rp ftz sat |
add sub mul | f64 | rn rz rm rp |
add sub mul | {_HALF} | rn ftz sat |
add sub addc subc | u32 s32 u64 s64 | cc |
mad madc | u32 s32 u64 s64 | lo hi cc |
mul | {_INT} | lo hi wide |
mad | {_INT} | lo hi wide |
mad | f32 | rn rz rm rp ftz sat |
mad | f64 | rn rz rm rp |
mul24 mad24 | u32 s32 | lo hi |
fma | f32 | rn rz rm rp ftz sat |
fma | f64 | rn rz rm rp |
fma | {_HALF} | rn ftz sat relu |
div rem | {_INT} | |
div | f32 | approx full rn rz rm rp ftz |
div | f64 | rn rz rm rp |
rcp sqrt | f32 | approx rn rz rm rp ftz |
rcp sqrt | f64 | rn rz rm rp approx ftz |
rsqrt | f32 f64 | approx ftz |
ex2 lg2 sin cos tanh | f32 | approx ftz |
ex2 tanh | {_HALF} | approx ftz |
abs neg | s16 s32 s64 | |
abs neg | f32 f64 {_HALF} | ftz |
min max | {_INT} | |
min max | f32 f64 {_HALF} | ftz NaN xorsign abs |
copysign | f32 f64 | |
testp | f32 f64 | finite infinite number notanumber normal subnormal |
sad | {_INT} | |
dp4a | u32 s32 | |
popc clz brev | b32 b64 | |
bfind | u32 s32 u64 s64 | shiftamt |
bfe | u32 s32 u64 s64 | |
bfi | b32 b64 | |
bmsk | b32 | clamp wrap |
and or xor not cnot | pred b16 b32 b64 | |
shl | b16 b32 b64 | |
shr | b16 b32 b64 u16 u32 u64 s16 s32 s64 | |
shf | b32 | l r clamp wrap |
prmt | b32 | f4e b4e rc8 ecl ecr rc16 |
lop3 | b32 | |
setp | b16 b32 b64 {_INT} f32 f64 f16 bf16 | {_COMPARE} and or xor ftz |
set | b16 b32 b64 u32 s32 f32 f64 u16 s16 u64 s64 | {_COMPARE} ftz |
selp | {_BITS} | |
slct | {_BITS} | ftz |
mov | pred {_BITS} | |
cvt | u8 s8 u16 s16 u32 s32 u64 s64 f16 bf16 f32 f64 | rn rz rm rp rni rzi rmi rpi ftz sat relu satfinite |
cvt | f16x2 bf16x2 f32 | rn rz relu satfinite |
cvt | tf32 f32 | rna rn rz relu satfinite |
cvta | u32 u64 | to global {_SHARED} local const param |
isspacep | | global {_SHARED} local const param |
ld ldu | {_BITS} | global {_SHARED} local param const {_CACHE} |
st | {_BITS} | global {_SHARED} local param {_CACHE} |
prefetch prefetchu discard applypriority | | global local L1 L2 L2::evict_last L2::evict_normal L2::128B tensormap |
atom red | u32 s32 u64 s64 b32 b64 b16 | global {_SHARED} add min max inc dec and or xor exch cas {_ORDER} |
atom red | f32 f64 f16 f16x2 bf16 bf16x2 | global {_SHARED} add noftz {_ORDER} |
membar fence | | gl sc proxy alias async global shared::cta {_ORDER} |
bar barrier | | sync aligned arrive cta |
bar barrier | pred u32 | red aligned popc and or cta | red
bar | | warp sync |
shfl | b32 | sync up down bfly idx |
vote | pred b32 | sync all any uni ballot |
match | b32 b64 | sync any all |
redux | u32 s32 b32 | sync add min max and or xor |
activemask | b32 | |
elect | | sync |
nanosleep | u32 | |
bra brx | | uni idx |
ret exit trap brkpt | | uni |
vprintf | | |
griddepcontrol | | launch_dependents wait |
cp | | async ca cg shared shared::cta global L2::64B L2::128B L2::256B | async
cp | | async commit_group wait_group wait_all | async
ldmatrix | b16 | sync aligned m8n8 x1 x2 x4 trans shared shared::cta |
stmatrix | b16 | sync aligned m8n8 x1 x2 x4 trans shared shared::cta |
movmatrix | b16 | sync aligned m8n8 trans |
mma | f32 f16 | sync aligned m16n8k16 m16n8k8 row col | m16n8k16
mma | f32 f16 bf16 | sync aligned m16n8k16 m16n8k8 row col |
"""

TYPES = frozenset(
    "pred b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f16x2 bf16x2 f32 f64 tf32 e4m3x2 e5m2x2 b128".split()
)


def _parse_table():
    forms = {}
    for line in _TABLE.strip().splitlines():
        opcodes, types, optional, required = (part.split() for part in line.split("|"))
        for opcode in opcodes:
            forms.setdefault(opcode, []).append(
                (frozenset(types) | frozenset(optional) | frozenset(required), frozenset(required))
            )
    return forms


_FORMS = _parse_table()


def types_of(instruction):
    """The type suffixes of an instruction, in order."""
    return [m for m in instruction.modifiers if m in TYPES]


def supported(instruction):
    """Whether the table admits an instruction with all its modifiers."""
    modifiers = frozenset(instruction.modifiers)
    if instruction.opcode == "mma" and instruction.modifiers[-1] == "f16":  # float16 accumulators
        return False
    return any(
        modifiers <= allowed and required <= modifiers for allowed, required in _FORMS.get(instruction.opcode, ())
    )


# (since, opcodes, modifiers of which one must be there): the first architecture that has them.
_SINCE = (
    (75, {"tanh"}, None),
    (80, {"cp"}, {"async"}),
    (80, {"redux"}, None),
    (80, {"mma"}, {"m16n8k16", "bf16"}),
    (80, {"fma", "cvt", "min", "max", "neg", "abs"}, {"bf16", "bf16x2"}),
    (80, {"cvt"}, {"f16x2", "tf32", "relu"}),
    (80, {"min", "max"}, {"f16", "f16x2", "NaN"}),
    (86, {"min", "max"}, {"xorsign"}),
    (90, {"stmatrix", "elect", "griddepcontrol"}, None),
    (90, {"add", "sub", "mul", "ex2", "tanh", "setp", "atom", "red"}, {"bf16", "bf16x2"}),
)


def first_architecture(instruction):
    """The compute capability (times 10) that an instruction needs, as far as it matters from sm_75 on."""
    modifiers = set(instruction.modifiers)
    rules = (rule for rule in _SINCE if instruction.opcode in rule[1])
    return max((since for since, _, some in rules if not some or some & modifiers), default=70)


def check_support(function, arch):
    """Raise NotImplementedError with every instruction of a kernel, one a line, that the simulator does
    not know, or that the architecture does not have."""
    capability = int(arch[3:])
    early = [i for i in function.code if first_architecture(i) > capability]
    if early:
        lines = [f"  {i} needs sm_{first_architecture(i)} (PTX line {i.line}, {i.where})" for i in early]
        raise NotImplementedError("\n".join([f"{function.name}: {arch} does not have these instructions:", *lines]))
    unknown = [instruction for instruction in function.code if not supported(instruction)]
    if unknown:
        lines = [f"  {i} (PTX line {i.line}{', ' + i.where if i.source else ''})" for i in unknown]
        raise NotImplementedError(
            "\n".join([f"{function.name}: the simulator does not know these instructions:", *lines])
        )
