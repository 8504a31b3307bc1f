"""Jobs of imported models in folders: what `run`, `compile` and `submit` of such a folder do."""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.frontend import optim
from plancompiler.frontend.data import Arrays
from plancompiler.frontend.trace import input as job_input
from plancompiler.frontend.trace import job, output
from plancompiler.importers.graph import Fields
from plancompiler.importers.model_folder import read_model
from plancompiler.importers.onnx_table import ONNX_RULES
from plancompiler.importers.stablehlo_rules import STABLEHLO_RULES
from plancompiler.importers.torch_rules import TORCH_RULES
from plancompiler.ir import Job, NdSbp, Placement, Split, TensorType
from plancompiler.ir.arguments import is_file
from plancompiler.ir.operators import TensorOperators
from plancompiler.ir.strict_json import parse_json

RULES = ChainMap(TORCH_RULES, ONNX_RULES, STABLEHLO_RULES)
"""Of every system, as a folder does not say which one its model is from."""


def build(
    folder: Path,
    data: str | None = None,
    optimizer: str | None = None,
    lr: float = 1e-3,
    dp: int | None = None,
    tp: int = 1,
    layout: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    ranks: int | None = None,
) -> Job:
    """A job of the model in a folder, on a mesh of `dp` times `tp` ranks.

    With `optimizer`, the name of one such as `AdamW`, it trains with the learning rate `lr` and
    reports the loss; else it reports all that the model returns. `data` is an npz file, or a
    pattern of such files, with an array for each input of the model; without it, inputs are fed.
    `layout` is a JSON file with patterns of parameters and their layouts along (dp, tp):
    `{"*.q_proj.weight": ["B", "S(0)"]}`. A model whose author annotated it for a mesh of as many
    ranks lives there, unless `dp`, `tp` or `layout` is given.
    """
    model = read_model(folder, RULES)
    own = model.mesh
    if own is None or (dp, tp, layout) != (None, 1, None) or ranks not in (None, own.size):
        mesh = _mesh(device, dp, tp, ranks)
        model.place(mesh, _layout(layout))
        annotated: Mapping[str, NdSbp] | None = None
    else:
        mesh = Placement(device, np.reshape(own.rank_list, own.hierarchy), own.axes)
        model.annotate(mesh, model.layouts)
        annotated = model.layouts
    with job(folder.name, seed=seed) as built:
        given = _inputs(model.arguments.inputs, data, mesh, annotated)
        out = model.call_with(given)
        if optimizer is None:
            for name, value in _named(out):
                output(name, value)
        else:
            loss = _loss(out)
            _optimizer(optimizer, lr).minimize(loss)
            output("loss", loss)
    return built


def _mesh(device: str, dp: int | None, tp: int, ranks: int | None) -> Placement:
    if dp is None:
        dp = 1 if ranks is None else max(1, ranks // tp)
    if ranks is not None and dp * tp != ranks:
        raise UsageError(
            "dp * tp must be the number of ranks",
            got=f"{dp} * {tp} = {dp * tp} with {ranks} ranks",
        )
    return Placement(device, np.arange(dp * tp).reshape(dp, tp), ("dp", "tp"))


def _layout(path: str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    if not is_file(Path(path)):
        raise UsageError("the file with a layout does not exist", got=repr(path))
    patterns = parse_json(Path(path).read_bytes(), f"the layout in {path}", error=UsageError)
    if not isinstance(patterns, dict):
        raise UsageError(
            "a layout is a JSON object",
            got=type(patterns).__name__,
            expected='{"*.q_proj.weight": ["B", "S(0)"]}',
        )
    return patterns


def _inputs(
    inputs: Mapping[str, TensorType],
    data: str | None,
    mesh: Placement,
    annotated: Mapping[str, NdSbp] | None,
) -> dict[str, Any]:
    """The model's inputs, as they are annotated, or else split along `dp` where their first axis is
    that of the batch.
    """
    batches = {each.shape[0] for each in inputs.values() if each.shape}
    batch = batches.pop() if len(batches) == 1 else None
    whole = NdSbp.broadcast(mesh.ndim)
    split = {name: NdSbp.of(["S(0)", "B"]) for name in inputs} if annotated is None else annotated
    sbp = {
        name: split.get(name, whole)
        if each.shape and (annotated is not None or batch is not None)
        else whole
        for name, each in inputs.items()
    }
    if data is None:
        return {
            name: job_input(name, each.shape, each.dtype, mesh, sbp[name])
            for name, each in inputs.items()
        }
    if batch is None:
        raise UsageError(
            "only a model whose inputs all have the batch as their first axis can read files",
            got=", ".join(f"{name} {each}" for name, each in inputs.items()),
        )
    # Rows of a batch are split as those of the first input are.
    first = next(iter(sbp.values()))
    rows_split = NdSbp.of([each if each == Split(0) else "B" for each in first])
    rows = Arrays(data, tuple(inputs), batch, placement=mesh, sbp=rows_split)
    for name, each in inputs.items():
        if rows[name].shape != each.shape or rows[name].dtype is not each.dtype:
            raise UsageError(
                f"array {name!r} of the data does not fit the model",
                got=f"batches {rows[name].dtype}{list(rows[name].shape)}",
                expected=str(each),
            )
    return {name: rows[name] for name in inputs}


def _named(out: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of a result, by the path to each."""
    if isinstance(out, TensorOperators):
        yield prefix or "output", out
        return
    items: Any = ()
    if isinstance(out, Fields):
        items = out.values.items()
    elif isinstance(out, Mapping):
        items = out.items()
    elif isinstance(out, (list, tuple)):
        items = enumerate(out)
    for name, each in items:
        yield from _named(each, f"{prefix}.{name}" if prefix else str(name))


def _loss(out: Any) -> Any:
    """The result named `loss`, else the first that is one floating number."""
    named = dict(_named(out))
    scalars = [each for each in named.values() if each.shape == () and each.dtype.is_floating]
    if "loss" not in named and not scalars:
        raise UsageError(
            "a model that returns no loss cannot be trained",
            got=", ".join(f"{name} {list(each.shape)}" for name, each in named.items()),
            hint="import it with an example that has labels",
        )
    return named.get("loss", scalars[0] if scalars else None)


def _optimizer(name: str, lr: float) -> Any:
    known: dict[str, Any] = {
        each: made
        for each, made in vars(optim).items()
        if inspect.isclass(made) and hasattr(made, "minimize")
    }
    if name not in known:
        raise UsageError(
            "there is no such optimizer", got=repr(name), expected="one of " + ", ".join(known)
        )
    return known[name](lr)
