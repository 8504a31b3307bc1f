"""Random state, which determines the counter-based random numbers of the next random op."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from plancompiler.errors import UsageError
from plancompiler.ir.source import user_line

logger = logging.getLogger("plancompiler.eager")


class Generator:
    """The state of eager random ops: a seed, a step, and the number of the next draw in the step.

    The random number of an element depends only on these and on its index in the global tensor, so
    a draw is the same in every layout, provided that all ranks make the same draws. A traced job
    with this seed draws the same numbers in its step `step`, if it has as many random ops as are
    called here in a step.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = _whole("seed", seed)
        self.step = 0
        self.number = 0
        self._given: set[object] = set()
        """The data sources that have given a batch since the step was chosen."""
        self._warned = False

    def next_number(self) -> int:
        """The number of the next draw; each number is used once per step."""
        number, self.number = self.number, self.number + 1
        return number

    def start_step(self, step: int) -> None:
        """Draw the numbers of step `step` of a traced job: draws are counted from 0 again."""
        self.step, self.number = _whole("step", step), 0
        self._given.clear()

    def note_data(self, source: object) -> None:
        """Note that a data source gives the batch of this step.

        The first time that a source gives the same batch again, a warning is logged: a loop that
        never calls `start_step` gets the same batch every time.
        """
        if source not in self._given:
            self._given.add(source)
        elif not self._warned:
            self._warned = True
            logger.warning(
                "%s reads the batch of step %d again: outside of jobs a batch is that of the "
                "generator's step; call pc.default_generator().start_step(k) before step k",
                user_line(),
                self.step,
            )

    def state(self) -> dict[str, int]:
        """What `load_state` takes."""
        return {"seed": self.seed, "step": self.step, "number": self.number}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from a saved state. UsageError for what is none."""
        if not isinstance(state, Mapping) or set(state) != {"seed", "step", "number"}:
            raise UsageError(
                "this is not the state of a generator",
                got=", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state),
                expected="seed, step, number",
            )
        self.seed, self.step, self.number = (
            _whole(name, state[name]) for name in ("seed", "step", "number")
        )
        self._given.clear()


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise UsageError(
            f"a generator's {name} is a whole number of 63 bits",
            got=repr(value),
            expected="0 to 2**63 - 1",
        )
    return value
