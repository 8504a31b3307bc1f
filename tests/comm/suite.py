"""What every backend of communicators must do, as functions that each of `RANKS` ranks calls.

Each rank knows what all ranks give, and compares with plain NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from plancompiler.errors import AttributeValueError, ShapeError, TransportError, UsageError
from plancompiler.executor.comm.host_rendezvous import STAGING_BYTES
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.ir import DType, Reduction

RANKS = 3
SHAPES = ((), (0,), (7,), (3, 5))
DTYPES = tuple(DType)
LARGE = (40_000, STAGING_BYTES // 4 + 12_345)
"""Elements of float32: what the members share, and what takes several rounds."""


def given(rank: int, dtype: DType, shape: tuple[int, ...]) -> np.ndarray:
    """What a rank gives: small whole numbers, so that every dtype holds all results."""
    count = int(np.prod(shape))
    values = (np.arange(count) * (rank + 1) + rank) % 3 + (0 if dtype is DType.BOOL else 1)
    return values.reshape(shape).astype(dtype.numpy)


def expected(reduction: Reduction, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The reduction by plain NumPy, one rank after the other."""
    dtype = arrays[0].dtype
    if dtype.kind == "b":
        stacked = np.stack(arrays)
        some = reduction in (Reduction.SUM, Reduction.MAX)
        return stacked.any(axis=0) if some else stacked.all(axis=0)
    wide = np.int64 if dtype.kind in "iu" else np.float64
    stacked = np.stack([array.astype(wide) for array in arrays])
    total = {
        Reduction.SUM: stacked.sum(axis=0),
        Reduction.AVG: stacked.sum(axis=0),
        Reduction.MAX: stacked.max(axis=0),
        Reduction.MIN: stacked.min(axis=0),
        Reduction.PROD: stacked.prod(axis=0),
    }[reduction]
    if reduction is Reduction.AVG:
        total = total // len(arrays) if wide is np.int64 else total / len(arrays)
    return np.asarray(total).astype(dtype)


def same(results: object, wanted: np.ndarray) -> None:
    """Equal values, shapes and dtypes; averages are rounded as their dtype does."""
    assert isinstance(results, np.ndarray)
    assert (results.shape, results.dtype) == (wanted.shape, wanted.dtype)
    if DType.parse(wanted.dtype).is_floating:
        precision = {2: 1e-2, 4: 1e-6, 8: 1e-12}[wanted.dtype.itemsize]
        np.testing.assert_allclose(
            results.astype(np.float64), wanted.astype(np.float64), rtol=precision
        )
    else:
        np.testing.assert_array_equal(results, wanted)


def run(comm: CommContextManager) -> int:
    """Everything; returns the number of results compared."""
    cases = 0
    for part in (reductions, copies, pairs, large, byte_orders, together, streams, smaller_groups):
        cases += sum(1 for _ in part(comm))
    bad_input(comm)
    return cases


def reductions(comm: CommContextManager) -> Iterator[None]:
    group, rank = comm.context(range(RANKS)), comm.rank
    for dtype in DTYPES:
        for shape in SHAPES:
            arrays = [given(other, dtype, shape) for other in range(RANKS)]
            for reduction in Reduction:
                wanted = expected(reduction, arrays)
                yield same(group.all_reduce(arrays[rank], reduction), wanted)
                root = len(shape) % RANKS
                actual = group.reduce(arrays[rank], root, str(reduction))
                if rank == root:
                    yield same(actual, wanted)
                else:
                    assert actual is None
                for axis in range(len(shape)):
                    piece = np.array_split(wanted, RANKS, axis)[rank]
                    yield same(group.reduce_scatter(arrays[rank], axis, reduction), piece)


