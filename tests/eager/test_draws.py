"""Random tensors by generator, like another tensor, and in place; shapes changed in place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import eager
from plancompiler.errors import InplaceError

DRAWS: dict[str, Callable[..., pc.DistTensor]] = {
    "bernoulli": lambda mesh, g: pc.bernoulli((3, 4), 0.5, placement=mesh, generator=g),
    "class_center_sample": lambda mesh, g: (
        pc.class_center_sample(pc.tensor([1, 5], mesh), 40, 8, shards=2, generator=g).sampled
    ),
    "dropout": lambda mesh, g: pc.dropout(pc.tensor(np.ones((3, 4)), mesh), 0.5, generator=g),
    "exponential": lambda mesh, g: pc.exponential((3, 4), placement=mesh, generator=g),
    "permutation": lambda mesh, g: pc.permutation(30, placement=mesh, generator=g),
    "rand": lambda mesh, g: pc.rand(3, 4, placement=mesh, generator=g),
    "rand_like": lambda mesh, g: pc.rand_like(pc.tensor(np.ones((3, 4)), mesh), generator=g),
    "randint_like": lambda mesh, g: pc.randint_like(
        pc.tensor(np.zeros((3, 4), np.int64), mesh), 0, 99, generator=g
    ),
    "randn": lambda mesh, g: pc.randn((3, 4), placement=mesh, generator=g),
    "uniform_": lambda mesh, g: pc.tensor(np.zeros((3, 4)), mesh).uniform_(2.0, 3.0, generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_decides_what_is_drawn(name: str) -> None:
    mesh, draw = pc.Placement("cpu", [0]), DRAWS[name]
    own, other = pc.Generator(5), pc.Generator(5)
    before = pc.default_generator().number
    first = draw(mesh, own).numpy()
    assert own.number == 1
    assert pc.default_generator().number == before
    np.testing.assert_array_equal(draw(mesh, other).numpy(), first)
    assert not np.array_equal(draw(mesh, other).numpy(), first)


def test_generators_that_do_not_fit_are_refused() -> None:
    mesh = pc.Placement("cpu", [0])
    with pytest.raises(pc.UsageError, match="come from a generator"):
        pc.rand(2, placement=mesh, generator=3)
    with pytest.raises(pc.TracingError, match="another generator"):
        pc.compile(lambda x: pc.dropout(x, 0.5, generator=pc.Generator(1)))(pc.tensor([1.0], mesh))
    with pc.job("draws"):
        pc.output("x", pc.rand(2, placement=mesh))
        with pytest.raises(pc.TracingError, match="a job has no generator"):
            pc.rand(2, placement=mesh, generator=pc.Generator(1))


def test_draws_in_place_keep_the_layout_and_are_those_of_the_functions() -> None:
    def program() -> list[bool]:
        mesh = pc.Placement("cpu", [0, 1])
        answers = []
        for sbp in ("S(0)", "S(1)", "B"):
            x = pc.tensor(np.zeros((5, 3), np.float32), mesh, sbp)
            pc.manual_seed(7)
            assert x.normal_(1.0, 2.0) is x
            drawn = x[1:].random_(3, 9)
            pc.manual_seed(7)
            whole = pc.normal((5, 3), 1.0, 2.0, placement=mesh)
            part = pc.randint((4, 3), 3, 9, placement=mesh)
            answers.append(str(x.sbp[0]) == sbp)
            answers.append(pc.array_equal(x[:1], whole[:1]))
            answers.append(pc.array_equal(drawn, part.cast("float32")))
            answers.append(pc.array_equal(x[1:], drawn))
        return answers

    for answers in eager.spawn(program, ranks=2):
        assert answers == [True] * 12


REFORMS: dict[str, tuple[tuple[object, ...], tuple[int, ...]]] = {
    "flatten_": ((), (24,)),
    "permute_": (((3, 1, 0, 2),), (3, 1, 4, 2)),
    "reshape_": ((2, 12), (2, 12)),
    "squeeze_": ((), (4, 2, 3)),
    "t_": ((), (3, 2, 1, 4)),
    "unsqueeze_": ((0,), (1, 4, 1, 2, 3)),
}


@pytest.mark.parametrize("name", REFORMS)
def test_a_shape_changes_in_place(name: str) -> None:
    args, shape = REFORMS[name]

    def program() -> list[bool]:
        mesh, answers = pc.Placement("cpu", [0, 1]), []
        numbers = np.arange(24.0).reshape(4, 1, 2, 3)
        for sbp in ("S(0)", "S(2)", "S(3)", "P", "B"):
            w = pc.tensor(numbers, mesh, sbp, requires_grad=True)
            x = w * 2
            y = x * x  # remembers x as it was
            other = w * 3
            assert getattr(other, name)(*args) is other
            wanted = getattr(pc.tensor(numbers * 3, mesh), name)(*args)
            answers.append(other.shape == shape and pc.array_equal(other, wanted))
            (other * other).sum().backward()
            assert w.grad is not None
            answers.append(pc.allclose(w.grad, pc.tensor(numbers * 18, mesh)))
            getattr(x, name)(*args)
            try:
                y.sum().backward()
            except pc.GradientError:
                answers.append(True)
        return answers

    for answers in eager.spawn(program, ranks=2):
        assert answers == [True] * 15


def test_a_shape_that_others_see_does_not_change() -> None:
    mesh = pc.Placement("cpu", [0])
    x = pc.tensor([[1.0, 2.0]], mesh)
    view = x[:, 1:]
    for tensor in (x, view):
        with pytest.raises(InplaceError, match="that others see") as caught:
            tensor.squeeze_(0)
        assert "x = x.squeeze(...)" in str(caught.value)
    leaf = pc.tensor([[1.0]], mesh, requires_grad=True)
    with pytest.raises(InplaceError):
        leaf.squeeze_()


def test_a_shape_changes_in_a_compiled_function() -> None:
    def function(x: pc.DistTensor) -> pc.DistTensor:
        y = x * 2
        y.unsqueeze_(0)
        return (y + 1).squeeze_(0)

    x = pc.tensor([1.0, 2.0], pc.Placement("cpu", [0]))
    np.testing.assert_array_equal(pc.compile(function)(x).numpy(), [3, 5])
