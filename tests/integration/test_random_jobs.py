"""Random jobs: data, variables, ops, layouts and updates mixed without a plan.

A job is made of random calls on random placements of up to 8 ranks, under random settings of the
compiler. What it computes is compared with the dense run, which knows nothing of placements,
boxing, streams and memory. Settings may be refused for a job; then it runs without them.

    python -m tests.integration.test_random_jobs FIRST LAST

tries many seeds.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.errors import (
    JobError,
    MicrobatchError,
    UsageError,
)
from plancompiler.executor.local_run import LocalWorld
from plancompiler.ir import Job, Placement, Value
from plancompiler.ir.pipeline import SCHEDULES
from plancompiler.lower.compile import Compilation, compile_plans
from plancompiler.passes import PASSES, Config
from tests.boxing.cases import MESHES, random_sbp
from tests.dense import run_dense

OLD_VALUE = "reads a variable's old value after its update"
"""Why a job may be refused whatever its settings: one op may ask for a value before and after the
same update, and there is no such order."""
SHAPES = ((4, 6), (5, 3), (1, 7), (6, 4), (8, 8), (3,), (16,), (), (2, 3, 5), (4, 2, 2), (90, 100))
UNARY = (pc.tanh, pc.sigmoid, pc.relu, pc.neg, pc.abs, pc.gelu, lambda x: x * 0.5, lambda x: x + x)
BINARY = (pc.add, pc.sub, pc.mul, pc.maximum, pc.minimum)
EVEN_SHAPES = ((4, 6), (8, 8), (4, 4), (8, 3), (16,), (8,), (4, 2, 2), (8, 90), ())
CONFIGS = ({"fuse_bytes": 0}, {}, {"fuse_bytes": 600}, {"passes": ()})


class RandomJob:
    """One random job, `job`.

    `mixing`: ops may read old and new values of variables. `even`: first axes can be cut into
    micro-batches, and are.
    """

    def __init__(
        self, seed: int, data: Path, calls: int, mixing: bool = False, even: bool = False
    ) -> None:
        self.mixing = mixing
        self.even = even
        self.shapes = EVEN_SHAPES if even else SHAPES
        self.rng = np.random.default_rng(seed)
        self.values: list[Value] = []
        self.updated: list[Value] = []
        self.variables: list[Value] = []
        self.placements = [self._placement(each) for each in range(self.rng.integers(1, 4))]
        config = self._config()
        self.zero = config.zero
        with pc.job(f"random_{seed}", seed=seed, config=config) as self.job:
            for _ in range(self.rng.integers(1, 4)):
                self._source(data)
            for number in range(self.rng.integers(1, 5)):
                self._variable(number)
            for _ in range(calls):
                self._call(self.values)
            if config.zero or self.rng.random() < 0.5:
                self._train()
            self._update()
            for number, value in enumerate(self._some(self.values, 5)):
                pc.output(f"y{number}", value)
            for number, value in enumerate(self._some(self.variables, 2)):
                pc.output(f"v{number}", value)
            for number, value in enumerate(self._some(self.updated, 4)):
                pc.output(f"u{number}", value)

    def _config(self) -> Config:
        config: dict[str, Any] = dict(self._pick(CONFIGS))
        if self.rng.random() < 0.4:
            names = [each.name for each in PASSES]
            config["passes"] = tuple(name for name in names if self.rng.random() < 0.6)
        if self.rng.random() < 0.6:
            config["zero"] = int(self.rng.integers(1, 4))
            config["prefetch"] = int(self.rng.integers(3))
            axes = {name for place in self.placements for name in place.axes or ()}
            config["dp_axes"] = self._pick((("dp",), tuple(sorted(axes))))
        if self.rng.random() < 0.2:
            config["sequence_parallel"] = True
        if self.even:
            config["microbatches"] = int(self._pick((2, 4)))
            config["schedule"] = self._pick(SCHEDULES)
        if "passes" in config:
            needed = {each.owner for each in Config.options() if each.asks and each.name in config}
            config["passes"] = tuple(sorted({*config["passes"], *needed}))
        return Config(**config)

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
        if not self.values or self.rng.random() < 0.5:
            sbp = self._split(placement, 2)
            batch = 8 if self.even else 6
            arrays = pc.data.Arrays(data, ("x", "y"), batch, placement=placement, sbp=sbp)
            self.values += [arrays["x"], arrays["y"]]
        else:
            shape = self._pick(self.shapes)
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
        placement, shape = self._pick(self.placements), self._pick(self.shapes)
        parameter = pc.nn.Parameter(
            shape, "float64", "uniform", (-1.0, 1.0), True, name=f"w{number}"
        )
        if self.zero and self.rng.random() < 0.7:
            parameter.place(placement)
        else:
            parameter.place(placement, self._split(placement, len(shape)))
        self.variables.append(parameter.value)
        self.values.append(parameter.value)

    def _call(self, values: list[Value]) -> None:
        x = self._pick(values)
        choice = self.rng.integers(15)
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
        elif choice == 14:
            made = pc.checkpoint(self._chain(x, values))(x)
        else:
            made = x * 0.9
        values.append(made)

    def _chain(self, x: Value, values: list[Value]):
        """A function of a few random calls, which are computed again for backward."""
        fitting = [y for y in values if y.placement == x.placement and y.shape in (x.shape, ())]
        other = self._pick(fitting)
        calls = [self._pick((*UNARY, self._moved)) for _ in range(self.rng.integers(1, 5))]
        home = x.placement

        def chain(value: Value) -> Value:
            for call in calls:
                value = call(value)
            if value.placement != home:
                value = value.redistribute(placement=home)
            return pc.tanh(value * other)

        return chain

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
        if self.rng.random() < 0.5:
            self.values += optimizer.minimize(loss, clip_norm=self._pick((None, 1.0)))
        else:
            grads = pc.gradients(loss, self.variables)
            factors = self._pick(((0.5, 0.5), (0.25, 1.0), (1.0, 2.0)))
            scaled = [grad * self._pick(factors) for grad in grads]
            optimizer.apply(self.variables, scaled)
            self.values += self._pick((grads, scaled, []))
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


def compare(results, expected, where: str) -> None:
    for step, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        assert got.keys() == wanted.keys(), where
        for name in wanted:
            np.testing.assert_allclose(
                got[name], wanted[name], rtol=1e-7, atol=1e-9, err_msg=f"{where} step {step} {name}"
            )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("rows"))


def compiled(job: Job) -> tuple[Compilation | None, list[str]]:
    """The plans under the job's settings, or without those that are refused, or none if the job
    itself is; and why something was refused.
    """
    reasons: list[str] = []
    while True:
        try:
            return compile_plans(job, 8, "rank_per_iter"), reasons
        except JobError as error:
            assert OLD_VALUE in str(error)  # noqa: PT017
            return None, [*reasons, OLD_VALUE]
        except (MicrobatchError, UsageError) as error:
            reason = error.report.what
        without: dict[str, Any] = {"microbatches": 1, "schedule": "gpipe"}
        if reason.startswith("zero "):
            without = {"zero": 0}
        elif reason.startswith("sequence_parallel "):
            without = {"sequence_parallel": False}
        config = replace(job.config, **without)
        assert config != job.config, reason
        job = replace(job, config=config)
        reasons.append(reason)


def run_and_compare(seed: int, data: Path, even: bool = False) -> list[str]:
    """One random job; why some of its settings were refused."""
    job = RandomJob(seed, data, 12 + seed % 30, mixing=seed % 2 == 1, even=even).job
    compilation, reasons = compiled(job)
    if compilation is not None:
        assert compile_plans(compilation.job, 8, "naive").digest == compilation.digest
        with LocalWorld(compilation.plans) as world:
            where = f"seed {seed} ({compilation.job.config})"
            compare(world.run(6), run_dense(job, 6), where)
    return reasons


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_on_threads(seed: int, data: Path) -> None:
    run_and_compare(seed, data)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_micro_batches(seed: int, data: Path) -> None:
    run_and_compare(seed, data, even=True)


@pytest.mark.processes
def test_on_processes(data: Path) -> None:
    job = RandomJob(100, data, 40).job
    compilation, _ = compiled(job)
    assert compilation is not None
    job = compilation.job
    with pc.run(job, ranks=8, backend="processes") as session:
        compare(list(session.run(20)), run_dense(job, 20), "processes")


def main(first: int, last: int) -> int:
    """Seeds `first` to `last` - 1: prints every failure and how often settings were refused."""
    refused: Counter[str] = Counter()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        rows = make_data(Path(folder))
        for seed in range(first, last):
            for even in (False, True):
                try:
                    refused.update(run_and_compare(seed, rows, even) or [""])
                except Exception as error:
                    failed += 1
                    print(f"seed {seed} even {even}: {type(error).__name__}: {error}", flush=True)
    for reason, count in refused.most_common():
        print(f"{count:5d} {reason or 'not refused'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
