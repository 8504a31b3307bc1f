"""Anomaly detection: which op made the first value that is not finite.

Every output of every op is looked at. What is infinite or no number already in an op's inputs, or
is among its attributes (a mask of -inf), is not its doing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import NonFiniteError
from plancompiler.ir.op import AttrValue

ANOMALY_VARIABLE = "PLANCOMPILER_ANOMALY"
"""Set to 1 where all runs of a process look for anomalies."""

Array = np.ndarray[Any, np.dtype[Any]]

FINITE, INFINITE, NO_NUMBER = range(3)
_NAMES = {INFINITE: "inf", NO_NUMBER: "nan"}


def anomaly_wanted() -> bool:
    """What the environment says."""
    return os.environ.get(ANOMALY_VARIABLE, "").strip() not in ("", "0")


def state_of(arrays: Iterable[Array]) -> int:
    """The worst that is in arrays: FINITE, INFINITE or NO_NUMBER."""
    worst = FINITE
    for array in arrays:
        if array.size and array.dtype.kind not in "biu" and not np.isfinite(array).all():
            if np.isnan(array).any():
                return NO_NUMBER
            worst = INFINITE
    return worst


def says_non_finite(attrs: Mapping[str, AttrValue]) -> bool:
    """Whether an attribute of an op is infinite or no number."""
    return any(
        isinstance(each, float) and not math.isfinite(each)
        for value in attrs.values()
        for each in (value if isinstance(value, tuple) else (value,))
    )


def check(before: int, outputs: Sequence[Array], what: str, when: str) -> None:
    """NonFiniteError where outputs are worse than the inputs were before: `what` made it."""
    after = state_of(outputs)
    if after <= before:
        return
    position = next(at for at, out in enumerate(outputs) if state_of([out]) == after)
    out = outputs[position]
    wrong = int(out.size - np.isfinite(out).sum())
    raise NonFiniteError(
        f"{what} made the first value that is not finite{when}",
        got=f"{_NAMES[after]} in output {position}: {wrong} of this rank's {out.size} elements",
        expected="finite numbers, as its inputs are" if before == FINITE else "no nan",
        hint="look at the inputs of this line: a division by zero, a logarithm of zero, an "
        "overflow, or a learning rate that is too large",
    )


def checked(
    run: Callable[[int], None],
    inputs: Sequence[Sequence[Array]],
    outputs: Sequence[Sequence[Array]],
    what: str,
) -> Callable[[int], None]:
    """A task's callable that checks what it makes; arrays by run, until their slots repeat."""
    period = len(outputs)

    def run_checked(version: int) -> None:
        slot = version % period
        before = state_of(inputs[slot])
        run(version)
        if not inputs[slot] or any(array.size for array in inputs[slot]):
            check(before, outputs[slot], what, f", in run {version}")

    return run_checked
