"""Which tensors an op computed, and which of them hold values that mean something.

What an op computed are its new results, and the tensors made in the same run that it changed; a
view computes nothing. A tensor from outside that a region updates (a counter, running statistics)
is at another value by nature in the second run; whether that matters shows in what reads it.

Memory that nobody has written to holds whatever was there before. ``empty`` makes such memory, and
so do kernels that have results for their own use, or that are padded.
"""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.ops import effects_of
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import storage_key

__all__ = ["Effects", "strides_of", "tensors_in"]

#: Ops of whose results only so many, the first, have a meaning.
_MEANINGFUL = {
    "empty": 0,
    "empty_like": 0,
    "empty_permuted": 0,
    "empty_strided": 0,
    "new_empty": 0,
    "new_empty_strided": 0,
    "resize_": 0,
    "rrelu_with_noise": 1,
    "nll_loss_forward": 1,
    "nll_loss2d_forward": 1,
    "_cudnn_attention_forward": 1,
    "_efficient_attention_forward": 1,
    "_flash_attention_forward": 1,
    "_scaled_dot_product_cudnn_attention": 1,
    "_scaled_dot_product_efficient_attention": 1,
    "_scaled_dot_product_flash_attention": 1,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_fused_attention_overrideable": 1,
    "_embedding_bag": 1,
    "_embedding_bag_forward_only": 1,
    "_ctc_loss": 1,
    "_cudnn_ctc_loss": 1,
    "_cudnn_rnn": 3,
    "miopen_rnn": 3,
    "mkldnn_rnn_layer": 3,
    "_batch_norm_with_update": 3,
    "cudnn_batch_norm": 3,
}


class Effects:
    """Follows the ops of one run."""

    def __init__(self) -> None:
        #: Storages that came into being in this run. A key may be used again for another one, but
        #: only for one of this run: those from outside are alive all the time.
        self._made: set[int | None] = {None}
        #: Those of them that nobody has written to.
        self._unwritten: set[int | None] = set()

    def of(
        self, op: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> list[torch.Tensor]:
        """What ``op``, called ``name`` and just run, computed that has a meaning."""
        new, changed = _results(op, args, kwargs, out)
        self._made.update(map(storage_key, new))
        computed = new + [tensor for tensor in changed if storage_key(tensor) in self._made]
        limit = _MEANINGFUL.get(name.partition(".")[0])
        if limit is not None:
            self._unwritten.update(map(storage_key, computed[limit:]))
            computed = computed[:limit]
        self._unwritten.difference_update(map(storage_key, computed))
        self._unwritten.discard(None)
        return computed

    def is_unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is memory that nobody has written to."""
        return storage_key(tensor) in self._unwritten


def _results(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """New tensors, and those that were changed."""
    effects = effects_of(op)
    if effects is None:
        return tensors_in(out), []
    new, written = effects
    results = out if len(new) != 1 and isinstance(out, (tuple, list)) else (out,)
    fresh = [result for result, is_new in zip(results, new, strict=False) if is_new]
    changed = [args[n] if n < len(args) else kwargs.get(name) for n, name in written]
    return tensors_in(fresh), tensors_in(changed)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def strides_of(tensor: torch.Tensor) -> tuple[int | None, ...]:
    """The strides that matter: not those of dimensions with a single place, nor without memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(step if size > 1 else None for size, step in sizes)
