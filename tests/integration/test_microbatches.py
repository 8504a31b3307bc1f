"""Steps of several micro-batches, run: fed inputs, inputs of the whole step, collected outputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.ir import Job
from tests.examples import gpt

ROWS, CLASSES = 12, 5
RUNS = [
    (1, "gpipe", "threads"),
    (3, "gpipe", "threads"),
    (4, "1f1b", "threads"),
    (6, "zero_bubble", "threads"),
    (4, "1f1b", "processes"),
]


def classifier(microbatches: int, schedule: str) -> Job:
    """Two stages of two ranks; class weights are fed whole, logits and hits come back whole."""
    first = pc.Placement("cpu", [0, 1], axes=("dp",))
    last = pc.Placement("cpu", [2, 3], axes=("dp",))
    config = pc.Config(microbatches=microbatches, schedule=schedule)
    with pc.job("classifier", config=config) as job:
        x = pc.input("x", (ROWS, 7), "float32", first, "S(0)")
        labels = pc.input("labels", (ROWS,), "int64", last, "S(0)")
        weights = pc.input("weights", (CLASSES,), "float32", last, batched=False)
        body = pc.nn.Linear(7, 6).place(first)
        head = pc.nn.Linear(6, CLASSES).place(last)
        hidden = pc.dropout(body(x).tanh(), 0.25)
        logits = head(hidden.redistribute(placement=last))
        weighted = logits * weights
        loss = pc.cross_entropy(weighted, labels)
        pc.optim.AdamW(lr=0.05).minimize(loss)
        pc.output("loss", loss)
        pc.output("logits", weighted)
        hits = pc.equal(weighted.argmax(axis=1), labels)
        pc.output("hits", hits.cast("float32").sum())
    return job


def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(7)
    for _ in range(steps):
        yield {
            "x": random.normal(size=(ROWS, 7)).astype(np.float32),
            "labels": random.integers(0, CLASSES, ROWS),
            "weights": random.uniform(0.5, 1.5, CLASSES).astype(np.float32),
        }


def reports(microbatches: int, schedule: str, backend: str) -> list[dict[str, np.ndarray]]:
    job = classifier(microbatches, schedule)
    with pc.run(job, ranks=4, backend=backend) as session:
        return [dict(session.step(**batch)) for batch in batches(4)]


@pytest.fixture(scope="module")
def whole() -> list[dict[str, np.ndarray]]:
    return reports(*RUNS[0])


@pytest.mark.processes
@pytest.mark.parametrize(("microbatches", "schedule", "backend"), RUNS[1:])
def test_a_cut_step_reports_what_the_whole_step_does(
    whole: list[dict[str, np.ndarray]], microbatches: int, schedule: str, backend: str
) -> None:
    for before, after in zip(whole, reports(microbatches, schedule, backend), strict=True):
        assert after["logits"].shape == (ROWS, CLASSES)
        assert after["hits"] == before["hits"]
        np.testing.assert_allclose(after["logits"], before["logits"], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(after["loss"], before["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"microbatches": 8},
        {"pp": 2, "microbatches": 4, "schedule": "1f1b", "dropout": 0.1},
        {"pp": 2, "layers": 4, "chunks": 2, "microbatches": 4, "schedule": "interleaved"},
        {"dp": 2, "pp": 2, "microbatches": 2, "schedule": "zero_bubble", "zero": 1},
        {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b", "sequence_parallel": True},
    ],
)
def test_losses_of_the_text_model_are_those_of_one_rank(settings: dict[str, object]) -> None:
    model = {name: settings[name] for name in ("dropout", "layers") if name in settings}

    def losses(job: Job) -> list[float]:
        with pc.run(job, ranks=job.world_size) as session:
            return [float(session.step()["loss"]) for _ in range(6)]

    np.testing.assert_allclose(losses(gpt(**settings)), losses(gpt(**model)), rtol=1e-5)
