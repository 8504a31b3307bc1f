"""Layers without inner structure, and containers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, ShapeError, UsageError
from plancompiler.frontend.functions.activation import silu, softmax
from plancompiler.frontend.functions.assembly import unflatten
from plancompiler.frontend.functions.indexing import embedding
from plancompiler.frontend.functions.linear import linear
from plancompiler.frontend.functions.normalization import layer_norm
from plancompiler.frontend.functions.shape import flatten
from plancompiler.frontend.functions.training import dropout
from plancompiler.frontend.nn import functional
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.ir import DType, Value
from plancompiler.ir.operators import whole_numbers
from plancompiler.ir.source import user_line


class Linear(Module):
    """x [..., in] to x weightᵀ + bias [..., out]; `weight` is [out, in], `bias` [out].

    Both start uniform within 1 / sqrt(in); with `std` the weight starts normal with that standard
    deviation and the bias at zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: DType | str = "float32",
        std: float | None = None,
    ) -> None:
        if std is None:
            bound = 1.0 / math.sqrt(max(1, in_features))
            init, args, bias_init = "uniform", (-bound, bound), "uniform"
        else:
            init, args, bias_init = "normal", (0.0, std), "zeros"
        self.weight = Parameter((out_features, in_features), dtype, init, args)
        self.bias: Parameter | None = None
        if bias:
            bias_args = args if bias_init == "uniform" else ()
            self.bias = Parameter((out_features,), dtype, bias_init, bias_args)

    def forward(self, x: Value) -> Value:
        weight = self.weight.value
        return linear(x, weight, None if self.bias is None else self.bias.value)


class Embedding(Module):
    """Ids [...] to rows of `weight` [num_embeddings, embedding_dim].

    Rows start normal with standard deviation `std`; that of `padding_idx` starts at zero, and stays
    there, as it gets no gradient.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: DType | str = "float32",
        std: float = 1.0,
    ) -> None:
        self.padding_idx = padding_idx
        shape = (num_embeddings, embedding_dim)
        self.weight = _table(shape, padding_idx, dtype, std)

    def forward(self, ids: Value) -> Value:
        if self.padding_idx is None:
            return embedding(self.weight.value, ids)
        return functional.embedding(ids, self.weight.value, self.padding_idx)


def _table(
    shape: tuple[int, int], padding_idx: int | None, dtype: DType | str, std: float
) -> Parameter:
    """Normal rows; with a row of padding they are drawn here, with that row at zero."""
    if padding_idx is None:
        return Parameter(shape, dtype, "normal", (0.0, std))
    if not -shape[0] <= padding_idx < shape[0]:
        raise AttributeValueError(
            "the row of the padding is none of the table", got=padding_idx, expected=shape[0]
        )
    rows = np.random.default_rng(shape).normal(0.0, std, shape)
    rows[padding_idx] = 0.0
    return Parameter(shape, dtype, rows)


class EmbeddingBag(Module):
    """The "sum", "mean" or "max" of each bag's rows of `weight` [num_embeddings, embedding_dim].

    See `pc.nn.functional.embedding_bag`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: DType | str = "float32",
    ) -> None:
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx = padding_idx
        self.weight = _table((num_embeddings, embedding_dim), padding_idx, dtype, 1.0)

    def forward(
        self,
        input: Value,  # noqa: A002  # PyTorch's name
        offsets: Value | None = None,
        per_sample_weights: Value | None = None,
    ) -> Value:
        return functional.embedding_bag(
            input,
            self.weight.value,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        )


class Bilinear(Module):
    """x₁ᵀ W x₂ + b of x₁ [..., in1] and x₂ [..., in2]; `weight` is [out, in1, in2], `bias` [out],
    both uniform within 1 / sqrt(in1).
    """

    def __init__(
        self,
        in1_features: int,
        in2_features: int,
        out_features: int,
        bias: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        bound = 1.0 / math.sqrt(max(1, in1_features))
        shape, args = (out_features, in1_features, in2_features), (-bound, bound)
        self.weight = Parameter(shape, dtype, "uniform", args)
        self.bias = Parameter((out_features,), dtype, "uniform", args) if bias else None

    def forward(self, input1: Value, input2: Value) -> Value:
        bias = None if self.bias is None else self.bias.value
        return functional.bilinear(input1, input2, self.weight.value, bias)


class LayerNorm(Module):
    """Normalises the last axis, or the last axes of the extents `normalized_shape`; then scales by
    `weight` and shifts by `bias`, unless without `elementwise_affine` or `bias`.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: DType | str = "float32",
    ) -> None:
        self.eps = eps
        self.shape = whole_numbers("normalized_shape", normalized_shape)
        shifts = elementwise_affine and bias
        self.weight = Parameter(self.shape, dtype, "ones") if elementwise_affine else None
        self.bias = Parameter(self.shape, dtype, "zeros") if shifts else None

    def forward(self, x: Value) -> Value:
        weight, bias = self.weight, self.bias
        if weight is not None and bias is not None and len(self.shape) == 1:
            return layer_norm(x, weight.value, bias.value, self.eps)
        scale, shift = (None if each is None else each.value for each in (weight, bias))
        return functional.layer_norm(x, self.shape, scale, shift, self.eps)


class Dropout(Module):
    """While training, zeroes elements with probability `p` and scales the others up."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if not 0.0 <= p < 1.0:
            raise AttributeValueError(
                "a dropout rate is a probability below one", got=p, expected="0 <= p < 1"
            )
        self.p = p

    def forward(self, x: Value) -> Value:
        return dropout(x, self.p) if self.training and self.p > 0.0 else x


class Identity(Module):
    """Its input, whatever it was made with."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """Take any arguments, as PyTorch does: the layer stands in for others."""

    def forward(self, x: Any) -> Any:
        return x


class PReLU(Module):
    """x where x > 0, else `weight` x, of which there is one, or one for each channel (axis 1)."""

    def __init__(
        self, num_parameters: int = 1, init: float = 0.25, dtype: DType | str = "float32"
    ) -> None:
        self.weight = Parameter((num_parameters,), dtype, "constant", (init,))

    def forward(self, x: Value) -> Value:
        return functional.prelu(x, self.weight.value)


class ReLU(Module):
    """max(x, 0)."""

    def __init__(self, inplace: bool = False) -> None:
        """`inplace` is PyTorch's; no layer changes its input."""

    def forward(self, x: Value) -> Value:
        return x.relu()


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x: Value) -> Value:
        return x.tanh()


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Value) -> Value:
        return x.sigmoid()


