"""How many blocks of a kernel fit on a streaming multiprocessor (SM) at once, and what keeps more from fitting.

An SM gives each block whole allocations of four things, and a block runs where all four are free:

* warps: the SM holds so many,
* blocks: and so many,
* registers: a warp takes ``32 * registers``, rounded up to 256, from the 16,384 of the quarter that it runs in,
* shared memory: static, dynamic and what the system reserves for each block (1 KiB from sm_80 on), rounded up to a
  unit; the SM is taken to be configured for as much shared memory as it has,
* from sm_90 on, named barriers.

Limits and rounding are those of the technical specifications by compute capability in the CUDA C++ Programming Guide,
and of ``cuda_occupancy.h`` in the CUDA runtime package.
"""

import dataclasses

_QUARTERS = 4  # of an SM: each has its own scheduler and register file
_REGISTERS = 65536  # of an SM
_REGISTERS_PER_THREAD = 255
_REGISTER_UNIT = 256


@dataclasses.dataclass(frozen=True)
class _Limits:
    """Of one SM. Shared memory in KiB: all of it, and what one block may have."""

    warps: int
    blocks: int
    shared: int
    shared_per_block: int
    reserved: int = 1  # KiB of each block, for the system
    shared_unit: int = 128  # bytes
    barriers: int | None = None  # all blocks together; None: never short


_LIMITS = {
    "sm_75": _Limits(32, 16, 64, 64, reserved=0, shared_unit=256),
    "sm_80": _Limits(64, 32, 164, 163),
    "sm_86": _Limits(48, 16, 100, 99),
    "sm_87": _Limits(48, 16, 164, 163),
    "sm_89": _Limits(48, 24, 100, 99),
    "sm_90": _Limits(64, 32, 228, 227, barriers=64),
    "sm_100": _Limits(64, 32, 228, 227, barriers=64),
    "sm_103": _Limits(64, 32, 228, 227, barriers=32),
    "sm_120": _Limits(48, 24, 100, 99, barriers=24),
    "sm_121": _Limits(48, 24, 100, 99, barriers=24),
}


def known(arch):
    """Whether the limits of an architecture are known."""
    return arch in _LIMITS


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """Blocks and warps of one kernel on one SM.

    limits
        The most blocks that each resource allows; resources that the kernel does not use are left out.
    """

    arch: str
    blocks: int
    warps: int
    max_warps: int
    limits: dict

    @property
    def fraction(self):
        """Warps, as a fraction of what the SM holds."""
        return self.warps / self.max_warps

    @property
    def limited_by(self):
        """The resources that allow the fewest blocks."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)

    def as_dict(self):
        """All of it by name."""
        return dataclasses.asdict(self) | {"fraction": self.fraction, "limited_by": list(self.limited_by)}

    def __str__(self):
        return (
            f"{self.blocks} blocks, {self.warps} of {self.max_warps} warps per SM ({self.fraction:.0%}) "
            f"on {self.arch}, limited by {' and '.join(self.limited_by)}"
        )


def occupancy(arch, threads, registers, shared_bytes=0, barriers=0):
    """How many blocks of a kernel an SM of an architecture holds.

    Parameters
    ----------
    arch : str
        Such as ``"sm_80"``.
    threads : int
        Of a block.
    registers : int
        Of a thread, as `resources` reports them.
    shared_bytes : int
        Of a block, static and dynamic.
    barriers : int
        Named barriers of a block.

    Raises
    ------
    ValueError
        For an architecture whose limits are not known, and for sizes that no block can have.

    >>> print(occupancy("sm_80", threads=128, registers=225, shared_bytes=64 * 1024))
    2 blocks, 8 of 64 warps per SM (12%) on sm_80, limited by registers and shared memory
    """
    if not known(arch):
        raise ValueError(f"arch: {arch!r}, must be one of {', '.join(_LIMITS)}")
    for name, value, least, most in (
        ("threads", threads, 1, 1024),
        ("registers", registers, 0, None),
        ("shared_bytes", shared_bytes, 0, None),
        ("barriers", barriers, 0, 16),
    ):
        if value < least or (most is not None and value > most):
            raise ValueError(f"{name}: {value}, must be {least} " + (f"to {most}" if most else "or more"))
    sm = _LIMITS[arch]
    warps = -(-threads // 32)
    limits = {"warps": sm.warps // warps, "blocks": sm.blocks}
    if registers:
        limits["registers"] = _blocks_by_registers(registers, warps)
    if shared_bytes + sm.reserved:
        limits["shared memory"] = _blocks_by_shared_memory(shared_bytes, sm)
    if barriers and sm.barriers:
        limits["barriers"] = sm.barriers // barriers
    blocks = min(limits.values())
    return Occupancy(arch, blocks, blocks * warps, sm.warps, limits)


def most_threads(registers):
    """The largest block, in threads, whose registers an SM has."""
    return min(1024, 32 * _blocks_by_registers(registers, 1)) if registers else 1024


def _blocks_by_registers(registers, warps):
    per_warp = _rounded(32 * registers, _REGISTER_UNIT)
    if registers > _REGISTERS_PER_THREAD:
        return 0
    return _REGISTERS // _QUARTERS // per_warp * _QUARTERS // warps


def _blocks_by_shared_memory(shared_bytes, sm):
    if shared_bytes > sm.shared_per_block * 1024:
        return 0
    return sm.shared * 1024 // _rounded(shared_bytes + sm.reserved * 1024, sm.shared_unit)


def _rounded(value, unit):
    return -(-value // unit) * unit
