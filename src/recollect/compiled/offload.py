"""Has the halves of a split graph send saved tensors to the host, and fetch them (P7).

Forward returns the copy on the host for backward, in the place of the tensor. What that holds on
the device, and from when on, is decided by where the ops of `transfer_ops` are in the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from recollect._torch.pytree import tree_map_only
from recollect.compiled.decisions import Away
from recollect.compiled.fusion import kernel_test
from recollect.compiled.joint import returned_by
from recollect.compiled.transfer_ops import FETCH, FETCHED, OPS, SEND, SENT

_Test = Callable[[fx.Node], bool]


def offload(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    outputs: int,
    away: Sequence[Away],
    *,
    fused: bool,
) -> None:
    """Change the halves of a graph so that tensors which are saved are held on the host.

    Args:
        forward: The first half, which returns what the caller gets and what backward is given.
        backward: The other half.
        outputs: How much of that is for the caller.
        away: What to hold on the host.
        fused: Whether Inductor compiles the halves.
    """
    is_kernel = kernel_test() if fused else _any
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    returned = returned_by(forward)
    saved = {each.name: each for each in returned[outputs:] if isinstance(each, fx.Node)}
    for each in returned[:outputs]:
        if isinstance(each, fx.Node):
            saved.pop(each.name, None)  # the caller holds it
    # In this order copies out begin, and copies back that begin at one node in the other one.
    leaving = [each for each in away if each.name in saved and each.name in given]
    hosts = {
        saved[each.name]: _send(forward, saved[each.name], each, is_kernel) for each in leaving
    }
    (output,) = forward.graph.find_nodes(op="output")
    output.args = tree_map_only(fx.Node, lambda node: hosts.get(node, node), output.args)
    for each in reversed(leaving):
        _fetch(backward, given[each.name], each, is_kernel)
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()


def _send(forward: fx.GraphModule, source: fx.Node, away: Away, is_kernel: _Test) -> fx.Node:
    """Send a tensor when it is made. Returns its copy once that has arrived."""
    host = _insert_after(source, SEND, (source,))
    places = {node: number for number, node in enumerate(forward.graph.nodes)}
    (output,) = forward.graph.find_nodes(op="output")
    freed = _named(forward, away.freed, host) if away.freed else output.prev
    last = max(_end_of(freed, is_kernel), host, key=places.__getitem__)
    return _insert_after(last, SENT, (source, host))


def _fetch(backward: fx.GraphModule, given: fx.Node, away: Away, is_kernel: _Test) -> None:
    """Fetch a tensor that backward is ``given``."""
    device = given.meta["val"].device
    given.meta["val"] = SEND(given.meta["val"])
    given.meta.pop("tensor_meta", None)
    places = {node: number for number, node in enumerate(backward.graph.nodes)}
    readers = [*given.users]
    if not readers:
        return
    first = min(readers, key=places.__getitem__)
    last_given = max(backward.graph.find_nodes(op="placeholder"), key=places.__getitem__)
    after = _named(backward, away.fetched, first.prev) if away.fetched else last_given
    after = min(_end_of(after, is_kernel), first.prev, key=places.__getitem__)
    tensor = _insert_after(after, FETCH, (given, device))
    there = _insert_after(first.prev, FETCHED, (given, tensor))
    for reader in readers:
        reader.replace_input_with(given, there)


def _named(half: fx.GraphModule, name: str, other: fx.Node) -> fx.Node:
    """The node of a name; ``other`` if torch has put another one in its place."""
    return next((node for node in half.graph.nodes if node.name == name), other)


def _end_of(node: fx.Node, is_kernel: _Test) -> fx.Node:
    """The last node that belongs to what runs at ``node``, with copies that begin or end there.

    A copy back begins before the device waits for another one. Inductor runs loops just before the
    next kernel of a library, or has the one before compute them: a product adds to its result.
    """
    while (following := node.next).op != "output":
        is_copy = following.target in OPS
        if following.target is FETCHED or (is_kernel(following) and not is_copy):
            break
        node = following
    return node


def _insert_after(node: fx.Node, op: Any, args: tuple[Any, ...]) -> fx.Node:
    with node.graph.inserting_after(node):
        made = node.graph.call_function(op, args)
    made.meta["val"] = op(*tree_map_only(fx.Node, _value, args))
    return made


def _value(node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


def _any(_: fx.Node) -> bool:
    return True
