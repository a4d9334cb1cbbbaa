"""Tests of cupyflash; run them with ``make test``, or ``python -m pytest --backend gpu`` on a GPU."""
