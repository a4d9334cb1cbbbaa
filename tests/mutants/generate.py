"""Kernel sources -> mutants, by patterns: no line numbers, so that they follow the sources as these change."""

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import kernels_cu
from cupyflash import _source

ENTRY_FILES = (
    "flash_fwd.cu",
    "flash_bwd_delta.cu",
    "flash_bwd_dkdv.cu",
    "flash_bwd_dq.cu",
    "flash_fwd_fma.cu",
    "flash_bwd_dkdv_fma.cu",
    "flash_bwd_dq_fma.cu",
    "flash_combine.cu",
    "flash_bwd_dbias.cu",
    "flash_bwd_dbias_fma.cu",
    "row_sum.cu",
    "attention_naive.cu",
    "attention_naive_bwd.cu",
    "strided_copy.cu",
)


@dataclass(frozen=True)
class Mutant:
    """One replacement at one place of one file."""

    kind: str
    file: str
    start: int  # offset in the file
    old: str
    new: str

    @property
    def line(self) -> str:
        """The line as it is."""
        text = kernels_cu.source(self.file)
        return text[text.rfind("\n", 0, self.start) + 1 : text.find("\n", self.start + len(self.old))].strip()

    @property
    def mutated_line(self) -> str:
        """The line as the mutant has it; of one that is gone, what it was."""
        text = self.applied()
        line = text[text.rfind("\n", 0, self.start) + 1 : text.find("\n", self.start + len(self.new))].strip()
        return f"removed: {self.line}" if line == ";" else line

    def applied(self) -> str:
        """Text of the file with the fault in it."""
        text = kernels_cu.source(self.file)
        assert text[self.start : self.start + len(self.old)] == self.old
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def __str__(self) -> str:
        return f"{self.file}: {self.line}  ->  {self.mutated_line}"


@contextlib.contextmanager
def planted(file: str, text: str) -> Iterator[None]:
    """Within the block, kernels are compiled with this text as ``file``."""
    original = kernels_cu.source
    with mock.patch.object(kernels_cu, "source", lambda name: text if name == file else original(name)):
        _source._resolved.cache_clear()
        try:
            yield
        finally:
            _source._resolved.cache_clear()


@functools.cache
def source_files(*entries: str) -> list[str]:
    """The files that kernels consist of."""
    files, remaining = [], list(entries)
    while remaining:
        name = remaining.pop(0)
        if name not in files and name != "user_functions.cuh":  # which is made of a call's expressions
            files.append(name)
            remaining += re.findall(r'^#include "([^"]+)"', kernels_cu.source(name), re.MULTILINE)
    return files


_COMPARISONS = {
    " < ": (" <= ", " >= "),
    " <= ": (" < ", " > "),
    " > ": (" >= ", " <= "),
    " >= ": (" > ", " < "),
    " == ": (" != ",),
    " != ": (" == ",),
}
_ARITHMETIC = {
    " + ": (" - ",),
    " - ": (" + ",),
    " * ": (" / ",),
    " / ": (" * ",),
    " % ": (" / ",),
    " ^ ": (" + ",),
    " & ": (" | ",),
    " >> ": (" << ",),
    " && ": (" || ",),
    " || ": (" && ",),
    " += ": (" = ", " -= "),
    " -= ": (" = ", " += "),
    " *= ": (" = ",),
    " /= ": (" *= ",),
    " |= ": (" = ",),
    " &= ": (" = ",),
}
_NAMES = {
    "min": ("max",),
    "max": ("min",),
    "fmaxf": ("fminf",),
    "true": ("false",),
    "false": ("true",),
    "row": ("column",),
    "seqlen_q": ("seqlen_k",),
    "seqlen_k": ("seqlen_q",),
    "head_dim": ("head_dim_v",),
    "head_dim_v": ("head_dim",),
    "HEAD_DIM": ("HEAD_DIM_V",),
    "HEAD_DIM_V": ("HEAD_DIM",),
    "BLOCK_M": ("BLOCK_N",),
    "BLOCK_N": ("BLOCK_M",),
    "MMA_M": ("MMA_N",),
    "MMA_N": ("MMA_K",),
    "MMA_K": ("MMA_N",),
    "key": ("value",),
    "value": ("key",),
    "query": ("key",),
    "first_query": ("first_key",),
    "first_key": ("first_query",),
    "owner": ("reduced",),
    "reduced": ("owner",),
    "begin": ("end",),
    "interior": ("end",),
    "end": ("interior",),
    "lse_log2": ("delta",),
    "delta": ("lse_log2",),
    "scale": ("scale_log2",),
    "stage": ("0",),
    "exp": ("__expf",),
    "log": ("__logf",),
    "int64_t": ("int",),
    "ldmatrix_x4": ("ldmatrix_x4_trans",),
    "ldmatrix_x4_trans": ("ldmatrix_x4",),
    "fragment_address": ("fragment_address_b",),
    "fragment_address_b": ("fragment_address",),
}
_ASSEMBLY = {
    "cvt.rn": ("cvt.rz",),
    ".trans": ("",),
    "setp.eq": ("setp.ne",),
    ", ignore_src;": (";",),
    "ex2.approx": ("lg2.approx",),
    "neg.f32": ("mov.f32",),
    "{%4, %5, %6, %7}": ("{%5, %4, %6, %7}", "{%4, %6, %5, %7}", "{%6, %7, %4, %5}"),
    "{%8, %9}": ("{%9, %8}",),
    "{%0, %1, %2, %3};": ("{%1, %0, %2, %3};", "{%2, %3, %0, %1};"),
    "{lo, hi}": ("{hi, lo}",),
}
_DECLARATION = re.compile(
    r"(constexpr|const|using|struct|template|return|static|extern|asm|int|float|bool|auto|void|uint\w+|int64_t|float4|uint4|"
    r"T|Operand|BatchShape|__device__|for|if|else|OnlineSoftmax|TileMask|TileLoader|\}|\{|:|\"|//|#|\)|KeyTiles|Bits|Compute)\b"
)


