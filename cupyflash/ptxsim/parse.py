"""PTX text to kernels: instructions, registers resolved through lexical scopes, variables, source lines."""

import bisect
import re

from .syntax import (
    FUNCTION_WINDOW,
    SINK,
    SIZES,
    Address,
    Function,
    Instruction,
    Label,
    Literal,
    Memory,
    Module,
    Not,
    Pair,
    Register,
    Special,
    Variable,
)

# What is no code; strings are matched so that nothing in them is taken for a comment.
_NO_CODE = re.compile(r'"[^"]*"|//[^\n]*|/\*.*?\*/|\.section\b[^{]*\{[^}]*\}', re.DOTALL)
_TOKEN = re.compile(
    r"""\n|"[^"]*"
      |0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|\d+\.\d*(?:[eE][+-]?\d+)?|\d+U?
      |\.\w+(?:::\w+)*|[A-Za-z_$%][\w$%.]*(?:::[\w.]+)*
      |[^\s\w]""",
    re.VERBOSE,
)
_NAME = re.compile(r"[\w$%]|\.\w")


class ParseError(ValueError):
    """The text is not PTX that this parser knows."""


def parse(text: str) -> Module:
    """Parse a whole PTX file. Raises ParseError with the line of what cannot be read."""
    parser = _Parser(text)
    try:
        return parser.module_()
    except ParseError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        # A word of another kind than belongs there, such as a name for a number.
        raise parser.error(f"not understood, up to {parser.found()}") from error


def _tokens(text):
    """Names, numbers, marks and line ends."""
    return _TOKEN.findall(_NO_CODE.sub(lambda m: m[0] if m[0][0] == '"' else "\n" * m[0].count("\n"), text))


class _Scope(dict):
    """Names of one pair of braces. Registers of a range such as `%r<9999>` are made when first named."""

    def __init__(self):
        super().__init__()
        self.ranges = {}  # prefix -> (count, type)

    def in_range(self, name):
        """The type of a register that a range declares, or None."""
        prefix = name.rstrip("0123456789")
        count, type_ = self.ranges.get(prefix, (0, None))
        return type_ if prefix != name and int(name[len(prefix) :]) < count else None


