"""A compiled module in memory: its variables, and its kernels made ready to run."""

import re

import numpy as np

from .memory import zeros_at
from .program import Program
from .syntax import place
from .templates import kernel_templates


class LoadedModule:
    """A parsed RawModule for one architecture. `lowered`: what name expressions are called in it."""

    def __init__(self, raw, parsed, lowered, arch):
        self.raw, self.parsed, self.lowered, self.arch = raw, parsed, lowered, arch
        self.titles = {name: expression for expression, name in lowered.items()}
        self.programs = {}
        self.memory, self.addresses = {}, {}  # of variables in global memory, by name; `reachable`: by a kernel
        self.constants = {}  # variables in constant memory -> their offsets
        variables = parsed.variables.values()
        self.constant_memory = zeros_at(64, place([v for v in variables if v.space == "const"], self.constants))
        for variable in variables:
            if variable.space == "global":
                self.memory[variable.name] = array = zeros_at(max(variable.align, 16), max(variable.size, 1))
                self.addresses[variable.name] = array.ctypes.data
            if variable.data:
                self.bytes_of(variable)[:] = np.frombuffer(variable.data, np.uint8)
        for variable in variables:
            for position, address, generic in variable.pointers:
                self.bytes_of(variable)[position : position + 8].view(np.uint64)[0] = self.value_of(address, generic)
        # Of headers such as CUB's there are thousands of variables that nothing refers to.
        self.reachable = {name: array for name, array in self.memory.items() if name in parsed.used}

    def value_of(self, address, generic):
        """An address within a variable, as the initial value of another."""
        if address.base.space == "const":
            start = self.constant_memory.ctypes.data if generic else 0
            return start + self.constants[address.base] + address.offset
        return self.addresses[address.base.name] + address.offset

    def bytes_of(self, variable):
        """The memory of a variable in global or constant memory."""
        if variable.space == "const":
            start = self.constants[variable]
            return self.constant_memory[start : start + variable.size]
        return self.memory[variable.name][: variable.size]

    def variable(self, name):
        """The memory of a variable by its name, or its name expression."""
        variable = self.parsed.variables.get(self.lowered.get(name, name))
        if variable is None or variable.space == "shared":
            known = ", ".join(v.name for v in self.parsed.variables.values() if v.space != "shared")
            raise ValueError(f"no global {name!r} in this module; it has {known or 'none'}")
        if variable.space == "global":
            self.reachable[variable.name] = self.memory[variable.name]
        return self.bytes_of(variable)

    @property
    def kernels(self):
        """Names of the kernels, template instances by their name expressions."""
        return [self.titles.get(f.name, f.name) for f in self.parsed.functions.values() if f.entry]

    def program(self, name, profiled=False, sanitized=False):
        """The executable form of a kernel, with or without counters and checks."""
        key = (name, profiled, sanitized)
        if key not in self.programs:
            function = self.parsed.functions.get(self.lowered.get(name, name))
            if function is None or not function.entry:
                known = ", ".join(self.kernels) or "none"
                raise ValueError(f"no kernel {name!r} in this module; it has {known}{self.hint(name)}")
            title = self.titles.get(function.name, function.name)
            self.programs[key] = Program(self, title, function, profiled, sanitized)
        return self.programs[key]

    def hint(self, name):
        """How a function that the source has becomes a kernel of the module."""
        if self.raw.code is None or any(known.startswith(f"{name}<") for known in self.titles.values()):
            return ""
        if not re.search(rf"\b{re.escape(name)}\b", self.raw.code):
            return ""
        if name in kernel_templates(self.raw.code):
            return f"; a template needs its arguments: name_expressions=('{name}<float>',)"
        return f'; a C++ function needs extern "C" or name_expressions=({name!r},)'
