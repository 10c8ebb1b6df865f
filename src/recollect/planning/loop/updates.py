"""Notices optimizer steps, and counts the bytes of optimizer state (P8)."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice
from statistics import median_low
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recollect._torch.dtensors import count_writes
from recollect._torch.groups import stages_beside
from recollect._torch.pytree import tree_leaves
from recollect._torch.tensors import local_tensors, storage_key
from recollect.planning.recording.model_state import gradients_of, parameters_of
from recollect.planning.recording.step import bytes_of_gradients, device_of, storage_sizes

#: After this many steps of other optimizers, none of its own is expected.
_OTHERS = 8
#: After so many updates of a model without a forward of it, its forward is not what the loop calls.
_UNCALLED = 8
#: How many forwards to wait for the first step: while gradients accumulate; and if they are cleared
#: without one.
_ACCUMULATED, _CLEARED = 64, 8
#: How often to look for the state of a loop that updates parameters itself.
_LOOKS = 8


class Updates:
    """The optimizer steps for some parameters from now on.

    ``on_step``: called as one of them begins.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], on_step: Callable[[], object] = lambda: None
    ) -> None:
        self._on_step = on_step
        parameters = [*parameters]
        self._parameters = {id(each) for each in parameters}
        self._versions = _Versions(parameters)
        #: Whether the loop has updated parameters itself, and the bytes of its state if so.
        self._updates_itself, self.own_bytes = False, 0
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._is_any = False
        #: The bytes of their state before their first step.
        self._before: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        #: The bytes of gradients that the first steps found.
        self.gradients = 0
        #: How often optimizers of other parameters have made a step.
        self.others = 0

    def begin(self) -> None:
        """Notice steps."""
        _watch_optimizers()
        _watching.add(self)
        for each in [*_changes.running]:  # as where a step runs a closure
            self.step_begins(each)

    @property
    def are_there(self) -> bool:
        """Whether an optimizer has made a step, or none is expected to.

        None is expected where only other parameters are updated, as with `functional_call`.
        """
        return self._is_any or self.others >= _OTHERS

    def are_awaited(self, forwards: int, model: nn.Module | None) -> bool:
        """Whether to wait for the first step, after so many forwards of ``model``.

        If gradients are cleared without a step, a `GradScaler` has skipped it, or the optimizer is
        not one of torch's.
        """
        if self.are_there:
            return False
        accumulate = model is not None and bool(gradients_of(model))
        return forwards < (_ACCUMULATED if accumulate else _CLEARED)

    def state_bytes(self) -> int:
        """The bytes of all state of optimizers that have made a step."""
        return sum(local_bytes(_state_of(each)) for each in self._optimizers)

    def base_bytes(self, model: nn.Module, gradients: int) -> int:
        """The bytes that are allocated before a step that finds so many bytes of gradients."""
        device = device_of(model)
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device) - bytes_of_gradients(model) + gradients
        parameters = parameters_of(model)
        self._updates_itself |= self._versions.have_changed(parameters)
        self.own_bytes = _bytes_like(parameters) if self._updates_itself else 0
        held = local_bytes([*parameters, *model.buffers()])
        beside = self._bytes_of(stages_beside(model))
        return held + self.state_bytes() + self.own_bytes + gradients + beside

    def _bytes_of(self, others: Sequence[nn.Module]) -> int:
        """The bytes of other models, and of the state of optimizers that update them alone."""
        held = [each for other in others for each in (*other.parameters(), *other.buffers())]
        ids = {*map(id, held)}
        optimizers = (each for each in [*_changes.lengths] if _has_any(each, ids))
        states = [_state_of(each) for each in optimizers if each not in self._optimizers]
        return local_bytes([*held, *(leaf for state in states for leaf in state)])

    def made_bytes(self) -> int:
        """The bytes of that state which these steps have made."""
        states = {each: local_bytes(_state_of(each)) for each in self._optimizers}
        return sum(nbytes - self._before.get(each, nbytes) for each, nbytes in states.items())

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer begins a step."""
        self._on_step()
        if optimizer not in self._before and _has_any(optimizer, self._parameters):
            self._before[optimizer] = local_bytes(_state_of(optimizer))
            found = _parameters_of(optimizer)
            self.gradients += local_bytes(p.grad for p in found if p.grad is not None)
            self._updates_itself |= self._versions.have_changed(found)

    def step_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step."""
        if _has_any(optimizer, self._parameters):
            self._is_any = True
            self._optimizers.add(optimizer)
        else:
            self.others += 1


