"""Which signature an op gets."""

from __future__ import annotations

import random

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.boxing.infer_sbp import Operand, cheapest_signature, infer_sbp
from plancompiler.boxing.planner import boxing_path
from plancompiler.ir import BROADCAST, DType, Job, NdSbp, Partial, TensorType, freeze_attrs
from plancompiler.ops.registry import infer_types, mesh_signatures, op_def
from plancompiler.passes import run_passes
from tests.examples import gpt
from tests.ops.samples import samples
from tests.passes.worlds import collectives, compiled, configured, losses, mesh


def dearest_first(candidates, operands, outputs, hierarchy) -> list:
    """All candidates with their four prices, none left out, the cheapest and earliest last."""
    priced = []
    for number, candidate in enumerate(candidates):
        moved = reduced = owed = 0.0
        for operand, wanted in zip(operands, candidate.inputs, strict=True):
            one, other = operand.seconds(wanted, hierarchy)
            moved, reduced = moved + one, reduced + other
        for tensor, sbp in zip(outputs, candidate.outputs, strict=True):
            whole = NdSbp(tuple(BROADCAST if isinstance(each, Partial) else each for each in sbp))
            owed += sum(step.seconds for step in boxing_path(sbp, whole, *tensor, hierarchy))
        pairs = zip(operands, candidate.inputs, strict=True)
        changed = sum(operand.made != wanted for operand, wanted in pairs)
        priced.append(((moved, reduced + owed, reduced, changed), number, candidate))
    return sorted(priced, key=lambda each: each[:2], reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("hierarchy", [(2,), (3,), (2, 2), (2, 3), (4, 1)])
def test_the_cheapest_signature_is_that_of_pricing_all(hierarchy, tmp_path, record_property):
    chosen = random.Random(7)
    pool = [sample for sample in samples(tmp_path) if sample.inputs and sample.kind != "output"]
    checked = 0
    for sample in chosen.sample(pool, 150):
        types = tuple(TensorType(array.shape, DType.parse(array.dtype)) for array in sample.inputs)
        outputs = infer_types(sample.kind, types, sample.attrs)
        attrs = freeze_attrs(sample.attrs)
        candidates = mesh_signatures(sample.kind, types, outputs, attrs, hierarchy)
        if len(candidates) > 200 or op_def(sample.kind).mutates:
            continue
        for _ in range(3):
            # Layouts that some signatures take, so that much of what is wanted is there already.
            operands = [
                Operand(
                    tensor,
                    chosen.choice(candidates).inputs[slot].without_halos(),
                    frozenset(
                        chosen.choice(candidates).inputs[slot]
                        for _ in range(chosen.choice([0, 0, 0, 1, 2]))
                    ),
                )
                for slot, tensor in enumerate(types)
            ]
            expected = dearest_first(candidates, operands, outputs, hierarchy)[-1]
            got = cheapest_signature(sample.kind, candidates, operands, outputs, hierarchy)
            assert got == expected[2], (str(sample), [str(each.made) for each in operands])
            checked += 1
    assert checked > 100
    record_property(f"choices_of_signatures_checked,_{hierarchy}", checked)


def signatures_of(job, *config):
    """(op, its signature) of the job as passes leave it."""
    graph = infer_sbp(run_passes(configured(job, **dict(config)))[0])
    return list(zip(graph.job.ops, graph.signatures, strict=True))


def test_what_follows_from_the_gradient_of_a_sum_is_made_in_parts():
    """A number's gradient is there on every rank, where all could do the work of all."""
    with pc.job("sum") as job:
        x = pc.input("x", (8, 6), "float32", mesh(2), "S(0)")
        layers = pc.nn.Linear(6, 6, bias=False), pc.nn.Linear(6, 6, bias=False)
        for layer in layers:
            x = layer.place(mesh(2))(x)
        loss = pc.sum(x)
        pc.optim.SGD(0.1).minimize(loss, [each.weight for each in layers])
        pc.output("loss", loss)
    products = {
        op.name: str(signature.outputs[0])
        for op, signature in signatures_of(job)
        if op.kind == "matmul"
    }
    assert "matmul_2" in products  # of the gradient
    assert set(products.values()) == {"[S(0)]"}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_gradient_of_a_split_table_is_made_in_parts(microbatches):
    placed = mesh(2)
    with pc.job("table") as job:
        ids = pc.input("ids", (8, 4), "int64", placed, "B")
        table = pc.nn.Embedding(32, 6).place(placed, {"weight": "S(0)"})
        loss = pc.mean(table(ids) ** 2.0)
        pc.optim.Adam(0.1).minimize(loss)
        pc.output("loss", loss)
    made = [
        str(signature.outputs[0])
        for op, signature in signatures_of(
            job, ("microbatches", microbatches), ("precision", "float16")
        )
        if op.kind == "embedding_grad"
    ]
    assert made == ["[S(0)]"]


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_gradients_are_reduced_once_per_step(precision):
    for op, signature in signatures_of(gpt(dp=2), ("microbatches", 4), ("precision", precision)):
        if op.kind == "accumulate" and op.attr("reduction") == "sum":
            assert signature.inputs[0].has_partial, op.name


def projections(pieces: bool, ranks: int = 2) -> Job:
    """Three projections of an input whose weights lie in one parameter."""
    with pc.job("projections") as job:
        x = pc.constant(np.arange(24).reshape(8, 3) / 24, "float32", mesh(ranks))
        x = x.redistribute(sbp="S(0)")
        layer = pc.nn.Linear(3, 6, bias=False).place(mesh(ranks))
        weight = layer.weight.value
        cuts = [slice(0, 4), slice(4, 5), slice(5, 6)]
        whole = x @ weight.T
        parts = [x @ weight[cut].T if pieces else whole[:, cut] for cut in cuts]
        loss = sum((part**2).mean() for part in parts)
        pc.optim.SGD(0.5).minimize(loss, [layer.weight])
        pc.output("loss", loss)
    return job


@pytest.mark.parametrize("zero", [0, 2])
def test_the_gradient_of_a_parameter_used_in_pieces_is_reduced_once(zero):
    compilation = compiled(projections(pieces=True), zero=zero)
    assert collectives(compilation) == collectives(compiled(projections(pieces=False), zero=zero))
    expected = losses(projections(pieces=True, ranks=1), 5)
    assert expected[4] < expected[0]
    np.testing.assert_allclose(losses(projections(pieces=True), 5, zero=zero), expected, rtol=1e-5)
