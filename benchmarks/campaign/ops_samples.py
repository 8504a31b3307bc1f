"""Every op kind in random layouts and dtypes, on other numbers than the tests: the dense result.

The reference is the op's own kernel on whole arrays in float64; tests prove those against NumPy.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from benchmarks.campaign.case import Result
from benchmarks.campaign.ops_in_place import MESHES
from plancompiler.eager import spawn
from plancompiler.ops import op_table
from tests.ops.dense import SEED, STEP
from tests.ops.sample import Sample
from tests.ops.samples import samples
from tests.ops.sharding import run_dense

STRUCTURE = {"input", "output", "variable", "accumulate", "collect_pieces", "take_piece"}
"""Kinds that only a compiled step can run."""
ROUNDINGS = {"float64": 1e-9, "float32": 3e-4}


@functools.cache
def drawn(dtype: str, seed: int) -> list[Sample]:
    """All samples, with numbers of a seed."""
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    return [each for each in samples(folder, dtype, seed) if each.kind not in STRUCTURE]


def run(result: Result, choices: random.Random) -> None:
    """One sample of a random kind."""
    dtype = choices.choice(list(ROUNDINGS))
    samples = drawn(dtype, 1 + choices.randrange(4) + 10 * result.case.seed)
    kinds = sorted({sample.kind for sample in samples})
    kind = choices.choice(kinds)
    sample = choices.choice([each for each in samples if each.kind == kind])
    mesh = choices.choice(MESHES)
    mutates = op_table()[kind].mutates
    layouts = []
    for array in sample.inputs:
        options = ["B"] if mutates else ["B", *(f"S({axis})" for axis in range(array.ndim))]
        if array.dtype.kind == "f" and not mutates:
            options.append("P")
        layouts.append([choices.choice(options) for _ in mesh.hierarchy])
    result.group = f"op samples, {dtype}"
    shown = ", ".join(" ".join(sbp) for sbp in layouts)
    mesh_text = "x".join(map(str, mesh.hierarchy))
    result.what = f"{sample} on {mesh_text}: {shown}"

    def rank() -> list[Any]:
        pc.manual_seed(SEED).start_step(STEP)
        world = pc.eager.current_world()
        world.step = STEP
        tensors = [
            pc.tensor(array, mesh, sbp) for array, sbp in zip(sample.inputs, layouts, strict=True)
        ]
        if not tensors:
            outputs = world.add(kind, (), sample.attrs, mesh)
        else:
            outputs = tensors[0]._apply(kind, tensors, sample.attrs)  # noqa: SLF001  # as ops call
        return [output.numpy() for output in outputs]

    expected = run_dense(kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)
    tolerance = ROUNDINGS[dtype]
    for outputs in spawn(rank, mesh.size):
        for number, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
            result.require(got.dtype == wanted.dtype, f"output {number} is {got.dtype}")
            size = max(1.0, float(np.max(np.abs(wanted.astype(np.float64)), initial=0.0)))
            same = np.isclose(got, wanted, tolerance, tolerance * size, equal_nan=True)
            if not same.all():
                at = tuple(int(each[0]) for each in np.nonzero(~same))
                result.problems.append(f"output {number} at {at}: {got[at]!r}, not {wanted[at]!r}")
                return
