"""Train a small language model within three budgets of memory, and compare that with plain.

The same as ``recollect demo``, with a page, which is opened where there is a screen. The exit code
is 1 if a budget is exceeded, or if a loss or gradient differs from plain training in any bit.

    python examples/demo.py [--steps N] [--html demo.html]
"""

import os
import sys
import webbrowser
from pathlib import Path

from recollect.cli import main


def has_screen() -> bool:
    """Whether somebody is there to look at a page."""
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.stdout.isatty() and bool(screen or sys.platform in ("darwin", "win32"))


if __name__ == "__main__":
    code = main(["demo", "--html", "demo.html", *sys.argv[1:]])
    if code == 0 and "--html" not in sys.argv and has_screen():
        webbrowser.open(Path("demo.html").resolve().as_uri())
    sys.exit(code)
