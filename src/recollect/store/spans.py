"""Tensors as ranges of bytes of their storage, and back.

A store keeps raw bytes, so strides, expanded dimensions and views of one storage are preserved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from recollect._torch.modes import raw_memory, unobserved
from recollect._torch.tensors import is_plain_tensor

#: Ranges start at a multiple of this, as allocations of a device do: copies are aligned alike.
_ALIGNMENT = 512


class Span(NamedTuple):
    """A range of bytes of a storage."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end


class Layout(NamedTuple):
    """Where the elements of a tensor are in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def layout_of(tensor: Tensor) -> Layout:
    """The layout of ``tensor`` in its storage."""
    return Layout(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def span_of(layout: Layout) -> Span:
    """The bytes of the storage from the first to the last element of a tensor that is not empty."""
    steps = zip(layout.size, layout.stride, strict=True)
    last = layout.offset + sum((size - 1) * stride for size, stride in steps)
    item = layout.dtype.itemsize
    return Span(layout.offset * item // _ALIGNMENT * _ALIGNMENT, (last + 1) * item)


def span_to_store(span: Span, whole: int) -> Span:
    """The bytes to copy for ``span`` out of ``whole``: all, unless ``span`` is less than half.

    Other views of the storage are likely to follow, such as the parts of a split.
    """
    return span if 2 * span.size < whole else Span(0, whole)


def bytes_of(storage: torch.UntypedStorage, span: Span) -> Tensor:
    """The bytes ``span`` of ``storage``, as a tensor."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, span.start, (span.size,), (1,))


def tensor_on(memory: Tensor, start: int, layout: Layout) -> Tensor:
    """The tensor of ``layout`` on a copy of its storage that begins at the byte ``start``."""
    empty = torch.empty(0, dtype=layout.dtype, device=memory.device)
    offset = layout.offset - start // layout.dtype.itemsize
    return empty.set_(memory.untyped_storage(), offset, layout.size, layout.stride)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy of ``tensor``, with the same strides if it is strided."""
    with raw_memory():
        if type(tensor) in (Tensor, nn.Parameter) and is_plain_tensor(tensor):
            layout = layout_of(tensor)
            if tensor.numel() == 0:
                return tensor.new_empty_strided(layout.size, layout.stride)
            span = span_of(layout)
            return tensor_on(bytes_of(tensor.untyped_storage(), span).clone(), span.start, layout)
    with unobserved():
        return tensor.detach().clone()


def shift_of(tensor: Tensor) -> int:
    """The alignment of ``tensor``: its offset in bytes from an aligned address.

    The last bit of a library's results may depend on it. (cuBLAS considers up to 256 bytes.)
    """
    try:
        return tensor.data_ptr() % (64 if tensor.device.type == "cpu" else 256)
    except RuntimeError:  # it has no memory
        return 0


def laid_out(values: Tensor, stride: tuple[int, ...], shift: int) -> Tensor:
    """A copy of ``values`` with these strides and, where possible, this alignment (`shift_of`)."""
    offset = shift // values.element_size() if values.numel() else 0
    layout = Layout(values.dtype, values.shape, stride, offset)
    length = span_of(layout).end // values.element_size() if values.numel() else 0
    memory = torch.empty(length, dtype=values.dtype, device=values.device)
    tensor = tensor_on(memory, 0, layout)
    # Elements of expanded dimensions (stride 0) are written once.
    once = tuple(slice(None) if step else slice(0, 1) for step in stride)
    tensor[once].copy_(values[once])
    return tensor
