"""`compile(function)`: traces eager code once per kind of arguments, and runs it as a plan.

All tensors that the function reads, arguments or not, are variables of the job. The plan reads and
changes them in their own memory if it can (see `compiled_variables`). The results of the function
are returned as tensors. Every rank makes the same job, and the plan of its own part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial, update_wrapper
from types import CodeType, MethodType
from typing import Any, overload
from weakref import WeakKeyDictionary

import numpy as np

from plancompiler.boxing.fuse import FuseOptions
from plancompiler.boxing.streams import StreamOptions
from plancompiler.eager import DistTensor, World, current_world
from plancompiler.eager.agreement import compare
from plancompiler.eager.tensor import Tensors
from plancompiler.errors import UsageError
from plancompiler.frontend.nn.module import Module
from plancompiler.ir import Job
from plancompiler.ir.settings import Settings
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER
from plancompiler.jit.specialization import Specialization, is_row

PROGRAMS = 64
"""Programs that a compiled function keeps per world; the oldest goes when there are more."""


@dataclass(frozen=True, kw_only=True)
class _Settings(StreamOptions, FuseOptions):
    """The options that a compiled function takes."""


_ByKind = dict[object, list[Specialization]]
"""Specializations by what they depend on."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@overload
def compile(  # noqa: A001  # the name users know
    function: Callable[..., Any], *, config: Settings | None = None
) -> Compiled: ...


@overload
def compile(  # noqa: A001  # as above
    function: None = None, *, config: Settings | None = None
) -> Callable[[Callable[..., Any]], Compiled]: ...


def compile(  # noqa: A001  # as above
    function: Callable[..., Any] | None = None, *, config: Settings | None = None
) -> Compiled | Callable[[Callable[..., Any]], Compiled]:
    """The same function of DistTensors, run as a compiled plan; also a decorator, with or without
    `config`.

    The first call with arguments of a kind traces the function into a job and compiles it: each
    rank makes its own plan and runs it together with the others. Later calls look up the plan by
    the shape, dtype, placement, SBP and `requires_grad` of tensor arguments and the value of all
    other arguments; by the plain numbers, strings, tensors and modules that the function itself
    refers to from its enclosing scope; and by whether ops are being recorded. What the function
    reads from other objects is read only while it is traced. The results are those of the function,
    with the same numbers up to rounding, except that partial values are reduced.

    Every call changes the tensors, parameters and optimizer states that the function changes in
    place, and leaves the gradients of its `backward` in the same tensors. Random ops draw from the
    world's generator as they do eagerly. The tape records the results like those of one op, whose
    gradient is a plan that computes the results again; a function that changes tensors must
    differentiate inside. TracingError if the function needs numbers while it is traced (`numpy()`,
    `item()`, `if tensor:`). All ranks of its placements call it together.

    `config` says where its collectives run and which of them are one:
    `pc.Config(streams="compute", fuse_bytes=0)`. UsageError for other options, which are those of
    jobs: the function says itself what is computed, and in which layout.
    """
    settings = _checked(config)
    if function is None:
        return partial(Compiled, config=settings)
    return Compiled(function, settings)


def _checked(config: Settings | None) -> Settings | None:
    if config is None:
        return None
    if not isinstance(config, Settings):
        raise UsageError(
            "a compiled function's config must be a Config",
            source=user_line(),
            got=type(config).__name__,
            expected="pc.Config(...)",
        )
    usual, own = type(config)(), {each.name for each in fields(_Settings)}
    asked = [
        each.name
        for each in fields(config)
        if getattr(config, each.name) != getattr(usual, each.name)
    ]
    if not own.issuperset(asked):
        raise UsageError(
            "a compiled function takes no such option",
            source=user_line(),
            got=", ".join(each for each in asked if each not in own),
            expected=" and ".join(sorted(own)),
            hint="trace a job with this config: pc.job(name, config=config)",
        )
    return config


