"""Which functions of a CUDA C++ source are templates, as far as its text shows."""

import re

# From `template <` to a function's name, in one declaration; attributes such as __launch_bounds__(256) are no name.
_FUNCTION = re.compile(r"\btemplate\s*<([^;{}]*?)\b(?!__)(\w+)\s*\(")


def kernel_templates(code):
    """Names of the kernels that are templates, in their order.

    >>> kernel_templates("template <int N> __device__ int f() {} template <class T> __global__ void g(T* x) {}")
    ['g']
    """
    return [name for head, name in _FUNCTION.findall(code) if "__global__" in head]
