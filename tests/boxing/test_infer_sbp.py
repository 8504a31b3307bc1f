"""Which signature an op gets."""

from __future__ import annotations

import plancompiler as pc
from plancompiler.boxing.infer_sbp import infer_sbp

MESH = pc.Placement("cpu", [0, 1])


def signatures(job: pc.Job) -> dict[str, str]:
    graph = infer_sbp(job)
    return {
        op.name: str(signature) for op, signature in zip(job.ops, graph.signatures, strict=True)
    }


def test_a_split_value_is_not_used_whole_because_somebody_gathered_it() -> None:
    with pc.job("square") as job:
        x = pc.input("x", (6, 6), "float32", MESH, "S(0)")
        pc.output("y", x @ x.redistribute(sbp="B"))
    assert signatures(job)["matmul_0"] == "[S(0)], [B] -> [S(0)]"


def test_scaling_and_adding_partial_values_reduces_nothing() -> None:
    with pc.job("linear") as job:
        x = pc.input("x", (4, 6), "float32", MESH, "S(1)")
        w = pc.input("w", (6, 5), "float32", MESH, "S(0)")
        pc.output("y", (x @ w) * 2.0 + (x @ w))
    found = signatures(job)
    assert found["matmul_0"] == "[S(1)], [S(0)] -> [P]"
    assert found["mul_scalar_0"] == "[P] -> [P]"
    assert found["add_0"] == "[P], [P] -> [P]"


def test_an_early_reader_shares_the_reduction_that_a_later_one_needs() -> None:
    with pc.job("share") as job:
        x = pc.input("x", (4, 6), "float32", MESH, "S(1)")
        w = pc.input("w", (6, 5), "float32", MESH, "S(0)")
        product = x @ w
        pc.output("sum", product.sum())
        pc.output("largest", product.relu().max())
    found = signatures(job)
    assert found["sum_0"] == "[B] -> [B]"
    assert found["relu_0"] == "[B] -> [B]"
