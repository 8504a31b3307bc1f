"""Programs beside an open job of a cluster: they read its variables, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import FeedError, JobError, UsageError
from plancompiler.master.server import MasterServer
from plancompiler.running.client import Client
from tests.integration.test_evaluation import HELD, X, Y, expected, predict, train


def test_a_program_reads_the_variables_of_an_open_job(cluster: MasterServer) -> None:
    with pc.run(train()) as session:
        losses = [session.step(x=X, y=Y)["loss"] for _ in range(3)]
    programs = {"one rank": predict(), "split": predict(pc.Placement("cpu", [0, 1]), "S(1)")}
    with Client(cluster.address) as client:
        with pytest.raises(JobError, match="changes a variable"):
            client.open(train(), programs={"p": train()})
        with client.open(train(), programs=programs) as session:
            for loss in losses:
                for name in programs:
                    made = session.evaluate(name, x=HELD)
                    np.testing.assert_allclose(made["y"], expected(session), 1e-5, 1e-6)
                    assert made["greatest"] == pytest.approx(HELD.max())
                assert session.step(x=X, y=Y)["loss"] == loss
            with pytest.raises(UsageError, match=r"no such program.*'one rank', 'split'"):
                session.evaluate("q", x=HELD)
            with pytest.raises(FeedError):
                session.evaluate("split", x=HELD[:2])
            assert session.evaluate("split", x=HELD)["y"].shape == (5, 3)
        with pytest.raises(UsageError, match="the session is closed"):
            session.evaluate("split", x=HELD)
