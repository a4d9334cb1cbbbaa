"""What calls leave behind for later ones: kernels and plans."""

import contextlib
from unittest import mock

from cupyflash import _launch, _plan
from cupyflash._memo import Memo


def no_plans():
    """Within the block, calls are planned anew: for whoever changes what plans are made of."""
    return mock.patch.object(_plan, "plans", Memo(_plan.plans.size))


@contextlib.contextmanager
def nothing_remembered():
    """Within the block, calls are as in a new process, but for CuPy's files."""
    with (
        mock.patch.object(_launch, "modules", Memo(_launch.modules.size)),
        mock.patch.object(_launch, "kernels", Memo(_launch.kernels.size)),
        no_plans(),
    ):
        yield
