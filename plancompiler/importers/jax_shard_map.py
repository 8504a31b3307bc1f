"""`shard_map` of JAX functions: what it computes on all devices, as a function of whole arrays.

Arrays get an axis for each mesh axis along which they are split, and the function that runs on each
device is mapped over these axes (`jax.vmap`), where JAX's collectives are sums, gathers and
permutations along them. The axes of devices are split over the mesh, so that in a layout each rank
computes what its device would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from plancompiler.importers.jaxpr_rewriting import Rewriting

SPLIT = "plancompiler.split"
"""The target of a call for an array whose first axes are split over the mesh axes that it names."""
_INVARIANT = {"psum_invariant": "psum_p", "all_gather_invariant": "all_gather_p"}
"""Collectives whose results are typed as equal on all devices, and the same without such types."""


def without_shard_map(rewriting: Rewriting, closed: Any) -> Any:
    """A traced function, with the functions of whole arrays in the place of `shard_map`."""

    def instead(equation: Any) -> Any:
        if equation.primitive.name != "shard_map":
            return None
        return rewriting.in_place_of(equation, _Mapped(rewriting, equation).computed)

    return rewriting.closed(closed, instead)


class _Mapped:
    """One `shard_map`."""

    def __init__(self, rewriting: Rewriting, equation: Any) -> None:
        self._rewriting = rewriting
        (plain,) = rewriting.jax.make_jaxpr(lambda x: x + 1)(0).eqns
        self._outside = plain.ctx
        """The context of an equation that knows no mesh."""
        params: Mapping[str, Any] = equation.params
        sizes = dict(params["mesh"].shape)
        rewriting.meshes[f"shard_map {len(rewriting.meshes)}"] = sizes
        self._sizes = {name: sizes[name] for name in sizes if name in params["newly_manual_axes"]}
        self._in_specs, self._out_specs = params["in_specs"], params["out_specs"]
        # Some may be inside of others.
        inner = without_shard_map(rewriting, rewriting.core.ClosedJaxpr(params["jaxpr"], ()))
        self._variables: dict[Any, Any] = {}
        self._body = rewriting.closed(inner, self._untyped, self._variable)

    def _untyped(self, equation: Any) -> Any:
        """An equation as it is outside, and without what only says along which mesh axes values
        differ.
        """
        name, primitives = equation.primitive.name, self._rewriting.core.primitives
        if name in ("pvary", "pcast"):
            for made, given in zip(equation.outvars, equation.invars, strict=True):
                self._variables[made] = self._variable(given)
            return []
        equation = self._rewriting.within(equation, self._untyped, self._variable)
        equation = equation.replace(
            ctx=self._outside,
            invars=[self._variable(each) for each in equation.invars],
            outvars=[self._variable(each) for each in equation.outvars],
        )
        if name not in _INVARIANT:
            return equation
        params = {"axis_index_groups": None, **equation.params}
        return equation.replace(primitive=getattr(primitives, _INVARIANT[name]), params=params)

    def _variable(self, variable: Any) -> Any:
        """A variable or number whose type knows no mesh; the same for the same variable."""
        jax, kind = self._rewriting.jax, variable.aval
        plain = jax.core.ShapedArray(kind.shape, kind.dtype, weak_type=kind.weak_type)
        if isinstance(variable, self._rewriting.core.Literal):
            return type(variable)(variable.val, plain)
        return self._variables.setdefault(variable, type(variable)(plain))

    def computed(self, *operands: Any) -> Any:
        """What all devices compute, of whole arrays."""
        jax, core = self._rewriting.jax, self._rewriting.core
        parts = [_axes(spec, x.ndim) for spec, x in zip(self._in_specs, operands, strict=True)]
        apart = [self._apart(x, axes) for x, axes in zip(operands, parts, strict=True)]
        function: Any = core.jaxpr_as_fun(self._body)
        for name in reversed(self._sizes):
            split = [0 if any(name in each for each in axes) else None for axes in parts]
            function = jax.vmap(
                function, split, out_axes=0, axis_name=name, axis_size=self._sizes[name]
            )
        return [
            self._together(y, _axes(spec, y.ndim - len(self._sizes)))
            for y, spec in zip(function(*apart), self._out_specs, strict=True)
        ]

    def _apart(self, x: Any, axes: Sequence[tuple[str, ...]]) -> Any:
        """[mesh axes in their order, axes of a device]."""
        shape: list[int] = []
        place: dict[str, int] = {}
        for extent, names in zip(x.shape, axes, strict=True):
            for name in names:
                place[name] = len(shape)
                shape.append(self._sizes[name])
            shape.append(extent // math.prod(self._sizes[name] for name in names))
        order = [name for name in self._sizes if name in place]
        inner = [at for at in range(len(shape)) if at not in place.values()]
        return self._placed(
            x.reshape(shape).transpose([*(place[name] for name in order), *inner]), order
        )

    def _together(self, y: Any, axes: Sequence[tuple[str, ...]]) -> Any:
        """A whole array of [mesh axes, axes of a device]; along mesh axes along which it is not
        split all devices have the same.
        """
        split = {name for names in axes for name in names}
        y = y[tuple(slice(None) if name in split else 0 for name in self._sizes)]
        order = [name for name in self._sizes if name in split]
        y = self._placed(y, order)
        turned: list[int] = []
        shape = []
        for at, names in enumerate(axes):
            turned += [*(order.index(name) for name in names), len(order) + at]
            extent = y.shape[len(order) + at]
            shape.append(extent * math.prod(self._sizes[name] for name in names))
        return y.transpose(turned).reshape(shape)

    def _placed(self, x: Any, names: Sequence[str]) -> Any:
        """An array whose first axes are split over these mesh axes."""
        return self._rewriting.call(SPLIT, x, config=" ".join(names)) if names else x


def _axes(spec: Any, count: int) -> list[tuple[str, ...]]:
    """The mesh axes along which each axis of an array is split."""
    every = (*spec, *[None] * (count - len(spec)))
    return [
        () if each is None else (each,) if isinstance(each, str) else tuple(each) for each in every
    ]
