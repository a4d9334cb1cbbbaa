"""Undefined behaviour that a launch may get away with: what is looked for, and the report of what was found."""

from .checker import Checker
from .fresh import empty
from .report import KINDS, Finding, Report, current_report, sanitize

__all__ = ["KINDS", "Checker", "Finding", "Report", "current_report", "empty", "sanitize"]
