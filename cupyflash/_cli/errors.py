"""What the command line reports as one line with exit status 2."""


class CommandError(Exception):
    """The command cannot be carried out as given; the message is one line."""

    def __init__(self, message: object):
        super().__init__(" ".join(str(message).split()))
