"""mma of integers and of float64: fragments by the ISA, sums against integers and exact fused multiply-adds."""

import itertools

import numpy as np
import pytest

from cupyflash import ptxsim

from . import exact
from .fuzz.compare import launch_ptx
from .launching import poisoned

# (row, column) in A and (k, column) in B of element i of lane 4 g + t, by shape and bits of an element.
A = {
    ("m8n8k16", 8): lambda g, t, i: (g, 4 * t + i),
    ("m16n8k16", 8): lambda g, t, i: (g + 8 * (i >= 4), 4 * t + i % 4),
    ("m16n8k32", 8): lambda g, t, i: (g if i < 4 or 8 <= i < 12 else g + 8, 4 * t + i % 4 + 16 * (i >= 8)),
    ("m8n8k32", 4): lambda g, t, i: (g, 8 * t + i),
    ("m16n8k32", 4): lambda g, t, i: (g + 8 * (i >= 8), 8 * t + i % 8),
    ("m16n8k64", 4): lambda g, t, i: (g if i < 8 or 16 <= i < 24 else g + 8, 8 * t + i % 8 + 32 * (i >= 16)),
    ("m8n8k128", 1): lambda g, t, i: (g, 32 * t + i),
    ("m16n8k128", 1): lambda g, t, i: (g + 8 * (i >= 32), 32 * t + i % 32),
    ("m16n8k256", 1): lambda g, t, i: (g if i < 32 or 64 <= i < 96 else g + 8, 32 * t + i % 32 + 128 * (i >= 64)),
    ("m8n8k4", 64): lambda g, t, i: (g, t),
    ("m16n8k4", 64): lambda g, t, i: (g + 8 * i, t),
    ("m16n8k8", 64): lambda g, t, i: (g + 8 * (i in (1, 3)), t + 4 * (i >= 2)),
    ("m16n8k16", 64): lambda g, t, i: (g, 2 * i + t) if i % 2 == 0 else (g + 8, 2 * i - 2 + t),
}
B = {
    ("m8n8k16", 8): lambda g, t, i: (4 * t + i, g),
    ("m16n8k16", 8): lambda g, t, i: (4 * t + i, g),
    ("m16n8k32", 8): lambda g, t, i: (4 * t + i % 4 + 16 * (i >= 4), g),
    ("m8n8k32", 4): lambda g, t, i: (8 * t + i, g),
    ("m16n8k32", 4): lambda g, t, i: (8 * t + i, g),
    ("m16n8k64", 4): lambda g, t, i: (8 * t + i % 8 + 32 * (i >= 8), g),
    ("m8n8k128", 1): lambda g, t, i: (32 * t + i, g),
    ("m16n8k128", 1): lambda g, t, i: (32 * t + i, g),
    ("m16n8k256", 1): lambda g, t, i: (32 * t + i % 32 + 128 * (i >= 32), g),
    ("m8n8k4", 64): lambda g, t, i: (t, g),
    ("m16n8k4", 64): lambda g, t, i: (t, g),
    ("m16n8k8", 64): lambda g, t, i: (t + 4 * i, g),
    ("m16n8k16", 64): lambda g, t, i: (t + 4 * i, g),
}


def c_position(g, t, i):
    return g + 8 * (i >= 2), 2 * t + i % 2


