"""A training step, run and recorded: from a model and a batch to a priced graph (P1 to P3)."""
