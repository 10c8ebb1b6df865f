"""Where a plan comes from: it stands in its file, for whoever finds that later."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from recollect._version import __version__


@dataclass(frozen=True)
class Origin:
    """The versions that a plan was made with, and when."""

    recollect: str
    torch: str
    date: str  #: in UTC, such as ``2026-11-18T07:10:00+00:00``

    @classmethod
    def now(cls) -> Origin:
        """Here and now."""
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(__version__, str(torch.__version__), date)

    def __str__(self) -> str:
        return f"recollect {self.recollect}, torch {self.torch}, {self.date[:10]}"
