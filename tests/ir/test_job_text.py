"""Jobs as text, both ways: what prints reads back as the same job, and errors name the place."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import plancompiler as pc
from plancompiler.cli.job_file import load_job
from plancompiler.errors import JobFileError, PlanCompilerError
from plancompiler.ir import (
    DType,
    Job,
    Micro,
    NdSbp,
    Op,
    Origin,
    Phase,
    Placement,
    SourceLine,
    Value,
    freeze_attrs,
    parse_sbp,
)
from plancompiler.ir.job_parser import parse_job
from plancompiler.ir.pipeline import SCHEDULES, Pipeline
from plancompiler.passes import Config, run_passes
from tests.examples import EXAMPLES, gpt, mlp

NAMES = some.one_of(some.from_regex(r"\A[a-z_][a-z0-9_]{0,6}(\.[0-9])?\Z"), some.text(max_size=6))
PLAIN = some.one_of(
    some.booleans(), some.integers(), some.floats(allow_nan=False), some.text(max_size=6)
)
ATTRS = some.dictionaries(
    NAMES, some.one_of(PLAIN, some.lists(PLAIN, max_size=3).map(tuple)), max_size=3
).map(freeze_attrs)
ENTRIES = some.sampled_from(["S(0)", "S(3)", "B", "P", "P(max)", "P(avg)"]).map(parse_sbp)
LAYOUTS = some.lists(ENTRIES, max_size=3).map(lambda entries: NdSbp(tuple(entries)))
ORIGINS = some.builds(
    Origin,
    some.sampled_from(Phase),
    some.text(max_size=6),
    some.booleans(),
    some.integers(-1, 3),
)
MICROS = some.none() | some.builds(
    lambda segment, reads, makes: Micro(segment, reads.entries, makes.entries),
    some.integers(0, 9),
    LAYOUTS,
    LAYOUTS,
)
SOURCES = some.builds(SourceLine, some.text(max_size=9), some.integers(0, 99))
CONFIGS = some.builds(
    Config,
    zero=some.integers(0, 3),
    microbatches=some.integers(1, 4),
    schedule=some.sampled_from(SCHEDULES),
    precision=some.sampled_from(("float32", "bfloat16")),
    dp_axes=some.sampled_from((("dp",), (), ("a", "b"))),
)
PIPELINES = some.none() | some.builds(Pipeline, some.just("gpipe"), *[some.just(2)] * 3)


@some.composite
def placements(draw: some.DrawFn) -> Placement:
    hierarchy = draw(some.lists(some.integers(1, 3), min_size=1, max_size=3))
    count = math.prod(hierarchy)
    run = some.integers(0, 9).map(lambda first: list(range(first, first + count)))
    ranks = draw(run | some.permutations(range(count)))
    unique = some.lists(NAMES, min_size=len(hierarchy), max_size=len(hierarchy), unique=True)
    device = draw(some.sampled_from(("cpu", "cuda")))
    return Placement(device, np.array(ranks).reshape(hierarchy), draw(some.none() | unique))


@some.composite
def jobs(draw: some.DrawFn) -> Job:
    """Any job whose ops read what earlier ops made; what they say need not make sense."""
    made: list[Value] = []
    ops = []
    for name in draw(some.lists(NAMES, max_size=4, unique=True)):
        placement, source = draw(placements()), draw(SOURCES)
        inputs = draw(some.lists(some.sampled_from(made), max_size=3)) if made else []
        results = draw(
            some.sampled_from(
                [[name], [f"{name}.0", f"{name}.1"], [], [f"{name}?"], [f"{name}0", name]]
            )
        )
        outputs = tuple(
            Value(
                each,
                tuple(draw(some.lists(some.integers(0, 1 << 40), max_size=3))),
                draw(some.sampled_from(DType)),
                placement,
                source,
            )
            for each in results
        )
        ops.append(
            Op(
                name,
                draw(NAMES),
                tuple(inputs),
                outputs,
                draw(ATTRS),
                placement,
                draw(some.none() | LAYOUTS),
                source,
                draw(ORIGINS),
                draw(MICROS),
            )
        )
        made.extend(outputs)
    return Job(
        draw(NAMES), tuple(ops), draw(some.integers(0, 1 << 62)), draw(CONFIGS), draw(PIPELINES)
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(jobs())
def test_any_job_reads_back_from_its_text(job: Job) -> None:
    text = str(job)
    again = parse_job(text)
    assert again == job
    assert str(again) == text


def with_config(job: Job, **config: object) -> Job:
    return replace(job, config=replace(job.config, **config))


EXAMPLE_JOBS = {
    "mlp": lambda: mlp(layout="dp_tp", ranks=4),
    "mlp zero": lambda: with_config(mlp(ranks=4), zero=3, precision="float16"),
    "gpt": lambda: with_config(gpt(dp=2, tp=2, pp=2), microbatches=4, schedule="1f1b"),
    "moe": lambda: load_job(str(EXAMPLES / "moe.py"), {}, 2),
    "fused_gpt": lambda: load_job(str(EXAMPLES / "fused_gpt.py"), {"layers": 1}, 2),
}


@pytest.mark.parametrize("name", EXAMPLE_JOBS)
def test_examples_read_back_before_and_after_their_passes(name: str) -> None:
    traced = EXAMPLE_JOBS[name]()
    for job in (traced, run_passes(traced)[0]):
        again = parse_job(str(job))
        assert again == job
        assert again.inputs.keys() == job.inputs.keys()


def test_constants_read_back_to_the_last_bit() -> None:
    numbers = np.array([0.1, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38], dtype="float32")
    with pc.job("constants") as job:
        mesh = pc.Placement("cpu", [0])
        pc.output("y", pc.constant(numbers, "float32", mesh) * 2.0)
    again = parse_job(str(job))
    assert str(again) == str(job)
    values = next(op.attr("values") for op in again.ops if op.kind == "constant")
    np.testing.assert_array_equal(np.array(values, dtype="float32"), numbers)
    assert np.signbit(values[1])


SMALL = """\
# A comment, and a line left out.