class Compiled:
    """A compiled function; `compile` makes it."""

    def __init__(self, function: Callable[..., Any], config: Settings | None = None) -> None:
        if not callable(function):
            raise UsageError("only a function can be compiled", got=type(function).__name__)
        self.function = function
        self._config = config
        update_wrapper(self, function, updated=())
        self._programs: WeakKeyDictionary[World, _ByKind] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._around = _named_around(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan for arguments of this kind, after making it if there is none."""
        world = current_world()
        if world.mode.traces or ACTIVE_TRACER.get() is not None:
            return self.function(*args, **kwargs)  # as part of what is traced
        tensors: list[DistTensor] = []
        key = (
            _key(args, tensors),
            _key(kwargs, tensors),
            tuple([_surrounding(read(), tensors) for read in self._around]),
            world.recording,
            world.implicit_broadcast,
            world.anomaly,
            world.mode if world.mode.records else None,
        )
        if world.compares and tensors:
            name = getattr(self.function, "__name__", type(self.function).__name__)
            said = {
                "arguments": _shown((args, kwargs)),
                "names around it": _shown([read() for read in self._around]),
                "recording": world.recording,
            }
            compare(world, tensors[0].placement.rank_list, name, said)
        with self._lock:
            programs = self._programs.get(world)
            if programs is None:
                programs = self._programs[world] = {}
                world.closed_with[self] = None
        known = programs.setdefault(key, [])
        for program in known:
            if program.holds(tensors):
                break
        else:
            program = Specialization(
                world, self.function, args, kwargs, tensors, config=self._config
            )
            known.append(program)
            _limit(programs)
        try:
            return program.call(tensors, args, kwargs)
        except BaseException:
            # After a failure a plan cannot go on.
            known.remove(program)
            program.close()
            raise

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method: the instance is the first argument."""
        return self if instance is None else MethodType(self, instance)

    def programs(self) -> list[Job]:
        """The jobs made so far in this world, oldest first; for inspection."""
        by_signature = self._programs.get(current_world(), {})
        return [program.job for known in by_signature.values() for program in known]

    def close(self) -> None:
        """Drop all programs of this world and free their memory; later calls compile again."""
        world = current_world()
        with self._lock:
            by_signature = self._programs.pop(world, {})
        world.closed_with.pop(self, None)
        for known in by_signature.values():
            for program in known:
                program.close()


# --- arguments ------------------------------------------------------------------------------------


def _key(value: Any, tensors: list[DistTensor]) -> object:
    """What a program depends on; tensors are appended in order."""
    if isinstance(value, DistTensor):
        place = _place(value, tensors)
        tensors.append(value)
        return value.spec, value.requires_grad, value.is_leaf, place
    kind = value.__class__
    if kind in _PLAIN:
        return kind, _plain(value)
    if is_row(value):
        return kind, tuple([_key(each, tensors) for each in value])
    if kind is dict:
        return kind, tuple([(name, _key(each, tensors)) for name, each in value.items()])
    if isinstance(value, Module):
        return value, _modes(value)
    if isinstance(value, np.ndarray):
        raise UsageError(
            "an array cannot be an argument of a compiled function",
            source=user_line(),
            got=f"{value.dtype} of shape {value.shape}",
            hint="make it a tensor with pc.tensor(array, placement, sbp)",
        )
    try:
        hash(value)
    except TypeError:
        raise UsageError(
            "an argument of a compiled function can neither be hashed nor taken apart",
            source=user_line(),
            got=kind.__name__,
            expected="tensors, plain values, lists, tuples and dicts of them, or hashable objects",
        ) from None
    return kind, value


def _shown(value: Any) -> str:
    """What a program depends on of a value, for ranks to compare."""
    if isinstance(value, DistTensor):
        return f"{value.spec}{' with a gradient' * value.requires_grad}"
    kind = value.__class__
    if is_row(value):
        return f"({', '.join([_shown(each) for each in value])})"
    if kind is dict:
        return f"({', '.join([f'{name}={_shown(each)}' for name, each in value.items()])})"
    return repr(value) if kind in _PLAIN else kind.__name__


def _place(value: DistTensor, tensors: Tensors) -> int:
    """The position of a tensor among these; a tensor that occurs twice is one variable."""
    local = value.local
    for at, each in enumerate(tensors):
        if each is value or each.local is local:
            return at
    return len(tensors)


def _plain(value: Any) -> Any:
    """A plain value as a key: 0.0 and -0.0 are equal but not the same, and nan is not itself."""
    return value if value and value == value else repr(value)  # finds nan


def _modes(module: Module) -> tuple[bool, ...]:
    """Whether each module of a tree trains."""
    modes = [module.training]
    for _, child in module.named_children():
        modes += _modes(child)
    return tuple(modes)


def _surrounding(value: Any, given: Tensors) -> object:
    """What a program depends on of a variable of the function's enclosing scope."""
    if isinstance(value, DistTensor):
        return id(value), value.spec, value.requires_grad, _place(value, given)
    if isinstance(value, Module):
        return id(value), _modes(value)
    kind = value.__class__
    return (kind, _plain(value)) if kind in _PLAIN else None


def _named_around(function: Callable[..., Any]) -> list[Callable[[], Any]]:
    """Readers of the variables around a function that its own code names."""
    readers: list[Callable[[], Any]] = []
    owner = getattr(function, "__self__", None)
    if owner is not None:
        readers.append(lambda: owner)
    elif isinstance(function, Module):
        readers.append(lambda: function)
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if not isinstance(code, CodeType):
        return readers

    def cell_reader(cell: Any) -> Callable[[], Any]:
        def read() -> Any:
            try:
                return cell.cell_contents
            except ValueError:  # not set yet
                return None

        return read

    def name_reader(name: str) -> Callable[[], Any]:
        return lambda: plain.__globals__.get(name)

    readers += [cell_reader(cell) for cell in plain.__closure__ or ()]
    readers += [name_reader(name) for name in _names(code)]
    return readers


def _names(code: CodeType) -> list[str]:
    """Global names in a function's code and in that of functions within it."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_names(constant)))
    return list(names)


def _limit(programs: _ByKind) -> None:
    """Drop the oldest programs when there are too many; all ranks do it in the same call."""
    while sum(map(len, programs.values())) > PROGRAMS:
        key = next(iter(programs))
        for program in programs.pop(key):
            program.close()
