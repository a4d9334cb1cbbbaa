"""Error of attention on real activations, against the exact result and its bound."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from cupyflash import attention, bounds, reference
from cupyflash.demo import activations


def head_errors(out: np.ndarray, q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """Largest error of each head, and its largest fraction of the bound."""
    error = np.abs(out.astype(np.float64) - reference.attention(q, k, v, **options))
    bound = bounds.attention(q, k, v, **options)
    return error.max(axis=(-2, -1)), (error / bound).max(axis=(-2, -1))


def report(device) -> Iterator[str]:
    """A line per layer: the worst of its heads over all texts."""
    inputs = activations.load()
    heads = inputs[0].q.shape[0]
    yield f"1. Attention {device.description}"
    yield f"   Inputs: all-MiniLM-L6-v2, float16, {heads} heads of head_dim {inputs[0].q.shape[-1]}, texts of " + (
        ", ".join(str(x.tokens) for x in inputs if x.layer == 0) + " tokens"
    )
    for layer in activations.LAYERS:
        seconds, worst = 0.0, (-1.0, 0.0, 0, 0)
        for x in (x for x in inputs if x.layer == layer):
            start = time.perf_counter()
            with device.working(f"layer {layer}, text {x.text}"):
                out = device.to_host(attention(*(device.to_device(array) for array in (x.q, x.k, x.v))))
            seconds += time.perf_counter() - start
            errors, fractions = head_errors(out, x.q, x.k, x.v)
            head = int(fractions.argmax())
            worst = max(worst, (fractions[head], errors[head], head, x.text))
        fraction, error, head, text = worst
        yield (
            f"   layer {layer}: {seconds:5.2f} s; worst head {head} of text {text}: error {error:.1e}, "
            f"{fraction:.0%} of its bound"
        )
