"""What mbarriers order, and their misuse: as data, initialised twice, arrivals in excess."""

import numpy as np
import pytest

from .launching import SCHEDULES, poisoned, schedule_name
from .sanitized import check, findings, line
from .test_mbarrier import HELPERS

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)

RELAXED = r"""
__device__ void arrive_relaxed(word* b) {
  asm volatile("mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
"""


def kernel(body):
    return f"""{HELPERS}{RELAXED}
extern "C" __global__ void kernel(int* out) {{
  __shared__ __align__(16) word b[4];
  __shared__ int box[128];
  int t = threadIdx.x, warp = t / 32;
  out += blockIdx.x * 128;
  if (t < 4) init(&b[t], t < 2 ? 32 : 1);
  __syncthreads();
  {body}
}}"""


def run(body, threads=96, **settings):
    return findings(kernel(body), 2, threads, poisoned(512, np.int32), arch="sm_90", **settings)


CLEAN = {
    "a warp tells another": """
  if (warp == 0) { box[t] = t; arrive(&b[0]); }
  if (warp == 1) { while (!test_parity(&b[0], 0)) { } out[t] = box[t - 32]; }""",
    "through one between": """
  if (warp == 0) { box[t] = t; arrive(&b[0]); }
  if (warp == 1) { while (!try_parity_acquire(&b[0], 0)) { } arrive(&b[1]); }
  if (warp == 2) { while (!test_parity(&b[1], 0)) { } out[t] = box[t - 64]; }""",
    "lanes of one warp": """
  if (warp == 0) {
    box[t] = t;
    word token = arrive(&b[0]);
    while (!test(&b[0], token)) { }
    out[t] = box[31 - t];
  }""",
    "one lane of a warp that has met": """
  if (warp == 0) { box[t] = t; __syncwarp(); if (t == 0) arrive(&b[2]); }
  if (warp == 1) { while (!test_parity(&b[2], 0)) { } out[t] = box[t - 32]; }""",
    "what a named barrier has told before": """
  if (warp < 2) { box[t] = t; asm volatile("bar.sync 1, 64;" ::: "memory"); }
  if (t == 0) arrive(&b[2]);
  if (warp == 2) { while (!test_parity(&b[2], 0)) { } out[t] = box[t - 32]; }""",
    "a second phase of readers": """
  for (int i = 0; i < 4; i++) {
    if (warp == 0) { if (i) while (!test_parity(&b[1], i + 1 & 1)) { } box[t] = i; arrive(&b[0]); }
    if (warp == 1) { while (!test_parity(&b[0], i & 1)) { } out[t] = box[t - 32]; arrive(&b[1]); }
  }""",
    "made again after its end": """
  if (t == 0) { inval(&b[3]); box[0] = ((int*)&b[3])[1] = 1; init(&b[3], 1); arrive(&b[3]); }
  __syncthreads();
  out[t] = test_parity(&b[3], 0) + box[0];""",
}


@every_schedule
@pytest.mark.parametrize("name", CLEAN)
def test_what_an_arrival_orders_before_a_wait(name, settings):
    assert not run(CLEAN[name].replace("try_parity_acquire", "test_parity"), **settings)


RACES = {
    "nobody waits": """
  if (warp == 0) { box[t] = t; arrive(&b[0]); }  // other
  if (warp == 1) out[t] = box[t - 32];  // here""",
    "a write after the arrival": """
  if (warp == 0) { arrive(&b[0]); box[t] = t; }  // other
  if (warp == 1) { while (!test_parity(&b[0], 0)) { } out[t] = box[t - 32]; }  // here""",
    "a relaxed arrival": """
  if (warp == 0) { box[t] = t; arrive_relaxed(&b[0]); }  // other
  if (warp == 1) { while (!test_parity(&b[0], 0)) { } out[t] = box[t - 32]; }  // here""",
    "a relaxed wait": """
  if (warp == 0) { box[t] = t; arrive(&b[0]); }  // other
  if (warp == 1) { while (!try_parity(&b[0], 0)) { } out[t] = box[t - 32]; }  // here""",
    "one lane of a warp that has not met": """
  if (warp == 0) { box[t] = t; if (t == 0) arrive(&b[2]); }  // other
  if (warp == 1) { while (!test_parity(&b[2], 0)) { } out[t] = box[t - 32]; }  // here""",
    "an arrival in the next phase": """
  if (warp == 0) { arrive(&b[0]); while (!test_parity(&b[0], 0)) { } }
  if (t < 31) { box[t] = t; arrive(&b[0]); }  // other
  if (warp == 1) { while (!test_parity(&b[0], 0)) { } out[t] = box[t - 32]; }  // here""",
}


