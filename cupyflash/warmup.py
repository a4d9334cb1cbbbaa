"""What calls need once, done ahead of them."""

from __future__ import annotations

from cupyflash import _launch
from cupyflash._options import check_flag
from cupyflash._problem import attention_problem
from cupyflash.attention import forward_call
from cupyflash.backward import backward_call

_OF_THE_FORWARD = ("return_lse", "return_max", "out")


def warmup(q, k, v, *, backward: bool = False, **options) -> None:
    """Compile the kernels of calls that look like this one, and launch none.

    The first call of :func:`cupyflash.attention` with a dtype, head dimensions and kinds of options compiles a kernel;
    each call that looks like no earlier one is planned. Here both are done ahead, on the arrays' device.

    Parameters
    ----------
    q, k, v, **options
        As a call of :func:`cupyflash.attention` has them, ``out`` included. Of arrays only shapes, strides, dtypes,
        devices and whether they start at multiples of 16 bytes matter, except lengths.
    backward : bool
        Also for :func:`cupyflash.attention_backward` and the pullback of :func:`cupyflash.attention_vjp`, with
        C-contiguous dout, out and lse and new gradients.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As that call.

    Notes
    -----
    Calls look alike where what was said of their arrays is the same, and so are all options by type and value. The
    plans of the 512 that were used last are kept; they keep no array. Calls with ``seqlens_q`` or ``seqlens_k``, of
    :func:`cupyflash.attention_varlen`, with subclasses of arrays or with numbers of types that are neither Python's nor
    NumPy's are planned each time.

    NumPy arrays warm up the simulator for the architecture of :func:`cupyflash.ptxsim.settings`; it translates a kernel
    when it first runs. For packed sequences, call :func:`cupyflash.attention_varlen` once.

    On CuPy arrays kernels are compiled and loaded on their device. A call then enqueues them on the current stream. It
    waits for nothing and copies nothing to or from the host, except lengths. What does not read lengths can be captured
    in a CUDA graph; without a warmup, compiling and loading would fall into the capture, where CUDA may refuse it. ::

        warmup(q, k, v, out=out)
        stream, pool = cupy.cuda.Stream(non_blocking=True), cupy.cuda.MemoryPool()
        with stream, cupy.cuda.using_allocator(pool.malloc):
            stream.begin_capture()
            attention(q, k, v, out=out)
            graph = stream.end_capture()
        graph.launch(stream)  # as often as wanted, with new contents in q, k and v

    A graph keeps addresses, not arrays: q, k, v and out must live as long as it does. So must, unused by anything else,
    the memory that the call allocated, also what it gave back at its end, for which there is the pool of the graph's
    own: results that were not given, the parts of ``split_size``, copies of operands whose rows are not whole 16-byte
    chunks and, in a backward call, two numbers per query.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import attention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 8)).astype(np.float16)
    >>> warmup(q, k, v, causal=True, backward=True)
    >>> attention(q, k, v, causal=True).shape  # compiles nothing
    (2, 5, 8)
    """
    check_flag("backward", backward)
    forward_call(q, k, v, **options).compile()
    if backward:
        options = {name: value for name, value in options.items() if name not in _OF_THE_FORWARD}
        problem = attention_problem(q, k, v, **options)
        with _launch.device_of(problem.kind, q) as device:
            out = device.empty(problem.out_shape, problem.dtype)
            lse = device.empty(problem.lse_shape, problem.lse_dtype)
        backward_call(out, q, k, v, out, lse, **options).compile()
