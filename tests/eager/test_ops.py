"""Every op kind on eager tensors, forward and backward, on several meshes and layouts: the dense
result, whatever the layout."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.ops import op_table
from tests.ops.dense import SEED, STEP, gradients_of
from tests.ops.samples import samples
from tests.ops.sharding import run_dense

ONE = pc.Placement("cpu", [0, 1])
TWO = pc.Placement("cpu", [[0, 1], [2, 3]])
THREE = pc.Placement("cpu", [0, 1, 2])
STRUCTURE = {"input", "output", "variable", "accumulate", "collect_pieces", "take_piece"}
"""Kinds that only a compiled step can run."""


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    results = [
        sample
        for sample in samples(tmp_path_factory.mktemp("data"))
        if sample.kind not in STRUCTURE
    ]
    # Enough of each kind to see its attributes, not all shapes.
    kept, seen = [], {}
    for sample in results:
        seen[sample.kind] = seen.get(sample.kind, 0) + 1
        if seen[sample.kind] <= 3:
            kept.append(sample)
    return kept


def layout(choice: str, array: np.ndarray, ndim: int) -> list[str]:
    """One SBP per mesh axis for an input, by a choice such as "S(0) P": what it cannot be is B."""
    layout = []
    for entry in choice.split():
        if entry == "S(last)":
            entry = f"S({array.ndim - 1})" if array.ndim else "B"
        if (entry == "S(0)" and not array.ndim) or (entry == "P" and array.dtype.kind != "f"):
            entry = "B"
        layout.append(entry)
    return layout[:ndim]


CASES = [
    (ONE, "S(0)"),
    (THREE, "S(last)"),
    (TWO, "P S(0)"),
    (TWO, "S(0) S(last)"),
]
"""Layouts that many ops cannot use as they are; test_signatures.py has those that they can."""


def names(case):
    return f"{case[0].hierarchy}-{case[1]}".replace(" ", "_")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=names)
def test_every_kind_gives_the_dense_result_on_every_layout(calls, case, record_property):
    placement, choice = case
    table = op_table()

    def rank():
        generator = pc.manual_seed(SEED)
        results = []
        for sample in calls:
            generator.start_step(STEP)
            pc.eager.current_world().step = STEP
            entry = "S(0) S(0)" if table[sample.kind].mutates and "P" in choice else choice
            if table[sample.kind].mutates:
                # All that an update takes lies as its variable does, but for scalars.
                entry = "B B"
            tensors = [
                pc.tensor(array, placement, layout(entry, array, placement.ndim))
                for array in sample.inputs
            ]
            if not tensors:
                world = pc.eager.current_world()
                outputs = world.add(sample.kind, (), sample.attrs, placement)
            else:
                outputs = tensors[0]._apply(sample.kind, tensors, sample.attrs)
            results.append([output.numpy() for output in outputs])
        return results

    for of_rank in spawn(rank, placement.size)[::2]:
        for sample, outputs in zip(calls, of_rank, strict=True):
            expected = run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)
            for got, wanted in zip(outputs, expected, strict=True):
                assert got.dtype == wanted.dtype, str(sample)
                np.testing.assert_allclose(got, wanted, 1e-9, 1e-12, err_msg=str(sample))
    record_property(f"eager_op_calls_checked,_{names(case)}", len(calls))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=names)
def test_every_gradient_is_the_dense_one_on_every_layout(calls, case, record_property):
    placement, choice = case
    table = op_table()
    differentiable = [
        sample
        for sample in calls
        if sample.inputs
        and sample.differentiable
        and table[sample.kind].gradient is not None
        and not table[sample.kind].mutates
        and sample.kind != "stop_gradient"
    ]
    rng = np.random.default_rng(5)
    weights = []
    for sample in differentiable:
        first = run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)[0]
        weights.append(np.asarray(rng.normal(size=first.shape)))

    def rank():
        generator = pc.manual_seed(SEED)
        results = []
        for sample, weight in zip(differentiable, weights, strict=True):
            generator.start_step(STEP)
            tensors = [
                pc.tensor(
                    array,
                    placement,
                    layout(choice, array, placement.ndim),
                    requires_grad=array.dtype.kind == "f",
                )
                for array in sample.inputs
            ]
            first = tensors[0]._apply(sample.kind, tensors, sample.attrs)[0]
            if first.requires_grad:
                first.backward(pc.tensor(weight, placement, layout(choice, weight, placement.ndim)))
            results.append([None if one.grad is None else one.grad.numpy() for one in tensors])
        return results

    for of_rank in spawn(rank, placement.size)[1::2]:
        for sample, weight, grads in zip(differentiable, weights, of_rank, strict=True):
            count = len(run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP))
            expected = gradients_of(
                sample.kind, sample.inputs, sample.attrs, [weight] + [None] * (count - 1)
            )
            for got, wanted in zip(grads, expected, strict=True):
                if wanted is None:
                    assert got is None, str(sample)
                else:
                    np.testing.assert_allclose(got, wanted, 1e-7, 1e-9, err_msg=str(sample))
    record_property(f"eager_gradients_checked,_{names(case)}", len(differentiable))
