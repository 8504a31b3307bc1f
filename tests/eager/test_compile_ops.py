"""Every op kind in a compiled function, forward and backward: what it gives eagerly."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.ops import op_table
from tests.eager.test_ops import CASES, STRUCTURE, layout, names
from tests.ops.samples import samples

SEED, STEP = 5, 3
OF_EACH_KIND = 2


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    kept, seen = [], {}
    for sample in samples(tmp_path_factory.mktemp("data")):
        seen[sample.kind] = seen.get(sample.kind, 0) + 1
        if sample.kind not in STRUCTURE and seen[sample.kind] <= OF_EACH_KIND:
            kept.append(sample)
    return kept


def results(sample, tensors, placement):
    """Outputs, and gradients of all inputs of the first output's sum."""
    if not tensors:
        world = pc.eager.current_world()
        return list(world.add(sample.kind, (), sample.attrs, placement)), []
    outputs = tensors[0]._apply(sample.kind, tensors, sample.attrs)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not outputs[0].requires_grad:
        return list(outputs), []
    return list(outputs), pc.eager.grad(outputs[0].sum(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=names)
def test_every_kind(calls, case, record_property):
    placement, choice = case
    calls = calls[:: placement.ndim]  # on two axes, signatures are many and compiling is slow
    table = op_table()

    def rank():
        pc.manual_seed(SEED).start_step(STEP)
        pc.eager.current_world().step = STEP
        rows = []
        for sample in calls:
            definition = table[sample.kind]
            entry = "B B" if definition.mutates else choice
            wants = sample.differentiable and definition.gradient is not None
            rows.append(
                [
                    pc.tensor(
                        array,
                        placement,
                        layout(entry, array, placement.ndim),
                        requires_grad=wants and array.dtype.kind == "f",
                    )
                    for array in sample.inputs
                ]
            )

        def function(rows):
            return [
                results(sample, row, placement) for sample, row in zip(calls, rows, strict=True)
            ]

        collected = []
        state = pc.default_generator().state()
        before = [[tensor.numpy() for tensor in row] for row in rows]
        for run in (function, pc.compile(function)):
            pc.default_generator().load_state(state)
            with pc.no_grad():
                for row, arrays in zip(rows, before, strict=True):
                    for tensor, array in zip(row, arrays, strict=True):
                        tensor.copy_(pc.tensor(array, placement))
            made = run(rows)
            collected.append(
                [
                    [None if each is None else each.numpy() for each in (*outputs, *grads)]
                    for outputs, grads in made
                ]
            )
        return collected

    gradients = 0
    for eager, compiled in spawn(rank, placement.size)[::2]:
        for sample, one, other in zip(calls, eager, compiled, strict=True):
            for wanted, got in zip(one, other, strict=True):
                assert (got is None) == (wanted is None), str(sample)
                if got is not None:
                    assert got.dtype == wanted.dtype
                    np.testing.assert_allclose(got, wanted, 1e-9, 1e-12, err_msg=str(sample))
            gradients += len(one)
    assert gradients > len(calls)
    record_property(f"compiled_op_calls_checked,_{names(case)}", len(calls))
