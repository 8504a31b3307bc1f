"""Jobs without a single layout, and ways through their legal layouts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np

import plancompiler as pc
from plancompiler import nn
from plancompiler.frontend.open_layouts import with_open_layouts
from plancompiler.ir import Job
from plancompiler.ops.registry import op_def
from plancompiler.ops.rule import NdSignature
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


def small(seed: int, hierarchy: tuple[int, ...]) -> Job:
    """A few random ops on values of random sizes."""
    draw = random.Random(seed)
    mesh = mesh_of(hierarchy)
    size = draw.choice([4, 60, 4000, 60000])
    with pc.job("small", config=AUTO) as job:
        a = pc.input("a", (size, 12), "float32", mesh)
        value = a
        if draw.random() < 0.5:
            value = a @ nn.Parameter((12, draw.choice([2, 12, 240]))).place(mesh).value
        for _ in range(draw.randrange(3)):
            kind = draw.randrange(4)
            if kind == 0:
                value = pc.relu(value)
            elif kind == 1:
                value = value + value.sum(axis=0)
            elif kind == 2:
                value = value.transpose(1, 0)
            else:
                value = value * 2.0
        pc.output("out", value.sum() if draw.random() < 0.7 else value)
    return job


def whole_problem(job: Job) -> LayoutProblem:
    """Every op by itself, with all of its legal signatures."""
    job, _ = run_passes(with_open_layouts(job))
    return layout_problem(tie_ops(job, None), with_dominated=True)


def count_of(problem: LayoutProblem) -> int:
    count = 1
    for each in problem.candidates:
        count *= len(each.signatures)
    return count


def all_layouts(problem: LayoutProblem) -> Iterator[tuple[NdSignature, ...]]:
    """Every combination of legal signatures."""
    yield from product(*(each.signatures for each in problem.candidates))


def random_layouts(problem: LayoutProblem, draw: random.Random) -> tuple[NdSignature, ...]:
    """Legal signatures at random; what is updated in place keeps its layout."""
    chosen: list[NdSignature] = []
    pinned: dict[str, object] = {}
    ops = problem.tied.job.ops
    # An update says how all of its variables lie.
    for op, each in zip(ops, problem.candidates, strict=True):
        sources = [source for _, source in op_def(op.kind).mutates]
        if sources:
            signature = draw.choice(each.signatures)
            pinned[op.name] = signature
            for source in sources:
                pinned[op.inputs[source].name] = signature.inputs[source]
    for op, each in zip(ops, problem.candidates, strict=True):
        known = pinned.get(op.name)
        if isinstance(known, NdSignature):
            chosen.append(known)
        elif op.kind == "variable" and op.outputs[0].name in pinned:
            chosen.append(NdSignature((), (pinned[op.outputs[0].name],)))  # type: ignore[arg-type]
        else:
            chosen.append(draw.choice(each.signatures))
    return tuple(chosen)
