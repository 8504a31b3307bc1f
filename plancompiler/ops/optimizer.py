"""Updates of variables by their gradients, one formula each.

The formulas are those of the papers that are cited, with the defaults and the order of PyTorch's
optimizers where it has them. What is computed of numbers alone is taken out of the loop over
elements. Where an optimizer needs numbers of a whole parameter, these are sums of squares, which
are ops of their own: partial where the parameter is split, reduced as scalars, and inputs of the
formula. So every split of a parameter is legal, and none gathers it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from plancompiler.ops.attributes import Bool, Float
from plancompiler.ops.registry import apply
from plancompiler.ops.update import define_update, of_numbers, root

DECAY = Float("weight_decay", 0.0, least=0.0)
DECOUPLED = Bool("decoupled", False)
EPS = Float("eps", least=0.0)
MOMENTUM = Float("momentum", least=0.0)
BETAS = (Float("beta1", least=0.0, below=1.0), Float("beta2", least=0.0, below=1.0))


def _decayed(w: Any, g: Any, rate: Any, decay: Any, decoupled: bool = False) -> tuple[Any, Any]:
    """The weight and the gradient, one of them with weight decay."""
    if not decay:
        return w, g
    return (w * (1.0 - rate * decay), g) if decoupled else (w, g + w * decay)


def _averaged(mean: Any, value: Any, share: Any) -> Any:
    """The moving average of which the mean so far has this share."""
    return mean * share + value * (1.0 - share)


# --- stochastic gradient descent ------------------------------------------------------------------


def _sgd(w: Any, g: Any, rate: Any, weight_decay: Any) -> Any:
    w, g = _decayed(w, g, rate, weight_decay, True)
    return w - g * rate


define_update(
    "sgd_update",
    "w F, g F, rate f () -> w F",
    _sgd,
    "(w, g, lr) -> w - lr * (g + weight_decay * w).",
    attrs=(DECAY,),
)


def _momentum(
    w: Any,
    g: Any,
    m: Any,
    rate: Any,
    count: Any,
    *,
    momentum: Any,
    nesterov: bool,
    dampening: Any,
    weight_decay: Any,
) -> Any:
    w, g = _decayed(w, g, rate, weight_decay)
    added = g * of_numbers(_undamped, dampening, count) if dampening else g
    m = m * momentum + added
    return w - (g + m * momentum if nesterov else m) * rate, m


def _undamped(dampening: float, count: Any) -> Any:
    """What is left of a gradient; all of the first."""
    return np.where(count == 1, 1.0, 1.0 - dampening)


define_update(
    "momentum_update",
    "w F, g F, m F, rate f () -> w F, m F",
    _momentum,
    "(w, g, m, lr) -> (w', m') with m' = momentum * m + g + weight_decay * w and "
    "w' = w - lr * m', or w - lr * (g + weight_decay * w + momentum * m') where nesterov "
    "(Y. Nesterov, 1983; in this form I. Sutskever et al., 2013). After the first update "
    "1 - dampening of the gradient is added to m.",
    attrs=(MOMENTUM, Bool("nesterov", False), Float("dampening", 0.0), DECAY),
)


def _lars(
    w: Any,
    g: Any,
    m: Any,
    size: Any,
    length: Any,
    rate: Any,
    *,
    momentum: Any,
    trust: Any,
    eps: Any,
    weight_decay: Any,
) -> Any:
    _, g = _decayed(w, g, rate, weight_decay)
    local = of_numbers(_local_rate, size, length, trust, eps, weight_decay)
    m = m * momentum + g * (rate * local)
    return w - m, m


def _local_rate(size: Any, length: Any, trust: float, eps: float, decay: float) -> Any:
    """trust |w| / (|g| + decay |w| + eps), or 1 where a norm is zero."""
    known = (size > 0) & (length > 0)
    norm = np.sqrt(size)
    other = np.sqrt(length) + decay * norm + eps
    return np.where(known, trust * norm / np.where(known, other, 1.0), 1.0)


define_update(
    "lars_update",
    "w F, g F, m F, size f (), length f (), rate f () -> w F, m F",
    _lars,
    "(w, g, m, sum of squares of w, of g, lr) -> (w', m'): LARS (Y. You, I. Gitman, B. Ginsburg, "
    "2017): m' = momentum * m + lr * local * (g + weight_decay * w) and w' = w - m', where local "
    "is trust * |w| / (|g| + weight_decay * |w| + eps), or 1 where either norm is zero.",
    attrs=(MOMENTUM, Float("trust", least=0.0), EPS, DECAY),
)


def _lion(w: Any, g: Any, m: Any, rate: Any, *, beta1: Any, beta2: Any, weight_decay: Any) -> Any:
    turn = apply("sign", _averaged(m, g, beta1)) * rate
    w, _ = _decayed(w, g, rate, weight_decay, True)
    return w - turn, _averaged(m, g, beta2)


define_update(
    "lion_update",
    "w F, g F, m F, rate f () -> w F, m F",
    _lion,
    "(w, g, m, lr) -> (w', m'): Lion (X. Chen et al., 2023), a step of lr along the signs "
    "of beta1 m + (1 - beta1) g, with decoupled weight decay.",
    attrs=(*BETAS, DECAY),
)


# --- squares of gradients -------------------------------------------------------------------------


def _adagrad(
    w: Any,
    g: Any,
    sum: Any,  # noqa: A002  # the name of the state
    rate: Any,
    count: Any,
    *,
    eps: Any,
    lr_decay: Any,
    initial: Any,
    weight_decay: Any,
) -> Any:
    _, g = _decayed(w, g, rate, weight_decay)
    sum = sum + g * g  # noqa: A001  # likewise
    total = sum + initial if initial else sum
    return w - g / (total.sqrt() + eps) * (rate / (1.0 + (count - 1) * lr_decay)), sum


define_update(
    "adagrad_update",
    "w F, g F, sum F, rate f () -> w F, sum F",
    _adagrad,
    "(w, g, sum, lr) -> (w', sum'): Adagrad (J. Duchi, E. Hazan, Y. Singer, 2011): sum' = sum + g² "
    "and w' = w - lr / (1 + (count - 1) * lr_decay) * g / (√(initial + sum') + eps).",
    attrs=(EPS, Float("lr_decay", 0.0, least=0.0), Float("initial", 0.0, least=0.0), DECAY),
)


def _rmsprop(
    w: Any,
    g: Any,
    v: Any,
    rate: Any,
    mean: Any = None,
    m: Any = None,
    *,
    alpha: Any,
    eps: Any,
    weight_decay: Any,
    momentum: Any = None,
) -> Any:
    _, g = _decayed(w, g, rate, weight_decay)
    v = _averaged(v, g * g, alpha)
    spread = v
    if mean is not None:
        mean = _averaged(mean, g, alpha)
        spread = apply("maximum_scalar", v - mean * mean, scalar=0.0)  # rounding may fall below
    step = g / (spread.sqrt() + eps)
    if m is not None:
        step = m = m * momentum + step
    kept = (each for each in (mean, m) if each is not None)
    return (w - step * rate, v, *kept)


for _states in ((), ("mean",), ("m",), ("mean", "m")):
    _more = "".join(f"{each} F, " for each in _states)
    _after = "".join(f", {each} F" for each in _states)
    _words = [*(["centered"] * ("mean" in _states)), "rmsprop", *(["momentum"] * ("m" in _states))]
    define_update(
        f"{'_'.join(_words)}_update",
        f"w F, g F, v F, {_more}rate f () -> w F, v F{_after}",
        _rmsprop,
        "RMSprop (T. Tieleman, G. Hinton, 2012): v' = alpha * v + (1 - alpha) * g² and "
        "w' = w - lr * g / (√v' + eps). "
        + "Centered (A. Graves, 2013): v' - mean'² in place of v', where mean is the moving "
        "average of g. "
        * ("mean" in _states)
        + "m' = momentum * m + the step replaces the step." * ("m" in _states),
        attrs=(
            Float("alpha", least=0.0, below=1.0),
            EPS,
            *((MOMENTUM,) if "m" in _states else ()),
            DECAY,
        ),
    )


def _adadelta(
    w: Any, g: Any, v: Any, delta: Any, rate: Any, *, rho: Any, eps: Any, weight_decay: Any
) -> Any:
    _, g = _decayed(w, g, rate, weight_decay)
    v = _averaged(v, g * g, rho)
    step = g * ((delta + eps).sqrt() / (v + eps).sqrt())
    return w - step * rate, v, _averaged(delta, step * step, rho)


define_update(
    "adadelta_update",
    "w F, g F, v F, delta F, rate f () -> w F, v F, delta F",
    _adadelta,
    "(w, g, v, delta, lr) -> (w', v', delta'): Adadelta (M. D. Zeiler, 2012): v and delta are "
    "moving averages of g² and of the squares of steps, and the step is √(delta + eps) / "
    "√(v' + eps) * g, times lr.",
    attrs=(Float("rho", least=0.0, below=1.0), EPS, DECAY),
)


# --- Adam and what follows from it ----------------------------------------------------------------


def _adam(
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    rate: Any,
    count: Any,
    peak: Any = None,
    *,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
    decoupled: bool,
) -> Any:
    w, g = _decayed(w, g, rate, weight_decay, decoupled)
    m, v = _averaged(m, g, beta1), _averaged(v, g * g, beta2)
    correction = root(1.0 - beta2**count)
    most = v if peak is None else apply("maximum", peak, v)
    step = m / (most.sqrt() + eps * correction)
    kept = () if peak is None else (most,)
    return (w - step * (rate * correction / (1.0 - beta1**count)), m, v, *kept)


for _peak in (False, True):
    define_update(
        "amsgrad_update" if _peak else "adam_update",
        "w F, g F, m F, v F, {}rate f () -> w F, m F, v F{}".format(
            *(("peak F, ", ", peak F") if _peak else ("", ""))
        ),
        _adam,
        "(w, g, m, v, lr) -> (w', m', v'): Adam (D. P. Kingma, J. Ba, 2015) with bias "
        "correction from the step; where decoupled, weight decay acts on w alone (AdamW: "
        "I. Loshchilov, F. Hutter, 2019)."
        + " The greatest v so far takes its place (AMSGrad: S. Reddi, S. Kale, S. Kumar, 2018)."
        * _peak,
        attrs=(*BETAS, EPS, DECAY, DECOUPLED),
    )


def _adamax(
    w: Any,
    g: Any,
    m: Any,
    top: Any,
    rate: Any,
    count: Any,
    *,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
) -> Any:
    _, g = _decayed(w, g, rate, weight_decay)
    m = _averaged(m, g, beta1)
    top = apply("maximum", top * beta2, abs(g) + eps)
    return w - m / top * (rate / (1.0 - beta1**count)), m, top


define_update(
    "adamax_update",
    "w F, g F, m F, top F, rate f () -> w F, m F, top F",
    _adamax,
    "(w, g, m, top, lr) -> (w', m', top'): Adamax (D. P. Kingma, J. Ba, 2015): Adam with "
    "top' = max(beta2 * top, |g| + eps) in place of the root of the second moment.",
    attrs=(*BETAS, EPS, DECAY),
)


def _nadam(
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    rate: Any,
    count: Any,
    *,
    beta1: Any,
    beta2: Any,
    eps: Any,
    momentum_decay: Any,
    weight_decay: Any,
    decoupled: bool,
) -> Any:
    w, g = _decayed(w, g, rate, weight_decay, decoupled)
    m, v = _averaged(m, g, beta1), _averaged(v, g * g, beta2)
    correction = root(1.0 - beta2**count)
    now, after = (of_numbers(_warmed, beta1, momentum_decay, count + ahead) for ahead in (0, 1))
    product = of_numbers(_warmed_product, beta1, momentum_decay, count)
    inverse = correction * rate
    step = g * ((1.0 - now) / (1.0 - product) * inverse)
    step = step + m * (after / (1.0 - product * after) * inverse)
    return w - step / (v.sqrt() + eps * correction), m, v


def _warmed(beta: float, decay: float, count: Any) -> Any:
    """NAdam's momentum of an update."""
    return beta * (1.0 - 0.5 * 0.96 ** (count * decay))


