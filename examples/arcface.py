"""Recognition among many classes with eager tensors: ArcFace on a sample of the class centers.

    plancompiler launch -n 2 examples/arcface.py
    plancompiler launch -n 4 examples/arcface.py --steps 300 --compiled

Each handwritten digit, turned by 0, 90, 180 or 270 degrees and mirrored or not, is a class of its
own: 80 in all, of which some look the same, as do a 0 and its mirror image. Pictures and class
centers are split over the ranks; in each step a rank uses the centers of the labels that it owns
and of random other classes. The losses do not depend on the number of ranks. At the end the
pictures of 360 digits that were never trained on are recognised by the center that is closest.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
SIDE, TRAINING_ROWS = 8, 1437
VIEWS = 8
CLASSES = 10 * VIEWS
RANGES = 4
"""Ranges of classes that are sampled: as many on any number of ranks, so that losses are equal."""


class Recogniser(pc.nn.Module):
    """A network from pictures to features of width 32, with a head over all classes."""

    def __init__(self, num_samples: int, shards: int) -> None:
        self.features = pc.nn.Sequential(
            pc.nn.Linear(SIDE * SIDE, 256), pc.nn.ReLU(), pc.nn.Linear(256, 32)
        )
        self.head = pc.nn.PartialFC(32, CLASSES, num_samples, shards, margin2=0.3, scale=16.0)

    def forward(self, pictures: pc.Value, labels: pc.Value) -> pc.Value:
        """The mean loss."""
        loss: pc.Value = self.head(self.features(pictures), labels)
        return loss


def views(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every picture in its eight views, with pixels from 0 to 1, and their classes."""
    squares = images.reshape(-1, SIDE, SIDE).astype(np.float32) / 16
    turned = [
        np.rot90(picture, turns, (1, 2))
        for picture in (squares, squares[:, :, ::-1])
        for turns in range(4)
    ]
    pictures = np.stack(turned, 1).reshape(-1, SIDE * SIDE)
    classes = labels.astype(np.int64)[:, None] * VIEWS + np.arange(VIEWS)
    return pictures, classes.reshape(-1)


def train(
    steps: int = 200,
    batch: int = 64,
    num_samples: int = 18,
    seed: int = 0,
    compiled: bool = False,
    ranks: int | None = None,
    device: str = "cpu",
) -> tuple[list[float], float]:
    """The losses of the steps, and the share of unseen pictures that are recognised.

    Runs on all ranks of the program, or on the first `ranks`.
    """
    size = ranks or pc.init().size
    mesh = pc.Placement(device, list(range(size)))
    with np.load(DATA) as data:
        images, labels = data["images"], data["labels"]
    pictures, classes = views(images[:TRAINING_ROWS], labels[:TRAINING_ROWS])
    generator = pc.manual_seed(seed)
    # With as many ranges as ranks, no center moves; with others the result is the same.
    net = Recogniser(num_samples, RANGES).place(mesh, {"head.weight": "S(0)"})
    update = pc.optim.AdamW(pc.optim.cosine(0.004, warmup=min(20, steps - 1), total=steps))

    def learn(x: Any, y: Any) -> Any:
        loss = net(x, y)
        update.minimize(loss)
        return loss

    step = pc.compile(learn) if compiled else learn
    chosen = np.random.default_rng(seed)
    losses = []
    for number in range(steps):
        rows = chosen.integers(0, len(classes), batch)
        generator.start_step(number)
        loss = step(pc.tensor(pictures[rows], mesh, "S(0)"), pc.tensor(classes[rows], mesh, "S(0)"))
        losses.append(loss.item())
    net.eval()
    pictures, classes = views(images[TRAINING_ROWS:], labels[TRAINING_ROWS:])
    with pc.no_grad():
        cosines: Any = net.head.cosines(net.features(pc.tensor(pictures, mesh, "S(0)")))
        right = float((cosines.argmax(-1).numpy() == classes).mean())
    return losses, right


def main() -> None:
    """Train and report on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compiled", action="store_true", help="compile the training step")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    world = pc.init()
    losses, right = train(given.steps, compiled=given.compiled, device=given.device)
    if world.rank == 0:
        for number in range(0, len(losses), max(1, len(losses) // 10)):
            print(f"step {number}: loss {losses[number]:.4f}")
        print(f"recognised among {CLASSES}: {right:.1%}")


if __name__ == "__main__":
    main()
