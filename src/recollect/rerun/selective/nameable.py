"""Results that are not kept, unless they are given a name for which they are.

A name comes after the op has run, and often by way of a view: ``recollect.tag(linear(x), "q")``
names a view of a product, and the product itself is gone. Until the region ends, each call is
remembered with what it takes to keep it after all: its result, or once there are views of it its
layout, in which it is found again in the memory of a view; and the other results of the op, which
are small as a rule (a mean, a variance, a logarithm of a sum).
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from recollect._torch.modes import detach_below_autograd
from recollect._torch.tensors import storage_key
from recollect.state.rng import RngState

__all__ = ["Nameable"]


class Nameable:
    """One call of an op."""

    # No slots: what is rarely set has its default here.

    #: Whether the result was changed in place since.
    is_spoilt = False
    #: Whether it has been given such a name.
    is_kept = False
    saved = False
    #: Of the result, if there are views of it: the type of its numbers, shape, strides and offset.
    _layout: Any = None
    #: How to put several results together.
    _others: Any = None

    def __init__(
        self, step: int, out: Any, inputs: tuple[Any, ...], rng: RngState | None, rank: int
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.rng = rng
        #: Of the rule by which the result is not kept.
        self.rank = rank
        #: The result, or the largest of several, weakly; and which memory it is.
        self._result: Any = _nothing
        self.memory: int | None = None
        if type(out) is torch.Tensor:
            self._result, self.memory = ref(out), storage_key(out)
        elif isinstance(out, (list, tuple)):
            self._take_apart(out)

    def _take_apart(self, results: list[Any] | tuple[Any, ...]) -> None:
        sizes = [(r.numel(), -n) for n, r in enumerate(results) if _is_memory(r)]
        main = -max(sizes)[1] if sizes else None
        if main is not None:
            self._result, self.memory = ref(results[main]), storage_key(results[main])
        others = [_detached(each, n == main) for n, each in enumerate(results)]
        self._others = type(results), others, main

    def note_view(self, tensor: torch.Tensor) -> None:
        """Somebody makes a view of ``tensor``, which is a result or a view of one."""
        if self._layout is None and self._result() is tensor and self._is_in_place(tensor):
            self._layout = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _is_in_place(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has the memory of the result, which ``.data =`` may have replaced."""
        return _is_memory(tensor) and storage_key(tensor) == self.memory

    def note_use(self, step: int) -> None:
        """Of no interest: what is named is not let go."""

    def out(self, view: torch.Tensor) -> Any:
        """What the op returned, of whose result ``view`` shows memory; None if it cannot be had."""
        result = None if self.is_spoilt else self._found(view)
        if self._others is None or result is None:
            return result
        kind, results, main = self._others
        return kind(result if n == main else each for n, each in enumerate(results))

    def _found(self, view: torch.Tensor) -> torch.Tensor | None:
        """The result, made anew on the memory of ``view`` if it is gone."""
        result: torch.Tensor | None = self._result()
        if result is not None:
            return result if self._is_in_place(result) else None
        if self._layout is None or not self._is_in_place(view):
            return None
        dtype, *layout = self._layout
        return view.as_strided(*layout) if view.dtype == dtype else None


def _nothing() -> None:
    """In the place of a reference."""


def _is_memory(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def _detached(value: Any, is_main: bool) -> Any:
    if is_main or not isinstance(value, torch.Tensor):
        return None if is_main else value
    return detach_below_autograd(value)
