"""The steps of a job as a client counts them."""

from __future__ import annotations

from collections.abc import Collection

from plancompiler.errors import ClusterError


class StepCount:
    """Counts a job's steps as their outputs arrive: each once, in order, with all its outputs.

    `names` are the outputs of a step; the steps of a job without outputs are not counted.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self.next: int | None = None
        """The step that must come; None until the first one has."""
        self.count = 0
        """Steps so far."""

    def came(self, step: int, outputs: Collection[str]) -> None:
        """A step is done, with these outputs."""
        missing = ", ".join(map(repr, sorted(self._names.difference(outputs))))
        if missing or self.next not in (None, step):
            raise ClusterError(
                "outputs of steps were lost or repeated on their way",
                got=f"step {step}" + (f" without {missing}" if missing else ""),
                expected=f"step {step if self.next is None else self.next} with all outputs",
            )
        self.next = step + 1
        self.count += 1

    def passed(self, count: int) -> None:
        """The master says that so many steps were not read in time, or are not wanted."""
        self.count += count
        if self.next is not None:
            self.next += count

    def expect(self, count: int) -> None:
        """The master reports that so many steps are done."""
        if self._names and self.count != count:
            raise ClusterError(
                "not as many steps arrived as were requested: outputs were "
                "lost or repeated on their way",
                got=f"outputs of {self.count} steps",
                expected=f"{count} steps",
            )
