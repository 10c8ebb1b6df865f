"""What a host store hands out for a tensor, and the bytes behind it.

Three kinds of handles: a tensor that stays where it is (`Held`), a tensor on bytes that were copied
(`Copied`), and a tensor made of others (`Parts`). Several of the second kind share what is
`Stored`: views of one storage are copied once.

None of them refers to the graph of the tensor, whose nodes may in turn hold the handle.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from recollect._torch.autograd import is_weight, view_base
from recollect._torch.modes import is_functorch_wrapped
from recollect.store.links import Link
from recollect.store.pool import Buffer
from recollect.store.spans import Layout, Span

__all__ = [
    "Arrival",
    "Copied",
    "Given",
    "Held",
    "Parts",
    "Stored",
    "is_memory",
    "stays",
    "version_of",
]


def version_of(tensor: Tensor) -> int | None:
    """How often ``tensor`` was written to; None for an inference tensor, which does not count."""
    return None if tensor.is_inference() else tensor._version


def is_memory(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a plain range of memory, and nothing that stands for another."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not is_functorch_wrapped(tensor)
    )


def stays(tensor: Tensor) -> bool:
    """Whether the memory of ``tensor`` is there anyway: a parameter, a leaf, a view of one."""
    base = view_base(tensor)
    origin = tensor if base is None else base
    return is_weight(origin) or isinstance(origin, nn.Parameter)


class Held:
    """A tensor that was not copied, with the version it had."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        """Hold ``tensor`` from now on."""
        self.tensor: Tensor | None = tensor
        self.version = version_of(tensor)

    def is_spoilt(self) -> bool:
        """Whether the tensor was written to since."""
        return self.tensor is not None and version_of(self.tensor) != self.version


class Parts:
    """A tensor subclass that is made of other tensors: their handles, and how to join them."""

    __slots__ = ("context", "handles", "kind", "others", "size", "stride")

    def __init__(
        self,
        kind: Any,
        handles: dict[str, Any],
        others: dict[str, Any],
        context: Any,
        size: Any,
        stride: Any,
    ) -> None:
        self.kind = kind
        self.handles = handles
        self.others = others
        self.context = context
        self.size = size
        self.stride = stride


class Copied:
    """A tensor whose bytes are stored on the host."""

    __slots__ = ("layout", "span", "stored")

    def __init__(self, stored: Stored, layout: Layout, span: Span) -> None:
        self.stored: Stored | None = stored
        self.layout = layout
        self.span = span


class Arrival:
    """Bytes on their way to the device: memory of ``stream``, there after the event ``done``."""

    __slots__ = ("done", "memory", "span", "stream")

    def __init__(self, memory: Tensor, span: Span, done: Any, stream: Any) -> None:
        self.memory = memory
        self.span = span
        self.done = done
        self.stream = stream


class Given:
    """A tensor that was given out: as long as it lives unchanged, other views can share it."""

    __slots__ = ("span", "storage", "stream", "tensor", "version")

    def __init__(self, tensor: Tensor, arrival: Arrival) -> None:
        self.tensor = weakref.ref(tensor)
        self.storage = weakref.ref(tensor.untyped_storage())
        self.version = tensor._version
        self.span = arrival.span
        self.stream = arrival.stream

    def serves(self, layout: Layout, span: Span, stream: Any) -> bool:
        """Whether ``span`` is there, as it was given out, for use on ``stream``."""
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
        # Detached: a tensor of its own and no view, that still shares the count of changes.
        return tensor.as_strided(layout.size, layout.stride, offset).detach()


class Stored:
    """The bytes ``span`` of a storage, on the host or on their way there."""

    __slots__ = (
        "ahead",
        "buffer",
        "done",
        "given",
        "key",
        "kept_bytes",
        "last_read",
        "link",
        "origin",
        "source",
        "span",
        "spoilt",
        "stream",
        "uses",
        "version",
    )

    def __init__(self, link: Link, key: int, source: Tensor, span: Span, buffer: Buffer) -> None:
        self.link = link
        self.key = key
        #: An alias of the tensor, until it need not be kept for the copy any more.
        self.source: Tensor | None = source
        self.version = version_of(source)
        self.origin = weakref.ref(source.untyped_storage())
        #: What the source keeps from being freed.
        self.kept_bytes = source.untyped_storage().nbytes()
        self.span = span
        self.buffer = buffer
        #: The stream that the tensor was put on, and the event of the end of the copy.
        self.stream: Any = link.stream()
        self.done: Any = None
        #: The event of the end of the last copy back.
        self.last_read: Any = None
        #: How many handles there are.
        self.uses = 0
        #: Whether the tensor was written to while it was being copied.
        self.spoilt = False
        self.ahead: Arrival | None = None
        self.given: Given | None = None

    def count_version(self) -> None:
        """Take the version that the source has by now for the one that it was put with."""
        if self.source is not None and not self.spoilt:
            self.version = version_of(self.source)

    def look(self) -> bool:
        """Whether the bytes are those that were put."""
        if self.source is not None and version_of(self.source) != self.version:
            self.spoilt = True
        return not self.spoilt

    def serves(self, tensor: Tensor, span: Span) -> bool:
        """Whether ``span`` of the storage of ``tensor`` as it is now is what is stored here."""
        return (
            self.origin() is tensor.untyped_storage()
            and self.version is not None
            and self.version == version_of(tensor)
            and self.span.covers(span)
            and self.look()
        )
