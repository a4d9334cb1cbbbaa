"""Races with several readers or writers of one word: each of them counts, and only those that it is about."""

import threading

import numpy as np
import pytest

from cupyflash import ptxsim

from .launching import SCHEDULES, launch, poisoned, schedule_name
from .sanitized import findings, line

every_schedule = pytest.mark.parametrize("settings", SCHEDULES, ids=schedule_name)


def numbers(n, dtype=np.int32):
    return np.arange(n, dtype=dtype)


@every_schedule
@pytest.mark.parametrize("writer", [0, 32])
def test_two_readers_are_both_remembered(writer, settings):
    source = f"""
    extern "C" __global__ void readers(int* y) {{
      __shared__ volatile int s;
      int t = threadIdx.x;
      if (t == 0) s = 1;
      __syncthreads();
      if (t == 0) y[0] = s;  // thread 0
      if (t == 32) y[1] = s;  // thread 32
      if (t == {writer}) s = 7;  // write
    }}"""
    found = findings(source, 1, 64, poisoned(2, np.int32), **settings)
    assert [f.kind for f in found] == ["shared race"]
    assert line(source, "write") in (found[0].where, found[0].other)


@every_schedule
@pytest.mark.parametrize("space", ["__shared__ int", "__device__ int"])
@pytest.mark.parametrize("writer", [0, 17, 63])
def test_readers_at_once_are_all_remembered(writer, space, settings):
    """The last lane that reads is none but one of them; the writer orders its own read, not those of its warp."""
    outside, inside = ("", f"{space} s;") if "shared" in space else (f"{space} s;", "")
    source = f"""
    {outside}
    extern "C" __global__ void broadcast(int* y) {{
      {inside}
      int t = threadIdx.x;
      if (t == 0) s = 1;
      __syncthreads();
      y[t] = s;  // read
      if (t == {writer}) s = 7;  // write
    }}"""
    found = findings(source, 1, 64, poisoned(64, np.int32), **settings)
    assert f"{space.split()[0].strip('_').replace('device', 'global')} race" in {f.kind for f in found}
    assert {f.where for f in found} | {f.other for f in found} == {line(source, "read"), line(source, "write")}
    assert not findings(
        source.replace("if (t ==", "__syncthreads(); if (t =="), 1, 64, poisoned(64, np.int32), **settings
    )


@every_schedule
@pytest.mark.parametrize("place", ["s[0]", "z[0]"])
def test_a_value_that_all_have_written_can_be_read_by_each(place, settings):
    source = f"""
    extern "C" __global__ void same(volatile int* z, int* y) {{
      __shared__ volatile int s[1];
      {place} = 5;
      y[blockIdx.x * 64 + threadIdx.x] = {place};
    }}"""
    y = poisoned(128, np.int32)
    assert not findings(source, 2, 64, poisoned(1, np.int32), y, **settings)
    assert not findings(source.replace("volatile", ""), 2, 64, poisoned(1, np.int32), y, **settings)
    assert (y == 5).all()


@every_schedule
@pytest.mark.parametrize("blocks", [1, 2])
def test_each_writes_the_value_again_and_reads_it(blocks, settings):
    source = """
    extern "C" __global__ void again(volatile int* z, int* y) {
      __shared__ volatile int s;
      for (int k = 0; k < 4; k++) {
        s = 5;
        y[blockIdx.x * 96 + threadIdx.x] = s;
        z[0] = 6;
        y[blockIdx.x * 96 + threadIdx.x] += z[0];
      }
    }"""
    y = poisoned(192, np.int32)
    for text in (source, source.replace("volatile ", "")):
        assert not findings(text, blocks, 96, poisoned(1, np.int32), y, **settings)
    assert (y[: 96 * blocks] == 11).all()


@every_schedule
@pytest.mark.parametrize(
    "space, blocks, threads, writes, reads",
    [
        (space, 1, *rest)
        for space in "sz"
        for rest in [(96, "t < 50", "t >= 64"), (32, "t < 10", "true"), (96, "t % 48 == 5", "t > 50")]
    ]
    + [("z", 3, 32, "b < 2", "b == 2")],
)
def test_a_value_that_several_have_written_is_not_there_for_others(space, blocks, threads, writes, reads, settings):
    """Those that have not written it may read what was there before."""
    source = f"""
    extern "C" __global__ void some(int* z, int* y) {{
      __shared__ int s[1];
      int t = threadIdx.x, b = blockIdx.x;
      if (t == 0) s[0] = 0;
      __syncthreads();
      if ({writes}) {space}[0] = 1;  // other
      SYNC
      if ({reads}) y[t] = {space}[0];  // here
    }}"""
    z, y = np.zeros(1, np.int32), poisoned(threads, np.int32)
    found = findings(source.replace("SYNC", ""), blocks, threads, z, y, **settings)
    assert found and {f.kind for f in found} == {"shared race" if space == "s" else "global race"}
    assert {f.where for f in found} | {f.other for f in found} == {line(source, "here"), line(source, "other")}
    if blocks == 1:
        assert not findings(source.replace("SYNC", "__syncthreads();"), blocks, threads, z, y, **settings)


