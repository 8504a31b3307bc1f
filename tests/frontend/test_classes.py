"""Training on samples of the classes: compiled and eager, against NumPy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import (
    AttributeValueError,
    DTypeError,
    ExecutionError,
    MicrobatchError,
    PlanCompilerError,
    ShapeError,
    UsageError,
)
from plancompiler.executor.local_run import LocalWorld
from plancompiler.lower.compile import compile_plans
from tests.frontend.test_split_losses import GRID, IGNORED, ROWS, dense_margin, mesh

RANDOM = np.random.default_rng(12)

# --- samples of classes ---------------------------------------------------------------------------

CLASSES, SAMPLES, DIM = 23, 3, 4
COUNTS = (8, 8, 7)
"""Classes of three ranges."""


def head(features, labels, weight, shards=None, num_samples=SAMPLES, classes=CLASSES):
    """The loss against a sample of the centers, and what was sampled."""
    sampled, places, sizes = pc.class_center_sample(labels, classes, num_samples, shards, key=5)
    rows = pc.class_center_rows(
        weight, sampled, sizes, classes if isinstance(classes, tuple) else None
    )
    loss = pc.margin_cross_entropy(pc.matmul(features, rows, transpose_b=True), places)
    return loss, sampled, places, rows, sizes


def inputs_of_head():
    features, weight = (
        each / np.linalg.norm(each, axis=1, keepdims=True)
        for each in (RANDOM.normal(size=(ROWS, DIM)), RANDOM.normal(size=(CLASSES, DIM)))
    )
    # Three of the first range, one of each of the others.
    return features, np.array([0, 18, 3, IGNORED, 9, 1]), weight


def dense_head(features, labels, weight, sampled, sizes, counts):
    """Loss and gradients from a sample, in NumPy."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    classes = np.repeat(starts, sizes) + sampled
    place = {int(each): number for number, each in enumerate(classes)}
    places = np.array([place.get(int(label), IGNORED) for label in labels])
    rows = weight[classes]
    dloss = np.full(len(labels), 1 / (labels != IGNORED).sum())
    losses, _, dcos = dense_margin(features @ rows.T, places, (1.0, 0.5, 0.0, 64.0), dloss)
    dweight = np.zeros_like(weight)
    dweight[classes] = dcos.T @ features
    return losses @ dloss, places, dcos @ rows, dweight


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_compiled_heads_sample_alike_on_every_layout(backend):
    features, labels, weight = inputs_of_head()
    place = mesh(3)
    seen = []
    for layouts in (("S(0)", "S(0)", "S(0)"), ("B", "B", "S(1)"), ("B", "S(0)", "B")):
        with pc.job("head", seed=3) as job:
            x = pc.input("x", features.shape, "float64", place, layouts[0])
            y = pc.input("y", labels.shape, "int64", place, layouts[1])
            w = pc.input("w", weight.shape, "float64", place, layouts[2])
            loss, sampled, places, _, sizes = head(x, y, w)
            dx, dw = pc.gradients(loss, [x, w])
            for name, value in zip(
                ("loss", "sampled", "places", "dx", "dw"),
                (loss, sampled, places, dx, dw),
                strict=True,
            ):
                pc.output(name, value)
        assert sizes == (3, 3, 3)
        with pc.run(job, ranks=3, backend=backend, cache=False) as session:
            steps = [session.step(x=features, y=labels, w=weight) for _ in range(2)]
        for result in steps:
            wanted = dense_head(features, labels, weight, result["sampled"], sizes, COUNTS)
            for name, expected in zip(("loss", "places", "dx", "dw"), wanted, strict=True):
                np.testing.assert_allclose(result[name], expected, 1e-9, 1e-12, err_msg=name)
        seen.append([result["sampled"].tolist() for result in steps])
        if backend == "processes":
            return
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] != seen[0][1]


