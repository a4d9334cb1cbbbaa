"""The attention of PyTorch, JAX and ONNX Runtime on the CPU, tested as anybody's own by :mod:`cupyflash.testing`.

``python -m experiments.examples.peers`` runs what is installed of ``torch``, ``jax`` and ``onnx onnxruntime``, says
what is not, and prints what the checks found; ``--write`` puts it in experiments/testing.md. Minutes for each library.

A failure here is a difference from what cupyflash promises, which the others need not: a bound for each element, 0
where a query sees no key, no influence of NaN behind a mask. Accuracy is judged apart, where none of that matters.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupyflash import bounds, reference, testing

PAGE = Path(__file__).parent.parent / "testing.md"
_BEGIN, _END = "<!-- written by python -m experiments.examples.peers --write: begin -->", "<!-- end -->"
FORWARD_STRIDES = [view for view in testing.VIEWS if "reversed" not in view]  # torch has no negative ones
#: From the tightest: which roundings the kernel has to have at most.
BOUNDS = {"tiled": bounds.attention, "standard": bounds.attention_naive}
BACKWARD_BOUNDS = {"tiled": bounds.attention_backward, "standard": bounds.attention_naive_backward}

SIZES = {
    "seqlens": testing.seqlens(70),
    "head_dims": st.sampled_from([(16, 16), (64, 64), (24, 24)]),
    "scales": [None, 1.0, 0.05, 3.0],  # others apart: few say what they take, and XLA flushes 1e-37
}
#: About pairs, where there are masks; what does not change with them is judged without.
MASK_CHECKS = [
    testing.check_within_bound,
    testing.check_key_permutation,
    testing.check_query_permutation,
    testing.check_batch_independence,
    testing.check_nonfinite_values_change_only_rows_that_see_them,
]


#: Those that change no shape, for what is compiled for each.
OF_ONE_SHAPE = [
    testing.check_within_bound,
    testing.check_two_runs,
    testing.check_query_independence,
    testing.check_query_permutation,
    testing.check_key_permutation,
    testing.check_signs,
    testing.check_masked_keys_have_no_influence,
    testing.check_constant_values,
    testing.check_value_linearity,
    testing.check_nonfinite_values_change_only_rows_that_see_them,
]
VJP_OF_ONE_SHAPE = [
    testing.check_gradients_within_bound,
    testing.check_vjp_two_runs,
    testing.check_vjp_query_permutation,
    testing.check_vjp_key_permutation,
    testing.check_vjp_identities,
    testing.check_vjp_linearity,
    testing.check_vjp_constant_values,
]


@dataclass(frozen=True)
class Peer:
    """A library's function and what it is for: arguments of :func:`cupyflash.testing.adapt`."""

    name: str
    fn: Callable
    dtypes: tuple[str, ...]
    domain: dict[str, Any] = field(default_factory=dict)
    is_vjp: bool = False
    checks: Sequence[Callable] = tuple(testing.FORWARD_CHECKS)

    def adapted(self, dtypes, **more):
        adapt = testing.adapt_vjp if self.is_vjp else testing.adapt
        return adapt(self.fn, dtypes, **{**SIZES, **self.domain, **more})

    @property
    def bounds(self):
        """From the tightest; that of the standard method knows no masks."""
        if "variants" in self.domain:
            return {"tiled": bounds.attention}
        return BACKWARD_BOUNDS if self.is_vjp else BOUNDS


# PyTorch


def torch_peers() -> list[Peer]:
    """scaled_dot_product_attention by each implementation that has a CPU kernel, forward and backward."""
    from torch.nn.attention import SDPBackend

    domain = {"layout": "BHLD", "align": "top-left", "views": FORWARD_STRIDES}
    dtypes = ("float16", "bfloat16", "float32", "float64")
    peers = []
    for backend in SDPBackend.MATH, SDPBackend.FLASH_ATTENTION:
        name = f"torch, {backend.name}"
        peers.append(Peer(name, functools.partial(torch_attention, backend), dtypes, domain))
        vjp, with_mask = (functools.partial(fn, backend) for fn in (torch_vjp, torch_masked))
        peers.append(Peer(f"{name}, backward", vjp, dtypes, domain, is_vjp=True, checks=testing.VJP_CHECKS))
        peers.append(
            Peer(f"{name}, attn_mask", with_mask, dtypes, {**domain, "variants": ["mask"]}, checks=MASK_CHECKS)
        )
    return peers


