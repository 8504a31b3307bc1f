"""Mistakes that people make: each gives one error that says what, where, got, expected, what to do.

Those of Python code raise a PlanCompilerError; those of commands print it as one paragraph and end
with 1 or 2. Every mistake is made once; a campaign has as many cases as there are mistakes.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

import plancompiler as pc
from benchmarks.campaign.case import Case, Result, unforeseen_lines
from benchmarks.campaign.sandbox import PROGRAMS
from plancompiler.cli.program import cli
from plancompiler.errors import ErrorReport, PlanCompilerError

LIMIT_SECONDS = 20.0
ONE, PAIR = pc.Placement("cpu", [0]), pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]], axes=("dp", "tp"))
JOB = str(PROGRAMS / "regression.py")
PARAGRAPH = re.compile(
    r"^(plancompiler: \[E\d{3} \w+\] .+|(Usage: .+\n)(Try .+\n)?\n?(Error: .+))$", re.S
)
"""One paragraph of ours, or what click says about options."""
Mistake = Callable[[Path], Any]
MISTAKES: dict[str, Mistake] = {}


def mistake(function: Mistake) -> Mistake:
    """Add a mistake in Python code, which gets an empty folder; its docstring says what it is."""
    assert function.__doc__ is not None
    MISTAKES[function.__doc__.rstrip(".").lower()] = function
    return function


def in_job(name: str, line: Callable[[pc.Value, pc.Value], Any]) -> None:
    """A mistake with values of a job: x of 4 × 6 split over two ranks, and labels of 4."""

    def trace(_: Path) -> None:
        with pc.job("wrong"):
            x = pc.input("x", (4, 6), "float32", PAIR, "S(0)")
            y = pc.input("y", (4,), "int64", PAIR, "S(0)")
            pc.output("total", x.sum())
            line(x, y)

    MISTAKES[name] = trace


def wrong(value: object) -> Any:
    """A value of a type that the function it is given to refuses."""
    return value


def on_tensors(name: str, line: Callable[[pc.DistTensor], Any]) -> None:
    """A mistake with an eager tensor of 4 × 6."""

    def run(_: Path) -> None:
        line(pc.tensor(np.ones((4, 6), np.float32), ONE, requires_grad=True))

    MISTAKES[name] = run


def command(name: str, *words: str, job: str = "", files: dict[str, str] | None = None) -> None:
    """A mistake in a command; FOLDER and JOB in a word are a folder with files, and a job there."""

    def invoke(folder: Path) -> str:
        for file, text in {**(files or {}), **({"job.py": job} if job else {})}.items():
            (folder / file).write_text(text)
        target = str(folder / "job.py") if job else JOB
        given = [word.replace("FOLDER", str(folder)).replace("JOB", target) for word in words]
        done = CliRunner().invoke(cli, given)
        if done.exit_code not in (1, 2):
            raise AssertionError(f"exit code {done.exit_code}: {done.output!r}")
        if done.stdout.strip() and "--json" not in words:
            raise AssertionError(f"words on standard output: {done.stdout!r}")
        return done.stderr

    MISTAKES[name] = invoke


# --- placements and layouts -----------------------------------------------------------------------

for text, arguments in {
    "a rank twice in a placement": ("cpu", [0, 1, 1]),
    "a negative rank": ("cpu", [-1, 0]),
    "a ragged placement": ("cpu", [[0, 1], [2]]),
    "an empty placement": ("cpu", []),
    "an unknown device type": ("tpu", [0]),
    "a rank that is no number": ("cpu", ["a"]),
    "a rank that is half a number": ("cpu", [0.5]),
    "a mesh with too few axis names": ("cpu", [[0, 1]], ("dp",)),
    "a mesh with one axis name twice": ("cpu", [[0, 1]], ("dp", "dp")),
    "a mesh whose axis names are numbers": ("cpu", [[0, 1]], (0, 1)),
}.items():
    MISTAKES[text] = partial(lambda words, _: pc.Placement(*words), arguments)
for text, sbp in {
    "an unknown layout": "Q",
    "a split without an axis": "S()",
    "a split of an axis that is not there": "S(7)",
    "more layouts than mesh axes": ["B", "B"],
    "an unknown reduction of a partial value": "P(median)",
    "a layout that is a number": 3,
    "a negative split axis": "S(-1)",
    "an empty list of layouts": [],
}.items():
    MISTAKES[text] = partial(lambda word, _: pc.tensor(np.ones((4, 6), np.float32), ONE, word), sbp)
on_tensors("redistribution to nothing at all", lambda x: x.redistribute(sbp="S(9)"))
on_tensors("an unknown dtype", lambda x: x.cast("float13"))
on_tensors("a placement of ranks that are not there", lambda x: x.redistribute(PAIR, "B").numpy())

# --- shapes, dtypes, attributes -------------------------------------------------------------------

in_job("a product of shapes that do not fit", lambda x, y: x @ x)
in_job("a sum of shapes that do not fit", lambda x, y: x + x.transpose((1, 0)))
in_job("a reshape to another number of elements", lambda x, y: x.reshape((5, 5)))
in_job("a reshape with two unknown extents", lambda x, y: x.reshape((-1, -1)))
in_job("a transpose with an axis twice", lambda x, y: x.transpose((0, 0)))
in_job("a sum along an axis that is not there", lambda x, y: x.sum(axis=5))
in_job("a softmax along an axis that is not there", lambda x, y: pc.softmax(x, axis=2))
in_job("labels of another shape", lambda x, y: pc.cross_entropy(x.sum(axis=1), y))
in_job("labels that are no whole numbers", lambda x, y: pc.cross_entropy(x, x.sum(axis=1)))
in_job("joining along different shapes", lambda x, y: pc.concat([x, y], 0))
in_job("joining nothing", lambda x, y: pc.concat([], 0))
in_job("an index beyond the end", lambda x, y: x[9])
in_job("an index that is a text", lambda x, y: x["a"])
in_job("a wrong equation for einsum", lambda x, y: pc.einsum("ab,bc->ad", x, x))
in_job("an embedding with indices that are no whole numbers", lambda x, y: pc.embedding(x, x))
in_job("a convolution of the wrong rank", lambda x, y: pc.conv2d(x, x))
in_job("dropout of more than everything", lambda x, y: pc.dropout(x, 1.5))
in_job("a condition on a traced value", lambda x, y: bool(x.sum() > 0))
in_job("a number out of a traced value", lambda x, y: float(x.sum()))
in_job("a traced value as an array", lambda x, y: np.asarray(x))
in_job("a module with the wrong width", lambda x, y: pc.nn.Linear(5, 3).place(PAIR)(x))
in_job("an array beside a traced value", lambda x, y: x + np.ones((4, 6), np.float32))
in_job("a name for two inputs", lambda x, y: pc.input("x", (4,), "float32", PAIR))
in_job("an input with a negative extent", lambda x, y: pc.input("z", (-4,), "float32", PAIR))
in_job("a whole number out of a traced value", lambda x, y: int(x.sum()))
in_job("the length of a scalar", lambda x, y: len(x.sum()))
in_job("a clip with its bounds exchanged", lambda x, y: pc.clip(x, 1.0, -1.0))
in_job("topk of more than there is", lambda x, y: pc.topk(x, 99))
in_job("a pad with too few numbers", lambda x, y: pc.pad(x, (1,), (1,)))
in_job("one-hot of a number that is negative", lambda x, y: pc.one_hot(y, -3))
in_job("a bit operation on real numbers", lambda x, y: x & x)
in_job("two placements in one op", lambda x, y: x + pc.ones((4, 6), "float32", ONE))


def backward_twice(x: pc.DistTensor) -> None:
    z = (x * x).sum()
    z.backward()
    z.backward()


on_tensors("an eager product that does not fit", lambda x: x @ x)
on_tensors("backward from what is no scalar", lambda x: (x * 2.0).backward())
on_tensors("backward twice", backward_twice)
on_tensors("a gradient that does not exist", lambda x: pc.eager.grad(x.detach().sum(), [x]))
on_tensors("a result into a tensor of another shape", lambda x: pc.exp(x, out=x[:1].detach()))
on_tensors("a change in place of what a gradient needs", lambda x: [x.exp_(), x])
on_tensors("item of many elements", lambda x: x.item())
on_tensors("a condition on many elements", lambda x: bool(x > 0.0))
on_tensors("an array beside an eager tensor", lambda x: x + np.ones((4, 6), np.float32))
on_tensors("a learning rate that is a text", lambda x: pc.optim.SGD(lr=wrong("fast")))
on_tensors("a momentum beyond one", lambda x: pc.optim.SGD(lr=0.1, momentum=-2.0))
on_tensors("a layer of negative width", lambda x: pc.nn.Linear(-2, 3).place(ONE))
on_tensors("a seed that is a text", lambda x: pc.manual_seed(wrong("seven")))


@mistake
def _(_: Path) -> None:
    """An input outside of a job."""
    pc.input("x", (4,), "float32", PAIR)


@mistake
def _(_: Path) -> None:
    """A value that left its job."""
    with pc.job("one"):
        x = pc.input("x", (4,), "float32", PAIR)
        pc.output("x", x)
    with pc.job("two"):
        pc.output("y", x + 1.0)


@mistake
def _(_: Path) -> None:
    """A job without an output."""
    with pc.job("silent") as job:
        pc.input("x", (4,), "float32", PAIR)
    pc.run(job)


@mistake
def _(_: Path) -> None:
    """A loss that is no scalar."""
    with pc.job("wide"):
        model = pc.nn.Linear(6, 2).place(PAIR)
        pc.optim.SGD(lr=0.1).minimize(model(pc.input("x", (4, 6), "float32", PAIR)))


@mistake
def _(_: Path) -> None:
    """A loss that depends on no parameter."""
    with pc.job("idle"):
        pc.optim.SGD(lr=0.1).minimize(pc.input("x", (4, 6), "float32", PAIR).sum())


@mistake
def _(_: Path) -> None:
    """A layout for a parameter that the module does not have."""
    pc.nn.Linear(6, 2).place(PAIR, {"wieght": "S(0)"})


@mistake
def _(_: Path) -> None:
    """A state dict of another model."""
    pc.nn.Linear(6, 2).place(ONE).load_state_dict(pc.nn.Linear(6, 3).place(ONE).state_dict())


@mistake
def _(_: Path) -> None:
    """Parts of another shape than the layout says."""
    pc.from_local(np.ones((3, 3)), ONE, "S(0)", shape=(4, 3))


@mistake
def _(_: Path) -> None:
    """A ZeRO stage that does not exist."""
    pc.Config(zero=7)


@mistake
def _(_: Path) -> None:
    """A schedule that does not exist."""
    pc.Config(schedule="2f2b")


# --- runs, files, checkpoints ---------------------------------------------------------------------


def fed_job() -> pc.Job:
    """A job with one input of 4 × 2."""
    with pc.job("fed") as job:
        x = pc.input("x", (4, 2), "float32", PAIR, "S(0)")
        pc.output("total", (pc.nn.Linear(2, 2).place(PAIR)(x)).sum())
    return job


def in_run(name: str, use: Callable[[pc.Session, Path], Any]) -> None:
    """A mistake with a session of that job."""

    def run(folder: Path) -> None:
        with pc.run(fed_job(), 2) as session:
            use(session, folder)

    MISTAKES[name] = run


FED = np.ones((4, 2), np.float32)


def step_after_the_end(session: pc.Session, _: Path) -> None:
    session.close()
    session.step(x=FED)


in_run("a step without its input", lambda session, _: session.step())
in_run("a step with an input by another name", lambda session, _: session.step(z=FED))
in_run("a feed of another shape", lambda session, _: session.step(x=FED[:2]))
in_run("a feed of another kind", lambda session, _: session.step(x=FED.astype(np.complex64)))
in_run("a feed out of range", lambda session, _: session.step(x=FED.astype(np.float64) + 1e300))
in_run("a feed that is a text", lambda session, _: session.step(x="one"))
in_run("a feed that is ragged", lambda session, _: session.step(x=[[1.0], [1.0, 2.0]]))
in_run("steps that nobody feeds", lambda session, _: list(session.run(3)))
in_run("minus one step", lambda session, _: list(session.run(-1)))
in_run("half a step", lambda session, _: list(session.run(wrong(0.5))))
in_run("a step after the end", step_after_the_end)


@mistake
def _(folder: Path) -> None:
    """Saving into a file."""
    (folder / "taken").write_text("a file")
    with pc.run(fed_job(), 2) as session:
        session.save(folder / "taken")


@mistake
def _(folder: Path) -> None:
    """Restoring from nothing."""
    pc.run(fed_job(), 2, restore=folder / "nowhere")


@mistake
def _(folder: Path) -> None:
    """Restoring from a folder that holds something else."""
    (folder / "index.json").write_text("[1, 2, 3]")
    pc.run(fed_job(), 2, restore=folder)


@mistake
def _(folder: Path) -> None:
    """Restoring the checkpoint of another job."""
    with pc.job("other") as job:
        pc.output("y", pc.nn.Linear(3, 3).place(PAIR)(pc.ones((4, 3), "float32", PAIR)).sum())
    with pc.run(job, 2) as session:
        session.save(folder)
    pc.run(fed_job(), 2, restore=folder)


@mistake
def _(folder: Path) -> None:
    """Restoring a checkpoint of which a shard is missing."""
    with pc.run(fed_job(), 2) as session:
        session.save(folder)
    next(iter(sorted(folder.glob("*.safetensors")))).unlink()
    pc.run(fed_job(), 2, restore=folder)


in_run("saving where no system can", lambda session, folder: session.save(f"{folder}/a\0b"))


@mistake
def _(folder: Path) -> None:
    """Loading a state from nothing."""
    pc.eager.load(folder / "nowhere", {"w": pc.tensor(np.ones(3), ONE)})


@mistake
def _(_: Path) -> None:
    """Fewer ranks than the job needs."""
    pc.run(fed_job(), 1)


@mistake
def _(_: Path) -> None:
    """An unknown backend."""
    pc.run(fed_job(), 2, backend="fibers")


@mistake
def _(_: Path) -> None:
    """A job that is none."""
    pc.run(7)  # type: ignore[arg-type]  # the mistake


@mistake
def _(_: Path) -> None:
    """A deadline that is negative."""
    pc.run(fed_job(), 2, deadline=-1.0)


@mistake
def _(_: Path) -> None:
    """A master that is not there."""
    pc.Client("127.0.0.1:1", timeout=0.5)


@mistake
def _(_: Path) -> None:
    """A master's address without a port."""
    pc.Client("localhost", timeout=0.5)


