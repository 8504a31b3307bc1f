"""Optimizers that treat every element of a parameter by itself."""

from __future__ import annotations

from plancompiler.errors import UsageError
from plancompiler.frontend.optim.eager import Parameters
from plancompiler.frontend.optim.optimizer import ElementwiseOptimizer
from plancompiler.frontend.optim.schedule import Rate
from plancompiler.ir import AttrValue
from plancompiler.ir.arguments import number_pair, real_number


class SGD(ElementwiseOptimizer):
    """Stochastic gradient descent: w -= lr * (g + weight_decay * w).

    With momentum, m = momentum * m + g replaces g; Nesterov's form looks ahead by g + momentum * m.
    """

    def __init__(
        self,
        lr: Rate,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, parameters)
        self.momentum = real_number("momentum", momentum)
        if self.momentum < 0.0:
            raise UsageError("momentum is negative", got=momentum, expected="at least 0")
        if nesterov and self.momentum == 0.0:
            raise UsageError(
                "Nesterov's method needs a momentum", got="momentum=0", expected="above 0"
            )
        self.nesterov = nesterov
        self.states = ("momentum",) if self.momentum else ()

    def update_op(self) -> tuple[str, dict[str, AttrValue]]:
        if not self.momentum:
            return "sgd_update", {"weight_decay": self.weight_decay}
        return "momentum_update", {
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "weight_decay": self.weight_decay,
        }


class Adam(ElementwiseOptimizer):
    """Adam (Kingma and Ba, 2015); weight decay is added to the gradient."""

    states = ("adam_m", "adam_v")
    decoupled = False

    def __init__(
        self,
        lr: Rate,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, parameters)
        self.betas = number_pair("betas", betas)
        self.eps = real_number("eps", eps)

    def update_op(self) -> tuple[str, dict[str, AttrValue]]:
        return "adam_update", {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
        }


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019): w shrinks by lr *
    weight_decay.
    """

    decoupled = True

    def __init__(
        self,
        lr: Rate,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay, parameters)


class Lion(ElementwiseOptimizer):
    """Lion (X. Chen et al., 2023): steps of the learning rate along signs, with decoupled weight
    decay.
    """

    states = ("lion_m",)

    def __init__(
        self,
        lr: Rate,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(lr, weight_decay, parameters)
        self.betas = number_pair("betas", betas)

    def update_op(self) -> tuple[str, dict[str, AttrValue]]:
        return "lion_update", {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "weight_decay": self.weight_decay,
        }
