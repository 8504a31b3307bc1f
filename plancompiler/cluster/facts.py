"""Cross-rank facts as bytes, and back: columns, since a rank has thousands."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from plancompiler.errors import WireFormatError
from plancompiler.ir.wire import build, split
from plancompiler.plan.digest import CrossRankFact
from plancompiler.proto import cluster_pb2 as pb

_MAX_FACTS = 1 << 20


def facts_to_bytes(facts: Sequence[CrossRankFact]) -> bytes:
    """What a rank believes about registers that cross ranks."""
    return pb.Facts(
        sync_id=[fact.sync_id for fact in facts],
        register=[fact.register for fact in facts],
        name=[fact.name for fact in facts],
        role=[fact.role for fact in facts],
        ranks=[len(fact.ranks) for fact in facts],
        rank=[rank for fact in facts for rank in fact.ranks],
        text=[fact.text for fact in facts],
    ).SerializeToString()


def facts_from_bytes(data: bytes) -> tuple[CrossRankFact, ...]:
    """The facts in bytes; anything else is a WireFormatError."""
    try:
        message = pb.Facts.FromString(data)
    except DecodeError as error:
        raise WireFormatError("a worker sent cross-rank facts that do not parse") from error
    if len(message.text) > _MAX_FACTS:
        raise WireFormatError(
            "a worker sent too many cross-rank facts",
            got=len(message.text),
            expected=f"at most {_MAX_FACTS}",
        )
    return tuple(
        build(
            CrossRankFact,
            message.sync_id[:],
            message.register[:],
            message.name[:],
            message.role[:],
            split(message.rank[:], message.ranks[:]),
            message.text[:],
        )
    )
