"""Random jobs without layouts, for searches: values with several readers, shared parameters, views,
reductions, updates in place, demands, uneven sizes, several losses and outputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

import plancompiler as pc
from plancompiler import nn
from plancompiler.ir import Job, Op, Value
from tests.search.open_jobs import AUTO, mesh_of

SIZES = (1, 2, 3, 4, 6, 7, 12, 60, 240, 4000)
OPTIMIZERS: tuple[Callable[[], pc.optim.Optimizer], ...] = (
    lambda: pc.optim.SGD(0.125),
    lambda: pc.optim.SGD(0.125, momentum=0.5),
    lambda: pc.optim.AdamW(0.125),
)


def random_job(seed: int, hierarchy: tuple[int, ...], ops: int, config: pc.Config = AUTO) -> Job:
    """A job of about so many ops before its gradients."""
    draw = random.Random(f"{seed} {hierarchy} {ops}")
    while True:
        try:
            with pc.job("random", seed=seed, config=config) as job:
                _Program(draw, mesh_of(hierarchy)).write(ops)
        except pc.GradientError:
            continue  # a parameter that only a loose end reads
        return job


class _Program:
    """Draws ops on values that are there already."""

    def __init__(self, draw: random.Random, mesh: pc.Placement) -> None:
        self.draw, self.mesh = draw, mesh
        self.values: list[Value] = []
        self.tables: list[nn.Parameter] = []
        self.trained = draw.random() < 0.4
        """Whether there are parameters, gradients and updates."""

    def write(self, ops: int) -> None:
        for number in range(1 + (self.draw.random() < 0.3)):
            shape = tuple(self.draw.choice(SIZES) for _ in range(self.draw.choice((1, 2, 2, 2, 3))))
            self.values.append(
                pc.input(f"in{number}", shape, "float32", self.mesh, self._demand(shape))
            )
        if self.draw.random() < 0.2:
            self._look_up()
        while ops > 0:
            ops -= 1
            self._op()
        self._finish()

    def _demand(self, shape: tuple[int, ...]) -> list[str] | None:
        """Now and then a layout that the user demands."""
        if self.draw.random() < 0.85:
            return None
        return [
            self.draw.choice(["B", *(f"S({axis})" for axis in range(len(shape)))])
            for _ in self.mesh.hierarchy
        ]

    def _parameter(self, *shape: int) -> Value:
        if self.tables and self.draw.random() < 0.3:
            for each in self.tables:
                if each.shape == shape:
                    return each.value  # shared
        made = nn.Parameter(shape, init="uniform", init_args=(-1.0, 1.0))
        self.tables.append(made.place(self.mesh, self._demand(shape)))
        return made.value

    def _look_up(self) -> None:
        rows = self.draw.choice((4, 7, 60))
        tokens = pc.input("tokens", (self.draw.choice((2, 6, 12)),), "int64", self.mesh)
        table = self._parameter(rows, self.draw.choice((2, 12)))
        self.values.append(pc.embedding(table, pc.remainder(tokens, rows)))

    def _op(self) -> None:
        # The latest value mostly: long chains and few loose ends.
        value = self.values[-1] if self.draw.random() < 0.7 else self.draw.choice(self.values)
        kinds = [self._elementwise, self._join, self._reduce, self._view, self._product]
        self.values.append(self.draw.choice(kinds)(value))

    def _elementwise(self, x: Value) -> Value:
        axis = self.draw.randrange(x.ndim) if x.ndim else None
        kinds: list[Callable[[], Value]] = [
            lambda: pc.relu(x),
            lambda: x * 0.5,
            lambda: pc.tanh(x),
            lambda: x * x,
            lambda: pc.clip(x, -1.0, 1.0),
            lambda: -x,
        ]
        if axis is not None:
            kinds += [
                lambda: pc.softmax(x, axis),
                lambda: pc.cumsum(x, axis) * 0.1,
                lambda: pc.pad(x, (1,) * x.ndim, (0,) * x.ndim),
                lambda: x.redistribute(sbp=self._demand(x.shape)),
            ]
        return self.draw.choice(kinds)()

    def _join(self, x: Value) -> Value:
        equal = [each for each in self.values if each.shape == x.shape]
        other = self.draw.choice(equal)
        kinds: list[Callable[[], Value]] = [
            lambda: x + other,
            lambda: x * other,
            lambda: pc.maximum(x, other),
            lambda: pc.where(pc.greater(x, 0.0), other, x * 2.0),
        ]
        if x.ndim:
            kinds += [
                lambda: pc.concat([x, other], self.draw.randrange(x.ndim)),
                lambda: x + x.sum(axis=0),
                lambda: x - pc.mean(x, -1, keepdims=True),
            ]
            if self.trained:
                kinds.append(lambda: x + self._parameter(x.shape[-1]))
        return self.draw.choice(kinds)()

    def _reduce(self, x: Value) -> Value:
        if not x.ndim:
            return x + 1.0
        axis = self.draw.randrange(x.ndim)
        return self.draw.choice(
            [
                lambda: x.sum(axis=axis),
                lambda: pc.mean(x, axis),
                lambda: pc.max(x, axis),
                lambda: x.sum(axis=axis, keepdims=True),
                lambda: pc.logsumexp(x, axis),
            ]
        )()

    def _view(self, x: Value) -> Value:
        if x.ndim < 2:
            return x.reshape(1, -1) if x.ndim else x.reshape(1)
        axes = self.draw.sample(range(x.ndim), x.ndim)
        kinds: list[Callable[[], Value]] = [
            lambda: pc.permute(x, axes),
            lambda: x.reshape(-1),
            lambda: x.reshape(x.shape[0], -1),
            lambda: pc.flip(x, (axes[0],)),
            lambda: pc.unsqueeze(x, axes[0]),
        ]
        if x.shape[0] > 1:
            kinds.append(lambda: x[: (x.shape[0] + 1) // 2])
        if x.shape[0] % 2 == 0:
            kinds.append(lambda: x.reshape(2, x.shape[0] // 2, *x.shape[1:]))
        return self.draw.choice(kinds)()

    def _product(self, x: Value) -> Value:
        if x.ndim < 2:
            return pc.relu(x)
        square = [each for each in self.values if each.ndim == 2 and each.shape[0] == x.shape[-1]]
        if square and x.ndim == 2 and self.draw.random() < 0.4:
            return x @ self.draw.choice(square)
        if self.trained:
            return x @ self._parameter(x.shape[-1], self.draw.choice(SIZES))
        return x @ pc.matrix_transpose(x)

    def _finish(self) -> None:
        last = self.values[-1]
        loss = pc.mean(last * last) if last.ndim else last * 1.0
        if len(self.values) > 2 and self.draw.random() < 0.3:
            second = pc.mean(pc.tanh(self.values[-2]))
            pc.output("second", second)
            loss = loss + second * 0.5
        if self.tables and self.trained:
            self.draw.choice(OPTIMIZERS)().minimize(loss)
        pc.output("loss", loss)
        for number, value in enumerate(self.values[1:-1]):
            if self.draw.random() < 0.15:
                pc.output(f"out{number}", value)
        if self.draw.random() < 0.3:
            pc.output("last", last)


def on_one_rank(job: Job) -> Job:
    """The job on the first rank of its mesh alone."""
    mesh = job.ops[0].placement
    alone = pc.Placement("cpu", np.zeros([1] * mesh.ndim, int), axes=mesh.axes)
    values: dict[str, Value] = {}

    def moved(op: Op) -> Op:
        outputs = tuple(replace(value, placement=alone) for value in op.outputs)
        values.update({value.name: value for value in outputs})
        inputs = tuple(values[value.name] for value in op.inputs)
        return replace(op, inputs=inputs, outputs=outputs, placement=alone)

    return replace(job, ops=tuple(map(moved, job.ops)))


def outputs_of(job: Job, seed: int, alone: bool = False) -> dict[str, np.ndarray]:
    """The outputs of a job's second step, with random feeds; on one rank if `alone`."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for op in job.ops:
        if op.kind == "input":
            shape, dtype = op.outputs[0].shape, str(op.outputs[0].dtype)
            drawn = rng.integers(0, 4, shape) if dtype == "int64" else rng.normal(size=shape)
            feeds[str(op.attr("name"))] = drawn.astype(dtype)
    with pc.run(on_one_rank(job) if alone else job) as session:
        session.step(**feeds)
        return {name: np.asarray(value) for name, value in session.step(**feeds).items()}
