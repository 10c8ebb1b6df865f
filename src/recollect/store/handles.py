"""The handles of a host store, and the bytes behind them.

A handle is a tensor that stays on its device (`OnDevice`), a tensor whose bytes are on the host
(`OnHost`), or a tensor subclass with a handle for each inner tensor (`Composite`). Handles of views
of one storage share a `HostCopy`.

No handle refers to the autograd graph of its tensor, whose nodes may hold the handle.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recollect._torch.autograd import is_weight, view_base
from recollect._torch.modes import unobserved
from recollect._torch.tensors import version_of
from recollect.errors import KeptTensorError
from recollect.store.links import CudaLink
from recollect.store.pool import HostBuffer
from recollect.store.spans import Layout, Span, copy_of

__all__ = [
    "Composite",
    "Fetched",
    "HostCopy",
    "OnDevice",
    "OnHost",
    "Returned",
    "is_resident",
    "leaves_of",
]

_DROPPED = "this handle of a HostStore was dropped: it can be neither read nor dropped again"

_MODIFIED = """\
A kept tensor was modified in place after it was given to a HostStore, before its copy to host \
memory was certain to be complete. Its values are lost.
Do one of these:
  - use an operation that is not in place (x = x.relu(), not x.relu_());
  - clone the tensor before it is modified;
  - call store.before_write(handle) first, if you use the store yourself."""


def is_resident(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is there anyway: a parameter, a leaf, a view of one."""
    base = view_base(tensor)
    origin = tensor if base is None else base
    return is_weight(origin) or isinstance(origin, nn.Parameter)


class OnDevice:
    """A tensor that was not copied, with the version it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        with unobserved():  # without its history, whose nodes may hold the handle
            self._hold(tensor if tensor.grad_fn is None else tensor.detach())

    def _hold(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)

    def _not_dropped(self) -> Tensor:
        if self.tensor is None:
            raise RuntimeError(_DROPPED)
        return self.tensor

    def get(self) -> Tensor:
        """The tensor, unless it was written to."""
        tensor = self._not_dropped()
        if version_of(tensor) != self.version:
            raise KeptTensorError(_MODIFIED)
        return tensor

    def drop(self) -> None:
        """Release the tensor."""
        self._not_dropped()
        self.tensor = None

    def hold_copy(self) -> None:
        """Hold a copy of the tensor, which is about to change."""
        self._hold(copy_of(self.get()))

    def count_version(self) -> None:
        """Take the tensor for unchanged, whatever its version."""
        self._hold(self._not_dropped())


@dataclass(slots=True, eq=False)
class Composite:
    """A tensor subclass that wraps other tensors: their handles by name, and how to join them."""

    handles: dict[str, Any]
    join: Callable[[dict[str, Tensor]], Tensor]


@dataclass(slots=True, eq=False)
class OnHost:
    """A tensor whose bytes are on the host, or on their way there."""

    #: None once dropped.
    copy: HostCopy | None
    layout: Layout
    span: Span

    def host_copy(self) -> HostCopy:
        """The bytes; an error if the handle was dropped."""
        if self.copy is None:
            raise RuntimeError(_DROPPED)
        return self.copy


def leaves_of(handle: Any) -> Iterator[OnDevice | OnHost]:
    """The handles of single tensors in ``handle``."""
    if isinstance(handle, Composite):
        for each in handle.handles.values():
            yield from leaves_of(each)
    else:
        yield handle


@dataclass(slots=True, eq=False)
class Fetched:
    """Bytes copied to the device: memory of ``stream``, complete after the event ``done``."""

    memory: Tensor
    span: Span
    done: Any
    stream: Any


class Returned:
    """A tensor that `get` returned: other views share its memory while it lives unchanged."""

    __slots__ = ("span", "storage", "stream", "tensor", "version")

    def __init__(self, tensor: Tensor, fetched: Fetched) -> None:
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())
        self.version = tensor._version
        self.span = fetched.span
        self.stream = fetched.stream

    def serves(self, layout: Layout, span: Span, stream: Any) -> bool:
        """Whether ``span`` is there, unchanged, for use on ``stream``."""
        tensor = self.tensor()
        return (
            tensor is not None
            and tensor._version == self.version
            and tensor.dtype == layout.dtype
            and self.stream == stream
            and self.span.covers(span)
            # The user may have given the tensor other memory (``.data =``), or freed it.
            and tensor.untyped_storage() is self.storage()
            and tensor.untyped_storage().nbytes() == self.span.size
        )

    def view(self, layout: Layout) -> Tensor:
        """The tensor of ``layout`` on the same memory."""
        tensor = self.tensor()
        assert tensor is not None
        offset = layout.offset - self.span.start // layout.dtype.itemsize
        # Detached: no view for autograd, and still sharing the version counter.
        return tensor.as_strided(layout.size, layout.stride, offset).detach()


@dataclass(slots=True, eq=False)
class HostCopy:
    """The bytes ``span`` of a storage, on the host or on their way there."""

    link: CudaLink
    #: The `storage_key` of the storage, and the storage while it lives.
    key: int
    origin: weakref.ReferenceType[torch.UntypedStorage]
    #: An alias of the tensor, until the copy is complete.
    source: Tensor | None
    version: int | None
    #: The bytes of device memory that the source holds.
    source_bytes: int
    span: Span
    buffer: HostBuffer
    #: The stream that the tensor was put on, and the event of the end of the copy.
    stream: Any
    done: Any = None
    #: The event of the end of the last copy back.
    last_read: Any = None
    #: How many handles there are.
    uses: int = 0
    #: Whether the source was written to while it was copied.
    is_modified: bool = False
    prefetched: Fetched | None = None
    returned: Returned | None = None

    def count_version(self) -> None:
        """Take the source for unchanged, whatever its version."""
        if self.source is not None and not self.is_modified:
            self.version = version_of(self.source)

    def is_intact(self) -> bool:
        """Whether the bytes are those that were put."""
        if self.source is not None and version_of(self.source) != self.version:
            self.is_modified = True
        return not self.is_modified

    def check_intact(self) -> None:
        """Raise if the source was modified while it was copied."""
        if not self.is_intact():
            raise KeptTensorError(_MODIFIED)

    def serves(self, tensor: Tensor, span: Span) -> bool:
        """Whether these bytes include ``span`` of the storage of ``tensor`` as it is now."""
        return (
            self.origin() is tensor.untyped_storage()
            and self.version is not None
            and self.version == version_of(tensor)
            and self.span.covers(span)
            and self.is_intact()
        )
