"""State of eager programs in checkpoint folders: the same files that compiled jobs write.

A state is a dict of tensors, numbers, and dicts of these: what `state_dict` of modules and
optimizers gives, and `Generator.state`. Its names in a checkpoint are joined by dots, so that the
parameters of a module and the states of its optimizer have the names that they have in a job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np

from plancompiler.eager.inplace import put
from plancompiler.eager.spec import TensorSpec
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.world import World, current_world
from plancompiler.errors import CheckpointError, UsageError
from plancompiler.executor.checkpoint import (
    SKIPPED_STEPS,
    load_shards,
    save_shards,
    saved_types,
    skipped_steps,
    write_index,
)
from plancompiler.executor.space import HOST
from plancompiler.ir import DType, NdSbp, Placement
from plancompiler.ir.argument_errors import names_wrong_arguments
from plancompiler.ir.arguments import folder_path
from plancompiler.ir.source import user_line
from plancompiler.ops.registry import Array
from plancompiler.plan.plan import Plan, VariableDesc

State = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@names_wrong_arguments
def save(folder: str | PathLike[str], state: State, step: int = 0) -> None:
    """Write a state as safetensors shards with an index; all ranks of the world call it together.

    `step` is the number of the next step. Of a list of states the names stand side by side, as in a
    job's checkpoint. Every rank writes what it is the first to hold; partial values are reduced.
    `load`, `pc.run(job, restore=folder)` and other layouts can read it. UsageError for what is
    neither tensor nor number, and for two values of one name.
    """
    folder = folder_path("the folder of a state", folder)
    world = current_world()
    specs: dict[str, TensorSpec] = {}
    arrays: dict[str, Array] = {}
    for name, value in _values(_parts(state)).items():
        spec = specs[name] = _spec_of(world, name, value)
        if not isinstance(value, DistTensor):
            arrays[name] = np.asarray(value, spec.numpy_dtype)
        else:
            local = value.part(spec)
            arrays[name] = local if spec.space is HOST else spec.space.get(local)
    save_shards(folder, _plan(world, specs), arrays, step)
    _meet(world)
    if world.rank == 0:
        write_index(folder, world.size, step)
    _meet(world)


@names_wrong_arguments
def load(folder: str | PathLike[str], state: State, strict: bool = True, check: bool = True) -> Any:
    """Read a checkpoint into the tensors of a state, whatever layout wrote it; all ranks call it.

    Returns the state with numbers as they were saved: generators and optimizers take theirs by
    `load_state` and `load_state_dict`. A list of states, of which a list is returned, is one whose
    names stand side by side, as in a job's checkpoint. States of an optimizer that has not stepped
    yet are those that the checkpoint holds. Steps that loss scaling skipped in a job update nothing
    and do not count as updates of its optimizer. CheckpointError where a name is missing or another
    shape or dtype was saved, and, unless `strict` is False, where the checkpoint holds more. What
    is read is held against its digests unless `check` is False.
    """
    folder = folder_path("the folder of a state", folder)
    world = current_world()
    saved = saved_types(folder)
    skipped = skipped_steps(folder)
    states = [_as_saved(part, "", saved, skipped) for part in _parts(state)]
    values = _values(states)
    specs = {name: _spec_of(world, name, value) for name, value in values.items()}
    # Numbers are on all ranks here, where only one has written them, and of any type there.
    everywhere = Placement("cpu", range(world.size))
    for name, value in values.items():
        if not isinstance(value, DistTensor):
            kept, _, shape = saved.get(name, "").partition("[")
            dtype = DType.parse(kept) if shape == "]" else specs[name].dtype
            specs[name] = world.spec((), dtype, everywhere, NdSbp.broadcast(1))
    # A job has these once, and by other names.
    of_job = {"step": 0} | ({"missed": skipped} if skipped else {})
    counts = {
        name: count
        for name, value in values.items()
        if name not in saved and not isinstance(value, DistTensor)
        if (count := _last(name)) in of_job
    }
    if strict or specs.keys() - saved.keys() - counts.keys():
        _check_names(specs, saved, counts, strict)
    if skipped and SKIPPED_STEPS not in values:
        _check_steps(counts.keys() & _plain_steps(_parts(state)), skipped)
    wanted = {name: spec for name, spec in specs.items() if name not in counts}
    arrays, of_job["step"] = load_shards(folder, _plan(world, wanted), None if check else False)
    _meet(world)

    def rebuilt(part: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in part.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                values[key] = rebuilt(value, f"{name}.")
            elif not isinstance(value, DistTensor):
                values[key] = of_job[counts[name]] if name in counts else arrays[name].item()
            else:
                spec = specs[name]
                array = arrays.get(name)
                loaded = DistTensor(spec, spec.empty() if array is None else spec.put(array))
                with world.no_grad():
                    put(value, loaded.redistribute(sbp=value.sbp))
                values[key] = value
        return values

    rebuilt_states = [rebuilt(part, "") for part in states]
    return rebuilt_states[0] if isinstance(state, Mapping) else rebuilt_states


def _parts(state: State) -> Sequence[Mapping[str, Any]]:
    """A state as a list of states, whose names stand side by side."""
    return [state] if isinstance(state, Mapping) else state


def _as_saved(
    part: Mapping[str, Any], prefix: str, saved: Collection[str], skipped: int
) -> dict[str, Any]:
    """A state whose optimizers know which states a checkpoint has, and if steps were skipped."""
    as_saved = getattr(part, "as_saved", None)
    if as_saved is not None:
        names = [name[len(prefix) :] for name in saved if name.startswith(prefix)]
        part = as_saved(names, bool(skipped))
    return {
        key: _as_saved(value, f"{prefix}{key}.", saved, skipped)
        if isinstance(value, Mapping)
        else value
        for key, value in part.items()
    }


def _plain_steps(parts: Iterable[Mapping[str, Any]], prefix: str = "") -> set[str]:
    """The numbers of steps in a state, but for those of optimizers."""
    names = set[str]()
    for part in parts:
        if not hasattr(part, "as_saved"):
            for key, value in part.items():
                if isinstance(value, Mapping):
                    names |= _plain_steps([value], f"{prefix}{key}.")
                elif _last(key) == "step":
                    names.add(f"{prefix}{key}")
    return names


def _check_steps(names: Collection[str], skipped: int) -> None:
    """Numbers of steps that would hide that some of the steps were skipped must not be read."""
    if names:
        raise CheckpointError(
            "loss scaling has skipped steps of the checkpoint, which the state would count",
            op="pc.eager.load",
            source=user_line(),
            got=f"{min(names)!r}, and {skipped} skipped steps",
            expected="the state_dict() of an optimizer itself, which leaves them out",
            hint=f"to read nothing but the number of the step, ask for {SKIPPED_STEPS!r} too",
        )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _check_names(
    specs: Mapping[str, TensorSpec], saved: Mapping[str, str], steps: Collection[str], strict: bool
) -> None:
    """A checkpoint must hold what is asked for and, where `strict`, nothing else."""
    missing = [name for name in specs if name not in saved and name not in steps]
    more = [name for name in saved if name not in specs]
    unlike = [
        name
        for name, spec in specs.items()
        if name in saved and saved[name] != f"{spec.dtype}{list(spec.shape)}"
    ]
    if missing or (strict and more and not unlike):
        raise CheckpointError(
            "the checkpoint has no variable for a part of the state"
            if missing
            else "the checkpoint holds more than the state asks for",
            op="pc.eager.load",
            source=user_line(),
            got=_listed("only in the checkpoint", more, saved.__getitem__),
            expected=_listed(
                "only in the state",
                missing,
                lambda name: f"{specs[name].dtype}{list(specs[name].shape)}",
            ),
            hint=None if missing else "ask for all of it, or leave the rest with strict=False",
        )


def _listed(what: str, names: Sequence[str], described: Callable[[str], str]) -> str:
    """Names with what they are, the first few."""
    shown = [f"{name} {described(name)}" for name in sorted(names)[:_SHOWN]]
    rest = [f"and {len(names) - _SHOWN} more"] * (len(names) > _SHOWN)
    return f"{what}: {', '.join([*shown, *rest]) or 'nothing'}"


_SHOWN = 12
"""Names that an error lists."""


def _values(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All that states hold, by name."""
    values: dict[str, Any] = {}
    for state in states:
        for name, value in _leaves(state):
            if name in values:
                raise UsageError(
                    "two values of a state have one name",
                    source=user_line(),
                    got=repr(name),
                    hint='put them into dicts: {"model": model.state_dict(), ...}',
                )
            values[name] = value
    return values


def _leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _spec_of(world: World, name: str, value: Any) -> TensorSpec:
    """How a value lies in the files."""
    if isinstance(value, DistTensor):
        return world.reduced(value.spec)
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
