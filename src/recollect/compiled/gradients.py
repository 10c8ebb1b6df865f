"""Has the gradient of each parameter be in memory of its own (P7).

Autograd takes a gradient as ``.grad`` without a copy if nobody else refers to the tensor. It cannot
see that another tensor shows the same memory. So where backward returns several views of a tensor,
as for parameters that are stacked or reshaped, what accumulates in one ``.grad``, or scales it in
place, changes the other ones too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from recollect._torch.inductor import is_same_size
from recollect._torch.pytree import tree_flatten, tree_unflatten
from recollect.compiled.joint import Joint


def separate_gradients(
    graph: fx.GraphModule,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **_: Any,
) -> None:
    """Copy gradients of parameters that show memory of another gradient, or of a given tensor.

    Args:
        graph: A joint graph; with what torch tells a partitioner about it.
        num_fwd_outputs: How many of its outputs are those of forward.
        static_lifetime_input_indices: Which of its inputs are parameters, or buffers.
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
