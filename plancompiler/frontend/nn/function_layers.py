"""Layers that are one function of `pc.nn.functional` each: activations, losses, pooling, padding
and changes of shape.

Such a layer takes what its function takes beside tensors, in the same order, and keeps it. It has a
function's name and documentation; only what is said here is said of it alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import UsageError
from plancompiler.frontend.nn import functional
from plancompiler.frontend.nn.module import Buffer, Module
from plancompiler.ir import DType
from plancompiler.ir.source import user_line

_OF_ARRAYS = ("weight", "pos_weight")
"""Options that are tensors: a layer keeps them as buffers."""


class FunctionLayer(Module):
    """A layer that is a function of its inputs and of options that stay."""

    function: Callable[..., Any]
    options: inspect.Signature
    """What the layer is made with: the function's parameters behind its tensors."""
    trains: bool
    """Whether the function does another thing while training."""

    def __init__(self, *args: Any, **named: Any) -> None:
        cls = type(self)
        named.pop("inplace", None)  # no layer changes its input, whoever asks for it
        try:
            bound = cls.options.bind(*args, **named)
        except TypeError as failure:
            raise UsageError(
                f"{cls.__name__} takes other arguments",
                source=user_line(),
                got=str(failure),
                expected=f"{cls.__name__}{cls.options}",
            ) from failure
        self.arguments = dict(bound.arguments)
        for name in _OF_ARRAYS:
            array = self.arguments.get(name)
            if array is not None:
                setattr(self, name, _buffer(array))

    def forward(self, *inputs: Any) -> Any:
        given = dict(self.arguments)
        for name in _OF_ARRAYS:
            if given.get(name) is not None:
                given[name] = getattr(self, name).value
        if self.trains:
            given["training"] = self.training
        return self.function(*inputs, **given)


def _buffer(value: Any) -> Buffer:
    """Numbers as a buffer: an array, a list, or an eager tensor."""
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if not np.issubdtype(array.dtype, np.floating) or (
        array.dtype == np.float64
        and not isinstance(value, np.ndarray)
        and not hasattr(value, "numpy")
    ):
        array = array.astype(np.float32)
    return Buffer(array.shape, str(DType.parse(array.dtype)), array)


def _layer(
    name: str, function: Callable[..., Any], tensors: int = 1, **fixed: Any
) -> type[FunctionLayer]:
    """The layer of a function whose first parameters are tensors; `fixed` are options that the
    layer's name says.
    """
    if fixed:
        whole = function

        def function(*args: Any, **named: Any) -> Any:
            return whole(*args, **fixed, **named)

        signature = inspect.signature(whole)
        kept = [each for each in signature.parameters.values() if each.name not in fixed]
        function.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]  # as `inspect` asks for
        function.__doc__ = (whole.__doc__ or "") + "".join(
            f"\n    `{option}` is {value!r}." for option, value in fixed.items()
        )
    given = list(inspect.signature(function).parameters.values())[tensors:]
    options = inspect.Signature([each for each in given if each.name != "training"])
    return type(
        name,
        (FunctionLayer,),
        {
            "function": staticmethod(function),
            "options": options,
            "trains": len(options.parameters) < len(given),
            "__doc__": function.__doc__,
            "__module__": __name__,
        },
    )


f = functional

# --- activations ----------------------------------------------------------------------------------