def mutants() -> list[Mutant]:
    """All of them, in the order of the sources."""
    found = {}
    files = source_files(*ENTRY_FILES)
    for file in files:
        text = kernels_cu.source(file)
        for mutant in _of_text(file, text):
            found.setdefault((file, mutant.start, mutant.old, mutant.new), mutant)
    return sorted(found.values(), key=lambda m: (files.index(m.file), m.start, m.new))


def _of_text(file: str, text: str) -> Iterator[Mutant]:
    code = _blank(text, strings=True)  # same offsets, nothing but code
    assembly = _blank(text, strings=False)

    def every(kind, pattern, replacements, where=code):
        for match in re.finditer(pattern, where):
            for new in replacements(match):
                if new is not None and new != match[0]:
                    yield Mutant(kind, file, match.start(), text[match.start() : match.end()], new)

    for kind, table in ("comparison", _COMPARISONS), ("operator", _ARITHMETIC):
        for old, news in table.items():
            yield from every(kind, re.escape(old), lambda _, news=news: news)
    for old, news in _NAMES.items():
        kind = "cast" if old == "int64_t" else "name"
        yield from every(kind, rf"(?<![\w<\"])\b{old}\b(?!\.cuh)", lambda _, news=news: news)
    for old, news in _ASSEMBLY.items():
        yield from every("assembly", re.escape(old), lambda _, news=news: news, assembly)
    yield from every("constant", r"(?<![\w.%])\d+(?![\w.])", _other_integers)
    yield from every(
        "constant", r"(?<![\w.])\d+\.\d+(e\d+)?f", lambda m: ("0.5f", "1.5f") if m[0] in ("0.0f", "1.0f") else ("1.0f",)
    )
    yield from every("sign", r"(?<=[ (,])-(?=[a-z(\d])", lambda _: ("",))
    yield from every("condition", r"\bif (constexpr )?\((?!false)", _other_conditions)
    yield from every("order", r"(\w+)\[(\d)\], \1\[(\d)\]", lambda m: (f"{m[1]}[{m[3]}], {m[1]}[{m[2]}]",))
    yield from every(
        "order", r"\"([rf])\"\((high)\), \"\1\"\((low)\)|\"([rf])\"\((low)\), \"\4\"\((high)\)", _swapped_pair, assembly
    )
    yield from every("order", r"\? ([^?:;,]+?) : ([^?:;,)]+)", lambda m: (f"? {m[2]} : {m[1]}",))
    yield from every("statement", r"(?<=\n)[ ]+[^\n]*;(?=[ ]*\n)", lambda m: (_without_statement(m[0]),))


def _blank(text: str, strings: bool) -> str:
    """Comments, preprocessor lines and static assertions, and strings if wanted, replaced by spaces."""
    pattern = r"//[^\n]*|^#[^\n]*|static_assert[^\n]*|__launch_bounds__\([^)]*\)|__align__\(\d+\)"
    if strings:
        pattern += r'|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda m: " " * len(m[0]), text, flags=re.MULTILINE)


def _other_integers(match):
    number = int(match[0])
    others = [number + 1] if number < 2 else [number - 1, number + 1]
    if number == 1:
        others.append(0)
    return [str(n) for n in others]


def _other_conditions(match):
    return f"if {match[1] or ''}(true || ", f"if {match[1] or ''}(false) {match[0]}"


def _swapped_pair(match):
    return (f'"f"({match[2]}), "f"({match[1]})',)


def _without_statement(code: str) -> str | None:
    """The line with its expression statement removed; None if it is something else, or part of one."""
    indent, stripped = code[: len(code) - len(code.lstrip())], code.strip()
    condition = re.match(r"(if|for) \(.*\) (?=[\w*]+)(?!if|for)", stripped)
    statement = stripped[condition.end() :] if condition else stripped
    if _DECLARATION.match(statement) or statement.count("(") != statement.count(")"):
        return None
    if not re.match(r"[\w:<>.*\[\] +]+(\(|=| [-+*/|&]?= )", statement):
        return None
    return indent + (condition[0] if condition else "") + ";"
