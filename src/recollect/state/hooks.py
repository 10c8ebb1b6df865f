"""How modules are called: their hooks, their ``forward``, their children, as they were at the call.

A hook may change what a module returns. One that was added or removed after forward, or a
``forward`` that was set on an instance, would make the rerun compute something else. So a rerun
finds the hooks, the instance's ``forward`` and the children that forward found, and they are what
they are again afterwards. What a class defines is not put back, since other code uses it at the
same time: another ``forward`` of a class, or another class of a module, is an error.

Almost always nothing has changed. To find that out takes some tens of nanoseconds for each module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import repeat
from operator import is_, itemgetter
from types import MappingProxyType
from typing import Any

from recollect._torch.modules import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from recollect.checks.names import name_in
from recollect.errors import InputChanged
from recollect.state.module_index import Attributes, Tree
from recollect.state.restorers import kinds_of

__all__ = ["Calls"]

_before, _after = map(itemgetter, FORWARD_HOOKS[:2])
_FORWARD = repeat("forward")
_get = dict.get
_get_from_class = MappingProxyType.get

#: Hooks by their numbers, of one module or of all.
_Hooks = dict[int, Any]

#: The attributes of a module and a name among them; or nothing, and one of the global ones.
_Place = tuple[Attributes | None, Any]


class Calls:
    """How the modules of a region were called when it began."""

    __slots__ = ("_callers", "_class_forwards", "_forwards", "_hooks", "_trees")

    def __init__(self, trees: Sequence[Tree], callers: list[Attributes]) -> None:
        """``callers``: the attributes of all modules, those at the root of ``trees`` included."""
        self._trees = trees
        self._callers = callers
        self._hooks = _hooks_of(callers)
        self._forwards = _forwards_of(callers)
        self._class_forwards = [[*map(_get_from_class, t.spaces, _FORWARD)] for t in trees]

    def is_present(self) -> bool:
        """Whether all of it is as it was, children of the same names excepted; almost always."""
        for tree, then in zip(self._trees, self._class_forwards, strict=True):
            if (
                any(tree.childless)
                or not tree.has_its_classes()
                or not all(map(is_, map(_get_from_class, tree.spaces, _FORWARD), then))
            ):
                return False
        hooks, forwards = _hooks_of(self._callers), _forwards_of(self._callers)
        return (hooks is self._hooks or _same_hooks(hooks, self._hooks)) and (
            forwards is self._forwards
            or (len(forwards) == len(self._forwards) and all(map(is_, forwards, self._forwards)))
        )

    def restore(self, stack: ExitStack) -> None:
        """Put back what can be, until ``stack`` closes, and raise for what cannot."""
        for tree in self._trees:
            for module, former in tree.changed_classes():
                # Not so a class of ours, under the same name: it computes the same.
                if _full_name(type(module)) != _full_name(former):
                    raise _other_class(tree, module, former)
        replaced = self._replaced_forward()
        if replaced is not None:
            raise InputChanged(_OTHER_FORWARD.format(name=replaced.__qualname__))
        for tree in self._trees:
            _restore_children(tree, stack)
        forwards = self._forwards or repeat(None)
        for attributes, forward in zip(self._callers, forwards, strict=False):
            if attributes.get("forward") is not forward:
                stack.callback(_set_forward, attributes, attributes.get("forward"))
                _set_forward(attributes, forward)
        now = _hooks_of(self._callers)
        if not _same_hooks(now, self._hooks):
            _restore_hooks(now, self._hooks, stack)

    def _replaced_forward(self) -> type | None:
        """A class whose ``forward`` is another one now, or that has one now, or has none."""
        for tree, then in zip(self._trees, self._class_forwards, strict=True):
            for cls, forward in zip(tree.classes, then, strict=True):
                if vars(cls).get("forward") is not forward:
                    return cls
        return None


# --- hooks ----------------------------------------------------------------------------------------


#: By place, with that: where there are any.
_AllHooks = dict[tuple[int, Any], tuple[_Place, _Hooks]]
_NO_HOOKS: _AllHooks = {}
_OF_ALL = GLOBAL_FORWARD_HOOKS[:2]


def _hooks_of(callers: list[Attributes]) -> _AllHooks:
    """The hooks of modules, and of all modules."""
    if not (any(map(_after, callers)) or any(map(_before, callers)) or any(_OF_ALL)):
        return _NO_HOOKS
    # How hooks are to be called is said only where there are some. Few modules have any.
    hooked = [each for each in callers if _after(each) or _before(each)]
    places: list[_Place] = [(each, name) for each in hooked for name in FORWARD_HOOKS if each[name]]
    if any(_OF_ALL):
        places += [(None, number) for number in range(len(GLOBAL_FORWARD_HOOKS))]
    found = [(place, hooks) for place in places if (hooks := _users_in(place))]
    return {(id(place[0]), place[1]): (place, hooks) for place, hooks in found}


def _hooks_at(place: _Place) -> Any:
    attributes, name = place
    return GLOBAL_FORWARD_HOOKS[name] if attributes is None else attributes[name]


def _users_in(place: _Place) -> _Hooks:
    """The hooks in a place that are the user's.

    Ours have numbers below zero. Those of all modules that torch has are there to look on.
    """
    hooks = _hooks_at(place).copy()
    if not hooks or place[0] is not None:
        return {number: hook for number, hook in hooks.items() if number >= 0}
    pairs = [pair for each in GLOBAL_FORWARD_HOOKS for pair in each.copy().items()]
    ours = {number for number, hook in pairs if _looks_on(hook)}
    return {number: hook for number, hook in hooks.items() if number not in ours}


def _looks_on(hook: Any) -> bool:
    module = getattr(hook, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] in ("torch", "recollect")


def _same_hooks(now: _AllHooks, then: _AllHooks) -> bool:
    if now.keys() != then.keys():
        return False
    pairs = [(now[key][1], then[key][1]) for key in now]
    return all([*a] == [*b] and all(map(is_, a.values(), b.values())) for a, b in pairs)


def _restore_hooks(now: _AllHooks, then: _AllHooks, stack: ExitStack) -> None:
    for key, (place, _) in (then | now).items():
        hooks = _hooks_at(place)
        former = then[key][1] if key in then else {}
        users = now[key][1] if key in now else {}
        others = {n: hook for n, hook in hooks.items() if n not in users}
        stack.callback(_put, hooks, hooks.copy())
        _put(hooks, {**former, **others})


def _put(owner: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Make ``owner`` hold ``content``, in this order, touching only what differs."""
    kinds_of(type(owner))[0].put(owner, content)


# --- children and forward -------------------------------------------------------------------------


def _restore_children(tree: Tree, stack: ExitStack) -> None:
    """Give modules the children of other names that they had.

    One that another stands for under its name is put back with parameters and buffers.
    """
    root = tree.root()
    if root is None or not tree.offspring:
        return
    for attributes, former in zip([root.__dict__, *tree.callers], tree.offspring, strict=True):
        # Looked up: to delete from a Sequential gives it another dictionary.
        family = attributes["_modules"]
        if [*family] != [*former]:
            stack.callback(_put, family, family.copy())
            _put(family, former)


_NO_FORWARDS: list[Any] = []


def _forwards_of(callers: list[Attributes]) -> list[Any]:
    """The ``forward`` of each module that has one of its own; nothing if none has."""
    if not any(map(_get, callers, _FORWARD)):
        return _NO_FORWARDS
    return [*map(_get, callers, _FORWARD)]


def _set_forward(attributes: Attributes, forward: Any) -> None:
    if forward is None:
        attributes.pop("forward", None)
    else:
        attributes["forward"] = forward


# --- errors ---------------------------------------------------------------------------------------


def _full_name(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _other_class(tree: Tree, module: Any, former: type) -> InputChanged:
    root = tree.root()
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