def torch_attention(backend, q, k, v, *, softmax_scale, causal):
    from experiments.examples.torch_bridge import as_array, as_tensor

    return as_array(_torch(backend, *map(as_tensor, (q, k, v)), scale=softmax_scale, is_causal=causal))


def torch_masked(backend, q, k, v, *, softmax_scale, mask=None):
    import torch

    from experiments.examples.torch_bridge import as_array, as_tensor

    if mask is not None:
        mask = torch.from_numpy(np.array(np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2]))))
    return as_array(_torch(backend, *map(as_tensor, (q, k, v)), scale=softmax_scale, attn_mask=mask))


def torch_vjp(backend, q, k, v, *, softmax_scale, causal):
    import torch

    from experiments.examples.torch_bridge import as_array, as_tensor

    inputs = [as_tensor(x).requires_grad_() for x in (q, k, v)]
    out = _torch(backend, *inputs, scale=softmax_scale, is_causal=causal)

    def pullback(dout):
        return [as_array(x) for x in torch.autograd.grad(out, inputs, as_tensor(dout), retain_graph=True)]

    return as_array(out), pullback


def _torch(backend, q, k, v, **options):
    import torch

    try:
        with torch.nn.attention.sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a kernel is not available
            grouped = q.shape[1] != k.shape[1]
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **options)
    except RuntimeError as error:
        if "No available kernel" in str(error):
            raise testing.NotApplicable(f"{backend.name} has no kernel for it") from None
        raise


# JAX


def jax_peers() -> list[Peer]:
    """jax.nn.dot_product_attention, which is XLA on a CPU; few shapes, each of which it compiles."""
    import jax

    jax.config.update("jax_enable_x64", True)
    domain = {
        "layout": "BLHD",
        "align": "top-left",
        "views": ["plain"],
        "seqlens": st.sampled_from([5, 70]),
        "head_dims": st.just((16, 16)),
        "leading_dims": st.just(((2, 4), (2, 2), (2, 2))),
        "empty": False,
    }
    dtypes = ("float16", "bfloat16", "float32", "float64")
    return [
        Peer("jax", jax_attention, dtypes, domain, checks=OF_ONE_SHAPE),
        Peer("jax, backward", jax_vjp, dtypes, domain, is_vjp=True, checks=VJP_OF_ONE_SHAPE),
        Peer("jax, mask", jax_masked, dtypes, {**domain, "variants": ["mask"]}, checks=MASK_CHECKS[:-2]),
    ]


def jax_attention(q, k, v, *, softmax_scale, causal):
    import jax

    return np.asarray(jax.nn.dot_product_attention(q, k, v, scale=softmax_scale, is_causal=causal))


def jax_masked(q, k, v, *, softmax_scale, mask=None):
    import jax

    (batch, seqlen_q, heads), seqlen_k = q.shape[:3], k.shape[1]
    mask = None if mask is None else np.broadcast_to(mask, (batch, heads, seqlen_q, seqlen_k))
    return np.asarray(jax.nn.dot_product_attention(q, k, v, mask=mask, scale=softmax_scale))


def jax_vjp(q, k, v, *, softmax_scale, causal):
    import jax

    attention = functools.partial(jax.nn.dot_product_attention, scale=softmax_scale, is_causal=causal)
    out, pullback = jax.vjp(attention, q, k, v)
    return np.asarray(out), lambda dout: [np.asarray(x) for x in pullback(jax.numpy.asarray(dout))]


# ONNX Runtime