CELU = _layer("CELU", f.celu)
ELU = _layer("ELU", f.elu)
GELU = _layer("GELU", f.gelu)
GLU = _layer("GLU", f.glu)
Hardshrink = _layer("Hardshrink", f.hardshrink)
Hardsigmoid = _layer("Hardsigmoid", f.hardsigmoid)
Hardswish = _layer("Hardswish", f.hardswish)
Hardtanh = _layer("Hardtanh", f.hardtanh)
LeakyReLU = _layer("LeakyReLU", f.leaky_relu)
LogSigmoid = _layer("LogSigmoid", f.logsigmoid)
LogSoftmax = _layer("LogSoftmax", f.log_softmax)
Mish = _layer("Mish", f.mish)
RReLU = _layer("RReLU", f.rrelu)
ReLU6 = _layer("ReLU6", f.relu6)
SELU = _layer("SELU", f.selu)
Softmax2d = _layer("Softmax2d", f.softmax, dim=-3)
Softmin = _layer("Softmin", f.softmin)
Softplus = _layer("Softplus", f.softplus)
Softshrink = _layer("Softshrink", f.softshrink)
Softsign = _layer("Softsign", f.softsign)
Tanhshrink = _layer("Tanhshrink", f.tanhshrink)
Threshold = _layer("Threshold", f.threshold)

AlphaDropout = _layer("AlphaDropout", f.alpha_dropout)
Dropout1d = _layer("Dropout1d", f.dropout1d)
Dropout2d = _layer("Dropout2d", f.dropout2d)
Dropout3d = _layer("Dropout3d", f.dropout3d)
FeatureAlphaDropout = _layer("FeatureAlphaDropout", f.feature_alpha_dropout)

# --- losses ---------------------------------------------------------------------------------------

BCELoss = _layer("BCELoss", f.binary_cross_entropy, 2)
BCEWithLogitsLoss = _layer("BCEWithLogitsLoss", f.binary_cross_entropy_with_logits, 2)
CTCLoss = _layer("CTCLoss", f.ctc_loss, 4)
CosineEmbeddingLoss = _layer("CosineEmbeddingLoss", f.cosine_embedding_loss, 3)
CrossEntropyLoss = _layer("CrossEntropyLoss", f.cross_entropy, 2)
GaussianNLLLoss = _layer("GaussianNLLLoss", f.gaussian_nll_loss, 3)
HingeEmbeddingLoss = _layer("HingeEmbeddingLoss", f.hinge_embedding_loss, 2)
HuberLoss = _layer("HuberLoss", f.huber_loss, 2)
KLDivLoss = _layer("KLDivLoss", f.kl_div, 2)
L1Loss = _layer("L1Loss", f.l1_loss, 2)
MSELoss = _layer("MSELoss", f.mse_loss, 2)
MarginRankingLoss = _layer("MarginRankingLoss", f.margin_ranking_loss, 3)
MultiLabelMarginLoss = _layer("MultiLabelMarginLoss", f.multilabel_margin_loss, 2)
MultiLabelSoftMarginLoss = _layer("MultiLabelSoftMarginLoss", f.multilabel_soft_margin_loss, 2)
MultiMarginLoss = _layer("MultiMarginLoss", f.multi_margin_loss, 2)
NLLLoss = _layer("NLLLoss", f.nll_loss, 2)
PoissonNLLLoss = _layer("PoissonNLLLoss", f.poisson_nll_loss, 2)
SmoothL1Loss = _layer("SmoothL1Loss", f.smooth_l1_loss, 2)
SoftMarginLoss = _layer("SoftMarginLoss", f.soft_margin_loss, 2)
TripletMarginLoss = _layer("TripletMarginLoss", f.triplet_margin_loss, 3)
TripletMarginWithDistanceLoss = _layer(
    "TripletMarginWithDistanceLoss", f.triplet_margin_with_distance_loss, 3
)
CosineSimilarity = _layer("CosineSimilarity", f.cosine_similarity, 2)
PairwiseDistance = _layer("PairwiseDistance", f.pairwise_distance, 2)

# --- pooling --------------------------------------------------------------------------------------

