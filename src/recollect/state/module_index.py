"""Finds at once the parameters, buffers, children and attributes of all modules below a module.

With an index, finding out that nothing has changed takes tens of nanoseconds for each of them;
walking through the modules would take a microsecond for each part, at every call. An index is valid
while every module has the same children, of the same classes, and parameters and buffers of the
same names. (torch would report registrations; but the compiler guards on registration hooks, in all
code that registers a module.) It is stored in the module itself: in a global table it would keep
alive a module that refers to itself (by a bound method, say).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from itertools import chain, islice
from operator import is_
from types import CellType, FunctionType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from recollect._torch.modules import BATCH_NORMS, is_torch_nn
from recollect.state.module_settings import FIRST, INDEX_KEY, Place, Watched
from recollect.state.restorers import CELL


class Writes(Enum):
    """Whether a buffer may be written to without its version being raised."""

    #: No: all writes raise it.
    SEEN = auto()
    #: Perhaps: a user's code may write through ``.data``.
    MAYBE = auto()
    #: The same of a module in training, which is remembered separately.
    MAYBE_IN_TRAINING = auto()
    #: Yes: an op updates statistics and does not raise it.
    HIDDEN = auto()


_WITH_STATISTICS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

#: For a module in eval mode, and in training: of torch's layers, of those with running statistics,
#: and of all other modules, which may do anything.
_PLAIN = Writes.SEEN, Writes.SEEN
_STATISTICS = Writes.SEEN, Writes.HIDDEN
_UNKNOWN = Writes.MAYBE, Writes.MAYBE_IN_TRAINING


def _writes_of(module: nn.Module) -> tuple[Writes, Writes]:
    if not is_torch_nn(module) or type(module) is nn.Module:
        return _UNKNOWN
    return _STATISTICS if isinstance(module, _WITH_STATISTICS) else _PLAIN


Attributes = dict[str, Any]


def _count_standard(attributes: Attributes) -> int:
    """How many of the first attributes of a module are those that every module has."""
    return len(FIRST) if [*islice(attributes, len(FIRST))] == FIRST else 0


class ModuleIndex:
    """A module and all below it.

    Lists of attributes lack those of the root, which refer to the index: there is no cycle.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = ref(root)
        self.root_class = type(root)
        self.is_scripted = isinstance(root, torch.jit.ScriptModule)
        #: How the buffers of the root may be written to, and whether it is no layer of torch's.
        self.writes = _writes_of(root)
        self.is_user_module = self.writes is _UNKNOWN
        #: How many of the first attributes of the root every module has.
        self.standard_attributes = _count_standard(root.__dict__)
        #: Which attributes of the root are watched, if it may have settings.
        self.watched = Watched(root.__dict__) if _may_have_settings(root) else None
        self._reset_searches()
        self._read_modules(_modules_below(root))
        #: Variables of enclosing functions, where the classes are defined.
        self.cells = _cells_of(self.functions)
        #: Dictionaries of parameters, buffers and children, if there are any: those of
        #: ``parameters`` first, those of children last. So one pass over their values serves all.
        self.owners = [*self.parameters, *self._other_owners, *self.children_dicts]
        #: Returns their values now, one after the other.
        self.read_values = _reader_of(self.owners)
        #: The names in each of ``owners``; and the same, one after the other.
        self.names = [(*owner,) for owner in self.owners]
        self.keys = [*chain.from_iterable(self.names)]
        #: How many of the values in ``owners`` are those of ``parameters``.
        self.guarded = sum(map(len, self.parameters))
        self.children = [*chain.from_iterable(map(dict.values, self.children_dicts))]
        self.child_classes = [*map(type, self.children)]

    def _reset_searches(self) -> None:
        """What is known of objects that attributes and globals hold: nothing yet."""
        #: The global variables that ``functions`` name; None until they are looked up.
        self.globals: list[Any] | None = None
        #: What was searched in vain: from attributes, from the globals.
        self.attached_in_vain: Any = None
        self.globals_in_vain: Any = None
        #: Whether forward changes contents of what attributes hold, how often to look whether it
        #: does, and the ``id`` of what was looked at last.
        self.contents_change = False
        self.looks_left = 4
        self.looked_at: list[int] = []

    def _read_modules(self, modules: list[nn.Module]) -> None:
        """Sort the contents of the modules, the root first."""
        #: The attributes of each module; and those of user modules, with the number of the first of
        #: them that every module has; of modules that may have settings; of those with buffers.
        self.content: list[Attributes] = []
        self.user_modules: list[tuple[Attributes, int]] = []
        self.settings: list[Place] = []
        self.with_buffers: list[tuple[Attributes, tuple[Writes, Writes]]] = []
        #: Dictionaries of parameters, if there are any, that a forward leaves alone; of children;
        #: the others; those that are empty; those of modules that make parameters when called.
        self.parameters: list[dict[str, Any]] = []
        self.children_dicts: list[dict[str, Any]] = []
        self._other_owners: list[dict[str, Any]] = []
        self.empty: list[dict[str, Any]] = []
        self._unfinished: list[dict[str, Any]] = []
        #: The children of each module that is not scripted, by name.
        self.offspring: list[dict[str, Any]] = []
        #: Dictionaries of parameters that a forward may change in place.
        self.rewritten: list[dict[str, Any]] = []
        #: The recurrent layers.
        self.recurrent: list[ref[Any]] = []
        #: Parameters and buffers of scripted modules, which have no attributes.
        self.scripted: list[torch.Tensor] = []
        #: Whether a module gathers statistics from other processes, in training.
        self.communicates = False
        #: The functions of classes that are not torch's; and the classes that may define a
        #: ``forward``.
        self.functions = _functions_of(self.root_class) if self.is_user_module else []
        bases = (base for cls in {*map(type, modules)} for base in cls.__mro__)
        self.classes = [*({*bases} - {nn.Module, object})]
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule):
                self.scripted += [*module.parameters(), *module.buffers()]
            else:
                self._add_dictionaries(module)
                if module is not modules[0]:
                    self._add_attributes(module)

    def _add_dictionaries(self, module: nn.Module) -> None:
        places = ("_parameters", "_buffers", "_modules")
        parameters, buffers, children = (module.__dict__[place] for place in places)
        is_rewritten = _may_change_parameters(module)
        self.rewritten += [parameters] if is_rewritten else []
        is_guarded = parameters and not is_rewritten
        if is_guarded:
            self.parameters.append(parameters)
        self._other_owners += [
            owner for owner in (None if is_guarded else parameters, buffers) if owner
        ]
        self.empty += [owner for owner in (parameters, buffers, children) if not owner]
        self.children_dicts += [children] if children else []
        self.offspring.append(children.copy())
        if isinstance(module, nn.RNNBase):
            self.recurrent.append(ref(module))
        if isinstance(module, LazyModuleMixin):
            self._unfinished += [parameters, buffers]
        self.communicates |= isinstance(module, nn.SyncBatchNorm)

    def _add_attributes(self, module: nn.Module) -> None:
        content, writes = module.__dict__, _writes_of(module)
        self.content.append(content)
        if content["_buffers"]:
            self.with_buffers.append((content, writes))
        if _may_have_settings(module):
            self.settings.append((content, Watched(content)))
        if writes is _UNKNOWN:
            self.user_modules.append((content, _count_standard(content)))
            self.functions += _functions_of(type(module))

    def read(self, module: nn.Module) -> list[Any] | None:
        """The values of ``owners`` now; None if this is not the index of ``module`` any more."""
        if (
            self.root() is not module
            or type(module) is not self.root_class
            or any(self.empty)
            or [*chain.from_iterable(self.owners)] != self.keys
        ):
            return None
        values = self.read_values()
        children = values[len(self.keys) - len(self.children) :]
        is_same = all(map(is_, children, self.children))
        return values if is_same and [*map(type, children)] == self.child_classes else None

    def changed_classes(self) -> list[tuple[nn.Module, type]]:
        """The modules that have another class now, each with its former one."""
        members = [self.root(), *self.children]
        pairs = zip(members, [self.root_class, *self.child_classes], strict=True)
        return [(m, cls) for m, cls in pairs if m is not None and type(m) is not cls]

    @property
    def is_unfinished(self) -> bool:
        """Whether a lazy module is still to make a parameter or buffer."""
        if not self._unfinished:
            return False
        tensors = chain.from_iterable([[*owner.values()] for owner in self._unfinished])
        return any(is_lazy(tensor) for tensor in tensors)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the module has its own


