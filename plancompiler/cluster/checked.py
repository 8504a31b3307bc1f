"""Messages with checksums: each carries an xxh3 of its content and of its place in its stream, so
that the receiver notices a message that was damaged, repeated or lost on its way.

TCP's checksum has only 16 bits, and a proxy that forwards a connection computes a new one.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import xxhash

from plancompiler.errors import WireFormatError


class Checked(Protocol):
    """A protobuf message with a field for its check."""

    check: int

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes:  # noqa: N802  # protobuf's
        """Its bytes."""


Message = TypeVar("Message", bound=Checked)


def _check_of(message: Checked, place: int) -> int:
    """Of a message whose own check is 0; never 0."""
    return xxhash.xxh3_64_intdigest(message.SerializeToString(deterministic=True), place) or 1


class Sent:
    """Gives each message of a stream its check."""

    def __init__(self) -> None:
        self._place = 0

    def __call__(self, message: Message) -> Message:
        message.check = 0
        message.check = _check_of(message, self._place)
        self._place += 1
        return message


class Received:
    """Looks at the check of each message of a stream, which comes from `whom`."""

    def __init__(self, whom: str) -> None:
        self._whom = whom
        self._place = 0

    def __call__(self, message: Message) -> Message:
        """The same message, without its check; WireFormatError where that does not fit."""
        check, message.check = message.check, 0
        expected = _check_of(message, self._place)
        if check != expected:
            came = f"check {check:016x}" if check else "no check"
            raise WireFormatError(
                f"a message of {self._whom} was damaged, repeated or lost on its way",
                got=f"message {self._place} of its stream with {came}",
                expected=f"check {expected:016x}",
                hint="something between the hosts changes bytes: look at the network and at "
                "whatever forwards the connection; the job can be started again",
            )
        self._place += 1
        return message
