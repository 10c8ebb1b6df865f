"""Runs a step on fake tensors, and checks that none of them is left afterwards (P2).

Code memoizes tensors: in a ``functools.lru_cache``, a global dict, a closure. If a step runs on
fake tensors, these are fake, and training would use them in place of real ones.
`TrainingStep.undone` restores what the model can reach. The garbage collector finds the others:
caches of ``functools`` are cleared, any other holder is an error that names it. To use a fake
tensor that was overlooked is an error as well, see `fake_tensors`.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.optim import Optimizer

from recollect._torch.pytree import tree_map_only
from recollect._torch.tensors import fake_on, fakes_left
from recollect.errors import CheckpointError
from recollect.planning.recording.step import TrainingStep, storage_sizes

_Tensor = torch.Tensor
_Cache = type(functools.lru_cache(len))
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
#: How many references to follow from a tensor to its holder, and how many holders to visit.
_DEPTH = 6
_MOST = 1000


class FakeStep(TrainingStep):
    """``step`` with fake tensors in place of its own."""

    def __init__(self, step: TrainingStep, mode: Any) -> None:
        vars(self).update(vars(step))
        self.shards, self.largest_collective, self.has_other_hooks = None, 0, False
        if step.device.type == "meta":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

        @functools.cache  # by identity: the batch of the loss has the tensors of the arguments
        def fake(tensor: _Tensor) -> _Tensor:
            if tensor.device.type == "meta":
                return fake_on(mode, tensor, self.device)
            return mode.from_tensor(tensor)  # type: ignore[no-any-return]

        named = [*step.model.named_parameters(), *step.model.named_buffers()]
        known = {id(tensor): fake(tensor) for _, tensor in named}
        self._fakes = {name: known[id(tensor)] for name, tensor in named}
        self.args = tree_map_only(_Tensor, fake, step.args)
        self.kwargs = tree_map_only(_Tensor, fake, step.kwargs)
        # The loss takes a mapping that is no dict as one.
        batch = step.batch if self.args or not step.kwargs else step.kwargs
        self.batch = tree_map_only(_Tensor, fake, batch)
        self.optimizer = _twin(step.optimizer, known)
        if self.optimizer is not None:
            self.run()  # so that it has its state before the step, as in all steps but the first

    def _forward(self) -> Any:
        return functional_call(self.model, self._fakes, self.args, self.kwargs)

    def _weights(self) -> Iterable[_Tensor]:
        return self._fakes.values()

    def clear_gradients(self) -> None:
        """Remove the gradients of the parameters."""
        for tensor in self._fakes.values():
            tensor.grad = None

    def base_bytes(self) -> int:
        """Bytes that would be allocated before the step begins."""
        return sum(storage_sizes(self.static_tensors())) + self.gradient_bytes


def _twin(optimizer: Optimizer | None, fakes: dict[int, _Tensor]) -> Optimizer | None:
    """The same optimizer for fake parameters; None if it cannot be made."""
    if optimizer is None:
        return None
    groups = [
        {**group, "params": [fakes[id(p)] for p in group["params"] if id(p) in fakes]}
        for group in optimizer.param_groups
    ]
    try:
        return type(optimizer)(groups)  # type: ignore[call-arg]
    except TypeError:
        return None  # it takes other arguments


# --- leftover fakes -------------------------------------------------------------------------------


@contextmanager
def no_fakes_left(caches: Callable[[], Iterable[Any]] = list) -> Iterator[None]:
    """A context whose end clears caches of fake tensors made in it, and refuses other holders.

    ``caches``: the known caches of ``functools``. The garbage collector does not find every holder,
    and none that is frozen (``gc.freeze``).
    """
    before = {id(fake) for fake in fakes_left()}
    try:
        yield
    except BaseException:
        _clear_caches(before, caches())  # the exception may hold fakes too, as long as it lives
        raise
    gc.collect()
    _clear_caches(before, caches())
    left = _new_fakes(before)
    if left:
        holder = _name_holder(left)
        raise CheckpointError(
            f"model: the step was recorded on tensors without values, and {holder} still holds "
            "one, which would be used in training in the place of a real one. Hold it in "
            "the model instead, self.register_buffer(name, tensor, persistent=False), or make the "
            "plan on the device on which the model is trained"
        )


def _new_fakes(before: set[int]) -> list[Any]:
    return [fake for fake in fakes_left() if id(fake) not in before]


def _clear_caches(before: set[int], known: Iterable[Any]) -> None:
    left = _new_fakes(before)
    if not left:
        return
    ids = {id(fake) for fake in left}
    found = [holder for holder, _ in _holders(left) if type(holder) is _Cache]
    for cache in [*found, *(each for each in known if _leads_to(each, ids))]:
        cache.cache_clear()
    del left
    gc.collect()


def _leads_to(cache: Any, ids: set[int]) -> bool:
    """Whether a cache holds one of the objects with these ids, or a container of one."""
    things = gc.get_referents(cache)
    for _ in range(_DEPTH):
        if any(id(each) in ids for each in things):
            return True
        things = gc.get_referents(*(each for each in things if type(each) in _CONTAINERS))
    return False


def _holders(things: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The holders of ``things``, from near to far, each with the object that it holds."""
    seen = {id(things)}
    near = list(things)
    for _ in range(_DEPTH):
        seen |= {id(each) for each in near} | {id(near)}
        far = [
            each
            for each in gc.get_referrers(*near)
            if id(each) not in seen and type(each) not in (FrameType, GeneratorType)
        ]
        found = []
        for holder in far[:_MOST]:
            held = [each for each in near if any(part is each for part in gc.get_referents(holder))]
            if held:
                yield holder, held[0]
                found.append(holder)
        # Holders of these hold much else, and are not to blame.
        ends = (_Cache, FunctionType, type, nn.Module)
        near = [each for each in found if not isinstance(each, ends) and not _is_namespace(each)]
        if not near:
            return


def _is_namespace(holder: Any) -> bool:
    """Whether it is the dict of global variables of a module."""
    return type(holder) is dict and str(holder.get("__name__")) in sys.modules


def _name_holder(left: list[Any]) -> str:
    """The nearest holder that has a name; else the kind of the nearest container."""
    container = ""
    cells: set[int] = set()
    for holder, held in _holders(left):
        if _is_namespace(holder):
            name = next((key for key, value in holder.items() if value is held), None)
            return f"the global variable {name!r} of {holder['__name__']}"
        if type(holder) is FunctionType:
            pairs = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
            closed = [f"the variable {name!r} around " for name, cell in pairs if id(cell) in cells]
            return f"{''.join(closed[:1])}the function {holder.__qualname__}"
        if isinstance(holder, type):
            return f"the class {holder.__qualname__}"
        if hasattr(holder, "__dict__") and not isinstance(holder, _CONTAINERS):
            names = [key for key, value in vars(holder).items() if value is held]
            what = f"the attribute {names[0]!r} of " if names else ""
            return f"{what}a {type(holder).__name__}"
        if type(holder) is CellType:
            cells.add(id(holder))
        container = container or f"a {type(holder).__name__}"
    return container or "an object"
