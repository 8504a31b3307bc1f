"""The public functions on tensors, by family: each names its own in `__all__`.

A function of each element of one tensor that no family names has its op's name all the same.
"""

from __future__ import annotations

from plancompiler.frontend.functions import (
    activation as _activation,
)
from plancompiler.frontend.functions import (
    assembly as _assembly,
)
from plancompiler.frontend.functions import (
    attention as _attention,
)
from plancompiler.frontend.functions import (
    classes as _classes,
)
from plancompiler.frontend.functions import (
    collective as _collective,
)
from plancompiler.frontend.functions import (
    convolution as _convolution,
)
from plancompiler.frontend.functions import (
    creation as _creation,
)
from plancompiler.frontend.functions import (
    data_norm as _data_norm,
)
from plancompiler.frontend.functions import (
    elementwise as _elementwise,
)
from plancompiler.frontend.functions import (
    experts as _experts,
)
from plancompiler.frontend.functions import (
    fused as _fused,
)
from plancompiler.frontend.functions import (
    indexing as _indexing,
)
from plancompiler.frontend.functions import (
    linear as _linear,
)
from plancompiler.frontend.functions import (
    losses as _losses,
)
from plancompiler.frontend.functions import (
    normalization as _normalization,
)
from plancompiler.frontend.functions import (
    random as _random,
)
from plancompiler.frontend.functions import (
    reduction as _reduction,
)
from plancompiler.frontend.functions import (
    searching as _searching,
)
from plancompiler.frontend.functions import (
    shape as _shape,
)
from plancompiler.frontend.functions import (
    statistics as _statistics,
)
from plancompiler.frontend.functions import (
    training as _training,
)
from plancompiler.frontend.functions.activation import *  # noqa: F403
from plancompiler.frontend.functions.assembly import *  # noqa: F403
from plancompiler.frontend.functions.attention import *  # noqa: F403
from plancompiler.frontend.functions.classes import *  # noqa: F403
from plancompiler.frontend.functions.collective import *  # noqa: F403
from plancompiler.frontend.functions.convolution import *  # noqa: F403
from plancompiler.frontend.functions.creation import *  # noqa: F403
from plancompiler.frontend.functions.data_norm import *  # noqa: F403
from plancompiler.frontend.functions.derived import unary
from plancompiler.frontend.functions.elementwise import *  # noqa: F403
from plancompiler.frontend.functions.experts import *  # noqa: F403
from plancompiler.frontend.functions.fused import *  # noqa: F403
from plancompiler.frontend.functions.indexing import *  # noqa: F403
from plancompiler.frontend.functions.linear import *  # noqa: F403
from plancompiler.frontend.functions.losses import *  # noqa: F403
from plancompiler.frontend.functions.normalization import *  # noqa: F403
from plancompiler.frontend.functions.random import *  # noqa: F403
from plancompiler.frontend.functions.reduction import *  # noqa: F403
from plancompiler.frontend.functions.searching import *  # noqa: F403
from plancompiler.frontend.functions.shape import *  # noqa: F403
from plancompiler.frontend.functions.statistics import *  # noqa: F403
from plancompiler.frontend.functions.training import *  # noqa: F403
from plancompiler.ops.registry import op_table

__all__: list[str] = []
__all__ += _activation.__all__
__all__ += _assembly.__all__
__all__ += _attention.__all__
__all__ += _classes.__all__
__all__ += _collective.__all__
__all__ += _convolution.__all__
__all__ += _creation.__all__
__all__ += _data_norm.__all__
__all__ += _elementwise.__all__
__all__ += _experts.__all__
__all__ += _fused.__all__
__all__ += _indexing.__all__
__all__ += _linear.__all__
__all__ += _losses.__all__
__all__ += _normalization.__all__
__all__ += _random.__all__
__all__ += _reduction.__all__
__all__ += _searching.__all__
__all__ += _shape.__all__
__all__ += _statistics.__all__
__all__ += _training.__all__

DERIVED = [
    kind
    for kind, definition in op_table().items()
    if definition.elementwise
    and not kind.endswith("_grad")
    and not definition.attrs
    and definition.input_counts == (1,)
    and kind not in __all__
]
"""Kinds of ops whose functions no family names."""
globals().update({kind: unary(kind) for kind in DERIVED})
__all__.extend(DERIVED)