def test_with_classes_split_neither_centers_nor_their_gradients_move():
    features, labels, weight = inputs_of_head()
    place = mesh(3)

    def rank():
        pc.manual_seed(3)
        x = pc.tensor(features, place, "S(0)", requires_grad=True)
        w = pc.tensor(weight, place, "S(0)", requires_grad=True)
        with pc.comm_trace() as trace:
            everyone = x.redistribute(sbp="B")
            loss, sampled, places, rows, sizes = head(everyone, pc.tensor(labels, place, "S(0)"), w)
        with pc.comm_trace() as back:
            loss.backward()
        layouts = [str(each.sbp) for each in (sampled, rows, w.grad)]
        values = [each.numpy() for each in (loss, places, x.grad, w.grad)]
        return trace, back, layouts, values, sampled.numpy(), sizes

    with pc.job("head", seed=3) as job:
        x = pc.input("x", features.shape, "float64", place)
        w = pc.input("w", weight.shape, "float64", place)
        pc.output("sampled", head(x, pc.input("y", (ROWS,), "int64", place), w)[1])
    with LocalWorld(compile_plans(job, 3, "rank_per_iter").plans) as world:
        compiled_sample = world.step({"x": features, "y": labels, "w": weight})["sampled"]
    for trace, back, layouts, values, sampled, sizes in spawn(rank, 3):
        assert layouts == ["[S(0)]"] * 3
        wanted = dense_head(features, labels, weight, sampled, sizes, COUNTS)
        for got, expected in zip(values, wanted, strict=True):
            np.testing.assert_allclose(got, expected, 1e-9, 1e-12)
        np.testing.assert_array_equal(sampled, compiled_sample)
        # Labels and features are gathered, three numbers per row reduced; of the centers nothing.
        assert trace.counts() == {"all_gather": 2, "all_reduce": 3}
        assert back.counts() == {"reduce_scatter": 1}
        assert back.nbytes() == features.nbytes


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_eager_samples_do_not_depend_on_the_number_of_ranks(ranks):
    features, labels, weight = inputs_of_head()

    def rank():
        pc.manual_seed(8)
        actual = head(
            *(pc.tensor(each, mesh(ranks), "S(0)") for each in (features, labels)),
            pc.tensor(weight, mesh(ranks), "S(0)"),
            shards=3,
        )
        return [each.numpy().tolist() for each in actual[1:3]], actual[0].item(), actual[4]

    alone = spawn(lambda: _alone(features, labels, weight), 1)[0]
    for sample, loss, sizes in spawn(rank, ranks):
        assert (sample, sizes) == (alone[0], (3, 3, 3))
        assert loss == pytest.approx(alone[1], rel=1e-9)


def _alone(features, labels, weight):
    pc.manual_seed(8)
    alone = head(*(pc.tensor(each, mesh(1)) for each in (features, labels, weight)), shards=3)
    return [each.numpy().tolist() for each in alone[1:3]], alone[0].item()


def test_eager_samples_grow_where_a_job_fails():
    features, labels, weight = inputs_of_head()
    labels[-2] = 2  # four of the first range, and none of the second
    place = mesh(3)

    def rank():
        pc.manual_seed(3)
        x, y, w = (pc.tensor(each, place, "S(0)") for each in (features, labels, weight))
        w.requires_grad = True
        loss, sampled, places, _, sizes = head(x, y, w)
        loss.backward()
        return [each.numpy() for each in (loss, places, w.grad)], sampled.numpy(), sizes

    for (loss, places, dw), sampled, sizes in spawn(rank, 3):
        assert sizes == (4, 3, 3)
        wanted = dense_head(features, labels, weight, sampled, sizes, COUNTS)
        for got, expected in zip((loss, places, dw), (*wanted[:2], wanted[3]), strict=True):
            np.testing.assert_allclose(got, expected, 1e-9, 1e-12)
    with pc.job("head") as job:
        x = pc.input("x", features.shape, "float64", place)
        w = pc.input("w", weight.shape, "float64", place)
        pc.output("loss", head(x, pc.input("y", (ROWS,), "int64", place), w)[0])
    with (
        LocalWorld(compile_plans(job, 3, "rank_per_iter").plans) as world,
        pytest.raises(ExecutionError, match="4 labels in range 0") as caught,
    ):
        world.step({"x": features, "y": labels, "w": weight})
    assert caught.value.report.op == "class_center_sample_0"
    assert "test_classes.py" in caught.value.report.source


def test_ranges_of_any_size():
    features, labels, weight = inputs_of_head()
    counts = (11, 0, 12)

    def rank():
        pc.manual_seed(3)
        x, y, w = (pc.tensor(each, mesh(3), "S(0)") for each in (features, labels, weight))
        w.requires_grad = True
        loss, sampled, places, _, sizes = head(x, y, w, classes=counts, num_samples=5)
        loss.backward()
        return [each.numpy() for each in (loss, places, w.grad)], sampled.numpy(), sizes

    for (loss, places, dw), sampled, sizes in spawn(rank, 3):
        assert sizes == (5, 0, 5)
        wanted = dense_head(features, labels, weight, sampled, sizes, counts)
        for got, expected in zip((loss, places, dw), (*wanted[:2], wanted[3]), strict=True):
            np.testing.assert_allclose(got, expected, 1e-9, 1e-12)


# --- training -------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arcface.py"
FACES, PIXELS = 40, 12


def faces():
    """Noisy pictures of 40 people."""
    rng = np.random.default_rng(0)
    people = rng.normal(size=(FACES, PIXELS))
    who = np.repeat(np.arange(FACES), 2)[rng.permutation(2 * FACES)]
    return (people[who] + 0.1 * rng.normal(size=(len(who), PIXELS))).astype(np.float32), who


