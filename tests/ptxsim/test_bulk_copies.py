"""cp.async.bulk from global to shared memory: late, counted in bytes by an mbarrier."""

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, schedule_name
from .sanitized import findings, line
from .test_mbarrier import HELPERS

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

HEAD = (
    HELPERS
    + r"""
__device__ void copy_bulk(void* to, const void* from, unsigned size, word* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(at(to)), "l"(__cvta_generic_to_global(from)), "r"(size), "r"(at(b)) : "memory"); }
"""
)

# Threads of the first warp copy rows of different lengths, each told to one of two mbarriers.
ROWS = (
    HEAD
    + r"""
extern "C" __global__ void rows(const int4* x, const int* lengths, int4* out, int copiers) {
  __shared__ int4 box[8][96];
  __shared__ word b[2];
  int t = threadIdx.x;
  x += 768 * blockIdx.x; out += 768 * blockIdx.x;
  if (t < 2) init(&b[t], (copiers + 1 - t) / 2);
  for (int i = t; i < 768; i += 64) (&box[0][0])[i] = make_int4(-1, -1, -1, -1);
  __syncthreads();
  if (t < copiers) {
    arrive_expect(&b[t % 2], 16 * lengths[t]);
    copy_bulk(box[t], x + 96 * t, 16 * lengths[t], &b[t % 2]);
  }
  for (int i = 0; i < 2; i++) {
    WAIT
    for (int r = i; r < 8; r += 2)
      for (int c = t; c < 96; c += 64) out[96 * r + c] = box[r][c];  // here
  }
}"""
)
WAIT = "while (!test_parity(&b[i], 0)) { }"


def run(source, copiers=8, watch=findings, **settings):
    rng = np.random.default_rng(copiers)
    x = rng.integers(0, 2**31, (2, 8, 96, 4)).astype(np.int32)
    lengths = rng.permutation([96, 1, 33, 32, 31, 64, 7, 0]).astype(np.int32)
    out = poisoned(x.shape, np.int32)
    found = watch(source, 2, 64, x, lengths, out, np.int32(copiers), arch="sm_90", name="rows", **settings)
    copied = (np.arange(96) < lengths[:, None]) & (np.arange(8) < copiers)[:, None]
    return found, (out == np.where(copied[..., None], x, -1)).all(), 16 * 2 * lengths[:copiers].sum()


@every_schedule
@pytest.mark.parametrize("copiers", [2, 8])
def test_rows_arrive(copiers, settings):
    assert run(ROWS.replace("WAIT", WAIT), copiers, watch=launch, **settings)[1]
    found, right, _ = run(ROWS.replace("WAIT", WAIT), copiers, **settings)
    assert right and not found


def test_copies_that_nobody_waits_for():
    """In lockstep, where they are as late as can be."""
    source = ROWS.replace("WAIT", "")
    found, right, _ = run(source)
    assert not right
    assert ("missing cp.async wait", line(source, "here")) in {(f.kind, f.where) for f in found}


def test_too_little_is_expected():
    """The phase of a barrier that expects less than comes never ends."""
    source = ROWS.replace("WAIT", WAIT).replace("arrive_expect(&b[t % 2], 16 *", "arrive_expect(&b[t % 2], 8 *")
    with pytest.raises(ptxsim.Deadlock, match="which lacks 0 of 4 arrivals and a tx-count of -"):
        run(source, watch=launch)


def test_a_profile_counts_their_bytes():
    with ptxsim.profile() as report:
        _, right, size = run(ROWS.replace("WAIT", WAIT), watch=launch)
    (kernel,) = report.kernels
    lengths = 4 * 8 * 2 * 2  # every thread that copies loads one length, twice for the compiler: at most so many bytes
    assert right and 0 <= kernel.global_load_bytes - size <= lengths


FAULTS = {
    "box[t], x + 96 * t, 16 * lengths[t] + 8,": "must be a multiple of 16",
    "(char*)box[t] + 8, x + 96 * t, 16 * lengths[t],": "misaligned",
    "box[t], (char*)x + 8, 16 * lengths[t],": "misaligned",
    "box[t], x + 96 * t, 1 << 20,": "outside its",
    "box[t], x + (1 << 28), 16 * lengths[t],": "outside every mapped array",
}


@pytest.mark.parametrize("operands", FAULTS)
def test_faults(operands):
    source = ROWS.replace("WAIT", WAIT).replace("box[t], x + 96 * t, 16 * lengths[t],", operands)
    with pytest.raises(ptxsim.SimulationError, match=FAULTS[operands]):
        run(source, watch=launch)
