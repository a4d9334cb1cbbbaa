"""Filters of grey images on the GPU."""

from .blur import box_blur
from .levels import equalise, histogram
from .tone import contrast, gamma

__all__ = ["box_blur", "contrast", "equalise", "gamma", "histogram"]
