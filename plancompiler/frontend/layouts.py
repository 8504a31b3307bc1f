"""Layouts of whole models: `model.place(mesh, pc.layouts.tensor_parallel(plan, axis="tp"))`.

A layout says of each parameter where it lives and how it is split there, by the names of mesh axes,
so that it serves any mesh that has these axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plancompiler.errors import PlacementError, UsageError
from plancompiler.frontend.nn.module import Module, Parameter, Place, name_pattern
from plancompiler.ir import NdSbp, Placement, Sbp
from plancompiler.ir.placement import require_placement
from plancompiler.ir.sbp import BROADCAST, Split
from plancompiler.ir.source import user_line

Style = Callable[[Parameter], Sbp | None]
"""From a parameter to its split along the mesh axis; None leaves it whole."""


def _by_outputs(parameter: Parameter) -> Sbp | None:
    return Split(_axis_of_parts(parameter) + 1)


def _by_inputs(parameter: Parameter) -> Sbp | None:
    parts = _axis_of_parts(parameter)
    if len(parameter.shape) - (parts >= 0) < 2:
        return None
    return Split({-1: 1, 0: 2, 1: 0}[parts])


def _axis_of_parts(parameter: Parameter) -> int:
    """The axis of a weight's parts, before that of each part's outputs; -1 where there is none."""
    pairs = zip(parameter.shape, parameter.file_shape, strict=False)
    return next((axis for axis, (held, stored) in enumerate(pairs) if held != stored), -1)


def _whole(parameter: Parameter) -> Sbp | None:
    return None


_STYLES: dict[str, Style] = {
    "colwise": _by_outputs,
    "colwise_rep": _by_outputs,
    "colwise_gather_output": _by_outputs,
    "embedding_rowwise": _by_outputs,
    "rowwise": _by_inputs,
    "rowwise_split_input": _by_inputs,
    "sequence_parallel": _whole,
    "sequence": _whole,
    "replicate": _whole,
    "replicated_with_grad_allreduce": _whole,
}
"""By the names that Hugging Face's plans have. A weight is [outputs, inputs], so that `colwise`,
which splits the columns of its transpose, splits rows; a table of an embedding is
[vocabulary, features]."""


@dataclass(frozen=True)
class TensorParallel:
    """See `tensor_parallel`."""

    plan: Mapping[str, str]
    axis: str

    def places(self, module: Module, mesh: Placement) -> dict[str, Place]:
        """Where each parameter lives; see `Module.place`."""
        at = _axis_of(mesh, self.axis)
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        parameters = dict(module.named_parameters(remove_duplicate=False))
        places: dict[str, Place] = {}
        for entry, style in self.plan.items():
            # Plans count from the base model, which may be a part of this one.
            pattern = name_pattern(f"*{entry}.*")
            matching = [name for name in names if pattern.search(name)]
            if not matching:
                raise UsageError(
                    "an entry of a tensor-parallel plan matches no parameter",
                    source=user_line(),
                    got=repr(entry),
                    expected="a part of one of " + ", ".join(names[:40]),
                )
            for name in matching:
                split = _STYLES[style](parameters[name])
                entries: list[Sbp] = [BROADCAST] * mesh.ndim
                if split is not None:
                    entries[at] = split
                places.setdefault(name, (mesh, NdSbp(tuple(entries))))
        return places


def tensor_parallel(plan: Any, axis: str = "tp") -> TensorParallel:
    """A layout that splits the layers of a plan along a mesh axis.

    `plan` is a dict of patterns of modules and styles, as the `tp_plan` of Hugging Face's models
    is, or such a model or its configuration: `{"layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise"}`. `colwise` splits a layer's outputs, `rowwise` its
    inputs, `embedding_rowwise` the vocabulary of an embedding; `sequence_parallel` and `replicate`
    leave weights whole. Raises UsageError for another style and, when it is used, for an entry that
    matches no parameter.
    """
    if not isinstance(plan, Mapping):
        plan = getattr(plan, "tp_plan", None) or getattr(plan, "base_model_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise UsageError(
            "there is no tensor-parallel plan",
            source=user_line(),
            got=type(plan).__name__,
            expected='{"layers.*.self_attn.q_proj": "colwise", ...}',
        )
    unknown = sorted({str(style) for style in plan.values()} - _STYLES.keys())
    if unknown:
        raise UsageError(
            "a tensor-parallel plan has a style that is not known",
            source=user_line(),
            got=", ".join(unknown),
            expected="one of " + ", ".join(_STYLES),
        )
    return TensorParallel(dict(plan), axis)


@dataclass(frozen=True)
class Stages:
    """See `stages`."""

    layers: str
    axis: str
    inner: TensorParallel | Mapping[str, Any] | None

    def places(self, module: Module, mesh: Placement) -> dict[str, Place]:
        """Where each parameter lives; see `Module.place`."""
        submeshes = stage_meshes(mesh, self.axis)
        pattern = name_pattern(self.layers)
        modules = dict(_modules(module))
        layers = [name for name in modules if pattern.search(name)]
        # The pattern of layers matches what is inside of them, too.
        layers = [name for name in layers if name.count(".") == min(map(_depth, layers))]
        if len(layers) < len(submeshes):
            raise UsageError(
                "a pipeline needs at least one layer for each stage",
                source=user_line(),
                got=f"{len(layers)} modules named {self.layers!r}",
                expected=f"at least {len(submeshes)}",
            )
        stage_of = {
            name: number * len(submeshes) // len(layers) for number, name in enumerate(layers)
        }
        parameters = dict(module.named_parameters(remove_duplicate=False))
        inside = {
            name: stage
            for name in parameters
            for layer, stage in stage_of.items()
            if name.startswith(f"{layer}.")
        }
        first = next(iter(inside), None)
        places: dict[str, Place] = {}
        inner = [_inner_places(self.inner, module, each) for each in submeshes]
        before = True
        for name in parameters:
            before = before and name != first
            stage = inside.get(name, 0 if before else len(submeshes) - 1)
            whole = NdSbp.broadcast(submeshes[stage].ndim)
            places[name] = inner[stage].get(name, (submeshes[stage], whole))
        return places


def stages(
    module: Module,
    layers: str,
    axis: str = "pp",
    inner: TensorParallel | Mapping[str, Any] | None = None,
) -> Stages:
    """A layout that deals the layers of a model along a mesh axis, as stages of a pipeline.

    `layers` is a pattern of modules, such as `"*.layers.*"`: equal runs of them, in order, live on
    the parts of the mesh along `axis`. Parameters that are defined before the layers live on the
    first stage, those after them on the last. `inner` is a layout within each stage, by the axes
    that are left. UsageError where no module has such a name, or there are fewer than stages.
    """
    pattern = name_pattern(layers)
    if not any(pattern.search(name) for name, _ in _modules(module)):
        raise UsageError(
            "no module has this name",
            source=user_line(),
            got=repr(layers),
            expected="a pattern such as '*.layers.*'",
        )
    return Stages(layers, axis, inner)


def _modules(module: Module, prefix: str = "") -> Sequence[tuple[str, Module]]:
    named: list[tuple[str, Module]] = []
    for name, child in module.named_children():
        named.append((prefix + name, child))
        named += _modules(child, f"{prefix}{name}.")
    return named


def _depth(name: str) -> int:
    return name.count(".")


def _inner_places(
    inner: TensorParallel | Mapping[str, Any] | None, module: Module, mesh: Placement
) -> dict[str, Place]:
    if isinstance(inner, TensorParallel):
        return inner.places(module, mesh)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    patterns = {name_pattern(name): NdSbp.of(sbp) for name, sbp in (inner or {}).items()}
    return {
        name: (mesh, sbp)
        for pattern, sbp in reversed(patterns.items())
        for name in parameters
        if pattern.search(name)
    }


def _axis_of(mesh: Placement, axis: str) -> int:
    axes = require_placement(mesh).axes or ()
    if axis not in axes:
        raise PlacementError(
            "the mesh has no axis of this name",
            source=user_line(),
            got=repr(axis),
            expected="one of " + ", ".join(axes),
        )
    return axes.index(axis)


def stage_meshes(mesh: Placement, axis: str = "pp") -> list[Placement]:
    """The parts of a mesh along one of its axes, which they do not have: where the stages of a
    pipeline live, and inputs on the first of them.
    """
    at = _axis_of(mesh, axis)
    axes = tuple(name for name in mesh.axes or () if name != axis)
    if not axes:
        return [Placement(mesh.device_type, [rank], ("dp",)) for rank in mesh.ranks.reshape(-1)]
    return [
        Placement(mesh.device_type, mesh.ranks.take([number], at).squeeze(at), axes)
        for number in range(mesh.ranks.shape[at])
    ]
