"""Communication by name: the same functions on eager tensors and in jobs, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.boxing.build import build_boxing_task_graph
from plancompiler.boxing.infer_sbp import infer_sbp
from plancompiler.boxing.report import boxing_costs
from plancompiler.eager import current_world, spawn
from plancompiler.errors import (
    AttributeValueError,
    ExecutionError,
    PlacementMismatchError,
    ShapeError,
)

MESH = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
PAIR = pc.Placement("cpu", [[0, 1]], axes=("dp", "tp"))
ROWS, WIDTH, HIDDEN = 6, 4, 8
RNG = np.random.default_rng(3)
X = RNG.standard_normal((ROWS, WIDTH))
UP = RNG.standard_normal((WIDTH, HIDDEN))
DOWN = RNG.standard_normal((HIDDEN, WIDTH))


def moved(job: pc.Job) -> dict[str, list[int]]:
    """Bytes that the busiest rank receives, for each primitive that crosses ranks."""
    moved: dict[str, list[int]] = {}
    for cost in boxing_costs(build_boxing_task_graph(infer_sbp(job), 4)):
        if cost.bytes_per_rank:
            moved.setdefault(str(cost.primitive), []).append(cost.bytes_per_rank)
    return moved


# --- the all_reduce family ------------------------------------------------------------------------


def region(x, up, down):
    """A tensor-parallel region: gradients are reduced where it begins, values where it ends."""
    return pc.all_reduce(pc.relu(pc.all_reduce_gradient(x, "tp") @ up) @ down, "tp")


def dense_region() -> tuple[np.ndarray, np.ndarray]:
    """Value, and gradient by x of the sum of squares."""
    hidden = X @ UP
    out = np.maximum(hidden, 0) @ DOWN
    return out, ((2 * out @ DOWN.T) * (hidden > 0)) @ UP.T


def check_region(rank: int, mesh: pc.Placement = PAIR) -> tuple[dict[str, int], dict[str, int]]:
    """Collectives forward and backward."""
    out, grad = dense_region()
    x = pc.tensor(X, mesh, ["S(0)", "B"], requires_grad=True)
    up, down = pc.tensor(UP, mesh, ["B", "S(1)"]), pc.tensor(DOWN, mesh, ["B", "S(0)"])
    with pc.comm_trace() as forward:
        y = region(x, up, down)
    loss = (y * y).sum()
    with pc.comm_trace() as backward:
        loss.backward()
    if rank in mesh:
        assert y.sbp == x.sbp
        assert x.grad.sbp == x.sbp
        np.testing.assert_allclose(y.numpy(), out)
        np.testing.assert_allclose(x.grad.numpy(), grad)
    # Without the mirror image the gradient stays partial.
    x.grad = None
    y = pc.all_reduce(pc.relu(x @ up) @ down, "tp")
    (y * y).sum().backward()
    if rank in mesh:
        assert str(x.grad.sbp[1]) == "P"
        np.testing.assert_allclose(x.grad.numpy(), grad)
    return forward.counts(), backward.counts()


def test_a_tensor_parallel_region_eager():
    def run():
        return check_region(current_world().rank, MESH)

    assert spawn(run, 4) == [({"all_reduce": 1}, {"all_reduce": 1})] * 4


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_tensor_parallel_region_compiled(backend):
    out, grad = dense_region()
    with pc.job("region") as job:
        x = pc.input("x", X.shape, "float64", MESH, ["S(0)", "B"])
        up = pc.input("up", UP.shape, "float64", MESH, ["B", "S(1)"])
        down = pc.input("down", DOWN.shape, "float64", MESH, ["B", "S(0)"])
        y = region(x, up, down)
        (dx,) = pc.gradients((y * y).sum(), [x])
        pc.output("y", y)
        pc.output("dx", dx)
    reductions = moved(job)["all_reduce"]
    assert len(reductions) == 2  # the outputs are gathered: the batch stays split until then
    with pc.run(job, ranks=4, backend=backend) as session:
        outputs = session.step(x=X, up=UP, down=DOWN)
    np.testing.assert_allclose(outputs["y"], out)
    np.testing.assert_allclose(outputs["dx"], grad)


FAMILY = {
    "all_gather": (lambda x: pc.all_gather(x, "tp"), "S(0)", "B", "all_gather"),
    "all_to_all": (lambda x: pc.all_to_all(x, 1, "tp"), "S(0)", "S(1)", "all_to_all"),
    "reduce_scatter": (lambda x: pc.reduce_scatter(x, 0, "tp"), "P", "S(0)", "reduce_scatter"),
    "all_reduce": (lambda x: pc.all_reduce(x, "tp"), "P", "B", "all_reduce"),
    "all_reduce of maxima": (lambda x: pc.all_reduce(x, "tp"), "P(max)", "B", "all_reduce"),
}


@pytest.mark.parametrize("name", FAMILY)
def test_one_collective_each(name):
    function, before, after, collective = FAMILY[name]
    value = np.arange(21.0).reshape(7, 3)

    def run():
        x = pc.tensor(value, MESH, ["B", before], requires_grad=True)
        with pc.comm_trace() as trace:
            y = function(x)
        assert str(y.sbp) == f"[B, {after}]"
        np.testing.assert_array_equal(y.numpy(), value)
        y.backward(pc.tensor(value, MESH, y.sbp))
        np.testing.assert_array_equal(x.grad.numpy(), value)
        return trace.counts()

    assert spawn(run, 4) == [{collective: 1}] * 4
    if before == "P(max)":
        return
    line = pc.Placement("cpu", [0, 1], axes=("tp",))
    with pc.job("family") as job:
        x = pc.input("x", value.shape, "float64", line, "S(0)" if before == "S(0)" else "B")
        y = function(x if before == "S(0)" else pc.redistribute(x, sbp=before))
        pc.output("y", y)
    assert collective in moved(job)
    with pc.run(job, ranks=2) as session:
        np.testing.assert_array_equal(session.step(x=value)["y"], value)


def test_mesh_axes_that_are_not_there():
    def run():
        x = pc.tensor(X, MESH, ["S(0)", "B"])
        for along in ("pp", 2, None, True):
            with pytest.raises(AttributeValueError, match="a mesh axis is needed"):
                pc.all_gather(x, along)
        with pytest.raises(AttributeValueError, match="a mesh axis is needed"):
            pc.all_reduce(x, "pp")
        with pytest.raises(AttributeValueError, match="a mesh axis is needed"):
            pc.all_reduce_gradient(x, 2)
        for function in (pc.all_reduce, pc.all_gather, pc.reduce_scatter):
            with pytest.raises(AttributeValueError, match="a tensor is needed"):
                function(X)
        with pytest.raises(AttributeValueError, match="axes must be distinct and within"):
            pc.all_to_all(x, 2, "tp")

    spawn(run, 4)
    with pc.job("unnamed"):
        x = pc.input("x", X.shape, "float64", pc.Placement("cpu", [[0, 1], [2, 3]]))
        with pytest.raises(AttributeValueError, match="a mesh with named axes"):
            pc.all_gather(x, 0)
        pc.output("x", x)


# --- slices between stages ------------------------------------------------------------------------

SECOND = pc.Placement("cpu", [[2, 3]], axes=("dp", "tp"))
BESIDE = pc.Placement("cpu", [[1, 2]], axes=("dp", "tp"))


def check_transfer(
    shape: tuple[int, ...], rank: int, there: pc.Placement = BESIDE
) -> list[dict[str, int]]:
    """Bytes that this rank gives to each collective, forward and backward."""
    value = np.arange(float(np.prod(shape))).reshape(shape)
    x = pc.tensor(value, PAIR, requires_grad=True)
    with pc.comm_trace() as forward:
        y = pc.partial_transfer(x, there, "tp")
    assert y.placement == there
    with pc.comm_trace() as backward:
        y.backward(pc.tensor(value, there))
        x.grad.redistribute(sbp=x.sbp)  # whole: it need not be so far
    if rank in PAIR:
        np.testing.assert_array_equal(x.grad.numpy(), value)
    if rank in there:
        np.testing.assert_array_equal(y.numpy(), value)
    return [{each.op: each.nbytes for each in trace.collectives} for trace in (forward, backward)]


@pytest.mark.parametrize("shape", [(6, 4), (5, 3), (1,)])
def test_each_rank_sends_a_slice_eager(shape):
    by_rank = spawn(lambda: check_transfer(shape, current_world().rank, SECOND), 4)
    cut = [len(part) * 8 for part in np.array_split(np.arange(np.prod(shape)), 2)]
    for rank in range(4):
        slice_bytes = cut[rank % 2]
        sender, receiver = by_rank[rank] if rank < 2 else by_rank[rank][::-1]
        assert sender == {"exchange": slice_bytes}
        assert receiver == {"exchange": 0, "all_gather": slice_bytes}


def test_each_rank_sends_a_slice_compiled():
    """Of the bytes that cross to the other stage, each rank sends half; redistribute sends all."""

    def job_of(send):
        with pc.job("stages") as job:
            x = pc.input("x", X.shape, "float64", PAIR)
            w = pc.input("w", UP.shape, "float64", SECOND)
            y = send(x * 2.0) @ w
            (dx,) = pc.gradients((y * y).sum(), [x])
            pc.output("y", y)
            pc.output("dx", dx)
        return job

    job = job_of(lambda x: pc.partial_transfer(x, SECOND, "tp"))
    half, whole = X.nbytes // 2, X.nbytes
    assert moved(job) == {"exchange": [half, half], "all_gather": [half, half]}
    plain = job_of(lambda x: x.redistribute(SECOND))
    assert moved(plain) == {"exchange": [whole, whole]}
    with pc.run(job, ranks=4) as session:
        outputs = session.step(x=X, w=UP)
    np.testing.assert_allclose(outputs["y"], 2 * X @ UP)
    np.testing.assert_allclose(outputs["dx"], 8 * X @ UP @ UP.T)


def test_slices_are_sent_and_put_in_place_eager_and_compiled():
    """Slice 1 of 3 of x goes to the other stage, into y; each element's gradient comes from where
    it is read.
    """
    x, y = X, X + 100
    begin, end = X.size // 3, 2 * X.size // 3
    wanted = y.copy()
    wanted.reshape(-1)[begin:end] = x.reshape(-1)[begin:end]
    mask = np.zeros(X.size)
    mask[begin:end] = 1
    mask = mask.reshape(X.shape)

    def put(x, y):
        sent = pc.partial_recv(y, pc.partial_send(x, SECOND, 3, 1), 3, 1)
        return pc.partial_all_gather(sent, "tp")

    with pc.job("slices") as job:
        a = pc.input("a", x.shape, "float64", PAIR)
        b = pc.input("b", y.shape, "float64", SECOND)
        made = put(a, b)
        da, db = pc.gradients((made * made).sum(), [a, b])
        for name, value in (("made", made), ("da", da), ("db", db)):
            pc.output(name, value)
    with pc.run(job, ranks=4) as session:
        outputs = session.step(a=x, b=y)
    np.testing.assert_array_equal(outputs["made"], wanted)
    np.testing.assert_array_equal(outputs["da"], 2 * x * mask)
    np.testing.assert_array_equal(outputs["db"], 2 * y * (1 - mask))

    def program():
        made = put(pc.tensor(x, PAIR), pc.tensor(y, SECOND))
        return pc.array_equal(made, pc.tensor(wanted, SECOND))

    assert spawn(program, 4) == [True] * 4


def test_slices_that_do_not_exist_are_refused():
    x = pc.tensor(np.arange(5.0), pc.Placement("cpu", [0]))
    with pytest.raises(AttributeValueError, match="number of a slice"):
        pc.partial_send(x, x.placement, 2, 2)
    with pytest.raises(ShapeError, match="not slice 0 of 2"):
        pc.partial_recv(x, x, 2, 0)


def test_meshes_of_other_shapes_are_refused():
    def run():
        x = pc.tensor(X, PAIR)
        for wrong in (pc.Placement("cpu", [2, 3]), "cpu"):
            with pytest.raises(PlacementMismatchError, match="equally many axes"):
                pc.partial_transfer(x, wrong, "tp")

    spawn(run, 4)


# --- rows to experts ------------------------------------------------------------------------------

RANKS, EXPERTS, GROUP_ROWS, CAPACITY = 2, 4, 6, 3
COUNTS = np.array([[2, 0, 3, 1], [0, 3, 1, 0]])
TOKENS = RNG.standard_normal((RANKS, GROUP_ROWS, WIDTH))
EXPERT_WEIGHTS = RNG.standard_normal((EXPERTS, WIDTH, WIDTH))
LINE = pc.Placement("cpu", list(range(RANKS)))


def mixture(x, counts, weights):
    """[g, r, d] tokens sorted by expert, each times its expert's matrix [e, d, d]."""
    sent = pc.global_scatter(x, counts, CAPACITY)
    made = pc.einsum("gecd,edf->gecf", sent, weights)
    return pc.global_gather(made, counts, GROUP_ROWS)


