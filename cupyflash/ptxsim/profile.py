"""Counters: instructions by class, global bytes and sectors, shared-memory wavefronts, FLOPs, barriers.

Counting rules. An instruction counts once for each warp in which a lane is active. A global request is
one instruction of one warp; it touches distinct sectors of 32 bytes. A shared access of 4 bytes or less
goes in one phase of 32 lanes, of 8 bytes in two of 16, of 16 bytes in four of 8 (ldmatrix: one phase for
each matrix), and a phase takes as many wavefronts as one bank has distinct words; ideal is one a phase.
cp.async is a global load and a shared store. Atomics count as instructions only.
"""

import contextlib
import contextvars
import dataclasses

import numpy as np

from .observer import Observer

_SECTOR = np.uint64(5)
_NONE = np.uint64(2**64 - 1)
_MERGE_AT = 1 << 20  # remembered sectors

_CLASSES = {
    "tensor": ("mma", "ldmatrix", "stmatrix", "movmatrix"),
    "memory": ("ld", "ldu", "st", "cp", "prefetch", "prefetchu"),
    "atomic": ("atom", "red"),
    "warp": ("shfl", "vote", "match", "redux", "activemask", "elect"),
    "barrier": ("bar", "barrier", "membar", "fence"),
    "control": ("bra", "brx", "ret", "exit", "trap", "call"),
    "conversion": ("cvt", "cvta"),
    "special function": ("ex2", "lg2", "sin", "cos", "tanh", "rcp", "rsqrt", "sqrt"),
    "move and select": ("mov", "selp", "slct", "setp", "set"),
}
_CLASS_OF = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes}
_FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}


def instruction_class(instruction):
    """The class that an instruction is counted in."""
    found = _CLASS_OF.get(instruction.opcode)
    return found or ("float arithmetic" if _FLOATS & set(instruction.modifiers) else "integer arithmetic")


@dataclasses.dataclass
class KernelProfile:
    """What all launches of one kernel did. Distinct sectors are those of each launch, added up."""

    name: str
    launches: int = 0
    instructions: dict = dataclasses.field(default_factory=dict)  # class -> warp instructions
    global_load_bytes: int = 0
    global_store_bytes: int = 0
    global_load_sectors: int = 0
    global_store_sectors: int = 0
    distinct_load_sectors: int = 0
    distinct_store_sectors: int = 0
    shared_wavefronts: int = 0
    shared_ideal_wavefronts: int = 0
    mma_flops: int = 0
    barriers: int = 0

    def __str__(self):
        rows = [("launches", self.launches), ("warp instructions", sum(self.instructions.values()))]
        rows += [(f"  {name}", count) for name, count in sorted(self.instructions.items(), key=lambda item: -item[1])]
        counters = [f.name for f in dataclasses.fields(self)[3:]]
        rows += [(name.replace("_", " "), getattr(self, name)) for name in counters]
        return "\n".join([self.name, *(f"  {label:<26}{count:>20,}" for label, count in rows)])

    def as_dict(self):
        """All counters by name."""
        return dataclasses.asdict(self)


class Profile:
    """Counters of the launches within one `profile()` block. `kernels`: a KernelProfile for each name."""

    def __init__(self):
        self._kernels = {}

    @property
    def kernels(self):
        return list(self._kernels.values())

    def __str__(self):
        return "\n\n".join(str(kernel) for kernel in self.kernels)

    def as_dict(self):
        """Counters of every kernel, by its name."""
        return {kernel.name: kernel.as_dict() for kernel in self.kernels}

    def add(self, name, counters):
        """Add one launch."""
        kernel = self._kernels.setdefault(name, KernelProfile(name))
        kernel.launches += 1
        for class_, count in counters.instructions.items():
            kernel.instructions[class_] = kernel.instructions.get(class_, 0) + count
        for what in ("load", "store"):
            counters.totals[f"distinct_{what}_sectors"] = counters.sectors[what].distinct()
        for name_, count in counters.totals.items():
            setattr(kernel, name_, getattr(kernel, name_) + count)


_current = contextvars.ContextVar("ptxsim_profile", default=None)


def current_profile():
    """The Profile that launches of this thread or task add to, or None."""
    return _current.get()


@contextlib.contextmanager
def profile():
    """Count what kernels do within the block.

    >>> import numpy as np
    >>> from cupyflash import ptxsim
    >>> source = 'extern "C" __global__ void copy(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }'
    >>> x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    >>> with profile() as counters:
    ...     ptxsim.RawModule(code=source).get_function("copy")((1,), (64,), (x, y))
    >>> counters.kernels[0].global_load_bytes
    256
    """
    chosen = Profile()
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)


