"""The forward of attention in Triton's interpreter: a peer of `simulator_speed`, which runs this in its own process.

    TRITON_INTERPRET=1 python -m experiments.triton_forward HEADS SEQLEN HEAD_DIM

prints the seconds of one call and the largest difference from NumPy's float32. It needs `pip install torch triton`; the
interpreter is chosen by the environment variable, before Triton is imported. SEQLEN must be a multiple of 128.
"""

import sys
import time

import numpy as np
import torch
import triton
import triton.language as tl

from experiments.simulator_speed import problem, three_steps

BLOCK_M, BLOCK_N = 128, 128


@triton.jit
def forward(q, k, v, out, scale, n, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = tl.arange(0, D)
    first = tl.program_id(1) * n
    rows = first + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q_tile = tl.load(q + rows[:, None] * D + columns[None, :])
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, n, BLOCK_N):
        keys = first + start + tl.arange(0, BLOCK_N)
        k_tile = tl.load(k + keys[:, None] * D + columns[None, :])
        v_tile = tl.load(v + keys[:, None] * D + columns[None, :])
        scores = tl.dot(q_tile, tl.trans(k_tile)) * scale
        larger = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp(scores - larger[:, None])
        rescale = tl.exp(largest - larger)
        total = total * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p.to(tl.float16), v_tile)
        largest = larger
    tl.store(out + rows[:, None] * D + columns[None, :], (acc / total[:, None]).to(tl.float16))


def main() -> None:
    heads, seqlen, head_dim = map(int, sys.argv[1:])
    arrays = problem(heads, seqlen, head_dim)
    q, k, v = map(torch.from_numpy, arrays)
    out = torch.empty_like(q)
    start = time.perf_counter()
    forward[(seqlen // BLOCK_M, heads)](q, k, v, out, head_dim**-0.5, seqlen, head_dim, BLOCK_M, BLOCK_N)
    seconds = time.perf_counter() - start
    print(seconds, np.abs(out.numpy().astype(np.float32) - three_steps(*arrays)).max())


if __name__ == "__main__":
    main()
