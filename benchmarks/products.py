"""The matrix products of a training step, alone: what `benchmarks.step` compares a step with.

They have the shapes, layouts and order of one rank's plan: those of linear layers whole, those of
attention tile by tile, as its NumPy kernels make them. Every product has arrays of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import plancompiler as pc
from plancompiler.ir.shard import region_shape
from plancompiler.lower.compile import compile_plans
from plancompiler.ops.registry import KernelContext, op_def
from plancompiler.plan.plan import ComputeSpec

# Later than plancompiler, which chooses the kernels that NumPy loads.
import numpy as np  # isort: skip

LINEAR = ("matmul", "contract_leading")
ATTENTION = ("attention", "attention_grad")
KINDS = (*LINEAR, *ATTENTION)


def products_of(job: pc.Job, ranks: int, rank: int) -> list[Callable[[], object]]:
    """The products of one rank's step, each as a call."""
    plan = compile_plans(job, ranks, only_ranks=[rank]).plans[rank]
    specs = [task.spec for task in plan.tasks if isinstance(task.spec, ComputeSpec)]
    calls: list[Callable[[], object]] = []
    for spec in specs:
        if spec.kind not in KINDS:
            continue
        random = np.random.default_rng(0)
        inputs, outputs = (
            [random.normal(size=region_shape(region)).astype(np.float32) for region in regions]
            for regions in (spec.input_regions, spec.output_regions)
        )
        shapes, regions = (
            (spec.input_shapes, spec.output_shapes),
            (spec.input_regions, spec.output_regions),
        )
        definition = op_def(spec.kind)
        context = KernelContext(definition.complete(dict(spec.attrs)), *shapes, *regions)
        run = partial(definition.kernel, context, inputs, outputs)
        if spec.kind in LINEAR:
            calls.append(run)
        else:
            with _recorded() as made:
                run()
            calls += made
    return calls


@contextmanager
def _recorded() -> Iterator[list[Callable[[], object]]]:
    """The products that are made meanwhile; not those with a column of ones, which are sums."""
    matmul = np.matmul
    made: list[Callable[[], object]] = []

    def record(left: Any, right: Any, out: Any = None) -> Any:
        result = matmul(left, right, out=out)
        if right.shape[-1] > 1:
            made.append(partial(matmul, left, right, out=result))
        return result

    # The kernels multiply scratch arrays of their own, so no input or output sees all products.
    with mock.patch.object(np, "matmul", record):
        yield made