READ_BY_BOTH = {
    "shared": """
    extern "C" __global__ void both(int* z, int* flags, int* y) {
      __shared__ int s[32], flag;
      int t = threadIdx.x;
      if (t == 0) flag = 0;
      if (t < 32) s[t] = 7;
      __syncthreads();
      if (t == 0) {
        y[0] = s[5];
        SIGNAL
        atomicExch(&flag, 1);
      } else if (t == 32) {
        int mine = s[5];
        while (atomicAdd(&flag, 0) == 0);
        __threadfence_block();
        s[5] = mine + 1;  // write
        y[1] = s[5];
      }
    }""",
    "global": """
    extern "C" __global__ void both(int* z, int* flags, int* y) {
      int mine = z[0];
      if (threadIdx.x == 0 && blockIdx.x == 0) {
        y[0] = mine;
        SIGNAL
        atomicExch(flags, 1);
      } else if (threadIdx.x == 0) {
        while (atomicAdd(flags, 0) == 0);
        __threadfence();
        z[0] = mine + 1;  // write
        y[1] = z[0];
      }
    }""",
    "whole warps": """
    extern "C" __global__ void both(int* z, int* flags, int* y) {
      __shared__ int s[1];
      __shared__ volatile int flag;
      int t = threadIdx.x;
      if (t == 0) s[0] = 7, flag = 0;
      __syncthreads();
      int mine = s[0];
      if (t < 32) {
        y[0] = mine;
        SIGNAL
        __syncwarp();
        if (t == 0) flag = 1;
      } else {
        while (flag == 0);
        __threadfence_block();
        __syncwarp();
        if (t == 32) s[0] = mine + 1;  // write
        __syncwarp();
        y[1] = s[0];
      }
    }""",
}


@every_schedule
@pytest.mark.parametrize("where", READ_BY_BOTH)
def test_two_have_read_and_one_of_them_writes_behind_the_flag_of_the_other(where, settings):
    z, y = np.full(1, 7, np.int32), poisoned(2, np.int32)
    source = READ_BY_BOTH[where]
    blocks, threads = (2, 1) if where == "global" else (1, 64)
    fenced = source.replace("SIGNAL", "__threadfence();")
    assert not findings(fenced, blocks, threads, z, np.zeros(1, np.int32), y, **settings)
    assert list(y) == [7, 8]
    found = findings(source.replace("SIGNAL", ""), blocks, threads, z, np.zeros(1, np.int32), y, **settings)
    assert line(source, "write") in {f.where for f in found}


SAME_WORD = """
extern "C" __global__ void all(int* y) { y[0] = threadIdx.x; }"""


def test_an_inner_report_takes_the_findings_and_other_threads_are_not_checked():
    def race():
        launch(SAME_WORD, 1, 32, poisoned(1, np.int32))

    with ptxsim.sanitize() as outer:
        with ptxsim.sanitize() as inner:
            race()
        thread = threading.Thread(target=race)
        thread.start()
        thread.join()
    assert [f.kind for f in inner.findings] == ["different values"] and not outer.findings


@every_schedule
def test_the_first_look_of_a_wait_that_sleeps(settings):
    """Compilers take the first look out of the loop."""
    source = """
    extern "C" __global__ void wait(int* out, int n) {
      __shared__ volatile int flag;
      __shared__ int data;
      if (threadIdx.x == 0) flag = 0;
      __syncthreads();
      if (threadIdx.x == 0) { data = n; __threadfence_block(); flag = 1; }
      if (threadIdx.x == 32) { while (flag == 0) __nanosleep(100); __threadfence_block(); out[0] = data; }
    }"""
    assert not findings(source, 1, 64, np.zeros(1, np.int32), np.int32(5), arch="sm_80", **settings)
    racy = source.replace("__threadfence_block();", "")
    assert findings(racy, 1, 64, np.zeros(1, np.int32), np.int32(5), arch="sm_80", **settings)
