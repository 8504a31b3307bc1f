"""`pc.compile`: functions of eager tensors, run as plans, with the numbers of eager execution."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import ExecutionError, GradientError, TracingError, UsageError

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
FAR = pc.Placement("cpu", [2])


def on_pair(function, *args):
    return spawn(function, 2, *args)


def rank_number():
    return pc.eager.current_world().rank


# --- results and guards ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "sbp"), [(ALONE, "B"), (PAIR, "S(0)"), (PAIR, "P"), (GRID, ["S(1)", "P"])]
)
def test_results_are_those_of_eager_execution(placement, sbp):
    def function(x, w, scale):
        y = ((x @ w) * scale).relu()
        return {"y": y, "parts": [y.sum(), (y.softmax(-1), scale)], "same": x}

    def rank():
        x = pc.tensor(np.arange(15.0).reshape(5, 3) - 7, placement, sbp)
        w = pc.tensor(np.linspace(-1, 1, 12).reshape(3, 4), placement, ["B"] * placement.ndim)
        compiled = pc.compile(function)
        for scale in (2.0, 2.0, 0.5):
            got, wanted = compiled(x, w, scale=scale), function(x, w, scale)
            assert got["same"] is x
            assert got["parts"][1][1] == scale
            for one, other in (
                (got["y"], wanted["y"]),
                (got["parts"][0], wanted["parts"][0]),
                (got["parts"][1][0], wanted["parts"][1][0]),
            ):
                assert one.spec.type == other.spec.type
                assert not one.sbp.has_partial
                np.testing.assert_allclose(one.numpy(), other.numpy(), 1e-12)
        return len(compiled.programs())

    assert spawn(rank, placement.size) == [2] * placement.size


def test_a_program_is_made_per_kind_of_arguments():
    calls = []

    def rank():
        factor = 3.0

        @pc.compile
        def function(x, *rest, mode="sum"):
            calls.append(mode)
            return (x.sum() if mode == "sum" else x.max()) * factor

        def tensor(shape, dtype="float32", sbp="B", where=PAIR):
            return pc.tensor(np.ones(shape), where, sbp, dtype)

        kinds = [
            lambda: function(tensor(4)),
            lambda: function(tensor(4, sbp="S(0)")),
            lambda: function(tensor(5)),
            lambda: function(tensor(4, "float64")),
            lambda: function(tensor(4), mode="max"),
            lambda: function(tensor(4), 1),
            lambda: function(tensor(4), 1.0),
            lambda: function(tensor(4), True),
            lambda: function(tensor(4, where=pc.Placement("cpu", [1, 0]))),
        ]
        for _ in range(2):
            values = [kind().item() for kind in kinds]
        assert values == [12.0, 12.0, 15.0, 12.0, 3.0, 12.0, 12.0, 12.0, 12.0]
        factor = 2.0  # named by the function from around it
        assert function(tensor(4)).item() == 8.0
        return len(function.programs())

    assert on_pair(rank) == [10, 10]
    assert len(calls) == 20


def test_modules_keep_their_mode_and_parameters_are_passed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).place(ALONE)
    pc.manual_seed(1)
    x = pc.tensor(np.ones((2, 4), np.float32), ALONE)
    compiled = pc.compile(net)
    pc.manual_seed(1)
    training = compiled(x).numpy()
    net.eval()
    evaluated = compiled(x).numpy()
    assert (training == 0).any()
    assert not (evaluated == 0).any()
    np.testing.assert_allclose(evaluated, net(x).numpy(), 1e-6)
    with pc.no_grad():
        net.parameters()[0].value.fill_(0.0)
    np.testing.assert_allclose(compiled(x).numpy(), net(x).numpy(), 1e-6)
    pc.manual_seed(2)  # parameters are made anew
    np.testing.assert_allclose(compiled(x).numpy(), net(x).numpy(), 1e-6)
    compiled.close()


def test_tensors_around_the_function_are_looked_at_in_each_call():
    def rank():
        w = pc.tensor(np.ones(4), PAIR, "S(0)")
        compiled = pc.compile(lambda x: (x * w).sum())
        x = pc.tensor(np.arange(4.0), PAIR, "B")
        first = compiled(x).item()
        with pc.no_grad():
            w *= 2.0
        second = compiled(x).item()
        w = pc.tensor(np.full(4, 5.0), PAIR, "S(0)")
        return first, second, compiled(x).item()

    assert on_pair(rank) == [(6.0, 12.0, 30.0)] * 2


def test_a_compiled_function_inside_another_is_part_of_it():
    inner = pc.compile(lambda x: x * 2.0)
    outer = pc.compile(lambda x: inner(x) + 1.0)
    assert outer(pc.tensor([1.0], ALONE)).numpy().tolist() == [3.0]
    assert inner.programs() == []
    outer.close()


# --- state ----------------------------------------------------------------------------------------


def test_changes_in_place_reach_the_tensors():
    def function(x, state):
        state += x
        view = state.reshape(4)
        view *= 2.0
        state.detach().copy_(state + 1.0)
        return state, (view * 1.0).sum()

    def rank():
        results = []
        for run in (function, pc.compile(function)):
            x = pc.tensor(np.arange(4.0).reshape(2, 2), PAIR, "S(0)")
            state = pc.tensor(np.ones((2, 2)), PAIR, "S(0)")
            outside = state.reshape(4)
            for _ in range(3):
                same, total = run(x, state)
                assert same is state
            results.append([state.numpy(), outside.numpy(), total.numpy()])
        return results

    for eager, compiled in on_pair(rank):
        for one, other in zip(eager, compiled, strict=True):
            np.testing.assert_array_equal(one, other)


def test_tensors_can_be_exchanged():
    a, b = pc.tensor([1.0], ALONE), pc.tensor([2.0], ALONE)

    @pc.compile
    def exchange():
        kept = a * 1.0
        a.copy_(b)
        b.copy_(kept)

    exchange()
    assert (a.item(), b.item()) == (2.0, 1.0)
    exchange()
    assert (a.item(), b.item()) == (1.0, 2.0)
    exchange.close()


def test_a_partial_tensor_keeps_its_layout_when_it_is_changed():
    def rank():
        x = pc.tensor(np.arange(3.0), PAIR, "P")

        @pc.compile
        def double():
            with pc.no_grad():
                x.copy_(x * 2.0)

        double()
        double()
        return str(x.sbp), x.numpy().tolist()

    assert on_pair(rank) == [("[P]", [0.0, 4.0, 8.0])] * 2


def test_gradients_are_left_where_eager_execution_leaves_them():
    def function(x, w):
        ((x @ w) ** 2).mean().backward()

    def rank():
        results = []
        for run in (function, pc.compile(function)):
            x = pc.tensor(np.arange(8.0).reshape(4, 2), PAIR, "S(0)")
            w = pc.tensor(np.ones((2, 3)), PAIR, "B", requires_grad=True)
            for _ in range(4):
                run(x, w)
            first = w.grad.numpy()
            w.grad = None
            run(x, w)
            results.append((first, w.grad.numpy(), x.grad))
        return results

    for eager, compiled in on_pair(rank):
        np.testing.assert_allclose(compiled[0], eager[0], 1e-12)
        np.testing.assert_allclose(compiled[1], eager[1], 1e-12)
        assert compiled[2] is None


def test_gradients_of_gradients_and_hooks():
    @pc.compile
    def function(x):
        y = x * x * x
        y.register_hook(lambda grad: grad * 2.0)
        (first,) = pc.eager.grad(y.sum(), [x], create_graph=True)
        (second,) = pc.eager.grad(first.sum(), [x])
        return first, second, x.detach() * 2.0

    x = pc.tensor([1.0, 2.0], ALONE, requires_grad=True)
    first, second, third = function(x)
    assert first.numpy().tolist() == [6.0, 24.0]
    assert second.numpy().tolist() == [12.0, 24.0]
    assert third.numpy().tolist() == [2.0, 4.0]
    assert x.grad is None
    function.close()


def test_random_numbers_are_those_of_the_generator():
    def function(x):
        y = pc.dropout(x, 0.5)
        return y, pc.normal((3,), placement=x.placement), pc.dropout(y, 0.5, key=3)

    def rank(placement, sbp):
        results = []
        for run in (function, pc.compile(function)):
            generator = pc.manual_seed(9)
            x = pc.tensor(np.ones((6, 4)), placement, sbp)
            rows = []
            for step in (0, 0, 0, 5):
                if step:
                    generator.start_step(step)
                rows.append([each.numpy() for each in run(x)])
            results.append((rows, generator.state()))
        return results

    for placement, sbp in ((ALONE, "B"), (PAIR, "S(0)")):
        for (eager, state), (compiled, other) in spawn(rank, placement.size, placement, sbp):
            assert state == other
            assert not np.array_equal(compiled[0][0], compiled[1][0])
            for one, two in zip(eager, compiled, strict=True):
                for each, same in zip(one, two, strict=True):
                    np.testing.assert_array_equal(each, same)


def test_batch_statistics_are_kept():
    def rank():
        results = []
        x = pc.tensor(np.arange(24.0, dtype=np.float32).reshape(6, 4), PAIR, "S(0)")
        for wrap in (lambda function: function, pc.compile):
            pc.manual_seed(0)
            net = nn.BatchNorm1d(4).place(PAIR)
            run = wrap(lambda x, net=net: net(x))
            for _ in range(3):
                y = run(x)
            results.append([y.numpy(), net.running_mean.value.numpy()])
        return results

    for eager, compiled in on_pair(rank):
        for one, other in zip(eager, compiled, strict=True):
            np.testing.assert_allclose(other, one, 1e-5, 1e-6)


# --- meshes ---------------------------------------------------------------------------------------


def test_ranks_outside_and_other_meshes():
    def function(x):
        y = (x * 2.0).redistribute(FAR, "B")
        return x.sum(), y + 1.0

    def rank():
        x = pc.tensor(np.arange(4.0), PAIR, "S(0)")
        compiled = pc.compile(function)
        for _ in range(2):
            total, far = compiled(x)
        if rank_number() == 3:
            return None
        return far.numpy().tolist() if rank_number() == 2 else total.item()

    assert spawn(rank, 4) == [6.0, 6.0, [1.0, 3.0, 5.0, 7.0], None]


def test_training_over_two_meshes():
    """Stages on meshes of their own, whose gradients come back from one to the other."""

    def rank(wrap, first, second, sbp):
        pc.manual_seed(6)
        front, back = nn.Linear(5, 6).place(first), nn.Linear(6, 3).place(second)
        optimizer = pc.optim.AdamW(lr=0.05)
        rng = np.random.default_rng(0)
        x = pc.tensor(rng.normal(size=(4, 5)).astype(np.float32), first, sbp)
        y = pc.tensor(rng.integers(0, 3, 4), second, "B")

        def step(x, y):
            hidden = front(x).relu().redistribute(second, "B")
            loss = pc.cross_entropy(back(hidden), y)
            optimizer.minimize(loss)
            return loss

        step = wrap(step)
        losses = [step(x, y) for _ in range(4)]
        return [each.item() for each in losses] if rank_number() in second else None

    (expected,) = spawn(rank, 1, lambda function: function, ALONE, ALONE, "B")
    assert expected[-1] < expected[0]
    for wrap in (lambda function: function, pc.compile):
        by_rank = spawn(rank, 3, wrap, PAIR, FAR, "S(0)")
        assert by_rank[:2] == [None, None]
        np.testing.assert_allclose(by_rank[2], expected, 1e-5)


def test_a_compiled_method():
    class Scale(nn.Module):
        def __init__(self, factor):
            self.factor = nn.Parameter((), "float32", "constant", (factor,)).place(ALONE)

        @pc.compile
        def times(self, x, shift=float("nan")):
            return x * self.factor.value

    x = pc.tensor([1.0, 2.0], ALONE)
    two, three = Scale(2.0), Scale(3.0)
    for _ in range(2):
        assert two.times(x).numpy().tolist() == [2.0, 4.0]
        assert three.times(x, float("nan")).numpy().tolist() == [3.0, 6.0]
    assert len(Scale.times.programs()) == 2
    Scale.times.close()


def test_optional_tensors_and_lists_of_them():
    def function(image, kernels, biases, extra=None):
        results = [
            None if kernel is None else pc.conv2d(image, kernel, bias)
            for kernel, bias in zip(kernels, biases, strict=True)
        ]
        halves = pc.split(image, 2, axis=1)
        joined = pc.concat([each for each in (*halves, extra) if each is not None], 1)
        return results, joined

    def rank():
        rng = np.random.default_rng(0)
        image = pc.tensor(rng.normal(size=(4, 4, 5, 5)), PAIR, "S(0)", requires_grad=True)
        kernels = [pc.tensor(rng.normal(size=(2, 4, 3, 3)), PAIR), None]
        kernels.append(pc.tensor(rng.normal(size=(3, 4, 1, 1)), PAIR, "S(0)"))
        biases = [None, None, pc.tensor(rng.normal(size=3), PAIR)]
        results = []
        for wrap in (lambda function: function, pc.compile):
            (first, none, third), joined = wrap(function)(image, kernels, biases)
            assert none is None
            results.append([each.numpy() for each in (first, third, joined)])
        (first, _, third), _ = function(image, kernels, biases)
        (first.sum() + third.sum()).backward()
        return (*results, image.grad.numpy().shape)

    for eager, compiled, shape in on_pair(rank):
        assert shape == (4, 4, 5, 5)
        np.testing.assert_array_equal(eager[2].shape, (4, 4, 5, 5))
        for one, other in zip(eager, compiled, strict=True):
            np.testing.assert_allclose(one, other, 1e-10)


# --- what cannot be traced ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.numpy(),
        lambda x: x * x.sum().item(),
        lambda x: x * float(x.sum()),
        lambda x: x.to_local(),
        lambda x: (x * 1.0).local.sum(),
    ],
)
def test_numbers_are_not_there_while_tracing(function):
    x = pc.tensor([1.0, 2.0], ALONE)
    compiled = pc.compile(function)
    with pytest.raises(TracingError, match="not known while a function is compiled") as raised:
        compiled(x)
    assert "test_compile.py" in str(raised.value)
    assert "outside of the function" in str(raised.value)
    # Nothing is left behind by the attempt.
    assert (x * 2.0).numpy().tolist() == [2.0, 4.0]


def test_wrong_arguments():
    compiled = pc.compile(lambda x: x)
    with pytest.raises(UsageError, match="an array cannot be an argument"):
        compiled(np.ones(2))
    with pytest.raises(UsageError, match="neither be hashed nor taken apart"):
        compiled({1})
    with pytest.raises(UsageError, match="only a function"):
        pc.compile(3)
    with pytest.raises(UsageError, match=r"takes no such option.*zero.*fuse_bytes and streams"):
        pc.compile(lambda x: x, config=pc.Config(zero=1, streams="one"))
    with pytest.raises(UsageError, match="must be a Config"):
        pc.compile(config={"streams": "one"})


def test_a_compiled_function_with_a_config_by_decorator():
    @pc.compile(config=pc.Config(streams="one"))
    def double(x):
        return x * 2.0

    assert double(pc.tensor([1.0, 2.0], ALONE)).tolist() == [2.0, 4.0]
    assert double.programs()[0].config == pc.Config(streams="one")


def test_what_would_be_wrong_is_refused():
    w = pc.tensor([1.0, 2.0], ALONE, requires_grad=True)
    made = w * 2.0

    def reach(x):
        (x * made).sum().backward()

    x = pc.tensor([1.0, 1.0], ALONE)
    with pytest.raises(GradientError, match="reach beyond it"):
        pc.compile(reach)(x)
    assert w.grad is None

    def seeds():
        pc.manual_seed(3)
        return pc.normal((2,), placement=ALONE)

    pc.manual_seed(7)
    with pytest.raises(TracingError, match="another generator"):
        pc.compile(seeds)()
    assert pc.default_generator().state() == {"seed": 7, "step": 0, "number": 0}

    def twice(x):
        for _ in range(2):
            sgd.minimize((w * x).sum(), [w])

    sgd = pc.optim.SGD(lr=0.1)
    with pytest.raises(TracingError, match=r"changed twice|steps twice"):
        pc.compile(twice)(x)
    base = pc.tensor([1.0, 2.0], ALONE)
    view = base.reshape(2, 1)

    def shared(x):
        base.copy_(x)
        return view * 1.0

    with pytest.raises(TracingError, match="whose memory it also reads"):
        pc.compile(shared)(x)


def test_results_are_on_the_tape():
    """Through modules, random ops and what was recorded before: as without compiling."""

    def rank(placement, sbp):
        results = []
        for wrap in (lambda function: function, pc.compile):
            pc.manual_seed(2)
            net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).place(placement)
            x = pc.tensor(np.ones((4, 3), np.float32), placement, sbp, requires_grad=True)
            run = wrap(lambda x, net=net: [net(x), (x * 2.0).sum(), x.detach()])
            values = []
            for _ in range(2):
                first, second, third = run(x * 3.0)
                assert not third.requires_grad
                loss = (first * first).mean() + second
                loss.backward()
                values += [loss.numpy(), x.grad.numpy()]
            values += [each.value.grad.numpy() for each in net.parameters()]
            first, _, _ = run(x)
            (only,) = pc.eager.grad(first.sum(), [x])
            results.append([*values, only.numpy()])
        return results

    for placement, sbp in ((ALONE, "B"), (PAIR, "S(0)")):
        for eager, compiled in spawn(rank, placement.size, placement, sbp):
            for one, other in zip(eager, compiled, strict=True):
                np.testing.assert_allclose(other, one, 1e-5, 1e-6)


def test_gradients_of_results_that_would_be_wrong_are_refused():
    x = pc.tensor([1.0], ALONE, requires_grad=True)
    state = pc.tensor([1.0], ALONE)

    @pc.compile
    def changes(x):
        with pc.no_grad():
            state.copy_(x)
        return (x * 2.0).sum()

    with pytest.raises(GradientError, match="that changes tensors cannot be differentiated"):
        changes(x).backward()
    double = pc.compile(lambda x: (x * 2.0).sum())
    with pytest.raises(GradientError, match="differentiated in turn"):
        pc.eager.grad(double(x), [x], create_graph=True)
    loss = double(x)
    with pc.no_grad():
        x += 1.0
    with pytest.raises(GradientError, match="changed in place"):
        loss.backward()
    with pc.no_grad():
        assert not double(x).requires_grad
    changes.close()
    double.close()


def test_ranks_that_trace_different_things_are_told():
    def rank():
        number = rank_number()
        x = pc.tensor(np.ones(4), PAIR, "S(0)")
        pc.compile(lambda x: (x * 2.0).sum() if number else x.sum())(x)

    with pytest.raises(TracingError, match="different jobs"):
        on_pair(rank)


def test_a_rank_that_fails_stops_the_others():
    def rank():
        x = pc.tensor(np.ones(4), PAIR, "S(0)")
        compiled = pc.compile(lambda x: x.sum() * 2.0)
        compiled(x)
        if rank_number():
            raise ValueError("broken on purpose")
        compiled(x).item()

    with pytest.raises((ValueError, ExecutionError), match="broken on purpose"):
        on_pair(rank)


# --- processes ------------------------------------------------------------------------------------

SCRIPT = """
import sys
import threading
import numpy as np
import plancompiler as pc
from plancompiler import nn

