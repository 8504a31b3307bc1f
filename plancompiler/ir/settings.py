"""What a user asks of the compiler besides the job itself, as settings with one text form.

What can be set is not known here: each pass declares its options in a class of `Settings`, and
`plancompiler.passes.Config` has them all. A job carries its settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, cast

from plancompiler.errors import UsageError
from plancompiler.hooks.compiler_settings import compiler_settings

T = TypeVar("T")


class Word(NamedTuple):
    """How a setting that is one word is made of what a user gives, such as a path."""

    given: Callable[[object], str]
    """The word for what a user gives; for a word itself the same. It may read the user's files."""
    check: Callable[[str], object]
    """Raises a UsageError for what is no such word, and reads no file of the user's."""


@dataclass(frozen=True, slots=True)
class Option:
    """A setting: its type is that of its default."""

    name: str
    owner: str
    """The pass that carries it out; empty for none."""
    default: Any
    help: str
    metavar: str | None
    """What the command line calls its value; None where it is no option there."""
    choices: tuple[str, ...]
    least: int
    most: int | None
    asks: bool
    """Whether a value other than the default is the work of the pass."""
    or_number: bool
    """Whether a whole number may stand for one of the words that are its choices."""
    word: Word | None
    """How its word is made; None for one of the choices."""

    def check(self, value: object) -> None:
        """A UsageError for a value that cannot be."""
        if isinstance(self.default, bool):
            if not isinstance(value, bool):
                raise UsageError(
                    f"{self.name} is on or off", got=repr(value), expected="True or False"
                )
        elif isinstance(self.default, int):
            self._check_number(value)
        elif self.word is not None:
            self.word.check(cast("str", value))
        elif isinstance(self.default, str):
            if self.or_number and not isinstance(value, str):
                self._check_number(value)
            elif value not in self.choices:
                raise UsageError(
                    f"unknown {self.name}",
                    got=repr(value),
                    expected=f"one of {', '.join(self.choices)}"
                    + (" or a whole number" if self.or_number else ""),
                )
        elif value is not None or self.default is not None:
            self._check_names(value)

    def _check_number(self, value: object) -> None:
        whole = isinstance(value, int) and not isinstance(value, bool)
        most = value if self.most is None else self.most
        if not whole or not self.least <= value <= most:  # type: ignore[operator]  # `whole` says it is a number
            raise UsageError(
                f"{self.name} must be a whole number",
                got=repr(value),
                expected=f"at least {self.least}"
                if self.most is None
                else f"{self.least} to {self.most}",
            )

    def _check_names(self, value: object) -> None:
        if not isinstance(value, tuple) or not all(
            isinstance(each, str) and each.isidentifier() for each in value
        ):
            raise UsageError(f"{self.name} must be a tuple of names", got=repr(value))
        if len(set(value)) != len(value):
            raise UsageError(f"{self.name} holds a name twice", got=repr(value))

    def read(self, text: str) -> object:
        """The value that a text means, as far as it means one."""
        if isinstance(self.default, bool):
            return {"0": False, "1": True}.get(text, text)
        numeric = isinstance(self.default, int) or (self.or_number and text not in self.choices)
        if numeric:
            try:
                return int(text)
            except ValueError:
                raise UsageError(f"{self.name} must be a whole number", got=repr(text)) from None
        if isinstance(self.default, str):
            return text
        return tuple(part for part in text.split(",") if part)


def format_setting(value: object) -> str:
    """A value as text, which `Option.read` reads."""
    if isinstance(value, bool):
        return str(int(value))
    return ",".join(value) if isinstance(value, tuple) else str(value)


def option(
    default: T,
    help: str,  # noqa: A002  # as in click
    *,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    least: int = 0,
    most: int | None = None,
    asks: bool = False,
    or_number: bool = False,
    word: Word | None = None,
) -> T:
    """The default of a field of a class of `Settings`, with what is known of it: see `Option`."""
    facts = (default, help, metavar, choices, least, most, asks, or_number, word)
    return field(default=default, metadata={"option": facts})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Plain data with one text form, which is also its wire form."""

    owner: ClassVar[str] = ""

    def __init_subclass__(cls, owner: str = "") -> None:
        """`owner` is the pass whose options the class declares."""
        cls.owner = owner

    def __post_init__(self) -> None:
        for each in self.options():
            if each.word is not None:
                object.__setattr__(self, each.name, each.word.given(getattr(self, each.name)))
            each.check(getattr(self, each.name))
        for cls in type(self).__mro__:
            if issubclass(cls, Settings) and "check" in vars(cls):
                cls.check(self)

    def check(self) -> None:
        """A UsageError for settings that do not go together. Each class checks its own."""

    @classmethod
    @functools.cache
    def options(cls) -> tuple[Option, ...]:
        """All of them: first the class's own, then those of its bases in order."""
        facts = {each.name: each.metadata["option"] for each in fields(cls)}
        return tuple(
            Option(name, base.owner, *facts[name])
            for base in cls.__mro__
            if issubclass(base, Settings)
            for name in vars(base).get("__annotations__", {})
            if name in facts
        )

    def changes(self) -> dict[str, Any]:
        """What differs from the defaults."""
        given = {each.name: getattr(self, each.name) for each in self.options()}
        return {
            each.name: given[each.name]
            for each in self.options()
            if given[each.name] != each.default
        }

    def __str__(self) -> str:
        """`passes=cse,dce zero=1`: what differs from the defaults; empty for the default."""
        return " ".join(f"{name}={format_setting(each)}" for name, each in self.changes().items())

    @classmethod
    def parse(cls, text: str) -> Self:
        """The settings of a text form; a UsageError where it is none. It reads no file, as texts
        come with jobs of others.
        """
        known = {each.name: each for each in cls.options()}
        given: dict[str, str] = {}
        for part in text.split():
            name, equals, value = part.partition("=")
            if not equals or name not in known or name in given:
                raise UsageError(
                    "a config does not parse",
                    got=repr(part),
                    expected=f"KEY=VALUE with a key of {', '.join(known)}, each at most once",
                )
            if known[name].word is not None:
                known[name].check(value)
            given[name] = value
        return cls.of(given)

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Self:
        """The settings of values that may still be text (`"1"`, `"cse,dce"`)."""
        known = {each.name: each for each in cls.options()}
        for name in settings:
            if name not in known:
                raise UsageError(
                    "there is no such setting of the compiler",
                    got=repr(name),
                    expected=f"one of {', '.join(known)}",
                )
        return cls(
            **{
                name: known[name].read(value) if isinstance(value, str) else value
                for name, value in settings.items()
            }
        )


def default_settings() -> Settings:
    """What a job asks of the compiler that says nothing."""
    return cast("Settings", compiler_settings()())


def parse_settings(text: str) -> Settings:
    """The settings that a job carries, of their text form; a UsageError where it is none."""
    return cast("Settings", compiler_settings().parse(text))
