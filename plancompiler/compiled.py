"""`compile(function)`: eager code as a plan: traced once per kind of arguments, then run as a job.

Tensors that the function reads, given or not, are variables of the job: their parts are copied into
the plan's memory before a run and, where the function changes them, back after it. What it returns
comes back as tensors. Every rank makes the same job, and the plan of its own part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import update_wrapper
from types import CodeType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from plancompiler.compiled_run import CompiledRun, Draws
from plancompiler.eager import DistTensor, World, current_world
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tape import Leaf
from plancompiler.eager.tracing import Capture, Symbol, Tracing, without_partial
from plancompiler.errors import TracingError, UsageError
from plancompiler.frontend.nn.module import Module
from plancompiler.frontend.trace import JobBuilder
from plancompiler.ir import AttrValue, DType, Job, Value
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER

PROGRAMS = 64
"""Programs that a compiled function keeps per world; the oldest goes when there are more."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def compile(function: Callable[..., Any]) -> Compiled:  # noqa: A001  # the name users know
    """The same function of DistTensors, run as a compiled plan; also a decorator.

    On the first call with arguments of a kind the function is traced into a job, which is compiled:
    each rank makes its own plan and runs it with the others. Later calls look the plan up by shape,
    dtype, placement, SBP and `requires_grad` of tensors and the value of everything else among the
    arguments, by plain numbers, texts, tensors and modules that the function itself names from
    around it, and by whether ops are being recorded. What the function reads from other objects is
    looked at when it is traced. The result is what the function returns, with the same numbers up
    to rounding: partial values come back reduced.

    Tensors, parameters and optimizer states that the function changes in place are changed after
    every call, gradients that `backward` leaves are left in the same tensors, and random ops
    draw from the world's generator as they would eagerly. A result is not recorded on the tape:
    differentiate inside. TracingError where the function needs numbers while it is traced
    (`numpy()`, `item()`, `if tensor:`). All ranks of its placements call it together.
    """
    return Compiled(function)


