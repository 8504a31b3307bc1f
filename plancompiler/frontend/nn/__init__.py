"""Modules: layers that own named parameters. `import plancompiler as pc`, then
`pc.nn.Linear(...)`.
"""

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
    Tanh,
)
from plancompiler.frontend.nn.module import Module, Parameter
from plancompiler.frontend.nn.transformer import MLP, CausalSelfAttention, TransformerBlock

__all__ = [
    "GELU",
    "MLP",
    "CausalSelfAttention",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleList",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Tanh",
    "TransformerBlock",
]
