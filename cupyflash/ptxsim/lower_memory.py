"""How loads, stores, atomics and address conversions are written in NumPy."""

from .atomics import ATOMICS_OF_HALVES
from .lower_integer import seen
from .syntax import SINK, Register, Variable

_SPACES = {
    "global": "x.global_",
    "shared": "x.shared",
    "shared::cta": "x.shared",
    "local": "x.local",
    "param": "x.param",
    "const": "x.const",
}
_WINDOWS = {
    "shared": "SHARED_WINDOW",
    "shared::cta": "SHARED_WINDOW",
    "local": "LOCAL_WINDOW",
    "param": "PARAM_WINDOW",
    "const": None,
}
OBSERVED = {"x.global_": "global", "x.shared": "shared", "x.local": "local", "x.generic": "generic"}
_NARROW = {"shared", "shared::cta", "local", "param", "const"}


def space_of(program, i, memory):
    """The state space that an access names. A `.param` of a call is the thread's own, like a local."""
    space = next((m for m in i.modifiers if m in _SPACES), None)
    base = memory.address.base
    if space == "param" and isinstance(base, Variable) and not program.is_parameter(base):
        return "local"
    return space


def address_of(t, memory, space):
    """Address local and the expression of its state space."""
    address = memory.address
    base = address.base
    if isinstance(base, Register):
        kind = seen(f"b{t.width(base.type)}")
    else:
        kind = "u4" if space in _NARROW else "u8"
    name = t.address(address, kind)
    if kind == "u4" and space not in _NARROW:
        name = t.cast(name, "u8")
    return name, _SPACES.get(space, "x.generic")


def _tell(t, i, what, space, address, size, values=""):
    name = OBSERVED.get(space)
    if name:
        t.tell(f"{what}(x, {t.mask()}, {name!r}, {address}, {size}, {values}{t.site(i)})")


def vector_of(i):
    return next((int(m[1]) for m in i.modifiers if m in ("v2", "v4", "v8")), 1)


def load(t, i, types):
    d, memory = i.operands
    address, space = address_of(t, memory, space_of(t.program, i, memory))
    type_, count = types[0], vector_of(i)
    size = t.width(type_) // 8
    _tell(t, i, "load", space, address, size * count)
    if count == 1:
        name = t.let(f"load(x, {t.mask()}, {space}, {address}, {size}, {t.site(i)})", f"u{size}")
        t.define(d, name, type_)
        return
    values = t.let(f"load_vector(x, {t.mask()}, {space}, {address}, {size}, {count}, {t.site(i)})", f"u{size}")
    for n, register in enumerate(d):
        if register != SINK:
            t.define(register, t.let(f"{values}[{n}]", f"u{size}"), type_)


def store(t, i, types):
    memory, value = i.operands
    address, space = address_of(t, memory, space_of(t.program, i, memory))
    type_, count = types[0], vector_of(i)
    size = t.width(type_) // 8
    names = [t.use(v, f"b{8 * size}") for v in (value if count > 1 else (value,))]
    values = ", ".join(names)
    _tell(t, i, "store", space, address, size * count, f"({values},), ")
    if count == 1:
        t.line(f"store(x, {t.mask()}, {space}, {address}, {size}, {values}, {t.site(i)})")
    else:
        t.line(f"store_vector(x, {t.mask()}, {space}, {address}, {size}, ({values}), {t.site(i)})")


