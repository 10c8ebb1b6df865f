"""The modules of a region as they were at the call: parameters, buffers, children, mode, hooks.

An assignment puts another tensor in the place of one: ``self.average = 0.9 * self.average + x``
inside the region, ``layer.weight = nn.Parameter(...)`` after it, ``torch.func.functional_call``
around it. ``model.eval()`` changes what dropout does; a hook, or a ``forward`` that is set on an
instance, changes what a module returns. A rerun finds all of this as forward found it. What a class
defines is not put back, since other code uses it at the same time: another ``forward`` of a class,
or another class of a module, is an error.

Almost always nothing has changed. To find that out takes some tens of nanoseconds for each module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, islice, repeat
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from recollect._torch.modules import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from recollect.checks.names import name_in
from recollect.errors import InputChanged
from recollect.state.module_index import Attributes, ModuleIndex
from recollect.state.restorers import UNSET, restorers_of

__all__ = ["ModuleState"]

_before, _after = map(itemgetter, FORWARD_HOOKS[:2])
_FORWARD, _TRAINING = repeat("forward"), repeat("training")
_get = dict.get
_get_from_class = MappingProxyType.get
_values = dict.values


class ModuleState:
    """What the modules of a region had, and how they were called, when it began."""

    __slots__ = (
        *("_class_forwards", "_content", "_forwards", "_hooks", "_indexes"),
        *("_owners", "_training", "_values"),
    )

    def __init__(self, modules: Sequence[nn.Module], indexes: Sequence[ModuleIndex]) -> None:
        """``modules``: those of ``indexes``."""
        self._indexes = indexes
        self._owners = [*chain.from_iterable([index.owners for index in indexes])]
        # Flat: a copy of each dictionary would take longer than all else.
        self._values = [*chain.from_iterable(map(_values, self._owners))]
        content: list[Attributes] = []
        for module, index in zip(modules, indexes, strict=True):
            if not isinstance(module, torch.jit.ScriptModule):
                content.append(module.__dict__)
            content += index.content
        self._content = content
        self._training = [*map(_get, content, _TRAINING)]  # None: a compiled module
        self._hooks = _hooks_of(content)
        self._forwards = _forwards_of(content)
        self._class_forwards = [[*map(_get_from_class, i.spaces, _FORWARD)] for i in indexes]

    def is_present(self) -> bool:
        """Whether all of it is as it was; almost always."""
        values = [*chain.from_iterable(map(_values, self._owners))]
        if (
            len(values) != len(self._values)
            or not all(map(is_, values, self._values))
            or [*map(_get, self._content, _TRAINING)] != self._training
        ):
            return False
        for index, then in zip(self._indexes, self._class_forwards, strict=True):
            if (
                any(index.childless)
                or not index.has_its_classes()
                or not all(map(is_, map(_get_from_class, index.spaces, _FORWARD), then))
            ):
                return False
        hooks, forwards = _hooks_of(self._content), _forwards_of(self._content)
        return (hooks is self._hooks or _same_hooks(hooks, self._hooks)) and (
            forwards is self._forwards
            or (len(forwards) == len(self._forwards) and all(map(is_, forwards, self._forwards)))
        )

    def restore(self, stack: ExitStack) -> None:
        """Put back what can be, until ``stack`` closes, and raise for what cannot."""
        self._check_classes()
        for index in self._indexes:
            _restore_children(index, stack)
        forwards = self._forwards or repeat(None)
        for attributes, forward in zip(self._content, forwards, strict=False):
            _assign(stack, attributes, "forward", UNSET if forward is None else forward)
        now = _hooks_of(self._content)
        if not _same_hooks(now, self._hooks):
            _restore_hooks(now, self._hooks, stack)
        for owner, name, value in self._replaced():
            _assign(stack, owner, name, value)
        for attributes, mode in zip(self._content, self._training, strict=True):
            if mode is not None:
                _assign(stack, attributes, "training", mode)

    def _check_classes(self) -> None:
        """Raise if a module has another class, or a class another ``forward``."""
        for index, then in zip(self._indexes, self._class_forwards, strict=True):
            for module, former in index.changed_classes():
                # Not so a class of ours, under the same name: it computes the same.
                if _full_name(type(module)) != _full_name(former):
                    raise _other_class(index, module, former)
            for cls, forward in zip(index.classes, then, strict=True):
                if vars(cls).get("forward") is not forward:
                    raise InputChanged(_OTHER_FORWARD.format(name=cls.__qualname__))

    def _replaced(self) -> list[tuple[Attributes, str, Any]]:
        """Where another parameter, buffer or child is now, and which was there."""
        all_names = [names for index in self._indexes for names in index.names]
        if sum(map(len, all_names)) != len(self._values):
            return []  # somebody writes to the dictionaries, and knows what is where
        then = iter(self._values)
        replaced: list[tuple[Attributes, str, Any]] = []
        for owner, names in zip(self._owners, all_names, strict=True):
            values = [*islice(then, len(names))]
            # If names are missing, or in another order, somebody else keeps track of them.
            if (*owner,) == names:
                pairs = zip(names, values, strict=True)
                replaced += [(owner, n, v) for n, v in pairs if _is_exchangeable(v, owner[n])]
        return replaced


def _assign(stack: ExitStack, owner: dict[str, Any], name: str, value: Any) -> None:
    """Set an item, or delete it for `UNSET`, until ``stack`` closes."""
    present = owner.get(name, UNSET)
    if present is not value:
        stack.callback(_set, owner, name, present)
        _set(owner, name, value)


def _set(owner: dict[str, Any], name: str, value: Any) -> None:
    if value is UNSET:
        owner.pop(name, None)
    else:
        owner[name] = value


def _put(stack: ExitStack, owner: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Give ``owner`` other content, in this order, until ``stack`` closes."""
    restorer = restorers_of(type(owner))[0]
    stack.callback(restorer.put, owner, dict(owner))
    restorer.put(owner, content)


