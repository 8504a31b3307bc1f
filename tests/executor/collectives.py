"""The abstract collective suite: a plan per number of ranks with every case, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from plancompiler.executor.comm.collective import CHUNKED_BYTES_OF_TWO
from plancompiler.executor.comm.reduce import CHUNKED_BYTES
from plancompiler.ir import DType, Reduction
from plancompiler.ir.shard import balanced_range
from plancompiler.ir.task import Primitive
from plancompiler.plan.plan import Plan
from tests.executor.plans import Sketch

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)


@dataclass(frozen=True)
class Case:
    """One collective. `shape` is the whole tensor's: what the members hold follows from it."""

    primitive: Primitive
    shape: tuple[int, ...]
    dtype: str = "float32"
    reduction: Reduction | None = None
    src_axis: int = -1
    dst_axis: int = -1
    in_place: bool = False
    count: int = 1

    def piece(self, axis: int, members: int, member: int) -> tuple[slice, ...]:
        cut = slice(*balanced_range(self.shape[axis], members, member))
        return (*(slice(None),) * axis, cut)

    def input_shape(self, members: int, member: int) -> tuple[int, ...]:
        if self.src_axis < 0:
            return self.shape
        return np.empty(self.shape, bool)[self.piece(self.src_axis, members, member)].shape

    def output_shape(self, members: int, member: int) -> tuple[int, ...]:
        if self.dst_axis < 0:
            return self.shape
        return np.empty(self.shape, bool)[self.piece(self.dst_axis, members, member)].shape

    def reference(self, inputs: list[np.ndarray], member: int) -> np.ndarray:
        """What a member must get, computed on whole tensors."""
        members = len(inputs)
        if self.src_axis >= 0:
            value = np.concatenate(inputs, axis=self.src_axis)
        else:
            value = combine(inputs, self.reduction)
        if self.dst_axis >= 0:
            value = value[self.piece(self.dst_axis, members, member)]
        return value


def combine(inputs: list[np.ndarray], reduction: Reduction | None) -> np.ndarray:
    """Reduce in rank order; 16 bits through float32, averages of whole numbers rounded down."""
    dtype = inputs[0].dtype
    sums = reduction in (Reduction.SUM, Reduction.AVG)
    if DType.parse(dtype).is_half and (sums or reduction is Reduction.PROD):
        inputs = [one.astype(np.float32) for one in inputs]
    elif dtype.kind in "iub" and reduction is Reduction.AVG:
        inputs = [one.astype(np.int64) for one in inputs]
    operator = {
        Reduction.SUM: np.add,
        Reduction.AVG: np.add,
        Reduction.MAX: np.maximum,
        Reduction.MIN: np.minimum,
        Reduction.PROD: np.multiply,
    }[reduction]
    total = reduce(operator, inputs)
    if reduction is Reduction.AVG:
        divide = np.divide if total.dtype.kind == "f" else np.floor_divide
        total = divide(total, total.dtype.type(len(inputs)))
    return total.astype(dtype)


