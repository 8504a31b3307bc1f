"""`Module`, `Parameter` and `Buffer`: a tree of layers whose parameters become variables of a job.

Modules are plain objects and belong to no job. When a parameter's `value` is first read while a
job is traced, it becomes a `variable` op of that job, named by its path from the root of its tree
(`blocks.0.mlp.fc1.weight`), and every later read gives the same value. Outside of jobs it becomes
an eager tensor with the same initial value in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, Self, SupportsIndex, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np

from plancompiler.errors import PlacementError, PlanCompilerError, ShapeError, UsageError
from plancompiler.frontend.stored import Array, Stored, kept_array
from plancompiler.frontend.trace import (
    JobBuilder,
    current_builder,
    current_recorder,
    source_tensor,
)
from plancompiler.hooks.eager_world import eager_world
from plancompiler.hooks.other_names import no_such_name
from plancompiler.ir import AttrValue, DType, NdSbp, Placement, Value
from plancompiler.ir.operators import SbpLike, TensorOperators
from plancompiler.ir.source import user_line
from plancompiler.ir.value import ACTIVE_TRACER

Initial = str | Array | Stored
"""The name of an initialiser, or the initial value."""


class Parameter:
    """A tensor that training changes.

    `shape` is global. `init` names an initialiser and `init_args` its numbers (`"normal"`, (mean,
    standard deviation); `"uniform"`, (low, high); `"constant"`, (value,); `"zeros"`; `"ones"`). It
    may also be the initial value itself: an array of this shape, or `pc.data.Stored(path, key)` for
    one in a safetensors file. A parameter that is `"missing"` gets its value from a checkpoint. The
    `name` is used where no module owns the parameter. A parameter with `trainable` False is left
    alone by optimizers.

    An eager tensor, or an array of floating numbers, in place of the shape is the initial value. A
    tensor is read for that, which is a collective, and says where the parameter lives.
    """

    def __init__(
        self,
        shape: Sequence[int] | Array | TensorOperators,
        dtype: DType | str = "float32",
        init: Initial = "zeros",
        init_args: Sequence[float] = (),
        trainable: bool = True,
        name: str = "parameter",
    ) -> None:
        lives = None
        if isinstance(shape, Value):
            raise UsageError(
                "a value of a job is no initial value of a parameter",
                source=user_line(),
                got=f"%{shape.name}",
                hint="give the parameter a shape, and an array as init=",
            )
        given: Any = shape
        if isinstance(shape, TensorOperators):
            dtype, init, lives = given.dtype, given.detach().numpy(), given.placement
            given = given.shape
        elif isinstance(shape, np.ndarray) and shape.dtype.kind == "f":
            dtype, init, given = DType.parse(shape.dtype), shape, shape.shape
        self.shape: tuple[int, ...] = tuple(given)
        if not all(
            isinstance(extent, SupportsIndex) and index(extent) >= 0 for extent in self.shape
        ):
            raise ShapeError(
                "a parameter cannot have this shape",
                source=user_line(),
                got=self.shape,
                expected="whole numbers of at least 0",
            )
        self.dtype = DType.parse(dtype)
        self.init = init if isinstance(init, str) else "stored"
        self._stored = None if isinstance(init, str) else self._checked(init)
        self.init_args = tuple(float(argument) for argument in init_args)
        self.trainable = trainable
        self.file_shape: tuple[int, ...] = ()
        """The shape in files of weights, where it is another; see `hold_as`."""
        self.name = name
        self.placement: Placement | None = None
        self.sbp: NdSbp | None = None
        self._demanded: NdSbp | None = None
        self._owner: Module | None = None
        self._eager: tuple[_Names, Any] | None = None
        if lives is not None:
            self.place(lives)

    def place(self, placement: Placement, sbp: SbpLike | None = None) -> Self:
        """Live on `placement` with this SBP (default: broadcast)."""
        demanded = NdSbp.broadcast(placement.ndim) if sbp is None else NdSbp.of(sbp)
        self.sbp = demanded.check(placement.ndim, len(self.shape))
        self._demanded = None if sbp is None else self.sbp
        self.placement = placement
        return self

    @property
    def value(self) -> Value:
        """The parameter in the job that is being traced; outside of jobs an eager tensor."""
        recorder = current_recorder()
        names = _names(recorder)
        latest = self._eager
        if latest is not None and latest[0] is names:
            tensor = latest[1]
        else:
            tensor = names.values.get(self)
        if tensor is None:
            name = names.name_of(self)
            placement = self.placement or names.input_placement
            if placement is None:
                raise PlacementError(
                    f"parameter {name!r} has no placement",
                    source=recorder.source_line(),
                    hint="call .place(...) on its module, or use it inside a module that is given "
                    "a value as its input",
                )
            attrs: dict[str, AttrValue] = {
                "name": name,
                "shape": self.shape,
                "dtype": str(self.dtype),
                "init": self.init,
                "init_args": self.init_args,
                "trainable": self.trainable,
            }
            if self._stored is not None:
                if not isinstance(self._stored, Stored):
                    whole = self._stored.reshape(self.file_shape or self.shape)
                    self._stored = kept_array(whole)
                attrs |= {"file": self._stored.file, "key": self._stored.key}
            if self.file_shape:
                attrs["file_shape"] = self.file_shape
            tensor = names.values[self] = source_tensor(
                "variable", attrs, placement, self._demanded
            )
        # Outside of jobs it is a DistTensor, of a package that this one does not import.
        if names.eager:
            if latest is None or latest[0] is not names:
                self._eager = names, tensor  # reached sooner than by a weak key
            if tensor.requires_grad is not self.trainable:
                tensor.requires_grad = self.trainable
        value: Value = tensor
        return value

    def hold_as(self, shape: Sequence[int]) -> None:
        """Have this shape from now on, of as many elements in the same order, and keep the present
        one in files of weights.
        """
        self.file_shape = self.file_shape or self.shape
        self.shape = tuple(shape)

    def start_from(self, stored: Stored) -> None:
        """Take the value of a tensor in a file: from now on a job starts with it, and the eager
        tensor has it. UsageError in a job that has read the parameter already.
        """
        names = _names(current_recorder()) if self._is_read() else None
        tensor = names.values.get(self) if names is not None else None
        if names is not None and tensor is not None and not names.eager:
            raise UsageError(
                f"the job has read parameter {names.name_of(self)!r} with its former initial value",
                source=user_line(),
                hint="load weights before the job is traced",
            )
        self.init, self.init_args, self._stored = "stored", (), stored
        if names is not None and tensor is not None:
            self._eager = None
            del names.values[self]
            loaded: Any = self.value
            names.values[self], self._eager = tensor, (names, tensor)
            eager: Any = tensor  # outside of jobs it is a DistTensor
            with eager_world().no_grad():
                eager.copy_(loaded)

    def _is_read(self) -> bool:
        """Whether it may have a value already: it has an eager one, or a job is traced."""
        return self._eager is not None or ACTIVE_TRACER.get() is not None

    def _checked(self, init: Array | Stored) -> Array | Stored:
        """An initial value, which must have the parameter's shape."""
        if isinstance(init, Stored):
            return init
        array = np.asarray(init)
        if array.shape != self.shape:
            raise ShapeError(
                "the initial value of a parameter has another shape than the parameter",
                source=user_line(),
                got=array.shape,
                expected=self.shape,
            )
        return array.astype(self.dtype.numpy, copy=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same, with a tensor of its own where it has an eager one: `copy.deepcopy(module)`."""
        duplicate = copy(self)
        memo[id(self)] = duplicate
        own = vars(duplicate)
        own["_owner"] = deepcopy(self._owner, memo)
        if self._eager is not None:
            names, tensor = self._eager
            kept = names.values[duplicate] = deepcopy(tensor, memo)
            own["_eager"] = names, kept
        return duplicate

    def owned_by(self, module: Module) -> None:
        """Take a module as the owner, unless there is one: the first gives the name."""
        if self._owner is None:
            self._owner = module

    @property
    def initial(self) -> Array | Stored | None:
        """The initial value that the parameter was given: an array, or its place in a file."""
        return self._stored

    @property
    def root(self) -> Module | None:
        """The root of the tree that owns the parameter."""
        return None if self._owner is None else self._owner.root

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such_name("parameter", name)

    def _no_operand(self, *others: object, **options: object) -> Any:
        raise UsageError(
            "a parameter describes a tensor, and is none itself",
            source=user_line(),
            got=repr(self),
            hint="compute with its tensor: p.value",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operand
    __truediv__ = __rtruediv__ = __pow__ = __matmul__ = __rmatmul__ = _no_operand
    __neg__ = __getitem__ = __setitem__ = __float__ = __array__ = _no_operand

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({self.shape}, {str(self.dtype)!r}, {self.init!r}, {self.init_args})"


class Buffer(Parameter):
    """A tensor that its module changes itself, such as a running mean, and no optimizer. Files of
    weights need not have one that is not `saved`, such as a cache.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DType | str = "float32",
        init: Initial = "zeros",
        init_args: Sequence[float] = (),
        name: str = "buffer",
        saved: bool = True,
    ) -> None:
        super().__init__(shape, dtype, init, init_args, trainable=False, name=name)
        self.saved = saved


