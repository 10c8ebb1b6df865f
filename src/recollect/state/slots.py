"""What modules have, by name: each parameter, buffer and child in its place again for a rerun.

An assignment puts another tensor in the place of one: ``self.average = 0.9 * self.average + x``
inside the region, ``layer.weight = nn.Parameter(...)`` after it, ``torch.func.functional_call``
around it. ``model.eval()`` changes what dropout does. A rerun must find what forward found.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

__all__ = ["Moved", "Slots", "put_in_place"]

Owner = dict[str, Any]

#: A place, and what was there when the region began.
Moved = tuple[Owner, str, Any]

_values = dict.values


class Slots:
    """What was in the dictionaries of modules when a region began."""

    __slots__ = ("_before", "_content", "_owners", "_training")

    def __init__(self, owners: list[Owner], content: list[Owner]) -> None:
        """``owners`` hold parameters, buffers and children; ``content`` are modules' attributes."""
        self._owners = owners
        self._before = [*map(dict.copy, owners)]
        self._content = content
        self._training = [attributes.get("training") for attributes in content]

    def moved(self) -> list[Moved]:
        """What is not in its place now; nothing, almost always."""
        owners, before = self._owners, self._before
        now = chain.from_iterable(map(_values, owners))
        then = chain.from_iterable(map(_values, before))
        same_mode = [attributes.get("training") for attributes in self._content] == self._training
        same_sizes = [*map(len, owners)] == [*map(len, before)]
        if same_mode and same_sizes and all(map(is_, now, then)):
            return []
        # What is gone altogether was taken by somebody who keeps track of it.
        return [
            (owner, name, value)
            for owner, content in zip(owners, before, strict=True)
            for name, value in content.items()
            if name in owner and _is_exchangeable(value, owner[name])
        ] + [
            (attributes, "training", mode)
            for attributes, mode in zip(self._content, self._training, strict=True)
            if attributes.get("training") != mode
        ]


_TENSORS = {torch.Tensor, nn.Parameter, type(None)}


def _is_exchangeable(old: Any, new: Any) -> bool:
    """Whether ``old`` was replaced by a user, who means it.

    A sharding engine puts whole parameters in the place of shards, and back, and keeps track of
    them itself. Those are not plain tensors on both sides, or the former has been emptied.
    """
    if old is new:
        return False
    if isinstance(old, nn.Module) and isinstance(new, nn.Module):
        return True
    if not {type(old), type(new)} <= _TENSORS:
        return False
    if old is None or old.layout is not torch.strided:
        return True
    return bool(old.numel() == 0 or old.untyped_storage().size() > 0)


def put_in_place(moved: list[Moved]) -> list[Moved]:
    """Put each thing in its place; the result undoes it."""
    before = [(owner, name, owner[name]) for owner, name, _ in moved]
    for owner, name, value in moved:
        owner[name] = value
    return before
