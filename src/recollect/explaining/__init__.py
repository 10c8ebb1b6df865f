"""What a forward leaves in memory, and why: which results are kept, offloaded, recomputed.

How much memory a model needs until backward is decided in many places: by what each op saves, by
which regions are checkpointed, by their policies and stores. ``explain`` does not add up what these
say they do. It runs one forward, notes each piece of memory as an op makes it, looks which pieces
are still there when forward is over, and asks who holds them. So what it reports is what is.

    `run`           one forward, watched
    `unchanged`     everything is put back afterwards
    `watcher`       the pieces of memory, as ops make them         `memory`
    `regions`       what regions save, keep, put into stores       `region`
    `replay`        the same, of the replay engine
    `account`       the rows, once forward is over                 `graph`
    `explanation`   rows, totals, remarks                          `rows`, `text`
"""

from recollect.explaining.explanation import Explanation
from recollect.explaining.rows import FATES, Call, Row, Totals
from recollect.explaining.run import explain

__all__ = ["FATES", "Call", "Explanation", "Row", "Totals", "explain"]
