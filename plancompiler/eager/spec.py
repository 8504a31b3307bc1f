"""`TensorSpec`, the description of an eager tensor without its numbers, and the interfaces of the
world that specs belong to: `WorldState`, its state, and `Mode`, the way in which it executes ops.

This module does not know the class of tensors: `Mode` and `WorldState` are generic in it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import numpy as np

from plancompiler.boxing.planner import canonical
from plancompiler.eager.generator import Generator
from plancompiler.engines.launch_variables import ALONE, read_launcher
from plancompiler.errors import RankError, UsageError
from plancompiler.executor.comm.context import members_are_compared
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.executor.space import HOST, Space, Spaces
from plancompiler.ir import AttrValue, DType, NdSbp, Phase, Placement, TensorType
from plancompiler.ir.operators import SbpLike, Scalar, TensorOperators
from plancompiler.ir.placement import require_placement
from plancompiler.ir.shard import Region, rank_region, region_shape
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array, Kernel, KernelContext

Tensor = TypeVar("Tensor")
Specs = tuple["TensorSpec", ...]
AnyWorld: TypeAlias = "WorldState[Any]"
AttrMap = Mapping[str, AttrValue]
Change = Callable[[Array], Array]
"""Makes this rank's part of a tensor in one layout from that in another."""


class TensorSpec:
    """Global shape, dtype, placement and SBP, and what follows for this rank.

    A world makes one object per combination, so that specs are compared and hashed by identity.
    """

    __slots__ = (
        "dtype",
        "inside",
        "local_shape",
        "numpy_dtype",
        "placement",
        "region",
        "runs",
        "sbp",
        "shape",
        "space",
        "whole",
        "world",
    )

    def __init__(
        self,
        world: AnyWorld,
        shape: tuple[int, ...],
        dtype: DType,
        placement: Placement,
        sbp: NdSbp,
    ) -> None:
        self.world = world
        self.shape = shape
        self.dtype = dtype
        self.placement = placement
        self.sbp = sbp
        self.numpy_dtype = dtype.numpy
        self.inside = world.rank in placement
        """Whether this rank holds a part."""
        self.space: Space = world.space(placement.device_type) if self.inside else HOST
        """Where its part lies."""
        self.region: Region = ()
        """The box of the global tensor that this rank holds."""
        self.local_shape: tuple[int, ...] = (0,) * max(1, len(shape))
        if self.inside:
            self.region = rank_region(shape, placement, sbp, world.rank)
            self.local_shape = region_shape(self.region)
        self.whole: TensorSpec | None = None
        """The same tensor broadcast, once somebody has asked the world for it."""
        self.runs: dict[Any, Callable[..., Any]] = {}
        """Prepared ops on a tensor of this spec, by kind and what else they take. Each mode of the
        world has tables of its own; see `WorldState.using`.
        """

    @property
    def type(self) -> TensorType:
        """Global shape and dtype."""
        return TensorType(self.shape, self.dtype)

    def same_but_layout(self, other: TensorSpec) -> bool:
        """Whether tensors of two specs have one shape, dtype and placement."""
        return self.type == other.type and self.placement == other.placement

    def empty(self) -> np.ndarray[Any, np.dtype[Any]]:
        """A local array of unset elements."""
        return self.space.empty(self.local_shape, self.numpy_dtype)

    def put(self, array: Array) -> Array:
        """An array of this rank's part as a tensor holds it: a copy; empty on a rank outside."""
        return self.space.put(array) if self.inside else self.empty()

    def __str__(self) -> str:
        return f"{self.type} on {self.placement} as {self.sbp}"


class SpecTensor(TensorOperators):
    """Mixin: the attributes of a tensor, with numbers or without, that its spec holds."""

    __slots__ = ()

    spec: TensorSpec

    # The mixin above declares attributes; here they are read off the spec.
    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # nobody sets it
        """The global shape."""
        return self.spec.shape

    @property
    def dtype(self) -> DType:  # type: ignore[override]  # likewise
        """The element type."""
        return self.spec.dtype

    @property
    def placement(self) -> Placement:
        """Where it lies."""
        return self.spec.placement

    def _full(self, shape: tuple[int, ...], dtype: DType, value: Scalar) -> Self:
        return self._source("fill", {"shape": shape, "dtype": str(dtype), "value": value})[0]


def attrs_key(attrs: AttrMap) -> tuple[object, ...]:
    """Attributes as part of a key. 1, 1.0 and True are equal but not the same, nor are 0.0 and
    -0.0; the key of a random op is no part of its plan.
    """
    return tuple(
        [
            (name, value, value.__class__) if value else (name, repr(value))
            for name, value in attrs.items()
            if name != "key" or value.__class__ is not int
        ]
    )