def atomic(t, i, types):
    d, memory, *values = i.operands if i.opcode == "atom" else (SINK, *i.operands)
    space_name = space_of(t.program, i, memory)
    address, space = address_of(t, memory, space_name)
    type_ = types[0]
    operation = next(
        m for m in ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas") if m in i.modifiers
    )
    if type_ == "b128":
        _tell(t, i, "atomic", space, address, 16)
        _atomic_wide(t, i, d, values, operation, f"x, {t.mask()}, {space}, {address}, 16")
        return
    kind = f"f{type_[1:]}" if type_ in ("f32", "f64") else type_
    function = f"atomic_{operation}"
    if (operation, type_) in ATOMICS_OF_HALVES:
        function, kind = t.constants.thing(ATOMICS_OF_HALVES[operation, type_]), f"b{t.width(type_)}"
    elif type_ == "f32":
        function = "atomic_add_ftz" if space_name in (None, "global") else "atomic_add_f32"
    size, count = t.width(type_) // 8, vector_of(i)
    _tell(t, i, "atomic", space, address, size * count)
    where = f"x, {t.mask()}, {space}, {address}, {size}, {function}"
    if count > 1:
        elements = ", ".join(t.use(v, kind) for v in values[0])
        old = t.let(f"atomic_vector({where}, ({elements}), {t.site(i)})", t.seen(kind))
        for n, register in enumerate(d if d != SINK else ()):
            t.define(register, t.let(f"{old}[{n}]", t.seen(kind)), kind)
        return
    operands = [t.use(v, kind) for v in values]
    value, compare = (operands[1], operands[0]) if operation == "cas" else (operands[0], "None")
    text = f"atomic({where}, {value}, {compare}, {t.site(i)})"
    if d == SINK:
        t.line(text)
    else:
        t.define(d, t.let(text, t.seen(kind)), kind)


def _atomic_wide(t, i, d, values, operation, where):
    """exch or cas of 16 bytes, in pairs of registers."""
    *compare, value = (
        t.let(f"sixteen_bytes({', '.join(t.use(half, 'b64') for half in pair)})", "c16") for pair in values
    )
    function = "atomic_exch" if operation == "exch" else "atomic_cas_wide"
    old = t.let(f"atomic({where}, {function}, {value}, {compare[0] if compare else None}, {t.site(i)})", "c16")
    for n, half in enumerate(d if d != SINK else ()):
        t.define(half, t.let(f"{old}.view('u8')[{n}::2]", "u8"), "b64")


def cvta(t, i, types):
    d, a = i.operands
    value = t.use(a, "u64")
    window = next((_window(t, m) for m in i.modifiers if m in _WINDOWS), None)
    if window is not None:
        operation = "np_subtract" if "to" in i.modifiers else "np_add"
        value = t.let(f"{operation}({value}, {window})", "u8")
    t.define(d, value, "u64")


def _window(t, space):
    """Where generic addresses of a space begin: constants are global memory, too, as on a GPU."""
    if space == "const":
        return t.constant(t.program.module.constant_memory.ctypes.data, "u8")
    return _WINDOWS[space]


def isspacep(t, i, types):
    d, a = i.operands
    space = next(m for m in i.modifiers)
    address = t.use(a, "u64")
    spaces = {"global": 0, "shared": 1, "shared::cta": 1, "shared::cluster": 1, "local": 2, "param": 3, "const": 0}
    number = spaces[space]  # the cluster is the block itself
    answer = t.let(f"({address} >> WINDOW_SHIFT) == {number}", "?")
    if number == 0:
        size = t.constant(t.program.module.constant_memory.size, "u8")
        constant = t.let(f"np_less(np_subtract({address}, {_window(t, 'const')}), {size})", "?")
        answer = constant if space == "const" else t.let(f"np_greater({answer}, {constant})", "?")
    t.define(d, answer, "pred")


def nothing(t, i, types):
    """Orders or hints that have no meaning while lanes run in lockstep."""


def fence(t, i, types):
    t.tell(f"fence(x, {t.mask()}, {t.site(i)})")


def vprintf(t, i, types):
    result, *operands = i.operands
    format_, arguments = (t.use(o, "u32") for o in operands)
    t.define(result, t.let(f"vprintf(x, {t.mask()}, {format_}, {arguments}, {t.site(i)})", "u4"), "b32")


def assertfail(t, i, types):
    text, _, line, *_ = (t.use(o, "u32") for o in i.operands)
    t.line(f"assertfail(x, {t.mask()}, {text}, {line}, {t.site(i)})")


MEMORY = {
    "vprintf": vprintf,
    "__assertfail": assertfail,
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cvta": cvta,
    "isspacep": isspacep,
    "membar": fence,
    "fence": fence,
    **dict.fromkeys(
        (
            "prefetch",
            "prefetchu",
            "applypriority",
            "nanosleep",
            "griddepcontrol",
            "brkpt",
        ),
        nothing,
    ),
}
