"""How operations on mbarrier objects are written in NumPy."""

from .lower_warp import shared_address


def mbarrier(t, i, types):
    lower = next(lower for name, lower in _OPERATIONS.items() if name in i.modifiers)
    lower(t, i)


def arrive_after_copies(t, i):
    t.line(_call(t, i, "arrive_after_copies", i.operands[0], str("noinc" not in i.modifiers)))


def _call(t, i, method, memory, *operands, choices=""):
    """The expression of an operation of Mbarriers."""
    address = shared_address(t, i, memory)
    t.tell(f"mbarrier(x, {t.mask()}, {address}, {t.site(i)})")
    return f"x.chunk.mbarriers.{method}(x, {t.mask()}, {', '.join((address, *operands, t.site(i)))}{choices})"


def _without_result(method):
    def lower(t, i):
        memory, *count = i.operands
        t.line(_call(t, i, method, memory, *(t.use(o, "u32") for o in count)))

    return lower


def _arrive(t, i):
    d, memory, *count = i.operands
    count = t.use(count[0], "u32") if count else t.constant(1, "u4")
    choices = ", drop=True" if "arrive_drop" in i.modifiers else ""
    if "expect_tx" in i.modifiers:
        choices += f", transactions={count}"
        count = t.constant(1, "u4")
    if "noComplete" in i.modifiers:
        choices += ", completes=False"
    t.define(d, t.let(_call(t, i, "arrive", memory, count, choices=choices), "u8"), "b64")


def _test(t, i):
    d, memory, phase, *_ = i.operands  # try_wait may give a time limit, too
    if "parity" in i.modifiers:
        phase = t.use(phase, "u32")
    else:
        phase = t.let(f"parity_of({t.use(phase, 'b64')})", "u8")
    t.define(d, t.let(_call(t, i, "test", memory, phase), "?"), "pred")


def _pending_count(t, i):
    d, token = i.operands
    t.define(d, t.let(f"pending_count({t.use(token, 'b64')})", "u4"), "u32")


_OPERATIONS = {
    "init": _without_result("init"),
    "inval": _without_result("inval"),
    "arrive": _arrive,
    "arrive_drop": _arrive,
    "expect_tx": _without_result("expect_transactions"),  # arrive.expect_tx is an arrive
    "complete_tx": _without_result("complete_transactions"),
    "test_wait": _test,
    "try_wait": _test,
    "pending_count": _pending_count,
}
MBARRIER = {"mbarrier": mbarrier}
