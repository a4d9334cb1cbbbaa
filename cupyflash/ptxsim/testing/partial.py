"""Objects that have some of the names of CuPy's."""


class Partial:
    """Of a name that it lacks, it says so."""

    __slots__ = ()

    def __getattr__(self, name):
        raise AttributeError(f"{type(self).__name__}.{name}: not simulated", name=name, obj=self)
