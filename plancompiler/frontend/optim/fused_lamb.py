"""LAMB for data-parallel training: gradients are reduced to shards, moments are shards, and
parameters are gathered.

In a job that is what the `zero` pass makes of it. Outside of jobs the parameters that are broadcast
lie behind each other in one flat buffer per placement, so that a step takes one reduce-scatter, two
small all-reduces and one all-gather, however many parameters there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from plancompiler.errors import AttributeValueError, UsageError
from plancompiler.frontend.functions.shape import concat
from plancompiler.frontend.functions.training import beside, square_sum_of_all, square_sums
from plancompiler.frontend.optim.eager import EagerSteps, OptimizerState
from plancompiler.frontend.optim.elementwise import Given
from plancompiler.frontend.optim.optimizer import State, Update, attributes_of
from plancompiler.frontend.optim.parameter_group import ParameterGroup, Parameters
from plancompiler.frontend.optim.schedule import Rate
from plancompiler.frontend.optim.whole import LAMB
from plancompiler.frontend.trace import JobBuilder
from plancompiler.ir import BROADCAST, AttrValue, NdSbp, Partial, Phase, Split, Value
from plancompiler.ir.arguments import real_number, whole_number
from plancompiler.ir.sbp import PARTIAL_SUM
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import apply

Tensor = Any
"""A tensor outside of jobs."""

_EPS = 1e-6
"""Added to the norm that clipping divides by, as `clip_by_global_norm` does."""


class DistributedFusedLamb(LAMB):
    """LAMB (Y. You et al., 2020) that reduces gradients to shards, skips steps whose gradients are
    not finite, clips, and adds gradients up over steps.

    An update is made every `accumulate` steps, from the mean of their gradients. `max_norm` clips
    all gradients together, `clip` "after" their reduction or "before" it: then every device scales
    what it adds by the norm of that, in every step, and all parameters must be broadcast. An update
    from gradients of which any is infinite or no number, or the sum of whose squares is, leaves
    parameters, moments and the count of updates as they are, on all devices.

    In a job give `pc.Config(zero=1, 2 or 3, dp_axes=...)` to have gradients, moments and updates
    split. Outside of jobs moments of broadcast parameters are split over their whole placement.
    """

    def __init__(
        self,
        params: Given = None,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        max_norm: float | None = None,
        clip: str = "after",
        accumulate: int = 1,
        *,
        maximize: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, maximize=maximize, parameters=parameters
        )
        if clip not in ("after", "before"):
            raise AttributeValueError(
                "gradients are clipped after or before their reduction",
                got=repr(clip),
                expected="'after' or 'before'",
            )
        self.max_norm = None if max_norm is None else real_number("max_norm", max_norm)
        if self.max_norm is not None and not self.max_norm > 0:
            raise UsageError("a norm is clipped to a positive number", got=max_norm)
        self.clip = clip
        self.accumulate = whole_number("accumulate", accumulate)
        if self.accumulate < 1:
            raise UsageError("an update needs the gradients of one step at least", got=accumulate)

    def states_of(
        self, value: Value, sbp: NdSbp | None, numbers: Mapping[str, Any]
    ) -> Iterable[State]:
        states = list(super().states_of(value, sbp, numbers))
        # Outside of jobs gradients are added up as they lie, before their reduction.
        if self.accumulate > 1 and isinstance(value, Value):
            states.append((_SUM, value.shape, sbp))
        return states

    def append_updates(self, builder: JobBuilder, updates: Iterable[Update]) -> None:
        every = list(updates)
        for value, *_ in every:
            self.check_layout(value, builder.producer(value).sbp)
        first = every[0][0]
        attrs: dict[str, AttrValue] = {
            "name": f"{builder.producer(first).attr('name')}.{_COUNT}",
            "shape": (),
            "dtype": "int32",
            "init": "zeros",
            "init_args": (),
            "trainable": False,
        }
        count = builder.add("variable", (), attrs, first.placement)[0]
        # They belong to backward: what splits the update reduces what they make.
        with builder.phase(Phase.BACKWARD):
            grads = self.clipped([grad for _, grad, _, _, _ in every])
        summed = [
            grad if len(states) < _STATES else self.added(states[-1], grad)
            for grad, (_, _, states, _, _) in zip(grads, every, strict=True)
        ]
        control = self.control(square_sum_of_all(summed), count)
        for grad, (value, _, states, rate, numbers) in zip(summed, every, strict=True):
            self.update(value, grad, states, rate, control, numbers)

    def check_layout(self, value: Tensor, sbp: NdSbp | None) -> None:
        """Raise UsageError for a parameter whose gradient cannot be clipped before reduction."""
        split = sbp is not None and any(
            entry != BROADCAST and extent > 1
            for entry, extent in zip(sbp, value.placement.hierarchy, strict=True)
        )
        if self.max_norm is not None and self.clip == "before" and split:
            raise UsageError(
                "gradients are clipped before their reduction where parameters are broadcast",
                source=user_line(),
                got=f"{value.type} as {sbp}" if isinstance(value, Value) else str(value),
                hint="clip after the reduction",
            )

    def clipped(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of one step as they are reduced."""
        if self.max_norm is None or self.clip == "after":
            return list(grads)
        places = dict.fromkeys(grad.placement for grad in grads)
        if len(places) > 1:
            raise UsageError(
                "gradients on several placements have no norm before their reduction",
                source=user_line(),
                got=" and ".join(map(str, places)),
                hint="clip after the reduction",
            )
        addends = apply("clip_addends", *grads, max_norm=self.max_norm, eps=_EPS)
        return [addends] if len(grads) == 1 else list(addends)

    def added(self, total: Tensor, grad: Tensor) -> Tensor:
        """The next value of the sum of gradients over steps."""
        return apply("gradient_sum_update", total, grad, every=self.accumulate)

    def control(self, squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What gradients are multiplied with, whether nothing is updated, and the count."""
        limit = self.max_norm if self.max_norm is not None and self.clip == "after" else 0.0
        control: tuple[Tensor, Tensor, Tensor] = apply(
            "lamb_control", squares, count, every=self.accumulate, max_norm=limit, eps=_EPS
        )
        return control

    def direction(
        self,
        value: Tensor,
        grad: Tensor,
        states: Sequence[Tensor],
        control: Sequence[Tensor],
        numbers: Mapping[str, Any],
    ) -> Tensor:
        """The step before it is scaled; the moments change."""
        factor, skipped, count = (beside(each, value) for each in control)
        return apply(
            "guarded_controlled_lamb_direction",
            value,
            grad,
            states[0],
            states[1],
            factor,
            count,
            skipped,
            **attributes_of("controlled_lamb_direction", numbers),
        )[0]

    def update(
        self,
        value: Tensor,
        grad: Tensor,
        states: Sequence[Tensor],
        rate: Tensor,
        control: Sequence[Tensor],
        numbers: Mapping[str, Any],
    ) -> None:
        """Append the update of one parameter."""
        step = self.direction(value, grad, states, control, numbers)
        skipped = beside(control[1], value)
        apply("guarded_lamb_update", value, step, *square_sums(value, step), rate, skipped)


_STATES = 3
"""States of a parameter whose gradients are added up."""
_MOMENTS = ("lamb_m", "lamb_v")
_SUM = "lamb_gradient"
_COUNT = "lamb_count"
"""Updates so far: a state that is named after the first parameter."""


class _Flat:
    """Parameters of one placement and dtype that are broadcast, and their moments in one buffer."""

    def __init__(self, tensors: Sequence[Tensor], moments: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self.moments = moments
        self.sizes = tuple(int(np.prod(tensor.shape)) for tensor in tensors)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of these shapes behind each other."""
        return concat([tensor.reshape(-1) for tensor in tensors])

    def parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its segment of a buffer, in its shape."""
        whole, start = flat.redistribute(sbp=self.tensors[0].sbp), 0
        for tensor, size in zip(self.tensors, self.sizes, strict=True):
            yield tensor, whole[start : start + size].reshape(tensor.shape)
            start += size


class _FlatSteps(EagerSteps):
    """Steps on flat buffers; parameters that are split are updated one by one."""

    def __init__(self, optimizer: DistributedFusedLamb, world: Any) -> None:
        super().__init__(optimizer, world)
        self._groups: dict[object, _Flat] = {}
        self._totals: dict[object, Tensor] = {}
        """Gradients of the steps since the last update, added up where they are."""
        self._sums: dict[object, Tensor] = {}
        """Those of compiled functions, which are reduced in each step, as jobs have them."""
        self._count: Tensor | None = None
        self._together: Mapping[object, Sequence[int]] | None = None
        """What the latest step has updated, as `_grouped` gives it: all have one count."""

    def _laid_out(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """As `backward` left them: they are reduced when an update needs them."""
        return list(grads)

    def _update(self, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        self._count_by(())
        lamb = self._optimizer
        for tensor in tensors:
            lamb.check_layout(tensor, tensor.sbp)
        grads = lamb.clipped(grads)
        first = self.done % lamb.accumulate == 0
        groups = self.groups_of(tensors)
        together = _grouped(tensors, groups)
        if self._together is not None and together.keys() != self._together.keys():
            raise _unlike(len(tensors), sum(map(len, self._together.values())))
        self._together = together
        traced = self._world.mode.traces and lamb.accumulate > 1
        if self._totals if traced else not first and not self._totals:
            raise UsageError(
                "gradients are being added up, and a compiled function adds them up elsewhere",
                source=user_line(),
                got=f"{self.done} steps, accumulate={lamb.accumulate}",
                hint="change between eager and compiled steps after an update",
            )
        reduced = {}
        for key, places in together.items():
            total = self._joined(
                key, [tensors[each] for each in places], [grads[each] for each in places]
            )
            if traced:
                total = self._summed(key, total, tensors[places[0]])
                reduced[key] = total
            else:
                self._totals[key] = total if first else self._totals[key] + total
        if traced:
            self._apply(tensors, groups, together, reduced)
        elif self.done % lamb.accumulate == lamb.accumulate - 1:
            for key, places in together.items():
                layout = self._layout(key, tensors[places[0]])
                reduced[key] = self._totals.pop(key).redistribute(sbp=layout)
            self._apply(tensors, groups, together, reduced)

    @property
    def version(self) -> object:
        """See `EagerSteps.version`; gradients that are added up are of eager or compiled steps."""
        return super().version, bool(self._totals)

    def _layout(self, key: object, tensor: Tensor) -> NdSbp:
        """That of a group's moments."""
        flat = self._groups.get(key)
        layout: NdSbp = tensor.sbp if flat is None else flat.moments[0].sbp
        return layout

    def _summed(self, key: object, grad: Tensor, tensor: Tensor) -> Tensor:
        """The sum of the gradients since the last update, in a variable that outlives calls."""
        layout = self._layout(key, tensor)
        if key not in self._sums:
            self._sums[key] = self._variable(
                _SUM, grad.shape, str(grad.dtype), grad.placement, layout
            )
        total: Tensor = self._optimizer.added(self._sums[key], grad.redistribute(sbp=layout))
        return total

    def _joined(self, key: object, tensors: Sequence[Tensor], grads: Sequence[Tensor]) -> Tensor:
        """The gradients of a group as one tensor, not reduced."""
        if not isinstance(key, tuple):
            return grads[0]
        if key not in self._groups:
            self._groups[key] = self._new_group(tensors)
        flat = self._groups[key]
        of_tensor = {id(tensor): grad for tensor, grad in zip(tensors, grads, strict=True)}
        if of_tensor.keys() != {id(tensor) for tensor in flat.tensors}:
            raise _unlike(len(tensors), len(flat.tensors))
        grads = [of_tensor[id(tensor)] for tensor in flat.tensors]
        # A gradient that is whole becomes partial, which costs nothing, rather than others whole.
        partial = NdSbp(
            tuple(
                PARTIAL_SUM if any(isinstance(each, Partial) for each in entries) else BROADCAST
                for entries in zip(*(grad.sbp for grad in grads), strict=True)
            )
        )
        return flat.joined([grad.redistribute(sbp=partial) for grad in grads])

    def _new_group(self, tensors: Sequence[Tensor]) -> _Flat:
        """Parameters with moments of zero."""
        first, size = tensors[0], sum(int(np.prod(tensor.shape)) for tensor in tensors)
        split = NdSbp((Split(0),) * first.placement.ndim)
        moments = [
            self._variable(name, (size,), str(first.dtype), first.placement, split)
            for name in _MOMENTS
        ]
        return _Flat(tensors, moments)

    def _apply(
        self,
        tensors: Sequence[Tensor],
        groups: Sequence[ParameterGroup],
        together: Mapping[object, Sequence[int]],
        reduced: Mapping[object, Tensor],
    ) -> None:
        """Update all parameters by the gradients that were added up."""
        lamb, rates = self._optimizer, self._rates(tensors, groups)
        if self._count is None:
            self._count = self._variable(_COUNT, (), "int32", tensors[0].placement)
        control = lamb.control(square_sum_of_all(list(reduced.values())), self._count)
        for key, places in together.items():
            tensor, flat = tensors[places[0]], self._groups.get(key)
            rate, group = rates[places[0]], groups[places[0]]
            if flat is None:
                states = self._kept_of(tensor, group).states
                lamb.update(tensor, reduced[key], states, rate, control, group.numbers)
                continue
            weights = flat.joined(flat.tensors).redistribute(sbp=flat.moments[0].sbp)
            step = lamb.direction(weights, reduced[key], flat.moments, control, group.numbers)
            sums = apply("segment_square_sums", weights, step, sizes=flat.sizes)
            skipped = beside(control[1], tensor)
            updated = apply(
                "flat_lamb_update", weights, step, sums, rate, skipped, sizes=flat.sizes
            )
            for each, value in flat.parts(updated):
                each.copy_(value)

    # --- what is kept -----------------------------------------------------------------------------

    def state_dict(self) -> OptimizerState:
        """See `EagerSteps.state_dict`; moments are those of each parameter, in its shape."""
        if self._totals or (self._sums and self.done % self._optimizer.accumulate):
            raise UsageError(
                "gradients are being added up, and are no part of the state",
                source=user_line(),
                got=f"{self.done} steps, accumulate={self._optimizer.accumulate}",
                hint="save after an update",
            )
        return super().state_dict()

    def _own(self) -> list[Tensor]:
        if self._optimizer.parameters is not None:
            return super()._own()
        grouped = [tensor for flat in self._groups.values() for tensor in flat.tensors]
        return [*grouped, *super()._own()]

    def _states_by_name(
        self, named: Mapping[str, Tensor], saved: Collection[str]
    ) -> dict[str, Tensor]:
        whole = {name: tensor for name, tensor in named.items() if _is_whole(tensor)}
        rest = {name: tensor for name, tensor in named.items() if name not in whole}
        states = super()._states_by_name(rest, saved)
        moments: dict[tuple[int, str], Tensor] = {}
        with self._world.no_grad():
            for flat in self._groups.values():
                for suffix, buffer in zip(_MOMENTS, flat.moments, strict=True):
                    for tensor, value in flat.parts(buffer):
                        moments[id(tensor), suffix] = value
        for name, tensor in whole.items():
            for suffix in _MOMENTS:
                kept = moments.get((id(tensor), suffix))
                states[f"{name}.{suffix}"] = self._blank(tensor) if kept is None else kept
        for name, tensor in named.items():
            # A job's sums of gradients over steps.
            if f"{name}.{_SUM}" in saved:
                states[f"{name}.{_SUM}"] = self._blank(tensor)
        if named:
            first = next((each for each in named if f"{each}.{_COUNT}" in saved), next(iter(named)))
            if self._count is None:
                self._count = self._variable(_COUNT, (), "int32", named[first].placement)
            states[f"{first}.{_COUNT}"] = self._count
        return states

    def _counts_by_name(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        return {}  # there is one count for all

    def _blank(self, tensor: Tensor) -> Tensor:
        """Zeros like a tensor."""
        return self._variable(
            "state", tensor.shape, str(tensor.dtype), tensor.placement, tensor.sbp
        )

    def _loaded(self, holders: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        for name, state in states.items():
            summed = name.endswith(f".{_SUM}") and state.spec.inside
            if summed and abs(state).max().item() > 0:
                raise UsageError(
                    "the state was saved between two updates, and gradients that are being added "
                    "up are no part of it here",
                    source=user_line(),
                    got=name,
                    hint="save the job after an update",
                )
        kept = [(name, tensor) for name, tensor in holders.items() if _is_whole(tensor)]
        self._groups.clear()
        self._totals.clear()
        self._together = None
        tensors = [tensor for _, tensor in kept]
        with self._world.no_grad():
            for key, places in _grouped(tensors, self.groups_of(tensors)).items():
                flat = self._groups[key] = self._new_group([tensors[place] for place in places])
                for suffix, moment in zip(_MOMENTS, flat.moments, strict=True):
                    values = [states[f"{kept[place][0]}.{suffix}"] for place in places]
                    moment.copy_(flat.joined(values).redistribute(sbp=moment.sbp))


def _grouped(
    tensors: Sequence[Tensor], groups: Sequence[ParameterGroup]
) -> dict[object, list[int]]:
    """Places of the tensors that are updated together: by (placement, dtype, group) where they are
    broadcast, else each by itself.
    """
    places: dict[object, list[int]] = {}
    for number, tensor in enumerate(tensors):
        key: object = id(tensor)
        if _is_whole(tensor):
            key = tensor.placement, tensor.dtype, groups[number].number
        places.setdefault(key, []).append(number)
    return places


def _unlike(now: int, before: int) -> UsageError:
    return UsageError(
        "every step must update the same parameters",
        source=user_line(),
        got=f"{now} with a gradient, {before} in the first step",
        hint="freeze parameters before the first step; LAMB can take new ones later",
    )


def _is_whole(tensor: Tensor) -> bool:
    return all(entry == BROADCAST for entry in tensor.sbp)


DistributedFusedLamb.eager_steps = _FlatSteps
