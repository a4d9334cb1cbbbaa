"""How floating-point instructions and conversions are written in NumPy."""

from .isa import types_of
from .lower_integer import seen

_UFUNC = {"add": "np_add", "sub": "np_subtract", "mul": "np_multiply"}
_HALF = {"f16": ("f16", 1), "bf16": ("bf16", 1), "f16x2": ("f16", 2), "bf16x2": ("bf16", 2)}
_FLUSH = {"f16": "flush_f16", "bf16": "flush"}
_KIND = {"f32": "f4", "f64": "f8"}
_SIGN = {"neg": "np_negative", "abs": "np_absolute"}


def _rounding(i):
    return next((m for m in i.modifiers if m in ("rn", "rz", "rm", "rp")), "rn")


def _inputs(t, i, operands, type_):
    """Operands as float32 or float64 arrays, flushed where the instruction says so."""
    names = [t.use(o, type_) for o in operands]
    if "ftz" in i.modifiers and type_ == "f32":
        names = [t.flush_input(n) for n in names]
    return names


def _result(t, i, text, type_, flush=True):
    """Define the destination, with the saturation and flushing that the modifiers ask for."""
    kind = _KIND[type_]
    ftz = "ftz" in i.modifiers and type_ == "f32"
    if ftz and flush:
        text = f"flush({text})"
    elif type_ == "f32":
        text = f"canonical({text})"
    if "sat" in i.modifiers:
        text = f"saturate({text})"
    t.define(i.operands[0], t.let(text, kind), type_, ftz)


def _half_inputs(t, i, operands, type_):
    """Operands of a 16-bit type, or of pairs of it, as float32."""
    scalar, lanes = _HALF[type_]
    decode, bits = (f"{scalar}x2_to_f32", "b32") if lanes == 2 else (f"{scalar}_to_f32", "b16")
    texts = [f"{decode}({t.use(o, bits)})" for o in operands]
    return [f"{_FLUSH[scalar]}({text})" for text in texts] if "ftz" in i.modifiers else texts


def _half_result(t, i, text, type_):
    """Round a float32 or float64 expression to the 16-bit type and define the destination."""
    scalar, lanes = _HALF[type_]
    if "sat" in i.modifiers:
        text = f"saturate({text})"
    if "relu" in i.modifiers:
        text = f"relu({text})"
    text = f"to_{scalar}({text})"
    if "ftz" in i.modifiers:
        text = f"to_{scalar}({_FLUSH[scalar]}({scalar}_to_f32({text})))"
    if lanes == 2:
        t.define(i.operands[0], t.let(f"packed({text})", "u4"), "b32")
    else:
        t.define(i.operands[0], t.let(text, "u2"), "b16")


def _exact(t, i, rounding):
    """A float64 operation in a directed rounding mode: rare, and done in rational arithmetic."""
    operands = ", ".join(t.use(o, "f64") for o in i.operands[1:])
    operation = "fma" if i.opcode == "mad" else i.opcode
    t.define(i.operands[0], t.let(f"exact_f64({operation!r}, {rounding!r}, {operands})", "f8"), "f64")


def arithmetic(t, i, types):
    type_, operands = types[-1], i.operands[1:]
    if type_ in _HALF:
        a, b = _half_inputs(t, i, operands, type_)
        _half_result(t, i, f"{_UFUNC[i.opcode]}({a}, {b})", type_)
        return
    a, b = t.broadcast(*_inputs(t, i, operands, type_))
    rounding = _rounding(i)
    if rounding != "rn" and type_ == "f64":
        _exact(t, i, rounding)
    elif rounding == "rn":
        _result(t, i, f"{_UFUNC[i.opcode]}({a}, {b})", type_)
    elif i.opcode == "sub":
        _result(t, i, f"add_f32_directed({a}, np_negative({b}), {rounding!r})", type_)
    else:
        _result(t, i, f"{i.opcode}_f32_directed({a}, {b}, {rounding!r})", type_)


def fma(t, i, types):
    type_, operands = types[-1], i.operands[1:]
    if type_ in _HALF:
        a, b, c = _half_inputs(t, i, operands, type_)
        _half_result(t, i, f"fma_f16({a}, {b}, {c})", type_)
        return
    rounding = _rounding(i)
    if type_ == "f64" and rounding != "rn":
        _exact(t, i, rounding)
    elif rounding == "rn" and t.guard is None and "sat" not in i.modifiers:
        t.fma.add(i, type_, "ftz" in i.modifiers)
    else:
        a, b, c = _inputs(t, i, operands, type_)
        text = f"fma_f64({a}, {b}, {c})" if type_ == "f64" else f"fma_f32({a}, {b}, {c}, {rounding!r})"
        _result(t, i, text, type_)


