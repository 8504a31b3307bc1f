"""A job's text read back: `parse_job(str(job)) == job`.

Recursive descent over the lines that `ir.job` prints; that module shows the form. Blank lines and
lines that start with `#` are comments. What an op leaves out of its line is the default: no layout
demanded, phase forward. Types and layouts are not held against the op table here:
`ops.verify_types` does it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np

from plancompiler.errors import JobFileError, PlanCompilerError
from plancompiler.ir.dtype import DType
from plancompiler.ir.job import BARE_NAME, Job, name_of_outputs
from plancompiler.ir.op import (
    NO_ORIGIN,
    UNKNOWN_SOURCE,
    AttrValue,
    Micro,
    Origin,
    Phase,
    SourceLine,
    freeze_attrs,
)
from plancompiler.ir.pipeline import Pipeline
from plancompiler.ir.placement import Placement
from plancompiler.ir.sbp import NdSbp
from plancompiler.ir.settings import parse_settings
from plancompiler.ir.task import require_rank_fits
from plancompiler.ir.value import Op, Value

_QUOTED = r"\"(?:[^\"\\\n]|\\.)*\""
_LIST = r"\[[^\]\n]*\]"
_BLANKS = re.compile(r"[ \t]*")
_SKIPPED = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*(?:#[^\n]*\Z)?")
_NAME = re.compile(f"{BARE_NAME}|{_QUOTED}")
_NUMBER = re.compile(r"-?(?:inf|nan|\d+(\.\d+)?(e[+-]?\d+)?)\b")
_WHOLE = re.compile(r"-?\d+")
_TEXT = re.compile(rf"'(?:[^'\\\n]|\\.)*'|{_QUOTED}")
_FLAG = re.compile(r"(?:True|False)\b")
_LAYOUT = re.compile(_LIST)
_RANKS = re.compile(r"\d+(?:\.\.\d+)?(?:,\d+(?:\.\.\d+)?)*")
_LINE = re.compile(r"[^\n]*")
_SOURCE = re.compile(rf"(?:({_QUOTED})|(\S.*)):(\d+)[ \t]*(?=\n|\Z)")
_PIPELINE = re.compile(r"pipeline (\w+) microbatches=(\d+) stages=(\d+) chunks=(\d+)")
_MICRO = re.compile(rf"\{{segment (\d+): ({_LIST}) -> ({_LIST})\}}")
_ORIGIN = re.compile(
    rf"\{{({'|'.join(map(str, Phase))})(?: region=({_QUOTED}))?( checkpoint)?(?: stage=(-?\d+))?\}}"
)


def parse_job(text: str, file: str = "") -> Job:
    """The job of a text form. `file` is what errors call the text; where it is given, ops that name
    no source line come from theirs in the text.

    JobFileError, with line and column, for what is no such form; the errors of configs, placements
    and layouts for those that say nothing valid. The functions in `Job.rates` are not in the text.
    """
    return _Parser(text, file).job()


class _Parser:
    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self._file = file
        self._at = 0
        self._values: dict[str, Value] = {}
        self._placements: dict[str, Placement] = {}
        """By their text: most ops have one of few."""

    def job(self) -> Job:
        self._skip_comments()
        self._expect("job ", "`job NAME (seed NUMBER) CONFIG`")
        name = self._name("the job's name")
        self._expect("(seed ", "`(seed NUMBER)`")
        seed = self._whole("a seed")
        self._expect(")", "`)`")
        with self._placing():
            config = parse_settings(self._need(_LINE, "the job's config").group())
        self._skip_comments()
        pipeline = None
        match = self._find(_PIPELINE)
        if match is not None:
            pipeline = Pipeline(match[1], *map(int, match.groups()[1:]))
            with self._placing(match.start(1)):
                pipeline.check()
            self._skip_comments()
        ops = []
        while self._at < len(self._text):
            ops.append(self._op())
            self._skip_comments()
        return Job(name, tuple(ops), seed, config, pipeline)

    def _op(self) -> Op:
        name = None
        results: list[tuple[str, tuple[int, ...], DType]] = []
        if not self._ahead("%"):
            name = self._name("a result `%NAME: TYPE`, or `NAME: ` before an op without one")
            self._expect(":", "`:` after the name of an op")
        while self._ahead("%"):
            results.append(self._result())
            if not self._take(","):
                self._expect("=", "`, ` and another result, or ` = ` and the op's kind")
                break
        kind = self._name("an op's kind")
        inputs = self._inputs()
        attrs: dict[str, AttrValue] = {}
        while not self._ahead("@"):
            key = self._name("an attribute `NAME=VALUE`, or `@PLACEMENT`")
            self._expect("=", "`=` after the name of an attribute")
            attrs[key] = self._attr()
        self._expect("@", "`@PLACEMENT`")
        placement = self._placement()
        sbp = self._sbp() if self._ahead("[") else None
        origin, micro = self._origin(), self._micro()
        source = self._source()
        outputs = tuple(Value(*result, placement, source) for result in results)
        self._values.update((value.name, value) for value in outputs)
        return Op(
            name=name_of_outputs(outputs) if name is None else name,
            kind=kind,
            inputs=inputs,
            outputs=outputs,
            attrs=freeze_attrs(attrs),
            placement=placement,
            sbp=sbp,
            source=source,
            origin=origin,
            micro=micro,
        )

    def _result(self) -> tuple[str, tuple[int, ...], DType]:
        self._expect("%", "`%NAME: TYPE`")
        name = self._name("a value's name")
        self._expect(":", "`: ` and the type of a value")
        with self._placing():
            dtype = DType.parse(self._name("a dtype"))
        self._expect("[", "`[` and the extents of a tensor")
        return name, tuple(self._wholes("]")), dtype

    def _inputs(self) -> tuple[Value, ...]:
        self._expect("(", "`(` and the values that the op reads")
        inputs: list[Value] = []
        while not self._take(")"):
            if inputs:
                self._expect(",", "`, ` or `)`")
            self._expect("%", "`%NAME` of an earlier result")
            at = self._at
            value = self._values.get(self._name("a value's name"))
            if value is None:
                raise self._error("the name of an earlier result", at)
            inputs.append(value)
        return tuple(inputs)

    def _attr(self) -> AttrValue:
        if not self._take("("):
            return self._plain()
        items: list[bool | int | float | str] = []
        while not self._take(")"):
            if items:
                self._expect(",", "`,` or `)`")
            items.append(self._plain())
        return tuple(items)  # type: ignore[return-value]  # mixed ones are the op table's to refuse

    def _plain(self) -> bool | int | float | str:
        if (flag := self._find(_FLAG)) is not None:
            return flag.group() == "True"
        if self._ahead("'") or self._ahead('"'):
            text = self._need(_TEXT, "a text that ends on its line")
            try:
                return str(ast.literal_eval(text.group()))
            except (SyntaxError, ValueError):
                raise self._error("a text as Python writes it", text.start()) from None
        match = self._need(_NUMBER, "a number, a text in quotes, True, False or a tuple of them")
        number = match.group()
        return int(number) if number.lstrip("-").isdigit() else float(number)

    def _placement(self) -> Placement:
        begin = self._at
        device = self._name("a placement such as cpu:0..3(dp=2, tp=2)").partition(":")[0]
        self._at = begin + len(device)
        self._expect(":", "`:` and the ranks of a placement")
        runs = []
        with self._placing():
            for run in self._need(_RANKS, "ranks such as 0..3 or 0,2").group().split(","):
                first, _, last = run.partition("..")
                require_rank_fits(int(last or first))
                runs.append(range(int(first), int(last or first) + 1))
        self._expect("(", "`(` and the extents of a mesh")
        extents: list[int] = []
        axes: list[str] = []
        while not self._take(")"):
            if extents:
                self._expect(",", "`, ` or `)`")
            if self._find(_WHOLE, keep=True) is None:
                axes.append(self._name("the name of a mesh axis, or its extent"))
                self._expect("=", "`=` and the extent of a mesh axis")
            extents.append(self._whole("the extent of a mesh axis"))
        text = self._text[begin : self._at]
        if text not in self._placements:
            with self._placing(begin):
                if prod(extents) != sum(map(len, runs)) or (axes and len(axes) != len(extents)):
                    raise self._error(
                        "as many ranks as the mesh has places, and all axes named or none", begin
                    )
                ranks = np.array([rank for run in runs for rank in run]).reshape(extents)
                self._placements[text] = Placement(device, ranks, axes or None)
        return self._placements[text]

    def _sbp(self) -> NdSbp:
        with self._placing():
            return NdSbp.of(self._need(_LAYOUT, "a layout such as [S(0), B]").group())

    def _origin(self) -> Origin:
        match = self._find(_ORIGIN)
        if match is None:
            return NO_ORIGIN
        region = self._quoted(match, 2) if match[2] else ""
        return Origin(Phase(match[1]), region, match[3] is not None, int(match[4] or -1))

    def _micro(self) -> Micro | None:
        match = self._find(_MICRO)
        if match is None:
            return None
        with self._placing():
            inputs, outputs = (NdSbp.of(each).entries for each in (match[2], match[3]))
        return Micro(int(match[1]), inputs, outputs)

    def _source(self) -> SourceLine:
        source = (
            SourceLine(self._file, self._position(self._at)[0]) if self._file else UNKNOWN_SOURCE
        )
        if self._take("#"):
            match = self._need(_SOURCE, "`FILE:LINE`, where the op was written")
            file = self._quoted(match, 1) if match[1] else match[2]
            source = SourceLine(file, int(match[3]))
        if self._at < len(self._text):
            self._expect("\n", "the end of the op: a layout [..], {..} or `# FILE:LINE`")
        return source

    # Tokens.

    def _name(self, expected: str) -> str:
        match = self._need(_NAME, expected)
        return self._quoted(match) if match.group()[0] == '"' else match.group()

    def _quoted(self, match: re.Match[str], group: int = 0) -> str:
        try:
            return str(json.loads(match[group]))
        except ValueError:
            raise self._error("a text as JSON writes it", match.start(group)) from None

    def _whole(self, expected: str) -> int:
        return int(self._need(_WHOLE, expected).group())

    def _wholes(self, end: str) -> Iterator[int]:
        if not self._take(end):
            yield self._whole("an extent")
            while not self._take(end):
                self._expect(",", f"`, ` or `{end}`")
                yield self._whole("an extent")

    def _skip_comments(self) -> None:
        match = _SKIPPED.match(self._text, self._at)
        self._at = self._at if match is None else match.end()

    def _ahead(self, literal: str) -> bool:
        self._skip_blanks()
        return self._text.startswith(literal, self._at)

    def _take(self, literal: str) -> bool:
        there = self._ahead(literal)
        self._at += len(literal) if there else 0
        return there

    def _expect(self, literal: str, expected: str) -> None:
        if not self._take(literal):
            raise self._error(expected)

    def _find(self, pattern: re.Pattern[str], *, keep: bool = False) -> re.Match[str] | None:
        self._skip_blanks()
        match = pattern.match(self._text, self._at)
        if match is not None and not keep:
            self._at = match.end()
        return match

    def _need(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = self._find(pattern)
        if match is None:
            raise self._error(expected)
        return match

    def _skip_blanks(self) -> None:
        match = _BLANKS.match(self._text, self._at)
        self._at = self._at if match is None else match.end()

    # Errors.

    def _position(self, at: int) -> tuple[int, int]:
        """Line and column, both from 1."""
        return self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)

    def _place(self, at: int) -> str:
        return ":".join(map(str, (self._file or "<text>", *self._position(at))))

    def _error(self, expected: str, at: int | None = None) -> JobFileError:
        at = self._at if at is None else at
        rest = self._text[at:].partition("\n")[0]
        return JobFileError(
            "the text of a job does not parse",
            source=self._place(at),
            got=repr(rest[:40]) if rest else "the end of the line",
            expected=expected,
        )

    @contextmanager
    def _placing(self, at: int | None = None) -> Iterator[None]:
        """Errors of what is made in the block are told where its text begins."""
        self._skip_blanks()
        at = self._at if at is None else at
        try:
            yield
        except PlanCompilerError as error:
            raise error.at(source=self._place(at)) from None
