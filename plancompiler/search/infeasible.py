"""Why no layouts fit: demands that contradict each other or an op's rule, or too little memory."""

from __future__ import annotations

from plancompiler.boxing.infer_sbp import legal_signatures
from plancompiler.boxing.planner import canonical
from plancompiler.errors import PlanCompilerError, ShapeError, UsageError
from plancompiler.ir import Job, Op
from plancompiler.ops.registry import op_def
from plancompiler.search.linear_program import layout_problem
from plancompiler.search.tied_ops import tie_ops


def why_nothing_fits(job: Job, memory_bytes: float | None) -> PlanCompilerError:
    """The error of a job for which a search has no answer."""
    makers = {value.name: op for op in job.ops for value in op.outputs}
    microbatches = 1 if job.pipeline is None else job.pipeline.microbatches
    for op in job.ops:
        error = _contradiction(op, makers, microbatches)
        if error is not None:
            return error
    if memory_bytes is not None:
        return _too_much(job, memory_bytes)
    return UsageError("no layouts fit", got="no limit", hint="pin less")


def _contradiction(op: Op, makers: dict[str, Op], microbatches: int) -> PlanCompilerError | None:
    """What is demanded of the tensors that an op updates in place, if it cannot be."""
    places = [source for _, source in op_def(op.kind).mutates]
    pinned = {
        place: maker
        for place in places
        if (maker := makers[op.inputs[place].name]).sbp is not None and maker.attr("along") is None
    }
    layouts = {
        place: canonical(maker.sbp, maker.placement.hierarchy)
        for place, maker in pinned.items()
        if maker.sbp is not None
    }
    demands = "; ".join(
        f"{maker.attr('name') or maker.name} {layouts[place]} at {maker.source}"
        for place, maker in pinned.items()
    )
    allowed = legal_signatures(op, microbatches)
    legal = [
        signature
        for signature in allowed
        if all(signature.inputs[place] == layout for place, layout in layouts.items())
    ]
    if legal or not pinned:
        return None
    if len(set(layouts.values())) > 1:
        return ShapeError(
            f"{op.kind} updates tensors together of which different layouts are demanded",
            at=op,
            got=demands,
            expected="one layout",
            hint="demand a layout of the parameter alone: its states lie as it does",
        )
    return ShapeError(
        f"{op.kind} cannot update a tensor in the layout that is demanded of it",
        at=op,
        got=demands,
        expected="; ".join(
            dict.fromkeys(
                str(each.inputs[places[0]]) for each in legal_signatures(op, microbatches)
            )
        ),
        hint="demand another layout of it, or use another optimizer",
    )


def _too_much(job: Job, memory_bytes: float) -> UsageError:
    """How little any layouts hold, and the tensor of which they hold most."""
    problem = layout_problem(tie_ops(job, None))
    least = [float(each.held_bytes.min()) for each in problem.candidates]
    held, place = max((each, -number) for number, each in enumerate(least))
    op = job.ops[-place]
    name = op.attr("name") or f"%{op.outputs[0].name}"
    if op.kind == "variable":
        name = f"{name}, with what its update keeps,"
    return UsageError(
        "no layouts fit",
        at=op,
        got=f"{memory_bytes:.0f} bytes of memory on a device",
        expected=f"at least {sum(least):.0f} bytes for variables and for what backward reads, of "
        f"which {name} takes {held:.0f}",
        hint="allow more memory or more devices, use micro-batches or recomputation, or pin less",
    )
