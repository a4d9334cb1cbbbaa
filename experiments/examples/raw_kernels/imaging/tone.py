import cupy as cp

gamma = cp.ElementwiseKernel(
    "T pixel, float64 exponent",
    "T out",
    "out = pow((double)pixel, exponent)",
    "gamma_curve",
)

largest_difference = cp.ReductionKernel(
    "T a, T b",
    "T out",
    "abs(a - b)",
    "max(a, b)",
    "out = a",
    "0",
    "largest_difference",
)


def contrast(image, axis=None):
    """The largest difference of neighbours in a row, over everything or along an axis."""
    return largest_difference(image[:, 1:], image[:, :-1], axis=axis)
