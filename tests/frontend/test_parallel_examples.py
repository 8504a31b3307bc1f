"""The examples that need several ranks: on any number of them, in every form, losses are equal."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import UsageError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 6


@pytest.fixture(autouse=True, scope="module")
def text(tmp_path_factory):
    """The text that is trained on is written to a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def moe():
    return imported("moe")


@pytest.fixture(scope="module")
def fused_gpt():
    return imported("fused_gpt")


def imported(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        return importlib.import_module(name)


def losses_of(job, backend="threads"):
    with pc.run(job, ranks=job.world_size, backend=backend, cache=False) as session:
        return [float(outputs["loss"]) for outputs in session.run(STEPS)]


def launched(ranks, name, *words):
    """The losses that a launched example prints, and its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "plancompiler", "launch", "-n", str(ranks),
         str(EXAMPLES / f"{name}.py"), "--steps", str(STEPS), *words],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == STEPS + 1  # of rank 0 alone
    return [float(line.rpartition(" ")[2]) for line in lines[:-1]], lines[-1]


# --- a mixture of experts -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe_losses(moe):
    """Those of one rank."""
    ((losses, _),) = spawn(lambda: moe.train(STEPS, total=STEPS, ranks=1), 1)
    return losses


def by_hand(experts, x, capacity):
    """What a mixture makes of rows [groups, rows, dim], and how many of them had no place."""
    router, weight1, bias1, weight2, bias2 = (
        each.value.numpy().astype(np.float64)
        for each in (experts.router.weight, experts.weight1, experts.bias1, experts.weight2,
                     experts.bias2)
    )  # fmt: skip
    y, passed = np.zeros_like(x, np.float64), 0
    for group, rows in enumerate(x.astype(np.float64)):
        taken = np.zeros(len(weight1), int)
        for number, row in enumerate(rows):
            scores = np.exp(router @ row)
            expert = int(scores.argmax())
            if taken[expert] == capacity:
                passed += 1
                continue
            taken[expert] += 1
            hidden = np.maximum(row @ weight1[expert] + bias1[expert, 0], 0)
            made = hidden @ weight2[expert] + bias2[expert, 0]
            y[group, number] = made * scores[expert] / scores.sum()
    return y, passed


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mixture_is_what_its_experts_make_of_rows(moe, ranks):
    x = np.random.default_rng(1).normal(size=(4, 12, 8)).astype(np.float32)

    def rank():
        pc.manual_seed(5)
        mesh = pc.Placement("cpu", list(range(ranks)))
        experts = moe.Experts(8, 16, experts=6, places=1.0)
        experts.place(mesh, dict.fromkeys(("weight1", "bias1", "weight2", "bias2"), "S(0)"))
        y, balance = experts(pc.tensor(x, mesh, "S(0)"))
        return y.numpy(), balance.item(), by_hand(experts, x, capacity=2)

    for y, balance, (wanted, passed) in spawn(rank, ranks):
        np.testing.assert_allclose(y, wanted, 1e-5, 1e-6)
        assert 0 < passed < 24
        assert balance > 1  # which is the least


@pytest.mark.processes
@pytest.mark.parametrize(("ranks", "backend"), [(1, "threads"), (2, "processes"), (4, "threads")])
def test_jobs_of_the_mixture(moe, moe_losses, ranks, backend):
    job = moe.build(ranks=ranks, total=STEPS)
    np.testing.assert_allclose(losses_of(job, backend), moe_losses, 1e-5)


@pytest.mark.parametrize(("ranks", "compiled"), [(2, False), (2, True), (4, False)])
def test_the_mixture_eager(moe, moe_losses, ranks, compiled):
    def rank():
        return moe.train(STEPS, total=STEPS, ranks=ranks, compiled=compiled)[0]

    for losses in spawn(rank, ranks):
        np.testing.assert_allclose(losses, moe_losses, 1e-5)


@pytest.mark.processes
def test_the_mixture_launched(moe_losses):
    losses, last = launched(2, "moe", "--compiled")
    np.testing.assert_allclose(losses, moe_losses, rtol=0, atol=1e-4)
    assert re.fullmatch(r"read of 360 unseen digits: [0-9.]+%", last)


def test_the_mixture_reads_digits_it_never_saw(moe):
    ((losses, right),) = spawn(lambda: moe.train(100, total=100, ranks=1), 1)
    assert np.mean(losses[-10:]) < 0.25 * losses[0]
    assert right > 0.85


def test_a_batch_of_the_mixture_has_groups(moe):
    with pytest.raises(UsageError, match="a multiple of 4"):
        moe.build(ranks=1, batch=30)


# --- fused layers ---------------------------------------------------------------------------------

SIZES = {"layers": 2, "dim": 32, "heads": 4, "length": 16, "batch": 4, "total": STEPS}


@pytest.fixture(scope="module")
def gpt_losses(fused_gpt):
    """Those of one rank."""
    losses = losses_of(fused_gpt.build(**SIZES))
    assert losses[-1] < losses[0]
    return losses


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dp", "tp", "backend"), [(2, 1, "threads"), (1, 2, "processes"), (2, 2, "threads")]
)
def test_jobs_of_fused_layers(fused_gpt, gpt_losses, dp, tp, backend):
    job = fused_gpt.build(dp=dp, tp=tp, **SIZES)
    np.testing.assert_allclose(losses_of(job, backend), gpt_losses, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "tp", "compiled"), [(1, 1, False), (2, 1, True), (1, 2, False), (2, 2, False)]
)
def test_fused_layers_eager(fused_gpt, gpt_losses, dp, tp, compiled):
    def rank():
        return fused_gpt.train(STEPS, dp, tp, ranks=dp * tp, compiled=compiled, **SIZES)

    for losses in spawn(rank, dp * tp):
        np.testing.assert_allclose(losses, gpt_losses, 1e-5)


@pytest.mark.processes
def test_fused_layers_launched(fused_gpt):
    """With the sizes that are for users."""
    job = fused_gpt.build(total=STEPS)
    losses, last = launched(2, "fused_gpt", "--tp", "2", "--compiled")
    np.testing.assert_allclose(losses, losses_of(job), rtol=0, atol=1e-4)
    assert last == f"after {STEPS} steps: loss {losses[-1]:.4f} nats per byte"


def test_what_is_split_by_vocabulary_is_never_gathered(fused_gpt):
    def rank():
        training = fused_gpt.Training(fused_gpt.mesh_of(1, 2, 2), **SIZES)
        tokens, targets = training.data()
        with pc.comm_trace() as trace:
            logits = training.model(tokens)
            pc.c_softmax_with_cross_entropy(logits, targets)
        return str(logits.sbp), trace.counts()

    for layout, counts in spawn(rank, 2):
        assert layout == "[B, S(2)]"
        # One for the embedding, one for each half of a layer, three numbers per byte of the loss.
        assert counts == {"all_reduce": 1 + 2 * SIZES["layers"] + 3}


def test_wrong_meshes_of_fused_layers(fused_gpt):
    for config, part in (
        ({"dp": 2, "tp": 2, "ranks": 3}, "number of ranks"),
        ({"tp": 2, "ranks": 3}, "number of ranks"),
        ({"tp": 0}, "tp must be"),
        ({"total": 0}, "total must be"),
    ):
        with pytest.raises(UsageError, match=part):
            fused_gpt.build(**config)
