"""State spaces: where a lane's address lies, and loads and stores once that is known.

A space turns addresses into elements of flat NumPy arrays after checking them; nothing is ever read
or written through an unchecked index. `sel` are positions of the active lanes (None: all of them).
"""

import ctypes
import itertools

import numpy as np

# Generic addresses: host addresses are global memory, the other spaces have windows far above them.
WINDOW_SHIFT = np.uint64(60)
SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW = (np.uint64(i << 60) for i in (1, 2, 3))

_DTYPES = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8"), 16: np.dtype("c16")}
_SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}


def views_of(data):
    """One flat array for each access size over the same bytes; their number is a multiple of 16."""
    return {size: data.view(dtype) for size, dtype in _DTYPES.items()}


def padded(size):
    """Bytes, rounded up so that 16-byte elements fit."""
    return -(-size // 16) * 16


def zeros_at(alignment, size):
    """Bytes that start at a multiple of `alignment`. Whatever is a view of them has this array as its last base."""
    memory = bytearray(padded(size) + alignment)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % alignment
    return np.ndarray(size, np.uint8, buffer=memory, offset=start)


class Buffer:
    """A space of `size` bytes for each row: shared memory has a row per block, local memory one
    per lane, parameters and constants a single one for all."""

    def __init__(self, name, size, rows, fill=0xFF, writable=True):
        self.name, self.size, self.writable = name, size, writable
        self.pitch = padded(size)
        self.views = views_of(np.full(max(self.pitch * rows, 16), fill, np.uint8))

    def base(self, x):
        """First byte of each lane's row."""
        return None

    def locate(self, x, sel, address, size, write, ins):
        top = int(address.max())
        if top > self.size - size:
            bad = address > max(self.size - size, 0) if self.size >= size else np.ones(address.shape, bool)
            raise x.fault(ins, sel, bad, address, self.name, size, f"outside its {self.size} bytes", write)
        if size > 1 and int(np.bitwise_or.reduce(address)) & (size - 1):
            bad = address & address.dtype.type(size - 1) != 0
            raise x.fault(ins, sel, bad, address, self.name, size, "misaligned", write)
        if write and not self.writable:
            raise x.fault(ins, sel, np.ones(address.shape, bool), address, self.name, size, "read-only", write)
        index = address.astype(np.int64)
        base = self.base(x)
        if base is not None:
            index = index + (base if sel is None else base[sel])
        return [(self.views[size], index >> _SHIFT[size], None)]


class SharedMemory(Buffer):
    def base(self, x):
        return x.shared_base


class LocalMemory(Buffer):
    def base(self, x):
        return x.local_base


class Segment:
    """Mapped bytes [start, stop) of host memory."""

    def __init__(self, start, stop, writable):
        self.start, self.stop, self.writable = np.uint64(start), np.uint64(stop), writable
        origin = start & ~15
        raw = (ctypes.c_uint8 * (padded(stop - origin))).from_address(origin)
        self.origin = np.uint64(origin)
        self.views = views_of(np.frombuffer(raw, np.uint8))


class GlobalMemory:
    """The host arrays that a launch may touch, at their real addresses."""

    name = "global"

    def __init__(self, extents):
        """`extents`: (start, stop, writable) byte ranges; where they overlap, writable wins."""
        cuts = sorted({edge for start, stop, _ in extents for edge in (start, stop)})
        pieces = []
        for start, stop in itertools.pairwise(cuts):
            covering = [w for a, b, w in extents if a <= start and stop <= b]
            if not covering:
                continue
            if pieces and pieces[-1][1] == start and pieces[-1][2] == any(covering):
                pieces[-1][1] = stop
            else:
                pieces.append([start, stop, any(covering)])
        self.segments = [Segment(*piece) for piece in pieces]
        self.starts = np.array([s.start for s in self.segments], np.uint64)
        self.hint = {}

    def locate(self, x, sel, address, size, write, ins):
        if size > 1 and int(np.bitwise_or.reduce(address)) & (size - 1):
            bad = address & np.uint64(size - 1) != 0
            raise x.fault(ins, sel, bad, address, "global", size, "misaligned", write)
        segment = self.hint.get(ins)
        if segment is not None:
            part = self.within(segment, x, sel, address, size, write, ins)
            if part is not None:
                return [part]
        number = np.searchsorted(self.starts, address, side="right") - 1
        parts = []
        for i in np.unique(number):
            lanes = None if len(parts) == 0 and (number == i).all() else np.flatnonzero(number == i)
            chosen = address if lanes is None else address[lanes]
            inner = sel if lanes is None else lanes if sel is None else sel[lanes]
            segment = self.segments[i] if i >= 0 else None
            part = segment and self.within(segment, x, inner, chosen, size, write, ins)
            if part is None:
                bad = self.outside(number, address, size)
                raise x.fault(ins, sel, bad, address, "global", size, "outside every mapped array", write)
            self.hint[ins] = segment
            parts.append((part[0], part[1], lanes))
        return parts

    def outside(self, number, address, size):
        """Which addresses lie in no segment; `number`: of the last segment that starts before each."""
        stops = np.array([s.stop for s in self.segments], np.uint64)
        return number < 0 if not stops.size else (number < 0) | (address > stops[number] - np.uint64(size))

    def within(self, segment, x, sel, address, size, write, ins):
        offset = address - segment.start
        if int(offset.max()) > int(segment.stop - segment.start) - size:
            return None
        if write and not segment.writable:
            raise x.fault(
                ins, sel, np.ones(address.shape, bool), address, "global", size, "in a read-only array", write
            )
        index = (address - segment.origin) >> np.uint64(_SHIFT[size])
        return segment.views[size], index.view(np.int64), None


class GenericSpace:
    """Any of the spaces, told apart by window."""

    name = "generic"

    def __init__(self, global_, shared, local, param):
        self.spaces = {0: global_, 1: shared, 2: local, 3: param}

    def locate(self, x, sel, address, size, write, ins):
        window = address >> WINDOW_SHIFT
        low, high = int(window.min()), int(window.max())
        if low == high:
            return self.space(low, x, sel, address, size, write, ins).locate(
                x, sel, self.inside(low, address), size, write, ins
            )
        parts = []
        for number in np.unique(window):
            lanes = np.flatnonzero(window == number)
            space = self.space(int(number), x, sel, address, size, write, ins)
            inner = lanes if sel is None else sel[lanes]
            for view, index, among in space.locate(
                x, inner, self.inside(int(number), address[lanes]), size, write, ins
            ):
                parts.append((view, index, lanes if among is None else lanes[among]))
        return parts

    def space(self, number, x, sel, address, size, write, ins):
        if number not in self.spaces:
            bad = address >> WINDOW_SHIFT == number
            raise x.fault(ins, sel, bad, address, "generic", size, "outside every mapped array", write)
        return self.spaces[number]

    def inside(self, number, address):
        return address - np.uint64(number << 60) if number else address


# -- accesses ------------------------------------------------------------------------------------------
def acting(x, m, address):
    """Positions of active lanes (None: all), and their addresses. Empty positions: nobody."""
    if m is None:
        return None, address
    if m.size == 1:
        return (None if m[0] else np.empty(0, np.intp)), address
    sel = np.flatnonzero(m)
    if sel.size == m.size:
        return None, address
    return sel, address if address.size == 1 else address[sel]


def load(x, m, space, address, size, ins):
    """Bits at `address`, as an array of unsigned integers (complex128 for 16 bytes), one element if
    the address and the space are the same for all lanes. Inactive lanes get zeros."""
    sel, address = acting(x, m, address)
    if sel is not None and sel.size == 0:
        return np.zeros(1, _DTYPES[size])
    parts = space.locate(x, sel, address, size, False, ins)
    if len(parts) == 1:
        view, index, _ = parts[0]
        values = view.take(index)
    else:
        values = np.empty(address.shape, _DTYPES[size])
        for view, index, lanes in parts:
            values[lanes] = view.take(index)
    if sel is None or values.size == 1:
        return values
    spread = np.zeros(x.n, _DTYPES[size])
    spread[sel] = values
    return spread


def store(x, m, space, address, size, value, ins):
    """Where several lanes write one place, the last one wins."""
    sel, address = acting(x, m, address)
    if sel is not None:
        if sel.size == 0:
            return
        if value.size > 1:
            value = value[sel]
    local = x.local.views[size]
    for view, index, lanes in space.locate(x, sel, address, size, True, ins):
        chosen = value if lanes is None or value.size == 1 else value[lanes]
        # A change is what may end a loop. Parameters of calls, and variables of code for debugging, are written in each
        # turn of a loop that waits: they must be other than before.
        x.changes += view is not local or "local" in ins.modifiers or bool((view[index] != chosen).any())
        if index.size == 1:
            view[index] = chosen[-1:]
        else:
            view[index] = chosen


def load_vector(x, m, space, address, size, count, ins):
    """`count` elements of `size` bytes each."""
    if size * count > 16:
        half = count // 2
        second = address + address.dtype.type(size * half)
        return (*load_vector(x, m, space, address, size, half, ins), *load_vector(x, m, space, second, size, half, ins))
    values = load(x, m, space, address, size * count, ins)
    return tuple(np.ascontiguousarray(values.view(_DTYPES[size]).reshape(-1, count).T))


def store_vector(x, m, space, address, size, values, ins):
    if size * len(values) > 16:
        half = len(values) // 2
        second = address + address.dtype.type(size * half)
        store_vector(x, m, space, address, size, values[:half], ins)
        store_vector(x, m, space, second, size, values[half:], ins)
        return
    total = size * len(values)
    n = max(v.size for v in values)
    together = np.empty((n, len(values)), _DTYPES[size])
    for i, value in enumerate(values):
        together[:, i] = value
    store(x, m, space, address, total, together.view(_DTYPES[total]).reshape(-1), ins)
