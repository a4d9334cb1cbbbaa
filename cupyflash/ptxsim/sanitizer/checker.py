"""The observer that tells each check of what a launch does."""

from ..observer import Observer


class Checker(Observer):
    """The checks of one launch."""

    def __init__(self, report, launch):
        self.report, self.launch = report, launch
