"""PyTorch's op database run through our functions: forward, gradients, layouts.

    python -m tests.suites.op_db [--only REGEX] [--rest FILE] [--samples N] [--json FILE]
        [--page FILE]

Every sample of every op variant, in float32 and float64 (else int64), is called on one rank; the
first of them also on 2 and 2×2 ranks, with each input split along each axis, all split, and all
partial. Results and gradients are compared with PyTorch's. A run is one such call; it is equal,
refused (by a `PlanCompilerError`), wrong, or a crash (any other error).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

import plancompiler as pc
from plancompiler.eager import DistTensor, spawn
from tests.suites.torch_calls import (
    COMPARED,
    FORWARD_ONLY,
    INEXACT,
    LEFT_OUT,
    RANDOM,
    SYMMETRIC,
    TRIANGLES,
    WHERE,
    function_for,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

TOLERANCE = {"float32": (1e-4, 2e-5), "float64": (1e-7, 1e-9)}
"""Relative, and absolute as a share of the greatest number: (rtol, atol) by dtype."""
MESHES = {
    "1": pc.Placement("cpu", [0]),
    "2": pc.Placement("cpu", [0, 1]),
    "2x2": pc.Placement("cpu", [[0, 1], [2, 3]]),
}
DEADLINE = 20.0
"""Seconds that ranks may wait for one that has failed alone."""

Layout = Callable[[int, np.ndarray], list[str]]
"""`(number of the tensor, its value)` to its layout, an entry per mesh axis."""


@dataclass(frozen=True)
class Case:
    """One call of an op of the database, and what PyTorch makes of it."""

    variant: str
    dtype: str
    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any]
    outputs: list[torch.Tensor]
    """After `process`, which takes out what is arbitrary, such as signs of eigenvectors."""
    slopes: list[np.ndarray | None]
    """What each output is multiplied by before it is differentiated; None for whole numbers."""
    gradients: list[np.ndarray | None] | None
    """Of the tensors that require one, in order; None where nothing is differentiated."""
    random: bool
    exact: Callable[[], list[np.ndarray | None] | None]
    """The gradients as PyTorch computes them in float64: what decides where ours and its own differ
    by its rounding, as those of a norm over one element do."""


@dataclass
class Outcome:
    """How the runs of a variant ended."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


# --- what PyTorch says ----------------------------------------------------------------------------


def name_of(op: Any) -> str:
    return f"{op.name}/{op.variant_test_name}" if op.variant_test_name else op.name


def tensors_in(value: Any) -> Iterator[Any]:
    """All tensors of nested arguments, in order."""
    if isinstance(value, (torch.Tensor, DistTensor)):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def cases_of(op: Any, samples: int) -> Iterator[Case]:
    """The samples of an op variant that PyTorch itself runs."""
    call = function_for(op.name, op.variant_test_name)
    assert call is not None
    dtypes = [each for each in (torch.float32, torch.float64) if each in op.dtypes]
    for dtype in dtypes or [torch.int64 if torch.int64 in op.dtypes else torch.bool]:
        wanted = op.supports_autograd and dtype.is_floating_point
        torch.manual_seed(7)
        for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=wanted), samples):
            # Copies: some samples share tensors that some ops change.
            args, kwargs = tree_map(copied, ((sample.input, *sample.args), sample.kwargs))
            if any(each.is_complex() for each in tensors_in([args, kwargs])):
                continue
            torch.manual_seed(11)
            try:
                made = op(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError):
                continue
            process = sample.output_process_fn_grad or (lambda made: made)
            if op.name in COMPARED:
                kept = COMPARED[op.name]
                process = lambda made, kept=kept: tuple(tensors_in(made))[:kept]  # noqa: E731
            yield case(op, call, dtype, args, kwargs, made, process, wanted)


