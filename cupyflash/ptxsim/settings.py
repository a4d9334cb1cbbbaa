"""The choices a launch depends on, scoped with a context manager."""

import contextlib
import contextvars
import dataclasses
import numbers
from collections.abc import Callable

from .workers import AVAILABLE

ARCHITECTURES = (
    "sm_75",
    "sm_80",
    "sm_86",
    "sm_87",
    "sm_88",
    "sm_89",
    "sm_90",
    "sm_100",
    "sm_103",
    "sm_110",
    "sm_120",
    "sm_121",
)
MMA_MODELS = ("fp32", "exact", "volta", "ampere", "ada", "hopper", "blackwell")
SCHEDULES = ("lockstep", "random")

_SHARED_KIB = {75: 64, 80: 163, 87: 163, 86: 99, 88: 99, 89: 99, 120: 99, 121: 99}


@dataclasses.dataclass(frozen=True)
class Settings:
    """One consistent set of choices; `settings` says what each means."""

    arch: str = "sm_80"
    mma: str = "fp32"
    schedule: str = "lockstep"
    ulp_noise: int = 0
    seed: int = 0
    progress: Callable[[int, int], None] | None = None
    chunk_lanes: int | None = None
    workers: int = 1

    def __post_init__(self):
        for name, allowed in (("arch", ARCHITECTURES), ("mma", MMA_MODELS), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ValueError(f"{name}: {value!r}, must be one of {', '.join(allowed)}")
        for name, least in (("ulp_noise", 0), ("seed", 0), ("chunk_lanes", 1), ("workers", 1)):
            value = getattr(self, name)
            if name == "chunk_lanes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
                raise ValueError(f"{name}: {value!r}, must be an integer of at least {least}")
            object.__setattr__(self, name, int(value))  # NumPy's integers overflow
        if self.progress is not None and not callable(self.progress):
            raise ValueError(f"progress: {self.progress!r}, must be callable or None")
        if self.workers > 1 and not AVAILABLE:
            raise ValueError(f"workers: {self.workers}, only 1 is possible on this platform")

    @property
    def shared_limit(self):
        """Bytes of shared memory one block may have."""
        return _SHARED_KIB.get(int(self.arch[3:]), 227) * 1024


_DEFAULT = Settings()
_current = contextvars.ContextVar("ptxsim_settings")


def current() -> Settings:
    """The settings in force in this thread or task."""
    return _current.get(_DEFAULT)


@contextlib.contextmanager
def settings(**choices):
    """Within the block, launches and compilations use these choices; the rest stay as they are.

    Parameters
    ----------
    arch : str, default "sm_80"
        The GPU to imitate: picks ``__CUDA_ARCH__`` and the shared-memory limit. One of ``"sm_75"``, ``"sm_80"``,
        ``"sm_86"``, ``"sm_87"``, ``"sm_88"``, ``"sm_89"``, ``"sm_90"``, ``"sm_100"``, ``"sm_103"``, ``"sm_110"``,
        ``"sm_120"``, ``"sm_121"``.
    mma : str, default "fp32"
        Arithmetic of tensor cores. ``"fp32"``, the fast one: consecutive mma instructions of one basic block of
        which each accumulates onto the result of the one before, read by nothing else, are summed in float64 (where
        products of 16-bit numbers are exact), and rounded to float32, to nearest, once at the end. In the others every
        instruction counts for itself. ``"exact"``: the exact sum of its products and its addend, rounded to nearest.
        ``"volta"``, ``"ampere"``, ``"ada"``, ``"hopper"``, ``"blackwell"``: the sums that measurements of these GPUs
        established: `w` products and the addend are truncated toward zero to multiples of 2**-f times the power of
        two of the largest (a product's is the one of its factors' exponents), added exactly, and truncated to
        float32; w, f = 4, 23 on Volta, 8, 24 on Ampere and Ada, 16, 25 on Hopper and Blackwell, so that an m16n8k16
        is 4, 2 or 1 such sums in order of k (of tf32 w is half of that). The model does not depend on `arch`, nor on
        what GPUs of its name lack: ``"volta"`` applies its sums to bfloat16, too. float16 accumulators are rounded to
        nearest by every sum; with ``"fp32"`` as with ``"exact"``, by every instruction.
    schedule : str, default "lockstep"
        ``"lockstep"`` runs all threads together; ``"random"`` runs one warp at a time, in a seeded
        random order, from barrier to barrier, so that a missing barrier shows in the results.
    ulp_noise : int, default 0
        0: ex2, rcp, lg2, rsqrt, tanh, sin and cos, as far as they are ``.approx``, are correctly rounded. k > 0: wrong
        by up to k ulp where the PTX ISA states the error of a float32 instruction in them (ex2 2, rcp 1), and by up to
        k / 2 of the error that it states elsewhere, never by more than the stated: 2 is as bad as it gets. The seed
        and the operand alone decide by how much. What the ISA fixes, zeros, infinities and NaN stay as they are.
    seed : int, default 0
        Of the random schedule and of the noise.
    progress : callable, optional
        Called as ``progress(done_blocks, total_blocks)`` during a launch.
    chunk_lanes : int, optional
        Threads that are simulated together, as one NumPy array for each register (at least one block). Default: 4096,
        or 262,144 where a loop of the kernel may wait for other blocks: as on a GPU, a block cannot wait for one that
        does not run at the same time. Cooperative launches have all their blocks together, whatever is chosen.
    workers : int, default 1
        Processes that share the chunks of a launch, on Linux; the results are those of one. Kernels whose blocks may
        work together (atomics, fences or volatile accesses in global memory) run in one, as do all under `profile`
        and `sanitize`.

    Yields
    ------
    Settings
        The choices in force, as attributes.

    Raises
    ------
    TypeError
        For a name that is no choice.
    ValueError
        For a value that its choice cannot have.

    >>> with settings(arch="sm_90", schedule="random", seed=3) as chosen:
    ...     chosen.arch
    'sm_90'
    """
    names = [field.name for field in dataclasses.fields(Settings)]
    if unknown := set(choices) - set(names):
        raise TypeError(f"settings: no choice {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = dataclasses.replace(current(), **choices)
    token = _current.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(token)
