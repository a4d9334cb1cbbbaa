"""Which cp.async a wait completes."""

import numpy as np


class Copies:
    """What the lanes of a chunk have issued and not yet waited for."""

    def __init__(self, chunk):
        self.committed = np.zeros(chunk.n, np.int64)  # groups of each lane
        self.pending = []  # (lanes, the group of each, elements of shared memory, their size, the instruction)

    def issue(self, lanes, index, size, ins):
        self.pending.append((lanes, self.committed[lanes], index, size, ins))

    def commit(self, lanes):
        self.committed[lanes] += 1

    def wait(self, lanes, allowed):
        """(lanes, elements, size, instruction) that lanes complete by waiting for all but `allowed` groups."""
        waits = np.zeros(self.committed.size, bool)
        waits[lanes] = True
        done, still = [], []
        for who, group, index, size, ins in self.pending:
            due = waits[who] if allowed is None else waits[who] & (group < self.committed[who] - allowed)
            if due.all():
                done.append((who, index, size, ins))
                continue
            if due.any():
                done.append((who[due], index[due], size, ins))
            still.append((who[~due], group[~due], index[~due], size, ins))
        self.pending = still
        return done