Place = tuple[Placement, NdSbp]
"""Where a parameter lives, and how it is split there."""


@runtime_checkable
class Layout(Protocol):
    """A layout of a whole module; `pc.layouts` makes them."""

    def places(self, module: Module, mesh: Placement) -> Mapping[str, Place]:
        """Where parameters live, by name; the others live on all of the mesh, as a whole."""


class Module:
    """Base of all layers. Subclasses set parameters and modules as attributes and define `forward`:

    class Scale(nn.Module):
        def __init__(self, dim):
            self.weight = nn.Parameter((dim,), init="ones")

        def forward(self, x):
            return x * self.weight.value
    """

    training: bool = True
    """Whether dropout is active and batches are normalised by their own statistics; see `train`."""
    parent: Module | None = None
    """The module that this one was first made an attribute of."""
    recomputable: bool = False
    """Whether `recompute="auto"` may compute a call of the module again for its gradients: its
    inputs are much smaller than all that it makes."""
    checkpointed: bool = False
    """Whether every call is computed again; see `pc.checkpoint`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's function; subclasses define it."""
        raise UsageError(f"module {type(self).__name__} defines no forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`forward`, with parameters that are not placed living where the first input lives."""
        given = args[0] if args else None
        if not isinstance(given, TensorOperators):
            every = (
                inner
                for each in (*args, *kwargs.values())
                for inner in (each if isinstance(each, tuple) else (each,))
            )
            given = next((each for each in every if isinstance(each, TensorOperators)), None)
            if given is None:
                return self.forward(*args, **kwargs)
        recorder = current_builder() if isinstance(given, Value) else current_recorder()
        names = _names(recorder)
        placement: Placement = given.placement  # type: ignore[attr-defined]  # all tensors have one
        if names.eager:
            names.placements.append(placement)
            try:
                return self.forward(*args, **kwargs)
            except PlanCompilerError as error:
                error.at(source=user_line())
                raise
            finally:
                names.placements.pop()
        with ExitStack() as around:
            around.enter_context(names.inputs_on(placement))
            if self.checkpointed or self.recomputable:
                around.enter_context(recorder.region(self.path, self.checkpointed))
            return self.forward(*args, **kwargs)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_such_name(f"a {type(self).__name__}", name)

    def __setattr__(self, name: str, value: object) -> None:
        if name != "parent":
            self._adopt(value)
        object.__setattr__(self, name, value)

    def _adopt(self, child: object) -> None:
        """Become the parent of a module or the owner of a parameter that has none yet."""
        if isinstance(child, Parameter):
            child.owned_by(self)
        elif isinstance(child, Module) and child.parent is None and child is not self:
            child.parent = self

    @property
    def root(self) -> Module:
        """The topmost module above this one."""
        module = self
        while module.parent is not None:
            module = module.parent
        return module

    @property
    def path(self) -> str:
        """Dotted name in its tree, such as `blocks.0`; of a root, its class."""
        parent = self.parent
        if parent is None:
            return _snake_case(type(self).__name__)
        name = next((name for name, child in parent.named_children() if child is self), "module")
        return name if parent.parent is None else f"{parent.path}.{name}"

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Direct child modules in attribute order."""
        for name, value in vars(self).items():
            if isinstance(value, Module) and name != "parent":
                yield name, value

    def named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """All parameters with their dotted names: own ones first, then those of children, each
        once; without `remove_duplicate`, a parameter that is tied under all its names.
        """
        seen: set[Parameter] = set()
        for name, parameter in _all_names(self, prefix):
            if not remove_duplicate or parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def children(self) -> list[Module]:
        """Direct child modules in attribute order."""
        return [child for _, child in self.named_children()]

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below with their dotted names, each once; its own is `prefix`."""
        seen: set[Module] = set()
        below: list[tuple[str, Module]] = [(prefix, self)]
        while below:
            name, module = below.pop()
            if module in seen:
                continue
            seen.add(module)
            yield name, module
            inner = [
                (f"{name}.{own}" if name else own, each) for own, each in module.named_children()
            ]
            below += reversed(inner)

    def modules(self) -> list[Module]:
        """This module and all below, each once."""
        return [module for _, module in self.named_modules()]

    def apply(self, function: Callable[[Module], object]) -> Self:
        """Call `function` with all modules below, inner ones first, and with this one."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def parameters(self) -> list[Parameter]:
        """All parameters, in the order of their names' definition."""
        return [parameter for _, parameter in self.named_parameters()]

    def place(
        self, placement: Placement, sbp: Mapping[str, SbpLike] | Layout | None = None
    ) -> Self:
        """Put all parameters on `placement`, with an SBP per dotted name (default: broadcast).

        In a name, `*` stands for any text: `{"*.query.weight": ["B", "S(0)"]}`. The first that
        matches a parameter counts; one that is tied may be meant by any of its names. Instead of
        names, `sbp` may be a layout that `pc.layouts` makes. Raises
        UsageError for a name that no parameter has, SbpLengthError or SbpAxisError for an SBP that
        does not fit the mesh or the parameter.
        """
        names: dict[Parameter, list[str]] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        if isinstance(sbp, Layout):
            places = sbp.places(self, placement)
            for parameter, several in names.items():
                where = (places[name] for name in several if name in places)
                parameter.place(*next(where, (placement, None)))
            return self
        every = "\n".join(name for several in names.values() for name in several)
        patterns = {given: name_pattern(given) for given in sbp or {}}
        unknown = [name for name, pattern in patterns.items() if not pattern.search(every)]
        if unknown:
            raise UsageError(
                f"module {type(self).__name__} has no parameter of this name",
                source=user_line(),
                got=", ".join(map(repr, unknown)),
                expected="one of " + every.replace("\n", ", "),
            )
        for parameter, (name, *others) in names.items():
            called = "\n".join((name, *others))
            chosen = (given for given, pattern in patterns.items() if pattern.search(called))
            try:
                parameter.place(placement, (sbp or {}).get(next(chosen, "")))
            except PlanCompilerError as error:
                raise error.at(op=name, source=user_line()) from None
        return self

    def train(self, training: bool = True) -> Self:
        """Training mode (or not) for this module and all below: dropout is active, and batches are
        normalised by their own statistics.
        """
        self.training = training
        for _, child in self.named_children():
            child.train(training)
        return self

    def eval(self) -> Self:
        """Not training mode: dropout does nothing, batches are normalised by running statistics."""
        return self.train(False)

    def freeze(self, frozen: bool = True) -> Self:
        """Let optimizers leave all parameters of this module alone (or not)."""
        for parameter in self.parameters():
            if not isinstance(parameter, Buffer):
                parameter.trainable = not frozen
        return self

    def state_dict(self) -> dict[str, Any]:
        """All parameters and buffers as eager tensors, by dotted name; they are not copied. One
        that is tied comes under all its names.
        """
        named = self.named_parameters(remove_duplicate=False)
        return {name: parameter.value for name, parameter in named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the eager parameters take the values of these tensors, which may lie in any layout.

        Raises UsageError for names that are missing or unknown, and for other shapes or dtypes.
        """
        check_state(state)
        names = dict(self.named_parameters(remove_duplicate=False))
        given = {names[name] for name in state if name in names}
        # One of the names of a parameter that is tied is enough.
        own = {
            name: parameter.value
            for name, parameter in names.items()
            if name in state or parameter not in given
        }
        unlike = sorted(own.keys() ^ state.keys())
        if unlike:
            raise UsageError(
                f"the state of another module was given to {type(self).__name__}",
                source=user_line(),
                got=_with_types(unlike, state) or "none besides its own",
                expected="besides those that were given: " + (_with_types(unlike, own) or "none"),
            )
        for name, tensor in own.items():  # all, before any changes
            check_fits(name, tensor, state)
        for name, tensor in own.items():
            load_value(name, tensor, state)

    def __repr__(self) -> str:
        children = "".join(
            f"\n  {name}: " + repr(child).replace("\n", "\n  ")
            for name, child in self.named_children()
        )
        return f"{type(self).__name__}({children}\n)" if children else f"{type(self).__name__}()"


@dataclass
class _Names:
    """What modules remember about one job: the names and values of parameters."""

    values: MutableMapping[Parameter, Value] = field(default_factory=dict)
    names: MutableMapping[Parameter, str] = field(default_factory=dict)
    prefixes: MutableMapping[Module, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    placements: list[Placement] = field(default_factory=list)
    eager: bool = False
    """Whether they are those of tensors that live as long as their parameters do."""
    told_apart: bool = False
    """Whether a name had to be numbered, as another parameter has it."""

    @property
    def input_placement(self) -> Placement | None:
        """Where the input of the innermost running module lives."""
        return self.placements[-1] if self.placements else None

    @contextmanager
    def inputs_on(self, placement: Placement) -> Iterator[None]:
        """While a module runs on an input that lives there."""
        self.placements.append(placement)
        try:
            yield
        finally:
            self.placements.pop()

    def name_of(self, parameter: Parameter) -> str:
        """The parameter's name in this job, given to its whole tree at once."""
        if parameter not in self.names:
            root = parameter.root
            if root is None:
                self._give(parameter, self._free(parameter.name))
            else:
                self._name_tree(root)
        return self.names[parameter]

    def _name_tree(self, root: Module) -> None:
        new = [
            (name, parameter)
            for name, parameter in root.named_parameters()
            if parameter not in self.names
        ]
        prefix = self.prefixes.get(root, "")
        number = 0
        while any(prefix + name in self.taken for name, _ in new):
            number += 1
            self.told_apart = True
            prefix = f"{_snake_case(type(root).__name__)}_{number}."
        self.prefixes[root] = prefix
        for name, parameter in new:
            self._give(parameter, prefix + name)

    def _free(self, name: str) -> str:
        free, number = name, 0
        while free in self.taken:
            number += 1
            self.told_apart = True
            free = f"{name}_{number}"
        return free

    def _give(self, parameter: Parameter, name: str) -> None:
        self.names[parameter] = name
        self.taken.add(name)


def _names(recorder: Any) -> _Names:
    names = recorder.attachments.get(_Names)
    if names is None:
        names = _Names()
        if not isinstance(recorder, JobBuilder):
            weak = WeakKeyDictionary[Any, Any]
            names = _Names(weak(), weak(), weak(), eager=True)
        recorder.attachments[_Names] = names
    assert isinstance(names, _Names)
    return names


def eager_parameters(world: Any) -> list[Any]:
    """The eager tensors of all trainable parameters that were read outside of jobs so far."""
    return [value for parameter, value in _names(world).values.items() if parameter.trainable]


def parameters_read(recorder: Any) -> list[Parameter]:
    """The trainable parameters that a job, or an eager world, has read so far."""
    return [parameter for parameter in _names(recorder).values if parameter.trainable]


def parameters_of(world: Any, tensors: Sequence[Any]) -> list[Parameter | None]:
    """The parameters whose eager tensors these are; None for other tensors."""
    by_tensor = {id(value): parameter for parameter, value in _names(world).values.items()}
    return [by_tensor.get(id(tensor)) for tensor in tensors]


def names_of(parameters: Sequence[Parameter | None]) -> tuple[list[str], bool]:
    """Names by the structure of the parameters' modules alone, whatever else there is; and whether
    modules had to be told apart by the order in which they are given. None is a tensor of no
    parameter.
    """
    names, others, by_structure = _Names(), 0, []
    for parameter in parameters:
        if parameter is None:
            by_structure.append(f"tensor_{others}")
            others += 1
        else:
            by_structure.append(names.name_of(parameter))
    return by_structure, others > 1 or names.told_apart


def check_state(state: object) -> None:
    """Refuse what is no dict of names."""
    if not isinstance(state, Mapping) or not all(isinstance(each, str) for each in state):
        raise UsageError(
            "a state is a dict of tensors and numbers by name",
            op="load_state_dict",
            source=user_line(),
            got=type(state).__name__,
            expected="what state_dict() gave",
        )


def type_text(value: Any) -> str:
    """Dtype and shape of a tensor, such as `float32[3, 4]`; of a number itself."""
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "shape") else repr(value)


def _with_types(names: Sequence[str], state: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {type_text(state[name])}" for name in names if name in state)


def check_fits(name: str, tensor: Any, state: Mapping[str, Any]) -> None:
    """Refuse a state whose value of this name a tensor cannot take."""
    value = state.get(name)
    if value is not None and not hasattr(value, "redistribute"):
        raise UsageError(
            f"a state does not fit {name!r}",
            source=user_line(),
            got=type(value).__name__,
            expected=f"a tensor {type_text(tensor)}",
        )
    if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise UsageError(
            f"a state does not fit {name!r}",
            source=user_line(),
            got="nothing" if value is None else type_text(value),
            expected=type_text(tensor),
        )


def load_value(name: str, tensor: Any, state: Mapping[str, Any]) -> None:
    """Let an eager tensor take the value of the same name, which may lie in any layout."""
    check_fits(name, tensor, state)
    value = state[name]
    with eager_world().no_grad():
        tensor.copy_(value.redistribute(tensor.placement, tensor.sbp))


def _all_names(module: Module, prefix: str) -> Iterator[tuple[str, Parameter]]:
    for name, value in vars(module).items():
        if isinstance(value, Parameter):
            yield prefix + name, value
    for child_name, child in module.named_children():
        yield from _all_names(child, f"{prefix}{child_name}.")


def name_pattern(name: str) -> re.Pattern[str]:
    """What matches a name with `*` for any text, in a text with a name in each line."""
    return re.compile(f"^{re.escape(name).replace(re.escape('*'), '.*')}$", re.MULTILINE)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