AdaptiveAvgPool1d = _layer("AdaptiveAvgPool1d", f.adaptive_avg_pool1d)
AdaptiveAvgPool2d = _layer("AdaptiveAvgPool2d", f.adaptive_avg_pool2d)
AdaptiveAvgPool3d = _layer("AdaptiveAvgPool3d", f.adaptive_avg_pool3d)
AdaptiveMaxPool1d = _layer("AdaptiveMaxPool1d", f.adaptive_max_pool1d)
AdaptiveMaxPool2d = _layer("AdaptiveMaxPool2d", f.adaptive_max_pool2d)
AdaptiveMaxPool3d = _layer("AdaptiveMaxPool3d", f.adaptive_max_pool3d)
AvgPool1d = _layer("AvgPool1d", f.avg_pool1d)
AvgPool2d = _layer("AvgPool2d", f.avg_pool2d)
AvgPool3d = _layer("AvgPool3d", f.avg_pool3d)
LPPool1d = _layer("LPPool1d", f.lp_pool1d)
LPPool2d = _layer("LPPool2d", f.lp_pool2d)
LPPool3d = _layer("LPPool3d", f.lp_pool3d)
MaxPool1d = _layer("MaxPool1d", f.max_pool1d)
MaxPool2d = _layer("MaxPool2d", f.max_pool2d)
MaxPool3d = _layer("MaxPool3d", f.max_pool3d)
MaxUnpool1d = _layer("MaxUnpool1d", f.max_unpool1d, 2)
MaxUnpool2d = _layer("MaxUnpool2d", f.max_unpool2d, 2)
MaxUnpool3d = _layer("MaxUnpool3d", f.max_unpool3d, 2)

# --- shapes ---------------------------------------------------------------------------------------

ChannelShuffle = _layer("ChannelShuffle", f.channel_shuffle)
Fold = _layer("Fold", f.fold)
LocalResponseNorm = _layer("LocalResponseNorm", f.local_response_norm)
PixelShuffle = _layer("PixelShuffle", f.pixel_shuffle)
PixelUnshuffle = _layer("PixelUnshuffle", f.pixel_unshuffle)
Unfold = _layer("Unfold", f.unfold)
Upsample = _layer("Upsample", f.interpolate)
UpsamplingBilinear2d = _layer(
    "UpsamplingBilinear2d", f.interpolate, mode="bilinear", align_corners=True
)
UpsamplingNearest2d = _layer("UpsamplingNearest2d", f.interpolate, mode="nearest")


def _padding(axes: int, mode: str) -> Callable[..., Any]:
    """Padding of as many axes; one number stands for all ends."""

    def function(input: Any, padding: int | Sequence[int], value: float = 0.0) -> Any:  # noqa: A002  # PyTorch's name
        amounts = [padding] * (2 * axes) if isinstance(padding, int) else list(padding)
        if len(amounts) != 2 * axes:
            raise UsageError(
                "padding needs a number, or two for each axis", got=padding, expected=2 * axes
            )
        return f.pad(input, amounts, mode, value if mode == "constant" else None)

    function.__doc__ = (
        f"The last {axes} axes padded, {mode}: by one number at all ends, or before and after the "
        "last axis, then the one before it, and so on. See `pc.nn.functional.pad`."
    )
    return function


CircularPad1d, CircularPad2d, CircularPad3d = (
    _layer(f"CircularPad{axes}d", _padding(axes, "circular"), value=0.0) for axes in (1, 2, 3)
)
ConstantPad1d, ConstantPad2d, ConstantPad3d = (
    _layer(f"ConstantPad{axes}d", _padding(axes, "constant")) for axes in (1, 2, 3)
)
ReflectionPad1d, ReflectionPad2d, ReflectionPad3d = (
    _layer(f"ReflectionPad{axes}d", _padding(axes, "reflect"), value=0.0) for axes in (1, 2, 3)
)
ReplicationPad1d, ReplicationPad2d, ReplicationPad3d = (
    _layer(f"ReplicationPad{axes}d", _padding(axes, "replicate"), value=0.0) for axes in (1, 2, 3)
)
ZeroPad1d, ZeroPad2d, ZeroPad3d = (
    _layer(f"ZeroPad{axes}d", _padding(axes, "constant"), value=0.0) for axes in (1, 2, 3)
)
