"""Names of regions, modules and tensors, as the author of the model wrote them."""

from __future__ import annotations

import functools
import gc
import inspect
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recollect._torch.tensors import memory_key


def region_name(function: Any) -> str:
    """The name of the region of ``function``: the path of its module in the model, if it has one.

    Never raises. Searches memory: for errors only.
    """
    try:
        return f"region {_name(function)}"
    except Exception:  # noqa: BLE001 - the name is a courtesy; the error must be shown
        return "a checkpointed region"


def _name(function: Any) -> str:
    module = module_of(function)
    if module is not None:
        return _titled(module)
    variables = _free_variables(function)
    match list(variables.values()):
        case [[nn.Module() as first, *_, nn.Module() as last]]:
            return f"{_titled(first)} to {_titled(last)}"  # a segment of a chain
        case [[nn.Module() as only]]:
            return _titled(only)
    owner = variables.get("self")
    inside = f", in {_titled(owner)}" if isinstance(owner, nn.Module) else ""
    return f"{_qualified(function)}{inside}"


def _titled(module: nn.Module) -> str:
    path = path_of(module)
    return f"`{path}` ({type(module).__name__})" if path else type(module).__name__


def _qualified(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    if code is None:
        return f"`{name}`"
    return f"`{name}` ({Path(code.co_filename).name}:{code.co_firstlineno})"


# --- from a function to its module ----------------------------------------------------------------


def module_of(function: Any, depth: int = 8) -> nn.Module | None:
    """The one module that ``function`` calls, behind ``depth`` wrappers at most."""
    if isinstance(function, nn.Module):
        return function
    if depth == 0 or not callable(function) or isinstance(function, type):
        return None
    inner = _wrapped_by(function)
    found = {id(m): m for m in (module_of(each, depth - 1) for each in inner) if m is not None}
    return found.popitem()[1] if len(found) == 1 else None


def _wrapped_by(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        if module_of(function.func) is not None:
            return [function.func]
        return [*function.args, *function.keywords.values()]
    for name in ("__self__", "__wrapped__"):
        if hasattr(function, name):
            return [getattr(function, name)]
    # A closure over ``self`` is a part of that module, not the module.
    return [value for name, value in _free_variables(function).items() if name != "self"]


def _free_variables(function: Any) -> dict[str, Any]:
    try:
        return dict(inspect.getclosurevars(function).nonlocals)
    except (TypeError, ValueError):  # not a Python function; a variable that has no value yet
        return {}


# --- from a module to its name --------------------------------------------------------------------

#: Names that wrappers give to the module they wrap.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def path_of(module: nn.Module) -> str:
    """The name of ``module`` in the model that holds it; empty if none does. Searches memory."""
    return _joined(reversed([name for name, _ in _way_up(module)]))


def model_of(module: nn.Module) -> nn.Module:
    """The outermost module that holds ``module``: itself, if none does. Searches memory."""
    return [module, *(parent for _, parent in _way_up(module))][-1]


def _way_up(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The name of ``module`` in its parent, the parent, and so on."""
    parents: dict[int, tuple[str, nn.Module]] = {}
    for each in _modules_in_memory():
        parents.update((id(child), (name, each)) for name, child in _children(each))
    way: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        name, module = parents[id(module)]
        way.append((name, module))
    return way


def names_in_memory() -> set[str]:
    """The names of all modules, in every module that holds them. Searches memory."""
    modules = _modules_in_memory()
    return {plain_name(name) for module in modules for name, _ in module.named_modules()}


def _modules_in_memory() -> list[nn.Module]:
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


def plain_name(path: str) -> str:
    """A path without the names that wrappers add."""
    return _joined(path.split("."))


def tensor_name(tensor: torch.Tensor) -> str:
    """The name of a parameter or buffer in the model that holds it. Searches memory."""
    return _name_where(lambda value: value is tensor) or "a tensor"


def owner_name(tensor: torch.Tensor) -> str | None:
    """The name of the parameter or buffer that a tensor is or is a view of. Searches memory."""
    key = memory_key(tensor)
    shares = None if key is None else _name_where(lambda value: memory_key(value) == key)
    return _name_where(lambda value: value is tensor) or shares


def _name_where(is_it: Callable[[torch.Tensor], bool]) -> str | None:
    try:
        for module in _modules_in_memory():
            for name, value in _tensors(module):
                if value is not None and is_it(value):
                    return f"`{_joined((*filter(None, [path_of(module)]), name))}`"
    except Exception:  # noqa: BLE001 - the name is a courtesy
        pass
    return None


def _tensors(module: nn.Module) -> list[tuple[str, Any]]:
    content = module.__dict__
    owners = (content.get("_parameters"), content.get("_buffers"))
    return [pair for owner in owners if type(owner) is dict for pair in owner.items()]


def name_in(parent: nn.Module, module: nn.Module) -> str | None:
    """The name of ``module`` in ``parent``, the shortest if there are several."""
    queue: deque[tuple[tuple[str, ...], nn.Module]] = deque([((), parent)])
    seen = {id(parent)}
    while queue:
        parts, each = queue.popleft()
        for name, child in _children(each):
            if child is module:
                return _joined((*parts, name))
            if id(child) not in seen:
                seen.add(id(child))
                queue.append(((*parts, name), child))
    return None


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    try:
        return list(module.named_children())
    except Exception:  # noqa: BLE001 - somebody else's module, perhaps half made
        return []


def _joined(parts: Any) -> str:
    """A path as the model's author would write it, without the names that wrappers add."""
    return ".".join(part for part in parts if part not in _WRAPPERS)
