"""Settings of a block or of the whole program: recording, implicit broadcast, seeds, generator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from plancompiler.eager import tape
from plancompiler.eager.generator import Generator
from plancompiler.eager.tensor import DistTensor
from plancompiler.eager.world import current_world
from plancompiler.errors import UsageError
from plancompiler.ir.source import user_line
from plancompiler.ir.spelling import takes_spellings


def no_grad() -> AbstractContextManager[None]:
    """Ops inside are not recorded on the tape."""
    return current_world().no_grad()


@contextmanager
def implicit_broadcast() -> Iterator[None]:
    """Plain arrays beside DistTensors count as broadcast: all ranks must have the same."""
    world = current_world()
    before, world.implicit_broadcast = world.implicit_broadcast, True
    try:
        yield
    finally:
        world.implicit_broadcast = before


def manual_seed(seed: int) -> Generator:
    """Start random numbers and initial values anew from a seed; returns the generator.

    Names of parameters start anew too, as those of a new job do.
    """
    world = current_world()
    world.generator = Generator(seed)
    world.attachments.clear()
    return world.generator


def default_generator() -> Generator:
    """The generator of random ops that are given none."""
    return current_world().generator


def using_generator(generator: Generator) -> AbstractContextManager[Generator]:
    """Random ops inside draw from this generator."""
    return current_world().drawing_from(generator)


@takes_spellings
def grad(
    output: DistTensor | Sequence[DistTensor],
    inputs: DistTensor | Sequence[DistTensor],
    seed: DistTensor | Sequence[DistTensor | None] | None = None,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> list[DistTensor | None]:
    """Gradients of `output` by each of `inputs`, which may be any tensors on the tape; their `grad`
    stays as it is. None stands for one that has no influence. Of several outputs, in a list, the
    gradients are added. `seed` is the gradient of an output of several elements.
    """
    outputs, several = _listed(output), _listed(inputs)
    seeds = [None] * len(outputs) if seed is None else _listed(seed)
    if len(seeds) != len(outputs):
        raise UsageError(
            "each output has a gradient of its own",
            op="grad",
            source=user_line(),
            got=f"{len(seeds)} for {len(outputs)} outputs",
        )
    for each in (*outputs, *several):
        if not isinstance(each, DistTensor):
            raise UsageError(
                "gradients are taken of a tensor with respect to tensors",
                op="grad",
                source=user_line(),
                got=type(each).__name__,
                expected="pc.eager.grad(output, [x, y])",
            )
    roots = [(each, tape.seed(each, own)) for each, own in zip(outputs, seeds, strict=True)]
    return tape.backward(roots, several, retain_graph, create_graph)


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
