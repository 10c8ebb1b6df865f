"""The hooks of a region's modules: a rerun calls those that there were at the call."""

from __future__ import annotations

from contextlib import ExitStack
from operator import itemgetter
from typing import Any

from recollect._torch.modules import FORWARD_HOOKS, GLOBAL_FORWARD_HOOKS
from recollect.state.restorers import put_until, restorers_of

#: The user's hooks by number, in each place that has some: the address of the attributes of a
#: module, and the name of a dictionary in them.
Hooks = dict[tuple[int, str], dict[int, Any]]

#: The hooks of all modules, under the names that those of one module have.
_pre, _post, *_how = GLOBAL_FORWARD_HOOKS  # which take no keywords before a call
_OF_ALL: dict[str, Any] = dict(zip(FORWARD_HOOKS, (_pre, _post, {}, *_how), strict=True))
_before, _after = map(itemgetter, FORWARD_HOOKS[:2])


def hooks_of(content: list[dict[str, Any]]) -> Hooks:
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


def restore_hooks(content: list[dict[str, Any]], then: Hooks, stack: ExitStack) -> None:
    """Give modules the hooks that they had, until ``stack`` closes."""
    now = hooks_of(content)
    owners = {id(each): each for each in (*content, _OF_ALL)}
    for place in (then | now) if now != then else ():
        hooks = owners[place[0]][place[1]]
        former, users = then.get(place, {}), now.get(place, {})
        others = {number: hook for number, hook in hooks.items() if number not in users}
        put_until(stack, hooks, restorers_of(type(hooks))[0], former | others)
