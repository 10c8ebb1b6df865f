"""Says which tensors are copied and put back, by kind and size.

A tensor of numbers in one dimension may be running statistics, which ``batch_norm`` writes to
without raising their version: those are copied up to a larger size than others.
"""

from __future__ import annotations

from ctypes import string_at
from typing import Any

import torch

from recollect._torch.tensors import is_plain_tensor

#: Bytes that are copied at every call: of buffers and of what may be statistics; of other tensors.
LARGE = 64 * 1024
SMALL = 4 * 1024


def is_copyable(tensor: Any) -> bool:
    """Whether ``tensor`` is memory that can be copied and copied back."""
    return (
        type(tensor) is torch.Tensor
        and (is_plain_tensor(tensor) or tensor.is_quantized)
        and not tensor.is_inference()
        and (tensor.is_contiguous() or 0 not in tensor.stride())  # expanded: one place for many
    )


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a copy of ``tensor`` is cheap, and enough to put it back: it needs no history."""
    return not tensor.requires_grad and nbytes(tensor) <= SMALL and is_copyable(tensor)


def are_statistics(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, not a large one, may be written to without its version being raised."""
    return (
        not tensor.requires_grad
        and tensor.dim() == 1
        and tensor.is_floating_point()
        and nbytes(tensor) <= LARGE
        and is_copyable(tensor)
    )


def nbytes(tensor: torch.Tensor) -> int:
    """The bytes of all values."""
    return tensor.numel() * tensor.element_size()


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same; False if that cannot be found out. Waits for a device."""
    if a.shape != b.shape:
        return False
    try:
        # As bytes, if possible: a transform around the region, such as vmap, may not know how to
        # run an op of comparison.
        if a.device.type != "cpu" or not (a.is_contiguous() and b.is_contiguous()):
            return torch.equal(a, b)
        size = nbytes(a)
        return string_at(a.data_ptr(), size) == string_at(b.data_ptr(), size)
    except RuntimeError:
        return False
