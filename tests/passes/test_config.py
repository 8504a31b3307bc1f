"""A config is checked where it is written, has one text form, and travels with its job."""

from __future__ import annotations

import pytest

import plancompiler as pc
from plancompiler.errors import UsageError, WireFormatError
from plancompiler.passes import PASSES, Config, chosen, run_passes
from plancompiler.plan.job_serde import job_from_bytes, job_to_bytes
from plancompiler.proto import job_pb2
from tests.passes.worlds import mesh, tower_job

CONFIGS = [
    Config(),
    Config(zero=3, fuse_bytes=0, precision="bfloat16", recompute="auto"),
    Config(passes=(), dp_axes=("a", "b"), streams="one"),
    Config(passes=("dce", "microbatch"), schedule="1f1b", microbatches=4),
]


def test_the_options_of_every_pass_are_in_the_config() -> None:
    assert pc.Config is Config
    names = {each.name for each in PASSES}
    for each in PASSES:
        assert each.options is None or (
            issubclass(Config, each.options) and each.options.owner == each.name
        )
    assert {each.owner for each in Config.options()} <= {"", *names}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_text_form_is_read_back(config: Config) -> None:
    assert Config.parse(str(config)) == config


def test_the_text_form_says_what_is_not_default() -> None:
    assert str(Config()) == ""
    assert str(Config(zero=1, passes=("zero", "dce"))) == "passes=zero,dce zero=1"


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"passes": ("dce", "speed")}, "Got: 'speed'. Expected: some of mixed_precision, fold"),
        ({"passes": ("dce", "dce")}, "twice"),
        ({"passes": "dce"}, "a tuple of names"),
        ({"dp_axes": None}, "a tuple of names"),
        ({"zero": 4}, "Expected: 0 to 3"),
        ({"zero": True}, "whole number"),
        ({"microbatches": 0}, "at least 1"),
        ({"fuse_bytes": 1.5}, "whole number"),
        ({"fuse_bytes": -1}, "at least 0"),
        ({"fuse_bytes": "large"}, "one of auto or a whole number"),
        ({"schedule": "fifo"}, "one of gpipe, 1f1b, interleaved, zero_bubble"),
        ({"precision": "float8"}, "unknown precision"),
        ({"zero": 1, "passes": ("dce",)}, "Expected: zero among the passes"),
        ({"microbatches": 2, "passes": ("dce",)}, "Expected: microbatch among the passes"),
        ({"schedule": "1f1b", "passes": ()}, "Expected: microbatch among the passes"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        Config(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["zero", "zero=x", "speed=1", "zero=1 zero=2"])
def test_text_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Config.parse(text)


def test_settings_of_the_command_line_are_read() -> None:
    given = {"zero": "2", "passes": "zero,dce", "fuse_bytes": 7}
    assert Config.of(given) == Config(zero=2, passes=("zero", "dce"), fuse_bytes=7)
    with pytest.raises(UsageError, match="no such setting"):
        Config.of({"speed": 1})


def test_a_job_carries_its_config() -> None:
    with pc.job("j", config=Config(fuse_bytes=3)) as job:
        pc.output("x", pc.zeros((2,), "float32", mesh(1)))
    assert job.config.fuse_bytes == 3
    assert str(job).startswith("job j (seed 0) fuse_bytes=3\n")
    assert job_from_bytes(job_to_bytes(job)) == job
    with pytest.raises(UsageError, match="must be a Config"):
        pc.job("j", config={"zero": 1})  # type: ignore[arg-type]


def test_a_damaged_config_on_the_wire_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tower_job(mesh(1))
    whole = job_pb2.Job.SerializeToString

    def damaged(message: job_pb2.Job) -> bytes:
        message.config = "zero=9"
        return whole(message)

    monkeypatch.setattr(job_pb2.Job, "SerializeToString", damaged, raising=False)
    with pytest.raises(WireFormatError, match="malformed"):
        job_from_bytes(job_to_bytes(job))


def test_a_config_chooses_passes_in_the_order_of_the_list() -> None:
    assert [each.name for each in chosen(Config(passes=("dce", "cse")))] == ["cse", "dce"]
    assert chosen(Config(passes=())) == ()
    defaults = [each.name for each in chosen(Config())]
    assert defaults == [each.name for each in PASSES if each.default]
    job = tower_job(mesh(2), pc.optim.SGD(0.1))
    _, records = run_passes(job)
    assert [record.name for record in records] == defaults
    assert records[-1].ops_before >= records[-1].ops_after
