"""Traces of forecasts by the published schemas of Chakra and of the Trace Event Format: what they
hold sums up to the forecast's numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner
from google.protobuf.message import Message

import plancompiler as pc
from plancompiler.cli.program import cli
from plancompiler.forecasting import Forecast
from plancompiler.forecasting.chakra import chakra_traces, file_name, write_traces
from plancompiler.forecasting.job_forecast import COMMUNICATION
from plancompiler.proto import et_def_pb2 as schema
from plancompiler.simulate import chrome_trace
from tests.examples import EXAMPLES, gpt

JOBS = {
    "data": {"dp": 2},
    "pipeline": {"dp": 2, "tp": 2, "pp": 2, "microbatches": 2, "schedule": "1f1b"},
    "ring": {"cp": 2},
}


@cache
def forecasted(name: str) -> Forecast:
    return pc.forecast(gpt(**JOBS[name]), "h100-sxm")


def messages(data: bytes) -> tuple[Message, list[Message]]:
    """The metadata and the nodes of a file, read as the format is published: each message after its
    size as a varint.
    """
    parts, place = [], 0
    while place < len(data):
        size, shift = 0, 0
        while True:
            byte = data[place]
            place += 1
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        parts.append(data[place : place + size])
        place += size
    assert place == len(data)
    return schema.GlobalMetadata.FromString(parts[0]), [
        schema.Node.FromString(part) for part in parts[1:]
    ]


def attributes(message: Message) -> dict[str, object]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in message.attr}


@pytest.mark.parametrize("name", JOBS)
def test_nodes_sum_up_to_the_forecast(name: str) -> None:
    known = forecasted(name)
    of_rank = {each.simulated: each for each in known.rank_classes.classes}
    figures = dict(zip((each.rank for each in known.classes), known.classes, strict=True))
    traffic, ranks = 0.0, []
    sent: Counter[tuple[int, ...]] = Counter()
    received: Counter[tuple[int, ...]] = Counter()
    for rank, pieces in chakra_traces(known):
        metadata, nodes = messages(b"".join(pieces))
        about = attributes(metadata)
        assert metadata.version == "0.0.4"
        assert about["rank"] == rank
        these = about["ranks"].values
        ranks += these
        moving = computing = came = 0.0
        micros = 0
        seen: set[int] = set()
        for node in nodes:
            assert node.id not in seen
            # A node waits for earlier ones only, so that the graph has no cycle.
            assert seen.issuperset((*node.data_deps, *node.ctrl_deps))
            seen.add(node.id)
            has = attributes(node)
            assert has["is_cpu_op"] is False
            came += has.get("received_bytes", 0.0)
            seconds = has.get("duration_seconds", 0.0)
            if node.type == schema.COMP_NODE:
                computing += seconds
            else:
                assert has["comm_size"] >= 0
                moving += seconds
            if node.type == schema.COMM_COLL_NODE:
                assert has["comm_type"] in schema.CollectiveCommType.values()
                assert rank in has["comm_ranks"].values
            elif node.type in (schema.COMM_SEND_NODE, schema.COMM_RECV_NODE):
                ends = sent if node.type == schema.COMM_SEND_NODE else received
                # Ranks that do the same send to and receive from such that do.
                stands = known.rank_classes.stands_for
                ends[
                    stands(has["comm_src"]),
                    stands(has["comm_dst"]),
                    has["comm_tag"],
                    has["comm_size"],
                ] += 1
            micros += node.duration_micros
            begin = node.start_time_micros
            assert all(begin >= nodes[each - 1].start_time_micros for each in node.data_deps)
        figure = figures[of_rank[rank].rank]
        assert moving == pytest.approx(figure.communication_seconds, rel=1e-9)
        assert computing == pytest.approx(figure.compute_seconds, rel=1e-9)
        assert came == pytest.approx(figure.received_bytes, rel=1e-12)
        # Begin and end are rounded to microseconds one by one.
        assert micros * 1e-6 == pytest.approx(moving + computing, abs=1e-6 * len(nodes))
        traffic += came * len(these)
    assert traffic == pytest.approx(known.traffic_bytes, rel=1e-12)
    assert sorted(ranks) == list(range(known.ranks))
    assert sent == received


@pytest.mark.parametrize("name", JOBS)
def test_events_sum_up_to_the_forecast(name: str) -> None:
    known = forecasted(name)
    trace = json.loads(chrome_trace(known.simulation))
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    kinds = {str(kind) for kind in COMMUNICATION}
    sums: Counter[tuple[int, bool]] = Counter()
    named = set()
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert event.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0
        assert event["dur"] > 0
        if event["args"]["step"] == known.simulation.last_step:
            sums[event["pid"], event["cat"] in kinds] += event["dur"]
    simulated = {each.simulated for each in known.rank_classes.classes}
    for each in known.classes:
        if each.rank in simulated:
            assert sums[each.rank, True] == pytest.approx(1e6 * each.communication_seconds)
            assert sums[each.rank, False] == pytest.approx(1e6 * each.compute_seconds)


def test_the_command_writes_a_file_per_class(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    target = str(EXAMPLES / "mlp.py")
    words = ["forecast", target, "--ranks", "2", "--chakra", str(folder), "--json"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    metadata, nodes = messages((folder / file_name(0)).read_bytes())
    assert attributes(metadata)["job"] == "mlp"
    assert nodes
    assert [path.name for path in folder.iterdir()] == [file_name(0)]
    taken = CliRunner().invoke(cli, [*words[:-2], str(folder / file_name(0)), "--json"])
    assert taken.exit_code == 2


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        write_traces(forecasted("data"), tmp_path / "file" / "traces")
