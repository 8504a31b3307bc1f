"""A function traced for one kind of arguments, its job, and the run of its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import finalize

from plancompiler.eager import DistTensor, Generator, World
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.symbol import Symbol
from plancompiler.eager.tape import backward
from plancompiler.eager.tensor import Grads, Leaf, Node, Tensors
from plancompiler.eager.tracing import TraceMode, untrained_variable
from plancompiler.errors import GradientError
from plancompiler.frontend.trace import JobBuilder
from plancompiler.ir import DType, Job, Value
from plancompiler.ir.settings import Settings
from plancompiler.ir.source import user_line
from plancompiler.jit.compiled_run import CompiledRun, Draws
from plancompiler.jit.compiled_variables import LeafState, Variable, Variables
from plancompiler.ops.registry import op_def


@dataclass(slots=True)
class _Made:
    """A tensor that a run makes."""

    name: str
    """Of the variable that holds it."""
    spec: TensorSpec
    recorded: bool
    """Whether it depends on what wants a gradient."""


_Making = Callable[[Tensors, Mapping[str, DistTensor]], Any]
"""Makes a result of a call's arguments and of what its run has made, by name."""


class _Call:
    """One call on the tape."""

    def __init__(
        self,
        program: Specialization,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Tensors,
        state: Mapping[str, int],
    ) -> None:
        self.kind = program.name
        self.outputs: tuple[TensorSpec, ...] = ()
        self.args = args
        self.kwargs = kwargs
        self.tensors = tuple(tensors)
        self.state = state
        """Of the generator when it began."""
        self._program = program

    def record(self, wanting: Tensors, results: Tensors) -> None:
        """Put the results on the tape, behind the tensors that want a gradient."""
        if not results:
            return
        self.outputs = tuple(each.spec for each in results)
        world = wanting[0].spec.world
        node = Node(self, tuple(wanting), tuple(each.local for each in results), world.tick())
        for slot, tensor in enumerate(results):
            tensor.node, tensor.slot = node, slot

    def backward(
        self,
        node: Node,
        grads: Grads,
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Grads:
        """See `Recorded.backward`."""
        if create_graph:
            raise GradientError(
                "the gradients of a compiled function's results cannot be differentiated in turn",
                op=self.kind,
                source=user_line(),
                hint="call pc.eager.grad inside of the function",
            )
        return self._program.gradients(self, node.inputs or (), grads)


class Specialization:
    """A function traced for one kind of arguments, and the run of its plan."""

    def __init__(
        self,
        world: World,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Tensors,
        inner: bool = False,
        config: Settings | None = None,
    ) -> None:
        self.name = name = getattr(function, "__name__", type(function).__name__)
        self._world = world
        self._function = function
        self._gradients: dict[object, Specialization] = {}
        self._config = config
        self._builder = JobBuilder(name, config=config)
        self._tracing = TraceMode(world, name, self._builder)
        self._leaves: list[LeafState] = []
        self._variables: list[Variable] = []
        self._results: dict[tuple[str, bool], _Made] = {}
        with self._tracing.recording():
            result = function(*args, **kwargs)
            self._result = self._resulting(result, tensors)
            self._note_leaves(tensors)
            del result
        self._note_variables(tensors)
        self._steps = list(self._tracing.steps)
        self._versions = [steps.version for steps in self._steps]
        self._counts = self._tracing.counts
        self._updated = [(steps.updated, steps.recounts) for steps in self._steps]
        variables = self._variables
        self._changed = [at for at, each in enumerate(variables) if each.changed]
        self._wanting = [at for at, each in enumerate(variables) if each.wants]
        """Places of variables that change, and of those that want a gradient."""
        self._changes = bool(
            self._steps or self._changed or any(state.after is not None for state in self._leaves)
        )
        """Whether it changes anything besides making its results."""
        self._draws = self._tracing.draws
        # What holds the parameters: where it is gone, they are made anew.
        self._attached = list(world.attachments.values())
        self._inner = inner
        self.job = self._finished(name)
        given = {capture.name for capture in self._tracing.captures}
        world.close_dropped()
        self._run = CompiledRun(world, self.job, given) if self.job.ops else None
        sources = [op.placement for op in self.job.ops if op_def(op.kind).source]
        self._notes_data = bool(sources) and sources[0].rank_list[0] == world.rank
        self._lying: Variables | None = None
        if self._run is not None:
            self._lying = Variables(self._run, variables)
            # Neither of them knows the function, so a model that it closes over can go.
            note = finalize(self, world.dropped.append, partial(_close, self._lying, self._run))
            note.atexit = False

    def holds(self, tensors: Tensors) -> bool:
        """Whether the state that it was traced in is still there."""
        attached = self._world.attachments.values()
        if len(attached) < len(self._attached):
            return False
        for one, other in zip(self._attached, attached, strict=False):
            if one is not other:
                return False
        if [steps.version for steps in self._steps] != self._versions:
            return False
        for at, (steps, (updated, counted)) in enumerate(
            zip(self._steps, self._updated, strict=True)
        ):
            recounts = steps.resume(updated)
            if recounts != counted:
                if not all(count.holds() for count in self._counts if count.steps is steps):
                    return False
                self._updated[at] = updated, recounts
        for state in self._leaves:
            if state.read:
                grad = state.now(tensors).grad
                if (None if grad is None else grad.spec) is not state.before:
                    return False
        if not self._inner:
            for variable in self._variables:
                if variable.now(tensors).requires_grad is not variable.wants:
                    return False
        return True

    def close(self) -> None:
        """Free the plan's memory and leave the other ranks."""
        for program in self._gradients.values():
            program.close()
        if self._lying is not None and self._run is not None:
            _close(self._lying, self._run)

    # --- tracing --------------------------------------------------------------------------------

    def _resulting(self, value: Any, tensors: Tensors) -> _Making:
        """What makes a result of this form."""
        if isinstance(value, DistTensor):
            return self._resulting_tensor(value, tensors)
        if isinstance(value, dict):
            entries = {name: self._resulting(each, tensors) for name, each in value.items()}
            return lambda given, made: {name: each(given, made) for name, each in entries.items()}
        if is_row(value):
            parts = [self._resulting(each, tensors) for each in value]
            kind = getattr(type(value), "_make", type(value))
            return lambda given, made: kind(each(given, made) for each in parts)
        return lambda given, made: value

    def _resulting_tensor(self, tensor: DistTensor, tensors: Tensors) -> _Making:
        if not isinstance(tensor.local, Symbol):
            place = _place(tensor, tensors)
            return lambda given, made: tensor if place < 0 else given[place]
        value = self._tracing.value(tensor)
        recorded = tensor.node is not None
        result = self._results.get((value.name, recorded))
        if result is None:
            name, spec = f"result_{len(self._results)}", self._world.reduced(tensor.spec)
            result = self._results[value.name, recorded] = _Made(name, spec, recorded)
            self._assign(untrained_variable(self._builder, name, spec), value)
        name = result.name
        return lambda given, made: made[name]

    def _assign(self, variable: Value, value: Value) -> None:
        for capture in self._tracing.captures:
            if value is capture.first:
                # What the variable held before: read it before anybody changes it.
                value = self._builder.redistribute(value, None, capture.spec.sbp)
        self._builder.add("assign", (variable, value), {}, variable.placement)

    def _note_leaves(self, tensors: Tensors) -> None:
        """What the function does to gradients, while the leaves still hold it."""
        tracing = self._tracing
        for leaf, before in tuple(tracing.leaves.items()):
            after = leaf.grad
            kept = None if after is before else self._resulting(after, tensors)
            place = next((at for at, each in enumerate(tensors) if each.node is leaf), -1)
            spec = None if before is None else before.spec
            read = leaf in tracing.read
            self._leaves.append(LeafState(leaf, place, spec, read, kept))

    def _note_variables(self, tensors: Tensors) -> None:
        """The tensors that were captured, and which of them the function changes."""
        for capture in self._tracing.captures:
            changed = capture.value is not capture.first
            if changed and not capture.updated:
                self._assign(capture.first, capture.value)
            leaf = next((one for one in self._leaves if one.leaf is capture.leaf), None)
            place = _place(capture.tensor, tensors)
            self._variables.append(
                Variable(capture, place, leaf, changed, capture.node is not None)
            )

    def _finished(self, name: str) -> Job:
        """The job, with an output as every job has one."""
        builder = self._builder
        if not builder.ops:
            return Job(name, (), 0)
        place = builder.ops[0].placement
        done = builder.full(place, (), DType.FLOAT32, 0.0)
        builder.add("output", (done,), {"name": "done", "finite": False}, place)
        return builder.finish()

    # --- running --------------------------------------------------------------------------------

    def call(
        self,
        tensors: Tensors,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the plan on these arguments, of which `tensors` are the tensors."""
        world = self._world
        recorded = world.recording and bool(self._wanting)
        state = world.generator.state() if recorded else {}
        variables = [variable.now(tensors) for variable in self._variables]
        arrays: Mapping[str, Any] = {}
        if self._run is not None and self._lying is not None:
            self._lying.enter(variables)
            generator = world.generator
            if self._notes_data:
                generator.note_data(self)
            rates = tuple([rate for steps in self._steps for rate in steps.rates])
            drawn = (generator.seed, generator.step, generator.number)
            counts = tuple([count.now for count in self._counts]) or (self._world.step,)
            self._run.step(Draws(*drawn, counts, rates))
            self._lying.leave()
            arrays = self._run.shards
        for at in self._changed:
            variables[at].written()
        world.generator.number += self._draws
        for steps in self._steps:
            world.step = steps.done
            steps.done += 1
        made = {
            each.name: DistTensor(
                each.spec,
                arrays[each.name].copy() if each.name in arrays else each.spec.empty(),
            )
            for each in self._results.values()
        }
        for leaf in self._leaves:
            if leaf.after is not None:
                leaf.now(tensors).grad = leaf.after(tensors, made)
        if recorded:
            # A backward that will raise an error needs no kept values.
            kept = ((), {}, ()) if self._changes else (args, kwargs or {}, tensors)
            call = _Call(self, *kept, state)
            results = [made[name] for name in self._recorded()]
            call.record([variables[at] for at in self._wanting], results)
        return self._result(tensors, made)

    # --- gradients of results -------------------------------------------------------------------

    def _recorded(self) -> list[str]:
        return [each.name for each in self._results.values() if each.recorded]

    def gradients(self, call: _Call, wanting: Tensors, grads: Grads) -> Grads:
        """Gradients of these tensors, from those of the results: a plan that computes the results
        again and then their gradients.
        """
        if self._changes:
            raise GradientError(
                "the results of a compiled function that changes tensors cannot be differentiated",
                op=self.name,
                source=user_line(),
                hint="call backward inside of the function",
            )
        world = self._world
        seeds = [grad for grad in grads if grad is not None]
        tensors = [*call.tensors, *seeds]
        key = tuple([None if grad is None else grad.spec for grad in grads])
        before, world.generator = world.generator, Generator()
        world.generator.load_state(call.state)
        try:
            program = self._gradients.get(key)
            if program is None or not program.holds(tensors):
                if program is not None:
                    program.close()
                made = self._gradient_program(call, wanting, grads, tensors)
                program = self._gradients[key] = made
            program_grads: Grads = program.call(tensors)
            return program_grads
        finally:
            world.generator = before

    def _gradient_program(
        self,
        call: _Call,
        wanting: Tensors,
        grads: Grads,
        tensors: Tensors,
    ) -> Specialization:
        world = self._world

        def function() -> list[DistTensor | None]:
            world.recording = True
            results: dict[str, DistTensor] = {}
            for tensor in _tensors_in(self._function(*call.args, **call.kwargs)):
                if isinstance(tensor.local, Symbol) and tensor.node is not None:
                    results.setdefault(world.mode.value(tensor).name, tensor)
            roots = [
                (result, grad)
                for result, grad in zip(results.values(), grads, strict=True)
                if grad is not None
            ]
            return backward(roots, wanting)

        function.__name__ = f"{self.name}_gradients"
        # Inside the function, the tape ends at every tensor that existed before the call.
        nodes = [tensor.node for tensor in wanting]
        for tensor in wanting:
            if isinstance(tensor.node, Node):
                tensor.node = Leaf(world.tick())
        try:
            return Specialization(world, function, (), {}, tensors, True, self._config)
        finally:
            for tensor, node in zip(wanting, nodes, strict=True):
                tensor.node = node


def _close(lying: Variables, run: CompiledRun) -> None:
    lying.close()
    run.close()


def _tensors_in(value: Any) -> Iterator[DistTensor]:
    """The tensors of a result, in order."""
    if isinstance(value, DistTensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif is_row(value):
        for each in value:
            yield from _tensors_in(each)


def is_row(value: Any) -> bool:
    """Whether a value is a list, a tuple, or a tuple with names."""
    kind = value.__class__
    return kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_make"))


def _place(tensor: DistTensor, tensors: Tensors) -> int:
    return next((at for at, each in enumerate(tensors) if each is tensor), -1)
