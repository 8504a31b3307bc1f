"""`pc.compile` works on the memory of tensors: what others see of it, and what they must not."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import nn
from plancompiler.eager import spawn
from plancompiler.errors import GradientError, InplaceError, TracingError

ALONE = pc.Placement("cpu", [0])
PAIR = pc.Placement("cpu", [0, 1])


def tensor(value, placement=ALONE, sbp="B", **options):
    return pc.tensor(np.asarray(value, np.float32), placement, sbp, **options)


def address(tensor):
    return tensor.local.ctypes.data


def test_steps_change_tensors_where_they_lie():
    net = nn.Linear(3, 2).place(ALONE)
    optimizer = pc.optim.AdamW(lr=0.01)
    x = tensor(np.ones((4, 3)))

    @pc.compile
    def step(x):
        loss = (net(x) * net(x)).mean()
        optimizer.minimize(loss)
        return loss

    step(x)
    kept = [each.value for each in net.parameters()]
    places = [address(each) for each in kept]
    before = [each.numpy() for each in kept]
    losses = [step(x).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert [address(each) for each in kept] == places
    for each, old in zip(kept, before, strict=True):
        assert (each.numpy() != old).all()
    # The plan is known to work on the memory, so that whoever asks who shares it can leave it out.
    lent = pc.eager.current_world().lent
    assert all(lent[id(each.local)] == 1 for each in kept)
    step.close()
    assert not any(lent[id(each.local)] for each in kept)
    assert [address(each) for each in kept] == places


def test_a_function_that_nobody_refers_to_is_gone_with_its_model():
    """The world closes compiled functions, but keeps neither them nor what they name."""
    lent = pc.eager.current_world().lent

    def trained():
        net = nn.Linear(3, 2).place(ALONE)
        optimizer = pc.optim.SGD(lr=0.01)

        @pc.compile
        def step(x):
            optimizer.minimize(net(x).sum(), net.parameters())
            return x * 1.0

        step(tensor(np.ones((4, 3))))
        return weakref.ref(net), weakref.ref(net.weight.value.local)

    model, memory = trained()
    gc.collect()
    assert model() is None
    # Its plan is closed when the next one is made, in a thread of this rank.
    following = pc.compile(lambda x: x + 1.0)
    assert following(tensor([1.0])).item() == 2.0
    gc.collect()
    assert memory() is None
    following.close()
    assert not any(lent.values())


def test_plans_and_eager_code_share_the_memory():
    w = tensor([1.0, 2.0])
    places = {address(w)}

    @pc.compile
    def double(x):
        w.copy_(w * 2.0)
        return w.sum() + x.sum() * 0.0

    read = pc.compile(lambda x: (w * x).sum())
    with pc.no_grad():
        for round_ in range(4):
            x = tensor(np.ones(2 if round_ % 2 else 1))  # two plans of each function
            assert double(x).item() == 6.0
            assert read(x).item() == 6.0
            w.copy_(w - 1.0)
            np.testing.assert_array_equal(w.numpy(), [1.0, 3.0])
            w.copy_(tensor([1.0, 2.0]))
            places.add(address(w))
    assert len(places) == 1
    assert len(double.programs()) == len(read.programs()) == 2


def test_views_see_what_plans_change():
    w = tensor([[1.0, 2.0], [3.0, 4.0]])
    early = w.detach()

    @pc.compile
    def double(x):
        w.copy_(w * x)

    with pc.no_grad():
        for _ in range(2):
            double(tensor(2.0))
        late, row = w.detach(), w[1]
        double(tensor(2.0))
        np.testing.assert_array_equal(w.numpy(), [[8.0, 16.0], [24.0, 32.0]])
        for each in (early, late):
            np.testing.assert_array_equal(each.numpy(), w.numpy())
        np.testing.assert_array_equal(row.numpy(), [24.0, 32.0])
        row.fill_(1.0)
        double(tensor(3.0))
    np.testing.assert_array_equal(w.numpy(), [[24.0, 48.0], [3.0, 3.0]])


def test_what_the_tape_keeps_is_not_written():
    scale = tensor([2.0], requires_grad=True)
    w = tensor([1.0, 2.0])

    @pc.compile
    def double(x):
        w.copy_(w * x)

    def run():
        with pc.no_grad():
            double(tensor(2.0))

    run()
    run()
    view = w[:1]
    with pytest.raises(InplaceError, match="shares its memory"):
        w *= scale
    del view
    # Besides only the plan holds the memory now, which the tape goes on to keep.
    w *= scale
    w.sum().backward()
    np.testing.assert_array_equal(scale.grad.numpy(), [12.0])
    w = w.detach()
    kept = w * scale
    run()
    np.testing.assert_array_equal(w.numpy(), [16.0, 32.0])
    with pytest.raises(GradientError, match="changed in place"):
        kept.sum().backward()


def test_a_tensor_that_goes_on_elsewhere_leaves_its_memory():
    scale = tensor([3.0], requires_grad=True)
    w = tensor([1.0, 2.0])
    read = pc.compile(lambda x: (w * x).sum())

    @pc.compile
    def double(x):
        w.copy_(w * x)

    wanted = w.numpy()
    for _ in range(6):
        with pc.no_grad():
            double(tensor(2.0))
            wanted = wanted * 2.0
            assert read(tensor(1.0)).item() == wanted.sum()
        before = wanted
        w *= scale  # recorded: what it held is kept for the gradient
        wanted = wanted * 3.0
        assert w.requires_grad
        total = w.sum()
        assert read(tensor(1.0)).item() == wanted.sum()
        scale.grad = None
        total.backward()
        np.testing.assert_array_equal(scale.grad.numpy(), [before.sum()])
        w.copy_(tensor(wanted))  # off the tape again
        assert not w.requires_grad


def test_arguments_may_be_others_in_each_call():
    rng = np.random.default_rng(0)

    @pc.compile
    def add(into, x):
        into.copy_(into + x)
        return into.sum()

    totals = [tensor(np.zeros(3)), tensor(np.zeros(3))]
    sums = np.zeros((2, 3), np.float32)
    given = []
    with pc.no_grad():
        for which in (0, 0, 0, 1, 1, 0, 1, 0, 0):
            values = rng.normal(size=3).astype(np.float32)
            x = tensor(values)
            given.append((x, values))
            sums[which] += values
            assert add(totals[which], x).item() == pytest.approx(sums[which].sum(), abs=1e-5)
            for total, wanted in zip(totals, sums, strict=True):
                np.testing.assert_array_equal(total.numpy(), wanted)
    for x, values in given:
        np.testing.assert_array_equal(x.numpy(), values)
    assert len(add.programs()) == 1


def test_a_view_beside_the_tensor_that_changes():
    w, x = tensor([1.0, 2.0]), tensor([1.0, 1.0])

    @pc.compile
    def add(x):
        w.copy_(w + x)

    with pc.no_grad():
        for _ in range(3):
            add(x)
        for _ in range(2):
            with pytest.raises(TracingError, match="memory"):
                add(w.reshape(2))
        add(x)
        np.testing.assert_array_equal(w.numpy(), [5.0, 6.0])
        # The same memory, seen alike, is one variable.
        for same in (w, w.detach()):
            add(same)
            add(x)
    np.testing.assert_array_equal(w.numpy(), [23.0, 27.0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int64", "bool", "float64"])
def test_every_dtype(dtype):
    w = pc.tensor(np.asarray([[1, 0], [1, 1]]), ALONE, "B", dtype)
    wanted = w.numpy()

    @pc.compile
    def flip(x):
        w.copy_(w.transpose((1, 0)) if dtype == "bool" else w.transpose((1, 0)) + x)

    x = pc.tensor(np.asarray(1), ALONE, "B", dtype)
    with pc.no_grad():
        for _ in range(4):
            flip(x)
            wanted = wanted.T if dtype == "bool" else wanted.T + x.numpy()
            np.testing.assert_array_equal(w.numpy(), wanted)
            w.copy_(w)


def test_tensors_that_are_not_whole_in_memory():
    base = tensor(np.arange(12.0).reshape(3, 4))
    columns = base.transpose((1, 0))
    wide = pc.expand(tensor([1.0]), (4, 3))
    expected = base.numpy().T

    @pc.compile
    def add():
        columns.copy_(columns + wide)
        return columns.sum()

    with pc.no_grad():
        for _ in range(3):
            expected = expected + 1
            assert add().item() == expected.sum()
            np.testing.assert_array_equal(base.numpy(), expected.T)


def test_parts_that_other_ranks_read():
    """Both ranks read each other's part of `w` in every step; it changes in between, too."""

    def rank():
        w = tensor(np.arange(6.0).reshape(2, 3), PAIR, "S(0)")
        sharded = tensor(np.arange(4.0), PAIR, "S(0)")
        wanted, bias = w.numpy(), sharded.numpy()

        @pc.compile
        def step(x):
            whole = w.redistribute(sbp="B")
            w.copy_((w * 0.5 + x).redistribute(sbp="S(0)"))
            sharded.copy_(sharded + 1.0)
            return (whole * x).sum() + sharded.sum()

        with pc.no_grad():
            for turn in range(20):
                x = tensor(np.full((2, 3), turn), PAIR, "S(0)")
                bias = bias + 1.0
                assert step(x).item() == pytest.approx((wanted * turn).sum() + bias.sum())
                wanted = wanted * 0.5 + turn
                np.testing.assert_allclose(w.numpy(), wanted, 1e-6)
                w.fill_(turn)  # at once, while the other rank may not have come back
                wanted[:] = turn
        return True

    assert spawn(rank, 2) == [True, True]


def test_plans_count_as_nobody_who_shares_the_memory():
    """A tensor that plans work on takes a value that wants a gradient, as it would without them."""
    scale = tensor([3.0], requires_grad=True)
    w = tensor([1.0, 2.0])
    one = pc.compile(lambda: w * 2.0)
    other = pc.compile(lambda: w + 1.0)
    for _ in range(2):
        one()
        other()
    w *= scale
    w.sum().backward()
    np.testing.assert_array_equal(scale.grad.numpy(), [3.0])
    np.testing.assert_array_equal(one().numpy(), [6.0, 12.0])
