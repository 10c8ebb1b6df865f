"""Folds views of views in a joint graph, of which each would cost a call (P7).

Autograd transposes a weight twice, and detaches what a function has saved. A product of three
dimensions is reshaped to two, and back. Eager code does so in C++, where it costs little.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from recollect._torch.inductor import is_same_size
from recollect._torch.ops import op_name
from recollect.compiled.joint import Joint

_RESHAPES = frozenset({"aten._unsafe_view.default", "aten.view.default"})
_VIEWS = frozenset(
    {
        *("aten::_unsafe_view", "aten::alias", "aten::detach", "aten::expand", "aten::permute"),
        *("aten::select", "aten::slice", "aten::squeeze", "aten::t", "aten::transpose"),
        *("aten::unsqueeze", "aten::view"),
    }
)


def fold_views(graph: fx.GraphModule, outputs: int) -> None:
    """Fold views in a joint graph. ``outputs``: how many of its outputs are those of forward.

    What shows the memory of an output of forward stays as it is: autograd is to notice it if the
    caller writes to that. So does what a policy has decided about.
    """
    joint = Joint(graph, outputs)
    shown = {joint.base(node) for _, node in joint.forward_outputs}
    gradients = {node for _, node in joint.backward_outputs}
    for node in joint.nodes:
        if not _is_view(node) or joint.base(node) in shown or "recompute" in node.meta:
            continue
        if str(node.target) in _RESHAPES:
            _skip_reshapes(node)
        same = _same_as(node)
        if same is None:
            continue
        if node in gradients:  # each is a tensor of its own
            if same in gradients or same in joint.forward or same.op == "placeholder":
                continue
            gradients.add(same)
        node.replace_all_uses_with(same)
    graph.graph.eliminate_dead_code()


def _is_view(node: fx.Node) -> bool:
    return op_name(node.target) in _VIEWS and isinstance(node.meta.get("val"), torch.Tensor)


def _same_as(node: fx.Node) -> fx.Node | None:
    """The first of the tensors that ``node`` is a view of, and that it equals."""
    found, each = None, node
    while _is_view(each):
        each = each.all_input_nodes[0]
        if _form(each) is not None and is_same_size(_form(each), _form(node)):
            found = each
    return found


def _form(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return value.dtype, (*value.shape,), value.stride(), value.storage_offset()


def _skip_reshapes(node: fx.Node) -> None:
    """Have a reshaped tensor be one of the first contiguous tensor that was reshaped to it."""
    source = node.all_input_nodes[0]
    while str(source.target) in _RESHAPES and _is_contiguous(source.all_input_nodes[0]):
        source = source.all_input_nodes[0]
    if source is not node.all_input_nodes[0]:
        node.args = source, *node.args[1:]


def _is_contiguous(node: fx.Node) -> bool:
    value = node.meta["val"]
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not is_same_size(stride, expected):
            return False
        expected = expected * size
    return True
