"""`World`: one rank's side of an SPMD program: its number, communicators, plans and random state.

Where ranks are processes, a process has one world; where they are threads, each thread has its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from plancompiler.eager import inplace
from plancompiler.eager.agreement import compare, compare_value
from plancompiler.eager.dispatch import RunMode
from plancompiler.eager.generator import Generator
from plancompiler.eager.spec import AttrMap, TensorSpec, WorldState
from plancompiler.eager.tape import backward, seed
from plancompiler.eager.tensor import DistTensor, Tensors
from plancompiler.errors import ShapeError, TracingError, UsageError
from plancompiler.executor.comm.manager import CommContextManager
from plancompiler.ir import DType, NdSbp, Phase, Placement, SourceLine
from plancompiler.ir.operators import SbpLike
from plancompiler.ir.placement import require_placement
from plancompiler.ir.shard import region_index
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array

if TYPE_CHECKING:
    from plancompiler.executor.cuda.interface import Device


class Closable(Protocol):
    """What takes memory, threads or connections until it is closed."""

    def close(self) -> None:
        """Give them back. May be called again."""


class World(WorldState[DistTensor]):
    """One rank's side of an SPMD program of `size` ranks."""

    def __init__(self, rank: int, size: int, comm: CommContextManager | None = None) -> None:
        super().__init__(rank, size, comm)
        self.mode: RunMode = RunMode(self)
        """How ops are carried out."""
        self.anomaly = False
        """Whether ops check what they make; see `anomaly`."""
        self.attachments: dict[object, object] = {}
        """State that the frontend keeps per world, by a key of its own."""
        self.closed_with: WeakKeyDictionary[Closable, None] = WeakKeyDictionary()
        """What is closed when the world closes, unless it is gone before."""
        self.dropped: deque[Callable[[], None]] = deque()
        """What closes parts that nobody refers to any more. The garbage collector notes them here,
        as it may run in any thread and at any time; `close_dropped` calls them."""
        self.parts: dict[object, TensorSpec] = {}
        """Specs of parts that `from_local` was given, by shape, dtype, placement and layout."""

    def use_device(self, device: Device | str) -> None:
        """Take this device (`cuda:1`) for placements on CUDA devices. Without it
        PLANCOMPILER_DEVICE counts, else the rank's place on its host. UsageError once one is used.
        """
        self.spaces.use(device)

    @property
    def closed(self) -> bool:
        """Whether the world is closed and has released its communicators."""
        return self._comm is not None and self._comm.closed

    def close(self) -> None:
        """Close the communicators, and end what runs on them."""
        self.close_dropped()
        for each in tuple(self.closed_with):
            each.close()
        if self._comm is not None:
            self._comm.close()
        else:
            self.spaces.close()

    def close_dropped(self) -> None:
        """Close what nobody refers to any more."""
        while self.dropped:
            self.dropped.popleft()()

    # --- tensors out of nothing -----------------------------------------------------------------

    def tensor(self, value: object, placement: Placement, sbp: SbpLike | None) -> DistTensor:
        """A tensor of a whole value that every rank has."""
        array = self.array_for(value, placement)
        if self.compares:
            compare_value(self, array, placement, "tensor")
        layout = NdSbp.broadcast(placement.ndim) if sbp is None else NdSbp.of(sbp)
        dtype = DType.parse(array.dtype)
        spec = self.spec(array.shape, dtype, placement, layout)
        if layout.has_partial and spec.inside:
            return DistTensor(spec, self.mode.move(self.whole(spec), spec)(spec.put(array)))
        return DistTensor(spec, spec.put(array[region_index(spec.region)]))

    def part(self, spec: TensorSpec, array: Array) -> DistTensor:
        """A tensor of which this rank holds an array; none on a rank outside."""
        return DistTensor(spec, spec.put(array))

    def array_for(self, value: object, placement: Placement) -> Array:
        """The user's numbers as an array for a placement, on the host or on its device."""
        if not hasattr(value, "__cuda_array_interface__"):
            try:
                array = np.asarray(value)
            except ValueError:
                raise ShapeError(
                    "lists of different lengths do not make an array",
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

    # --- what the frontend asks for -------------------------------------------------------------

    def add(
        self,
        kind: str,
        inputs: Tensors,
        attrs: AttrMap,
        placement: Placement,
        sbp: NdSbp | None = None,
    ) -> tuple[DistTensor, ...]:
        """Run an op; `sbp` demands the layout of its outputs."""
        require_placement(placement)
        whole = sbp
        if sbp is not None and sbp.has_partial:
            whole = sbp.reduced()
        plan = self.mode.plan(kind, tuple(each.spec for each in inputs), attrs, placement, whole)
        if plan.random:
            self.draw_from(attrs)
        plan.context.seed = self.draw[0] if plan.random else self.generator.seed
        outputs = plan.call(inputs)
        return outputs if whole is sbp else tuple(each.redistribute(sbp=sbp) for each in outputs)

    def source(self, placement: Placement, kind: str, attrs: AttrMap) -> tuple[DistTensor, ...]:
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

    def gradients(self, loss: DistTensor, wrt: Tensors) -> list[DistTensor | None]:
        """d loss / d value for each value of `wrt`."""
        return backward([(loss, seed(loss, None))], list(wrt))

    def backward(
        self, root: DistTensor, grad: DistTensor | None, retain_graph: bool, create_graph: bool
    ) -> None:
        """See `WorldState.backward`."""
        given = seed(root, grad)
        if grad is not None and not create_graph:
            # Leaves may keep its memory, and its owner may change that.
            given = self.mode.note(DistTensor(grad.spec, self.mode.own_local(grad)))
        backward([(root, given)], None, retain_graph, create_graph)

    change = staticmethod(inplace.change)
    reform = staticmethod(inplace.reform)
    copy = staticmethod(inplace.copy)
    assign = staticmethod(inplace.assign)
    into = staticmethod(inplace.into)

    def next_number(self, purpose: str) -> int:
        """The key of the next random op."""
        return self.mode.next_number()

    @contextmanager
    def drawing_from(self, generator: Generator) -> Iterator[Generator]:
        """Random ops inside draw from this generator."""
        if not isinstance(generator, Generator):
            raise UsageError(
                "random numbers come from a generator",
                source=user_line(),
                got=type(generator).__name__,
                expected="a pc.Generator",
            )
        if self.mode.traces and generator is not self.generator:
            raise TracingError(
                "a compiled function cannot choose another generator",
                source=user_line(),
                hint="use pc.manual_seed and pc.using_generator around the call",
            )
        before, self.generator = self.generator, generator
        try:
            yield generator
        finally:
            self.generator = before

    def source_line(self) -> SourceLine:
        """The user's line that runs."""
        return user_line()

    def phase(self, phase: Phase) -> AbstractContextManager[None]:
        """Ops are sorted by phase where they are recorded in a job."""
        return self.mode.phase(phase)

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
    world = _CURRENT.get() or _process
    if world is None:
        world = _process = World(0, 1)
    return world


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
