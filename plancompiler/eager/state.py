"""State of eager programs in checkpoint folders: the same files that compiled jobs write.

A state is a dict of tensors, numbers, and dicts of these: what `state_dict` of modules and
optimizers gives, and `Generator.state`. Its names in a checkpoint are joined by dots, so that the
parameters of a module and the states of its optimizer have the names that they have in a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import numpy as np

from plancompiler.eager.inplace import put
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.tracing import without_partial
from plancompiler.eager.world import World, current_world
from plancompiler.errors import UsageError
from plancompiler.executor.checkpoint import load_shards, save_shards, write_index
from plancompiler.executor.space import HOST
from plancompiler.ir import DType, NdSbp, Placement
from plancompiler.ir.arguments import folder_path
from plancompiler.ir.refusal import names_wrong_arguments
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array
from plancompiler.plan.plan import Plan, VariableDesc

State = Mapping[str, Any]


@names_wrong_arguments
def save(folder: str | PathLike[str], state: State, step: int = 0) -> None:
    """Write a state as safetensors shards with an index; all ranks of the world call it together.

    `step` is the number of the next step. Every rank writes what it is the first to hold; partial
    values are reduced. `load`, `pc.run(job, restore=folder)` and other layouts can read it.
    UsageError for what is neither tensor nor number.
    """
    folder = folder_path("the folder of a state", folder)
    world = current_world()
    found: dict[str, TensorSpec] = {}
    arrays: dict[str, Array] = {}
    for name, value in _leaves(state):
        spec = found[name] = _spec_of(world, name, value)
        if not isinstance(value, DistTensor):
            arrays[name] = np.asarray(value, spec.numpy_dtype)
        else:
            local = value.local
            if value.spec is not spec:
                local = value.moved(spec, world.move(value.spec, spec))
            arrays[name] = local if spec.space is HOST else spec.space.get(local)
    save_shards(folder, _plan(world, found), arrays, step)
    _meet(world)
    if world.rank == 0:
        write_index(folder, world.size, step)
    _meet(world)


@names_wrong_arguments
def load(folder: str | PathLike[str], state: State) -> dict[str, Any]:
    """Read a checkpoint into the tensors of a state, whatever layout wrote it; all ranks call it.

    Returns the state with numbers as they were saved: generators and optimizers take theirs by
    `load_state` and `load_state_dict`. CheckpointError where a name is missing or another shape or
    dtype was saved. Names that the state does not have are left alone.
    """
    folder = folder_path("the folder of a state", folder)
    world = current_world()
    specs = {name: _spec_of(world, name, value) for name, value in _leaves(state)}
    # Numbers are on all ranks here, where only one has written them.
    everywhere = Placement("cpu", range(world.size))
    for name, value in _leaves(state):
        if not isinstance(value, DistTensor):
            spec = specs[name]
            specs[name] = world.spec((), spec.dtype, everywhere, NdSbp.broadcast(1))
    arrays, _ = load_shards(folder, _plan(world, specs))
    _meet(world)

    def rebuilt(part: State, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in part.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                found[key] = rebuilt(value, f"{name}.")
            elif not isinstance(value, DistTensor):
                found[key] = arrays[name].item()
            else:
                spec = specs[name]
                array = arrays.get(name)
                loaded = DistTensor(spec, spec.empty() if array is None else spec.space.put(array))
                with world.no_grad():
                    put(value, loaded.redistribute(sbp=value.sbp))
                found[key] = value
        return found

    return rebuilt(state, "")


def _leaves(state: State, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _spec_of(world: World, name: str, value: Any) -> TensorSpec:
    """How a value lies in the files."""
    if isinstance(value, DistTensor):
        spec = value.spec
        return world.spec(*spec.type, spec.placement, without_partial(spec.sbp))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(
            "a state holds tensors and numbers",
            source=user_line(),
            got=f"{name!r}: {type(value).__name__}",
        )
    dtype = DType.INT64 if isinstance(value, int) else DType.FLOAT64
    return world.spec((), dtype, Placement("cpu", [0]), NdSbp.broadcast(1))


def _plan(world: World, specs: Mapping[str, TensorSpec]) -> Plan:
    """What checkpoints want to know of this rank: which boxes of which variables it holds."""
    variables = tuple(
        VariableDesc(name, 0, spec.shape, spec.dtype, spec.placement, spec.sbp, spec.region, ())
        for name, spec in specs.items()
        if spec.inside
    )
    return Plan("eager", world.rank, world.size, 0, (), (), (), (), (), variables, ())


def _meet(world: World) -> None:
    if world.size > 1:
        world.comm.context(tuple(range(world.size))).barrier()
