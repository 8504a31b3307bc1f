"""The mode that records eager ops in a job instead of running them, for `pc.compile`.

While a function is traced, the eager code itself runs: dispatch, tape, gradients, optimizers. Only
the world's mode differs. Instead of running a kernel or a change of layout, the mode records an op,
and the resulting tensor holds a `Symbol` in place of its numbers. A tensor that existed before
becomes a variable of the job when an op first reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast
from weakref import ReferenceType, ref

from plancompiler.eager.dispatch import RunMode
from plancompiler.eager.foreach import Row
from plancompiler.eager.materialized_view import replaced
from plancompiler.eager.op_plan import OpPlan
from plancompiler.eager.redistribution import Redistribution
from plancompiler.eager.spec import AttrMap, Change, TensorSpec
from plancompiler.eager.symbol import Symbol, no_numbers
from plancompiler.eager.tensor import DistTensor, Grads, Leaf, Node, Tensors, record
from plancompiler.eager.world import World
from plancompiler.errors import GradientError, TracingError
from plancompiler.frontend.trace import JobBuilder
from plancompiler.ir import AttrValue, NdSbp, Phase, Placement, Value
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array, op_def

DRAWN = 1 << 62
"""Keys of random ops from here on count the draws of one run; smaller ones are the user's own."""


class Capture:
    """A tensor that was there before: a variable of the job."""

    def __init__(self, tensor: DistTensor, spec: TensorSpec, first: Value, name: str) -> None:
        self.tensor = tensor
        self.node = tensor.node
        """Where the tape outside of the function reaches the tensor."""
        self.leaf: Leaf | None = None
        """Set where the tensor is what a leaf's gradient was when the function was called."""
        self.spec = spec
        """How the variable holds it: as the tensor does, partial values reduced."""
        self.first = first
        """The variable's value when a run begins."""
        self.value = first
        """What the tensor holds by now."""
        self.name = name
        self.updated = False
        """Whether an op of the job changes the variable itself."""


