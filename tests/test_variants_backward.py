"""Gradients with every option in the tensor-core kernels, within their bounds."""

import numpy as np
import pytest

import cupyflash
from cupyflash import bounds, ptxsim, reference
from cupyflash._arrays import BFLOAT16
from cupyflash._gradients import NAMES
from cupyflash.testing import assert_gradients_within_bound, assert_same_bits, assert_within_bound

RIGHT = {"align": "bottom-right"}
SEQLEN_Q, SEQLEN_K = 70, 150
LEADING = {
    "heads": ((2, 2), (2, 1), (2, 1)),
    "queries shared": ((1, 2), (2, 2), (2, 2)),
    "keys shared": ((2, 2), (1, 1), (1, 2)),
}


def options_of(names, rng, heads, seqlen_q=SEQLEN_Q, seqlen_k=SEQLEN_K):
    """Of a batch of 2; where a name is not an option, it stands for a use of one."""
    masked = rng.random((2, 1, seqlen_q, seqlen_k)) < 0.5
    masked[:, :, 5] = False
    bias = rng.standard_normal((heads, seqlen_q, seqlen_k)).astype(np.float32)
    bias[:, 3] = -np.inf
    bias[0, 10, 4] = -np.inf
    aux = {"table": rng.standard_normal(seqlen_q + seqlen_k).astype(np.float32)}
    choices = {
        "causal": {"causal": True, **RIGHT},
        "window": {"window_size": (20, 5), **RIGHT},
        "left": {"window_size": (7, None), "align": "top-left"},
        "softcap": {"softcap": 1.5},
        "score_mod": {"score_mod": "score * score - table[i + j] + b", "aux": aux},
        "mask": {"mask": masked},
        "mask_mod": {"mask_mod": "(i + j + h) % 3 != 0"},
        "bias": {"bias": bias},
        "alibi": {"alibi_slopes": np.linspace(0.3, 0.01, heads, dtype=np.float32), **RIGHT},
        "sink": {"attn_sink": np.linspace(1, -2, heads, dtype=np.float32)},
        "dropout": {"dropout_p": 0.3, "seed": 5},
        "lengths": {"seqlens_q": np.array([33, seqlen_q - 1]), "seqlens_k": np.array([seqlen_k - 1, 40])},
        "empty": {"seqlens_q": np.array([0, seqlen_q]), "seqlens_k": np.array([seqlen_k, 0])},
    }
    return {name: value for word in names.split() for name, value in choices[word].items()}


def drawn(rng, dtype, *shapes):
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(dtype, names, leading, head_dim=16, head_dim_v=16):
    rng = np.random.default_rng(0)
    matrices = (SEQLEN_Q, head_dim), (SEQLEN_K, head_dim), (SEQLEN_K, head_dim_v)
    q, k, v = drawn(rng, dtype, *((*lead, *matrix) for lead, matrix in zip(leading, matrices, strict=True)))
    options = options_of(names, rng, max(lead[-1] for lead in leading))
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    (dout,), (dlse,) = drawn(rng, dtype, out.shape), drawn(rng, lse.dtype, lse.shape)
    arguments = dout, q, k, v, out, lse
    gradients = cupyflash.attention_backward(*arguments, dlse=dlse, **options)
    assert_gradients_within_bound(gradients, *arguments, dlse=dlse, **options)


ONE_BY_ONE = ["", "causal", "window", "left", "softcap", "score_mod", "mask", "mask_mod", "bias", "alibi", "sink"]
ONE_BY_ONE += ["dropout", "lengths", "empty"]
TOGETHER = [
    "causal lengths",
    "left lengths dropout",
    "window lengths softcap sink",
    "lengths alibi dropout",
    "empty bias sink score_mod",
    "lengths window softcap score_mod mask mask_mod bias alibi sink dropout",
]


@pytest.mark.parametrize("names", ONE_BY_ONE + TOGETHER)
def test_gradients(names):
    check(np.float16, names, LEADING["heads"])


