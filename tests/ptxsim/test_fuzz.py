"""Random straight-line PTX, every register of every lane against a scalar interpreter; and that no instruction of the
table escapes it."""

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fuzz.compare import fails, report, shrunk
from .fuzz.program import Generator

LENGTH = 25

# What acts on more than one lane's registers and own memory is tested for itself.
ELSEWHERE = {
    **dict.fromkeys(("membar", "fence", "bar", "barrier", "nanosleep"), "test_barriers.py"),
    **dict.fromkeys(("bra", "brx", "ret", "exit", "trap"), "test_control_flow.py"),
    **dict.fromkeys(("cvta", "isspacep", "prefetch", "prefetchu", "discard", "applypriority"), "test_memory_spaces.py"),
    **dict.fromkeys(("ldmatrix", "stmatrix", "movmatrix", "mma"), "test_tensor_core.py"),
    "cp": "test_async_copies.py",
    "vprintf": "test_ordinary_kernels.py",
}


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(0, 2**32))
def test_random_programs(seed):
    program = Generator(random.Random(seed)).program(LENGTH)
    assert not fails(program), report(shrunk(program))