@mistake
def _(folder: Path) -> None:
    """Ranks that are outside of any launcher's world."""
    pc.eager.spawn(lambda: pc.tensor(np.ones(2), pc.Placement("cpu", [0, 5])), 2)


def data_job(file: Path, **settings: Any) -> None:
    """A job that reads arrays from a file."""
    words: dict[str, Any] = {"batch": 4, "placement": PAIR, "sbp": "S(0)", **settings}
    with pc.job("reading") as job:
        x, y = pc.data.Arrays(file, ("x", "y"), **words)
        pc.output("total", x.sum() + y.cast("float32").sum())
    with pc.run(job, 2) as session:
        session.step()


def write_rows(folder: Path) -> Path:
    """A file of ten rows."""
    np.savez(folder / "rows.npz", x=np.ones((10, 3), np.float32), y=np.arange(10))
    return folder / "rows.npz"


for text, use in {
    "to restore from": lambda path: pc.run(fed_job(), 2, restore=path),
    "to trace into": lambda path: pc.run(fed_job(), 2, trace=path),
    "of arrays": data_job,
    "of a state": lambda path: pc.eager.load(path, {"w": pc.tensor(np.ones(3), ONE)}),
}.items():
    MISTAKES[f"a path {text} that no system takes"] = partial(
        lambda use, folder: use(folder / "a\0b"), use
    )


