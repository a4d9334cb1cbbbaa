"""Random kernels of branches, loops, jumps and exchanges, run by the simulator and by a Python interpreter."""

import operator

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupyflash import ptxsim

from .launching import OPTIONS, poisoned

THREADS = 72
VARIABLES = ("a", "b", "c")
WORD = 1 << 32


def signed(x):
    return x - WORD if x >> 31 else x


# name: (C text of the operation on x and y, the same on Python ints in 0 .. 2**32 - 1)
OPERATIONS = {
    "+": ("({x} + {y})", operator.add),
    "-": ("({x} - {y})", operator.sub),
    "*": ("({x} * {y})", operator.mul),
    "&": ("({x} & {y})", operator.and_),
    "|": ("({x} | {y})", operator.or_),
    "^": ("({x} ^ {y})", operator.xor),
    "<<": ("({x} << ({y} & 31u))", lambda x, y: x << (y & 31)),
    ">>": ("({x} >> ({y} & 31u))", lambda x, y: x >> (y & 31)),
    "arithmetic >>": ("unsigned(int({x}) >> ({y} & 31u))", lambda x, y: signed(x) >> (y & 31)),
    "/": ("({x} / ({y} | 1u))", lambda x, y: x // (y | 1)),
    "%": ("({x} % ({y} | 1u))", lambda x, y: x % (y | 1)),
    "<": ("unsigned({x} < {y})", operator.lt),
    "signed <": ("unsigned(int({x}) < int({y}))", lambda x, y: signed(x) < signed(y)),
    "==": ("unsigned(({x} & 3u) == ({y} & 3u))", lambda x, y: x & 3 == y & 3),
    "select": ("({x} & 1u ? {x} : {y})", lambda x, y: x if x & 1 else y),
    "high": ("__umulhi({x}, {y})", lambda x, y: x * y >> 32),
    "count": ("unsigned(__popc({x}) + __clz({y}))", lambda x, y: x.bit_count() + 32 - y.bit_length()),
}

leaves = st.sampled_from((*VARIABLES, "t")) | st.integers(0, 40) | st.integers(0, WORD - 1)
expressions = st.recursive(leaves, lambda e: st.tuples(st.sampled_from(sorted(OPERATIONS)), e, e), max_leaves=5)


def statements(depth, in_loop, may_return):
    """One statement; blocks nest to `depth`, jumps appear where they are legal."""
    kinds = [st.tuples(st.just("set"), st.sampled_from(VARIABLES), expressions)] * 3
    if depth:
        inner = blocks(depth - 1, in_loop, may_return)
        kinds.append(st.tuples(st.just("if"), expressions, inner, inner))
        kinds.append(st.tuples(st.just("for"), expressions, blocks(depth - 1, True, may_return)))
    if in_loop:
        kinds += [st.just(("break",)), st.just(("continue",))]
    if may_return:
        kinds.append(st.just(("return",)))
    return st.one_of(kinds)


def blocks(depth, in_loop, may_return):
    return st.lists(statements(depth, in_loop, may_return), min_size=0, max_size=3).map(tuple)


exchanges = st.tuples(st.just("exchange"), st.sampled_from(VARIABLES), st.integers(1, THREADS - 1))
shuffles = st.tuples(st.just("shuffle"), st.sampled_from(VARIABLES), st.integers(1, 7))
programs = st.lists(statements(2, False, True) | exchanges, min_size=1, max_size=5) | st.lists(
    statements(2, False, False) | exchanges | shuffles, min_size=1, max_size=5
)


def c_expression(e):
    if not isinstance(e, tuple):
        return f"{e}u" if isinstance(e, int) else e
    return OPERATIONS[e[0]][0].format(x=c_expression(e[1]), y=c_expression(e[2]))


def c_block(block, depth=0):
    return "{ " + " ".join(c_statement(s, depth) for s in block) + " }"


def c_statement(s, depth):
    if s[0] == "set":
        return f"{s[1]} = {c_expression(s[2])};"
    if s[0] == "if":
        condition = f"({c_expression(s[1])} & 2u)"
        return f"if {condition} {c_block(s[2], depth)} else {c_block(s[3], depth)}"
    if s[0] == "for":
        k = f"k{depth}"
        start = f"unsigned {k} = {c_expression(s[1])} & 7u"
        return f"for ({start}; {k} > 0; --{k}) {{ c += {k}; {c_block(s[2], depth + 1)} }}"
    if s[0] == "exchange":
        return f"box[t] = {s[1]}; __syncthreads(); {s[1]} ^= box[(t + {s[2]}u) % {THREADS}u]; __syncthreads();"
    if s[0] == "shuffle":
        return f"{s[1]} += __shfl_xor_sync(t < 64 ? 0xffffffffu : 0xffu, {s[1]}, {s[2]});"
    return "{ out[t] = a ^ b * 5 ^ c * 9; return; }" if s[0] == "return" else f"{s[0]};"


def c_source(program):
    body = "\n  ".join(c_statement(s, 0) for s in program)
    return f"""extern "C" __global__ void random_program(unsigned* out) {{
  __shared__ unsigned box[{THREADS}];
  unsigned t = threadIdx.x, a = t, b = t * 2654435761u, c = 7;
  box[t] = t;
  __syncthreads();
  {body}
  out[t] = a ^ b * 5 ^ c * 9;
}}"""


def value(e, env):
    if not isinstance(e, tuple):
        return e if isinstance(e, int) else env[e]
    return int(OPERATIONS[e[0]][1](value(e[1], env), value(e[2], env))) % WORD


def run_block(block, env):
    """Execute statements for one thread; the jump that ended them, or None."""
    for s in block:
        jump = run_statement(s, env)
        if jump:
            return jump
    return None


def run_statement(s, env):
    if s[0] == "set":
        env[s[1]] = value(s[2], env)
    elif s[0] == "if":
        return run_block(s[2] if value(s[1], env) & 2 else s[3], env)
    elif s[0] == "for":
        for k in range(value(s[1], env) & 7, 0, -1):
            env["c"] = (env["c"] + k) % WORD
            jump = run_block(s[2], env)
            if jump == "break":
                break
            if jump == "return":
                return jump
    else:
        return s[0]
    return None


def interpret(program):
    """What every thread must write: statement by statement, all threads before the next exchange."""
    threads = [{"t": t, "a": t, "b": t * 2654435761 % WORD, "c": 7} for t in range(THREADS)]
    box, running = list(range(THREADS)), list(threads)
    for s in program:
        if s[0] == "exchange":
            for env in running:
                box[env["t"]] = env[s[1]]
            for env in running:
                env[s[1]] ^= box[(env["t"] + s[2]) % THREADS]
        elif s[0] == "shuffle":
            before = [env[s[1]] for env in threads]
            for env in threads:
                env[s[1]] = (env[s[1]] + before[env["t"] ^ s[2]]) % WORD
        else:
            running = [env for env in running if run_statement(s, env) != "return"]
    return [(env["a"] ^ env["b"] * 5 % WORD ^ env["c"] * 9 % WORD) for env in threads]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs, st.integers(0, 1000))
def test_random_programs_do_what_they_say(program, seed):
    kernel = ptxsim.RawModule(code=c_source(program), options=OPTIONS).get_function("random_program")
    expected = interpret(program)
    for schedule in ("lockstep", "random"):
        out = poisoned(THREADS, np.uint32)
        with ptxsim.settings(schedule=schedule, seed=seed):
            kernel((1,), (THREADS,), (out,))
        np.testing.assert_array_equal(out, expected, err_msg=c_source(program))
