"""Attention over Dask arrays on a cluster of two processes: the same bits whoever computes, also if a worker dies."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import dask
import numpy as np
import pytest
from dask import array as da
from distributed import Client, LocalCluster

from cupyflash import distributed, testing
from experiments import parallel, record, sparse_work

ROOT = Path(__file__).parent.parent
OPTIONS = {"causal": True, "align": "bottom-right", "dropout_p": 0.2, "seed": 3, "score_mod": "score * (1 + h)"}


@pytest.fixture(scope="module")
def client():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = (1, 2, 24, 16), (1, 1, 30, 16), (1, 1, 30, 16)
    return [da.from_array(rng.standard_normal(s).astype(np.float16), chunks=(1, 2, 12, 16)) for s in shapes]


def results(q, k, v):
    out, lse = distributed.attention(q, k, v, return_lse=True, **OPTIONS)
    return [out, lse, *distributed.attention_backward(out, q, k, v, out, lse, **OPTIONS)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_any_number_of_workers_gives_the_same_bits(client, arrays, num_workers):
    expected = dask.compute(*results(*arrays), scheduler="synchronous")
    workers = sorted(client.scheduler_info()["workers"])[:num_workers]
    found = client.gather(client.compute(results(*arrays), workers=workers))
    for result, right in zip(found, expected, strict=True):
        testing.assert_same_bits(result, right)


def killing_its_worker_once(chunk, died):
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return chunk


def test_a_worker_that_dies_is_replaced(client, arrays, tmp_path: Path):
    q, k, v = arrays
    expected = dask.compute(*results(q, k, v), scheduler="synchronous")
    died = tmp_path / "died"
    # The last chunk of queries is met late, when each worker holds results of others.
    fatal = q[:, :, 12:].map_blocks(killing_its_worker_once, died, dtype=q.dtype, meta=q._meta)
    found = client.gather(client.compute(results(da.concatenate([q[:, :, :12], fatal], axis=2), k, v)))
    assert died.exists()
    for result, right in zip(found, expected, strict=True):
        testing.assert_same_bits(result, right)


def test_experiments_are_spread_over_a_cluster(tmp_path):
    """By commands alone, as the page has them."""
    dask = [sys.executable, "-m", "dask"]
    file = tmp_path / "scheduler.json"
    with contextlib.ExitStack() as stack:
        for command in (
            ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)],
            ["worker", "--scheduler-file", str(file), "--nthreads", "1", "--no-dashboard"],
        ):
            process = subprocess.Popen([*dask, *command], cwd=ROOT, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        with Client(scheduler_file=str(file), timeout=60, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=60)
            address = client.scheduler.address
        command = ["run", "sparse_work", "--seqlens", "70", "--results", str(tmp_path / "out"), "--dask", address]
        done = subprocess.run(
            [sys.executable, "-m", "experiments", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    assert "100%" in done.stdout  # the cluster's own bar
    rows, _ = record.read_csv(tmp_path / "out" / "sparse_work.csv")
    assert rows == [sparse_work.count((mask, 70)) for mask in sparse_work.MASKS]


def test_a_cluster_that_cannot_import_the_experiments(client, monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'experiments'")

    monkeypatch.setattr(parallel, "imported", missing)
    with pytest.raises(RuntimeError, match="cannot import experiments; start both in this folder, by python -m dask"):
        with parallel.on_dask(client.scheduler.address):
            pass


def test_where_cases_are_measured(client):
    assert parallel.everywhere(os.getpid) == [os.getpid()]
    with parallel.on_dask(client.scheduler.address):
        pids = parallel.everywhere(os.getpid)
        assert pids[0] == os.getpid() and len(set(pids)) == 3
        measured = parallel.measure_all(lambda case: (case, os.getpid()), range(6), work=lambda case: case)
        environment = record.joined(parallel.everywhere(record.environment, "sim", "quick"))
    assert [case for case, _ in measured] == [*range(6)] and {pid for _, pid in measured} == set(pids[1:])
    assert environment == record.environment("sim", "quick")


@pytest.mark.parametrize(
    ("address", "why"),
    [("tcp://127.0.0.1:9", "no scheduler answers"), ("127.0.0.1:8786", "not an address"), ("http://x:1", "not an ad")],
)
def test_no_cluster(address, why, capsys, monkeypatch):
    from experiments.__main__ import main

    monkeypatch.setattr(parallel, "SECONDS_TO_CONNECT", 0.2)
    assert main(["all", "--quick", "--dask", address]) == 2
    assert capsys.readouterr().err.startswith(f"--dask {address}: {why}")


def test_a_cluster_without_workers(capsys):
    from experiments.__main__ import main

    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        assert main(["all", "--quick", "--dask", cluster.scheduler_address]) == 2
    assert "the scheduler has no workers" in capsys.readouterr().err
