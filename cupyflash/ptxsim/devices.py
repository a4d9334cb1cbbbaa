"""Numbers of the GPUs that bounds are given for: one table, and where each column comes from.

Rates are of one streaming multiprocessor (SM) and one clock cycle. Where sources disagree, or state a rate only for
some of the instructions that a column stands for, the highest is here: a bound may be low, never high.

* sms, clock, memory bandwidth: NVIDIA's data sheets, the highest clock (GHz) and GB/s of each board,
* fp32, fp64, alu, mufu, shuffle (lanes) and fp16 (results): "Throughput of Native Arithmetic Instructions", CUDA C++
  Programming Guide and Best Practices Guide; min and max of sm_100 run at twice the rate of the other ALU instructions,
* tensor (fused multiply-adds): what the data sheets' dense peak comes to for each SM and cycle. GeForce boards
  accumulate float16 products in float32 at half rate. From sm_90 on the peak is that of warp-group and
  tensor-memory instructions, which `mma.sync` does not reach,
* every SM: 4 schedulers issue one warp instruction each, shared memory has 32 banks of 4 bytes, the second-level cache
  delivers at most 64 bytes.
"""

import dataclasses

SCHEDULERS = 4
L2_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Device:
    """One board."""

    name: str
    arch: str
    sms: int
    clock: float
    bandwidth: float
    fp32: int
    fp64: int
    fp16: int
    alu: int
    mufu: int
    shuffle: int
    tensor_f16: int  # float16 and bfloat16, accumulated in float32
    tensor_f16_f16: int  # accumulated in float16
    tensor_tf32: int

    @property
    def dram_bytes(self):
        """Bytes of device memory for each clock cycle of the whole board."""
        return self.bandwidth / self.clock


_TABLE = """
name           arch    sms  clock  GB/s  fp32 fp64 fp16 alu mufu shuffle  tensor: f32  f16  tf32
T4             sm_75    40  1.59    320    64    2  128  64   16      32          512  512     0
A100           sm_80   108  1.41   2039    64   32  256  64   16      32         1024 1024   512
RTX_A6000      sm_86    84  1.80    768   128    2  128  64   16      32          512  512   256
RTX_4090       sm_89   128  2.52   1008   128    2  128  64   16      32          256  512   128
L40S           sm_89   142  2.52    864   128    2  128  64   16      32          512  512   256
H100           sm_90   132  1.98   3350   128   64  256  64   16      32         2048 2048  1024
H200           sm_90   132  1.98   4800   128   64  256  64   16      32         2048 2048  1024
B200           sm_100  148  1.965  8000   128   64  256 128   16      32         4096 4096  2048
RTX_5090       sm_120  170  2.41   1792   128    2  256  64   16      32          256  512   128
RTX_PRO_6000   sm_120  188  2.62   1792   128    2  256  64   16      32          512  512   256
"""


def _parsed(line):
    name, arch, sms, clock, bandwidth, *rates = line.split()
    return Device(name.replace("_", " "), arch, int(sms), float(clock), float(bandwidth), *map(int, rates))


DEVICES = {device.name: device for device in map(_parsed, _TABLE.strip().splitlines()[1:])}
BOUNDED = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")  # architectures that reports give bounds for


def device(name):
    """A device by its name, or the first of an architecture in the table.

    >>> device("sm_80").name
    'A100'
    """
    for candidate in DEVICES.values():
        if name in (candidate.name, candidate.arch):
            return candidate
    known = ", ".join(f"{d.name} ({d.arch})" for d in DEVICES.values())
    raise ValueError(f"device: {name!r}, must be one of {known}, or an architecture of these")
