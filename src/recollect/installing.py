"""``install`` and ``uninstall``: replace ``torch.utils.checkpoint`` by recollect.

``from torch.utils.checkpoint import checkpoint`` stores the function in the importing module, so
every loaded module is searched for torch's objects. Modules loaded later find ours in torch's
module.
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
from recollect._torch.dynamo import forget_checkpoint, know_checkpoint
from recollect.options import Engine, installed_options
from recollect.rerun import selective

#: The names that others import from torch's module: the public ones, and these.
_NAMES = [
    *compat.__all__,
    "_infer_device_type",
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",  # torch >= 2.15
]

_OURS: dict[str, Any] = {
    name: getattr(compat, name) for name in _NAMES if hasattr(torch_checkpoint, name)
} | {
    "_CachingTorchDispatchMode": selective.RecordMode,
    "_CachedTorchDispatchMode": selective.RecomputeMode,
}
_THEIRS: dict[str, Any] = {name: getattr(torch_checkpoint, name) for name in _OURS}


class _Installed:
    """State for `uninstall`, for the whole process."""

    #: How many ``installed()`` blocks are open, if one of them installed.
    scopes = 0
    #: Modules and attributes that held our objects before: they stay.
    held_before: frozenset[tuple[str, str]] = frozenset()


_lock = threading.RLock()


def install(
    *,
    engine: Engine | None = None,
    policy: Any = None,
    offload_inputs: bool = False,
    store: Any = None,
) -> None:
    """Make ``torch.utils.checkpoint`` and every module that took a name from it use recollect.

    The options are those of ``recollect.checkpoint``. A call's own options override them, and a
    later ``install`` with options replaces them.

    Call it before or after those modules are imported, any number of times. A ``functools.partial``
    of torch's ``checkpoint`` made earlier (as transformers' ``gradient_checkpointing_enable`` does)
    still calls torch's, so install first.
    """
    given = {"engine": engine, "policy": policy, "offload_inputs": offload_inputs, "store": store}
    keywords = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    with _lock:
        was_active = installed_options.is_active
        if keywords or not was_active:
            installed_options.set(keywords)
        know_checkpoint(_THEIRS["checkpoint"])
        if was_active:
            return
        _Installed.held_before = frozenset((m.__name__, attr) for m, attr, _ in _occurrences(_OURS))
        for module, attribute, name in _occurrences(_THEIRS):
            setattr(module, attribute, _OURS[name])


def uninstall() -> None:
    """Undo ``install``, also in modules loaded since. Without an ``install``, do nothing."""
    with _lock:
        if not installed_options.is_active:
            return
        occurrences = _occurrences(_OURS)
        wanted = {m: _taken_from_recollect(m) for m in {module for module, _, _ in occurrences}}
        for module, attribute, name in occurrences:
            held = (module.__name__, attribute) in _Installed.held_before
            if not held and attribute not in wanted[module]:
                setattr(module, attribute, _THEIRS[name])
        forget_checkpoint()
        installed_options.clear()


@contextmanager
def installed(
    *,
    engine: Engine | None = None,
    policy: Any = None,
    offload_inputs: bool = False,
    store: Any = None,
) -> Iterator[None]:
    """``install`` for the duration of a ``with`` block.

    Inside another one, or after ``install``, only its options have an effect.
    """
    with _lock:
        before, was_active = installed_options.keywords, installed_options.is_active
        install(engine=engine, policy=policy, offload_inputs=offload_inputs, store=store)
        is_counted = not was_active or _Installed.scopes > 0
        _Installed.scopes += is_counted
    try:
        yield
    finally:
        with _lock:
            _Installed.scopes -= is_counted
            if is_counted and _Installed.scopes == 0:
                uninstall()
            elif installed_options.is_active:
                installed_options.set(before)


def _occurrences(objects: dict[str, Any]) -> list[tuple[ModuleType, str, str]]:
    """Every place in a loaded module, except ours, that holds one of ``objects``."""
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
