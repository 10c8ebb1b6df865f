"""What the nodes of a joint graph cost: seconds, and the memory that they take while they run (P3).

Kernels of libraries are run, on tensors like theirs. Loops move bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from recollect._torch.inductor import known_size
from recollect._torch.ops import OpOverload
from recollect._torch.pytree import tree_map_only
from recollect.planning.recording.prices import Prices

#: Seconds to launch a kernel of loops.
_LAUNCH = 3e-6


class NodeCosts:
    """The costs of nodes on one device."""

    def __init__(self, device: torch.device) -> None:
        self._prices = Prices(device, fakes=True)

    @property
    def spread(self) -> float:
        """By how much times may be off, as a fraction."""
        return self._prices.spread

    def of_kernel(self, node: fx.Node, moved: int) -> tuple[float, int]:
        """The seconds and the workspace of an op that runs as it is. ``moved``: its bytes."""
        if type(node.target) is not OpOverload:
            return self.of_loop(moved), 0
        args, kwargs = tree_map_only(fx.Node, _like, (node.args, node.kwargs))
        try:
            price = self._prices.price(node.target, args, kwargs)
        except NotImplementedError:  # what only a library knows
            return self.of_loop(moved), 0
        return price.seconds, max(0, price.workspace)

    def of_loop(self, moved: int) -> float:
        """The seconds of a kernel that reads and writes so many bytes."""
        return self._prices.moving(moved) + _LAUNCH

    def finish(self) -> None:
        """Remember all prices."""
        self._prices.finish()


def _like(node: fx.Node) -> Any:
    """A tensor like that of a node, without memory; another value as it is."""
    return tree_map_only((torch.Tensor, torch.SymInt, torch.SymFloat), _bare, node.meta.get("val"))


def _bare(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return known_size(value)
    sizes = [known_size(size) for size in value.shape]
    strides = [known_size(stride) for stride in value.stride()]
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