class _Sectors:
    """A growing set of sector numbers."""

    def __init__(self):
        self.known = [np.empty(0, np.uint64)]
        self.waiting = 0

    def add(self, sectors):
        self.known.append(sectors)
        self.waiting += sectors.size
        if self.waiting > _MERGE_AT:
            self.known, self.waiting = [np.unique(np.concatenate(self.known))], 0

    def distinct(self):
        return int(np.unique(np.concatenate(self.known)).size)


class Counters(Observer):
    """What a launch has done so far. Translated code calls the methods named like instructions."""

    def __init__(self):
        self.instructions = {}
        self.totals = dict.fromkeys((f.name for f in dataclasses.fields(KernelProfile)[3:]), 0)
        self.sectors = {"load": _Sectors(), "store": _Sectors()}
        self.of_block = {}

    def block(self, block, x):
        """A group has run a basic block."""
        if block.index not in self.of_block:
            self.of_block[block.index] = _count_block(block)
        classes, flops = self.of_block[block.index]
        for class_, count in classes.items():
            self.instructions[class_] = self.instructions.get(class_, 0) + count * x.warps
        self.totals["mma_flops"] += flops * x.warps

    def barrier(self, lanes, chunk, ins):
        self.totals["barriers"] += np.unique(lanes // chunk.pitch).size

    def load(self, x, m, space, address, size, ins):
        self.access(x, m, space, address, size, "load")

    def store(self, x, m, space, address, size, values, ins):
        self.access(x, m, space, address, size, "store")

    def access(self, x, m, space, address, size, what):
        active = np.broadcast_to(True if m is None else m, x.n)
        address = np.broadcast_to(address.astype(np.uint64), x.n)
        if space == "generic":
            window = address >> np.uint64(60)
            self.request(active & (window == 0), address, size, what)
            self.phases(active & (window == 1), address & np.uint64(2**60 - 1), size)
        elif space == "global":
            self.request(active, address, size, what)
        elif space == "shared":
            self.phases(active, address, size)

    def copy(self, x, m, address, size, shared, amount, ins):
        active = np.broadcast_to(True if m is None else m, x.n)
        self.phases(active, np.broadcast_to(shared.astype(np.uint64), x.n), size)
        amount = np.broadcast_to(size if amount is None else amount, x.n)
        self.request(active & (amount > 0), np.broadcast_to(address, x.n), np.minimum(amount, size), "load")

    def matrix_load(self, x, address, count, ins):
        named = np.broadcast_to(x.lane < 8 * count, x.n)
        self.phases(named, np.broadcast_to(address.astype(np.uint64), x.n), 16)

    matrix_store = matrix_load

    def request(self, active, address, size, what):
        if not active.any():
            return
        self.totals[f"global_{what}_bytes"] += int(np.broadcast_to(size, active.shape)[active].sum())
        sectors = np.where(active, address >> _SECTOR, _NONE).reshape(-1, 32)
        sectors = np.sort(sectors, axis=1)
        first = np.ones(sectors.shape, bool)
        np.not_equal(sectors[:, 1:], sectors[:, :-1], out=first[:, 1:])
        distinct = sectors[first & (sectors != _NONE)]
        self.totals[f"global_{what}_sectors"] += distinct.size
        self.sectors[what].add(np.unique(distinct))

    def phases(self, active, address, size):
        """Wavefronts of a shared access: in each phase, the most distinct words that one bank has."""
        lanes = {8: 16, 16: 8}.get(size, 32)
        words = max(size // 4, 1)
        word = (address >> np.uint64(2))[:, None] + np.arange(words, dtype=np.uint64)
        word = np.where(active[:, None], word, _NONE).reshape(-1, lanes * words)
        used = active.reshape(-1, lanes).any(1)
        if not used.any():
            return
        word = np.sort(word[used], axis=1)
        first = np.ones(word.shape, bool)
        np.not_equal(word[:, 1:], word[:, :-1], out=first[:, 1:])
        first &= word != _NONE
        phase, at = np.nonzero(first)
        bank = (word[phase, at] & np.uint64(31)).astype(np.int64)
        per_bank = np.bincount(phase * 32 + bank, minlength=32 * word.shape[0]).reshape(-1, 32)
        self.totals["shared_wavefronts"] += int(per_bank.max(1).sum())
        self.totals["shared_ideal_wavefronts"] += word.shape[0]


def _count_block(block):
    classes, flops = {}, 0
    for instruction in [*block.code, *([block.ending] if block.ending else [])]:
        class_ = instruction_class(instruction)
        classes[class_] = classes.get(class_, 0) + 1
        if instruction.opcode == "mma":
            flops += 2 * 16 * 8 * (16 if "m16n8k16" in instruction.modifiers else 8)
    return classes, flops
