"""Exported PyTorch programs as one list of functional operations.

`torch.export` leaves two things to do: parts of a model that run without gradients are regions with
a graph of their own, and operations may change tensors in place. Regions are inlined here, and what
they read is detached, as the author's gradients stop there; so are those within regions that
compute in another precision, which stay. In-place operations, and these, are left to PyTorch's
decomposition with an empty table: it traces the whole program again, which takes as long
as the export, so a program without them is spared that.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from copy import copy, deepcopy
from functools import partial
from typing import Any

from plancompiler.errors import ModelImportError
from plancompiler.ir import UNKNOWN_SOURCE, SourceLine
from plancompiler.ir.source import shown_path

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_REGION = "wrap_with_set_grad_enabled"
_CAST_REGION = "wrap_with_autocast"
_HIDDEN_UPDATES = ("aten.batch_norm.", "aten.instance_norm.", "aten.rrelu.")
"""Beginnings of targets that change their arguments, which their schemas do not say."""
_FRESH = re.compile(r"aten\.(new_|(zeros|ones|full|empty|rand|randn|randint)_like)")
"""Targets that read no numbers of their arguments."""
_STOPS = ("aten.detach.default", "aten.detach_.default")


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
    known = _constants(program.graph_signature)
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    reached = [each for each in places if each.name not in known]
    _stop_gradients(torch, program.graph_module, reached)
    if _is_plain(torch, program, understood):
        return program
    table, done = _composites(torch, program, understood), set[Any]()
    while True:
        program = program.run_decompositions(table)
        done |= table.keys()
        table = _composites(torch, program, understood)
        if not table.keys() - done:
            return program


def _composites(torch: Any, program: Any, understood: Container[str]) -> dict[Any, Any]:
    """What PyTorch itself writes with other operations, gradients included, of what is not
    understood.
    """
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001  # no other name
    return {
        node.target: partial(node.target._op_dk, key)  # noqa: SLF001  # `decompose` asks this table
        for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)  # noqa: SLF001  # no other name
        and (str(node.target) not in understood or _updates_statistics(node))
        # Nor has this question a public name.
        and torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), key.name)  # noqa: SLF001
    }


def _updates_statistics(node: Any) -> bool:
    """Whether a node is an instance norm in training with running statistics. PyTorch writes it as
    a batch norm, and their changes as other operations.
    """
    if str(node.target) != "aten.instance_norm.default":
        return False
    _x, _weight, _bias, mean, _variance, of_input, *_ = node.args
    return mean is not None and of_input is True


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


def _stop_gradients(torch: Any, module: Any, given: Collection[Any]) -> None:
    """Inline regions without gradients in a graph and in those within it, and detach what they
    read. Gradients reach `given`, some of the graph's placeholders.

    ModelImportError where a tensor that gradients reach changes in place where they do not: its
    gradient is that of the old value, which no functional operation has.
    """
    graph = module.graph
    changed = False
    while regions := [node for node in graph.nodes if _REGION in str(node.target)]:
        reached = _Reached(torch, graph, given)
        for region in regions:
            _inline(torch, module, region, reached)
        changed = True
    for node in list(graph.nodes):
        if str(node.target) == _STOPS[1]:
            changed = True
            _stop_after(torch, graph, node)
    casts = [node for node in graph.nodes if _CAST_REGION in str(node.target)]
    if casts or any(_is_mutable(node) for node in graph.nodes):
        reached = _Reached(torch, graph, given)
        for node in graph.nodes:
            reached.refuse_hidden_change(node)
        for node in casts:
            *_, holder = (each for each in node.args if getattr(each, "op", "") == "get_attr")
            inner = module.get_submodule(holder.target)
            arguments = node.args[node.args.index(holder) + 1 :]
            places = [each for each in inner.graph.nodes if each.op == "placeholder"]
            pairs = zip(places, arguments, strict=True)
            _stop_gradients(torch, inner, [place for place, each in pairs if each in reached])
    if changed:
        graph.eliminate_dead_code()
        module.recompile()


def _is_mutable(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


class _Reached:
    """The floating tensors of a graph that gradients flow through, and which of its tensors share
    memory.
    """

    def __init__(self, torch: Any, graph: Any, given: Collection[Any]) -> None:
        self._torch = torch
        self._root: dict[Any, Any] = {}
        """The tensor whose memory a tensor is a view of."""
        self._stopped: set[Any] = set()
        """Views that are detached from it."""
        self._nodes: set[Any] = set()
        self._grown: set[Any] = set()
        """Tensors that take gradients by a change in place."""
        for node in graph.nodes:
            if node.op == "placeholder":
                if node in given and self._may_have(node):
                    self._nodes.add(node)
            else:
                self._follow(node)

    def __contains__(self, node: object) -> bool:
        if node in self._nodes:
            return True
        return node not in self._stopped and self._root.get(node, node) in self._grown

    def replace(self, old: Any, new: Any) -> None:
        """A node takes the place of another."""
        if old in self:
            self._nodes.add(new)

    def _may_have(self, node: Any) -> bool:
        value = node.meta.get("val")
        return not isinstance(value, self._torch.Tensor) or bool(value.is_floating_point())

    def _follow(self, node: Any) -> None:
        shared = self._shared(node)
        if shared is not None:
            self._root[node] = self._root.get(shared, shared)
            if shared in self._stopped or str(node.target) in _STOPS:
                self._stopped.add(node)
        target = str(node.target)
        if target in _STOPS or _FRESH.match(target) or (_REGION in target and not node.args[0]):
            return
        if self._may_have(node) and any(each in self for each in node.all_input_nodes):
            self._nodes.add(node)
            for each in self._changed(node):
                self._grown.add(self._root.get(each, each))

    def _shared(self, node: Any) -> Any:
        """The tensor of which the result is a view, or that it is."""
        if "getitem" in str(node.target):
            return node.args[0]
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(each.alias_info is not None for each in schema.returns):
            return None
        for argument, value in self._arguments(node):
            if argument.alias_info is not None and hasattr(value, "all_input_nodes"):
                return value
        return None

    def _changed(self, node: Any) -> list[Any]:
        """The tensors that a node changes in place."""
        return [
            value
            for argument, value in self._arguments(node)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and hasattr(value, "all_input_nodes")
        ]

    @staticmethod
    def _arguments(node: Any) -> list[tuple[Any, Any]]:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return []
        named = {each.name: each for each in schema.arguments}
        pairs = list(zip(schema.arguments, node.args, strict=False))
        return pairs + [(named[name], value) for name, value in node.kwargs.items()]

    def refuse_hidden_change(self, node: Any) -> None:
        """ModelImportError where a node changes what gradients reach through a detached view."""
        for each in self._changed(node):
            root = self._root.get(each, each)
            if each in self._stopped and (root in self._nodes or root in self._grown):
                raise ModelImportError(
                    "a tensor that gradients flow through is changed in place where they do not: "
                    "under no_grad, or by a detached view",
                    source=author_line(self._torch, node),
                    got=str(node.target),
                    expected="a new tensor, or a change that gradients see",
                    hint="x = x + (value - x).detach() has the value, and the gradient of x",
                )


def author_line(torch: Any, node: Any) -> SourceLine:
    """The innermost line of the author for a node, outside of PyTorch itself."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if not file.startswith(str(torch.__path__[0])):
            return SourceLine(shown_path(file) or file, int(line))
    return UNKNOWN_SOURCE


