"""Eager tensors on CUDA devices: what they give on CPUs. The devices are simulated, on arrays that
refuse what CuPy refuses; `tests/executor/cuda/test_devices.py` has the same on real ones."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import InplaceError, PlacementMismatchError, UsageError
from plancompiler.ops import op_table
from tests.eager.test_ops import STRUCTURE, layout
from tests.eager.test_redistribute import ENTRIES, change_all, check_all
from tests.executor.cuda.devices import WHERE, spawn_on
from tests.executor.cuda.processes import shared_folder
from tests.ops.dense import SEED, STEP, gradients_of
from tests.ops.samples import samples
from tests.ops.samples_linalg import FREE_SIGNS
from tests.ops.sharding import run_dense

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.parametrize("where", WHERE)
ONE = pc.Placement("cuda", [0])
DATA = pc.Placement("cuda", [0, 1])
GRID = pc.Placement("cuda", [[0, 1], [2, 3]], axes=("dp", "tp"))
rng = np.random.default_rng(0)
X = rng.normal(size=(10, 7)).astype(np.float32)
Y = rng.integers(0, 5, 10)


def on_host(tensor):
    """This rank's own part as an array of the host."""
    return tensor.spec.space.get(tensor.local)


def on_device(array):
    """A host array as one of the device."""
    return pc.eager.current_world().space("cuda").put(array)


def lies_there(array):
    """Whether an array is one of the device."""
    return isinstance(array, pc.eager.current_world().space("cuda").arrays.ndarray)


# --- ops ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    kept, seen = [], {}
    for sample in samples(tmp_path_factory.mktemp("data"), np.float32):
        seen[sample.kind] = seen.get(sample.kind, 0) + 1
        if sample.kind not in STRUCTURE and seen[sample.kind] <= 2:
            kept.append(sample)
    return kept


def close(got, wanted, label):
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), label
    finite = wanted[np.isfinite(wanted)] if wanted.dtype.kind == "f" else np.empty(0)
    scale = float(np.max(np.abs(finite), initial=1.0))
    np.testing.assert_allclose(got, wanted, 2e-4, 2e-5 * scale, err_msg=label)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["S(0)", "P"])
def test_every_kind_gives_the_dense_result_forward_and_backward(
    where, calls, choice, record_property
):
    table = op_table()
    # As in each process that runs this test again.
    rng = np.random.default_rng(1)
    weights, vectors = {}, {}
    for number, sample in enumerate(calls):
        definition = table[sample.kind]
        if (
            sample.inputs
            and sample.differentiable
            and definition.gradient is not None
            and not definition.mutates
            and sample.kind != "stop_gradient"
        ):
            first = run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)[0]
            weights[number] = rng.normal(size=first.shape).astype(first.dtype)
            if sample.kind in FREE_SIGNS:
                vectors[number] = first

    def call(number, sample):
        """The outputs of a call and the gradients of its inputs."""
        entry = "B" if table[sample.kind].mutates else choice
        tensors = [
            pc.tensor(
                array,
                DATA,
                layout(entry, array, 1),
                requires_grad=number in weights and array.dtype.kind == "f",
            )
            for array in sample.inputs
        ]
        assert all(lies_there(each.local) for each in tensors)
        if tensors:
            outputs = tensors[0]._apply(sample.kind, tensors, sample.attrs)
        else:
            outputs = pc.eager.current_world().add(sample.kind, (), sample.attrs, DATA)
        assert all(lies_there(each.local) for each in outputs)
        results = [each.numpy() for each in outputs]
        if number in weights and outputs[0].requires_grad:
            weight = weights[number]
            if number in vectors:
                # Vectors of the other sign have the same gradient if their weights have it, too.
                weight = np.where(results[0] * vectors[number] < 0, -weight, weight)
            outputs[0].backward(pc.tensor(weight, DATA, layout(choice, weight, 1)))
        return results, [None if one.grad is None else one.grad.numpy() for one in tensors]

    def rank():
        world = pc.eager.current_world()
        generator = pc.manual_seed(SEED)
        results = []
        for number, sample in enumerate(calls):
            generator.start_step(STEP)
            world.step = STEP
            try:
                results.append(call(number, sample))
            except Exception as error:  # one run on GPUs tells of all kinds
                results.append(repr(error))
        return results

    wrong = []
    for number, (sample, result) in enumerate(zip(calls, spawn_on(where, rank, 2)[1], strict=True)):
        try:
            assert not isinstance(result, str), result
            outputs, grads = result
            expected = run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)
            for got, wanted in zip(outputs, expected, strict=True):
                if number in vectors:
                    got, wanted = np.abs(got), np.abs(wanted)
                close(got, wanted, "")
            if number in weights:
                given = [weights[number]] + [None] * (len(expected) - 1)
                wanted_grads = gradients_of(sample.kind, sample.inputs, sample.attrs, given)
                for got, wanted in zip(grads, wanted_grads, strict=True):
                    if wanted is None:
                        assert got is None
                    else:
                        close(got, wanted, "gradient")
        except AssertionError as error:
            wrong.append(f"{sample}: {error}")
    assert not wrong, "\n".join(wrong)
    record_property(f"eager_op_calls_on_devices_checked,_{choice}", len(calls))
    record_property(f"eager_gradients_on_devices_checked,_{choice}", len(weights))