def div(t, i, types):
    a, b = t.broadcast(*_inputs(t, i, i.operands[1:], types[-1]))
    rounding = _rounding(i)
    if "approx" in i.modifiers:
        _result(t, i, f"div_approximate({a}, {b})", types[-1])
    elif rounding == "rn":
        _result(t, i, f"np_divide({a}, {b})", types[-1])
    elif types[-1] == "f64":
        _exact(t, i, rounding)
    else:
        _result(t, i, f"div_directed({a}, {b}, {rounding!r})", types[-1])


def rcp(t, i, types):
    if "approx" in i.modifiers:
        approximate(t, i, types)
        return
    (a,) = _inputs(t, i, i.operands[1:], types[-1])
    if _rounding(i) != "rn" and types[-1] == "f64":
        _exact(t, i, _rounding(i))
    else:
        _result(t, i, f"rcp({a}, {_rounding(i)!r})", types[-1])


def sqrt(t, i, types):
    (a,) = _inputs(t, i, i.operands[1:], types[-1])
    rounding = _rounding(i)
    if rounding == "rn":
        _result(t, i, f"np_sqrt({a})", types[-1], flush=False)
    elif types[-1] == "f64":
        _exact(t, i, rounding)
    else:
        _result(t, i, f"sqrt_directed({a}, {rounding!r})", types[-1], flush=False)


def approximate(t, i, types):
    type_ = types[-1]
    if type_ == "f64":
        a = t.use(i.operands[1], "f64")
        text = f"coarse({i.opcode}, {a})" if "ftz" in i.modifiers else f"{i.opcode}({a})"
        t.define(i.operands[0], t.let(text, "f8"), "f64")
    elif type_ in _HALF:
        (a,) = _half_inputs(t, i, i.operands[1:], type_)
        _half_result(t, i, f"approximation(x, {i.opcode!r}, {_HALF[type_][0]!r}, {a})", type_)
    else:
        (a,) = _inputs(t, i, i.operands[1:], type_)
        text = f"approximation(x, {i.opcode!r}, 'f32', {a})"
        _result(t, i, text, type_, flush=i.opcode not in ("lg2", "rsqrt"))


def extremum(t, i, types):
    """min and max: of 2 or 3 operands, with .NaN and .xorsign.abs."""
    type_, operands = types[-1], i.operands[1:]
    half = type_ in _HALF
    names = [t.let(n, "f4") for n in _half_inputs(t, i, operands, type_)] if half else _inputs(t, i, operands, type_)
    signs = names if half else [t.use(o, type_) for o in operands]  # a NaN has one, until it is flushed
    kind = "f4" if half else _KIND[type_]
    value = names[0]
    for other in names[1:]:
        x, y = t.broadcast(value, other)
        if "abs" in i.modifiers:
            x, y = (f"np_absolute({n})" for n in (value, other))
        result = f"{'minimum' if i.opcode == 'min' else 'maximum'}_number({x}, {y})"
        if "xorsign" in i.modifiers:
            result = f"xor_sign({result}, {signs[0]}, {signs[1]})"
        if "NaN" in i.modifiers:
            result = f"with_nan({result}, {value}, {other})"
        value = t.let(result, kind)
    if half:
        _half_result(t, i, value, type_)
    else:
        flushed = all(n in t.flushed for n in names)
        t.define(i.operands[0], value, type_, flushed)


def sign(t, i, types):
    """abs and neg, on the bits of 16-bit types."""
    type_ = types[-1]
    if type_ in _HALF and "ftz" in i.modifiers:
        (a,) = _half_inputs(t, i, i.operands[1:], type_)
        _half_result(t, i, f"{_SIGN[i.opcode]}({a})", type_)
        return
    if type_ in _HALF:
        bits = "b32" if _HALF[type_][1] == 2 else "b16"
        top = 0x80008000 if bits == "b32" else 0x8000
        value = t.use(i.operands[1], bits)
        if i.opcode == "neg":
            text = f"np_bitwise_xor({value}, {t.constant(top, seen(bits))})"
        else:
            text = f"np_bitwise_and({value}, {t.constant(top - 1 if bits == 'b16' else 0x7FFF7FFF, seen(bits))})"
        t.define(i.operands[0], t.let(text, seen(bits)), bits)
        return
    (a,) = _inputs(t, i, i.operands[1:], type_)
    name = t.let(f"{_SIGN[i.opcode]}({a})", _KIND[type_])
    t.define(i.operands[0], name, type_, a in t.flushed)


