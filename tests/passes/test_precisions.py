"""16-bit numbers: close losses and float32 masters with float16 and bfloat16 alike.

What one of them has alone is in `test_mixed_precision` and `test_bfloat16`.
"""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.ir import DType
from plancompiler.lower.compile import MODES, compile_plans
from plancompiler.passes import run_passes
from tests.examples import gpt
from tests.passes.worlds import (
    STEPS,
    arena,
    compiled,
    configured,
    float_dtypes,
    losses,
    mesh,
    tower_job,
)

pytestmark = pytest.mark.parametrize("precision", ["float16", "bfloat16"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ({"dp": 2}, {}),
        ({"dp": 2, "tp": 2}, {"zero": 1}),
        ({"dp": 2, "tp": 2}, {"zero": 3, "recompute": "auto"}),
        ({"dp": 2, "pp": 2}, {"zero": 2}),
        ({"dp": 2}, {"passes": ("mixed_precision", "fold", "cse", "fuse_elementwise", "dce")}),
    ],
)
def test_losses_are_close_to_those_of_one_rank(
    precision: str,
    layout: dict[str, int],
    settings: dict[str, object],
    one_rank: tuple[float, ...],
) -> None:
    actual = losses(gpt(**layout), STEPS, precision=precision, **settings)
    np.testing.assert_allclose(actual, one_rank, rtol=2e-2)
    assert tuple(actual) != one_rank


@pytest.mark.processes
def test_all_modes_give_the_same_plans(precision: str) -> None:
    job = configured(gpt(dp=2, pp=2), zero=3, precision=precision)
    assert len({compile_plans(job, 4, mode).digest for mode in MODES}) == 1


def test_each_kind_of_op_has_its_dtype(precision: str) -> None:
    asked = configured(gpt(layers=1), passes=("mixed_precision",), precision=precision)
    job, _ = run_passes(asked)
    half, single = DType.parse(precision), DType.FLOAT32
    for kind in ("matmul", "contract_leading", "gelu", "gelu_grad"):
        assert float_dtypes(job, kind) == {half}, kind
    for kind in (
        "layer_norm",
        "layer_norm_grad",
        "cross_entropy",
        "cross_entropy_grad",
        "guarded_adam_update" if precision == "float16" else "adam_update",
        "variable",
        "output",
    ):
        assert float_dtypes(job, kind) == {single}, kind
    # The residual stream stays in float32, biases are added in 16 bits.
    assert float_dtypes(job, "add") == {half, single}
    assert {value.dtype for value in job.outputs.values()} == {single}


def test_zero_gathers_in_16_bits(precision: str) -> None:
    job = tower_job(mesh(2), pc.optim.AdamW(1e-2))
    gathered = [
        family.outputs[0].dtype
        for family in compiled(job, zero=3, precision=precision).graph.families
        if family.transfer is not None and str(family.transfer.primitive) == "all_gather"
    ]
    assert set(gathered) == {DType.parse(precision)}
    assert len(gathered) >= 6


def test_activations_take_less_memory(precision: str) -> None:
    job = gpt(layers=4, length=32)
    assert arena(compiled(job, precision=precision)) < 0.9 * arena(compiled(job))
