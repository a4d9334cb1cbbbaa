"""What tests of the sanitizer share: launch under it, and compare what it finds with marks in the source."""

from cupyflash import ptxsim

from .launching import launch


def line_of(source, mark):
    """The 1-based line of a source that carries a comment."""
    (line,) = (k for k, text in enumerate(source.splitlines(), 1) if f"// {mark}" in text)
    return line


def line(source, mark):
    """`kernel.cu:n`, the place that carries a comment."""
    return f"kernel.cu:{line_of(source, mark)}"


def findings(source, grid, block, *args, **options):
    """The findings of one launch."""
    with ptxsim.sanitize() as report:
        launch(source, grid, block, *args, **options)
    return report.findings


def check(found, source, kind, mark="fault", other=None):
    """Exactly one finding of this kind, at the marked line, which names the marked line of the other access."""
    (finding,) = found
    assert finding.kind == kind, finding
    assert finding.where.endswith(f":{line_of(source, mark)}"), finding
    if other:
        assert finding.other.endswith(f":{line_of(source, other)}"), finding
    assert "thread (" in finding.message and "block (" in finding.message, finding
    return finding


def assert_found(source, found, kind, here="here", other="other"):
    """One of the findings is of this kind, at the lines with these marks."""
    places = [(f.kind, f.where, f.other) for f in found]
    assert (kind, line(source, here), other and line(source, other)) in places, "\n".join(map(str, found)) or "nothing"
