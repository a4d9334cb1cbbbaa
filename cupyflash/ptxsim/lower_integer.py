"""How integer, logic, comparison and move instructions are written in NumPy.

A lowering is `f(t, i, types)`: t the BlockTranslator, i the Instruction, types its type suffixes.
"""

from .syntax import SINK, Literal, Pair

_UFUNC = {
    "add": "np_add",
    "sub": "np_subtract",
    "and": "np_bitwise_and",
    "or": "np_bitwise_or",
    "xor": "np_bitwise_xor",
    "min": "np_minimum",
    "max": "np_maximum",
}
_PAIRS = {"u16x2": "u2", "s16x2": "i2"}  # types of two integers in one word -> the dtype of each
_UNSIGNED = {"s8": "u8", "s16": "u16", "s32": "u32", "s64": "u64"}


def seen(type_):
    """The dtype of a value of an integer type."""
    return {"s": "i", "u": "u", "b": "u"}[type_[0]] + str(int(type_[1:]) // 8) if type_ != "pred" else "?"


def call(t, function, arguments, type_, kind=None):
    """A local for `function` of operands, all of one type."""
    names = [t.use(a, type_) for a in arguments]
    if function.startswith("np_"):
        names = t.broadcast(*names)
    return t.let(f"{function}({', '.join(names)})", kind or seen(type_))


def wrapping(t, i, types):
    """Operations whose bits do not depend on signedness."""
    d, a, b = i.operands
    (type_,) = types
    if "sat" in i.modifiers:
        t.define(d, call(t, f"{i.opcode}_sat", (a, b), type_), type_)
        return
    if "cc" in i.modifiers:
        with_carry(t, i, types)
        return
    plain = _UNSIGNED.get(type_, type_)
    t.define(d, call(t, _UFUNC[i.opcode], (a, b), plain), plain)


def extreme(t, i, types):
    """min and max; with .relu of two negative numbers 0."""
    d, a, b = i.operands
    (type_,) = types
    value = call(t, _UFUNC[i.opcode], (a, b), type_)
    if "relu" in i.modifiers:
        value = t.let(f"np_maximum({value}, 0)", seen(type_))
    t.define(d, value, type_)


def or_in_halves(lower):
    """`lower`, and of types of two integers the same of each."""

    def either(t, i, types):
        if types[0] not in _PAIRS:
            lower(t, i, types)
            return
        d, a, b = i.operands
        operands = f"{t.use(a, 'b32')}, {t.use(b, 'b32')}"
        text = f"in_halves({_UFUNC[i.opcode]}, {operands}, '{_PAIRS[types[0]]}', {'relu' in i.modifiers})"
        t.define(d, t.let(text, "u4"), "b32")

    return either


def with_carry(t, i, types):
    """add.cc, addc, sub.cc, subc, mad.cc, madc: the flag is `d|flag` where written, the last operand where read."""
    d, a, b, *rest = i.operands
    type_ = _UNSIGNED.get(types[0], types[0])
    carry = t.use(rest.pop(), "pred") if i.opcode.endswith("c") else "None"
    if rest:
        function = "mul_hi" if "hi" in i.modifiers else "np_multiply"
        a, b = t.cast(call(t, function, (a, b), types[0]), seen(type_)), rest[0]
    else:
        a = t.use(a, type_)
    function = "sub_carry" if i.opcode.startswith("sub") else "add_carry"
    both = t.let(f"{function}({a}, {t.use(b, type_)}, {carry})", seen(type_))
    value, flag = (d.value, d.predicate) if isinstance(d, Pair) else (d, SINK)
    t.define(value, t.let(f"{both}[0]", seen(type_)), type_)
    t.define(flag, t.let(f"{both}[1]", "?"), "pred")


def mul(t, i, types):
    d, a, b = i.operands
    (type_,) = types
    _multiply(t, i, type_, d, a, b, None)


def mad(t, i, types):
    d, a, b, c = i.operands
    (type_,) = types
    if "cc" in i.modifiers:
        with_carry(t, i, types)
        return
    _multiply(t, i, type_, d, a, b, c)


def _multiply(t, i, type_, d, a, b, c):
    if "wide" in i.modifiers:
        result = f"{type_[0]}{2 * int(type_[1:])}"
        value = call(t, "mul_wide", (a, b), type_, seen(result))
    elif "hi" in i.modifiers:
        result, value = type_, call(t, "mul_hi", (a, b), type_)
    else:
        result = type_ = _UNSIGNED.get(type_, type_)
        value = call(t, "np_multiply", (a, b), type_)
    if c is not None:
        value = t.let("np_add({}, {})".format(*t.broadcast(value, t.use(c, result))), seen(result))
    t.define(d, value, result)


def mul24(t, i, types):
    d, a, b, *c = i.operands
    (type_,) = types
    value = t.let(f"mul24({t.use(a, type_)}, {t.use(b, type_)}, {'hi' in i.modifiers})", seen(type_))
    if c:
        value = t.let(f"np_add({value}, {t.use(c[0], type_)})", seen(type_))
    t.define(d, value, type_)


def same_type(function):
    """All operands and the result have the instruction's type."""

    def lower(t, i, types):
        d, *arguments = i.operands
        t.define(d, call(t, function, arguments, types[0]), types[0])

    return lower


def negate(t, i, types):
    type_ = _UNSIGNED.get(types[0], types[0])
    t.define(i.operands[0], call(t, "np_negative", i.operands[1:], type_), type_)


def not_(t, i, types):
    function = "logical_not" if types[0] == "pred" else "np_invert"
    t.define(i.operands[0], call(t, function, i.operands[1:], types[0]), types[0])


def cnot(t, i, types):
    value = t.let(f"({t.use(i.operands[1], types[0])} == 0).astype('{seen(types[0])}')", seen(types[0]))
    t.define(i.operands[0], value, types[0])


def shift(t, i, types):
    d, a, n = i.operands
    if isinstance(n, Literal) and 0 <= n.value < t.width(types[0]):
        function = "np_left_shift" if i.opcode == "shl" else "np_right_shift"
        t.define(d, call(t, function, (a, n), types[0]), types[0])
    else:
        t.define(d, t.let(f"{i.opcode}({t.use(a, types[0])}, {t.use(n, 'u32')})", seen(types[0])), types[0])


def to_u32(function):
    """A count or a position, whatever the operand's width."""

    def lower(t, i, types):
        extra = ", True" if "shiftamt" in i.modifiers else ""
        t.define(i.operands[0], t.let(f"{function}({t.use(i.operands[1], types[0])}{extra})", "u4"), "u32")

    return lower


def bit_field(t, i, types):
    d, *values, position, length = i.operands
    text = ", ".join([*(t.use(v, types[0]) for v in values), t.use(position, "u32"), t.use(length, "u32")])
    t.define(d, t.let(f"{i.opcode}({text})", seen(types[0])), types[0])


def bmsk(t, i, types):
    d, a, b = i.operands
    t.define(d, t.let(f"bmsk({t.use(a, 'u32')}, {t.use(b, 'u32')}, {'clamp' in i.modifiers})", "u4"), "u32")


def fns(t, i, types):
    d, mask, base, offset = i.operands
    t.define(d, t.let(f"fns({t.use(mask, 'u32')}, {t.use(base, 'u32')}, {t.use(offset, 's32')})", "u4"), "u32")


def absolute_differences(t, i, types):
    """vabsdiff2 and vabsdiff4, of all parts: without .add the last operand has no part in it."""
    d, a, b, c = i.operands
    total = t.use(c, "u32") if "add" in i.modifiers else None
    value = t.let(f"absolute_differences({t.use(a, 'u32')}, {t.use(b, 'u32')}, {i.opcode[-1]}, {total})", "u4")
    t.define(d, value, "u32")


def shf(t, i, types):
    d, *abc = i.operands
    text = ", ".join(t.use(o, "u32") for o in abc)
    t.define(d, t.let(f"shf({text}, {'l' in i.modifiers}, {'clamp' in i.modifiers})", "u4"), "u32")


def prmt(t, i, types):
    d, *abc = i.operands
    mode = next((m for m in i.modifiers if m != "b32"), None)
    t.define(d, t.let(f"prmt({', '.join(t.use(o, 'u32') for o in abc)}, {mode!r})", "u4"), "u32")


def lop3(t, i, types):
    d, *abc, table = i.operands
    t.define(d, t.let(f"lop3({', '.join(t.use(o, 'u32') for o in abc)}, {table.value})", "u4"), "u32")


def dp4a(t, i, types):
    d, a, b, c = i.operands
    value = t.let(f"dp4a({t.use(a, types[0])}, {t.use(b, types[1])}, {t.use(c, 'u32')})", "i4")
    t.define(d, value, "s32")


def dp2a(t, i, types):
    d, a, b, c = i.operands
    high = "hi" in i.modifiers
    value = t.let(f"dp2a({t.use(a, types[0])}, {t.use(b, types[1])}, {t.use(c, 'u32')}, {high})", "i4")
    t.define(d, value, "s32")


# -- predicates and selection ----------------------------------------------------------------------------
_COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
_UNORDERED = {"equ": "ne_ordered", "neu": None, "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_FLOATS = {"f16", "bf16", "f16x2", "bf16x2", "f32", "f64"}
_HALF_ONE = {"f16": 0x3C00, "bf16": 0x3F80}


def comparison(t, i, type_, a, b):
    """A local of bools for `a OP b`: (lanes, 2) for pairs of 16-bit floats."""
    operator = next(m for m in i.modifiers if m in _COMPARE or m in _UNORDERED or m in ("num", "nan"))
    if type_ not in _FLOATS:
        type_ = _UNSIGNED.get(type_, type_) if operator in ("lo", "ls", "hi", "hs", "eq", "ne") else type_
        a, b = t.broadcast(t.use(a, type_), t.use(b, type_))
        return t.let(f"{a} {_COMPARE[operator]} {b}", "?")
    if type_ not in ("f32", "f64"):
        bits = "b32" if type_.endswith("x2") else "b16"
        a, b = (f"{type_}_to_f32({t.use(o, bits)})" for o in (a, b))
        if "ftz" in i.modifiers:
            a, b = f"flush_f16({a})", f"flush_f16({b})"
    else:
        a, b = t.use(a, type_), t.use(b, type_)
        if "ftz" in i.modifiers and type_ == "f32":
            a, b = t.flush_input(a), t.flush_input(b)
        a, b = t.broadcast(a, b)
    if operator in ("num", "nan"):
        return t.let(f"{'is_number' if operator == 'num' else 'is_nan'}({a}, {b})", "?")
    if operator == "ne":
        return t.let(f"ne_ordered({a}, {b})", "?")
    if operator == "neu":
        return t.let(f"{a} != {b}", "?")
    if operator == "equ":
        return t.let(f"logical_not(ne_ordered({a}, {b}))", "?")
    if operator in _UNORDERED:
        return t.let(f"logical_not({a} {_UNORDERED[operator]} {b})", "?")
    return t.let(f"{a} {_COMPARE[operator]} {b}", "?")


def setp(t, i, types):
    d, a, b, *c = i.operands
    result = comparison(t, i, types[-1], a, b)
    negated = t.let(f"logical_not({result})", "?") if isinstance(d, Pair) else None
    if c:
        combine = next(m for m in i.modifiers if m in ("and", "or", "xor"))
        other = t.use(c[0], "pred")
        result = t.let(f"{_UFUNC[combine]}({result}, {other})", "?")
        negated = negated and t.let(f"{_UFUNC[combine]}({negated}, {other})", "?")
    if isinstance(d, Pair):
        t.define(d.value, result, "pred")
        t.define(d.predicate, negated, "pred")
    else:
        t.define(d, result, "pred")


def set_(t, i, types):
    d, a, b = i.operands
    result = comparison(t, i, types[1], a, b)
    if types[0] == "f32":
        t.define(d, t.let(f"{result}.astype('f4')", "f4"), "f32")
        return
    pairs = types[1].endswith("x2")
    kind = "u2" if pairs else seen(_UNSIGNED.get(types[0], types[0])) if types[0][0] in "us" else "u2"
    text = f"{result}.astype('{kind}')"
    scalar = types[0].removesuffix("x2")
    if scalar in _HALF_ONE:
        text = f"np_multiply({text}, {t.constant(_HALF_ONE[scalar], kind)})"
    else:
        text = f"np_negative({text})"
    if pairs:
        t.define(d, t.let(f"packed({text})", "u4"), "b32")
    else:
        t.define(d, t.let(text, kind), f"b{t.width(types[0])}")


def selp(t, i, types):
    d, a, b, p = i.operands
    type_ = types[0] if types[0] in ("f32", "f64") else f"b{t.width(types[0])}"
    x, y = t.use(a, type_), t.use(b, type_)
    flushed = x in t.flushed and y in t.flushed
    t.define(d, t.let(f"where({t.use(p, 'pred')}, {x}, {y})", t.seen(type_)), type_, flushed)


def slct(t, i, types):
    d, a, b, c = i.operands
    type_ = f"b{t.width(types[0])}"
    chooser = t.flush_input(t.use(c, "f32")) if "ftz" in i.modifiers else t.use(c, types[1])
    text = f"where({chooser} >= 0, {t.use(a, type_)}, {t.use(b, type_)})"
    t.define(d, t.let(text, t.seen(type_)), type_)


# -- moves -----------------------------------------------------------------------------------------------
def mov(t, i, types):
    d, a = i.operands
    (type_,) = types
    if isinstance(d, tuple):
        _unpack(t, d, a, type_)
        return
    if isinstance(a, tuple):
        t.define(d, t.pack(a, type_), type_)
        return
    name = t.use(a, type_)
    t.define(d, name, type_, name in t.flushed)


def _unpack(t, parts, whole, type_):
    width = t.width(type_)
    each = width // len(parts)
    value = t.use(whole, f"b{width}")
    pieces = t.let(f"split({value}, {len(parts)})", f"u{each // 8}")
    for n, part in enumerate(parts):
        if part != SINK:
            t.define(part, t.let(f"{pieces}[{n}]", f"u{each // 8}"), f"b{each}")


INTEGER = {
    "add": or_in_halves(wrapping),
    **dict.fromkeys(("sub", "and", "or", "xor"), wrapping),
    **dict.fromkeys(("addc", "subc", "madc"), with_carry),
    "mul": mul,
    "mad": mad,
    "mul24": mul24,
    "mad24": mul24,
    "div": same_type("div"),
    "rem": same_type("rem"),
    **dict.fromkeys(("min", "max"), or_in_halves(extreme)),
    "abs": same_type("np_absolute"),
    "sad": same_type("sad"),
    "neg": negate,
    "not": not_,
    "cnot": cnot,
    "shl": shift,
    "shr": shift,
    "brev": same_type("brev"),
    "popc": to_u32("popc"),
    "clz": to_u32("clz"),
    "bfind": to_u32("bfind"),
    "bfe": bit_field,
    "bfi": bit_field,
    "bmsk": bmsk,
    "fns": fns,
    **dict.fromkeys(("vabsdiff2", "vabsdiff4"), absolute_differences),
    "shf": shf,
    "prmt": prmt,
    "lop3": lop3,
    "dp4a": dp4a,
    "dp2a": dp2a,
    "setp": setp,
    "set": set_,
    "selp": selp,
    "slct": slct,
    "mov": mov,
}
