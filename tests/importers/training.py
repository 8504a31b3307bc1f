"""Training of an imported model beside PyTorch's training of the original."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np

import plancompiler as pc
from tests.importers.models import torch

STEPS = 10
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RATE = 2.0**-10
"""Exact in float32, which learning rates are."""

ONE = pc.Placement("cpu", [[0]], ("dp", "tp"))
DP = pc.Placement("cpu", [[0], [1]], ("dp", "tp"))
TP = pc.Placement("cpu", [[0, 1]], ("dp", "tp"))


@dataclass
class Trained:
    """Losses of steps, gradients of the first, and parameters after the last."""

    losses: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]


def loss_of(out: Any) -> Any:
    """The loss that a model returns; of one without, the mean cube of its first result."""
    loss = out["loss"] if "loss" in out.keys() else None  # noqa: SIM118  # as both outputs have it
    return (out[0] * out[0] * out[0]).mean() if loss is None else loss


def reference(module: Any, example: dict[str, Any]) -> Trained:
    """What PyTorch computes."""
    module = deepcopy(module)
    named = dict(module.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=RATE, **ADAM)
    losses: list[float] = []
    gradients: dict[str, np.ndarray] = {}
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(module(**example))
        loss.backward()
        if not losses:
            gradients = {
                name: each.grad.numpy().copy()
                for name, each in named.items()
                if each.grad is not None
            }
        optimizer.step()
        losses.append(loss.item())
    after = {name: each.detach().numpy() for name, each in named.items()}
    return Trained(losses, gradients, after)


def job_of(
    model: Any,
    example: dict[str, Any],
    mesh: pc.Placement,
    sbp: list[str],
    config: pc.Config | None = None,
    gradients: bool = True,
) -> pc.Job:
    """A training job that reports the loss and, unless `gradients` is False, every gradient."""
    with pc.job("imported", config=config or pc.Config()) as job:
        given = {
            name: pc.input(name, tuple(value.shape), str(value.dtype)[len("torch.") :], mesh, sbp)
            if torch.is_tensor(value)
            else value
            for name, value in example.items()
        }
        loss = loss_of(model(**given))
        # Those that no operation reads have no gradient in PyTorch, either.
        graph = model.graph
        read = {ref.name for node in graph.nodes for ref in node.refs}
        used = {model.tensors[name] for value, name in graph.parameters.items() if value in read}
        trained = {
            name: each for name, each in model.named_parameters() if each.trainable and each in used
        }
        if gradients:
            made = pc.gradients(loss, [each.value for each in trained.values()])
            for name, gradient in zip(trained, made, strict=True):
                if gradient is not None:
                    pc.output(f"gradient {name}", gradient)
        pc.optim.AdamW(RATE, **ADAM).minimize(loss)
        pc.output("loss", loss)
    return job


def fed(example: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in example.items() if torch.is_tensor(value)}


def rows_split(model: Any) -> dict[str, list[str]]:
    """Every matrix split along its rows over `tp`: a layout that nobody chose for the model."""
    return {name: ["B", "S(0)"] for name, each in model.named_parameters() if len(each.shape) > 1}


def trained(
    model: Any,
    example: dict[str, Any],
    mesh: pc.Placement,
    sbp: list[str],
    steps: int = STEPS,
    backend: str = "threads",
) -> Trained:
    """What an imported model computes in a job."""
    job = job_of(model, example, mesh, sbp)
    with pc.run(job, ranks=mesh.size, cache=False, backend=backend) as session:
        outputs = [session.step(**fed(example)) for _ in range(steps)]
    gradients = {
        name.removeprefix("gradient "): value
        for name, value in outputs[0].items()
        if name != "loss"
    }
    return Trained([float(each["loss"]) for each in outputs], gradients, {})


def compare(made: Trained, wanted: Trained, losses: float, gradients: float) -> None:
    """Losses to a relative tolerance; gradients to one of each tensor's greatest magnitude."""
    np.testing.assert_allclose(made.losses, wanted.losses[: len(made.losses)], rtol=losses)
    # Some gradients are zero but for rounding, such as those of biases of keys: what they are
    # compared with is not less than the rounding of the greatest gradient.
    greatest = max(np.abs(each).max() for each in wanted.gradients.values())
    floor = greatest * np.finfo(np.float32).eps / 1e-5
    for name, expected in wanted.gradients.items():
        if not np.abs(expected).any() and name not in made.gradients:
            continue
        error = np.abs(made.gradients[name] - expected).max()
        scale = max(np.abs(expected).max(), floor)
        assert error <= gradients * scale, f"{name}: {error / scale}"
