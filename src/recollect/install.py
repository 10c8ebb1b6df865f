"""Putting recollect in the place of ``torch.utils.checkpoint``, and taking it out again.

A name taken with ``from torch.utils.checkpoint import checkpoint`` lives in the importing module, so
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

from recollect import compat, selective

__all__ = ["install", "installed", "uninstall"]

#: Names that others take from torch's module although they are private.
_PRIVATE = {
    "_infer_device_type": compat._infer_device_type,
    "_checkpoint_without_reentrant_generator": compat._checkpoint_without_reentrant_generator,
    "_CachingTorchDispatchMode": selective.RecordMode,
    "_CachedTorchDispatchMode": selective.ReplayMode,
}

_OURS: dict[str, Any] = {name: getattr(compat, name) for name in compat.__all__} | _PRIVATE
_THEIRS: dict[str, Any] = {name: getattr(torch_checkpoint, name) for name in _OURS}

_lock = threading.RLock()
_active = False
#: (module, attribute) pairs that held our objects before ``install``: they asked for ours.
_held_before: set[tuple[str, str]] = set()


def install() -> None:
    """Make ``torch.utils.checkpoint`` and every module that took a name from it use recollect.

    Can be called before or after those modules are imported, and more than once. Objects made
    earlier keep what they were made with: a ``functools.partial`` of torch's ``checkpoint`` (as
    transformers' ``gradient_checkpointing_enable`` creates) calls torch's, so install first.
    """
    global _active
    with _lock:
        if _active:
            return
        _held_before.clear()
        _held_before.update((m.__name__, attr) for m, attr, _ in _occurrences(_OURS))
        for module, attribute, name in _occurrences(_THEIRS):
            setattr(module, attribute, _OURS[name])
        _active = True


def uninstall() -> None:
    """Undo ``install``, in the modules loaded since as well; without one, do nothing."""
    global _active
    with _lock:
        if not _active:
            return
        for module, attribute, name in _occurrences(_OURS):
            held = (module.__name__, attribute) in _held_before
            if not held and not _imported_from_recollect(module, attribute):
                setattr(module, attribute, _THEIRS[name])
        _active = False


@contextmanager
def installed() -> Iterator[None]:
    """``install`` for the duration of a ``with`` block; inside another one it changes nothing."""
    was_active = _active
    install()
    try:
        yield
    finally:
        if not was_active:
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


def _imported_from_recollect(module: ModuleType, attribute: str) -> bool:
    """Whether the source of ``module`` takes ``attribute`` from recollect by its own will."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(
        (alias.asname or alias.name) == attribute
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").partition(".")[0] == "recollect"
        for alias in node.names
    )
