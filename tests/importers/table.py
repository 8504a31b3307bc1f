"""The table of models in docs/models.md: how each imports, and in which layouts it trains.

    python -m tests.importers.table [MODEL ...] [--write] [--lines FILE]

Each model is trained beside PyTorch, as `test_torch_models` does for one rank and two layouts, and
in more layouts here. Prints one JSON line per model; `--write` makes docs/models.md of them, and of
those in FILE for models that did not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.errors import PlanCompilerError
from plancompiler.lower.compile import MODES, compile_plans
from tests.importers.models import MODELS, made, torch, transformers
from tests.importers.training import (
    DP,
    ONE,
    TP,
    Trained,
    compare,
    job_of,
    reference,
    rows_split,
    trained,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BOTH = pc.Placement("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
STAGES = pc.Placement("cpu", [[[0], [1]], [[2], [3]]], ("pp", "dp", "tp"))
STEPS = 10
FEW = 3
"""Steps in layouts that others here are made of."""

Row = dict[str, Any]


def stages_pattern(model: pc.nn.Module) -> str:
    """The layers of a model: the modules with numbers for names, where most are."""
    numbers: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdecimal():
                numbers.setdefault(".".join(parts[:at]), set()).add(part)
    several = [name for name, each in numbers.items() if len(each) > 1]
    return f"{min(several, key=lambda name: name.count('.'))}.*"


def labelled_everywhere(example: dict[str, Any]) -> dict[str, Any]:
    """The example with a label everywhere, so that all micro-batches count alike."""
    labels = example.get("labels")
    return example if labels is None else {**example, "labels": labels.clamp(min=0)}


class Model:
    """One model, and what PyTorch computes of it."""

    def __init__(self, name: str) -> None:
        self.module, self.example = made(name)
        begin = time.perf_counter()
        self.model = pc.from_torch(self.module, self.example)
        self.seconds = time.perf_counter() - begin
        self.wanted = reference(self.module, self.example)

    def one(self) -> None:
        """One rank: losses and gradients to 1e-5."""
        made = trained(self.model.place(ONE), self.example, ONE, ["B", "B"], STEPS)
        compare(made, self.wanted, 1e-5, 1e-5)

    def data_parallel(self) -> None:
        """The batch on two ranks."""
        made = trained(self.model.place(DP), self.example, DP, ["S(0)", "B"], STEPS)
        compare(made, self.wanted, 1e-4, 1e-4)

    def tensor_parallel(self) -> None:
        """The rows of every matrix on two ranks."""
        placed = self.model.place(TP, rows_split(self.model))
        compare(trained(placed, self.example, TP, ["B", "B"], STEPS), self.wanted, 1e-4, 1e-4)

    def both(self, backend: str = "threads") -> None:
        """Both, on four ranks."""
        placed = self.model.place(BOTH, rows_split(self.model))
        made = trained(placed, self.example, BOTH, ["S(0)", "B"], FEW, backend)
        compare(made, self.wanted, 1e-4, 1e-4)

    def processes(self) -> None:
        """The same, with processes."""
        self.both("processes")

    def pipeline(self) -> None:
        """Two stages of two ranks each, and two micro-batches."""
        example = labelled_everywhere(self.example)
        wanted = reference(self.module, example)
        layout = pc.layouts.stages(self.model, stages_pattern(self.model), "pp")
        model = self.model.place(STAGES, layout)
        first = pc.layouts.stage_meshes(STAGES, "pp")[0]
        config = pc.Config(microbatches=2)
        job = job_of(model, example, first, ["S(0)", "B"], config, gradients=False)
        self._steps(job, 4, example, wanted)

    def zero(self) -> None:
        """Training state split over the ranks of the batch."""
        model = self.model.place(BOTH, rows_split(self.model))
        config = pc.Config(zero=3)
        job = job_of(model, self.example, BOTH, ["S(0)", "B"], config, gradients=False)
        self._steps(job, 4, self.example, self.wanted)

    def modes(self) -> None:
        """One digest of the plans for four ranks in all modes."""
        placed = self.model.place(BOTH, rows_split(self.model))
        job = job_of(placed, self.example, BOTH, ["S(0)", "B"])
        digests = {compile_plans(job, 4, mode).digest for mode in MODES}
        assert len(digests) == 1, digests

    def _steps(self, job: pc.Job, ranks: int, example: dict[str, Any], wanted: Trained) -> None:
        feeds = {key: each.numpy() for key, each in example.items() if torch.is_tensor(each)}
        with pc.run(job, ranks=ranks, cache=False) as session:
            losses = [float(session.step(**feeds)["loss"]) for _ in range(FEW)]
        np.testing.assert_allclose(losses, wanted.losses[:FEW], rtol=1e-4)


LAYOUTS: dict[str, Callable[[Model], None]] = {
    "one rank": Model.one,
    "dp 2": Model.data_parallel,
    "tp 2": Model.tensor_parallel,
    "dp 2 × tp 2": Model.both,
    "processes": Model.processes,
    "pp 2 × dp 2": Model.pipeline,
    "zero 3": Model.zero,
    "modes": Model.modes,
}


def row_of(name: str) -> Row:
    """What a model shows."""
    model = Model(name)
    row: Row = {
        "model": name,
        "class": type(model.module).__name__,
        "targets": len({node.target for node in model.model.graph.nodes}),
        "parameters": sum(each.numel() for each in model.module.parameters()),
        "seconds": round(model.seconds, 2),
    }
    for title, prove in LAYOUTS.items():
        try:
            prove(model)
            row[title] = "yes"
        except (AssertionError, PlanCompilerError) as error:
            print(f"{name}, {title}: {error}", file=sys.stderr)
            row[title] = error.code if isinstance(error, PlanCompilerError) else "no"
    return row


INTRODUCTION = """# Imported models