def copied(value: Any) -> Any:
    """A tensor of its own."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def case(
    op: Any,
    call: Callable[..., Any],
    dtype: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: Any,
    process: Callable[[Any], Any],
    wanted: bool,
) -> Case:
    random = op.name in RANDOM or bool(kwargs.get("dropout_p"))
    outputs = list(tensors_in(process(made)))
    if not outputs and made is not None:
        plain = made if isinstance(made, (list, tuple)) else [made]
        outputs = [torch.as_tensor(each) for each in plain]
    slopes, gradients = [slope_of(each) for each in outputs], None
    leaves = [each for each in tensors_in([args, kwargs]) if each.requires_grad]
    wanted = wanted and not random and name_of(op) not in FORWARD_ONLY
    if wanted and any(each.requires_grad for each in outputs):
        gradients = gradients_of(outputs, slopes, leaves)

    def exact() -> list[np.ndarray | None] | None:
        wide = tree_map(in_float64, (args, kwargs))
        made = list(tensors_in(process(op(*wide[0], **wide[1]))))
        wide_slopes = [None if slope is None else slope.astype(np.float64) for slope in slopes]
        return gradients_of(
            made, wide_slopes, [each for each in tensors_in([*wide]) if each.requires_grad]
        )

    dtype_name = str(dtype).removeprefix("torch.")
    detached = [each.detach() for each in outputs]
    given = (name_of(op), dtype_name, call, args, kwargs, process, detached, slopes)
    return Case(*given, gradients, random, exact)


def in_float64(value: Any) -> Any:
    """A floating tensor as one of its own in float64."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def gradients_of(
    outputs: Sequence[torch.Tensor],
    slopes: Sequence[np.ndarray | None],
    leaves: Sequence[torch.Tensor],
) -> list[np.ndarray | None] | None:
    """Of the leaves, in order; None where PyTorch has no gradient."""
    pairs = [
        (each, torch.as_tensor(slope))
        for each, slope in zip(outputs, slopes, strict=True)
        if slope is not None and each.requires_grad
    ]
    try:
        made = torch.autograd.grad(
            [each for each, _ in pairs], leaves, [slope for _, slope in pairs], allow_unused=True
        )
    except RuntimeError:
        return None
    return [None if each is None else each.numpy() for each in made]


def slope_of(output: torch.Tensor) -> np.ndarray | None:
    """Factors between 0.5 and 1.5, the same for every call of a shape."""
    if not output.dtype.is_floating_point:
        return None
    shape = tuple(output.shape)
    rng = np.random.default_rng(3)
    return (rng.random(shape) + 0.5).astype(str(output.dtype).removeprefix("torch."))


# --- what we say ----------------------------------------------------------------------------------


def ours(value: Any, place: Callable[[torch.Tensor], DistTensor]) -> Any:
    """Arguments with our tensors and names of dtypes in place of PyTorch's."""
    if isinstance(value, torch.Tensor):
        return place(value)
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)(ours(each, place) for each in value)
    if isinstance(value, dict):
        return {name: ours(each, place) for name, each in value.items()}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


def run(case: Case, mesh: pc.Placement, layout: Layout) -> tuple[str, str]:
    """How one call in one layout ends, and why."""
    leaves: list[DistTensor] = []
    number = iter(range(1000))

    def place(tensor: torch.Tensor) -> DistTensor:
        array = tensor.detach().numpy()
        made = pc.tensor(np.array(array), mesh, layout(next(number), array))
        if tensor.requires_grad and case.gradients is not None:
            made.requires_grad = True
            leaves.append(made)
        return made

    try:
        args, kwargs = ours(case.args, place), ours(case.kwargs, place)
        WHERE.placement = mesh
        with np.errstate(all="ignore"):
            made = case.call(*args, **kwargs)
            trouble = compared_outputs(case, made)
            if not trouble and case.gradients is not None:
                differentiate(case, made, mesh)
                trouble = compared_gradients(case, leaves)
    except pc.PlanCompilerError as error:
        return "refused", f"[{error.code}] {str(error).splitlines()[0]}"
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:160]}"
        # Python's own word for an argument that a function does not have.
        unknown = isinstance(error, TypeError) and "argument" in what
        return ("refused" if unknown else "crash"), what
    return ("wrong", trouble) if trouble else ("equal", "")


