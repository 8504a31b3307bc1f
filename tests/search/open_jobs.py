"""Jobs without a single layout, and the problem of all of their legal layouts."""

from __future__ import annotations

import numpy as np

import plancompiler as pc
from plancompiler import nn
from plancompiler.frontend.open_layouts import with_open_layouts
from plancompiler.ir import Job
from plancompiler.passes import run_passes
from plancompiler.search.linear_program import LayoutProblem, layout_problem
from plancompiler.search.tied_ops import tie_ops

AUTO = pc.Config(layout="auto")


def mesh_of(hierarchy: tuple[int, ...]) -> pc.Placement:
    ranks = np.arange(int(np.prod(hierarchy))).reshape(hierarchy)
    return pc.Placement("cpu", ranks, axes=("x", "y", "z")[: len(hierarchy)])


def mlp(hierarchy: tuple[int, ...], config: pc.Config = AUTO, width: int = 64) -> Job:
    """A training job of a network of three layers."""
    mesh = mesh_of(hierarchy)
    with pc.job("mlp", seed=3, config=config) as job:
        x = pc.input("x", (16, width), "float32", mesh)
        y = pc.input("y", (16,), "int64", mesh)
        net = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.Linear(width, 8)
        )
        loss = pc.cross_entropy(net.place(mesh)(x), y)
        pc.optim.AdamW(1e-2).minimize(loss)
        pc.output("loss", loss)
    return job


def transformer(
    hierarchy: tuple[int, ...], layers: int, config: pc.Config = AUTO, dim: int = 32
) -> Job:
    """A training job of transformer blocks on embedded tokens."""
    mesh = mesh_of(hierarchy)
    with pc.job("transformer", seed=5, config=config) as job:
        tokens = pc.input("tokens", (8, 16), "int64", mesh)
        net = nn.Sequential(
            nn.Embedding(64, dim),
            *(nn.TransformerBlock(dim, 4) for _ in range(layers)),
            nn.Linear(dim, 64),
        )
        loss = pc.cross_entropy(net.place(mesh)(tokens).reshape(128, 64), tokens.reshape(128))
        pc.optim.AdamW(1e-3).minimize(loss)
        pc.output("loss", loss)
    return job


def whole_problem(job: Job) -> LayoutProblem:
    """Every op by itself, with all of its legal signatures."""
    job, _ = run_passes(with_open_layouts(job))
    return layout_problem(tie_ops(job, None), with_dominated=True)
