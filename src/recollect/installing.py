"""``install`` and ``uninstall``: recollect in the place of ``torch.utils.checkpoint``.

A name taken with ``from torch.utils.checkpoint import checkpoint`` lives in the importing module:
every loaded module is searched for torch's objects, under whatever name it has them. Modules loaded
later find ours in torch's module.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from recollect import compat
from recollect.rerun import selective

__all__ = ["install", "installed", "uninstall"]

#: The names that others import from torch's module: the public ones, and these.
_NAMES = [*compat.__all__, "_infer_device_type", "_checkpoint_without_reentrant_generator"]

_OURS: dict[str, Any] = {name: getattr(compat, name) for name in _NAMES} | {
    "_CachingTorchDispatchMode": selective.RecordMode,
    "_CachedTorchDispatchMode": selective.RecomputeMode,
}
_THEIRS: dict[str, Any] = {name: getattr(torch_checkpoint, name) for name in _OURS}


class _Installed:
    """Whether recollect is installed, for the whole process."""

    active = False
    #: How many ``installed()`` blocks are open, and whether the first one installed.
    scopes = 0
    scoped = False
    #: Module and attribute of those that held our objects before: they stay.
    held_before: frozenset[tuple[str, str]] = frozenset()


_lock = threading.RLock()


def install() -> None:
    """Make ``torch.utils.checkpoint`` and every module that took a name from it use recollect.

    Can be called before or after those modules are imported, and more than once. Objects made
    earlier keep what they were made with: a ``functools.partial`` of torch's ``checkpoint`` (as
    transformers' ``gradient_checkpointing_enable`` creates) calls torch's, so install first.
    """
    with _lock:
        if _Installed.active:
            return
        _Installed.held_before = frozenset((m.__name__, attr) for m, attr, _ in _occurrences(_OURS))
        for module, attribute, name in _occurrences(_THEIRS):
            setattr(module, attribute, _OURS[name])
        _Installed.active = True


def uninstall() -> None:
    """Undo ``install``, in the modules loaded since as well; without one, do nothing."""
    with _lock:
        if not _Installed.active:
            return
        occurrences = _occurrences(_OURS)
        wanted = {m: _taken_from_recollect(m) for m in {module for module, _, _ in occurrences}}
        for module, attribute, name in occurrences:
            held = (module.__name__, attribute) in _Installed.held_before
            if not held and attribute not in wanted[module]:
                setattr(module, attribute, _THEIRS[name])
        _Installed.active = False


@contextmanager
def installed() -> Iterator[None]:
    """``install`` for the duration of a ``with`` block; inside another one it changes nothing."""
    with _lock:
        _Installed.scoped = _Installed.scoped or not _Installed.active
        _Installed.scopes += 1
        install()
    try:
        yield
    finally:
        with _lock:
            _Installed.scopes -= 1
            if _Installed.scopes == 0 and _Installed.scoped:
                _Installed.scoped = False
                uninstall()


def _occurrences(objects: dict[str, Any]) -> list[tuple[ModuleType, str, str]]:
    """Every place in a loaded module, ours excepted, that holds one of ``objects``."""
    names = {id(value): name for name, value in objects.items()}
    return [
        (module, attribute, names[id(value)])
        for module_name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and module_name.partition(".")[0] != "recollect"
        for attribute, value in list(vars(module).items())
        if id(value) in names
    ]


def _taken_from_recollect(module: ModuleType) -> set[str]:
    """The names that the source of ``module`` imports from recollect itself."""
    if module is torch_checkpoint:
        return set()
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "recollect"
        for alias in node.names
    }
