"""The standard's own cases of every operator of ONNX, run through the importer on eager tensors.

    python -m tests.importers.onnx_cases [PATTERN] [--write]

prints what became of each kind of case; `--write` puts the table into docs/import.md. A case is a
model of one operator, with inputs and the results that they must give. What decides about shapes is
an input there, so where the importer asks for the value of an input, it is given as a constant.
Results of random operators are compared by shape and dtype only.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import plancompiler as pc
from plancompiler.errors import PlanCompilerError

BEGIN, END = "<!-- onnx cases: begin -->", "<!-- onnx cases: end -->"
HERE = pc.Placement("cpu", [0])
_RANDOM = re.compile("bernoulli|training_dropout(?!.*zero_ratio)|random")
_ROUNDING = 2.0**-21
"""Of float32, of the greatest number of a result: others that cancel out are not exact there."""
_HALF = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
"""Rounding of 16 bits, in which the standard's own results are rounded at each step."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    name: str
    kind: str
    """passed, refused or wrong."""
    why: str = ""


def cases(pattern: str = "") -> list[Any]:
    """The cases whose names match."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        return [each for each in collect_testcases(None) if re.search(pattern, each.name)]


def outcome(case: Any) -> Outcome:
    """Import a case, run it and compare."""
    inputs, wanted = ([_array(each) for each in values] for values in case.data_sets[0])
    named = {each.name: value for each, value in zip(case.model.graph.input, inputs, strict=False)}
    try:
        model = _imported(case.model, named)
        given = {
            name: pc.tensor(np.asarray(named[name]), HERE, dtype=str(kind.dtype))
            for name, kind in model.graph.inputs.items()
        }
        made = list(_leaves(model(**given)))
    except PlanCompilerError as error:
        return Outcome(case.name, "refused", str(error))
    wanted = list(_leaves(wanted))
    if len(made) != len(wanted):
        return Outcome(case.name, "wrong", f"{len(made)} results instead of {len(wanted)}")
    for ours, theirs in zip(made, wanted, strict=True):
        why = _difference(case, np.asarray(ours.numpy()), np.asarray(theirs))
        if why:
            return Outcome(case.name, "wrong", why)
    return Outcome(case.name, "passed")


def _array(value: Any) -> Any:
    from onnx import TensorProto, numpy_helper

    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _imported(proto: Any, named: dict[str, Any]) -> Any:
    """The model, with constants for the inputs that must be known."""
    constants: dict[str, Any] = {}
    while True:
        example = {
            name: value
            for name, value in named.items()
            if name not in constants and isinstance(value, (np.ndarray, np.generic))
        }
        try:
            return pc.from_onnx(proto, example, constants=constants)
        except PlanCompilerError as error:
            asked = re.search(r"on the values of tensors.*?Got: (\S+?)[ .,]", str(error))
            if asked is None or len(constants) >= len(named) - 1:
                raise
            name = asked.group(1)
            if name not in named or name in constants:  # something made of inputs
                constants = dict(list(named.items())[1:])
            else:
                constants[name] = named[name]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)) or hasattr(value, "keys"):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _difference(case: Any, ours: Any, theirs: Any) -> str:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype}{ours.shape} instead of {theirs.dtype}{theirs.shape}"
    if _RANDOM.search(case.name):
        return ""
    if ours.dtype.kind in "biu":
        return "" if np.array_equal(ours, theirs) else f"{ours} instead of {theirs}"[:300]
    finite = np.abs(theirs[np.isfinite(theirs)].astype(np.float64))
    least = max(case.atol, _ROUNDING * finite.max(initial=0))
    near = max(case.rtol, _HALF.get(ours.dtype.name, 0))
    close = np.allclose(
        ours.astype(np.float64), theirs.astype(np.float64), near, least, equal_nan=True
    )
    return "" if close else f"{ours.reshape(-1)[:4]} instead of {theirs.reshape(-1)[:4]}"


REASONS = (
    (
        "dtypes that tensors do not have: strings, 8-bit floats, 4-bit and 2-bit numbers",
        r"dtype that tensors do not have|knows no dtype",
    ),
    ("no rule", r"has no rule for"),
    ("shapes or branches that depend on values", r"on the values of tensors"),
    ("inputs that are sequences or optional", r"inputs that are not tensors"),
    ("nothing to compute: no inputs and no parameters", r"no inputs and no parameters"),
    ("opsets before 7", r"opset that the importer does not know"),
)


def reason(why: str) -> str:
    """The kind of a refusal."""
    return next((name for name, pattern in REASONS if re.search(pattern, why)), "other forms")


def main() -> None:
    """Run the cases, and print or write what became of them."""
    words = [each for each in sys.argv[1:] if each != "--write"]
    pc.init()
    outcomes = [outcome(each) for each in cases(words[0] if words else "")]
    kinds = Counter(each.kind for each in outcomes)
    refused = Counter(reason(each.why) for each in outcomes if each.kind == "refused")
    operators = Counter(
        name
        for each in outcomes
        if reason(each.why) == "no rule"
        for name in re.findall(r"([\w.]+) \(\d+ times", each.why)
    )
    lines = [
        "| | cases |",
        "|---|---|",
        f"| equal | {kinds['passed']:,} |",
        f"| wrong | {kinds['wrong']} |",
    ]
    lines += [f"| refused: {name} | {count} |" for name, count in refused.most_common()]
    lines += ["", "Without a rule: " + ", ".join(sorted(operators)) + "."]
    if "--write" in sys.argv:
        page = Path(__file__).parents[2] / "docs" / "import.md"
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text("\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"]))
    else:
        for each in outcomes:
            if each.kind == "wrong" or words:
                print(each.name, each.kind, each.why[:400])
        print("\n".join(lines))


if __name__ == "__main__":
    main()
