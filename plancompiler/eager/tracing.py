"""Eager code recorded instead of run: what `pc.compile` makes jobs of.

While a function is traced, the eager path itself runs: dispatch, tape, gradients, optimizers. Only
its last step differs. Where a kernel or a change of layout would run, an op is recorded, and the
tensor that comes out holds a `Symbol` where its numbers would be. Tensors that exist already become
variables of the job when an op first reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from weakref import ReferenceType, ref

from plancompiler.eager.dispatch import Dispatcher, OpPlan
from plancompiler.eager.foreach import Row
from plancompiler.eager.materialized_view import slice_bounds
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tape import Leaf, Node, record
from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import GradientError, TracingError
from plancompiler.ir import BROADCAST, AttrValue, NdSbp, Op, Partial, Placement, Value
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

if TYPE_CHECKING:
    from plancompiler.eager.world import World

DRAWN = 1 << 62
"""Keys of random ops from here on count the draws of one run; smaller ones are the user's own."""


class Recorder(Protocol):
    """What takes the ops down: a job's builder."""

    def add(
        self,
        kind: str,
        inputs: Sequence[Value],
        attrs: Mapping[str, AttrValue],
        placement: Placement | None,
        sbp: NdSbp | None = None,
    ) -> tuple[Value, ...]:
        """Record an op."""

    def redistribute(self, value: Value, placement: Placement | None, sbp: NdSbp | None) -> Value:
        """Record a change of layout."""

    def producer(self, value: Value) -> Op:
        """The op that makes a value."""


def no_numbers(what: str = "the numbers of a tensor") -> TracingError:
    """The error of who asks for numbers while there are none."""
    return TracingError(
        f"{what} are not known while a function is compiled",
        source=user_line(),
        hint="read numbers (numpy, item, to_local, `if tensor:`) outside of the function, or "
        "choose by data with pc.where",
    )


