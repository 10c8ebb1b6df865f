"""The command line: ``recollect plan``, ``frontier``, ``explain``, ``demo``, ``doctor``."""

from recollect.cli.commands import main

__all__ = ["main"]
