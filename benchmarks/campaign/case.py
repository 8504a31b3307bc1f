"""One case of a campaign: where its choices come from, what came of it, and how to replay it."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

UNFORESEEN = re.compile(
    r"that plancompiler did not foresee|unexpected \w+ while|Exception ignored|"
    r"exception calling callback|Fatal Python error|Segmentation fault|"
    r"was never (retrieved|awaited)"
)
"""What nobody who uses plancompiler may see."""
RAISED = re.compile(r"^(?!\s)([\w.]+(?:Error|Exception|Interrupt|Exit|Warning))\b")
ALLOWED = re.compile(r"plancompiler\.errors\.|KeyboardInterrupt$|SystemExit$")
"""Exceptions that the traceback of a user's own script may end with."""
CHAINED = ("During handling of the above", "The above exception was")


@dataclass(frozen=True, slots=True)
class Case:
    """The `index`-th case of a campaign with a seed; the same three give the same choices."""

    campaign: str
    seed: int
    index: int

    @property
    def choices(self) -> random.Random:
        """A fresh generator: whoever asks again gets the same choices."""
        return random.Random(f"{self.campaign} {self.seed} {self.index}")

    @property
    def replay(self) -> str:
        """The command that runs this case alone."""
        return (
            f"python -m benchmarks.campaign --kind {self.campaign} --seed {self.seed} "
            f"--case {self.index}"
        )


@dataclass(slots=True)
class Result:
    """What came of a case."""

    case: Case
    group: str
    """Its row of the table."""
    what: str
    """What was done, for people."""
    ending: str = ""
    """How it ended, in a few words that are counted."""
    seconds: float = 0.0
    """What was awaited took so long."""
    problems: list[str] = field(default_factory=list)
    """What must not be, each a sentence."""

    def require(self, holds: object, problem: str) -> None:
        """Note a problem where something does not hold."""
        if not holds:
            self.problems.append(problem)

    def as_json(self) -> dict[str, object]:
        """One line of the command's output."""
        return {
            "campaign": self.case.campaign,
            "seed": self.case.seed,
            "case": self.case.index,
            "group": self.group,
            "what": self.what,
            "ending": self.ending,
            "seconds": round(self.seconds, 2),
            "problems": self.problems,
        }


def unforeseen_lines(text: str, of_a_script: bool = False) -> list[str]:
    """Lines of standard error that say that something was not foreseen.

    A traceback is one of them, except that of a user's own script (`of_a_script`) which ends with
    an error that plancompiler raises on purpose.
    """
    unforeseen = []
    in_traceback = was_bare = False
    for line in text.splitlines():
        if UNFORESEEN.search(line):
            unforeseen.append(line)
        elif line.startswith("Traceback (most recent call last)"):
            in_traceback = of_a_script
            if not of_a_script:
                unforeseen.append(line)
        elif line.startswith(CHAINED):
            if was_bare:  # what was raised in its place counts
                unforeseen.pop()
            was_bare = False
        elif in_traceback and (raised := RAISED.match(line)):
            in_traceback = False
            was_bare = not ALLOWED.match(raised[1])
            if was_bare:
                unforeseen.append(line)
    return unforeseen