def _warmed_product(beta: float, decay: float, count: Any) -> Any:
    """That of all updates so far: beta ** count times the product of 1 - q ** k / 2 over k up to
    count, where q is 0.96 ** decay. The logarithm of the latter is a series of powers of 1 / 2,
    each of which takes the sum of a geometric sequence.
    """
    if not decay:
        return (0.5 * beta) ** count
    logarithm = sum(share * np.expm1(power * count) for share, power in _series(decay))
    return beta**count * np.exp(logarithm)


@lru_cache(maxsize=64)
def _series(decay: float) -> list[tuple[float, float]]:
    """Per term what it is multiplied with, and the logarithm of the ratio of its sequence; as many
    as a float64 can tell apart.
    """
    powers = [(term, math.log(0.96) * decay * term) for term in range(1, 54)]
    return [
        (-(0.5**term) / term * math.exp(power) / math.expm1(power), power) for term, power in powers
    ]


define_update(
    "nadam_update",
    "w F, g F, m F, v F, rate f () -> w F, m F, v F",
    _nadam,
    "(w, g, m, v, lr) -> (w', m', v'): NAdam (T. Dozat, 2016), Adam with Nesterov's momentum, "
    "which is beta1 * (1 - 0.96 ** (count * momentum_decay) / 2) in an update.",
    attrs=(*BETAS, EPS, Float("momentum_decay", least=0.0), DECAY, DECOUPLED),
)


