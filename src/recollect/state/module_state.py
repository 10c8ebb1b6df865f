"""The modules of a region as they were at the call: parameters, buffers, children, mode, hooks.

A tensor may be replaced by assignment (``self.average = 0.9 * self.average + x`` in the region,
``layer.weight = nn.Parameter(...)`` after it, ``torch.func.functional_call`` around it);
``model.eval()``, a hook or a ``forward`` set on an instance change what a module returns. All of
this is restored for a rerun. Classes are not, since other code uses them at the same time: another
``forward`` of a class, or another class of a module, is an error.

Almost always nothing has changed, which a `ModuleIndex` finds out quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain, islice, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from recollect._torch.modules import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from recollect.checks.names import name_in
from recollect.errors import InputChanged
from recollect.state.module_index import Attributes, ModuleIndex
from recollect.state.module_settings import ModuleSettings, Place
from recollect.state.restorers import UNSET, VARIABLES, put_until, restorers_of
from recollect.state.variables import Counters

_get = dict.get
_FORWARD, _TRAINING, _NOTHING = repeat("forward"), repeat("training"), repeat(None)


class ModuleState:
    """The parameters, buffers, children, hooks and modes of a region's modules at the call."""

    __slots__ = (
        *("_class_forwards", "_content", "_forwards", "_hooks", "_indexes", "_made"),
        *("_settings", "_training", "_values"),
    )

    def __init__(
        self,
        modules: Sequence[nn.Module],
        indexes: Sequence[ModuleIndex],
        values: Sequence[list[Any]],
        made: list[torch.Tensor],
    ) -> None:
        """``modules`` and ``values``: those of ``indexes``, as `read_index` returned them.

        ``made``: where a rerun notes the parameters that it has made.
        """
        self._made = made
        self._indexes = indexes
        # Flat: a copy of each dictionary would take longer than all else.
        self._values = values[0] if len(values) == 1 else [*chain.from_iterable(values)]
        content: list[Attributes] = []
        settings: list[Place] = []
        for module, index in zip(modules, indexes, strict=True):
            if not index.is_scripted:
                content.append(module.__dict__)
                if index.watched is not None:
                    settings.append((module.__dict__, index.watched))
            content += index.content
            settings += index.settings
        self._settings = ModuleSettings(settings)
        self._content = content
        self._training = [*map(_get, content, _TRAINING)]
        self._forwards = _forwards_of(content)
        self._hooks = _hooks_of(content)
        self._class_forwards = [_class_forwards(index) for index in indexes]

    def guarded(self) -> list[torch.Tensor]:
        """The parameters that may not be changed in place."""
        first, found = 0, []
        for index in self._indexes:
            found += self._values[first : first + index.guarded]
            first += len(index.keys)
        return [parameter for parameter in found if parameter is not None]

    def unheld(self) -> list[int]:
        """The ``id`` of each tensor in a plain attribute that is not held during the call."""
        return self._settings.unheld()

    def settle(self, *, counters: Counters) -> list[int]:
        """After the call: note what it has assigned to plain attributes.

        Returns the ``id`` of each tensor that is not to be held.
        """
        return self._settings.settle(counters=counters)

    def is_present(self) -> bool:
        """Whether all of it is as it was; almost always."""
        if not self._settings.is_present():
            return False
        indexes = self._indexes
        if len(indexes) == 1:
            values = indexes[0].read_values()
        else:
            values = [*chain.from_iterable([index.read_values() for index in indexes])]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            return False
        content = self._content
        if [*map(_get, content, _TRAINING)] != self._training:
            return False
        if _forwards_of(content) != self._forwards:
            return False
        for index, then in zip(indexes, self._class_forwards, strict=True):
            if (
                any(index.empty)
                or type(index.root()) is not index.root_class
                or [*map(type, index.children)] != index.child_classes
                or _class_forwards(index) != then
            ):
                return False
        return _hooks_of(content) == self._hooks

    def restore(self, stack: ExitStack) -> None:
        """Restore it until ``stack`` closes; raise if a class has changed."""
        self._check_classes()
        self._settings.restore(stack)
        for index in self._indexes:
            _restore_children(index, stack)
        _restore_hooks(self._content, self._hooks, stack)
        for owner, name, value in (*self._replaced(), *self._added()):
            _assign(stack, owner, name, value)
        stack.callback(self._note_made)
        for name, values in ("training", self._training), ("forward", self._forwards or _NOTHING):
            for attributes, value in zip(self._content, values, strict=False):
                _assign(stack, attributes, name, UNSET if value is None else value)

    def _check_classes(self) -> None:
        """Raise if a module has another class, or a class another ``forward``."""
        for index, then in zip(self._indexes, self._class_forwards, strict=True):
            for module, former in index.changed_classes():
                # `checkpointed` exchanges the class for one of the same name, which is harmless.
                if _full_name(type(module)) != _full_name(former):
                    raise _other_class(index, module, former)
            now = _class_forwards(index)
            replaced = [cls for cls, a, b in zip(index.classes, now, then, strict=True) if a != b]
            # Subclasses inherit it.
            for cls in sorted(replaced, key=lambda cls: "forward" not in vars(cls)):
                raise InputChanged(_OTHER_FORWARD.format(name=cls.__qualname__))

    def _replaced(self) -> list[tuple[Attributes, str, Any]]:
        """Where another parameter, buffer or child is now, and which was there."""
        all_names = [names for index in self._indexes for names in index.names]
        if sum(map(len, all_names)) != len(self._values):
            return []  # other code manages these dictionaries
        then = iter(self._values)
        replaced: list[tuple[Attributes, str, Any]] = []
        owners = chain.from_iterable([index.owners for index in self._indexes])
        for owner, names in zip(owners, all_names, strict=True):
            values = [*islice(then, len(names))]
            # If names are missing, or in another order, somebody else keeps track of them.
            if (*owner,) == names:
                pairs = zip(names, values, strict=True)
                replaced += [(owner, n, v) for n, v in pairs if _was_replaced_by_user(v, owner[n])]
        return replaced

    def _added(self) -> list[tuple[Attributes, str, Any]]:
        """Where a parameter or buffer is now that was not there."""
        known = {
            id(o): n for each in self._indexes for o, n in zip(each.owners, each.names, strict=True)
        }
        owners = [each[place] for each in self._content for place in ("_parameters", "_buffers")]
        return [
            (owner, name, UNSET)
            for owner in owners
            for name, value in [*owner.items()]
            if name not in known.get(id(owner), ()) and type(value) in _TENSORS
        ]

    def _note_made(self) -> None:
        """At the end of a rerun, note the parameters that it has made."""
        known = {id(child) for index in self._indexes for child in index.children}
        children = chain.from_iterable([each["_modules"].values() for each in self._content])
        made = [child for child in children if child is not None and id(child) not in known]
        self._made += [parameter for child in made for parameter in child.parameters()]
        self._made += [owner[name] for owner, name, _ in self._added()]


