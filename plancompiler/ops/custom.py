"""Custom ops: a user's function on NumPy arrays as an op like any other.

    @pc.op(rule="... k, k n -> ... n", linear=((0,), (1,)))
    def project(x, w, *, scale=1.0):
        return scale * (x @ w)

The rule line says how the op splits (see `plancompiler.ops.rule`) and, as the outputs have the
extents of its factors, which shapes it makes. On each device the function sees the local parts.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from plancompiler.errors import (
    AttributeValueError,
    CustomOpError,
    ExecutionError,
    GradientError,
    PlanCompilerError,
    ShapeError,
    TracingError,
)
from plancompiler.ir.dtype import DType
from plancompiler.ir.op import AttrValue, SourceLine, TensorType
from plancompiler.ir.operators import TensorOperators, filled
from plancompiler.ir.sbp import Reduction
from plancompiler.ir.source import shown_path
from plancompiler.ops.attributes import Attribute, Ints, Like
from plancompiler.ops.check import broadcast_shapes, describe
from plancompiler.ops.registry import (
    Arrays,
    AttrMap,
    KernelContext,
    OpDef,
    Rule,
    Tensors,
    Types,
    apply,
    custom_ops,
    is_import_path,
    register_custom,
)
from plancompiler.ops.rule import expand_rule, parse_rule_line

Function = Callable[..., Any]
Linear = int | Sequence[int | Sequence[int]]
_PLAIN = (bool, int, float, str)
_NONE = inspect.Parameter.empty
_CONTEXT = "context"
"""A keyword-only parameter of this name is given the `KernelContext`."""
_ABSENT = "absent"
"""The attribute of ops with optional inputs that has the places of those that are left out."""


class CustomOp:
    """What `pc.op` makes of a function: called with tensors it records the op, with arrays it
    computes.
    """

    def __init__(self, function: Function, definition: OpDef, signature: _Parameters) -> None:
        self.function = function
        self.kind = definition.kind
        self._signature = signature
        self._definition = register_custom(definition)
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", definition.kind)

    @property
    def definition(self) -> OpDef:
        """The op's entry beside the op table."""
        return self._definition

    def __call__(self, *inputs: Any, **attrs: Any) -> Any:
        """The op's output, or a tuple where it has several. Attributes are keyword arguments. An
        array whose default is None may be None, or left out.
        """
        inputs, attrs = self._signature.arranged(inputs, attrs)
        complete = {**self._signature.defaults, **attrs}
        given = [each for each in inputs if each is not None]
        tensors = [isinstance(each, TensorOperators) for each in given]
        if not any(tensors):
            if given and all(isinstance(each, np.ndarray) for each in given):
                return self.function(*inputs, **attrs)
            raise TracingError(
                f"{self.kind} takes tensors of a job, or arrays",
                op=self.kind,
                got=", ".join(type(each).__name__ for each in inputs) or "nothing",
            )
        if not all(tensors):
            raise TracingError(
                f"{self.kind} takes tensors only; attributes are keyword arguments",
                op=self.kind,
                got=", ".join(type(each).__name__ for each in inputs),
                hint="bring arrays into a job through pc.input or pc.constant",
            )
        absent = tuple(at for at, each in enumerate(inputs) if each is None)
        if absent:
            required = [at for at in absent if at not in self._signature.optional.values()]
            if required:
                raise TracingError(
                    f"{self.kind} needs a tensor here",
                    op=self.kind,
                    got=f"None as input {required[0]}",
                    hint="an array of the function whose default is None may be None",
                )
            complete[_ABSENT] = absent
        return apply(self.kind, *given, **complete)

    def gradient(self, function: Function) -> Function:
        """Decorator: `function(inputs, outputs, grads, **attrs)` gives a gradient per input, or
        None where there is none. It is written with tensors and ops, custom ones included.
        """
        self._definition = register_custom(
            replace(self._definition, gradient=_gradient_of(self.kind, function))
        )
        return function

    def __repr__(self) -> str:
        return f"<op {self.kind!r}>"