def dense_mixture() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The value, and gradients by tokens and weights of the sum of squares."""
    out, dx = np.zeros_like(TOKENS), np.zeros_like(TOKENS)
    dw = np.zeros_like(EXPERT_WEIGHTS)
    for group in range(RANKS):
        experts = np.repeat(np.arange(EXPERTS), COUNTS[group])
        for row, expert in enumerate(experts):
            x, w = TOKENS[group, row], EXPERT_WEIGHTS[expert]
            out[group, row] = x @ w
            dx[group, row] = 2 * (x @ w) @ w.T
            dw[expert] += np.outer(x, 2 * (x @ w))
    return out, dx, dw


def check_mixture(rank: int) -> dict[str, int]:
    """Collectives forward and backward."""
    out, dx, dw = dense_mixture()
    x = pc.tensor(TOKENS, LINE, "S(0)", requires_grad=True)
    counts = pc.tensor(COUNTS, LINE, "S(0)")
    weights = pc.tensor(EXPERT_WEIGHTS, LINE, "S(0)", requires_grad=True)
    with pc.comm_trace() as trace:
        y = mixture(x, counts, weights)
        assert str(y.sbp) == "[S(0)]"
        loss = (y * y).sum()
        loss.backward()
    if rank in LINE:
        np.testing.assert_allclose(y.numpy(), out)
        np.testing.assert_allclose(x.grad.numpy(), dx)
        np.testing.assert_allclose(weights.grad.numpy(), dw)
    return trace.counts()


def test_a_mixture_of_experts_eager():
    counts = spawn(lambda: check_mixture(current_world().rank), RANKS)
    assert counts == [{"all_to_all": 4}] * RANKS


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_a_mixture_of_experts_compiled(backend):
    out, dx, dw = dense_mixture()
    with pc.job("mixture") as job:
        x = pc.input("x", TOKENS.shape, "float64", LINE, "S(0)")
        counts = pc.input("counts", COUNTS.shape, "int64", LINE, "S(0)")
        weights = pc.input("weights", EXPERT_WEIGHTS.shape, "float64", LINE, "S(0)")
        y = mixture(x, counts, weights)
        grads = pc.gradients((y * y).sum(), [x, weights])
        for name, value in zip(("y", "dx", "dw"), (y, *grads), strict=True):
            pc.output(name, value)
    assert len(moved(job)["all_to_all"]) == 4
    with pc.run(job, ranks=RANKS, backend=backend) as session:
        outputs = session.step(x=TOKENS, counts=COUNTS, weights=EXPERT_WEIGHTS)
        np.testing.assert_allclose(outputs["y"], out)
        np.testing.assert_allclose(outputs["dx"], dx)
        np.testing.assert_allclose(outputs["dw"], dw)
        if backend == "threads":
            with pytest.raises(ExecutionError, match="more rows of a group than"):
                session.step(x=TOKENS, counts=np.array([[4, 0, 0, 0]] * 2), weights=EXPERT_WEIGHTS)


def test_rows_beyond_the_capacity_can_be_dropped():
    def run():
        x = pc.tensor(TOKENS, LINE, "S(0)")
        counts = pc.tensor(COUNTS, LINE, "S(0)")
        sent = pc.global_scatter(x, counts, 1, overflow="drop")
        assert sent.shape == (RANKS, EXPERTS, 1, WIDTH)
        kept = np.zeros_like(TOKENS)
        for group in range(RANKS):
            firsts = np.cumsum(COUNTS[group]) - COUNTS[group]
            for first in firsts[COUNTS[group] > 0]:
                kept[group, first] = TOKENS[group, first]
        back = pc.global_gather(sent, counts, GROUP_ROWS, overflow="drop")
        np.testing.assert_array_equal(back.numpy(), kept)

    spawn(run, RANKS)


def test_counts_that_make_no_sense():
    def run(counts, capacity=CAPACITY, x=TOKENS, **more):
        pc.global_scatter(pc.tensor(x, LINE), pc.tensor(counts, LINE), capacity, **more)

    for counts, message in (
        ([[9, 0], [0, 0]], "do not fit its rows"),
        ([[1, -1], [0, 0]], "do not fit its rows"),
        ([[4, 0], [0, 0]], "more rows of a group than it has places for"),
    ):
        with pytest.raises(ExecutionError, match=message):
            spawn(run, RANKS, np.array(counts))
    for counts in ([[1, 1]], [1, 1]):
        with pytest.raises(ShapeError, match="its counts"):
            spawn(run, RANKS, np.array(counts))
    with pytest.raises(AttributeValueError, match="'overflow'"):
        spawn(lambda: run(COUNTS, overflow="wait"), RANKS)
    with pytest.raises(AttributeValueError, match="'capacity'"):
        spawn(run, RANKS, COUNTS, -1)
    with pytest.raises(ShapeError, match="groups of rows"):
        spawn(run, RANKS, COUNTS, 1, TOKENS[0, 0])
