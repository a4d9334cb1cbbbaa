"""Tells when the lanes of a chunk come back to a state that they were in: they will do so for ever."""


class Recurrence:
    """Looks at everybody from time to time. The state to compare with is a new one after 1, 2, 4, ... looks (Brent's
    search for a cycle)."""

    def __init__(self, chunk):
        self.chunk = chunk
        self.then = self.scene = None

    def again(self, look):
        """Whether everybody is where they were at an earlier look, in the same state, and memory is what it was. Looks
        are numbered from 1 on."""
        chunk, now = self.chunk, (self.chunk.changes, self.chunk.ticks)
        renewed = look & (look - 1) == 0
        if now != self.then and not renewed:
            return False
        scene = [chunk.pc.copy(), chunk.parked.copy(), chunk.barriers.waiting.copy(), *chunk.registers]
        scene += [] if chunk.stack is None else chunk.stack.state()
        found = look > 1 and now == self.then and all(map(same, self.scene, scene))
        if renewed:
            self.then, self.scene = now, scene
        return found


def same(a, b):
    """Whether two arrays, or None, hold the same bits."""
    if a is None or b is None:
        return a is b
    return a is b or (a.size == b.size and a.tobytes() == b.tobytes())
