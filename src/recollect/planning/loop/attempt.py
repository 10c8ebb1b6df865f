"""Decides whether a forward that ran out of memory can be repeated (P7)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import nn

from recollect._torch.fsdp import is_parallel, shards_of
from recollect._torch.groups import collectives_begun, has_peers
from recollect.state.module_index import index_of
from recollect.state.rng import read_streams, settle_streams, write_streams


class Attempt:
    """The state of ``model`` and random streams before a forward. Copies no tensor.

    Runs at every call, so it is written for speed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = _state_of(model)
        self._streams = read_streams(())
        self._collectives = collectives_begun() if has_peers() else 0

    def undo(self) -> bool:
        """Restore random streams. Returns False if the failed forward changed anything else.

        Batch norm would count the batch twice. A sharded model would gather its parameters again,
        and other processes would not take part; nor in collectives of the model's own code.
        """
        if shards_of(self._model) is not None or is_parallel(self._model):
            return False
        if has_peers() and collectives_begun() != self._collectives:
            return False
        (values, numbers), (before, numbers_before) = _state_of(self._model), self._before
        if numbers != numbers_before or len(values) != len(before):
            return False
        if not all(map(is_, values, before)):
            return False
        write_streams(settle_streams(self._streams))
        return True


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


#: By type of an attribute: a number that changes with its contents; None if there is none.
_measures: dict[type, Callable[[Any], int] | None] = {}


def _measure_for(kind: type) -> Callable[[Any], int] | None:
    if issubclass(kind, torch.Tensor):
        return _version
    # Modules are listed with their own attributes, and may define ``__len__``.
    return len if hasattr(kind, "__len__") and not issubclass(kind, (nn.Module, str)) else None


def _state_of(model: nn.Module) -> tuple[list[Any], list[int]]:
    """Parameters, buffers and attributes of modules (not of torch's layers), with a measure each.

    The measure is the version of a tensor, and the length of another container.
    """
    index = index_of(model)
    own = [(model.__dict__, index.standard_attributes), *index.user_modules]
    places = [*map(dict.values, index.owners), *(islice(at.values(), n, None) for at, n in own)]
    values = [*chain.from_iterable(places), *index.scripted]
    for kind in {*map(type, values)} - _measures.keys():
        _measures[kind] = _measure_for(kind)
    pairs = zip(map(_measures.__getitem__, map(type, values)), values, strict=True)
    return values, [measure(value) for measure, value in pairs if measure is not None]