class Symbol:
    """Stands where a tensor's numbers would be."""

    __slots__ = ("seen", "value", "view")

    __array_ufunc__ = None

    def __init__(self, value: Value) -> None:
        self.value = value
        self.view: tuple[DistTensor, str, dict[str, AttrValue]] | None = None
        """Of a view: the tensor whose memory it shares, and the op that makes it of that."""
        self.seen: Value | None = None
        """The base's value when the view was last made of it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise no_numbers()

    def __array__(self, *args: object, **kwargs: object) -> Array:
        raise no_numbers()

    def __len__(self) -> int:
        raise no_numbers()

    def __getitem__(self, index: object) -> NoReturn:
        raise no_numbers()


_NO_NUMBERS: Any = None


class LeakedTensor(DistTensor):
    """A tensor of a compiled function that somebody still holds after the function was traced.

    It has a shape and a layout, and says so; whoever asks for more gets a TracingError.
    """

    __slots__ = ()

    @property  # over the attribute of the base, which held what stood for the numbers
    def local(self) -> Array:  # type: ignore[override]  # nobody sets it
        raise self._error()

    @property
    def node(self) -> None:  # type: ignore[override]  # likewise
        raise self._error()

    def _error(self) -> TracingError:
        name, source = (self.more or {})["leaked"]
        return TracingError(
            "a tensor of a compiled function was used after the function was traced: it stands for "
            "a value of every call and has no numbers of its own",
            source=user_line(),
            rank=self.spec.world.rank,
            got=f"{self.spec}, made in {name!r} at {source}",
            expected="a tensor that the compiled function returns",
            hint=f"return the tensor from {name!r}, and use what the call gives",
        )

    def __repr__(self) -> str:
        name, source = (self.more or {})["leaked"]
        return f"DistTensor({self.spec}, without numbers: made in compiled {name!r} at {source})"


class Capture:
    """A tensor that was there before: a variable of the job."""

    def __init__(self, tensor: DistTensor, spec: TensorSpec, first: Value, name: str) -> None:
        self.tensor = tensor
        self.node = tensor.node
        """Its place on the tape, outside of the function."""
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


_GRAD: Any = vars(Leaf)["grad"]


class _WatchedLeaf(Leaf):
    """A leaf while a function is traced."""

    __slots__ = ()

    @property  # over the attribute of the base, whose place keeps the value
    def grad(self) -> DistTensor | None:
        self.watcher.touched(self, reading=True)
        found: DistTensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, value: DistTensor | None) -> None:
        self.watcher.touched(self, reading=False)
        _GRAD.__set__(self, value)


class Tracing:
    """One function being traced in one world."""

    def __init__(self, world: World, name: str, recorder: Recorder) -> None:
        self.world = world
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
        self.first_draw = world.generator.number
        self.draws = 0
        self.real = world.dispatcher
        self._generator = world.generator
        self._at = (world.generator.seed, world.generator.step)
        self._began = world.clock
        self._watched: list[Leaf] = []
        self._views: dict[int, list[ReferenceType[DistTensor]]] = {}
        """The views that the function has made of what somebody's numbers stand for, by its id."""
        self._locals: list[Any] = []
        """Keeps apart the numbers of what has views."""
        self._drawn: set[int] = set()
        self._by_array: dict[int, Capture] = {}
        self._made: list[ReferenceType[DistTensor]] = []
        """The tensors that the function has made."""
        self._move = world.move

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Ops of the world are recorded inside, and everything is as it was afterwards."""
        world = self.world
        clean = world.step, world.recording, world.forced, world.implicit_broadcast
        runs = [(spec, spec.runs) for spec in world.specs()]
        for spec, _ in runs:
            spec.runs = {}
        world.tracing = self
        world.dispatcher = TraceDispatcher(world, self)
        # Shadows of the methods, for as long as the function is traced.
        shadows: dict[str, Callable[..., Any]] = {
            "fast_run": lambda plan: None,
            "move": self._moved_later,
            "next_number": self._next_number,
        }
        hidden = {name: vars(world)[name] for name in shadows if name in vars(world)}
        vars(world).update(shadows)
        for leaf in tuple(world.leaves):
            self.watch(leaf)
        try:
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
            for name in shadows:
                del vars(world)[name]
            vars(world).update(hidden)
            world.dispatcher = self.real
            world.tracing = None
            for spec, kept in runs:
                spec.runs = kept
            for leaf in self._watched:
                leaf.__class__ = Leaf
                leaf.watcher = None
            for leaf, grad in self.leaves.items():
                leaf.grad = grad
            for capture in self.captures:
                capture.tensor.node = capture.node
            self._leave_behind()
            self._generator.number = self.first_draw
            world.generator = self._generator
            world.step, world.recording, world.forced, world.implicit_broadcast = clean

    def _leave_behind(self) -> None:
        """Let tensors that somebody keeps say what they are, and hold nothing of the trace."""
        for reference in self._made:
            tensor = reference()
            if tensor is not None:
                symbol: Any = tensor.local
                tensor.local = _NO_NUMBERS
                tensor.node = None
                tensor.__class__ = LeakedTensor
                tensor.more = {"leaked": (self.name, self.recorder.producer(symbol.value).source)}
        self._made.clear()

    # --- values ---------------------------------------------------------------------------------

    def tensor(self, spec: TensorSpec, value: Value) -> DistTensor:
        """A tensor without numbers."""
        symbol: Any = Symbol(value)
        return self.note(DistTensor(spec, symbol))

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
            base, kind, attrs = local.view
            now = self.value(base)
            if now is not local.seen:
                spec = tensor.spec
                (local.value,) = self.recorder.add(kind, (now,), attrs, spec.placement)
                local.seen = now
        found: Value = local.value
        return found

    def capture(self, tensor: DistTensor) -> Capture:
        """The variable of a tensor that was there before."""
        found = self._by_array.get(id(tensor.local))
        if found is not None:
            return found
        spec = tensor.spec
        whole = spec.world.spec(*spec.type, spec.placement, without_partial(spec.sbp))
        name = f"tensor_{len(self.captures)}"
        attrs: dict[str, AttrValue] = {
            "name": name,
            "shape": spec.shape,
            "dtype": str(spec.dtype),
            "init": "zeros",
            "init_args": (),
            "trainable": False,
        }
        (value,) = self.recorder.add("variable", (), attrs, spec.placement, whole.sbp)
        found = Capture(tensor, whole, value, name)
        for leaf, grad in self.leaves.items():
            if grad is tensor:
                found.leaf = leaf
        self._by_array[id(tensor.local)] = found
        self.captures.append(found)
        return found

    def store(self, tensor: DistTensor, value: Value, *, updated: bool = False) -> None:
        """A tensor's memory takes another value."""
        local: Any = tensor.local
        if local.__class__ is Symbol:
            if local.view is not None:
                base, kind, attrs = local.view
                self.store(base, self._into_base(base, kind, attrs, value))
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

    def _into_base(
        self, base: DistTensor, kind: str, attrs: Mapping[str, AttrValue], value: Value
    ) -> Value:
        """The base's value when a view of it has been changed."""
        add, where = self.recorder.add, base.placement
        if kind in ("slice", "strided_slice"):
            whole = self.value(base)
            return add("slice_scatter", (whole, value), slice_bounds(attrs, base.ndim), where)[0]
        if kind == "reshape":
            return add("reshape", (value,), {"shape": base.shape}, where)[0]
        if kind == "transpose":
            axes = attrs["axes"]
            assert isinstance(axes, tuple)
            back = tuple(axes.index(axis) for axis in range(len(axes)))
            return add("transpose", (value,), {"axes": back}, where)[0]
        return value

    # --- what the eager path asks ---------------------------------------------------------------

    def run(self, plan: TracedPlan, tensors: Sequence[DistTensor]) -> tuple[DistTensor, ...]:
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
        found = tuple(map(self.tensor, plan.outputs, made))
        if plan.views and plan.makes_view(tensors[0]):
            self._note_view(found[0], tensors[0], plan)
        if plan.recorded and world.recording and any(each.node is not None for each in tensors):
            locals_ = tuple(each.local for each in found)
            draw = world.draw if plan.random else None
            node = Node(plan, tuple(tensors), locals_, world.tick(), draw)
            for slot, tensor in enumerate(found):
                if tensor.dtype.is_floating:
                    tensor.node, tensor.slot = node, slot
        return found

    def holds_alone(self, tensor: DistTensor, views: Sequence[DistTensor]) -> bool:
        """Whether none but these views of a tensor, made in the function, are still there."""
        for reference in self._views.get(id(tensor.local), ()):
            view = reference()
            if view is not None and not any(view is each for each in views):
                return False
        return True

    def made(self, tensor: DistTensor) -> bool:
        """Whether a tensor was made in the function."""
        local: Any = tensor.local
        return isinstance(local, Symbol)

    def copied(self, tensor: DistTensor) -> DistTensor:
        """A tensor of its own with the same value, off the tape."""
        return self.tensor(tensor.spec, self.value(tensor))

    def _note_view(self, view: DistTensor, source: DistTensor, plan: TracedPlan) -> None:
        view.view_of(source, plan)
        at: DistTensor | None = source
        while at is not None:
            self._views.setdefault(id(at.local), []).append(ref(view))
            self._locals.append(at.local)
            at = at.source if self.made(at) else None
        symbol: Any = view.local
        symbol.view = source, plan.kind, dict(plan.attrs)
        symbol.seen = self.value(source)

    def _check_variable(self, tensor: DistTensor, kind: str) -> None:
        if isinstance(tensor.local, Symbol):
            raise TracingError(
                f"{kind} updates a tensor that was made inside of the compiled function",
                source=user_line(),
                got=str(tensor.spec),
                hint="make it before the first call",
            )

    def redistribute(self, tensor: DistTensor, target: TensorSpec) -> DistTensor:
        """Record a change of layout."""
        # That module is imported where tensors first change their layout.
        from plancompiler.eager.redistribution import Redistribution  # noqa: PLC0415

        spec, world = tensor.spec, self.world
        if spec is target:
            return tensor
        value = self.recorder.redistribute(self.value(tensor), target.placement, target.sbp)
        found = self.tensor(target, value)
        if tensor.node is not None and world.recording:
            record(found, Redistribution(spec, target), tensor)
        return found

    def check_inside(self, node: Node) -> None:
        """Refuse to differentiate what was recorded before the function was called."""
        if node.number <= self._began:
            raise GradientError(
                "a gradient inside of a compiled function would reach beyond it",
                op=node.op.kind,
                source=user_line(),
                hint="pass the tensor detached, or compile what made it too",
            )

    def no_numbers(self) -> TracingError:
        """The error of who asks for numbers while there are none."""
        return no_numbers()

    def watch(self, leaf: Leaf) -> None:
        """Learn when a leaf's gradient is looked at or changed."""
        leaf.watcher = self
        leaf.__class__ = _WatchedLeaf
        self._watched.append(leaf)

    def touched(self, leaf: Leaf, *, reading: bool) -> None:
        """A leaf's gradient is about to be looked at or changed."""
        if leaf not in self.leaves:
            self.leaves[leaf] = _GRAD.__get__(leaf)
            if reading:
                self.read.add(leaf)

    def grad_of(self, leaf: Leaf) -> DistTensor | None:
        """What a leaf holds by now."""
        found: DistTensor | None = _GRAD.__get__(leaf)
        return found

    def stepped(self, steps: Any) -> None:
        """An optimizer has made a step."""
        if steps in self.steps:
            raise TracingError(
                "an optimizer steps twice in a compiled function",
                source=user_line(),
                hint="compile one step, and call it twice",
            )
        self.steps.append(steps)

    def _next_number(self, purpose: str) -> int:
        number = self.world.generator.next_number()
        self._drawn.add(number)
        return number

    def _key(self, number: int) -> int:
        return DRAWN + number - self.first_draw if number in self._drawn else number

    def _moved_later(self, source: TensorSpec, target: TensorSpec) -> Callable[[Any], Any]:
        """Stands for a change of layout of arrays: real ones are still changed at once."""
        return partial(self._moved, source, target)

    def _moved(self, source: TensorSpec, target: TensorSpec, array: Any) -> Any:
        if isinstance(array, Symbol):
            raise no_numbers()
        return self._move(source, target)(array)


