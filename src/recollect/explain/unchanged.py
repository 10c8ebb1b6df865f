"""A context after which everything is as it was before: what a forward changes is put back.

Random streams, buffers, what modules have in which place, attributes and containers, variables of
functions, gradients, process-wide switches. What the function can get at is found as for a region;
see ``state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from recollect.state.containers import Contents
from recollect.state.flags import read_flags, write_flags
from recollect.state.mutation import Watch
from recollect.state.reach import Reach
from recollect.state.streams import read_streams, settle_streams, write_streams
from recollect.state.variables import Variables
from recollect.torch_private import any_autocast_enabled

__all__ = ["Unchanged"]

#: The attributes of a module that are dictionaries of its parts.
_PLACES = ("_parameters", "_buffers", "_modules")


class Unchanged:
    """Enter it before the forward of ``function``."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        contents = Contents()
        iterator = contents.look_into([*args, *kwargs.values()])
        if iterator is not None:
            raise TypeError(
                f"an argument is an iterator ({type(iterator).__name__}): to explain the function "
                "would use it up. Pass a list of its items, `list(...)`"
            )
        #: What the function can get at.
        self.reach = reach = Reach(function, [*args, *kwargs.values()])
        self._contents = contents
        self._stack = ExitStack()
        #: What was there before forward.
        self.tensors = [*_tensors_of(reach), *contents.tensors]

    def __enter__(self) -> None:
        reach, undo = self.reach, self._stack.callback
        attributes = [each for each in reach.content if isinstance(each, dict)]
        places = [each[place] for each in attributes for place in _PLACES if place in each]
        undo(_write_all, [(each, dict(each)) for each in [*attributes, *places, *reach.owners]])
        values = [
            value for each in attributes for name, value in each.items() if name not in _PLACES
        ]
        self._look_into([*values, *(value for _, value in reach.cells)])
        undo(Variables(reach.cells, reach.globals).restore, ExitStack())
        watch = Watch(reach.buffers, reach.tensors)
        undo(_put_back, watch)
        tensors = [*self.tensors, *self._contents.tensors]
        leaves = {id(t): t for t in tensors if t.is_leaf and t.requires_grad}
        undo(_write_gradients, [(tensor, tensor.grad) for tensor in leaves.values()])
        _write_gradients([(tensor, None) for tensor in leaves.values()])
        undo(_write_streams, read_streams(reach.generators))
        undo(write_flags, read_flags())
        swapped = self._contents.swap(str, guard=False)
        if swapped is not None:
            undo(swapped.put_back)

    def _look_into(self, values: Iterable[Any]) -> None:
        """Have containers and objects put back. Iterators are not: they could only be used up."""
        others = (torch.Tensor, torch.nn.Module, Iterator)
        self._contents.look_into([each for each in values if not isinstance(each, others)])

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if any_autocast_enabled():
            torch.clear_autocast_cache()  # casts of weights, with their history
        self._stack.__exit__(exc_type, exc, traceback)


def _tensors_of(reach: Reach) -> Iterator[torch.Tensor]:
    for owner in [*reach.parameters, *reach.owners]:
        yield from (each for each in owner.values() if isinstance(each, torch.Tensor))
    yield from reach.tensors


def _write_all(taken: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for owner, content in taken:
        if owner.keys() != content.keys() or any(owner[key] is not content[key] for key in owner):
            owner.clear()
            owner.update(content)


def _put_back(watch: Watch) -> None:
    watch.settle()
    if watch.has_changes:
        with ExitStack() as stack:
            watch.recall(stack)
            stack.pop_all()  # for good


def _write_streams(streams: Any) -> None:
    write_streams(settle_streams(streams))


def _write_gradients(pairs: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for tensor, gradient in pairs:
        tensor.grad = gradient
