"""Warnings about a plan, one for each cause."""

from __future__ import annotations

from recollect.checks.place import warn_user
from recollect.errors import PlanWarning


class WarnOnce:
    """Warns once for each cause."""

    def __init__(self) -> None:
        self._causes: set[str] = set()

    def warn(self, cause: str, message: str) -> None:
        """Warn at the user's line, unless there was a warning for the same cause."""
        if cause not in self._causes:
            self._causes.add(cause)
            warn_user(message, PlanWarning)
