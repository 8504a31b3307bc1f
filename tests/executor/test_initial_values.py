"""What several ranks of a host hold whole is copied out of its file by one of them."""

from __future__ import annotations

import logging
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import plancompiler as pc
from plancompiler.errors import AbortedError, DataError, TransportError
from plancompiler.executor import initial_values
from plancompiler.executor.comm.choice import open_link
from plancompiler.executor.comm.host import HostLink
from plancompiler.executor.comm.local import LocalHub
from plancompiler.executor.comm.remote import PeerServer, remote_link
from plancompiler.executor.runtime import Runtime
from plancompiler.lower.compile import compile_plans

MESH = pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
RANDOM = np.random.default_rng(5)
WEIGHTS = {
    "whole": RANDOM.normal(size=(9, 11)),
    "rows": RANDOM.normal(size=(7, 6)).astype(np.float32),
    "columns": RANDOM.normal(size=(2, 3, 5)).astype(np.float32),
    "each": RANDOM.normal(size=(4, 3)).astype(np.float32),
    "long": RANDOM.normal(size=(1, 200)).astype(np.float32),
    "number": np.array(2.5, np.float32),
    "empty": np.zeros((0, 3), np.float32),
    "vector": RANDOM.normal(size=5).astype(np.float16),
}
LAYOUTS = {"rows": ["B", "S(0)"], "columns": ["B", "S(2)"], "each": ["S(0)", "S(1)"]}


class Weights(pc.nn.Module):
    """Variables that have their values from a file; `vector` is wider than there."""

    def __init__(self, path):
        for name in WEIGHTS:
            dtype = "float32" if name == "vector" else None
            setattr(self, name, pc.nn.Parameter(*_kind(name, dtype), pc.data.Stored(path, name)))

    def forward(self):
        return [each.value for each in self.parameters()]


def _kind(name, dtype):
    return WEIGHTS[name].shape, dtype or str(WEIGHTS[name].dtype)


@pytest.fixture
def runtimes(tmp_path, monkeypatch, request):
    """Ranks of a job, which are not prepared yet, and the file of its weights."""
    monkeypatch.setattr(initial_values, "_HALF", 128)
    path = tmp_path / "weights.safetensors"
    save_file(WEIGHTS, path)
    with pc.job("reading") as job:
        model = Weights(path).place(MESH, LAYOUTS)
        for name, value in zip(WEIGHTS, model(), strict=True):
            pc.output(name, value)
    plans = compile_plans(job, 4).plans
    token = secrets.token_hex(8)
    servers: list[PeerServer] = []
    if request.param == "threads":
        links = [*map(LocalHub().link, range(4))]
    elif request.param == "shared memory":
        links = [HostLink(token, rank) for rank in range(4)]
    else:  # two hosts of two ranks
        servers += [PeerServer("127.0.0.1:0") for _ in range(4)]
        addresses = {rank: f"127.0.0.1:{each.port}" for rank, each in enumerate(servers)}
        links = []
        for rank, server in enumerate(servers):
            far = (2, 3) if rank < 2 else (0, 1)
            remote = partial(remote_link, rank=rank, server=server, addresses=addresses)
            links.append(open_link(token, rank, 4, far=far, remote=remote))
    made = [Runtime(plans[rank], link, deadline=30.0) for rank, link in enumerate(links)]
    yield made, path
    for each in (*made, *servers):
        each.close()


def prepared(runtimes):
    with ThreadPoolExecutor(len(runtimes)) as pool:
        futures = [pool.submit(runtime.prepare) for runtime in runtimes]
        return [future.exception() for future in futures]


def mapped_memory():
    """What the kernel says this process maps."""
    return Path("/proc/self/maps").read_text().splitlines()


@pytest.mark.parametrize("runtimes", ["threads", "shared memory", "two hosts"], indirect=True)
def test_bytes_are_copied_out_of_a_file_once_by_all_ranks_of_a_host(runtimes, caplog, request):
    ranks, _ = runtimes
    hosts = 2 if "hosts" in request.node.name else 1
    with caplog.at_level(logging.DEBUG, logger="plancompiler.ops.initializer"):
        assert prepared(ranks) == [None] * 4
    read = dict.fromkeys(WEIGHTS, 0)
    for record in caplog.records:
        size, name = re.match(r"(\d+) bytes of variable (\w+) ", record.getMessage()).groups()
        read[name] += int(size)
    expected = {name: each.nbytes * hosts for name, each in WEIGHTS.items()}
    assert read == {**expected, "each": WEIGHTS["each"].nbytes}  # split over all ranks
    # What they read into together is given back.
    assert not [line for line in mapped_memory() if "plancompiler-reading" in line]
    for rank, runtime in enumerate(ranks):
        tp = rank % 2
        expected = {
            **WEIGHTS,
            "rows": np.split(WEIGHTS["rows"], [4])[tp],
            "columns": np.split(WEIGHTS["columns"], [3], axis=2)[tp],
            "each": np.split(np.split(WEIGHTS["each"], 2)[rank // 2], [2], axis=1)[tp],
        }
        for name, value in runtime.variables().items():
            np.testing.assert_array_equal(value, expected[name], name)


@pytest.mark.parametrize("runtimes", ["threads", "shared memory"], indirect=True)
def test_a_file_that_the_first_cannot_read_stops_all_ranks(runtimes):
    ranks, path = runtimes
    path.write_bytes(path.read_bytes()[:-8])
    errors = prepared(ranks)
    assert any(isinstance(each, DataError) for each in errors), errors
    assert all(isinstance(each, DataError | AbortedError) for each in errors), errors


@pytest.mark.parametrize("runtimes", ["threads"], indirect=True)
def test_ranks_that_read_other_variables_together_are_told(runtimes):
    """One of them goes on from a checkpoint, the others do not."""
    ranks, _ = runtimes
    given = {"whole": WEIGHTS["whole"]}
    ranks[3] = Runtime(ranks[3].plan, ranks[3]._link, variables=given, deadline=30.0)
    errors = prepared(ranks)
    assert any(isinstance(each, TransportError) for each in errors), errors
