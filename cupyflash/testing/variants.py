"""What a problem asks for beside softmax_scale, causal and align: names of families, of which a seed makes arrays."""

from dataclasses import dataclass, fields, replace

import numpy as np

from cupyflash.testing import layouts, operands
from cupyflash.testing.expressions import MASK_EXPRESSIONS, SCORE_EXPRESSIONS
from cupyflash.testing.reproducible import Reproducible
from cupyflash.testing.values import require_known


@dataclass(frozen=True, repr=False)
class Operand(Reproducible):
    """An optional array: a family of values, which dimensions it has, its dtype, and how it lies in memory.

    ``dtype`` is "inputs", "float32" or "float64"; a mask is bool and has none.
    """

    values: str
    form: str = "all"
    dtype: str = "inputs"
    view: str = "plain"


@dataclass(frozen=True, repr=False)
class Lengths(Reproducible):
    """Lengths of each batch, or one of all: a family, and their dtype."""

    values: str
    each_batch: bool = True
    dtype: str = "int32"


_FAMILIES = {
    "mask": operands.MASK_FAMILIES,
    "bias": operands.BIAS_FAMILIES,
    "alibi_slopes": operands.SLOPE_FAMILIES,
    "attn_sink": operands.SINK_FAMILIES,
    "seqlens_q": operands.LENGTH_FAMILIES,
    "seqlens_k": operands.LENGTH_FAMILIES,
}
_PER_PAIR, _PER_HEAD, _PER_BATCH = ("mask", "bias"), ("alibi_slopes", "attn_sink"), ("seqlens_q", "seqlens_k")


