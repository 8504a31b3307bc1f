"""Jobs, graphs, slices and plans as bytes: exact round trips, and refusal of everything else."""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancompiler.boxing.graph import BoxingTaskGraph, RankSlice
from plancompiler.boxing.serde import (
    graph_from_bytes,
    graph_to_bytes,
    slice_from_bytes,
    slice_to_bytes,
)
from plancompiler.errors import WireFormatError
from plancompiler.ir import DType, Job, NdSbp, Op, Phase, Placement, Reduction, Value
from plancompiler.ir.pipeline import SegmentKind, Slot
from plancompiler.ir.task import Primitive, TaskKind
from plancompiler.ir.wire import DTYPES, PHASES, PRIMITIVES, REDUCTIONS, TASK_KINDS, Codes
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes
from plancompiler.plan.plan import Plan, Stream
from plancompiler.plan.serde import SEGMENT_KINDS, STREAMS, plan_from_bytes, plan_to_bytes
from plancompiler.proto import job_pb2, plan_pb2
from tests.serde.samples import (
    MESH,
    empty_plan,
    sample_graph,
    sample_job,
    sample_plan,
    sample_slice,
)

HEADER = struct.Struct(">4sHHIQ")


class Wire(NamedTuple):
    sample: Any
    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


WIRES = {
    "job": Wire(sample_job(), job_to_bytes, job_from_bytes),
    "graph": Wire(sample_graph(), graph_to_bytes, graph_from_bytes),
    "slice": Wire(sample_slice(), slice_to_bytes, slice_from_bytes),
    "plan": Wire(sample_plan(), plan_to_bytes, plan_from_bytes),
}
KINDS = sorted(WIRES)


def sealed(data: bytes, body: bytes) -> bytes:
    """The body in the frame of `data`, with a right length and checksum."""
    magic, version, kind, _, _ = HEADER.unpack_from(data)
    return HEADER.pack(magic, version, kind, zlib.crc32(body), len(body)) + body


