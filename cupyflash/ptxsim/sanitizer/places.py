"""Where the lanes of an access find their elements, for all checks alike."""

from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """Where some lanes access memory: all of one array."""

    view: np.ndarray  # over the whole space, as in `memory`
    index: np.ndarray  # elements of it; a single one may stand for all lanes
    lanes: np.ndarray  # positions in the chunk
    sel: np.ndarray | None  # positions in the group, None for all
    size: int  # bytes of an element
    offset: int  # bytes of the access that lie before


def positions(x):
    """Positions in the chunk of all lanes of a group, active or not."""
    found = x.memo.get("positions")
    if found is None:
        found = x.memo["positions"] = np.arange(x.n) if x.lanes is None else x.lanes
    return found


def active(m):
    """Positions in the group of the lanes of a mask; None: all."""
    if m is None or (m.size == 1 and m[0]):
        return None
    if m.size == 1:
        return np.empty(0, np.intp)
    sel = np.flatnonzero(m)
    return None if sel.size == m.size else sel


def lanes_of(x, m):
    """Positions in the chunk of the lanes of a mask."""
    sel = active(m)
    return positions(x) if sel is None else positions(x)[sel]


def matrix_rows(x, count):
    """The mask of the lanes that name rows to an ldmatrix of `count` matrices; None for all."""
    if count == 4:
        return None
    key = ("matrix rows", count)
    if key not in x.memo:
        x.memo[key] = x.lane < 8 * count
    return x.memo[key]


def places(x, m, name, address, size, write, ins):
    """The Places of an access; none if nobody is active."""
    space = {"global": x.global_, "shared": x.shared, "local": x.local, "generic": x.generic}[name]
    sel = active(m)
    if sel is not None:
        if sel.size == 0:
            return
        address = address if address.size == 1 else address[sel]
    for offset in range(0, size, 16):
        part = min(size - offset, 16)
        at = address + address.dtype.type(offset) if offset else address
        for view, index, among in space.locate(x, sel, at, part, write, ins):
            inner = sel if among is None else among if sel is None else sel[among]
            lanes = positions(x) if inner is None else positions(x)[inner]
            yield Place(view, index, lanes, inner, part, offset)
