"""`World`: one rank's side of an SPMD program: its number, communicators, plans and random state.

Where ranks are processes, a process has one world; where they are threads, each thread has its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from plancompiler.boxing.planner import canonical
from plancompiler.eager.agreement import ComparingDispatcher, compare, compare_value
from plancompiler.eager.dispatch import Dispatcher, OpPlan, fast_run
from plancompiler.eager.generator import Generator
from plancompiler.eager.launch_variables import ALONE, read_launcher
from plancompiler.eager.layout import Change, plan_move
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tape import Leaf, backward
from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import RankError, ShapeError, UsageError
from plancompiler.executor.comm.context import members_are_compared
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.executor.space import Space, Spaces
from plancompiler.ir import (
    BROADCAST,
    AttrValue,
    DType,
    NdSbp,
    Partial,
    Phase,
    Placement,
    SourceLine,
)
from plancompiler.ir.operators import SbpLike
from plancompiler.ir.placement import require_placement
from plancompiler.ir.shard import region_index
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

if TYPE_CHECKING:
    from plancompiler.executor.cuda.interface import Device

SPECS = 1 << 14
"""Specs that a world keeps before it forgets those of tensors that are gone."""


class World:
    """One rank's side of an SPMD program of `size` ranks."""

    def __init__(self, rank: int, size: int, comm: CommContextManager | None = None) -> None:
        if not 0 <= rank < size:
            raise RankError("a rank is outside its world", got=rank, expected=f"0 to {size - 1}")
        self.rank = rank
        self.size = size
        self.spaces = Spaces(rank) if comm is None else comm.spaces
        """Where arrays of this rank lie; see `use_device`."""
        self.recording = True
        """Whether ops on tensors that want a gradient are recorded."""
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
        self.attachments: dict[object, object] = {}
        """What the frontend remembers per world, by a key of its own."""
        self.compares = members_are_compared()
        """Whether ranks compare all that they call; see `agreement`."""
        self.dispatcher = ComparingDispatcher(self) if self.compares else Dispatcher(self)
        self.anomaly = False
        """Whether ops check what they make; see `anomaly`."""
        self.tracing: Any = None
        """What records ops instead of running them, while a function is compiled."""
        self.leaves: WeakSet[Leaf] = WeakSet()
        """Ends of the tape."""
        self.closers: list[Callable[[], None]] = []
        """Called when the world closes."""
        self.parts: dict[object, TensorSpec] = {}
        """Specs of parts that `from_local` was given, by shape, dtype, placement and layout."""
        self._comm = comm
        self._specs: dict[tuple[object, ...], TensorSpec] = {}
        self._moves: dict[tuple[TensorSpec, TensorSpec], Change] = {}

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

    def use_device(self, device: Device | str) -> None:
        """Take this device (`cuda:1`) for placements on CUDA devices. Without it
        PLANCOMPILER_DEVICE counts, else the rank's place on its host. UsageError once one is used.
        """
        self.spaces.use(device)

    def tick(self) -> int:
        """The next time of the clock."""
        self.clock += 1
        return self.clock

    @property
    def closed(self) -> bool:
        """Whether it has let go of the communicators."""
        return self._comm is not None and self._comm.closed

    def close(self) -> None:
        """Let go of the communicators, and of what runs on them."""
        for closer in tuple(self.closers):
            closer()
        if self._comm is not None:
            self._comm.close()
        else:
            self.spaces.close()

    # --- specs and moves ------------------------------------------------------------------------

    def spec(
        self, shape: tuple[int, ...], dtype: DType, placement: Placement, sbp: NdSbp
    ) -> TensorSpec:
        """The one object of this combination."""
        key = (shape, dtype, placement, sbp)
        try:
            found = self._specs.get(key)
        except TypeError:
            found = None
        if found is None:
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
                found = self.spec(shape, dtype, placement, layout)
            else:
                found = TensorSpec(self, shape, dtype, placement, sbp)
            self._specs[key] = found
        return found

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

    def leaf(self) -> Leaf:
        """A new end of the tape."""
        found = Leaf(self.tick())
        self.leaves.add(found)
        if self.tracing is not None:
            self.tracing.watch(found)
        return found

    def specs(self) -> list[TensorSpec]:
        """All specs that were made so far, each once."""
        return list(dict.fromkeys(self._specs.values()))

    def whole(self, spec: TensorSpec) -> TensorSpec:
        """The spec of the same tensor where every rank has all of it."""
        found = spec.whole
        if found is None:
            layout = NdSbp.broadcast(spec.placement.ndim)
            found = spec.whole = self.spec(*spec.type, spec.placement, layout)
        return found

    def target(self, spec: TensorSpec, placement: Placement, sbp: NdSbp | None) -> TensorSpec:
        """What a tensor becomes on a placement as `sbp`; by default as it was, reduced, if the mesh
        has as many axes, else broadcast.
        """
        if sbp is None:
            if placement == spec.placement:
                return spec
            sbp = NdSbp.broadcast(placement.ndim)
            if placement.ndim == spec.placement.ndim:
                sbp = NdSbp(
                    tuple(BROADCAST if isinstance(entry, Partial) else entry for entry in spec.sbp)
                )
        return self.spec(*spec.type, placement, sbp)

    def move(self, source: TensorSpec, target: TensorSpec) -> Change:
        """What changes arrays of one spec to those of another."""
        found = self._moves.get((source, target))
        if found is None:
            found = self._moves[source, target] = plan_move(source, target)
        return found

    def compare_change(self, source: TensorSpec, target: TensorSpec) -> None:
        """Have ranks compare a change of layout."""
        ranks = {*source.placement.rank_list, *target.placement.rank_list}
        compare(self, tuple(sorted(ranks)), "redistribute", {"source": source, "target": target})

    def fast_run(self, plan: OpPlan) -> Callable[..., DistTensor] | None:
        """The plan as one function of its tensors, where it is simple enough."""
        return None if self.compares else fast_run(plan)

    # --- tensors out of nothing -----------------------------------------------------------------

    def tensor(self, value: object, placement: Placement, sbp: SbpLike | None) -> DistTensor:
        """A tensor of a whole value that every rank has."""
        array = self.array_for(value, placement)
        if self.compares:
            compare_value(self, array, placement, "tensor")
        layout = NdSbp.broadcast(placement.ndim) if sbp is None else NdSbp.of(sbp)
        dtype = DType.parse(array.dtype)
        spec = self.spec(array.shape, dtype, placement, layout)
        if not spec.inside:
            return DistTensor(spec, spec.empty())
        if layout.has_partial:
            whole = self.spec(array.shape, dtype, placement, NdSbp.broadcast(placement.ndim))
            return DistTensor(spec, self.move(whole, spec)(spec.space.put(array)))
        return DistTensor(spec, spec.space.put(array[region_index(spec.region)]))

    def array_for(self, value: object, placement: Placement) -> Array:
        """What a user gives as numbers for a placement: an array of the host, or of the device."""
        if not hasattr(value, "__cuda_array_interface__"):
            try:
                array = np.asarray(value)
            except ValueError:
                raise ShapeError(
                    "lists of different lengths are no array",
                    source=user_line(),
                    got=type(value).__name__,
                    expected="lists of one length along each axis",
                ) from None
            # Parts travel as bytes, in this machine's order.
            native: Array = array.astype(array.dtype.newbyteorder("="), copy=False)
            return native
        if placement.device_type == "cpu":
            raise UsageError(
                "an array on a device cannot be taken for a placement on CPUs",
                source=user_line(),
                got=type(value).__name__,
                expected="an array of the host, or a placement on CUDA devices",
                hint="cupy.asnumpy(array) copies it to the host",
            )
        return self.spaces.device().adopt(value)

    def from_local(self, local: object, spec: TensorSpec) -> DistTensor:
        """A tensor of this rank's own part."""
        array = self.array_for(local, spec.placement)
        if spec.inside and array.shape != spec.local_shape:
            raise ShapeError(
                "a part has another shape than its rank holds",
                source=user_line(),
                rank=self.rank,
                got=array.shape,
                expected=f"{spec.local_shape}, this rank's part of {spec}",
                hint="parts of a split are balanced: the first ranks hold one element more; "
                "give the global shape where they differ",
            )
        if not spec.inside:
            return DistTensor(spec, spec.empty())
        return DistTensor(spec, spec.space.put(array))

    # --- what the frontend asks for -------------------------------------------------------------

    def add(
        self,
        kind: str,
        inputs: Sequence[DistTensor],
        attrs: Mapping[str, AttrValue],
        placement: Placement,
        sbp: NdSbp | None = None,
    ) -> tuple[DistTensor, ...]:
        """Run an op; `sbp` demands the layout of its outputs."""
        require_placement(placement)
        whole = sbp
        if sbp is not None and sbp.has_partial:
            whole = NdSbp(tuple(BROADCAST if isinstance(e, Partial) else e for e in sbp))
        plan = self.dispatcher.plan(
            kind, tuple(each.spec for each in inputs), attrs, placement, whole
        )
        if plan.random:
            self.draw_from(attrs)
        plan.context.seed = self.draw[0] if plan.random else self.generator.seed
        found = plan.call(inputs)
        return found if whole is sbp else tuple(each.redistribute(sbp=sbp) for each in found)

    def source(
        self, placement: Placement, kind: str, attrs: Mapping[str, AttrValue]
    ) -> tuple[DistTensor, ...]:
        """Outputs of an op without inputs."""
        return self.add(kind, (), attrs, placement)

    def number(self, value: float, placement: Placement) -> DistTensor:
        """A float32 number on all ranks of a placement, without an op."""
        spec = self.spec((), DType.FLOAT32, placement, NdSbp.broadcast(placement.ndim))
        if self.compares:
            compare(self, placement.rank_list, "a number", {"value": value})
        if not spec.inside:
            return DistTensor(spec, spec.empty())
        return DistTensor(spec, spec.space.full((), value, spec.numpy_dtype))

    def gradients(self, loss: DistTensor, wrt: Sequence[DistTensor]) -> list[DistTensor | None]:
        """d loss / d value for each value of `wrt`."""
        return backward([(loss, loss.seed(None))], list(wrt))

    def draw_from(self, attrs: Mapping[str, AttrValue]) -> None:
        """Name the numbers that the next random op reads."""
        seed, step = self.forced or (self.generator.seed, self.generator.step)
        key = attrs["key"]
        if not isinstance(key, int):
            raise UsageError("the key of a random op is a whole number", got=repr(key))
        self.draw = (seed, step, key)

    def next_number(self, purpose: str) -> int:
        """The key of the next random op."""
        return self.generator.next_number()

    def source_line(self) -> SourceLine:
        """The user's line that runs."""
        return user_line()

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Ops are not sorted by phase when they run at once."""
        return nullcontext()

    def region(self, name: str, checkpoint: bool) -> AbstractContextManager[None]:
        """Regions that may be computed again matter to the compiler only."""
        return nullcontext()

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Ops inside are not recorded."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before


# --- the current world ----------------------------------------------------------------------------

_CURRENT: ContextVar[World | None] = ContextVar("plancompiler_world", default=None)
_process: World | None = None
"""The world of a process whose ranks are processes."""


def current_world() -> World:
    """This thread's world, else this process's; without either, a world of one rank is made."""
    global _process
    found = _CURRENT.get() or _process
    if found is None:
        found = _process = World(0, 1)
    return found


def set_thread_world(world: World | None) -> None:
    """Make a world that of the running thread."""
    _CURRENT.set(world)


def set_process_world(world: World | None) -> None:
    """Make a world that of the process; None for none."""
    global _process
    _process = world


def process_world() -> World | None:
    """The process's world, if there is one."""
    return _process
