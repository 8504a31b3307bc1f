"""Seeded damage to all that the product reads: files, messages, and the JSON within them.

A `Format` makes a damaged input of a seed and reads it as the product would, down to the last
consumer that could trip over it. `attempt` says what became of one: refused with an error of ours,
accepted, or anything else, which is a defect. The same seed makes the same damage, so that tests
try a few hundred seeds of each format and campaigns many more of the same. The formats themselves
are in `tests.damaged_formats`.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plancompiler.errors import PlanCompilerError

EXTREMES = (0, 1, 2, -1, 255, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 63) - 1)
TEXTS = ("", "S(0)", "B", "matmul", "variable", "\0", "../../x", "a" * 300, "float32", "P(max)")
JSON_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "\0", [], {}, [[]], [None], {"a": {}}, 0, -1, 1.5, -0.0),
    *(1 << 31, 1 << 62, 1 << 63, 1 << 70, 10**400, 1e308, -(1 << 63), [0] * 50, "9" * 5000),
)


# --- mutators -------------------------------------------------------------------------------------


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with one to three places flipped, cut off, cut out, doubled, zeroed or made extreme."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(damaged) + 1)
        size = rng.choice((1, 2, 4, 8, rng.randrange(1, 200)))
        match rng.randrange(8):
            case 0 | 1 if at < len(damaged):
                damaged[at] ^= 1 << rng.randrange(8)
            case 2:
                del damaged[at:]
            case 3:
                del damaged[at : at + size]
            case 4:
                damaged[at:at] = damaged[at : at + size]
            case 5:
                damaged[at : at + size] = bytes(size)
            case 6:
                damaged[at : at + 8] = struct.pack("<Q", rng.choice(EXTREMES) & ((1 << 64) - 1))
            case _:
                damaged[at:at] = rng.randbytes(size)
    return bytes(damaged)


def damaged_json(value: Any, rng: random.Random) -> bytes:
    """The text of a JSON value with one to three parts replaced, dropped, doubled, moved or buried
    under many brackets.
    """
    text = json.dumps(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = json.loads(text)
        # The value itself is a place like all others.
        whole = [value]
        places = list(_places(whole))
        holder, key = rng.choice(places)
        match rng.randrange(7):
            case 0 | 1:
                holder[key] = rng.choice(JSON_VALUES)
            case 2:
                if holder is not whole:
                    del holder[key]
            case 3:
                other, place = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[place]))
            case 4:
                if isinstance(holder, list):
                    holder.insert(key, holder[key])
                else:
                    holder[f"{key}x"] = holder[key]
            case 5:
                number = holder[key]
                if isinstance(number, int):
                    holder[key] = number + rng.choice((-1, 1, 7, 1 << 40))
                elif isinstance(number, str):
                    holder[key] = rng.choice(TEXTS)
            case _:
                holder[key] = "@nested@"
        text = json.dumps(whole[0])
        depth = rng.choice((5, 100, 100_000))
        text = text.replace('"@nested@"', "[" * depth + "]" * depth)
        if depth > 500 and "[" * 500 in text:
            break
    if rng.randrange(20) == 0:
        text = text.replace("}", ', "format": 1}', 1)
    return text.encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    stack = [value]
    while stack:
        holder = stack.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            yield holder, key
            if isinstance(holder[key], (list, dict)):
                stack.append(holder[key])


def damaged_message(message: Any, rng: random.Random) -> Any:
    """A protobuf message with one to three fields or elements of columns changed."""
    damaged = type(message)()
    damaged.CopyFrom(message)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        fields = list(_fields(damaged))
        if not fields:
            break
        holder, field = rng.choice(fields)
        if field.is_repeated:
            _damage_column(holder, field, rng)
        elif field.message_type is not None:
            holder.ClearField(field.name)
        else:
            setattr(holder, field.name, _other(field, getattr(holder, field.name), rng))
    return damaged


def _fields(message: Any) -> Iterator[tuple[Any, Any]]:
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                yield from _fields(each)


def _damage_column(holder: Any, field: Any, rng: random.Random) -> None:
    column = getattr(holder, field.name)
    at = rng.randrange(len(column))
    action = rng.randrange(7)
    if action == 0:
        del column[at]
    elif action == 1:
        del column[at:]
    elif field.message_type is not None:
        column.add().CopyFrom(column[at])
    elif action == 2:
        column.append(column[at])
    else:
        other = column[rng.randrange(len(column))]
        value = other if action == 3 else _other(field, column[at], rng)
        column[at] = value


def _other(field: Any, value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        if field.enum_type is not None:
            return rng.randrange(12)
        near = value + rng.choice((-2, -1, 1, 2, 100))
        chosen = rng.choice((near, near, rng.choice(EXTREMES)))
        low, high = _BOUNDS[field.cpp_type]
        return min(max(chosen, low), high)
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, 1e300, float("nan"), float("inf")))
    if isinstance(value, bytes):
        return damaged_bytes(value, rng)
    return rng.choice((rng.choice(TEXTS), value + "x", value[:-1], value[::-1]))


_BOUNDS = {
    1: (-(1 << 31), (1 << 31) - 1),
    2: (-(1 << 63), (1 << 63) - 1),
    3: (0, (1 << 32) - 1),
    4: (0, (1 << 64) - 1),
}
"""Least and largest number by protobuf's CPPTYPE."""


# --- attempts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Format:
    """Something that the product reads."""

    name: str
    damaged: Callable[[random.Random], Any]
    """An input that was damaged."""
    read: Callable[[Any], object]
    """Reads it and uses what came of it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one damaged input."""

    format: str
    seed: int
    error: BaseException | None
    """What was raised; None where the input was accepted."""
    seconds: float

    @property
    def is_defect(self) -> bool:
        """Whether something was raised that is no error of ours."""
        return self.error is not None and not isinstance(self.error, PlanCompilerError)


def attempt(tried: Format, seed: int) -> Outcome:
    """Damage by this seed, and what the reader makes of it."""
    given = tried.damaged(random.Random(f"{tried.name} {seed}"))
    begin = time.perf_counter()
    error: BaseException | None = None
    try:
        tried.read(given)
    except Exception as raised:  # the question is which
        error = raised
    return Outcome(tried.name, seed, error, time.perf_counter() - begin)


@contextmanager
def bounded_memory(nbytes: int) -> Iterator[None]:
    """Make allocations fail that would take more than so many bytes beyond what is taken now."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
