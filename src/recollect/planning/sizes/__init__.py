"""Steps of other sizes, and the largest one that fits: ``recollect.largest_batch``."""