def parts(value: object) -> Iterator[object]:
    """A value and everything in it."""
    yield value
    if isinstance(value, tuple):
        for item in value:
            yield from parts(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_is_exact(kind: str) -> None:
    wire = WIRES[kind]
    data = wire.to_bytes(wire.sample)
    again = wire.from_bytes(data)
    assert again == wire.sample
    assert repr(again) == repr(wire.sample)  # equality takes 1, 1.0 and True for the same
    assert wire.to_bytes(again) == data


MADE_BY_PASSES = {"job": {(Job, "pipeline"), (Op, "micro")}}
"""What a job has only after its passes, when it is sent no more."""
NEVER_SENT = {(Value, "source")}
"""What is known only where a job is traced."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_samples_use_every_field(kind: str) -> None:
    """So that a field added to the types and forgotten in the wire format fails the round trip."""
    seen: dict[type, dict[str, set[str]]] = {}
    for part in parts(WIRES[kind].sample):
        if dataclasses.is_dataclass(part):
            fields = seen.setdefault(type(part), {})
            for field in dataclasses.fields(part):
                fields.setdefault(field.name, set()).add(repr(getattr(part, field.name)))
    for cls, fields in seen.items():
        for field in dataclasses.fields(cls):
            known = (cls, field.name) in MADE_BY_PASSES.get(kind, set()) | NEVER_SENT
            if field.default is not dataclasses.MISSING and not known:
                assert fields[field.name] - {repr(field.default)}, f"{cls.__name__}.{field.name}"


@pytest.mark.parametrize(
    ("codes", "members", "proto", "prefix"),
    [
        (DTYPES, DType, job_pb2.DType, "DTYPE"),
        (REDUCTIONS, Reduction, job_pb2.Reduction, "REDUCTION"),
        (PRIMITIVES, Primitive, job_pb2.Primitive, "PRIMITIVE"),
        (TASK_KINDS, TaskKind, job_pb2.TaskKind, "TASK_KIND"),
        (PHASES, Phase, job_pb2.Phase, "PHASE"),
        (STREAMS, Stream, plan_pb2.Stream, "STREAM"),
        (SEGMENT_KINDS, SegmentKind, plan_pb2.SegmentKind, "SEGMENT_KIND"),
    ],
)
def test_enums_have_the_numbers_of_the_proto_files(
    codes: Codes[Any], members: type[enum.Enum], proto: Any, prefix: str
) -> None:
    for member in members:
        (code,) = codes.encode([member])
        assert proto.Name(code) == f"{prefix}_{member.name}"
        assert codes.decode([code]) == [member]
    assert len(proto.keys()) == len(members) + 1
    for wrong in (0, len(members) + 1):
        with pytest.raises((WireFormatError, IndexError)):
            codes.decode([wrong])


def test_an_empty_plan_and_an_empty_job() -> None:
    assert plan_from_bytes(plan_to_bytes(empty_plan())) == empty_plan()
    assert job_from_bytes(job_to_bytes(Job("", ()))) == Job("", ())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", KINDS)
def test_another_kind_is_refused(kind: str, other: str) -> None:
    if kind != other:
        data = WIRES[other].to_bytes(WIRES[other].sample)
        with pytest.raises(WireFormatError, match="another kind"):
            WIRES[kind].from_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_another_format_version_is_refused(kind: str) -> None:
    wire = WIRES[kind]
    data = bytearray(wire.to_bytes(wire.sample))
    data[4:6] = (2).to_bytes(2, "big")
    with pytest.raises(WireFormatError, match="another version of the wire format") as caught:
        wire.from_bytes(bytes(data))
    assert caught.value.report.got == "version 2"


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(kind: str) -> None:
    wire = WIRES[kind]
    data = wire.to_bytes(wire.sample)
    for length in range(0, len(data), 7):
        with pytest.raises(WireFormatError):
            wire.from_bytes(data[:length])
    with pytest.raises(WireFormatError):
        wire.from_bytes(data + b"x")


@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    for wire in WIRES.values():
        with pytest.raises(WireFormatError):
            wire.from_bytes(data)
        with pytest.raises(WireFormatError):
            wire.from_bytes(b"PCWF" + data)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None)
def test_a_changed_byte_is_refused(kind: str, data: st.DataObject) -> None:
    wire = WIRES[kind]
    changed = bytearray(wire.to_bytes(wire.sample))
    position = data.draw(st.integers(0, len(changed) - 1))
    changed[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(WireFormatError):
        wire.from_bytes(bytes(changed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_malformed_body_is_refused_or_is_an_object(kind: str, data: st.DataObject) -> None:
    """With a right checksum, so that the columns themselves are put to the test."""
    wire = WIRES[kind]
    whole = wire.to_bytes(wire.sample)
    body = bytearray(whole[HEADER.size :])
    for _ in range(data.draw(st.integers(1, 4))):
        if not body:
            break
        position = data.draw(st.integers(0, len(body) - 1))
        match data.draw(st.sampled_from(["change", "insert", "delete", "cut"])):
            case "change":
                body[position] = data.draw(st.integers(0, 255))
            case "insert":
                body[position:position] = data.draw(st.binary(min_size=1, max_size=6))
            case "delete":
                del body[position : position + data.draw(st.integers(1, 6))]
            case "cut":
                del body[max(position, 1) :]
    try:
        actual = wire.from_bytes(sealed(whole, bytes(body)))
    except WireFormatError:
        return
    assert type(actual) is type(wire.sample)
    repr(actual)  # whole enough to be shown


@pytest.mark.slow
@given(body=st.binary(max_size=300))
@settings(max_examples=300)
def test_a_random_body_is_refused_or_is_an_object(body: bytes) -> None:
    for wire in WIRES.values():
        data = sealed(wire.to_bytes(wire.sample), body)
        try:
            actual = wire.from_bytes(data)
        except WireFormatError:
            continue
        assert isinstance(actual, (Job, BoxingTaskGraph, RankSlice, Plan))


def _job_with_runs(runs: list[tuple[int, int, int]], mesh: list[int]) -> bytes:
    """A job with one placement of these (start, length, stride) runs, whatever they say."""
    whole = job_to_bytes(Job("j", ()))
    message = job_pb2.Job(name="j")
    message.tables.strings.append("cpu")
    message.tables.placement_device.append(0)
    message.tables.placement_ndim.append(len(mesh))
    message.tables.placement_extent.extend(mesh)
    message.tables.placement_named.append(0)
    message.tables.placement_runs.append(len(runs))
    for start, length, stride in runs:
        message.tables.run_start.append(start)
        message.tables.run_length.append(length)
        message.tables.run_stride.append(stride)
    return sealed(whole, message.SerializeToString())


@pytest.mark.parametrize(
    ("runs", "mesh"),
    [
        ([(0, (1 << 32) - 1, 1)], [(1 << 32) - 1]),  # four billion ranks in a few bytes
        ([(0, 1 << 20, 1)] * 2, [2, 1 << 20]),
        ([(0, 1 << 19, 1)] * 2, [2, 1 << 19]),  # every rank twice
        ([(0, 4, 1)], [3]),
        ([(0, 4, 1)], [2, 0]),
        ([(0, 4, -1)], [4]),
        ([], []),
    ],
)
def test_absurd_placements_are_refused_without_taking_memory(
    runs: list[tuple[int, int, int]], mesh: list[int]
) -> None:
    with pytest.raises(WireFormatError):
        job_from_bytes(_job_with_runs(runs, mesh))


def test_large_placements_are_short() -> None:
    def job_on(count: int) -> Job:
        mesh = Placement("cpu", [list(range(row * 8, row * 8 + 8)) for row in range(count // 8)])
        value = Value("x", (8,), DType.FLOAT32, mesh)
        return Job("j", (Op("x", "input", (), (value,), (), mesh),))

    small, large = job_to_bytes(job_on(64)), job_to_bytes(job_on(16384))
    assert len(large) - len(small) < 8
    assert job_from_bytes(large) == job_on(16384)


@given(ranks=st.lists(st.integers(0, 5000), min_size=1, max_size=60, unique=True))
def test_any_rank_list_survives(ranks: list[int]) -> None:
    mesh = Placement("cpu", ranks)
    value = Value("x", (8,), DType.FLOAT32, mesh)
    actual = job_from_bytes(job_to_bytes(Job("j", (Op("x", "input", (), (value,), (), mesh),))))
    assert actual.ops[0].placement == mesh
    assert actual.ops[0].outputs[0].placement == mesh


SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@given(
    attrs=st.dictionaries(
        st.text("abcdef", min_size=1), SCALARS | st.lists(SCALARS, max_size=5).map(tuple)
    )
)
def test_attributes_keep_their_types(attrs: dict[str, Any]) -> None:
    op = Op("x", "fill", (), (), tuple(sorted(attrs.items())), MESH)
    twins = Op("y", "fill", (), (), (("a", 1), ("b", 1.0), ("c", True), ("d", -0.0)), MESH)
    actual = job_from_bytes(job_to_bytes(Job("j", (op, twins))))
    assert [repr(each.attrs) for each in actual.ops] == [repr(op.attrs), repr(twins.attrs)]


@pytest.mark.parametrize("value", [1 << 63, None, 1j, (1, (2,)), [1], b"x", "\ud800"])
def test_attributes_without_wire_form_are_refused(value: Any) -> None:
    with pytest.raises(WireFormatError):
        job_to_bytes(Job("j", (Op("x", "fill", (), (), (("a", value),), MESH),)))


def test_a_plan_keeps_values_that_differ_in_placement_only() -> None:
    first = Value("x", (8,), DType.FLOAT32, MESH)
    second = Value("x", (8,), DType.FLOAT32, Placement("cpu", [3]))
    job = Job("j", (Op("a", "x", (first, second), (), (), MESH, NdSbp.of(["B", "B"])),))
    actual = job_from_bytes(job_to_bytes(job))
    assert [value.placement for value in actual.ops[0].inputs] == [
        first.placement,
        second.placement,
    ]


def _plan_with(edit: Callable[[plan_pb2.Plan], object]) -> bytes:
    """The sample plan with its columns changed."""
    whole = plan_to_bytes(sample_plan())
    message = plan_pb2.Plan()
    message.ParseFromString(whole[HEADER.size :])
    edit(message)
    return sealed(whole, message.SerializeToString())


@pytest.mark.parametrize(
    "edit",
    [
        lambda p: p.segments.kind.append(8),
        lambda p: p.segments.kind.append(0),
        lambda p: p.segments.chunk.append(1),
        lambda p: p.segments.slot_segment.append(0),
        lambda p: p.segments.slot_microbatch.append(0),
        lambda p: p.tasks.segment.pop(),
        lambda p: p.tasks.compute_input_pieces.append(1),
        lambda p: p.tasks.compute_input_piece.append(1),
        lambda p: p.tasks.compute_output_pieces.pop(),
        lambda p: p.tasks.compute_output_piece.pop(),
        lambda p: p.registers.per_microbatch.pop(),
        lambda p: p.remote_registers.per_microbatch.append(True),
    ],
)
def test_schedule_columns_that_do_not_fit_are_refused(
    edit: Callable[[plan_pb2.Plan], object],
) -> None:
    assert plan_from_bytes(_plan_with(lambda p: None)) == sample_plan()
    with pytest.raises(WireFormatError):
        plan_from_bytes(_plan_with(edit))


def test_a_slot_costs_two_bytes() -> None:
    """Columns are packed, so long schedules stay small."""
    plan = sample_plan()
    slots = tuple(Slot(m % 4, m % 100) for m in range(4096))
    longer = len(plan_to_bytes(dataclasses.replace(plan, slots=slots))) - len(plan_to_bytes(plan))
    assert 2 * 4096 - 32 < longer <= 2 * 4096 + 8
