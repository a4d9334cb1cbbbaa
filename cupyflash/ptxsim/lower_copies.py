"""How cp.async is written in NumPy."""

from .lower_mbarrier import arrive_after_copies
from .lower_memory import address_of
from .lower_warp import shared_address
from .syntax import Register


def copy_async(t, i, types):
    modifiers = i.modifiers
    if "commit_group" in modifiers:
        t.tell(f"commit(x, {t.mask()}, {t.site(i)})")
        t.line(f"x.copies.commit(x, {t.mask()})")
    elif "wait_all" in modifiers or "wait_group" in modifiers:
        allowed = None if "wait_all" in modifiers else i.operands[0].value
        t.tell(f"wait(x, {t.mask()}, {allowed}, {t.site(i)})")
        t.line(f"x.copies.wait(x, {t.mask()}, {allowed})")
    elif "bulk" in modifiers:
        _bulk(t, i)
    elif "mbarrier" in modifiers:
        arrive_after_copies(t, i)
    else:
        _issue(t, i)


def _bulk(t, i):
    target, source, size, mbarrier = i.operands
    shared, at = (shared_address(t, i, memory) for memory in (target, mbarrier))
    address, _ = address_of(t, source, "global")
    t.tell(f"mbarrier(x, {t.mask()}, {at}, {t.site(i)})")
    operands = f"{at}, {shared}, {address}, {t.use(size, 'u32')}"
    t.line(f"x.chunk.mbarriers.copy_bulk(x, {t.mask()}, {operands}, {t.site(i)})")


def _issue(t, i):
    target, source, size, *rest = i.operands
    shared, _ = address_of(t, target, "shared")
    address, _ = address_of(t, source, "global")
    amount = "None"
    if rest and isinstance(rest[0], Register) and rest[0].type == "pred":
        ignore = t.use(rest[0], "pred")
        zero, all_ = t.constant(0, "u4"), t.constant(size.value, "u4")
        amount = t.let(f"where({ignore}, {zero}, {all_})", "u4")
    elif rest:
        amount = t.use(rest[0], "u32")
    t.tell(f"copy(x, {t.mask()}, {address}, {size.value}, {shared}, {amount}, {t.site(i)})")
    t.line(f"x.copies.issue(x, {t.mask()}, {shared}, {address}, {size.value}, {amount}, {t.site(i)})")


COPIES = {"cp": copy_async}
