"""Recurrent layers, with PyTorch's parameters.

Weights are those of PyTorch's layers, by name and shape: `weight_ih_l0` [gates hidden, in],
`weight_hh_l0` [gates hidden, hidden], `bias_ih_l0` and `bias_hh_l0`, `_l1` of the next layer,
`_reverse` of the other direction. All start uniform within 1 / sqrt(hidden). What the inputs add to
the gates is one product for all times; the rest is one op for each layer and direction. The batch
may be split.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from plancompiler.errors import AttributeValueError, ShapeError
from plancompiler.frontend.nn.functional import recurrence
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.frontend.nn.packed_sequence import PackedSequence
from plancompiler.ir import AttrValue, DType
from plancompiler.ir.operators import filled

_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class _Weights(Module):
    """What layers and cells share: their parameters."""

    _kind: ClassVar[str]
    _gates: ClassVar[int]

    def _add(
        self,
        suffix: str,
        inputs: int,
        hidden: int,
        bias: bool,
        dtype: DType | str,
        projected: int = 0,
    ) -> None:
        bound = 1.0 / math.sqrt(max(1, hidden))
        rows = self._gates * hidden
        shapes: dict[str, tuple[int, ...]] = {
            "weight_ih": (rows, inputs),
            "weight_hh": (rows, projected or hidden),
        }
        if bias:
            shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
        if projected:
            shapes["weight_hr"] = (projected, hidden)
        for name, shape in shapes.items():
            setattr(self, name + suffix, Parameter(shape, dtype, "uniform", (-bound, bound)))

    def _values(self, suffix: str) -> list[Any]:
        named = (getattr(self, name + suffix, None) for name in _NAMES)
        return [None if each is None else each.value for each in named]


def _check(name: str, **sizes: int) -> None:
    for what, size in sizes.items():
        if size < 1:
            raise AttributeValueError(f"{name} needs {what} of at least 1", got=size)


def _zeros(x: Any, shape: tuple[int, ...]) -> Any:
    return filled(x, 0.0, shape)


class _Recurrent(_Weights):
    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: DType | str = "float32",
        proj_size: int = 0,
    ) -> None:
        _check(
            type(self).__name__,
            input_size=input_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
        )
        if not 0.0 <= dropout <= 1.0:
            raise AttributeValueError("a dropout probability is a share", got=dropout)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.dropout, self.bidirectional = batch_first, dropout, bidirectional
        self.proj_size = proj_size
        self._attrs: dict[str, AttrValue] = {}
        for layer in range(num_layers):
            given = (proj_size or hidden_size) * self.directions
            inputs = input_size if layer == 0 else given
            for suffix in self._suffixes(layer):
                self._add(suffix, inputs, hidden_size, bias, dtype, proj_size)

    @property
    def directions(self) -> int:
        """1, or 2 of a layer that also reads backwards."""
        return 2 if self.bidirectional else 1

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: self.directions]

    def _forward(self, x: Any, states: list[Any]) -> tuple[Any, list[Any]]:
        if isinstance(x, PackedSequence):
            made, last = self._layers(x.padded, states, x.lengths)
            return PackedSequence(made, x.lengths), last
        single = x.ndim == 2
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise ShapeError(
                f"{type(self).__name__} takes sequences of vectors",
                got=x.shape,
                expected=f"[n, t, {self.input_size}]"
                if self.batch_first
                else f"[t, n, {self.input_size}]",
            )
        if single:
            x = x.reshape((x.shape[0], 1, x.shape[1]))
            states = [each.reshape((each.shape[0], 1, *each.shape[1:])) for each in states]
        elif self.batch_first:
            x = x.transpose((1, 0, 2))
        made, last = self._layers(x, states)
        if single:
            made = made.reshape((made.shape[0], made.shape[2]))
            last = [each.reshape((each.shape[0], each.shape[2])) for each in last]
        elif self.batch_first:
            made = made.transpose((1, 0, 2))
        return made, last

    def _layers(self, x: Any, states: list[Any], lengths: Any = None) -> tuple[Any, list[Any]]:
        if x.ndim != 3 or x.shape[2] != self.input_size:
            raise ShapeError(
                f"{type(self).__name__} takes sequences of vectors",
                got=x.shape,
                expected=f"[t, n, {self.input_size}]",
            )
        weights = [
            self._values(suffix)
            for layer in range(self.num_layers)
            for suffix in self._suffixes(layer)
        ]
        rate = self.dropout if self.training else 0.0
        return recurrence.layers(
            self._kind, x, states, weights, self.directions, rate, lengths, **self._attrs
        )


class LSTM(_Recurrent):
    """Long short-term memory of x [t, n, in] (or [t, in]; with `batch_first` [n, t, in]).

    Gives the states of all steps of the last layer [t, n, hidden directions], and the last state
    and cell of each layer and direction, [layers directions, n, hidden] each; `hx` is such a pair
    to start from, by default zeros. See `pc.nn.recurrent` for the weights. A `pc.nn.PackedSequence`
    has sequences of several lengths: then the states are those at their ends.

    With `proj_size` the state is what `weight_hr_l0` [proj_size, hidden] makes of the output of
    each step, and so are the outputs of the layer.
    """

    _kind, _gates = "lstm", 4

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        dtype: DType | str = "float32",
    ) -> None:
        if not 0 <= proj_size < max(1, hidden_size):
            raise AttributeValueError(
                "LSTM projects its state to fewer units",
                got=f"proj_size={proj_size}",
                expected=f"0 to {hidden_size - 1}",
            )
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            dtype,
            proj_size,
        )

    def forward(self, input: Any, hx: tuple[Any, Any] | None = None) -> Any:  # noqa: A002  # PyTorch's name
        made, (h, c) = self._forward(input, [] if hx is None else list(hx))
        return made, (h, c)


class GRU(_Recurrent):
    """Gated recurrent units of x [t, n, in]; see `LSTM`, with states only."""

    _kind, _gates = "gru", 3

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002  # PyTorch's name
        made, (h,) = self._forward(input, [] if hx is None else [hx])
        return made, h


class RNN(_Recurrent):
    """A plain recurrent layer of x [t, n, in]: tanh or relu of what input and state add; see
    `LSTM`, with states only.
    """

    _kind, _gates = "rnn", 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: DType | str = "float32",
    ) -> None:
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype
        )
        self._attrs = _nonlinearity(nonlinearity)

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002  # PyTorch's name
        made, (h,) = self._forward(input, [] if hx is None else [hx])
        return made, h


def _nonlinearity(name: str) -> dict[str, AttrValue]:
    if name not in ("tanh", "relu"):
        raise AttributeValueError("unknown nonlinearity", got=repr(name), expected="tanh or relu")
    return {"nonlinearity": name}


class _Cell(_Weights):
    def __init__(
        self, input_size: int, hidden_size: int, bias: bool = True, dtype: DType | str = "float32"
    ) -> None:
        _check(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        self.input_size, self.hidden_size = input_size, hidden_size
        self._attrs: dict[str, AttrValue] = {}
        self._add("", input_size, hidden_size, bias, dtype)

    def _step(self, x: Any, states: list[Any]) -> list[Any]:
        single = x.ndim == 1
        rows = 1 if single else x.shape[0]
        kinds = 2 if self._kind == "lstm" else 1
        states = states or [_zeros(x, (rows, self.hidden_size))] * kinds
        states = [each.reshape((rows, self.hidden_size)) for each in states]
        row = x.reshape((1, rows, x.shape[-1]))
        every = recurrence.direction(
            self._kind, row, states, self._values(""), False, **self._attrs
        )
        return [each[0, 0] if single else each[0] for each in every]


class LSTMCell(_Cell):
    """One step of an `LSTM`: x [n, in] (or [in]) and a pair of states [n, hidden] to the next
    pair. Weights are `weight_ih`, `weight_hh`, `bias_ih`, `bias_hh`.
    """

    _kind, _gates = "lstm", 4

    def forward(self, input: Any, hx: tuple[Any, Any] | None = None) -> Any:  # noqa: A002  # PyTorch's name
        h, c = self._step(input, [] if hx is None else list(hx))
        return h, c


class GRUCell(_Cell):
    """One step of a `GRU`: x [n, in] (or [in]) and a state [n, hidden] to the next state."""

    _kind, _gates = "gru", 3

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002  # PyTorch's name
        return self._step(input, [] if hx is None else [hx])[0]


class RNNCell(_Cell):
    """One step of an `RNN`: x [n, in] (or [in]) and a state [n, hidden] to the next state."""

    _kind, _gates = "rnn", 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        dtype: DType | str = "float32",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, dtype)
        self._attrs = _nonlinearity(nonlinearity)

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002  # PyTorch's name
        return self._step(input, [] if hx is None else [hx])[0]
