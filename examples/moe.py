"""A mixture of experts that reads handwritten digits, as a compiled job or with eager tensors.

    plancompiler run examples/moe.py --ranks 4 --steps 200
    plancompiler launch -n 4 examples/moe.py
    plancompiler launch -n 4 examples/moe.py --compiled

A router sends every picture to one of eight experts (top-1, W. Fedus et al., 2021). Pictures lie in
four groups of a batch, each with so many places at every expert; pictures that find none pass by.
Groups and experts are split over the ranks, so that pictures travel to the ranks of their experts
and back, in one all-to-all each. Model, batches and losses are the same in every form and on any
number of ranks. At the end 360 digits that were never trained on are read.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import plancompiler as pc

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
PIXELS, CLASSES = 64, 10
TRAINING_ROWS, ROWS = 1437, 1797
DIM, HIDDEN, EXPERTS = 64, 64, 8
GROUPS = 4
"""Of rows that share places: as many on any number of ranks, so that the same rows find places."""
BALANCE = 0.01
"""Weight of the loss that keeps experts equally busy."""


class Experts(pc.nn.Module):
    """One of many small networks for each row, chosen by the row itself."""

    def __init__(self, dim: int, hidden: int, experts: int, places: float) -> None:
        self.experts = experts
        self.places = places
        """Places at an expert for a group, as a multiple of the rows it gets if all get as many."""
        self.router = pc.nn.Linear(dim, experts, bias=False)
        self.weight1 = weights(experts, dim, hidden)
        self.bias1 = pc.nn.Parameter((experts, 1, hidden))
        self.weight2 = weights(experts, hidden, dim)
        self.bias2 = pc.nn.Parameter((experts, 1, dim))

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Rows [groups, rows, dim] to what their experts make of them, times the router's
        confidence (zero for rows without a place), and the loss of balance.
        """
        groups, rows, _ = x.shape
        probabilities = pc.softmax(self.router(x))
        confidence = probabilities.max(-1, keepdims=True)
        chosen = probabilities.argmax(-1)
        one_hot = pc.one_hot(chosen, self.experts, "int64")
        counts = one_hot.sum(1)
        # Rows by expert, those of one expert in the order that they had.
        order = pc.argsort(chosen, axis=1)
        sorted_rows = pc.take_along_axis(x, columns(order, x), 1)
        capacity = math.ceil(self.places * rows / self.experts)
        sent = pc.global_scatter(sorted_rows, counts, capacity, overflow="drop")
        hidden = pc.relu(pc.einsum("gecd,edh->gech", sent, self.weight1.value) + self.bias1.value)
        made = pc.einsum("gech,ehd->gecd", hidden, self.weight2.value) + self.bias2.value
        back = pc.global_gather(made, counts, rows, overflow="drop")
        y = pc.take_along_axis(back, columns(pc.argsort(order, axis=1), x), 1) * confidence
        # Least where all experts get as many rows: the share of rows times the mean probability.
        shares = counts.sum(0).cast("float32") * (1.0 / (groups * rows))
        balance = (shares * probabilities.mean((0, 1))).sum() * self.experts
        return y, balance


class Reader(pc.nn.Module):
    """Pictures [batch, 64] to logits [batch, 10], and the loss of balance."""

    def __init__(self, places: float = 1.5) -> None:
        self.first = pc.nn.Linear(PIXELS, DIM)
        self.norm = pc.nn.LayerNorm(DIM)
        self.mixture = Experts(DIM, HIDDEN, EXPERTS, places)
        self.last = pc.nn.Linear(DIM, CLASSES)

    def forward(self, images: Any) -> tuple[Any, Any]:
        pixels = images.cast("float32") * (1.0 / 16.0)
        x = pc.relu(self.first(pixels.reshape(GROUPS, -1, PIXELS)))
        y, balance = self.mixture(self.norm(x))
        return self.last(x + y).reshape(-1, CLASSES), balance


SPLIT = {f"mixture.{name}{number}": "S(0)" for name in ("weight", "bias") for number in (1, 2)}
"""Experts are split over the ranks, all other parameters are on each."""


