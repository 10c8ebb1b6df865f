"""What modules have, by name: each parameter, buffer and child in its place again for a rerun.

An assignment puts another tensor in the place of one: ``self.average = 0.9 * self.average + x``
inside the region, ``layer.weight = nn.Parameter(...)`` after it, ``torch.func.functional_call``
around it. ``model.eval()`` changes what dropout does. A rerun must find what forward found.
"""

from __future__ import annotations

from itertools import chain, islice
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

__all__ = ["Moved", "Slots", "put_in_place"]

Owner = dict[str, Any]

#: A place, and what was there when the region began.
Moved = tuple[Owner, str, Any]

_values = dict.values
_training = itemgetter("training")


class Slots:
    """What was in the dictionaries of modules when a region began."""

    __slots__ = ("_content", "_names", "_owners", "_then", "_training")

    def __init__(
        self, owners: list[Owner], names: list[tuple[str, ...]], content: list[Owner]
    ) -> None:
        """``owners`` hold parameters, buffers and children; ``content`` are modules' attributes.

        ``names``: those in each of ``owners``, in their order when they were first looked at.
        """
        self._owners = owners
        self._names = names
        # Flat: for the microsecond that this may take, a copy of each would be too much.
        self._then = [*chain.from_iterable(map(_values, owners))]
        self._content = content
        self._training = [*map(_training, content)]

    def is_present(self) -> bool:
        """Whether everything is in its place; almost always."""
        now = [*chain.from_iterable(map(_values, self._owners))]
        return (
            len(now) == len(self._then)
            and all(map(is_, now, self._then))
            and [*map(_training, self._content)] == self._training
        )

    def moved(self) -> list[Moved]:
        """What is not in its place now."""
        return self._moved_values() + [
            (attributes, "training", mode)
            for attributes, mode in zip(self._content, self._training, strict=True)
            if attributes["training"] != mode
        ]

    def _moved_values(self) -> list[Moved]:
        if sum(map(len, self._names)) != len(self._then):
            return []  # somebody writes to the dictionaries, and knows what is where
        then = iter(self._then)
        moved: list[Moved] = []
        for owner, names in zip(self._owners, self._names, strict=True):
            values = [*islice(then, len(names))]
            # What is gone, or in another place in order, was taken by somebody who keeps track.
            if (*owner,) == names:
                moved += [
                    (owner, name, value)
                    for name, value in zip(names, values, strict=True)
                    if _is_exchangeable(value, owner[name])
                ]
        return moved


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
