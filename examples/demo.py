"""Train a small language model within three budgets of memory, and compare that with plain.

The same as ``recollect demo``, with a page for the browser. The exit code is 1 if a budget is
exceeded or a loss or gradient is not that of plain training, bit for bit.

    python examples/demo.py [--steps N] [--html demo.html]
"""

import sys

from recollect.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", "--html", "demo.html", *sys.argv[1:]]))
