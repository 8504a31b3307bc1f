"""`pc.nn.utils` on eager tensors: what is clipped in place, and parameters as a vector."""

from __future__ import annotations

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.errors import NonFiniteError, ShapeError, UnknownNameError, UsageError

PAIR = pc.Placement("cpu", [0, 1])
WEIGHTS, BIASES = np.linspace(-2, 3, 12).reshape(4, 3), np.array([1.0, -4.0])
SLOPES = [2 * WEIGHTS, 2 * BIASES]


def parameters(sbp):
    """Two parameters, whose gradients are twice their values."""
    made = [pc.tensor(each, PAIR, sbp) for each in (WEIGHTS, BIASES)]
    for each in made:
        each.requires_grad = True
    sum((each * each).sum() for each in made).backward()
    return made


@pytest.mark.parametrize("sbp", ["S(0)", "B"])
def test_gradients_are_clipped_in_place(sbp):
    flat = np.concatenate([each.ravel() for each in SLOPES])

    def program():
        made = []
        for norm_type in (2.0, 1.0, np.inf):
            tensors = parameters(sbp)
            grads = [each.grad for each in tensors]
            total = pc.nn.utils.clip_grad_norm_(tensors, 1.5, norm_type)
            same = all(each.grad is grad for each, grad in zip(tensors, grads, strict=True))
            assert same, "gradients keep their memory"
            made.append([float(total), *(each.grad.numpy() for each in tensors)])
        small = parameters(sbp)
        assert float(pc.nn.utils.clip_grad_norm_(small, 100.0)) < 100
        pc.nn.utils.clip_grad_value_(small[0], 1.0)
        return made, [each.grad.numpy() for each in small]

    for made, small in spawn(program, 2):
        for (total, *grads), norm_type in zip(made, (2, 1, np.inf), strict=True):
            expected = np.linalg.norm(flat, norm_type)
            np.testing.assert_allclose(total, expected)
            for grad, slope in zip(grads, SLOPES, strict=True):
                np.testing.assert_allclose(grad, slope * 1.5 / (expected + 1e-6))
        np.testing.assert_allclose(small[0], SLOPES[0].clip(-1, 1))
        np.testing.assert_allclose(small[1], SLOPES[1])


def test_a_compiled_step_clips_too():
    mesh = pc.Placement("cpu", [0])

    def train(wrap):
        pc.manual_seed(0)
        model = pc.nn.Linear(3, 2).place(mesh)
        optimizer = pc.optim.SGD(model.parameters(), lr=0.5)

        def step(x):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            total = pc.nn.utils.clip_grad_norm_(model, 0.1)
            optimizer.step()
            return total

        run = wrap(step)
        totals = [float(run(pc.tensor(WEIGHTS, mesh).float())) for _ in range(3)]
        return [*totals, *pc.nn.utils.parameters_to_vector(model.parameters()).tolist()]

    np.testing.assert_allclose(train(pc.compile), train(lambda step: step), 1e-6)


def test_parameters_are_a_vector_and_take_one():
    model = pc.nn.Linear(3, 2).place(pc.Placement("cpu", [0]))
    vector = pc.nn.utils.parameters_to_vector(model.parameters())
    assert vector.shape == (8,)
    pc.nn.utils.vector_to_parameters(vector * 0 + 2.0, model.parameters())
    assert (pc.nn.utils.parameters_to_vector(model) == 2.0).all()
    with pytest.raises(ShapeError, match=r"Got: \(7,\)\. Expected: \(8,\)"):
        pc.nn.utils.vector_to_parameters(vector[1:], model.parameters())


def test_what_cannot_be_clipped_is_refused():
    model = pc.nn.Linear(3, 2).place(pc.Placement("cpu", [0]))
    assert pc.nn.utils.clip_grad_norm_(model, 1.0) == 0.0
    bias = model.bias.value
    (bias * np.inf).abs().sum().backward()  # biases may have any signs
    with pytest.raises(NonFiniteError, match="norm of the gradients"):
        pc.nn.utils.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    with pytest.raises(UsageError, match=r"minimize\(loss, clip_norm=...\)"), pc.job("clip"):
        pc.nn.utils.clip_grad_norm_(model, 1.0)
    with pytest.raises(UnknownNameError, match="no 'ChainedScheduler'"):
        pc.optim.lr_scheduler.ChainedScheduler  # noqa: B018
