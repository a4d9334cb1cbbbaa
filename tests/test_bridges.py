"""The framework examples in experiments/ against the frameworks' own attention; skipped where one is not installed."""

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention, attention_backward, bounds


def expected(dout, q, k, v, dlse, **options):
    """out, lse, dq, dk and dv of cupyflash for these NumPy arrays, and how far they may be from the framework's own.

    The latter are computed from the same values by the standard method in float64, which errs itself.
    """
    out, lse = attention(q, k, v, return_lse=True, **options)
    results = [out, lse, *attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)]
    ours = [
        *bounds.attention(q, k, v, return_lse=True, **options),
        *bounds.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options),
    ]
    dout, q, k, v, dlse, out, lse = (x.astype(np.float64) for x in (dout, q, k, v, dlse, out, lse))
    own = [
        *bounds.attention_naive(q, k, v, return_lse=True, **options),
        *bounds.attention_naive_backward(dout, q, k, v, out, lse, dlse=dlse, **options),
    ]
    return results, [x + y for x, y in zip(ours, own, strict=True)]


def drawn(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="JAX is not installed: pip install jax")


TORCH_TYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_torch_function(torch, dtype):
    from experiments.examples import torch_bridge

    shapes = (2, 33, 4, 24), (2, 70, 4, 24), (2, 70, 4, 16), (2, 4, 33, 16), (2, 4, 33)
    options = {"softmax_scale": 0.3, "causal": True, "align": "bottom-right"}
    generator = torch.Generator().manual_seed(1)
    lse_dtype = torch.float64 if dtype == "float64" else torch.float32
    *operands, dout, dlse = (
        torch.randn(s, generator=generator).to(getattr(torch, dtype) if len(s) > 3 else lse_dtype) for s in shapes
    )
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in operands)
    out, lse = torch_bridge.attention(q, k, v, return_lse=True, **options)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    found = [torch_bridge.as_array(x) for x in (out, lse, *gradients)]

    arrays = [torch_bridge.as_array(x) for x in (dout, q, k, v, dlse)]
    assert [x.ctypes.data for x in arrays] == [x.data_ptr() for x in (dout, q, k, v, dlse)]
    assert [x.shape for x in arrays[:4]] == [(2, 4, 33, 16), (2, 4, 33, 24), (2, 4, 70, 24), (2, 4, 70, 16)]
    same, bound = expected(*arrays, **options)
    for ours, direct in zip(found, same, strict=True):
        assert ours.dtype == direct.dtype and (ours == direct).all()

    # The framework's own formulas: a mask aligned at the bottom right, and the gradient of its softmax.
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    scores = 0.3 * wide[0] @ wide[1].transpose(-1, -2)
    scores = scores.masked_fill(torch.ones(33, 70, dtype=torch.bool).triu(38), -torch.inf)
    own = scores.softmax(-1) @ wide[2], scores.logsumexp(-1)
    own = [*own, *torch.autograd.grad(own, wide, (dout.double(), dlse.double()))]
    for ours, exact, error in zip(found, own, bound, strict=True):
        assert (np.abs(ours.astype(np.float64) - exact.detach().numpy()) <= error).all()


def test_torch_gradcheck(torch):
    from experiments.examples import torch_bridge

    def both(q, k, v):
        return torch_bridge.attention(q, k, v, return_lse=True, causal=True, align="bottom-right")

    shapes = (2, 3, 4), (2, 5, 4), (2, 5, 2)
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(both, inputs, nondet_tol=0.0, fast_mode=True)  # along random directions


def test_torch_bfloat16_shares_memory(torch):
    from experiments.examples.torch_bridge import as_array, as_tensor

    tensor = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    array = as_array(tensor)
    assert array.dtype == ml_dtypes.bfloat16 and array.tolist() == tensor.tolist()
    array[0, 1] = 7
    assert tensor[0, 1] == 7 and as_tensor(array).data_ptr() == tensor.data_ptr()
    assert as_tensor(array).dtype == torch.bfloat16 and as_tensor(array).stride() == tensor.stride()


def test_torch_differences_are_small(torch, capsys):
    from experiments.examples import torch_bridge

    torch_bridge.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"torch.{dtype}" for dtype in TORCH_TYPES]
    assert max(torch_bridge.differences(torch.float16).values()) < 5e-3


JAX_TYPES = ["float16", "bfloat16", "float32"]


@pytest.mark.parametrize("dtype", JAX_TYPES)
def test_jax_function(jax, dtype):
    from experiments.examples import jax_bridge

    q, k, v, dout = drawn(jax.numpy.dtype(dtype), (2, 4, 33, 24), (2, 2, 70, 24), (2, 2, 70, 16), (2, 4, 33, 16))
    (dlse,) = drawn(np.float32, (2, 4, 33))
    options = 0.3, True, "bottom-right"
    results, pullback = jax.vjp(jax.jit(lambda *x: jax_bridge.attention(*x, *options)), q, k, v)
    found = [np.asarray(x) for x in (*results, *pullback((dout, dlse)))]
    same, bound = expected(dout, q, k, v, dlse, softmax_scale=0.3, causal=True, align="bottom-right")
    for ours, direct in zip(found, same, strict=True):
        assert ours.dtype == direct.dtype and (ours == direct).all()

    with jax.enable_x64(True):
        jnp = jax.numpy

        def own(q, k, v):
            k, v = (jnp.repeat(x, 2, axis=1) for x in (k, v))  # two query heads use a key head
            scores = 0.3 * q @ jnp.swapaxes(k, -1, -2)
            scores = jnp.where(np.tri(33, 70, 70 - 33, dtype=bool), scores, -np.inf)
            return jax.nn.softmax(scores) @ v, jax.nn.logsumexp(scores, axis=-1)

        results, pullback = jax.vjp(own, *(x.astype(np.float64) for x in (q, k, v)))
        exact = [*results, *pullback((dout.astype(np.float64), dlse.astype(np.float64)))]
        assert exact[0].dtype == np.float64
    for ours, value, error in zip(found, exact, bound, strict=True):
        assert (np.abs(ours.astype(np.float64) - np.asarray(value)) <= error).all()


def test_jax_check_grads(jax):
    from jax.test_util import check_grads

    from experiments.examples import jax_bridge

    def both(q, k, v):
        return jax_bridge.attention(q, k, v, None, True, "bottom-right")

    with jax.enable_x64(True):
        check_grads(both, drawn(np.float64, (2, 3, 4), (2, 5, 4), (2, 5, 2)), order=1, modes=["rev"])


def test_jax_maps_over_a_batch(jax):
    from experiments.examples import jax_bridge

    q, k, v = drawn(np.float16, *[(3, 2, 20, 16)] * 3)
    out, lse = jax.vmap(jax_bridge.attention)(q, k, v)
    same = attention(q, k, v, return_lse=True)
    assert (out == same[0]).all() and (lse == same[1]).all()


def test_jax_differences_are_small(jax, capsys):
    from experiments.examples import jax_bridge

    jax_bridge.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == JAX_TYPES
    assert max(jax_bridge.differences(jax.numpy.float16).values()) < 5e-3