class FirstCall:
    """Waits for the first forward of a model; ``missed`` is called if its updates go on without."""

    def __init__(self, model: nn.Module, missed: Callable[[nn.Module], None]) -> None:
        self._model, self._missed = ref(model), missed
        self._updates = 0
        _watch_optimizers()
        _watching.add(self)

    def end(self) -> None:
        """The forward was called, or nobody waits for it any more."""
        _watching.discard(self)

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer begins a step."""
        model = self._model()
        found = () if model is None else model.parameters()
        if model is None or not _has_any(optimizer, {id(p) for p in found if p.grad is not None}):
            return
        self._updates += 1
        if self._updates == _UNCALLED:
            self.end()
            self._missed(model)

    def step_ends(self, _: Optimizer) -> None:
        """An optimizer has made a step."""


class StateWatch:
    """The state of the optimizers of a model: it grows when they first update a parameter."""

    def __init__(self) -> None:
        _watch_optimizers()
        self._seen = -1
        self._ids: frozenset[int] = frozenset()
        self._nbytes = 0
        #: What steps hold that run a closure, beside the state; and how often that was looked for.
        self._held = self._looked = 0

    def nbytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """The bytes of the state of those that have made a step with one of ``parameters``."""
        ids = frozenset(map(id, parameters))
        running = [each for each in [*_changes.running] if _has_any(each, ids)]
        if running or self._seen != _changes.count or ids != self._ids:
            self._seen, self._ids = -1 if running else _changes.count, ids
            mine = [each for each in {*_changes.lengths, *running} if _has_any(each, ids)]
            self._nbytes = sum(local_bytes(_state_of(each)) for each in mine)
            if running:
                self._nbytes += self._held_by(running)
        return self._nbytes

    def _held_by(self, running: Sequence[Optimizer]) -> int:
        """The most bytes that steps of LBFGS hold as they run a closure; others hold nothing."""
        running = [each for each in running if isinstance(each, torch.optim.LBFGS)]
        if not all(each in _changes.lengths for each in running):
            return sum(map(_flat_bytes, running))  # of the first step: it has no state yet
        if running and self._looked < _LOOKS:
            self._looked += 1
            self._held = max(self._held, sum(map(_flat_bytes, running)))
        return self._held


class OwnState:
    """The state of a loop that updates parameters itself: tensors that are shaped like these.

    As for sharpness-aware minimization, whose second forward runs with other parameters than the
    first, and which holds their difference. Nothing but the garbage collector knows of it: a mode
    that sees such tensors would have to stay on the stack between steps, among those of the loop.
    """

    def __init__(self) -> None:
        self._versions = _Versions()
        self._looked = 0
        #: The most bytes that were there, by whether a forward followed such an update.
        self._most: dict[bool, int] = {}

    def nbytes(self, parameters: Sequence[torch.Tensor]) -> int:
        """The bytes that are there as a forward begins."""
        first = [*islice(filter(_is_plain, parameters), 1)]
        is_updated = not _changes.running and self._versions.have_changed(first)
        if (is_updated or self._most) and self._looked < _LOOKS:
            self._looked += 1
            most = self._most.get(is_updated, 0)
            self._most[is_updated] = max(most, _bytes_like(parameters))
        return self._most.get(is_updated, 0)


class _Versions:
    """Notices parameters that change without a step of an optimizer."""

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._seen: tuple[int, dict[int, int]] = (-1, {})
        self.have_changed(parameters)

    def have_changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether any has since the last call, and no optimizer has made a step."""
        now = {id(each): each._version for each in parameters if _is_plain(each)}
        (steps, before), self._seen = self._seen, (_changes.steps, now)
        return steps == _changes.steps and any(before.get(key, n) != n for key, n in now.items())


def _is_plain(parameter: torch.Tensor) -> bool:
    return type(parameter) is nn.Parameter and not parameter.is_inference()


