"""What is below a module, remembered.

Walking through a module takes a microsecond for each of its parts; a region would pay that at every
call. What was found holds as long as every module has the same children, of the same classes, and
parameters and buffers of the same names: to compare that takes nanoseconds. (torch would tell of
registrations; but the compiler guards on who is told, in all code that registers a module.)

It is remembered in the module itself: in a table of ours, a module that refers to itself (by a
bound method among its attributes, say) would be kept alive for good.
"""

from __future__ import annotations

from itertools import chain, islice
from operator import is_
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

__all__ = ["BARE", "OWN", "STATISTICS", "Attributes", "ModuleKind", "Tree", "tree_of"]

#: Where in a module it is remembered.
_KEY = "_recollect_tree"

#: The attributes that every module has, in the order in which it gets them; and ours.
_FIRST = [*nn.Module().__dict__]
BARE = frozenset(_FIRST) | {_KEY}


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


Attributes = dict[str, Any]
_PLACES = ("_parameters", "_buffers", "_modules")
_values = dict.values


def _bare_in(attributes: Attributes) -> int:
    """How many of the first attributes of a module are those that every module has."""
    return len(_FIRST) if [*islice(attributes, len(_FIRST))] == _FIRST else 0


class Tree:
    """A module and all below it."""

    __slots__ = (
        "__weakref__",
        "_child_classes",
        "_class",
        "_empty",
        "_keys",
        "_unfinished",
        "bare",
        "callers",
        "childless",
        "children",
        "classes",
        "communicates",
        "content",
        "families",
        "functions",
        "is_simple",
        "kind",
        "named",
        "names",
        "offspring",
        "own",
        "owners",
        "parameters",
        "recurrent",
        "root",
        "scripted",
        "spaces",
        "with_buffers",
    )

    def __init__(self, root: nn.Module) -> None:
        self.root = ref(root)
        #: The attributes of each module, but for the root: nothing here may refer to what refers to
        #: this. (The same holds for all lists of attributes.)
        self.content: list[Attributes] = []
        #: The same with those of compiled modules, which have hooks but no mode.
        self.callers: list[Attributes] = []
        #: Dictionaries of parameters, if there are any, that a forward leaves alone.
        self.parameters: list[dict[str, Any]] = []
        #: Dictionaries of parameters, buffers and children, if there are any; the names in them.
        self.owners: list[dict[str, Any]] = []
        self.names: list[tuple[str, ...]] = []
        #: Dictionaries of children, and what they hold, one after the other; and those that are
        #: empty.
        self.families: list[dict[str, Any]] = []
        self.children: list[Any] = []
        self.childless: list[dict[str, Any]] = []
        #: The attributes of modules that have buffers.
        self.with_buffers: list[tuple[Attributes, ModuleKind]] = []
        #: The attributes of modules that are not torch's layers, and how many of the first of them
        #: are bare; and that of the root.
        self.own: list[tuple[Attributes, int]] = []
        self.bare = _bare_in(root.__dict__)
        #: The attributes of recurrent layers.
        self.recurrent: list[Attributes] = []
        #: The global variables that the functions of ``own`` name; None until somebody has looked.
        self.named: list[Any] | None = None
        #: Parameters and buffers of scripted modules, which have no attributes to look at.
        self.scripted: list[torch.Tensor] = []
        #: Dictionaries of modules that make their parameters at the first call.
        self._unfinished: list[dict[str, Any]] = []
        #: Whether one of them gathers statistics from other processes, in training.
        self.communicates = False
        #: Dictionaries of parameters and buffers that are empty.
        self._empty: list[dict[str, Any]] = []
        #: Whether there is nothing to it but parameters; None until somebody has looked.
        self.is_simple: bool | None = None
        self._class = type(root)
        self.kind = _kind_of(root)
        self.functions = _functions_of(type(root)) if self.kind is OWN else []
        modules = _modules_below(root)
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted += [*module.parameters(), *module.buffers()]
            else:
                self._add_dictionaries(module)
                if module is not root:
                    self._add_attributes(module)
        self.names = [(*owner,) for owner in self.owners]
        self._keys = [*chain.from_iterable(self.names)]
        self.children = [*chain.from_iterable(map(_values, self.families))]
        self._child_classes = [*map(type, self.children)]
        #: The children of the root and of each of ``callers``, by name.
        self.offspring = [
            m.__dict__["_modules"].copy()
            for m in modules
            if not isinstance(m, torch.jit.ScriptModule)
        ]
        #: The classes that may define a ``forward``, and what they define.
        self.classes = _classes_of(modules)
        self.spaces = [vars(cls) for cls in self.classes]

    def _add_dictionaries(self, module: nn.Module) -> None:
        parameters, buffers, children = (module.__dict__[place] for place in _PLACES)
        if parameters and not _may_change_parameters(module):
            self.parameters.append(parameters)
        self.owners += [owner for owner in (parameters, buffers, children) if owner]
        self._empty += [owner for owner in (parameters, buffers) if not owner]
        (self.families if children else self.childless).append(children)
        if isinstance(module, LazyModuleMixin):
            self._unfinished += [parameters, buffers]
        self.communicates |= isinstance(module, nn.SyncBatchNorm)

    def _add_attributes(self, module: nn.Module) -> None:
        content, kind = module.__dict__, _kind_of(module)
        self.callers.append(content)
        if "training" in content:  # a compiled module has it elsewhere
            self.content.append(content)
        if content["_buffers"]:
            self.with_buffers.append((content, kind))
        if isinstance(module, nn.RNNBase):
            self.recurrent.append(content)
        if kind is OWN:
            self.own.append((content, _bare_in(content)))
            self.functions += _functions_of(type(module))

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is what is below ``module`` now."""
        return (
            self.root() is module
            and not any(self._empty)
            and not any(self.childless)
            and [*chain.from_iterable(self.owners)] == self._keys
            and all(map(is_, chain.from_iterable(map(_values, self.families)), self.children))
            and self.has_its_classes()
        )

    def has_its_classes(self) -> bool:
        """Whether every module is of the class that it was of."""
        return (
            type(self.root()) is self._class and [*map(type, self.children)] == self._child_classes
        )

    def changed_classes(self) -> list[tuple[nn.Module, type]]:
        """The modules that are of another class now, and of which they were."""
        members = [self.root(), *self.children]
        pairs = zip(members, [self._class, *self._child_classes], strict=True)
        return [(m, cls) for m, cls in pairs if m is not None and type(m) is not cls]

    @property
    def is_unfinished(self) -> bool:
        """Whether a parameter or buffer is still to be made, by the first call."""
        if not self._unfinished:
            return False
        tensors = [*chain.from_iterable(map(_values, self._unfinished))]
        return any(is_lazy(tensor) for tensor in tensors)

    def __reduce__(self) -> Any:
        return _nothing, ()  # a copy of the module has its own


def _nothing() -> None:
    return None


def _functions_of(cls: type) -> list[FunctionType]:
    """The functions that a class of modules has beside those of every module."""
    classes = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
    members = [member for base in classes for member in [*vars(base).values()]]
    return list({id(m.__code__): m for m in members if type(m) is FunctionType}.values())


def _may_change_parameters(module: nn.Module) -> bool:
    """Whether a forward changes parameters, and may: an embedding scales them, to the same end."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def _modules_below(root: nn.Module) -> list[nn.Module]:
    """``root`` and all below, each once, as ``modules()`` has them."""
    found: dict[int, nn.Module] = {}
    pending = [root]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            # A copy: another thread, or the module's own code, may be registering something.
            children = module.__dict__.get("_modules")
            below = [*(children.values() if isinstance(children, dict) else module.children())]
            pending += [child for child in reversed(below) if child is not None]
    return [*found.values()]


def _classes_of(modules: list[nn.Module]) -> list[type]:
    bases = (base for cls in {*map(type, modules)} for base in cls.__mro__)
    return [*({*bases} - {nn.Module, object})]


def tree_of(module: nn.Module) -> Tree:
    """What is below ``module``."""
    tree: Tree | None = module.__dict__.get(_KEY)
    if tree is None or not tree.is_of(module):
        tree = Tree(module)
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__[_KEY] = tree
    return tree
