"""mbarrier objects in shared memory: arrivals, transactions, copies that arrive, and the lanes that wait."""

import numpy as np

from .bulk_copy import ROW, transfers
from .mbarrier_word import MOST, State, parity_of, tokens


def counts_of(x, m, count, least, ins):
    """The count that each lane gives, a valid one if it is active."""
    counts = np.broadcast_to(count, x.n).astype(np.int64)
    bad = (counts < least) | (counts > MOST)
    if bad.any():
        wrong = [lane for lane in _active(x, m).tolist() if bad[lane]]
        if wrong:
            what = f"{ins} with a count of {counts[wrong[0]]}, must be {least} to {MOST}"
            raise x.error(ins, wrong[0], what, "mbarrier count")
    return counts


def _active(x, m):
    """The lanes of a mask."""
    m = x.mask if m is None else m
    return np.arange(x.n) if m is None else np.flatnonzero(np.broadcast_to(m, x.n))


class Mbarriers:
    """The mbarrier objects in the shared memory of a chunk of blocks, and the lanes that wait for them.

    An object is known by its place, an element of the array of all shared memory as 64-bit words. What is undefined
    raises: an operation where no object is, a count out of its range. The methods up to `test` are instructions;
    `address`: of 32 bits, in shared memory.
    """

    def __init__(self, chunk):
        self.chunk = chunk
        self.words = chunk.shared.views[8]
        self.made = {}  # object -> its mbarrier.init
        self.coming = {}  # object -> [(itself, lanes, their batches of cp.async, instruction)], arrivals yet to come
        self.transfers = {}  # object -> [(lanes, cp.async.bulk that are under way)]
        self.waits = None  # of each lane (object, instruction) of a wait that was in vain, two arrays
        self.refused = False  # whether there has been such a wait since the scheduler has looked

    def init(self, x, m, address, count, ins):
        counts = counts_of(x, m, count, 1, ins)
        for at, lanes in self.named(x, m, address, ins):
            for each in counts[lanes].tolist():
                self.words[at] = State(0, each, 0, each).word()
            self.made[at] = ins
            self.tell("made", x, lanes, at, ins)
        x.changes += 1

    def inval(self, x, m, address, ins):
        for at, lanes in self.objects(x, m, address, ins):
            del self.made[at]
            self.coming.pop(at, None)
            self.transfers.pop(at, None)
            self.tell("ended", x, lanes, at, ins)
        x.changes += 1

    def arrive(self, x, m, address, count, ins, transactions=None, drop=False, completes=True):
        """Arrivals, `count` for each lane; each lane's token. Before it arrives a lane lets the phase wait for
        `transactions`, and with `drop` takes itself out of later phases. `completes`: whether it may end a phase."""
        given = np.zeros(x.n, np.uint64)
        count = counts_of(x, m, count, 1, ins)
        if transactions is not None:
            transactions = counts_of(x, m, transactions, 0, ins)
        for at, lanes in self.objects(x, m, address, ins):
            counts, state = count[lanes], State.of(self.words[at])
            while lanes.size:
                before = np.cumsum(counts) - counts
                now = max(int(np.searchsorted(before, state.pending)), 1)  # lanes that arrive in this phase
                here, total = lanes[:now], int(counts[:now].sum())
                if transactions is not None:
                    self.expect(x, state, int(transactions[here].sum()), here, at, ins)
                given[here] = tokens(state.phase, state.pending - before[:now])
                state.expected -= total * drop
                self.require(state.expected >= 0, x, here[-1], at, "fewer are expected than drop out", ins)
                if self.arrivals(x, state, total, here, at, ins):
                    self.require(completes, x, here[-1], at, "completes the phase", ins)
                lanes, counts = lanes[now:], counts[now:]
            self.words[at] = state.word()
        x.changes += 1
        return given

    def expect_transactions(self, x, m, address, count, ins):
        counts = counts_of(x, m, count, 0, ins)
        for at, lanes in self.objects(x, m, address, ins):
            state = State.of(self.words[at])
            self.expect(x, state, int(counts[lanes].sum()), lanes, at, ins)
            self.words[at] = state.word()
        x.changes += 1

    def complete_transactions(self, x, m, address, count, ins):
        counts = counts_of(x, m, count, 0, ins)
        for at, lanes in self.objects(x, m, address, ins):
            state = State.of(self.words[at])
            for lane in lanes:
                if state.transfer(int(counts[lane])):
                    self.completed(x, np.array([lane]), at, ins)
                self.require(state.transactions >= -MOST, x, lane, at, "a tx-count below its range", ins)
            self.words[at] = state.word()
        x.changes += 1

    def arrive_after_copies(self, x, m, address, adds, ins):
        """cp.async.mbarrier.arrive; `adds`: the phase waits for one arrival more, the one to come. It comes when
        somebody looks, the latest moment, or by the coin of the random schedule at once."""
        chunk = self.chunk
        for at, lanes in self.objects(x, m, address, ins):
            if adds:
                state = State.of(self.words[at])
                state.pending += lanes.size
                self.require(state.pending <= MOST, x, lanes[0], at, "more pending arrivals than there can be", ins)
                self.words[at] = state.word()
            lanes = lanes if x.lanes is None else x.lanes[lanes]
            self.coming.setdefault(at, []).append((at, lanes, chunk.copies.batches.of(lanes), ins))
            if chunk.random is not None and chunk.random.random() < 0.5:
                self.come(self.coming.pop(at))
        chunk.copies.batches.step(x, m)
        x.changes += 1

    def copy_bulk(self, x, m, address, target, source, size, ins):
        """cp.async.bulk, which completes as many transactions as it copies bytes: like copies of cp.async, late."""
        target, source, size = (np.broadcast_to(each, x.n) for each in (target, source, size))
        for transfer in transfers(x, self.objects(x, m, address, ins), target, source, size, ins):
            lanes = transfer.lanes if x.lanes is None else x.lanes[transfer.lanes]
            for observer in self.chunk.observers:
                observer.bulk_copy(x, transfer)
            if self.chunk.random is not None and self.chunk.random.random() < 0.5:
                self.end_transfer(lanes, transfer)
            else:
                self.transfers.setdefault(transfer.at, []).append((lanes, transfer))
        x.changes += 1

    def test(self, x, m, address, phase, ins):
        """Which lanes find the phase of a parity complete. The others let others run first."""
        found = self.objects(x, m, address, ins)
        due = [arrival for at, _ in found for arrival in self.coming.pop(at, ())]
        if due:
            self.come(due)
        for at, _ in found:
            for transfer in self.transfers.pop(at, ()):
                self.end_transfer(*transfer)
        complete = np.ones(x.n, bool)
        phase = np.broadcast_to(phase & phase.dtype.type(1), x.n)
        for at, lanes in found:
            complete[lanes] = passed = phase[lanes] != parity_of(self.words[at])
            if self.chunk.observers and passed.any():
                self.tell("passed", x, lanes[passed], at, ins)
        self.remember(x, found, complete, ins)
        return complete

    # -- counting --------------------------------------------------------------------------------------
    def arrivals(self, x, state, count, lanes, at, ins):
        """Lanes arrive. Returns whether that completes the phase."""
        self.require(count <= state.pending, x, lanes[-1], at, "arrives, when all have arrived that it waits for", ins)
        self.tell("arrived", x, lanes, at, ins)
        complete = state.arrive(count)
        if complete:
            self.completed(x, lanes, at, ins)
        return complete

    def completed(self, x, lanes, at, ins):
        """A phase is complete. In lockstep those who have waited in vain go on, all together, when nobody else can."""
        self.tell("completed", x, lanes, at, ins)
        if self.chunk.random is not None and self.waits is not None:
            self.chunk.behind[self.waits[0] == at] = False

    def come(self, due):
        """Arrivals of cp.async.mbarrier.arrive, whose copies are thereby done."""
        chunk = self.chunk
        lanes = np.concatenate([lanes for _, lanes, _, _ in due])
        batches = np.concatenate([np.broadcast_to(batches, lanes.size) for _, lanes, batches, _ in due])
        chunk.copies.finish(lanes, batches)
        for observer in chunk.observers:
            observer.mbarrier_copies(lanes, batches)
        for at, lanes, _, ins in due:
            state = State.of(self.words[at])
            while lanes.size:
                here = lanes[: max(state.pending, 1)]
                self.arrivals(chunk.everyone, state, here.size, here, at, ins)
                lanes = lanes[here.size :]
            self.words[at] = state.word()
        chunk.changes += 1

    def end_transfer(self, lanes, transfer):
        """Copies of cp.async.bulk are done; `lanes`: of the chunk, one for each row."""
        chunk, at = self.chunk, transfer.at
        transfer.perform(chunk.observers)
        for observer in chunk.observers:
            observer.bulk_copy_done(lanes, transfer)
        state = State.of(self.words[at])
        if state.transfer(ROW * lanes.size):
            self.completed(chunk.everyone, lanes, at, transfer.ins)
        enough = state.transactions >= -MOST
        self.require(enough, chunk.everyone, lanes[0], at, "a tx-count below its range", transfer.ins)
        self.words[at] = state.word()
        chunk.changes += 1

    def expect(self, x, state, count, lanes, at, ins):
        state.transactions += count
        self.require(state.transactions <= MOST, x, lanes[0], at, "a tx-count above its range", ins)

    # -- whom an instruction means -----------------------------------------------------------------------
    def named(self, x, m, address, ins):
        """(place, lanes of the group that name it), place by place."""
        sel = _active(x, m)
        if not sel.size:
            return []
        ((_, index, _),) = x.shared.locate(x, sel, np.broadcast_to(address, x.n)[sel], 8, True, ins)
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        return list(zip(ordered[starts].tolist(), np.split(sel[order], starts[1:]), strict=True))

    def objects(self, x, m, address, ins):
        found = self.named(x, m, address, ins)
        for at, lanes in found:
            if at not in self.made:
                what = f"{ins} at {self.address(x, lanes[0], at)}, where no mbarrier is"
                raise x.error(ins, int(lanes[0]), what, "no mbarrier")
        return found

    def require(self, condition, x, lane, at, what, ins):
        if not condition:
            which = f"the mbarrier at {self.address(x, lane, at)}, initialised at {self.made[at].path}"
            raise x.error(ins, int(lane), f"{ins} of {which}: {what}", "mbarrier count")

    def address(self, x, lane, at):
        return f"0x{8 * at - int(x.shared_base[lane]):x}"

    def tell(self, event, x, lanes, at, ins):
        for observer in self.chunk.observers:
            getattr(observer, f"mbarrier_{event}")(lanes if x.lanes is None else x.lanes[lanes], at, ins)

    # -- lanes that wait ---------------------------------------------------------------------------------
    def remember(self, x, found, complete, ins):
        """Lanes have tested whether phases are complete; `found`: (object, lanes of the group)."""
        refused = not complete.all()
        self.refused |= refused
        if self.waits is None:
            if not refused:
                return
            self.waits = np.full(self.chunk.n, -1, np.int64), np.full(self.chunk.n, None, object)
        objects, instructions = self.waits
        for at, lanes in found:
            here = lanes if x.lanes is None else x.lanes[lanes]
            objects[here] = np.where(complete[lanes], -1, at)
            instructions[here] = ins
            self.chunk.behind[here] = ~complete[lanes]

    def waiting(self):
        """Lanes whose last wait was in vain."""
        return np.zeros(self.chunk.n, bool) if self.waits is None else self.waits[0] >= 0

    def forget(self, lanes):
        """Lanes are about something else."""
        if self.waits is not None:
            self.waits[0][lanes] = -1

    def awaited(self, waiting):
        """What lanes wait for in vain and the wait -> which lanes of the chunk."""
        found = {}
        for lane in np.flatnonzero(waiting).tolist():
            at, ins = (array[lane] for array in self.waits)
            lacking = State.of(self.words[at]).lacking()
            what = f"waiting at the mbarrier of {self.made[at].path}, which lacks {lacking}"
            found.setdefault((what, ins), np.zeros(self.chunk.n, bool))[lane] = True
        return found
