"""The arithmetic of an op, from its shapes alone: for ops that would take too long to run (P3)."""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.ops import flop_formula, op_name
from recollect._torch.pytree import tree_map_only

#: Attention on the CPU, for which torch has no formula: the position of the queries, and how many
#: products of queries and keys it takes.
_CPU_ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The operations of a product, a convolution or attention; 0 of any other op.

    The arguments may be fake tensors.
    """
    attention = _CPU_ATTENTION.get(op_name(func))
    if attention is not None:
        first, products = attention
        queries, keys = args[first : first + 2]
        return int(2 * products * queries.numel() * keys.shape[-2])
    formula = flop_formula(func)
    if formula is None:
        return 0
    args, kwargs = tree_map_only(torch.Tensor, _without_data, (args, kwargs))
    return int(formula(*args, **kwargs, out_val=func(*args, **kwargs)))


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
