"""cupyflash beside other libraries: run one with ``python -m experiments.examples.NAME``."""
