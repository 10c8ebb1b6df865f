"""Which of the modules that rules match are being called while a region runs.

For the time of the region those modules, and no others, get a pair of hooks. Afterwards the model
is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn

from recollect._torch.modules import compiled_in, hook_module, unhook_module
from recollect.checks.names import model_of, plain_name
from recollect.policy.patterns import fits, listed
from recollect.policy.rulings import Rulebook
from recollect.state.module_index import index_of
from recollect.state.reachable import Reachable

__all__ = ["InsideModules"]

#: A module, and the ranks of the rules that match it.
_Matched = list[tuple[nn.Module, tuple[int, ...]]]
_Named = list[tuple[str, nn.Module]]


def _roots(function: Callable[..., Any], values: tuple[Any, ...]) -> list[nn.Module]:
    """The modules that a region may call: its own, or those that it reaches or is given."""
    owner = getattr(function, "__self__", function)
    found = [owner] if isinstance(owner, nn.Module) else Reachable(function).modules
    return found + [value for value in values if isinstance(value, nn.Module)]


def _matched(rulebook: Rulebook, roots: list[nn.Module]) -> _Matched:
    """The modules of a region that a rule matches. A pattern must match one, here or elsewhere."""
    known = _known(rulebook, roots[0]) if len(roots) == 1 else None
    if known is not None:
        return known
    inside = [pair for root in roots for pair in _visible(root)]
    ranks: dict[int, set[int]] = {}
    for rank, rule in rulebook.modules.items():
        for pattern in rule.patterns:
            for module in _find(pattern, rule.title, inside, roots):
                ranks.setdefault(id(module), set()).add(rank)
    modules = {id(module): module for _, module in inside if id(module) in ranks}
    matched = [(module, (*sorted(ranks[key]),)) for key, module in modules.items()]
    if len(roots) == 1:
        # Weakly: the policy may outlive the model.
        weak = [(ref(module), own) for module, own in matched]
        rulebook.matched[roots[0]] = ref(index_of(roots[0])), weak
    return matched


def _known(rulebook: Rulebook, root: nn.Module) -> _Matched | None:
    """What was found last time, if the module is as it was then."""
    entry = rulebook.matched.get(root)
    if entry is None or entry[0]() is not index_of(root):
        return None
    found = [(module(), ranks) for module, ranks in entry[1]]
    return None if any(module is None for module, _ in found) else found


def _find(pattern: str, title: str, inside: _Named, roots: list[nn.Module]) -> list[nn.Module]:
    """The modules inside of a region that ``pattern`` matches; an error if it matches none at all.

    By the path in the region or, which only a search through memory can tell, in the whole model.
    """
    found = [module for name, module in inside if fits(name, pattern)]
    if found:
        return found
    models = {id(model): model for model in map(model_of, roots)}
    outside = [pair for model in models.values() for pair in _visible(model)]
    found = [module for name, module in outside if fits(name, pattern)]
    if not found:
        raise ValueError(
            f"{title}: {pattern!r} matches no module (those in compiled code cannot be seen). "
            f"There are: {listed([name for name, _ in inside + outside], pattern)}"
        )
    own = {id(module) for _, module in inside}
    return [module for module in found if id(module) in own]


def _visible(root: nn.Module) -> _Named:
    """Modules by name, but for those in compiled code, whose ops are not seen."""
    hidden = {id(each) for module in root.modules() for each in compiled_in(module)}
    pairs = root.named_modules(remove_duplicate=False)
    return [(plain_name(name), module) for name, module in pairs if id(module) not in hidden]


class _Hook:
    """Called before or after a module is. In a copy of the module, it does nothing."""

    __slots__ = ("_counts", "_ranks", "_step", "_thread")

    def __init__(self, ranks: tuple[int, ...], counts: list[int], step: int) -> None:
        self._ranks = ranks
        self._counts = counts
        self._step = step
        self._thread = threading.get_ident()

    def __call__(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            for rank in self._ranks:
                self._counts[rank] += self._step

    def __reduce__(self) -> Any:
        return _Hook, ((), [], 0)


class InsideModules:
    """A context that counts, for each rule, how many of its modules are being called."""

    __slots__ = ("_counts", "_matched", "_own", "ranks")

    def __init__(
        self,
        rulebook: Rulebook,
        function: Callable[..., Any],
        values: tuple[Any, ...],
        counts: list[int],
    ) -> None:
        self._matched = _matched(rulebook, _roots(function, values))
        self._counts = counts
        #: The ranks of the rules that match a module of the region.
        self.ranks = {rank for _, ranks in self._matched for rank in ranks}
        # The region's own module may have been entered already, on the way to its forward.
        owner = getattr(function, "__self__", None)
        self._own = [rank for module, ranks in self._matched if module is owner for rank in ranks]

    def __enter__(self) -> None:
        for rank in self._own:
            self._counts[rank] += 1
        for module, ranks in self._matched:
            before, after = (_Hook(ranks, self._counts, step) for step in (1, -1))
            hook_module(module, -id(self), before, after)

    def __exit__(self, *exc: object) -> None:
        for module, _ in self._matched:
            unhook_module(module, -id(self))