def _radam(
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    rate: Any,
    count: Any,
    *,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
    decoupled: bool,
) -> Any:
    w, g = _decayed(w, g, rate, weight_decay, decoupled)
    m, v = _averaged(m, g, beta1), _averaged(v, g * g, beta2)
    share = rate / (1.0 - beta1**count)
    adaptive = of_numbers(_rectified, beta2, count)
    plain, floor = (of_numbers(each, beta2, count) for each in (_unrectified, _floor))
    step = m / (v.sqrt() + (eps + floor)) * (adaptive * share) + m * (plain * share)
    return w - step, m, v


def _length(beta2: float, count: Any) -> tuple[float, Any]:
    """How many gradients the second moment averages in the end, and now."""
    last = 2.0 / (1.0 - beta2) - 1.0
    power = beta2**count
    return last, last - 2.0 * count * power / (1.0 - power)


_LEAST_LENGTH = 5.0
"""Above it the variance of the adaptive rate is known well enough to correct it."""


def _rectified(beta2: float, count: Any) -> Any:
    """What multiplies the adaptive step; 0 as long as it is not taken."""
    last, now = _length(beta2, count)
    if last <= _LEAST_LENGTH:
        return 0.0
    ratio = (now - 4) * (now - 2) * last / ((last - 4) * (last - 2) * now)
    return np.sqrt(np.where(now > _LEAST_LENGTH, ratio * (1.0 - beta2**count), 0.0))


