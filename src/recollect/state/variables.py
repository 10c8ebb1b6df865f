"""What a region assigns: variables of enclosing functions, globals, plain attributes of modules.

In a rerun they have the value of the call, if others assign to them after forward, or the region
itself (``nonlocal``, ``global``); afterwards they are as before the rerun. An integer that the
region counts up by one counts the rerun, too, if it is to do as torch does.

Constants, and tensors without a graph that are not large, are held, and tuples and lists of them.
For others there is a stand-in, which answers for its form: to use its values is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch

from recollect._torch.modes import unobserved
from recollect._torch.pytree import tree_leaves
from recollect.errors import CheckpointError
from recollect.state.contents import Contents
from recollect.state.iterators import successor
from recollect.state.restorers import ATOMS, CELL, UNSET, VARIABLES, Entry, put_until
from recollect.state.tensors import LARGE, nbytes

_Tensor = torch.Tensor

# --- variables ------------------------------------------------------------------------------------


class Where(NamedTuple):
    """What a tensor was in, and what else to do than to pass it."""

    text: str
    advice: str = ""


def in_attribute(name: str) -> Where:
    """In an attribute of a module."""
    buffer = f"module.register_buffer({name!r}, ...)"
    advice = f"; or, if no gradient goes through it, make it a buffer: {buffer}"
    return Where(f"the attribute {name!r} of a module", advice)


class Slot(NamedTuple):
    """A name in a namespace or among attributes; or the cell of a closure, which has no name."""

    owner: Any
    name: str | None = None

    def read(self) -> Any:
        """The value; `UNSET` if there is none."""
        if self.name is None:
            return next(iter(CELL.take(self.owner)), UNSET)
        return self.owner.get(self.name, UNSET)

    def write(self, value: Any) -> None:
        if self.name is None:
            CELL.put(self.owner, [] if value is UNSET else [value])
        else:
            VARIABLES.put((self.owner, (self.name,)), {self.name: value})

    def count_on(self, since: int) -> None:
        """Add what was counted since the call, to a counter that had its value in the rerun."""
        now = self.read()
        if type(now) is int:
            self.write(now + since)


def _where(slot: Slot) -> Where:
    return Where("a variable of an enclosing function" if slot.name is None else f"{slot.name!r}")


#: What a rerun does with an integer that the region counts up by one: it finds forward's value and
#: counts itself, as in torch; or leaves all as it was before; or finds what is there by then, for
#: torch's composable checkpoint, where modules may tell a rerun by it.
Counters = Literal["counted", "restored", "live"]


class Variables:
    """Some variables, as they were at the call."""

    __slots__ = ("_assigned", "_counters", "_others", "_where")

    def __init__(self, variables: Sequence[Entry], where: Callable[[Slot], Where] = _where) -> None:
        """``where``: what an error calls one of them."""
        #: Those that the region has not assigned.
        self._others = variables
        #: Those that it has, and its rerun will again; and those that it counts up.
        self._assigned: list[tuple[Slot, Any]] = []
        self._counters: list[tuple[Slot, int]] = []
        self._where = where

    def settle(self, *, counters: Counters, added: Iterable[Slot] = ()) -> list[int]:
        """After the call: note what it has assigned, and ``added``.

        Returns the ``id`` of each tensor that is not to be held.
        """
        unheld: list[int] = []
        for slot, then in (*self._split(), *((slot, UNSET) for slot in added)):
            if counters != "restored" and type(then) is int and _is_next(then, slot.read()):
                if counters == "counted":
                    self._counters.append((slot, then))
            else:
                held = then if then is UNSET else kept(then, self._where(slot))
                unheld += numbers_of(then) if held is not then else []
                self.assign(slot, held)
        return unheld

    def assign(self, slot: Slot, value: Any) -> None:
        """Note what a rerun finds where the region assigns."""
        self._assigned.append((slot, value))

    def hold(self, space: dict[str, Any], held: dict[str, Any]) -> None:
        """Note values of names in ``space`` that the region leaves alone."""
        self._others = [*self._others, ((space, (*held,)), VARIABLES, held)]

    def is_present(self) -> bool:
        """Whether all have their values, and keep them in a rerun; almost always."""
        return not (self._assigned or self._counters or self._differing())

    def restore(self, stack: ExitStack) -> None:
        """Restore them until ``stack`` closes."""
        for thing, restorer, held in self._differing():
            put_until(stack, thing, restorer, held)
        for slot, value in self._assigned:
            stack.callback(slot.write, slot.read())
            slot.write(successor(value) or value)  # of an iterator, each rerun has one
        for slot, then in self._counters:
            now = slot.read()
            if type(now) is int:
                stack.callback(slot.count_on, now - then)
                slot.write(then)

    def _differing(self) -> list[Entry]:
        return [entry for entry in self._others if not entry[1].same(entry[0], entry[2])]

    def _split(self) -> list[tuple[Slot, Any]]:
        """Those that have other values now, each by itself. The others stay."""
        left: list[Entry] = []
        assigned: list[tuple[Slot, Any]] = []
        for thing, restorer, held in self._others:
            if restorer.same(thing, held):
                left.append((thing, restorer, held))
            elif restorer is VARIABLES:
                space = thing[0]
                same = {name: v for name, v in held.items() if space.get(name, UNSET) is v}
                left.append(((space, (*same,)), VARIABLES, same))
                assigned += [(Slot(space, name), held[name]) for name in held if name not in same]
            else:
                assigned.append((Slot(thing), held[0]))
        self._others = left
        return assigned


def _is_next(then: int, now: Any) -> bool:
    return type(now) is int and now == then + 1


# --- what is not held -----------------------------------------------------------------------------

#: Of tensors, as a hidden state of several parts; and how deep these are, and how long, at most.
_SEQUENCES = frozenset({tuple, list})
_DEPTH, _ITEMS = 3, 64


def _getters(*names: str) -> Iterator[Any]:
    """The functions behind attributes of a tensor."""
    return (operator.attrgetter(f"{name}.__get__")(_Tensor) for name in names)


#: What asks a tensor for its form alone, and what for its device.
_FORM = frozenset(
    {
        *(_Tensor.size, _Tensor.stride, _Tensor.dim, _Tensor.ndimension, _Tensor.__len__),
        *(_Tensor.numel, _Tensor.nelement, _Tensor.element_size, _Tensor.is_contiguous),
        *(_Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_signed),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
        *_getters("shape", "ndim", "dtype", "layout", "itemsize", "nbytes"),
    }
)
_DEVICE = frozenset({*_getters("device", "is_cuda", "is_cpu", "is_meta"), _Tensor.get_device})
(_REQUIRES_GRAD,) = _getters("requires_grad")


class Forgotten(torch.Tensor):
    """A tensor on the meta device, in the place of one that is not held.

    Args:
        forgotten_from: What it was in.
        forgotten_device: The device that it was on.
        forgotten_grad: Whether it required a gradient.
    """

    forgotten_from: Where
    forgotten_device: torch.device
    forgotten_grad: bool

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<the tensor that was in {self.forgotten_from.text}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for form and device; anything else is an error."""
        kwargs = kwargs or {}
        found = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Forgotten))
        if func == _REQUIRES_GRAD:
            return found.forgotten_grad
        if func in _FORM:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if func in _DEVICE:
            with unobserved():
                return func(torch.empty(0, device=found.forgotten_device))
        where = found.forgotten_from
        raise CheckpointError(
            f"the region has replaced the tensor in {where.text} since forward, or others have. It "
            f"runs again for backward, and reads the one of forward, {tuple(found.shape)} of "
            f"{found.dtype}. recollect holds a tensor that a region replaces only if it is at most "
            "64 KiB and has no graph. Pass it to the region as an argument, and return the new one"
            + where.advice
        )