def _detached(torch: Any, graph: Any, value: Any) -> Any:
    result = graph.call_function(torch.ops.aten.detach.default, (value,))
    result.meta = copy(value.meta)
    return result


def _stop_after(torch: Any, graph: Any, node: Any) -> None:
    """A tensor that is detached in place is so for all that comes after."""
    later = set()
    after = node.next
    while after.op != "root":
        later.add(after)
        after = after.next
    value = node.args[0]
    with graph.inserting_before(node):
        detached = _detached(torch, graph, value)
    node.replace_all_uses_with(detached)
    value.replace_all_uses_with(detached, delete_user_cb=later.__contains__)
    graph.erase_node(node)


def _inline(torch: Any, module: Any, region: Any, reached: _Reached) -> None:
    """Put a region's nodes in the place of the node that runs it."""
    graph = module.graph
    enabled, holder, *arguments = region.args
    inner = module.get_submodule(holder.target)
    placeholders = [node for node in inner.graph.nodes if node.op == "placeholder"]
    with graph.inserting_before(region):
        read = [
            _detached(torch, graph, each) if not enabled and each in reached else each
            for each in arguments
        ]
        instead: dict[Any, Any] = dict(zip(placeholders, read, strict=True))
        for node in inner.graph.nodes:
            if node.op == "get_attr":
                instead[node] = graph.get_attr(f"{holder.target}.{node.target}")
                instead[node].meta = copy(node.meta)
        results = graph.graph_copy(inner.graph, instead)
        several = results if isinstance(results, (tuple, list)) else (results,)
        for user in list(region.users):
            reached.replace(user, several[user.args[1]])
            user.replace_all_uses_with(several[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(region)
