"""Rewrites joint graphs whose ops run as they are (P7).

`fold_views` folds views of views: each would cost a call. Autograd transposes a weight
twice, and detaches what a function has saved. A product of three dimensions is reshaped to two, and
back. Eager code does so in C++, where it costs little.

`separate_gradients` has the gradient of each parameter be in memory of its own. Autograd takes a
gradient as ``.grad`` without a copy if nobody else refers to the tensor. It cannot see that another
tensor shows the same memory. So where backward returns several views of a tensor, as for parameters
that are stacked or reshaped, what accumulates in one ``.grad``, or scales it in place, changes the
other ones too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from recollect._torch.inductor import is_same_size
from recollect._torch.ops import op_name
from recollect._torch.pytree import tree_flatten, tree_unflatten
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


# --- gradients -----------------------------------------------------------------------------------


def separate_gradients(
    graph: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **_: Any,
) -> None:
    """Copy gradients of parameters that show memory of another gradient, or of a given tensor.

    The arguments are what torch tells a partitioner about a joint graph: how many outputs forward
    has, and which inputs are parameters, or buffers.
    """
    outputs, parameters = num_fwd_outputs, set(static_lifetime_input_indices or ())
    joint = Joint(graph, outputs)
    #: By result: what shows its memory and is returned as it is.
    shown: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    taken = []
    for number, node in joint.backward_outputs:
        if number in parameters and _is_taken(node, joint.placeholders[number]):
            taken.append(node)
        else:
            shown[joint.base(node)].append(node)
    copied: set[fx.Node] = set()
    for node in dict.fromkeys(taken):
        base = joint.base(node)
        if _is_held(joint, node) or any(_overlap(node, other) for other in shown[base]):
            copied.add(node)
        else:
            shown[base].append(node)
    if copied:
        _return_copies(graph, outputs, parameters, copied)


def _return_copies(
    graph: fx.GraphModule, outputs: int, parameters: Collection[int], copied: Collection[fx.Node]
) -> None:
    (output,) = graph.graph.find_nodes(op="output")
    returned, structure = tree_flatten(output.args)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.graph.inserting_before(output):
        for node in copied:
            copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {**node.meta, "val": torch.clone(node.meta["val"])}
            copy.meta.pop("recompute", None)
            copies[node] = copy
    for number in parameters:
        at = outputs + number
        if at < len(returned):
            returned[at] = copies.get(returned[at], returned[at])
    output.args = tree_unflatten(returned, structure)


def _is_taken(gradient: fx.Node, parameter: fx.Node) -> bool:
    """Whether autograd takes a gradient as it is: it copies one of another layout.

    The stride of a dimension of size one tells nothing.
    """
    first, second = gradient.meta["val"], parameter.meta["val"]
    strides = zip(first.shape, first.stride(), second.stride(), strict=True)
    return all(is_same_size(size, 1) or is_same_size(one, other) for size, one, other in strides)


def _is_held(joint: Joint, node: fx.Node) -> bool:
    """Whether somebody else may hold a tensor that ``node`` shows."""
    base = joint.base(node)
    if base in joint.tangents:  # autograd knows who refers to the tensor itself
        return node is not base
    return base in joint.forward or base.op == "placeholder"


def _overlap(first: fx.Node, second: fx.Node) -> bool:
    """Whether two tensors in one storage have a number in common."""
    if first is second:  # it is returned twice, which autograd sees
        return False
    extents = [_extent(node.meta["val"]) for node in (first, second)]
    if None in extents:
        return True
    (start, end), (other_start, other_end) = extents
    return bool(start < other_end and other_start < end)


def _extent(value: Any) -> Any:
    """From where to where a tensor is in its storage; None if its sizes are dynamic."""
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    if not all(isinstance(each, int) for each in numbers):
        return None
    last = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return value.storage_offset(), value.storage_offset() + last + 1