def op(
    rule: str,
    *,
    linear: Linear = (),
    reduction: str | None = "sum",
    gradient: Function | None = None,
    infer: Function | None = None,
    dtype: DType | str | Sequence[DType | str] | None = None,
    flops: Callable[[Types, Types, AttrMap], int] | None = None,
    kind: str | None = None,
) -> Callable[[Function], CustomOp]:
    """Make an op of a function on NumPy arrays.

    The function takes one array per input of the rule and attributes (plain data, as keyword
    arguments) and returns an array per output. It is called with the local parts on each device,
    must not write to its inputs, and must return exactly the local shapes and dtypes that the rule
    implies. Arrays whose default is None are optional: the function is given None where the caller
    has left one out, and so are `infer` and the gradient.

    rule: one line in the notation of `plancompiler.ops.rule`. An axis that the function needs whole
        is written `[k]`; a factor that no output has is summed away, as in a product.
    linear: inputs in which the op is linear: `0`, `(0, 1)` for each of them alone, or `((0, 1),)`
        for both together.
    reduction: how parts combine where a factor that is summed away is split: sum, max, min, prod;
        None forbids such splits.
    gradient: as for the `gradient` decorator of the result.
    infer: `infer(*types, **attrs)` gives the `TensorType` of each output, where extents or dtypes
        do not follow from the rule.
    dtype: of the outputs; by default that of the first floating input.
    flops: operations of a call; by default one per output element.
    kind: the import path `module:function` under which workers find the op; by default that of the
        function.

    Raises AttributeValueError, with the line of the function, for a rule that does not parse, names
    an axis in an output that no input has, or has another number of inputs than the function.
    """

    def decorate(function: Function) -> CustomOp:
        name = _kind_of(function, kind)
        try:
            _check_text(name, rule)
            parameters = _Parameters(name, rule, function)
            outputs = _check_rule(name, rule, parameters.optional, free=infer is not None)
            definition = OpDef(
                name,
                infer=_Infer(name, rule, infer, _dtypes(name, dtype, outputs)),
                rule=_rule_of_given(rule) if parameters.optional else rule,
                kernel=_Kernel(name, function, parameters),
                attrs=tuple(parameters.attributes),
                inputs=parameters.counts,
                portable=False,
                gradient=None if gradient is None else _gradient_of(name, gradient),
                linear=_linear(name, linear, parameters.count),
                linear_if=(lambda inputs, attrs: not attrs[_ABSENT])
                if parameters.optional
                else None,
                reduction=_reduction(name, reduction),
                flops=None if flops is None else partial(_flops, name, flops),
                doc=inspect.getdoc(function) or "A custom op.",
            )
            return CustomOp(function, definition, parameters)
        except PlanCompilerError as error:
            raise error.at(op=name, source=_line_of(function)) from None

    return decorate


def _called(name: str, part: str, function: Function, *args: Any, **named: Any) -> Any:
    """What a function of the user gives. CustomOpError, with its cause, for what it raises; who
    calls knows the rank and the line of the op.
    """
    try:
        return function(*args, **named)
    except PlanCompilerError:
        raise  # of our own functions, which say what is wrong
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            inner = trace.tb_next
            if not shown_path(inner.tb_frame.f_code.co_filename):
                break
            trace = inner
        at = ""
        if trace is not None:
            shown = shown_path(trace.tb_frame.f_code.co_filename)
            at = f", at {shown}:{trace.tb_lineno}" if shown else ""
        raise CustomOpError(
            f"{part} of the custom op {name} raised an exception",
            got=f"{type(error).__name__}: {error}{at}",
            hint="the exception is this error's cause, where it was raised in this process",
        ) from error


# --- inputs that are None -------------------------------------------------------------------------


