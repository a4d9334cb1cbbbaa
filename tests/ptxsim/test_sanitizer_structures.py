"""Padding, bit-fields and other words that are written in part are no fault; data in them that is missing is found."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .sanitized import check, findings

MEMBERS = {
    "an end": "double a; int b;",
    "a long end": "long long a; char b;",
    "a gap and an end": "char a; double b; int c;",
    "three of four": "float a, b, c;",
    "a list": "short a; int b[5]; double c;",
}
COPIES = {
    "=": "out[t] = box[63 - t];",
    "memcpy": "memcpy(out + t, box + 63 - t, sizeof(Item));",
    "words": "for (int k = 0; k < sizeof(Item) / 4; ++k) ((unsigned*)(out + t))[k] = ((unsigned*)(box + 63 - t))[k];",
    "on a condition": "Item item = box[63 - t]; if (t != n + 99) out[t] = item;",
    "chosen": "Item item = box[63 - t]; if (n > 5) item = box[t]; out[t] = item;",
    "changed": "Item item = box[63 - t]; item.a += 1; out[t] = item;",
    "shuffled": """
      Item mine = box[63 - t], item;
      for (int k = 0; k < sizeof(Item) / 4; ++k) ((int*)&item)[k] = __shfl_xor_sync(~0u, ((int*)&mine)[k], 1);
      out[t] = item;""",
    "generic": "Item* where = n < 999 ? out : box; where[t] = box[63 - t];",
}


def structure(members, copy, memory="__shared__ Item box[64];"):
    names = {"double a; int b;": "ab", "long long a; char b;": "ab", "short a; int b[5]; double c;": "ac"}
    fields = "".join(f" box[i].{name} = t;" for name in names.get(members, "abc"))
    return f"""
    struct __align__(sizeof({members.split()[0]}) == 4 ? 16 : 8) Item {{ {members} }};
    extern "C" __global__ void structure(Item* out, int n) {{
      {memory}
      int t = threadIdx.x;
      for (int i = t; i < n; i += 64) {{{fields} }}
      __syncthreads();
      {copy}  // fault
    }}"""


def outcome(source, n):
    return findings(source, 1, 64, np.zeros((64, 6), np.float64), np.int32(n))


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_padding_of_structures(members, copy):
    assert not outcome(structure(members, copy), 64)


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
@pytest.mark.parametrize("copy", [COPIES[name] for name in ("=", "words", "on a condition", "changed", "generic")])
def test_a_structure_that_nobody_has_written(members, copy):
    found = outcome(source := structure(members, copy), 60)
    found = check(found, source, "uninitialised shared memory")
    apart = copy == COPIES["changed"] and members in (MEMBERS["a gap and an end"], MEMBERS["a list"])
    assert found.count == (8 if apart else 4) or copy == COPIES["words"]  # apart: a gap is between two copies


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_a_structure_in_local_memory(members):
    memory, copy = "Item box[70];", "out[t] = box[t + 64 * (n / 100)];"
    source = structure(members, copy, memory).replace("i = t; i < n; i += 64", "i = 0; i < n % 100; ++i")
    assert not outcome(source, 64)
    assert check(outcome(source, 60), source, "uninitialised local memory").count == 4


def test_padding_in_code_that_is_not_optimised():
    """The address of each store is worked out anew."""
    source = structure(MEMBERS["a long end"], COPIES["="])
    with ptxsim.sanitize() as report:
        kernel = ptxsim.RawModule(code=source, options=("-G",)).get_function("structure")
        kernel((1,), (64,), (np.zeros((64, 2)), np.int32(64)))
        assert not report, str(report)
        kernel((1,), (64,), (np.zeros((64, 2)), np.int32(60)))
    assert check(report.findings, source, "uninitialised shared memory").count == 4


def test_a_member_that_is_missing_is_found_where_it_is_used():
    """Also if it has gone through global memory meanwhile; what is computed with is used at once."""
    source = """
    struct Item { double a; int b, c; };
    extern "C" __global__ void missing(Item* out, int* sums, int n) {
      __shared__ Item box[32];
      int t = threadIdx.x;
      box[t].a = 1; box[t].b = 2;
      if (t < n) box[t].c = 3;
      __syncwarp();
      out[t] = box[31 - t];  // fault
      __syncwarp();
      sums[t] = SUM;  // use
    }"""

    def run(sum_, n):
        out = ptxsim.empty((32, 2), np.float64)
        return findings(source.replace("SUM", sum_), 1, 32, out, np.zeros(32, np.int32), np.int32(n))

    for part in ("out[t].b + 1", "(int)out[t].a"):
        assert not run(part, 30)
    assert check(run("out[31 - t].c + 1", 30), source, "uninitialised shared memory", other="use").count == 2
    assert not run("out[31 - t].c + 1", 32)


SINGLE = {
    "a float": "float",
    "a double": "double",
    "bytes": "unsigned char",
    "a pair": "float2",
    "an aligned vector": "float4",
}


@pytest.mark.parametrize("type_", SINGLE.values(), ids=SINGLE)
def test_copies_of_data(type_):
    """A copy is a use of what is no part of a structure, and of a structure that is undefined altogether."""
    source = f"""
    extern "C" __global__ void data({type_}* out, const {type_}* x, int n) {{
      __shared__ {type_} box[64];
      int t = threadIdx.x;
      if (t < n) box[t] = x[t];
      __syncthreads();
      out[t] = box[63 - t];  // fault
    }}"""
    x = np.zeros((64, 4))
    assert not findings(source, 1, 64, np.zeros((64, 4)), x, np.int32(64))
    found = findings(source, 1, 64, np.zeros((64, 4)), x, np.int32(60))
    assert check(found, source, "uninitialised shared memory").count == 4


def test_undefined_results_beside_each_other():
    """Computed ones are used each for itself, whatever their neighbours."""
    source = """
    extern "C" __global__ void beside(float4* out, int n) {
      __shared__ float box[32];
      int t = threadIdx.x;
      if (t < n) box[t] = t;
      __syncwarp();
      float v = box[31 - t];  // fault
      out[t] = make_float4(t, 1, 2 * v, 3);  // use
    }"""
    out = np.zeros((32, 4), np.float32)
    assert not findings(source, 1, 32, out, np.int32(32))
    found = findings(source, 1, 32, out, np.int32(20))
    assert check(found, source, "uninitialised shared memory", other="use").count == 12


def test_a_computed_structure_is_found_once():
    """What has been reported is not followed further, unlike padding."""
    source = """
    extern "C" __global__ void once(float2* out, float* sums, int n) {
      __shared__ float box[32];
      int t = threadIdx.x;
      if (t < n) box[t] = t;
      __syncwarp();
      float v = 2 * box[31 - t];  // fault
      out[t] = make_float2(v, v + 1);  // use
      __syncwarp();
      sums[t] = out[31 - t].x;
    }"""
    found = findings(source, 1, 32, ptxsim.empty((32, 2), np.float32), np.zeros(32, np.float32), np.int32(30))
    assert check(found, source, "uninitialised shared memory", other="use").count == 4


def test_copies_of_one_line_to_different_places():
    source = """
    extern "C" __global__ void apart(float* out, const float* x, int n) {
      __shared__ float box[32];
      int t = threadIdx.x;
      if (t < n) box[t] = t;
      __syncwarp();
      out[t] = box[31 - t], out[t + 64] = x[t];  // fault
    }"""
    x = np.zeros(32, np.float32)
    assert not findings(source, 1, 32, np.zeros(96, np.float32), x, np.int32(32))
    found = findings(source, 1, 32, np.zeros(96, np.float32), x, np.int32(30))
    assert check(found, source, "uninitialised shared memory").count == 2


# -- words of which some bits are written ------------------------------------------------------------------
FIELDS = {
    "bit-fields": "box[t].a = t; box[t].b = t + 1; box[t].c = t + 2;",
    "one by one": """
      box[t].c = t + 2; asm volatile("" ::: "memory");
      box[t].a = t; asm volatile("" ::: "memory"); box[t].b = t + 1;""",
    "in another order": "if (n) box[t].c = t + 2; box[t].b = t + 1; if (n) box[t].a = t;",
}


@pytest.mark.parametrize("memory", ["__shared__ Fields box[64]", "Fields box[64]"], ids=["shared", "local"])
@pytest.mark.parametrize("set_", FIELDS.values(), ids=FIELDS)
def test_bit_fields(set_, memory):
    source = f"""
    struct Fields {{ unsigned a : 3, b : 5, c : 12; }};
    extern "C" __global__ void fields(unsigned* out, int n) {{
      {memory};
      int t = threadIdx.x;
      if (t < n) {{ {set_} }}
      __syncthreads();
      out[t] = box[t % n].a + 8 * box[t % n].b + 256 * box[t % n].c;  // fault
    }}"""
    local = memory.startswith("Fields")
    source = source.replace("t % n]", "t + n / 1000]") if local else source
    out = np.zeros(64, np.uint32)
    assert not findings(source, 1, 64, out, np.int32(64))
    if not local:
        assert (
            out == sum((np.arange(64) + k) % size * place for k, size, place in ((0, 8, 1), (1, 32, 8), (2, 4096, 256)))
        ).all()
        source = source.replace("t % n", "t % 64")
    assert {f.kind for f in findings(source, 1, 64, out, np.int32(60))} == {
        f"uninitialised {'local' if local else 'shared'} memory"
    }


PARTS = {
    "the low byte": ("box[t] = box[t] & ~0xffu | t;", "box[31 - t] & 0xff"),
    "the high byte": ("box[t] = box[t] & 0xffffff | t << 24;", "box[31 - t] >> 24"),
    "shifted in": ("for (int k = 0; k < n; ++k) box[t] = box[t] << 8 | t;", "box[31 - t]"),
    "a merge by xor": (
        'unsigned r; asm volatile("{ .reg .u32 a, b; xor.b32 a, %1, %2; and.b32 b, a, %3; xor.b32 %0, b, %2; }"'
        ' : "=r"(r) : "r"(box[t]), "r"(t), "r"(x[t])); box[t] = r;',
        "box[31 - t] & ~x[31 - t]",
    ),
    "a funnel shift": ("box[t] = __funnelshift_l(box[t], t, 8);", "box[31 - t] >> 8"),
    "a masked merge": ("box[t] = box[t] & ~x[t] | t & x[t];", "box[31 - t] & x[31 - t]"),
    "bfi": (
        'asm volatile("{ .reg .u32 r; ld.shared.u32 r, [%0]; bfi.b32 r, %1, r, 8, 8; st.shared.u32 [%0], r; }"'
        ' :: "r"((unsigned)__cvta_generic_to_shared(box + t)), "r"(t) : "memory");',
        "box[31 - t] >> 8 & 0xff",
    ),
    "prmt": ("box[t] = __byte_perm(box[t], t, 0x3240);", "box[31 - t] >> 8 & 0xff"),
    "lop3": (
        'unsigned r; asm volatile("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(x[t]), "r"(t), "r"(box[t]));'
        "box[t] = r;",
        "box[31 - t] & x[31 - t]",
    ),
    "nothing of it": ("", "box[31 - t] & (x[t] - 0xff00)"),
}


def parts(set_, get):
    return f"""
    extern "C" __global__ void parts(unsigned* out, const unsigned* x, int n) {{
      __shared__ unsigned box[32];
      int t = threadIdx.x;
      if (t < n) {{ {set_} }}
      __syncwarp();
      out[t] = {get};  // fault
    }}"""


@pytest.mark.parametrize("set_, get", PARTS.values(), ids=PARTS)
def test_words_that_are_written_in_part(set_, get):
    x = np.full(32, 0xFF00, np.uint32)
    assert not findings(parts(set_, get), 1, 32, np.zeros(32, np.uint32), x, np.int32(32))


@pytest.mark.parametrize("set_, get", [PARTS[name] for name in PARTS if name != "nothing of it"])
def test_words_that_are_not_written(set_, get):
    source = parts(set_, get)
    found = findings(source, 1, 32, np.zeros(32, np.uint32), np.full(32, 0xFF00, np.uint32), np.int32(30))
    assert check(found, source, "uninitialised shared memory").count == 2


@pytest.mark.parametrize(
    "get",
    ["box[t] & 0xff", "box[t] & x[t]", "box[t] | x[t]", "box[t] ^ x[t]", "box[t] << 3", "box[t] >> x[0] % 7",
     "__byte_perm(box[t], x[t], 0x0123)", "__byte_perm(x[t], box[t], 0x6745)",
     "__funnelshift_l(box[t], box[t], 7)", "__brev(box[t])"],
)  # fmt: skip
def test_bits_of_words_that_are_not_written(get):
    source = parts("box[t] = t;", get)
    x = np.full(32, 0xFF00, np.uint32)
    assert not findings(source, 1, 32, np.zeros(32, np.uint32), x, np.int32(32))
    found = findings(source, 1, 32, np.zeros(32, np.uint32), x, np.int32(20))
    assert check(found, source, "uninitialised shared memory").count == 12


@pytest.mark.parametrize("table, depends", [(0x96, "xyz"), (0xCA, ""), (0xF0, "x"), (0xAA, "z"), (0xC0, "")])
def test_which_operands_of_lop3_matter(table, depends):
    """0x96: the exclusive or of all; 0xca: x ? y : z, bit by bit; 0xf0: x; 0xaa: z; 0xc0: x and y. One that others
    may mask away counts as masked away."""
    for name in "xyz":
        operands = ", ".join(f'"r"({"v" if operand == name else "t + 1"})' for operand in "xyz")
        code = f'unsigned r; asm volatile("lop3.b32 %0, %1, %2, %3, {table};" : "=r"(r) : {operands}); box[t] = r;'
        source = parts("unsigned v = box[t];  // fault\n" + code, "box[31 - t]").replace(
            "box[31 - t];  // fault", "box[31 - t];"
        )
        found = findings(source, 1, 32, np.zeros(32, np.uint32), np.zeros(32, np.uint32), np.int32(32))
        assert bool(found) == (name in depends), name


def test_lop3_of_undefined_operands_only():
    """x and y; that z is defined makes no difference."""
    code = 'unsigned r; asm volatile("lop3.b32 %0, %1, %1, %2, 0xc0;" : "=r"(r) : "r"(box[t]), "r"(t)); box[t] = r;'
    found = findings(parts(code, "box[31 - t]"), 1, 32, np.zeros(32, np.uint32), np.zeros(32, np.uint32), np.int32(32))
    (finding,) = found
    assert finding.kind == "uninitialised shared memory" and finding.count == 32
