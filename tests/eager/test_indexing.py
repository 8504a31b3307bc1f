"""`x[index]` and `x[index] = value` against NumPy, in layouts, jobs, traces, and with gradients."""

from __future__ import annotations

import random

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import AttributeValueError, ExecutionError, IndexingError, TracingError

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
A = np.arange(2 * 3 * 4 * 5, dtype=np.float64).reshape(2, 3, 4, 5)
MASK = A[0, 0] % 3 == 0
ENTRIES = [
    0,
    -1,
    slice(None),
    slice(None, None, -1),
    slice(3, 0, -2),
    slice(1, 3),
    slice(5, 2),
    None,
    Ellipsis,
    np.array([0, 2, -1]),
    np.array([[1], [0]]),
    [0, 1],
    np.array(1),
    [True, False, True],
    MASK,
]


def indices(seed, count):
    """Random indices that NumPy takes, and those that it refuses, with what NumPy gives."""
    chosen = random.Random(seed)
    for _ in range(count):
        index = tuple(chosen.choice(ENTRIES) for _ in range(chosen.randint(1, 5)))
        try:
            yield index, A[index]
        except IndexError:
            yield index, None


def ours(index, placement):
    return tuple(
        pc.tensor(entry, placement) if isinstance(entry, np.ndarray) else entry for entry in index
    )


def test_random_indices_read_and_write_as_numpy_does():
    written = 0
    rng = np.random.default_rng(1)
    for index, part in indices(0, 300):
        x, mine = pc.tensor(A, ALONE), ours(index, ALONE)
        if part is None:
            with pytest.raises((IndexError, ExecutionError)):
                x[mine]
            continue
        got = x[mine].numpy()
        assert got.shape == part.shape
        np.testing.assert_array_equal(got, part, err_msg=str(index))
        expected = A.copy()
        for value in (7.0, rng.normal(size=part.shape), rng.normal(size=part.shape[1:])):
            expected[index] = value
            x[mine] = value if isinstance(value, float) else pc.tensor(value, ALONE)
            np.testing.assert_array_equal(x.numpy(), expected, err_msg=str(index))
        put = pc.index_put(pc.tensor(A, ALONE), mine, 7.0).numpy()
        np.testing.assert_array_equal(put[index], part * 0 + 7.0)
        written += 1
    assert written > 100


@pytest.mark.parametrize("sbp", ["S(0)", "S(2)", "P", "B"])
def test_split_tensors_are_indexed_alike(sbp):
    def rank():
        x, places = pc.tensor(A, PAIR, sbp), pc.tensor([1, 0, 1], PAIR, "S(0)")
        np.testing.assert_array_equal(x[places].numpy(), A[[1, 0, 1]])
        np.testing.assert_array_equal(x[:, [2, 0], ::-1].numpy(), A[:, [2, 0], ::-1])
        mask = pc.tensor(A % 7 == 0, PAIR, "S(1)")
        np.testing.assert_array_equal(x[mask].numpy(), A[A % 7 == 0])
        y = pc.tensor(A, PAIR, sbp)
        y[mask] = -1.0
        y[places, 1] = 5.0
        expected = A.copy()
        expected[A % 7 == 0] = -1.0
        expected[[1, 0, 1], 1] = 5.0
        np.testing.assert_array_equal(y.numpy(), expected)
        distinct = pc.unique(pc.tensor([3, 1, 3, 2], PAIR, "S(0)"))
        assert distinct.values.numpy().tolist() == [1, 2, 3]
        assert distinct.counts.numpy().tolist() == [1, 1, 2]
        rows = np.array([[2, 1], [-1, 4], [2, 0], [2, 1]])
        for axis in (0, 1):
            distinct = pc.unique(pc.tensor(rows, PAIR, "S(0)"), axis=axis)
            expected = np.unique(
                rows, axis=axis, return_index=True, return_inverse=True, return_counts=True
            )
            for got, right in zip(distinct, expected, strict=True):
                np.testing.assert_array_equal(got.numpy(), np.reshape(right, got.shape))
        assert [row.numpy().tolist() for row in pc.tensor([[1], [2]], PAIR, "S(0)")] == [[1], [2]]

    pc.eager.spawn(rank, 2)


