"""Mixed precision (P. Micikevicius et al., 2018): 16 bits where they pay, float32 where it counts.

    low        products and convolutions work on float16 or bfloat16; their inputs are cast
    following  elementwise ops and changes of shape take the dtype of what they are fed, parameters
               aside: 16 bits stay 16 bits, a mixture becomes float32
    traced     all else (normalisation, softmax, losses, sums, updates) works as it was traced

Variables stay as they are, so the parameters are float32 master weights.

float16 cannot hold small gradients, so the loss's gradient starts at a scale instead of 1. What
leaves backward is cast to its traced dtype and divided by the scale. If anything in it is not
finite, on any device, all updates of the step are skipped and the scale is halved; after enough
good steps it is doubled. What updates go by, such as Adam's bias correction, counts the steps that
were not skipped. The scale and both counts are variables.

bfloat16 has the exponents of float32, so it holds whatever float32 holds, and nothing is scaled
(D. Kalamkar et al., 2019): what leaves backward is cast, and updates are never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from plancompiler.errors import UsageError
from plancompiler.ir import (
    AttrValue,
    DType,
    Job,
    NdSbp,
    Op,
    Origin,
    Phase,
    Placement,
    Split,
    TensorType,
    Value,
    freeze_attrs,
)
from plancompiler.ir.settings import Settings, option
from plancompiler.ops.loss_scale import SKIPPABLE, guarded_kind
from plancompiler.ops.registry import infer_types, op_def
from plancompiler.passes.base import PassResult, counted, producers_of, with_ops

FIRST_SCALE = 65536
"""Initial scale where the config names none."""


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(Settings, owner="mixed_precision"):
    """The dtype of the computation, and how losses are scaled for it."""

    precision: str = option(
        "float32",
        "Dtype of most of the computation; variables stay as they are.",
        choices=("float32", "float16", "bfloat16"),
        metavar="DTYPE",
        asks=True,
    )
    loss_scale: int = option(
        0, f"With `float16`, what gradients are multiplied by at first; 0: {FIRST_SCALE}."
    )
    loss_scale_steps: int = option(
        2000, "With `float16`, steps without overflow after which the scale is doubled.", least=1
    )

    def check(self) -> None:
        for name, value in self.changes().items():
            if name.startswith("loss_scale") and self.precision != "float16":
                raise UsageError(
                    "losses are scaled for the range of float16 only",
                    got=f"{name}={value} precision={self.precision}",
                    expected="precision=float16",
                    hint=f"leave {name} out",
                )


def lower_precision(job: Job, config: PrecisionOptions) -> PassResult:
    """The job computing in `config.precision`.

    With float16, raises UsageError for an update that cannot be skipped and for gradients of
    gradients; with bfloat16, DTypeError where the package for that dtype is missing.
    """
    if config.precision == "float32":
        return PassResult(job, "off")
    low = DType.parse(config.precision)
    facts = _analyse(job, low)
    rewrite = _InLowPrecision(job, config, facts, _decide(job, facts, low))
    rewritten = with_ops(job, rewrite.ops())
    summary = (
        f"{counted(len(rewrite.decisions.lowered), 'op')} of {len(job.ops)} in {low}, with "
        f"{counted(rewrite.casts, 'cast')}; "
    )
    if low is not DType.FLOAT16:
        return PassResult(rewritten, summary + "no gradient is scaled")
    if not facts.seeds:
        return PassResult(rewritten, summary + "no gradient to scale")
    summary += (
        f"loss scale {config.loss_scale or FIRST_SCALE}, checked on "
        f"{counted(rewrite.checked, 'gradient')}, guards {counted(rewrite.guarded, 'update')}"
    )
    return PassResult(rewritten, summary)


# --- analysis: where gradients go -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Gradients:
    """What follows from gradients where these are scaled or have 16 bits, by name."""

    seeds: Mapping[str, Op]
    """The ones at which the gradients of losses start, where they are scaled."""
    scaled: frozenset[str]
    """Values in backward that carry the scale."""
    leaving: frozenset[str]
    """Ops outside backward that use gradients, or change what they train, where those are scaled:
    they read gradients as they would be without a scale.
    """
    held: frozenset[str]
    """Of these, updates and what follows from them: they come after the check of all gradients."""
    traced: frozenset[str]
    """Ops that work on gradients as they were traced."""


def _analyse(job: Job, low: DType) -> _Gradients:
    seeds = _seeds(job) if low is DType.FLOAT16 else {}
    scaled: dict[str, int] = {}
    """With how many uses of gradients came before."""
    after: set[str] = set()
    """Values that follow from gradients outside backward."""
    backward: set[str] = set()
    updated: set[str] = set()
    leaving: set[str] = set()
    held: set[str] = set()
    traced: set[str] = set()
    for op in job.ops:
        inputs = {value.name for value in op.inputs}
        outputs = [value.name for value in op.outputs]
        definition = op_def(op.kind)
        phase, changes = op.origin.phase, bool(definition.mutates)
        clips = definition.scaled and not definition.linear and not changes
        if clips and phase is Phase.BACKWARD:
            # It goes by how long gradients are, and so reads them as they are.
            phase = Phase.UPDATE
        if phase is Phase.BACKWARD:
            backward.update(outputs)
        if op.name in seeds:
            scaled[outputs[0]] = len(leaving)
        elif phase is Phase.BACKWARD:
            # One loss's backward is traced without a break, so a gradient from before the last use
            # of gradients belongs to another loss.
            for value in op.inputs:
                if value.name in after or scaled.get(value.name, len(leaving)) < len(leaving):
                    raise _second_order(op, value)
            if not inputs.isdisjoint(scaled):
                scaled.update(dict.fromkeys(outputs, len(leaving)))
        elif seeds:
            if (changes and phase is Phase.UPDATE) or not (
                inputs.isdisjoint(after) and inputs.isdisjoint(scaled)
            ):
                leaving.add(op.name)
                after.update(outputs)
                if changes or not inputs.isdisjoint(updated):
                    held.add(op.name)
                    updated.update(outputs)
        elif low is not DType.FLOAT16 and (
            phase is Phase.UPDATE or not inputs.isdisjoint(after) or not inputs.isdisjoint(backward)
        ):
            traced.add(op.name)
            after.update(outputs)
    return _Gradients(
        seeds, frozenset(scaled), frozenset(leaving), frozenset(held), frozenset(traced)
    )


def _seeds(job: Job) -> dict[str, Op]:
    if not any(op.origin.phase is Phase.UPDATE and op_def(op.kind).mutates for op in job.ops):
        return {}
    return {
        op.name: op
        for op in job.ops
        if op.kind == "fill"
        and op.origin.phase is Phase.BACKWARD
        and op.attr("value") == 1.0
        and op.outputs[0].shape == ()
        and op.outputs[0].dtype.is_floating
    }


def _second_order(op: Op, value: Value) -> UsageError:
    return UsageError(
        "a gradient of gradients cannot be computed with loss scaling",
        at=op,
        got=f"%{value.name}, which follows from the gradients of another loss",
        expected="losses that depend on no gradient",
        hint="use precision=float32 for this job",
    )


# --- decisions: which ops work on 16 bits ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lowered:
    low: DType
    lowered: Mapping[str, tuple[DType, ...]]
    """The dtypes of what an op makes, by its name, for those that work on 16 bits."""


def _decide(job: Job, facts: _Gradients, low: DType) -> _Lowered:
    made: dict[str, DType] = {}
    lowered: dict[str, tuple[DType, ...]] = {}
    variables = {op.outputs[0].name for op in job.ops if op.kind == "variable"}
    kept = {*facts.seeds, *facts.leaving, *facts.traced}
    for op in job.ops:
        made.update((value.name, value.dtype) for value in op.outputs)
        floating = [value.name for value in op.inputs if value.dtype.is_floating]
        # All floating inputs have 16 bits already, parameters aside.
        fed_low = any(made[name] is low for name in floating) and all(
            made[name] is low or name in variables for name in floating
        )
        definition = op_def(op.kind)
        follows = definition.moves or definition.precision == "following"
        wanted = definition.precision == "low" or (follows and fed_low)
        if op.name not in kept and wanted and _is_lowerable(op, low):
            inputs = tuple(
                TensorType(value.shape, low if _is_low(op, position) else made[value.name])
                for position, value in enumerate(op.inputs)
            )
            types = infer_types(op.kind, inputs, dict(op.attrs))
            lowered[op.name] = tuple(tensor.dtype for tensor in types)
            made.update(zip((value.name for value in op.outputs), lowered[op.name], strict=True))
    return _Lowered(low, lowered)


def _is_lowerable(op: Op, low: DType) -> bool:
    """Whether all floating numbers of an op were traced as float32, and fit."""
    operands = [value for value in (*op.inputs, *op.outputs) if value.dtype.is_floating]
    scalar = op.attr("scalar", 1.0)
    if isinstance(scalar, (int, float)) and scalar:
        least, most = low.range
        if not least <= abs(scalar) <= most:
            return False
    return bool(operands) and all(one.dtype is DType.FLOAT32 for one in operands)


def _is_low(op: Op, position: int) -> bool:
    """Whether an op on 16 bits reads this input in them."""
    return op.inputs[position].dtype.is_floating and position not in op_def(op.kind).wide


# --- rewriting ------------------------------------------------------------------------------------


class _InLowPrecision:
    """Walks the job once, in order, and keeps what it makes of each value by its traced name."""

    def __init__(
        self, job: Job, config: PrecisionOptions, facts: _Gradients, decisions: _Lowered
    ) -> None:
        self._job, self._config, self._facts, self.decisions = job, config, facts, decisions
        self._traced = producers_of(job)
        self._made: dict[str, Value] = {}
        """Each value as it is made now."""
        self._cast: dict[tuple[str, DType], list[tuple[Origin, Value]]] = {}
        """Its other forms, and for whom they were made."""
        self._done: list[Op] = []
        self._names = {op.name for op in job.ops}
        self.casts = self.checked = self.guarded = 0
        """Casts, gradients looked at, updates that can be skipped."""
        self._scales: dict[Placement, Value] = {}
        self._inverses: dict[Placement, Value] = {}
        self._finals: dict[str, Value] = {}
        """Gradients as they leave backward, by traced name."""
        self._held: list[Op] = []

    def ops(self) -> list[Op]:
        """The ops of the job in 16 bits."""
        facts = self._facts
        for seed in [*facts.seeds.values()][:1]:
            self._make_scale(seed)
        for op in self._job.ops:
            if op.name in facts.seeds:
                self._made[op.outputs[0].name] = self._seed(op)
            elif op.name in facts.leaving:
                self._leave_backward(op)
            elif op.name in self.decisions.lowered:
                self._append_low(op)
            else:
                self._append_traced(op)
        if facts.seeds:
            self._guard()
        return self._done

    # --- dtypes -----------------------------------------------------------------------------------

    def _append_low(self, op: Op) -> None:
        low = self.decisions.low
        inputs = tuple(
            self._as(value, low, op) if _is_low(op, position) else self._made[value.name]
            for position, value in enumerate(op.inputs)
        )
        dtypes = self.decisions.lowered[op.name]
        outputs = tuple(
            replace(value, dtype=dtype) for value, dtype in zip(op.outputs, dtypes, strict=True)
        )
        self._append(replace(op, inputs=inputs, outputs=outputs))

    def _append_traced(self, op: Op) -> None:
        self._append(
            replace(op, inputs=tuple(self._as(value, value.dtype, op) for value in op.inputs))
        )

    def _append(self, op: Op) -> None:
        self._done.append(op)
        self._made.update((value.name, value) for value in op.outputs)

    def _as(self, value: Value, dtype: DType, reader: Op) -> Value:
        """A traced value in a dtype, for an op that reads it.

        One cast serves all readers of a parameter. Of other values each region has casts of its
        own, which backward shares: so a cast need not outlive its region.
        """
        made = self._made[value.name]
        if made.dtype is dtype:
            return made
        shared = self._traced[value.name].kind == "variable"
        forward = reader.origin.phase is Phase.FORWARD
        known = self._cast.setdefault((value.name, dtype), [])
        for origin, form in known:
            if shared or not forward or origin.region == reader.origin.region:
                return form
        origin = Origin(reader.origin.phase) if shared else reader.origin
        number = f"_{len(known)}" if known else ""
        cast = self._add(
            f"{value.name}:{dtype}{number}",
            "cast",
            (made,),
            value.placement,
            origin,
            reader,
            {"dtype": str(dtype)},
        )
        self.casts += 1
        known.append((origin, cast))
        return cast

    def _add(
        self,
        name: str,
        kind: str,
        inputs: tuple[Value, ...],
        placement: Placement,
        origin: Origin,
        like: Op,
        attrs: dict[str, AttrValue] | None = None,
        sbp: NdSbp | None = None,
    ) -> Value:
        """Append a new op with one output; it stands for the user's line of another."""
        while name in self._names:
            name += "+"
        self._names.add(name)
        given = attrs or {}
        (tensor,) = infer_types(kind, tuple(value.type for value in inputs), given)
        value = Value(name, tensor.shape, tensor.dtype, placement)
        attributes = freeze_attrs(given)
        op = Op(name, kind, inputs, (value,), attributes, placement, sbp, like.source, origin)
        self._append(op)
        return value

    # --- the scale --------------------------------------------------------------------------------

    def _make_scale(self, seed: Op) -> None:
        first = float(self._config.loss_scale or FIRST_SCALE)
        self._scale = self._variable("loss_scale", "float32", "constant", (first,), seed)
        self._counter = self._variable("loss_scale.good_steps", "int32", "zeros", (), seed)
        self._skipped = self._variable("loss_scale.skipped_steps", "int32", "zeros", (), seed)
        self._scales[seed.placement] = self._scale

    def _variable(
        self, name: str, dtype: str, init: str, init_args: tuple[float, ...], like: Op
    ) -> Value:
        taken = {op.attr("name") for op in self._job.ops if op.kind == "variable"}
        while name in taken:
            name += "_"
        attrs: dict[str, AttrValue] = {
            "name": name,
            "shape": (),
            "dtype": dtype,
            "init": init,
            "init_args": init_args,
            "trainable": False,
        }
        whole = NdSbp.broadcast(like.placement.ndim)
        return self._add(name, "variable", (), like.placement, Origin(), like, attrs, whole)

    def _scale_on(self, placement: Placement, like: Op) -> Value:
        if placement not in self._scales:
            whole = NdSbp.broadcast(placement.ndim)
            name = f"loss_scale:there_{len(self._scales)}"
            self._scales[placement] = self._add(
                name, "redistribute", (self._scale,), placement, Origin(), like, None, whole
            )
        return self._scales[placement]

    def _seed(self, op: Op) -> Value:
        """What a gradient starts at instead of 1."""
        scale, dtype = self._scale_on(op.placement, op), op.outputs[0].dtype
        if scale.dtype is dtype:
            return scale
        attrs: dict[str, AttrValue] = {"dtype": str(dtype)}
        return self._add(f"{op.name}:scale", "cast", (scale,), op.placement, op.origin, op, attrs)

    def _leave_backward(self, op: Op) -> None:
        """Append an op that reads gradients as they would be without a scale."""
        inputs = tuple(
            self._final(value, op)
            if value.name in self._facts.scaled
            else self._as(value, value.dtype, op)
            for value in op.inputs
        )
        op = replace(op, inputs=inputs)
        if op.name in self._facts.held:
            self._made.update((value.name, value) for value in op.outputs)
            self._held.append(op)
        else:
            self._append(op)

    def _final(self, value: Value, reader: Op) -> Value:
        """A gradient in its traced dtype and divided by the scale."""
        if value.name not in self._finals:
            origin, place = Origin(Phase.UPDATE), value.placement
            if place not in self._inverses:
                scale = self._scale_on(place, reader)
                name = f"loss_scale:inverse_{len(self._inverses)}"
                self._inverses[place] = self._add(
                    name, "reciprocal", (scale,), place, origin, reader
                )
            like = replace(reader, origin=origin)
            traced = self._as(value, value.dtype, like)
            inverse = self._inverses[place]
            if inverse.dtype is not value.dtype:
                attrs: dict[str, AttrValue] = {"dtype": str(value.dtype)}
                inverse = self._add(
                    f"{value.name}:inverse", "cast", (inverse,), place, origin, reader, attrs
                )
            self._finals[value.name] = self._add(
                f"{value.name}:final", "mul", (traced, inverse), place, origin, reader
            )
        return self._finals[value.name]

    # --- the check --------------------------------------------------------------------------------

    def _guard(self) -> None:
        """Append the check of all gradients, the scale's update, and the guarded updates."""
        home = self._scale.placement
        like = self._traced[next(iter(self._finals))] if self._finals else self._held[0]
        broken = {
            placement: self._any_broken(placement, gradients, like)
            for placement, gradients in self._finals_by_placement().items()
        }
        total = self._moved(broken.pop(home), home, like) if home in broken else None
        for flag in broken.values():
            here = self._moved(flag, home, like)
            total = here if total is None else self._either(total, here, like)
        if total is None:
            zero: dict[str, AttrValue] = {"shape": (), "dtype": "float32", "value": 0.0}
            total = self._add("found_inf:none", "fill", (), home, Origin(Phase.UPDATE), like, zero)
        flags = {home: total}
        skipped = {home: self._skipped}
        for op in self._held:
            place, counts = op.placement, op_def(op.kind).counts_steps
            if place not in flags:
                flags[place] = self._moved(total, place, like)
            if counts and place not in skipped:
                skipped[place] = self._moved(self._skipped, place, like)
            more = (flags[place], skipped[place]) if counts else (flags[place],)
            self._done.append(self._guarded(op, more))
        self._update_scale(total, like)

    def _finals_by_placement(self) -> dict[Placement, list[Value]]:
        finals: dict[Placement, list[Value]] = {}
        for value in self._finals.values():
            finals.setdefault(value.placement, []).append(value)
        return finals

    def _any_broken(self, placement: Placement, gradients: list[Value], like: Op) -> Value:
        """1 where a gradient of a placement is not finite, else 0.

        Flags of split gradients come first: their maximum stays partial, and is reduced once.
        """
        origin = Origin(Phase.UPDATE)
        split = {
            value.name
            for op in self._held
            for source in op.inputs
            if self._is_split(source)
            for value in op.inputs
        }
        flags = []
        for value in sorted(gradients, key=lambda each: each.name not in split):
            self.checked += 1
            name = f"{value.name}:found_inf"
            flags.append(self._add(name, "found_inf", (value,), placement, origin, like))
        total = flags[0]
        for flag in flags[1:]:
            total = self._either(total, flag, like)
        return total

    def _is_split(self, value: Value) -> bool:
        """Whether a value is a variable that the user split."""
        op = self._traced.get(value.name)
        if op is None or op.kind != "variable" or op.sbp is None:
            return False
        return any(isinstance(entry, Split) for entry in op.sbp)

    def _either(self, left: Value, right: Value, like: Op) -> Value:
        return self._add(
            f"{right.name}:max",
            "maximum",
            (left, right),
            right.placement,
            Origin(Phase.UPDATE),
            like,
        )

    def _moved(self, flag: Value, placement: Placement, like: Op) -> Value:
        """A flag, whole, on a placement."""
        whole = NdSbp.broadcast(placement.ndim)
        origin = Origin(Phase.UPDATE)
        name = f"{flag.name}:whole"
        return self._add(name, "redistribute", (flag,), placement, origin, like, None, whole)

    def _guarded(self, op: Op, more: Sequence[Value]) -> Op:
        """An update that is skipped where a flag, its next input, is set; other ops as they are."""
        definition = op_def(op.kind)
        if not definition.mutates or definition.skips_itself:
            return op
        kind = guarded_kind(op.kind)
        if kind is None:
            raise UsageError(
                "loss scaling must be able to skip updates, and this one cannot be skipped",
                at=op,
                got=op.kind,
                expected=f"one of {', '.join(SKIPPABLE)}",
                hint="use precision='bfloat16', which needs no loss scale, or an optimizer with "
                "these updates",
            )
        self.guarded += 1
        return replace(op, kind=kind, inputs=(*op.inputs, *more))

    def _update_scale(self, flag: Value, like: Op) -> None:
        kept = (self._scale, self._counter, self._skipped)
        outputs = tuple(replace(value, name=f"{value.name}:next") for value in kept)
        self._append(
            Op(
                "loss_scale:update",
                "loss_scale_update",
                (*kept, flag),
                outputs,
                freeze_attrs({"interval": self._config.loss_scale_steps}),
                flag.placement,
                None,
                like.source,
                Origin(Phase.UPDATE),
            )
        )
