"""Attention for PyTorch tensors, forward and backward; needs ``pip install torch``.

Tensors on the CPU share their memory with NumPy arrays and run in the simulator, tensors on a GPU share theirs with
CuPy arrays through DLPack. ``python -m experiments.examples.torch_bridge`` compares with PyTorch's own attention.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

import cupyflash


class Attention(torch.autograd.Function):
    """out, lse of q, k, v; gradients flow through both."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        out, lse = cupyflash.attention(*map(as_array, (q, k, v)), return_lse=True, **options)
        out, lse = as_tensor(out), as_tensor(lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, dlse):
        arrays = map(as_array, (dout, *ctx.saved_tensors))
        gradients = cupyflash.attention_backward(*arrays, dlse=as_array(dlse), **ctx.options)
        return *map(as_tensor, gradients), None


def attention(q, k, v, *, return_lse: bool = False, **options):
    """:func:`cupyflash.attention` on tensors; options are softmax_scale, causal and align.

    >>> q, k, v = torch.randn(3, 2, 8, 64, dtype=torch.float16, requires_grad=True)
    >>> attention(q, k, v, causal=True).sum().backward()
    """
    out, lse = Attention.apply(q, k, v, options)
    return (out, lse) if return_lse else out


def as_array(tensor):
    """A NumPy or CuPy array on the tensor's memory, with its strides."""
    tensor = tensor.detach()
    if tensor.is_cuda:
        import cupy

        return cupy.from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # NumPy has none of its own
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def as_tensor(array):
    """A tensor on the memory of a NumPy or CuPy array."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def differences(dtype: torch.dtype, shape: tuple[int, ...] = (1, 2, 50, 32)) -> dict[str, float]:
    """Largest difference of out, dq, dk and dv from PyTorch's own attention in float64, on equal inputs."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4))

    def results(function, inputs, dout, **options):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out = function(*inputs, **options)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    ours = results(attention, (q, k, v), dout, causal=True)
    own = results(
        torch.nn.functional.scaled_dot_product_attention, [x.double() for x in (q, k, v)], dout.double(), is_causal=True
    )
    names = ("out", "dq", "dk", "dv")
    return {name: (x.double() - y).abs().max().item() for name, x, y in zip(names, ours, own, strict=True)}


def main() -> None:
    print("Largest difference from torch.nn.functional.scaled_dot_product_attention in float64, causal, (1, 2, 50, 32)")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        found = differences(dtype)
        print(f"  {dtype!s:15}", "  ".join(f"{name} {value:.1e}" for name, value in found.items()))


if __name__ == "__main__":
    main()