def _unrectified(beta2: float, count: Any) -> Any:
    """1 as long as the step is that of momentum alone."""
    return 1.0 * (_length(beta2, count)[1] <= _LEAST_LENGTH)


def _floor(beta2: float, count: Any) -> Any:
    """Added to a divisor that may be 0 as long as what is divided does not count."""
    return _unrectified(beta2, count)


define_update(
    "radam_update",
    "w F, g F, m F, v F, rate f () -> w F, m F, v F",
    _radam,
    "(w, g, m, v, lr) -> (w', m', v'): RAdam (L. Liu et al., 2020), Adam whose adaptive rate is "
    "corrected for its variance, and left out as long as that is not known.",
    attrs=(*BETAS, EPS, DECAY, DECOUPLED),
)


# --- steps that are scaled by norms of the whole parameter ----------------------------------------


def _lamb_direction(
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    count: Any,
    factor: Any = None,
    *,
    beta1: Any,
    beta2: Any,
    eps: Any,
    weight_decay: Any,
) -> Any:
    if factor is not None:
        g = g * factor
    m, v = _averaged(m, g, beta1), _averaged(v, g * g, beta2)
    correction = root(1.0 - beta2**count)
    step = m / (v.sqrt() + eps * correction) * (correction / (1.0 - beta1**count))
    return step + w * weight_decay if weight_decay else step, m, v


