"""Dispatch: the plan of an op on tensors of given specs, made once and then looked up.

The key holds everything that a plan depends on: kind, attributes, and the inputs' specs. A hit is
one look-up, which infers nothing. A miss infers types, compares the costs of the op's signatures as
the compiler does, and prepares the inputs' changes of layout and the context of the local kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache

from plancompiler.boxing.exchange import halo_seconds
from plancompiler.boxing.infer_sbp import Operand, cheapest_signature, flops_if_hiding
from plancompiler.boxing.planner import boxing_path, canonical
from plancompiler.eager.agreement import compare_change, compare_op
from plancompiler.eager.foreach import Row, update_all
from plancompiler.eager.inplace import holds_alone, write
from plancompiler.eager.layout import plan_move
from plancompiler.eager.op_plan import OpPlan, prepared
from plancompiler.eager.redistribution import Redistribution
from plancompiler.eager.spec import AttrMap, Change, Mode, Specs, TensorSpec, WorldState, attrs_key
from plancompiler.eager.tensor import DistTensor
from plancompiler.errors import AttributeValueError, PlacementMismatchError, PlanCompilerError
from plancompiler.ir import NdSbp, Placement, freeze_attrs, plain_value
from plancompiler.ir.op import Attrs
from plancompiler.ir.source import user_line
from plancompiler.ir.task import Primitive
from plancompiler.ops.registry import (
    Array,
    OpDef,
    Types,
    infer_types,
    mesh_signatures,
    op_def,
    passes,
)
from plancompiler.ops.rule import NdSignature

logger = logging.getLogger("plancompiler.eager")

PLANS = 1 << 14
"""The number of plans that a mode keeps; it drops all when there would be more."""

_MOVING = (Primitive.ALL_GATHER, Primitive.ALL_TO_ALL)


class RunMode(Mode[DistTensor]):
    """The mode in which ops run when they are called; other modes override how plans are made."""

    plan_class: type[OpPlan] = OpPlan
    prepares = True
    """Whether a plan may be turned into one function that only runs it."""

    def __init__(self, world: WorldState[DistTensor]) -> None:
        self.world = world
        self.compares = world.compares
        """Whether ranks compare what they call; see `agreement`."""
        self._plans: dict[object, OpPlan] = {}
        self._moves: dict[tuple[TensorSpec, TensorSpec], Change] = {}

    def plan(
        self,
        kind: str,
        inputs: Specs,
        attrs: AttrMap,
        placement: Placement | None = None,
        sbp: NdSbp | None = None,
    ) -> OpPlan:
        """See `Mode.plan`."""
        if self.compares:
            compare_op(self.world, kind, inputs, attrs, placement)
        key: object
        try:
            if placement is None and sbp is None:
                key = (kind, attrs_key(attrs), inputs) if attrs else (kind, inputs)
            else:
                key = (kind, attrs_key(attrs), inputs, placement, sbp)
            plan = self._plans.get(key)
        except (TypeError, ValueError):  # a list among the attributes, or what is refused now
            attrs = {name: plain_value(name, value) for name, value in attrs.items()}
            key = (kind, attrs_key(attrs), inputs, placement, sbp)
            plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            try:
                plan = self._make(kind, inputs, attrs, placement, sbp)
            except PlanCompilerError as error:
                error.at(op=kind, source=user_line(), rank=self.world.rank)
                raise
            self._plans[key] = plan
        return plan

    def _make(
        self,
        kind: str,
        inputs: Specs,
        attrs: AttrMap,
        placement: Placement | None,
        sbp: NdSbp | None,
    ) -> OpPlan:
        world = self.world
        plain = {name: plain_value(name, value) for name, value in attrs.items()}
        where = inputs[0].placement if placement is None else placement
        for spec in inputs:
            if spec.placement != where:
                raise PlacementMismatchError(
                    "an op needs all its inputs on one placement",
                    got="; ".join(str(each) for each in inputs),
                    hint="move a tensor first: tensor.redistribute(placement=...)",
                )
        types = tuple(spec.type for spec in inputs)
        outputs = infer_types(kind, types, plain)
        if not outputs:
            raise AttributeValueError("an op without outputs has no eager form", got=kind)
        if sbp is not None:
            for tensor in outputs:
                sbp.check(where.ndim, len(tensor.shape))
        hierarchy = where.hierarchy
        if kind == "variable":
            layout = canonical(sbp or NdSbp.broadcast(where.ndim), hierarchy)
            signature = NdSignature((), (layout,))
        else:
            signature = _chosen(
                op_def(kind),
                types,
                outputs,
                freeze_attrs(plain),
                tuple(spec.sbp for spec in inputs),
                hierarchy,
                sbp,
                passes(kind, where.device_type),
            )
        used = tuple(
            world.spec(*spec.type, where, wanted)
            for spec, wanted in zip(inputs, signature.inputs, strict=True)
        )
        made = tuple(
            world.spec(*tensor, where, layout)
            for tensor, layout in zip(outputs, signature.outputs, strict=True)
        )
        _report(kind, inputs, used)
        return self.plan_class(world, kind, plain, inputs, used, made)

    def prepared(self, plan: OpPlan) -> Callable[..., DistTensor] | None:
        """See `Mode.prepared`."""
        return prepared(plan) if self.prepares and not self.compares else None

    def update_all(self, kind: str, attrs: AttrMap, rows: Sequence[Row]) -> None:
        """Run an elementwise op that changes its inputs, on many rows of inputs."""
        update_all(self.plan, kind, attrs, rows)

    def move(self, source: TensorSpec, target: TensorSpec) -> Change:
        """See `Mode.move`."""
        change = self._moves.get((source, target))
        if change is None:
            change = self._moves[source, target] = plan_move(source, target)
        return change

    def redistribution(
        self, source: TensorSpec, target: TensorSpec, key: object
    ) -> Callable[[DistTensor], DistTensor]:
        """See `Mode.redistribution`."""
        run = Redistribution(source, target)
        if self.compares:
            compare_change(self.world, source, target)
        else:
            source.runs[key] = run
        return run

    def next_number(self) -> int:
        """The key of the next random op."""
        return self.world.generator.next_number()

    def copied(self, tensor: DistTensor) -> DistTensor:
        """See `Mode.copied`."""
        return DistTensor(tensor.spec, tensor.local)

    def own_local(self, tensor: DistTensor) -> Array:
        """See `Mode.own_local`."""
        return tensor.local.copy()

    holds_alone = staticmethod(holds_alone)
    put = staticmethod(write)


@lru_cache(maxsize=PLANS)
def _chosen(
    definition: OpDef,
    types: Types,
    outputs: Types,
    attrs: Attrs,
    layouts: tuple[NdSbp, ...],
    hierarchy: tuple[int, ...],
    demanded: NdSbp | None,
    passing: bool,
) -> NdSignature:
    """The cheapest signature for inputs in these layouts; ranks that are threads share it."""
    kind = definition.kind
    return cheapest_signature(
        kind,
        mesh_signatures(kind, types, outputs, attrs, hierarchy, passing),
        [Operand(tensor, sbp) for tensor, sbp in zip(types, layouts, strict=True)],
        outputs,
        hierarchy,
        demanded,
        flops=flops_if_hiding(kind, types, outputs, attrs),
    )


def _report(kind: str, inputs: Specs, used: Specs) -> None:
    """Say once, at INFO, that an op gathers an input or its halo, which costs more than reducing
    it.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    for got, wanted in zip(inputs, used, strict=True):
        hierarchy = got.placement.hierarchy
        if wanted.sbp.has_halo:
            _, seconds = halo_seconds(got.sbp, wanted.sbp, *got.type, hierarchy)
            moves = seconds > 0
        else:
            steps = boxing_path(got.sbp, wanted.sbp, *got.type, hierarchy)
            moves = any(step.primitive in _MOVING for step in steps)
        if moves:
            logger.info("%s (%s) uses %s as %s", kind, user_line(), got, wanted.sbp)