def as_torch(made: Any) -> Any:
    """Outputs as PyTorch's tensors, in the same nesting."""
    if isinstance(made, DistTensor):
        return torch.as_tensor(np.array(made.numpy()))
    if isinstance(made, (list, tuple)):
        return (
            type(made)(as_torch(each) for each in made)
            if type(made) in (list, tuple)
            else (tuple(as_torch(each) for each in made))
        )
    return made


def compared_outputs(case: Case, made: Any) -> str:
    """What is wrong with the outputs; empty if nothing is."""
    processed = case.process(as_torch(made))
    got = list(tensors_in(processed))
    if not got and made is not None:
        plain = made if isinstance(made, (list, tuple)) else [made]
        got = [torch.as_tensor(each) for each in plain]
    if len(got) != len(case.outputs):
        return f"{len(got)} outputs instead of {len(case.outputs)}"
    for one, wanted in zip(got, case.outputs, strict=True):
        if one.dtype != wanted.dtype:
            return f"dtype {one.dtype} instead of {wanted.dtype}"
        if one.shape != wanted.shape:
            return f"shape {tuple(one.shape)} instead of {tuple(wanted.shape)}"
        if not case.random and not close(
            one.numpy(), wanted.numpy(), least=INEXACT.get(case.variant, 0.0)
        ):
            return f"value {summary(one.numpy(), wanted.numpy())}"
    return ""


def differentiate(case: Case, made: Any, mesh: pc.Placement) -> None:
    """Walk back from our outputs as PyTorch did from its own."""
    tensors = list(tensors_in(made))
    raw = [torch.as_tensor(np.array(each.numpy())) for each in tensors]
    for each in raw:
        each.requires_grad_(each.dtype.is_floating_point)
    left = iter(raw)

    def rebuilt(value: Any) -> Any:
        if isinstance(value, DistTensor):
            return next(left)
        if isinstance(value, (list, tuple)):
            return tuple(rebuilt(each) for each in value)
        return value

    processed = list(tensors_in(case.process(rebuilt(made))))
    pairs = [
        (each, torch.as_tensor(slope))
        for each, slope in zip(processed, case.slopes, strict=True)
        if slope is not None and each.requires_grad
    ]
    sources = [each for each in raw if each.requires_grad]
    slopes_of = torch.autograd.grad(
        [each for each, _ in pairs], sources, [slope for _, slope in pairs], allow_unused=True
    )
    grads = iter(slopes_of)
    total = None
    for tensor, each in zip(tensors, raw, strict=True):
        grad = next(grads) if each.requires_grad else None
        if grad is None or tensor.node is None:
            continue
        factors = pc.tensor(grad.numpy(), mesh)
        # Not a product with what may be infinite: the gradient is passed as it is.
        part = Passed(tensor, factors)
        total = [*(total or []), part]
    for index, part in enumerate(total or []):
        part.tensor.backward(part.grad, retain_graph=index + 1 < len(total or []))


@dataclass(frozen=True)
class Passed:
    tensor: DistTensor
    grad: DistTensor


def compared_gradients(case: Case, leaves: Sequence[DistTensor]) -> str:
    assert case.gradients is not None
    trouble = compared_with(case, leaves, case.gradients)
    if not trouble or case.dtype != "float32":
        return trouble
    exact = case.exact()
    return trouble if exact is None else compared_with(case, leaves, exact) and trouble


def compared_with(
    case: Case, leaves: Sequence[DistTensor], gradients: Sequence[np.ndarray | None]
) -> str:
    """What is wrong with gradients beside these."""
    for number, (leaf, wanted) in enumerate(zip(leaves, gradients, strict=True)):
        got = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        expected = np.zeros(leaf.shape) if wanted is None else wanted
        if got.shape != expected.shape:
            return f"shape of gradient {number}: {got.shape} instead of {expected.shape}"
        if case.variant in SYMMETRIC:
            got, expected = (each + np.swapaxes(each, -1, -2) for each in (got, expected))
        if TRIANGLES.get(case.variant) == number:
            upper = case.kwargs.get("upper", False)
            got, expected = (np.triu(each) if upper else np.tril(each) for each in (got, expected))
        if not close(got, expected, case.dtype, INEXACT.get(case.variant, 0.0)):
            return f"gradient {number}: {summary(got, expected)}"
    return ""