@dataclass(frozen=True, repr=False)
class Variants(Reproducible):
    """Options of :func:`cupyflash.attention`, by the same names; those that are None are not given.

    ``score_mod`` and ``mask_mod`` are names of SCORE_EXPRESSIONS and MASK_EXPRESSIONS. Names that are of no family,
    form or layout raise ValueError, and so does an origin whose key is behind its query, where no expression's array
    reaches.

    >>> Variants(mask=Operand("random", "keys"), softcap=2.0).names
    ('softcap', 'mask')
    """

    window_size: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    mask: Operand | None = None
    bias: Operand | None = None
    alibi_slopes: Operand | None = None
    attn_sink: Operand | None = None
    seqlens_q: Lengths | None = None
    seqlens_k: Lengths | None = None
    dropout_p: float | None = None
    score_mod: str | None = None
    mask_mod: str | None = None
    split_size: int | None = None
    origin: tuple[int, int, int, int] | None = None

    def __post_init__(self):
        for name, families in _FAMILIES.items():
            operand = getattr(self, name)
            if operand is None:
                continue
            require_known(f"{name}.values", operand.values, families)
            if name in _PER_BATCH:
                require_known(f"{name}.dtype", operand.dtype, ["int32", "int64"])
                continue
            forms = operands.PAIR_FORMS if name in _PER_PAIR else operands.HEAD_FORMS
            require_known(f"{name}.form", operand.form, forms)
            require_known(f"{name}.dtype", operand.dtype, operands.OPERAND_TYPES)
            require_known(f"{name}.view", operand.view, layouts.VIEWS)
        if self.origin is not None and self.origin[3] > self.origin[2]:
            raise ValueError(f"origin: key {self.origin[3]} is behind query {self.origin[2]}")
        for name, known in ("score_mod", SCORE_EXPRESSIONS), ("mask_mod", MASK_EXPRESSIONS):
            if getattr(self, name) is not None:
                require_known(name, getattr(self, name), known)

    @property
    def names(self):
        """Of the options that are given."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def need_align(self):
        """Whether some of them speak of where a query stands."""
        return self.window_size is not None or self.alibi_slopes is not None

    def keeping(self, names):
        """The same without any other."""
        return replace(self, **{name: None for name in self.names if name not in names})

    def plain(self):
        """The same with contiguous arrays."""
        arrays = {name: getattr(self, name) for name in (*_PER_PAIR, *_PER_HEAD)}
        return replace(self, **{name: replace(x, view="plain") for name, x in arrays.items() if x is not None})

    def options(self, problem):
        """Keyword arguments of ``attention`` for a problem, which says dtype, lengths, leading dimensions and seed."""
        given = {name: getattr(self, name) for name in self.names}
        for name, operand in given.items():
            if isinstance(operand, (Operand, Lengths)):
                given[name] = _array(name, operand, problem)
        if self.dropout_p is not None:
            given["seed"] = int(_generator(problem, "dropout_p").integers(2**64, dtype=np.uint64))
        aux = {}
        for name, known in ("score_mod", SCORE_EXPRESSIONS), ("mask_mod", MASK_EXPRESSIONS):
            if name in given:
                expression = known[given[name]]
                given[name] = expression.text
                aux |= expression.arrays(problem, _generator(problem, name))
        return {**given, "aux": aux} if aux else given


NO_VARIANTS = Variants()
VARIANTS = tuple(f.name for f in fields(Variants))
#: Options whose meaning does not depend on where in a matrix a pair is.
ANYWHERE = ("softcap", "attn_sink", "split_size", "origin")
#: Those that mean the same for a head alone as among others.
BATCH_BLIND = tuple(name for name in VARIANTS if name not in ("dropout_p", "score_mod", "mask_mod"))
#: Those that mean the same for the first queries and keys as for all, aligned top-left.
PREFIX_BLIND = ("window_size", "softcap", "mask", "bias", "alibi_slopes", "attn_sink", "dropout_p", "origin")


def contiguous(options):
    """The same options with contiguous copies of arrays."""
    return {name: np.array(x, order="C") if isinstance(x, np.ndarray) else x for name, x in options.items()}


def taken(options, rows=None, columns=None):
    """The same options for some queries and keys: mask and bias where they have more than one of them."""
    part = dict(options)
    for name in set(_PER_PAIR) & set(options):
        array = options[name]
        if rows is not None and array.shape[-2:-1] > (1,):
            array = array[..., rows, :]
        if columns is not None and array.shape[-1:] > (1,):
            array = array[..., columns]
        part[name] = array
    return part


def of_head(options, index):
    """The same options for the result's head at ``index``, with leading dimensions of 1."""
    part = dict(options)
    batch = index[:-1] if len(index) >= 2 else index
    for names, position, own in (_PER_PAIR, index, 2), (_PER_HEAD, index, 0), (_PER_BATCH, batch, 0):
        for name in set(names) & set(options):
            array = options[name]
            leading = array.shape[: max(array.ndim - own, 0)]
            at = zip(leading, position[len(position) - len(leading) :], strict=True)
            part[name] = array[tuple(slice(0, 1) if n == 1 else slice(i, i + 1) for n, i in at)]
    return part


def _generator(problem, name):
    """Random numbers of an option, whichever others there are."""
    return np.random.default_rng([problem.seed, 2, VARIANTS.index(name)])


def _array(name, operand, problem):
    rng, leading = _generator(problem, name), problem.leading
    if name in _PER_BATCH:
        batches = leading[:-1] if len(leading) >= 2 else leading
        shape = batches if operand.each_batch else ()
        longest = problem.seqlen_q if name == "seqlens_q" else problem.seqlen_k
        return operands.length_family(operand.values, rng, shape, longest).astype(operand.dtype)
    if name in _PER_PAIR:
        shape = operands.PAIR_FORMS[operand.form](leading, problem.seqlen_q, problem.seqlen_k)
    else:
        shape = operands.HEAD_FORMS[operand.form](leading)
    if name == "mask":
        return operands.viewed(operands.mask_family(operand.values, rng, shape), operand.view)
    family = {"bias": operands.bias_family, "alibi_slopes": operands.slope_family, "attn_sink": operands.sink_family}
    dtype = operands.operand_dtype(operand.dtype, problem.dtype)
    return operands.viewed(family[name](operand.values, rng, shape, dtype), operand.view)
