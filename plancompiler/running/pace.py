"""How many steps a session asks for in one request, so that its ranks are never far ahead."""

from __future__ import annotations

import math

from plancompiler.ir import Job

REQUEST_TIME = 1.0
"""Seconds for which a request has steps, about: an aim and no limit."""
REQUEST_BYTES = 16 << 20
"""A request's steps have about so many bytes of outputs, which wait for the reader."""
_GROWTH = 8
"""A request has at most so many times the steps of the largest before it."""


class Pace:
    """Learns from the requests that were made how many steps the next one may have."""

    def __init__(self, job: Job) -> None:
        types = [output.type for output in job.outputs.values()]
        step_bytes = sum(math.prod(each.shape) * each.dtype.itemsize for each in types)
        self._most = max(1, REQUEST_BYTES // max(1, step_bytes))
        self.steps = 1
        """Of the next request, if so many are wanted."""
        self.is_known = False
        """Whether a request was made that tells how long a step takes."""

    def took(self, steps: int, seconds: float) -> None:
        """A request for at most `self.steps` took so long, with the reading of its outputs."""
        fitting = int(REQUEST_TIME * steps / max(seconds, 1e-6))
        if steps < self.steps and seconds < REQUEST_TIME:
            # Of a short request most of the time is not that of its steps.
            fitting = max(fitting, self.steps)
        self.is_known = True
        self.steps = max(1, min(fitting, _GROWTH * self.steps, self._most))