BIG = (3, CHUNKED_BYTES // 8 + 7)
"""float32 elements of twice the size from which an all_reduce is shared out; uneven."""

PIECES = (3, CHUNKED_BYTES_OF_TWO // 12 + 7)
"""float32 elements that two members share out too, in several pieces; uneven."""

CASES = [
    *(
        Case(Primitive.ALL_REDUCE, (5, 7), dtype, reduction)
        for dtype in DTYPES
        for reduction in Reduction
    ),
    *(Case(Primitive.ALL_REDUCE, BIG, dtype, Reduction.SUM) for dtype in DTYPES),
    *(Case(Primitive.ALL_REDUCE, BIG, "float16", reduction) for reduction in Reduction),
    *(Case(Primitive.ALL_REDUCE, shape, "float32", Reduction.SUM) for shape in [(), (1,), (0, 3)]),
    *(
        Case(Primitive.ALL_REDUCE, shape, dtype, reduction, in_place=True)
        for shape in [(5, 7), BIG, (0,)]
        for dtype, reduction in [
            ("float32", Reduction.SUM),
            ("float16", Reduction.AVG),
            ("int32", Reduction.PROD),
        ]
    ),
    Case(Primitive.ALL_REDUCE, BIG, "float32", Reduction.SUM, count=2),
    Case(Primitive.ALL_REDUCE, PIECES, "int32", Reduction.MAX, in_place=True),
    *(
        Case(Primitive.REDUCE_SCATTER, (5, 7, 3), dtype, reduction, dst_axis=axis)
        for axis in range(3)
        for dtype, reduction in [
            ("float32", Reduction.SUM),
            ("float16", Reduction.AVG),
            ("bool", Reduction.MAX),
            ("int64", Reduction.MIN),
            ("uint8", Reduction.AVG),
        ]
    ),
    Case(Primitive.REDUCE_SCATTER, (2, 3), "float32", Reduction.SUM, dst_axis=0),
    Case(Primitive.REDUCE_SCATTER, (301, 300), "float32", Reduction.SUM, dst_axis=1),
    Case(Primitive.REDUCE_SCATTER, (4, 0), "float32", Reduction.SUM, dst_axis=1),
    *(
        Case(Primitive.ALL_GATHER, (5, 7, 3), dtype, src_axis=axis)
        for axis in range(3)
        for dtype in DTYPES
    ),
    Case(Primitive.ALL_GATHER, (2, 3), "float32", src_axis=0),
    Case(Primitive.ALL_GATHER, (0, 3), "float32", src_axis=0, count=2),
    *(
        Case(Primitive.ALL_TO_ALL, (5, 7, 3), dtype, src_axis=src, dst_axis=dst)
        for src in range(3)
        for dst in range(3)
        if src != dst
        for dtype in ("bool", "float16", "int64")
    ),
    Case(Primitive.ALL_TO_ALL, (1, 2), "float32", src_axis=0, dst_axis=1),
    Case(Primitive.ALL_TO_ALL, (3, 200, 300), "float32", src_axis=2, dst_axis=1),
]


def collective_plans(members: int) -> dict[int, Plan]:
    """Every case on ranks 0 to members - 1, one after another."""
    sketch = Sketch(members)
    ranks = range(members)
    family = 0
    for number, case in enumerate(CASES):
        inputs = {
            rank: sketch.input(
                rank,
                family,
                f"x{number}.{rank}",
                case.input_shape(members, rank),
                case.dtype,
                count=case.count,
            )
            for rank in ranks
        }
        outputs = sketch.collective(
            ranks,
            family + 1,
            case.primitive,
            inputs,
            {rank: case.output_shape(members, rank) for rank in ranks},
            case.dtype,
            reduction=case.reduction,
            src_axis=case.src_axis,
            dst_axis=case.dst_axis,
            in_place=case.in_place,
            count=case.count,
        )
        for rank in ranks:
            sketch.output(rank, family + 2, f"y{number}.{rank}", outputs[rank])
            if case.in_place:
                # The next step's input goes over the result, so it waits until that was read.
                sketch.control(rank, family, family + 2)
        family += 3
    for rank in ranks:
        sketch.step_end(rank, family)
    return sketch.build()


def collective_feeds(members: int, seed: int) -> dict[str, np.ndarray]:
    """Random inputs of every case and rank."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for number, case in enumerate(CASES):
        for rank in range(members):
            shape = case.input_shape(members, rank)
            if case.dtype == "bool":
                value = rng.integers(0, 2, shape).astype(bool)
            elif DType.parse(case.dtype).is_floating:
                value = rng.normal(size=shape).astype(DType.parse(case.dtype).numpy)
            else:
                limits = np.iinfo(case.dtype)
                value = rng.integers(limits.min // 4, limits.max // 4, shape, case.dtype)
            feeds[f"x{number}.{rank}"] = np.asarray(value)
    return feeds


def check_collectives(
    members: int,
    feeds: dict[str, np.ndarray],
    outputs: dict[str, np.ndarray],
    ranks: Sequence[int] | None = None,
) -> None:
    """Compare every output of some ranks, or of all, with its reference, bit by bit."""
    ranks = range(members) if ranks is None else ranks
    assert len(outputs) == len(CASES) * len(ranks)
    for number, case in enumerate(CASES):
        inputs = [feeds[f"x{number}.{rank}"] for rank in range(members)]
        for rank in ranks:
            actual = outputs[f"y{number}.{rank}"]
            with np.errstate(all="ignore"):
                wanted = case.reference(inputs, rank)
            assert actual.dtype == wanted.dtype
            np.testing.assert_array_equal(actual, wanted, err_msg=f"{case} on rank {rank}")