@mistake
def _(folder: Path) -> None:
    """Data that are missing."""
    data_job(folder / "nowhere.npz")


@mistake
def _(folder: Path) -> None:
    """Data under another name."""
    np.savez(folder / "rows.npz", a=np.ones((10, 3)), b=np.arange(10))
    data_job(folder / "rows.npz")


@mistake
def _(folder: Path) -> None:
    """Data that are a text."""
    (folder / "rows.npz").write_text("x,y\n1,2\n")
    data_job(folder / "rows.npz")


@mistake
def _(folder: Path) -> None:
    """Arrays of different lengths."""
    np.savez(folder / "rows.npz", x=np.ones((10, 3), np.float32), y=np.arange(7))
    data_job(folder / "rows.npz")


@mistake
def _(folder: Path) -> None:
    """A batch of no rows."""
    data_job(write_rows(folder), batch=0)


@mistake
def _(folder: Path) -> None:
    """Arrays of Python objects."""
    objects = np.array([{"a": 1}] * 4, dtype=object)
    np.savez(folder / "rows.npz", x=objects, y=objects)
    data_job(folder / "rows.npz")


@mistake
def _(folder: Path) -> None:
    """A token file shorter than a sequence."""
    (folder / "tokens.bin").write_bytes(b"abc")
    with pc.job("reading") as job:
        x, _y = pc.data.TokenFile(
            folder / "tokens.bin", batch=2, length=64, dtype="uint8", placement=PAIR, sbp="S(0)"
        )
        pc.output("total", x.cast("float32").sum())
    with pc.run(job, 2) as session:
        session.step()