def _in_places(given: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Inputs with None for those that were left out."""
    absent = attrs.get(_ABSENT, ())
    rest = iter(given)
    count = len(given) + len(absent)
    return tuple(None if at in absent else next(rest) for at in range(count))


def _own_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that the function itself has."""
    return {name: value for name, value in attrs.items() if name != _ABSENT}


def _given_rule(rule: str, attrs: Mapping[str, Any]) -> str:
    """The rule line without the inputs that were left out."""
    left, arrow, right = rule.partition("->")
    absent = attrs.get(_ABSENT, ())
    kept = (each for at, each in enumerate(left.split(",")) if at not in absent)
    return f"{','.join(kept)}{arrow}{right}"


def _rule_of_given(rule: str) -> Rule:
    return lambda inputs, outputs, attrs: _given_rule(rule, attrs)


def _flops(
    name: str, function: Function, inputs: Types, outputs: Types, attrs: Mapping[str, Any]
) -> int:
    every = _in_places(inputs, attrs)
    count: int = _called(name, "flops", function, every, outputs, _own_attrs(attrs))
    return count


# --- what is checked when an op is defined --------------------------------------------------------


def _kind_of(function: Function, kind: str | None) -> str:
    if kind is not None:
        if not is_import_path(kind):
            raise AttributeValueError(
                "the kind of a custom op is an import path",
                source=_line_of(function),
                got=repr(kind),
                expected="'module:function'",
            )
        return kind
    derived = f"{function.__module__}:{function.__qualname__}"
    if is_import_path(derived):
        return derived
    # Made inside a function, perhaps several times: nobody can import it, so each has its own name.
    known = custom_ops()
    numbered = (f"{derived}#{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain((derived,), numbered) if each not in known)


def _line_of(function: Function) -> SourceLine | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    return SourceLine(shown_path(code.co_filename), code.co_firstlineno)


def _letters(operand: Sequence[str]) -> list[str]:
    """The factors of an operand, whole ones included."""
    return [token.strip("[]") for token in operand if token != "1"]


def _check_text(name: str, rule: object) -> None:
    if not isinstance(rule, str):
        raise AttributeValueError(
            f"the rule of {name} is no text", got=repr(rule), expected="'... k, k n -> ... n'"
        )


def _check_rule(name: str, rule: str, optional: Mapping[str, int], *, free: bool) -> int:
    """Checks the line by itself; the number of its outputs. `free` outputs may have new axes,
    others those of inputs that are always there.
    """
    inputs, outputs = parse_rule_line(rule)
    if not inputs or not outputs:
        raise AttributeValueError(f"{name} needs at least one input and one output", got=repr(rule))
    for operand in (*inputs, *outputs):
        letters = _letters(operand)
        if len(set(letters)) != len(letters):
            raise AttributeValueError(
                f"the rule of {name} names an axis twice in one operand", got=repr(rule)
            )
    always = [each for at, each in enumerate(inputs) if at not in optional.values()]
    known = {letter for operand in always for letter in _letters(operand)}
    for operand in outputs:
        for letter in _letters(operand):
            if letter not in known and letter != "..." and not free:
                raise AttributeValueError(
                    f"the rule of {name} names an axis of an output that no input"
                    + (" has that is always there" if optional else " has"),
                    got=f"{letter!r} in {rule!r}",
                    expected="one of " + ", ".join(sorted(known)) if known else "axes of inputs",
                    hint="give `infer` to make new axes",
                )
    return len(outputs)


class _Parameters:
    """What a function takes: arrays, then attributes."""

    def __init__(self, name: str, rule: str, function: Function) -> None:
        self.count = len(parse_rule_line(rule)[0])
        self.defaults: dict[str, AttrValue] = {}
        self.attributes: list[Attribute] = []
        self.wants_context = False
        self.optional: dict[str, int] = {}
        """Arrays that may be None, by name: their places among the inputs."""
        arrays = 0
        open_ended = False
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                raise AttributeValueError(
                    f"the attributes of {name} must be named",
                    got=f"**{parameter.name}",
                    expected="keyword-only parameters",
                )
            if parameter.kind is parameter.VAR_POSITIONAL:
                open_ended = True
            elif parameter.kind is parameter.KEYWORD_ONLY and parameter.name == _CONTEXT:
                self.wants_context = True
            elif parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is None:
                self.optional[parameter.name] = arrays
                arrays += 1
            elif parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not _NONE:
                self._add_attribute(name, parameter)
            else:
                arrays += 1
        if arrays != self.count and not (open_ended and arrays <= self.count):
            raise AttributeValueError(
                f"the rule of {name} has another number of inputs than the function takes arrays",
                got=f"{arrays} arrays",
                expected=f"{self.count}, as in {rule!r}",
            )
        if self.optional:
            self.attributes.append(Ints(_ABSENT, ()))

    @property
    def counts(self) -> Sequence[int]:
        """How many tensors the op may have."""
        return range(max(1, self.count - len(self.optional)), self.count + 1)

    def arranged(
        self, inputs: Sequence[Any], attrs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs in their places, those that may be None by keyword or left out, and attributes."""
        if not self.optional:
            return tuple(inputs), dict(attrs)
        named = {name: value for name, value in attrs.items() if name in self.optional}
        complete = [*inputs, *[None] * (self.count - len(inputs))]
        for name, value in named.items():
            complete[self.optional[name]] = value
        return tuple(complete), {name: attrs[name] for name in attrs if name not in named}

    def _add_attribute(self, name: str, parameter: inspect.Parameter) -> None:
        value = parameter.default
        if parameter.name == _ABSENT:
            raise AttributeValueError(
                f"an attribute of {name} has a name that is taken", got=repr(_ABSENT)
            )
        if value is _NONE:
            self.attributes.append(Attribute(parameter.name))
            return
        if isinstance(value, list):
            value = tuple(value)
        if not isinstance(value, _PLAIN) and not (
            isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value)
        ):
            raise AttributeValueError(
                f"attribute {parameter.name!r} of {name} is not plain data",
                got=repr(value),
                expected="a number, a text, or a tuple of one of them",
            )
        self.defaults[parameter.name] = value
        self.attributes.append(Like(parameter.name, value))


def _dtypes(
    name: str, dtype: DType | str | Sequence[DType | str] | None, count: int
) -> tuple[DType, ...] | None:
    if dtype is None:
        return None
    if isinstance(dtype, (DType, str)):
        return (DType.parse(dtype),) * count
    dtypes = tuple(map(DType.parse, dtype))
    if len(dtypes) != count:
        raise AttributeValueError(
            f"{name} has another number of dtypes than outputs", got=len(dtypes), expected=count
        )
    return dtypes


def _linear(name: str, linear: Linear, count: int) -> tuple[tuple[int, ...], ...]:
    sets = (linear,) if isinstance(linear, int) else tuple(linear)
    checked = tuple((each,) if isinstance(each, int) else tuple(each) for each in sets)
    if any(not 0 <= position < count for each in checked for position in each):
        raise AttributeValueError(
            f"{name} is linear in an input that it does not have",
            got=repr(linear),
            expected=f"positions from 0 to {count - 1}",
        )
    return checked


def _reduction(name: str, reduction: str | None) -> Reduction | None:
    if reduction is None:
        return None
    known = [each.value for each in Reduction if each is not Reduction.AVG]
    if reduction not in known:
        raise AttributeValueError(
            f"{name} has an unknown reduction",
            got=repr(reduction),
            expected=", ".join(known) + " or None",
        )
    return Reduction(reduction)


# --- what is checked when an op is recorded -------------------------------------------------------


class _Infer:
    """Types of the outputs, from the factors' extents or from the user's own function."""

    def __init__(
        self,
        name: str,
        rule: str,
        own: Function | None,
        dtypes: tuple[DType, ...] | None,
    ) -> None:
        self.name = name
        self.rule = rule
        self.own = own
        self.dtypes = dtypes

    def __call__(self, inputs: Types, attrs: AttrMap) -> Types:
        rule = _given_rule(self.rule, attrs)
        operands, results = parse_rule_line(rule)
        extents, leading = self._extents(operands, inputs)
        if self.own is not None:
            return self._own_types(rule, inputs, attrs, len(results))
        shapes = []
        for operand in results:
            shape: list[int] = []
            for token in operand:
                if token == "...":
                    shape.extend(leading)
                else:
                    shape.append(extents.get(token.strip("[]"), 1))
            shapes.append(tuple(shape))
        floating = [tensor.dtype for tensor in inputs if tensor.dtype.is_floating]
        default = floating[0] if floating else inputs[0].dtype
        dtypes = self.dtypes or (default,) * len(shapes)
        return tuple(map(TensorType, shapes, dtypes))

    def _extents(
        self, operands: Sequence[Sequence[str]], inputs: Types
    ) -> tuple[Mapping[str, int], tuple[int, ...]]:
        """The extent of each factor, and the axes that `...` stands for."""
        extents: dict[str, int] = {}
        leading: list[tuple[int, ...]] = [()]
        for position, (operand, tensor) in enumerate(zip(operands, inputs, strict=True)):
            spread = len(tensor.shape) - len(operand) + operand.count("...")
            if spread < 0 or (spread and "..." not in operand):
                raise AttributeValueError(
                    f"the rule of {self.name} has another number of axes than its input {position}",
                    got=f"shape {tensor.shape}",
                    expected=f"{' '.join(operand)!r}, as in {self.rule!r}",
                )
            left = tensor.shape
            for token in operand:
                if token == "...":
                    leading.append(left[:spread])
                    left = left[spread:]
                    continue
                extent, left = left[0], left[1:]
                wanted = 1 if token == "1" else extents.setdefault(token.strip("[]"), extent)
                if extent != wanted:
                    raise ShapeError(
                        f"the shapes given to {self.name} do not fit its rule",
                        got=f"{extent} for {token!r} in input {position} of {describe(inputs)}",
                        expected=f"{wanted}, by {self.rule!r}",
                    )
        return extents, broadcast_shapes(self.name, leading)

    def _own_types(self, rule: str, inputs: Types, attrs: AttrMap, count: int) -> Types:
        if self.own is None:
            raise AttributeValueError(f"{self.name} has no function for its types")
        all_inputs = _in_places(inputs, attrs)
        given = _called(self.name, "infer", self.own, *all_inputs, **_own_attrs(attrs))
        types = (given,) if isinstance(given, TensorType) else given
        if not isinstance(types, (tuple, list)) or not all(
            isinstance(each, TensorType) for each in types
        ):
            raise AttributeValueError(
                f"`infer` of {self.name} gave no types",
                got=repr(given),
                expected="a TensorType per output",
            )
        if len(types) != count:
            raise AttributeValueError(
                f"`infer` of {self.name} gave another number of types than its rule has outputs",
                got=len(types),
                expected=f"{count}, as in {self.rule!r}",
            )
        expand_rule(rule, inputs, tuple(types))
        return tuple(types)


def _gradient_of(name: str, function: Function) -> Any:
    """The user's gradient function in the form of the table."""

    def gradient(attrs: AttrMap, inputs: Tensors, outputs: Tensors, grads: Tensors) -> Tensors:
        complete = [
            filled(out, 0) if grad is None else grad
            for out, grad in zip(outputs, grads, strict=True)
        ]
        given = _in_places(inputs, attrs), tuple(outputs), tuple(complete)
        passed = _called(name, "the gradient", function, *given, **_own_attrs(attrs))
        if passed is None or isinstance(passed, TensorOperators):
            passed = (passed,)
        if not isinstance(passed, (tuple, list)):
            raise GradientError(
                f"the gradient of {name} gave no gradients",
                op=name,
                got=type(passed).__name__,
                expected=f"a tensor or None for each of {len(given[0])} inputs",
            )
        if len(passed) != len(given[0]):
            return passed  # which is refused
        return [each for each, there in zip(passed, given[0], strict=True) if there is not None]

    return gradient


# --- what is checked when an op runs --------------------------------------------------------------


class _Kernel:
    """The user's function as a kernel that checks what it returns."""

    def __init__(self, name: str, function: Function, parameters: _Parameters) -> None:
        self.name = name
        self.function = function
        self.wants_context = parameters.wants_context

    def __call__(self, context: KernelContext, inputs: Arrays, outputs: Arrays) -> None:
        more = {_CONTEXT: context} if self.wants_context else {}
        arrays, attrs = _in_places(inputs, context.attrs), _own_attrs(context.attrs)
        given = _called(self.name, "the function", self.function, *arrays, **attrs, **more)
        results = given if isinstance(given, (tuple, list)) else (given,)
        if len(results) != len(outputs):
            raise ExecutionError(
                f"{self.name} returned another number of arrays than its rule has outputs",
                got=len(results),
                expected=len(outputs),
            )
        for position, (value, out) in enumerate(zip(results, outputs, strict=True)):
            if type(value) in (bool, int, float):
                value = np.asarray(value, out.dtype)
            if not isinstance(value, (np.ndarray, np.generic)):
                raise self._wrong(position, type(value).__name__, f"{out.dtype}{out.shape}")
            if value.shape != out.shape or value.dtype != out.dtype:
                raise self._wrong(
                    position,
                    f"{value.dtype} of shape {value.shape}",
                    f"{out.dtype} of shape {out.shape}",
                    [f"{array.dtype} of shape {array.shape}" for array in inputs],
                )
            np.copyto(out, value)

    def _wrong(
        self, position: int, got: str, expected: str, inputs: Sequence[str] = ()
    ) -> ExecutionError:
        return ExecutionError(
            f"{self.name} returned a wrong output {position}"
            + (f" for local inputs {', '.join(inputs)}" if inputs else ""),
            got=got,
            expected=expected,
            hint="return the local shape and dtype that its rule implies, or write axes that must "
            "stay whole as [axis]",
        )