def places(position, count):
    """Index arrays, (32, count) each, of the elements that lanes hold."""
    found = np.array([[position(lane // 4, lane % 4, i) for i in range(count)] for lane in range(32)])
    return found[..., 0], found[..., 1]


def sizes(shape):
    m, rest = shape[1:].split("n")
    n, k = map(int, rest.split("k"))
    return int(m), n, k


def registers(matrix, position, bits):
    """Matrices (warps, rows, columns) as what lanes hold: (warps, 32, registers) of 32 bits, or of float64."""
    held = np.ascontiguousarray(matrix[(slice(None), *places(position, matrix[0].size // 32))])
    if bits == 64:
        return held
    if bits == 1:
        return np.packbits(held.astype(bool), axis=-1, bitorder="little").view(np.uint32)
    if bits == 4:
        held = (held[..., ::2] & 15) | (held[..., 1::2] & 15) << 4
    return held.astype(np.uint8).view(np.uint32)


def kernel(instructions, counts, bits):
    """PTX of a kernel that loads registers of A, C and a B for each instruction, accumulates, and stores D."""
    kind, size = ("f64", 8) if bits == 64 else ("b32", 4)
    counts = {"a": counts[0], "b": counts[1] * len(instructions), "c": counts[2], "d": counts[2]}
    names = {x: [f"%{x}{n}" for n in range(count)] for x, count in counts.items()}
    lines = [f"ld.param.u64 %at{x}, [{x}]; mad.wide.u32 %at{x}, %t, {size * len(names[x])}, %at{x};" for x in "abcd"]
    for x in "abc":
        lines += [f"ld.global.{kind} {name}, [%at{x}+{size * n}];" for n, name in enumerate(names[x])]
    a, c, d = ("{" + ", ".join(names[x]) + "}" for x in "acd")
    factors = [names["b"][n :: len(instructions)] for n in range(len(instructions))]
    for n, text in enumerate(instructions):
        lines.append(f"{text} {d}, {a}, {{{', '.join(factors[n])}}}, {d if n else c};")
    lines += [f"st.global.{kind} [%atd+{size * n}], {name};" for n, name in enumerate(names["d"])]
    declared = "".join(f".reg .{kind} %{x}<{len(found)}>;" for x, found in names.items())
    parameters = ", ".join(f".param .u64 {x}" for x in "abcd")
    body = "\n".join(lines)
    return f""".version 8.8
.target sm_90
.address_size 64
.visible .entry product({parameters})
{{
{declared} .reg .b32 %t; .reg .b64 %ata, %atb, %atc, %atd;
mov.u32 %t, %tid.x;
{body}
ret;
}}"""


def multiply(shape, types, a, b, c, options="", arch="sm_90"):
    """D = A B + C for each B of (steps, warps, k, n) one after another, by instructions of these types of A and B."""
    bits = int(types[0][1:])
    steps = np.stack([registers(one, B[shape, bits], bits) for one in b], axis=-1)
    fragments = [registers(a, A[shape, bits], bits), steps.reshape(*steps.shape[:2], -1)]
    at = places(c_position, c[0].size // 32)
    fragments.append(np.ascontiguousarray(c[(slice(None), *at)]))
    kept = "f64" if bits == 64 else "s32"
    text = f"mma.sync.aligned.{shape}.row.col{options}.{kept}.{types[0]}.{types[1]}.{kept}"
    out = poisoned(fragments[2].shape, c.dtype)
    counts = fragments[0].shape[2], steps.shape[2], out.shape[2]
    source = kernel([text] * len(b), counts, bits)
    launch_ptx(source, "product", (1,), (32 * len(a),), (*fragments, out), arch=arch)
    result = poisoned(c.shape, c.dtype)
    result[(slice(None), *at)] = out
    return result


def integers(rng, type_, size):
    bits = int(type_[1:])
    low = -(1 << bits - 1) if type_[0] == "s" else 0
    return rng.integers(low, low + (1 << bits), size)


SIGNS = list(itertools.product("su", repeat=2))


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("signs", SIGNS, ids="".join)
@pytest.mark.parametrize("shape, bits", [key for key in A if key[1] in (4, 8)])
def test_products_of_integers(shape, bits, signs, clamp):
    """Two instructions in a row, near both ends of the range, where sums wrap or, each by itself, are clamped."""
    m, n, k = sizes(shape)
    rng = np.random.default_rng(m + k)
    types = [f"{sign}{bits}" for sign in signs]
    a, b = integers(rng, types[0], (2, m, k)), integers(rng, types[1], (2, 2, k, n))
    near = 2**31 - rng.integers(0, 4 << 2 * bits, (2, m, n))
    for c in (rng.integers(-1000, 1000, (2, m, n)), near - 1, -near):
        out = multiply(shape, types, a, b, c.astype(np.int32), ".satfinite" * clamp)
        expected = c
        for one in b:
            expected = expected + a @ one
            expected = np.clip(expected, -(2**31), 2**31 - 1) if clamp else expected
        np.testing.assert_array_equal(out, expected.astype(np.int32))


@pytest.mark.parametrize("operation", ["xor", "and"])
@pytest.mark.parametrize("shape", [shape for shape, bits in A if bits == 1])
def test_counts_of_bits(shape, operation):
    """Of a row of A and a column of B, the bits that differ or that both have."""
    m, n, k = sizes(shape)
    rng = np.random.default_rng(k)
    a, b = (rng.integers(0, 2, size).astype(bool) for size in ((2, m, k), (2, 2, k, n)))
    c = rng.integers(-(2**31), 2**31, (2, m, n))
    out = multiply(shape, ("b1", "b1"), a, b, c.astype(np.int32), f".{operation}.popc")
    pairs = np.bitwise_xor if operation == "xor" else np.bitwise_and
    counts = sum(pairs(a[:, :, :, None], one[:, None]).sum(2) for one in b)
    np.testing.assert_array_equal(out, (c + counts).astype(np.int32))


@pytest.mark.parametrize(
    "shape, rounding",
    [
        *((shape, "") for shape, bits in A if bits == 64),
        *(("m8n8k4", rounding) for rounding in ("rn", "rz", "rm", "rp")),
        ("m16n8k8", "rp"),
    ],
)
def test_products_of_float64(shape, rounding):
    """Fused multiply-adds one after another, k ascending; infinities and NaN as these make them."""
    m, n, k = sizes(shape)
    rng = np.random.default_rng(k)
    a, b, c = (rng.normal(size=s) * 2.0 ** rng.integers(-30, 30, s) for s in ((2, m, k), (2, 2, k, n), (2, m, n)))
    a[0, 3, 1], b[0, 0, 2, 5], c[1, 0, 0] = np.inf, np.nan, -np.inf
    options = f".{rounding}" if rounding else ""
    out = multiply(shape, ("f64", "f64"), a, b, c, options)
    expected = c.copy()
    for one in b:
        for w, i, j in np.ndindex(c.shape):
            for s in range(k):
                terms = float(a[w, i, s]), float(one[w, s, j]), float(expected[w, i, j])
                expected[w, i, j] = exact.fma(*terms, exact.F64, (rounding or "rn")[1])
    np.testing.assert_array_equal(out, expected)


def test_products_of_different_heights_that_share_b():
    """m8n8k16 and m16n8k16 take the same registers of B, and must not become one product."""
    rng = np.random.default_rng(1)
    a, b = integers(rng, "s8", (1, 16, 16)), integers(rng, "s8", (1, 16, 8))
    tall, low = registers(a, A["m16n8k16", 8], 8), registers(b, B["m16n8k16", 8], 8)
    text = kernel(["mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32"], (2, 1, 4), 8)
    more = "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%c0, %c1}, {%a1}, {%b0}, {%c0, %c1};\n"
    more += "add.s32 %d2, %d2, %c0; add.s32 %d3, %d3, %c1;\n"
    text = text.replace("st.global.b32 [%atd+0]", more + "st.global.b32 [%atd+0]")
    out = poisoned((32, 4), np.int32)
    launch_ptx(text, "product", (1,), (32,), (tall, low, np.zeros((32, 4), np.int32), out), arch="sm_80")
    expected = a[0] @ b[0] * np.array([1] * 8 + [2] * 8)[:, None]
    np.testing.assert_array_equal(out, expected[places(c_position, 4)])


@pytest.mark.parametrize(
    "shape, types, arch",
    [("m16n8k32", ("s8", "s8"), "sm_75"), ("m8n8k4", ("f64", "f64"), "sm_75"), ("m16n8k4", ("f64", "f64"), "sm_80")],
)
def test_older_architectures_have_fewer_shapes(shape, types, arch):
    m, n, k = sizes(shape)
    kept = np.float64 if types[0] == "f64" else np.int32
    a, b, c = (np.ones((1, *s), kept) for s in ((m, k), (k, n), (m, n)))
    with pytest.raises(NotImplementedError, match=r"needs sm_\d+"):
        multiply(shape, types, a, b[None], c, arch=arch)


def test_undefined_operands_make_their_row_and_column_undefined():
    """Under the sanitizer a row of the results follows its row of A, for tiles of 8 rows too."""
    a, b, c = np.ones((1, 8, 16), np.int64), np.ones((1, 16, 8), np.int64), np.zeros((1, 8, 8), np.int32)
    fragments = [registers(a, A["m8n8k16", 8], 8), registers(b, B["m8n8k16", 8], 8), c.reshape(1, 32, 2)]
    text = kernel(["mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32"], (1, 1, 2), 8)
    skipping = text.replace("ld.global.b32 %a0", "setp.ne.u32 %p, %t, 13;\n@%p ld.global.b32 %a0")
    skipping = skipping.replace(".reg .b32 %t;", ".reg .b32 %t; .reg .pred %p;")
    for source, expected in ((text, []), (skipping, [4, 4])):  # the four lanes of row 3, in both of their stores
        out = poisoned((32, 2), np.int32)
        with ptxsim.sanitize() as report:
            launch_ptx(source, "product", (1,), (32,), (*fragments, out))
        assert [f.count for f in report.findings] == expected, str(report)