class Compiled:
    """A compiled function; `compile` makes it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function):
            raise UsageError("only a function can be compiled", got=type(function).__name__)
        self.function = function
        update_wrapper(self, function, updated=())
        self._programs: WeakKeyDictionary[World, dict[object, list[_Program]]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._around = _named_around(function)
        finalize(self, _close_all, self._programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan for arguments of this kind, after making it if there is none."""
        world = current_world()
        if world.tracing is not None or ACTIVE_TRACER.get() is not None:
            return self.function(*args, **kwargs)  # as part of what is traced
        tensors: list[DistTensor] = []
        key = (
            _key(args, tensors),
            _key(kwargs, tensors),
            tuple([_surrounding(read()) for read in self._around]),
            world.recording,
            world.implicit_broadcast,
        )
        with self._lock:
            programs = self._programs.get(world)
            if programs is None:
                programs = self._programs[world] = {}
                world.closers.append(self.close)
        known = programs.setdefault(key, [])
        program = next((each for each in known if each.holds(tensors)), None)
        if program is None:
            program = _Program(world, self.function, args, kwargs, tensors)
            known.append(program)
            _limit(programs)
        try:
            return program.call(tensors)
        except BaseException:
            # After a failure a plan cannot go on.
            known.remove(program)
            program.close()
            raise

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method: the instance is the first argument."""
        return self if instance is None else MethodType(self, instance)

    def programs(self) -> list[Job]:
        """The jobs made so far in this world, oldest first; for looking at."""
        found = self._programs.get(current_world(), {})
        return [program.job for known in found.values() for program in known]

    def close(self) -> None:
        """Forget all programs of this world and free their memory; later calls compile anew."""
        world = current_world()
        with self._lock:
            found = self._programs.pop(world, {})
        if self.close in world.closers:
            world.closers.remove(self.close)
        for known in found.values():
            for program in known:
                program.close()


# --- arguments ------------------------------------------------------------------------------------


def _key(value: Any, tensors: list[DistTensor]) -> object:
    """What a program depends on; tensors are appended in order."""
    if isinstance(value, DistTensor):
        # One tensor given twice is one variable.
        place = next((at for at, each in enumerate(tensors) if each is value), len(tensors))
        tensors.append(value)
        return value.spec, value.requires_grad, value.is_leaf, place
    kind = value.__class__
    if kind in _PLAIN:
        return kind, _plain(value)
    if kind in (list, tuple):
        return kind, tuple([_key(each, tensors) for each in value])
    if kind is dict:
        return kind, tuple([(name, _key(each, tensors)) for name, each in value.items()])
    if isinstance(value, Module):
        return value, _modes(value)
    if isinstance(value, np.ndarray):
        raise UsageError(
            "an array cannot be given to a compiled function",
            source=user_line(),
            got=f"{value.dtype} of shape {value.shape}",
            hint="make it a tensor with pc.tensor(array, placement, sbp)",
        )
    try:
        hash(value)
    except TypeError:
        raise UsageError(
            "an argument of a compiled function can be neither compared nor looked into",
            source=user_line(),
            got=kind.__name__,
            expected="tensors, plain values, lists, tuples and dicts of them, or hashable objects",
        ) from None
    return kind, value


def _plain(value: Any) -> Any:
    """A plain value as a key: 0.0 and -0.0 are equal but not the same, and nan is not itself."""
    return value if value and value == value else repr(value)  # finds nan


def _modes(module: Module) -> tuple[bool, ...]:
    """Whether each module of a tree trains."""
    found = [module.training]
    for _, child in module.named_children():
        found += _modes(child)
    return tuple(found)


def _surrounding(value: Any) -> object:
    """What a program depends on of something around the function."""
    if isinstance(value, DistTensor):
        return id(value), value.spec, value.requires_grad
    if isinstance(value, Module):
        return id(value), _modes(value)
    kind = value.__class__
    return (kind, _plain(value)) if kind in _PLAIN else None


def _named_around(function: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Readers of the variables around a function that its own code names."""
    found: list[Callable[[], Any]] = []
    owner = getattr(function, "__self__", None)
    if owner is not None:
        found.append(lambda: owner)
    elif isinstance(function, Module):
        found.append(lambda: function)
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if not isinstance(code, CodeType):
        return found

    def cell_reader(cell: Any) -> Callable[[], Any]:
        def read() -> Any:
            try:
                return cell.cell_contents
            except ValueError:  # not set yet
                return None

        return read

    def name_reader(name: str) -> Callable[[], Any]:
        return lambda: plain.__globals__.get(name)

    found += [cell_reader(cell) for cell in plain.__closure__ or ()]
    found += [name_reader(name) for name in _names(code)]
    return found


def _names(code: CodeType) -> list[str]:
    """Global names in a function's code and in that of functions within it."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(dict.fromkeys(_names(constant)))
    return list(found)


# --- programs -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Made:
    """A tensor that a run makes."""

    name: str
    """Of the variable that holds it."""
    spec: TensorSpec


@dataclass(slots=True)
class _Given:
    """An argument, by its place."""

    place: int


@dataclass(slots=True)
class _Kept:
    """Anything else, as it was when the function was traced."""

    value: Any


@dataclass(slots=True)
class _LeafState:
    """A leaf whose gradient the function looks at or changes."""

    leaf: Leaf
    place: int
    """Which argument's it is, -1 for none."""
    before: TensorSpec | None
    """Spec of the gradient that the function finds."""
    read: bool
    """Whether the function depends on it."""
    after: _Made | _Given | _Kept | None
    """What it leaves there; None for what it leaves alone."""

    def now(self, tensors: Sequence[DistTensor]) -> Leaf:
        """The leaf in a call with these arguments."""
        found = self.leaf if self.place < 0 else tensors[self.place].node
        assert isinstance(found, Leaf)
        return found


@dataclass(slots=True)
class _Variable:
    """A variable of the job, and the tensor that it is."""

    capture: Capture
    place: int
    """Which argument it is, -1 for none."""
    leaf: _LeafState | None
    """Of which it is the gradient."""
    changed: bool

    def now(self, tensors: Sequence[DistTensor]) -> DistTensor:
        """The tensor in a call with these arguments."""
        if self.place >= 0:
            return tensors[self.place]
        if self.leaf is not None:
            found = self.leaf.now(tensors).grad
            assert found is not None
            return found
        return self.capture.tensor


@dataclass(slots=True)
class _Traced:
    """What tracing a function gave."""

    result: Any = None
    leaves: list[_LeafState] = field(default_factory=list)
    variables: list[_Variable] = field(default_factory=list)
    made: dict[str, _Made] = field(default_factory=dict)


