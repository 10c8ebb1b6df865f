"""What is done when a step under a plan runs out of memory (P7)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain, islice
from operator import is_
from typing import Any, TypeVar
from weakref import finalize

import torch
from torch import nn

from recollect._torch.autograd import after_each_backward
from recollect._torch.fsdp import is_shared
from recollect._torch.groups import collectives_begun, has_peers
from recollect.checks.place import WarnOnce
from recollect.planning.loop.forwards import Forwards
from recollect.planning.loop.kinds import Kinds
from recollect.planning.loop.planned_step import StepKind
from recollect.planning.loop.watch import weakly
from recollect.planning.recording.step import is_out_of_memory
from recollect.report.units import bytes_text
from recollect.state.module_index import index_of
from recollect.state.rng import read_streams, settle_streams, write_streams

_T = TypeVar("_T")


class Attempts:
    """Runs the forwards of a model. After one that runs out of memory, steps like it keep less.

    A forward is repeated if that changes nothing else; a backward cannot be.
    """

    def __init__(self, forwards: Forwards, warnings: WarnOnce) -> None:
        self._forwards = forwards
        self._warnings = warnings
        #: The kinds of steps whose backwards are watched.
        self._kinds: Kinds | None = None

    def run(
        self, kinds: Kinds, step: StepKind, run: Callable[[], _T], attempt: Attempt | None
    ) -> _T:
        """Run a forward; if it runs out of memory, undo it and run it with less kept."""
        try:
            return run()
        except RuntimeError as error:
            if attempt is None or not is_out_of_memory(error):
                raise
            if not self._tighten(kinds, step, error) or not attempt.undo():
                raise
        torch.cuda.empty_cache()  # now that nothing holds the frames of the first attempt
        return run()

    def watch_backward(self, kinds: Kinds) -> None:
        """Notice backwards that run out of memory."""
        if self._kinds is None:
            finalize(self, after_each_backward(weakly(self._backward_is_over)))
        self._kinds = kinds

    def _backward_is_over(self) -> None:
        """If a backward ran out of memory, perhaps that of this model: keep less."""
        forwards, error = self._forwards, sys.exc_info()[1]
        if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
            return
        if self._kinds is not None and any(each.is_running for each in forwards.waiting):
            self._tighten(self._kinds, forwards.step, error)

    def _tighten(self, kinds: Kinds, step: StepKind, error: BaseException) -> bool:
        """A step ran out of memory: have later ones keep less. Returns whether they do."""
        less = kinds.tighten(step)
        note = (
            f"recollect: steps like this one take {bytes_text(less)} less from now on: they keep "
            "less and recompute more. This one cannot be run again: backward had begun, or forward "
            "had changed buffers or other state of the model"
            if less
            else "recollect: this step already runs by the schedule of the least memory"
        )
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            self._warnings.warn("out of memory", note)
        return less > 0


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
        if is_shared(self._model):
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
