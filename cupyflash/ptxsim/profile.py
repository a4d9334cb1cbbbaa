import contextvars

_current = contextvars.ContextVar("ptxsim_profile", default=None)


def current_profile():
    return _current.get()
