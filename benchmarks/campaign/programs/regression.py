"""A small job that reads its own data: least squares on random rows, split over the ranks."""

import plancompiler as pc


def build(ranks: int | None = None, width: int = 6) -> pc.Job:
    """The training job."""
    mesh = pc.Placement("cpu", list(range(ranks or 2)))
    with pc.job("regression", seed=5) as job:
        x = pc.normal((8, width), placement=mesh, sbp="S(0)")
        y = x @ pc.ones((width, 2), "float32", mesh)
        y = y + pc.normal((8, 2), placement=mesh, sbp="S(0)")
        error = pc.nn.Linear(width, 2).place(mesh)(x) - y
        loss = (error * error).mean()
        pc.optim.Adam(lr=0.01).minimize(loss)
        pc.output("loss", loss)
    return job
