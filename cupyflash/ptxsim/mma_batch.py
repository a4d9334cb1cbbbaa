"""mma instructions of a basic block, collected so that many are one matrix product."""

# Of accumulators: what their registers are kept as, the dtype of results, the function that computes them.
_ACCUMULATORS = {
    "f32": ("f32", "f4", "mma"),
    "f16": ("b32", "u4", "mma_f16"),
    "s32": ("s32", "i4", "mma_s32"),
    "f64": ("f64", "f8", "mma_f64"),
}
_OPTIONS = ("satfinite", "rz", "rm", "rp", "xor")


class _Chain:
    """mma instructions that accumulate into one tile. float16 and clamped accumulators are rounded each time: one
    instruction."""

    def __init__(self, instruction, types, c):
        self.instruction, self.c = instruction, c
        self.kind = _kind(instruction, types)
        self.a, self.b, self.d = [], [], None

    def takes(self, instruction, types):
        """Whether an instruction may be appended whose addends are this chain's results."""
        rounded = types[0] == "f16" or "satfinite" in instruction.modifiers
        return not rounded and self.kind == _kind(instruction, types)


def _kind(instruction, types):
    """What two mma instructions must have in common to be parts of one product: function, types of A and B, number of
    accumulators, options."""
    options = tuple(option for option in _OPTIONS if option in instruction.modifiers)
    return _ACCUMULATORS[types[0]][2], tuple(types[1:3]), len(instruction.operands[0]), options


class MmaBatch:
    """Collects the mma instructions of a block, and writes each grid of tiles as one product.

    Chains that accumulate over k become the inner dimension, tiles that share A fragments the
    columns, tiles that share B fragments the rows.
    """

    def __init__(self, translator):
        self.t = translator
        self.chains = {}  # the names of a chain's results -> chain
        self.results = set()

    def add(self, i, types):
        t = self.t
        d, a, b, c = ((o if isinstance(o, tuple) else (o,)) for o in i.operands)
        factor = "f64" if types[1] == "f64" else "b32"
        a_names = tuple(t.use(r, factor) for r in a)
        b_names = tuple(t.use(r, factor) for r in b)
        c_names = tuple(t.current.get(getattr(r, "index", None)) for r in c)
        chain = self.chains.get(c_names)
        kept, local, _ = _ACCUMULATORS[types[0]]
        continued = (
            chain is not None and chain.takes(i, types) and all((chain.instruction, r.index) in t.used_once for r in c)
        )
        if continued:
            del self.chains[c_names]
        else:
            chain = _Chain(i, types, tuple(t.use(r, kept) for r in c))
        chain.instruction = i
        chain.a.append(a_names)
        chain.b.append(b_names)
        chain.d = tuple(t.fresh(local) for _ in d)
        self.chains[chain.d] = chain
        self.results.update(chain.d)
        for register, name in zip(d, chain.d, strict=True):
            t.define(register, name, kept)

    def emit(self):
        chains, self.chains = list(self.chains.values()), {}
        self.results.clear()
        by_a = {}
        for chain in chains:
            by_a.setdefault((chain.kind, tuple(chain.a)), []).append(chain)
        by_b = {}
        for (kind, a), row in by_a.items():
            by_b.setdefault((kind, tuple(tuple(c.b) for c in row)), []).append((a, row))
        for ((function, factors, *_), b), rows in by_b.items():
            a = tuple(a for a, _ in rows)
            c = tuple(tuple(chain.c for chain in row) for _, row in rows)
            names = [name for _, row in rows for chain in row for name in chain.d]
            site = self.t.site(rows[0][1][0].instruction)
            text = f"{function}(x, m, {factors!r}, {_tuple(a)}, {_tuple(b)}, {_tuple(c)}, {site})"
            self.t.lines.append(f"({', '.join(names)},) = {text}")


def _tuple(nested):
    """Nested tuples of names as Python source."""
    return nested if isinstance(nested, str) else f"({', '.join(_tuple(n) for n in nested)},)"