job "two words" (seed 3) zero=1 passes=zero,dce
  pipeline 1f1b microbatches=4 stages=2 chunks=2
  %x: float32[4, 6] = input() name='x' @cpu:0..3(dp=2, tp=2) [S(0), B]  # mlp.py:3
  # Another comment.
  out: output(%x) name="it's" axes=(0,1) @cpu:0..3(dp=2, tp=2) {forward region="r s" stage=0}
"""


def test_a_text_written_by_hand_reads_as_it_says() -> None:
    job = parse_job(SMALL)
    assert (job.name, job.seed, str(job.config)) == ("two words", 3, "passes=zero,dce zero=1")
    assert job.pipeline == Pipeline("1f1b", 4, 2, 2)
    first, second = job.ops
    assert second.inputs == first.outputs
    assert second.attrs == (("axes", (0, 1)), ("name", "it's"))
    assert second.origin == Origin(region="r s", stage=0)
    assert (str(first.source), second.source.line) == ("mlp.py:3", 0)
    assert parse_job(SMALL.replace("\n", " \n")) == job
    assert [str(op.source) for op in parse_job(SMALL, "job.txt").ops] == ["mlp.py:3", "job.txt:7"]


WRONG = {
    "nothing": (SMALL, "", "", "`job NAME"),
    "header": ("(seed 3)", "(seed x)", "x) zero", "a seed"),
    "config": ("zero=1", "zero=7", "zero=7", "0 to 3"),
    "unknown setting": ("zero=1", "zorro=1", "zorro=1", "KEY=VALUE"),
    "schedule": ("1f1b", "2f2b", "2f2b", "gpipe"),
    "dtype": ("float32[", "floot[", "floot[", "float32"),
    "extent": ("[4, 6]", "[4, x]", "x] =", "an extent"),
    "no kind": ("= input()", "input()", "input()", "` = `"),
    "unclosed": ("input()", "input(", "name='x'", "%NAME"),
    "attribute": ("name='x'", "name", "@cpu", "`=`"),
    "text": ("name='x'", "name='x", "'x @", "ends on its line"),
    "escape": ("name='x'", r"name='\u12'", r"'\u12'", "Python"),
    "value": ("name='x'", "name=*", "* @cpu", "a number"),
    "device": ("@cpu:0..3(dp=2, tp=2) [", "@tpu:0(1) [", "tpu:0", "cpu or cuda"),
    "few ranks": ("0..3(dp=2, tp=2) [", "0..2(dp=2, tp=2) [", "cpu:0..2", "as many"),
    "many ranks": ("0..3(dp=2, tp=2) [", "0..99999999999(2) [", "0..999", "20 bits"),
    "half named": ("(dp=2, tp=2) [", "(dp=2, 2) [", "cpu:0..3(dp=2, 2)", "all axes named"),
    "layout": ("[S(0), B]", "[S(0), Q]", "[S(0), Q]", "S(i)"),
    "source": ("# mlp.py:3", "# mlp.py", "mlp.py\n", "FILE:LINE"),
    "unknown value": ("output(%x)", "output(%y)", "y)", "an earlier result"),
    "no label": ("out: output", "output", "(%x)", "`:`"),
    "quotes": ("out: output", r'"\x": output', r'"\x"', "JSON"),
    "origin": ("{forward", "{sideways", "{sideways", "{..}"),
    "cut off": ('{forward region="r s" stage=0}', "[S(0)", "[S(0)\n", "a layout"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_names_line_column_and_what_was_expected(name: str) -> None:
    old, new, got, expected = WRONG[name]
    text = SMALL.replace(old, new, 1)
    before = text[: text.index(got)]
    with pytest.raises(PlanCompilerError) as caught:
        parse_job(text, "job.txt")
    report = caught.value.report
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    assert report.source == f"job.txt:{line}:{column}", str(caught.value)
    assert report.got
    assert expected in str(report.expected)


def test_a_file_of_text_is_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    job = mlp(ranks=2)
    path.write_text(str(job))
    assert load_job(str(path), {}) == job
    for target, config in ((f"{path}:other", {}), (str(path), {"dp": 2})):
        with pytest.raises(pc.UsageError, match="no function and no settings"):
            load_job(target, config)
    path.write_bytes(b"\xff")
    with pytest.raises(JobFileError, match="cannot be read"):
        load_job(str(path), {})
    path.write_text(str(job).replace("float32[30, 64] = cast", "float32[30, 65] = cast"))
    with pytest.raises(PlanCompilerError, match=r"makes something else than it says.*examples"):
        load_job(str(path), {})