class _Parser:
    def __init__(self, text):
        self.texts = _tokens(text)
        self.line_ends = [at for at, token in enumerate(self.texts) if token == "\n"]
        self.texts += [""] * 4
        self.at = 0
        self.module = Module()
        self.files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', text, re.MULTILINE))
        self.scopes = [_Scope()]
        self.source = None
        self.function = None

    # -- tokens ------------------------------------------------------------------------------------
    def line(self, at):
        return bisect.bisect_left(self.line_ends, at) + 1

    def peek(self):
        while self.texts[self.at] == "\n":
            self.at += 1
        return self.texts[self.at]

    def take(self):
        text = self.peek()
        if not text:
            raise self.error("end of file")
        self.at += 1
        return text

    def accept(self, text):
        if self.peek() == text:
            self.at += 1
            return True
        return False

    def expect(self, text):
        if not self.accept(text):
            raise self.error(f"expected {text!r}, found {self.found()}")

    def found(self):
        """The next word, in an error."""
        return repr(self.peek()) if self.peek() else "end of file"

    def error(self, what):
        return ParseError(f"PTX line {self.line(self.at)}: {what}")

    def rest_of_line(self):
        start = self.at
        while self.texts[self.at] not in ("\n", ""):
            self.at += 1
        return self.texts[start : self.at]

    def skip_past(self, text):
        while self.take() != text:
            pass

    def listed(self, closing, item):
        """What `item` reads, with commas between, up to a closing mark."""
        items = []
        while not self.accept(closing):
            if items and not self.accept(","):
                raise self.error(f"expected ',' or {closing!r}, found {self.found()}")
            items.append(item())
        return items

    # -- module level ------------------------------------------------------------------------------
    def module_(self):
        while self.peek():
            text = self.take()
            if text == ".target":
                self.module.target = self.take()
                self.rest_of_line()
            elif text in (".version", ".address_size", ".file", ".loc"):
                self.rest_of_line()
            elif text in (".visible", ".weak", ".extern", ".common", ".alias"):
                continue
            elif text in (".entry", ".func"):
                self.function_(text == ".entry")
            elif text in (".global", ".const", ".shared"):
                extern = self.texts[self.at - 2] == ".extern"
                for variable in self.variables_(text[1:], extern):
                    self.module.variables[variable.name] = self.scopes[0][variable.name] = variable
            elif text == ".pragma":
                self.skip_past(";")
            elif text == ".section":  # without an end: of whole ones nothing is left here
                self.skip_past("}")
            else:
                raise self.error(f"unknown directive {text!r}")
        return self.module

    def function_(self, entry):
        self.scopes = [self.scopes[0], _Scope()]
        results = self.parameters_() if not entry and self.peek() == "(" else []
        function = Function(self.take(), [], entry)
        self.function = function
        if not entry:
            self.module.addresses.setdefault(function.name, FUNCTION_WINDOW + 16 * (len(self.module.addresses) + 1))
        function.parameters = results + (self.parameters_() if self.peek() == "(" else [])
        while self.peek() not in ("{", ";"):
            name = self.take()
            values = []
            while self.texts[self.at][:1].isdigit() or self.texts[self.at] == ",":
                values.append(self.take())
            function.attributes[name.lstrip(".")] = tuple(int(v, 0) for v in values if v != ",")
        if self.accept(";"):
            return
        self.expect("{")
        self.module.functions[function.name] = function
        self.source, self.calls, self.calls_at = None, (), {}
        self.branches = []
        self.body()
        for instruction, scopes in self.branches:
            instruction.operands = tuple(self.resolved(operand, scopes) for operand in instruction.operands)
        for name, (targets, scopes) in function.tables.items():
            function.tables[name] = [self.resolved(Label(target), scopes).name for target in targets]

    def resolved(self, operand, scopes):
        """A label may be used before it is defined: look it up when all are known."""
        if isinstance(operand, Label):
            return next((s[operand.name] for s in reversed(scopes) if operand.name in s), operand)
        return operand

    def parameters_(self):
        self.expect("(")
        parameters = self.listed(")", self.parameter)
        offset = 0
        for p in parameters:
            p.offset = offset = -(-offset // p.align) * p.align
            offset += p.size
        return parameters

    def parameter(self):
        self.expect(".param")
        variable = self.declaration("param")
        self.scopes[-1][variable.name] = variable
        return variable

    def declaration(self, space, extern=False):
        align, type_, pointer = None, None, False
        while self.peek().startswith("."):
            word = self.take()
            if word == ".align":
                value = int(self.take())
                align = align if pointer else value
            elif word[1:] in SIZES:
                type_ = word[1:]
            elif word == ".ptr":
                pointer = True
            elif word == ".attribute":
                self.skip_past(")")
        name = self.take()
        count = None
        while self.accept("["):
            size = "0" if self.peek() == "]" else self.take()
            count = int(size, 0) * (1 if count is None else count)
            self.expect("]")
        item = SIZES[type_]
        variable = Variable(name, space, item * (1 if count is None else count), align or item, type_, extern=extern)
        if self.accept("="):
            data = bytearray()
            self.initial_value(variable, data)
            variable.data = bytes(data.ljust(variable.size, b"\0"))
        return variable

    def initial_value(self, variable, data):
        """Append one value, or a list of them, to the data of a variable."""
        if self.accept("{"):
            self.listed("}", lambda: self.initial_value(variable, data))
            return
        generic = self.accept("generic")
        operand = self.with_addresses(self.operand())
        if generic and isinstance(operand[0], Address):
            operand = Address(operand[0].base, operand[0].offset + self.offset())
        if isinstance(operand, Address) and isinstance(operand.base, Variable):
            variable.pointers += ((len(data), operand, generic),)
            operand = Literal(0)
        if not isinstance(operand, Literal):
            raise self.error(f"{operand} as initial value is not supported")
        size = SIZES[variable.type]
        data += (operand.value & (1 << 8 * size) - 1).to_bytes(size, "little")

    def with_addresses(self, operand):
        """An operand; if it names a function, that function's address."""
        if not isinstance(operand, Label) or operand.name not in self.module.addresses:
            return operand
        self.module.taken.add(operand.name)
        return Literal(self.module.addresses[operand.name])

    def variables_(self, space, extern=False):
        variables = [self.declaration(space, extern)]
        while self.accept(","):
            raise self.error("one variable per declaration")
        self.expect(";")
        return variables

    def location(self, words):
        """.loc file line column [, function_name label, inlined_at file line column]

        An inlined_at names the place of an earlier .loc, which may itself have one: the latest of that place counts.
        """
        place = self.place(*words[:2])
        if place[1]:
            calls = ()
            if "inlined_at" in words:
                outer = tuple(words[words.index("inlined_at") + 1 :][:3])
                calls = ("{}:{}".format(*self.place(*outer[:2])), *self.calls_at.get(outer, ()))
            self.source, self.calls = place, calls
            self.calls_at[tuple(words[:3])] = calls

    def place(self, file, line):
        return self.files.get(file, f"file {file}"), int(line)

    # -- function bodies ---------------------------------------------------------------------------
    def body(self):
        depth = len(self.scopes)
        self.scopes.append(_Scope())
        code = self.function.code
        while len(self.scopes) > depth:
            text = self.take()
            if text == "{":
                self.scopes.append(_Scope())
            elif text == "}":
                self.scopes.pop()
            elif text == ".reg":
                self.registers_()
            elif text == ".loc":
                self.location(self.rest_of_line())
            elif text in (".shared", ".local", ".param", ".const", ".global"):
                for variable in self.variables_(text[1:]):
                    self.scopes[-1][variable.name] = variable
                    self.function.variables.append(variable)
            elif text == ".pragma":
                self.skip_past(";")
            elif text == "@":
                guard = self.operand()
                code.append(self.instruction(self.take(), guard))
            elif text == ";":
                continue
            elif self.peek() == ":":
                self.take()
                self.label(text)
            elif _NAME.match(text):
                code.append(self.instruction(text, None))
            else:
                raise self.error(f"unexpected {text!r}")

    def label(self, name):
        if self.peek() == ".callprototype":
            self.skip_past(";")
            return
        if self.peek() in (".branchtargets", ".calltargets"):
            self.take()
            targets = self.listed(";", self.take)
            unique = f"{name}@{len(self.function.code)}" if name in self.function.tables else name
            self.scopes[-1][name] = Label(unique)
            self.function.tables[unique] = targets, tuple(self.scopes)
            return
        unique = f"{name}@{len(self.function.code)}" if name in self.function.labels else name
        self.scopes[-1][name] = Label(unique)
        self.function.labels[unique] = len(self.function.code)

    def registers_(self):
        type_ = self.take()[1:]
        while True:
            name = self.take()
            if self.accept("<"):
                self.scopes[-1].ranges[name] = int(self.take()), type_
                self.expect(">")
            else:
                self.new_register(self.scopes[-1], name, type_)
            if not self.accept(","):
                break
        self.expect(";")

    def new_register(self, scope, name, type_):
        register = Register(len(self.function.registers), name, type_)
        self.function.registers.append(register)
        scope[name] = register
        return register

    def instruction(self, text, guard):
        line = self.line(self.at - 1)
        opcode, *modifiers = text.split(".")
        operands = self.listed(";", self.operand)
        if opcode == "mov":
            operands = [self.with_addresses(operand) for operand in operands]
        elif opcode in ("ld", "st"):  # Triton writes a single register as a vector of one
            operands = [o[0] if isinstance(o, tuple) and len(o) == 1 else o for o in operands]
        if "cc" in modifiers and operands:
            operands[0] = Pair(operands[0], self.carry_flag())
        if opcode in ("addc", "subc", "madc"):
            operands.append(self.carry_flag())
        instruction = Instruction(opcode, tuple(modifiers), tuple(operands), guard, line, self.source, self.calls)
        if opcode in ("bra", "brx"):
            self.branches.append((instruction, tuple(self.scopes)))
        return instruction

    def carry_flag(self):
        """CC.CF of the ISA, made an ordinary predicate: results and operands name it like any other register."""
        scope = self.scopes[1]
        return scope.get("CC.CF") or self.new_register(scope, "CC.CF", "pred")

    def operand(self):
        value = self.simple_operand()
        if self.texts[self.at] == "|":
            self.take()
            return Pair(value, self.simple_operand())
        return value

    def simple_operand(self):
        text = self.take()
        if text == "[":
            address = self.simple_operand()
            if self.peek() == ",":  # of a texture or a tensor map
                parts = [address]
                while self.accept(","):
                    parts.append(self.simple_operand())
                self.expect("]")
                return Memory(tuple(parts))
            if not isinstance(address, Address):
                address = Address(None, address.value) if isinstance(address, Literal) else Address(address)
            self.expect("]")
            return Memory(address)
        if text in ("{", "("):
            return tuple(self.listed("}" if text == "{" else ")", self.simple_operand))
        if text == "!":
            return Not(self.simple_operand())
        if text == "-":
            literal = self.simple_operand()
            return Literal(-literal.value, literal.kind)
        if text == "+":
            return self.simple_operand()
        if text[:1].isdigit():
            return _literal(text)
        base = self.lookup(text)
        offset = self.offset()
        if isinstance(base, Variable):
            self.module.used.add(base.name)
            return Address(base, offset)
        return Address(base, offset) if offset else base

    def offset(self):
        """`+ 4 - 8` behind an address."""
        offset = 0
        while self.texts[self.at] in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            if self.accept("-"):
                sign = -sign
            offset += sign * _literal(self.take()).value
        return offset

    def lookup(self, name):
        if name == "_":
            return SINK
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
            if type_ := scope.in_range(name):
                return self.new_register(scope, name, type_)
        if name == "WARP_SZ":
            return Literal(32)
        if name.startswith("%"):
            return Special(name[1:])
        if not _NAME.match(name):
            raise self.error(f"unexpected {name!r}")
        return Label(name)


def _literal(text):
    prefix = text[:2]
    if prefix in ("0f", "0F"):
        return Literal(int(text[2:], 16), "f32")
    if prefix in ("0d", "0D"):
        return Literal(int(text[2:], 16), "f64")
    text = text.rstrip("U")
    if "." in text or ("e" in text and prefix not in ("0x", "0X")):
        return Literal(float(text), "float")
    if len(text) > 1 and text[0] == "0" and text.isdigit():
        return Literal(int(text, 8))
    return Literal(int(text, 0))
