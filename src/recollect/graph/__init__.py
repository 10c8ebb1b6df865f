"""A training step as a graph of ops, and what a schedule does to it. Pure: no torch."""
