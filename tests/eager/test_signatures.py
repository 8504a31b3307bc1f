"""Every op kind on eager tensors that lie as each of its signatures says: the dense result, forward
and backward, put together from the ranks' own parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

import plancompiler as pc
from plancompiler.eager import spawn
from plancompiler.eager.op_plan import OpPlan
from plancompiler.ir import BROADCAST, NdSbp, Partial
from plancompiler.ir.halo import Halo
from plancompiler.ops import op_table
from plancompiler.ops.rule import NdSignature
from tests.eager.test_ops import STRUCTURE
from tests.ops.dense import SEED, STEP, gradients_of
from tests.ops.samples import Sample, samples
from tests.ops.sharding import Shards, assemble, assert_close, run_dense, split
from tests.ops.test_sharding import signatures_on, tolerance

LINE = pc.Placement("cpu", [0, 1])
GRID = pc.Placement("cpu", [[0, 1], [2, 3]])
LEAST = {LINE: 3_500, GRID: 6_900}
"""Signatures that there are at least."""


@dataclass(frozen=True)
class Call:
    """A sample whose inputs lie as a signature says, in random parts where they are partial, and
    without the halos that it wants.
    """

    sample: Sample
    signature: NdSignature
    shards: tuple[Shards, ...]

    def __str__(self) -> str:
        return f"{self.sample}: {self.signature}"

    @property
    def differentiable(self) -> bool:
        """Whether the gradient of its first output is compared."""
        definition = op_table()[self.sample.kind]
        return (
            bool(self.sample.inputs)
            and self.sample.differentiable
            and definition.gradient is not None
            and not definition.mutates
            and self.sample.kind != "stop_gradient"
        )


@pytest.fixture(scope="module")
def all_samples(tmp_path_factory):
    return [
        sample
        for sample in samples(tmp_path_factory.mktemp("data"))
        if sample.kind not in STRUCTURE
    ]


def calls_on(placement: pc.Placement, all_samples: list[Sample]) -> list[Call]:
    """Every signature of every sample; on two axes, where they are many, each signature of a kind
    once, on the sample that had the fewest so far.
    """
    rng = np.random.default_rng(2)
    hierarchy = placement.hierarchy
    results: dict[object, list[tuple[int, NdSignature]]] = {}
    for number, sample in enumerate(all_samples):
        for signature in signatures_on(sample, hierarchy):
            key = (
                (sample.kind, _without_reaches(signature))
                if placement.ndim > 1
                else (number, signature)
            )
            results.setdefault(key, []).append((number, signature))
    taken = [0] * len(all_samples)
    calls = []
    for choices in results.values():
        number, signature = min(choices, key=lambda choice: taken[choice[0]])
        taken[number] += 1
        sample = all_samples[number]
        shards = tuple(
            split(array, sbp.without_halos(), hierarchy, rng)
            for array, sbp in zip(sample.inputs, signature.inputs, strict=True)
        )
        calls.append(Call(sample, signature, shards))
    return calls


def _without_reaches(signature: NdSignature) -> tuple[object, ...]:
    """The signature with a mark for each halo: how far these reach follows from the shapes."""
    return tuple(
        tuple(("halo", entry.axis) if isinstance(entry, Halo) else entry for entry in sbp)
        for sbp in (*signature.inputs, *signature.outputs)
    )


def whole(parts, placement):
    """The array from each rank's part, as the layout says in which they lie."""
    (sbp,) = {sbp for _, sbp in parts}
    hierarchy = placement.hierarchy
    shards = {
        placement.coordinates(placement.parallel_id(rank)): local
        for rank, (local, _) in enumerate(parts)
    }
    return assemble(shards, sbp, hierarchy)


def reduced(sbp: NdSbp) -> NdSbp:
    """The layout that the gradient of a value has when nobody splits it further."""
    return NdSbp(tuple(BROADCAST if isinstance(entry, Partial) else entry for entry in sbp))


def plan_of(call: Call, tensors: list[pc.DistTensor], placement: pc.Placement) -> OpPlan | None:
    """The plan of the call's own signature, where the dispatcher has a cheaper one; else None."""
    world = pc.eager.current_world()
    sample, signature = call.sample, call.signature
    specs = tuple(tensor.spec for tensor in tensors)
    if not tensors:
        chosen = world.mode.plan(sample.kind, (), sample.attrs, placement)
    else:
        chosen = world.mode.plan(sample.kind, specs, sample.attrs)
    wanted = tuple(
        world.spec(*made.type, placement, sbp)
        for made, sbp in zip(chosen.outputs, signature.outputs, strict=True)
    )
    used = tuple(
        world.spec(*spec.type, placement, sbp)
        for spec, sbp in zip(specs, signature.inputs, strict=True)
    )
    if chosen.used == used and chosen.outputs == wanted:
        return None
    return OpPlan(world, sample.kind, chosen.attrs, specs, used, wanted)