world = pc.init()
mesh = pc.Placement("cpu", list(range(world.size)))
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).place(mesh)
optimizer = pc.optim.AdamW(lr=0.05)

@pc.compile
def step(x, y):
    loss = pc.cross_entropy(net(x), y)
    optimizer.minimize(loss)
    return loss

rng = np.random.default_rng(0)
x = pc.tensor(rng.normal(size=(9, 5)).astype(np.float32), mesh, "S(0)")
y = pc.tensor(rng.integers(0, 3, 9), mesh, "S(0)")
losses = [step(x, y).item() for _ in range(4)]
sys.stdout.write(" ".join(f"{loss:.5f}" for loss in losses) + "\\n")
sys.stdout.flush()
"""


@pytest.mark.processes
def test_ranks_as_processes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    results = []
    for ranks in (1, 2):
        done = subprocess.run(
            [sys.executable, "-m", "plancompiler", "launch", "-n", str(ranks), str(script)],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        results += done.stdout.splitlines()
    assert len(results) == 3
    losses = [list(map(float, line.split())) for line in results]
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, 1e-3)


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (None, {"gradient", "collective"}),
        (pc.Config(streams="one"), {"collective"}),
        (pc.Config(streams="compute", fuse_bytes=0), set()),
    ],
)
def test_gradients_have_a_stream_of_their_own_as_in_jobs(config, wanted):
    def program():
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).place(PAIR)
        optimizer = pc.optim.SGD(model.parameters(), lr=0.1)
        x = pc.tensor(np.ones((4, 6), np.float32), PAIR, ["S(0)"])

        def step(x):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            return loss

        losses = [step(x).item()]
        compiled = pc.compile(step, config=config)
        losses += [compiled(x).item() for _ in range(2)]
        threads = {thread.name for thread in threading.enumerate()}
        streams = {each for each in names if f"plancompiler-{rank_number()}-{each}" in threads}
        return losses, streams

    names = ("gradient", "parameter", "collective")
    for losses, streams in on_pair(program):
        assert streams == wanted
        assert losses[2] < losses[1] < losses[0]
