"""Which errors are for the user to read, and which for whoever mends the code."""

from __future__ import annotations

import re
import traceback

__all__ = ["UsageError", "names_an_argument"]

#: How errors begin that recollect raises for what a user has passed.
_ARGUMENT = re.compile(r"(model|batch|loss|optimizer|budget|offload|path)\b")


class UsageError(Exception):
    """An argument of a command cannot be used as it is. Names it, and shows how it could."""


def names_an_argument(error: ValueError) -> bool:
    """Whether recollect raised ``error`` for what it was given, and not a function it called."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_ours = str(frame.f_globals.get("__name__")).startswith("recollect.")
    return is_ours and _ARGUMENT.match(str(error)) is not None
