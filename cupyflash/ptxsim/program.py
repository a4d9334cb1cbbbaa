"""A kernel made ready to run: checked, split into blocks, its variables laid out."""

import threading

import numpy as np

from .cooperative import environment_register
from .flow import basic_blocks, bits, in_loop, leave_at_branches, results, sources
from .frames import lay_out
from .inline import inline_calls
from .isa import check_support, types_of
from .shadow import may_be_undefined
from .syntax import Address, Memory, Special, Variable, place
from .translate import BlockTranslator, Constants
from .wide_registers import split_wide_registers
from .wmma import expand_wmma
from .workers import communicates

_SPECIAL_64 = {"gridid"}
RESERVED = 1024  # bytes of shared memory for the system, where cooperative groups has 288 for tiles of several warps


class Program:
    """One kernel of a loaded module. Translated code tells the counters of what it does if `profiled`, and
    the checker if `sanitized`. `name`: what users call it."""

    def __init__(self, module, name, function, profiled, sanitized):
        function = inline_calls(function, module.parsed)
        check_support(function, name, module.arch)
        function = split_wide_registers(expand_wmma(function))
        self.module, self.function = module, function
        self.profiled, self.sanitized = profiled, sanitized
        self.name = name
        self.communicates = communicates(function)
        self.blocks = basic_blocks(function)
        self.frames = {module.parsed.addresses[f.function.name]: f for f in function.frames if f.register}
        called = min((frame.entry for frame in self.frames.values()), default=len(self.blocks))  # perhaps in loops
        polling = (b for b in self.blocks if b.polls)
        self.awaits_blocks = self.communicates and any(b.index >= called or in_loop(self.blocks, b) for b in polling)
        if not profiled and not sanitized:  # who watches hears of every instruction
            leave_at_branches(self.blocks)
        self.constants = Constants()
        self.memo = {}  # what checks work out once for all launches
        self.undefinable = may_be_undefined(self) if sanitized else frozenset()
        self.lock = threading.Lock()
        self.specials = {}  # name -> position among the registers
        self.flushed = _never_subnormal(function)
        self.reserve_specials()
        self.lay_out()

    def lay_out(self):
        parameters = self.function.parameters
        self.parameter_bytes = max((p.offset + p.size for p in parameters), default=0)
        used = _variables_used(self.function)
        placed = [v for v in (*self.module.parsed.variables.values(), *self.function.variables) if v in used]
        # Variable -> offset in its state space, for this kernel.
        self.places = {p: p.offset for p in parameters} | self.module.constants
        self.shared_bytes = place((v for v in placed if v.space == "shared" and not v.extern), self.places)
        local = [v for v in placed if v.space in ("local", "param") and v not in parameters]
        frames = self.function.frames
        self.local_bytes = lay_out(frames, local, self.places) if frames else place(local, self.places)
        dynamic = [v for v in placed if v.extern and v.space == "shared"]  # begins after the static part
        self.places |= {v: -(-self.shared_bytes // v.align) * v.align for v in dynamic}
        self.shared_bytes = max([self.shared_bytes, *(self.places[v] for v in dynamic)])

    @property
    def takes_shared_mem(self):
        """Whether the kernel has an array of dynamic shared memory."""
        return any(variable.extern and variable.space == "shared" for variable in self.places)

    def shared_pitch(self, used):
        """Bytes of shared memory that a block has which is to use so many: with those of the system behind them, where
        the kernel asks for their place."""
        return -(-used // 128) * 128 + RESERVED if "reserved_smem_offset_1" in self.specials else used

    def frame_of(self, block):
        """The frame of the function that a block of a kernel with frames belongs to."""
        return max((f for f in self.function.frames if f.entry <= block.index), key=lambda frame: frame.entry)

    def ways(self):
        """Where control may go from each block, into functions and back: from a return to what follows any call."""
        found = [set(block.targets) for block in self.blocks]
        calls = [block for block in self.blocks if block.ending and block.ending.opcode == "call"]
        for block in self.blocks if calls else ():
            name = self.frame_of(block).function.name
            if not block.targets:
                found[block.index] = {call.targets[0] for call in calls if name in call.ending.operands.names}
        for call in calls:
            names = call.ending.operands.names
            found[call.index] = {f.entry for f in self.frames.values() if f.function.name in names}
        return found

    def unwritten(self):
        """The registers, as a bit set, that some path reads before it writes them."""
        found = self.blocks[0].live_in
        for frame in self.frames.values():
            found |= self.blocks[frame.entry].live_in & ~(1 << frame.register.index)
        return found

    def is_parameter(self, variable):
        """Whether a variable is one of the kernel's own parameters."""
        return any(variable is p for p in self.function.parameters)

    def reserve_specials(self):
        for block in self.blocks:
            found = set()
            for instruction in [*block.code, *([block.ending] if block.ending else [])]:
                for operand in instruction.operands:
                    if isinstance(operand, Special) and not operand.name.startswith(("clock", "globaltimer", "_")):
                        found.add(self.special(operand)[0])
            block.needs = bits(block.reads) + sorted(found)

    def special(self, operand):
        """Position among the registers, and dtype, of a special register."""
        position = self.specials.setdefault(operand.name, len(self.function.registers) + len(self.specials))
        return position, "u8" if operand.name in _SPECIAL_64 else "u4"

    def translate(self, block):
        """The Python function of a block, made at its first visit."""
        with self.lock:
            if block.run is None:
                block.run = BlockTranslator(self, block).translate()
        return block.run


def _variables_used(function):
    found = set()
    for instruction in function.code:
        for operand in instruction.operands:
            base = operand.address if isinstance(operand, Memory) else operand
            base = base.base if isinstance(base, Address) else base
            if isinstance(base, Variable):
                found.add(base)
    return found


_KEEPS = {"mov", "selp", "min", "max", "neg", "abs"}


def _never_subnormal(function):
    """Indices of float32 registers that only ever receive flushed or ordinary numbers."""
    good = {r.index for r in function.registers if r.type == "f32"}
    written = [(i, r) for i in function.code for r in results(i) if r.type == "f32"]
    changed = True
    while changed:
        changed = False
        for instruction, register in written:
            if register.index in good and not _result_is_flushed(instruction, good):
                good.discard(register.index)
                changed = True
    return good


def _result_is_flushed(i, good):
    if "ftz" in i.modifiers:
        return True
    if i.opcode == "cvt":
        return types_of(i)[-1] not in ("f32", "f64", "bf16")
    if i.opcode not in _KEEPS or any(isinstance(o, tuple) for o in i.operands):
        return False
    if not all(r.type == "f32" and r.index in good for r in sources(i) if r.type != "pred"):
        return False
    literals = [o for o in i.operands if hasattr(o, "kind")]
    return all(o.kind == "f32" and not 0 < (int(o.value) & 0x7FFFFFFF) < 0x00800000 for o in literals)


def lane_values(name, chunk):
    """A special register's value for each lane of a chunk (length 1 where all agree)."""
    launch = chunk.launch
    if name[:4] in ("tid.", "ntid") or name[:5] in ("ctaid", "nctai"):
        axis = "xyz".index(name[-1])
        kind = name[:-2]
        if kind == "ntid":
            return _uniform(launch.block[axis])
        if kind == "nctaid":
            return _uniform(launch.grid[axis])
        if kind == "tid":
            if launch.block[axis] == 1:
                return _uniform(0)
            thread = np.arange(chunk.pitch)
            below = int(np.prod(launch.block[:axis], initial=1))
            return np.tile((thread // below % launch.block[axis]).astype(np.uint32), chunk.count)
        if launch.grid[axis] == 1:
            return _uniform(0)
        block = np.arange(chunk.first, chunk.first + chunk.count)
        below = int(np.prod(launch.grid[:axis], initial=1))
        values = (block // below % launch.grid[axis]).astype(np.uint32)
        return values if chunk.count == 1 else np.repeat(values, chunk.pitch)
    lane = chunk.lane
    one = np.uint32(1)
    if name == "laneid":
        return lane
    if name == "warpid":
        return np.tile((np.arange(chunk.pitch) // 32).astype(np.uint32), chunk.count)
    if name.startswith("lanemask_"):
        bit = one << lane
        masks = {"eq": bit, "lt": bit - one, "le": bit | (bit - one), "ge": ~(bit - one), "gt": ~(bit | (bit - one))}
        return masks[name[9:]]
    if name.startswith("envreg"):
        return _uniform(environment_register(name, launch))
    fixed = {
        "nwarpid": chunk.pitch // 32,
        "smid": 0,
        "nsmid": 1,
        "dynamic_smem_size": launch.shared_bytes - launch.program.shared_bytes,
        "total_smem_size": launch.shared_bytes,
        "reserved_smem_offset_1": launch.shared_pitch - RESERVED,
    }
    if name == "gridid":
        return np.zeros(1, np.uint64)
    return _uniform(fixed[name])


def _uniform(value):
    return np.array([value], np.uint32)
