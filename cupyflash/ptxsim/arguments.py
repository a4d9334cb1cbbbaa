"""Arguments of a launch: the bytes that a kernel gets for them."""

import numpy as np

_INTEGERS = {"u8", "u16", "u32", "u64"}  # as NVRTC declares parameters; structures are b8


def packed(program, args):
    """The parameter block, checked against the kernel's declaration."""
    parameters = program.function.parameters
    if not isinstance(args, tuple | list):
        raise TypeError(f"args: {type(args).__name__}, must be a tuple")
    if len(args) != len(parameters):
        raise ValueError(f"args: {len(args)} arguments, {program.name} takes {len(parameters)}")
    data = bytearray(program.parameter_bytes)
    for number, (value, parameter) in enumerate(zip(args, parameters, strict=True)):
        bits = _bytes_of(number, value, parameter)
        if len(bits) > parameter.size and _holds(parameter, value):
            bits = bits[: parameter.size]
        if len(bits) != parameter.size:
            wanted = f"{program.name} takes {parameter.size} there"
            raise TypeError(f"args[{number}]: {type(value).__name__} has {len(bits)} bytes, {wanted}")
        data[parameter.offset : parameter.offset + parameter.size] = bits
    return bytes(data)


def _holds(parameter, value):
    """Whether an integer keeps its value in an integer parameter, of which a GPU reads the low bytes only."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or parameter.type not in _INTEGERS:
        return False
    return -(2 ** (8 * parameter.size - 1)) <= value < 2 ** (8 * parameter.size)


def check_dtype(name, value):
    """Raise for what is not bytes that a GPU could read."""
    if value.dtype.hasobject:
        raise TypeError(f"{name}: dtype {value.dtype} holds Python objects")
    if not value.dtype.isnative:
        raise TypeError(f"{name}: dtype {value.dtype} is not in this machine's byte order")


def _bytes_of(number, value, parameter):
    if isinstance(value, np.ndarray | np.generic):
        check_dtype(f"args[{number}]", value)
    if isinstance(value, np.ndarray):
        if value.size == 1 and not _may_be_pointer(parameter):
            return value.tobytes()
        return value.__array_interface__["data"][0].to_bytes(8, "little")
    if value is None:
        return bytes(8)
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise OverflowError(f"args[{number}]: {value} does not fit in 64 bits")
        return (value & 2**64 - 1).to_bytes(8, "little")
    if isinstance(value, float | complex):
        return np.array(value).tobytes()
    raise TypeError(
        f"args[{number}]: {type(value).__name__}, must be a numpy array or scalar, int, float, complex, bool or None"
    )


def _may_be_pointer(parameter):
    """Structures are declared as so many bytes, `.b8 name[size]`, everything else by its type."""
    return parameter.size == 8 and parameter.type != "b8"