def copies(comm: CommContextManager) -> Iterator[None]:
    group, rank = comm.context(range(RANKS)), comm.rank
    everyone = range(RANKS)
    for dtype in DTYPES:
        for shape in SHAPES:
            arrays = [given(other, dtype, shape) for other in everyone]
            for root in everyone:
                actual = group.broadcast(arrays[root] if rank == root else None, root)
                yield same(actual, arrays[root])
            pieces = [given(other, dtype, (other, *shape)) for other in everyone]
            actual = group.scatter(pieces if rank == 1 else None, 1)
            yield same(actual, pieces[rank])
            sent = [[given(s + t, dtype, (s * t, *shape)) for t in everyone] for s in everyone]
            for source, came in enumerate(group.exchange(sent[rank])):
                yield same(came, sent[source][rank])
            for axis in range(len(shape)):
                # Parts of different extents along the axis.
                parts = [given(other, dtype, _with(shape, axis, other)) for other in everyone]
                whole = np.concatenate(parts, axis)
                yield same(group.all_gather(parts[rank], axis), whole)
                gathered = group.gather(parts[rank], 2, axis)
                if rank == 2:
                    yield same(gathered, whole)
                else:
                    assert gathered is None
                joint = (axis + 1) % len(shape)
                yield same(
                    group.all_to_all(arrays[rank], axis, joint),
                    np.concatenate(
                        [np.array_split(each, RANKS, axis)[rank] for each in arrays], joint
                    ),
                )
            flat = np.concatenate(
                [
                    each.reshape(-1)[place * each.size // RANKS : (place + 1) * each.size // RANKS]
                    for place, each in enumerate(arrays)
                ]
            )
            yield same(group.partial_all_gather(arrays[rank]), flat.reshape(shape))
    kept = np.arange(100_000, dtype=np.float64)
    actual = group.all_gather(kept)
    kept[:] = -1  # the result is no view of what was given
    group.barrier()
    yield same(actual, np.tile(np.arange(100_000, dtype=np.float64), RANKS))


def _with(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def pairs(comm: CommContextManager) -> Iterator[None]:
    """Rank 0 sends to rank 1, rank 2 to rank 0; whole arrays and slices of them."""
    group, rank = comm.context(range(RANKS)), comm.rank
    for source, target in ((0, 1), (2, 0)):
        for dtype in DTYPES:
            for shape in SHAPES:
                array = given(source, dtype, shape)
                if rank == source:
                    group.send(array, target)
                elif rank == target:
                    yield same(group.recv(source), array)
        for size in (0, 5, 12):
            for num in (1, 3):
                for place in range(num):
                    array = given(source, DType.FLOAT32, (size,))
                    if rank == source:
                        group.partial_send(array, target, num, place)
                    elif rank == target:
                        out = np.full((size,), -1, np.float32)
                        assert group.partial_recv(out, source, num, place) is out
                        wanted = np.full((size,), -1, np.float32)
                        cut = slice(place * size // num, (place + 1) * size // num)
                        wanted[cut] = array[cut]
                        yield same(out, wanted)


def large(comm: CommContextManager) -> Iterator[None]:
    group, rank = comm.context(range(RANKS)), comm.rank
    for size in LARGE:
        arrays = [given(other, DType.FLOAT32, (size,)) for other in range(RANKS)]
        total = expected(Reduction.SUM, arrays)
        yield same(group.all_reduce(arrays[rank]), total)
        yield same(group.all_reduce(arrays[rank], "max"), expected(Reduction.MAX, arrays))
        yield same(group.reduce_scatter(arrays[rank]), np.array_split(total, RANKS)[rank])
        parts = [each[: size - other] for other, each in enumerate(arrays)]
        yield same(group.all_gather(parts[rank]), np.concatenate(parts))
        yield same(group.broadcast(arrays[1] if rank == 1 else None, 1), arrays[1])
        for source, came in enumerate(
            group.exchange([arrays[rank][:other] for other in (9, size, 0)])
        ):
            yield same(came, arrays[source][: (9, size, 0)[rank]])


def byte_orders(comm: CommContextManager) -> Iterator[None]:
    """Arrays in the other byte order count by their values; results are in this machine's."""
    context, rank = comm.context(range(RANKS)), comm.rank
    if context.device_type != "cpu":
        return  # devices have one byte order
    for dtype in (DType.FLOAT16, DType.FLOAT64, DType.INT32):
        for shape in ((6,), (LARGE[0], 2)):
            arrays = [given(other, dtype, shape) for other in range(RANKS)]
            # One rank has them as they are: all must get the same.
            own = arrays[rank] if rank == 1 else _swapped(arrays[rank])
            total, whole = expected(Reduction.SUM, arrays), np.concatenate(arrays)
            yield same(context.all_reduce(own), total)
            yield same(context.reduce_scatter(own), np.array_split(total, RANKS)[rank])
            yield same(context.all_gather(own), whole)
            yield same(context.broadcast(own if rank == 0 else None, 0), arrays[0])
            yield same(context.scatter([own] * RANKS if rank == 2 else None, 2), arrays[2])
            pieces = [np.array_split(each, RANKS)[rank] for each in arrays]
            yield same(context.all_to_all(own), np.concatenate(pieces))
            for source, came in enumerate(context.exchange([own] * RANKS)):
                yield same(came, arrays[source])
            with context.group() as group:
                reduced = group.all_reduce(own)
                group.send(own, (rank + 1) % RANKS)
                received = group.recv((rank - 1) % RANKS)
            yield same(reduced.wait(), total)
            yield same(received.wait(), arrays[rank - 1])
    with pytest.raises(AttributeValueError, match="byte order"):
        context.partial_recv(_swapped(np.zeros(2)), (rank + 1) % RANKS, 1, 0)


def _swapped(array: np.ndarray) -> np.ndarray:
    """The same values in the other byte order."""
    return array.astype(array.dtype.newbyteorder("S"))


def together(comm: CommContextManager) -> Iterator[None]:
    """Operations started as one: the same results, and a ring of sends comes to its end."""
    context, rank = comm.context(range(RANKS)), comm.rank
    small = [given(other, DType.FLOAT16, (5,)) for other in range(RANKS)]
    big = [given(other, DType.FLOAT32, (LARGE[0],)) for other in range(RANKS)]
    right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
    out = np.zeros(4, np.int64)
    before = context.sequence
    with context.group() as group:
        works = [
            group.all_reduce(small[rank]),
            group.all_reduce(big[rank], "avg"),
            group.all_gather(small[rank][: rank + 1]),
            group.scatter([np.array([other]) for other in range(RANKS)] if rank == 2 else None, 2),
        ]
        group.send(small[rank], right)
        ring = group.recv(left)
        group.partial_send(np.arange(4), left, 2, 1)
        sliced = group.partial_recv(out, right, 2, 1)
        nothing = group.barrier()
        assert not any(work.done for work in (*works, ring, sliced, nothing))
        with pytest.raises(UsageError, match="when its block ends"):
            ring.wait()
    yield same(works[0].wait(), expected(Reduction.SUM, small))
    yield same(works[1].wait(), expected(Reduction.AVG, big))
    wanted = np.concatenate([each[: other + 1] for other, each in enumerate(small)])
    yield same(works[2].wait(), wanted)
    yield same(works[3].wait(), np.array([rank]))
    yield same(ring.wait(), small[left])
    assert sliced.wait() is out
    yield same(out, np.array([0, 0, 2, 3]))
    assert nothing.wait() is None
    assert context.sequence == before + 5  # sends and receives are those of pairs


def streams(comm: CommContextManager) -> Iterator[None]:
    """A communicator stream gives the same bits as the compute stream, beside it."""
    rng = np.random.default_rng(comm.rank)
    context = comm.context(range(RANKS))
    stream = comm.context(range(RANKS), on_compute_stream=False)
    assert comm.context(range(RANKS), on_compute_stream=False) is stream
    arrays = [rng.standard_normal(size).astype(np.float32) for size in (3, 1000, LARGE[0])]
    works = [stream.all_reduce(array) for array in arrays]
    works += [stream.reduce_scatter(array, 0, "avg") for array in arrays]
    right, left = (comm.rank + 1) % RANKS, (comm.rank - 1) % RANKS
    if comm.rank == 0:
        passed = stream.send(arrays[0], right), stream.recv(left)
    else:
        passed = stream.recv(left), stream.send(arrays[0], right)
    # Meanwhile, on the compute stream, in the other order:
    scattered = [context.reduce_scatter(array, 0, "avg") for array in arrays]
    reduced = [context.all_reduce(array) for array in arrays]
    for work, plain in zip(works, (*reduced, *scattered), strict=True):
        actual = work.wait()
        assert work.started.is_set()
        assert work.done
        np.testing.assert_array_equal(actual, plain)
        yield
    first = np.random.default_rng(left).standard_normal(3).astype(np.float32)
    yield same(passed[comm.rank == 0].wait(), first)
    passed[comm.rank != 0].wait()


def smaller_groups(comm: CommContextManager) -> Iterator[None]:
    """Groups are made in different orders on different ranks, and only by their members."""
    for pair in ((0, 1), (1, 2), (2, 0)) if comm.rank else ((2, 0), (0, 1)):
        if comm.rank in pair:
            comm.context(pair)
    for pair in ((0, 1), (1, 2), (2, 0)):
        if comm.rank in pair:
            actual = comm.context(pair).all_gather(np.array([comm.rank]))
            yield same(actual, np.array(pair))
    yield same(comm.context([comm.rank]).all_reduce(np.array([2.5])), np.array([2.5]))
    assert comm.context(range(RANKS)) is comm.context([0, 1, 2])


def bad_input(comm: CommContextManager) -> None:
    """Refused with what was got and expected; afterwards the group still works."""
    group, rank = comm.context(range(RANKS)), comm.rank
    x = np.arange(3)
    for wrong, message in (
        (lambda: group.all_reduce(x, "mean"), "unknown reduction"),
        (lambda: group.all_reduce([1, 2]), "takes an array"),
        (lambda: group.broadcast(None, 9), "no member"),
        (lambda: group.send(x, rank), "another rank than this one"),
        (lambda: group.exchange([x]), "a piece for each member"),
        (lambda: group.reduce_scatter(x, 1), "an axis that it does not have"),
        (lambda: group.partial_send(x, (rank + 1) % RANKS, 2, 2), "number of a slice"),
        (lambda: group.partial_recv(x[::2], (rank + 1) % RANKS, 1, 0), "contiguous"),
        (lambda: comm.context((rank, rank)), "distinct ranks"),
        (lambda: comm.context(((rank + 1) % RANKS,)), "this one among them"),
    ):
        with pytest.raises(AttributeValueError, match=message):
            wrong()
    for seconds in (0, -1.0, float("nan"), True, "soon"):
        with pytest.raises(AttributeValueError, match="number of seconds"):
            comm.deadline = seconds
    with pytest.raises(ShapeError, match="one shape") as raised:
        group.all_reduce(np.zeros(rank + 1))
    report = raised.value.report
    assert report.op == "all_reduce"
    assert ".py:" in str(report.source)  # on devices, of what adapts this suite
    assert "rank 2: float64[3]" in str(report.got)
    assert report.expected == "float64[1] on all, as rank 0 has it"
    with pytest.raises(ShapeError, match="joined along axis 0"):
        group.all_gather(np.zeros((1, rank)))
    with pytest.raises(TransportError, match=r"different calls.*rank 0: all_gather"):
        group.all_gather(x) if rank == 0 else group.all_reduce(x)
    with pytest.raises(TransportError, match=r"different calls.*of \(3,\).*of \(4,\)"):
        group.reduce_scatter(np.zeros(3 if rank == 0 else 4))
    same(group.all_reduce(x), RANKS * x)
