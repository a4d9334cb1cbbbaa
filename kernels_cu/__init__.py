"""CUDA C++ sources of cupyflash: kernels (.cu, one idea each) and the headers they share (.cuh).

Nothing here runs on the host and no file includes a CUDA header. A reader may start with
``attention_naive.cu``, the standard method, and go on to ``flash_fwd.cu``.
"""

from importlib.resources import files

__all__ = ["CATALOGUE", "source"]

#: Kernel file -> what it computes, its compile-time constants beside those of options (variant.cuh), and its grid. Only
#: ``pair_functions`` is not here: it is compiled around a user's expressions.
CATALOGUE = {
    "attention_naive": "attention by the standard method, scores and weights in device memory: three kernels, "
    "`scores`, `softmax` and `weighted_values`",
    "attention_naive_bwd": "its gradients, P, dP and dS in device memory: five kernels, `dweights`, `dscores`, "
    "`dquery`, `dkey` and `dvalue`",
    "flash_fwd": "attention, forward, on tensor cores (float16, bfloat16); ELEMENT, HEAD_DIM, HEAD_DIM_V, "
    "BLOCK_M, BLOCK_N, NUM_WARPS, BAND_RIGHT, SCALE_POSITIVE; one block per BLOCK_M queries of one head",
    "flash_combine": "joins attention over parts of the keys; ELEMENT, PARTIAL (that of the parts); one warp per query",
    "flash_bwd_delta": "delta = rowsum(dout * out) - dlse, and for the next two lse in base 2; ELEMENT; "
    "one warp per query",
    "flash_bwd_dkdv": "dk, dv on tensor cores; constants of flash_fwd, WITH_DKEY, WITH_DVALUE; "
    "one block per BLOCK_N keys of one key head",
    "flash_bwd_dq": "dq on tensor cores; constants of flash_fwd, NUM_STAGES; one block per BLOCK_M queries of one head",
    "flash_bwd_dbias": "gradient of a bias on tensor cores; constants of flash_fwd, DBIAS (its element type), "
    "SUM_QUERIES, SUM_KEYS; one block per BLOCK_M x BLOCK_N tile of it",
    "flash_fwd_fma": "attention, forward, by fused multiply-adds (float32, float64); ELEMENT, HEAD_DIM, HEAD_DIM_V, "
    "BLOCK_M, BLOCK_N, NUM_WARPS, BAND_RIGHT; one block per BLOCK_M queries of one head",
    "flash_bwd_dkdv_fma": "dk, dv by fused multiply-adds; constants of flash_fwd_fma, WITH_DKEY, WITH_DVALUE; "
    "one block per BLOCK_N keys of one key head",
    "flash_bwd_dq_fma": "dq by fused multiply-adds; constants of flash_fwd_fma; "
    "one block per BLOCK_M queries of one head",
    "flash_bwd_dbias_fma": "gradient of a bias by fused multiply-adds; constants of flash_fwd_fma, DBIAS, SUM_QUERIES, "
    "SUM_KEYS; one block per BLOCK_M x BLOCK_N tile of it",
    "row_sum": "sums of one value per query, with which gradients of ALiBi slopes and sinks end; ELEMENT, RESULT "
    "(element type of the sums), NUM_THREADS; one block per sum",
    "strided_copy": "one array into another of the same shape and any strides; ELEMENT_BYTES; one thread per element",
}


def source(name: str) -> str:
    """Text of one file of this package.

    >>> source("flash_fwd.cu").count("__global__")
    1
    """
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
