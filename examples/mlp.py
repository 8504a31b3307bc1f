"""A small network that reads handwritten digits, on one or several ranks.

    plancompiler run examples/mlp.py --ranks 2 --steps 300
    plancompiler run examples/mlp.py --ranks 4 --steps 300 -D layout=dp_tp -D hidden=512

The job reports the training loss and, on the 360 digits it never trains on, the accuracy. Layouts:

    dp      every rank has all weights and a part of each batch
    tp      every rank has the whole batch and a part of the weights
    dp_tp   a mesh of two axes: batches split along the first, weights along the second
    auto    the compiler searches for the best layouts

With `-D device=cuda` every rank runs on a GPU.
"""

from pathlib import Path

import plancompiler as pc

DATA = Path(__file__).resolve().parent / "data" / "digits.npz"
PIXELS, CLASSES = 64, 10
TRAINING_ROWS, ROWS = 1437, 1797

LAYOUTS = {
    # The first hidden layer is split by its outputs and the second by its inputs, so that between
    # the two no rank needs to know what the others computed.
    "dp": ("dp",),
    "tp": ("tp",),
    "dp_tp": ("dp", "tp"),
    "auto": ("x",),
}


def mesh_for(layout: str, ranks: int | None, device: str) -> pc.Placement:
    """The mesh of a layout on devices of a type; without a number of ranks, as few as show the
    layout.
    """
    if layout not in LAYOUTS:
        raise pc.UsageError(
            "unknown layout", got=repr(layout), expected="one of " + ", ".join(LAYOUTS)
        )
    axes = LAYOUTS[layout]
    if len(axes) == 1:
        return pc.Placement(device, list(range(ranks or 2)), axes)
    ranks = ranks or 4
    if ranks > 1 and ranks % 2:
        raise pc.UsageError(
            "layout dp_tp splits weights over pairs of ranks",
            got=f"{ranks} ranks",
            expected="an even number",
        )
    width = min(2, ranks)
    rows = [[row * width + column for column in range(width)] for row in range(ranks // width)]
    return pc.Placement(device, rows, axes)


def build(
    layout: str = "dp",
    ranks: int | None = None,
    hidden: int = 256,
    batch: int = 64,
    lr: float = 0.002,
    total: int = 300,
    seed: int = 0,
    evaluate: bool = True,
    device: str = "cpu",
) -> pc.Job:
    """The training job. `total` is the number of steps over which the learning rate decays."""
    for name, value in {"hidden": hidden, "batch": batch, "total": total}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise pc.UsageError(f"{name} must be a positive whole number", got=repr(value))
    if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not lr > 0:
        raise pc.UsageError("lr must be a positive number", got=repr(lr))
    mesh = mesh_for(layout, ranks, device)
    axes = LAYOUTS[layout]
    searched = layout == "auto"
    data_sbp = None if searched else ["S(0)" if axis == "dp" else "B" for axis in axes]

    def split(sbp: str) -> list[str]:
        return [sbp if axis == "tp" else "B" for axis in axes]

    first, second = split("S(0)"), split("S(1)")
    layouts = {} if searched else {"0.weight": first, "0.bias": first, "2.weight": second}
    with pc.job("mlp", seed, pc.Config(layout="auto") if searched else None) as job:
        model = pc.nn.Sequential(
            pc.nn.Linear(PIXELS, hidden),
            pc.nn.ReLU(),
            pc.nn.Linear(hidden, hidden),
            pc.nn.ReLU(),
            pc.nn.Linear(hidden, CLASSES),
        ).place(mesh, layouts)
        images, labels = pc.data.Arrays(
            DATA,
            ("images", "labels"),
            batch=batch,
            split=(0, TRAINING_ROWS),
            seed=seed,
            placement=mesh,
            sbp=data_sbp,
        )
        loss = pc.cross_entropy(model(scaled(images)), labels, ignore_index=None)
        pc.optim.AdamW(
            pc.optim.cosine(lr, warmup=min(20, total - 1), total=total, final=lr / 20)
        ).minimize(loss)
        pc.output("loss", loss)
        if evaluate:
            images, labels = pc.data.Arrays(
                DATA,
                ("images", "labels"),
                batch=ROWS - TRAINING_ROWS,
                split=(TRAINING_ROWS, ROWS),
                shuffle=False,
                placement=mesh,
                sbp=data_sbp,
            )
            pc.output("accuracy", pc.accuracy(model(scaled(images)), labels))
    return job


def scaled(images: pc.Value) -> pc.Value:
    """Pixels from 0..16 to 0..1."""
    return images.cast("float32") * (1.0 / 16.0)