class Recogniser(nn.Module):
    def __init__(self):
        self.embed = nn.Linear(PIXELS, 8)
        self.head = nn.PartialFC(8, FACES, 25, shards=2, scale=16.0)

    def forward(self, pictures, who):
        return self.head(self.embed(pictures), who)


def job_of_training(place, split):
    pictures, who = faces()
    with pc.job("faces", seed=1) as job:
        x = pc.input("x", pictures.shape, "float32", place, split)
        y = pc.input("y", who.shape, "int64", place, split)
        net = Recogniser().place(place, {"head.weight": split})
        loss = net(x, y)
        pc.optim.Adam(lr=0.02).minimize(loss)
        pc.output("loss", loss)
    return job


STEPS = 30


def test_a_sampled_head_learns_alike_on_one_rank_two_ranks_and_eagerly():
    pictures, who = faces()
    results = {}
    for name, place, split in (("one", mesh(1), "B"), ("two", mesh(2), "S(0)")):
        job = job_of_training(place, split)
        with LocalWorld(compile_plans(job, place.size, "rank_per_iter").plans) as world:
            results[name] = [
                float(world.step({"x": pictures, "y": who})["loss"]) for _ in range(STEPS)
            ]

    def rank(compiled):
        generator = pc.manual_seed(1)
        net = Recogniser().place(mesh(2), {"head.weight": "S(0)"})
        update = pc.optim.Adam(lr=0.02)
        x, y = pc.tensor(pictures, mesh(2), "S(0)"), pc.tensor(who, mesh(2), "S(0)")

        def learn(x, y):
            loss = net(x, y)
            update.minimize(loss)
            return loss

        step = pc.compile(learn) if compiled else learn
        losses = []
        for number in range(STEPS):
            generator.start_step(number)
            losses.append(step(x, y).item())
        net.eval()
        right = (net.head.cosines(net.embed(x)).argmax(-1).numpy() == who).mean()
        return losses, right, net(x, y).item()

    np.testing.assert_allclose(results["two"], results["one"], 2e-3)
    for losses, right, of_all in [*spawn(rank, 2, False), *spawn(rank, 2, True)]:
        np.testing.assert_allclose(losses, results["one"], 2e-3)
        assert losses[-1] < 0.4 * losses[0]
        assert right > 0.9
        # Against all classes the loss is greater than against a sample of them.
        assert of_all > 0.5 * losses[-1]


