"""Tensors that are held from forward to backward: by autograd, or to recompute others from."""

from __future__ import annotations

from typing import Any

import torch

from recollect._torch.autograd import has_history, without_history
from recollect._torch.tensors import memory_key, version_of
from recollect.checks.changed_input import source_changed
from recollect.replay.recorded_graph import Layout, copy_of_storage, view_of
from recollect.store.offload_batch import OffloadBatch, OffloadedTensor

__all__ = ["HeldTensor", "Ticket", "hold_for_good", "saved_in"]

#: Stands in the autograd graph for a saved tensor: the tensor if it is held, its version, and if it
#: is not held the view that it is. A list, since one is made for each saved tensor of a model.
Ticket = list[Any]


def saved_in(ticket: Ticket) -> torch.Tensor:
    """The tensor of a ticket, without history.

    The history of a result is the node that saves it: the two would hold each other where the
    garbage collector does not look. Most tensors come without.
    """
    tensor: torch.Tensor = ticket[0]
    return without_history(tensor) if has_history(tensor) else tensor


def hold_for_good(ticket: Ticket) -> None:
    """Have a ticket hold its tensor until the autograd graph is freed."""
    ticket[0] = saved_in(ticket)


class HeldTensor:
    """A tensor of a value, on the device or in a store."""

    __slots__ = ("away", "layout", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, layout: Layout) -> None:
        self.layout = layout
        self.version = version_of(tensor)
        self.tensor = tensor
        self.away: OffloadedTensor | None = None

    @property
    def storage(self) -> int | None:
        """The key of its storage, or of the one it was offloaded from; None if that is gone."""
        return memory_key(self.tensor) if self.away is None else self.away.address

    def send(self, offload_batch: OffloadBatch, layout: Layout) -> None:
        """Offload the whole tensor, which has this ``layout``."""
        if self.layout is not layout:
            self.tensor, self.layout = view_of(self.tensor, self.layout, layout), layout
        self.away = offload_batch.put(self.tensor)
        del self.tensor

    def is_unchanged(self) -> bool:
        """Whether the tensor, which is on the device, has not been written to."""
        return version_of(self.tensor) == self.version

    def count_version(self) -> None:
        """Take the present version as unchanged: the writes until now were known."""
        if self.away is None:
            self.version = version_of(self.tensor)
        else:
            self.away.count_version()

    def spoil(self) -> None:
        """The tensor has been changed: raise an error when it is used."""
        self.version = -1

    def become_copy(self) -> None:
        """Hold a copy: the storage is about to be written to, or may be."""
        self.tensor = copy_of_storage(self.tensor)
        self.version = version_of(self.tensor)

    def get(self, own: Layout, *, is_guarded: bool) -> torch.Tensor:
        """The tensor of the layout ``own``. ``is_guarded``: raise if it has been changed."""
        if self.away is not None:
            return view_of(self.away.get(), self.layout, own)
        if is_guarded and not self.is_unchanged():
            raise source_changed(self.tensor)
        return view_of(self.tensor, self.layout, own)
