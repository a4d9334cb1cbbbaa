"""Attention as a stranger may write it, to test the checks of cupyflash.testing with."""