def run_all(calls: list[Call], weights: dict[int, np.ndarray | None], placement: pc.Placement):
    """Local parts and layouts of outputs and gradients of all calls, and how many of them got
    their signature from the dispatcher."""
    world = pc.eager.current_world()
    me = placement.coordinates(placement.parallel_id(world.rank))
    generator = pc.manual_seed(SEED)
    outputs_of, gradients, dispatched = [], [], 0
    for call in calls:
        sample, signature, weight = call.sample, call.signature, weights[id(call.sample)]
        generator.start_step(STEP)
        world.step = STEP
        tensors = []
        for array, shards, sbp in zip(sample.inputs, call.shards, signature.inputs, strict=True):
            made = sbp.without_halos()
            tensor = pc.eager.from_local(shards[me], placement, made, shape=array.shape)
            tensor.requires_grad = weight is not None and array.dtype.kind == "f"
            tensors.append(tensor)
        plan = plan_of(call, tensors, placement)
        if plan is not None:
            if plan.random:
                world.draw_from(plan.attrs)
            plan.context.seed = SEED
            outputs = plan.call(tensors)
        elif tensors:
            outputs = tensors[0]._apply(sample.kind, tensors, sample.attrs)
        else:
            outputs = world.add(sample.kind, (), sample.attrs, placement)
        assert tuple(output.sbp for output in outputs) == signature.outputs, str(call)
        outputs_of.append([(output.local.copy(), output.sbp) for output in outputs])
        dispatched += plan is None
        if weight is not None and outputs[0].requires_grad:
            outputs[0].backward(pc.tensor(weight, placement, reduced(outputs[0].sbp)))
        gradients.append(
            [None if one.grad is None else (one.grad.local, one.grad.sbp) for one in tensors]
        )
    return outputs_of, gradients, dispatched


@dataclass(frozen=True)
class Dense:
    """What a sample gives on whole arrays."""

    outputs: list[np.ndarray]
    weight: np.ndarray | None
    """That of the first output, where gradients are compared."""
    gradients: list[np.ndarray | None]


@pytest.fixture(scope="module")
def dense_of(all_samples):
    """The dense results of a call, which are those of its sample on every mesh."""
    rng = np.random.default_rng(5)
    results: dict[int, Dense] = {}

    def dense_of(call: Call) -> Dense:
        sample, key = call.sample, id(call.sample)
        if key not in results:
            outputs = run_dense(sample.kind, sample.inputs, sample.attrs, seed=SEED, step=STEP)
            weight, gradients = None, []
            if call.differentiable and outputs[0].dtype.kind == "f":
                weight = np.asarray(rng.normal(size=outputs[0].shape), outputs[0].dtype)
                given = [weight] + [None] * (len(outputs) - 1)
                gradients = gradients_of(sample.kind, sample.inputs, sample.attrs, given)
            results[key] = Dense(outputs, weight, gradients)
        return results[key]

    return dense_of


@pytest.mark.slow
@pytest.mark.parametrize("placement", [LINE, GRID], ids=["2", "2x2"])
def test_every_signature_gives_the_dense_result(all_samples, dense_of, placement, record_property):
    calls = calls_on(placement, all_samples)
    weights = {id(call.sample): dense_of(call).weight for call in calls}
    by_rank = spawn(run_all, placement.size, calls, weights, placement)
    backward = 0
    for number, call in enumerate(calls):
        dense = dense_of(call)
        for slot, wanted in enumerate(dense.outputs):
            got = whole([outputs[number][slot] for outputs, _, _ in by_rank], placement)
            assert got.dtype == wanted.dtype, str(call)
            assert_close(got, wanted, tolerance(wanted) * 10, label=call)
        for slot, wanted in enumerate(dense.gradients):
            parts = [gradients[number][slot] for _, gradients, _ in by_rank]
            if wanted is None:
                assert parts == [None] * placement.size, str(call)
                continue
            got = whole(parts, placement)
            bound = 1e-7 if wanted.dtype == np.float64 else 1e-5
            assert_close(got, wanted, bound, bound / 100, call)
        backward += dense.weight is not None
    kinds = len({call.sample.kind for call in calls})
    record_property(
        f"eager_signatures_proved_on_mesh_{placement.hierarchy}",
        f"{len(calls)} forward, {backward} backward, of {kinds} op kinds; "
        f"{by_rank[0][2]} as dispatched, the others on plans of their own",
    )
    assert len(calls) >= LEAST[placement]
