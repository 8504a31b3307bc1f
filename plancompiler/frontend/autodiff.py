"""Reverse-mode differentiation of a job while it is traced.

The ops between the wanted values and the loss are walked backwards; each op's own gradient function
(one definition serves compiled and eager execution) records the ops of its gradients, which carry
the user's line of their forward op, and its pipeline stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from plancompiler.errors import GradientError, PlanCompilerError
from plancompiler.frontend.trace import JobBuilder, current_recorder
from plancompiler.ir import Op, Origin, Phase, Value
from plancompiler.ops.registry import op_def


def gradients(loss: Value, wrt: Sequence[Value]) -> list[Value | None]:
    """d loss / d value for each value of `wrt`, with the value's shape, dtype and placement.

    `loss` is a floating scalar. None stands for a value that does not influence it through
    differentiable ops. Raises GradientError for a loss that is no floating scalar and for an op
    on the way that has no gradient.

    Outside of jobs it walks back the tape of eager tensors, which then cannot be walked again.
    """
    recorder = current_recorder()
    if not isinstance(recorder, JobBuilder):
        passed: list[Value | None] = recorder.gradients(loss, wrt)
        return passed
    builder = recorder
    if loss.shape != () or not loss.dtype.is_floating:
        raise GradientError(
            "a loss must be a floating scalar",
            op=builder.producer(loss).name,
            source=builder.producer(loss).source,
            got=str(loss),
            hint="reduce it first, for example with .mean()",
        )
    producers = [builder.producer(value) for value in (loss, *wrt)]
    recorded = tuple(builder.ops)
    reached = _reached(recorded, wrt)
    grads: dict[str, Value] = {}
    with builder.phase(Phase.BACKWARD):
        if loss.name in reached:
            with builder.lines_of(producers[0].source):
                grads[loss.name] = builder.full(loss.placement, (), loss.dtype, 1.0)
        for op in reversed(recorded):
            if any(value.name in grads for value in op.outputs) and any(
                value.name in reached for value in op.inputs
            ):
                origin = Origin(Phase.BACKWARD, stage=op.origin.stage)
                with builder.lines_of(op.source), builder.originating(origin):
                    _accumulate(builder, op, reached, grads)
    return [grads.get(value.name) for value in wrt]


def _reached(ops: Sequence[Op], wrt: Sequence[Value]) -> set[str]:
    """Names of the floating values that `wrt` influences, themselves included."""
    reached = {value.name for value in wrt}
    for op in ops:
        if any(value.name in reached for value in op.inputs):
            reached.update(value.name for value in op.outputs if value.dtype.is_floating)
    return reached


def _accumulate(builder: JobBuilder, op: Op, reached: set[str], grads: dict[str, Value]) -> None:
    """Add what one op passes back to the gradients of its inputs."""
    arrived = [grads.get(value.name) for value in op.outputs]
    try:
        passed = op_def(op.kind).gradients(dict(op.attrs), op.inputs, op.outputs, arrived)
    except PlanCompilerError as error:
        error.at(op=op.name, source=op.source)
        raise
    for value, grad in zip(op.inputs, passed, strict=True):
        if grad is None or value.name not in reached:
            continue
        if grad.type != value.type or grad.placement != value.placement:
            raise GradientError(
                f"the gradient of {op.kind} does not fit its input",
                at=op,
                got=f"{grad.type} on {grad.placement}",
                expected=f"{value.type} on {value.placement}",
            )
        earlier = grads.get(value.name)
        grads[value.name] = grad if earlier is None else earlier + grad
