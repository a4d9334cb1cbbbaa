"""Exact attention for NumPy and CuPy arrays, compiled from CUDA C++ at first use."""

__version__ = "0.1.0"
