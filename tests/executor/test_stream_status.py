"""Who is to blame where ranks wait for each other, and the form in which ranks say what they do."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.errors import WireFormatError
from plancompiler.executor.comm import host_wire
from plancompiler.executor.stream_status import (
    MAX_RANKS,
    MAX_TEXT,
    Answer,
    Question,
    RankStatus,
    State,
    StreamStatus,
    judge,
    unpack_note,
)

DEADLINE = 8.0


def stream(state: State, seconds: float = 9.0, ranks: tuple[int, ...] = ()) -> StreamStatus:
    waits = "register 'h' (0:1.0.0) to arrive" if ranks else ""
    return StreamStatus("compute", state, seconds, "the_op", "job.py:7", 4, "step 3", waits, ranks)


def waiting(*ranks: int, seconds: float = 9.0) -> RankStatus:
    return (stream(State.WAITING, seconds, ranks),)


def running(seconds: float) -> RankStatus:
    return (stream(State.RUNNING, seconds),)


def verdict(statuses: dict[int, RankStatus]):
    return judge(0, statuses, DEADLINE, 2.0, 0.5)


def blamed(statuses: dict[int, RankStatus]):
    error = verdict(statuses).error
    assert error is not None
    return error.report


def test_the_end_of_a_chain_is_blamed() -> None:
    report = blamed({0: waiting(1), 1: waiting(2)})
    assert report.rank == 2
    assert report.what.startswith("rank 2 does not answer")
    first, second = report.got.split("; ")
    assert first.startswith("rank 0 has waited for rank 1 for 9 s: register 'h' (0:1.0.0)")
    assert second.startswith("rank 1 has waited for rank 2")
    assert second.endswith("in 'the_op' (family 4, step 3)")
    assert (report.op, report.source) == ("the_op", "job.py:7")
    assert "process of rank 2" in report.hint
    assert "longer deadline" in report.hint


def test_several_are_blamed() -> None:
    report = blamed({0: waiting(1, 2, 3), 2: waiting(1)})
    assert report.what.startswith("ranks 1, 3 do not answer")
    assert report.rank == 1


def test_a_rank_in_one_task_for_too_long() -> None:
    report = blamed({0: waiting(1), 1: running(8.5)})
    assert report.what.startswith("rank 1 has been in 'the_op' (family 4, step 3) for 8.5 s")
    assert "what that op waits for" in report.hint


def test_a_rank_that_was_told_less() -> None:
    report = blamed({0: waiting(1), 1: (stream(State.IDLE), stream(State.IDLE, 20.0))})
    assert report.what.startswith("rank 1 was not told to run step 3")
    assert "same number of steps" in report.hint


def test_the_own_kernel_is_found_behind_another_rank() -> None:
    own = (*running(9.0), stream(State.WAITING, 9.0, (1,)))
    report = blamed({0: own, 1: waiting(0)})
    assert report.rank == 0
    assert "rank 1 has waited for rank 0" in report.got


@pytest.mark.parametrize(
    "streams", [running(3.0), (*waiting(2), *running(3.0))], ids=["one", "two"]
)
def test_a_slow_rank_is_not_blamed(streams: RankStatus) -> None:
    actual = verdict({0: waiting(1), 1: streams, 2: running(1.0)})
    assert actual.error is None
    assert actual.again == pytest.approx(DEADLINE - 0.5 - 3.0)


def test_a_rank_that_could_not_yet_answer_is_not_blamed() -> None:
    actual = verdict({0: waiting(1), 1: waiting(2, seconds=1.0)})
    assert actual.error is None
    assert actual.again == pytest.approx(DEADLINE - 0.5 - 3.0)


def test_a_circle_is_shown_once_all_have_waited() -> None:
    report = blamed({0: waiting(1), 1: waiting(0)})
    assert "ranks have waited for each other" in report.what
    assert report.got.count("has waited for") == 2
    actual = verdict({0: waiting(1), 1: waiting(0, seconds=2.5)})
    assert actual.error is None
    assert actual.again == pytest.approx(DEADLINE - 0.5 - 2.5)


# --- the form -------------------------------------------------------------------------------------

ranks = st.lists(st.integers(0, 1 << 20), max_size=MAX_RANKS).map(tuple)
texts = st.text(max_size=MAX_TEXT)
statuses = st.lists(
    st.builds(
        StreamStatus,
        texts,
        st.sampled_from(State),
        st.floats(0, 1e6),
        texts,
        st.none() | texts,
        st.integers(0, 1 << 20),
        texts,
        texts,
        ranks,
    ),
    max_size=3,
).map(tuple)
numbers = st.integers(0, 1 << 20)
notes = st.builds(Question, numbers, numbers, ranks.filter(bool)) | st.builds(
    Answer, numbers, numbers, ranks, numbers, statuses
)


@settings(max_examples=100, deadline=None)
@given(notes)
def test_notes_come_back(note: Question | Answer) -> None:
    assert unpack_note(note.packed()) == note


@settings(max_examples=100, deadline=None)
@given(notes, st.data())
def test_a_damaged_note_is_refused_or_another_note(note: Question | Answer, data) -> None:
    raw = bytearray(note.packed())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireFormatError):
        assert isinstance(unpack_note(bytes(raw)), (Question, Answer))


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"[",
        b"[" * 100_000,
        b"7",
        b"{}",
        b'["question",0,1,[]]',
        b'["question",0,-1,[0]]',
        b'["question",0,1,[0],1]',
        b'["answer",0,1,[0],true,[]]',
        b'["answer",0,1,[0],1,[["s","asleep",0,"o",null,0,"m","",[]]]]',
        b'["answer",0,1,[0],1,[["s","idle",NaN,"o",null,0,"m","",[]]]]',
    ],
    ids=repr,
)
def test_a_wrong_note_is_refused(note: bytes) -> None:
    with pytest.raises(WireFormatError):
        unpack_note(note)


def test_long_texts_are_cut_and_fit_a_packet() -> None:
    text = "t" * 999
    many = tuple(range(1 << 20, (1 << 20) + 99))
    long = StreamStatus(text, State.WAITING, 1.0, text, text, 1, text, text, many)
    packed = Answer(1, 1, (0,) * 10, 1, (long,) * 4).packed()
    assert len(packed) < host_wire.MAX_PACKET
    actual = unpack_note(packed)
    assert isinstance(actual, Answer)
    assert len(actual.status[0].ranks) == MAX_RANKS
