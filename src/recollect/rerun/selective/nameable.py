"""Results that a name may keep after their op has run.

A tensor gets its name after the op has run, and often by way of a view: ``recollect.tag(linear(x),
"q")`` names a view of a product, and the product itself is gone. Its memory is not: it is known by
its storage. Until the region ends, each call is remembered with what is needed to keep it after
all: storage and layout of its result, and the other results of the op, which are usually small (a
mean, a variance, a logarithm of a sum).
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from recollect._torch.modes import detach_below_autograd
from recollect._torch.tensors import is_plain_tensor, storage_key
from recollect.state.rng import RngState

__all__ = ["HELD", "Nameable", "NameableResults"]

#: In place of a call: the tensor is held anyway, by an entry or from outside of the region.
HELD = object()


class Nameable:
    """One call of an op."""

    def __init__(
        self, step: int, out: Any, inputs: tuple[Any, ...], rng: RngState | None, rank: int
    ) -> None:
        self.step = step
        self.inputs = inputs
        self.rng = rng
        #: The rank of the rule by which the result is not kept.
        self.rank = rank
        #: Whether a name has kept the result.
        self.is_kept = False
        #: Several results, with the largest left out, and where it belongs.
        self._others: Any = None
        self._main: int | None = None
        result = out
        if isinstance(out, (list, tuple)):
            sizes = [(each.numel(), -n) for n, each in enumerate(out) if _is_plain(each)]
            self._main = -max(sizes)[1] if sizes else None
            result = None if self._main is None else out[self._main]
            self._others = type(out)(_detached(each, each is result) for each in out)
        #: The result, or the largest of several: its storage, weakly, dtype and layout.
        self._result: Any = None
        if _is_plain(result):
            layout = result.storage_offset(), result.shape, result.stride()
            self._result = ref(result.untyped_storage()), result.dtype, result.device, layout

    def out(self) -> Any:
        """What the op returned; None if it is gone."""
        storage = None if self._result is None else self._result[0]()
        if storage is None:
            return None
        _, dtype, device, layout = self._result
        result = torch.empty(0, dtype=dtype, device=device).set_(storage, *layout)
        if self._others is None:
            return result
        each = enumerate(self._others)
        return type(self._others)(result if n == self._main else other for n, other in each)


class NameableResults:
    """The memory that the ops of a region have allocated, and the calls that filled it."""

    __slots__ = ("_sources",)

    def __init__(self) -> None:
        #: By key of a storage: that, weakly, and its call, `HELD`, or None: it cannot be kept.
        self._sources: dict[int | None, tuple[Any, Any]] = {}

    def source(self, tensor: torch.Tensor) -> Any:
        """The call that computed ``tensor``, `HELD`, or None."""
        key = storage_key(tensor)
        if key is None:
            return None
        known = self._sources.get(key)
        return HELD if known is None or known[0]() is not tensor.untyped_storage() else known[1]

    def note(self, out: Any, source: Any) -> None:
        """An op has returned ``out``, which is no view."""
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(each, torch.Tensor) and (key := storage_key(each)) is not None:
                self._sources[key] = ref(each.untyped_storage()), source

    def before_write(self, memory: int | None) -> None:
        """Results in ``memory`` are about to be changed in place: a name cannot keep those."""
        known = self._sources.get(memory)
        if known is not None:
            self._sources[memory] = known[0], None


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_plain_tensor(value)


def _detached(value: Any, is_main: bool) -> Any:
    if is_main or not isinstance(value, torch.Tensor):
        return None if is_main else value
    return detach_below_autograd(value)