class SiLU(Module):
    """x * sigmoid(x)."""

    def __init__(self, inplace: bool = False) -> None:
        """`inplace` is PyTorch's; no layer changes its input."""

    def forward(self, x: Value) -> Value:
        return silu(x)


class Softmax(Module):
    """exp(x) normalised to sum to one along an axis, which may be split with `split_axis`."""

    def __init__(self, dim: int = -1, split_axis: bool = False) -> None:
        self.dim, self.split_axis = dim, split_axis

    def forward(self, x: Value) -> Value:
        return softmax(x, self.dim, self.split_axis)


class Flatten(Module):
    """Axes from `start_dim` to `end_dim` become one; by default all but the first."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Value) -> Value:
        if not -x.ndim <= self.start_dim < x.ndim:
            raise ShapeError(
                "there is no axis to flatten", got=x.shape, expected=f"over {self.start_dim} axes"
            )
        return flatten(x, self.start_dim, self.end_dim)


class Unflatten(Module):
    """Axis `dim` becomes several, of the extents `unflattened_size`, of which one may be -1."""

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Value) -> Value:
        return unflatten(x, self.dim, self.unflattened_size)


class ModuleList(Module, Sequence[Module]):
    """Modules in a list, named by their position."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self._modules: list[Module] = []
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Add a module at the end."""
        self._adopt(module)
        self._modules.append(module)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        for position, module in enumerate(self._modules):
            yield str(position), module

    def __getitem__(self, position: Any) -> Any:
        return self._modules[position]

    def __len__(self) -> int:
        return len(self._modules)


class Sequential(ModuleList):
    """Modules applied one after another, named by their position."""

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        for module in self._modules:
            x = module(x)
        return x


class ModuleDict(Module):
    """Modules by name."""

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        self.update(modules or {})

    def update(self, modules: Mapping[str, Module]) -> None:
        """Add modules, or replace those of the same names."""
        for name, module in modules.items():
            self[name] = module

    def __setitem__(self, name: str, module: Module) -> None:
        _refuse_name(self, name)
        setattr(self, name, module)

    def __getitem__(self, name: str) -> Any:
        return dict(self.named_children())[name]

    def __delitem__(self, name: str) -> None:
        delattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in dict(self.named_children())

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.named_children()))

    def __len__(self) -> int:
        return len(dict(self.named_children()))

    def keys(self) -> Iterable[str]:
        """The names."""
        return dict(self.named_children()).keys()

    def values(self) -> Iterable[Module]:
        """The modules."""
        return dict(self.named_children()).values()

    def items(self) -> Iterable[tuple[str, Module]]:
        """Names and modules."""
        return dict(self.named_children()).items()


def _refuse_name(module: Module, name: str) -> None:
    if hasattr(type(module), name) or "." in name or not name:
        raise UsageError(
            "a module in a dict cannot have this name", source=user_line(), got=repr(name)
        )


class ParameterList(Module):
    """Parameters in a list, named by their position."""

    def __init__(self, values: Iterable[Parameter] = ()) -> None:
        for value in values:
            self.append(value)

    def _list(self) -> list[Parameter]:
        return [value for value in vars(self).values() if isinstance(value, Parameter)]

    def append(self, value: Parameter) -> None:
        """Add a parameter at the end."""
        setattr(self, str(len(self)), value)

    def __getitem__(self, position: int) -> Parameter:
        return self._list()[position]

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._list())

    def __len__(self) -> int:
        return len(self._list())


class ParameterDict(Module):
    """Parameters by name."""

    def __init__(self, values: Mapping[str, Parameter] | None = None) -> None:
        for name, value in (values or {}).items():
            self[name] = value

    def _dict(self) -> dict[str, Parameter]:
        return {name: each for name, each in vars(self).items() if isinstance(each, Parameter)}

    def __setitem__(self, name: str, value: Parameter) -> None:
        _refuse_name(self, name)
        setattr(self, name, value)

    def __getitem__(self, name: str) -> Parameter:
        return self._dict()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._dict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict())

    def __len__(self) -> int:
        return len(self._dict())
