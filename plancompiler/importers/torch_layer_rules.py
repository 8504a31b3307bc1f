"""The rules of PyTorch's layers and losses, which are functions of `pc.nn.functional`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plancompiler.frontend.functions import assembly
from plancompiler.frontend.nn import functional as f
from plancompiler.frontend.nn.functional import recurrence
from plancompiler.importers.rules import define, torch_rule

# Arguments have the names and the order that PyTorch gives them; only those that calls name matter.

# --- losses ---------------------------------------------------------------------------------------

_REDUCTIONS = ("none", "mean", "sum")
"""By PyTorch's numbers."""


def _reducing(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A loss whose arguments have these names in this order; a reduction is a number."""

    def rule(*given: Any, **named: Any) -> Any:
        arguments = {**dict(zip(names, given, strict=False)), **named}
        if "reduction" in arguments:
            arguments["reduction"] = _REDUCTIONS[arguments["reduction"]]
        return function(**arguments)

    return rule


_TWO = ("input", "target")
_THREE = ("input1", "input2", "target")
define(
    {
        "aten.cross_entropy_loss.default": _reducing(
            f.cross_entropy,
            *(*_TWO, "weight", "reduction", "ignore_index", "label_smoothing"),
        ),
        "aten.nll_loss_nd.default aten.nll_loss.default aten.nll_loss2d.default": _reducing(
            f.nll_loss, *_TWO, "weight", "reduction", "ignore_index"
        ),
        "aten.mse_loss.default": _reducing(f.mse_loss, *_TWO, "reduction"),
        "aten.l1_loss.default": _reducing(f.l1_loss, *_TWO, "reduction"),
        "aten.smooth_l1_loss.default": _reducing(f.smooth_l1_loss, *_TWO, "reduction", "beta"),
        "aten.huber_loss.default": _reducing(f.huber_loss, *_TWO, "reduction", "delta"),
        "aten.binary_cross_entropy.default": _reducing(
            f.binary_cross_entropy, *_TWO, "weight", "reduction"
        ),
        "aten.binary_cross_entropy_with_logits.default": _reducing(
            f.binary_cross_entropy_with_logits, *_TWO, "weight", "pos_weight", "reduction"
        ),
        "aten.kl_div.default": _reducing(f.kl_div, *_TWO, "reduction", "log_target"),
        "aten.soft_margin_loss.default": _reducing(f.soft_margin_loss, *_TWO, "reduction"),
        "aten.multilabel_margin_loss.default": _reducing(
            f.multilabel_margin_loss, *_TWO, "reduction"
        ),
        "aten.multi_margin_loss.default": _reducing(
            f.multi_margin_loss, *_TWO, "p", "margin", "weight", "reduction"
        ),
        "aten.poisson_nll_loss.default": _reducing(
            f.poisson_nll_loss, *_TWO, "log_input", "full", "eps", "reduction"
        ),
        "aten.hinge_embedding_loss.default": _reducing(
            f.hinge_embedding_loss, *_TWO, "margin", "reduction"
        ),
        "aten.margin_ranking_loss.default": _reducing(
            f.margin_ranking_loss, *_THREE, "margin", "reduction"
        ),
        "aten.cosine_embedding_loss.default": _reducing(
            f.cosine_embedding_loss, *_THREE, "margin", "reduction"
        ),
        "aten.triplet_margin_loss.default": _reducing(
            f.triplet_margin_loss,
            *("anchor", "positive", "negative", "margin", "p", "eps", "swap", "reduction"),
        ),
        "aten.cosine_similarity.default": f.cosine_similarity,
        "aten.pairwise_distance.default": f.pairwise_distance,
    }
)

# --- activations ----------------------------------------------------------------------------------

define(
    {
        "aten.celu.default": f.celu,
        "aten.prelu.default": f.prelu,
        "aten.rrelu.default": lambda x, lower=1 / 8, upper=1 / 3, training=False, generator=None: (
            f.rrelu(x, lower, upper, training)
        ),
        "aten.threshold.default": f.threshold,
    }
)

# --- pooling --------------------------------------------------------------------------------------


def _size(sizes: Any) -> Any:
    """A list of one number stands for all axes."""
    return sizes[0] if isinstance(sizes, (list, tuple)) and len(sizes) == 1 else sizes


def _inside(x: Any, axes: int, kernel: Any, padding: Any) -> list[int]:
    """A window no larger than the padded input: with `ceil_mode` PyTorch cuts a larger one."""
    windows, pads = (
        list(each) * (axes // len(each)) if isinstance(each, (list, tuple)) else [each] * axes
        for each in (kernel, padding)
    )
    extents = x.shape[-axes:]
    return [
        min(window, extent + 2 * pad)
        for window, extent, pad in zip(windows, extents, pads, strict=True)
    ]


def _max_pool(axes: int, *, places: bool = False) -> Callable[..., Any]:
    function = (f.max_pool1d, f.max_pool2d, f.max_pool3d)[axes - 1]

    def rule(
        x: Any,
        kernel: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        stride, dilation = _size(stride) or _size(kernel), _size(dilation)
        if ceil_mode and dilation in (1, [1] * axes):
            kernel = _inside(x, axes, kernel, padding)
        return function(x, _size(kernel), stride, _size(padding), dilation, ceil_mode, places)

    return rule


def _avg_pool(axes: int) -> Callable[..., Any]:
    function = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)[axes - 1]

    def rule(x: Any, kernel: Any, stride: Any = None, padding: Any = 0, *more: Any) -> Any:
        stride = _size(stride) or _size(kernel)
        if more and more[0]:
            kernel = _inside(x, axes, kernel, padding)
        return function(x, _size(kernel), stride, _size(padding), *more)

    return rule


for _axes in (1, 2, 3):
    torch_rule(f"aten.max_pool{_axes}d.default")(_max_pool(_axes))
    torch_rule(f"aten.max_pool{_axes}d_with_indices.default")(_max_pool(_axes, places=True))
    torch_rule(f"aten.avg_pool{_axes}d.default")(_avg_pool(_axes))


def _with_places(function: Callable[..., Any]) -> Callable[..., Any]:
    """The greatest elements, and where they are, which nobody reads."""
    return lambda x, size: (function(x, _size(size)), None)


define(
    {
        "aten.adaptive_avg_pool1d.default": f.adaptive_avg_pool1d,
        "aten.adaptive_avg_pool2d.default": f.adaptive_avg_pool2d,
        "aten.adaptive_avg_pool3d.default": f.adaptive_avg_pool3d,
        "aten.adaptive_max_pool1d.default": _with_places(f.adaptive_max_pool1d),
        "aten.adaptive_max_pool2d.default": _with_places(f.adaptive_max_pool2d),
        "aten.adaptive_max_pool3d.default": _with_places(f.adaptive_max_pool3d),
    }
)

# --- space ----------------------------------------------------------------------------------------


def _interpolation(mode: str, *, corners: bool, antialias: bool = False) -> Callable[..., Any]:
    def rule(x: Any, size: Any, *more: Any) -> Any:
        align, factors = more if corners else (None, *more)
        wanted = {"size": size} if size is not None else {"scale_factor": factors}
        return f.interpolate(x, mode=mode, align_corners=align, antialias=antialias, **wanted)

    return rule


for _axes, _linear in enumerate(("linear", "bilinear", "trilinear"), 1):
    define(
        {
            f"aten.upsample_nearest{_axes}d.vec": _interpolation("nearest", corners=False),
            f"aten._upsample_nearest_exact{_axes}d.vec": _interpolation(
                "nearest-exact", corners=False
            ),
            f"aten.upsample_{_linear}{_axes}d.vec": _interpolation(_linear, corners=True),
        }
    )


def _grid_sample(x: Any, grid: Any, mode: int, padding: int, align_corners: bool) -> Any:
    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    return f.grid_sample(x, grid, modes[mode], paddings[padding], align_corners)


define(
    {
        "aten.upsample_bicubic2d.vec": _interpolation("bicubic", corners=True),
        "aten._upsample_bilinear2d_aa.vec": _interpolation(
            "bilinear", corners=True, antialias=True
        ),
        "aten._upsample_bicubic2d_aa.vec": _interpolation("bicubic", corners=True, antialias=True),
        "aten.grid_sampler.default": _grid_sample,
        "aten.affine_grid_generator.default": f.affine_grid,
        "aten.pad.default": f.pad,
        "aten.constant_pad_nd.default": lambda x, pad, value=0: f.pad(x, pad, "constant", value),
        "aten.pixel_shuffle.default": f.pixel_shuffle,
        "aten.pixel_unshuffle.default": f.pixel_unshuffle,
        "aten.channel_shuffle.default": f.channel_shuffle,
        "aten.im2col.default": f.unfold,
        "aten.col2im.default": f.fold,
        "aten.broadcast_tensors.default": lambda tensors: assembly.broadcast_tensors(*tensors),
    }
)

# --- norms, bags of rows, and products ------------------------------------------------------------


def _embedding_bag(
    weight: Any,
    ids: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    padding = None if padding_idx is None or padding_idx < 0 else padding_idx
    bags = f.embedding_bag(
        ids,
        weight,
        offsets,
        scale_grad_by_freq=scale_grad_by_freq,
        mode=("sum", "mean", "max")[mode],
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding,
    )
    return bags, None, None, None


define(
    {
        "aten.layer_norm.default": lambda x, shape, weight=None, bias=None, eps=1e-5, *rest: (
            f.layer_norm(x, shape, weight, bias, eps)
        ),
        "aten.rms_norm.default": f.rms_norm,
        "aten.group_norm.default": lambda x, groups, weight=None, bias=None, eps=1e-5, *rest: (
            f.group_norm(x, groups, weight, bias, eps)
        ),
        "aten.instance_norm.default": lambda x, weight, bias, mean, var, own, share, eps, *rest: (
            f.instance_norm(x, mean, var, weight, bias, own, share, eps)
        ),
        "aten.embedding_bag.padding_idx": _embedding_bag,
        "aten.bilinear.default": f.bilinear,
    }
)

# --- recurrent layers -----------------------------------------------------------------------------


def _recurrent(kind: str, **attrs: str) -> Callable[..., Any]:
    def rule(
        x: Any,
        states: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        directions = 2 if bidirectional else 1
        each = len(params) // (num_layers * directions)
        weights = [list(params[at : at + each]) for at in range(0, len(params), each)]
        for one in weights:
            if not has_biases:
                one[2:2] = [None, None]
        given = list(states) if kind == "lstm" else [states]
        x = x.transpose((1, 0, 2)) if batch_first else x
        rate = dropout if train else 0.0
        made, last = recurrence.layers(kind, x, given, weights, directions, rate, **attrs)
        return (made.transpose((1, 0, 2)) if batch_first else made, *last)

    return rule


def _cell(kind: str, **attrs: str) -> Callable[..., Any]:
    def rule(x: Any, states: Any, *weights: Any) -> Any:
        given = list(states) if kind == "lstm" else [states]
        row = x.reshape((1, *x.shape))
        made = recurrence.direction(kind, row, given, weights, False, **attrs)
        return (made[0][0], made[1][0]) if kind == "lstm" else made[0][0]

    return rule


define(
    {
        "aten.lstm.input": _recurrent("lstm"),
        "aten.gru.input": _recurrent("gru"),
        "aten.rnn_tanh.input": _recurrent("rnn", nonlinearity="tanh"),
        "aten.rnn_relu.input": _recurrent("rnn", nonlinearity="relu"),
        "aten.lstm_cell.default": _cell("lstm"),
        "aten.gru_cell.default": _cell("gru"),
        "aten.rnn_tanh_cell.default": _cell("rnn", nonlinearity="tanh"),
        "aten.rnn_relu_cell.default": _cell("rnn", nonlinearity="relu"),
    }
)