# --- layouts --------------------------------------------------------------------------------------


def changes():
    """Pairs of a placement and a layout, before and after."""
    for before in ENTRIES:
        for after in ENTRIES:
            yield (DATA, before), (DATA, after)
    devices = pc.Placement("cuda", [1, 2])
    host = pc.Placement("cpu", [0, 1, 2])
    for before in ("S(0)", "B", "P", "P(max)", "P(avg)"):
        for after in ("S(1)", "B", "P"):
            yield (DATA, before), (devices, after)
            yield (DATA, before), (host, after)
            yield (host, before), (devices, after)


@pytest.mark.parametrize("shape", [(5, 7), (1, 3)], ids=str)
def test_every_change_of_layout_between_devices_and_hosts(where, shape, record_property):
    pairs = list(changes())

    def run(pairs, value, shards):
        actual = change_all(pairs, value, shards)
        x = pc.tensor(value, pc.Placement("cpu", [0, 1, 2]), "S(0)")
        moved = x.redistribute(DATA, "S(0)")
        assert lies_there(moved.local) == (pc.eager.current_world().rank in DATA)
        assert not lies_there(moved.redistribute(x.placement, "B").local)
        return actual

    check_all(
        pairs,
        np.random.default_rng(2).normal(size=shape),
        lambda _, ranks, *given: spawn_on(where, lambda: run(*given), ranks),
    )
    record_property(f"changes_of_layout_on_devices_proved,_{shape}", len(pairs))


# --- training -------------------------------------------------------------------------------------


LAYOUTS = {
    "one": ("S(0)", [0], {}),
    "data": ("S(0)", [0, 1], {}),
    "grid": (
        ["S(0)", "B"],
        [[0, 1], [2, 3]],
        {"0.weight": ["B", "S(0)"], "0.bias": ["B", "S(0)"], "3.weight": ["B", "S(1)"]},
    ),
    "sharded": ("S(0)", [0, 1], {"0.weight": "S(0)", "0.bias": "S(0)", "3.weight": "S(0)"}),
}
OPTIMIZERS = {
    "sgd": lambda: pc.optim.SGD(lr=0.1, momentum=0.9),
    "adamw": lambda: pc.optim.AdamW(lr=pc.optim.cosine(0.05, warmup=2, total=9)),
    "lamb": lambda: pc.optim.LAMB(lr=0.05),
}


