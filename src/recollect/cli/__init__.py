"""The command line: ``recollect plan``, ``frontier``, ``explain``, ``demo``, ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from recollect.cli.parser import make_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default the one of this process. Returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    # Only now, as it imports torch: help and misspelt options need none.
    return int(import_module("recollect.cli.commands").run(arguments))
