"""Which cp.async a wait completes."""

import numpy as np


class Copies:
    """What the lanes of a chunk have issued and not yet waited for."""

    def __init__(self, chunk):
        self.committed = np.zeros(chunk.n, np.int64)  # groups of each lane
        self.batches = chunk.copies.batches
        # (lanes, the group and the batch of each, elements of shared memory, their size, the instruction)
        self.pending = []

    def issue(self, lanes, index, size, ins):
        batch = np.broadcast_to(self.batches.of(lanes), lanes.shape)
        self.pending.append((lanes, self.committed[lanes], batch, index, size, ins))

    def commit(self, lanes):
        self.committed[lanes] += 1

    def wait(self, lanes, allowed):
        """(lanes, elements, size, instruction) that lanes complete by waiting for all but `allowed` groups."""
        waits = np.zeros(self.committed.size, bool)
        waits[lanes] = True
        if allowed is None:
            return self.done(lambda who, group, batch: waits[who])
        return self.done(lambda who, group, batch: waits[who] & (group < self.committed[who] - allowed))

    def wait_for_batches(self, lanes, batches):
        """The same of what lanes have issued up to their batches."""
        last = np.full(self.committed.size, -1)
        np.maximum.at(last, lanes, batches)
        return self.done(lambda who, group, batch: batch <= last[who])

    def done(self, is_due):
        done, still = [], []
        for who, group, batch, index, size, ins in self.pending:
            due = is_due(who, group, batch)
            if due.all():
                done.append((who, index, size, ins))
                continue
            if due.any():
                done.append((who[due], index[due], size, ins))
            still.append((who[~due], group[~due], batch[~due], index[~due], size, ins))
        self.pending = still
        return done
