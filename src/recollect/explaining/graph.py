"""What the graph of a result holds, node by node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from recollect._torch.autograd import packed_by
from recollect.explaining.memory import tensors_in

__all__ = ["saved_by_graph"]


def saved_by_graph(result: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that backward from ``result`` finds saved, each with the name of its node."""
    for node in _nodes(result):
        held = packed_by(node)
        if isinstance(node, BackwardCFunction):
            held = [*held, *vars(node).values()]  # put on the context by a function of the user's
        for tensor in tensors_in(held):
            yield node.name(), tensor


def _nodes(result: Any) -> Iterator[Any]:
    pending = [tensor.grad_fn for tensor in tensors_in(result)]
    # The nodes themselves: what stands for one in Python is made anew when it is not held.
    seen = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]