_TENSORS = {torch.Tensor, nn.Parameter, type(None)}


def _is_exchangeable(old: Any, new: Any) -> bool:
    """Whether ``old`` was replaced by a user, who means it.

    A sharding engine puts whole parameters in the place of shards, and back, and keeps track of
    them itself. Those are not plain tensors on both sides, or the former has been emptied.
    """
    if old is new:
        return False
    if isinstance(old, nn.Module) and isinstance(new, nn.Module):
        return True
    if not {type(old), type(new)} <= _TENSORS:
        return False
    if old is None or old.layout is not torch.strided:
        return True
    return bool(old.numel() == 0 or old.untyped_storage().size() > 0)


def _restore_children(index: ModuleIndex, stack: ExitStack) -> None:
    """Give modules the children of other names that they had.

    One that was replaced under its name is put back with parameters and buffers.
    """
    root = index.root()
    if root is None:
        return
    for attributes, former in zip([root.__dict__, *index.content], index.offspring, strict=False):
        # Looked up: to delete from a Sequential gives it another dictionary.
        family = attributes["_modules"]
        if [*family] != [*former]:
            _put(stack, family, former)


_NO_FORWARDS: list[Any] = []


def _forwards_of(content: list[Attributes]) -> list[Any]:
    """The ``forward`` of each module that has one of its own; nothing if none has."""
    if not any(map(_get, content, _FORWARD)):
        return _NO_FORWARDS
    return [*map(_get, content, _FORWARD)]


# --- hooks ----------------------------------------------------------------------------------------

#: The attributes of a module, or the hooks of all modules, and a name or number in them; the user's
#: hooks there, by their numbers.
_Hooks = dict[tuple[int, Any], tuple[dict[Any, Any], dict[int, Any]]]
_NO_HOOKS: _Hooks = {}
_OF_ALL: dict[Any, Any] = dict(enumerate(GLOBAL_FORWARD_HOOKS))


def _hooks_of(content: list[Attributes]) -> _Hooks:
    """The user's hooks, where there are any."""
    has_global = GLOBAL_FORWARD_HOOKS[0] or GLOBAL_FORWARD_HOOKS[1]
    if not (any(map(_after, content)) or any(map(_before, content)) or has_global):
        return _NO_HOOKS
    # How hooks are to be called is said only where there are some. Few modules have any.
    hooked = [each for each in content if _after(each) or _before(each)]
    found = {
        (id(each), name): (each, _users_in(each[name])) for each in hooked for name in FORWARD_HOOKS
    }
    if has_global:
        found |= {(0, name): (_OF_ALL, _users_in(hooks)) for name, hooks in _OF_ALL.items()}
    return {place: hooks for place, hooks in found.items() if hooks[1]}


def _users_in(hooks: dict[int, Any]) -> dict[int, Any]:
    """The hooks that are the user's.

    Ours have numbers below zero. Those of all modules that torch has only observe.
    """
    if any(hooks is each for each in GLOBAL_FORWARD_HOOKS):
        pairs = [pair for each in GLOBAL_FORWARD_HOOKS for pair in each.copy().items()]
        observers = {number for number, hook in pairs if _only_observes(hook)}
        return {number: hook for number, hook in hooks.copy().items() if number not in observers}
    return {number: hook for number, hook in hooks.copy().items() if number >= 0}


def _only_observes(hook: Any) -> bool:
    module = getattr(hook, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in ("torch", "recollect")


def _same_hooks(now: _Hooks, then: _Hooks) -> bool:
    if now.keys() != then.keys():
        return False
    pairs = [(now[key][1], then[key][1]) for key in now]
    return all([*a] == [*b] and all(map(is_, a.values(), b.values())) for a, b in pairs)


def _restore_hooks(now: _Hooks, then: _Hooks, stack: ExitStack) -> None:
    for key, (owner, _) in (then | now).items():
        hooks = owner[key[1]]
        former, users = (each[key][1] if key in each else {} for each in (then, now))
        _put(stack, hooks, {**former, **{n: h for n, h in hooks.items() if n not in users}})


# --- errors ---------------------------------------------------------------------------------------


def _full_name(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _other_class(index: ModuleIndex, module: Any, former: type) -> InputChanged:
    root = index.root()
    path = None if root is None else name_in(root, module)
    name = f"`{path}`" if path else "the module"
    return InputChanged(
        f"{name} of a checkpointed region was of the class {former.__name__} in forward and is of "
        f"the class {type(module).__name__} now: the recomputation would compute something else. "
        "Register or remove a parametrization (or whatever else exchanges the class) before "
        "forward, or after backward."
    )


_OTHER_FORWARD = (
    "{name}.forward, which a checkpointed region may call, was replaced since the region began: "
    "the recomputation would compute something else. Replace it before forward, or after backward; "
    "or set it on the instance (module.forward = ...), which is put back for the recomputation."
)