@every_schedule
@pytest.mark.parametrize("name", RACES)
def test_what_it_does_not(name, settings):
    found = run(RACES[name], **settings)
    assert {f.kind for f in found} - {"uninitialised shared memory"} == {"shared race"}, found
    lines = {f"kernel.cu:{n}" for n in lines_of(kernel(RACES[name]))}
    assert all({f.where, f.other} == lines for f in found if f.kind == "shared race"), found


def lines_of(source):
    return [n for n, text in enumerate(source.splitlines(), 1) if "// here" in text or "// other" in text]


DATA = {
    "a load": "if (t == 0) out[0] = *(volatile int*)&b[1];  // here",
    "a store": "if (t == 0) *((volatile char*)&b[1] + 7) = 0;  // here",
    "an atomic": "if (t == 0) atomicAdd((int*)&b[1], 1);  // here",
    "a vector, whose second half it is": """
  if (t == 0) asm volatile("st.shared.v2.u64 [%0], {0, 0};" :: "r"(at(b)));  // here""",
    "a copy": """
  if (t == 0)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(at(&b[1])), "l"(out));  // here""",
}


@every_schedule
@pytest.mark.parametrize("name", DATA)
def test_its_bytes_are_no_data(name, settings):
    body = f"if (t == 0) inval(&b[0]);\n  __syncthreads();\n  {DATA[name]}"
    found = [f for f in run(body, **settings) if f.kind != "uninitialised global memory"]
    check(found, kernel(body), "mbarrier reuse", "here")
    assert found[0].other == "kernel.cu:4"  # where it was initialised


@every_schedule
def test_an_mbarrier_is_initialised_once(settings):
    for body in (
        "__syncthreads(); if (t == 40) init(&b[1], 3);  // here",
        "if (t < 2) { inval(&b[t]); init(&b[0], 1); }",
    ):
        found = [f for f in run(body, **settings) if "race" not in f.kind]
        assert {f.kind for f in found} == {"mbarrier reuse"}


@every_schedule
def test_arrivals_in_excess(settings):
    body = """
  if (warp == 0) arrive(&b[0]);
  if (t == 32) { arrive(&b[2]); arrive(&b[2]); }  // here
  __syncthreads();"""
    found = [f for f in run(body, **settings) if f.kind == "mbarrier arrival"]
    assert len(found) == 1 and found[0].count == 2, found  # in both blocks
    assert "nobody has waited for the phase before" in found[0].message


@every_schedule
def test_its_end_while_others_wait(settings):
    body = """
  if (t == 0) { arrive(&b[2]); inval(&b[2]); }
  if (warp == 0) while (!test_parity(&b[2], 0)) { }"""
    assert {f.kind for f in run(body, **settings)} <= {"shared race", "no mbarrier"} and run(body, **settings)


def test_undefined_operands():
    body = """
  if (warp) box[t] = t;
  __syncthreads();
  if (t == 0) { inval(&b[3]); init(&b[3], box[blockDim.x == 96]); }  // here"""
    assert ("uninitialised shared memory", line(kernel(body), "here")) in {(f.kind, f.where) for f in run(body)}


BATCHES = """
  for (int i = 0; i < 2 && warp == 0; i++) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(at(&box[32 * i + t])), "l"(out + 32 * i + t));
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(at(&b[i])) : "memory");
  }
  if (warp == 1) {
    while (!test_parity(&b[0], 0)) { }
    out[64 + t] = box[t - WHICH];  // here
  }"""


@every_schedule
def test_copies_that_are_waited_for(settings):
    source = kernel(BATCHES.replace("WHICH", "32"))
    assert not findings(source, 2, 64, np.zeros(512, np.int32), arch="sm_90", **settings)


def test_a_wait_is_for_the_copies_before_the_arrival():
    """In lockstep, where copies are as late as can be."""
    source = kernel(BATCHES.replace("WHICH", "0"))
    found = findings(source, 2, 64, np.zeros(512, np.int32), arch="sm_90")
    assert {f.kind for f in found} - {"uninitialised shared memory"} == {"missing cp.async wait"}
    assert {f.where for f in found} == {line(source, "here")}
