"""Exported PyTorch programs as one list of functional operations.

`torch.export` leaves two things to do: parts of a model that run without gradients are regions with
a graph of their own, and operations may change tensors in place. Regions are inlined here, and what
they return is detached, as the author's gradients stop there. In-place operations are left to
PyTorch's decomposition with an empty table: it traces the whole program again, which takes as long
as the export, so a program without them is spared that.
"""

from __future__ import annotations

from collections.abc import Container
from copy import copy, deepcopy
from typing import Any

_REGION = "wrap_with_set_grad_enabled"
_HIDDEN_UPDATES = ("aten.batch_norm.", "aten.instance_norm.", "aten.rrelu.")
"""Beginnings of targets that change their arguments, which their schemas do not say."""


def flat_program(torch: Any, program: Any, understood: Container[str], own: bool) -> Any:
    """The program without regions and in-place operations. `understood` are the targets that need
    no decomposition; a program that is not one's `own` is left as it is.
    """
    if not own:
        # A program has no way to take another graph; its parameters are not part of that.
        given, program = program, copy(program)
        program._graph_module = deepcopy(given._graph_module)  # noqa: SLF001  # no setter
        for old, new in zip(given.graph.nodes, program.graph.nodes, strict=True):
            new.name = old.name  # which the signature refers to; a copy names some anew
    _inline_regions(torch, program)
    return program if _is_plain(torch, program, understood) else program.run_decompositions({})


def _is_plain(torch: Any, program: Any, understood: Container[str]) -> bool:
    """Whether nothing changes in place, and all that depends on inputs or weights is understood."""
    constants = _constants(program.graph_signature)
    varying = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name not in constants:
            varying.add(node)
        if node.op != "call_function" or "getitem" in str(node.target):
            varying.update(each for each in (node,) if varying.intersection(node.all_input_nodes))
            continue
        name = str(node.target)
        operation = isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001  # no other name
        if not operation or name.startswith(_HIDDEN_UPDATES):
            return False
        if node.target._schema.is_mutable:  # noqa: SLF001  # the only way to ask
            return False
        if varying.intersection(node.all_input_nodes):
            varying.add(node)
            if name not in understood and node.users:
                return False
    return True


def _constants(signature: Any) -> set[str]:
    """Names of placeholders for what is neither an input nor a weight."""
    return {*signature.inputs_to_buffers, *signature.inputs_to_lifted_tensor_constants}


def _inline_regions(torch: Any, program: Any) -> None:
    module = program.graph_module
    graph = module.graph
    regions = [node for node in graph.nodes if _REGION in str(node.target)]
    if not regions:
        return
    while regions:
        for region in regions:
            _inline(torch, module, region, _depends_on_weights(torch, program))
        regions = [node for node in graph.nodes if _REGION in str(node.target)]
    graph.eliminate_dead_code()
    module.recompile()


def _depends_on_weights(torch: Any, program: Any) -> set[Any]:
    """Nodes of floating tensors that gradients may reach."""
    fixed = _constants(program.graph_signature)
    reached: set[Any] = set()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            continue
        if node.op == "placeholder":
            if node.name not in fixed:
                reached.add(node)
        elif any(each in reached for each in node.all_input_nodes):
            reached.add(node)
    return reached


def _inline(torch: Any, module: Any, region: Any, reached: set[Any]) -> None:
    """Put a region's nodes in the place of the node that runs it."""
    graph = module.graph
    enabled, holder, *arguments = region.args
    inner = getattr(module, holder.target)
    stops = not enabled and any(each in reached for each in arguments)
    instead: dict[Any, Any] = {}
    placeholders = [node for node in inner.graph.nodes if node.op == "placeholder"]
    instead.update(zip(placeholders, arguments, strict=True))
    with graph.inserting_before(region):
        for node in inner.graph.nodes:
            if node.op == "get_attr":
                instead[node] = graph.get_attr(f"{holder.target}.{node.target}")
                instead[node].meta = copy(node.meta)
        results = graph.graph_copy(inner.graph, instead)
        several = results if isinstance(results, (tuple, list)) else (results,)
        for user in list(region.users):
            result = several[user.args[1]]
            value = user.meta.get("val")
            if stops and isinstance(value, torch.Tensor) and value.is_floating_point():
                result = graph.call_function(torch.ops.aten.detach.default, (result,))
                result.meta = copy(user.meta)
            user.replace_all_uses_with(result)
            graph.erase_node(user)
    graph.erase_node(region)
