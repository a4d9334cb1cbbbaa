"""A fault planted in the kernel's source, and how the error bound sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np

from cupyflash import _source, attention, bounds, ptxsim, reference
from cupyflash.demo import activations
from cupyflash.demo.online_softmax import ARCH

RIGHT = "alpha[m][half] = exponential(old_max - new_max);"
WRONG = "alpha[m][half] = 1.0f;"


@contextlib.contextmanager
def altered_sources(right: str, wrong: str) -> Iterator[None]:
    """Within the block, kernels are compiled with ``wrong`` in the one place where their source says ``right``."""
    original = _source.render

    def render(kernel, *variant):
        source = original(kernel, *variant)
        if source.count(right) != 1:
            raise ValueError(f"right: {right!r} occurs {source.count(right)} times in {kernel}, expected once")
        return source.replace(right, wrong)

    with mock.patch.object(_source, "render", render):
        yield


def report() -> Iterator[str]:
    """Error and bound of one layer without the rescaling of earlier tiles."""
    x = activations.load()[0]
    exact, bound = reference.attention(x.q, x.k, x.v), bounds.attention(x.q, x.k, x.v)
    yield "\n4. A planted fault: softmax.cuh without its rescaling of earlier tiles (layer 0, text 0)"
    for what, sources in ("as it is", contextlib.nullcontext()), ("fault", altered_sources(RIGHT, WRONG)):
        with ptxsim.settings(arch=ARCH), sources:
            error = np.abs(attention(x.q, x.k, x.v) - exact)
        times = float((error / bound).max())
        beyond = int((error > bound).any(axis=-1).sum())
        yield (
            f"   {what:9} largest error {error.max():.1e}, {times:,.{2 * (times < 10)}f} times its bound; "
            f"{beyond:,} of {bound[..., 0].size:,} rows beyond the bound"
        )
