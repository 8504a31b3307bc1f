"""Cross-rank facts as bytes, and back: columns, since a rank has thousands."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from plancompiler.errors import WireFormatError
from plancompiler.ir.columns import PLAIN, Columns, Ragged
from plancompiler.plan.digest import CrossRankFact
from plancompiler.proto import cluster_pb2 as pb

_MAX_FACTS = 1 << 20
_FACTS = Columns(CrossRankFact, ranks=Ragged(PLAIN, "rank"))


def facts_to_bytes(facts: Sequence[CrossRankFact]) -> bytes:
    """The facts of a rank's plan about registers that cross ranks."""
    message = pb.Facts()
    _FACTS.write(message, facts)
    return message.SerializeToString()


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
    return tuple(_FACTS.read(message))
