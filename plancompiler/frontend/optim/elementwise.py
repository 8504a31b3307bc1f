"""Optimizers that treat every element of a parameter by itself; `ops.optimizer` has their formulas.

Arguments are those of PyTorch's optimizers of the same names, with the same defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plancompiler.errors import UsageError
from plancompiler.frontend.optim.optimizer import FormulaOptimizer
from plancompiler.frontend.optim.parameter_group import Parameters
from plancompiler.frontend.optim.schedule import Rate
from plancompiler.ir.source import user_line

Given = Parameters | Rate | None
"""What comes first: parameters, or the rate where there are none."""
Numbers = Mapping[str, Any]


class SGD(FormulaOptimizer):
    """Stochastic gradient descent: w -= lr * (g + weight_decay * w).

    With momentum, m = momentum * m + (1 - dampening) * g replaces g; Nesterov's form looks ahead by
    g + momentum * m.
    """

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        if isinstance(dampening, bool):  # as it was typed before there was a dampening
            nesterov, dampening = bool(dampening), 0.0
        super().__init__(
            params,
            lr,
            parameters,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )

    def check(self, numbers: Numbers) -> None:
        super().check(numbers)
        momentum, dampening = numbers["momentum"], numbers["dampening"]
        if numbers["nesterov"] and (momentum == 0.0 or dampening):
            raise UsageError(
                "Nesterov's method needs a momentum without dampening",
                source=user_line(),
                got=f"momentum={momentum}, dampening={dampening}",
                expected="momentum above 0, dampening 0",
            )

    def kind(self, numbers: Numbers) -> str:
        return "momentum_update" if numbers["momentum"] else "sgd_update"

    def _names_of(self, kind: str) -> list[str]:
        return ["momentum"] if kind == "momentum_update" else []


class Adam(FormulaOptimizer):
    """Adam (D. P. Kingma, J. Ba, 2015); weight decay is added to the gradient, unless it is
    decoupled. `amsgrad` divides by the greatest second moment so far (S. Reddi et al., 2018).
    """

    prefix = "adam"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
        )

    def kind(self, numbers: Numbers) -> str:
        return "amsgrad_update" if numbers["amsgrad"] else "adam_update"


class AdamW(Adam):
    """Adam with decoupled weight decay (I. Loshchilov, F. Hutter, 2019): w shrinks by lr *
    weight_decay.
    """

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            parameters=parameters,
        )


class NAdam(FormulaOptimizer):
    """NAdam (T. Dozat, 2016): Adam with Nesterov's momentum, which warms up by `momentum_decay`."""

    prefix = "nadam"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            momentum_decay=momentum_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            maximize=maximize,
        )

    def kind(self, numbers: Numbers) -> str:
        return "nadam_update"


class RAdam(FormulaOptimizer):
    """RAdam (L. Liu et al., 2020): Adam whose adaptive rate is corrected for its variance, and left
    out in the first steps, in which that is not known.
    """

    prefix = "radam"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=decoupled_weight_decay,
            maximize=maximize,
        )

    def kind(self, numbers: Numbers) -> str:
        return "radam_update"


class Adamax(FormulaOptimizer):
    """Adamax (D. P. Kingma, J. Ba, 2015): Adam by the infinity norm."""

    prefix = "adamax"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
        )

    def kind(self, numbers: Numbers) -> str:
        return "adamax_update"


class Adagrad(FormulaOptimizer):
    """Adagrad (J. Duchi, E. Hazan, Y. Singer, 2011): steps over the root of the sum of all squares,
    with a rate of lr / (1 + (step - 1) * lr_decay).

    The state `sum` lacks the initial value, which the formula adds.
    """

    prefix = "adagrad"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            maximize=maximize,
        )

    def kind(self, numbers: Numbers) -> str:
        return "adagrad_update"


class RMSprop(FormulaOptimizer):
    """RMSprop (T. Tieleman, G. Hinton, 2012): steps over the root of a moving average of squares;
    `centered` (A. Graves, 2013) over that of the variance.
    """

    prefix = "rmsprop"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            parameters,
            alpha=alpha,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            centered=centered,
            maximize=maximize,
        )

    def kind(self, numbers: Numbers) -> str:
        centered = "centered_" if numbers["centered"] else ""
        return f"{centered}rmsprop_{'momentum_' if numbers['momentum'] else ''}update"


class Adadelta(FormulaOptimizer):
    """Adadelta (M. D. Zeiler, 2012): steps as long as those before, over the gradient's root mean
    square.
    """

    prefix = "adadelta"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params, lr, parameters, rho=rho, eps=eps, weight_decay=weight_decay, maximize=maximize
        )

    def kind(self, numbers: Numbers) -> str:
        return "adadelta_update"


class Lion(FormulaOptimizer):
    """Lion (X. Chen et al., 2023): steps of the learning rate along signs, with decoupled weight
    decay.
    """

    prefix = "lion"

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params, lr, parameters, betas=betas, weight_decay=weight_decay, maximize=maximize
        )

    def kind(self, numbers: Numbers) -> str:
        return "lion_update"
