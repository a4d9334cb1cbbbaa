"""How instructions that act across a warp are written in NumPy: shuffles, votes, tensor cores."""

from .lower_memory import address_of, space_of
from .syntax import SINK, Literal, Pair
from .wmma import fragment_of


def _tell_exchange(t, i, members):
    if not (isinstance(members, Literal) and members.value & 0xFFFFFFFF == 0xFFFFFFFF):
        t.tell(f"exchange(x, {t.mask()}, {t.use(members, 'u32')}, {t.site(i)})")


def shuffle(t, i, types):
    d, a, b, c, members = i.operands
    mode = next(m for m in i.modifiers if m in ("up", "down", "bfly", "idx"))
    operands = ", ".join(t.use(o, "u32") for o in (a, b, c, members))
    _tell_exchange(t, i, members)
    text = f"shfl(x, {t.mask()}, {mode!r}, {operands}, {t.site(i)})"
    value, predicate = (d.value, d.predicate) if isinstance(d, Pair) else (d, SINK)
    both = t.let(text, "u4")
    t.define(value, t.let(f"{both}[0]", "u4"), "b32")
    t.define(predicate, t.let(f"{both}[1]", "?"), "pred")


def vote(t, i, types):
    d, a, members = i.operands
    mode = next(m for m in i.modifiers if m in ("all", "any", "uni", "ballot"))
    _tell_exchange(t, i, members)
    text = f"vote(x, {t.mask()}, {mode!r}, {t.use(a, 'pred')}, {t.use(members, 'u32')}, {t.site(i)})"
    if mode == "ballot":
        t.define(d, t.let(text, "u4"), "b32")
    else:
        t.define(d, t.let(text, "?"), "pred")


def match(t, i, types):
    d, a, members = i.operands
    mode = "all" if "all" in i.modifiers else "any"
    _tell_exchange(t, i, members)
    both = t.let(f"match(x, {t.mask()}, {mode!r}, {t.use(a, types[0])}, {t.use(members, 'u32')}, {t.site(i)})", "u4")
    value, predicate = (d.value, d.predicate) if isinstance(d, Pair) else (d, SINK)
    t.define(value, t.let(f"{both}[0]", "u4"), "b32")
    t.define(predicate, t.let(f"{both}[1]", "?"), "pred")


def redux(t, i, types):
    d, a, members = i.operands
    operation = next(m for m in i.modifiers if m in ("add", "min", "max", "and", "or", "xor"))
    _tell_exchange(t, i, members)
    function, options = "redux", ""
    if types[0] == "f32":
        function, options = "redux_f32", f"{'abs' in i.modifiers}, {'NaN' in i.modifiers}, "
    operands = f"{t.use(a, types[0])}, {t.use(members, 'u32')}"
    text = f"{function}(x, {t.mask()}, {operation!r}, {options}{operands}, {t.site(i)})"
    t.define(d, t.let(text, t.seen(types[0])), types[0])


def activemask(t, i, types):
    t.define(i.operands[0], t.let(f"activemask(x, {t.mask()})", "u4"), "b32")


def elect(t, i, types):
    d, members = i.operands
    _tell_exchange(t, i, members)
    both = t.let(f"elect(x, {t.mask()}, {t.use(members, 'u32')}, {t.site(i)})", "u4")
    t.define(d.value, t.let(f"{both}[0]", "u4"), "b32")
    t.define(d.predicate, t.let(f"{both}[1]", "?"), "pred")


def sync_warp(t, i, types):
    members = t.use(i.operands[0], "u32")
    t.line(f"sync_warp(x, {t.mask()}, {members}, {t.site(i)})")
    t.tell(f"warp_barrier(x, {t.mask()}, {members}, {t.site(i)})")


def matrix_count(i):
    return next(int(m[1]) for m in i.modifiers if m in ("x1", "x2", "x4"))


def shared_address(t, i, memory):
    base = memory.address.base
    kind = "u8" if getattr(base, "type", "b32") in ("b64", "u64", "s64") else "u4"
    address = t.address(memory.address, kind)
    return t.let(f"in_shared({address})", "u4") if kind == "u8" else address


def ldmatrix(t, i, types):
    d, memory = i.operands
    registers = d if isinstance(d, tuple) else (d,)
    address = shared_address(t, i, memory)
    t.tell(f"matrix_load(x, {address}, {matrix_count(i)}, {t.site(i)})")
    values = t.let(f"ldmatrix(x, m, {address}, {matrix_count(i)}, {'trans' in i.modifiers}, {t.site(i)})", "u4")
    for n, register in enumerate(registers):
        t.define(register, t.let(f"{values}[{n}]", "u4"), "b32")


def stmatrix(t, i, types):
    memory, values = i.operands
    values = values if isinstance(values, tuple) else (values,)
    address = shared_address(t, i, memory)
    t.tell(f"matrix_store(x, {address}, {matrix_count(i)}, {t.site(i)})")
    registers = ", ".join(t.use(v, "b32") for v in values)
    t.line(f"stmatrix(x, m, {address}, ({registers},), {'trans' in i.modifiers}, {t.site(i)})")


def movmatrix(t, i, types):
    d, a = i.operands
    t.define(d, t.let(f"movmatrix(x, m, {t.use(a, 'b32')}, {t.site(i)})", "u4"), "b32")


def mma(t, i, types):
    t.mma.add(i, types)


def wmma(t, i, types):
    """What expand_wmma has left of a load or store: the addresses of the accesses that follow."""
    addresses, memory, stride = i.operands
    address, _ = address_of(t, memory, space_of(t.program, i, memory))
    t.line(f"require_whole_warps(x, m, {t.site(i)})")
    fragment = t.constants.thing(fragment_of(i.modifiers))
    found = t.let(f"fragment_addresses(x, {address}, {t.use(stride, 'u32')}, {fragment})", "u8")
    for n, register in enumerate(addresses):
        t.define(register, t.let(f"{found}[{n}]", "u8"), "b64")


WARP = {
    "shfl": shuffle,
    "vote": vote,
    "match": match,
    "redux": redux,
    "activemask": activemask,
    "elect": elect,
    "bar": sync_warp,
    "ldmatrix": ldmatrix,
    "stmatrix": stmatrix,
    "movmatrix": movmatrix,
    "mma": mma,
    "wmma": wmma,
}
