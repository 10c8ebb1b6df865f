"""Results that are not kept, unless they are given a name for which they are.

A name comes after the op has run, and often by way of a view: ``recollect.tag(linear(x), "q")``
names a view of a product, and the product itself is gone. Until the region ends, each call is
remembered with what it takes to keep it after all: its result by its layout, which is found again
in the memory of the view, and the other results of the op, which are small as a rule (a mean, a
variance, a logarithm of a sum).
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from recollect.state.rng import RngState
from recollect.torch_private import detach_below_autograd, storage_key

__all__ = ["Nameable"]

#: A tensor, weakly; its type of numbers; and its layout: shape, strides, offset.
_Place = tuple[Any, torch.dtype, tuple[Any, ...]]


class Nameable:
    """One call of an op."""

    # No slots: what is rarely set has its default here.

    #: Whether the result was changed in place since.
    is_spoilt = False
    #: Whether it has been given such a name.
    is_kept = False
    saved = False
    #: If there are several results: how to put them together.
    _others: Any = None

    def __init__(
        self, step: int, out: Any, inputs: tuple[Any, ...], rng: RngState | None, rank: int
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.rng = rng
        #: Of the rule by which the result is not kept.
        self.rank = rank
        #: The result, or the largest of several: where it is, and which memory that is.
        self._place: _Place | None = None
        self.memory: int | None = None
        if _is_memory(out):
            self._find(out)
        elif isinstance(out, (list, tuple)):
            self._find_largest(out)

    def _find(self, result: torch.Tensor) -> None:
        self.memory = storage_key(result)
        layout = result.shape, result.stride(), result.storage_offset()
        self._place = ref(result), result.dtype, layout

    def _find_largest(self, results: list[Any] | tuple[Any, ...]) -> None:
        sizes = [(r.numel(), -n) for n, r in enumerate(results) if _is_memory(r)]
        main = -max(sizes)[1] if sizes else None
        if main is not None:
            self._find(results[main])
        others = [_detached(each, n == main) for n, each in enumerate(results)]
        self._others = type(results), others, main

    def note_use(self, step: int) -> None:
        """Of no interest: what is named is not let go."""

    def out(self, view: torch.Tensor) -> Any:
        """What the op returned, of whose result ``view`` shows memory; None if it cannot be had."""
        result = None if self.is_spoilt else self._result(view)
        if self._others is None or result is None:
            return result
        kind, results, main = self._others
        return kind(result if n == main else each for n, each in enumerate(results))

    def _result(self, view: torch.Tensor) -> torch.Tensor | None:
        """The result, made anew on the memory of ``view`` if it is gone."""
        if self._place is None:
            return None
        reference, dtype, layout = self._place
        result: torch.Tensor | None = reference()
        if result is None and view.dtype == dtype and storage_key(view) == self.memory:
            result = view.as_strided(*layout)
        return result


def _is_memory(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def _detached(value: Any, is_main: bool) -> Any:
    if is_main or not isinstance(value, torch.Tensor):
        return None if is_main else value
    return detach_below_autograd(value)
