"""A function called in a Python of its own, with which all that it changes ends."""

import pickle
import subprocess
import sys

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
function, arguments = pickle.load(sys.stdin.buffer)
try:
    answer = function(*arguments), None
except Exception as error:
    answer = None, error
sys.stdout.buffer.write(pickle.dumps(answer))
"""


def call_apart(function, *arguments):
    """What a function of a module returns or raises; it, its arguments and what comes of them can be pickled."""
    given = pickle.dumps(sys.path) + pickle.dumps((function, arguments))
    done = subprocess.run([sys.executable, "-c", _CHILD], input=given, stdout=subprocess.PIPE, check=True)
    result, error = pickle.loads(done.stdout)
    if error is not None:
        raise error
    return result