class _Program:
    """A function traced for one kind of arguments, and the run of its plan."""

    def __init__(
        self,
        world: World,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[DistTensor],
    ) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        self._world = world
        self._builder = JobBuilder(name)
        self._tracing = Tracing(world, self._builder)
        self._traced = _Traced()
        with self._tracing.recording():
            result = function(*args, **kwargs)
            self._traced.result = self._resulting(result, tensors)
            self._note_leaves(tensors)
        self._note_variables(tensors)
        self._steps = list(self._tracing.steps)
        self._draws = self._tracing.draws
        # What parameters were found by: where it is gone, they are made anew.
        self._found_by = list(world.attachments.values())
        self.job = self._finished(name)
        self._run = CompiledRun(world, self.job) if self.job.ops else None

    def holds(self, tensors: Sequence[DistTensor]) -> bool:
        """Whether the state that it was traced in is still there."""
        found_by = self._world.attachments.values()
        if len(found_by) < len(self._found_by) or any(
            one is not other for one, other in zip(self._found_by, found_by, strict=False)
        ):
            return False
        for state in self._traced.leaves:
            if state.read:
                grad = state.now(tensors).grad
                if (None if grad is None else grad.spec) is not state.before:
                    return False
        return True

    def close(self) -> None:
        """Free the plan's memory and leave the other ranks."""
        if self._run is not None:
            self._run.close()

    # --- tracing --------------------------------------------------------------------------------

    def _resulting(self, value: Any, tensors: Sequence[DistTensor]) -> Any:
        """A result, with what stands for its tensors in their place."""
        if isinstance(value, DistTensor):
            return self._resulting_tensor(value, tensors)
        if isinstance(value, dict):
            return {name: self._resulting(each, tensors) for name, each in value.items()}
        if value.__class__ in (list, tuple):
            return type(value)(self._resulting(each, tensors) for each in value)
        return _Kept(value)

    def _resulting_tensor(
        self, tensor: DistTensor, tensors: Sequence[DistTensor]
    ) -> _Made | _Given | _Kept:
        symbol: Any = tensor.local
        if not isinstance(symbol, Symbol):
            place = _place(tensor, tensors)
            return _Given(place) if place >= 0 else _Kept(tensor)
        value = self._tracing.value(tensor)
        found = self._traced.made.get(value.name)
        if found is None:
            spec = tensor.spec
            whole = self._world.spec(*spec.type, spec.placement, without_partial(spec.sbp))
            name = f"result_{len(self._traced.made)}"
            found = self._traced.made[value.name] = _Made(name, whole)
            self._keep(name, value, whole)
        return found

    def _keep(self, name: str, value: Value, spec: TensorSpec) -> None:
        """Let a variable take a value that the run makes."""
        attrs: dict[str, AttrValue] = {
            "name": name,
            "shape": spec.shape,
            "dtype": str(spec.dtype),
            "init": "zeros",
            "init_args": (),
            "trainable": False,
        }
        add = self._builder.add
        (variable,) = add("variable", (), attrs, spec.placement, spec.sbp)
        self._assign(variable, value)

    def _assign(self, variable: Value, value: Value) -> None:
        for capture in self._tracing.captures:
            if value is capture.first:
                # What the variable held before: read it before anybody changes it.
                value = self._builder.redistribute(value, None, capture.spec.sbp)
        self._builder.add("assign", (variable, value), {}, variable.placement)

    def _note_leaves(self, tensors: Sequence[DistTensor]) -> None:
        """What the function does to gradients, while the leaves still hold it."""
        tracing = self._tracing
        for leaf, before in tuple(tracing.leaves.items()):
            after = tracing.grad_of(leaf)
            kept: _Made | _Given | _Kept | None = None
            if after is not before:
                kept = _Kept(None) if after is None else self._resulting_tensor(after, tensors)
            place = next((at for at, each in enumerate(tensors) if each.node is leaf), -1)
            spec = None if before is None else before.spec
            read = leaf in tracing.read
            self._traced.leaves.append(_LeafState(leaf, place, spec, read, kept))

    def _note_variables(self, tensors: Sequence[DistTensor]) -> None:
        """The tensors that were captured, and which of them the function changes."""
        for capture in self._tracing.captures:
            changed = capture.value is not capture.first
            if changed and not capture.updated:
                self._assign(capture.first, capture.value)
            leaf = next((one for one in self._traced.leaves if one.leaf is capture.leaf), None)
            place = _place(capture.tensor, tensors)
            self._traced.variables.append(_Variable(capture, place, leaf, changed))

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

    def call(self, tensors: Sequence[DistTensor]) -> Any:
        """Run the plan on these arguments."""
        world = self._world
        found = {
            variable.capture.name: variable.now(tensors) for variable in self._traced.variables
        }
        changed = [variable for variable in self._traced.variables if variable.changed]
        self._check_apart(found, {variable.capture.name for variable in changed})
        arrays: Mapping[str, Any] = {}
        if self._run is not None:
            inputs = {
                variable.capture.name: _whole(found[variable.capture.name], variable.capture.spec)
                for variable in self._traced.variables
            }
            generator = world.generator
            arrays = self._run.step(
                inputs,
                Draws(generator.seed, generator.step, generator.number, self._done(), world.step),
            )
        for variable in changed:
            name, spec = variable.capture.name, variable.capture.spec
            if name in arrays:
                tensor = found[name]
                array = arrays[name]
                if tensor.spec is not spec:
                    array = world.move(spec, tensor.spec)(array)
                np.copyto(tensor.local, array)
            found[name].written()
        world.generator.number += self._draws
        for steps in self._steps:
            world.step = steps.done
            steps.done += 1
        made = {
            each.name: DistTensor(
                each.spec,
                arrays[each.name].copy() if each.name in arrays else each.spec.empty(),
            )
            for each in self._traced.made.values()
        }
        for state in self._traced.leaves:
            if state.after is not None:
                state.now(tensors).grad = _built(state.after, tensors, made)
        return _built(self._traced.result, tensors, made)

    def _done(self) -> int:
        """Steps that the function's optimizers have made."""
        counts = {steps.done for steps in self._steps}
        if len(counts) > 1:
            raise UsageError(
                "optimizers that step in one compiled function have made different numbers of "
                "steps",
                source=user_line(),
                got=", ".join(map(str, sorted(counts))),
                hint="compile their steps in functions of their own",
            )
        return counts.pop() if counts else 0

    def _check_apart(self, found: Mapping[str, DistTensor], changed: set[str]) -> None:
        """Refuse tensors that share memory with one that the function changes."""
        if not changed:
            return
        owners: dict[int, str] = {}
        for name, tensor in found.items():
            owner = _owner(tensor.local)
            other = owners.setdefault(owner, name)
            if other != name and (name in changed or other in changed):
                raise TracingError(
                    "a compiled function changes a tensor whose memory it also reads as another "
                    "tensor",
                    source=user_line(),
                    got=f"{found[other].spec} and {tensor.spec}",
                    hint="use views inside of the function only, or copy one of the tensors",
                )


