"""What is below a module, remembered.

Walking through a module takes a microsecond for each of its parts; a region would pay that at every
call. What was found holds until some module is given a child, a parameter or a buffer, of which
torch tells those who ask. Only lists of modules can be changed without, so their lengths are
compared.
"""

from __future__ import annotations

from itertools import count
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

__all__ = ["BARE", "OWN", "STATISTICS", "Kind", "Tree", "tree_of"]


class Kind:
    """What is known of a class of modules."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: Of torch's.
PLAIN = Kind("plain")
#: Of torch's, with running statistics that its op writes to without raising their versions.
STATISTICS = Kind("statistics")
#: Of somebody else's: nothing is known.
OWN = Kind("own")

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def _kind_of(module: nn.Module) -> Kind:
    if (type(module).__module__ or "").partition(".")[0] != "torch":
        return OWN
    return STATISTICS if isinstance(module, _WITH_STATISTICS) else PLAIN


class Tree:
    """A module and all below it."""

    __slots__ = (
        "_epoch",
        "_lengths",
        "_lists",
        "_root",
        "attached",
        "communicates",
        "own",
        "owners",
        "parameters",
        "renormalised",
        "with_buffers",
    )

    def __init__(self, root: nn.Module) -> None:
        self._root = ref(root, _forget(id(root)))
        self._epoch = _epoch.value
        #: The dictionaries in which modules have their parameters, if they have any.
        self.parameters: list[dict[str, Any]] = []
        #: These, and those with buffers.
        self.owners: list[dict[str, Any]] = []
        #: The attributes of modules that have buffers. (Attributes, and not modules: nothing here
        #: may keep the root alive.)
        self.with_buffers: list[tuple[dict[str, Any], Kind]] = []
        #: The attributes of modules that are not torch's, and their ``forward``.
        self.own: list[tuple[dict[str, Any], Any]] = []
        #: What the attributes of ``own`` lead to; None until somebody has looked.
        self.attached: list[Any] | None = None
        #: Dictionaries of parameters that their module changes in forward, and may: an embedding
        #: scales its weight, to the same end again; a lazy module makes its parameters.
        self.renormalised: list[dict[str, Any]] = []
        #: Whether one of them gathers statistics from other processes, in training.
        self.communicates = False
        self._lists: list[dict[str, Any]] = []
        for module in root.modules():
            self._add(module)
        self._lengths = [*map(len, self._lists)]

    def _add(self, module: nn.Module) -> None:
        content = module.__dict__
        kind = _kind_of(module)
        if content["_parameters"]:
            self.parameters.append(content["_parameters"])
            self.owners.append(content["_parameters"])
        if content["_buffers"]:
            self.with_buffers.append((content, kind))
            self.owners.append(content["_buffers"])
        if kind is OWN:
            self.own.append((content, type(module).forward))
        if isinstance(module, nn.SyncBatchNorm):
            self.communicates = True
        if _may_change_parameters(module):
            self.renormalised.append(content["_parameters"])
        if content["_modules"] or isinstance(module, _CONTAINERS):
            self._lists.append(content["_modules"])

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is what is below ``module`` now."""
        return (
            self._epoch == _epoch.value
            and self._root() is module
            and self._lengths == [*map(len, self._lists)]
        )


def _may_change_parameters(module: nn.Module) -> bool:
    if isinstance(module, LazyModuleMixin):
        return True
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


#: The attributes that every module has.
BARE = frozenset(nn.Module().__dict__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Epoch:
    """Counts what modules are given."""

    __slots__ = ("_numbers", "_watching", "value")

    def __init__(self) -> None:
        self._numbers = count(1)
        self._watching = False
        self.value = 0

    def watch(self) -> None:
        """Be told from now on."""
        if not self._watching:
            self._watching = True
            register_module_module_registration_hook(self._next)
            register_module_parameter_registration_hook(self._next)
            register_module_buffer_registration_hook(self._next)

    def _next(self, *_: Any) -> None:
        self.value = next(self._numbers)


_epoch = _Epoch()
#: By identity: to hash a module, or to look it up weakly, costs more than the rest of a call.
_trees: dict[int, Tree] = {}


def _forget(key: int) -> Any:
    def forget(_: Any) -> None:
        _trees.pop(key, None)

    return forget


def tree_of(module: nn.Module) -> Tree:
    """What is below ``module``."""
    tree = _trees.get(id(module))
    if tree is None or not tree.is_of(module):
        _epoch.watch()
        tree = _trees[id(module)] = Tree(module)
    return tree
