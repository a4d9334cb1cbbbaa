"""Uninitialised reads: values that nobody has written, followed until something depends on them.

A shadow byte stands for each byte of shared and local memory, and of those arrays of `ptxsim.empty` that a launch
touches: where its undefined value came from, which may be another memory. Shadows of registers tell the same of their
halves (halves.py). Undefined values may be copied, computed with and selected away, as padding and tails are; using
one as an address, a predicate, an operand of an atomic or a result in global memory is a finding. Used is what is
undefined in all of its bytes, but for operands of mma, each half of which counts.
"""

import numpy as np

from ..flow import bits
from ..group import WARP
from ..memory import views_of
from ..observer import Observer
from ..stack import Saved
from ..tensor_core import transposed
from ..warp import absent_sources, bits_of_warps, shuffle_source
from .fresh import unwritten_bytes
from .halves import LAST, NONE, UNWRITTEN, WHOLE, grown, half, of_bytes, or_none, pair, tiles, to_bytes, whole

_DEFINED = np.full(1, NONE, np.uint16)


class Undefined(Observer):
    """Shadows of the memory and the registers of a launch."""

    def __init__(self, checker):
        self.checker = checker
        checker.undefined = self
        # number -> (kind of memory, instruction that read it, what it is); 0 and UNWRITTEN number none
        self.origins = [None, None]
        self.numbers = {}
        self.tracked = {}  # id of a view of memory -> its shadow
        for segment in checker.launch.global_.segments:
            unwritten = unwritten_bytes(segment)
            if unwritten is not None:
                self.tracked |= _shadows(segment.views, unwritten)

    def begin(self, chunk):
        self.chunk, self.completed = chunk, 0
        self.quiet = set() if self.tracked else {"global"}  # spaces without any unwritten byte
        self.shadows = dict(self.tracked)
        self.own = {}  # id of a view of shared or local memory -> name of the space
        for space in (chunk.shared, chunk.local):
            if space.size:
                self.shadows |= _shadows(space.views, np.ones(space.views[1].size, np.uint8))
                self.own |= dict.fromkeys(map(id, space.views.values()), space.name)
            else:
                self.quiet.add(space.name)
        if chunk.launch.shared_pitch > chunk.launch.shared_bytes:  # what belongs to the system has some value
            blocks = self.shadows[id(chunk.shared.views[1])].reshape(chunk.count, -1)
            blocks[:, chunk.launch.shared_bytes :] = 0
        self.see_generic()
        self.kept, self.saved = {}, Saved(chunk.n)
        program = chunk.launch.program
        for index in bits(program.unwritten()):
            name = program.function.registers[index].name
            number = self.number(("uninitialised register", index), None, f"register {name}, which was given no value")
            self.kept[index] = np.full(1, number | WHOLE, np.uint16)

    def barrier(self, lanes, chunk, ending):
        """At the first, second, fourth, ... barrier see whether all of shared memory has been written."""
        self.completed += 1
        if self.completed & (self.completed - 1) == 0 and "shared" not in self.quiet:
            if not self.shadows[id(chunk.shared.views[8])].any():
                self.quiet.add("shared")
                self.see_generic()

    def see_generic(self):
        if self.quiet >= {"global", "shared", "local"}:
            self.quiet.add("generic")

    # -- origins and findings ------------------------------------------------------------------------
    def number(self, key, ins, what):
        """The number of an origin, which is the same for equal keys."""
        if key not in self.numbers:
            self.numbers[key] = min(len(self.origins), LAST)
            if len(self.origins) < LAST:
                self.origins.append((key[0], ins, what))
            elif len(self.origins) == LAST:  # it stands for all further ones
                self.origins.append(("uninitialised value", None, "one of many uninitialised values"))
        return self.numbers[key]

    def memory_read(self, name, ins):
        return self.number((f"uninitialised {name} memory", ins), ins, f"{name} memory that nothing has written")

    def use(self, x, m, shadow, ins, what):
        """Something depends on the lanes of a shadow that are undefined as a whole."""
        bad = np.broadcast_to(shadow >= WHOLE if m is None else (shadow >= WHOLE) & m, x.n)
        if not bad.any():
            return
        numbers = np.where(bad, shadow & np.uint16(LAST), NONE)
        for number in np.unique(numbers[bad]):
            lanes = numbers == number
            kind, read, origin = self.origins[number]
            if read is not None and read.where != ins.where:
                origin += f", read at {read.where}"
            message = f"{x.thread(int(np.argmax(lanes)))}: {what} of {ins} depends on {origin}"
            other = None if read is None else ins
            self.checker.found(kind, read or ins, message, other, int(np.count_nonzero(lanes)))

    # -- registers -----------------------------------------------------------------------------------
    def registers(self, x):
        """Shadows of the registers of a group, by index, without those that are None."""
        if not self.kept or x.lanes is None:
            return self.kept
        return {index: u if u.size == 1 else u[x.lanes] for index, u in self.kept.items()}

    def keep(self, x, pairs):
        """At the end of a block, what other blocks need to know."""
        whole = x.lanes is None and x.mask is None
        for index, shadow in pairs:
            old = self.kept.get(index)
            if shadow is None and old is None:
                continue
            if whole:
                new = shadow
            else:
                new = np.array(np.broadcast_to(NONE if old is None else old, self.chunk.n))
                new[x.positions()] = x.of_active(NONE if shadow is None else shadow)
            if new is None or not new.any():
                self.kept.pop(index, None)
            else:
                self.kept[index] = new

    def called(self, depth, registers, lanes):
        for index in registers:
            self.saved.keep(depth, index, lanes, self.kept.get(index, _DEFINED))

    def entered(self, lanes, frames, start, stop):
        """What earlier calls have left in a frame is no value of its variables."""
        first = lanes * self.chunk.local.pitch + frames.astype(np.int64)
        self.shadows[id(self.chunk.local.views[1])][first[:, None] + np.arange(start, stop)] = UNWRITTEN

    def returned(self, depth, registers, lanes):
        for index in registers:
            new = self.saved.restored(depth, index, lanes, self.kept.pop(index, _DEFINED))
            if new.any():
                self.kept[index] = new

    def either(self, a, b):
        return np.maximum(a, b)

    whole, half, pair = staticmethod(whole), staticmethod(half), staticmethod(pair)

    def all_of(self, *shadows):
        """What is put together from parts is undefined if all of them are."""
        if any(u is None for u in shadows):
            return None
        undefined = [u >= WHOLE for u in np.broadcast_arrays(*shadows)]
        return or_none(np.where(np.logical_and.reduce(undefined), shadows[0], NONE))

    def chosen(self, p, a, b):
        """The shadow of `p ? a : b`."""
        if a is None and b is None:
            return None
        return or_none(np.where(p, NONE if a is None else a, NONE if b is None else b))

    def undecided(self, a, a_decides, b, b_decides):
        """The shadow of an and (or): one false (true) operand that is defined decides it."""
        if a is None and b is None:
            return None
        a_decides = a_decides if a is None else (a < WHOLE) & a_decides
        b_decides = b_decides if b is None else (b < WHOLE) & b_decides
        known = a if b is None else b if a is None else np.maximum(a, b)
        return or_none(np.where(a_decides | b_decides, NONE, known))

    def inserted(self, a, a_makes_room, b, b_makes_room):
        """The shadow of an or: a defined operand fills the room that an undefined one makes for it."""
        if a is None:
            return None if b_makes_room else b
        if b is None:
            return None if a_makes_room else a
        a_fills = b_makes_room & (a < WHOLE)
        b_fills = a_makes_room & (b < WHOLE)
        return or_none(np.where(a_fills | b_fills, NONE, np.maximum(a, b)))

    # -- memory --------------------------------------------------------------------------------------
    def read(self, x, m, space, address, size, count, ins):
        """The shadow of a loaded value; of a vector, a tuple of those of its elements, or None."""
        if space in self.quiet:
            return None
        origin = None
        for place in self.checker.locate(x, m, space, address, size * count, False, ins):
            shadow = self.shadows.get(id(place.view))
            if shadow is None:
                continue
            columns = place.size // size
            words = shadow.take(place.index).view(f"u{size}").reshape(-1, columns)
            if words.any():
                if origin is None:
                    origin = np.zeros((x.n, count), np.uint16)
                first = place.offset // size
                number = self.memory_read(self.own.get(id(place.view), "global"), ins)
                lanes = slice(None) if place.sel is None else place.sel
                origin[lanes, first : first + columns] = of_bytes(words, size, number)
        if origin is None:
            return None
        columns = tuple(or_none(np.ascontiguousarray(column)) for column in origin.T)
        return columns[0] if count == 1 else columns

    def write(self, x, m, space, address, size, shadows, used, ins):
        """Undefined values make bytes of memory undefined again. Globally that is a use of `used` (None: of all of
        them), and only what does not count as used stays undefined."""
        defined = not any(u is not None for u in (*shadows, *(used or ())))
        if defined and space in self.quiet:
            return
        for place in self.checker.locate(x, m, space, address, size * len(shadows), True, ins):
            shadow = self.shadows.get(id(place.view))
            own = id(place.view) in self.own
            if shadow is not None and not defined and (own or used is not None):
                among = shadows[place.offset // size :][: place.size // size]
                values = to_bytes(x, among, size).view(shadow.dtype).reshape(-1)
                values = values if place.sel is None else values[place.sel]
                shadow[place.index] = values[-1:] if place.index.size == 1 else values
                if own:
                    self.quiet -= {self.own[id(place.view)], "generic"}
            elif shadow is not None:
                shadow[place.index] = 0
            if not defined and not own and place.offset == 0:
                here = np.zeros(x.n, bool)
                here[slice(None) if place.sel is None else place.sel] = True
                for u in shadows if used is None else used:
                    if u is not None:
                        self.use(x, here, u, ins, "the value")

    def change(self, x, m, space, address, size, count, exchange, ins):
        """An atomic of one value or a vector: exch only writes, the other operations depend on what was there."""
        if space in self.quiet:
            return None
        m = x.mask if m is None else m
        before = self.read(x, m, space, address, size, count, ins)
        self.write(x, m, space, address, size, (None,) * count, None, ins)
        if before is None or exchange:
            return before
        for old in before if count > 1 else (before,):
            if old is not None:
                self.use(x, m, old, ins, "the old value")
        return None

    def read_matrix(self, x, address, count, trans, ins):
        """Shadows of the registers of ldmatrix."""
        if "shared" in self.quiet:
            return None
        (place,) = self.checker.locate_rows(x, address, count, False, ins)
        index = np.broadcast_to(place.index, place.lanes.shape)
        words = _rows(self.shadows[id(place.view)].take(index).view(np.uint32), count)
        words = (transposed(words) if trans else words).reshape(count, -1)
        if not words.any():
            return None
        return tuple(map(or_none, of_bytes(words, 4, self.memory_read("shared", ins))))

    def write_matrix(self, x, address, shadows, trans, ins):
        defined = all(u is None for u in shadows)
        if defined and "shared" in self.quiet:
            return
        count = len(shadows)
        (place,) = self.checker.locate_rows(x, address, count, True, ins)
        words = to_bytes(x, shadows, 4).T.reshape(count, -1, WARP)
        words = (transposed(words) if trans else words).reshape(count, -1, 8, 4).swapaxes(0, 1)
        self.shadows[id(place.view)][place.index] = np.ascontiguousarray(words).view(place.view.dtype).reshape(-1)
        if not defined:
            self.quiet -= {"shared", "generic"}

    def copied(self, view, to, source, at, ins):
        """A cp.async has happened; undefined bytes stay so."""
        from_ = None if source is None else self.shadows.get(id(source))
        bytes_ = None if from_ is None else from_[at].view(np.uint8)
        if bytes_ is not None and bytes_.any():
            bytes_[bytes_ == UNWRITTEN] = self.memory_read("global", ins)
            self.shadows[id(view)][to] = bytes_.view(from_.dtype)
            self.quiet -= {"shared", "generic"}
        elif "shared" not in self.quiet:
            self.shadows[id(view)][to] = 0

    # -- across a warp -------------------------------------------------------------------------------
    def shuffled(self, x, m, shadow, mode, b, c, members, ins):
        source, inside = shuffle_source(x, mode, b, c)
        absent = absent_sources(x, m, source, inside, members)
        if shadow is not None and shadow.size > 1:
            shadow = or_none(shadow.take(source))
        if absent is None:
            return shadow
        number = self.number(("inactive lane", ins), ins, "a lane that takes no part")
        return np.where(absent, number | WHOLE, NONE if shadow is None else shadow)

    def of_warps(self, x, m, shadow, members=None, decided=None):
        """What depends on all active lanes of a warp that `members` names, unless one that is defined decides it."""
        if shadow is None:
            return None
        shadow = np.broadcast_to(shadow, x.n)
        active = np.broadcast_to(True if m is None else m, x.n)
        members = np.uint32(0xFFFFFFFF) if members is None else members
        depends = bits_of_warps(x, active & (shadow >= WHOLE)) & members != 0
        if decided is not None:
            depends &= bits_of_warps(x, active & (shadow < WHOLE) & decided) & members == 0
        origin = np.where(active, shadow, NONE).reshape(-1, WARP).max(1)
        return or_none(np.where(depends, np.repeat(origin, WARP), NONE))

    def mma(self, x, a, b, c):
        """A row of the result depends on that row of A, a column on that column of B."""
        height = len(a) // len(b)  # in times of 8 rows
        rows = [grown(tiles(x, a[n::height])).max(2, keepdims=True) for n in range(height)]
        columns = grown(tiles(x, b)).max(2).reshape(-1, 1, 4, 2)
        results = []
        halves = len(c) == height  # two accumulators of a row in one register
        for n, addend in enumerate(c):
            row, column = (rows[n], columns.max(-1)) if halves else (rows[n // 2], columns[..., n % 2])
            tile = np.maximum(tiles(x, (addend,)), np.maximum(row, column))
            results.append(or_none(tile.reshape(-1)))
        return tuple(results)


def _shadows(views, unwritten):
    """Views of shadow bytes by the identity of the views that they stand for."""
    return {id(views[size]): view for size, view in views_of(unwritten).items()}


def _rows(words, count):
    """Words of rows in the order of lanes, 8 * count for each warp, as (count, warps, 8 * 4)."""
    return np.ascontiguousarray(words.reshape(-1, count, 8 * 4).swapaxes(0, 1))
