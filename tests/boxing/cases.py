"""Random boxing cases, proved against dense NumPy.

    python -m tests.boxing.cases 10000

A case is a shape, two placements of up to 8 ranks (equal, overlapping or disjoint, with one to
three mesh axes, on one or two device types), a layout on each, and a global value whose partial
parts differ on every device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from plancompiler.boxing.exchange import plan_boxing
from plancompiler.ir import BROADCAST, DType, NdSbp, Partial, Placement, Reduction, Split
from tests.boxing.simulation import apply_exchange, apply_step, assemble, scatter

MESHES = ((1,), (2,), (3,), (4,), (5,), (7,), (8,), (2, 2), (1, 3), (2, 3), (4, 2), (2, 2, 2))
SHAPES = ((4, 6), (5, 3), (1, 7), (2, 1), (8, 8), (3,), (16,), (), (0, 3), (2, 3, 5), (4, 2, 2))


@dataclass(frozen=True)
class Case:
    """One value to bring from one layout to another."""

    shape: tuple[int, ...]
    src: Placement
    src_sbp: NdSbp
    dst: Placement
    dst_sbp: NdSbp
    seed: int


def random_placement(rng: np.random.Generator) -> Placement:
    mesh = MESHES[rng.integers(len(MESHES))]
    return Placement("cpu", rng.permutation(8)[: int(np.prod(mesh))].reshape(mesh))


def random_sbp(rng: np.random.Generator, placement: Placement, ndim: int) -> NdSbp:
    entries = [BROADCAST, *map(Split, range(ndim)), *map(Partial, Reduction)]
    return NdSbp(tuple(entries[rng.integers(len(entries))] for _ in placement.hierarchy))


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    shape = SHAPES[rng.integers(len(SHAPES))]
    src = random_placement(rng)
    dst = src if rng.random() < 0.3 else random_placement(rng)
    if rng.random() < 0.1:
        dst = Placement("cuda", dst.ranks)
    return Case(
        shape,
        src,
        random_sbp(rng, src, len(shape)),
        dst,
        random_sbp(rng, dst, len(shape)),
        seed,
    )


def boxed(case: Case, array: np.ndarray) -> np.ndarray:
    """The value after boxing, computed shard by shard from the plan's steps."""
    shards = scatter(array, case.src, case.src_sbp, np.random.default_rng(case.seed))
    plan = plan_boxing(case.src, case.src_sbp, case.dst, case.dst_sbp, array.shape, DType.FLOAT64)
    for step in plan.before:
        shards = apply_step(step, shards, array.shape, case.src)
    if plan.exchange is not None:
        shards = apply_exchange(plan.exchange, shards)
    return assemble(shards, array.shape, case.dst, case.dst_sbp)


def check(case: Case) -> None:
    """Raise AssertionError where the boxed value is not the value."""
    rng = np.random.default_rng(case.seed)
    array = np.asarray(rng.integers(1, 9, size=case.shape), dtype=np.float64)
    np.testing.assert_allclose(boxed(case, array), array, rtol=1e-9, err_msg=str(case))


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for seed in range(count):
        check(random_case(seed))
    print(f"{count} boxing cases proved, 0 wrong, 0 refused")


if __name__ == "__main__":
    main()
