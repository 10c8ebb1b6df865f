"""Patterns of names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache

__all__ = ["first_unmatched", "fits", "fits_any", "listed"]

#: How many names an error shows.
_SHOWN = 40


def fits(name: str, pattern: str) -> bool:
    """Whether ``name``, or the end of it after a dot, is what ``pattern`` describes.

    The path of a region's module in the whole model need not be known for that: ``*.attn.wo`` and
    ``attn.wo`` find the projection in a block as well as in a model of blocks.
    """
    if fnmatchcase(f".{name}", pattern):
        return True
    while True:
        if fnmatchcase(name, pattern):
            return True
        _, dot, name = name.partition(".")
        if not dot:
            return False


@lru_cache(maxsize=1024)
def fits_any(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether one of ``patterns`` describes ``name``."""
    return any(fits(name, pattern) for pattern in patterns)


@lru_cache(maxsize=1024)
def first_unmatched(patterns: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    """The first of ``patterns`` that describes none of ``names``."""
    return next((p for p in patterns if not any(fits(name, p) for name in names)), None)


def listed(names: Iterable[str], sought: str) -> str:
    """``names`` for an error about ``sought``, the most similar first."""
    known = sorted({name for name in names if name})
    if not known:
        return "none"
    similar = get_close_matches(sought.strip("*."), known, n=5, cutoff=0.5)
    ordered = [*similar, *(name for name in known if name not in similar)]
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more
