"""Rendered kernel sources."""

import re

import pytest

import kernels_cu
from cupyflash import _source


def physical_lines(source):
    """(file, line number) -> text, as #line directives map them."""
    lines, name, number = {}, None, 0
    for text in source.splitlines():
        if match := re.fullmatch(r'#line (\d+) "kernels_cu/([^"]+)"', text):
            number, name = int(match[1]), match[2]
        elif name is None:
            assert text.startswith("#define ")
        else:
            lines[name, number] = text
            number += 1
    return lines


@pytest.mark.parametrize("kernel", ["attention_naive", "flash_fwd", "strided_copy"])
def test_every_line_keeps_its_file_and_number(kernel):
    lines = physical_lines(_source.render(kernel, {}))
    assert (f"{kernel}.cu", 1) in lines
    for (name, number), text in lines.items():
        original = kernels_cu.source(name).splitlines()[number - 1]
        assert text == original or (text == "" and original.startswith("#include"))


def test_the_source_is_self_contained_and_each_header_appears_once():
    source = _source.render("flash_fwd", {})
    assert "#include" not in source
    starts = re.findall(r'#line 1 "(.+)"', source)
    assert len(starts) == len(set(starts)) and "kernels_cu/common.cuh" in starts


def test_defines_come_first_in_their_order():
    source = _source.render("strided_copy", {"ELEMENT_BYTES": 2, "OTHER": "float"})
    assert source.startswith("#define ELEMENT_BYTES 2\n#define OTHER float\n#line 1 ")


def test_rendering_is_reproducible():
    defines = {"ELEMENT": "Half"}
    assert _source.render("attention_naive", defines) == _source.render("attention_naive", defines)


@pytest.mark.parametrize("line", ["#include <cuda_fp16.h>", '#include "a.cuh" // why', '  #include "a.cuh"'])
def test_other_includes_are_refused(line, monkeypatch):
    monkeypatch.setattr(kernels_cu, "source", {"k.cu": f"int x;\n{line}\n"}.__getitem__)
    with pytest.raises(ValueError, match=r"kernels_cu/k\.cu:2: kernels include only"):
        _source._lines("k.cu", set())


def test_a_header_named_twice_is_written_out_once(monkeypatch):
    files = {"k.cu": '#include "a.cuh"\n#include "b.cuh"\nend', "a.cuh": "int a;", "b.cuh": '#include "a.cuh"\nint b;'}
    monkeypatch.setattr(kernels_cu, "source", files.__getitem__)
    lines = _source._lines("k.cu", set())
    assert lines.count("int a;") == 1 and lines.count("int b;") == 1
    assert lines[-2:] == ['#line 3 "kernels_cu/k.cu"', "end"]