def weights(experts: int, inputs: int, outputs: int) -> pc.nn.Parameter:
    """One matrix per expert."""
    bound = 1 / math.sqrt(inputs)
    return pc.nn.Parameter((experts, inputs, outputs), "float32", "uniform", (-bound, bound))


def columns(order: Any, x: Any) -> Any:
    """Positions of rows [groups, rows] for every column of rows [groups, rows, dim]."""
    return pc.expand(pc.unsqueeze(order, -1), x.shape)


def data(mesh: pc.Placement, batch: int, seed: int) -> tuple[Any, Any]:
    """The training pictures and labels of a step."""
    return tuple(
        pc.data.Arrays(
            DATA,
            ("images", "labels"),
            batch=batch,
            split=(0, TRAINING_ROWS),
            seed=seed,
            placement=mesh,
            sbp="S(0)",
        )
    )


def unseen(model: Reader, mesh: pc.Placement) -> Any:
    """The share of pictures never trained on that the model reads."""
    images, labels = pc.data.Arrays(
        DATA,
        ("images", "labels"),
        batch=ROWS - TRAINING_ROWS,
        split=(TRAINING_ROWS, ROWS),
        shuffle=False,
        placement=mesh,
        sbp="S(0)",
    )
    return pc.accuracy(model(images)[0], labels)


def loss_of(model: Reader, images: Any, labels: Any) -> Any:
    """What is made small."""
    logits, balance = model(images)
    return pc.cross_entropy(logits, labels, ignore_index=None) + balance * BALANCE


def optimizer(lr: float, total: int) -> pc.optim.AdamW:
    """AdamW with a rate that decays over `total` steps."""
    return pc.optim.AdamW(pc.optim.cosine(lr, warmup=min(20, total - 1), total=total))


def build(
    ranks: int | None = None,
    batch: int = 64,
    lr: float = 0.004,
    total: int = 200,
    seed: int = 0,
    device: str = "cpu",
) -> pc.Job:
    """The training job. `total` is the number of steps over which the learning rate decays."""
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1 or batch % GROUPS:
        raise pc.UsageError(
            "a batch is cut into groups", got=repr(batch), expected=f"a multiple of {GROUPS}"
        )
    mesh = pc.Placement(device, list(range(ranks or 2)))
    with pc.job("moe", seed=seed) as job:
        model = Reader().place(mesh, SPLIT)
        loss = loss_of(model, *data(mesh, batch, seed))
        optimizer(lr, total).minimize(loss)
        pc.output("loss", loss)
        pc.output("accuracy", unseen(model, mesh))
    return job


def train(
    steps: int = 200,
    batch: int = 64,
    lr: float = 0.004,
    total: int = 200,
    seed: int = 0,
    compiled: bool = False,
    ranks: int | None = None,
    device: str = "cpu",
) -> tuple[list[float], float]:
    """The same with eager tensors: the losses of the steps, and the share of unseen digits that
    are read. With `compiled` the step is compiled by `pc.compile`.

    Runs on all ranks of the program, or on the first `ranks`.
    """
    mesh = pc.Placement(device, list(range(ranks or pc.init().size)))
    generator = pc.manual_seed(seed)
    model = Reader().place(mesh, SPLIT)
    update = optimizer(lr, total)

    def learn(images: Any, labels: Any) -> Any:
        loss = loss_of(model, images, labels)
        update.minimize(loss)
        return loss

    step = pc.compile(learn) if compiled else learn
    losses = []
    for number in range(steps):
        generator.start_step(number)
        losses.append(step(*data(mesh, batch, seed)).item())
    with pc.no_grad():
        generator.start_step(0)
        return losses, unseen(model, mesh).item()


def main() -> None:
    """Train and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compiled", action="store_true", help="compile the training step")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    world = pc.init()
    losses, right = train(
        given.steps,
        total=max(2, given.steps),
        compiled=given.compiled,
        device=given.device,
    )
    if world.rank == 0:
        for number in range(0, len(losses), max(1, len(losses) // 10)):
            print(f"step {number}: loss {losses[number]:.4f}")
        print(f"read of {ROWS - TRAINING_ROWS} unseen digits: {right:.1%}")


if __name__ == "__main__":
    main()