class ForgottenObject:
    """Stands in for an object or a container that holds a graph: to use it is an error."""

    __slots__ = ("_kind", "_where")

    def __init__(self, kind: str, where: Where) -> None:
        """``kind``: the name of its class."""
        self._kind = kind
        self._where = where

    def _refuse(self, *_: Any) -> Any:
        raise CheckpointError(
            f"the region has replaced an object ({self._kind}) in {self._where.text} since "
            "forward. It runs again for backward, and reads that of forward, which holds tensors "
            "with a graph and is not held. Pass it to the region as an argument, and return the "
            "new one"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = _refuse


class Unheld:
    """What an attribute of a module holds at a call: a tensor, or a sequence with tensors.

    No tensor is held, only what knows it again, and a stand-in.
    """

    def __init__(self, name: str, value: Any) -> None:
        """``name``: that of the attribute."""
        self.knows = _recognizer(value)
        self.stand_in = stand_in(value, in_attribute(name))
        #: The ``id`` of each tensor.
        self.numbers = numbers_of(value)


# --- what values hold -----------------------------------------------------------------------------


def is_constant(kind: type) -> bool:
    """Whether values of a type hold nothing that can change."""
    return kind in ATOMS or issubclass(kind, Enum)


def has_tensors(value: Any) -> bool:
    """Whether it is a tensor, or a sequence with tensors. Nested ones have no form to stand in."""
    tensors = [leaf for leaf in _leaves(value) if type(leaf) is _Tensor]
    return bool(tensors) and not any(tensor.is_nested for tensor in tensors)


def can_be_held(value: Any) -> bool:
    """Whether no graph is held with it."""
    return all(
        not leaf.requires_grad if type(leaf) is _Tensor else is_constant(type(leaf))
        for leaf in _leaves(value)
    )


def kept(value: Any, where: Where) -> Any:
    """``value``; or, if it leads to a graph or to large tensors, what stands in for it."""
    if has_tensors(value):
        size = sum(nbytes(leaf) for leaf in _leaves(value) if type(leaf) is _Tensor)
        return value if can_be_held(value) and size <= LARGE else stand_in(value, where)
    found = Contents([value], in_attributes=True).tensors
    has_graph = any(each.grad_fn is not None for each in found)
    return ForgottenObject(type(value).__name__, where) if has_graph else value


def numbers_of(value: Any) -> list[int]:
    """The ``id`` of a tensor, or of those in a sequence."""
    return [id(leaf) for leaf in _leaves(value) if type(leaf) is _Tensor]


def stand_in(value: Any, where: Where, depth: int = _DEPTH) -> Any:
    """What takes the place of a tensor, or of those in a sequence."""
    if _has_parts(value, depth):
        return type(value)(stand_in(item, where, depth - 1) for item in value)
    if type(value) is not _Tensor:
        return value
    with unobserved():  # a recording around the region would be one of tensors on the meta device
        form = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        found = form.as_subclass(Forgotten)
    found.forgotten_from, found.forgotten_device = where, value.device
    found.forgotten_grad = value.requires_grad
    return found


def _has_parts(value: Any, depth: int) -> bool:
    return depth > 0 and type(value) in _SEQUENCES and len(value) <= _ITEMS


def _leaves(value: Any, depth: int = _DEPTH) -> list[Any]:
    """The parts of a sequence, and of those in it; of anything else, itself."""
    if _has_parts(value, depth):
        return [leaf for item in value for leaf in _leaves(item, depth - 1)]
    return [value]


def _recognizer(value: Any) -> Callable[[Any], bool]:
    """Tells whether it is given ``value`` again. Holds no tensor."""
    leaves = _leaves(value)
    kind, numbers = type(value), [*map(id, leaves)]
    weak = [ref(leaf) for leaf in leaves if type(leaf) is _Tensor]

    def is_it(now: Any) -> bool:
        is_alive = all(each() is not None for each in weak)  # else another one may have the ``id``
        return is_alive and type(now) is kind and [*map(id, _leaves(now))] == numbers

    return is_it
