"""Ranks that do not do the same, with PLANCOMPILER_COMM_CHECK=1: named before anything is wrong."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import PlanCompilerError, TransportError

PAIR = pc.Placement("cpu", [0, 1])
MESH = pc.Placement("cpu", [[0, 1], [2, 3]])


def ones(*shape):
    return np.ones(shape, np.float32)


def step(net, optimizer):
    optimizer.minimize(net(pc.tensor(ones(4, 2), PAIR, "S(0)")).mean())


def compiled(x, number):
    return x * number


COMPILED = pc.compile(compiled)
MISTAKES = {
    "shape": lambda rank: pc.tensor(ones(4 + 2 * rank, 2), PAIR, "S(0)"),
    "dtype": lambda rank: pc.tensor(np.ones(4, ["f4", "f8"][rank]), PAIR),
    "numbers": lambda rank: pc.tensor(ones(4) * (1 + rank), PAIR),
    "parts": lambda rank: pc.from_local(ones(3) * rank, PAIR, "B"),
    "scalar": lambda rank: pc.tensor(ones(4), PAIR) * (2.0 + rank),
    "calls": lambda rank: getattr(pc.tensor(ones(4), PAIR), ["exp", "tanh"][rank])(),
    "input 1": lambda rank: pc.tensor(ones(4), PAIR) + pc.tensor(ones(4), PAIR, ["B", "P"][rank]),
    "target": lambda rank: pc.tensor(ones(4, 4), PAIR).redistribute(sbp=f"S({rank})"),
    "axes": lambda rank: pc.tensor(ones(4, 4), PAIR).sum(rank),
    "seed": lambda rank: (pc.manual_seed(rank), nn.Linear(2, 2).place(PAIR).weight.value),
    "value": lambda rank: step(nn.Linear(2, 1).place(PAIR), pc.optim.SGD(0.1 * (1 + rank))),
    "weight_decay": lambda rank: step(
        nn.Linear(2, 1).place(PAIR), pc.optim.SGD(0.1, weight_decay=0.1 * rank)
    ),
    "arguments": lambda rank: COMPILED(pc.tensor(ones(4), PAIR), 2.0 + rank),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_difference_is_named(name, monkeypatch):
    monkeypatch.setenv("PLANCOMPILER_COMM_CHECK", "1")
    results = []

    def rank():
        try:
            MISTAKES[name](pc.eager.current_world().rank)
        except PlanCompilerError as error:
            results.append(error)
            raise

    with pytest.raises(TransportError):
        spawn(rank, 2, deadline=30.0)
    assert len(results) == 2
    for error in results:
        what = {"calls": "different calls", "parts": "numbers of from_local"}.get(name, name)
        assert what in error.report.what
        first, second = error.report.got.split("; ")
        assert first.startswith("rank 0: ")
        assert second.startswith("rank 1: ")
        assert "test_agreement.py:" in first
        assert "test_agreement.py:" in second


def test_ranks_that_agree_find_nothing(monkeypatch):
    def rank():
        pc.manual_seed(3)
        net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).place(PAIR)
        adam, actual = pc.optim.AdamW(lambda step: 0.1 / (step + 1)), []

        @pc.compile
        def function(x):
            loss = net(x).mean()
            adam.minimize(loss)
            return loss

        x = pc.tensor(ones(4, 2), PAIR, "S(0)")
        for call in (function.function, function):
            actual += [call(x).item() for _ in range(2)]
        own = pc.from_local(ones(2, 2) * pc.eager.current_world().rank, PAIR, "S(0)", check=True)
        return [*actual, own.sum().item()]

    plain = spawn(rank, 2)
    monkeypatch.setenv("PLANCOMPILER_COMM_CHECK", "1")
    assert spawn(rank, 2) == plain


def test_copies_of_one_part_are_compared_where_that_is_asked_for():
    """On a mesh, ranks that differ along a broadcast axis hold the same part."""

    def rank():
        number = pc.eager.current_world().rank
        same = pc.from_local(ones(2) * (number // 2), MESH, ["S(0)", "B"], check=True)
        pc.from_local(ones(2) * number, MESH, ["S(0)", "P"], check=True)
        with pytest.raises(TransportError, match="numbers of from_local") as caught:
            pc.from_local(ones(2) * number, MESH, ["S(0)", "B"], check=True)
        row = [2 * (number // 2), 2 * (number // 2) + 1]
        assert [f"rank {each}:" in str(caught.value) for each in row] == [True, True]
        pc.from_local(ones(2) * number, MESH, ["S(0)", "B"])  # nobody looks
        return same.numpy().tolist()

    assert spawn(rank, 4) == [[0.0, 0.0, 1.0, 1.0]] * 4


def test_collectives_that_differ_are_named_with_their_lines(monkeypatch):
    monkeypatch.setenv("PLANCOMPILER_COMM_CHECK", "1")

    def rank():
        world = pc.eager.current_world()
        world.comm.context((0, 1, 2)).all_reduce(ones(2 + (world.rank == 1)))

    at = r" at \S*test_agreement.py:\d+"
    calls = "; ".join(
        rf"rank {number}: all_reduce sum float32\[{size}\]{at}"
        for number, size in enumerate((2, 3, 2))
    )
    with pytest.raises(TransportError, match=f"made different calls.*{calls}"):
        spawn(rank, 3, deadline=30.0)