def _flat_bytes(optimizer: Optimizer) -> int:
    """The bytes of flat tensors of all parameters: directions and gradients of LBFGS."""
    parameters = _parameters_of(optimizer)
    return local_bytes(_unlisted(parameters, [torch.Size([sum(map(torch.numel, parameters))])]))


def _bytes_like(parameters: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors that are shaped like ``parameters``, in whole sets."""
    trained = [each for each in parameters if each.requires_grad and each.is_leaf]
    if sets := _count_sets(trained):
        gc.collect()  # those that nobody holds any more
        sets = _count_sets(trained)
    return sets * local_bytes(trained)


def _count_sets(parameters: Sequence[torch.Tensor]) -> int:
    """How many tensors there are, for most parameters, that are shaped like it."""
    shapes = Counter(each.shape for each in parameters)
    found = Counter(each.shape for each in _unlisted(parameters, shapes))
    sets = [found[each.shape] // shapes[each.shape] for each in parameters]
    return median_low(sets) if sets else 0


def _unlisted(
    parameters: Sequence[torch.Tensor], shapes: Container[torch.Size]
) -> list[torch.Tensor]:
    """Tensors of these shapes that are no parameters, gradients or state of optimizers.

    Nothing but the garbage collector knows of them.
    """
    states = [leaf for optimizer in _seen_optimizers() for leaf in _state_of(optimizer)]
    known = {storage_key(each) for each in (*parameters, *states)}
    known |= {storage_key(each.grad) for each in parameters if each.grad is not None}
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return [
        each
        for each in found
        if each.shape in shapes and not each.requires_grad and storage_key(each) not in known
    ]


class _Changes:
    """For each optimizer that has made a step: the size of its state, and how often it changed."""

    def __init__(self) -> None:
        self.lengths: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.count = 0
        self.steps = 0  #: how many steps optimizers have made
        self.is_registered = False
        #: Those in the middle of a step, which may run a closure: their state grows meanwhile.
        self.running: WeakSet[Optimizer] = WeakSet()

    def note(self, optimizer: Optimizer) -> None:
        length = len(optimizer.state)
        if length == 1:  # as that of LBFGS, which has a history in it
            length = len(_state_of(optimizer))
        if self.lengths.get(optimizer) != length:
            self.lengths[optimizer] = length
            self.count += 1


_changes = _Changes()
_watching: WeakSet[Updates | FirstCall] = WeakSet()


def _watch_optimizers() -> None:
    # These hooks stay: torch iterates over them while it calls one, so none may be removed.
    if not _changes.is_registered:
        _changes.is_registered = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: object) -> None:
    _changes.running.add(optimizer)
    for each in [*_watching]:
        each.step_begins(optimizer)


def _after_step(optimizer: Optimizer, *_: object) -> None:
    _changes.running.discard(optimizer)
    _changes.note(optimizer)
    _changes.steps += 1
    # Otherwise a late backward would use the updated parameters, and nobody would notice.
    count_writes(each for each in _parameters_of(optimizer) if each.grad is not None)
    for each in [*_watching]:
        each.step_ends(optimizer)


def _seen_optimizers() -> set[Optimizer]:
    """Those that have made a step, or are in the middle of their first one."""
    return {*_changes.lengths, *_changes.running}


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _has_any(optimizer: Optimizer, ids: frozenset[int] | set[int]) -> bool:
    return any(id(each) in ids for each in _parameters_of(optimizer))


#: Attributes of an optimizer without state, but for its ``state``.
_STATELESS = ("param_groups", "defaults")


def _state_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors of its ``state``, and those that it keeps in attributes of its own."""
    held = [value for name, value in vars(optimizer).items() if name not in _STATELESS]
    tensors = [leaf for leaf in tree_leaves(held) if isinstance(leaf, torch.Tensor)]
    parameters = _parameters_of(optimizer)
    others = {storage_key(each) for p in parameters for each in (p, p.grad) if each is not None}
    return [each for each in tensors if storage_key(each) not in others]


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of ``tensors``, in the parts that this process has."""
    return sum(storage_sizes(each for tensor in tensors for each in local_tensors(tensor)))
