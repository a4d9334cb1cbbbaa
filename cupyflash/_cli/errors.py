"""What the command line reports as an error with exit status 2."""


class CommandError(Exception):
    """The command cannot be carried out as given; the message is one line, or as it is with ``lines``."""

    def __init__(self, message: object, *, lines: bool = False):
        super().__init__(str(message).rstrip() if lines else " ".join(str(message).split()))
