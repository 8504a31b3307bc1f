"""Which results share memory with their tensor, by changes in place of one and the other."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import InplaceError, ShapeError
from tests.eager.view_calls import COPIES, REFUSED, SHAPE, TURNED, VIEWS

PAIR = pc.Placement("cpu", [0, 1])
VALUE = np.arange(1.0, 1.0 + np.prod(SHAPE)).reshape(SHAPE)
CALLS = [
    *((each, True) for each in (VIEWS | TURNED).items()),
    *((each, False) for each in COPIES.items()),
]


@pytest.mark.parametrize(
    ("sbp", "wrap"),
    [
        *(pytest.param(sbp, lambda each: each, id=f"{sbp}-eager") for sbp in ("B", "S(0)", "S(1)")),
        pytest.param("B", pc.compile, id="B-compiled"),
        pytest.param("S(0)", pc.compile, id="S(0)-compiled", marks=pytest.mark.slow),
        pytest.param("S(1)", pc.compile, id="S(1)-compiled", marks=pytest.mark.slow),
    ],
)
def test_a_result_shares_memory_where_it_does_in_pytorch(sbp, wrap):
    def change_part(xs):
        results = []
        for ((_, call), _), x in zip(CALLS, xs, strict=True):
            part = call(pc, x)
            part *= -1.0
            results.append(part * 1.0)
        return results

    def change_base(xs):
        results = []
        for ((_, call), _), x in zip(CALLS, xs, strict=True):
            part = call(pc, x)
            x *= 2.0
            results.append(part * 1.0)
        return results

    def rank():
        xs, ys = ([pc.tensor(VALUE, PAIR, sbp) for _ in CALLS] for _ in range(2))
        plain = pc.tensor(VALUE, PAIR, sbp)
        elements = [call(pc, plain).numpy() for (_, call), _ in CALLS]
        values = (wrap(change_part)(xs), xs, wrap(change_base)(ys))
        return [elements, *([each.numpy() for each in value] for value in values)]

    for results in spawn(rank, 2):
        for ((name, _), shares), elements, part, base, kept in zip(CALLS, *results, strict=True):
            changed = np.isin(VALUE, elements) & shares
            np.testing.assert_array_equal(part, -elements, name)
            np.testing.assert_array_equal(base, np.where(changed, -VALUE, VALUE), name)
            np.testing.assert_array_equal(kept, elements * (2.0 if shares else 1.0), name)


@pytest.mark.parametrize("wrap", [lambda function: function, pc.compile], ids=["eager", "compiled"])
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recorded"])
def test_what_cannot_be_changed_says_so(recorded, wrap):
    def rank():
        for sbp in ("B", "S(0)"):
            x = pc.tensor(VALUE, PAIR, sbp)
            w = pc.tensor(VALUE, PAIR, sbp, requires_grad=recorded)
            for name, call in REFUSED.items():

                def change(x, w, call=call):
                    part = call(pc, x * w if recorded else x)
                    part *= -1.0

                with pytest.raises(ShapeError if "view" in name else InplaceError):
                    wrap(change)(x, w)
            np.testing.assert_array_equal(x.numpy(), VALUE)

    spawn(rank, 2)