class TracedPlan(OpPlan):
    """An op that is recorded."""

    demanded: NdSbp | None = None
    """The layout that the caller demands of the outputs."""

    def call(self, tensors: Tensors) -> tuple[DistTensor, ...]:
        """See `OpPlan.call`."""
        return cast("TraceMode", self.world.mode).run(self, tensors)

    def update(self, tensors: Tensors) -> None:
        """See `OpPlan.update`."""
        self.call(tensors)

    def backward(
        self,
        node: Node,
        grads: Grads,
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Grads:
        """See `OpPlan.backward`: gradients are always made of ops."""
        return super().backward(node, grads, needed, True)


class TraceMode(RunMode):
    """One function being traced in one world."""

    plan_class = TracedPlan
    prepares = False
    traces = True

    def __init__(self, world: World, name: str, recorder: JobBuilder) -> None:
        super().__init__(world)
        self.compares = False
        self.world: World = world
        self.name = name
        """The function's."""
        self.recorder = recorder
        self.captures: list[Capture] = []
        self.leaves: dict[Leaf, DistTensor | None] = {}
        """Leaves whose gradient was looked at or changed, and what it was."""
        self.read: set[Leaf] = set()
        """Those of which the gradient was looked at first."""
        self.steps: list[Any] = []
        """Optimizers that step in the function."""
        self.counts: list[Any] = []
        """What their updates go by; the first, what other ops go by that count steps."""
        self._counter = 0
        self.first_draw = world.generator.number
        self.draws = 0
        self._real = world.mode
        self._generator = world.generator
        self._at = (world.generator.seed, world.generator.step)
        self._began = world.clock
        self._views: dict[int, list[ReferenceType[DistTensor]]] = {}
        """The views that the function has made of a symbol's tensor, by the symbol's id."""
        self._locals: list[Any] = []
        """Keeps apart the numbers of what has views."""
        self._drawn: set[int] = set()
        self._by_array: dict[int, Capture] = {}
        self._made: list[ReferenceType[DistTensor]] = []
        """The tensors that the function has made."""

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """See `Mode.phase`."""
        return self.recorder.phase(phase)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Ops of the world are recorded inside, and everything is as it was afterwards."""
        world = self.world
        clean = world.step, world.recording, world.forced, world.implicit_broadcast
        try:
            with world.using(self):
                yield
            self.draws = self._generator.number - self.first_draw
            if world.generator is not self._generator or self._at != (
                self._generator.seed,
                self._generator.step,
            ):
                raise TracingError(
                    "a compiled function cannot choose another generator, seed or step",
                    hint="use pc.manual_seed, pc.using_generator and start_step around the call",
                )
        finally:
            for leaf, grad in self.leaves.items():
                leaf.grad = grad
            for capture in self.captures:
                capture.tensor.node = capture.node
            self._leave_behind()
            self._generator.number = self.first_draw
            world.generator = self._generator
            world.step, world.recording, world.forced, world.implicit_broadcast = clean

    def _leave_behind(self) -> None:
        """Detach kept tensors from the trace; they only know where they were made."""
        for reference in self._made:
            tensor = reference()
            if tensor is not None:
                symbol: Any = tensor.local
                if symbol.leaked is None:
                    symbol.leak(self.name, self.recorder.producer(symbol.value).source)
                tensor.node = tensor.more = None
        self._made.clear()

    # --- values ---------------------------------------------------------------------------------

    def tensor(self, spec: TensorSpec, value: Value) -> DistTensor:
        """A tensor without numbers."""
        return self.note(DistTensor(spec, cast("Array", Symbol(value))))

    def note(self, tensor: DistTensor) -> DistTensor:
        """Know of a tensor whose numbers may be those of one that the function has made."""
        if isinstance(tensor.local, Symbol):
            self._made.append(ref(tensor))
        return tensor

    def value(self, tensor: DistTensor) -> Value:
        """What a tensor holds by now."""
        local: Any = tensor.local
        if local.__class__ is not Symbol:
            return self.capture(tensor).value
        if local.view is not None:
            base, plan = local.view
            now = self.value(base)
            if now is not local.seen:
                add = self.recorder.add
                (local.value,) = add(plan.kind, (now,), plan.attrs, tensor.placement)
                local.seen = now
        value: Value = local.value
        return value

    def capture(self, tensor: DistTensor) -> Capture:
        """The variable of a tensor that was there before."""
        capture = self._by_array.get(id(tensor.local))
        if capture is not None:
            return capture
        spec = tensor.spec
        whole = spec.world.reduced(spec)
        name = f"tensor_{len(self.captures)}"
        value = untrained_variable(self.recorder, name, whole)
        capture = Capture(tensor, whole, value, name)
        for leaf, grad in self.leaves.items():
            if grad is tensor:
                capture.leaf = leaf
        self._by_array[id(tensor.local)] = capture
        self.captures.append(capture)
        return capture

    def store(self, tensor: DistTensor, value: Value, *, updated: bool = False) -> None:
        """A tensor's memory takes another value."""
        local: Any = tensor.local
        if local.__class__ is Symbol:
            if local.view is not None:
                base, plan = local.view
                with self.world.no_grad():
                    self.put(base, replaced(base, self.tensor(tensor.spec, value), plan))
                local.seen = None
            else:
                local.value = value
            return
        capture = self.capture(tensor)
        if capture.updated or (updated and capture.value is not capture.first):
            raise TracingError(
                "a tensor that an optimizer updates is changed twice in a compiled function",
                source=user_line(),
                got=str(tensor.spec),
                hint="compile what is done to it in two functions",
            )
        capture.value = value
        capture.updated = updated

    # --- what the eager path asks ---------------------------------------------------------------

    def run(self, plan: TracedPlan, tensors: Tensors) -> tuple[DistTensor, ...]:
        """Record an op instead of running it."""
        world = self.world
        values = [self.value(each) for each in tensors]
        attrs = plan.attrs
        if plan.random:
            attrs = {**attrs, "key": self._key(world.draw[2])}
        placement = plan.outputs[0].placement
        made = self.recorder.add(plan.kind, values, attrs, placement, plan.demanded)
        if plan.mutates:
            kept = dict(plan.mutates)
            for slot, source in kept.items():
                self._check_variable(tensors[source], plan.kind)
                self.store(tensors[source], made[slot], updated=True)
                tensors[source].written()
            return tuple(
                tensors[kept[slot]] if slot in kept else self.tensor(spec, made[slot])
                for slot, spec in enumerate(plan.outputs)
            )
        outputs = tuple(map(self.tensor, plan.outputs, made))
        if plan.views and plan.makes_view(tensors[0]):
            self._note_view(outputs[0], tensors[0], plan)
        plan.record(tensors, outputs, tuple(each.local for each in outputs))
        return outputs

    def holds_alone(self, tensor: DistTensor, views: Tensors) -> bool:
        """See `Mode.holds_alone`: none but views that the function has made are known."""
        for reference in self._views.get(id(tensor.local), ()):
            view = reference()
            if view is not None and not any(view is each for each in views):
                return False
        return True

    def made(self, tensor: DistTensor) -> bool:
        """See `Mode.made`."""
        return isinstance(tensor.local, Symbol)

    def copied(self, tensor: DistTensor) -> DistTensor:
        """See `Mode.copied`."""
        return self.tensor(tensor.spec, self.value(tensor))

    def own_local(self, tensor: DistTensor) -> Array:
        """See `Mode.own_local`."""
        return cast("Array", Symbol(self.value(tensor)))

    def put(self, tensor: DistTensor, value: DistTensor) -> None:
        """See `Mode.put`."""
        self.store(tensor, self.value(value))

    def _note_view(self, view: DistTensor, source: DistTensor, plan: TracedPlan) -> None:
        view.view_of(source, plan)
        at: DistTensor | None = source
        while at is not None:
            self._views.setdefault(id(at.local), []).append(ref(view))
            self._locals.append(at.local)
            at = at.source if self.made(at) else None
        symbol: Any = view.local
        symbol.view = source, plan
        symbol.seen = self.value(source)

    def _check_variable(self, tensor: DistTensor, kind: str) -> None:
        if isinstance(tensor.local, Symbol):
            raise TracingError(
                f"{kind} updates a tensor that was made inside of the compiled function",
                source=user_line(),
                got=str(tensor.spec),
                hint="make it before the first call",
            )

    def redistribution(
        self, source: TensorSpec, target: TensorSpec, key: object
    ) -> Callable[[DistTensor], DistTensor]:
        """See `Mode.redistribution`."""
        return partial(self._redistributed, target)

    def _redistributed(self, target: TensorSpec, tensor: DistTensor) -> DistTensor:
        spec = tensor.spec
        if spec is target:
            return tensor
        value = self.recorder.redistribute(self.value(tensor), target.placement, target.sbp)
        moved = self.tensor(target, value)
        if tensor.node is not None and self.world.recording:
            record(moved, Redistribution(spec, target), tensor)
        return moved

    def check_reach(self, number: float, kind: str) -> None:
        """See `Mode.check_reach`: what was recorded before the function was called."""
        if number <= self._began:
            raise GradientError(
                "a gradient inside of a compiled function would reach beyond it",
                op=kind,
                source=user_line(),
                hint="pass the tensor detached, or compile what made it too",
            )

    def check_numbers(self) -> None:
        """See `Mode.check_numbers`."""
        raise no_numbers()

    def touched(self, leaf: Leaf, *, reading: bool) -> None:  # type: ignore[override]  # no other is
        """See `Mode.touched`."""
        if leaf not in self.leaves:
            self.leaves[leaf] = leaf.grad
            if reading:
                self.read.add(leaf)

    def count(self, count: Any) -> None:
        """The ops that follow go by a count of steps."""
        if count.missed and not self.counts:
            self.counts.append(type(count)(count.steps))
        self._counter = len(self.counts)
        self.counts.append(count)

    def stepped(self, steps: Any) -> None:
        """An optimizer has made a step."""
        self._counter = 0
        if steps in self.steps:
            raise TracingError(
                "an optimizer steps twice in a compiled function",
                source=user_line(),
                hint="compile one step, and call it twice",
            )
        self.steps.append(steps)

    def next_number(self) -> int:
        """See `RunMode.next_number`."""
        number = super().next_number()
        self._drawn.add(number)
        return number

    def _key(self, number: int) -> int:
        return DRAWN + number - self.first_draw if number in self._drawn else number

    def move(self, source: TensorSpec, target: TensorSpec) -> Change:
        """See `Mode.move`: later, and real arrays only."""
        return partial(self._moved, source, target)

    def _moved(self, source: TensorSpec, target: TensorSpec, array: Any) -> Any:
        if isinstance(array, Symbol):
            raise no_numbers()
        return self._real.move(source, target)(array)

    def update_all(self, kind: str, attrs: AttrMap, rows: Sequence[Row]) -> None:
        """See `RunMode.update_all`: a job updates each variable by an op of its own."""
        for row in rows:
            self.plan(kind, tuple([each.spec for each in row]), attrs).update(row)

    def plan(
        self,
        kind: str,
        inputs: tuple[TensorSpec, ...],
        attrs: AttrMap,
        placement: Placement | None = None,
        sbp: NdSbp | None = None,
    ) -> OpPlan:
        """See `Mode.plan`. Parameters and states that are first used here are made at once, as they
        outlive the function's call.
        """
        if kind == "variable":
            return self._real.plan(kind, inputs, attrs, placement, sbp)
        if self._counter and op_def(kind).counts_steps:
            attrs = {**attrs, "counter": self._counter}
        plan = super().plan(kind, inputs, attrs, placement, sbp)
        if isinstance(plan, TracedPlan):
            plan.demanded = sbp
        return plan


def untrained_variable(recorder: JobBuilder, name: str, spec: TensorSpec) -> Value:
    """Record a variable that begins as zeros."""
    attrs: dict[str, AttrValue] = {
        "name": name,
        "shape": spec.shape,
        "dtype": str(spec.dtype),
        "init": "zeros",
        "init_args": (),
        "trainable": False,
    }
    return recorder.add("variable", (), attrs, spec.placement, spec.sbp)[0]