def train(device_type, name, optimizer, compiled=False):
    sbp, ranks, parameters = LAYOUTS[name]
    placement = pc.Placement(device_type, ranks)
    generator = pc.manual_seed(4)
    layers = (nn.Linear(7, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.25), nn.Linear(12, 5))
    net = nn.Sequential(*layers)
    names = {key.replace("3.", "4."): value for key, value in parameters.items()}
    net.place(placement, names)
    update = OPTIMIZERS[optimizer]()
    x, y = pc.tensor(X, placement, sbp), pc.tensor(Y, placement, sbp)

    def learn(x, y):
        loss = pc.cross_entropy(net(x), y)
        update.minimize(loss, clip_norm=0.5)
        return loss

    step = pc.compile(learn) if compiled else learn
    losses = []
    for number in range(5):
        generator.start_step(number)
        losses.append(step(x, y).item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_are_those_of_one_cpu_on_every_layout(where, optimizer, compiled):
    expected = spawn(train, 1, "cpu", "one", optimizer)[0]
    assert expected[-1] != expected[0]
    for name, (_, ranks, _) in LAYOUTS.items():
        for losses in spawn_on(
            where, lambda name=name: train("cuda", name, optimizer, compiled), np.size(ranks)
        ):
            np.testing.assert_allclose(losses, expected, 1e-4, err_msg=name)


def test_the_same_seed_gives_the_same_bits_as_on_cpus(where):
    def draw(device_type):
        placement = pc.Placement(device_type, [0, 1])
        pc.manual_seed(3)
        x = pc.tensor(np.ones((5, 4), np.float32), placement, "S(0)")
        layer = nn.Linear(4, 3).place(placement, {"weight": "S(0)"})
        return [
            pc.dropout(x, 0.5).numpy(),
            pc.normal((3, 5), placement=placement).numpy(),
            layer.weight.value.numpy(),
        ]

    expected = spawn(draw, 2, "cpu")[0]
    for of_rank in spawn_on(where, lambda: draw("cuda"), 2):
        for number, (got, wanted) in enumerate(zip(of_rank, expected, strict=True)):
            if where == "real" and number == 1:
                # CUDA rounds logarithms and cosines in its own way.
                np.testing.assert_allclose(got, wanted, 1e-5, 1e-6)
            else:
                assert got.tobytes() == wanted.tobytes()


def test_float16_with_a_loss_scale(where):
    def run(device_type):
        placement = pc.Placement(device_type, [0, 1])
        pc.manual_seed(2)
        w = pc.tensor(np.full((7, 3), 0.1, np.float16), placement, "B", requires_grad=True)
        x = pc.tensor(X.astype(np.float16), placement, "S(0)")
        scale, update = pc.eager.LossScale(scale=2.0**15), pc.optim.SGD(lr=0.1)
        results = []
        for _ in range(6):
            loss = (x @ w).sum().cast("float32")
            scale.backward(loss)
            results.append((scale.step(update, [w]), scale.scale, loss.item()))
        return results

    expected = spawn(run, 2, "cpu")[0]
    assert {done for done, _, _ in expected} == {True, False}
    for of_rank in spawn_on(where, lambda: run("cuda"), 2):
        for got, wanted in zip(of_rank, expected, strict=True):
            assert got[:2] == wanted[:2]
            np.testing.assert_allclose(got[2], wanted[2], 1e-2)


def test_rows_of_experts_and_their_gradients(where):
    def run(device_type):
        rank = pc.eager.current_world().rank
        own = pc.Placement(device_type, [rank])
        counts = np.array([[1, 0, 2, 1], [0, 3, 1, 0]][rank])
        rows = np.arange(counts.sum() * 2, dtype=np.float32).reshape(-1, 2) + 10 * rank
        x = pc.tensor(rows, own, "B", requires_grad=True)
        sent, received = pc.eager.global_scatter(x, counts)
        back = pc.eager.global_gather(sent * (rank + 2), counts, received)
        (back * back).sum().backward()
        return on_host(sent), received, on_host(back), on_host(x.grad)

    expected = spawn(run, 2, "cpu")
    for got, wanted in zip(spawn_on(where, lambda: run("cuda"), 2), expected, strict=True):
        for left, right in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(left, right)


def test_checkpoints_move_between_hosts_and_devices(where, tmp_path):
    folder = tmp_path if where == "simulated" else shared_folder()

    def rank(save, device_type):
        pc.manual_seed(7 if save else 8)
        net = nn.Linear(7, 3).place(pc.Placement(device_type, [0, 1]), {"weight": "S(1)"})
        state = {"net": net.state_dict(), "epoch": 3 if save else 0}
        if save:
            pc.eager.save(folder / device_type, state, step=5)
        else:
            state = pc.eager.load(folder / ("cpu" if device_type == "cuda" else "cuda"), state)
        return net.weight.value.numpy(), state["epoch"]

    saved = spawn(rank, 2, True, "cpu") + spawn_on(where, lambda: rank(True, "cuda"), 2)
    loaded = spawn(rank, 2, False, "cpu") + spawn_on(where, lambda: rank(False, "cuda"), 2)
    for weight, epoch in saved + loaded:
        np.testing.assert_array_equal(weight, saved[0][0])
        assert epoch == 3


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["moe", "arcface", "fused_gpt"])
def test_examples_train_to_the_losses_of_one_cpu(where, name, compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    train = importlib.import_module(name).train
    sizes = {"tp": 2} if name == "fused_gpt" else {}

    def losses(losses):
        return losses if name == "fused_gpt" else losses[0]

    expected = losses(spawn(lambda: train(3, ranks=1), 1)[0])
    by_rank = spawn_on(
        where, lambda: losses(train(3, ranks=2, device="cuda", compiled=compiled, **sizes)), 2
    )
    np.testing.assert_allclose(by_rank, [expected] * 2, 1e-4)


# --- one tensor -----------------------------------------------------------------------------------


def test_views_and_changes_in_place(where):
    def rank():
        x = pc.tensor(X, ONE, requires_grad=False)
        row, turned, wide = x[2:4], x.transpose(1, 0), pc.expand(x[:1], (3, 7))
        assert row.is_view
        assert turned.is_view
        assert wide.is_view
        row += 1.0
        expected = X.copy()
        expected[2:4] += 1
        np.testing.assert_array_equal(x.numpy(), expected)
        np.testing.assert_array_equal((turned * 2).numpy(), expected.T * 2)
        np.testing.assert_allclose((turned @ x).numpy(), expected.T @ expected, 1e-5)
        turned *= 2.0
        np.testing.assert_array_equal(x.numpy(), expected * 2)
        with pytest.raises(InplaceError, match="share memory"):
            wide.fill_(0)
        w = pc.tensor(X, ONE, requires_grad=True)
        y = (w * 2.0).relu()
        y += w
        y.sum().backward()
        np.testing.assert_array_equal(w.grad.numpy(), 1 + 2 * (X > 0))
        assert "holds [[" in repr(x)
        return True

    assert spawn_on(where, rank, 1) == [True]


def test_changes_in_place_of_what_overlaps_and_of_empty_parts(where):
    def rank():
        x = pc.tensor(X, ONE if pc.eager.current_world().size == 1 else DATA, "B")
        with pc.no_grad():
            x[1:].copy_(x[:-1])
        expected = X.copy()
        expected[1:] = X[:-1]
        np.testing.assert_array_equal(x.numpy(), expected)
        row = pc.tensor(X[:1], DATA, "S(0)")  # the second rank has none of it
        row.fill_(3.0)
        row += 1.0
        np.testing.assert_array_equal(row.numpy(), np.full((1, 7), 4, np.float32))
        return True

    assert spawn_on(where, rank, 2) == [True] * 2


def test_arrays_of_the_device_are_taken_and_given(where):
    def rank():
        part = on_device(X[:5])
        x = pc.from_local(part, DATA, "S(0)")
        assert x.shape == (10, 7)
        part[...] = 0.0  # what was taken is a copy
        np.testing.assert_array_equal(on_host(x), X[:5])
        part = on_device(X[:5])
        whole = pc.tensor(part, DATA, "S(0)")
        assert lies_there(whole.to_local())
        np.testing.assert_array_equal(whole.numpy(), X[:5])
        ragged = on_device(X[: 2 - pc.eager.current_world().rank])
        assert pc.from_local(ragged, DATA, "S(0)", check=True).shape == (3, 7)
        return True

    assert spawn_on(where, rank, 2) == [True, True]


def test_what_cannot_be_is_refused(where):
    def rank():
        world = pc.eager.current_world()
        x, host = pc.tensor(X, ONE), pc.tensor(X, pc.Placement("cpu", [0]))
        with pytest.raises(PlacementMismatchError, match="one placement"):
            x + host
        with pytest.raises(UsageError, match=r"placement on CPUs"):
            pc.tensor(on_device(X), pc.Placement("cpu", [0]))
        with pytest.raises(UsageError, match="has a device already"):
            world.use_device("cuda:1")
        np.testing.assert_array_equal((x.redistribute(host.placement) + host).numpy(), X + X)
        return True

    assert spawn_on(where, rank, 1) == [True]
