"""wmma: fragments of whole matrices, whose loads, products and stores become those of mma instructions.

The ISA leaves open which lane holds which element. Here, as in the machine code that NVRTC makes for sm_80, the
registers of a fragment are those of the mma instructions that the product takes, tile after tile: m16n16k16 is two
tiles m16n8k16 side by side, m32n8k16 two below each other, and m8n32k16 the transpose of such a product,
C' = B' A'. Each lane's elements are the same for either layout in memory. Registers of float16 A and B beyond those
of the tiles are copies.

A load of A or B from shared memory is an ldmatrix where that can be, of 16-bit elements and of rows of bytes; other
accesses take what lies together in memory, and where that is a column of a tile of 16-bit elements, a movmatrix
transposes it.
"""

import dataclasses
import functools
import re

import numpy as np

from .isa import types_of
from .rewrite import rewritten
from .syntax import Address, Function, Literal, Memory, Register
from .tensor_core import IN_REGISTER, WARP

_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")
_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f32": 32,
    "f64": 64,
    "s32": 32,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
    "b1": 1,
}
_STORED = {"f32": "f32", "f64": "f64"}  # how registers of a type are loaded and stored, others as b32
_OPTIONS = {"satfinite", "rn", "rz", "rm", "rp", "xor", "and", "popc"}
_SHARED = {"shared", "shared::cta"}


@dataclasses.dataclass(frozen=True)
class _Product:
    """How a product of a shape is made of tiles of `height` rows and 8 columns; `turned`: how its transpose is."""

    rows: int
    columns: int
    depth: int
    turned: bool

    @property
    def height(self):
        return 8 if self.rows == 8 else 16


def _product(modifiers):
    m, n, k = next(tuple(map(int, found.groups())) for found in map(_SHAPE.fullmatch, modifiers) if found)
    turned = m < n
    return _Product(*((n, m) if turned else (m, n)), k, turned)


