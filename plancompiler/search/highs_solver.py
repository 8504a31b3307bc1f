"""Linear programs solved by HiGHS (Q. Huangfu and J. Hall, 2018), always in the same way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.search.linear_program import LinearProgram


@dataclass(frozen=True)
class Solution:
    """What a solver found."""

    columns: np.ndarray
    duals: np.ndarray
    """Per row; those of the linear program, without the demand that choices are whole."""
    is_whole: bool


def solve(program: LinearProgram) -> Solution:
    """The least solution: of the linear program, and where that is not whole, of the mixed one.

    UsageError where there is none.
    """
    # The greatest prices are far above the solver's tolerances, which are absolute, and so are small
    # ones.
    scale = 1e3 / max(float(program.costs.max(initial=0.0)), 1e-30)
    solver, model = _load(program, scale)
    solver.run()
    _check(solver)
    columns = np.array(solver.getSolution().col_value)
    duals = np.array(solver.getSolution().row_dual)
    chosen = columns[: program.choices]
    whole = bool(np.all(np.abs(chosen - np.round(chosen)) < 1e-6))
    if whole:
        return Solution(columns, duals / scale, True)
    highspy = _highspy()
    kinds = [highspy.HighsVarType.kInteger] * program.choices
    kinds += [highspy.HighsVarType.kContinuous] * (len(program.costs) - program.choices)
    model.integrality_ = kinds
    solver.passModel(model)
    solver.run()
    _check(solver)
    return Solution(np.array(solver.getSolution().col_value), duals / scale, False)


def _highspy():  # type: ignore[no-untyped-def]
    try:
        import highspy  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise UsageError(
            "the search for layouts needs HiGHS",
            got="no package highspy",
            hint="pip install 'plancompiler[search]'",
        ) from error
    return highspy


def _load(program: LinearProgram, scale: float):  # type: ignore[no-untyped-def]
    highspy = _highspy()
    solver = highspy.Highs()
    for name, value in (
        ("output_flag", False),
        ("threads", 1),
        ("random_seed", 0),
        ("parallel", "off"),
        ("mip_rel_gap", 1e-3),
    ):
        solver.setOptionValue(name, value)
    order = np.argsort(program.columns, kind="stable")
    starts = np.searchsorted(program.columns[order], np.arange(len(program.costs) + 1))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.costs), len(program.lower)
    model.col_cost_ = program.costs * scale
    model.col_lower_ = np.zeros(len(program.costs))
    model.col_upper_ = np.concatenate(
        [np.ones(program.choices), np.full(len(program.costs) - program.choices, np.inf)]
    )
    model.row_lower_, model.row_upper_ = program.lower, program.upper
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = starts.astype(np.int32)
    matrix.index_ = program.rows[order].astype(np.int32)
    matrix.value_ = program.values[order]
    solver.passModel(model)
    return solver, model


def _check(solver) -> None:  # type: ignore[no-untyped-def]
    status = solver.getModelStatus()
    if status != _highspy().HighsModelStatus.kOptimal:
        raise UsageError(
            "no layouts fit",
            got=solver.modelStatusToString(status),
            hint="allow more memory, or pin less",
        )
