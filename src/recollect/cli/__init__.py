"""The command line: ``recollect plan``, ``frontier``, ``explain``, ``demo``, ``doctor``.

Whatever a user got wrong is said in a sentence. A traceback is for faults in code: that of the
user's function, or ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from recollect.cli.parser import make_parser
from recollect.cli.screen import UsageError, complain, names_an_argument
from recollect.errors import InfeasibleBudget

__all__ = ["main"]

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default the one of this process. Returns the exit code."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return _USAGE
    try:
        return int(arguments.run(arguments))
    except UsageError as error:
        complain(arguments.command, str(error))
        return _USAGE
    except InfeasibleBudget as error:
        complain(arguments.command, f"{error}\nThe least that works:  --budget {error.least}")
    except ValueError as error:
        if not names_an_argument(error):
            raise
        complain(arguments.command, str(error))
    except KeyboardInterrupt:
        complain(arguments.command, "stopped")
        return _INTERRUPTED
    return _FAILED
