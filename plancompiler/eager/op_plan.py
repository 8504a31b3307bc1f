"""`OpPlan`: an op on inputs of known specs, prepared for this rank: run, recorded, walked back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from plancompiler.eager.gradient_program import GradientProgram, trace_gradient
from plancompiler.eager.materialized_view import MaterializedView
from plancompiler.eager.passing import passing_of
from plancompiler.eager.spec import AttrMap, Change, Specs, TensorSpec, WorldState
from plancompiler.eager.tensor import DistTensor, Grads, Node, Tensors
from plancompiler.eager.views import alias_of, makes_view, only_thin
from plancompiler.errors import PlanCompilerError
from plancompiler.executor.space import HOST
from plancompiler.ir.source import user_line
from plancompiler.ops.kernel import direct_kernel
from plancompiler.ops.registry import Array, Kernel, KernelContext, is_custom, op_def, stops
from plancompiler.ops.view import RESHAPED, keeps_order


class OpPlan:
    """One op on inputs of these specs, prepared for this rank."""

    def __init__(
        self,
        world: WorldState[DistTensor],
        kind: str,
        attrs: AttrMap,
        inputs: Specs,
        used: Specs,
        outputs: Specs,
    ) -> None:
        definition = op_def(kind)
        self.world = world
        self.kind = kind
        self.attrs = attrs
        self.inputs = inputs
        self.used = used
        """The inputs in the layouts that the kernel takes."""
        self.kept = tuple(
            world.spec(*wanted.type, wanted.placement, wanted.sbp.without_halos())
            if got.sbp.has_partial
            else got
            for got, wanted in zip(inputs, used, strict=True)
        )
        """The inputs for gradient functions: partial ones as they were reduced for the op."""
        self.outputs = outputs
        self.moves: tuple[Change | None, ...] = tuple(
            None if got is wanted else world.mode.move(got, wanted)
            for got, wanted in zip(inputs, used, strict=True)
        )
        self.reduced = tuple(
            (slot, kept, move if kept is wanted else world.mode.move(got, kept))
            for slot, (got, kept, wanted, move) in enumerate(
                zip(inputs, self.kept, used, self.moves, strict=True)
            )
            if move is not None and kept is not got
        )
        """Inputs that gradient functions get reduced: place, spec, and change of layout."""
        self.definition = definition
        self.mutates = definition.mutates
        self.recorded = (
            any(spec.dtype.is_floating for spec in outputs)
            and not self.mutates
            and definition.gradient is not stops
        )
        self.random = attrs.get("key").__class__ is int
        self.source = definition.source
        self.stepped = definition.source or definition.counts_steps
        self.inside = outputs[0].inside
        self.alias: Change | None = None
        """What gives a view of the input in place of the output."""
        self.any_order = True
        """Whether it does so for any memory order of the input."""
        self.strided = False
        """Whether that view is not in row-major order."""
        single = len(inputs) == len(outputs) == 1
        if single and definition.strided is not None and self.moves[0] is None:
            self.alias = alias_of(definition.strided, attrs, used[0], outputs[0])
            self.strided = self.alias is not None and not keeps_order(
                kind, attrs, used[0].shape, outputs[0].shape
            )
        if single and definition.view and element_counts_agree(used[0], outputs[0]):
            self.alias = alias_of(RESHAPED, attrs, used[0], outputs[0])
            self.any_order = only_thin(used[0], outputs[0])
        self.views = single and (definition.strided is not None or bool(definition.view))
        """Whether the output is a view of the input: always, but for reshapes of some views."""
        self.context = KernelContext(
            attrs=definition.complete(attrs),
            input_shapes=tuple(spec.shape for spec in inputs),
            output_shapes=tuple(spec.shape for spec in outputs),
            input_regions=tuple(spec.region for spec in used),
            output_regions=tuple(spec.region for spec in outputs),
            arrays=outputs[0].space.arrays,
        )
        self.context.ring, self.context.peers = passing_of(world, definition, used, outputs)
        self.kernel = outputs[0].space.kernel(
            definition, [spec.dtype for spec in (*inputs, *outputs)]
        )
        if is_custom(kind):
            self.kernel = self._placed(self.kernel)
        self.still = self.inside and not any(self.moves)
        """Whether it runs here, on inputs that lie as its kernel takes them."""
        on_host = outputs[0].space is HOST
        self.joinable = self.still and on_host
        """Whether running several updates as one saves time."""
        self.direct = (
            direct_kernel(
                self.kernel,
                self.context,
                [spec.numpy_dtype for spec in (*inputs, *outputs)],
                outputs[0].local_shape,
            )
            if len(outputs) == 1 and self.inside and on_host
            else None
        )
        self.local = self._local()
        self._programs: dict[object, GradientProgram] = {}

    def _placed(self, kernel: Kernel) -> Kernel:
        """The kernel of a user's op, whose errors say where it was called."""

        def placed(context: KernelContext, inputs: Any, outputs: Any) -> None:
            try:
                kernel(context, inputs, outputs)
            except PlanCompilerError as error:
                self._say_where(error)
                raise

        return placed

    def _say_where(self, error: PlanCompilerError) -> None:
        error.at(op=self.kind, source=user_line(), rank=self.world.rank)

    def _local(self) -> Callable[..., Any]:
        """The kernel on arrays in the layouts that it takes: an array, or a tuple of several."""
        outputs, kernel, context = self.outputs, self.kernel, self.context
        if not self.inside:
            if len(outputs) == 1:
                return lambda *arrays: outputs[0].empty()
            return lambda *arrays: tuple(spec.empty() for spec in outputs)
        if self.random:
            return self._drawn
        if len(outputs) != 1:
            return self._several
        shape, dtype, empty = outputs[0].local_shape, outputs[0].numpy_dtype, outputs[0].space.empty
        if self.direct is not None:
            return self.direct

        def single(*arrays: Array) -> Array:
            out = empty(shape, dtype)
            kernel(context, arrays, (out,))
            return out

        return single

    def _several(self, *arrays: Array) -> tuple[Array, ...]:
        outs = tuple(spec.empty() for spec in self.outputs)
        self.kernel(self.context, arrays, outs)
        return outs

    def _drawn(self, *arrays: Array) -> Any:
        """A random op: its numbers follow from the draw that the world names."""
        context = self.context
        context.seed, context.step, key = self.world.draw
        if context.attrs["key"] != key:
            context.attrs = {**context.attrs, "key": key}
        outs = self._several(*arrays)
        return outs[0] if len(outs) == 1 else outs

    def call(self, tensors: Tensors) -> tuple[DistTensor, ...]:
        """Run on tensors of the plan's specs, and record it if a gradient is wanted."""
        world = self.world
        source = tensors[0] if self.views else None
        alias = self.alias if source.__class__ is DistTensor else None
        if alias is not None and not (tensors[0].packed() or self.any_order):
            alias = None
        arrays = [
            tensor.local if move is None else tensor.moved(spec, move)
            for tensor, move, spec in zip(tensors, self.moves, self.used, strict=True)
        ]
        if self.mutates:
            return self._updated(tensors, arrays)
        if self.stepped:
            # Data are those of the step that draws are of, rates those of the optimizer's.
            self.context.step = world.generator.step if self.source else world.step
            if self.source and world.rank == self.outputs[0].placement.rank_list[0]:
                world.generator.note_data(self)
        shares = alias is not None and self.inside and self.moves[0] is None
        outs: tuple[Array, ...]
        if alias is not None and shares:
            outs = (alias(arrays[0]),)
        elif len(self.outputs) == 1:
            outs = (self.local(*arrays),)
        else:
            outs = self.local(*arrays)
        if source is None or not (shares or self.makes_view(source)):
            results = tuple(map(DistTensor, self.outputs, outs))
        elif shares or not self.inside:
            results = (DistTensor(self.outputs[0], outs[0]),)
            results[0].view_of(source, self)
        else:
            results = (MaterializedView.of(source, self, outs[0]),)
        self.record(tensors, results, outs)
        return results

    def record(
        self,
        tensors: Tensors,
        results: Tensors,
        outs: tuple[Array, ...],
    ) -> None:
        """Put what was made of tensors on the tape, if a gradient is wanted."""
        world = self.world
        if self.recorded and world.recording and any(each.node is not None for each in tensors):
            draw = world.draw if self.random else None
            node = Node(self, tuple(tensors), outs, world.tick(), draw)
            for slot, tensor in enumerate(results):
                if self.outputs[slot].dtype.is_floating:
                    tensor.node, tensor.slot = node, slot

    def makes_view(self, tensor: DistTensor) -> bool:
        """Whether the output for this input is a view of it, where the op has views."""
        return makes_view(tensor, self.kind, self.attrs, self.outputs[0].shape)

    def again(self, tensor: DistTensor) -> Array:
        """This rank's part of the only output for the only input, computed once more."""
        move = self.moves[0]
        array: Array = self.local(
            tensor.local if move is None else tensor.moved(self.used[0], move)
        )
        return array

    def update(self, tensors: Tensors) -> None:
        """Run an op that only changes inputs, on inputs that lie as its kernel takes them."""
        if any(self.moves):
            self.call(tensors)
            return
        self._updated(tensors, [tensor.local for tensor in tensors])

    def _updated(self, tensors: Tensors, arrays: Sequence[Array]) -> tuple[DistTensor, ...]:
        """An op that changes inputs: their memory takes what they become."""
        kept = dict(self.mutates)
        outs = tuple(
            arrays[kept[slot]] if slot in kept else spec.empty()
            for slot, spec in enumerate(self.outputs)
        )
        self.context.step = self.world.step
        if self.inside:
            self.kernel(self.context, arrays, outs)
        for source in kept.values():
            tensors[source].written()
        return tuple(
            tensors[kept[slot]] if slot in kept else DistTensor(spec, outs[slot])
            for slot, spec in enumerate(self.outputs)
        )

    # --- backward -------------------------------------------------------------------------------

    def backward(
        self,
        node: Node,
        grads: Grads,
        needed: tuple[bool, ...],
        create_graph: bool,
    ) -> Grads:
        """Gradients of the inputs that need one; see `Recorded.backward`."""
        draw = node.draw
        attrs = self.attrs if draw is None else {**self.attrs, "key": draw[2]}
        if create_graph:
            return self._differentiable(node, attrs, grads)
        specs = tuple([None if grad is None else grad.spec for grad in grads])
        key = (needed, specs)
        program = self._programs.get(key)
        if program is None:
            try:
                program = self._programs[key] = self._gradient_program(attrs, specs, needed)
            except PlanCompilerError as error:
                self._say_where(error)
                raise
        arrays = [tensor.local for tensor in node.inputs or ()]
        for slot, kept, move in self.reduced:
            arrays[slot] = (node.inputs or ())[slot].moved(kept, move)
        arrays += node.outputs
        for grad in grads:
            if grad is not None:
                arrays.append(grad.local)
        if draw is not None:
            self.world.draw = draw
        held = program.run(arrays)
        passed = [
            None if result is None else DistTensor(result[0], held[result[1]])
            for result in program.results
        ]
        for slot in program.shared:
            passed[slot].more = {"shared": True}  # type: ignore[union-attr]  # they are there
        return passed

    def _gradient_program(
        self,
        attrs: AttrMap,
        grads: Sequence[TensorSpec | None],
        needed: tuple[bool, ...],
    ) -> GradientProgram:
        given = self.kept, self.outputs
        return trace_gradient(self.world, self.definition, attrs, given, grads, needed)

    def _differentiable(self, node: Node, attrs: AttrMap, grads: Grads) -> Grads:
        """The same by eager ops, which are recorded in turn."""
        outputs = []
        for slot, (spec, array) in enumerate(zip(self.outputs, node.outputs, strict=True)):
            tensor = DistTensor(spec, array)
            if spec.dtype.is_floating:
                tensor.node, tensor.slot = node, slot
            outputs.append(tensor)
        world = self.world
        before = world.forced
        world.forced = None if node.draw is None else node.draw[:2]
        try:
            return self.definition.gradients(attrs, node.inputs or (), outputs, grads)
        except PlanCompilerError as error:
            self._say_where(error)
            raise
        finally:
            world.forced = before


