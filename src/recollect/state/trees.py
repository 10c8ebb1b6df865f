"""What is below a module, remembered.

Walking through a module takes a microsecond for each of its parts; a region would pay that at every
call. What was found holds until some module is given a child, a parameter or a buffer that it did
not have, of which torch tells those who ask. Only lists of modules can be changed without, so their
lengths are compared.

It is remembered in the module itself: in a table of ours, a module that refers to itself (by a
bound method among its attributes, say) would be kept alive for good.
"""

from __future__ import annotations

from itertools import count
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

__all__ = ["BARE", "OWN", "STATISTICS", "ModuleKind", "Tree", "tree_of"]

#: Where in a module it is remembered.
_KEY = "_recollect_tree"

#: The attributes that every module has.
BARE = frozenset(nn.Module().__dict__) | {_KEY}


class ModuleKind:
    """What is known of a class of modules."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


#: A layer of torch's.
PLAIN = ModuleKind("plain")
#: A layer of torch's with running statistics, written to without their versions being raised.
STATISTICS = ModuleKind("statistics")
#: Of somebody else's, or made by a tool: nothing is known.
OWN = ModuleKind("own")

_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def _kind_of(module: nn.Module) -> ModuleKind:
    if not (type(module).__module__ or "").startswith("torch.nn.") or type(module) is nn.Module:
        return OWN
    return STATISTICS if isinstance(module, _WITH_STATISTICS) else PLAIN


_Attributes = dict[str, Any]
_PLACES = ("_parameters", "_buffers", "_modules")


class Tree:
    """A module and all below it."""

    __slots__ = (
        "__weakref__",
        "_epoch",
        "_lengths",
        "_lists",
        "_root",
        "_unfinished",
        "attached",
        "communicates",
        "content",
        "functions",
        "is_simple",
        "kind",
        "named",
        "names",
        "own",
        "owners",
        "parameters",
        "recurrent",
        "scripted",
        "with_buffers",
    )

    def __init__(self, root: nn.Module) -> None:
        self._root = ref(root)
        self._epoch = _epoch.value
        #: The attributes of each module, but for the root: nothing here may refer to what refers to
        #: this. (The same holds for all lists of attributes.)
        self.content: list[_Attributes] = []
        #: Dictionaries of parameters, if there are any, that a forward leaves alone.
        self.parameters: list[dict[str, Any]] = []
        #: Dictionaries of parameters, buffers and children, if there are any; the names in them.
        self.owners: list[dict[str, Any]] = []
        self.names: list[tuple[str, ...]] = []
        #: The attributes of modules that have buffers.
        self.with_buffers: list[tuple[_Attributes, ModuleKind]] = []
        #: The attributes of modules that are not torch's layers.
        self.own: list[_Attributes] = []
        #: The attributes of recurrent layers.
        self.recurrent: list[_Attributes] = []
        #: What the attributes of ``own`` lead to, and the global variables that their functions
        #: name; None until somebody has looked.
        self.attached: list[Any] | None = None
        self.named: list[Any] = []
        #: Parameters and buffers of scripted modules, which have no attributes to look at.
        self.scripted: list[torch.Tensor] = []
        #: Dictionaries of modules that make their parameters at the first call.
        self._unfinished: list[dict[str, Any]] = []
        #: Whether one of them gathers statistics from other processes, in training.
        self.communicates = False
        self._lists: list[dict[str, Any]] = []
        #: Whether there is nothing to it but parameters; None until somebody has looked.
        self.is_simple: bool | None = None
        self.kind = _kind_of(root)
        self.functions = _functions_of(type(root)) if self.kind is OWN else []
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted += [*module.parameters(), *module.buffers()]
            else:
                self._add_dictionaries(module)
                if module is not root:
                    self._add_attributes(module)
        self._lengths = [*map(len, self._lists)]
        self.names = [(*owner,) for owner in self.owners]

    def _add_dictionaries(self, module: nn.Module) -> None:
        parameters, buffers, children = (module.__dict__[place] for place in _PLACES)
        if parameters and not _may_change_parameters(module):
            self.parameters.append(parameters)
        self.owners += [owner for owner in (parameters, buffers, children) if owner]
        if children or isinstance(module, _CONTAINERS):
            self._lists.append(children)
        if isinstance(module, LazyModuleMixin):
            self._unfinished += [parameters, buffers]
        self.communicates |= isinstance(module, nn.SyncBatchNorm)

    def _add_attributes(self, module: nn.Module) -> None:
        content, kind = module.__dict__, _kind_of(module)
        if "training" in content:  # a compiled module has it elsewhere
            self.content.append(content)
        if content["_buffers"]:
            self.with_buffers.append((content, kind))
        if isinstance(module, nn.RNNBase):
            self.recurrent.append(content)
        if kind is OWN:
            self.own.append(content)
            self.functions += _functions_of(type(module))

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is what is below ``module`` now."""
        return (
            self._epoch == _epoch.value
            and self._root() is module
            and self._lengths == [*map(len, self._lists)]
        )

    @property
    def is_unfinished(self) -> bool:
        """Whether a parameter or buffer is still to be made, by the first call."""
        if not self._unfinished:
            return False
        return any(is_lazy(tensor) for owner in self._unfinished for tensor in owner.values())

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of the module has its own


def _nothing() -> None:
    return None


def _functions_of(cls: type) -> list[FunctionType]:
    """The functions that a class of modules has beside those of every module."""
    classes = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
    members = [member for base in classes for member in vars(base).values()]
    return list({id(m.__code__): m for m in members if type(m) is FunctionType}.values())


def _may_change_parameters(module: nn.Module) -> bool:
    """Whether a forward changes parameters, and may: an embedding scales them, to the same end."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Epoch:
    """Counts what modules are given. What is in dictionaries that we know is read there."""

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
            register_module_parameter_registration_hook(self._on_parameter)
            register_module_buffer_registration_hook(self._on_buffer)

    def _on_parameter(self, module: nn.Module, name: str, _: Any) -> None:
        if name not in module.__dict__["_parameters"]:
            self._next()

    def _on_buffer(self, module: nn.Module, name: str, _: Any) -> None:
        if name not in module.__dict__["_buffers"]:
            self._next()

    def _next(self, *_: Any) -> None:
        self.value = next(self._numbers)


_epoch = _Epoch()


def tree_of(module: nn.Module) -> Tree:
    """What is below ``module``."""
    tree: Tree | None = module.__dict__.get(_KEY)
    if tree is None or not tree.is_of(module):
        _epoch.watch()
        tree = Tree(module)
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__[_KEY] = tree
    return tree
