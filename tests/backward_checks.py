"""What gradients must satisfy beside their bounds."""

import ml_dtypes
import numpy as np

from cupyflash import testing


def assert_unbiased(gradient, exact):
    """A weight, a dS or a result that is truncated instead of rounded errs to one side."""
    unit = float(ml_dtypes.finfo(gradient.dtype).eps) / 2
    large = np.abs(exact) > np.median(np.abs(exact))
    bias = np.mean(((gradient.astype(np.float64) - exact) / (unit * exact))[large])
    assert abs(bias) < 0.15, f"mean error {bias:+.3f} units"


def assert_nonfinite_rows_reach_who_sees_them(backend, problem, arch):
    """One NaN in a row of dout, q, k or v: what sees it is spoilt, and nothing else changes a bit.

    The problem is one causal head with as many keys as queries. Each spoilt row is a batch of its own, out and lse are
    those of the clean inputs.
    """
    arguments, options = problem.arguments(backend.attention, arch=arch)
    dlse = options.pop("dlse")
    clean = backend.attention_backward(*arguments, dlse=dlse, arch=arch, **options)
    index = np.arange(len(arguments[1]))
    rows = index[::11]  # 11 and the sizes of all tiles have no common factor
    for position, name in enumerate(("dout", "q", "k", "v")):
        batches = [np.repeat(array[None], len(rows), axis=0) for array in arguments]
        spoilt = batches[position]
        spoilt[np.arange(len(rows)), rows, rows % spoilt.shape[-1]] = np.nan
        batched_dlse = None if dlse is None else np.repeat(dlse[None], len(rows), axis=0)
        gradients = backend.attention_backward(*batches, dlse=batched_dlse, arch=arch, **options)
        for batch, row in enumerate(rows):
            queries, keys = (index >= row, index == row) if name in "kv" else (index == row, index <= row)
            for which, sees in ("dq", queries), ("dk", keys), ("dv", keys & (name != "v")):
                gradient, before = getattr(gradients, which)[batch], getattr(clean, which)
                testing.assert_same_bits(gradient[~sees], before[~sees])
                assert not np.isfinite(gradient[sees].astype(np.float64)).all(axis=-1).any()
