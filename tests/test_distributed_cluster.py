"""Attention over Dask arrays on a cluster of two processes: the same bits whoever computes, also if a worker dies."""

import os
import signal
from pathlib import Path

import dask
import numpy as np
import pytest
from dask import array as da
from distributed import Client, LocalCluster

from cupyflash import distributed, testing
from experiments import parallel, record, sparse_work
from tests.experiments.running import run

OPTIONS = {"causal": True, "align": "bottom-right", "dropout_p": 0.2, "seed": 3, "score_mod": "score * (1 + h)"}


@pytest.fixture(scope="module")
def client():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        yield client


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    shapes = (1, 4, 24, 16), (1, 2, 40, 16), (1, 2, 40, 16)
    return [da.from_array(rng.standard_normal(s).astype(np.float16), chunks=(1, 2, 8, 16)) for s in shapes]


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
    fatal = q[:, :, 16:].map_blocks(killing_its_worker_once, died, dtype=q.dtype, meta=q._meta)
    found = client.gather(client.compute(results(da.concatenate([q[:, :, :16], fatal], axis=2), k, v)))
    assert died.exists()
    for result, right in zip(found, expected, strict=True):
        testing.assert_same_bits(result, right)


def test_experiments_are_spread_over_a_cluster(client, tmp_path, capfd):
    rows, _ = run("sparse_work", tmp_path, "--seqlens", "70", "--dask", client.scheduler.address)
    assert rows == [sparse_work.count((mask, 70)) for mask in sparse_work.MASKS]
    assert "100%" in capfd.readouterr().out  # the cluster's own bar


def test_where_cases_are_measured(client):
    assert parallel.everywhere(os.getpid) == [os.getpid()]
    with parallel.on_dask(client.scheduler.address):
        pids = parallel.everywhere(os.getpid)
        assert pids[0] == os.getpid() and len(set(pids)) == 3
        measured = parallel.measure_all(lambda case: (case, os.getpid()), range(6), work=lambda case: case)
        environment = record.joined(parallel.everywhere(record.environment, "sim", "quick"))
    assert [case for case, _ in measured] == [*range(6)] and {pid for _, pid in measured} == set(pids[1:])
    assert environment == record.environment("sim", "quick")


@pytest.mark.parametrize(("address", "why"), [("tcp://127.0.0.1:9", "no scheduler answers"), ("x", "no scheduler ans")])
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