def onnx_peers() -> list[Peer]:
    """The operators Attention (ONNX, opset 23) and MultiHeadAttention (com.microsoft)."""
    importlib.import_module("onnx")
    importlib.import_module("onnxruntime")
    domain = {
        "layout": "BHLD",
        "align": "top-left",
        "views": ["plain"],
        "scales": [None, 1.0, 0.0625, 3.0],
    }  # in float32
    square = {**domain, "grouped": False, "align": None}  # it does not say what unidirectional means elsewhere
    halves = ("float16", "float32")
    return [
        Peer("onnxruntime, Attention", onnx_attention, (*halves, "float64"), domain),
        Peer(
            "onnxruntime, Attention, attn_mask",
            onnx_masked,
            halves,
            {**domain, "variants": ["mask"]},
            checks=MASK_CHECKS,
        ),
        Peer("onnxruntime, MultiHeadAttention", onnx_heads, halves, square),
    ]


def onnx_attention(q, k, v, *, softmax_scale, causal):
    options = {"is_causal": int(causal), **_onnx_scale(softmax_scale)}
    return _session(str(q.dtype), ("q", "k", "v"), "Attention", "", **options).run(None, {"q": q, "k": k, "v": v})[0]


def onnx_masked(q, k, v, *, softmax_scale, mask=None):
    if mask is None:
        return onnx_attention(q, k, v, softmax_scale=softmax_scale, causal=False)
    mask = np.array(np.broadcast_to(mask, (*q.shape[:-1], k.shape[-2])))
    session = _session(str(q.dtype), ("q", "k", "v", "mask"), "Attention", "", **_onnx_scale(softmax_scale))
    return session.run(None, {"q": q, "k": k, "v": v, "mask": mask})[0]


