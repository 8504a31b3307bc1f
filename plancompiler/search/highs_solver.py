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


@dataclass(frozen=True)
class Solution:
    """The columns of a least solution."""

    columns: np.ndarray | None
    """None where none is known."""
    bound: float
    """No solution costs less, by the solver's word; infinite where there is none."""
    memory_price: float = 0.0
    """What the linear program would save by as much memory again as there is, in seconds."""


def solve(program: LinearProgram) -> Solution:
    """The least solution: of the linear program, and where that is not whole, of the mixed one."""
    highspy = _highspy()
    # The class below `Highs`, which would print a banner and start threads for callbacks.
    solver = highspy.Highs.__mro__[1]()
    solver.setOptionValue("output_flag", False)
    for name, value in OPTIONS.items():
        solver.setOptionValue(name, value)
    scale = GREATEST_PRICE / max(float(program.costs.max(initial=0.0)), 1e-30)
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
    chosen = columns[: program.choices]
    if bool(np.all(np.abs(chosen - np.round(chosen)) < 1e-6)):
        return Solution(columns, solver.getInfo().objective_function_value / scale, memory_price)
    kinds = highspy.HighsVarType
    flows = len(program.costs) - program.choices
    model.integrality_ = [kinds.kInteger] * program.choices + [kinds.kContinuous] * flows
    solver.passModel(model)
    solver.run()
    bound = solver.getInfo().mip_dual_bound / scale
    if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        bound = np.inf
    if solver.getInfo().primal_solution_status != FEASIBLE:
        return Solution(None, bound)
    return Solution(np.array(solver.getSolution().col_value), bound, memory_price)


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
