"""Loads, stores and atomics within a slot that each lane has to itself in every state space."""

from collections.abc import Callable
from dataclasses import dataclass

from .. import exact
from .forms import TYPES, Form, bits_of

SPACES = ("global", "shared", "local", "")  # "": a generic address of one of the three
SLOT = 64
CACHE = ("", "ca", "cg", "cs", "cv", "volatile", "relaxed.gpu")
ELEMENTS = (*(f"{k}{n}" for k in "bus" for n in (8, 16, 32, 64)), "f32", "f64")


@dataclass(frozen=True)
class MemoryForm(Form):
    """`formula(old, *sources)` of an atomic gives the new contents; plain loads and stores have none."""

    formula: Callable = None
    space: str = ""
    element: str = "b32"
    count: int = 1


def accesses():
    for space in SPACES:
        for cache in CACHE if space != "local" else ("", "volatile"):
            for vector in ("", "v2", "v4"):
                for t in ELEMENTS:
                    count = int(vector[1:] or 1)
                    if bits_of(t) * count > 128 or (cache in ("ca", "cg", "cs", "cv") and space == "shared"):
                        continue
                    if cache.startswith("relaxed") and vector:
                        continue
                    middle = "".join(f".{m}" for m in (space, vector, t) if m)
                    more = {"space": space, "element": t, "count": count, "wide": True}
                    place = f"raw_{t}" if t in ("f32", "f64") else t
                    if cache != "cs" or not space.startswith("shared"):
                        load = cache if cache != "cg" or space != "shared" else ""
                        yield MemoryForm(text("ld", load, middle), (), (place,) * count, None, **more)
                    if cache != "ca":
                        yield MemoryForm(
                            text("st", {"cv": "wt"}.get(cache, cache), middle), (place,) * count, (), None, **more
                        )


def text(opcode, cache, rest):
    """Ordering comes before the state space, cache operators after it."""
    words = rest.split(".")[1:]
    if cache in ("volatile", "relaxed.gpu", ""):
        return ".".join([opcode, *([cache] if cache else []), *words])
    at = 1 if words[0] in SPACES else 0
    return ".".join([opcode, *words[:at], cache, *words[at:]])


def atomics():
    for space in ("global", "shared", ""):
        for t in ("u32", "s32", "u64", "s64", "b32", "b64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2", "b16"):
            for name, function in operations(t).items():
                if t == "s64" and name == "add":
                    continue
                tail = f"{name}.noftz" if t.startswith(("f16", "bf16")) else name
                middle = f".{space}" if space else ""
                more = {"space": space, "element": t}
                f = flushing_sum if t == "f32" and space != "shared" else function
                sources = (t, t) if name == "cas" else (t,)
                yield MemoryForm(f"atom{middle}.{tail}.{t}", sources, (t,), f, **more)
                if name not in ("exch", "cas"):
                    yield MemoryForm(f"red{middle}.{tail}.{t}", sources, (), f, **more)


def operations(t):
    if t in ("f32", "f64", "f16", "bf16"):
        return {"add": lambda old, x: exact.add(old, x, TYPES[t].fmt)}
    if t in ("f16x2", "bf16x2"):
        fmt = TYPES[t].fmt
        return {"add": lambda old, x: tuple(exact.add(p, q, fmt) for p, q in zip(old, x, strict=True))}
    if t == "b16":
        return {"cas": lambda old, compare, x: x if old == compare else old}
    if t in ("b32", "b64"):
        return {
            "and": lambda old, x: old & x,
            "or": lambda old, x: old | x,
            "xor": lambda old, x: old ^ x,
            "exch": lambda old, x: x,
            "cas": lambda old, compare, x: x if old == compare else old,
        }
    found = {"add": lambda old, x: old + x, "min": min, "max": max}
    if t == "u32":
        found["inc"] = lambda old, x: 0 if old >= x else old + 1
        found["dec"] = lambda old, x: x if old == 0 or old > x else old - 1
    return found


def flushing_sum(old, x):
    """Additions of float32 to global memory flush subnormals."""
    return exact.add(old, x, ftz=True)


def all_forms():
    for group in (accesses, atomics):
        yield from group()