def _functions_of(cls: type) -> list[FunctionType]:
    """The functions of a class of modules that torch does not define, and those they close over.

    What a decorator returns calls the function that it was given.
    """
    classes = [base for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
    pending = [member for base in classes for member in [*vars(base).values()]]
    found: dict[int, FunctionType] = {}
    while pending:
        member = pending.pop()
        if type(member) is FunctionType and id(member) not in found:
            found[id(member)] = member
            pending += chain.from_iterable(map(CELL.take, member.__closure__ or ()))
    return [*found.values()]


def _cells_of(functions: list[FunctionType]) -> list[CellType]:
    """The variables that ``functions`` close over, but for functions, and ``__class__``."""
    cells = {id(cell): cell for function in functions for cell in function.__closure__ or ()}
    return [
        cell
        for cell in cells.values()
        if not any(isinstance(value, (FunctionType, type)) for value in CELL.take(cell))
    ]


def _may_change_parameters(module: nn.Module) -> bool:
    """Whether forward may change parameters in place: ``max_norm`` scales embedding rows.

    A rerun would scale them once more: a row that was scaled may still be too long, by rounding.
    """
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None


def _may_have_settings(module: nn.Module) -> bool:
    """Whether plain attributes may say what ``module`` computes. Sharding keeps its own there."""
    cls = type(module)
    if cls in _WITHOUT_SETTINGS:  # unless somebody has set others, as `spectral_norm` does
        return any(name[0] != "_" and name not in _USUAL for name in [*module.__dict__])
    return not cls.__module__.startswith("torch.distributed")


_WITHOUT_SETTINGS = frozenset({nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity})
_USUAL = frozenset({"training", "in_features", "out_features", "forward"})


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


def _reader_of(owners: list[dict[str, Any]]) -> Callable[[], list[Any]]:
    """A function that returns the values of all ``owners``."""
    values = [*chain.from_iterable(map(dict.values, owners))]
    # A third of the time; but what a subclass of dict refers to is more than its values.
    read = partial(gc.get_referents, *owners)
    is_usual = {*map(type, owners)} <= {dict}
    if is_usual and len(found := read()) == len(values) and all(map(is_, found, values)):
        return read
    return lambda: [*chain.from_iterable(map(dict.values, owners))]


def read_index(module: nn.Module) -> tuple[ModuleIndex, list[Any]]:
    """The index of ``module``, made again if it is out of date; and the values of its owners."""
    index: ModuleIndex | None = module.__dict__.get(INDEX_KEY)
    values = None if index is None else index.read(module)
    if index is None or values is None:
        index = ModuleIndex(module)
        values = index.read_values()
        if not isinstance(module, torch.jit.ScriptModule):
            module.__dict__[INDEX_KEY] = index
    return index, values


def index_of(module: nn.Module) -> ModuleIndex:
    """The index of ``module``, made again if it is out of date."""
    return read_index(module)[0]
