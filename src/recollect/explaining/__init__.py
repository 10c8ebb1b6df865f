"""``explain``: what a forward leaves in memory, and why.

It runs one forward, tracks each storage that an op allocates, and then finds out who holds those
that are still alive.

    `run`        one forward, watched, after which everything is as it was before; then the rows
    `regions`    the storages that ops allocate, and what the regions of each engine hold
"""

from recollect.explaining.run import explain
from recollect.report.explanation import Explanation

__all__ = ["Explanation", "explain"]
