"""Parameter structures of calls with options are laid out as the kernels that they launch declare them."""

from unittest import mock

import numpy as np
import pytest

import cupyflash
from cupyflash import _launch, _source
from cupyflash._block_mask import BlockMask
from tests.test_backward_arguments import compiles
from tests.test_launch import offsets

HEADS, QUERIES, KEYS, DIM = 4, 5, 7, 16
EVERY_PAIR = {
    "window_size": (3, 2),
    "align": "bottom-right",
    "softcap": 2.0,
    "score_mod": "score + table[i]",
    "mask_mod": "i != j + offset[0]",
    "aux": {"table": np.ones(QUERIES, np.float32), "offset": np.ones(1, np.int64)},
    "mask": np.ones((QUERIES, KEYS), bool),
    "bias": np.ones((HEADS, 1, KEYS), np.float32),
    "alibi_slopes": np.ones(HEADS),
    "attn_sink": np.ones(HEADS, np.float32),
    "dropout_p": 0.5,
    "seed": 2**40,
}
PADDED = {"seqlens_q": np.array([4]), "seqlens_k": np.array([5])}
ONE_NUMBER = {"bias": np.ones((), np.float32)}
BLOCKS = {"mask_mod": BlockMask("i >= j", {}, QUERIES, KEYS, 128, np.ones((1, 1, 1, 1), np.uint32))}
CASES = {
    "padded": EVERY_PAIR | PADDED,
    "packed": EVERY_PAIR | {"offsets": (np.array([0, QUERIES]), np.array([0, KEYS]))},
    "some, of stacked heads": EVERY_PAIR | ONE_NUMBER | {"softcap": None, "mask": None, "dropout_p": 0.0, "seed": None},
    "others": {"softcap": 2.0, "attn_sink": np.ones((), np.float32), **BLOCKS},
}


def structures(dtype, options):
    """(kernel, constants, functions) -> structure, of all launches of a forward, of one in parts and of a backward."""
    q, k, v = (np.ones((1, heads, rows, DIM), dtype) for heads, rows in ((HEADS, QUERIES), (2, KEYS), (2, KEYS)))
    lse = np.ones((1, HEADS, QUERIES), np.float64 if dtype == np.float64 else np.float32)
    offsets, options = options.get("offsets", ()), {name: x for name, x in options.items() if name != "offsets"}
    forward, backward, dout = cupyflash.attention, cupyflash.attention_backward, q
    if offsets:
        forward, backward = cupyflash.attention_varlen, cupyflash.attention_varlen_backward
        q, k, v, dout = (x[0].swapaxes(0, 1) for x in (q, k, v, q))
        lse = lse[0]
    launches = []
    with mock.patch.object(_launch, "run", lambda _, more: launches.extend(more)):
        forward(q, k, v, *offsets, **options)
        forward(q, k, v, *offsets, return_max=True, split_size=128, **options)
        backward(dout, q, k, v, dout, lse, *offsets, **options)
    configs = {_source.render(x.config.file, x.config.defines, x.config.user_functions): x for x in launches}
    return [(x.config.file, source, x.params.dtype) for source, x in configs.items()]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_parameters_are_laid_out_as_the_kernels_declare_them(case, dtype):
    found = structures(dtype, CASES[case])
    suffix = "_fma" if dtype == np.float64 else ""
    expected = {f"{name}{suffix}" for name in ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkdv")}
    expected |= {"flash_combine", "flash_bwd_delta", "row_sum", "strided_copy"}
    if "bias" in CASES[case]:
        expected.add(f"flash_bwd_dbias{suffix}")
    assert {file for file, *_ in found} | {"strided_copy"} == expected
    for _, source, dtype_of_params in found:
        checks = [f'static_assert(sizeof(Params) == {dtype_of_params.itemsize}, "size");']
        checks += [
            f'static_assert(__builtin_offsetof(Params, {path}) == {offset}, "{path}");'
            for path, offset in offsets(dtype_of_params)
        ]
        compiles(source + "\n".join(checks))
