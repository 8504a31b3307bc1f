"""Random programs against NumPy: a few of each kind, and proof that a wrong one is seen."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from benchmarks.campaign import ops, ops_steps
from benchmarks.campaign.case import Case
from tests.campaign.conftest import Hold

EACH = 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ops.KINDS)
def test_some_cases_of_each_kind(hold: Hold, kind: str) -> None:
    first = ops.KINDS.index(kind)
    count = EACH if kind != "changes in place" else EACH // 2
    results = hold("ops", 5, range(first, first + count * len(ops.KINDS), len(ops.KINDS)))
    assert {each.group.partition(",")[0] for each in results} == {kind}


def test_a_wrong_reference_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared are numbers: of a function that is slightly another one they differ."""

    def larger(reference):
        return lambda *x, **named: reference(*x, **named) * 1.2

    for table in (ops_steps.PLAIN, ops_steps.PARTLY, ops_steps.BINARY, ops_steps.REDUCTIONS):
        for name, (ours, reference) in list(table.items()):
            monkeypatch.setitem(table, name, (ours, larger(reference)))
    monkeypatch.setattr(ops_steps, "SMOOTH_ONLY", {})
    with ops.opened() as campaign:
        results = [campaign.run(Case("ops", 5, index)) for index in range(0, 60, len(ops.KINDS))]
    assert sum(bool(each.problems) for each in results) >= len(results) // 4


def test_edges_differ_by_kind_of_infinity() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 1e5])
    assert ops.difference("x", x.astype(np.float32), x, "float32", 1.0) is None
    assert ops.difference("x", -x.astype(np.float32), x, "float32", 1.0) is not None
    # Beyond float16 a large number is infinite.
    halves = np.array([np.inf, -np.inf, np.nan, np.inf], np.float16)
    assert ops.difference("x", halves, x, "float16", 1.0) is None


def test_parts_add_up_to_what_they_were_made_of() -> None:
    choices = Case("ops", 1, 0).choices
    mesh = pc.Placement("cpu", [[0, 1], [2, 3]])
    array = np.arange(12.0).reshape(4, 3)
    for sbp in (["P", "S(0)"], ["S(0)", "S(0)"], ["B", "P"], ["S(1)", "B"]):
        parts = ops.split(choices, array, sbp, mesh, False)
        np.testing.assert_allclose(ops._whole(parts, sbp, mesh), array, atol=1e-12)
