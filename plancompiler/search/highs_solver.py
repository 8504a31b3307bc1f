"""Linear programs solved by HiGHS (Q. Huangfu and J. Hall, 2018), always in the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.search.linear_program import LinearProgram

GREATEST_PRICE = 1e5
"""To which prices are scaled: far above the solver's tolerances, which are absolute, so that small
prices are, too."""
FEASIBLE = 2
"""The solver's number for a solution that keeps to all rows."""
OPTIONS: dict[str, bool | int | float | str] = {
    "threads": 1,
    "random_seed": 0,
    "parallel": "off",
    "mip_rel_gap": 1e-4,
    "mip_max_nodes": 200,
}
"""A limit of nodes, and not of time, gives the same answer on every machine."""
MOST_MIXED = 80_000
"""Columns of a program with a limit of memory up to which the mixed-integer program is tried first:
beyond, it takes minutes."""
FEW_COLUMNS = 10_000
"""Of a mixed-integer program, up to which looking for columns of no use takes more than it saves:
prices have left them out."""
DEARER = 1e-3
"""By how much a price of memory is raised, so that what is least by it fits."""


@dataclass(frozen=True)
class Solution:
    """The columns of a least solution."""

    columns: np.ndarray | None
    """None where none is known."""
    bound: float
    """No solution costs less, by the solver's word; infinite where there is none."""
    memory_price: float = 0.0
    """What the linear program would save by as much memory again as there is, in seconds."""


def solve(program: LinearProgram, wanted: float = np.inf) -> Solution:
    """The least solution: of the linear program, and where that is not whole, of the mixed one. If
    there is none below what is `wanted`, in seconds, any other may be returned, with that bound.
    """
    highspy, solver = _solver()
    scale = _scale(program)
    model = _model(highspy, program, scale)
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    if status != highspy.HighsModelStatus.kOptimal:
        infeasible = status == highspy.HighsModelStatus.kInfeasible
        return Solution(None, np.inf if infeasible else -np.inf)
    columns = np.array(solver.getSolution().col_value)
    memory_price = 0.0
    if program.memory_row is not None:
        memory_price = max(0.0, -solver.getSolution().row_dual[program.memory_row] / scale)
    bound = solver.getInfo().objective_function_value / scale
    if _whole(program, columns):
        return Solution(columns, bound, memory_price)
    if program.memory_row is not None and len(program.costs) > MOST_MIXED:
        columns = _least_at_price(solver, program, memory_price * (1 + DEARER) * scale, scale)
        if _whole(program, columns):
            return Solution(columns, bound, memory_price)
    kinds = highspy.HighsVarType
    flows = len(program.costs) - program.choices
    model.integrality_ = [kinds.kInteger] * program.choices + [kinds.kContinuous] * flows
    solver.passModel(model)
    if len(program.costs) <= FEW_COLUMNS:
        solver.setOptionValue("presolve", "off")
    if program.memory_row is not None:
        solver.setOptionValue("objective_bound", wanted * scale)
    solver.run()
    bound = solver.getInfo().mip_dual_bound / scale
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        bound = np.inf
    # What is not wanted the solver leaves out, and its bound does not count it.
    bound = min(bound, wanted)
    if solver.getInfo().primal_solution_status != FEASIBLE:
        return Solution(None, bound)
    return Solution(np.array(solver.getSolution().col_value), bound, memory_price)


class Relaxation:
    """The linear program of a choice, to which rows are added and whose columns are closed: it is
    solved again from where it ended.
    """

    def __init__(self, program: LinearProgram) -> None:
        self._highspy, self._solver = _solver()
        self._scale, self._count = _scale(program), program.choices
        self._solver.passModel(_model(self._highspy, program, self._scale))

    def least(self, closed: np.ndarray) -> tuple[float, np.ndarray]:
        """Seconds, infinite where nothing is possible, and the candidates' columns, without those
        that are `closed`.
        """
        columns = np.arange(self._count, dtype=np.int32)
        self._solver.changeColsBounds(
            self._count, columns, np.zeros(self._count), np.where(closed, 0.0, 1.0)
        )
        self._solver.run()
        status = self._solver.getModelStatus()
        if status == self._highspy.HighsModelStatus.kInfeasible:
            return np.inf, np.zeros(self._count)
        if status != self._highspy.HighsModelStatus.kOptimal:
            return -np.inf, np.zeros(self._count)
        seconds = self._solver.getInfo().objective_function_value / self._scale
        return seconds, np.array(self._solver.getSolution().col_value)[: self._count]

    def add_row(self, weights: np.ndarray, least: float) -> None:
        """Let `weights @ columns` of the candidates be at least so much."""
        (used,) = np.nonzero(weights)
        self._solver.addRow(least, np.inf, len(used), used.astype(np.int32), weights[used])


def _solver() -> tuple[Any, Any]:
    """The package, and a solver with our options."""
    highspy = _highspy()
    # The class below `Highs`, which would print a banner and start threads for callbacks.
    solver = highspy.Highs.__mro__[1]()
    solver.setOptionValue("output_flag", False)
    for name, value in OPTIONS.items():
        solver.setOptionValue(name, value)
    return highspy, solver


def _scale(program: LinearProgram) -> float:
    return GREATEST_PRICE / max(float(program.costs.max(initial=0.0)), 1e-30)


def _whole(program: LinearProgram, columns: np.ndarray) -> bool:
    chosen = columns[: program.choices]
    return bool(np.all(np.abs(chosen - np.round(chosen)) < 1e-6))


def _least_at_price(
    solver: Any, program: LinearProgram, memory_price: float, scale: float
) -> np.ndarray:
    """The least solution of a program whose limit of memory has become a price, from where the
    solver has ended. Above the price that the limit has it holds no more than the limit.
    """
    row, count = program.memory_row, len(program.costs)
    held, places = np.zeros(count), program.rows == row
    held[program.columns[places]] = program.values[places]
    solver.changeRowBounds(row, -np.inf, np.inf)
    costs = program.costs * scale + memory_price * held
    solver.changeColsCost(count, np.arange(count, dtype=np.int32), costs)
    solver.run()
    return np.array(solver.getSolution().col_value)


def _highspy() -> Any:
    try:
        import highspy  # noqa: PLC0415  # an extra, which only searches need
    except ImportError as error:
        raise UsageError(
            "the search for layouts needs HiGHS",
            got="no package highspy",
            hint="pip install 'plancompiler[search]'",
        ) from error
    return highspy


def _model(highspy: Any, program: LinearProgram, scale: float) -> Any:
    order = np.argsort(program.columns, kind="stable")
    starts = np.searchsorted(program.columns[order], np.arange(len(program.costs) + 1))
    flows = len(program.costs) - program.choices
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.costs), len(program.lower)
    model.col_cost_ = program.costs * scale
    model.col_lower_ = np.zeros(len(program.costs))
    model.col_upper_ = np.concatenate([np.ones(program.choices), np.full(flows, np.inf)])
    model.row_lower_, model.row_upper_ = program.lower, program.upper
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = starts.astype(np.int32)
    matrix.index_ = program.rows[order].astype(np.int32)
    matrix.value_ = program.values[order]
    return model