def onnx_heads(q, k, v, *, softmax_scale, causal):
    """Which takes (batch, length, heads x head_dim)."""
    batch, heads, length, _ = q.shape
    options = {"unidirectional": int(causal), "num_heads": heads, **_onnx_scale(softmax_scale)}
    session = _session(str(q.dtype), ("q", "k", "v"), "MultiHeadAttention", "com.microsoft", **options)
    packed = {
        name: np.swapaxes(x, 1, 2).reshape(batch, x.shape[2], heads * x.shape[3])
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    out = session.run(None, packed)[0]
    return np.swapaxes(out.reshape(batch, length, heads, v.shape[-1]), 1, 2)


def _onnx_scale(softmax_scale):
    return {} if softmax_scale is None else {"scale": float(softmax_scale)}


@functools.cache
def _session(dtype, names, operator, domain, **attributes):
    """Of a graph with this node alone."""
    import onnxruntime
    from onnx import TensorProto, helper

    element = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}[dtype]
    rank = 4 if operator == "Attention" else 3
    tensors = [
        helper.make_tensor_value_info(
            name, TensorProto.BOOL if name == "mask" else element, [f"{name}{axis}" for axis in range(rank)]
        )
        for name in (*names, "out")
    ]
    node = helper.make_node(operator, names, ["out"], domain=domain, **attributes)
    opsets = [helper.make_opsetid("", 23), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(
        helper.make_graph([node], operator, tensors[:-1], tensors[-1:]), opset_imports=opsets, ir_version=10
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


LIBRARIES = {"torch": torch_peers, "jax": jax_peers, "onnxruntime": onnx_peers}


# What is found


def accuracy(peer: Peer, dtype: str, examples: int) -> tuple[str | None, str]:
    """Which bound holds where every query has keys and everything is finite, if any, and what is said of it.

    Of more problems than each check gets: what is found later is to be of what the check is about.
    """
    where = {"empty": False, "empty_rows": False, "nonfinite": False}
    check = testing.check_gradients_within_bound if peer.is_vjp else testing.check_within_bound
    for name, bound in peer.bounds.items():
        found = testing.report(peer.adapted([dtype], **where), examples=6 * examples, checks=[check], bound=bound)
        finding = found.findings[0]
        if finding.verdict == testing.LEFT_OUT:
            return None, finding.said
        if finding.verdict == testing.PASSED:
            return name, f"the {name} bound holds"
    return None, f"beyond the {' and the '.join(peer.bounds)} bound: {shown(finding)}"


def shown(finding: testing.Finding) -> str:
    """The first line of what is wrong, and the problem."""
    said = finding.said.splitlines()[0]
    return f"{said if len(said) < 240 else f'{said[:40]} ... {said[-120:]}'}, in `{finding.problem}`"


def leaves_nothing(problem) -> bool:
    """Whether a dimension is 0, or a query sees no key."""
    forward = getattr(problem, "forward", problem)
    inputs = forward.inputs()
    _, lse = reference.attention(*inputs, return_lse=True, **forward.options)
    return not all(x.size for x in inputs) or bool(np.isneginf(lse).any())


def peer_lines(peer: Peer, examples: int) -> list[str]:
    """The page's lines about one function: accuracy, empty arrays and rows, then all checks where nothing is empty."""
    found = {dtype: accuracy(peer, dtype, examples) for dtype in peer.dtypes}
    lines = [f"**{peer.name}**", "", *(f"- {dtype}: {said}" for dtype, (_, said) in found.items())]
    sound = [dtype for dtype, (bound, _) in found.items() if bound]
    if not sound:
        return [*lines, ""]
    bound = peer.bounds["standard" if "standard" in {name for name, _ in found.values()} else "tiled"]
    of_scale = peer.adapted(sound, scales=[0.0, -0.3, -2.0], empty=False, empty_rows=False)
    apart = {"a scale of 0 or below": (of_scale, of_scale.problems())}
    takes_empty = peer.domain.get("empty", True)
    if takes_empty or "variants" in peer.domain:  # or else every query sees a key
        of_any = peer.adapted(sound)
        what = "dimensions of 0, queries that see no key" if takes_empty else "queries that see no key"
        apart[what] = of_any, of_any.problems().filter(leaves_nothing)
    for what, (adapted, problems) in apart.items():
        first = testing.report(
            adapted, examples=2 * examples, checks=peer.checks[:1], problems=problems, bound=bound
        ).findings[0]
        said = {testing.PASSED: "right", testing.LEFT_OUT: f"not asked: {first.said}"}.get(first.verdict)
        lines.append(f"- {what}: {said or shown(first)}")
    report = testing.report(peer.adapted(sound, empty=False), examples=examples, checks=peer.checks, bound=bound)
    counts = {verdict: [x for x in report.findings if x.verdict == verdict] for verdict in testing.VERDICTS}
    said = ", ".join(f"{len(findings)} {verdict}" for verdict, findings in counts.items() if findings)
    left_out = "; ".join(report.left_out) or "nothing"
    lines.append(f"- {len(peer.checks)} checks ({', '.join(sound)}): {said}; not asked: {left_out}")
    lines += [f"    - {finding.check}: {shown(finding)}" for finding in report.failures]
    return [*lines, ""]


def library_lines(name: str, examples: int) -> list[str]:
    """The same of a library, or that it is not installed."""
    try:
        peers = LIBRARIES[name]()
    except ImportError as error:
        return [f"### {name}", "", f"Left out: {error.name} is not installed.", ""]
    lines = [f"### {name} {importlib.import_module(name).__version__}", ""]
    for peer in peers:
        print(f"{peer.name} ...", file=sys.stderr, flush=True)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lines += peer_lines(peer, examples)
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.examples.peers", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=LIBRARIES, nargs="+", default=list(LIBRARIES), help="default: all")
    parser.add_argument(
        "--examples", type=int, default=12, help="problems for each check, default 12; accuracy gets 6 times as many"
    )
    parser.add_argument("--write", action="store_true", help=f"rewrite {PAGE.name}")
    args = parser.parse_args(arguments)
    lines = [
        f"{datetime.date.today().isoformat()}, NumPy {np.__version__}, {args.examples} problems for each check, "
        f"{6 * args.examples} for accuracy.",
        "",
    ]
    for name in args.only:
        lines += library_lines(name, args.examples)
    text = "\n".join(lines)
    print(text)
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        PAGE.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
