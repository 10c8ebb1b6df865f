"""What a forward leaves in memory, and why: which results are kept, offloaded, recomputed.

``explain`` does not add up what regions and policies claim. It runs one forward, notes each storage
as an op allocates it, and after forward finds out who holds those that are still there.

    `run`        one forward, after which everything is as it was before; then the rows
    `watcher`    the ops and regions of that forward
    `regions`    the storages that ops allocate, and what regions hold; `replay`: that engine's
"""

from recollect.explaining.run import explain
from recollect.report.explanation import Explanation

__all__ = ["Explanation", "explain"]
