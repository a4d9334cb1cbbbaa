"""cp.async.bulk: copies of many bytes, whose completion is counted by an mbarrier."""

import dataclasses

import numpy as np

ROW = 16  # bytes: sizes and addresses are multiples of it


@dataclasses.dataclass(slots=True, eq=False)
class Transfer:
    """Copies to the shared memory of one block that one instruction starts, in rows of 16 bytes."""

    at: int  # the mbarrier object
    lanes: np.ndarray  # of each row who has started it: positions in the group
    target: np.ndarray  # addresses of the rows
    source: np.ndarray
    ins: object
    # [(which rows, (flat array of shared memory, elements), the same of global memory)]
    parts: list = dataclasses.field(default_factory=list)

    def locate(self, x):
        """Find the rows, which may fault."""
        ((to, index, _),) = x.shared.locate(x, self.lanes, self.target, ROW, True, self.ins)
        for view, places, rows in x.global_.locate(x, self.lanes, self.source, ROW, False, self.ins):
            rows = np.arange(index.size) if rows is None else rows
            self.parts.append((rows, (to, index[rows]), (view, places)))
        return self

    def perform(self, observers):
        for _, (to, index), (view, places) in self.parts:
            to[index] = view[places]
            for observer in observers:
                observer.copied(to, index, view, places, self.ins)


def transfers(x, objects, target, source, size, ins):
    """The Transfers of an instruction; `objects`: (mbarrier, lanes of the group that name it)."""
    for at, lanes in objects:
        bad = size[lanes] % ROW != 0
        if bad.any():
            lane = int(lanes[np.argmax(bad)])
            raise x.error(ins, lane, f"{ins} of {size[lane]} bytes, must be a multiple of {ROW}", "misaligned access")
        rows = size[lanes].astype(np.int64) // ROW
        who = np.repeat(lanes, rows)
        if who.size:
            offset = ROW * (np.arange(who.size) - np.repeat(np.cumsum(rows) - rows, rows))
            addresses = target[who] + offset.astype(np.uint32), source[who] + offset.astype(np.uint64)
            yield Transfer(at, who, *addresses, ins).locate(x)
