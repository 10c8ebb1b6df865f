"""What is below a module, remembered.

Walking through a module takes a microsecond for each of its parts; a region would pay that at every
call. An index holds as long as every module has the same children, of the same classes, and
parameters and buffers of the same names: to compare that takes nanoseconds. (torch would report
registrations; but the compiler guards on registration hooks, in all code that registers a module.)

It is stored in the module itself: in a table of ours, a module that refers to itself (by a bound
method among its attributes, say) would never be freed.
"""

from __future__ import annotations

from enum import Enum, auto
from itertools import chain, islice
from operator import is_
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

__all__ = ["BARE", "Attributes", "ModuleIndex", "ModuleKind", "index_of"]

#: Where in a module it is stored.
_KEY = "_recollect_tree"

#: The attributes that every module has, in the order in which it gets them; and ours.
_FIRST = [*nn.Module().__dict__]
BARE = frozenset(_FIRST) | {_KEY}


class ModuleKind(Enum):
    """What is known of a class of modules."""

    #: A layer of torch's.
    PLAIN = auto()
    #: A layer of torch's with running statistics, written to without their versions being raised.
    STATISTICS = auto()
    #: Of the user's, or made by a tool: nothing is known.
    OWN = auto()


_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def _kind_of(module: nn.Module) -> ModuleKind:
    if not (type(module).__module__ or "").startswith("torch.nn.") or type(module) is nn.Module:
        return ModuleKind.OWN
    has_statistics = isinstance(module, _WITH_STATISTICS)
    return ModuleKind.STATISTICS if has_statistics else ModuleKind.PLAIN


Attributes = dict[str, Any]
_values = dict.values


def _bare_in(attributes: Attributes) -> int:
    """How many of the first attributes of a module are those that every module has."""
    return len(_FIRST) if [*islice(attributes, len(_FIRST))] == _FIRST else 0


class ModuleIndex:
    """A module and all below it.

    Lists of attributes lack those of the root, which refer to the index: there is no cycle.
    """

    __slots__ = (
        *("__weakref__", "_child_classes", "_class", "_empty", "_keys", "_unfinished", "bare"),
        *("childless", "children", "classes", "communicates", "content", "families"),
        *("functions", "globals", "is_simple", "kind", "names", "offspring", "own", "owners"),
        *("parameters", "recurrent", "root", "scripted", "spaces", "with_buffers"),
    )

    def __init__(self, root: nn.Module) -> None:
        self.root = ref(root)
        #: The attributes of each module.
        self.content: list[Attributes] = []
        #: Dictionaries of parameters, if there are any, that a forward leaves alone.
        self.parameters: list[dict[str, Any]] = []
        #: Dictionaries of parameters, buffers and children, if there are any.
        self.owners: list[dict[str, Any]] = []
        #: Dictionaries of children; and those that are empty.
        self.families: list[dict[str, Any]] = []
        self.childless: list[dict[str, Any]] = []
        #: The attributes of modules that have buffers.
        self.with_buffers: list[tuple[Attributes, ModuleKind]] = []
        #: The attributes of modules that are not torch's layers, and how many of the first of them
        #: are bare; and that of the root.
        self.own: list[tuple[Attributes, int]] = []
        self.bare = _bare_in(root.__dict__)
        #: The recurrent layers, the root included.
        self.recurrent: list[ref[Any]] = []
        #: The global variables that the functions of ``own`` name; None until they are looked up.
        self.globals: list[Any] | None = None
        #: Parameters and buffers of scripted modules, which have no attributes.
        self.scripted: list[torch.Tensor] = []
        #: Dictionaries of modules that make their parameters at the first call.
        self._unfinished: list[dict[str, Any]] = []
        #: Whether a module gathers statistics from other processes, in training.
        self.communicates = False
        #: Dictionaries of parameters and buffers that are empty.
        self._empty: list[dict[str, Any]] = []
        #: Whether the root reaches nothing but parameters; None until that is known.
        self.is_simple: bool | None = None
        self._class = type(root)
        self.kind = _kind_of(root)
        #: The functions of classes that are not torch's.
        self.functions = _functions_of(type(root)) if self.kind is ModuleKind.OWN else []
        #: The children of the root and of each of ``content``, by name.
        self.offspring: list[dict[str, Any]] = []
        modules = _modules_below(root)
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted += [*module.parameters(), *module.buffers()]
            else:
                self._add_dictionaries(module)
                if module is not root:
                    self._add_attributes(module)
        #: The names in each of ``owners``.
        self.names = [(*owner,) for owner in self.owners]
        self._keys = [*chain.from_iterable(self.names)]
        self.children = [*chain.from_iterable(map(_values, self.families))]
        self._child_classes = [*map(type, self.children)]
        #: The classes that may define a ``forward``, and their namespaces.
        self.classes = _classes_of(modules)
        self.spaces = [vars(cls) for cls in self.classes]

    def _add_dictionaries(self, module: nn.Module) -> None:
        places = ("_parameters", "_buffers", "_modules")
        parameters, buffers, children = (module.__dict__[place] for place in places)
        if parameters and not _may_change_parameters(module):
            self.parameters.append(parameters)
        self.owners += [owner for owner in (parameters, buffers, children) if owner]
        self._empty += [owner for owner in (parameters, buffers) if not owner]
        (self.families if children else self.childless).append(children)
        self.offspring.append(children.copy())
        if isinstance(module, nn.RNNBase):
            self.recurrent.append(ref(module))
        if isinstance(module, LazyModuleMixin):
            self._unfinished += [parameters, buffers]
        self.communicates |= isinstance(module, nn.SyncBatchNorm)

    def _add_attributes(self, module: nn.Module) -> None:
        content, kind = module.__dict__, _kind_of(module)
        self.content.append(content)
        if content["_buffers"]:
            self.with_buffers.append((content, kind))
        if kind is ModuleKind.OWN:
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
        """Whether every module still has its class."""
        return (
            type(self.root()) is self._class and [*map(type, self.children)] == self._child_classes
        )

    def changed_classes(self) -> list[tuple[nn.Module, type]]:
        """The modules that have another class now, each with its former one."""
        members = [self.root(), *self.children]
        pairs = zip(members, [self._class, *self._child_classes], strict=True)
        return [(m, cls) for m, cls in pairs if m is not None and type(m) is not cls]

    @property
    def is_unfinished(self) -> bool:
        """Whether the first call is still to make a parameter or buffer."""
        tensors = chain.from_iterable([[*owner.values()] for owner in self._unfinished])
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


def index_of(module: nn.Module) -> ModuleIndex:
    """The index of ``module``, made again if it is out of date."""
    index: ModuleIndex | None = module.__dict__.get(_KEY)
    if index is None or not index.is_of(module):
        index = ModuleIndex(module)
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__[_KEY] = index
    return index
