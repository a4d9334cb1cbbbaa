"""The word of an mbarrier object: what it counts, phase after phase.

PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". To a kernel the 64 bits are opaque; here
they are laid out as GPUs have them:

    bit 63      parity of the current phase, which is the first that is not complete
    bits 62-43  arrivals that this phase waits for, negated
    bits 41-21  tx-count: transactions that it waits for, negated
    bits 20-1   arrivals that later phases wait for, negated

A token, the result of an arrival, is the word before it without the lower half: test_wait compares its phase,
pending_count reads its arrivals.
"""

import dataclasses

import numpy as np

MOST = (1 << 20) - 1  # of every count
_PHASE, _PENDING, _TRANSACTIONS, _EXPECTED = 63, 43, 21, 1  # lowest bits of the fields


@dataclasses.dataclass(slots=True)
class State:
    """What the word of an mbarrier says. `arrive` and `transfer` return whether they complete the phase."""

    phase: int  # its parity
    pending: int
    transactions: int
    expected: int

    @classmethod
    def of(cls, word):
        word = int(word)
        transactions = -(word >> _TRANSACTIONS) & 2 * MOST + 1
        transactions -= (transactions > MOST) * (2 * MOST + 2)
        return cls(word >> _PHASE, -(word >> _PENDING) & MOST, transactions, -(word >> _EXPECTED) & MOST)

    def word(self):
        return np.uint64(
            self.phase << _PHASE
            | (-self.pending & MOST) << _PENDING
            | (-self.transactions & 2 * MOST + 1) << _TRANSACTIONS
            | (-self.expected & MOST) << _EXPECTED
        )

    def arrive(self, count):
        self.pending -= count
        return self.settle()

    def transfer(self, count):
        """Transactions are complete."""
        self.transactions -= count
        return self.settle()

    def settle(self):
        if self.pending or self.transactions:
            return False
        self.phase ^= 1
        self.pending = self.expected
        return True

    def lacking(self):
        """What the phase waits for, in words."""
        text = f"{self.pending} of {self.expected} arrivals"
        return f"{text} and a tx-count of {self.transactions}" if self.transactions else text


def pending_count(token):
    """Arrivals that were pending before the one that gave a token."""
    return (-(token >> np.uint64(_PENDING)) & np.uint64(MOST)).astype(np.uint32)


def parity_of(token):
    """The phase of a token: 0 or 1."""
    return token >> np.uint64(_PHASE)


def tokens(phase, pending):
    """Of arrivals in a phase, before each of which so many were pending."""
    return np.uint64(phase << _PHASE) | (-pending & MOST).astype(np.uint64) << np.uint64(_PENDING)
