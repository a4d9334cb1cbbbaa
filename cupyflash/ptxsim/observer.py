"""What a running launch tells those who watch it: the counters of a profile, the checks of a sanitizer.

Translated code calls these methods just before it does what they are named after; the scheduler calls the
rest. Addresses, sizes and masks are arrays of one element, or of one for each lane of the group `x`;
`m` is the mask of lanes that act (None: all of them), `ins` the instruction.
"""


class Observer:
    """Hears of everything and does nothing; subclasses override what they need."""

    def begin(self, chunk):
        """A chunk of blocks is about to run."""

    def end(self, chunk):
        """All threads of a chunk have exited."""

    def guarded(self, x, m, ins):
        """An instruction with a guard; `m`: the lanes that it acts for."""

    def block(self, block, x):
        """A group has run a basic block."""

    def branch(self, block, x, diverged):
        """A group has come to a conditional branch; `diverged`: an array over its warps, or False for none."""

    def called(self, depth, registers, lanes):
        """These lanes (positions in the chunk) have called a function that needs a stack, from within `depth` others;
        `registers`: numbers of those that will be restored."""

    def entered(self, lanes, frames, start, stop):
        """These lanes begin to run a function; `frames`: where theirs begin in local memory, in which the function's
        variables lie from `start` to `stop`."""

    def returned(self, depth, registers, lanes):
        """These lanes have come back, and their registers are what they were."""

    def barrier(self, lanes, chunk, ins):
        """Barriers are complete and let these lanes (positions in the chunk) of one or more blocks go on; `ins`:
        the barrier instruction of the first of them."""

    def reached(self, x, block, number, count):
        """A group has come to the barrier that ends a block; `count`: threads that it is to wait for, None for all."""

    def arrive(self, lanes, numbers, chunk):
        """bar.arrive: lanes that go on at once, and the barrier of each."""

    def mbarrier(self, x, m, address, ins):
        """mbarrier, cp.async.mbarrier.arrive: an operation on objects in shared memory. What it does follows, for each
        `at`, the object as an element of shared memory as 64-bit words, and positions `lanes` of the chunk."""

    def mbarrier_made(self, lanes, at, ins):
        """mbarrier.init."""

    def mbarrier_ended(self, lanes, at, ins):
        """mbarrier.inval."""

    def mbarrier_arrived(self, lanes, at, ins):
        """Arrivals; of cp.async.mbarrier.arrive when the copies are done."""

    def mbarrier_completed(self, lanes, at, ins):
        """The phase is complete: the last of these lanes was what it waited for."""

    def mbarrier_passed(self, lanes, at, ins):
        """test_wait and try_wait: lanes that find the phase complete."""

    def mbarrier_copies(self, lanes, batches):
        """The cp.async of lanes up to those of these batches (AsyncCopies.batches) are done."""

    def fence(self, x, m, ins):
        """membar, fence."""

    def warp_barrier(self, x, m, members, ins):
        """bar.warp.sync of the lanes that the bits of `members` name: they are all there."""

    def exchange(self, x, m, members, ins):
        """shfl, vote, match, redux or elect among lanes that the bits of `members` name, not all 32 of them by a
        constant."""

    def load(self, x, m, space, address, size, ins):
        """ld of `size` bytes a lane; `space`: global, shared, local, or generic for an address in any."""

    def store(self, x, m, space, address, size, values, ins):
        """st; `values`: a tuple of arrays, the elements of a vector."""

    def atomic(self, x, m, space, address, size, ins):
        """atom and red."""

    def matrix_load(self, x, address, count, ins):
        """ldmatrix of `count` matrices; lanes 0 to 8 * count - 1 give the addresses of their rows."""

    def matrix_store(self, x, address, count, ins):
        """stmatrix."""

    def copy(self, x, m, address, size, shared, amount, ins):
        """cp.async from global `address` to `shared`; `amount`: bytes that are read, None for all."""

    def bulk_copy(self, x, transfer):
        """cp.async.bulk to the shared memory of one block: a Transfer."""

    def bulk_copy_done(self, lanes, transfer):
        """It is done, and has told its mbarrier; `lanes`: positions in the chunk of the lanes of its rows."""

    def copied(self, view, to, source, at, ins):
        """Copies have been done: to the elements `to` of `view` from those `at` of `source` (None: zeros); `ins`: the
        cp.async."""

    def commit(self, x, m, ins):
        """cp.async.commit_group."""

    def wait(self, x, m, allowed, ins):
        """cp.async.wait_group, or wait_all with `allowed` None."""