def close(got: np.ndarray, wanted: np.ndarray, dtype: str = "", least: float = 0.0) -> bool:
    if wanted.dtype.kind not in "fc" and not dtype:
        return bool(np.array_equal(got, wanted))
    rtol, atol = TOLERANCE.get(dtype or str(wanted.dtype), TOLERANCE["float32"])
    rtol, atol = max(rtol, least), max(atol, least)
    finite = wanted[np.isfinite(wanted)]
    scale = max(1.0, float(abs(finite).max(initial=0.0)))
    return bool(np.allclose(got, wanted, rtol, atol * scale, equal_nan=True))


def summary(got: np.ndarray, wanted: np.ndarray) -> str:
    def short(array: np.ndarray) -> str:
        return np.array2string(array.reshape(-1)[:4], precision=5)

    return f"{short(got)} instead of {short(wanted)} of shape {wanted.shape}"


# --- layouts --------------------------------------------------------------------------------------


def whole(entries: int) -> Layout:
    return lambda number, value: ["B"] * entries


def layouts_of(case: Case, ranks: str) -> Iterator[Layout]:
    """The layouts in which a call is run on a mesh: every split of one input along one axis, the
    same axis of all split, all partial; on 2×2 ranks pairs of these.
    """
    if ranks == "1":
        yield whole(1)
        return
    values = [each.detach().numpy() for each in tensors_in([case.args, case.kwargs])]

    def split_all(*axes: int) -> Layout:
        def layout(number: int, value: np.ndarray) -> list[str]:
            return [
                "B" if value.ndim == 0 else f"S({min(axis % value.ndim, value.ndim - 1)})"
                for axis in axes
            ]

        return layout

    def partial(*rest: str) -> Layout:
        def layout(number: int, value: np.ndarray) -> list[str]:
            entry = "P" if value.dtype.kind == "f" else "B"
            return [entry, *(each if value.ndim else "B" for each in rest)]

        return layout

    if ranks == "2x2":
        yield split_all(0, -1)
        yield split_all(0, 0)
        yield partial("S(0)")
        return
    for chosen, value in enumerate(values):
        for axis in range(value.ndim):

            def one(number: int, _: np.ndarray, at: int = chosen, axis: int = axis) -> list[str]:
                return [f"S({axis})" if number == at else "B"]

            yield one
    if len(values) > 1:
        yield split_all(0)
        yield split_all(-1)
    yield partial()


# --- runs -----------------------------------------------------------------------------------------


def run_world(ranks: str, jobs: Sequence[tuple[Case, Layout]]) -> list[tuple[str, str]]:
    """The outcomes of calls on a mesh. Where one rank fails alone, the others are woken, and the
    calls are made one by one.
    """
    mesh = MESHES[ranks]

    def program() -> list[tuple[str, str]]:
        return [run(case, mesh, layout) for case, layout in jobs]

    try:
        by_rank = spawn(program, mesh.size, deadline=DEADLINE)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        if len(jobs) == 1:
            if isinstance(error, pc.PlanCompilerError):
                return [("refused", f"[{error.code}] {str(error).splitlines()[0]}")]
            return [("crash", f"{type(error).__name__}: {str(error)[:160]}")]
        return [outcome for job in jobs for outcome in run_world(ranks, [job])]
    return [worst(each) for each in zip(*by_rank, strict=True)]


def worst(outcomes: Sequence[tuple[str, str]]) -> tuple[str, str]:
    order = ("crash", "wrong", "refused", "equal")
    return min(outcomes, key=lambda outcome: order.index(outcome[0]))