def trust_ratio(size: Any, length: Any) -> Any:
    """The root of the ratio of two sums of squares, or 1 where either is zero."""
    known = (size > 0) & (length > 0)
    return np.where(known, np.sqrt(size / np.where(known, length, 1.0)), 1.0)


for _control in ("", ", factor f (), count int32 ()"):
    define_update(
        "controlled_lamb_direction" if _control else "lamb_direction",
        f"w F ..., g F ..., m F ..., v F ...{_control} -> u F ..., m F ..., v F ...",
        _lamb_direction,
        "(w, g, m, v) -> (u, m', v'): the step of LAMB (Y. You et al., 2020) before it is "
        "scaled: Adam's with bias correction, plus weight_decay * w."
        + " Two scalars more, factor and count: g is multiplied with the factor, and the "
        "correction is that of the count-th update." * bool(_control),
        attrs=(*BETAS, EPS, DECAY),
    )
define_update(
    "lamb_update",
    "w F, u F, size f (), length f (), rate f () -> w F",
    lambda w, u, size, length, rate: w - u * (rate * of_numbers(trust_ratio, size, length)),
    "(w, u, sum of squares of w, of u, lr) -> w - lr * trust * u, where the trust ratio is "
    "the norm of w over that of u, or 1 where either is zero.",
)


define_update(
    "adafactor_vector_direction",
    "g F, v F -> u F, v F",
    lambda g, v, count, eps, power: _along(g, _averaged(v, g * g + eps, 1.0 - count**-power)),
    "(g, v) -> (u, v'): v' is the moving average of g² + eps with decay 1 - (step + 1) ** -power, "
    "and u = g / √v': the step of Adafactor (N. Shazeer, M. Stern, 2018) for what is no matrix.",
    attrs=(EPS, Float("power", least=0.0)),
)


def _along(g: Any, v: Any) -> tuple[Any, Any]:
    return g / v.sqrt(), v


def _adafactor(
    w: Any,
    u: Any,
    size: Any,
    length: Any,
    rate: Any,
    elements: Any,
    *,
    clip: Any,
    relative: bool,
    eps: Any,
    weight_decay: Any,
) -> Any:
    if relative:
        rate = rate * of_numbers(np.maximum, eps, root(size / elements))
    w, _ = _decayed(w, u, rate, weight_decay, True)
    return w - u * (rate / of_numbers(np.maximum, 1.0, root(length / elements) / clip))


define_update(
    "adafactor_update",
    "w F, u F, size f (), length f (), rate f () -> w F",
    _adafactor,
    "(w, u, sum of squares of w, of u, lr) -> w': Adafactor (N. Shazeer, M. Stern, 2018): "
    "w - rate * u / max(1, rms(u) / clip), where the rate is lr, times max(eps, rms(w)) if "
    "`relative`; weight decay is decoupled.",
    attrs=(Float("clip", least=1e-30), Bool("relative"), EPS, DECAY),
)