def _whole(tensor: DistTensor, spec: TensorSpec) -> Any:
    """This rank's part as the variable holds it: partial values are reduced, once."""
    if tensor.spec is spec:
        return tensor.local
    return tensor.moved(spec, spec.world.move(tensor.spec, spec))


def _owner(array: Any) -> int:
    """What tells apart arrays that own their memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return id(array)


def _place(tensor: DistTensor, tensors: Sequence[DistTensor]) -> int:
    return next((at for at, each in enumerate(tensors) if each is tensor), -1)


def _built(value: Any, tensors: Sequence[DistTensor], made: Mapping[str, DistTensor]) -> Any:
    """A result out of what stands for its tensors."""
    if isinstance(value, _Made):
        return made[value.name]
    if isinstance(value, _Given):
        return tensors[value.place]
    if isinstance(value, _Kept):
        return value.value
    if isinstance(value, dict):
        return {name: _built(each, tensors, made) for name, each in value.items()}
    return type(value)(_built(each, tensors, made) for each in value)


def _limit(programs: dict[object, list[_Program]]) -> None:
    """Let go of the oldest programs when there are too many; all ranks do it in the same call."""
    while sum(map(len, programs.values())) > PROGRAMS:
        key = next(iter(programs))
        for program in programs.pop(key):
            program.close()


def _close_all(programs: WeakKeyDictionary[World, dict[object, list[_Program]]]) -> None:
    for by_key in list(programs.values()):
        for known in by_key.values():
            for program in known:
                program.close()