class PreparedOp(Protocol[Tensor]):
    """An op on inputs of known specs."""

    kind: str
    attrs: AttrMap
    random: bool
    """Whether it draws numbers."""
    recorded: bool
    """Whether it goes on the tape."""
    strided: bool
    """Whether it makes views that are not in row-major order."""
    used: Specs
    """The inputs in the layouts that the kernel takes."""
    outputs: Specs
    moves: tuple[Change | None, ...]
    """What changes the inputs to those."""
    kernel: Kernel
    context: KernelContext
    local: Callable[..., Any]
    """The kernel on arrays in the layouts that it takes: an array, or a tuple of several."""

    def call(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run or record it."""

    def again(self, tensor: Tensor) -> Array:
        """This rank's part of the only output for the only input, computed once more."""


class Mode(ABC, Generic[Tensor]):
    """How a world carries out ops: `dispatch.RunMode` runs them, `anomaly.CheckMode` also checks
    them, and `tracing.TraceMode` records them in a job.
    """

    traces = False
    """Whether tensors have no numbers, as ops are recorded in a job."""
    records = False
    """Whether runs of compiled functions record what they do; see `record`."""

    @abstractmethod
    def plan(
        self,
        kind: str,
        inputs: Specs,
        attrs: AttrMap,
        placement: Placement | None = None,
        sbp: NdSbp | None = None,
    ) -> PreparedOp[Tensor]:
        """The plan of an op on inputs of these specs, or of one without inputs on a placement."""

    @abstractmethod
    def prepared(self, plan: Any) -> Callable[..., Tensor] | None:
        """A plan as one function of its tensors, to be kept in `TensorSpec.runs`; None where it
        needs more care.
        """

    @abstractmethod
    def move(self, source: TensorSpec, target: TensorSpec) -> Change:
        """What changes arrays of one spec to those of another."""

    @abstractmethod
    def redistribution(
        self, source: TensorSpec, target: TensorSpec, key: object
    ) -> Callable[[Tensor], Tensor]:
        """What changes tensors of one spec to those of another; kept by its key where it can be."""

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Ops of the block belong to this phase of a step, where they are recorded in a job."""
        return nullcontext()

    def record(self, close: Callable[[], None]) -> Path | None:
        """Where the run of a compiled function records what it does, if it is to; `close` ends it.

        A mode that asks for it has functions compiled for itself.
        """
        return None

    def check_numbers(self) -> None:
        """Raise a TracingError if tensors have no numbers, because a function is traced."""

    def check_reach(self, number: float, kind: str) -> None:
        """Raise an error if backward would reach an op that was recorded outside of the trace."""

    def touched(self, leaf: Hashable, *, reading: bool) -> None:
        """Note that the gradient of a leaf is about to be read or changed."""

    def note(self, tensor: Tensor) -> Tensor:
        """Note a new tensor that shares its numbers (or the symbol for them) with another."""
        return tensor

    def made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in this mode, so that all its views are known to it."""
        return True

    @abstractmethod
    def copied(self, tensor: Tensor) -> Tensor:
        """A tensor with the same value, off the tape; its memory may be shared."""

    @abstractmethod
    def own_local(self, tensor: Tensor) -> Array:
        """What a tensor holds, in memory of its own."""

    @abstractmethod
    def holds_alone(self, tensor: Tensor, views: Sequence[Tensor]) -> bool:
        """Whether nobody but the tape and these views of it reads the memory of a tensor that is no
        view itself.
        """

    @abstractmethod
    def put(self, tensor: Tensor, value: Tensor) -> None:
        """Write a value of the same spec into a tensor's memory."""


class WorldState(ABC, Generic[Tensor]):
    """What specs, tensors and ops ask of their world; see `world.World`."""

    mode: Mode[Tensor]

    def __init__(self, rank: int, size: int, comm: CommContextManager | None) -> None:
        if not 0 <= rank < size:
            raise RankError("a rank is outside its world", got=rank, expected=f"0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.spaces = Spaces(rank) if comm is None else comm.spaces
        """Where arrays of this rank lie; see `World.use_device`."""
        self.recording = True
        """Whether ops on tensors that want a gradient are recorded on the tape; in all modes."""
        self.implicit_broadcast = False
        """Whether plain arrays beside tensors count as broadcast."""
        self.clock = 0
        """Counts recorded ops and changes in place."""
        self.step = 0
        """What optimizer steps and schedules see as the step."""
        self.generator = Generator()
        self.draw: tuple[int, int, int] = (0, 0, 0)
        """Seed, step and key of the random op that runs."""
        self.forced: tuple[int, int] | None = None
        """Seed and step of random ops that repeat an earlier one."""
        self.compares = members_are_compared()
        """Whether ranks compare all that they call; see `agreement`."""
        self.lent: Counter[int] = Counter()
        """How many compiled plans work on the memory of a tensor, by the id of its array."""
        self._comm = comm
        self._specs: dict[tuple[object, ...], TensorSpec] = {}

    @property
    def comm(self) -> CommContextManager:
        """The communicators of this rank."""
        if self._comm is None:
            raise UsageError(
                "this program runs as one rank and has nobody to exchange data with",
                source=user_line(),
                hint=self._more_ranks(),
            )
        return self._comm

    def space(self, device_type: str) -> Space:
        """Where this rank's parts lie on placements of a device type."""
        return self.spaces.of(device_type)

    def tick(self) -> int:
        """The next time of the clock."""
        self.clock += 1
        return self.clock

    @contextmanager
    def using(self, mode: Mode[Tensor]) -> Iterator[None]:
        """Carry out ops in this mode. A mode has prepared ops of its own, so that those of the mode
        before need not ask in which mode they run.
        """
        before, runs = self.mode, {spec: spec.runs for spec in self._specs.values()}
        for spec in runs:
            spec.runs = {}
        self.mode = mode
        try:
            yield
        finally:
            self.mode = before
            for spec in self._specs.values():
                spec.runs = runs.get(spec, {})

    # --- specs ----------------------------------------------------------------------------------

    def spec(
        self, shape: tuple[int, ...], dtype: DType, placement: Placement, sbp: NdSbp
    ) -> TensorSpec:
        """The one object of this combination."""
        key = (shape, dtype, placement, sbp)
        try:
            spec = self._specs.get(key)
        except TypeError:
            spec = None
        if spec is None:
            require_placement(placement)
            if max(placement.rank_list) >= self.size:
                raise RankError(
                    "a placement names a rank outside the world",
                    source=user_line(),
                    got=str(placement),
                    expected=f"ranks 0 to {self.size - 1}",
                    hint=self._more_ranks(),
                )
            layout = canonical(sbp.check(placement.ndim, len(shape)), placement.hierarchy)
            if layout != sbp:
                spec = self.spec(shape, dtype, placement, layout)
            else:
                spec = TensorSpec(self, shape, dtype, placement, sbp)
            self._specs[key] = spec
        return spec

    def _more_ranks(self) -> str:
        """What to do where this world has too few ranks."""
        launched = read_launcher(os.environ) if self._comm is None else ALONE
        if launched.launcher is not None and launched.size > self.size:
            return (
                f"call pc.init() at the start of the program: {launched.launcher.name} has started "
                f"this process as rank {launched.rank} of {launched.size}"
            )
        more = "start it" if self.size == 1 else "start more ranks"
        return f"{more} with `plancompiler launch -n N SCRIPT.py`, and call pc.init()"

    def whole(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the same tensor where every rank has all of it."""
        if spec.whole is None:
            layout = NdSbp.broadcast(spec.placement.ndim)
            spec.whole = self.spec(*spec.type, spec.placement, layout)
        return spec.whole

    def reduced(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the same tensor where partial entries are reduced."""
        return self.spec(*spec.type, spec.placement, spec.sbp.reduced())

    def target(
        self, spec: TensorSpec, placement: Placement | None, sbp: NdSbp | None
    ) -> TensorSpec:
        """What a tensor becomes on a placement (default: its own) as `sbp`; by default as it was,
        reduced, if the mesh has as many axes, else broadcast.
        """
        placement = spec.placement if placement is None else placement
        if sbp is None:
            if placement == spec.placement:
                return spec
            same = placement.ndim == spec.placement.ndim
            sbp = spec.sbp.reduced() if same else NdSbp.broadcast(placement.ndim)
        return self.spec(*spec.type, placement, sbp)

    def draw_from(self, attrs: AttrMap) -> None:
        """Name the numbers that the next random op reads."""
        seed, step = self.forced or (self.generator.seed, self.generator.step)
        key = attrs["key"]
        if not isinstance(key, int):
            raise UsageError("the key of a random op is a whole number", got=repr(key))
        self.draw = (seed, step, key)

    # --- what tensors ask for -------------------------------------------------------------------

    @abstractmethod
    def tensor(self, value: object, placement: Placement, sbp: SbpLike | None) -> Tensor:
        """A tensor of a whole value that every rank has."""

    @abstractmethod
    def source(self, placement: Placement, kind: str, attrs: AttrMap) -> tuple[Tensor, ...]:
        """Outputs of an op without inputs."""

    @abstractmethod
    def backward(
        self, root: Tensor, grad: Tensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """Walk back from a tensor, and add up gradients at the leaves; see
        `DistTensor.backward`.
        """

    @abstractmethod
    def change(self, tensor: Tensor, make: Callable[[Tensor], Tensor], what: str) -> Tensor:
        """Let a tensor take the value that `make` makes of it; see `inplace.change`."""

    @abstractmethod
    def reform(self, tensor: Tensor, make: Callable[[Tensor], Tensor], what: str) -> Tensor:
        """Let a tensor take another shape of the same elements; see `inplace.reform`."""

    @abstractmethod
    def copy(self, tensor: Tensor, value: Tensor) -> Tensor:
        """Let a tensor take the value of another one; see `inplace.copy`."""

    @abstractmethod
    def assign(self, tensor: Tensor, index: Any, value: Any) -> None:
        """`tensor[index] = value`; see `inplace.assign`."""

    @abstractmethod
    def into(self, out: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A function's results in existing tensors; see `inplace.into`."""
