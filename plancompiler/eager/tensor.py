"""`DistTensor`: a tensor that lies on the ranks of a placement, and where the tape reaches it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from plancompiler.eager.host_value import HostValue
from plancompiler.eager.inplace_forms import InPlaceForms, check_tensor
from plancompiler.eager.spec import AttrMap, Change, PreparedOp, TensorSpec, attrs_key
from plancompiler.eager.symbol import Symbol
from plancompiler.errors import GradientError, PlacementError, UsageError
from plancompiler.executor.space import HOST
from plancompiler.ir import AttrValue, NdSbp, Placement, SourceLine
from plancompiler.ir.operators import (
    TENSORS_ONLY,
    is_scalar,
    promoted,
    vector_product,
    whole_numbers,
)
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array
from plancompiler.ops.view import Strides, in_order, row_major, view_strides

Tensors = Sequence["DistTensor"]
Grads = Sequence["DistTensor | None"]
"""Gradients; None where there is none."""
Hook = Callable[[Any], Any]
"""Given a gradient; gives another one in its place, or None to leave it."""


class Recorded(Protocol):
    """What a node asks of the op that it recorded."""

    @property
    def kind(self) -> str:
        """Kind of the op."""

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Specs of its outputs."""

    def backward(
        self,
        node: Node,
        grads: Grads,
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Grads:
        """Gradients of the inputs that need one, from those of the outputs."""


class RecordedPlan(PreparedOp["DistTensor"], Recorded, Protocol):
    """The plan of an op that may have made a view."""


class Leaf:
    """The end of the tape at a tensor that wants a gradient."""

    __slots__ = ("__weakref__", "grad", "hooks", "number")

    def __init__(self, number: int) -> None:
        self.grad: DistTensor | None = None
        """The gradient that has been added up here; the mode is told who looks at it."""
        self.hooks: list[Hook] = []
        self.number = number


class Node:
    """One recorded op.

    It keeps its inputs as tensors and its outputs as arrays: an output tensor points to its node,
    and a circle would keep both alive.
    """

    __slots__ = (
        "behind",
        "draw",
        "hooks",
        "inputs",
        "number",
        "op",
        "outputs",
        "source",
        "stale",
    )

    behind: Sequence[Node | Leaf | None]
    """Where the inputs were on the tape; set once a walk has passed."""
    source: SourceLine
    """The user's line; set where anomalies are looked for, and else not at all."""

    def __init__(
        self,
        op: Recorded,
        inputs: tuple[DistTensor, ...] | None,
        outputs: tuple[Array, ...],
        number: float,
        draw: tuple[int, int, int] | None = None,
    ) -> None:
        self.op = op
        self.inputs = inputs
        """None once a walk has passed."""
        self.outputs = outputs
        self.number = number
        """Counts recorded ops and changes in place, in their order; see `retaken` for fractions."""
        self.draw = draw
        """Seed, step and key of a random op."""
        self.hooks: list[tuple[int, Hook]] | None = None
        self.stale = False
        """Whether the memory of an output was changed."""


def record(output: DistTensor, op: Recorded, source: DistTensor) -> None:
    """Put a tensor on the tape as the only output of an op on another one."""
    output.node = Node(op, (source,), (output.local,), output.spec.world.tick())
    output.slot = 0


Run = Callable[..., "DistTensor"]
"""A prepared op."""
_INTERNAL = frozenset(
    {
        "by",
        "changed",
        "follow",
        "held",
        "lineage",
        "local",
        "more",
        "moved",
        "node",
        "of",
        "own",
        "packed",
        "part",
        "renamed",
        "root",
        "slot",
        "source",
        "spec",
        "view_of",
        "whole_local",
        "whole_strides",
        "written",
    }
)
"""Attributes and methods of tensors, and of views that hold a copy, that only this package uses."""


def _operator(kind: str) -> Callable[[DistTensor, Any], DistTensor]:
    """An operator of two operands; what has run before takes one look-up."""

    def run(self: DistTensor, other: Any) -> DistTensor:
        if other.__class__ is DistTensor:
            prepared: Run | None = self.spec.runs.get((kind, other.spec))
            if prepared is not None:
                return prepared(self, other)
        return self._binary(kind, other)

    return run


class DistTensor(InPlaceForms, HostValue):
    """A tensor of which each rank of `placement` holds its part as `sbp` says.

    Made by `pc.tensor`, `DistTensor.from_local` and by ops. All ranks of a placement run the same
    calls in the same order. A rank outside of the placement holds an empty part and computes
    nothing; reading numbers raises an error there.

    `numpy()`, `item()` and `bool()` are collectives: they give the whole value on every rank of the
    placement.
    """

    __slots__ = ("__weakref__", "local", "more", "node", "slot", "spec")

    spec: TensorSpec
    local: Array
    """This rank's part; others may share its memory."""
    node: Node | Leaf | None
    """The op on the tape that made it, or its leaf; None if it requires no gradient."""
    slot: int
    """Which output of its node it is."""
    more: dict[str, Any] | None
    """Data that few tensors have: the base of a view, and the reduced form of a partial value."""

    def __init__(self, spec: TensorSpec, local: Array) -> None:
        self.spec = spec
        self.local = local
        self.node = None
        self.more = None

    from_local: ClassVar[Callable[..., DistTensor]]
    """See `creation.from_local`, which sets it."""

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    # --- what it is -----------------------------------------------------------------------------

    @property
    def sbp(self) -> NdSbp:
        """How it lies there."""
        return self.spec.sbp

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return self.spec.local_shape

    @property
    def base(self) -> DistTensor | None:
        """The tensor whose elements this one shares, where it is a view."""
        return None if self.more is None else self.more.get("base")

    @property
    def root(self) -> DistTensor:
        """The tensor that owns the memory: its base, else itself."""
        base = self.base
        return self if base is None else base

    def to_local(self) -> Array:
        """A copy of this rank's part, outside of the tape; CuPy's where it lies on a device. Of a
        partial value it is a summand. Of a view whose base was changed since the view was last
        read, it may be a collective.
        """
        self.spec.world.mode.check_numbers()
        return self.local.copy()

    def numpy(self) -> Array:
        """The whole value on every rank of the placement: a collective."""
        spec = self.spec
        spec.world.mode.check_numbers()
        if not spec.inside:
            raise PlacementError(
                "this rank holds no part of the tensor",
                source=user_line(),
                rank=spec.world.rank,
                got=str(spec),
                hint="read it on the ranks of its placement, or redistribute it to all",
            )
        whole = spec.world.whole(spec)
        return spec.space.get(self.part(whole))

    def whole_local(self) -> Array:
        """See `HostValue.whole_local`."""
        spec = self.spec
        spec.world.mode.check_numbers()
        if not spec.inside or spec.space is not HOST or spec is not spec.world.whole(spec):
            raise BufferError(f"{spec} does not lie as a whole in the memory of this rank's CPU")
        self.own()
        return self.local

    def __copy__(self) -> DistTensor:
        """The same tensor once more: one memory, one place on the tape."""
        self.own()
        duplicate = DistTensor(self.spec, self.local)
        duplicate.view_of(self)
        duplicate.follow(self)
        return duplicate

    def __deepcopy__(self, memo: dict[int, object]) -> DistTensor:
        """The same value in memory of its own, off the tape; it wants a gradient as this one does.

        GradientError for a result: what is on the tape cannot be there twice.
        """
        if isinstance(self.node, Node):
            raise GradientError(
                "a result on the tape cannot be copied with its past",
                source=user_line(),
                got=str(self.spec),
                hint="copy x.detach()",
            )
        self.spec.world.mode.check_numbers()
        duplicate = DistTensor(self.spec, self.spec.space.put(self.local))
        duplicate.requires_grad = self.requires_grad
        memo[id(self)] = duplicate
        return duplicate

    def __str__(self) -> str:
        return f"DistTensor({self.spec})"

    def __repr__(self) -> str:
        if isinstance(self.local, Symbol) and self.local.leaked is not None:
            name, source = self.local.leaked
            where = f"without numbers: made in compiled {name!r} at {source}"
            return f"DistTensor({self.spec}, {where})"
        if self.spec.world.mode.traces:
            return str(self)
        local = self.spec.space.get(self.local)
        part = np.array2string(local, threshold=8, edgeitems=2, precision=4)
        return f"DistTensor({self.spec}, rank {self.spec.world.rank} holds {part})"

    # --- gradients ------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """Whether ops on it are recorded. Set it on tensors that no recorded op has made."""
        return self.node is not None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if not isinstance(wanted, (bool, np.bool_)):
            raise UsageError(
                "requires_grad is True or False",
                op="requires_grad",
                source=user_line(),
                got=type(wanted).__name__,
            )
        if wanted and not self.dtype.is_floating:
            raise GradientError(
                "only a floating tensor has a gradient", source=user_line(), got=str(self.spec)
            )
        if isinstance(self.node, Node):
            if not wanted:
                raise GradientError("a result cannot be taken off the tape", hint="use .detach()")
        elif wanted and self.node is None:
            self.node = Leaf(self.spec.world.tick())
        elif not wanted:
            self.node = None

    @property
    def grad(self) -> DistTensor | None:
        """The gradient that `backward` has added up here, for tensors with `requires_grad` set.

        It may be partial: it is reduced when it is first needed whole.
        """
        leaf = self.node
        if not isinstance(leaf, Leaf):
            return None
        mode = self.spec.world.mode
        if mode.traces:
            mode.touched(leaf, reading=True)
        return leaf.grad

    @grad.setter
    def grad(self, value: DistTensor | None) -> None:
        if not isinstance(self.node, Leaf):
            raise GradientError("only a tensor with requires_grad set keeps a gradient")
        if value is not None:
            check_tensor("grad", value)
            if not value.spec.same_but_layout(self.spec):
                raise GradientError(
                    "a gradient has the shape, dtype and placement of its tensor",
                    got=str(value.spec),
                    expected=str(self.spec),
                )
        self.spec.world.mode.touched(self.node, reading=False)
        self.node.grad = value

    @property
    def is_leaf(self) -> bool:
        """Whether no recorded op has made it."""
        return not isinstance(self.node, Node)

    def backward(
        self,
        grad: DistTensor | None = None,
        retain_graph: bool = False,
        create_graph: bool = False,
    ) -> None:
        """Add the gradients of this tensor, times `grad`, to all leaves that it was made of.

        `grad` may be left out for a scalar. With `create_graph` the gradients are recorded too, so
        that they can be differentiated in turn.
        """
        self.spec.world.backward(self, grad, retain_graph, create_graph)

    def detach(self) -> DistTensor:
        """The same value and memory, off the tape."""
        self.packed()
        detached = DistTensor(self.spec, self.local)
        detached.view_of(self)
        note: Run = self.spec.world.mode.note
        return note(detached)

    def register_hook(self, hook: Hook) -> Callable[[], None]:
        """Call `hook` with the gradient when `backward` has it; what it returns takes its place.

        Returns a function that takes the hook off again.
        """
        if self.node is None:
            raise GradientError("a tensor without gradient has no hooks", source=user_line())
        if not callable(hook):
            raise UsageError(
                "a hook is a function of the gradient",
                op="register_hook",
                source=user_line(),
                got=type(hook).__name__,
            )
        if isinstance(self.node, Leaf):
            hooks = self.node.hooks
            hooks.append(hook)
            return lambda: hooks.remove(hook)
        if self.node.hooks is None:
            self.node.hooks = []
        entry, entries = (self.slot, hook), self.node.hooks
        entries.append(entry)
        return lambda: entries.remove(entry)

    # --- layout ---------------------------------------------------------------------------------

    def _redistribute(self, placement: Placement | None, sbp: NdSbp | None) -> DistTensor:
        spec = self.spec
        key = ("redistribute", placement, sbp)
        run: Run | None = spec.runs.get(key)
        if run is None:
            world = spec.world
            run = world.mode.redistribution(spec, world.target(spec, placement, sbp), key)
        return run(self)

    def part(self, spec: TensorSpec) -> Array:
        """This rank's part in another layout; shares memory where it is this one."""
        own = self.spec
        return self.local if spec is own else self.moved(spec, own.world.mode.move(own, spec))

    def moved(self, spec: TensorSpec, move: Change) -> Array:
        """This rank's part in another layout. A partial value is reduced once and then kept."""
        if not self.spec.sbp.has_partial:
            return move(self.local)
        more = self.more
        if more is None:
            more = self.more = {}
        kept = more.get("reduced")
        if kept is None or kept[0] is not spec or self.changed > kept[2]:
            kept = more["reduced"] = (spec, move(self.local), self.spec.world.clock)
        reduced: Array = kept[1]
        return reduced

    # --- changes in place -----------------------------------------------------------------------

    @property
    def changed(self) -> int:
        """When its memory was last changed in place, by the clock of the tape; 0 for never."""
        root = self.root
        return 0 if root.more is None else int(root.more.get("changed", 0))

    def written(self) -> None:
        """Note that the memory was changed, so that what the tape kept of it is no longer valid."""
        more = self.more
        root = self if more is None else more.get("base", self)
        world = self.spec.world
        world.clock = clock = world.clock + 1
        if root.more is None:
            root.more = {"changed": clock}
        else:
            root.more.pop("reduced", None)
            root.more["changed"] = clock
        if self.node.__class__ is Node:
            _make_stale(self)
        if root is not self and root.node.__class__ is Node:
            _make_stale(root)

    def view_of(self, source: DistTensor, by: Any = None) -> None:
        """Note that this tensor is a view of another one, and the plan of the op that made it; None
        for a second object of the same tensor.
        """
        more = source.more
        if more is None or "base" not in more:
            self.more = {"base": source, "by": by}
        else:
            self.more = {"base": more["base"], "source": source, "by": by}

    @property
    def source(self) -> DistTensor | None:
        """The tensor of which it was made as a view: its base, or another view of that."""
        more = self.more
        return None if more is None else more.get("source", more.get("base"))

    @property
    def by(self) -> RecordedPlan | None:
        """The plan of the op that made it as a view; None where it is the same tensor once more."""
        return None if self.more is None else self.more.get("by")

    def whole_strides(self) -> Strides:
        """The strides that it would have as a whole; those of its base's memory, where it is a
        view.
        """
        source, plan = self.source, self.by
        if source is None:
            return row_major(self.shape)
        if plan is None:
            return source.whole_strides() if source.shape == self.shape else row_major(self.shape)
        of_source = source.whole_strides()
        strides = view_strides(plan.kind, plan.attrs, source.shape, of_source, self.shape)
        assert strides is not None
        return strides

    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order, which only views may not; the same in every
        layout.
        """
        return not self.is_view or in_order(self.shape, self.whole_strides())

    @property
    def renamed(self) -> int:
        """When a change in place gave it another place on the tape; 0 for never."""
        return 0 if self.more is None else int(self.more.get("renamed", 0))

    @renamed.setter
    def renamed(self, clock: int) -> None:
        if self.more is not None:
            self.more["renamed"] = clock

    def lineage(self) -> Iterator[DistTensor]:
        """It, what it is a view of, and so on to its base."""
        at: DistTensor | None = self
        while at is not None:
            yield at
            at = at.source

    def follow(self, other: DistTensor) -> None:
        """Take the place of another tensor on the tape."""
        self.node = other.node
        if isinstance(other.node, Node):
            self.slot = other.slot

    def packed(self) -> bool:
        """Lie in row-major order, before the memory is viewed. False, and nothing happens, for a
        view that does not: on all ranks alike, even where a part does.
        """
        more = self.more
        if more is not None:
            if "base" in more:
                return not any(each.by is not None and each.by.strided for each in self.lineage())
            self.own()
        if not self.spec.world.mode.traces and not self.local.flags.c_contiguous:
            self.local = self.local.copy()
        return True

    def own(self) -> None:
        """Copy the memory if it is shared, before it is written or viewed: a partial tensor shares
        its reduced value with the tensor that was made by the reduction.
        """
        more = self.more
        if more is not None and more.pop("shared", False):
            self.local = self.local.copy()

    # --- ops ------------------------------------------------------------------------------------

    def _apply(self, kind: str, inputs: Sequence[Any], attrs: AttrMap) -> tuple[DistTensor, ...]:
        run: Run | None = None
        key: object = None
        try:
            first = inputs[0].spec
            if len(inputs) <= 2:
                key = kind if len(inputs) == 1 else (kind, inputs[1].spec)
                run = first.runs.get((key, *attrs_key(attrs)) if attrs else key)
        except AttributeError:
            inputs = [self.coerced(kind, each) for each in inputs]
            key = None
        except (TypeError, ValueError):  # a list or an array among the attributes
            key = None
        if run is not None:
            return (run(*inputs),)
        if key is not None and attrs:
            key = (key, *attrs_key(attrs))
        return _run(kind, key, attrs, inputs)

    def _source(self, kind: str, attrs: AttrMap) -> tuple[DistTensor, ...]:
        return self.spec.world.source(self.placement, kind, attrs)

    def coerced(self, kind: str, value: object) -> DistTensor:
        """An operand as a tensor on this placement; arrays only inside `implicit_broadcast`."""
        if isinstance(value, DistTensor):
            return value
        world = self.spec.world
        if isinstance(value, (np.ndarray, list, tuple)) and world.implicit_broadcast:
            array = np.asarray(value)
            if not isinstance(value, np.ndarray):
                array = array.astype(self.spec.numpy_dtype)
            made: DistTensor = world.tensor(array, self.placement, None)
            return made
        raise UsageError(
            f"{kind} cannot combine a DistTensor with this",
            op=kind,
            source=user_line(),
            got=type(value).__name__,
            expected="a DistTensor or a plain number",
            hint="make it a tensor with pc.tensor(array, placement, sbp), or let arrays count as "
            "broadcast inside `with pc.implicit_broadcast():`; of a parameter take p.value",
        )

    def _binary(self, kind: str, other: Any, *, swapped: bool = False) -> DistTensor:
        kept = other.__class__
        if kept is not float and kept is not int:
            if isinstance(other, DistTensor):
                left, right = (other, self) if swapped else (self, other)
                ready: Run | None = left.spec.runs.get((kind, right.spec))
                if ready is not None:
                    return ready(left, right)
                kind, left, right = promoted(kind, left, right)
                if kind == "matmul" and min(left.ndim, right.ndim) < 2:
                    return vector_product(left, right)
                return _run(kind, (kind, right.spec), {}, (left, right))[0]
            if not is_scalar(other):
                return self._binary(kind, self.coerced(kind, other), swapped=swapped)
        number = other.item() if hasattr(other, "item") else other
        # 1, 1.0 and True are equal but not the same, nor are 0.0 and -0.0.
        key = (kind, number.__class__, number or repr(number), swapped)
        run: Run | None = self.spec.runs.get(key)
        if run is not None:
            return run(self)
        wanted = self.counted_as(kind, number)
        if wanted is not None:
            counted = self.cast(wanted)
            return counted._binary(kind, number, swapped=swapped)  # noqa: SLF001  # of this class
        if isinstance(number, bool):
            counted_number = self.plain(number)
            if counted_number is not number:
                return self._binary(kind, counted_number, swapped=swapped)
        if kind in TENSORS_ONLY or self.takes_truth(kind, number):
            return self._binary(kind, self.beside(kind, number), swapped=swapped)
        attrs: dict[str, AttrValue] = {"scalar": number}
        if swapped:
            attrs["swapped"] = True
        return _run(f"{kind}_scalar", key, attrs, (self,))[0]

    def _unary(self, kind: str, **attrs: AttrValue) -> DistTensor:
        if attrs:
            return self._apply(kind, (self,), attrs)[0]
        run: Run | None = self.spec.runs.get(kind)
        if run is not None:
            return run(self)
        return _run(kind, kind, {}, (self,))[0]

    __add__ = _operator("add")
    __sub__ = _operator("sub")
    __mul__ = _operator("mul")
    __truediv__ = _operator("div")
    __matmul__ = _operator("matmul")

    @property
    def is_view(self) -> bool:
        """Whether it shares the elements of another tensor, its `base`: a change of one is seen in
        the other.
        """
        return self.base is not None

    def reshape(self, *shape: int | Sequence[int]) -> DistTensor:
        try:
            run: Run | None = self.spec.runs.get(("reshape", shape))
        except TypeError:  # a list
            return super().reshape(*shape)
        if run is not None:
            return run(self)
        wanted = whole_numbers("extents", shape[0] if len(shape) == 1 else shape)
        attrs: dict[str, AttrValue] = {"shape": wanted}
        return _run("reshape", ("reshape", shape), attrs, (self,))[0]

    def relu(self) -> DistTensor:
        run: Run | None = self.spec.runs.get("relu")
        return self._unary("relu") if run is None else run(self)


def _run(kind: str, key: object, attrs: AttrMap, tensors: Tensors) -> tuple[DistTensor, ...]:
    """Run an op, and keep it by a key on the first tensor's spec, as one function where it is that
    simple.
    """
    spec, world = tensors[0].spec, tensors[0].spec.world
    plan: PreparedOp[DistTensor] = world.mode.plan(
        kind, tuple([each.spec for each in tensors]), attrs
    )
    if plan.random:
        world.draw_from(attrs)
    elif key is not None and (run := world.mode.prepared(plan)) is not None:
        if len(spec.runs) >= _RUNS:
            spec.runs.clear()
        spec.runs[key] = run
        return (run(*tensors),)
    return plan.call(tensors)


_RUNS = 1024
"""Prepared ops that a spec keeps; it starts anew when there are more (numbers that all differ)."""


def _make_stale(tensor: DistTensor) -> None:
    """Note at what recorded a tensor that its memory was changed."""
    node = tensor.node
    if isinstance(node, Node) and any(out is tensor.local for out in node.outputs):
        node.stale = True
