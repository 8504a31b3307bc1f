"""Layers without inner structure, and containers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from plancompiler.errors import AttributeValueError
from plancompiler.frontend.functions.activation import silu, softmax
from plancompiler.frontend.functions.indexing import embedding
from plancompiler.frontend.functions.linear import linear
from plancompiler.frontend.functions.normalization import layer_norm
from plancompiler.frontend.functions.training import dropout
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.ir import DType, Value


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
    """Ids [...] to rows of `weight` [count, dim]; rows start normal with standard deviation
    `std`.
    """

    def __init__(
        self, count: int, dim: int, dtype: DType | str = "float32", std: float = 1.0
    ) -> None:
        self.weight = Parameter((count, dim), dtype, "normal", (0.0, std))

    def forward(self, ids: Value) -> Value:
        return embedding(self.weight.value, ids)


class LayerNorm(Module):
    """Normalises the last axis (of extent `dim`), then scales by `weight` and shifts by `bias`."""

    def __init__(self, dim: int, eps: float = 1e-5, dtype: DType | str = "float32") -> None:
        self.eps = eps
        self.weight = Parameter((dim,), dtype, "ones")
        self.bias = Parameter((dim,), dtype, "zeros")

    def forward(self, x: Value) -> Value:
        return layer_norm(x, self.weight.value, self.bias.value, self.eps)


class Dropout(Module):
    """While training, zeroes elements with probability `rate` and scales the others up."""

    def __init__(self, rate: float) -> None:
        if not 0.0 <= rate < 1.0:
            raise AttributeValueError(
                "a dropout rate is a probability below one", got=rate, expected="0 <= rate < 1"
            )
        self.rate = rate

    def forward(self, x: Value) -> Value:
        return dropout(x, self.rate) if self.training and self.rate > 0.0 else x


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Value) -> Value:
        return x.relu()


class GELU(Module):
    """Gaussian error linear unit, tanh form."""

    def forward(self, x: Value) -> Value:
        return x.gelu()


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

    def forward(self, x: Value) -> Value:
        return silu(x)


class Softmax(Module):
    """exp(x) normalised to sum to one along an axis, which may be split with `split_axis`."""

    def __init__(self, axis: int = -1, split_axis: bool = False) -> None:
        self.axis, self.split_axis = axis, split_axis

    def forward(self, x: Value) -> Value:
        return softmax(x, self.axis, self.split_axis)


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