def element_counts_agree(left: TensorSpec, right: TensorSpec) -> bool:
    """Whether two local arrays have as many elements, of one size."""
    return left.dtype is right.dtype and int(np.prod(left.local_shape)) == int(
        np.prod(right.local_shape)
    )


def prepared(plan: OpPlan) -> Callable[..., DistTensor] | None:
    """A plan as one function of its tensors, where nothing needs care; else None."""
    if (
        len(plan.outputs) != 1
        or not plan.still
        or plan.random
        or plan.stepped
        or plan.mutates
        or not 1 <= len(plan.inputs) <= 2
    ):
        return None
    if plan.views and plan.alias is None:
        return None
    world, local, (spec,) = plan.world, plan.local, plan.outputs
    alias, any_order, recorded = plan.alias, plan.any_order, plan.recorded

    def run_one(x: DistTensor) -> DistTensor:
        out = local(x.local)
        result = DistTensor(spec, out)
        if x.node is not None and recorded and world.recording:
            world.clock = number = world.clock + 1
            result.node = Node(plan, (x,), (out,), number)
            result.slot = 0
        return result

    def run_two(x: DistTensor, y: DistTensor) -> DistTensor:
        out = local(x.local, y.local)
        result = DistTensor(spec, out)
        if (x.node is not None or y.node is not None) and recorded and world.recording:
            world.clock = number = world.clock + 1
            result.node = Node(plan, (x, y), (out,), number)
            result.slot = 0
        return result

    def run_view(x: DistTensor) -> DistTensor:
        part = x.local
        if x.more is None and part.flags.c_contiguous:
            out = alias(part)  # type: ignore[misc]  # it is there where this function is returned
            view = DistTensor(spec, out)
            view.more = {"base": x, "by": plan}
        elif x.__class__ is DistTensor and (x.packed() or any_order):
            out = alias(x.local)  # type: ignore[misc]  # as above
            view = DistTensor(spec, out)
            view.view_of(x, plan)
        else:
            return plan.call((x,))[0]
        if x.node is not None and recorded and world.recording:
            world.clock = number = world.clock + 1
            view.node = Node(plan, (x,), (out,), number)
            view.slot = 0
        return view

    if alias is not None:
        return run_view
    return run_one if len(plan.inputs) == 1 else run_two