def copysign(t, i, types):
    d, a, b = i.operands
    t.define(d, t.let(f"np.copysign({t.use(b, types[0])}, {t.use(a, types[0])})", _KIND[types[0]]), types[0])


def testp(t, i, types):
    (what,) = (m for m in i.modifiers if m != types[0])
    t.define(i.operands[0], t.let(f"testp_{what}({t.use(i.operands[1], types[0])})", "?"), "pred")


# -- cvt -------------------------------------------------------------------------------------------------
_INTEGERS = {"u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"}


def convert(t, i, types):
    if len(i.operands) == 3:
        _convert_pair(t, i, types)
        return
    to, source = types
    operand = i.operands[1]
    integral = next((m for m in i.modifiers if m in ("rni", "rzi", "rmi", "rpi")), None)
    if to in _INTEGERS and source in _INTEGERS:
        value = t.use(operand, source)
        text = f"saturate_integer({value}, '{seen(to)}')" if "sat" in i.modifiers else f"{value}.astype('{seen(to)}')"
        t.define(i.operands[0], t.let(text, seen(to)), to)
        return
    if to in _INTEGERS:
        value = _decoded(t, i, operand, source)
        t.define(i.operands[0], t.let(f"float_to_integer({value}, '{seen(to)}', {integral or 'rzi'!r})", seen(to)), to)
        return
    if source in _INTEGERS:
        value = t.use(operand, source)
        if to in ("f32", "f64"):
            text = f"integer_to_float({value}, np.float{to[1:]}, {_rounding(i)!r})"
        else:
            text = f"integer_to_float({value}, np.float64, 'odd')"
        _encoded(t, i, text, to, True)
        return
    value = _decoded(t, i, operand, source)
    if integral:
        value = f"round_integer({value}, {integral!r})"
    _encoded(t, i, value, to, source in ("f16",))


def _decoded(t, i, operand, source):
    """A floating-point operand as float32 or float64."""
    if source in _HALF:
        return f"{source}_to_f32({t.use(operand, 'b16')})"
    value = t.use(operand, source)
    return t.flush_input(value) if "ftz" in i.modifiers and source == "f32" else value


def _encoded(t, i, text, to, normal):
    """Define the destination from a float expression that may be wider. `normal`: never subnormal."""
    rounding = _rounding(i)
    if "sat" in i.modifiers:
        text = f"saturate({text})"
    if "relu" in i.modifiers:
        text = f"relu({text})"
    if to in _HALF:
        finite = f"finite_{to}(" if "satfinite" in i.modifiers else "("
        t.define(i.operands[0], t.let(f"{finite}to_{to}({text}, {rounding!r}))", "u2"), "b16")
    elif to == "tf32":
        finite = "finite_tf32(" if "satfinite" in i.modifiers else "("
        text = f"{finite}to_tf32({text}, {'rna' if 'rna' in i.modifiers else rounding!r}))"
        t.define(i.operands[0], t.let(text, "u4"), "b32")
    elif to == "f64":
        t.define(i.operands[0], t.let(f"({text}).astype('f8')", "f8"), "f64")
    else:
        ftz = "ftz" in i.modifiers
        text = f"to_f32({text}, {rounding!r})"
        if types_of(i)[-1] in ("f16", "f64"):
            text = f"canonical({text})"
        t.define(i.operands[0], t.let(f"flush({text})" if ftz and not normal else text, "f4"), "f32", ftz or normal)


def _convert_pair(t, i, types):
    """cvt.f16x2.f32 d, a, b: a goes to the high half."""
    d, high, low = i.operands
    scalar = _HALF[types[0]][0]
    parts = []
    for operand in (low, high):
        value = t.use(operand, "f32")
        if "relu" in i.modifiers:
            value = f"relu({value})"
        bits = f"to_{scalar}({value}, {_rounding(i)!r})"
        parts.append(f"finite_{scalar}({bits})" if "satfinite" in i.modifiers else bits)
    t.define(d, t.let(f"pair({parts[0]}, {parts[1]})", "u4"), "b32")


FLOAT = {
    **dict.fromkeys(("add", "sub", "mul"), arithmetic),
    **dict.fromkeys(("fma", "mad"), fma),
    **dict.fromkeys(("min", "max"), extremum),
    **dict.fromkeys(("abs", "neg"), sign),
    **dict.fromkeys(("ex2", "lg2", "sin", "cos", "tanh", "rsqrt"), approximate),
    "div": div,
    "rcp": rcp,
    "sqrt": sqrt,
    "copysign": copysign,
    "testp": testp,
    "cvt": convert,
}
