"""What a cubin, the ELF file of machine code for one architecture, says of its kernels beside their instructions."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_SYMBOL = struct.Struct("<IBBHQQ")  # name, info, other, section, value, size
_SYMBOL_TABLE = 2  # type of a section
_CUDA = 190  # machine of an ELF file
# Attributes of .nv.info, as nvdisasm names them: EIATTR_MAX_THREADS, _REQNTID, _MIN_STACK_SIZE, _REGCOUNT.
_MAX_THREADS, _REQUIRED_THREADS, _STACK_BYTES, _REGISTERS = 0x05, 0x10, 0x12, 0x2F
_RESERVED_SECTION, _RESERVED_BYTES = ".nv.shared.reserved.0", 1024  # of shared memory, for the system: from sm_90 on
_WITH_SIZE = 4  # format of an attribute whose value follows; others have theirs in the two bytes of the size
_ATTRIBUTE = struct.Struct("<BBH")  # format, attribute, size


class CubinError(ValueError):
    """A file that is no cubin, or says something that is not understood."""


@dataclass(frozen=True)
class KernelResources:
    """Of one kernel. ``threads`` is the largest block that its launch bounds allow, None without them."""

    name: str
    registers: int = 0
    stack_bytes: int = 0  # of a thread: arrays, and registers that were spilled
    static_shared_bytes: int = 0  # of a block; what a launch asks for comes on top
    threads: int | None = None


def read(cubin: bytes) -> dict[str, KernelResources]:
    """Each kernel's resources by its name."""
    if cubin[:6] != b"\x7fELF\x02\x01" or int.from_bytes(cubin[18:20], "little") != _CUDA:
        raise CubinError("no cubin: not an ELF file of 64 bits for CUDA")
    try:
        return _kernels(_sections(cubin))
    except (struct.error, IndexError) as error:
        raise CubinError(f"a damaged cubin: {error}") from error


def _sections(cubin: bytes) -> list[tuple[str, int, int, bytes]]:
    """Name, type, size and bytes of each section; of one that takes no room in the file the bytes mean nothing."""
    try:
        (offset,) = struct.unpack_from("<Q", cubin, 0x28)
        count, names = struct.unpack_from("<HH", cubin, 0x3C)
        headers = [_SECTION.unpack_from(cubin, offset + _SECTION.size * index) for index in range(count)]
    except struct.error as error:
        raise CubinError("a damaged cubin: the file ends early") from error
    texts = cubin[headers[names][4] :]
    return [(_text(texts, name), kind, size, cubin[at : at + size]) for name, kind, _, _, at, size, *_ in headers]


def _text(texts: bytes, offset: int) -> str:
    return texts[offset : texts.index(b"\0", offset)].decode()


def _kernels(sections: list[tuple[str, int, int, bytes]]) -> dict[str, KernelResources]:
    found = {
        name.removeprefix(".text."): KernelResources(name.removeprefix(".text."))
        for name, *_ in sections
        if name.startswith(".text.")
    }

    def add(name: str, **values: int) -> None:
        if name in found:  # functions that kernels call have attributes, too
            found[name] = replace(found[name], **values)

    symbols = _symbols(sections)
    reserved = _RESERVED_BYTES if any(name == _RESERVED_SECTION for name, *_ in sections) else 0
    for section, _, size, content in sections:
        if section.startswith(".nv.shared."):
            add(section.removeprefix(".nv.shared."), static_shared_bytes=max(size - reserved, 0))
        elif section == ".nv.info":
            for attribute, value in _attributes(content):
                if attribute in (_STACK_BYTES, _REGISTERS):
                    symbol, number = struct.unpack("<II", value)
                    add(symbols[symbol], **{"stack_bytes" if attribute == _STACK_BYTES else "registers": number})
        elif section.startswith(".nv.info."):
            for attribute, value in _attributes(content):
                if attribute in (_MAX_THREADS, _REQUIRED_THREADS):
                    x, y, z = struct.unpack("<III", value)
                    add(section.removeprefix(".nv.info."), threads=x * y * z)
    return found


def _symbols(sections: list[tuple[str, int, int, bytes]]) -> list[str]:
    (table,) = (content for _, kind, _, content in sections if kind == _SYMBOL_TABLE)
    (texts,) = (content for name, _, _, content in sections if name == ".strtab")
    return [_text(texts, name) for name, *_ in _SYMBOL.iter_unpack(table)]


def _attributes(info: bytes):
    """Attributes whose values follow them, and the values."""
    offset = 0
    while offset < len(info):
        kind, attribute, size = _ATTRIBUTE.unpack_from(info, offset)
        offset += _ATTRIBUTE.size
        if kind == _WITH_SIZE:
            yield attribute, info[offset : offset + size]
            offset += size
