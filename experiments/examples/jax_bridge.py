"""Attention for JAX arrays, forward and backward, under jit, grad and vmap; needs ``pip install jax``.

The arrays go through the host as NumPy arrays and run in the simulator, wherever JAX keeps them. ``python -m
experiments.examples.jax_bridge`` compares with JAX's own attention.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import cupyflash


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def attention(q, k, v, softmax_scale=None, causal=False, align=None):
    """out, lse of :func:`cupyflash.attention`, for q with all leading dimensions; gradients flow through both.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 64), jnp.float16)
    >>> jax.grad(lambda q: attention(q, k, v)[0].sum())(q).shape
    (2, 8, 64)
    """
    return forward(q, k, v, softmax_scale, causal, align)[0]


def forward(q, k, v, *options):
    lse_dtype = jnp.promote_types(q.dtype, jnp.float32)
    results = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct(q.shape[:-1], lse_dtype)
    out, lse = on_host(partial(cupyflash.attention, return_lse=True), results, options, q, k, v)
    return (out, lse), (q, k, v, out, lse)


def backward(softmax_scale, causal, align, saved, cotangents):
    dout, dlse = cotangents
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in saved[:3])
    return on_host(cupyflash.attention_backward, results, (softmax_scale, causal, align), dout, *saved, dlse=dlse)


attention.defvjp(forward, backward)


def on_host(function, results, options, *arrays, **named):
    """Call a function of NumPy arrays, which gives arrays like ``results``, from within JAX."""
    options = dict(zip(("softmax_scale", "causal", "align"), options, strict=True))

    def call(*arrays, **named):
        named = {name: np.asarray(x) for name, x in named.items()}
        return tuple(function(*map(np.asarray, arrays), **named, **options))

    return jax.pure_callback(call, results, *arrays, **named, vmap_method="broadcast_all")


def differences(dtype, shape: tuple[int, ...] = (1, 2, 50, 32)) -> dict[str, float]:
    """Largest difference of out, dq, dk and dv from JAX's own attention in float32, on equal inputs."""
    q, k, v, dout = jax.random.normal(jax.random.key(0), (4, *shape), jnp.float32).astype(dtype)

    def own(q, k, v):  # (batch, seqlen, heads, head_dim)
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v, is_causal=True), 1, 2)

    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, None, True)[0], q, k, v)
    ours = out, *pullback(dout)
    wide = [x.astype(jnp.promote_types(dtype, jnp.float32)) for x in (q, k, v, dout)]
    out, pullback = jax.vjp(own, *wide[:3])
    names = ("out", "dq", "dk", "dv")
    return {
        name: float(jnp.abs(x.astype(y.dtype) - y).max())
        for name, x, y in zip(names, ours, (out, *pullback(wide[3])), strict=True)
    }


def main() -> None:
    print("Largest difference from jax.nn.dot_product_attention, causal, (1, 2, 50, 32), which computes in float32")
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        found = differences(dtype)
        print(f"  {dtype.dtype.name:10}", "  ".join(f"{name} {value:.1e}" for name, value in found.items()))


if __name__ == "__main__":
    main()
