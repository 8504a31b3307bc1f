"""State dicts, and checkpoints that eager and compiled programs share."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import CheckpointError, UsageError

ONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
rng = np.random.default_rng(0)
X = rng.normal(size=(8, 6)).astype(np.float32)
Y = rng.integers(0, 3, 8)


def parts(placement, layout):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))
    return net.place(placement, layout), pc.optim.AdamW(lr=0.05)


def losses(net, optimizer, placement, sbp, count):
    x, y = pc.tensor(X, placement, sbp), pc.tensor(Y, placement, sbp)
    losses = []
    for _ in range(count):
        loss = pc.cross_entropy(net(x), y)
        optimizer.minimize(loss)
        losses.append(loss.item())
    return losses


def everything(net, optimizer):
    generator = pc.default_generator().state()
    return {**net.state_dict(), "optimizer": optimizer.state_dict(), "generator": generator}


def test_training_goes_on_on_another_layout(tmp_path):
    folder = tmp_path / "checkpoint"

    def first():
        pc.manual_seed(3)
        net, optimizer = parts(PAIR, {"0.weight": "S(0)", "3.weight": "S(1)"})
        losses(net, optimizer, PAIR, "S(0)", 3)
        pc.eager.save(folder, everything(net, optimizer), step=3)
        return losses(net, optimizer, PAIR, "S(0)", 3)

    def second(placement, sbp, layout):
        pc.manual_seed(99)
        net, optimizer = parts(placement, layout)
        actual = pc.eager.load(folder, everything(net, optimizer))
        optimizer.load_state_dict(actual["optimizer"])
        pc.default_generator().load_state(actual["generator"])
        assert actual["optimizer"]["step"] == 3
        return losses(net, optimizer, placement, sbp, 3)

    expected = spawn(first, 2)[0]
    for placement, sbp, layout in (
        (ONE, "B", {}),
        (PAIR, "B", {"0.weight": "S(1)"}),
        (PAIR, "S(0)", {}),
    ):
        for actual in spawn(second, placement.size, placement, sbp, layout):
            np.testing.assert_allclose(actual, expected, 1e-4)


OPTIMIZERS = {
    "SGD": lambda **more: pc.optim.SGD(0.05, **more),
    "momentum": lambda **more: pc.optim.SGD(0.05, momentum=0.9, **more),
    "schedule": lambda **more: pc.optim.Adam(pc.optim.cosine(0.05, 2, 8), **more),
    "function": lambda **more: pc.optim.Adam(lambda step: 0.05 / (step + 1), **more),
    "AdamW": lambda **more: pc.optim.AdamW(0.05, **more),
    "Lion": lambda **more: pc.optim.Lion(0.01, **more),
    "LAMB": lambda **more: pc.optim.LAMB(0.05, **more),
    "Adafactor": lambda **more: pc.optim.Adafactor(0.05, **more),
    "DistributedFusedLamb": lambda **more: pc.optim.DistributedFusedLamb(0.05, **more),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_of_a_job_is_read_eagerly_and_back(name, tmp_path):
    """By a fresh model and optimizer, on another layout and number of ranks."""

    def made(placement, layout):
        net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).place(placement, layout)
        return net, OPTIMIZERS[name]()

    net, optimizer = made(PAIR, {"0.weight": "S(0)"})
    with pc.job("net", seed=5) as job:
        x, y = (
            pc.input(name, value.shape, str(value.dtype), PAIR, "S(0)")
            for name, value in (("x", X), ("y", Y))
        )
        loss = pc.cross_entropy(net(x), y)
        optimizer.minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, cache=False) as session:
        for _ in range(2):
            session.step(x=X, y=Y)
        session.save(tmp_path / "job")
        expected = [session.step(x=X, y=Y)["loss"] for _ in range(2)]

    other, fresh = made(ONE, {})
    _, state = pc.eager.load(tmp_path / "job", [other.state_dict(), fresh.state_dict()])
    assert state["step"] == 2
    fresh.load_state_dict(state)
    pc.eager.save(tmp_path / "eager", [other.state_dict(), fresh.state_dict()], step=2)
    np.testing.assert_allclose(losses(other, fresh, ONE, "B", 2), expected, 1e-4)
    with pc.run(job, restore=tmp_path / "eager", cache=False) as session:
        again = [session.step(x=X, y=Y)["loss"] for _ in range(2)]
    np.testing.assert_allclose(again, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_program_that_resumes_goes_on_exactly(name, tmp_path):
    """A fresh model and optimizer, made after other layers, read all that was saved."""

    def trained(net, optimizer, compiled=False):
        def step(x, y):
            loss = pc.cross_entropy(net(x), y)
            optimizer.minimize(loss)
            return loss

        run = pc.compile(step) if compiled else step
        x, y = pc.tensor(X, PAIR, "S(0)"), pc.tensor(Y, PAIR, "S(0)")
        return [run(x, y).item() for _ in range(3)]

    def rank():
        results = []
        for compiled in (False, True):
            folder = tmp_path / f"{compiled}"
            pc.manual_seed(3)
            layers = nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
            net = nn.Sequential(*layers).place(PAIR, {"0.weight": "S(0)"})
            optimizer = OPTIMIZERS[name]()
            trained(net, optimizer, compiled)
            pc.eager.save(folder, {"model": net.state_dict(), "opt": optimizer.state_dict()})
            rows = [trained(net, optimizer, compiled)]
            for given in (False, True):
                pc.manual_seed(99)
                other = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
                other.place(PAIR, {"0.weight": "S(0)"})
                if not given:
                    del net, optimizer, layers
                fresh = OPTIMIZERS[name](**({"parameters": other.parameters()} if given else {}))
                state = {"model": other.state_dict(), "opt": fresh.state_dict()}
                state = pc.eager.load(folder, state)
                assert state["opt"]["step"] == 3
                fresh.load_state_dict(state["opt"])
                rows.append(trained(other, fresh, compiled))
                net = optimizer = layers = None
                del other, fresh, state
            results.append(rows)
        return results

    for rows in spawn(rank, 2)[0]:
        assert rows[0] == rows[1] == rows[2]
        assert rows[0][0] != rows[0][2]


def test_rates_and_loss_scales_are_kept(tmp_path):
    def made():
        return nn.Linear(2, 1).place(ONE), pc.optim.SGD(0.1), pc.eager.LossScale(4.0, 2)

    def state():
        return {"net": net.state_dict(), "sgd": sgd.state_dict(), "scale": scale.state()}

    net, sgd, scale = made()
    sgd.lr = 0.25
    for _ in range(3):
        scale.backward(net(pc.tensor(np.ones((1, 2), np.float32), ONE)).sum())
        scale.step(sgd, net.parameters())
    pc.eager.save(tmp_path, state())
    net, sgd, scale = made()
    actual = pc.eager.load(tmp_path, state())
    sgd.load_state_dict(actual["sgd"])
    scale.load_state(actual["scale"])
    assert (sgd.lr, sgd.state_dict()["step"]) == (0.25, 3)
    assert (scale.scale, scale.good_steps) == (8.0, 1)


def test_the_loss_scale_of_a_job_is_read_as_numbers(tmp_path):
    net, adam = nn.Linear(4, 1).place(ONE), pc.optim.Adam(0.1)
    with pc.job("half", config=pc.Config(precision="float16")) as job:
        x = pc.input("x", (8, 4), "float32", ONE)
        loss = net(x).mean()
        adam.minimize(loss)
        pc.output("loss", loss)
    with pc.run(job, cache=False) as session:
        session.step(x=np.ones((8, 4), np.float32))
        session.save(tmp_path)
        kept = session.variables()
    fresh = pc.optim.Adam(0.1, parameters=net.parameters())
    with pytest.raises(CheckpointError, match="more than the state asks for") as caught:
        pc.eager.load(tmp_path, [net.state_dict(), fresh.state_dict()])
    names = "loss_scale", "loss_scale.good_steps", "loss_scale.skipped_steps"
    shown = f"{names[0]} float32[], {names[1]} int32[], {names[2]} int32[]"
    assert shown in str(caught.value)
    scale = dict(zip(names, (0.0, 0, 0), strict=True))
    *_, actual = pc.eager.load(tmp_path, [net.state_dict(), fresh.state_dict(), scale])
    assert actual == {name: kept[name] for name in scale}


def test_steps_that_a_job_skipped_are_not_counted_as_updates(tmp_path):
    # Adam's bias correction: of four steps two overflow, so the next update is the third one.
    net, adam = nn.Linear(2, 1, bias=False).place(ONE), pc.optim.Adam(0.1)

    def job(**config):
        with pc.job("half", config=pc.Config(**config)) as job:
            loss = net(pc.input("x", (1, 2), "float32", ONE)).sum()
            adam.minimize(loss)
            pc.output("loss", loss)
        return job

    feeds = [np.array([[1, 2]], np.float32), np.full((1, 2), 1e4, np.float32)]
    with pc.run(job(precision="float16", loss_scale=1024), cache=False) as session:
        for number in (0, 1, 1, 0):
            session.step(x=feeds[number])
        session.save(tmp_path)
        session.step(x=feeds[0])
        kept = session.variables()
    assert kept["loss_scale.skipped_steps"] == 2

    fresh = pc.optim.Adam(0.1, parameters=net.parameters())
    actual = pc.eager.load(tmp_path, [net.state_dict(), fresh.state_dict()], strict=False)[1]
    assert (actual["step"], actual["weight.missed"]) == (4, 2)
    fresh.load_state_dict(actual)
    net(pc.tensor(feeds[0], ONE)).sum().backward()
    fresh.step()
    assert fresh.state_dict().keys() == actual.keys()
    assert_allclose(net.weight.value.numpy(), kept["weight"], rtol=1e-6)
    pc.eager.save(tmp_path / "eager", fresh.state_dict())
    other = pc.optim.Adam(0.1, parameters=net.parameters())
    assert pc.eager.load(tmp_path / "eager", other.state_dict())["weight.missed"] == 2

    # A number of steps that does not tell is not read, by eager code or by a job without skips.
    plain = {"step": 0, **net.state_dict()}
    with pytest.raises(CheckpointError, match=r"skipped steps .*'step', and 2 skipped"):
        pc.eager.load(tmp_path, plain, strict=False)
    both = pc.eager.load(tmp_path, plain | {"loss_scale.skipped_steps": 0}, strict=False)
    assert (both["step"], both["loss_scale.skipped_steps"]) == (4, 2)
    with pytest.raises(CheckpointError, match=r"skipped steps .*skipped_steps' = 2"):
        pc.run(job(), restore=tmp_path, cache=False)
    with pc.run(job(), restore=tmp_path, cache=False, strict_restore=False) as session:
        assert session.variables()["weight"].shape == (1, 2)


def test_a_parameter_called_step_is_no_number_of_steps(tmp_path):
    step = pc.tensor(np.ones(2, np.float32), ONE)
    pc.eager.save(tmp_path, {"other": step}, step=7)
    with pytest.raises(CheckpointError, match="no variable for a part of the state"):
        pc.eager.load(tmp_path, {"step": step}, strict=False)


@pytest.mark.slow
def test_what_a_checkpoint_holds_is_restored_or_refused(tmp_path):
    def step(optimizer, *nets, **more):
        value = pc.tensor(np.ones((2, 3), np.float32), ONE)
        for net in nets:
            value = net(value)
        optimizer.minimize(value.sum(), **more)

    first, second, adam = nn.Linear(3, 3).place(ONE), nn.Linear(3, 3).place(ONE), pc.optim.Adam(0.1)
    step(adam, first, second, parameters=second.parameters())
    assert sorted(adam.state_dict()) == [
        *("bias.adam_m", "bias.adam_v", "step", "weight.adam_m", "weight.adam_v")
    ]
    pc.eager.save(tmp_path, {"net": second.state_dict(), "adam": adam.state_dict()})

    # Neither left out nor asked for too much.
    with pytest.raises(CheckpointError, match="more than the state asks for") as caught:
        pc.eager.load(tmp_path, {"net": second.state_dict()})
    assert "adam.bias.adam_m float32[3]" in str(caught.value)
    pc.eager.load(tmp_path, {"net": second.state_dict()}, strict=False)
    wider = pc.optim.Adam(0.1, parameters=[*first.parameters(), *second.parameters()])
    with pytest.raises(CheckpointError, match="no variable") as caught:
        pc.eager.load(tmp_path, {"net": second.state_dict(), "adam": wider.state_dict()})
    assert "adam.linear_1.weight.adam_m float32[3, 3]" in str(caught.value)

    # Of which of two models it is, a fresh optimizer has to be told.
    state = {"net": second.state_dict(), "adam": pc.optim.Adam(0.1).state_dict()}
    with pytest.raises(UsageError, match="cannot be told which parameters"):
        pc.eager.load(tmp_path, state)
    told = pc.optim.Adam(0.1, parameters=second.parameters())
    state = pc.eager.load(tmp_path, {"net": second.state_dict(), "adam": told.state_dict()})
    told.load_state_dict(state["adam"])
    actual, kept = told.state_dict(), adam.state_dict()
    assert actual.keys() == kept.keys()
    assert actual["weight.adam_m"].numpy().tolist() == kept["weight.adam_m"].numpy().tolist()

    # An optimizer of both has the names of both, whatever else the process has made.
    nn.Linear(3, 3).place(ONE).state_dict()
    both = pc.optim.Adam(0.1)
    step(both, first, second)
    assert "linear_1.weight.adam_m" in both.state_dict()
    for unlike, part in ((pc.optim.SGD(0.1), "adam_m"), (pc.optim.Lion(0.1), "lion_m")):
        step(unlike, second, parameters=second.parameters())
        with pytest.raises(UsageError, match="not the state of this optimizer") as caught:
            unlike.load_state_dict(kept)
        assert part in str(caught.value)
    before = kept["bias.adam_m"].numpy().tolist()
    with pytest.raises(UsageError, match="not the state of this optimizer") as caught:
        adam.load_state_dict({**kept, "bias.adam_m": kept["weight.adam_m"], "step": 9})
    assert "bias.adam_m float32[3, 3]" in caught.value.report.got
    assert "bias.adam_m float32[3]" in caught.value.report.expected
    actual = adam.state_dict()
    assert (actual["step"], actual["bias.adam_m"].numpy().tolist()) == (1, before)


def test_states_move_between_modules_of_other_layouts():
    def rank():
        pc.manual_seed(1)
        left, right = nn.Linear(4, 6).place(PAIR, {"weight": "S(0)"}), nn.Linear(4, 6).place(ONE)
        right.load_state_dict(left.state_dict())
        if pc.eager.current_world().rank == 0:
            return left.weight.value.redistribute(ONE, "B").numpy(), right.weight.value.numpy()
        left.weight.value.redistribute(ONE, "B")
        return None

    moved, taken = spawn(rank, 2)[0]
    np.testing.assert_array_equal(moved, taken)


def test_states_that_do_not_fit(tmp_path):
    net = nn.Linear(4, 6).place(ONE)
    with pytest.raises(UsageError, match="state of another module"):
        net.load_state_dict({"weight": net.weight.value, "scale": net.weight.value})
    before = net.weight.value.numpy().tolist()
    for name, other in (("weight", np.ones((6, 4))), ("bias", np.ones(7, np.float32))):
        given = {each: value * 0.0 for each, value in net.state_dict().items()}
        with pytest.raises(UsageError, match=f"does not fit '{name}'"):
            net.load_state_dict({**given, name: pc.tensor(other, ONE)})
        assert net.weight.value.numpy().tolist() == before
    with pytest.raises(UsageError, match="not the state of this optimizer"):
        pc.optim.AdamW(lr=0.1).load_state_dict({"step": 1, "nobody.m": net.weight.value})
    with pytest.raises(UsageError, match="tensors and numbers"):
        pc.eager.save(tmp_path, {"name": "text"})
    pc.eager.save(tmp_path, {"kept": pc.tensor([1.0, 2.0], ONE), "number": 0.5})
    with pytest.raises(CheckpointError, match="has no variable"):
        pc.eager.load(tmp_path, {"other": pc.tensor([1.0, 2.0], ONE)})
    with pytest.raises(CheckpointError, match="another shape"):
        pc.eager.load(tmp_path, {"kept": pc.tensor([1.0], ONE)})
    target = pc.tensor([0.0, 0.0], ONE)
    assert pc.eager.load(tmp_path, {"kept": target, "number": 0.0})["number"] == 0.5
    assert target.numpy().tolist() == [1.0, 2.0]