# --- commands -------------------------------------------------------------------------------------

BUILD = "import plancompiler as pc\n\ndef build():\n    {}\n"
command("a command that does not exist", "train", JOB)
command("an option that does not exist", "run", "JOB", "--rank", "2")
command("no job file", "run")
command("a job file that is not there", "run", "FOLDER/nowhere.py")
command("a folder as job file", "run", "FOLDER")
command("a job file that is not Python", "run", "FOLDER/job.txt", files={"job.txt": "no"})
command("a job file with an error of syntax", "run", "JOB", job="def build(:\n")
command("a job file whose function fails", "run", "JOB", job=BUILD.format("return 1 / 0"))
command("a job file whose function gives no job", "run", "JOB", job=BUILD.format("return 7"))
command("a job file that imports what is missing", "run", "JOB", job="import nothing_at_all\n")
command("a function that is not in the job file", "run", "JOB:train")
command("a setting that the function does not take", "run", "JOB", "-D", "depth=3")
command("a setting that does not parse", "run", "JOB", "-D", "width")
command("a setting of the wrong kind", "run", "JOB", "-D", "width=wide")
command("no ranks", "run", "JOB", "--ranks", "0")
command("minus one step on the command line", "run", "JOB", "--steps", "-1")
command("steps that are no number", "run", "JOB", "--steps", "many")
command("a backend that does not exist", "run", "JOB", "--backend", "fibers")
command("a mode that does not exist", "run", "JOB", "--mode", "fastest")
command("saving often, but nowhere", "run", "JOB", "--save-every", "5")
command("saving where a file is", "run", "JOB", "--save", "FOLDER/a", files={"a": ""})
command("restoring from nothing by command", "run", "JOB", "--restore", "FOLDER/nowhere")
command("a trace into a folder that is not there", "run", "JOB", "--trace", "FOLDER/no/t.json")
command("a trace into a folder", "run", "JOB", "--trace", "FOLDER")
command("a pass that does not exist", "run", "JOB", "--pass", "optimise")
command("a ZeRO stage beyond three", "run", "JOB", "--zero", "9")
command("micro-batches that do not divide", "run", "JOB", "--microbatches", "3", "--steps", "1")
command("a precision that does not exist", "run", "JOB", "--precision", "float7")
command("a schedule without stages", "run", "JOB", "--schedule", "1f2b")
command("plans into a file", "compile", "JOB", "--out", "FOLDER/a", files={"a": ""})
command("a rank to compile that is not there", "compile", "JOB", "--ranks", "2", "--rank", "9")
command("plans that are not there", "inspect", "FOLDER/nowhere")
command("an empty folder of plans", "inspect", "FOLDER")
command("a plan that is a text", "inspect", "FOLDER/a.plan", files={"a.plan": "text"})
command("a format that does not exist", "inspect", "FOLDER", "--format", "pdf")
command("a master that nobody runs", "submit", "JOB", "--master", "127.0.0.1:1", "--timeout", "1")
command("an address that is none", "submit", "JOB", "--master", "master")
command("a port beyond the last", "submit", "JOB", "--master", "127.0.0.1:99999")
command("a worker of no master", "worker", "--master", "127.0.0.1:1", "--timeout", "1")
command("a worker of a negative rank", "worker", "--master", "127.0.0.1:1", "--rank", "-3")
command("a device that does not exist", "worker", "--master", "127.0.0.1:1", "--device", "abacus")
command("a master without ranks", "master", "--listen", "127.0.0.1:0")
command("a master for everybody", "master", "--listen", "0.0.0.0:0", "--ranks", "1")
command(
    "a master at another machine's address", "master", "--listen", "192.0.2.1:0", "--ranks", "1"
)
command(
    "half of a certificate",
    "master",
    "--listen",
    "127.0.0.1:0",
    "--ranks",
    "1",
    "--tls-ca",
    "FOLDER/a",
)
command(
    "certificates that are not there",
    *("master", "--listen", "127.0.0.1:0", "--ranks", "1"),
    *("--tls-ca", "FOLDER/a", "--tls-cert", "FOLDER/b", "--tls-key", "FOLDER/c"),
)
command("a script that is not there", "launch", "-n", "2", "FOLDER/nowhere.py")
command("a launch of nobody", "launch", "-n", "0", JOB)
command(
    "custom ops of a module that is not there",
    "run",
    "JOB",
    "--backend",
    "processes",
    "--allow-ops",
    "no_such",
)
command("a cache command that does not exist", "cache", "wash")
command("a JSON report of a failure", "run", "FOLDER/nowhere.py", "--json")

