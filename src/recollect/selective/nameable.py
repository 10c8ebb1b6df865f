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


class Nameable:
    """One call of an op."""

    __slots__ = (
        "_others",
        "_result",
        "inputs",
        "is_kept",
        "is_spoilt",
        "memory",
        "rank",
        "rng",
        "saved",
        "step",
    )

    def __init__(
        self, step: int, out: Any, inputs: tuple[Any, ...], rng: RngState | None, rank: int
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.rng = rng
        #: Of the rule by which the result is not kept.
        self.rank = rank
        #: Whether the result was changed in place since.
        self.is_spoilt = False
        #: Whether it has been given such a name.
        self.is_kept = False
        self.saved = False
        results = list(out) if isinstance(out, (list, tuple)) else [out]
        main = _largest(results)
        self._result = None if main is None else (main, _Layout(results[main]))
        self.memory = None if main is None else storage_key(results[main])
        self._others: Any = None
        if isinstance(out, (list, tuple)):
            self._others = type(out), [_detached(each, n == main) for n, each in enumerate(results)]

    def note_use(self, step: int) -> None:
        """Of no interest: what is named is not let go."""

    def out(self, view: torch.Tensor) -> Any:
        """What the op returned, of whose result ``view`` shows memory; None if it cannot be had."""
        if self._result is None or self.is_spoilt:
            return None
        place, layout = self._result
        result = layout.back(view if storage_key(view) == self.memory else None)
        if self._others is None or result is None:
            return result
        kind, results = self._others
        return kind(result if n == place else each for n, each in enumerate(results))


class _Layout:
    """Where in a memory a tensor is."""

    __slots__ = ("_dtype", "_offset", "_shape", "_stride", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = ref(tensor)
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset, self._dtype = tensor.storage_offset(), tensor.dtype

    def back(self, view: torch.Tensor | None) -> torch.Tensor | None:
        """The tensor, made from another one on the same memory if it is gone."""
        tensor: torch.Tensor | None = self._tensor()
        if tensor is None and view is not None and view.dtype == self._dtype:
            tensor = view.as_strided(self._shape, self._stride, self._offset)
        return None if tensor is None else tensor.detach()


def _largest(results: list[Any]) -> int | None:
    sizes = [(r.numel(), -n) for n, r in enumerate(results) if _is_memory(r)]
    return -max(sizes)[1] if sizes else None


def _is_memory(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def _detached(value: Any, is_main: bool) -> Any:
    if is_main or not isinstance(value, torch.Tensor):
        return None if is_main else value
    return detach_below_autograd(value)