def measure(op: Any, samples: int, spread: int, most: int) -> Outcome:
    """All runs of an op variant: `samples` of each dtype on one rank, the first `spread` of them
    also on more ranks, in at most `most` layouts each.
    """
    cases = list(cases_of(op, samples))
    outcome = Outcome()
    passed: list[Case] = []
    first = run_world("1", [(each, whole(1)) for each in cases])
    for each, (status, reason) in zip(cases, first, strict=True):
        note(outcome, each, "1", status, reason)
        if status == "equal":
            passed.append(each)
    by_dtype: dict[str, list[Case]] = defaultdict(list)
    for each in passed:
        by_dtype[each.dtype].append(each)
    chosen = [each for group in by_dtype.values() for each in group[:spread]]
    for ranks in ("2", "2x2"):
        jobs = [
            (each, layout) for each in chosen for layout in islice(layouts_of(each, ranks), most)
        ]
        for (each, _), (status, reason) in zip(jobs, run_world(ranks, jobs), strict=True):
            note(outcome, each, ranks, status, reason)
    return outcome


def note(outcome: Outcome, case: Case, ranks: str, status: str, reason: str) -> None:
    outcome.counts[status] += 1
    if reason:
        outcome.reasons[f"{status}: {case.dtype} on {ranks}: {reason}"] += 1


def variants(only: str) -> list[Any]:
    return [op for op in op_db if re.search(only, name_of(op))]


def measure_all(
    only: str = "", samples: int = 1000, spread: int = 5, most: int = 8
) -> dict[str, Outcome | None]:
    """By variant its outcome; None where it maps to none of our functions."""
    torch.set_num_threads(1)
    results: dict[str, Outcome | None] = {}
    for op in variants(only):
        if op.name in LEFT_OUT or function_for(op.name, op.variant_test_name) is None:
            results[name_of(op)] = None
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results[name_of(op)] = measure(op, samples, spread, most)
        print(f"{name_of(op)}: {dict(results[name_of(op)].counts)}", file=sys.stderr)
    return results


def totals(results: dict[str, Outcome | None]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for outcome in results.values():
        counts["variants"] += 1
        if outcome is not None:
            counts["mapped"] += outcome.counts["equal"] > 0
            counts["refused altogether"] += outcome.counts["equal"] == 0
            counts.update(outcome.counts)
            counts["runs"] += outcome.counts.total()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression for names of variants")
    parser.add_argument("--samples", type=int, default=1000, help="per variant and dtype")
    parser.add_argument("--spread", type=int, default=5, help="of these, on more than one rank")
    parser.add_argument("--most", type=int, default=8, help="layouts of each on 2 ranks")
    parser.add_argument("--rest", type=Path, help="such a file, for what --only leaves out")
    parser.add_argument("--json", type=Path, help="a file for the outcomes of every variant")
    parser.add_argument("--page", type=Path, help="the page whose table is written anew")
    options = parser.parse_args()
    results = measure_all(options.only, options.samples, options.spread, options.most)
    if options.rest:
        results = read_outcomes(options.rest) | results
    for name, outcome in results.items():
        for reason, count in (outcome.reasons if outcome else Counter()).most_common(6):
            print(f"{name}: {count} × {reason}")
    print(dict(totals(results)))
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    name: None if each is None else [each.counts, each.reasons]
                    for name, each in results.items()
                },
                indent=1,
            )
        )
    if options.page:
        write_table(options.page, results)


def read_outcomes(file: Path) -> dict[str, Outcome | None]:
    """What `--json` has written."""
    return {
        name: None if each is None else Outcome(Counter(each[0]), Counter(each[1]))
        for name, each in json.loads(file.read_text()).items()
    }


BEGIN, END = "<!-- op_db: begin -->", "<!-- op_db: end -->"


def write_table(page: Path, results: dict[str, Outcome | None]) -> None:
    """Put the counts between the marks on a page."""
    counts = totals(results)
    left_out = sum(name.split("/")[0] in LEFT_OUT for name in results)
    rows = [
        ("op variants in the database", counts["variants"]),
        ("of these left out (see below)", left_out),
        ("variants that map to a function", counts["mapped"]),
        ("variants of which every call is refused", counts["refused altogether"]),
        ("runs", counts["runs"]),
        ("equal", counts["equal"]),
        ("refused", counts["refused"]),
        ("wrong", counts["wrong"]),
        ("crashes", counts["crash"]),
    ]
    table = "\n".join(["| | count |", "|---|---|", *(f"| {what} | {n:,} |" for what, n in rows)])
    head, _, rest = page.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


if __name__ == "__main__":
    main()
