"""Random jobs: data, variables, ops, layouts and updates mixed without a plan.

A job is made of random calls on random placements of up to 8 ranks. What it computes is compared
with the dense run, which knows nothing of placements, boxing, streams and memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import JobError
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import Placement, Value
from plancompiler.ir.config import Config
from plancompiler.lower.compile import compile_plans
from tests.boxing.cases import MESHES, random_sbp
from tests.dense import run_dense

SHAPES = ((4, 6), (5, 3), (1, 7), (6, 4), (8, 8), (3,), (16,), (), (2, 3, 5), (4, 2, 2), (90, 100))
UNARY = (pc.tanh, pc.sigmoid, pc.relu, pc.neg, pc.abs, pc.gelu, lambda x: x * 0.5, lambda x: x + x)
BINARY = (pc.add, pc.sub, pc.mul, pc.maximum, pc.minimum)
CONFIGS = ({"fuse_bytes": 0}, {}, {"fuse_bytes": 600}, {"passes": ()})


class RandomJob:
    """One random job, `job`. `mixing`: ops may read old and new values of variables."""

    def __init__(self, seed: int, data: Path, calls: int, mixing: bool = False) -> None:
        self.mixing = mixing
        self.rng = np.random.default_rng(seed)
        self.values: list[Value] = []
        self.updated: list[Value] = []
        self.variables: list[Value] = []
        self.placements = [self._placement(each) for each in range(self.rng.integers(1, 4))]
        config = Config(**self._pick(CONFIGS))  # type: ignore[arg-type]
        with pc.job(f"random_{seed}", seed=seed, config=config) as self.job:
            for _ in range(self.rng.integers(1, 4)):
                self._source(data)
            for number in range(self.rng.integers(1, 5)):
                self._variable(number)
            for _ in range(calls):
                self._call(self.values)
            if self.rng.random() < 0.6:
                self._train()
            self._update()
            for number, value in enumerate(self._some(self.values, 5)):
                pc.output(f"y{number}", value)
            for number, value in enumerate(self._some(self.variables, 2)):
                pc.output(f"v{number}", value)
            for number, value in enumerate(self._some(self.updated, 4)):
                pc.output(f"u{number}", value)

    def _pick(self, options):
        return options[self.rng.integers(len(options))]

    def _some(self, options, count):
        return [self._pick(options) for _ in range(count)] if options else []

    def _placement(self, number: int) -> Placement:
        mesh = self._pick(MESHES)
        axes = ("dp", "tp", "pp")[: len(mesh)]
        return Placement("cpu", self.rng.permutation(8)[: int(np.prod(mesh))].reshape(mesh), axes)

    def _sbp(self, placement: Placement, ndim: int):
        return random_sbp(self.rng, placement, ndim)

    def _split(self, placement: Placement, ndim: int):
        choices = ["B", *(f"S({axis})" for axis in range(ndim))]
        return [self._pick(choices) for _ in placement.hierarchy]

    def _source(self, data: Path) -> None:
        placement = self._pick(self.placements)
        if self.rng.random() < 0.5:
            sbp = self._split(placement, 2)
            arrays = pc.data.Arrays(data, ("x", "y"), 6, placement=placement, sbp=sbp)
            self.values += [arrays["x"], arrays["y"]]
        else:
            shape = self._pick(SHAPES)
            self.values.append(
                pc.uniform(
                    shape,
                    -1,
                    1,
                    dtype="float64",
                    placement=placement,
                    sbp=self._split(placement, len(shape)),
                )
            )

    def _variable(self, number: int) -> None:
        placement, shape = self._pick(self.placements), self._pick(SHAPES)
        parameter = pc.nn.Parameter(
            shape, "float64", "uniform", (-1.0, 1.0), True, name=f"w{number}"
        ).place(placement, self._split(placement, len(shape)))
        self.variables.append(parameter.value)
        self.values.append(parameter.value)

    def _call(self, values: list[Value]) -> None:
        x = self._pick(values)
        choice = self.rng.integers(14)
        if choice <= 3:
            made = self._moved(x)
        elif choice <= 6:
            made = self._pick(UNARY)(x)
        elif choice <= 8:
            fitting = [y for y in values if y.placement == x.placement and y.shape in (x.shape, ())]
            made = self._pick(BINARY)(x, self._pick(fitting))
        elif choice == 9:
            flat = int(np.prod(x.shape))
            made = x.reshape(self._pick(((flat,), x.shape[::-1])))
        elif choice == 10 and x.ndim:
            axis = int(self.rng.integers(x.ndim))
            made = self._pick((pc.sum, pc.mean, pc.max, pc.min))(x, axis, self.rng.random() < 0.5)
            made = made * 0.3
        elif choice == 11 and x.ndim == 2:
            fitting = [y for y in values if y.placement == x.placement and y.shape == x.shape]
            made = pc.matmul(x, self._pick(fitting), transpose_b=True) * 0.1
        elif choice == 12 and x.ndim:
            made = pc.softmax(x, int(self.rng.integers(x.ndim)))
        elif choice == 13 and x.ndim:
            made = pc.transpose(x)
        else:
            made = x * 0.9
        values.append(made)

    def _moved(self, x: Value) -> Value:
        placement = x.placement if self.rng.random() < 0.5 else self._pick(self.placements)
        return x.redistribute(placement=placement, sbp=self._sbp(placement, x.ndim))

    def _train(self) -> None:
        loss = None
        home = self.placements[0]
        for value in [*self._some(self.values, 3), *self.variables]:
            term = pc.tanh(value).mean().redistribute(placement=home, sbp=["B"] * home.ndim)
            loss = term if loss is None else loss + term
        optimizer = self._pick(
            (pc.optim.SGD(0.1), pc.optim.SGD(0.1, momentum=0.9), pc.optim.Adam(0.01))
        )
        self.values += optimizer.minimize(loss, clip_norm=self._pick((None, 1.0)))
        self.values.append(loss)

    def _settled(self, value: Value) -> Value:
        """The value, computed from what variables held before their updates."""
        return value if self.mixing else value * 0.5

    def _update(self) -> None:
        for number in range(self.rng.integers(3)):
            value = self._settled(self._pick(self.values))
            state = (
                pc.nn.Buffer(value.shape, "float64", "ones", name=f"average{number}")
                .place(value.placement, self._split(value.placement, value.ndim))
                .value
            )
            for _ in range(self.rng.integers(3)):
                self.values.append(self._moved(state) * 0.5)
            self.updated.append(pc.moving_average_update(state, value, 0.5))
        if self.updated:
            pool = [
                *self.updated,
                *map(self._settled, self._some(self.values, self.rng.integers(5))),
            ]
            for _ in range(8):
                self._call(pool)
            self.updated = pool


def make_data(folder: Path) -> Path:
    path = folder / "rows.npz"
    rng = np.random.default_rng(5)
    np.savez(path, x=rng.uniform(-1, 1, (23, 4)), y=rng.uniform(-1, 1, (23, 6)))
    return path


def compare(found, expected, where: str) -> None:
    for step, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert got.keys() == wanted.keys(), where
        for name in wanted:
            np.testing.assert_allclose(
                got[name], wanted[name], rtol=1e-7, atol=1e-9, err_msg=f"{where} step {step} {name}"
            )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize("seed", range(30))
def test_on_threads(seed: int, data: Path) -> None:
    job = RandomJob(seed, data, 12 + seed, mixing=seed % 2 == 1).job
    try:
        compilation = compile_plans(job, 8, "rank_per_iter")
    except JobError as error:
        # One op may ask for a value before and after the same update: there is no such order.
        assert "reads a variable's old value after its update" in str(error)  # noqa: PT017
        return
    assert compile_plans(job, 8, "naive").digest == compilation.digest
    with LocalWorld(compilation.plans) as world:
        compare(world.run(6), run_dense(job, 6), f"seed {seed}")


def test_on_processes(data: Path) -> None:
    job = RandomJob(100, data, 40).job
    with pc.run(job, ranks=8, backend="processes") as session:
        compare(list(session.run(20)), run_dense(job, 20), "processes")