def test_jobs_and_compiled_functions_index_with_known_sizes():
    with pc.job("indexed") as job:
        x = pc.input("x", (4, 3), "float32", PAIR, "S(0)")
        ids = pc.input("ids", (2,), "int64", PAIR, "B")
        pc.output("rows", x[ids, ::-1])
        pc.output("put", pc.index_put(x, ids, 0.0))
        pc.output("places", pc.argwhere(x > 4.0, size=3, fill=-1))
        with pytest.raises(TracingError, match="known only when the program runs"):
            x[x > 4.0]
    values, picked = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([3, -4])
    with pc.run(job) as session:
        made = session.step(x=values, ids=picked)
    np.testing.assert_array_equal(made["rows"], values[picked, ::-1])
    zeroed = values.copy()
    zeroed[picked] = 0
    np.testing.assert_array_equal(made["put"], zeroed)
    np.testing.assert_array_equal(made["places"], np.argwhere(values > 4)[:3])

    @pc.compile
    def changed(x, ids):
        y = x * 1.0
        y[ids] = 0.0
        y[y > 9.0] = -1.0
        return y

    expected = np.where(zeroed > 9, -1, zeroed)
    given = pc.tensor(values, ALONE), pc.tensor(picked, ALONE)
    np.testing.assert_array_equal(changed(*given).numpy(), expected)


def test_gradients_flow_to_what_was_selected_and_put():
    x = pc.tensor(np.arange(4.0), ALONE, requires_grad=True)
    v = pc.tensor([10.0, 20.0], ALONE, dtype="float64", requires_grad=True)
    y = x * 2.0
    y[[1, -1]] = v
    (y[[0, 1, 1]] * pc.tensor([1.0, 2.0, 3.0], ALONE, dtype="float64")).sum().backward()
    assert x.grad is not None
    assert v.grad is not None
    assert x.grad.numpy().tolist() == [2.0, 0.0, 0.0, 0.0]
    values, places = pc.max_with_index(pc.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, -1.0]], ALONE))
    assert (values.numpy().tolist(), places.numpy().tolist()) == ([3.0, 2.0], [1, 0])
    assert v.grad.numpy().tolist() == [5.0, 0.0]


def test_wrong_indices_and_values_are_refused():
    x = pc.tensor(np.arange(6).reshape(2, 3), ALONE)
    for index in ((0, 0, 0), 2, "a", 0.5, (..., ...), pc.tensor([0.5], ALONE), ([0, 1], [0, 1, 2])):
        with pytest.raises(IndexingError):
            x[index]
    with pytest.raises(ExecutionError, match="outside its axis"):
        x[[2]]
    with pytest.raises(AttributeValueError, match="does not fit"):
        x[[0]] = pc.tensor([0.5], ALONE)
    with pytest.raises(pc.ShapeError, match="no rows"):
        iter(x.sum())


DTYPES = [dtype for dtype in pc.DType if dtype is not pc.DType.BFLOAT16]


def test_dtypes_mix_as_in_numpy():
    for one in DTYPES:
        for other in DTYPES:
            x, y = (pc.tensor(np.ones(2, each.numpy), ALONE) for each in (one, other))
            assert (x * y).dtype.numpy == np.result_type(one.numpy, other.numpy)
            assert pc.concat([x, y]).dtype.numpy == np.result_type(one.numpy, other.numpy)
    whole = pc.tensor([1, 2], ALONE)
    assert (whole / 2).numpy().tolist() == [0.5, 1.0]
    assert (whole**2).numpy().tolist() == [1, 4]
    assert (whole @ whole).item() == 5
    assert f"{whole.sum():03d}" == "003"
    assert np.isnan(pc.tensor(np.zeros((0, 2)), ALONE).mean(0).numpy()).all()
    with pytest.raises(pc.PlanCompilerError, match="negative power"):
        whole**-1
    with pc.strict_dtypes():
        for use in (lambda: whole + 1.5, lambda: whole / 2, lambda: whole * whole.cast("int32")):
            with pytest.raises(pc.DTypeError):
                use()


def test_the_namespace_of_the_array_api():
    xp = pc.tensor([1.0], ALONE).__array_namespace__(api_version="2024.12")
    assert xp is pc.array_api
    x = xp.asarray([[3, 1], [2, 2]])
    assert x.size == 4
    assert x.size() == (2, 2)
    assert x.device == x.to_device(x.device).device
    assert xp.unique_counts(x).counts.tolist() == [1, 2, 1]
    assert xp.sort(x, descending=True).tolist() == [[3, 1], [2, 2]]
    assert np.from_dlpack(x).tolist() == x.tolist()
    assert xp.result_type(xp.int32, xp.float32) is xp.float64
    with pytest.raises(pc.UsageError, match="version"):
        x.__array_namespace__(api_version="1999.1")