def _class_forwards(index: ModuleIndex) -> list[Any]:
    """The ``forward`` of each class, be it inherited: so it is found in the cache of types."""
    return [*map(getattr, index.classes, _FORWARD, _NOTHING)]


def _assign(stack: ExitStack, owner: dict[str, Any], name: str, value: Any) -> None:
    """Set an item, or delete it for `UNSET`, until ``stack`` closes."""
    if owner.get(name, UNSET) is not value:
        put_until(stack, (owner, (name,)), VARIABLES, {name: value})


_TENSORS = {torch.Tensor, nn.Parameter, type(None)}


def _was_replaced_by_user(old: Any, new: Any) -> bool:
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
            put_until(stack, family, restorers_of(type(family))[0], former)


def _forwards_of(content: list[Attributes]) -> list[Any]:
    """The ``forward`` that each instance has of its own; empty if none has one."""
    return [*map(_get, content, _FORWARD)] if any(map(_get, content, _FORWARD)) else []


# --- hooks ----------------------------------------------------------------------------------------

#: The user's hooks by number, in each place that has some: the address of the attributes of a
#: module, and the name of a dictionary in them.
Hooks = dict[tuple[int, str], dict[int, Any]]

#: The hooks of all modules, under the names that those of one module have.
_pre, _post, *_how = GLOBAL_FORWARD_HOOKS  # which take no keywords before a call
_OF_ALL: dict[str, Any] = dict(zip(FORWARD_HOOKS, (_pre, _post, {}, *_how), strict=True))
_before, _after = map(itemgetter, FORWARD_HOOKS[:2])


def _hooks_of(content: list[Attributes]) -> Hooks:
    """The user's hooks, where there are any."""
    has_hooks = any(map(_after, content)) or any(map(_before, content))
    if not (has_hooks or _after(_OF_ALL) or _before(_OF_ALL)):
        return {}
    # How hooks are to be called is said only where there are some. Few modules have any.
    hooked = [each for each in (*content, _OF_ALL) if _after(each) or _before(each)]
    found = {(id(each), n): _users_in(each, each[n]) for each in hooked for n in FORWARD_HOOKS}
    return {place: hooks for place, hooks in found.items() if hooks}


def _users_in(attributes: dict[str, Any], hooks: dict[int, Any]) -> dict[int, Any]:
    """The hooks that are the user's.

    Ours have numbers below zero. Those of all modules that torch has only observe.
    """
    if attributes is not _OF_ALL:
        return {number: hook for number, hook in hooks.copy().items() if number >= 0}
    pairs = [pair for each in _OF_ALL.values() for pair in each.copy().items()]
    observers = {number for number, hook in pairs if _only_observes(hook)}
    return {number: hook for number, hook in hooks.copy().items() if number not in observers}


def _only_observes(hook: Any) -> bool:
    module = getattr(hook, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in ("torch", "recollect")


def _restore_hooks(content: list[dict[str, Any]], then: Hooks, stack: ExitStack) -> None:
    """Give modules the hooks that they had, until ``stack`` closes."""
    now = _hooks_of(content)
    owners = {id(each): each for each in (*content, _OF_ALL)}
    for place in (then | now) if now != then else ():
        hooks = owners[place[0]][place[1]]
        former, users = then.get(place, {}), now.get(place, {})
        others = {number: hook for number, hook in hooks.items() if number not in users}
        put_until(stack, hooks, restorers_of(type(hooks))[0], former | others)


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
