"""Modules: layers that own named parameters. `import plancompiler as pc`, then
`pc.nn.Linear(...)`.
"""

from plancompiler.frontend.nn import functional
from plancompiler.frontend.nn.classes import PartialFC
from plancompiler.frontend.nn.convolution import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    Flatten,
    MaxPool2d,
)
from plancompiler.frontend.nn.data_norm import DataNorm
from plancompiler.frontend.nn.fused import (
    FusedAttention,
    FusedFeedForward,
    FusedMultiTransformer,
    FusedTransformerLayer,
    KeyValueCache,
    KeyValueCaches,
)
from plancompiler.frontend.nn.layers import (
    GELU,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    ModuleList,
    ReLU,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from plancompiler.frontend.nn.module import (
    Buffer,
    Module,
    Parameter,
)
from plancompiler.frontend.nn.normalization import (
    BatchNorm1d,
    BatchNorm2d,
    GroupNorm,
    RMSNorm,
)
from plancompiler.frontend.nn.transformer import (
    MLP,
    CausalSelfAttention,
    SwiGLU,
    TransformerBlock,
)

__all__ = [
    "GELU",
    "MLP",
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BatchNorm1d",
    "BatchNorm2d",
    "Buffer",
    "CausalSelfAttention",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "DataNorm",
    "Dropout",
    "Embedding",
    "Flatten",
    "FusedAttention",
    "FusedFeedForward",
    "FusedMultiTransformer",
    "FusedTransformerLayer",
    "GroupNorm",
    "KeyValueCache",
    "KeyValueCaches",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "Parameter",
    "PartialFC",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SwiGLU",
    "Tanh",
    "TransformerBlock",
    "functional",
]
