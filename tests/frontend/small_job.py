"""A small job for the golden text: two layouts, two placements, an update."""

import plancompiler as pc


def build() -> pc.Job:
    mesh = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
    last = pc.Placement("cpu", [4, 5])
    with pc.job("small", seed=7) as job:
        x = pc.input("x", (8, 6), "float32", mesh, ["S(0)", "B"])
        y = pc.input("y", (8,), "int64", last, "S(0)")
        hidden = pc.nn.Linear(6, 4).place(mesh, {"weight": ["B", "S(0)"], "bias": ["B", "S(0)"]})
        head = pc.nn.Linear(4, 3)
        h = hidden(x).relu().redistribute(sbp="[S(0), B]")
        logits = head(h.redistribute(placement=last))
        loss = pc.cross_entropy(logits, y)
        pc.optim.SGD(pc.optim.linear(0.1, warmup=2, total=10), momentum=0.9).minimize(loss)
        unused = logits.exp() * 2.0
        assert unused.shape == (8, 3)
        pc.output("loss", loss)
        pc.output("logits", logits)
    return job