class TracedPlan(OpPlan):
    """An op that is recorded."""

    demanded: NdSbp | None = None
    """The layout that the caller demands of the outputs."""

    def call(self, tensors: Sequence[DistTensor]) -> tuple[DistTensor, ...]:
        """See `OpPlan.call`."""
        tracing: Tracing = self.world.tracing
        return tracing.run(self, tensors)

    def update(self, tensors: Sequence[DistTensor]) -> None:
        """See `OpPlan.update`."""
        self.call(tensors)

    def backward(
        self,
        node: Node,
        grads: Sequence[DistTensor | None],
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Sequence[DistTensor | None]:
        """See `OpPlan.backward`: gradients are always made of ops."""
        return super().backward(node, grads, needed, True)


class TraceDispatcher(Dispatcher):
    """Makes plans that record."""

    plan_class = TracedPlan

    def __init__(self, world: World, tracing: Tracing) -> None:
        super().__init__(world)
        self._tracing = tracing

    def update_all(self, kind: str, attrs: Mapping[str, AttrValue], rows: Sequence[Row]) -> None:
        """See `Dispatcher.update_all`: a job updates each variable by an op of its own."""
        for row in rows:
            self.plan(kind, tuple([each.spec for each in row]), attrs).update(row)

    def plan(
        self,
        kind: str,
        inputs: tuple[TensorSpec, ...],
        attrs: Mapping[str, AttrValue],
        placement: Placement | None = None,
        sbp: NdSbp | None = None,
    ) -> OpPlan:
        """See `Dispatcher.plan`. Parameters and states that are first used here are made at once,
        as they outlive the function's call.
        """
        if kind == "variable":
            return self._tracing.real.plan(kind, inputs, attrs, placement, sbp)
        found = super().plan(kind, inputs, attrs, placement, sbp)
        if isinstance(found, TracedPlan):
            found.demanded = sbp
        return found


def without_partial(sbp: NdSbp) -> NdSbp:
    """The layout with every partial entry reduced."""
    return NdSbp(tuple(BROADCAST if isinstance(entry, Partial) else entry for entry in sbp))