@pytest.mark.parametrize(
    ("names", "leading"),
    [
        ("causal lengths", "queries shared"),
        ("causal lengths", "keys shared"),
        ("empty bias sink score_mod", "keys shared"),
    ],
)
def test_gradients_of_what_batches_share(names, leading):
    with ptxsim.sanitize() as report:
        check(BFLOAT16, names, LEADING[leading])
    assert not report, str(report)


@pytest.mark.parametrize("names", ["lengths window softcap mask dropout"])
@pytest.mark.parametrize("arch", ["sm_75", pytest.param("sm_90", marks=pytest.mark.deep)])
def test_gradients_elsewhere(names, arch):
    with ptxsim.settings(arch=arch):
        check(np.float16, names, ((2, 2), (2, 1), (2, 1)), 40, 24)


OFFSETS_Q, OFFSETS_K = np.array([0, 33, 33, 40, 110]), np.array([0, 20, 60, 60, 150])


@pytest.mark.parametrize(
    ("names", "heads"),
    [("window alibi dropout", (2, 1)), ("softcap mask bias sink score_mod", (2, 2))],  # others: test_varlen.py
)
def test_gradients_of_packed_sequences(names, heads):
    rng = np.random.default_rng(0)
    num_heads, num_kv_heads = heads
    q, k, v = drawn(rng, np.float16, (113, num_heads, 16), (155, num_kv_heads, 16), (155, num_kv_heads, 24))
    options = options_of(names, rng, num_heads, 70, 90)
    if "mask" in options:
        options["mask"] = rng.random((4, 1, 70, 90)) < 0.7
        options["attn_sink"] = rng.standard_normal((4, num_heads)).astype(np.float32)
    out, lse = cupyflash.attention_varlen(q, k, v, OFFSETS_Q, OFFSETS_K, return_lse=True, **options)
    (dout,), (dlse,) = drawn(rng, np.float16, out.shape), drawn(rng, lse.dtype, lse.shape)
    arguments = dout, q, k, v, out, lse, OFFSETS_Q, OFFSETS_K
    gradients, exact, allowed = (
        module.attention_varlen_backward(*arguments, dlse=dlse, **options) for module in (cupyflash, reference, bounds)
    )
    for name in NAMES:
        result, *values = (getattr(x, name) for x in (gradients, exact, allowed))
        if result is not None:
            assert_within_bound(result, *values, name=name)


@pytest.mark.parametrize("names", ["lengths causal", "mask", "bias", "lengths softcap alibi mask_mod dropout"])
def test_what_is_removed_has_no_influence(names):
    """NaN in everything that no pair is left of: the same bits as with numbers there."""
    rng = np.random.default_rng(0)
    q, k, v = drawn(rng, np.float16, (2, 2, 40, 16), (2, 2, 70, 16), (2, 2, 70, 16))
    options = options_of(names, rng, 2, 40, 70)
    if "mask" in options:
        options["mask"][..., 30:33] = options["mask"][..., 7, :] = False
    if "bias" in options:
        options["bias"][..., 30:33] = options["bias"][..., 7, :] = -np.inf
    hidden = hidden_rows(options)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    (dout,) = drawn(rng, np.float16, out.shape)
    clean = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    for array in q, dout:
        array[:, :, hidden[0]] = np.nan
    for array in k, v:
        array[:, :, hidden[1]] = np.nan
    spoilt = cupyflash.attention_backward(dout, q, k, v, out, lse, **options)
    for name in NAMES:
        if getattr(clean, name) is not None:
            assert_same_bits(getattr(spoilt, name), getattr(clean, name), name=name)


def hidden_rows(options):
    """Queries that see no key, and keys that no query sees, in either batch."""
    if "mask" in options or "bias" in options:
        return [7], [30, 31, 32]
    ends_q, ends_k = (options[name].max() for name in ("seqlens_q", "seqlens_k"))
    return slice(ends_q, None), slice(ends_k, None)