@pytest.mark.slow
def test_the_example_learns_alike_on_any_number_of_ranks():
    spec = importlib.util.spec_from_file_location("example_arcface", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def rank(ranks):
        return example.train(steps=40, ranks=ranks)

    ((one, right),) = spawn(rank, 1, 1)
    assert np.mean(one[-5:]) < 0.5 * np.mean(one[:5])
    # Of 80 classes, at random 1.25 %.
    assert right > 0.4
    for losses, actual in spawn(rank, 4, 4):
        np.testing.assert_allclose(losses, one, 1e-2)
        assert actual == pytest.approx(right, abs=0.02)


def test_micro_batches_need_the_labels_of_all():
    config = pc.Config(microbatches=2)
    with pc.job("head", config=config) as job:
        features = pc.nn.Linear(3, DIM).place(mesh(1))(pc.input("x", (4, 3), "float32", mesh(1)))
        labels = pc.input("y", (4,), "int64", mesh(1))
        pc.output("loss", nn.PartialFC(DIM, 9, 4).place(mesh(1))(features, labels))
    with pytest.raises(MicrobatchError, match="class_center_sample"):
        pc.run(job, 1, cache=False)


def test_a_split_head_with_micro_batches_is_the_head():
    pictures, who = faces()
    losses = []
    for microbatches in (1, 4):
        with pc.job("faces", seed=1, config=pc.Config(microbatches=microbatches)) as job:
            x = pc.input("x", pictures.shape, "float32", mesh(2))
            net = Recogniser().place(mesh(2), {"head.weight": "S(0)"})
            net.eval()
            loss = net(x, pc.input("y", who.shape, "int64", mesh(2)))
            pc.optim.SGD(lr=0.1).minimize(loss)
            pc.output("loss", loss)
        with pc.run(job, 2, cache=False) as session:
            losses.append([float(session.step(x=pictures, y=who)["loss"]) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], 1e-5)


SCRIPT = """
import sys
import numpy as np
import plancompiler as pc

world = pc.init()
mesh = pc.Placement("cpu", list(range(world.size)))
given = np.load(sys.argv[1])
x = pc.tensor(given["x"], mesh, "S(0)", requires_grad=True)
w = pc.tensor(given["w"], mesh, "S(0)", requires_grad=True)
pc.manual_seed(3)
labels = pc.tensor(given["y"], mesh, "S(0)")
sampled, places, sizes = pc.class_center_sample(labels, len(given["w"]), 6)
rows = pc.class_center_rows(w, sampled, sizes)
loss = pc.margin_cross_entropy(pc.matmul(x, rows, transpose_b=True), places)
loss.backward()
results = [each.numpy() for each in (loss, sampled, places, x.grad, w.grad)]
if world.rank == 0:
    np.savez(sys.argv[2], *results)
"""


@pytest.mark.processes
def test_ranks_that_are_processes_sample_and_learn_alike(tmp_path):
    features, labels, weight = inputs_of_head()
    script, given, out = (tmp_path / name for name in ("script.py", "given.npz", "out.npz"))
    script.write_text(SCRIPT)
    np.savez(given, x=features, y=labels, w=weight)
    words = [sys.executable, "-m", "plancompiler", "launch", "-n", "2", script, given, out]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    loss, sampled, places, dx, dw = np.load(out).values()
    wanted = dense_head(features, labels, weight, sampled, (6, 6), (12, 11))
    for got, expected in zip((loss, places, dx, dw), wanted, strict=True):
        np.testing.assert_allclose(got, expected, 1e-9, 1e-12)


# --- bad input ------------------------------------------------------------------------------------


def a(*shape):
    return pc.tensor(np.zeros(shape), mesh(1))


def labels_of(*values):
    return pc.tensor(np.array(values, np.int64), mesh(1))


BAD = {
    "a float label": (lambda: pc.class_center_sample(a(2), 5, 2), DTypeError, "labels"),
    "no samples": (
        lambda: pc.class_center_sample(labels_of(1), 5, 0),
        AttributeValueError,
        "at least 1",
    ),
    "half a sample": (lambda: pc.class_center_sample(labels_of(1), 5, 2.5), UsageError, "2.5"),
    "no range": (
        lambda: pc.class_center_sample(labels_of(1), 5, 2, shards=0),
        AttributeValueError,
        "range",
    ),
    "empty ranges": (
        lambda: pc.class_center_sample(labels_of(1), 2, 2, shards=3),
        AttributeValueError,
        "2 classes in 3 ranges",
    ),
    "two numbers of ranges": (
        lambda: pc.class_center_sample(labels_of(1), (2, 3), 2, shards=3),
        UsageError,
        "2 numbers",
    ),
    "a label beyond": (
        lambda: pc.class_center_sample(labels_of(1, 5), 5, 2),
        ExecutionError,
        "class_center_sample is no class.*Got: 5",
    ),
    "no sizes": (lambda: pc.class_center_rows(a(3, 2), labels_of(1), ()), UsageError, "none"),
    "a weight without rows": (
        lambda: pc.class_center_rows(a(), labels_of(1), (1,)),
        PlanCompilerError,
        "class_center_rows",
    ),
    "a margin of text": (
        lambda: pc.margin_cross_entropy(a(1, 3), labels_of(1), margin2="0.5"),
        UsageError,
        "margin2 of margin_cross_entropy.*'0.5'",
    ),
    "no scale": (
        lambda: pc.margin_cross_entropy(a(1, 3), labels_of(1), scale=float("inf")),
        UsageError,
        "scale of margin_cross_entropy.*inf",
    ),
    "an unknown reduction": (
        lambda: pc.margin_cross_entropy(a(1, 3), labels_of(1), reduction="max"),
        AttributeValueError,
        "mean, sum or none",
    ),
    "a class beyond": (
        lambda: pc.margin_cross_entropy(a(1, 3), labels_of(3)),
        ExecutionError,
        "margin_cross_entropy is no class.*Got: 3.*Expected: 0 to 2",
    ),
    "a label below": (
        lambda: pc.c_softmax_with_cross_entropy(a(1, 3), labels_of(-1)),
        ExecutionError,
        "is no class.*Got: -1",
    ),
    "labels of another shape": (
        lambda: pc.c_softmax_with_cross_entropy(a(1, 3), labels_of(1, 2)),
        ShapeError,
        "another shape for its labels",
    ),
    "labels that are numbers": (
        lambda: pc.c_softmax_with_cross_entropy(a(2, 3), a(2)),
        DTypeError,
        "labels",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, error, words = BAD[case]
    with pytest.raises(error, match=f"(?s){words}"):
        call()


def test_a_mesh_of_several_axes_needs_the_number_of_ranges():
    with pc.job("j"):
        labels = pc.input("y", (4,), "int64", GRID)
        with pytest.raises(UsageError, match="give shards"):
            pc.class_center_sample(labels, 9, 2)
        actual = pc.class_center_sample(labels, 9, 2, shards=3)
        assert actual.sizes == (2, 2, 2)
        pc.output("sampled", actual.sampled)
