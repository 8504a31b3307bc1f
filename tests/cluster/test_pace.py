"""How many steps a session asks for at once: as many as take a short time, and a bounded memory."""

from __future__ import annotations

import plancompiler as pc
from plancompiler.running.pace import REQUEST_BYTES, REQUEST_TIME, Pace


def job(elements: int) -> pc.Job:
    with pc.job("outputs") as made:
        pc.output("x", pc.ones((elements,), "float32", pc.Placement("cpu", [0])))
    return made


def test_requests_grow_until_they_take_their_time() -> None:
    pace = Pace(job(1))
    assert (pace.steps, pace.is_known) == (1, False)
    requests = []
    for _ in range(5):
        pace.took(pace.steps, pace.steps * REQUEST_TIME / 1000)
        requests.append(pace.steps)
    assert requests == [8, 64, 512, 1000, 1000]
    assert pace.is_known
    pace.took(3, REQUEST_TIME / 100)  # a short request, most of which is overhead
    assert pace.steps == 1000
    pace.took(1000, 4 * REQUEST_TIME)
    assert pace.steps == 250
    pace.took(3, 3 * REQUEST_TIME)
    assert pace.steps == 1
    pace.took(1, 0.0)
    assert pace.steps == 8


def test_the_outputs_of_a_request_have_a_bounded_size() -> None:
    for elements, most in ((REQUEST_BYTES // 16, 4), (REQUEST_BYTES, 1)):
        pace = Pace(job(elements))
        for _ in range(3):
            pace.took(pace.steps, 0.0)
        assert pace.steps == most
