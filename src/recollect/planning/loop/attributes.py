"""Which modules change attributes of their own in a forward.

Such a module may do something else when it is called again: it must not run twice.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class AttributeWatch:
    """Remembers the attributes of all modules of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = _attributes_of(model)

    def changed(self) -> set[str]:
        """The paths of the modules that have other attributes now, or others in their containers.

        A write to a tensor is no change here: an engine that runs a module again undoes it.
        """
        now = _attributes_of(self._model)
        return {
            path
            for path in {**self._before, **now}
            if not _are_same(self._before.get(path), now.get(path))
        }


def _attributes_of(model: nn.Module) -> dict[str, list[Any]]:
    return {
        path: _flattened(vars(module))
        for path, module in model.named_modules(remove_duplicate=False)
    }


def _flattened(attributes: dict[str, Any]) -> list[Any]:
    """Names and values, with the content of containers beside them."""
    found: list[Any] = []
    for name, value in attributes.items():
        found += (name, value)
        if isinstance(value, dict):
            found += (*value.keys(), *value.values())
        elif isinstance(value, (list, set, tuple)):
            found += value
    return found


def _are_same(before: list[Any] | None, now: list[Any] | None) -> bool:
    """Whether these are the same objects."""
    if before is None or now is None or len(before) != len(now):
        return False
    return all(a is b or _is_equal(a, b) for a, b in zip(before, now, strict=True))


def _is_equal(a: Any, b: Any) -> bool:
    """Whether these are equal constants."""
    return type(a) is type(b) and isinstance(a, (str, int, float)) and a == b
