"""Experiments: one question each, one command, one CSV and one figure; see README.md."""