`python -m tests.importers.table --write` makes this page: models of transformers {transformers} of
small sizes with random weights, imported by `pc.from_torch` from PyTorch {torch} and trained with
AdamW beside PyTorch.

`targets` are the kinds of operations of the imported graph, and `seconds` is the time of the
import, most of it PyTorch's export. `yes` says that losses agree with PyTorch's, to 1e-5 on one
rank and to 1e-4 in layouts; where the batch (`dp`) or the rows of every matrix (`tp`) are split all
gradients do, too. `processes` is dp 2 × tp 2 with a process for each rank, the others have threads.
`pp 2 × dp 2` has two stages of two ranks each and two micro-batches; `zero 3` splits the training
state of dp 2 × tp 2; `modes` says that all four compile modes give the same plans. The others show
the code of an error, or `no` for other numbers.
"""
END = """
E128: the loss of CLIP compares every image with every text of the batch, so that micro-batches
would compute something else, and are refused.
"""


def page(rows: list[Row]) -> str:
    """docs/models.md."""
    torch_version = torch.__version__.partition("+")[0]
    lines = [
        INTRODUCTION.format(transformers=transformers.__version__, torch=torch_version),
        "| class | targets | parameters | seconds | " + " | ".join(LAYOUTS) + " |",
        "|---|--:|--:|--:|" + "---|" * len(LAYOUTS),
    ]
    for row in rows:
        cells = [row["class"], str(row["targets"]), f"{row['parameters']:,}", str(row["seconds"])]
        cells += [row[title] for title in LAYOUTS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + END


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--lines", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: dict[str, Row] = {}
    if options.lines is not None:
        for line in options.lines.read_text().splitlines():
            row = json.loads(line)
            rows[row["model"]] = row
    for name in options.models:
        rows[name] = row_of(name)
        print(json.dumps(rows[name], ensure_ascii=False), flush=True)
    if options.write:
        PAGE.write_text(page([rows[name] for name in MODELS if name in rows]))


if __name__ == "__main__":
    main()
