"""Options of ``attend`` that change the scores: each reaches the call, and each error is one line."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention
from cupyflash._cli import files
from tests import test_command_line
from tests.test_command_line import FILES, attend, check_error, prepare_errors, saved

folder = test_command_line.folder  # a fixture


@pytest.fixture
def operands(folder):
    rng = np.random.default_rng(1)
    mask, bias = rng.random((7, 5)) < 0.7, rng.standard_normal((2, 1, 5)).astype(np.float32)
    np.save("mask.npy", mask)
    np.save("bias.npy", bias)
    return mask, bias


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("--window 1 2 --align top-left", {"window_size": (1, 2), "align": "top-left"}),
        ("--window 0 all --align bottom-right", {"window_size": (0, None), "align": "bottom-right"}),
        ("--window all all", {}),
        ("--softcap 0.5", {"softcap": 0.5}),
        ("--dropout 0.25 --seed 3", {"dropout_p": 0.25, "seed": 3}),
        ("--dropout 0.25 --seed 4", {"dropout_p": 0.25, "seed": 4}),
    ],
)
def test_numbers(folder, arguments, options):
    plain = attention(*saved())
    assert attend(*FILES, *arguments.split(), "-o", "out.npy") == 0
    np.testing.assert_array_equal(np.load("out.npy"), attention(*saved(), **options))
    assert not options or (np.load("out.npy") != plain).any()


def test_arrays(operands):
    mask, bias = operands
    assert attend(*FILES, "--mask", "mask.npy", "--bias", "bias.npy", "-o", "out.npy") == 0
    np.testing.assert_array_equal(np.load("out.npy"), attention(*saved(), mask=mask, bias=bias))
    assert attend(*FILES, "--mask", "mask.npy", "-o", "out.npy") == 0
    np.testing.assert_array_equal(np.load("out.npy"), attention(*saved(), mask=mask))


def test_a_bfloat16_bias(operands):
    bias = operands[1].astype(ml_dtypes.bfloat16)
    np.save("bias.npy", bias)
    assert np.load("bias.npy").dtype == files.OPAQUE
    assert attend(*FILES, "--dtype", "bfloat16", "--bias", "bias.npy", "-o", "out.npy") == 0
    inputs = [x.astype(ml_dtypes.bfloat16) for x in saved()]
    np.testing.assert_array_equal(np.load("out.npy"), attention(*inputs, bias=bias).astype(np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--window 1 -o out.npy", "--window: expected 2 arguments"),
        ("--window 1 -1 -o out.npy", "--window: '-1' is neither a whole number of at least 0 nor 'all'"),
        ("--window 1 none -o out.npy", "--window: 'none' is neither a whole number of at least 0 nor 'all'"),
        ("--window 1 2.5 -o out.npy", "--window: '2.5' is neither a whole number"),
        ("--window 1 2 -o out.npy", "align: a window with seqlen_q 7 and seqlen_k 5 needs one of"),
        ("--softcap 0 -o out.npy", "softcap: 0.0 is not between"),
        ("--softcap x -o out.npy", "--softcap: invalid float value: 'x'"),
        ("--dropout 0.5 -o out.npy", "--dropout 0.5: needs --seed N, which says what is dropped"),
        ("--dropout 1 --seed 1 -o out.npy", "dropout_p: 1.0 is not at least 0"),
        ("--seed -1 -o out.npy", "seed: -1 is not between 0 and 2**64 - 1"),
        ("--mask missing.npy -o out.npy", "missing.npy: No such file"),
        ("--mask bias.npy -o out.npy", "mask: dtype float32, expected bool"),
        ("--mask in.npz -o out.npy", "in.npz: is an .npz archive, not one array"),
        ("--bias mask.npy -o out.npy", "mask.npy (bias): dtype bool is not one of"),
        ("--bias opaque.npy -o out.npy", "opaque.npy (bias): elements are two opaque bytes"),
        ("--bias cut.npy -o out.npy", "cut.npy: not a readable"),
        ("--bias q.npy -o out.npy", "bias: shape (2, 7, 16) does not broadcast to (2, 7, 5)"),
        ("--mask mask.npy -o mask.npy", "mask.npy: is an input and an output"),
        ("--bias bias.npy -o out.npy --lse bias.npy", "bias.npy: is an input and an output"),
    ],
)
def test_errors(folder, operands, capsys, arguments, message):
    prepare_errors(folder)
    check_error(folder, capsys, ["attend", *FILES, *arguments.split()], message)