@dataclasses.dataclass(frozen=True)
class Fragment:
    """How one matrix lies in registers and in memory.

    `across` and `along` are its two dimensions: a register of lane (g, t) holds element g across and `together`
    elements along, from t * together on. `blocks`: where each register (pair of registers of accumulators) begins.
    `lies_along`: whether neighbours in memory are neighbours along.
    """

    type: str
    bits: int
    extent: tuple  # elements (across, along)
    together: int
    blocks: tuple
    lies_along: bool
    by_rows: bool  # loaded by ldmatrix

    @property
    def registers(self):
        """Registers that are no copies of others: for every block one, or two that hold an accumulator each."""
        return len(self.blocks) * (2 if self.type in ("f32", "s32") or self.together * self.bits > 64 else 1)

    @property
    def stride(self):
        """The least distance of rows, or of columns, in memory."""
        return self.extent[self.lies_along]

    @property
    def by_element(self):
        """Whether each element is an access of its own."""
        return self.together == 1 or not (self.lies_along or self.bits == 16)

    def offsets(self):
        """Where the accesses of each lane lie, in whole strides and in elements beyond them: (accesses, 32) each. Of
        an ldmatrix, lane 8 i + r names row r of block i."""
        lane = np.arange(WARP)
        blocks = np.array(self.blocks)
        if self.by_rows:
            count = min(len(blocks), 4)
            across, along = np.moveaxis(blocks.reshape(-1, count, 2)[:, lane // 8 % count], 2, 0)
            more = lane % 8
            across, along = (across + more, along) if self.lies_along else (across, along + more)
        else:
            across, along = np.moveaxis(blocks[:, None, None], 3, 0)
            g = lane // 4
            t = lane % 4 * self.together + np.arange(self.together if self.by_element else 1)[:, None]
            turned = not self.lies_along and not self.by_element
            across, along = np.broadcast_arrays(*((across + t, along + g) if turned else (across + g, along + t)))
            across, along = across.reshape(-1, WARP), along.reshape(-1, WARP)
        return (across, along) if self.lies_along else (along, across)


@functools.cache
def fragment_of(modifiers):
    """The Fragment of a wmma.load or wmma.store."""
    product = _product(modifiers)
    operand = next(m for m in modifiers if m in ("a", "b", "c", "d"))
    type_ = next(m for m in modifiers if m in _BITS)
    factor = operand in ("a", "b")
    left = operand == ("b" if product.turned else "a")
    height = 8 if factor and not left else product.height
    extent = (product.rows if left or not factor else product.columns, product.depth if factor else product.columns)
    together = IN_REGISTER[type_] if factor else 2
    blocks = tuple(
        (across + half, along)
        for across in range(0, extent[0], height)
        for along in range(0, extent[1], 4 * together)
        for half in range(0, height, 8)
    )
    along_columns = operand == "a" or (not factor and not product.turned)
    lies_along = along_columns == ("row" in modifiers)
    has_rows = _BITS[type_] == 16 or (_BITS[type_] == 8 and lies_along)
    by_rows = factor and has_rows and not _SHARED.isdisjoint(modifiers)
    return Fragment(type_, _BITS[type_], extent, together, blocks, lies_along, by_rows)


def expand_wmma(function: Function) -> Function:
    """A copy of a kernel in which loads, stores and mma instructions stand for those of wmma.

    What is left of a wmma.load or wmma.store computes the addresses of the accesses behind it.
    """
    if not any(i.opcode == "wmma" for i in function.code):
        return function
    expander = _Expander(function.registers)
    return rewritten(function, expander.registers, expander.expansion)


class _Expander:
    def __init__(self, registers):
        self.registers = list(registers)
        self.at, self.code = None, []  # the instruction that is being replaced, and by what

    def expansion(self, instruction):
        """The instructions that stand for one."""
        if instruction.opcode != "wmma":
            return [instruction]
        self.at, self.code = instruction, []
        steps = {"load": self.load, "store": self.store, "mma": self.mma}
        next(steps[m] for m in instruction.modifiers if m in steps)()
        return self.code

    def fresh(self, type_):
        register = Register(len(self.registers), f"%wmma{len(self.registers)}", type_)
        self.registers.append(register)
        return register

    def emit(self, text, *operands):
        opcode, *modifiers = text.split(".")
        self.code.append(dataclasses.replace(self.at, opcode=opcode, modifiers=tuple(modifiers), operands=operands))

    def accesses(self, fragment, memory, stride=None):
        """Memory operands of the accesses, and the suffix of their state space."""
        addresses = tuple(self.fresh("b64") for _ in fragment.offsets()[0])
        operands = (addresses, memory, stride or Literal(fragment.stride))
        self.code.append(dataclasses.replace(self.at, operands=operands))
        space = next((f".{m}" for m in self.at.modifiers if m in ("global", "shared", "shared::cta")), "")
        return [Memory(Address(address)) for address in addresses], space

    def load(self):
        registers, memory, *stride = self.at.operands
        fragment = fragment_of(self.at.modifiers)
        places, space = self.accesses(fragment, memory, *stride)
        loaded = registers[: fragment.registers]
        if fragment.by_rows:
            trans = "" if fragment.lies_along else ".trans"
            count = len(loaded) // len(places)
            for n, place in enumerate(places):
                part = loaded[n * count : (n + 1) * count]
                self.emit(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16", part, place)
        else:
            self.transfer(fragment, loaded, places, space, "ld")
        for n, copy in enumerate(registers[len(loaded) :]):
            self.emit("mov.b32", copy, loaded[n % len(loaded)])

    def store(self):
        memory, registers, *stride = self.at.operands
        fragment = fragment_of(self.at.modifiers)
        places, space = self.accesses(fragment, memory, *stride)
        self.transfer(fragment, registers, places, space, "st")

    def transfer(self, fragment, registers, places, space, opcode):
        """The loads (`ld`) or stores (`st`) of a fragment's registers."""
        order = slice(None, None, 1 if opcode == "ld" else -1)

        def access(type_, value, place):
            self.emit(f"{opcode}{space}.{type_}", *(value, place)[order])

        type_ = _STORED.get(fragment.type, "b32")
        if fragment.bits == 8 and fragment.by_element:
            for n, register in enumerate(registers):
                parts = tuple(self.fresh("b8") for _ in range(4))
                for part, place in zip(parts, places[4 * n : 4 * n + 4], strict=True):
                    access("b8", part, place)
                self.emit("mov.b32", register, parts)
        elif fragment.bits == 16 and not fragment.lies_along:
            for register, place in zip(registers, places, strict=True):
                column = self.fresh("b32")
                turn = ("movmatrix.sync.aligned.m8n8.trans.b16", *(register, column)[order])
                if opcode == "st":
                    self.emit(*turn)
                access(type_, column, place)
                if opcode == "ld":
                    self.emit(*turn)
        elif len(registers) == 2 * len(places):
            for n, place in enumerate(places):
                access(f"v2.{type_}", registers[2 * n : 2 * n + 2], place)
        else:
            for register, place in zip(registers, places, strict=True):
                access(type_, register, place)

    def mma(self):
        product = _product(self.at.modifiers)
        d, a, b, c = self.at.operands
        types = types_of(self.at)
        if len(types) == 2:  # of d and c
            types = [types[0], "f16", "f16", types[1]]
        kept = "f32" if "f32" in types else types[0]
        addends = c if types[3] == kept else self.widened(c)
        results = d if types[0] == kept else tuple(self.fresh(kept) for _ in addends)
        left, right = (b, a) if product.turned else (a, b)
        options = [m for m in self.at.modifiers if m in _OPTIONS]
        shape = f"m{product.height}n8k{product.depth}"
        text = ".".join(("mma.sync.aligned", shape, "row.col", *options, kept, types[1], types[2], kept))
        rows, columns = product.rows // product.height, product.columns // 8
        width = product.depth // (4 * IN_REGISTER[types[1]])  # registers of a tile of the right factor
        tall, accumulators = width * product.height // 8, len(addends) // (rows * columns)
        for i in range(rows):
            for j in range(columns):
                of_tile = slice((i * columns + j) * accumulators, (i * columns + j + 1) * accumulators)
                factors = left[i * tall : (i + 1) * tall], right[j * width : (j + 1) * width]
                self.emit(text, results[of_tile], *factors, addends[of_tile])
        if results is not d:
            for n, packed in enumerate(d):
                self.emit("cvt.rn.f16x2.f32", packed, results[2 * n + 1], results[2 * n])

    def widened(self, halves):
        """float32 registers with the numbers of packed float16."""
        wide = []
        for register in halves:
            parts = self.fresh("b16"), self.fresh("b16")
            self.emit("mov.b32", parts, register)
            for part in parts:
                wide.append(self.fresh("f32"))
                self.emit("cvt.f32.f16", wide[-1], part)
        return tuple(wide)


def fragment_addresses(x, address, stride, fragment):
    """(accesses, lanes) addresses of a fragment whose matrix begins at `address`."""
    strides, more = (o[:, None].astype(np.int64) for o in fragment.offsets())
    stride, address = (v if v.size == 1 else v.reshape(-1, WARP) for v in (stride, address))
    offset = (strides * stride.astype(np.int64) + more) * fragment.bits // 8
    addresses = address.astype(np.uint64) + offset.astype(np.uint64)
    return np.broadcast_to(addresses, (len(strides), x.warps, WARP)).reshape(len(strides), -1)
