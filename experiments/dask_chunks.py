"""What does attention of Dask arrays cost: time, memory and bytes between workers?

A sequence in chunks on local clusters of one process per worker: causal, of which each chunk of queries meets half of
the chunks of keys, and with a window, so long that its scores alone (2 N^2 bytes) would not fit in the machine's
memory.
Inputs are made chunk by chunk by the workers, float16, one head; the result goes to files, chunk by chunk, and sampled
rows of it are compared with the reference. Counted by the workers: bytes received from others. Of them the model says:
each chunk of q, k and v goes to every other worker at most once, and of two parts that are joined one moves. Memory is
what Dask says that the workers hold together, at its largest among samples, and how far the call raises the largest
resident set of a worker, which includes the simulator, after a call on one chunk that loads and compiles everything.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from dask import array as da
from distributed import Client, LocalCluster
from distributed.diagnostics import MemorySampler
from tqdm import tqdm

from cupyflash import attention, bounds, distributed, reference
from experiments import record
from experiments.experiment import Experiment, Outcome, Row
from experiments.memory import largest_resident_set

HEAD_DIM = 64
WINDOW = 1024
CHUNKS = 16  # of a sequence
SAMPLED_ROWS = 4
SECONDS_BETWEEN_SAMPLES = 0.25
FEW = 12  # chunks that a worker holds beside those that all rows of queries need
ELEMENT_BYTES, LSE_BYTES = 2, 4
OPTIONS = {"causal": {"causal": True}, f"window of {WINDOW}": {"window_size": (WINDOW - 1, 0)}}


def measure(causal_seqlen: int, window_seqlen: int, workers: list[int]) -> list[Row]:
    """A row per mask and number of workers."""
    lengths = zip(OPTIONS, (causal_seqlen, window_seqlen), strict=True)
    cases = [(mask, seqlen, count) for (mask, seqlen), count in product(lengths, workers)]
    return [on_cluster(*case) for case in tqdm(cases, unit="cluster", smoothing=0)]


def on_cluster(mask: str, seqlen: int, workers: int) -> Row:
    """One call on a cluster of its own."""
    inputs, options = lazy_inputs(seqlen), OPTIONS[mask]
    out = distributed.attention(*inputs, **options)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0", memory_limit=0) as cluster,
        Client(cluster) as client,
    ):
        client.run(call_once, -(-seqlen // CHUNKS), options)
        before, sampler = client.run(largest_resident_set), MemorySampler()
        start = time.perf_counter()
        with sampler.sample("held", measure="managed", interval=SECONDS_BETWEEN_SAMPLES):
            da.to_npy_stack(folder, out, axis=0)
        seconds = time.perf_counter() - start
        held = max(number for _, number in sampler.samples["held"])
        after = client.run(largest_resident_set)
        moved = sum(client.run(received_bytes).values())
        result = da.from_npy_stack(folder, mmap_mode="r")
        q, k, v = client.gather(client.compute(inputs))
        digest = hashlib.sha256()
        for path in sorted(Path(folder).glob("*.npy")):
            digest.update(np.load(path, mmap_mode="r").tobytes())
        share = error_over_bound(q, k, v, result, options)
    pairs, joins = (sum(str(key[0]).startswith(f"attention-{what}") for key in tasks(out)) for what in ("pair", "join"))
    chunk = -(-seqlen // CHUNKS)
    input_bytes = sum(x.nbytes for x in inputs)
    part_bytes = chunk * (HEAD_DIM * ELEMENT_BYTES + LSE_BYTES)
    return {
        "mask": mask,
        "seqlen": seqlen,
        "chunk": chunk,
        "workers": workers,
        "pairs": pairs,
        "joins": joins,
        "seconds": seconds,
        "moved_bytes": moved,
        "moved_most": (workers - 1) * input_bytes + joins * part_bytes * (workers > 1),
        "held_bytes": held,
        "worker_growth_bytes": max(after[worker] - before[worker] for worker in after),
        "chunk_bytes": chunk * HEAD_DIM * ELEMENT_BYTES,
        "scores_bytes": ELEMENT_BYTES * seqlen**2,
        "machine_bytes": psutil.virtual_memory().total,
        "sampled_rows": SAMPLED_ROWS,
        "error_over_bound": share,
        "digest": digest.hexdigest()[:16],
    }


def lazy_inputs(seqlen: int) -> list[da.Array]:
    """q, k and v, each chunk made where it is needed first."""
    rng, chunks = da.random.default_rng(seqlen), (-(-seqlen // CHUNKS), HEAD_DIM)
    return [rng.standard_normal((seqlen, HEAD_DIM), chunks=chunks).astype(np.float16) for _ in "qkv"]


def tasks(array: da.Array) -> list[tuple[Any, ...]]:
    """Their keys."""
    return [key for key in array.dask.to_dict() if isinstance(key, tuple)]


def call_once(seqlen: int, options: dict[str, Any]) -> None:
    """Have everything loaded and compiled in this process."""
    x = np.ones((seqlen, HEAD_DIM), np.float16)
    attention(x, x, x, return_lse=True, **options)


def received_bytes(dask_worker: Any) -> int:
    """From other workers, until now."""
    return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)


def error_over_bound(q, k, v, out: da.Array, options: dict[str, Any]) -> float:
    """The largest error in sampled rows, in units of the bound of each element."""
    edges = np.cumsum([0, *out.chunks[0]]).tolist()
    rows = np.random.default_rng(0).integers(len(q), size=SAMPLED_ROWS)
    shares = []
    for row in map(int, rows):
        one = q[row : row + 1], k, v
        placed = {**options, "align": row}
        exact = reference.attention(*one, **placed)
        bound, _ = bounds.attention_in_parts(*one, edges, **placed)
        shares.append(np.max(np.abs(out[row : row + 1].compute(scheduler="synchronous") - exact) / bound))
    return float(max(shares))


def draw(figure, rows: list[Row]) -> None:
    """Seconds, bytes moved and memory, for each mask by number of workers."""
    labels = [f"{row['mask']}\nN = {row['seqlen']:,}\nworkers: {row['workers']}" for row in rows]
    places = np.arange(len(rows))
    times, moved, memory = figure.subplots(1, 3)
    times.bar(places, [row["seconds"] for row in rows], color=record.OURS)
    times.set_title("Seconds")
    width = 0.4
    moved.bar(places - width / 2, _megabytes(rows, "moved_bytes"), width, color=record.OURS, label="counted")
    moved.bar(places + width / 2, _megabytes(rows, "moved_most"), width, color=record.EXTRA, label="model: at most")
    moved.set_title("MB between workers")
    moved.legend(frameon=False)
    for place, (column, colour, label) in enumerate(
        (
            ("held_bytes", record.OURS, "held by all workers"),
            ("worker_growth_bytes", "#c79a2b", "growth of a worker,\nwith its simulator"),
            ("machine_bytes", record.EXTRA, "the machine's memory"),
            ("scores_bytes", record.STANDARD, "the scores, not stored"),
        )
    ):
        memory.bar(places + (place - 1.5) * 0.2, _megabytes(rows, column), 0.2, color=colour, label=label)
    memory.set_yscale("log")
    memory.set_title("Memory, MB")
    memory.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in times, moved, memory:
        axes.set_xticks(places, labels, fontsize=7)


def _megabytes(rows: list[Row], column: str) -> list[float]:
    return [row[column] / 1e6 for row in rows]


def outcomes(rows: list[Row]) -> list[Outcome]:
    """Right, the same on any number of workers, within the model, and quicker with more workers."""
    worst = max(row["error_over_bound"] for row in rows)
    moved = [row for row in rows if row["moved_bytes"] > row["moved_most"]]
    longest = max(rows, key=lambda row: row["seqlen"])
    found = [
        Outcome(
            f"{SAMPLED_ROWS} sampled rows of each result against the reference",
            "within the bound of parts that are joined (computed)",
            f"largest error {worst:.2f} of its bound",
            worst <= 1,
        ),
        Outcome(
            "bytes received from other workers",
            "at most each input chunk once per other worker, and one part of each join (predicted)",
            f"so in {len(rows) - len(moved)} of {len(rows)} rows",
            not moved,
            "a worker may drop a chunk and fetch it again; the model does not count that",
        ),
        Outcome(
            f"the scores at N = {longest['seqlen']:,}",
            "more than the machine's memory (computed)",
            f"{longest['scores_bytes'] / 1e9:.3g} GB, {longest['machine_bytes'] / 1e9:.3g} GB",
            longest["scores_bytes"] > longest["machine_bytes"],
            "this machine has more memory; --window-seqlen asks for more queries",
        ),
    ]
    for mask in dict.fromkeys(row["mask"] for row in rows):
        of_mask = [row for row in rows if row["mask"] == mask]
        same = len({row["digest"] for row in of_mask}) == 1
        counts = ", ".join(str(row["workers"]) for row in of_mask)
        found.append(
            Outcome(f"{mask}: bits on {counts} workers", "the same (computed)", "the same" * same or "others", same)
        )
        found += [_held(mask, of_mask), *_speedup(mask, of_mask)]
    return found


def _held(mask: str, rows: list[Row]) -> Outcome:
    needed = 2 * CHUNKS if mask == "causal" else 0
    held = [row["held_bytes"] / row["chunk_bytes"] / row["workers"] for row in rows]
    return Outcome(
        f"{mask}: chunks that a worker holds",
        f"at most {FEW}{', beside k and v, which all queries need: ' + str(needed) if needed else ''} (predicted)",
        ", ".join(f"{chunks:.1f}" for chunks in held),
        max(held) <= needed + FEW,
        "what is made, moved and joined when depends on how quick workers are",
    )


def _speedup(mask: str, rows: list[Row]) -> list[Outcome]:
    seconds = {row["workers"]: row["seconds"] for row in rows}
    if not seconds.keys() >= {1, 2}:
        return []
    ratio = seconds[1] / seconds[2]
    return [
        Outcome(
            f"{mask}: 1 to 2 workers",
            "1.6 to 2.1 times as fast (predicted)",
            f"{ratio:.2f} times",
            1.6 <= ratio <= 2.1,
            "" if 1.6 <= ratio <= 2.1 else "a figure of one run: what else ran on the cores counts too",
        )
    ]


EXPERIMENT = Experiment(
    claim="A sequence in chunks needs the memory of some chunks in each worker, whatever its scores would take; "
    "each other worker gets a chunk of the inputs about once and one part of each join moves; bits do not depend on "
    "the number of workers ([how it scales](distributed.md))",
    caption="Attention in chunks on one and two workers: time, bytes exchanged, memory beside that of the scores.",
    measure=measure,
    draw=draw,
    outcomes=outcomes,
    full={"causal_seqlen": 16384, "window_seqlen": 262144, "workers": [1, 2]},
    quick={"causal_seqlen": 512, "window_seqlen": 4096, "workers": [1, 2]},
    figure_size=(14.0, 4.6),
)