COUNT = len(MISTAKES)


class Mistakes:
    """Makes one mistake after another."""

    def run(self, case: Case) -> Result:
        """The mistake of the case's index."""
        name, make = list(MISTAKES.items())[case.index % len(MISTAKES)]
        result = Result(case, "mistakes", name)
        folder = Path(tempfile.mkdtemp(prefix="campaign-"))
        begin = time.monotonic()
        try:
            said = make(folder)
        except PlanCompilerError as error:
            result.ending = "an error of ours"
            self._judge(result, error.report)
        except AssertionError as error:
            result.problems.append(str(error))
        except Exception as error:
            result.problems.append(f"a bare {type(error).__name__}: {error}")
        else:
            self._judge_text(result, said)
        finally:
            shutil.rmtree(folder)
        result.seconds = time.monotonic() - begin
        result.require(result.seconds < LIMIT_SECONDS, f"it took {result.seconds:.0f} s")
        return result

    @staticmethod
    def _judge(result: Result, report: ErrorReport) -> None:
        """What, and at least two of got, expected and what to do."""
        parts = [report.got, report.expected, report.hint]
        result.require(report.what, "the error does not say what")
        result.require(
            sum(part is not None for part in parts) >= 2,
            f"the error says too little: {PlanCompilerError.from_report(report)}",
        )

    @staticmethod
    def _judge_text(result: Result, said: object) -> None:
        if not isinstance(said, str):
            result.problems.append("nothing is wrong with it")
            return
        text = said.strip()
        result.ending = "one paragraph, exit code 1 or 2"
        result.problems += [f"it says: {line}" for line in unforeseen_lines(text)]
        notes = ("compiled", "worker of", "read the plans")
        last = text.splitlines()[-1] if text.startswith(notes) else text
        result.require(PARAGRAPH.match(last), f"no paragraph of ours: {text}")


@contextlib.contextmanager
def opened() -> Iterator[Mistakes]:
    """Runs cases."""
    yield Mistakes()
